"""Log-sum-exp, mean shift and maximum mean discrepancy."""

from __future__ import annotations

import warnings
from typing import Any

from linattn import _arrays, _checks
from linattn.functional import softmax_attention
from linattn.kernels._gaussian import Gaussian, check_points, log_weights, persisted
from linattn.typing import Array


@_arrays.on_array_device
def log_sum_exp(
    query: Array,
    key: Array,
    *,
    scale: float | None = None,
    bandwidth: Any = None,
    weights: Any = None,
    key_mask: Array | None = None,
) -> Array:
    r"""Return the logarithm of a sum of kernels over all keys, for each query.

    .. math::
        z_i = \log \sum_j w_j \exp(-|x_i - y_j|^2 / (2 h^2)) \quad\text{or}\quad
        z_i = \log \sum_j w_j \exp(s \, x_i \cdot y_j)

    with `bandwidth` h or with `scale` s. Letters: ``N`` queries x, ``n`` keys y, ``d`` coordinates,
    ``w`` weights.

    Parameters
    ----------
    query : array, (..., N, d)
        Of any array-API library. Integers and booleans count as numbers.
    key : array, (..., n, d)
        Same library, dtype and device.
    scale : float, optional
        s. Give this or `bandwidth`.
    bandwidth : float or array, () or (d,), optional
        h; one number, or one for each coordinate.
    weights : array_like, (n,) or (..., n), optional
        w; not negative. Default 1.
    key_mask : boolean array, (n,) or (..., n), optional
        False leaves a key out. Default: all count.

    Returns
    -------
    array, (..., N)
        In the library, dtype and device of the points; -inf where no key counts.

    Raises
    ------
    TypeError, ValueError
        Not numbers of one library, floating dtype and device; both or neither of `scale` and
        `bandwidth`, or one that is not positive (bandwidth) or finite; weights that are negative or
        of another length.

    Notes
    -----
    Time O(N n d), memory O((N + n) d): the N x n matrix is never made. float32 is computed in
    float64 where the library has it, and rounded at the end. Leading bits of squared distances are
    multiplied exactly: errors stay below 1e-12, even in 40 dimensions at a bandwidth of 1/100.
    Gradients of torch and JAX pass through, also to an array `bandwidth`; they need memory O(N n).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.kernels import log_sum_exp
    >>> x, y = np.random.default_rng(0).standard_normal((2, 1000, 3))
    >>> log_sum_exp(x, y, bandwidth=0.5).shape
    (1000,)
    """
    xp, (query, key), dtype = check_points(query=query, key=key)
    if (scale is None) == (bandwidth is None):
        raise ValueError(f"give scale or bandwidth, one of them, got {scale} and {bandwidth}")
    log_weight = log_weights("weights", weights, "key", key, key_mask)
    if scale is None:
        kernel = Gaussian.of("key", key, bandwidth, log_weight)
        _, logs = kernel.read(kernel.of_query(query))
    else:
        key = xp.broadcast_to(key, (*log_weight.shape, key.shape[-1]))
        _, logs = softmax_attention(
            query, key, key[..., :1], scale=scale, key_bias=log_weight, return_log_normalizer=True
        )
    return xp.astype(logs, dtype, copy=False)


@_arrays.on_array_device
def mean_shift(
    points: Array,
    data: Array,
    *,
    bandwidth: Any,
    weights: Any = None,
    key_mask: Array | None = None,
    max_iterations: int = 300,
    tolerance: float | None = 1e-3,
) -> Array:
    r"""Return points moved uphill to the modes of a kernel density.

    .. math::
        x \leftarrow \frac{\sum_j w_j K_h(x - y_j) \, y_j}{\sum_j w_j K_h(x - y_j)}, \qquad
        K_h(t) = \exp(-|t|^2 / (2 h^2))

    Points that end at one mode are one cluster. Letters: ``N`` points x, ``n`` rows of data y,
    ``d`` coordinates.

    Parameters
    ----------
    points : array, (..., N, d)
        Where to start; often `data` itself.
    data : array, (..., n, d)
        Same library, dtype and device.
    bandwidth : float or array, () or (d,)
        h.
    weights, key_mask
        Of the data, as for :func:`log_sum_exp`.
    max_iterations : int, optional
        Steps at most. Default 300.
    tolerance : float or None, optional
        Stop when no coordinate moves by more than this many bandwidths. None takes all steps
        without inspecting values, as ``jax.jit`` needs. Default 1e-3.

    Returns
    -------
    array, (..., N, d)
        Points after the last step, in the library, dtype and device of the points.

    Raises
    ------
    TypeError, ValueError
        As :func:`log_sum_exp`; counts or tolerances out of range; no row of data counts.

    Warns
    -----
    RuntimeWarning
        Where points still move by more than the tolerance after `max_iterations` steps.

    Notes
    -----
    Time O(N n d) a step, memory O((N + n) d). Steps shrink slowly on a flat top.

    References
    ----------
    Cheng, "Mean Shift, Mode Seeking, and Clustering" (1995).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.kernels import mean_shift
    >>> rng = np.random.default_rng(0)
    >>> data = np.concatenate([rng.normal(0, 1, (50, 2)), rng.normal(9, 1, (50, 2))])
    >>> modes = mean_shift(data, data, bandwidth=2.0)
    >>> len(np.unique(np.round(modes), axis=0))
    2
    """
    xp, (points, data), dtype = check_points(points=points, data=data)
    steps = _checks.check_positive_int("max_iterations", max_iterations)
    least = None if tolerance is None else _checks.check_finite_number("tolerance", tolerance)
    log_weight = log_weights("weights", weights, "data", data, key_mask, rows=1)
    kernel = Gaussian.of("data", data, bandwidth, log_weight)
    at = kernel.of_query(points)
    for _ in range(steps):
        before, at = at, persisted(kernel.read(at, kernel.coordinates)[0])
        if least is not None and not bool(xp.any(xp.abs(at - before) > least)):
            break
    else:
        if least is not None:
            stopped = f"mean_shift stopped after {steps} steps with points that move by more than"
            message = f"{stopped} {least:.1e} bandwidths; raise max_iterations or tolerance"
            warnings.warn(message, RuntimeWarning, stacklevel=_arrays.caller_level())
    return xp.astype(at * kernel.bandwidth + kernel.centre, dtype, copy=False)


@_arrays.on_array_device
def mmd(
    x: Array,
    y: Array,
    *,
    bandwidth: Any,
    x_weights: Any = None,
    y_weights: Any = None,
    unbiased: bool = False,
) -> Array:
    r"""Return the squared maximum mean discrepancy of two samples.

    .. math::
        \mathrm{MMD}^2 = \sum_{ij} a_i a_j K_h(x_i - x_j) + \sum_{ij} b_i b_j K_h(y_i - y_j)
        - 2 \sum_{ij} a_i b_j K_h(x_i - y_j)

    with weights a and b that sum to 1. The unbiased form leaves out the pairs i = j of the first
    two sums and divides these by ``1 - sum a_i^2`` and ``1 - sum b_i^2``.

    Parameters
    ----------
    x : array, (..., N, d)
        First sample.
    y : array, (..., n, d)
        Second sample; same library, dtype and device.
    bandwidth : float or array, () or (d,)
        h.
    x_weights, y_weights : array_like, (N,) and (n,), optional
        a and b, scaled to sum 1. Default: equal.
    unbiased : bool, optional
        Leave out the pairs i = j. Then the result may be negative, and its mean over samples of
        one distribution is 0. Default False.

    Returns
    -------
    array, (...)
        In the library, dtype and device of the samples.

    Raises
    ------
    TypeError, ValueError
        As :func:`log_sum_exp`; a sample has no row of positive weight, or only one if `unbiased`.

    Notes
    -----
    Time O((N + n)^2 d), memory O((N + n) d). The biased form is too large by O(1 / N + 1 / n). The
    sums are near 1 and are subtracted: the error is some 1e-15 of 1, not of the result.

    References
    ----------
    Gretton et al., "A Kernel Two-Sample Test" (2012), eq. 3 and 5.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.kernels import mmd
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.standard_normal((2, 500, 3))
    >>> bool(mmd(x, y, bandwidth=1.0) < mmd(x, y + 1, bandwidth=1.0))
    True
    """
    xp, (x, y), dtype = check_points(x=x, y=y)
    unbiased = _checks.check_flag("unbiased", unbiased)
    sides = {}
    for side, points, weights in (("x", x, x_weights), ("y", y, y_weights)):
        log = log_weights(f"{side}_weights", weights, side, points, rows=1 + unbiased)
        sides[side] = points, Gaussian.of(side, points, bandwidth, log)

    def mean(side: str, key: str) -> Array:
        (points, first), (_, kernel) = sides[side], sides[key]
        _, log_sum = kernel.read(kernel.of_query(points))
        total = xp.sum(xp.exp(first.log_weight + log_sum), axis=-1)
        if side == key and unbiased:
            same = xp.sum(xp.exp(2 * first.log_weight), axis=-1)
            total = (total - same) / (1 - same)
        return total

    result = mean("x", "x") + mean("y", "y") - 2 * mean("x", "y")
    return xp.astype(result, dtype, copy=False)

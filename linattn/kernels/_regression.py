"""Local constant and local linear regression."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np

from linattn import _arrays, _checks
from linattn.kernels._gaussian import Gaussian, check_points, joined, log_weights
from linattn.typing import Array

RIDGE = 1e-3
"""Default penalty of slopes, in units of the bandwidth."""

BLOCK_NUMBERS = 1 << 20
"""Numbers of the systems that are solved together."""


@_arrays.on_array_device
def local_regression(
    query: Array,
    x: Array,
    y: Array,
    *,
    bandwidth: Any,
    degree: int = 1,
    weights: Any = None,
    key_mask: Array | None = None,
    ridge: float = RIDGE,
) -> Array:
    r"""Return targets smoothed by a constant or a line fitted around each query.

    .. math::
        \min_{\alpha, \beta} \sum_j w_j K_h(x_j - q)
        \Big|y_j - \alpha - \beta \cdot \frac{x_j - q}{h}\Big|^2 / \sum_j w_j K_h(x_j - q)
        + \lambda |\beta|^2, \qquad K_h(t) = \exp(-|t|^2 / (2 h^2))

    The result is alpha. Degree 0 leaves out beta: the weighted mean of Nadaraya and Watson.
    Letters: ``N`` queries q, ``n`` rows x with targets y, ``d`` coordinates, ``k`` outputs.

    Parameters
    ----------
    query : array, (..., N, d)
        Of any array-API library. Integers and booleans count as numbers.
    x : array, (..., n, d)
        Same library, dtype and device.
    y : array, (..., n, k)
        Same library, dtype and device.
    bandwidth : float or array, () or (d,)
        h.
    degree : {0, 1}, optional
        Constant or line. Default 1.
    weights, key_mask
        Of the rows, as for :func:`log_sum_exp`.
    ridge : float, optional
        lambda, positive: keeps slopes small where the rows do not determine them. Default 1e-3.

    Returns
    -------
    array, (..., N, k)
        In the library, dtype and device of the rows. Far from all rows, the value of the nearest.

    Raises
    ------
    TypeError, ValueError
        As :func:`log_sum_exp`; a degree that is neither 0 nor 1, a ridge that is not positive; no
        row counts.

    Notes
    -----
    A line has no first-order bias at the borders of the data, nor where rows are denser on one
    side. So its bandwidth may be wider.

    Degree 0 takes time O(N n (d + k)); degree 1 O(N n (d^2 + d k) + N d^3). Memory O((N + n)(d^2 +
    d k)), nothing that grows with N n. Moments of degree 1 are subtracted: they lose
    ``log10(r^2 / h^2)`` digits of 16 in data of extent r.

    References
    ----------
    Nadaraya, "On Estimating Regression" (1964); Fan and Gijbels, "Local Polynomial Modelling and
    Its Applications" (1996), eq. 3.5.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.kernels import local_regression
    >>> x = np.linspace(0, 1, 100)[:, None]
    >>> line = local_regression(np.array([[0.0]]), x, 3 * x + 1, bandwidth=0.1)
    >>> mean = local_regression(np.array([[0.0]]), x, 3 * x + 1, bandwidth=0.1, degree=0)
    >>> line.round(2), mean.round(2)
    (array([[1.]]), array([[1.23]]))
    """
    xp, (query, x, y), dtype = check_points(query=query, x=x, y=y)
    degree = _checks.check_positive_int("degree", degree, least=0, most=1)
    ridge = _checks.check_finite_number("ridge", ridge, positive=True)
    if y.shape[-2] != x.shape[-2]:
        raise ValueError(f"y must have the {x.shape[-2]} rows of x, got shape {tuple(y.shape)}")
    log_weight = log_weights("weights", weights, "x", x, key_mask, rows=1)
    kernel = Gaussian.of("x", x, bandwidth, log_weight)
    at = kernel.of_query(query)
    if degree == 0:
        means, _ = kernel.read(at, y)
    else:
        means, _ = kernel.read(at, moments(kernel.coordinates, y))
        means = local_fit(at, means, ridge)
    return xp.astype(means, dtype, copy=False)


def moments(u: Array, y: Array) -> Array:
    """Return the moments that a line is fitted from: ``[y, u, u u^T, u y]`` for each row.

    Shape (..., n, k + d + d^2 + d k).
    """
    xp, d = _arrays.namespace(u), u.shape[-1]
    squares = [u * u[..., i : i + 1] for i in range(d)]
    products = [y * u[..., i : i + 1] for i in range(d)]
    lead = np.broadcast_shapes(u.shape[:-1], y.shape[:-1])
    parts = [y, u, *squares, *products]
    return joined([xp.broadcast_to(c, (*lead, c.shape[-1])) for c in parts])


def local_fit(u: Array, means: Array, ridge: float) -> Array:
    """Return the constant of the line at each query, (..., N, k), from means of :func:`moments`."""
    xp, d = _arrays.namespace(u), u.shape[-1]
    k = (means.shape[-1] - d - d * d) // (1 + d)
    n, lead = u.shape[-2], math.prod(means.shape[:-2])
    step = max(1, BLOCK_NUMBERS // (d * (d + k) * max(1, lead)))
    blocks = [slice(i, min(i + step, n)) for i in range(0, max(1, n), step)]
    fits = [_fit_block(u[..., rows, :], means[..., rows, :], ridge, k) for rows in blocks]
    return fits[0] if len(fits) == 1 else xp.concat(fits, axis=-2)


def _fit_block(u: Array, means: Array, ridge: float, k: int) -> Array:
    xp, d = _arrays.namespace(u), u.shape[-1]
    y, m, rest = means[..., :k], means[..., k : k + d], means[..., k + d :]
    second = xp.reshape(rest[..., : d * d], (*rest.shape[:-1], d, d))
    mixed = xp.reshape(rest[..., d * d :], (*rest.shape[:-1], d, k))
    identity = xp.eye(d, dtype=u.dtype, device=array_api_compat.device(u))
    system = xp.concat(
        [
            second - m[..., :, None] * m[..., None, :] + ridge * identity,
            mixed - m[..., :, None] * y[..., None, :],
        ],
        axis=-1,
    )
    slope = _solved(system, d)
    return y + xp.sum((u - m)[..., None] * slope, axis=-2)


def _solved(system: Array, d: int) -> Array:
    """Solve A x = B, given ``[A, B]``, (..., d, d + k), for positive definite A, on any library."""
    xp = _arrays.namespace(system)
    for i in range(d):
        pivot = system[..., i : i + 1, :] / system[..., i : i + 1, i : i + 1]
        remaining = system - system[..., :, i : i + 1] * pivot
        system = xp.concat([remaining[..., :i, :], pivot, remaining[..., i + 1 :, :]], axis=-2)
    return system[..., d:]

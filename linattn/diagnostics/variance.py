"""Before attention runs: the variance of a map's kernel, and the columns that it asks for."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _numerics
from linattn._driver.problem import check_feature_map
from linattn.diagnostics._shared import (
    Floats,
    check_inputs,
    evenly_spaced,
    features_per_row,
    is_deterministic,
    make_verdict,
    rows_drawn_together,
    softmax,
    weighted_percentiles,
    weighted_quantile,
    worst,
)
from linattn.diagnostics.costs import crossover_length
from linattn.typing import Array
from linattn.typing.records import one_line

__all__ = [
    "PERCENTILES",
    "Recommendation",
    "RelativeVariance",
    "recommend_num_features",
    "relative_variance",
]

PERCENTILES = (5, 25, 50, 75, 95)
"""The percentiles that :func:`relative_variance` reports."""


class RelativeVariance(NamedTuple):
    """Variance of a map's kernel estimate over the kernel squared, weighted by attention.

    Attributes
    ----------
    mean, median : ndarray, (...)
        Of each head; NaN for a head that sees no key.
    percentiles : ndarray, (..., 5)
        At :data:`PERCENTILES`.
    bias : ndarray, (...)
        Mean of ``E estimate / kernel - 1``, with the same weights: 0 for unbiased maps, NaN where
        the mean of the estimate is not known.
    verdict : str
        Begins with "use exact softmax attention" ("exact kernel attention" for maps of another
        kernel) where the median is above 1 in every head, with "use exact softmax attention in
        k of n heads" where it is in some, and with "linear attention" otherwise.

    Examples
    --------
    >>> import linattn
    >>> query, key, _ = (x[0, 0, :64] for x in linattn.datasets.pretrained_qkv())
    >>> phi = linattn.feature_maps.PositiveFeatures(32, num_features=64, rng=0)
    >>> report = linattn.diagnostics.relative_variance(query, key, phi)
    >>> bool(report.median > 1), report.verdict[:27]
    (True, 'use exact softmax attention')
    """

    mean: Floats
    median: Floats
    percentiles: Floats
    bias: Floats
    verdict: str

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Recommendation(NamedTuple):
    """How many columns a tolerance takes.

    Attributes
    ----------
    num_features : int or None
        Columns that are enough in every head that is not `hopeless`; None if all are.
    per_head : ndarray, (...)
        Columns that each head takes, infinite where no number is enough.
    hopeless : ndarray of bool, (...)
        Heads where exact attention costs no more than that number of columns.
    verdict : str
        Begins with "use exact softmax attention" where that is cheaper; see
        :class:`RelativeVariance`.

    Examples
    --------
    >>> import linattn
    >>> query, key, _ = (x[0, 0, :64] for x in linattn.datasets.pretrained_qkv())
    >>> phi = linattn.feature_maps.PositiveFeatures(32, num_features=64, rng=0)
    >>> found = linattn.diagnostics.recommend_num_features(query, key, phi, tolerance=0.1)
    >>> bool(found.hopeless)
    True
    """

    num_features: int | None
    per_head: Floats
    hopeless: NDArray[np.bool_]
    verdict: str

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


@_arrays.on_array_device
def relative_variance(
    query: Array,
    key: Array,
    feature_map: Any,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    num_samples: int = 128,
) -> RelativeVariance:
    r"""Exact relative variance of a map's kernel on these inputs, weighted by attention.

    .. math::
        \frac{\mathrm{Var}\, \hat K(q_i, k_j)}{K(q_i, k_j)^2}
        \quad \text{with weights} \quad
        p_{ij} = \frac{|K(q_i, k_j)|}{\sum_l |K(q_i, k_l)|}

    Nothing is drawn: the variance is the closed form of ``feature_map.variance``.

    Parameters
    ----------
    query : array, (..., L, d)
        Queries, unscaled.
    key : array, (..., S, d)
        Keys.
    feature_map : feature map
        With ``kernel`` and ``variance``.
    is_causal : bool, optional
        Query i sees keys 0..i only; needs L = S. Default False.
    key_mask : boolean array, (S,) or key.shape[:-1] with axes of 1, optional
        True = attend.
    num_samples : int, optional
        Most queries, and most keys, that are used: evenly spaced ones. Default 128.

    Returns
    -------
    RelativeVariance

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention` for the arrays; no token at all; NaN or inf; a map
        without ``kernel`` and ``variance``.
    NotImplementedError
        The map has no closed form for its variance.

    Notes
    -----
    A pair whose kernel squared leaves the range of float64 counts as infinite. For deterministic
    maps everything is 0, though their kernel need not be softmax. Time O(n^2 d) and
    memory O(n^2) a head, n = num_samples.

    Examples
    --------
    >>> import linattn
    >>> query, key, _ = linattn.datasets.pretrained_qkv()
    >>> phi = linattn.feature_maps.PositiveFeatures(32, 256, rng=0)
    >>> linattn.diagnostics.relative_variance(query, key, phi).verdict[:27]
    'use exact softmax attention'
    """
    pairs = _weighted_pairs(query, key, feature_map, is_causal, key_mask, num_samples)
    with np.errstate(invalid="ignore"):
        weights = pairs.weights / np.sum(pairs.weights, axis=(-2, -1), keepdims=True)
    mean = _weighted_mean(pairs.variance, weights).sum(axis=-1)
    percentiles = weighted_percentiles(pairs.variance, weights, PERCENTILES)
    median = percentiles[..., PERCENTILES.index(50)]
    return RelativeVariance(
        mean=mean,
        median=median,
        percentiles=percentiles,
        bias=_weighted_mean(pairs.bias, weights).sum(axis=-1),
        verdict=make_verdict(
            median > 1,
            feature_map,
            f"half of the attention falls on pairs whose estimate has a relative standard "
            f"deviation above {worst(np.sqrt(median)):.2g}",
        ),
    )


@_arrays.on_array_device
def recommend_num_features(
    query: Array,
    key: Array,
    feature_map: Any,
    *,
    tolerance: float,
    coverage: float = 0.9,
    is_causal: bool = False,
    key_mask: Array | None = None,
    length: int | None = None,
    value_dim: int | None = None,
    num_samples: int = 128,
) -> Recommendation:
    r"""Columns that a map needs for a tolerance on these inputs, or the advice not to use it.

    .. math::
        \sqrt{\mathrm{relVar}\, \hat D_i} \le r_i = \sum_j p_{ij}
        \frac{\mathrm{sd}\, \hat K(q_i, k_j)}{K(q_i, k_j)}, \qquad
        m = m_0 \left( r_i / \mathrm{tolerance} \right)^2

    with p exact attention and m_0 the columns of the map that is given. The bound on the
    denominator D of query i is exact (Cauchy-Schwarz); to first order the output is then within
    ``tolerance`` root mean square, in units of the largest distance of a value from it.

    Parameters
    ----------
    query, key : array, (..., L, d) and (..., S, d)
        As :func:`relative_variance`.
    feature_map : feature map
        A random map, of any number of columns.
    tolerance : float
        Largest r, such as 0.1.
    coverage : float, optional
        Share of a head's queries that must meet it. Default 0.9.
    is_causal, key_mask, num_samples
        As :func:`relative_variance`.
    length : int, optional
        Length for which exact attention is the alternative. Default S.
    value_dim : int, optional
        e, for the cost. Default d.

    Returns
    -------
    Recommendation

    Raises
    ------
    TypeError, ValueError
        As :func:`relative_variance`; a tolerance that is not positive; a coverage outside (0, 1];
        a deterministic map; a biased map whose bias is not known.

    Notes
    -----
    Rounded up to whole blocks, for which the variance of independent and block-coupled rows is
    exactly proportional to 1/m; couplings across blocks do better. A bias, which no number of
    columns cures, is taken off the tolerance. Where m columns cost more than exact attention at
    this length (:func:`crossover_length`) the head is `hopeless`. r is an upper bound: errors of
    different keys partly cancel. Cost as :func:`relative_variance`.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key = 0.3 * np.random.default_rng(0).standard_normal((2, 50, 8))
    >>> phi = linattn.feature_maps.PositiveFeatures(8, 64, rng=0)
    >>> recommend = linattn.diagnostics.recommend_num_features
    >>> recommend(query, key, phi, tolerance=0.1, length=100_000).num_features
    80
    """
    tolerance = _checks.check_finite_number("tolerance", tolerance, positive=True)
    coverage = _checks.check_finite_number("coverage", coverage, positive=True)
    if coverage > 1:
        raise ValueError(f"coverage must be above 0 and at most 1, got {coverage}")
    if is_deterministic(feature_map):
        raise ValueError(
            f"feature_map must be random, so that columns lower its variance, got {feature_map!r}"
        )
    pairs = _weighted_pairs(query, key, feature_map, is_causal, key_mask, num_samples)
    if np.isnan(pairs.bias).any():
        raise ValueError(
            f"feature_map must be unbiased or know its mean: more columns do not lower a bias, "
            f"and that of {feature_map!r} is not known"
        )
    d = int(query.shape[-1])
    length = key.shape[-2] if length is None else _checks.check_positive_int("length", length)
    value_dim = d if value_dim is None else value_dim
    deviation = _weighted_mean(np.sqrt(pairs.variance), pairs.weights)
    left = tolerance - _weighted_mean(np.abs(pairs.bias), pairs.weights)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(left > 0, deviation / left, np.inf) ** 2
    sees_keys = np.sum(pairs.weights, axis=-1)
    wanted = weighted_quantile(factor, sees_keys, coverage) * feature_map.num_features
    step = _features_per_block(feature_map)
    per_head = step * np.maximum(np.ceil(wanted * (1 - 1e-12) / step), 1)
    too_many = np.array(
        [
            not math.isfinite(m)
            or length < crossover_length(d, value_dim, int(m), is_causal=is_causal)
            for m in per_head.ravel()
        ]
    ).reshape(per_head.shape)
    too_many &= ~np.isnan(per_head)
    possible = per_head[~too_many & np.isfinite(per_head)]
    most = int(possible.max()) if possible.size else None
    reason = f"a tolerance of {tolerance:g} takes {_range_text(per_head)}"
    if too_many.any():
        reason += f", which costs more than exact attention to {length} keys"
    return Recommendation(most, per_head, too_many, make_verdict(too_many, feature_map, reason))


class _Pairs(NamedTuple):
    weights: Floats  # (..., n, s): attention, each row of sum 1, or 0 if it sees no key
    variance: Floats  # relative, as is the bias
    bias: Floats


def _weighted_pairs(
    query: Array,
    key: Array,
    feature_map: Any,
    is_causal: bool,
    key_mask: Array | None,
    num_samples: int,
) -> _Pairs:
    check_feature_map(feature_map)
    if not hasattr(feature_map, "variance") or not hasattr(feature_map, "kernel"):
        raise TypeError(
            f"feature_map must have kernel(x, y) and variance(x, y), got "
            f"{type(feature_map).__name__}"
        )
    num_samples = _checks.check_positive_int("num_samples", num_samples)
    x, y, visible = check_inputs(query, key, is_causal, key_mask)
    if 0 in x.shape or 0 in y.shape:
        raise ValueError(f"query and key must have a token, got shapes {x.shape} and {y.shape}")
    queries, keys = (evenly_spaced(a.shape[-2], num_samples) for a in (x, y))
    x, y, visible = x[..., queries, :], y[..., keys, :], visible[..., queries, :][..., keys]
    with _numerics.ignore_fp_warnings():
        kernel = np.asarray(feature_map.kernel(x, y))
        if getattr(feature_map, "softmax_kernel", False):
            log_kernel = feature_map.scale * (x @ np.swapaxes(y, -1, -2))
        else:
            log_kernel = np.log(np.abs(kernel))
        weights = softmax(np.where(visible, log_kernel, -np.inf))
        variance = np.asarray(feature_map.variance(x, y))
        bias = _relative_bias(feature_map, x, y, kernel)
        relative = np.where(variance == 0, 0.0, variance / kernel**2)
        relative = np.where(np.isnan(relative), np.inf, np.maximum(relative, 0))
    weights, relative, bias = np.broadcast_arrays(weights, relative, bias)
    return _Pairs(weights, relative, bias)


def _relative_bias(feature_map: Any, x: Floats, y: Floats, kernel: Floats) -> Floats:
    if getattr(feature_map, "unbiased", False):
        return np.zeros_like(kernel)
    try:
        return np.asarray(feature_map.mean(x, y) / kernel - 1)
    except (AttributeError, NotImplementedError):
        return np.full_like(kernel, np.nan)


def _weighted_mean(values: Floats, weights: Floats) -> Floats:
    """Sum of weights times values along the last axis; a weight of 0 takes no part."""
    return np.asarray(np.sum(np.where(weights == 0, 0.0, values) * weights, axis=-1))


def _range_text(per_head: Floats) -> str:
    known = per_head[~np.isnan(per_head)]
    if not known.size:
        return "no columns, no key being seen"
    low, high = (f"{m:.0f}" if m < 1e6 else f"{m:.1e}" for m in (known.min(), known.max()))
    return f"{low} columns" if low == high else f"{low} to {high} columns"


def _features_per_block(feature_map: Any) -> int:
    rows = rows_drawn_together(feature_map) or 1
    return rows * features_per_row(feature_map, feature_map.num_features)

"""How good an approximation of attention is on these inputs, before it runs and after.

Before: the exact variance of a map's kernel, weighted by attention, and from it the columns needed
and the length from which they pay. After: the error and the bias of an output, estimated from the
terms of the very sum that made it. Where exact attention is the better choice the ``verdict`` of a
result says so.

Arrays may come from any library. Everything is computed on the host by NumPy in float64, on a
sample of tokens where the cost would be quadratic; results are NumPy arrays.

Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``m`` features (columns), ``e`` value dim, ``...``
leading axes (batch, heads), which broadcast and of which every element is called a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _checks, _generic
from linattn._problem import check_feature_map, map_columns, map_specs
from linattn.attention import linear_attention
from linattn.feature_maps import BaseFeatureMap
from linattn.sampling import Sampler
from linattn.typing import Array, ColumnMeans, FeatureMap, State

__all__ = [
    "PERCENTILES",
    "Denominators",
    "OutputError",
    "Recommendation",
    "RelativeVariance",
    "attention_weights",
    "crossover_length",
    "denominators",
    "effective_features",
    "output_error",
    "recommend_num_features",
    "relative_variance",
]

Floats = NDArray[np.float64]

PERCENTILES = (5, 25, 50, 75, 95)
"""The percentiles that :func:`relative_variance` reports."""

# Samplers of independent blocks of d rows; "gaussian" has blocks of one, others a single block.
BLOCK_SAMPLERS = ("fixed_norm", "orthogonal", "simplex")

# Terms of a read that are held at once: 32 MiB of float64.
MOST_TERMS = 2**22


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
    """

    mean: Floats
    median: Floats
    percentiles: Floats
    bias: Floats
    verdict: str


class Recommendation(NamedTuple):
    """How many columns a tolerance takes.

    Attributes
    ----------
    num_features : int or None
        Columns that are enough in every head that is not hopeless; None if all are.
    per_head : ndarray, (...)
        Columns that each head takes, infinite where no number is enough.
    hopeless : ndarray of bool, (...)
        Heads where exact attention costs no more than that number of columns.
    verdict : str
        Begins with "use exact softmax attention" where that is cheaper; see
        :class:`RelativeVariance`.
    """

    num_features: int | None
    per_head: Floats
    hopeless: NDArray[np.bool_]
    verdict: str


class OutputError(NamedTuple):
    """What the terms of one read say of its error.

    Attributes
    ----------
    output : ndarray, (..., L, e)
        The output itself.
    variance : ndarray, (..., L, e)
        Estimated variance over draws of the projection, to first order.
    jackknife : ndarray, (..., L, e)
        The same from leaving out each block in turn, which sees a little further.
    bias : ndarray, (..., L, e)
        Estimated bias of the ratio of two estimates.
    denominator_variance : ndarray, (..., L)
        Estimated relative variance of the denominator.
    effective_features : ndarray, (..., L)
        See :func:`effective_features`.
    num_blocks : int
        Independent blocks G that the estimates rest on.
    verdict : str
        Begins with "use exact softmax attention" where the denominator has a relative standard
        deviation above 1/4 for half of the queries; see :class:`RelativeVariance`.
    """

    output: Floats
    variance: Floats
    jackknife: Floats
    bias: Floats
    denominator_variance: Floats
    effective_features: Floats
    num_blocks: int
    verdict: str

    @property
    def corrected(self) -> Floats:
        """The output less its estimated bias, ``(..., L, e)``."""
        return self.output - self.bias

    def interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Return the ends of an interval that holds exact attention with this probability.

        ``corrected -+ t sqrt(jackknife)``, t the quantile of Student's law with G - 1 degrees of
        freedom. The level is reached where blocks are near normal; it is not where a few features
        carry the output: where the verdict is against linear attention, do not rely on it.

        Parameters
        ----------
        level : float, optional
            Between 0 and 1. Default 0.95.

        Returns
        -------
        low, high : ndarray, (..., L, e)

        Raises
        ------
        TypeError, ValueError
            A level that is not a number between 0 and 1.
        """
        level = _checks.check_finite_number("level", level, positive=True)
        if level >= 1:
            message = f"level must be between 0 and 1, got {level}"
            raise ValueError(message)
        half = _student_quantile(level, self.num_blocks - 1) * np.sqrt(self.jackknife)
        return self.corrected - half, self.corrected + half


class Denominators(NamedTuple):
    """How often the denominator of attention is not positive.

    Attributes
    ----------
    negative, zero : ndarray, (...)
        Share of each head's queries whose denominator is below 0, and exactly 0; of the queries
        that see a key, NaN if there is none.
    verdict : str
        Begins with "use exact softmax attention" in words as :class:`RelativeVariance` where a
        denominator is negative for more than one query in a hundred.
    """

    negative: Floats
    zero: Floats
    verdict: str


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
        Most queries, and most keys, that are looked at: evenly spaced ones. Default 128.

    Returns
    -------
    RelativeVariance

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention` for the arrays; no token at all; NaN or inf; a map
        without ``kernel`` and ``variance``.
    NotImplementedError
        The map knows no closed form for its variance.

    Notes
    -----
    A pair whose kernel squared leaves the range of float64 counts as infinite. For deterministic
    maps everything is 0: they are what they are, which need not be softmax. Time O(n^2 d) and
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
    percentiles = _weighted_percentiles(pairs.variance, weights)
    median = percentiles[..., PERCENTILES.index(50)]
    return RelativeVariance(
        mean=mean,
        median=median,
        percentiles=percentiles,
        bias=_weighted_mean(pairs.bias, weights).sum(axis=-1),
        verdict=_verdict(
            median > 1,
            feature_map,
            f"half of the attention falls on pairs whose estimate has a relative standard "
            f"deviation above {_worst(np.sqrt(median)):.2g}",
        ),
    )


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
    this length (:func:`crossover_length`) the head is hopeless. r is an upper bound: errors of
    different keys partly cancel. Cost as :func:`relative_variance`.
    """
    tolerance = _checks.check_finite_number("tolerance", tolerance, positive=True)
    coverage = _checks.check_finite_number("coverage", coverage, positive=True)
    if coverage > 1:
        message = f"coverage must be above 0 and at most 1, got {coverage}"
        raise ValueError(message)
    if _is_deterministic(feature_map):
        message = (
            f"feature_map must be random, so that columns lower its variance, got {feature_map!r}"
        )
        raise ValueError(message)
    pairs = _weighted_pairs(query, key, feature_map, is_causal, key_mask, num_samples)
    if np.isnan(pairs.bias).any():
        message = (
            f"feature_map must be unbiased or know its mean: more columns do not lower a bias, "
            f"and that of {feature_map!r} is not known"
        )
        raise ValueError(message)
    d = int(query.shape[-1])
    length = key.shape[-2] if length is None else _checks.check_positive_int("length", length)
    value_dim = d if value_dim is None else value_dim
    deviation = _weighted_mean(np.sqrt(pairs.variance), pairs.weights)
    left = tolerance - _weighted_mean(np.abs(pairs.bias), pairs.weights)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(left > 0, deviation / left, np.inf) ** 2
    sees_keys = np.sum(pairs.weights, axis=-1)
    wanted = _weighted_quantile(factor, sees_keys, coverage) * feature_map.num_features
    step = _columns_per_block(feature_map)
    per_head = step * np.maximum(np.ceil(wanted * (1 - 1e-12) / step), 1)
    hopeless = np.array(
        [
            not math.isfinite(m)
            or length < crossover_length(d, value_dim, int(m), is_causal=is_causal)
            for m in per_head.ravel()
        ]
    ).reshape(per_head.shape)
    hopeless &= ~np.isnan(per_head)
    possible = per_head[~hopeless & np.isfinite(per_head)]
    most = int(possible.max()) if possible.size else None
    reason = f"a tolerance of {tolerance:g} takes {_columns(per_head)}"
    if hopeless.any():
        reason += f", which costs more than exact attention to {length} keys"
    return Recommendation(most, per_head, hopeless, _verdict(hopeless, feature_map, reason))


def crossover_length(
    dim: int,
    value_dim: int,
    num_features: int,
    *,
    is_causal: bool = False,
    chunk_size: int = 128,
    exact_rate: float = 1.0,
    linear_rate: float = 1.0,
) -> int:
    r"""Length from which linear attention takes less time than exact attention.

    Operations of the matrix products, for one head and ``N = L = S``:

    .. math::
        \text{exact: } 2 N^2 (d + e), \qquad \text{linear: } 4 N m (d + e + 1)

    and with a causal mask, of which exact attention skips one half and linear attention computes
    blocks of c tokens by pairs,

    .. math::
        \text{exact: } N (N + 1) (d + e), \qquad
        \text{linear: } 4 N m (d + e + 1) + 2 N c (m + e + 1)

    Parameters
    ----------
    dim, value_dim, num_features : int
        d, e and m.
    is_causal : bool, optional
        Default False.
    chunk_size : int, optional
        c, for causal attention. Default 128.
    exact_rate, linear_rate : float, optional
        Operations a second of the two, as measured where it will run; only their ratio counts.
        Exact attention usually has the higher rate on a GPU. Default 1 and 1.

    Returns
    -------
    int
        The smallest such N, at least 1.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, rates that are not positive.

    Notes
    -----
    A formula, not a measurement: exponentials (N^2 of them against 2 N m), memory traffic, which
    favours linear attention, and the half of its projection that a paired map saves are left out.

    Examples
    --------
    >>> from linattn.diagnostics import crossover_length
    >>> crossover_length(64, 64, 256)
    517
    """
    sizes = {"dim": dim, "value_dim": value_dim, "num_features": num_features}
    d, e, m = (_checks.check_positive_int(name, size) for name, size in sizes.items())
    c = _checks.check_positive_int("chunk_size", chunk_size)
    rates = {"exact_rate": exact_rate, "linear_rate": linear_rate}
    exact, linear = (
        _checks.check_finite_number(name, rate, positive=True) for name, rate in rates.items()
    )
    operations = 4 * m * (d + e + 1)
    if is_causal:
        equal = (operations + 2 * c * (m + e + 1)) / (d + e) * (exact / linear) - 1
    else:
        equal = operations / (2 * (d + e)) * (exact / linear)
    return max(1, math.floor(equal) + 1)


def attention_weights(
    query: Array,
    key: Array,
    feature_map: FeatureMap | None = None,
    *,
    rows: int | slice | Sequence[int],
    is_causal: bool = False,
    key_mask: Array | None = None,
    scale: float | None = None,
) -> Floats:
    r"""Rows of the attention matrix, which attention itself never makes; for looking at.

    .. math::
        w_{ij} = \frac{\phi(q_i) \cdot \psi(k_j)}{\sum_l \phi(q_i) \cdot \psi(k_l)}
        \qquad \text{or} \qquad w_{ij} = \mathrm{softmax}_j(s\, q_i \cdot k_j)

    Parameters
    ----------
    query, key : array, (..., L, d) and (..., S, d)
        Queries and keys.
    feature_map : FeatureMap, optional
        The map whose weights are wanted. Default None: exact softmax.
    rows : int, slice or sequence of int
        Queries whose rows are wanted. ``slice(None)`` is the whole matrix.
    is_causal : bool, optional
        Query i sees keys 0..i only; needs L = S. Default False.
    key_mask : boolean array, (S,) or key.shape[:-1] with axes of 1, optional
        True = attend.
    scale : float, optional
        s of exact softmax; a map has its own. Default ``1 / sqrt(d)``.

    Returns
    -------
    ndarray, (..., rows, S)
        Rows sum to 1, or are 0 where the denominator is exactly 0; a signed map may give weights
        of both signs. An int gives one row, its axis kept.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention`; rows that are not there; a scale beside a map.

    Notes
    -----
    Each row is added up pair by pair in the log domain. Time and memory of one row O(S m) a head,
    of the features O((L + S) m d).
    """
    x, y, visible = _inputs(query, key, is_causal, key_mask)
    chosen = _chosen_rows(rows, x.shape[-2])
    if feature_map is None:
        s = x.shape[-1] ** -0.5 if scale is None else _checks.check_finite_number("scale", scale)
        logits = s * x[..., chosen, :] @ np.swapaxes(y, -1, -2)
        return _softmax(np.where(visible[..., chosen, :], logits, -np.inf))
    if scale is not None:
        message = f"scale must be None with a feature map, which has its own, got {scale!r}"
        raise ValueError(message)
    check_feature_map(feature_map)
    map_columns(feature_map, "query and key", x.shape[-1])
    result = [
        _map_row(log_terms, signs, mask)
        for log_terms, signs, mask in _row_terms(feature_map, x, y, visible, chosen)
    ]
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return np.stack(result, axis=-2) if result else np.zeros((*lead, 0, y.shape[-2]))


def output_error(
    query: Array, state: State, feature_map: Any, *, block_size: int | None = None
) -> OutputError:
    r"""Error and bias of attention to a state, estimated from the terms of one read.

    With ``D_g`` and ``N_g`` the parts of denominator and numerator that come from block g of the
    projection's rows, ``o = sum N_g / sum D_g``, ``pi_g = D_g / D`` and
    ``u_g = (N_g - o D_g) / D``, for G blocks of equal size

    .. math::
        \hat V = \frac{G}{G-1} \sum_g u_g^2, \qquad
        \hat b = -\frac{G}{G-1} \sum_g \pi_g u_g, \qquad
        \mathrm{relVar}\, \hat D = \frac{G}{G-1} \Big( \sum_g \pi_g^2 - \frac1G \Big)

    and the jackknife ``(G - 1) / G sum_g (o_(g) - mean o_(g))^2``, ``o_(g)`` the output without
    block g.

    Blocks are what was drawn independently: single rows, whole orthogonal blocks of d rows, with
    all columns that come from a row (antithetic pairs, cosine and sine) together.

    Parameters
    ----------
    query : array, (..., L, d)
        Queries.
    state : State
        Keys and values seen: :func:`linattn.update_state`, or what
        ``linear_attention(..., return_state=True)`` returns.
    feature_map : feature map
        The random map of the state.
    block_size : int, optional
        Rows that were drawn together. Default: what the map's sampler does; needed for a map of
        given rows, or with a sampler of your own.

    Returns
    -------
    OutputError
        For attention of the queries to all keys of the state. NaN where the denominator is 0.

    Raises
    ------
    TypeError, ValueError
        Not arrays, a map or a state that fit; a deterministic map; rows of unknown coupling; only
        one independent block, which can say nothing of its own error.

    Notes
    -----
    The terms of a read know nothing of the features that were not drawn: where the law of the
    kernel estimate has a heavy tail (:func:`relative_variance` above 1) all of this is too small.
    A verdict for linear attention needs both.

    A last block of fewer rows counts by its size, ``1 - sum_g (m_g / m)^2`` standing for
    ``(G - 1) / G``. Time O(L m e) a head, as the read.

    References
    ----------
    Derived in this project (delta method). Busing, Meijer and van der Leeden, "Delete-m jackknife
    for unequal m" (1999).

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = 0.3 * np.random.default_rng(0).standard_normal((3, 100, 8))
    >>> phi = linattn.feature_maps.PositiveFeatures(8, 256, rng=0)
    >>> _, state = linattn.linear_attention(query, key, value, phi, return_state=True)
    >>> found = linattn.diagnostics.output_error(query, state, phi)
    >>> error = found.output - linattn.softmax_attention(query, key, value)
    >>> bool(0.5 < np.mean(error**2) / np.mean(found.variance) < 2)
    True
    """
    x, kvz, log_scale = _read_inputs(query, state, feature_map)
    starts, sizes, copies = _blocks(feature_map, kvz.shape[-2], block_size)
    if len(starts) < 2:
        message = (
            f"output_error needs two or more independent blocks of rows, and {feature_map!r} has "
            f"one: use more columns, or sampler='gaussian', whose rows are all independent"
        )
        raise ValueError(message)
    share = sizes / sizes.sum()
    correction = 1 / (1 - np.sum(share**2))
    pieces = []
    with _generic.quiet():
        for features in _query_weights(x, log_scale, feature_map, kvz):
            terms = features[..., :, None] * kvz[..., None, :, :]
            rows = terms.reshape(*terms.shape[:-2], copies, -1, terms.shape[-1]).sum(axis=-3)
            blocks = np.add.reduceat(rows, starts, axis=-2)
            total = blocks.sum(axis=-2, keepdims=True)
            fractions = blocks / total[..., -1:]
            pi, output = fractions[..., -1:], fractions[..., :-1].sum(axis=-2, keepdims=True)
            u = fractions[..., :-1] - output * pi
            excess = pi - share[:, None]
            without = (output - fractions[..., :-1]) / (1 - pi)
            pieces.append(
                (
                    np.where(total[..., -1:] == 0, 0.0, output)[..., 0, :],
                    correction * np.sum(u * u, axis=-2),
                    _jackknife(output, without, share[:, None]),
                    -correction * np.sum(excess * u, axis=-2),
                    correction * np.sum(excess * excess, axis=-2)[..., 0],
                    _participation(terms[..., -1]),
                )
            )
    output, variance, jackknife, bias, relative, effective = (
        np.concatenate(parts, axis=axis)
        for parts, axis in zip(zip(*pieces, strict=True), (-2, -2, -2, -2, -1, -1), strict=True)
    )
    deviation = np.sqrt(_median(relative))
    reason = (
        f"for half of the queries the denominator has a relative standard deviation above "
        f"{_worst(deviation):.2g}"
    )
    verdict = _verdict(deviation > 0.25, feature_map, reason)
    return OutputError(output, variance, jackknife, bias, relative, effective, len(starts), verdict)


def effective_features(query: Array, state: State, feature_map: FeatureMap) -> Floats:
    r"""Count the features that carry each query's read: ``1 / sum_r pi_r^2``.

    .. math::
        \pi_r = \frac{\phi_r(q) z_r}{\sum_s \phi_s(q) z_s}, \qquad
        m_{\mathrm{eff}} = 1 / \sum_r \pi_r^2

    Parameters
    ----------
    query : array, (..., L, d)
        Queries.
    state : State
        Keys and values seen.
    feature_map : FeatureMap
        The map of the state, random or not.

    Returns
    -------
    ndarray, (..., L)
        Between 1 and m for maps that are not negative; NaN where the denominator is 0. For signed
        maps it may be below 1: the terms cancel.

    Raises
    ------
    TypeError, ValueError
        Not arrays, a map or a state that fit.

    Notes
    -----
    For independent rows ``1 / m_eff - 1 / m`` is about the relative variance of the denominator:
    a handful of effective features out of hundreds is an output that another draw would change.
    Time O(L m).
    """
    x, kvz, log_scale = _read_inputs(query, state, feature_map)
    with _generic.quiet():
        parts = [
            _participation(features * kvz[..., None, :, -1])
            for features in _query_weights(x, log_scale, feature_map, kvz)
        ]
    return np.concatenate(parts, axis=-1)


def denominators(
    query: Array,
    key: Array,
    feature_map: Any,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
) -> Denominators:
    """Count the queries whose denominator is 0 or negative; linear attention clamps neither.

    Features of both signs (trigonometric) may cancel: where a denominator is negative the output
    is no average of the values, and near 0 it is unbounded.

    Parameters
    ----------
    query, key, feature_map, is_causal, key_mask
        As :func:`linattn.linear_attention`.

    Returns
    -------
    Denominators

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention`; NaN or inf in a query or a visible key.

    Notes
    -----
    In float64. A denominator of exactly 0 comes from features that are all 0 together (ReLU), or
    from underflow, and gives the output 0. Time O((L + S) m d), as attention with one value.
    """
    check_feature_map(feature_map)
    x, y, visible = _inputs(query, key, is_causal, key_mask)
    hidden = None
    if key_mask is not None:
        hidden = np.array(np.broadcast_to(_mask(key, key_mask, x.shape[-2]), y.shape[:-1]))
    _, log_normalizer = linear_attention(
        x,
        y,
        np.zeros((*y.shape[:-1], 1)),
        feature_map,
        is_causal=is_causal,
        key_mask=hidden,
        return_log_normalizer=True,
    )
    counts = np.broadcast_to(visible.any(axis=-1), log_normalizer.shape)
    seen = counts.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        negative = np.sum(counts & np.isnan(log_normalizer), axis=-1) / seen
        zero = np.sum(counts & (log_normalizer == -np.inf), axis=-1) / seen
    reason = f"the denominator is negative for {_worst(100 * negative):.3g} % of the queries"
    return Denominators(negative, zero, _verdict(negative > 0.01, feature_map, reason))


def _host(array: Array, xp: Any) -> Floats:
    # NumPy has no bfloat16.
    if _checks.dtype_bits(array.dtype) == 16:
        array = xp.astype(array, xp.float32)
    return _checks.to_numpy(array).astype(np.float64)


def _mask(key: Array, key_mask: Array | None, query_len: int) -> NDArray[np.bool_]:
    """Return the mask of the keys on the host, ``(..., S)``."""
    xp, (key,) = _checks.check_arrays(key=key)
    if key_mask is None:
        return np.ones(key.shape[-2], dtype=bool)
    mask = _checks.check_key_mask(key_mask, key, xp, query_len=query_len)
    return np.asarray(_checks.to_numpy(mask)[..., 0])


def _inputs(
    query: Array, key: Array, is_causal: bool, key_mask: Array | None
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return queries, keys (0 where masked) and which key each query sees, ``(..., 1 or L, S)``."""
    xp, (query, key) = _checks.check_arrays(query=query, key=key)
    L, S = query.shape[-2], key.shape[-2]
    if query.shape[-1] != key.shape[-1]:
        message = (
            f"query and key must have one last axis (dim), got shapes {tuple(query.shape)} and "
            f"{tuple(key.shape)}"
        )
        raise ValueError(message)
    if is_causal and L != S:
        message = f"is_causal needs query and key of equal length, got {L} and {S}"
        raise ValueError(message)
    _checks.check_leading_axes(query=tuple(query.shape[:-2]), key=tuple(key.shape[:-2]))
    mask = _mask(key, key_mask, L)
    x, y = _host(query, xp), np.where(mask[..., None], _host(key, xp), 0.0)
    for name, array in (("query", x), ("key", y)):
        if not np.isfinite(array).all():
            message = f"{name} must be finite where it is not masked, got NaN or inf"
            raise ValueError(message)
    visible = np.broadcast_to(mask[..., None, :], (*mask.shape[:-1], L, S))
    return x, y, visible & np.tri(L, S, dtype=bool) if is_causal else visible


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
        message = (
            f"feature_map must have kernel(x, y) and variance(x, y), got "
            f"{type(feature_map).__name__}"
        )
        raise TypeError(message)
    num_samples = _checks.check_positive_int("num_samples", num_samples)
    x, y, visible = _inputs(query, key, is_causal, key_mask)
    if 0 in x.shape or 0 in y.shape:
        message = f"query and key must have a token, got shapes {x.shape} and {y.shape}"
        raise ValueError(message)
    queries, keys = (_evenly_spaced(a.shape[-2], num_samples) for a in (x, y))
    x, y, visible = x[..., queries, :], y[..., keys, :], visible[..., queries, :][..., keys]
    with _generic.quiet():
        kernel = np.asarray(feature_map.kernel(x, y))
        if getattr(feature_map, "softmax_kernel", False):
            log_kernel = feature_map.scale * (x @ np.swapaxes(y, -1, -2))
        else:
            log_kernel = np.log(np.abs(kernel))
        weights = _softmax(np.where(visible, log_kernel, -np.inf))
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


def _evenly_spaced(length: int, most: int) -> NDArray[np.intp]:
    return np.linspace(0, length - 1, min(length, most)).round().astype(np.intp)


def _softmax(logits: Floats) -> Floats:
    """Softmax along the last axis; 0 where every logit is -inf."""
    shift = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(shift == -np.inf, 0.0, shift))
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0))


def _weighted_mean(values: Floats, weights: Floats) -> Floats:
    """Sum of weights times values along the last axis; a weight of 0 takes no part."""
    return np.asarray(np.sum(np.where(weights == 0, 0.0, values) * weights, axis=-1))


def _weighted_quantile(values: Floats, weights: Floats, level: float) -> Floats:
    """Smallest value with a share of the weights, at least ``level``, at or below it."""
    order = np.argsort(values, axis=-1)
    values = np.take_along_axis(values, order, axis=-1)
    total = np.cumsum(np.take_along_axis(weights, order, axis=-1), axis=-1)
    # Rounding of the sums must not push the last share beyond every value.
    reached = total >= level * (1 - 1e-12) * total[..., -1:]
    found = np.take_along_axis(values, np.argmax(reached, axis=-1)[..., None], axis=-1)[..., 0]
    return np.where(total[..., -1] > 0, found, np.nan)


def _weighted_percentiles(values: Floats, weights: Floats) -> Floats:
    flat = [a.reshape(*a.shape[:-2], -1) for a in (values, weights)]
    levels = [_weighted_quantile(flat[0], flat[1], level / 100) for level in PERCENTILES]
    return np.stack(levels, axis=-1)


def _median(values: Floats) -> Floats:
    """Median along the last axis of what is not NaN; NaN if nothing is."""
    return _weighted_quantile(np.nan_to_num(values, nan=np.inf), 1.0 - np.isnan(values), 0.5)


def _verdict(hopeless: NDArray[np.bool_], feature_map: Any, reason: str) -> str:
    kernel = "softmax" if getattr(feature_map, "softmax_kernel", False) else "kernel"
    number, total = int(np.sum(hopeless)), np.size(hopeless)
    if number == 0:
        return f"linear attention: {reason}"
    where = "" if number == total else f" in {number} of {total} heads"
    return f"use exact {kernel} attention{where}: {reason}"


def _worst(values: Floats) -> float:
    """Largest value of any head that has one."""
    return float(np.max(values, initial=0.0, where=~np.isnan(values)))


def _columns(per_head: Floats) -> str:
    known = per_head[~np.isnan(per_head)]
    if not known.size:
        return "no columns, no key being seen"
    low, high = (f"{m:.0f}" if m < 1e6 else f"{m:.1e}" for m in (known.min(), known.max()))
    return f"{low} columns" if low == high else f"{low} to {high} columns"


def _innermost(feature_map: Any) -> Any:
    """Return the map that was drawn, inside maps that only change coordinates."""
    while hasattr(feature_map, "feature_map"):
        feature_map = feature_map.feature_map
    return feature_map


def _is_deterministic(feature_map: Any) -> bool:
    drawn = _innermost(feature_map)
    return isinstance(drawn, BaseFeatureMap) and getattr(drawn, "projection", None) is None


def _rows_drawn_together(feature_map: Any) -> int | None:
    """Count the rows of one independent block of a map's sampler; None if that is not known."""
    drawn = _innermost(feature_map)
    sampler: Any = getattr(drawn, "sampler", None)
    name = sampler.name if isinstance(sampler, Sampler) else sampler
    if name == "gaussian":
        return 1
    return int(drawn.projection.shape[-1]) if name in BLOCK_SAMPLERS else None


def _columns_per_row(feature_map: Any, m: int) -> int:
    projection = getattr(_innermost(feature_map), "projection", None)
    return 1 if projection is None else m // int(projection.shape[-2])


def _columns_per_block(feature_map: Any) -> int:
    rows = _rows_drawn_together(feature_map) or 1
    return rows * _columns_per_row(feature_map, feature_map.num_features)


def _blocks(
    feature_map: Any, m: int, block_size: int | None
) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """Return each independent block's first row and size, and the columns that a row makes."""
    if _is_deterministic(feature_map):
        message = f"feature_map must be random for its output to vary, got {feature_map!r}"
        raise ValueError(message)
    if block_size is None:
        block_size = _rows_drawn_together(feature_map)
        if block_size is None:
            message = (
                f"block_size must say how many rows of {feature_map!r} were drawn together: its "
                f"sampler is not one of independent blocks that are known. Where all rows were, "
                f"compare the outputs of independent draws instead (redraw)"
            )
            raise ValueError(message)
    block_size = _checks.check_positive_int("block_size", block_size)
    copies = _columns_per_row(feature_map, m)
    starts = np.arange(0, m // copies, block_size)
    return starts, np.diff(starts, append=m // copies), copies


def _read_inputs(
    query: Array, state: Any, feature_map: FeatureMap
) -> tuple[Floats, Floats, Floats]:
    """Return queries, ``kvz`` and ``log_scale``, checked against each other."""
    check_feature_map(feature_map)
    xp, (query,) = _checks.check_arrays(query=query)
    state_xp, state = _checks.check_state_record("state", state)
    m = map_columns(feature_map, "query", query.shape[-1])
    if state.kvz.shape[-2] != m:
        message = (
            f"state must have {m} columns, those of feature_map, got kvz of shape "
            f"{tuple(state.kvz.shape)}"
        )
        raise ValueError(message)
    _checks.check_leading_axes(query=tuple(query.shape[:-2]), state=tuple(state.kvz.shape[:-2]))
    return _host(query, xp), _host(state.kvz, state_xp), _host(state.log_scale, state_xp)


def _query_weights(
    x: Floats, log_scale: Floats, feature_map: FeatureMap, kvz: Floats
) -> Iterator[Floats]:
    """Yield features ``(..., n, m)``, on the state's scale, of one stretch of queries a time."""
    heads = math.prod(np.broadcast_shapes(x.shape[:-2], log_scale.shape[:-1]))
    size = max(1, MOST_TERMS // max(1, heads * kvz.shape[-1] * kvz.shape[-2]))
    for start in range(0, max(x.shape[-2], 1), size):
        log, values = feature_map.query_features(x[..., start : start + size, :])
        exponent = (0.0 if log is None else np.asarray(log)) + log_scale[..., None, :]
        row = np.max(exponent, axis=-1, keepdims=True)
        weights = np.exp(exponent - np.where(row == -np.inf, 0.0, row))
        yield weights if values is None else np.asarray(values) * weights


def _jackknife(output: Floats, without: Floats, share: Floats) -> Floats:
    """Variance of outputs ``(..., 1, e)`` from those without each block, ``(..., G, e)``."""
    pseudo = output / share - (1 / share - 1) * without
    centre = output * share.size - np.sum((1 - share) * without, axis=-2, keepdims=True)
    return np.asarray(np.mean((pseudo - centre) ** 2 * share / (1 - share), axis=-2))


def _participation(terms: Floats) -> Floats:
    """``(sum t)^2 / sum t^2`` along the last axis; NaN where the sum is 0."""
    total = terms.sum(axis=-1)
    return np.where(total == 0, np.nan, total**2 / np.sum(terms * terms, axis=-1))


def _chosen_rows(rows: Any, length: int) -> NDArray[np.intp]:
    indices = np.arange(length)
    if isinstance(rows, slice):
        return indices[rows]
    chosen = np.atleast_1d(np.asarray(rows))
    if chosen.size == 0:
        return indices[:0]
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        message = f"rows must be an int, a slice or a sequence of ints, got {rows!r}"
        raise TypeError(message)
    if chosen.min() < -length or chosen.max() >= length:
        message = f"rows must be from {-length} to {length - 1} for {length} queries, got {rows!r}"
        raise ValueError(message)
    return np.asarray(indices[chosen])


def _row_terms(
    feature_map: Any, x: Floats, y: Floats, visible: NDArray[np.bool_], chosen: NDArray[np.intp]
) -> Iterator[tuple[Floats, Floats, NDArray[np.bool_]]]:
    """Yield the logs and signs of a row's terms, ``(..., S, m)``, and the keys it sees."""
    # All queries, because features may depend on the position.
    log_query, sign_query = _log_and_sign(feature_map.query_features(x))
    log_key, sign_key = _log_and_sign(feature_map.key_features(y))
    query_spec, _ = map_specs(feature_map, np, np.float64, "cpu")
    for i in chosen:
        mask = visible[..., i, :]
        seen = np.where(mask[..., None], log_key, -np.inf)
        if isinstance(query_spec, ColumnMeans):
            seen = np.log(_softmax(np.swapaxes(seen, -1, -2)))
            seen = np.swapaxes(seen, -1, -2)
        yield log_query[..., i, None, :] + seen, sign_query[..., i, None, :] * sign_key, mask


def _map_row(log_terms: Floats, signs: Floats, mask: NDArray[np.bool_]) -> Floats:
    shift = np.max(log_terms, axis=(-2, -1), keepdims=True, initial=-np.inf)
    terms = signs * np.exp(log_terms - np.where(shift == -np.inf, 0.0, shift))
    weights = np.where(mask, np.sum(terms, axis=-1), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total != 0))


def _log_and_sign(features: Any) -> tuple[Floats, Floats]:
    log, values = features
    if values is None:
        return np.asarray(log), np.ones_like(log)
    with np.errstate(divide="ignore"):
        magnitude = np.log(np.abs(values))
    return magnitude if log is None else magnitude + log, np.sign(values)


def _student_quantile(level: float, freedom: int) -> float:
    """Return t with ``P(|T| <= t) = level``, by bisection of the law for whole degrees."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _student_law(middle, freedom) > level else (middle, high)
    return math.sqrt(freedom) * math.tan(low)


def _student_law(angle: float, freedom: int) -> float:
    """``P(|T| <= sqrt(freedom) tan(angle))``: a finite sum for whole degrees of freedom."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(freedom // 2):
        total += term
        term *= cosine**2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total

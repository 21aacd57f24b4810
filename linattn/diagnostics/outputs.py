"""After attention has run: the error of an output, its features and its denominators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _numerics
from linattn._driver import forward
from linattn._driver.problem import check_feature_map, linear_problem, num_features_of
from linattn._driver.stamps import check_map_of_state, check_sequences
from linattn.diagnostics._shared import (
    Floats,
    check_inputs,
    features_per_row,
    is_deterministic,
    make_verdict,
    rows_drawn_together,
    to_host,
    visible_keys,
    weighted_quantile,
    worst,
)
from linattn.typing import Array, FeatureMap, State
from linattn.typing.records import one_line

__all__ = ["Denominators", "OutputError", "denominators", "effective_features", "output_error"]

# Terms of a read that are held at once: 32 MiB of float64.
MAX_TERMS = 2**22


class OutputError(NamedTuple):
    """What the terms of one read say of its error.

    Attributes
    ----------
    output : ndarray, (..., L, e)
        The output itself.
    variance : ndarray, (..., L, e)
        Estimated variance over draws of the projection, to first order.
    jackknife : ndarray, (..., L, e)
        The same from leaving out one block after another, which sees a little further.
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

    Examples
    --------
    >>> import linattn
    >>> query, key, value = (x[0, 0, :64] for x in linattn.datasets.pretrained_qkv())
    >>> phi = linattn.feature_maps.PositiveFeatures(32, num_features=64, rng=0)
    >>> _, state = linattn.linear_attention(query, key, value, phi, return_state=True)
    >>> error = linattn.diagnostics.output_error(query, state, phi)
    >>> low, high = error.interval(0.95)
    >>> low.shape, error.verdict.startswith("use exact softmax attention")
    ((64, 32), True)
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

        ``corrected -+ t sqrt(jackknife)``, t the quantile of Student's t distribution with G - 1
        degrees of freedom. The level is reached where blocks are near normal; it is not where a few
        features carry the output: where the verdict is against linear attention, do not rely on it.

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
            raise ValueError(f"level must be between 0 and 1, got {level}")
        half = _student_quantile(level, self.num_blocks - 1) * np.sqrt(self.jackknife)
        return self.corrected - half, self.corrected + half

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


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

    Examples
    --------
    >>> import linattn
    >>> query, key, _ = (x[0, 0, :64] for x in linattn.datasets.pretrained_qkv())
    >>> phi = linattn.feature_maps.TrigonometricFeatures(32, num_features=64, rng=0)
    >>> report = linattn.diagnostics.denominators(query, key, phi)
    >>> bool(report.negative > 0)
    True
    """

    negative: Floats
    zero: Floats
    verdict: str

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


@_arrays.on_array_device
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
    all columns that come from a row (antithetic pairs, cosine and sine) jointly.

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
    The terms of a read say nothing of the features that were not drawn: where the distribution of
    the kernel estimate has a heavy tail (:func:`relative_variance` above 1) all of this is too
    small. A verdict for linear attention needs both.

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
        raise ValueError(
            f"output_error needs two or more independent blocks of rows, and {feature_map!r} has "
            f"one: use more columns, or sampler='gaussian', whose rows are all independent"
        )
    share = sizes / sizes.sum()
    correction = 1 / (1 - np.sum(share**2))
    batches = []
    with _numerics.ignore_fp_warnings():
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
            batches.append(
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
        for parts, axis in zip(zip(*batches, strict=True), (-2, -2, -2, -2, -1, -1), strict=True)
    )
    deviation = np.sqrt(_median(relative))
    reason = (
        f"for half of the queries the denominator has a relative standard deviation above "
        f"{worst(deviation):.2g}"
    )
    verdict = make_verdict(deviation > 0.25, feature_map, reason)
    return OutputError(output, variance, jackknife, bias, relative, effective, len(starts), verdict)


@_arrays.on_array_device
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

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> _, state = linattn.linear_attention(query, key, value, phi, return_state=True)
    >>> linattn.diagnostics.effective_features(query, state, phi).shape
    (50,)
    """
    x, kvz, log_scale = _read_inputs(query, state, feature_map)
    with _numerics.ignore_fp_warnings():
        parts = [
            _participation(features * kvz[..., None, :, -1])
            for features in _query_weights(x, log_scale, feature_map, kvz)
        ]
    return np.concatenate(parts, axis=-1)


@_arrays.on_array_device
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

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key = np.asarray([[1.0], [-1.0]]), np.asarray([[1.0], [2.0]])
    >>> phi = linattn.feature_maps.ReluFeatures()
    >>> float(linattn.diagnostics.denominators(query, key, phi).zero)
    0.5
    """
    check_feature_map(feature_map)
    x, y, visible = check_inputs(query, key, is_causal, key_mask)
    hidden = None
    if key_mask is not None:
        hidden = np.array(np.broadcast_to(visible_keys(key, key_mask, x.shape[-2]), y.shape[:-1]))
    problem = linear_problem(
        x,
        y,
        np.zeros((*y.shape[:-1], 1)),
        feature_map,
        is_causal=is_causal,
        key_mask=hidden,
        want_log=True,
    )
    # What linear attention would warn of is counted here.
    log_normalizer = forward.solve(problem.replace(signed=False), return_state=False)[2]
    assert log_normalizer is not None
    counts = np.broadcast_to(visible.any(axis=-1), log_normalizer.shape)
    seen = counts.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        negative = np.sum(counts & np.isnan(log_normalizer), axis=-1) / seen
        zero = np.sum(counts & (log_normalizer == -np.inf), axis=-1) / seen
    reason = f"the denominator is negative for {worst(100 * negative):.3g} % of the queries"
    return Denominators(negative, zero, make_verdict(negative > 0.01, feature_map, reason))


def _median(values: Floats) -> Floats:
    """Median along the last axis, ignoring NaN; NaN if all are."""
    return weighted_quantile(np.nan_to_num(values, nan=np.inf), 1.0 - np.isnan(values), 0.5)


def _blocks(
    feature_map: Any, m: int, block_size: int | None
) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """Return each independent block's first row and size, and the columns that a row makes."""
    if is_deterministic(feature_map):
        raise ValueError(f"feature_map must be random for its output to vary, got {feature_map!r}")
    if block_size is None:
        block_size = rows_drawn_together(feature_map)
        if block_size is None:
            raise ValueError(
                f"block_size must say how many rows of {feature_map!r} were drawn together: its "
                f"sampler is not one of independent blocks that are known. Where all rows were, "
                f"compare the outputs of independent draws instead (redraw)"
            )
    block_size = _checks.check_positive_int("block_size", block_size)
    copies = features_per_row(feature_map, m)
    starts = np.arange(0, m // copies, block_size)
    return starts, np.diff(starts, append=m // copies), copies


def _read_inputs(
    query: Array, state: Any, feature_map: FeatureMap
) -> tuple[Floats, Floats, Floats]:
    """Return queries, ``kvz`` and ``log_scale``, checked against each other."""
    check_feature_map(feature_map)
    xp, (query,) = _checks.check_arrays(query=query)
    state_xp, state = _checks.check_state_record("state", state)
    m = num_features_of(feature_map, "query", query.shape[-1])
    if state.kvz.shape[-2] != m:
        raise ValueError(
            f"state must have {m} columns, those of feature_map, got kvz of shape "
            f"{tuple(state.kvz.shape)}"
        )
    check_map_of_state("state", state, feature_map)
    check_sequences("state", state, None, query=query)
    _checks.check_leading_axes(query=tuple(query.shape[:-2]), state=tuple(state.kvz.shape[:-2]))
    return to_host(query, xp), to_host(state.kvz, state_xp), to_host(state.log_scale, state_xp)


def _query_weights(
    x: Floats, log_scale: Floats, feature_map: FeatureMap, kvz: Floats
) -> Iterator[Floats]:
    """Yield features ``(..., n, m)``, on the state's scale, of one block of queries a time."""
    heads = math.prod(np.broadcast_shapes(x.shape[:-2], log_scale.shape[:-1]))
    size = max(1, MAX_TERMS // max(1, heads * kvz.shape[-1] * kvz.shape[-2]))
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


def _student_quantile(level: float, freedom: int) -> float:
    """Return t with ``P(|T| <= t) = level``, for whole degrees, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if _student_probability(middle, freedom) > level else (middle, high)
        )
    return math.sqrt(freedom) * math.tan(low)


def _student_probability(angle: float, freedom: int) -> float:
    """``P(|T| <= sqrt(freedom) tan(angle))``: a finite sum for whole degrees of freedom."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(freedom // 2):
        total += term
        term *= cosine**2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total

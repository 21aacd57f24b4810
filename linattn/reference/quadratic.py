"""The oracles: quadratic attention in float64, written to be obviously right.

Everything here visits one query row at a time, selects the keys which that row may see, and adds
up their terms. No code is shared with the linear-time folds: agreement of the two is evidence.

Shape letters: ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value dim, ``m`` features; ``...`` are
leading axes (batch, heads), which broadcast.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from linattn.typing import FeatureMap

    Float64 = npt.NDArray[np.float64]
    Kernel = Callable[[Float64, Float64], npt.ArrayLike]
    Visible = npt.NDArray[np.bool_]
from linattn.typing.records import one_line

__all__ = ["KernelSums", "kernel_attention", "kernel_sums", "softmax_attention"]


class KernelSums(NamedTuple):
    """The sums that attention divides, one row per query, each known up to ``exp(log_scale)``.

    With ``w_ij`` the weight of key j for query i, and ``a_ij`` the sum of its absolute terms
    (``|w_ij|`` for a kernel, ``sum_r |phi_r(q_i) phi_r(k_j)|`` for a feature map)::

        sum_j w_ij v_j   = numerator            * exp(log_scale)      (..., L, e)
        sum_j w_ij       = denominator          * exp(log_scale)      (..., L, 1)
        sum_j a_ij |v_j| = absolute_numerator   * exp(log_scale)      (..., L, e)
        sum_j a_ij       = absolute_denominator * exp(log_scale)      (..., L, 1)

    ``log_scale`` is (..., L, 1): zero for a kernel, the largest log term of the row for a feature
    map, and -inf (with four zero sums) for a row that has no term different from zero.

    Where features change sign the sums may cancel, and no error bound relative to their result can
    hold; rounding is bounded by a few eps times the absolute sums.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> sums = linattn.reference.kernel_sums(query, key, value, linattn.feature_maps.EluFeatures())
    >>> out = linattn.linear_attention(query, key, value, linattn.feature_maps.EluFeatures())
    >>> bool(np.allclose(sums.numerator / sums.denominator, out))
    True
    """

    numerator: Float64
    denominator: Float64
    absolute_numerator: Float64
    absolute_denominator: Float64
    log_scale: Float64

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


@np.errstate(all="ignore")
def kernel_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    kernel: Kernel | FeatureMap,
    *,
    is_causal: bool = False,
    key_mask: npt.ArrayLike | None = None,
    visible: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
) -> Float64:
    """Attention with the weights of a kernel, or of a feature map, in quadratic time.

    ``out_i = (sum_j w_ij v_j) / (sum_j w_ij)`` over the keys j that query i may see.

    Parameters
    ----------
    query : array_like, (..., L, d)
        Any real dtype; computed in float64, whatever comes in.
    key : array_like, (..., S, d)
        The leading axes of query, key and value broadcast.
    value : array_like, (..., S, e)
        What the weights average.
    kernel : callable or feature map
        A callable ``(x, y) -> (..., L, S)`` returns the weights themselves; they must be finite in
        float64. A feature map is anything with ``query_features(x)`` and ``key_features(y)`` that
        return ``(log, values)``, meaning ``phi = values * exp(log)`` and ``values=None`` meaning 1;
        then ``w_ij = phi(q_i) . phi(k_j)``, computed from logarithms, so that features may span
        any range.
    is_causal : bool
        Query i sees the keys j <= i only. Needs L == S.
    key_mask : array_like of bool, optional
        True = attend: shape (S,), or ``key.ndim - 1`` axes, each 1 or equal to key's. Masked
        keys and values are left out before any arithmetic: NaN there leaves no trace.
    visible : array_like of bool, optional
        (..., L, S), True = query i sees key j: any pattern of pairs, beside what `is_causal` and
        `key_mask` leave. Default: all.
    bias : array_like, optional
        (..., L, S), or axes of 1: log weight of each pair, ``w_ij`` times ``exp(bias_ij)``; a pair
        of -inf is left out. Default: 0.

    Returns
    -------
    ndarray, (..., L, e), float64
        Exact 0 in rows whose denominator is exactly 0, for instance rows that see no key. NaN in a
        query, a visible key or a visible value propagates to the rows that use it.

    Raises
    ------
    TypeError
        An argument is not real, or `key_mask` is not boolean.
    ValueError
        Shapes do not fit, or `is_causal` with L != S.

    Notes
    -----
    Time O(L S (m + e)) per head and O(S (m + e)) of extra memory per row for a feature map; a
    callable makes its whole (..., L, S) block. The logarithms of a map's features are added in
    float64, so its weights carry a relative error of about eps times the largest of them. Weights
    that change sign may make the denominator cancel: it is not clamped. `kernel_sums` gives
    numerators and denominators.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 4))
    >>> def kernel(x, y):
    ...     return np.exp(x @ y.swapaxes(-1, -2) / 2)
    >>> output = linattn.reference.kernel_attention(query, key, value, kernel)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    masks = {"is_causal": is_causal, "key_mask": key_mask, "visible": visible, "bias": bias}
    sums = kernel_sums(query, key, value, kernel, **masks)  # type: ignore[arg-type]
    # A row of dead features is 0, but NaN in a value that it sees stays NaN.
    empty = (sums.denominator == 0) & ~np.isnan(sums.numerator)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(empty, 0.0, sums.numerator / sums.denominator)


@np.errstate(all="ignore")
def kernel_sums(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    kernel: Kernel | FeatureMap,
    *,
    is_causal: bool = False,
    key_mask: npt.ArrayLike | None = None,
    visible: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
) -> KernelSums:
    """Numerator and denominator of `kernel_attention`, and the sums of their absolute terms.

    Arguments, errors and cost as for `kernel_attention`.

    Returns
    -------
    KernelSums
        Float64 arrays, each row on a scale of its own.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 4))
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> sums = linattn.reference.kernel_sums(query, key, value, phi)
    >>> output = linattn.linear_attention(query, key, value, phi)
    >>> bool(np.allclose(sums.numerator / sums.denominator, output))
    True
    """
    q, k, v, mask = _prepare(query, key, value, is_causal, key_mask)
    parts = _parts(q, k, kernel)
    pairs, extra = _pairs(visible, bias, q, k)
    batch = np.broadcast_shapes(*(a.shape[:-2] for a in (q, k, v, pairs, *parts)))
    v, extra, *parts = (np.broadcast_to(a, batch + a.shape[-2:]) for a in [v, extra, *parts])
    shape = (*batch, q.shape[-2])
    numerator, absolute_numerator = (np.zeros((*shape, v.shape[-1])) for _ in range(2))
    denominator, absolute_denominator, log_scale = (np.zeros((*shape, 1)) for _ in range(3))
    with np.errstate(invalid="ignore", over="ignore"):
        for row, seen in _rows(shape, mask, pairs, is_causal):
            *head, i = row
            terms, log_scale[row] = _row_terms([a[*head] for a in parts], i, seen, extra[row])
            weight, absolute = terms.sum(axis=-1), np.abs(terms).sum(axis=-1)
            values = v[*head][seen]
            numerator[row], denominator[row] = weight @ values, weight.sum()
            absolute_numerator[row] = absolute @ np.abs(values)
            absolute_denominator[row] = absolute.sum()
    return KernelSums(numerator, denominator, absolute_numerator, absolute_denominator, log_scale)


@np.errstate(all="ignore")
def softmax_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    key_mask: npt.ArrayLike | None = None,
    visible: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
) -> Float64:
    """Exact softmax attention in quadratic time.

    ``out_i = sum_j p_ij v_j``, ``p_ij = softmax_j(scale * q_i . k_j)`` over the keys j that query i
    may see.

    Parameters
    ----------
    query, key, value, is_causal, key_mask, visible, bias
        As in `kernel_attention`.
    scale : float, optional
        Factor of the logits; None means ``1 / sqrt(d)``.

    Returns
    -------
    ndarray, (..., L, e), float64
        Exact 0 in rows that see no key.

    Raises
    ------
    TypeError, ValueError
        As in `kernel_attention`.

    Notes
    -----
    Time O(L S (d + e)) per head, O(S (d + e)) of extra memory.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> output = linattn.reference.softmax_attention(query, key, value)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    q, k, v, mask = _prepare(query, key, value, is_causal, key_mask)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    pairs, extra = _pairs(visible, bias, q, k)
    batch = np.broadcast_shapes(*(a.shape[:-2] for a in (q, k, v, pairs)))
    q, k, v, extra = (np.broadcast_to(a, batch + a.shape[-2:]) for a in (q, k, v, extra))
    out = np.zeros((*batch, q.shape[-2], v.shape[-1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for row, seen in _rows(out.shape[:-1], mask, pairs, is_causal):
            if seen.any():
                logits = scale * (k[row[:-1]][seen] @ q[row]) + extra[row][seen]
                weight = np.exp(logits - logits.max())
                out[row] = weight @ v[row[:-1]][seen] / weight.sum()
    return out


def _prepare(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    is_causal: bool,
    key_mask: npt.ArrayLike | None,
) -> tuple[Float64, Float64, Float64, Visible]:
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    q, k, v = _float64("query", query), _float64("key", key), _float64("value", value)
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(
            f"query and key: want the same last axis >= 1, got {q.shape} and {k.shape}"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"key and value: want the same length (axis -2), got {k.shape} and {v.shape}"
        )
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"is_causal: want query and key of one length, got {q.shape} and {k.shape}"
        )
    mask = _mask(key_mask, k.shape)
    return q, np.where(mask[..., None], k, 0.0), v, mask


def _float64(name: str, array: npt.ArrayLike) -> Float64:
    raw = np.asarray(array)
    if not np.can_cast(raw.dtype, np.float64, "same_kind"):
        raise TypeError(f"{name}: want real numbers, got dtype {raw.dtype}")
    if raw.ndim < 2:
        raise ValueError(f"{name}: want shape (..., length, dim), got {raw.shape}")
    return raw.astype(np.float64)


def _mask(key_mask: npt.ArrayLike | None, key_shape: tuple[int, ...]) -> Visible:
    if key_mask is None:
        return np.ones(key_shape[-2], dtype=bool)
    mask = np.asarray(key_mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"key_mask: want dtype bool (True = attend), got {mask.dtype}")
    want = key_shape[:-1]
    per_batch = mask.ndim == len(want) and all(
        m in (1, n) for m, n in zip(mask.shape, want, strict=True)
    )
    if mask.shape != want[-1:] and not per_batch:
        raise ValueError(
            f"key_mask: want shape {want[-1:]}, or {len(want)} axes each 1 or equal to {want}, "
            f"got {mask.shape}"
        )
    return np.broadcast_to(mask, (*mask.shape[:-1], want[-1]))


def _pairs(
    visible: npt.ArrayLike | None, bias: npt.ArrayLike | None, q: Float64, k: Float64
) -> tuple[Visible, Float64]:
    """Check which keys each query may see, and how much they count: both ``(..., L, S)``."""
    wanted = q.shape[-2], k.shape[-2]
    extra = _float64("bias", np.zeros(wanted) if bias is None else bias)
    if any(n not in (1, m) for n, m in zip(extra.shape[-2:], wanted, strict=True)):
        raise ValueError(f"bias: want last axes {wanted}, or 1, got shape {extra.shape}")
    extra = np.broadcast_to(extra, extra.shape[:-2] + wanted)
    pairs = _visible(visible, wanted) & (extra != -np.inf)
    return pairs, np.broadcast_to(extra, pairs.shape)


def _visible(visible: npt.ArrayLike | None, wanted: tuple[int, int]) -> Visible:
    if visible is None:
        return np.ones((1, 1), dtype=bool)
    pairs = np.asarray(visible)
    if pairs.dtype != np.bool_:
        raise TypeError(f"visible: want dtype bool (True = attend), got {pairs.dtype}")
    if pairs.shape[-2:] != wanted:
        raise ValueError(f"visible: want last axes {wanted}, got shape {pairs.shape}")
    return pairs


def _rows(
    shape: tuple[int, ...], mask: Visible, pairs: Visible, is_causal: bool
) -> Iterator[tuple[tuple[int, ...], Visible]]:
    """Yield each row's index in (..., L), and which of the S keys it may see."""
    mask = np.broadcast_to(mask, (*shape[:-1], mask.shape[-1]))
    pairs = np.broadcast_to(pairs, (*shape, mask.shape[-1]))
    position = np.arange(mask.shape[-1])
    for row in np.ndindex(*shape):
        seen = mask[row[:-1]] & pairs[row]
        yield row, seen & (position <= row[-1]) if is_causal else seen


def _parts(query: Float64, key: Float64, kernel: Any) -> list[Float64]:
    """Return ``[weights]`` of a callable, ``[log, sign, log, sign]`` of a map's two sides."""
    if hasattr(kernel, "query_features"):
        return [
            *_log_and_sign(kernel.query_features(query)),
            *_log_and_sign(kernel.key_features(key)),
        ]
    return [np.asarray(kernel(query, key), dtype=np.float64)]


def _row_terms(
    parts: list[Float64], i: int, seen: Visible, extra: Float64
) -> tuple[Float64, float]:
    """Terms whose sums over axis -1 are row i's weights over exp(shift); and that shift."""
    if len(parts) == 1:
        return (parts[0][i, seen] * np.exp(extra[seen]))[:, None], 0.0
    log_query, sign_query, log_key, sign_key = parts
    exponent = log_query[i] + log_key[seen] + extra[seen][:, None]
    shift = exponent.max(initial=-np.inf)
    if shift == -np.inf:
        return np.zeros_like(exponent), shift
    return sign_query[i] * sign_key[seen] * np.exp(exponent - shift), shift


def _log_and_sign(features: Any) -> tuple[Float64, Float64]:
    """``phi = sign * exp(log)`` of a map's features, each (..., length, m)."""
    log, values = features
    if values is None:
        log = np.asarray(log, dtype=np.float64)
        return log, np.ones_like(log)
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(divide="ignore"):
        magnitude = np.log(np.abs(values))
    return magnitude if log is None else magnitude + log, np.sign(values)

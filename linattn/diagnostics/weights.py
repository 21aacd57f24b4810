"""Rows of the attention matrix, for inspection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn._driver.problem import check_feature_map, map_specs, num_features_of
from linattn.diagnostics._shared import Floats, check_inputs, softmax
from linattn.typing import Array, ColumnNormalized, FeatureMap, SeparateDenominator

__all__ = ["attention_weights"]


@_arrays.on_array_device
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
    r"""Rows of the attention matrix, which attention itself never makes; for inspection.

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

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key = np.random.default_rng(0).standard_normal((2, 50, 8))
    >>> weights = linattn.diagnostics.attention_weights(query, key, rows=[0, 10])
    >>> weights.shape, bool(np.allclose(np.sum(weights, axis=-1), 1))
    ((2, 50), True)
    """
    x, y, visible = check_inputs(query, key, is_causal, key_mask)
    chosen = _chosen_rows(rows, x.shape[-2])
    if feature_map is None:
        s = x.shape[-1] ** -0.5 if scale is None else _checks.check_finite_number("scale", scale)
        logits = s * x[..., chosen, :] @ np.swapaxes(y, -1, -2)
        return softmax(np.where(visible[..., chosen, :], logits, -np.inf))
    if scale is not None:
        raise ValueError(f"scale must be None with a feature map, which has its own, got {scale!r}")
    check_feature_map(feature_map)
    num_features_of(feature_map, "query and key", x.shape[-1])
    query_spec, _ = map_specs(feature_map, np, np.float64, "cpu")
    separate = isinstance(query_spec, SeparateDenominator)
    result = [
        _map_row(log_terms, signs, mask, separate)
        for log_terms, signs, mask in _row_terms(feature_map, x, y, visible, chosen)
    ]
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return np.stack(result, axis=-2) if result else np.zeros((*lead, 0, y.shape[-2]))


def _chosen_rows(rows: Any, length: int) -> NDArray[np.intp]:
    indices = np.arange(length)
    if isinstance(rows, slice):
        return indices[rows]
    chosen = np.atleast_1d(np.asarray(rows))
    if chosen.size == 0:
        return indices[:0]
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        raise TypeError(f"rows must be an int, a slice or a sequence of ints, got {rows!r}")
    if chosen.min() < -length or chosen.max() >= length:
        raise ValueError(
            f"rows must be from {-length} to {length - 1} for {length} queries, got {rows!r}"
        )
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
        if isinstance(query_spec, ColumnNormalized):
            seen = np.log(softmax(np.swapaxes(seen, -1, -2)))
            seen = np.swapaxes(seen, -1, -2)
        yield log_query[..., i, None, :] + seen, sign_query[..., i, None, :] * sign_key, mask


def _map_row(log_terms: Floats, signs: Floats, mask: NDArray[np.bool_], separate: bool) -> Floats:
    """Weights of a row; ``separate``: over sums of the second half of the terms."""
    shift = np.max(log_terms, axis=(-2, -1), keepdims=True, initial=-np.inf)
    terms = signs * np.exp(log_terms - np.where(shift == -np.inf, 0.0, shift))
    terms = np.where(mask[..., None], terms, 0.0)
    above, below = np.split(terms, 2, axis=-1) if separate else (terms, terms)
    weights = above.sum(axis=-1)
    total = below.sum(axis=(-2, -1))[..., None]
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total != 0))


def _log_and_sign(features: Any) -> tuple[Floats, Floats]:
    log, values = features
    if values is None:
        return np.asarray(log), np.ones_like(log)
    with np.errstate(divide="ignore"):
        magnitude = np.log(np.abs(values))
    return magnitude if log is None else magnitude + log, np.sign(values)

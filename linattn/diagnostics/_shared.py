"""What more than one diagnostic uses: inputs on the host, weights, verdicts, drawn rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.feature_maps import BaseFeatureMap
from linattn.sampling import Sampler
from linattn.typing import Array

Floats = NDArray[np.float64]

# Samplers of independent blocks of d rows; "gaussian" has blocks of one, others a single block.
BLOCK_SAMPLERS = ("fixed_norm", "orthogonal", "simplex")


def to_host(array: Array, xp: Any) -> Floats:
    # NumPy has no bfloat16.
    if _arrays.dtype_bits(array.dtype) == 16:
        array = xp.astype(array, xp.float32)
    return _arrays.to_numpy(array).astype(np.float64)


def visible_keys(key: Array, key_mask: Array | None, query_len: int) -> NDArray[np.bool_]:
    """Return the mask of the keys on the host, ``(..., S)``."""
    xp, (key,) = _checks.check_arrays(key=key)
    if key_mask is None:
        return np.ones(key.shape[-2], dtype=bool)
    mask = _checks.check_key_mask(key_mask, key, xp, query_len=query_len)
    return np.asarray(_arrays.to_numpy(mask)[..., 0])


def check_tokens(
    query: Array, key: Array, is_causal: bool, key_mask: Array | None
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return queries, keys (0 where masked) and the mask, ``(..., S)``, on the host."""
    is_causal = _checks.check_flag("is_causal", is_causal)
    xp, (query, key) = _checks.check_arrays(query=query, key=key)
    L, S = query.shape[-2], key.shape[-2]
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have one last axis (dim), got shapes {tuple(query.shape)} and "
            f"{tuple(key.shape)}"
        )
    if is_causal and L != S:
        raise ValueError(f"is_causal needs query and key of equal length, got {L} and {S}")
    _checks.check_leading_axes(query=tuple(query.shape[:-2]), key=tuple(key.shape[:-2]))
    mask = visible_keys(key, key_mask, L)
    x, y = to_host(query, xp), np.where(mask[..., None], to_host(key, xp), 0.0)
    for name, array in (("query", x), ("key", y)):
        if not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite where it is not masked, got NaN or inf")
    return x, y, mask


def check_inputs(
    query: Array, key: Array, is_causal: bool, key_mask: Array | None
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return queries, keys (0 where masked) and which key each query sees, ``(..., L, S)``."""
    x, y, mask = check_tokens(query, key, is_causal, key_mask)
    L, S = x.shape[-2], y.shape[-2]
    visible = np.broadcast_to(mask[..., None, :], (*mask.shape[:-1], L, S))
    return x, y, visible & np.tri(L, S, dtype=bool) if is_causal else visible


def evenly_spaced(length: int, most: int) -> NDArray[np.intp]:
    return np.linspace(0, length - 1, min(length, most)).round().astype(np.intp)


def softmax(logits: Floats) -> Floats:
    """Softmax along the last axis; 0 where every logit is -inf."""
    shift = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(shift == -np.inf, 0.0, shift))
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0))


def weighted_quantile(values: Floats, weights: Floats, level: float) -> Floats:
    """Smallest value with a share of the weights, at least ``level``, at or below it."""
    order = np.argsort(values, axis=-1)
    values = np.take_along_axis(values, order, axis=-1)
    total = np.cumsum(np.take_along_axis(weights, order, axis=-1), axis=-1)
    # Rounding of the sums must not push the last share beyond every value.
    reached = total >= level * (1 - 1e-12) * total[..., -1:]
    found = np.take_along_axis(values, np.argmax(reached, axis=-1)[..., None], axis=-1)[..., 0]
    return np.where(total[..., -1] > 0, found, np.nan)


def weighted_percentiles(values: Floats, weights: Floats, percentiles: Sequence[int]) -> Floats:
    """Weighted quantiles of all pairs of each head, along a new last axis."""
    values, weights = (a.reshape(*a.shape[:-2], -1) for a in (values, weights))
    levels = [weighted_quantile(values, weights, percent / 100) for percent in percentiles]
    return np.stack(levels, axis=-1)


def make_verdict(too_many: NDArray[np.bool_], feature_map: Any, reason: str) -> str:
    kernel = "softmax" if getattr(feature_map, "softmax_kernel", False) else "kernel"
    number, total = int(np.sum(too_many)), np.size(too_many)
    if number == 0:
        return f"linear attention: {reason}"
    where = "" if number == total else f" in {number} of {total} heads"
    return f"use exact {kernel} attention{where}: {reason}"


def worst(values: Floats) -> float:
    """Largest value of any head that has one."""
    return float(np.max(values, initial=0.0, where=~np.isnan(values)))


def _innermost(feature_map: Any) -> Any:
    """Return the map that was drawn, inside maps that only change coordinates."""
    while hasattr(feature_map, "feature_map"):
        feature_map = feature_map.feature_map
    return feature_map


def is_deterministic(feature_map: Any) -> bool:
    drawn = _innermost(feature_map)
    return isinstance(drawn, BaseFeatureMap) and getattr(drawn, "projection", None) is None


def rows_drawn_together(feature_map: Any) -> int | None:
    """Count the rows of one independent block of a map's sampler; None if that is not known."""
    drawn = _innermost(feature_map)
    sampler: Any = getattr(drawn, "sampler", None)
    name = sampler.name if isinstance(sampler, Sampler) else sampler
    if name == "gaussian":
        return 1
    return int(drawn.projection.shape[-1]) if name in BLOCK_SAMPLERS else None


def features_per_row(feature_map: Any, m: int) -> int:
    projection = getattr(_innermost(feature_map), "projection", None)
    return 1 if projection is None else m // int(projection.shape[-2])


def mean_distance(exact: Floats, weights: Floats | None = None) -> Floats:
    """Mean squared distance of rows ``(..., h, e)`` to their mean row.

    The squared error of an output that does not depend on its query: what one has to expect at
    worst of rows that nobody has seen.
    """
    if not exact.shape[-2]:
        return np.zeros(exact.shape[:-2])
    share = np.ones(exact.shape[-2]) if weights is None else weights
    share = share / share.sum()
    apart = exact - (share @ exact)[..., None, :]
    return np.asarray(np.vecdot(apart, apart) @ share)


def error_and_bound(
    squares: Floats, units: Floats, probability: float | None, unseen: Any = 0.0
) -> tuple[Floats, Floats]:
    """Relative error on rows, from the squares of their errors and of their exact outputs.

    And its bound over all rows that could have been drawn; without a probability these are all.
    Rows of which none was drawn have squares of at most ``unseen``, or of the largest seen.
    """
    h = max(squares.shape[-1], 1)
    square, unit = np.sum(squares, axis=-1), np.sum(units, axis=-1)
    ratio = np.where(square == 0, 0.0, square / unit)
    relative = bound = np.sqrt(ratio)
    if probability is not None:
        residuals = squares - ratio[..., None] * units
        square = square + h * _margin(residuals, -log(1 - probability), unseen)
        bound = np.where(square == 0, 0.0, np.sqrt(square / unit))
    return relative, bound


def _margin(residuals: Floats, level: float, unseen: Any) -> Floats:
    """Bound what a mean square lacks: Bernstein's inequality with the variance that the rows show.

    The largest residual is the largest of the drawn rows, or of rows they may miss: with a
    probability of ``1 - exp(-level)`` no set of more than ``level / h`` of all draws is missed.
    """
    h = residuals.shape[-1]
    if h < 2:
        return np.full(residuals.shape[:-1], np.inf)
    variance = np.mean(residuals**2, axis=-1)
    largest = np.maximum(np.max(residuals, axis=-1), unseen)
    return np.asarray(np.sqrt(2 * level * variance / h) + level * largest / h)

"""Softmax attention of a block in place, and that of a window."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Declined, Exact, Partial, Tokens
from linattn_numpy.limits import (
    EMPTY,
    MAX_EXPONENT,
    MIN_EXACT_DENOMINATOR,
    MIN_READ_DENOMINATOR,
    all_finite,
    exp,
    row_max,
)
from linattn_numpy.products import product, transposed

__all__ = [
    "band_block",
    "exact_block",
    "exact_more",
    "window_block",
]

Floats = NDArray[Any]

NOT_FINITE = Declined("sums are not finite")


def _logits(spec: Exact, query: Tokens, key: Tokens) -> Floats:
    """Logits in a buffer, -inf for masked keys."""
    x = query.x if spec.scale == 1.0 else query.x * spec.scale
    logits = product(x, transposed(key.x), "logits")
    if key.log_weight is not None:
        masked = np.broadcast_to(transposed(key.log_weight) == -np.inf, logits.shape)
        np.copyto(logits, -np.inf, where=masked)
    return logits


def exact_more(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Floats, part: Partial
) -> Partial | Declined:
    """Add a block of keys to a partial of the same queries, on its scale."""
    if 0 in query.x.shape or 0 in values_and_one.shape:
        return EMPTY
    if part.log.shape[:-1] != query.x.shape[:-1]:
        return Declined("queries have other leading axes than what they have read")
    # The scale as one more coordinate: a pass over the logits less.
    x = np.concatenate([query.x * spec.scale, -part.log], axis=-1)
    y = np.concatenate([key.x, np.ones_like(key.x[..., :1])], axis=-1)
    logits = _logits(Exact(1.0), query._replace(x=x), key._replace(x=y))
    more = product(exp(logits), values_and_one, "more")
    if more.shape != part.num_den.shape:
        return Declined("keys have other leading axes than those before")
    num_den = more + part.num_den
    # What is inf or NaN is so by itself, or because the scale is too low for this block.
    return Partial(num_den, part.log) if all_finite(num_den) else NOT_FINITE


def exact_block(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    visible: NDArray[np.bool_] | None = None,
) -> Partial | Declined:
    """Softmax attention of a block of queries to a block of keys, or to the visible ones."""
    if 0 in query.x.shape or 0 in values_and_one.shape:
        return EMPTY
    logits = _logits(spec, query, key)
    if _are_moderate(logits):
        part = _unshifted(logits, values_and_one, visible)
        if part is not None:
            return part
        logits = _logits(spec, query, key)
    if visible is not None:
        np.copyto(logits, -np.inf, where=~visible)
    row = row_max(logits)
    if not np.isfinite(row).all():
        return Declined("a query sees no key, or its logits are not finite")
    logits -= row
    return Partial(np.matmul(exp(logits), values_and_one), row)


def _are_moderate(logits: Floats) -> bool:
    """Whether none is too large to be exponentiated as it is: the largest of all is soon found."""
    return bool(logits.max() <= MAX_EXPONENT[logits.itemsize])


def _unshifted(
    logits: Floats, values_and_one: Floats, visible: NDArray[np.bool_] | None
) -> Partial | None:
    """Read with exponentials of logits as they are; None where a row's are small, or overflow."""
    weights = exp(logits)
    if visible is not None:
        for keys in _hidden_ends(visible):
            np.copyto(weights[..., keys], 0, where=~visible[:, keys])
    num_den = np.matmul(weights, values_and_one)
    if not (num_den[..., -1].min() >= MIN_EXACT_DENOMINATOR and all_finite(num_den)):
        return None
    return Partial(num_den, np.zeros((*num_den.shape[:-1], 1), num_den.dtype))


def _hidden_ends(visible: NDArray[np.bool_]) -> list[slice]:
    """Keys at either end with all that is hidden: a band has none between."""
    seen_by_all, n = np.asarray(visible.all(axis=0)), visible.shape[1]
    first = int(seen_by_all.argmax())
    last = n - int(seen_by_all[::-1].argmax())
    if not seen_by_all[first:last].all():
        return [slice(0, n)]
    return [slice(0, first), slice(last, n)]


def window_block(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Floats, is_causal: bool, lazy: bool
) -> Partial | Declined:
    """Exact part of a window: keys of neighbouring blocks are views that overlap, not copies."""
    w = query.x.shape[-2]
    visible = np.tri(w, 2 * w, w, dtype=bool) if is_causal else None
    part = band_block(spec, query, key, values_and_one, visible)
    if is_causal and isinstance(part, Partial) and not all_finite(part.num_den):
        return NOT_FINITE
    return part


def band_block(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    visible: NDArray[np.bool_] | None,
) -> Partial | Declined:
    """Softmax attention of blocks to those beside them, which are views that overlap."""
    if 0 in query.x.shape or 0 in values_and_one.shape:
        return EMPTY
    g = query.x.shape[-3]
    width = key.x.shape[-3] - g + 1
    keys = Tokens(_neighbors(key.x, g, width), _neighbors(key.log_weight, g, width), key.start)
    values_and_one = _neighbors(values_and_one, g, width)
    if visible is None:
        return exact_block(spec, query, keys, values_and_one)
    logits = _logits(spec, query, keys)
    if _are_moderate(logits):
        part = _unshifted(logits, values_and_one, visible)
        if part is not None:
            return part
        logits = _logits(spec, query, keys)
    row = row_max(logits)
    if not np.isfinite(row).all():
        return Declined("a query sees no key, or its logits are not finite")
    logits -= row
    # The scale is that of hidden keys too: -inf in their place would slow the exponentials down.
    weights = exp(logits)
    np.copyto(weights, 0, where=~visible)
    num_den = np.matmul(weights, values_and_one)
    sees = np.asarray(visible.any(axis=-1))
    if not ((num_den[..., -1] >= MIN_READ_DENOMINATOR[num_den.itemsize]) | ~sees).all():
        return Declined("small weights beside those of hidden keys, or none")
    return Partial(num_den, row if sees.all() else np.where(sees[:, None], row, -np.inf))


def _neighbors(x: Any, g: int, width: int) -> Any:
    """View of each block and those behind it, ``(..., g, width w, .)``; None stays None."""
    if x is None:
        return None
    *lead, _, w, d = x.shape
    if x.strides[-3] != w * x.strides[-2]:
        x = np.ascontiguousarray(x)
    return np.lib.stride_tricks.as_strided(x, (*lead, g, width * w, d), x.strides, writeable=False)

"""Softmax attention of a block in place, and that of a window."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Declined, Exact, Partial, Tokens
from linattn_numpy import tuning
from linattn_numpy.buffers import buffer
from linattn_numpy.limits import (
    EMPTY,
    MAX_EXPONENT,
    MIN_EXACT_DENOMINATOR,
    MIN_READ_DENOMINATOR,
    all_finite,
    exp,
    feature_max,
    row_max,
)
from linattn_numpy.products import broadcast_lead, product, small_parts, transposed

__all__ = ["band_block", "exact_block", "exact_more", "window_block"]

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
        weights = exp(logits)
        if visible is not None:
            np.copyto(weights, 0, where=~visible)
        part = _unshifted(np.matmul(weights, values_and_one))
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


def _unshifted(num_den: Floats) -> Partial | None:
    """Take sums of unshifted exponentials; None where a row's are small, or overflow."""
    if not (num_den[..., -1].min() >= MIN_EXACT_DENOMINATOR and all_finite(num_den)):
        return None
    return Partial(num_den, np.zeros((*num_den.shape[:-1], 1), num_den.dtype))


def window_block(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Floats, is_causal: bool, lazy: bool
) -> Partial | Declined:
    """Exact part of a window: a causal block sees no key behind its own."""
    w = query.x.shape[-2]
    part = band_block(spec, query, key, values_and_one, (-w, w) if is_causal else None)
    if is_causal and isinstance(part, Partial) and not all_finite(part.num_den):
        return NOT_FINITE
    return part


def band_block(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Floats, band: tuple[int, int] | None
) -> Partial | Declined:
    """Softmax attention of blocks to those beside them, which are views that overlap.

    A band that lies within the keys of its blocks is cut into short ones, of which each has fewer
    keys that only some rows see.
    """
    if 0 in query.x.shape or 0 in values_and_one.shape:
        return EMPTY
    *lead, g, n, d = query.x.shape
    s = (key.x.shape[-3] - g + 1) * key.x.shape[-2]
    views = _Views(0, n, s)
    if band is not None and band[0] >= 0 and band[1] + n <= s and n % tuning.BAND_ROWS == 0:
        first, rows, band = band[0], tuning.BAND_ROWS, (0, band[1] - band[0])
        views = _Views(first, rows, band[1] + rows)
    if key.log_weight is not None:
        # Masked keys are zeros: what has no values and ones may have weights.
        values_and_one = np.where(key.log_weight == -np.inf, 0, values_and_one)
    count = g * n // views.step
    part = _read_band(
        spec,
        query.x.reshape(*lead, count, views.step, d),
        views.of(key.x, count),
        views.of(values_and_one, count),
        band,
    )
    if isinstance(part, Declined):
        return part
    lead = list(part.num_den.shape[:-3])
    return Partial(part.num_den.reshape(*lead, g, n, -1), part.log.reshape(*lead, g, n, 1))


class _Views(NamedTuple):
    """Keys that short blocks see: as many from the first on, and from ``step`` further each."""

    first: int
    step: int
    size: int

    def of(self, x: Floats, count: int) -> Floats:
        """View of those of each of so many blocks, ``(..., count, size, .)``."""
        *lead, blocks, n, d = x.shape
        # BLAS takes rows only whose numbers lie side by side.
        x = x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)
        rows = x.reshape(*lead, blocks * n, d)[..., self.first :, :]
        shape = (*lead, count, self.size, d)
        *strides, row, item = rows.strides
        return np.lib.stride_tricks.as_strided(
            rows, shape, (*strides, self.step * row, row, item), writeable=False
        )


def _read_band(
    spec: Exact,
    queries: Floats,
    keys: Floats,
    values_and_one: Floats,
    band: tuple[int, int] | None,
) -> Partial | Declined:
    """Attention of each block, ``(..., n, d)``, to its keys, ``(..., s, d)``, within a band."""
    logits = _logits_by_key(spec, queries, keys)
    if _are_moderate(logits):
        part = _unshifted(_band_sums(exp(logits), values_and_one, band))
        if part is not None:
            return part
        logits = _logits_by_key(spec, queries, keys)
    # The scale is that of hidden keys too: -inf in their place would slow the exponentials down.
    log = feature_max(logits)
    if not np.isfinite(log).all():
        return Declined("logits are not finite")
    logits -= log[..., None, :]
    num_den = _band_sums(exp(logits), values_and_one, band)
    sees = np.ones(log.shape[-1], bool)
    if band is not None:
        first = np.arange(log.shape[-1]) + band[0]
        sees = (first < keys.shape[-2]) & (first + (band[1] - band[0]) >= 0)
    if not ((num_den[..., -1] >= MIN_READ_DENOMINATOR[num_den.itemsize]) | ~sees).all():
        return Declined("small weights beside those of hidden keys, or none")
    return Partial(num_den, np.where(sees, log, -np.inf)[..., None])


def _logits_by_key(spec: Exact, queries: Floats, keys: Floats) -> Floats:
    """Logits in a buffer, ``(..., s, n)``: small products are faster with what is short second."""
    *lead, n, d = queries.shape
    x = buffer("queries", (*lead, d, n), queries.dtype)
    np.multiply(transposed(queries), spec.scale, out=x)
    s = keys.shape[-2]
    shape = (*broadcast_lead(queries.shape[:-2], keys.shape[:-2]), s, n)
    logits = buffer("logits", shape, keys.dtype)
    for rows in small_parts(s, n * d):
        np.matmul(keys[..., rows, :], x, out=logits[..., rows, :])
    return logits


def _band_sums(weights: Floats, values_and_one: Floats, band: tuple[int, int] | None) -> Floats:
    """Weighted sums of the values that each query of a block sees; weights are ``(..., s, n)``."""
    s, n = weights.shape[-2:]
    if band is not None:
        low, high = band
        # All rows see what lies between.
        first = min(max(low + n - 1, 0), s)
        last = min(max(high + 1, first), s)
        for start, stop in ((0, first), (last, s)):
            offset = np.arange(start, stop)[:, None] - np.arange(n)
            hidden = (offset < low) | (offset > high)
            np.copyto(weights[..., start:stop, :], 0, where=hidden)
    num_den: Any = None
    for rows in small_parts(s, n * values_and_one.shape[-1]):
        more = np.matmul(transposed(weights[..., rows, :]), values_and_one[..., rows, :])
        num_den = more if num_den is None else np.add(num_den, more, out=num_den)
    return np.asarray(num_den)

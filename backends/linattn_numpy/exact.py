"""Softmax attention in place: of a block, and of a window of short blocks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Declined, Exact, Partial, Tokens
from linattn_numpy import limits, tuning
from linattn_numpy.buffers import Bools, Floats, buffer
from linattn_numpy.products import broadcast_lead, product, small_parts, transposed

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
    """Add a block of keys to a partial of the same queries, on its scale or a higher one."""
    if part.log.shape[:-1] != query.x.shape[:-1]:
        return Declined("queries and their sums so far differ in leading axes")
    # The scale as one more coordinate: a pass over the logits less.
    x = np.concatenate([query.x * spec.scale, -part.log], axis=-1)
    y = np.concatenate([key.x, np.ones_like(key.x[..., :1])], axis=-1)
    logits = _logits(Exact(1.0), query._replace(x=x), key._replace(x=y))
    if not _are_moderate(logits):
        top = np.maximum(limits.row_max(logits), 0)
        logits -= top
        part = Partial(part.num_den * limits.weights(-top), part.log + top)
    more = product(limits.weights(logits), values_and_one, "more")
    if more.shape != part.num_den.shape:
        return Declined("keys have other leading axes than the keys before them")
    num_den = more + part.num_den
    # A sum is inf or NaN because of its values, or because the scale is too low for this block.
    return Partial(num_den, part.log) if limits.all_finite(num_den) else NOT_FINITE


def exact_block(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    visible: Bools | None = None,
) -> Partial | Declined:
    """Softmax attention of a block of queries to a block of keys, or to the visible ones."""
    logits = _logits(spec, query, key)
    if _are_moderate(logits):
        weights = limits.weights(logits)
        if visible is not None:
            np.copyto(weights, 0, where=~visible)
        part = _unshifted(np.matmul(weights, values_and_one))
        if part is not None:
            return part
        logits = _logits(spec, query, key)
    if visible is not None:
        np.copyto(logits, -np.inf, where=~visible)
    row = limits.row_max(logits)
    if not np.isfinite(row).all():
        return Declined("a query sees no key, or its logits are not finite")
    logits -= row
    return Partial(np.matmul(limits.weights(logits), values_and_one), row)


def _are_moderate(logits: Floats) -> bool:
    """Whether every eighth row can be exponentiated unshifted; the sums then check all rows."""
    return bool(logits[..., ::8, :].max() <= limits.MAX_EXPONENT[logits.itemsize])


def _unshifted(num_den: Floats) -> Partial | None:
    """Return sums of unshifted exponentials as a partial; None if a row's are small or large."""
    least, most = limits.MIN_EXACT_DENOMINATOR, limits.MAX_EXACT_DENOMINATOR[num_den.itemsize]
    sums = num_den[..., -1]
    if not (least <= sums.min() and sums.max() <= most and limits.all_finite(num_den)):
        return None
    return Partial(num_den, np.zeros((*num_den.shape[:-1], 1), num_den.dtype))


def band_block(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Floats, band: tuple[int, int]
) -> Partial | Declined:
    """Softmax attention of a block to the keys of a band, by short blocks of few rows.

    A short block has few keys that only some of its rows see. If the keys are fewer than a short
    block's window, all rows are one block.
    """
    (low, high), n, s = band, query.x.shape[-2], key.x.shape[-2]
    rows = tuning.BAND_ROW_BYTES // query.x.itemsize
    if s <= high - low + rows:
        return _read_windows(spec, query.x, key, values_and_one, _Windows(0, n, s, 1), band)
    windows = _Windows(low, rows, high - low + rows, -(-n // rows))
    return _read_windows(spec, query.x, key, values_and_one, windows, (0, high - low))


class _Windows(NamedTuple):
    """Keys that each short block sees: ``size`` keys from ``first + i * step`` on, block i."""

    first: int
    step: int
    size: int
    number: int

    def of(self, x: Floats, name: str) -> Floats:
        """Return the rows of all blocks, ``(..., blocks, size, .)``, as views that overlap.

        Rows before the first key and after the last are zeros.
        """
        length = (self.number - 1) * self.step + self.size
        rows = x[..., max(self.first, 0) : max(self.first + length, 0), :]
        # BLAS takes only rows with adjacent numbers.
        if rows.shape[-2] < length or rows.strides[-1] != rows.itemsize:
            front = min(max(-self.first, 0), length)
            there, rows = rows, buffer(name, (*x.shape[:-2], length, x.shape[-1]), x.dtype)
            rows.fill(0)
            rows[..., front : front + there.shape[-2], :] = there
        *lead, row, item = rows.strides
        shape = (*rows.shape[:-2], self.number, self.size, rows.shape[-1])
        strides = (*lead, self.step * row, row, item)
        return np.lib.stride_tricks.as_strided(rows, shape, strides, writeable=False)


def _read_windows(
    spec: Exact,
    query: Floats,
    key: Tokens,
    values_and_one: Floats,
    windows: _Windows,
    band: tuple[int, int],
) -> Partial | Declined:
    """Attention of short blocks of queries, one after the other, to their windows.

    ``band``: which keys of its block's window a row sees.
    """
    n, keys = query.shape[-2], windows.of(key.x, "window_keys")
    values = windows.of(values_and_one, "window_values")
    logits = _window_logits(spec, query, keys, windows)
    # Each row is a block, so that whole blocks are sampled.
    if _are_moderate(by_block := logits.reshape(*logits.shape[:-2], -1)):
        limits.weights(by_block)
        _apply(np.multiply, logits, band, 1.0, 0.0)
        part = _unshifted(_window_sums(logits, values)[..., :n, :])
        if part is not None:
            return part
        logits = _window_logits(spec, query, keys, windows)
    log = _hide(logits, key, windows, band).max(axis=-2)
    logits -= limits.finite_shift(log)[..., None, :]
    log = log.reshape(*log.shape[:-2], -1, 1)[..., :n, :]
    if not np.isfinite(log).all():
        seen = _hide(np.zeros_like(logits), key, windows, band).max(axis=-2)
        seen = seen.reshape(*seen.shape[:-2], -1, 1)[..., :n, :]
        if not np.isfinite(log[seen == 0]).all():
            return Declined("logits are not finite")
    num_den = _window_sums(limits.weights(logits), values)[..., :n, :]
    return Partial(num_den, log) if limits.all_finite(num_den) else NOT_FINITE


def _hide(logits: Floats, key: Tokens, windows: _Windows, band: tuple[int, int]) -> Floats:
    """Put -inf in place of the logits of keys that are masked or outside a band."""
    _apply(np.fmin, logits, band, np.inf, -np.inf)
    weight = np.zeros_like(key.x[..., :1]) if key.log_weight is None else key.log_weight
    np.copyto(logits, -np.inf, where=~windows.of(weight == 0, "seen"))
    return logits


def _window_logits(spec: Exact, query: Floats, keys: Floats, windows: _Windows) -> Floats:
    """Logits in a buffer, ``(..., blocks, keys, rows)``: a short last axis suits small products."""
    (*lead, n, d), (_, rows, size, count) = query.shape, windows
    # In order first: to fetch them from memory a column at a time would take twice as long.
    scaled = buffer("scaled", (*lead, count * rows, d), query.dtype)
    np.multiply(query, spec.scale, out=scaled[..., :n, :])
    scaled[..., n:, :] = 0
    x = buffer("queries", (*lead, count, d, rows), query.dtype)
    np.copyto(x, transposed(scaled.reshape(*lead, count, rows, d)))
    heads = broadcast_lead(query.shape[:-2], keys.shape[:-3])
    logits = buffer("logits", (*heads, count, size, rows), query.dtype)
    for part in small_parts(size, rows * d):
        np.matmul(keys[..., part, :], x, out=logits[..., part, :])
    return logits


def _window_sums(weights: Floats, values: Floats) -> Floats:
    """Sum values by weights, ``(..., blocks, keys, rows)``, for all rows of all blocks."""
    (count, size, rows), e = weights.shape[-3:], values.shape[-1]
    lead = broadcast_lead(weights.shape[:-3], values.shape[:-3])
    num_den = np.empty((*lead, count, rows, e), weights.dtype)
    for part in small_parts(size, rows * e):
        x = transposed(weights[..., part, :])
        if part.start == 0:
            np.matmul(x, values[..., part, :], out=num_den)
        else:
            num_den += np.matmul(x, values[..., part, :])
    return num_den.reshape(*lead, count * rows, e)


def _apply(
    operation: np.ufunc, x: Floats, band: tuple[int, int], seen: float, hidden: float
) -> None:
    """Combine pairs of each block with one number where they are seen, another where hidden."""
    s, n = x.shape[-2:]
    # All rows see the keys between the corners.
    first = min(max(band[0] + n - 1, 0), s)
    last = min(max(band[1] + 1, first), s)
    for start, stop in ((0, first), (last, s)):
        corner = x[..., start:stop, :]
        operation(corner, _corner(start, stop, n, band, (seen, hidden), x.dtype), out=corner)


@lru_cache(16)
def _corner(
    start: int, stop: int, n: int, band: tuple[int, int], numbers: tuple[float, float], dtype: Any
) -> Floats:
    """One number for pairs within a band, another for others, of keys start to stop, n queries."""
    keys, rows = np.arange(start, stop)[:, None], np.arange(n)
    within = (keys >= rows + band[0]) & (keys <= rows + band[1])
    return np.asarray(np.where(within, *np.array(numbers, dtype)))

"""Chunks of a recurrence, a tile of them at once: all that does not need the state before them.

Where decays are weak, as in most tiles, ``exp(x_i - x_j)``, the decay from token j to token i, is a
product of two factors. The x are sums of log decays from the middle of a chunk on, all of one
sign, so that they keep their digits. Elsewhere all factors are at most 1, as in the generic code.

Letters: ``h`` heads, ``r`` queries that share a state, ``g`` chunks of ``c`` tokens, ``w`` numbers
of a log decay: 1, or one for each of the ``d`` key channels.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn_numpy import tuning
from linattn_numpy.buffers import buffer
from linattn_numpy.limits import MAX_DECAY_EXPONENT
from linattn_numpy.products import transposed

__all__ = ["Chunks", "Inside", "inside", "unit_lower_inverse"]

Floats = NDArray[Any]

MIN_LOG = -1e30
"""As good as -inf, of which products with 0 are NaN."""


class Chunks(NamedTuple):
    """Tokens of a tile, in the accumulation dtype."""

    query: Floats
    """``(h, r, g, c, d)``."""
    key: Floats
    """``(h, g, c, d)``."""
    value: Floats
    """``(h, g, c, e)``."""
    log_decay: Floats | None
    """``(h, g, c, w)``."""
    beta: Floats | None
    """``(h, g, c, 1)``."""


class Inside(NamedTuple):
    """What the walk from chunk to chunk needs of them; None for factors of 1."""

    reads: Floats
    """``(h, r, g, c, d + c)``: what queries multiply the state and the chunk's values with."""
    before: Floats
    """``(h, g, c, d)``: keys that are looked up in the state."""
    after: Floats
    """``(h, g, c, d)``: keys that write to it."""
    pairs: Floats | None
    """``(h, g, c, c)``: -beta times products of keys, right below the diagonal; of delta rules."""
    value: Floats | None = None
    """``(h, g, c, 1)``: factor of the values."""
    enter: Floats | None = None
    """``(h, g, w, 1)``: factor of the state before a chunk reads it."""
    total: Floats | None = None
    """``(h, g, w, 1)``: factor of the state after a chunk has read it."""
    leave: Floats | None = None
    """``(h, w, 1)``: factor of the state after the last chunk."""


def inside(chunks: Chunks, scale: float) -> Inside:
    """Products of tokens inside of each chunk."""
    query, key, _, log_decay, beta = chunks
    if log_decay is None:
        reads = _reads(query, key.dtype.type(scale), key)
        return Inside(reads, key, key, _pairs(key, key, beta))
    by_token = log_decay.shape[-1] == 1
    if by_token:
        # Few numbers: float64 costs nothing.
        sums = _from_middle(key.shape[-2], np.float64)
        x = np.matmul(log_decay[..., 0], transposed(sums))[..., None]
    else:
        sums = _from_middle(key.shape[-2], key.dtype)
        x = np.matmul(sums, log_decay, out=buffer("since", key.shape, key.dtype))
    first, last = x[..., 0, :], x[..., -1, :]
    # NaN is not weak.
    if not (first.max() <= MAX_DECAY_EXPONENT and last.min() >= -MAX_DECAY_EXPONENT):
        return _strong_by_token(chunks, scale) if by_token else _strong_by_channel(chunks, scale)
    # From the middle of a chunk, or from before the first, to the middle of the next.
    enter = log_decay[..., 0, :] - first
    enter[:, 1:] += last[:, :-1]
    of_state = {
        "enter": np.exp(enter).astype(key.dtype, copy=False)[..., None],
        "leave": np.exp(last[:, -1, :]).astype(key.dtype, copy=False)[..., None],
    }
    since = np.exp(x, out=x)
    if by_token:
        # Keys stay as they are: the state and what is written to it are relative to the middle.
        reads = _reads(query, (scale * since).astype(key.dtype, copy=False), key)
        value = (1 / since).astype(key.dtype, copy=False)
        return Inside(reads, key, key, _pairs(key, key, beta), value, **of_state)
    after = np.divide(key, since, out=buffer("keys after", key.shape, key.dtype))
    reads = _reads(query, since, after)
    reads *= key.dtype.type(scale)
    if beta is None:
        return Inside(reads, key, after, None, **of_state)
    before = np.multiply(key, since, out=since)
    return Inside(reads, before, after, _pairs(before, after, beta), **of_state)


def _strong_by_token(chunks: Chunks, scale: float) -> Inside:
    query, key, _, log_decay, beta = chunks
    assert log_decay is not None
    log_decay = log_decay.clip(MIN_LOG)
    upto, below = _lower(key.shape[-2], key.dtype), _lower(key.shape[-2], key.dtype, -1)
    before = np.exp(np.matmul(upto, log_decay))
    after = np.exp(np.matmul(transposed(below), log_decay))
    # In row i and column j the log decays of tokens j + 1, ..., i.
    decay = np.exp(np.matmul(upto, log_decay * below))
    reads = _reads(query, key.dtype.type(scale), key)
    d = key.shape[-1]
    reads[..., d:] *= decay[:, None]
    reads[..., :d] *= before[:, None]
    pairs = _pairs(key, key, beta)
    if pairs is not None:
        pairs *= decay
    return Inside(reads, key * before, key * after, pairs, total=before[..., -1:, :])


def _strong_by_channel(chunks: Chunks, scale: float) -> Inside:
    """In runs of 2, 4, 8, ... tokens right halves meet left ones, with factors to the middle."""
    query, key, _, log_decay, beta = chunks
    assert log_decay is not None
    c, d = key.shape[-2:]
    since = log_decay.clip(MIN_LOG)
    until = np.zeros_like(since)
    reads = buffer("reads", (*query.shape[:-1], d + c), key.dtype)
    rows = np.multiply(query, key.dtype.type(scale), out=reads[..., :d])
    scores = reads[..., d:]
    scores.fill(0)
    np.einsum("...ii->...i", scores)[...] = (rows * key[:, None]).sum(axis=-1)
    pairs = None
    if beta is not None:
        # What is not below the diagonal is multiplied by 0 later, which NaN would survive.
        pairs = buffer("pairs", (*key.shape[:-1], c), key.dtype)
        pairs.fill(0)
    half = 1
    while half < c:
        for start in range(0, c, 2 * half):
            left, right = slice(start, start + half), slice(start + half, start + 2 * half)
            so_far = np.exp(since[..., right, :])
            earlier = transposed(key[..., left, :] * np.exp(until[..., left, :]))
            later = rows[..., right, :] * so_far[:, None]
            np.matmul(later, earlier[:, None], out=scores[..., right, left])
            if pairs is not None:
                np.matmul(key[..., right, :] * so_far, earlier, out=pairs[..., right, left])
            until[..., left, :] += since[..., right, :][..., -1:, :]
            since[..., right, :] += since[..., left, :][..., -1:, :]
        half *= 2
    if pairs is not None and beta is not None:
        pairs *= -beta
    before = np.exp(since)
    rows *= before[:, None]
    after = key * np.exp(until)
    return Inside(reads, key * before, after, pairs, total=before[..., -1, :, None])


def _reads(query: Floats, factor: Any, key: Floats) -> Floats:
    """``[q, tril(q k^T)]``, the queries multiplied by a factor."""
    c, d = key.shape[-2:]
    reads = buffer("reads", (*query.shape[:-1], d + c), key.dtype)
    factor = factor if np.ndim(factor) == 0 else factor[:, None]
    rows = np.multiply(query, factor, out=reads[..., :d])
    scores = np.matmul(rows, transposed(key)[:, None], out=reads[..., d:])
    scores *= _lower(c, key.dtype)
    return reads


def _pairs(rows: Floats, keys: Floats, beta: Floats | None) -> Floats | None:
    if beta is None:
        return None
    # NumPy takes x x^T for a case of its own, which is slower.
    rows = np.multiply(rows, -beta, out=buffer("minus beta rows", rows.shape, rows.dtype))
    out = buffer("pairs", (*rows.shape[:-1], rows.shape[-2]), rows.dtype)
    return np.matmul(rows, transposed(keys), out=out)


@cache
def _lower(c: int, dtype: Any, diagonal: int = 0) -> Floats:
    return np.tri(c, k=diagonal, dtype=dtype)


@cache
def _from_middle(c: int, dtype: Any) -> Floats:
    """Matrix of sums from the middle token to each: of those after it, or minus those up to it."""
    upto = np.tri(c, dtype=dtype)
    return np.asarray(upto - upto[c // 2])


def unit_lower_inverse(negative: Floats) -> Floats:
    """Invert ``I - negative``, ``(h, g, c, c)``, of which only what is below the diagonal is read.

    The inverse of a triangle of 2n tokens has those of its halves and ``R negative L`` across. For
    all short triangles at once that is ``X + X C X``, where C is what ``negative`` has across and X
    holds the inverses of all halves.
    """
    (h, g, c, _), dtype = negative.shape, negative.dtype
    across, product = (buffer(name, negative.shape, dtype) for name in ("across", "product"))
    inverse = buffer("inverse", negative.shape, dtype)
    np.add(
        np.multiply(negative, _across(c, 1, dtype), out=inverse),
        np.eye(c, dtype=dtype),
        out=inverse,
    )
    n = 2
    while n < min(c, tuning.MASKED_TRIANGLE_ROWS):
        np.multiply(negative, _across(c, n, dtype), out=across)
        np.matmul(across, inverse, out=product)
        inverse += np.matmul(inverse, product, out=across)
        n *= 2
    while n < c:
        product = buffer("product", (h, g, n, n), dtype)
        for start in range(0, c, 2 * n):
            left, right = slice(start, start + n), slice(start + n, start + 2 * n)
            np.matmul(negative[..., right, left], inverse[..., left, left], out=product)
            np.matmul(inverse[..., right, right], product, out=inverse[..., right, left])
        n *= 2
    return inverse


@cache
def _across(c: int, n: int, dtype: Any) -> Floats:
    """1 where the right half of a triangle of 2n tokens meets the left one."""
    run = np.arange(c) // n
    return np.asarray((run[:, None] == run + 1) & (run % 2 == 0), dtype)

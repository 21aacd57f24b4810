"""Chunks of a recurrence, a tile of them together: all products that need no state.

The decay from token j to token i is ``exp(x_i - x_j)``. If decays are weak, as in most tiles, it is
a product of two factors. The x are sums of log decays from the middle of a chunk, all of one sign,
so that they keep their digits. In other tiles all factors are at most 1, as in the generic code.

Letters: ``h`` heads, ``r`` queries that share a state, ``g`` chunks of ``c`` tokens, ``w`` numbers
of a log decay: 1, or one for each of the ``d`` key channels.
"""

from __future__ import annotations

from functools import cache
from math import log
from typing import Any, NamedTuple

import numpy as np

from linattn_numpy import limits
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.products import transposed
from linattn_numpy.tiles import lower

MIN_LOG = -1e30
"""Stands for -inf, whose product with 0 would be NaN."""


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
    """Arrays that the walk from chunk to chunk needs; None for factors of 1."""

    reads: Floats
    """``(h, r, g, c, d + c)``: matrices that multiply the state above the chunk's values."""
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
    given = chunks, log_decay, scale
    if log_decay.shape[-1] == 1:
        return _weak_by_token(*given) or _strong_by_token(*given)
    return _weak_by_channel(*given) or _strong_by_channel(*given)


def _within(x: Floats, most: float) -> bool:
    # NaN is not.
    return bool(x[..., 0, :].max() <= most and x[..., -1, :].min() >= -most)


def _weak_by_token(chunks: Chunks, log_decay: Floats, scale: float) -> Inside | None:
    """Leave keys unchanged: state and values are relative to the middle token of a chunk."""
    query, key, _, _, beta = chunks
    # Few numbers: float64 costs nothing.
    x = log_decay.cumsum(axis=-2, dtype=np.float64)
    x -= x[..., x.shape[-2] // 2, None, :]
    if not _within(x, limits.MAX_TOKEN_DECAY_EXPONENT):
        return None
    of_state = _to_middles(x, log_decay, key.dtype)
    since = np.exp(x, out=x)
    reads = _reads(query, (scale * since).astype(key.dtype, copy=False), key)
    value = (1 / since).astype(key.dtype, copy=False)
    return Inside(reads, key, key, _pairs(key, key, beta), value, **of_state)


def _weak_by_channel(chunks: Chunks, log_decay: Floats, scale: float) -> Inside | None:
    query, key, _, _, beta = chunks
    sums = _from_middle(key.shape[-2], key.dtype)
    x = np.matmul(sums, log_decay, out=buffer("since", key.shape, key.dtype))
    if not _within(x, limits.MAX_DECAY_EXPONENT):
        return None
    of_state = _to_middles(x, log_decay, key.dtype)
    since = np.exp(x, out=x)
    after = np.divide(key, since, out=buffer("keys after", key.shape, key.dtype))
    before = key
    if beta is not None:
        before = np.multiply(key, since, out=buffer("keys before", key.shape, key.dtype))
    since *= key.dtype.type(scale)
    reads = _reads(query, since, after)
    return Inside(reads, before, after, _pairs(before, after, beta), **of_state)


def _to_middles(x: Floats, log_decay: Floats, dtype: Any) -> dict[str, Floats]:
    """Factors of the state: from one middle, or the start, to the next, and from the last one."""
    enter = log_decay[..., 0, :] - x[..., 0, :]
    enter[:, 1:] += x[:, :-1, -1, :]
    leave = x[:, -1, -1, :]
    factors = (np.exp(log).astype(dtype, copy=False)[..., None] for log in (enter, leave))
    return dict(zip(("enter", "leave"), factors, strict=True))


def _strong_by_token(chunks: Chunks, log_decay: Floats, scale: float) -> Inside:
    query, key, _, _, beta = chunks
    log_decay = log_decay.clip(MIN_LOG)
    upto, below = lower(key.shape[-2], key.dtype), lower(key.shape[-2], key.dtype, -1)
    before = limits.weights(np.matmul(upto, log_decay), None, limits.DECAYED)
    after = limits.weights(np.matmul(transposed(below), log_decay), None, limits.DECAYED)
    # In row i and column j the log decays of tokens j + 1, ..., i.
    decay = limits.weights(np.matmul(upto, log_decay * below), None, limits.DECAYED)
    decay *= upto
    reads = _reads(query, key.dtype.type(scale), key, decay[:, None])
    reads[..., : key.shape[-1]] *= before[:, None]
    pairs = _pairs(key, key, beta)
    if pairs is not None:
        pairs *= decay
    looked_up = key if pairs is None else key * before
    return Inside(reads, looked_up, key * after, pairs, total=before[..., -1:, :])


def _strong_by_channel(chunks: Chunks, log_decay: Floats, scale: float) -> Inside:
    """Multiply right halves with left halves, in runs of 2, 4, 8, ... tokens.

    The factors are decays to the middle of a run. As runs join, the decays of queries are extended
    to the start of the run, and the decays of keys to its end. Decayed numbers are rounded to
    multiples of a small share of their token's largest, if there are smaller ones.
    """
    query, key, _, _, beta = chunks
    (c, d), least = key.shape[-2:], limits.FADED[key.itemsize]
    total = np.exp(log_decay, out=buffer("totals", key.shape, key.dtype))
    reads = buffer("reads", (*query.shape[:-1], d + c), key.dtype)
    rows, scores = buffer("rows before", query.shape, key.dtype), reads[..., d:]
    np.multiply(query, key.dtype.type(scale), out=rows)
    scores.fill(0)
    np.einsum("...id,...id->...i", rows, key[:, None], out=np.einsum("...ii->...i", scores))
    after = buffer("keys after", key.shape, key.dtype)
    after[...] = key
    faint: list[tuple[Floats, Floats, int]] = []
    if np.matmul(np.ones((1, c), key.dtype), log_decay).min() < log(least):
        faint = [(rows, _least(rows), 1), (after, _least(key), 0)]
    rows *= total[:, None]
    before, pairs = key, None
    if beta is not None:
        before = np.multiply(key, total, out=buffer("keys before", key.shape, key.dtype))
        faint += [(before, of_key, 1) for _, of_key, side in faint if side == 0]
        # Entries above the diagonal are multiplied by 0 later, which would keep a NaN.
        pairs = buffer("pairs", (*key.shape[:-1], c), key.dtype)
        pairs.fill(0)
    n = 1
    while n < c:
        left, right = _halves(total, 1)
        total = (left * right)[..., 0, :]
        if faint and total.min() < least:
            for x, share, side in faint:
                limits.rounded(_halves(x, n)[side], _halves(share, n)[side])
        earlier, later = transposed(_halves(after, n)[0]), _halves(rows, n)[1]
        np.matmul(later, earlier[:, None], out=_below(scores, n))
        later *= left[:, None]
        if pairs is not None:
            later = _halves(before, n)[1]
            np.matmul(later, earlier, out=_below(pairs, n))
            later *= left
        earlier *= transposed(right)
        n *= 2
    for x, share, _ in faint:
        limits.rounded(x, share)
    reads[..., :d] = rows
    if pairs is not None and beta is not None:
        pairs *= -beta
    return Inside(reads, before, after, pairs, total=transposed(total))


SHARE = {4: 2.0**-50, 8: 2.0**-450}
"""Smallest decayed number of a token beside its largest one, if it is not 0."""


def _least(tokens: Floats) -> Floats:
    """Return the smallest numbers of each token that are not 0, of the shape of the tokens."""
    size = np.sqrt(np.vecdot(tokens, tokens))[..., None]
    least = np.where(size < np.inf, size * SHARE[tokens.itemsize], 0)
    # Whole arrays are added in half the time.
    return np.broadcast_to(least, tokens.shape).copy()


def _halves(tokens: Floats, n: int) -> tuple[Floats, Floats]:
    """Left and right halves ``(..., c / 2n, n, w)`` of all runs of 2n tokens, views."""
    *lead, c, w = tokens.shape
    runs = tokens.reshape(*lead, c // (2 * n), 2, n, w)
    return runs[..., 0, :, :], runs[..., 1, :, :]


def _below(squares: Floats, n: int) -> Floats:
    """Blocks of right rows and left columns of runs of 2n: ``(..., c / 2n, n, n)``, a view."""
    *lead, c, _ = squares.shape
    runs = squares.reshape(*lead, c // (2 * n), 2, n, c // (2 * n), 2, n)
    below: Floats = np.einsum("...aiaj->...aij", runs[..., 1, :, :, 0, :])
    return below


def _reads(query: Floats, factor: Any, key: Floats, ratios: Floats | None = None) -> Floats:
    """``[q, tril(q k^T)]``, the queries multiplied by a factor, all products by lower ratios."""
    c, d = key.shape[-2:]
    reads = buffer("reads", (*query.shape[:-1], d + c), key.dtype)
    factor = factor if np.ndim(factor) == 0 else factor[:, None]
    rows = np.multiply(query, factor, out=reads[..., :d])
    scores = np.matmul(rows, transposed(key)[:, None], out=reads[..., d:])
    scores *= lower(c, key.dtype) if ratios is None else ratios
    return reads


def _pairs(rows: Floats, keys: Floats, beta: Floats | None) -> Floats | None:
    if beta is None:
        return None
    out = buffer("pairs", (*rows.shape[:-1], rows.shape[-2]), rows.dtype)
    out[..., 0, :] = 0
    # Without the first row, for NumPy takes x x^T for a case of its own, which is slower.
    np.matmul(rows[..., 1:, :], transposed(keys), out=out[..., 1:, :])
    out *= -beta
    return out


@cache
def _from_middle(c: int, dtype: Any) -> Floats:
    """Matrix of signed sums from the middle token to each: tokens before it count negative."""
    upto = np.tri(c, dtype=dtype)
    return np.asarray(upto - upto[c // 2])


def unit_lower_inverse(negative: Floats) -> Floats:
    """Invert ``I - negative``, ``(h, g, c, c)``; only entries below the diagonal are read.

    The inverse of a triangle of 2n tokens has the inverses L and R of its halves, and
    ``R negative L`` across. For all triangles together that is ``X + X C X``: X holds the inverses
    of all halves, and C the entries of ``negative`` across.
    """
    c, dtype = negative.shape[-1], negative.dtype
    across, product = (buffer(name, negative.shape, dtype) for name in ("across", "product"))
    inverse = buffer("inverse", negative.shape, dtype)
    np.multiply(negative, _across(c, 1, dtype), out=inverse)
    inverse += np.eye(c, dtype=dtype)
    n = 2
    while n < c:
        np.multiply(negative, _across(c, n, dtype), out=across)
        np.matmul(across, inverse, out=product)
        inverse += np.matmul(inverse, product, out=across)
        n *= 2
    return inverse


@cache
def _across(c: int, n: int, dtype: Any) -> Floats:
    """1 where the right half of a triangle of 2n tokens meets the left one."""
    run = np.arange(c) // n
    return np.asarray((run[:, None] == run + 1) & (run % 2 == 0), dtype)

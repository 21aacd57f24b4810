"""Decays inside a chunk of tokens, as factors of at most 1.

The factor between two tokens is ``exp`` of the sum of the log decays between them. It is never
made as ``exp(a_i) exp(-a_j)``, which overflows. It is never made from a difference ``a_i - a_j`` of
long sums either, which loses the digits of a short sum.

With one decay for each token, these sums make a triangle for each chunk. With one for each key
channel, each channel would need a triangle. Instead tokens are multiplied in runs of 2, 4, 8, ...
tokens: right halves by their decay since the middle, left halves by their decay up to the middle.
Products of both halves then fill the block between them.
"""

from __future__ import annotations

from typing import NamedTuple

import array_api_compat

from linattn._arrays import namespace
from linattn._numerics import DECAYED, exp_or_zero
from linattn.typing import Array


class Decay(NamedTuple):
    """Factors of a chunk of c tokens, for one number a token (w = 1) or one a key channel (w = d).

    Attributes
    ----------
    before : array, (..., c, w)
        Share of the state before the chunk that is left at a token, its own decay included.
    after : array, (..., c, w)
        Share of a token that is left after the chunk.
    ratios : array, (..., c, c)
        Factors from token j to token i, 0 for j > i; None for one number a key channel.
    halves : list of pairs of arrays, each (..., c / 2h, h, d)
        For one number a key channel and h = 1, 2, 4, ...: since the middle at tokens of right
        halves, and up to the middle at tokens of left halves.
    forgets : bool
        Whether there are log decays.
    """

    before: Array
    after: Array
    ratios: Array
    halves: list[tuple[Array, Array]]
    forgets: bool = True


MIN_LOG = -1e30
"""Stands for -inf, whose product with 0 would be NaN."""


def _left(log: Array) -> Array:
    """Exponentials of log decays, 0 where these leave nothing beside a new token."""
    return exp_or_zero(log, least=DECAYED)


def triangle(n: int, like: Array, *, strict: bool = False) -> Array:
    """Lower triangle of ones, ``(n, n)``, strict without the diagonal."""
    xp = namespace(like)
    ones = xp.ones((n, n), dtype=like.dtype, device=array_api_compat.device(like))
    return xp.tril(ones, k=-1 if strict else 0)


def no_decay(like: Array) -> Decay:
    """Factors of a chunk that forgets nothing, for tokens ``(..., c, d)``."""
    ones = namespace(like).ones_like(like[..., :1])
    return Decay(ones, ones, triangle(like.shape[-2], like), [], forgets=False)


def chunk_decay(log_decay: Array) -> Decay:
    """Factors of a chunk from its log decays ``(..., c, w)``; c is a power of two."""
    xp = namespace(log_decay)
    c, w = log_decay.shape[-2:]
    log_decay = xp.clip(log_decay, min=MIN_LOG)
    if w > 1:
        return _channel_decay(log_decay)
    upto, below = triangle(c, log_decay), triangle(c, log_decay, strict=True)
    before = _left(xp.matmul(upto, log_decay))
    after = _left(xp.matmul(xp.matrix_transpose(below), log_decay))
    # In row i and column j the log decays of tokens j + 1, ..., i.
    return Decay(before, after, _left(xp.matmul(upto, log_decay * below)) * upto, [])


def _channel_decay(log_decay: Array) -> Decay:
    xp = namespace(log_decay)
    since, until = log_decay, xp.zeros_like(log_decay)
    halves = []
    h = 1
    while h < log_decay.shape[-2]:
        since_left, since_right = _split(since, h)
        until_left, until_right = _split(until, h)
        halves.append((_left(since_right), _left(until_left)))
        since = _join(since_left, since_right + since_left[..., -1:, :])
        until = _join(until_left + since_right[..., -1:, :], until_right)
        h *= 2
    return Decay(_left(since), _left(until), None, halves)


def products(x: Array, y: Array, decay: Decay) -> Array:
    """``sum_a x_ia y_ja`` times the decay from token j to token i, 0 for j > i: ``(..., c, c)``."""
    xp = namespace(x)
    if decay.ratios is None:
        return _products_across(x, y, decay.halves)
    return xp.matmul(x, xp.matrix_transpose(y)) * decay.ratios


def products_vjp(
    grad: Array, x: Array, y: Array, decay: Decay, product: Array
) -> tuple[Array, Array, Array]:
    """Pull :func:`products` back to x, y and the log decays, these None for no decay.

    A log decay is between all pairs of tokens across it: their terms are added up, none is
    subtracted.
    """
    xp = namespace(grad)
    if decay.ratios is None:
        return _products_across_vjp(grad, x, y, decay.halves)
    weighted = grad * decay.ratios
    grad_x, grad_y = xp.matmul(weighted, y), xp.matmul(xp.matrix_transpose(weighted), x)
    if not decay.forgets:
        return grad_x, grad_y, None
    c = grad.shape[-1]
    later = xp.matmul(xp.matrix_transpose(triangle(c, grad)), grad * product)
    grad_log = xp.sum(later * triangle(c, grad, strict=True), axis=-1, keepdims=True)
    return grad_x, grad_y, grad_log


def _split(x: Array, h: int) -> tuple[Array, Array]:
    """Left and right halves of runs of 2h tokens, each ``(..., c / 2h, h, w)``."""
    *lead, c, w = x.shape
    runs = namespace(x).reshape(x, (*lead, c // (2 * h), 2, h, w))
    return runs[..., 0, :, :], runs[..., 1, :, :]


def _join(left: Array, right: Array) -> Array:
    """Tokens ``(..., c, w)`` of their left and right halves, each ``(..., c / 2h, h, w)``."""
    xp = namespace(left)
    *lead, runs, h, w = left.shape
    return one_part(xp.reshape(xp.concat([left, right], axis=-2), (*lead, 2 * runs * h, w)))


def _products_across(x: Array, y: Array, halves: list[tuple[Array, Array]]) -> Array:
    xp = namespace(x)
    blocks = xp.sum(x * y, axis=-1)[..., None, None]
    for since, until in halves:
        h = since.shape[-2]
        right, left = _split(x, h)[1] * since, _split(y, h)[0] * until
        blocks = join_blocks(blocks, xp.matmul(right, xp.matrix_transpose(left)))
    return blocks[..., 0, :, :]


def _products_across_vjp(
    grad: Array, x: Array, y: Array, halves: list[tuple[Array, Array]]
) -> tuple[Array, Array, Array]:
    xp = namespace(grad)
    eye = triangle(grad.shape[-1], grad) - triangle(grad.shape[-1], grad, strict=True)
    diagonal = xp.sum(grad * eye, axis=-1, keepdims=True)
    grad_x, grad_y = diagonal * y, diagonal * x
    grad_log = xp.zeros_like(grad_x)
    for since, until in halves:
        h = since.shape[-2]
        right, left = _split(x, h)[1] * since, _split(y, h)[0] * until
        cross = cross_blocks(grad, h)
        grad_right = xp.matmul(cross, left)
        grad_left = xp.matmul(xp.matrix_transpose(cross), right)
        zeros = xp.zeros_like(grad_right)
        grad_x = grad_x + _join(zeros, grad_right * since)
        grad_y = grad_y + _join(grad_left * until, zeros)
        grad_log = grad_log + _join(
            xp.matmul(triangle(h, grad, strict=True), grad_left * left),
            xp.matmul(xp.matrix_transpose(triangle(h, grad)), grad_right * right),
        )
    return grad_x, grad_y, grad_log


def cross_blocks(lower: Array, h: int) -> Array:
    """Cut the blocks of right rows and left columns: ``(..., c, c)`` to ``(..., c / 2h, h, h)``."""
    starts = range(0, lower.shape[-1], 2 * h)
    blocks = [lower[..., s + h : s + 2 * h, s : s + h] for s in starts]
    return one_part(namespace(lower).stack(blocks, axis=-3))


def join_blocks(blocks: Array, cross: Array) -> Array:
    """Triangles of 2h tokens from triangles of h, ``(..., 2r, h, h)``, and the blocks across."""
    xp = namespace(blocks)
    *lead, runs, h, _ = cross.shape
    blocks = xp.broadcast_to(blocks, (*lead, 2 * runs, h, h))
    upper = xp.concat([blocks[..., 0::2, :, :], xp.zeros_like(cross)], axis=-1)
    lower = xp.concat([cross, blocks[..., 1::2, :, :]], axis=-1)
    return one_part(xp.concat([upper, lower], axis=-2))


def one_part(x: Array) -> Array:
    """Keep the last three axes of a Dask array together: its parts multiply with every product."""
    return x.rechunk({-3: -1, -2: -1, -1: -1}) if hasattr(x, "rechunk") else x

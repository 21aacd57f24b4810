"""Tokens in blocks on an axis of their own."""

from __future__ import annotations

import array_api_compat

from linattn import _arrays
from linattn._driver.blocks import raw_tokens, values_and_one_block
from linattn._driver.modifiers import decay_of_rows
from linattn._generic.hierarchical import pad
from linattn.typing import Array, Partial, Problem, Tokens

__all__ = ["decay_blocks", "flat_rows", "in_blocks", "key_blocks", "split"]


def key_blocks(
    problem: Problem, first: int, stop: int, size: int, start: int, limit: int
) -> tuple[Tokens, Array]:
    """Keys and ``[v, 1]`` of some blocks; what lies outside the sequence is masked.

    So are the keys from the position ``limit`` on.
    """
    rows = _inside(first * size, stop * size, limit)
    tokens = raw_tokens(problem, "key", rows, start)
    values_and_one = values_and_one_block(problem, rows)
    total = (stop - first) * size
    front = min(max(rows.start - first * size, 0), total)
    log_weight = tokens.log_weight
    if log_weight is None and tokens.x.shape[-2] < total:
        log_weight = problem.xp.zeros_like(tokens.x[..., :1])
    x = _padded(tokens.x, front, total)
    log_weight = split(_padded(log_weight, front, total, -float("inf")), size)
    tokens = Tokens(split(x, size), log_weight, first * size + start)
    return tokens, split(_padded(values_and_one, front, total), size)


def decay_blocks(problem: Problem, first: int, stop: int, size: int) -> Array:
    """Log decay of the keys of some blocks, ``(..., blocks, size, 1)``; 0 outside the sequence."""
    rows = _inside(first * size, stop * size, problem.key.shape[-2])
    total = (stop - first) * size
    front = min(max(rows.start - first * size, 0), total)
    return split(_padded(decay_of_rows(problem, rows), front, total), size)


def _inside(first: int, stop: int, limit: int) -> slice:
    """Cut a slice at 0 and at a limit."""
    stop = min(max(stop, 0), limit)
    return slice(min(max(first, 0), stop), stop)


def _padded(x: Array, front: int, size: int, fill: float = 0.0) -> Array:
    """Put rows of one number before and after; None stays None."""
    if x is None or (not front and x.shape[-2]):
        return pad(x, size, fill)
    xp, device = _arrays.namespace(x), array_api_compat.device(x)

    def rows(count: int) -> Array:
        shape = (*x.shape[:-2], count, x.shape[-1])
        return xp.full(shape, fill, dtype=x.dtype, device=device)

    return xp.concat([rows(front), x, rows(size - front - x.shape[-2])], axis=-2)


def in_blocks(tokens: Tokens, total: int, size: int, front: int = 0) -> Tokens:
    """Cut tokens into blocks of one size, padded to a total, ``front`` of it before them."""
    x = split(_padded(tokens.x, front, total), size)
    return Tokens(x, split(tokens.log_weight, size), tokens.start - front)


def split(x: Array, size: int) -> Array:
    """Cut rows into blocks of one size; None stays None."""
    if x is None:
        return None
    # The number of blocks in full: -1 for it would be a guess where there are no heads.
    *lead, total, width = x.shape
    return _arrays.namespace(x).reshape(x, (*lead, total // size, size, width))


def flat_rows(part: Partial, rows: int, front: int = 0) -> Partial:
    """Join blocks of rows into one axis again, and leave out what was padded."""
    xp, taken = _arrays.namespace(part.num_den), slice(front, front + rows)
    *lead, g, n, width = part.num_den.shape
    num_den = xp.reshape(part.num_den, (*lead, g * n, width))[..., taken, :]
    return Partial(num_den, xp.reshape(part.log, (*part.log.shape[:-3], g * n, 1))[..., taken, :])

"""Decay inside of a causal block: what it leaves of keys and states, sub-block by sub-block.

Its sums begin anew with each sub-block, and all of its factors are at most 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn_numpy import limits
from linattn_numpy.buffers import buffer
from linattn_numpy.limits import exp
from linattn_numpy.products import transposed
from linattn_numpy.tiles import lower, moveaxis, split_tiles

__all__ = ["Decay", "decay_of_tiles"]

Floats = NDArray[Any]


class Decay(NamedTuple):
    """What is left in a tile, ``(..., count, size, .)``: of all sub-blocks alike, count is 1."""

    pairs: Floats
    """Of key j for row i of its sub-block, ``(..., count, size, size)``; 0 for later keys."""
    rows: Floats
    """Of the state before a sub-block for each of its rows."""
    keys: Floats
    """Of a key at the end of its sub-block."""
    states: list[Floats]
    """Of the state before each sub-block at its end, ``(..., 1)``."""


def decay_of_tiles(
    log_decay: Floats | None, rows: slice, count: int, size: int, dtype: Any
) -> Iterator[Decay | None]:
    """Decay of some rows of a block, a tile of ``count`` sub-blocks at a time."""
    if log_decay is None:
        yield from repeat(None)
        return
    if log_decay.strides[-2] == 0:
        # One decay for all tokens.
        yield from repeat(next(_decays(log_decay[None, ..., None, :size, :], count, dtype)))
        return
    yield from _decays(split_tiles(log_decay[..., rows, :], count, size), count, dtype)


def _decays(log_decay: Floats, count: int, dtype: Any) -> Iterator[Decay]:
    """Decay of each tile; tiles are the first axis."""
    # In float64: the sums of a strong decay have no digits left for the weak ones after it.
    since = np.cumsum(log_decay, axis=-2)
    last = since[..., -1:, :]
    limit = limits.MAX_HALF_DECAY[dtype.itemsize]
    is_steep = (last < -2 * limit)[..., 0, 0]
    to_middle = (last / 2 - since).clip(-limit, limit)
    factors = (np.exp(x).astype(dtype) for x in (-to_middle, transposed(to_middle)))
    parts = (exp(x.astype(dtype)) for x in (since, last - since, last))
    for sums, steep, row, key, left, until, whole in zip(
        since, is_steep, *factors, *parts, strict=True
    ):
        pairs = buffer("pairs", (*row.shape[:-1], row.shape[-2]), dtype)
        np.multiply(row, lower(row.shape[-2], dtype), out=pairs)
        np.multiply(pairs, key, out=pairs)
        if steep.any():
            pairs[steep] = _steep_pairs(sums[steep], dtype)
        states = list(moveaxis(whole[..., 0], -2, 0))
        yield Decay(pairs, left, until, states * (count // len(states)))


def _steep_pairs(since: Floats, dtype: Any) -> Floats:
    """Decay of pairs of which that of some token is out of the range of a number."""
    between = np.minimum(since - transposed(since), 0).astype(dtype)
    return exp(between) * lower(since.shape[-2], dtype)

"""Decay inside of a causal block: what it leaves of keys and states, sub-block by sub-block.

Its sums begin anew with each sub-block, and all of its factors are at most 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        yield from repeat(_decay(log_decay[..., None, :size, :], count, dtype))
        return
    for part in split_tiles(log_decay[..., rows, :], count, size):
        yield _decay(part, count, dtype)


def _decay(log_decay: Floats, count: int, dtype: Any) -> Decay:
    since = np.cumsum(log_decay, axis=-2)
    last = since[..., -1:, :]
    shape = (*since.shape[:-1], since.shape[-2])
    # In float64: the sums of a strong decay have no digits left for the weak ones after it.
    between = np.subtract(since, transposed(since), out=buffer("between", shape, since.dtype))
    pairs = buffer("pairs", shape, dtype)
    pairs[...] = between
    exp(np.minimum(pairs, 0, out=pairs))
    pairs *= lower(shape[-1], dtype)
    left, until, whole = (exp(x.astype(dtype)) for x in (since, last - since, last))
    states = list(moveaxis(whole[..., 0], -2, 0))
    return Decay(pairs, left, until, states * (count // len(states)))

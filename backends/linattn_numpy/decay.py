"""Decay inside a causal block: the factors of keys and states, sub-block by sub-block.

Sums of log decays restart with each sub-block. Weak decay: values are divided by the decay since
the start of their sub-block, and the decay of rows is added to their log scale. Otherwise all
factors are at most 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from math import log
from typing import Any, NamedTuple

import numpy as np

from linattn_numpy import limits
from linattn_numpy.buffers import Bools, Floats
from linattn_numpy.products import transposed
from linattn_numpy.tiles import lower, moveaxis, split_tiles, sub_blocks


class Decay(NamedTuple):
    """Decay factors in a tile, ``(..., count, size, .)``; count is 1 if sub-blocks share them."""

    pairs: Floats
    """From key j to row i of its sub-block, ``(..., count, size, size)``; 0 for later keys."""
    rows: Floats
    """From the start of a sub-block to each of its rows."""
    keys: Floats
    """From a key to the end of its sub-block."""
    states: list[Floats]
    """From the start of each sub-block to its end, ``(..., 1)``."""
    least: float
    """Smallest factors that are not 0; 0 if all factors are large enough to multiply with."""


class WeakDecay(NamedTuple):
    """Decay factors if values have been divided by their decay, and rows are not yet multiplied."""

    states: list[Floats]
    """Factor of the state after each sub-block, with the keys of the sub-block."""


def decay_of_tiles(
    log_decay: Floats | None,
    rows: slice,
    count: int,
    size: int,
    dtype: Any,
    since: Floats | None = None,
    least: dict[int, float] = limits.LEAST,
) -> Iterator[Decay | WeakDecay | None]:
    """Yield the decay of some rows of a block, a tile of ``count`` sub-blocks at a time.

    ``since``: from :func:`weak_decay`; the values of the block have been divided by its ``exp``.
    ``least``: smallest factors that are not 0, by bytes of a number.
    """
    if log_decay is None:
        return repeat(None)
    if since is not None:
        last = split_tiles(since[..., rows, :], count, size)[..., -1, :]
        return (WeakDecay(list(moveaxis(left, -2, 0))) for left in np.exp(last))
    if log_decay.strides[-2] == 0:
        # One decay for all tokens.
        return repeat(next(_decays(log_decay[None, ..., None, :size, :], count, dtype, least)))
    return _decays(split_tiles(log_decay[..., rows, :], count, size), count, dtype, least)


def weak_decay(log_decay: Floats, dtype: Any) -> tuple[Floats, Bools]:
    """Return log decays from the start of each sub-block, and which heads have weak decay only."""
    runs = sub_blocks(log_decay.shape[-2])
    sums = (np.cumsum(run.split(log_decay), axis=-2) for run in runs)
    since = np.concatenate([x.reshape(*x.shape[:-3], -1, 1) for x in sums], axis=-2)
    is_weak = since.min(axis=(-2, -1)) >= -limits.MAX_WEAK_DECAY[dtype.itemsize]
    return since.astype(dtype), is_weak


def _decays(log_decay: Floats, count: int, dtype: Any, least: dict[int, float]) -> Iterator[Decay]:
    """Decay of each tile; tiles are the first axis."""
    # In float64: the sums of a strong decay have no digits left for the weak ones after it.
    since = np.cumsum(log_decay, axis=-2)
    last, size = since[..., -1:, :], since.shape[-2]
    smallest = least[dtype.itemsize]
    smallest = smallest if last.min() < log(smallest) else 0.0
    parts = (limits.weights(x.astype(dtype), None, least) for x in (since, last - since, last))
    for sums, left, until, whole in zip(since, *parts, strict=True):
        pairs = np.minimum(sums - transposed(sums), 0).astype(dtype)
        pairs = limits.weights(pairs, None, least)
        pairs *= lower(size, dtype)
        states = list(moveaxis(whole[..., 0], -2, 0))
        yield Decay(pairs, left, until, states * (count // len(states)), smallest)

"""Borders between packed sequences in a causal block, sub-block by sub-block."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn_numpy.buffers import Floats

Lengths = NDArray[np.int64]


class Border(NamedTuple):
    """A sub-block of a tile in which sequences begin, perhaps at its first row."""

    place: int
    first: int
    """First row that does not see the state before the sub-block."""
    last: int
    """First row of the last sequence; all keys before it belong to sequences that have ended."""
    pairs: Floats
    """``(size, size)``: 1 for rows and keys of one sequence."""


def borders_of_tiles(
    lengths: Lengths, rows: slice, count: int, size: int, dtype: Any
) -> list[list[Border]]:
    """Borders within some rows of a block, of each tile of ``count`` sub-blocks."""
    starts = np.cumsum(lengths)[:-1] - rows.start
    starts = starts[(starts >= 0) & (starts < rows.stop - rows.start)]
    found: list[list[Border]] = [[] for _ in range(rows.start, rows.stop, count * size)]
    if not len(starts):
        return found
    blocks, index = np.unique(starts // size, return_index=True)
    first, last = starts[index] % size, np.append(starts[index[1:] - 1], starts[-1]) % size
    numbers = np.searchsorted(starts, blocks[:, None] * size + np.arange(size), side="right")
    pairs = (numbers[:, :, None] == numbers[:, None, :]).astype(dtype)
    for block, *border in zip(blocks.tolist(), first.tolist(), last.tolist(), pairs, strict=True):
        tile, place = divmod(block, count)
        found[tile].append(Border(place, *border))
    return found

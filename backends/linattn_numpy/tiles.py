"""Rows of a block in tiles of one length, and of sub-blocks that share a causal triangle."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_numpy import tuning

__all__ = ["lower", "moveaxis", "split_sub_blocks", "split_tiles", "sub_blocks", "tiles"]

Floats = NDArray[Any]


def sub_blocks(n: int) -> list[tuple[slice, int]]:
    """Rows of a block by the length of their sub-blocks: whole ones, and the rest."""
    whole = n - n % tuning.SUB_BLOCK_ROWS
    parts = [(slice(0, whole), tuning.SUB_BLOCK_ROWS), (slice(whole, n), n - whole)]
    return [(rows, size) for rows, size in parts if rows.start < rows.stop]


def split_sub_blocks(x: Floats, rows: slice, size: int) -> Floats:
    """Give these rows an axis of sub-blocks."""
    x = x[..., rows, :]
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


@cache
def tiles(n: int, max_rows: int) -> list[tuple[slice, int, int]]:
    """Rows of a block by the shape of their tiles: ``(rows, length of a tile, its sub-blocks')``.

    A tile is of at most so many rows, or of one sub-block.
    """
    groups = []
    for rows, size in sub_blocks(n):
        length = max(1, max_rows // size) * size
        edge = rows.stop - (rows.stop - rows.start) % length
        groups.append((slice(rows.start, edge), length, size))
        groups.append((slice(edge, rows.stop), rows.stop - edge, size))
    return [group for group in groups if group[0].start < group[0].stop]


def split_tiles(x: Floats, *shape: int) -> Floats:
    """Give the rows of a number of tiles this shape, and put the tiles first."""
    return moveaxis(x.reshape(*x.shape[:-2], -1, *shape, x.shape[-1]), x.ndim - 2, 0)


@cache
def lower(size: int, dtype: Any) -> Floats:
    """Ones at and below the diagonal."""
    return np.tri(size, dtype=dtype)


def moveaxis(x: Floats, source: int, target: int) -> Floats:
    """Move an axis, without the checks that make NumPy's own function slow."""
    axes = list(range(x.ndim))
    axes.insert(target % x.ndim, axes.pop(source))
    return x.transpose(axes)

"""Parts of a block: heads, tiles of one length, and sub-blocks that share a causal triangle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Index
from linattn_numpy import tuning
from linattn_numpy.buffers import Floats


class Run(NamedTuple):
    """Sub-blocks of one length, one after the other."""

    rows: slice
    size: int
    places: slice
    """Their numbers among all sub-blocks of a block."""

    def split(self, x: Floats) -> Floats:
        """Return the rows of these sub-blocks, ``(..., count, size, width)``."""
        x = x[..., self.rows, :]
        return x.reshape(*x.shape[:-2], -1, self.size, x.shape[-1])


def sub_blocks(n: int, size: int = tuning.SUB_BLOCK_ROWS) -> list[Run]:
    """Sub-blocks of a block: whole ones, and the rest."""
    count, rest = divmod(n, size)
    runs = [Run(slice(0, n - rest), size, slice(0, count))] if count else []
    return [*runs, Run(slice(n - rest, n), rest, slice(count, count + 1))] if rest else runs


def runs_of(sizes: Iterable[int]) -> list[Run]:
    """Put sub-blocks of these sizes, one after the other, into runs."""
    runs, row, place = [], 0, 0
    for size, alike in groupby(sizes):
        count = len(list(alike))
        runs.append(Run(slice(row, row + count * size), size, slice(place, place + count)))
        row, place = row + count * size, place + count
    return runs


@lru_cache(128)
def tiles(n: int, max_rows: int) -> list[tuple[slice, int, int]]:
    """Rows of a block by the shape of their tiles: ``(rows, length of a tile, its sub-blocks')``.

    A tile has at most ``max_rows`` rows, or one sub-block.
    """
    groups = []
    for rows, size, _ in sub_blocks(n):
        length = max(1, max_rows // size) * size
        edge = rows.stop - (rows.stop - rows.start) % length
        groups.append((slice(rows.start, edge), length, size))
        groups.append((slice(edge, rows.stop), rows.stop - edge, size))
    return [group for group in groups if group[0].start < group[0].stop]


@lru_cache(128)
def equal_parts(n: int, most: int) -> list[slice]:
    """Cut n rows into as few parts as possible of at most ``most``; all but the last are equal."""
    size = -(-n // -(-n // max(1, most)))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


@lru_cache(128)
def head_parts(lead: tuple[int, ...], heads: int) -> Sequence[Index]:
    """Cut leading axes into parts of at most ``heads`` heads, or of one."""
    sizes = part_sizes(lead, heads)
    if sizes == lead:
        return [()]
    # An axis of 1 stays whole: queries may have more along it.
    axes = [
        [slice(i, min(i + size, n)) for i in range(0, n, size)] if n != 1 else [slice(None)]
        for n, size in zip(lead, sizes, strict=True)
    ]
    return list(product(*axes))


@lru_cache(128)
def head_tiles(
    lead: tuple[int, ...], n: int, most: int, min_rows: int, are_apart: bool
) -> Sequence[tuple[Any, Any]]:
    """Return tiles of at most ``most`` rows, or ``min_rows`` of each head, as pairs of indices.

    The first index takes heads, the second takes rows of them. ``are_apart``: a tile is whole heads
    or a part of one head, without its leading axes; otherwise some rows of all heads.
    """
    tiles, parts = [], head_parts(lead, most // n) if are_apart else [()]
    for heads in product(*map(range, lead)) if are_apart and most // n <= 1 else parts:
        num_heads = np.broadcast_to(0, lead)[heads].size
        for rows in equal_parts(n, max(min_rows, most // num_heads)):
            tiles.append((heads, (*heads, ..., rows, slice(None))))
    return tiles


def part_sizes(lead: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """Entries of each axis in a part: whole last axes, and a share of the axis before them."""
    sizes: list[int] = []
    for n in reversed(lead):
        sizes.insert(0, max(1, min(n, heads)))
        heads //= max(n, 1)
    return tuple(sizes)


def split_tiles(x: Floats, *shape: int) -> Floats:
    """Reshape rows to tiles of this shape, with the axis of tiles first."""
    return moveaxis(x.reshape(*x.shape[:-2], -1, *shape, x.shape[-1]), x.ndim - 2, 0)


@cache
def lower(size: int, dtype: Any, diagonal: int = 0) -> Floats:
    """Ones at and below a diagonal."""
    return np.tri(size, k=diagonal, dtype=dtype)


@lru_cache(128)
def ones_column(n: int, dtype: Any) -> Floats:
    """Ones, (n, 1)."""
    return np.ones((n, 1), dtype)


def moveaxis(x: Floats, source: int, target: int) -> Floats:
    """Move an axis, without the checks that make NumPy's own function slow."""
    axes = list(range(x.ndim))
    axes.insert(target % x.ndim, axes.pop(source))
    return x.transpose(axes)

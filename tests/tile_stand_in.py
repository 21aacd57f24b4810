"""`cuda.tile` on NumPy: a tile is an array, blocks run one after another.

Numbers are rounded where a kernel says `astype`, products are of float32. Padding is NaN where a
load does not ask for zeros. Formulas are told wrong by it, not what a compiler makes of them.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np


class Constant:
    """`Constant[int]` as an annotation."""

    def __class_getitem__(cls, kind):
        return kind


class Grid:
    """The grid, and the block that runs now."""

    shape: Any = (1, 1, 1)
    at: Any = (0, 0, 0)


def _window(index, shape):
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, shape, strict=True))


def load(array, index, shape, padding_mode=np.nan):
    """Read a tile."""
    part = array[_window(index, shape)]
    tile = np.full(shape, padding_mode, array.dtype)
    tile[tuple(slice(0, n) for n in part.shape)] = part
    return tile


def store(array, index, tile):
    """Write a tile, as far as it lies within the array."""
    view = array[_window(index, tile.shape)]
    assert tile.dtype == array.dtype, (tile.dtype, array.dtype)
    view[...] = tile[tuple(slice(0, n) for n in view.shape)]


def mma(a, b, c):
    """Return a @ b + c in float32."""
    assert a.dtype == b.dtype
    assert c.dtype == np.float32
    assert all(n & (n - 1) == 0 for n in (*a.shape, *b.shape)), "tiles have powers of 2"
    return a.astype(np.float32) @ b.astype(np.float32) + c


def astype(x, dtype):
    """Round; TF32 has 10 bits after the point."""
    if dtype != "tf32":
        return x.astype(dtype)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def launch(stream, grid, kernel, args):
    """Run the blocks of a grid one after another."""
    Grid.shape = grid
    with np.errstate(all="ignore"):
        for Grid.at in itertools.product(*map(range, grid)):
            kernel(*args)


def stand_in(monkeypatch):
    """Put the stand-in where `import cuda.tile` finds it, until the test ends."""
    tile, cuda = ModuleType("cuda.tile"), ModuleType("cuda")
    shared = dict(Constant=Constant, load=load, store=store, mma=mma, astype=astype, launch=launch)
    same = dict(reshape=np.reshape, zeros=np.zeros, full=np.full, max=np.max, sum=np.sum)
    for name, value in {**shared, **same}.items():
        setattr(tile, name, value)
    tile.bfloat16, tile.float32, tile.int32 = ml_dtypes.bfloat16, np.float32, np.int32
    tile.tfloat32, tile.PaddingMode = "tf32", SimpleNamespace(ZERO=0.0)
    tile.kernel = lambda **hints: lambda function: function
    tile.bid, tile.num_blocks = lambda axis: Grid.at[axis], lambda axis: Grid.shape[axis]
    tile.transpose, tile.maximum = np.transpose, np.maximum
    tile.arange = lambda n, dtype: np.arange(n, dtype=dtype)
    tile.exp2 = lambda x, flush_to_zero: np.exp2(x)
    tile.where = lambda mask, x, y: np.where(mask, x, np.float32(y))
    cuda.tile = tile
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.tile", tile)
    monkeypatch.delitem(sys.modules, "linattn_cupy.tile_kernels", raising=False)

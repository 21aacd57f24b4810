"""Rows of all heads in float32 as kernels take them: tokens, maps, keys, and where results go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Spec
from linattn_cupy import device
from linattn_cupy.device import cupy
from linattn_cupy.layout import Heads, is_uniform, view
from linattn_cupy.parameters import FAMILIES, Parameters, family_of, num_features_of, parameters_of
from linattn_cupy.products import multiply

WARPS = 8
THREADS = 32 * WARPS
COPIES_AT_ONCE = 8
"""As in features.cu: elements that a thread of a copy takes."""

StateArrays = tuple[Array, Array]
"""Sums (heads, m, columns) and shifts (heads, m)."""


def launch_rows(
    function: str, blocks: int, args: list[Any], *, source: str = "features.cu"
) -> None:
    """Launch a kernel of rows."""
    device.launch(source, function, {"WARPS": WARPS}, (blocks, 1, 1), (THREADS, 1, 1), 0, args)


def element_blocks(heads: int, count: int, each: int = 1) -> int:
    """Count thread blocks of threads that take `each` of the `count` elements of a head."""
    return heads * -(-count // (THREADS * each))


def row_blocks(heads: int, count: int) -> int:
    """Blocks of threads whose warps take one of the `count` rows of a head each."""
    return heads * -(-count // WARPS)


def int32(*sizes: int) -> list[np.int32]:
    """Return sizes as kernels take them."""
    return [np.int32(size) for size in sizes]


def array_steps(array: Array | None, axes: int) -> list[Any]:
    """Return an array and its first strides in elements, a null pointer for None."""
    if array is None:
        return [None, *[np.int64(0)] * axes]
    return [array, *(np.int64(step // array.dtype.itemsize) for step in array.strides[:axes])]


def whole_array(array: Array, axes: int, lead: tuple[int, ...]) -> Array:
    """Return an array with all leading axes, in C order."""
    inner = tuple(array.shape[array.ndim - axes :])
    if tuple(array.shape[: array.ndim - axes]) != lead:
        array = cupy.broadcast_to(array, (*lead, *inner))
    return cupy.ascontiguousarray(array)


class HeadRows:
    """Rows of every head, (heads, n, x): where they lie, or packed a block at a time."""

    def __init__(self, array: Array, heads: Heads) -> None:
        shape = tuple(array.shape[-2:])
        if tuple(array.shape[:-2]) != heads.lead:
            array = cupy.broadcast_to(array, (*heads.lead, *shape))
        if array.strides[-1] != array.dtype.itemsize:
            array = cupy.ascontiguousarray(array)
        self._array, self.heads = array, heads
        self._flat = array.reshape(heads.total, *shape) if is_uniform(array) else None

    def view(self, rows: slice) -> list[Any]:
        """Rows and their strides as the kernels take them that know of several axes of heads."""
        return view(self.heads, self._array[..., rows, :])

    def part(self, rows: slice) -> Array:
        """Rows of all heads, with one step from each head to the next."""
        return self.packed(rows) if self._flat is None else self._flat[:, rows]

    def packed(self, rows: slice, log_weights: Sequence[Any] = (None, np.int64(0))) -> Array:
        """Rows one behind the other, those of log weight -inf as zeros."""
        n, width = self._array[..., rows, :].shape[-2:]
        packed = cupy.empty((self.heads.total, n, width), "float32")
        args = [*self.view(rows), *self.heads.args, *log_weights]
        args += [*int32(n, width, 0), packed]
        launch_rows("pack_rows", element_blocks(self.heads.total, n * width, COPIES_AT_ONCE), args)
        return packed


class Side:
    """One side of a map, for all heads or for one that they share."""

    def __init__(self, spec: Spec, dim: int, lead: tuple[int, ...]) -> None:
        self.family, self.features = family_of(spec), num_features_of(spec, dim)
        given = parameters_of(spec, cupy.empty((0, dim), "float32"), dim, self.features)
        self.map = given if given.lead in ((), lead) else _broadcast(given, lead)

    def logits(self, x: Array) -> Array:
        """Logits (heads, n, m) of tokens, without the terms added to rows and columns."""
        heads, n, d = x.shape
        u = cupy.empty((heads, n, self.features), "float32")
        if self.map.projection is None:
            step, *row = array_steps(x, 2)[1:]
            args = [x, *[np.int64(0)] * 2, step, *row, np.int64(1), np.int64(heads)]
            args += [None, np.int64(0), *int32(n, d, FAMILIES[self.family]), u]
            launch_rows("pack_rows", element_blocks(heads, n * d, COPIES_AT_ONCE), args)
        else:
            multiply(x, self.map.projection, u)
        return u

    @property
    def offsets(self) -> list[Any]:
        """Offsets of the features, and of how many heads they are."""
        return [self.map.col, np.int64(self.map.col.shape[0])]

    @property
    def curvature(self) -> np.float32:
        """Curvature of the map."""
        return np.float32(self.map.curvature)


def _broadcast(given: Parameters, lead: tuple[int, ...]) -> Parameters:
    """Copy parameters to every head."""

    def copied(array: Array) -> Array:
        shape = tuple(array.shape[1:])
        whole = whole_array(array.reshape(*given.lead, *shape), len(shape), lead)
        return whole.reshape(-1, *shape)

    projection = None if given.projection is None else copied(given.projection)
    return Parameters(projection, copied(given.col), given.curvature, lead)


class Keys(NamedTuple):
    """Keys and values of every head, and log weights ``(..., n)``, contiguous, or None for 0.

    ``decay``, (heads, n): sums of log decays from the first token of each tile on, or None.
    """

    side: Side
    tokens: HeadRows
    values: HeadRows
    weights: Array | None
    decay: Array | None = None

    def fades(self, rows: slice) -> list[Any]:
        """Decays of a block, and the step from each head to the next."""
        return array_steps(None if self.decay is None else self.decay[:, rows], 1)

    def log_weights(self, rows: slice) -> list[Any]:
        """Log weights, and the step from each head to the next."""
        if self.weights is None:
            return [None, np.int64(0)]
        return [self.weights[..., rows], np.int64(self.weights.shape[-1])]


class Queries(NamedTuple):
    """Queries of every head."""

    side: Side
    tokens: HeadRows


class Output(NamedTuple):
    """Where rows of all heads go: the output (heads, n, e), and log normalizers (heads, n) or None.

    Unless it ``divides``: numerators and denominators (heads, n, e + 1), and logs of their scales.
    """

    rows: Array
    norms: Array | None
    divides: bool

    def part(self, rows: slice) -> Output:
        """Take some rows."""
        norms = None if self.norms is None else self.norms[:, rows]
        return self._replace(rows=self.rows[:, rows], norms=norms)

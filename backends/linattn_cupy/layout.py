"""Layout of arrays as kernels take it: strides over at most three axes of heads, segments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array
from linattn_cupy import device

MAX_AXES = 3


class Heads(NamedTuple):
    """Leading axes, without those of size 1, filled up with ones to three."""

    sizes: tuple[int, int, int]
    axes: tuple[int, ...]
    lead: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many heads."""
        return self.sizes[0] * self.sizes[1] * self.sizes[2]

    @property
    def args(self) -> tuple[np.int64, np.int64]:
        """Sizes as the kernels take them: the first is not needed."""
        return np.int64(self.sizes[1]), np.int64(self.sizes[2])


class Segments(NamedTuple):
    """How the tokens of each head are cut into segments, one for each block of threads."""

    num_tokens: int
    length: int
    number: int

    @property
    def args(self) -> tuple[np.int64, np.int64, np.int32]:
        """Sizes as the kernels take them."""
        return np.int64(self.num_tokens), np.int64(self.length), np.int32(self.number)


def heads_of(lead: tuple[int, ...]) -> Heads:
    """Heads of leading axes; UnsupportedError where more than three of them are larger than 1."""
    axes = tuple(i for i, size in enumerate(lead) if size != 1)
    device.require(len(axes) <= MAX_AXES, f"{len(axes)} axes of heads are more than {MAX_AXES}")
    sizes = (1,) * (MAX_AXES - len(axes)) + tuple(lead[i] for i in axes)
    return Heads((sizes[0], sizes[1], sizes[2]), axes, lead)


def _head_strides(heads: Heads, shape: tuple[int, ...], steps: tuple[int, ...]) -> list[np.int64]:
    """Return steps along the heads' axes, 0 where an array has one element only, or no axis."""
    missing = len(heads.lead) - len(shape)
    found = [np.int64(0)] * (MAX_AXES - len(heads.axes))
    for axis in heads.axes:
        i = axis - missing
        found.append(np.int64(steps[i] if i >= 0 and shape[i] != 1 else 0))
    return found


def strides(heads: Heads, array: Array, *, rows: bool = True) -> list[np.int64]:
    """Strides of an array ``(..., n, x)`` in elements: three for the heads, one for the row."""
    shape, size = tuple(array.shape[:-2]), array.dtype.itemsize
    found = _head_strides(heads, shape, tuple(step // size for step in array.strides[:-2]))
    return [*found, np.int64(array.strides[-2] // size)] if rows else found


def is_uniform(array: Array) -> bool:
    """Whether all heads of an array ``(..., n, x)`` are one step from the next.

    Rows must not overlap, nor their elements have gaps: as products take their operands.
    """
    steps = [step // array.dtype.itemsize for step in array.strides]
    axes = [x for x in zip(array.shape[:-2], steps, strict=False) if x[0] != 1]
    row, element = steps[-2:]
    return (
        all(outer == size * step for (_, outer), (size, step) in pairwise(axes))
        and all(step >= 0 for _, step in axes)
        and element == 1
        and (row >= array.shape[-1] or array.shape[-2] == 1)
    )


def view(heads: Heads, array: Array | None) -> list[Any]:
    """Return an array and its strides as the kernels take them, a null pointer for None."""
    if array is None:
        return [None, *[np.int64(0)] * 4]
    return [array, *strides(heads, array)]


def unit_strides(heads: Heads, lead: tuple[int, ...]) -> list[np.int64]:
    """Strides of a contiguous array with these leading axes, in its units of a head."""
    steps = [1] * len(lead)
    for i in range(len(lead) - 1, 0, -1):
        steps[i - 1] = steps[i] * lead[i]
    return _head_strides(heads, lead, tuple(steps))


def sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the leading axes along which an argument of this shape was broadcast."""
    missing = gradient.ndim - len(shape)
    axes = tuple(
        i
        for i, size in enumerate(gradient.shape[:-2])
        if i < missing or (shape[i - missing] == 1 and size != 1)
    )
    if not axes:
        return gradient.reshape(shape)
    return gradient.astype("float32").sum(axis=axes).reshape(shape).astype(gradient.dtype)

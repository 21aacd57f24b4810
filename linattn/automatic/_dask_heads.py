"""Some heads of Dask arrays, and outputs of all heads put together: one more task a block for each.

Parameters of heads go with one chunk of heads. So every *box*, a chunk along each leading axis, is
attended to by itself, its heads along one axis. Nothing of Dask is imported: arrays have methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn.automatic._heads import Given, Heads
from linattn.typing import Array, Problem

__all__ = ["Box", "boxes_of", "join_boxes", "lead_chunks"]


class Box(NamedTuple):
    """One chunk along each leading axis.

    Attributes
    ----------
    slices : tuple of slice
        Of the leading axes.
    shape : tuple of int
        Their lengths.
    heads : list of int
        Numbers of its heads, in their order.
    """

    slices: tuple[slice, ...]
    shape: tuple[int, ...]
    heads: list[int]

    def taken(self, given: Given, chosen: Sequence[int]) -> Heads:
        """Take some heads, along one axis; a mask or bias of all heads stays as it is."""
        problem = given.problem
        places = [self.heads.index(head) for head in chosen]
        query, key, value = (
            self._taken(x, places) for x in (problem.query, problem.key, problem.value)
        )
        mask, bias = (
            None if x is None else (x if x.ndim == 2 else self._taken(x, places))[..., 0]
            for x in (problem.key_mask, problem.key_bias)
        )
        return Heads(query, key, value, mask, bias)

    def _taken(self, x: Array, places: list[int]) -> Array:
        axes = x.ndim - 2
        pairs = zip(self.slices[len(self.slices) - axes :], x.shape[:axes], strict=True)
        index = (slice(None) if n == 1 else rows for rows, n in pairs)
        x = x[(*index, slice(None), slice(None))]
        if x.shape[:axes] == (len(places),) == self.shape:
            return x
        return x.map_blocks(
            _take_heads,
            shape=self.shape,
            places=places,
            drop_axis=list(range(axes)),
            new_axis=0,
            chunks=((len(places),), *x.chunks[-2:]),
            dtype=x.dtype,
            meta=x._meta.reshape((0, 0, 0)),
        )

    def joined(self, parts: Sequence[tuple[Sequence[int], Array]]) -> Array:
        """Put the outputs of groups of heads into the order of the heads, on the leading axes."""
        outputs = [output for _, output in parts]
        if len(parts) == len(self.shape) == 1:
            return outputs[0]
        first = outputs[0]
        order = np.argsort([self.heads.index(head) for heads, _ in parts for head in heads])
        return first.map_blocks(
            _join_heads,
            *outputs[1:],
            order=order,
            shape=self.shape,
            drop_axis=0,
            new_axis=list(range(len(self.shape))),
            chunks=(*((n,) for n in self.shape), *first.chunks[-2:]),
            dtype=first.dtype,
            meta=first._meta.reshape((0,) * (len(self.shape) + 2)),
        )


def _take_heads(x: Array, shape: tuple[int, ...], places: list[int]) -> Array:
    xp = array_api_compat.array_namespace(x)
    flat = xp.reshape(xp.broadcast_to(x, (*shape, *x.shape[-2:])), (-1, *x.shape[-2:]))
    return xp.take(flat, xp.asarray(places, device=array_api_compat.device(x)), axis=0)


def _join_heads(*outputs: Array, order: NDArray[np.intp], shape: tuple[int, ...]) -> Array:
    xp = array_api_compat.array_namespace(outputs[0])
    index = xp.asarray(order, device=array_api_compat.device(outputs[0]))
    joined = xp.take(xp.concat(outputs, axis=0), index, axis=0)
    return xp.reshape(joined, (*shape, *joined.shape[-2:]))


def lead_chunks(problem: Problem) -> list[tuple[int, ...]]:
    """Chunks along the leading axes: those of the arrays that are not broadcast there."""
    arrays = problem.query, problem.key, problem.value
    chunks: list[tuple[int, ...]] = []
    for axis in range(-2 - len(problem.lead), -2):
        found = [x.chunks[axis] for x in arrays if x.ndim >= -axis]
        chunks.append(next((c for c in found if sum(c) != 1), (1,)))
    return chunks


def boxes_of(problem: Problem) -> list[Box]:
    """All boxes, those of the last axis one after the other."""
    numbers = np.arange(int(np.prod(problem.lead, dtype=np.int64))).reshape(problem.lead)
    axes = [
        [slice(stop - n, stop) for n, stop in zip(chunks, accumulate(chunks), strict=True) if n]
        for chunks in lead_chunks(problem)
    ]
    boxes = []
    for slices in product(*axes):
        heads = numbers[slices]
        boxes.append(Box(slices, heads.shape, heads.ravel().tolist()))
    return boxes


def join_boxes(problem: Problem, outputs: list[Array]) -> Array:
    """Put the outputs of all boxes side by side."""
    for axis, chunks in reversed(list(enumerate(lead_chunks(problem)))):
        n = sum(length > 0 for length in chunks)
        if n > 1:
            groups = [outputs[i : i + n] for i in range(0, len(outputs), n)]
            outputs = [problem.xp.concat(group, axis=axis) for group in groups]
    return outputs[0]

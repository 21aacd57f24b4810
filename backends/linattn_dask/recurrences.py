"""Recurrences block by block: a block maps the state before it to that after it.

The maps of all blocks are made side by side and merged in their order; then each block is done
again from the state before it, as causal attention is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from dask.array.utils import meta_from_array

from linattn.typing import Array, Declined, Recurrence
from linattn_dask.block_recurrences import (
    merge_transitions,
    pack_matrix,
    recur,
    transition,
)
from linattn_dask.blocks import Call
from linattn_dask.layout import (
    Part,
    check_chunks,
    common_chunks,
    differing,
    lead_axes,
    read_again,
    tasks,
)
from linattn_dask.short import short
from linattn_dask.states import AXES, ones, prefix_scan

Chunks: TypeAlias = tuple[int, ...]

TOKENS = ("query", "key", "value")
BESIDE = {"log_decay": "log_decay", "beta": "beta", "erase_key": "dim", "read_key": "dim"}
"""Other arrays of tokens, with the names of their last axes."""
OF_BLOCKS = ("tokens", *AXES[1:])


def recurrence(problem: Recurrence) -> tuple[Array, Array]:
    """Output and state after the last token, lazily."""
    blocks = _Blocks(problem)
    before, last = blocks.states()
    parts = blocks.parts | {"state": Part(before, OF_BLOCKS)}
    axes = {"tokens": blocks.chunks, "outputs": (blocks.value_dim,)}
    ndim = len(blocks.lead) + 2
    meta = meta_from_array(problem.query._meta, ndim=ndim, dtype=problem.query.dtype)
    output = blocks.make(recur, axes, blocks.lead, parts, meta=meta, scale=problem.scale)
    return output, last[..., 0, :, : blocks.value_dim]


def recurrence_vjp(problem: Recurrence, grad_output: Array, grad_state: Array | None) -> Declined:
    """Leave the gradients of short sequences to the core; longer sequences are an error."""
    return short("gradients of a recurrence", problem)


class _Blocks:
    """Arrays of a recurrence with their axes, checked; and the tasks that are made of them."""

    def __init__(self, problem: Recurrence) -> None:
        self.problem, self.value_dim = problem, problem.value.shape[-1]
        axes = {"query": "dim", "key": "dim", "value": "value"}
        self.parts = {n: Part(getattr(problem, n), ("tokens", last)) for n, last in axes.items()}
        self.chunks: Chunks = problem.key.chunks[-2]
        for name, part in self.parts.items():
            check_chunks(name, part.array)
            if part.array.chunks[-2] != self.chunks:
                raise differing(("key", name), -2, self.chunks, part.array.chunks[-2])
        keys = [self.parts["key"], self.parts["value"]]
        for name, last in BESIDE.items():
            numbers = getattr(problem, name)
            if numbers is not None:
                numbers = self._beside(numbers, self.chunks, keys)
                self.parts[name] = Part(numbers, ("tokens", last))
                keys.append(self.parts[name])
        self.token_lead = common_chunks(keys, ())
        self._state: Array | None = problem.initial_state
        if self._state is not None:
            self._state = self._beside(self._state, -1, [*keys, self.parts["query"]])
            keys.append(Part(self._state, ("features", "value")))
        self.state_lead = common_chunks(keys, ())
        self.lead = common_chunks([*keys, self.parts["query"]], ())
        width = self.value_dim + problem.key.shape[-1]
        self.state_axes: dict[str, Chunks] = {
            "features": (problem.key.shape[-1],),
            "packed": (width,),
        }

    def _beside(self, array: Array, rows: Any, parts: list[Part]) -> Array:
        """Chunk an array along leading axes as tokens are."""
        lead = common_chunks(parts, ())[::-1]
        chunks = list(array.chunks[:-2][::-1])
        for i, like in enumerate(lead[: len(chunks)]):
            if sum(like) == sum(chunks[i]):
                chunks[i] = like
        return array.rechunk((*chunks[::-1], rows, -1))

    def make(
        self,
        function: Callable[..., Any],
        axes: dict[str, Chunks],
        lead: list[Chunks],
        parts: dict[str, Part],
        *,
        meta: Array | None = None,
        **options: Any,
    ) -> Array:
        """Make an array of a task for each block: ``axes`` are the last ones, with their chunks."""
        problem = self.problem
        precision = "float64" if problem.dtype == np.float64 else None
        call = Call(
            tuple(parts),
            self.value_dim,
            problem.num_threads,
            precision,
            chunk_size=problem.chunk_size,
        )
        if meta is None:
            ndim = len(lead) + len(axes)
            meta = meta_from_array(problem.key._meta, ndim=ndim, dtype=problem.dtype)
        return tasks(function, call, {**lead_axes(lead), **axes}, parts, meta, **options)

    def of_keys(self) -> dict[str, Part]:
        """Return what changes states."""
        return {name: part for name, part in self.parts.items() if name != "query"}

    def merge(self, *states: Array, of_blocks: bool = False, from_the_end: bool = False) -> Array:
        """Merge maps chunk by chunk, in their order."""
        axes = {"block": ones(states[-1].chunks[-3]), **self.state_axes}
        lead = list(states[0].chunks[:-3]) if of_blocks else self.state_lead
        parts = {str(i): Part(state, AXES) for i, state in enumerate(states)}
        return self.make(merge_transitions, axes, lead, parts, from_the_end=from_the_end)

    def pack(self, matrix: Array) -> Array:
        """Make a map of a state or an adjoint, with all leading axes."""
        matrix = self._beside(matrix, -1, [Part(self.map_of_nothing(), AXES)])
        parts = {"matrix": Part(matrix, ("features", "value"))}
        axes: dict[str, Chunks] = {"block": (1,), **self.state_axes}
        packed = self.make(pack_matrix, axes, list(matrix.chunks[:-2]), parts)
        return self.merge(packed, self.map_of_nothing())

    def map_of_nothing(self) -> Array:
        """Map of no token."""
        parts = {
            name: Part(part.array[..., :0, :].rechunk({-2: -1}), part.axes)
            for name, part in self.of_keys().items()
        }
        axes: dict[str, Chunks] = {"tokens": (1,), **self.state_axes}
        return self.make(transition, axes, self.token_lead, parts)

    def states(self) -> tuple[Array, Array]:
        """States before each block, and the last."""
        axes = {"tokens": ones(self.chunks), **self.state_axes}
        tokens = read_again(self.of_keys(), "states")
        maps = self.make(transition, axes, self.token_lead, tokens)
        nothing = self.map_of_nothing()
        first = nothing if self._state is None else self.pack(self._state)
        return prefix_scan(self.merge, maps, first)

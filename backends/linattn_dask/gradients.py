"""Gradients block by block: what queries leave for keys is merged as states are, from the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from linattn.typing import Array, Cotangent, Declined, Problem
from linattn_dask.block_gradients import (
    add_heads,
    adjoint_of_block,
    gradient_of_block,
    pull_causal_block,
    pull_keys,
    pull_queries,
    state_gradient,
)
from linattn_dask.blocks import pack_block
from linattn_dask.fitted import fitted
from linattn_dask.layout import Layout, Part, state_parts
from linattn_dask.short import declined_gradients
from linattn_dask.states import (
    AXES,
    all_states,
    block_states,
    first_state,
    merge,
    ones,
    reduce_states,
    state_axes,
    states_after,
    states_before,
)
from linattn_dask.sums import sum_to, with_ones

Chunks: TypeAlias = tuple[int, ...]
Gradients: TypeAlias = tuple[Array | None, ...]

WEIGHTS = ("key_bias", "log_decay")
KEYS = ("key", "value", "key_mask", *WEIGHTS)


def attention_vjp(problem: Problem, cotangent: Cotangent) -> Gradients | Declined:
    """Pull back lazily, block by block of the caller's chunks."""
    if problem.mode not in WALKS:
        return declined_gradients(problem)
    gradients = WALKS[problem.mode](_Pullback(fitted(problem), cotangent))
    arrays = (problem.query, problem.key, problem.value, None, *_weights(problem))
    return tuple(
        each if each is None or array is None else each.rechunk(array.chunks, method="tasks")
        for each, array in zip(gradients, arrays, strict=True)
    )


def _weights(problem: Problem) -> list[Array | None]:
    return [getattr(problem.weights, name) for name in WEIGHTS]


class _Pulled(NamedTuple):
    """Gradients of all blocks, one block a chunk."""

    blocks: Part
    lead: list[Chunks]
    """Chunks of the leading axes that the blocks were made of."""


class _Pullback:
    """A problem with the derivatives of a loss by its outputs, and the tasks made of them."""

    def __init__(self, problem: Problem, cotangent: Cotangent) -> None:
        self.problem, self.layout = problem, Layout(problem)
        chunks = (*self.layout.lead, self.layout.query_chunks, (problem.value.shape[-1],))
        output = cotangent.output.rechunk(chunks, method="tasks")
        self.cotangent = cotangent._replace(output=output)

    def last_adjoint(self) -> Array:
        """Adjoint after the last key, ``(..., 1, m, packed)``: of the state that was returned."""
        layout, given = self.layout, self.cotangent.state
        nothing = first_state(layout, with_given=False)
        if given is None:
            return nothing
        parts = state_parts(given, layout.state_lead)
        axes = {"block": (1,), **state_axes(layout)}
        axes["packed"] = (self.problem.value.shape[-1] + 2,)
        packed = layout.blockwise(pack_block, axes, parts["kvz"].lead_chunks, parts)
        return merge(layout, packed, nothing)

    def pull(
        self, function: Callable[..., Any], axis: str, parts: dict[str, Part], lead: list[Chunks]
    ) -> _Pulled:
        """Make the gradients of each block along an axis."""
        chunks = self._chunks(axis)
        parts |= self.layout.parts("feature_map") | self.layout.starts(chunks, axis)
        meta = np.empty((0,) * (len(lead) + 2), dtype=object)
        # The last axis, which stands for axes that are summed over, must have one chunk.
        axes = {axis: ones(chunks), "gradients": (1,)}
        blocks = self.layout.blockwise(function, axes, [*map(ones, lead)], parts, meta=meta)
        return _Pulled(Part(blocks, (axis, "gradients")), lead)

    def gradient(self, name: str, *pulled: _Pulled) -> Array:
        """Gradient by an array of the problem: of one kind of blocks, or the sum of several."""
        if any(each.lead != pulled[0].lead for each in pulled):
            first, *more = (self.gradient(name, each) for each in pulled)
            return sum(more, start=first)
        lead, (axis, _) = pulled[0].lead, pulled[0].blocks.axes
        array, argument_axes = self.layout.part(name)
        *shape, _, width = array.shape
        chunks = self._chunks("rows" if name == "query" else axis)
        # One number for all keys has a gradient from each block, from one without keys too.
        axes = {axis: ones(chunks) if "all_keys" in argument_axes else chunks, "numbers": (width,)}
        parts = {str(i): each.blocks for i, each in enumerate(pulled)}
        gradient = self.layout.blockwise(
            gradient_of_block,
            axes,
            with_ones(lead, shape),
            parts,
            argument=name,
            ndim=len(lead) + 2,
        )
        return sum_to(gradient, array.shape).astype(array.dtype, copy=False)

    def adjoints(self, pulled: _Pulled) -> Array:
        """Adjoint of the state before each block, ``(..., blocks, m, packed)``."""
        layout, (axis, _) = self.layout, pulled.blocks.axes
        shape = [sum(chunks) for chunks in layout.state_lead]
        lead = with_ones(pulled.lead, shape)
        axes = {axis: ones(self._chunks(axis)), **state_axes(layout)}
        parts = {"pulled": pulled.blocks}
        adjoints = layout.blockwise(adjoint_of_block, axes, lead, parts, ndim=len(lead) + 3)
        add = partial(add_heads, value_dim=self.problem.value.shape[-1])
        return sum_to(adjoints, (*shape, *adjoints.shape[-3:]), add)

    def state_gradient(self, adjoint: Array) -> Array | None:
        """Gradient by the ``kvz`` of the initial state, of the adjoint before the first key."""
        layout, state = self.layout, self.problem.state
        if state is None:
            return None
        parts = layout.parts("log_scale") | {"adjoint": Part(adjoint, AXES)}
        axes: dict[str, Chunks] = {"features": (self.problem.num_features,)}
        axes["width"] = (state.kvz.shape[-1],)
        gradient = layout.blockwise(state_gradient, axes, layout.state_lead, parts)
        return sum_to(gradient, state.kvz.shape)

    def weights(self, *pulled: _Pulled) -> list[Array | None]:
        """Gradients by the numbers of keys that change weights."""
        there = [name for name in WEIGHTS if getattr(self.problem.weights, name) is not None]
        found = {name: self.gradient(name, *pulled) for name in there}
        return [found.get(name) for name in WEIGHTS]

    def _chunks(self, axis: str) -> Chunks:
        return self.layout.query_chunks if axis == "rows" else self.layout.key_chunks


def _full(pullback: _Pullback) -> Gradients:
    layout = pullback.layout
    parts = layout.parts("query") | {
        "grad_output": Part(pullback.cotangent.output, ("rows", "outputs")),
        "state": Part(all_states(layout), AXES),
    }
    queries = pullback.pull(pull_queries, "rows", parts, layout.lead)
    adjoint = reduce_states(layout, pullback.adjoints(queries))
    if pullback.cotangent.state is not None:
        adjoint = merge(layout, pullback.last_adjoint(), adjoint)
    parts = layout.reading_again("gradients").parts(*KEYS) | {"adjoint": Part(adjoint, AXES)}
    keys = pullback.pull(pull_keys, "keys", parts, layout.state_lead)
    return (
        pullback.gradient("query", queries),
        pullback.gradient("key", keys),
        pullback.gradient("value", keys),
        pullback.state_gradient(adjoint),
        *pullback.weights(keys),
    )


def _causal(pullback: _Pullback) -> Gradients:
    layout = pullback.layout
    layout.check_rows()
    of_blocks = ("keys", *AXES[1:])
    states = block_states(layout.reading_again())
    before, _ = states_before(layout, states, first_state(layout))
    rows = layout.parts(*KEYS) | {
        "state": Part(before, of_blocks),
        "query": layout.part("query", ("keys", "dim")),
        "grad_output": Part(pullback.cotangent.output, ("keys", "outputs")),
    }
    keys = layout.reading_again("gradients").parts(*KEYS)
    if layout.problem.weights.log_decay is not None:
        keys["state"] = rows["state"]
        rows["states"] = Part(states, of_blocks)
    blocks = pullback.pull(pull_causal_block, "keys", rows, layout.lead)
    after, adjoint = states_after(layout, pullback.adjoints(blocks), pullback.last_adjoint())
    keys["adjoint"] = Part(after, of_blocks)
    later = pullback.pull(pull_keys, "keys", keys, layout.state_lead)
    return (
        pullback.gradient("query", blocks),
        pullback.gradient("key", blocks, later),
        pullback.gradient("value", blocks, later),
        pullback.state_gradient(adjoint),
        *pullback.weights(blocks, later),
    )


WALKS: dict[str, Callable[[_Pullback], Gradients]] = {"full": _full, "causal": _causal}
"""By the mode of the problem."""

"""Gradients of 16-bit attention by the fused kernels: forward again, then one walk a side."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Cotangent, Declined, Problem, State
from linattn_cupy import device
from linattn_cupy.device import cupy
from linattn_cupy.fused import (
    CAUSAL_TILE,
    MAX_WARPS,
    READ_TILES,
    Forward,
    SegmentStates,
    Variant,
    Work,
    aligned_rows,
    check_memory,
    first_pass,
    read_tile,
    redo_rejected,
    scan,
    scan_segments,
    segments_of,
    work_of,
)
from linattn_cupy.layout import Segments, sum_to, view

ONE_STRIP = 16 * MAX_WARPS
"""Most features of one strip a warp."""


def _shared(variant: Variant, tile: int, *, sources: bool, targets: bool) -> int:
    """Bytes of shared memory, as ``share`` in gradients.cu lays it out."""
    token_row, value_row = variant.dim + 8, variant.values + 8
    size = variant.features * token_row if variant.family == "exponential" else 0
    size += (sources + targets) * tile * (token_row + value_row)
    if targets:
        size += variant.features * value_row
    if sources and targets:
        size += variant.features * (tile + 8)
    return 2 * size + 4 * (5 * variant.features + 4 * tile)


class _Side(NamedTuple):
    """Tokens of one side: themselves, their vectors, log weights and scalars (None for 1)."""

    tokens: Array
    vectors: Array
    mask: Array | None
    rows: Array
    scalars: Array | None


class _Gradients(NamedTuple):
    """Gradients of tokens, partial ones where there are several value tiles, and of values."""

    whole: Array | None
    partials: Array | None
    values: Array | None
    dtype: Any

    @property
    def args(self) -> list[Any]:
        size = 0 if self.partials is None else self.partials[0].size
        return [self.whole, self.partials, np.int64(size), self.values]

    def result(self) -> tuple[Array, Array | None]:
        """Sum the partial results."""
        if self.partials is None:
            return self.whole, self.values
        return self.partials.sum(axis=0).astype(self.dtype), self.values


class _Pull:
    """The launches of a problem in which no two heads share a state."""

    def __init__(self, work: Work, grad_output: Array) -> None:
        self.work, self.heads = work, work.heads
        self.grad = aligned_rows(grad_output)

    def queries(self, output: Array, norms: Array) -> _Side:
        """Return queries with what the forward pass made of them."""
        length = norms.shape[-1]
        rows, scalars = (cupy.empty(norms.shape, "float32") for _ in range(2))
        total = self.heads.total * length
        work = self.work
        args = [
            *view(self.heads, work.query),
            *view(self.heads, self.grad),
            *(output, norms),
            *self.heads.args,
            *(np.int64(length), np.int64(total)),
            *work.dims()[:2],
            work.curvature(),
            *(rows, scalars),
        ]
        blocks = -(-total // work.variant.warps)
        work.launch("query_terms", blocks, CAUSAL_TILE, args, 0, KEYS=0)
        return _Side(work.query, self.grad, None, rows, scalars)

    def keys(self) -> _Side:
        """Return keys with their log weights."""
        work = self.work
        length = work.key.shape[-2]
        rows = cupy.empty((*work.problem.lead, length), "float32")
        total = self.heads.total * length
        args = [
            *view(self.heads, work.key),
            *view(self.heads, work.mask),
            *self.heads.args,
            *(np.int64(length), np.int64(total)),
            np.int32(work.key.shape[-1]),
            work.curvature(),
            rows,
        ]
        work.launch("key_terms", -(-total // work.variant.warps), CAUSAL_TILE, args, 0, KEYS=0)
        return _Side(work.key, work.value, work.mask, rows, None)

    def adjoints(self, queries: _Side, segments: Segments, needed: int) -> tuple[Array, Array]:
        """Adjoint states of the last ``needed`` segments, last first, and their shifts."""
        work = self.work
        kvz, shifts = work.new_states(self.heads.total, needed)
        if needed:
            args = [
                *view(self.heads, queries.tokens),
                *view(self.heads, queries.vectors),
                *(queries.rows, queries.scalars),
                *work.spec_args(self.heads),
                *self.heads.args,
                *segments.args,
                np.int32(needed),
                *work.dims(),
                *(kvz, shifts),
            ]
            blocks = self.heads.total * needed
            shared = _shared(work.variant, CAUSAL_TILE, sources=True, targets=False)
            work.launch("segment_adjoints", blocks, CAUSAL_TILE, args, shared, KEYS=0)
        return kvz, shifts

    def read(
        self, side: _Side, state: tuple[Array, Array], flags: Array, *, keys: bool
    ) -> tuple[Array, Array | None]:
        """Gradients of tokens that read one state each head, and of values for keys."""
        work, heads = self.work, self.heads
        length = side.tokens.shape[-2]
        tile = read_tile(partial(_shared, work.variant, sources=False, targets=True))
        segments = segments_of(length, heads.total * work.value_tiles, tile, length)
        out = self._gradients(keys=keys)
        args = [
            *view(self.heads, side.tokens),
            *view(self.heads, side.vectors),
            *view(heads, side.mask),
            *(side.rows, side.scalars),
            *work.spec_args(heads),
            *state,
            *work.sizes(heads, segments),
            *out.args,
            flags,
        ]
        blocks = heads.total * segments.number
        shared = _shared(work.variant, tile, sources=False, targets=True)
        work.launch("read_gradients", blocks, tile, args, shared, KEYS=int(keys))
        return out.result()

    def walk(
        self, queries: _Side, keys: _Side, states: SegmentStates, flags: Array, *, of_keys: bool
    ) -> tuple[Array, Array | None]:
        """Causal gradients of one side, from the states before segments or the adjoints after."""
        work, heads = self.work, self.heads
        out = self._gradients(keys=of_keys)
        arrays = (queries.tokens, keys.tokens, keys.vectors, queries.vectors, work.mask)
        args = [
            *(arg for array in arrays for arg in view(heads, array)),
            *(queries.rows, queries.scalars, keys.rows),
            *work.spec_args(heads),
            *(states.kvz, states.shifts),
            *work.sizes(heads, states.cut.segments),
            *out.args,
            flags,
        ]
        blocks = heads.total * states.cut.segments.number
        shared = _shared(work.variant, CAUSAL_TILE, sources=True, targets=True)
        work.launch("causal_gradients", blocks, CAUSAL_TILE, args, shared, KEYS=int(of_keys))
        return out.result()

    def _gradients(self, *, keys: bool) -> _Gradients:
        problem, dtype, tiles = self.work.problem, self.work.query.dtype, self.work.value_tiles
        tokens = problem.key if keys else problem.query
        rows = (*problem.lead, tokens.shape[-2])
        shape = (*rows, tokens.shape[-1])
        whole = cupy.empty(shape, dtype) if tiles == 1 else None
        partials = None if tiles == 1 else cupy.empty((tiles, *shape), "float32")
        values = cupy.empty((*rows, problem.value.shape[-1]), dtype) if keys else None
        return _Gradients(whole, partials, values, dtype)


@device.or_generic
def attention_pullback(problem: Problem) -> Any:
    """Linear attention of 16-bit arrays, and its pullback, which takes a copy of the output.

    The caller may write over the output before the pullback runs.
    """
    device.require(problem.state_lead == problem.lead, "heads share a state")
    work = _work_of(problem)
    forward = first_pass(work)
    output = forward.output.copy()
    norms = forward.norms.copy() if problem.want_log else None
    redo_rejected(work, forward, output, norms)
    before = 0 if problem.state is None else problem.state.length
    kvz, shifts = (x.copy() for x in forward.after)
    state = State(kvz, shifts, before + problem.key.shape[-2])
    return output, state, norms, partial(_pull_back, problem, work, forward)


@device.or_generic
def attention_vjp(problem: Problem, cotangent: Cotangent) -> Any:
    """Gradients of linear attention of float16 and bfloat16, or Declined.

    Output and normalizers are computed again, then the gradients of queries by a walk over the
    state of the keys, and gradients of keys and values by a walk over the state of the queries.
    Causal walks go over segments in parallel. Products are of bfloat16 (queries, keys and the
    projection in the dtype of the inputs) and accumulated in float32; gradients of heads that share
    an argument are rounded to its dtype before they are summed. With more than 64 values gradients
    of queries, then of keys, are summed from partial ones in float32, one for each 64.

    The host waits for a flag at the end: where rows were rejected, or a gradient is not finite, the
    call is declined, and generic code computes all gradients.
    """
    shared_state = cotangent.state is not None and problem.state_lead != problem.lead
    device.require(not shared_state, "heads share a state that has a cotangent")
    work = _work_of(problem)
    return _pull_back(problem, work, first_pass(work), cotangent)


def _work_of(problem: Problem) -> Work:
    """Prepare a problem in which no two heads share a state."""
    unshared = replace(problem, state_lead=problem.lead, want_log=True)
    # Causal gradients of d = 16 would spill registers where a warp has two strips of features.
    work = work_of(unshared, 32 if problem.num_features > ONE_STRIP else 16)
    check_memory("gradients", unshared, _least_memory(work))
    return work


def _pull_back(problem: Problem, work: Work, forward: Forward, cotangent: Cotangent) -> Any:
    walk = _causal if problem.sees.is_causal else _full
    gradients, adjoint, flags = walk(_Pull(work, cotangent.output), forward, cotangent.state)
    if not bool((flags == 0).all()):
        return Declined("rows were rejected, or a gradient is not finite")
    arrays = (problem.query, problem.key, problem.value)
    sums = [sum_to(x, tuple(like.shape)) for x, like in zip(gradients, arrays, strict=True)]
    state = None if adjoint is None else _state_gradient(problem, *adjoint)
    return *sums, state


def _least_memory(work: Work) -> int:
    """Bytes of shared memory that a block of the largest kernel needs."""
    if work.problem.sees.is_causal:
        return _shared(work.variant, CAUSAL_TILE, sources=True, targets=True)
    return max(
        _shared(work.variant, CAUSAL_TILE, sources=True, targets=False),
        _shared(work.variant, READ_TILES[-1], sources=False, targets=True),
    )


_Walked = tuple[tuple[Array, ...], tuple[Array, Array] | None, Array]
"""Gradients of query, key and value, the adjoint before all keys where it is wanted, and flags."""


def _full(pull: _Pull, forward: Forward, grad_state: State | None) -> _Walked:
    work, state = pull.work, forward.after
    queries = pull.queries(forward.output, forward.norms)
    flags = cupy.zeros((1,), "int32")
    of_query, _ = pull.read(queries, state, flags, keys=False)
    length = queries.tokens.shape[-2]
    count = work.heads.total * work.value_tiles
    segments = segments_of(length, count, CAUSAL_TILE, work.max_states())
    states = pull.adjoints(queries, segments, segments.number)
    adjoint = work.new_state()
    scan(work, grad_state, states, adjoint)
    of_key, of_value = pull.read(pull.keys(), adjoint, flags, keys=True)
    return (of_query, of_key, of_value), adjoint if work.problem.state is not None else None, flags


def _causal(pull: _Pull, forward: Forward, grad_state: State | None) -> _Walked:
    work, before, flags = pull.work, forward.before, forward.flags.copy()
    assert before is not None
    queries, keys = pull.queries(forward.output, forward.norms), pull.keys()
    of_query, _ = pull.walk(queries, keys, before, flags, of_keys=False)
    cut = before.cut
    of_state = work.problem.state is not None
    needed = cut.parts.number - (0 if of_state else cut.parts_per_segment)
    states = pull.adjoints(queries, cut.parts, needed)
    adjoint = work.new_state() if of_state else None
    first = (None, None) if adjoint is None else adjoint
    adjoints = scan_segments(work, grad_state, states, cut, first)
    of_key, of_value = pull.walk(queries, keys, adjoints, flags, of_keys=True)
    return (of_query, of_key, of_value), adjoint, flags


def _state_gradient(problem: Problem, kvz: Array, shifts: Array) -> Array:
    """Gradient of the initial state's ``kvz``, from the adjoint before all keys."""
    assert problem.state is not None
    gradient = kvz * problem.xp.exp(shifts + problem.state.log_scale)[..., None]
    return sum_to(gradient, tuple(problem.state.kvz.shape))

"""Gradients of 16-bit attention by the fused kernels: forward again, then one walk a side."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Problem, State
from linattn_cupy import device
from linattn_cupy.fused import (
    CAUSAL_CHUNK,
    READ_CHUNKS,
    Before,
    Variant,
    Work,
    causal_rows,
    cut,
    full_rows,
    full_state,
    need_memory,
    read_chunk,
    ready,
    scan,
    states_before,
    work_of,
)
from linattn_cupy.layout import strides

__all__ = ["attention_vjp"]

PARTS = {
    "query_terms": 0,
    "key_terms": 0,
    "segment_suffixes": 0,
    "read_gradients": 1,
    "causal_gradients": 2,
}
"""Option PART of the kernels: what is compiled together."""


def _shared(variant: Variant, chunk: int, *, others: bool, own: bool) -> int:
    """Bytes of shared memory, as ``share`` in gradients.cu lays it out."""
    wide, tall = variant.dim + 8, variant.values + 8
    size = variant.columns * wide if variant.family == "exponential" else 0
    size += (others + own) * chunk * (wide + tall)
    if own:
        size += variant.columns * tall
    if others and own:
        size += variant.columns * (chunk + 8)
    return 2 * size + 4 * (5 * variant.columns + 4 * chunk)


class _Side(NamedTuple):
    """Tokens of one side: themselves, their vectors, log weights and scalars (None for 1)."""

    tokens: Array
    vectors: Array
    mask: Array | None
    rows: Array
    scalars: Array | None


class _Room(NamedTuple):
    """Where gradients go: of tokens whole or, with several value tiles, in parts; of values."""

    whole: Array | None
    parts: Array | None
    values: Array | None
    dtype: Any

    @property
    def args(self) -> list[Any]:
        size = 0 if self.parts is None else self.parts[0].size
        return [self.whole, self.parts, np.int64(size), self.values]

    def result(self) -> tuple[Array, Array | None]:
        """Gradients of tokens and of values."""
        if self.parts is None:
            return self.whole, self.values
        return self.parts.sum(axis=0).astype(self.dtype), self.values


class _Pull:
    """The launches of one problem, whose heads all have a state of their own."""

    def __init__(self, work: Work, grad_output: Array) -> None:
        self.work, self.heads = work, work.heads
        self.grad = ready(grad_output)

    def _launch(
        self,
        function: str,
        blocks: int,
        chunk: int,
        args: list[Any],
        *,
        keys: bool = False,
        others: bool = False,
        own: bool = False,
    ) -> None:
        variant = self.work.variant
        device.launch(
            "gradients.cu",
            function,
            {**variant.options(PARTS[function], chunk), "KEYS": int(keys)},
            (blocks, self.work.tiles if others or own else 1, 1),
            (32 * variant.warps, 1, 1),
            _shared(variant, chunk, others=others, own=own) if others or own else 0,
            args,
        )

    def _view(self, array: Array) -> list[Any]:
        return [array, *strides(self.heads, array)]

    def queries(self, output: Array, norms: Array) -> _Side:
        """Return queries with what the forward pass made of them."""
        length = norms.shape[-1]
        rows, scalars = (device.empty(norms.shape, "float32") for _ in range(2))
        total = self.heads.total * length
        work = self.work
        args = [
            *self._view(work.query),
            *self._view(self.grad),
            *(output, norms),
            *self.heads.args,
            *(np.int64(length), np.int64(total)),
            *work.sizes()[:2],
            work.curvature(),
            *(rows, scalars),
        ]
        self._launch("query_terms", -(-total // work.variant.warps), CAUSAL_CHUNK, args)
        return _Side(work.query, self.grad, None, rows, scalars)

    def keys(self) -> _Side:
        """Return keys with their log weights."""
        work = self.work
        length = work.key.shape[-2]
        rows = device.empty((*work.problem.lead, length), "float32")
        total = self.heads.total * length
        args = [
            *self._view(work.key),
            *work.mask_args(self.heads),
            *self.heads.args,
            *(np.int64(length), np.int64(total)),
            np.int32(work.key.shape[-1]),
            work.curvature(),
            rows,
        ]
        self._launch("key_terms", -(-total // work.variant.warps), CAUSAL_CHUNK, args)
        return _Side(work.key, work.value, work.mask, rows, None)

    def adjoints(
        self, queries: _Side, segments: int, segment_length: int, needed: int
    ) -> tuple[Array, Array]:
        """Suffixes of the last ``needed`` segments of queries, last first, and their shifts."""
        work = self.work
        shape = (self.heads.total, segments, work.problem.num_features)
        kvz = device.empty((*shape, work.columns), "float32")
        shifts = device.empty(shape, "float32")
        if needed:
            args = [
                *self._view(queries.tokens),
                *self._view(queries.vectors),
                *(queries.rows, queries.scalars),
                *work.spec_args(self.heads),
                *self.heads.args,
                np.int64(queries.tokens.shape[-2]),
                np.int64(segment_length),
                np.int32(segments),
                np.int32(needed),
                *work.sizes(),
                *(kvz, shifts),
            ]
            blocks = self.heads.total * needed
            self._launch("segment_suffixes", blocks, CAUSAL_CHUNK, args, others=True)
        return kvz, shifts

    def read(
        self, side: _Side, state: tuple[Array, Array], flags: Array, *, keys: bool
    ) -> tuple[Array, Array | None]:
        """Gradients of tokens that read one state each head, and of values for keys."""
        work, heads = self.work, self.heads
        length = side.tokens.shape[-2]
        chunk = read_chunk(partial(_shared, work.variant, others=False, own=True))
        segments, segment_length = cut(heads.total * work.tiles, length, chunk, length)
        out = self._room(keys=keys)
        mask = work.mask_args(heads) if keys else [None, *[np.int64(0)] * 4]
        args = [
            *self._view(side.tokens),
            *self._view(side.vectors),
            *mask,
            *(side.rows, side.scalars),
            *work.spec_args(heads),
            *state,
            *heads.args,
            np.int64(length),
            np.int64(segment_length),
            np.int32(segments),
            *work.sizes(),
            work.curvature(),
            *out.args,
            flags,
        ]
        blocks = heads.total * segments
        self._launch("read_gradients", blocks, chunk, args, keys=keys, own=True)
        return out.result()

    def walk(
        self, queries: _Side, keys: _Side, states: Before, flags: Array, *, of_keys: bool
    ) -> tuple[Array, Array | None]:
        """Causal gradients of one side, from the states before or the adjoints behind segments."""
        work, heads = self.work, self.heads
        out = self._room(keys=of_keys)
        args: list[Any] = []
        for array in (queries.tokens, keys.tokens, keys.vectors, queries.vectors):
            args += self._view(array)
        args += [
            *work.mask_args(heads),
            *(queries.rows, queries.scalars, keys.rows),
            *work.spec_args(heads),
            *(states.kvz, states.shifts),
            *heads.args,
            np.int64(queries.tokens.shape[-2]),
            np.int64(states.segment_length),
            np.int32(states.segments),
            *work.sizes(),
            work.curvature(),
            *out.args,
            flags,
        ]
        blocks = heads.total * states.segments
        self._launch(
            "causal_gradients", blocks, CAUSAL_CHUNK, args, keys=of_keys, others=True, own=True
        )
        return out.result()

    def _room(self, *, keys: bool) -> _Room:
        problem, dtype, tiles = self.work.problem, self.work.query.dtype, self.work.tiles
        tokens = problem.key if keys else problem.query
        rows = (*problem.lead, tokens.shape[-2])
        shape = (*rows, tokens.shape[-1])
        whole = device.empty(shape, dtype) if tiles == 1 else None
        parts = None if tiles == 1 else device.empty((tiles, *shape), "float32")
        values = device.empty((*rows, problem.value.shape[-1]), dtype) if keys else None
        return _Room(whole, parts, values, dtype)


@device.or_generic
def attention_vjp(problem: Problem, cotangent: Any) -> Any:
    """Gradients of linear attention of float16 and bfloat16, or NotImplemented.

    Output and normalizers are computed again, then the gradients of queries by a walk over the
    state of the keys, and those of keys and values by a walk over that of the queries; causal walks
    go over segments side by side. Products are of bfloat16 (queries, keys and the projection
    in the dtype of the inputs) and accumulated in float32; gradients of heads that share an
    argument are rounded to its dtype before they are summed. With more than 64 values gradients of
    queries, then of keys, are summed from parts in float32, one for each 64.

    The host waits for a flag at the end: where a scale that a chunk shares may have spoilt
    something, or a gradient is not finite, the answer is NotImplemented, and all is done again.
    """
    with device.on_device(problem.query):
        own = replace(problem, state_lead=problem.lead, want_log=True)
        work = work_of(own)
        shared = cotangent.state is not None and problem.state_lead != problem.lead
        if work is None or shared:
            return NotImplemented
        need_memory("gradients", own, _least_memory(work))
        pull = _Pull(work, cotangent.output)
        walk = _causal if problem.is_causal else _full
        gradients, adjoint, flags = walk(pull, cotangent.state)
        if bool(flags.any()):
            return NotImplemented
        arrays = (problem.query, problem.key, problem.value)
        sums = [_sum_to(x, tuple(like.shape)) for x, like in zip(gradients, arrays, strict=True)]
        state = None if adjoint is None else _state_gradient(problem, *adjoint)
        return *sums, state


def _least_memory(work: Work) -> int:
    """Bytes of shared memory that a block of the largest kernel needs."""
    if work.problem.is_causal:
        return _shared(work.variant, CAUSAL_CHUNK, others=True, own=True)
    return max(
        _shared(work.variant, CAUSAL_CHUNK, others=True, own=False),
        _shared(work.variant, READ_CHUNKS[-1], others=False, own=True),
    )


_Walked = tuple[tuple[Array, ...], tuple[Array, Array] | None, Array]
"""Gradients of query, key and value, the adjoint before all keys where it is wanted, and flags."""


def _full(pull: _Pull, grad_state: State | None) -> _Walked:
    work = pull.work
    state = full_state(work)
    queries = pull.queries(*full_rows(work, state))
    flags = device.full((1,), 0, "int32")
    of_query, _ = pull.read(queries, state, flags, keys=False)
    length = queries.tokens.shape[-2]
    segments, segment_length = cut(
        work.heads.total * work.tiles, length, CAUSAL_CHUNK, work.most_segments()
    )
    states = pull.adjoints(queries, segments, segment_length, segments)
    adjoint = work.room()
    scan(work, grad_state, segments, states, adjoint)
    of_key, of_value = pull.read(pull.keys(), adjoint, flags, keys=True)
    return (of_query, of_key, of_value), adjoint if work.problem.state is not None else None, flags


def _causal(pull: _Pull, grad_state: State | None) -> _Walked:
    work = pull.work
    before = states_before(work)
    output, norms, _, flags = causal_rows(work, before)
    queries, keys = pull.queries(output, norms), pull.keys()
    of_query, _ = pull.walk(queries, keys, before, flags, of_keys=False)
    _, _, segments, segment_length = before
    del output, norms, before  # their memory is for the adjoints
    whole = work.problem.state is not None
    states = pull.adjoints(queries, segments, segment_length, segments - (not whole))
    adjoint = work.room() if whole else None
    shifts = scan(work, grad_state, segments, states, (None, None) if adjoint is None else adjoint)
    behind = Before(states[0], shifts, segments, segment_length)
    of_key, of_value = pull.walk(queries, keys, behind, flags, of_keys=True)
    return (of_query, of_key, of_value), adjoint, flags


def _state_gradient(problem: Problem, kvz: Array, shifts: Array) -> Array:
    """Gradient of the initial state's ``kvz``, from the adjoint before all keys."""
    assert problem.state is not None
    gradient = kvz * problem.xp.exp(shifts + problem.state.log_scale)[..., None]
    return _sum_to(gradient, tuple(problem.state.kvz.shape))


def _sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
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

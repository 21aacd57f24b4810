"""Attention of 16-bit arrays by the fused kernels: matches problems, cuts them up, launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Problem, State
from linattn_cupy import device
from linattn_cupy.layout import Heads, heads_of, strides, unit_strides
from linattn_cupy.parameters import FAMILIES, Parameters, columns_of, family_of, parameters_of
from linattn_cupy.steps import MOST_VALUES, Rows, exact_map, redo

__all__ = ["attention"]

LARGEST_DIM = 128
MOST_COLUMNS = 256
MOST_WARPS = 8
CAUSAL_CHUNK = 64
READ_CHUNK = 128
VALUE_TILE = 64
PARTS = {"segment_states": 0, "scan_states": 0, "read_states": 1, "causal_rows": 2}
"""Option PART of the kernels: what is compiled together."""

PIECE = 8
"""Elements of 16 bits that are copied at once."""

BLOCKS_A_PROCESSOR = 2
"""Blocks that a multiprocessor should have to do, over its waves."""

WORKSPACE = 40 * 2**20
"""Bytes of states of segments beyond which there are no more segments."""


class _Variant(NamedTuple):
    """A way to compile the kernels, and what it means for a problem."""

    family: str
    float16: bool
    dim: int
    columns: int
    values: int
    warps: int

    def options(self, part: int, chunk: int) -> dict[str, int]:
        return {
            "PART": part,
            "MAP": FAMILIES[self.family],
            "FP16": int(self.float16),
            "HEAD_DIM": self.dim,
            "FEATURES": self.columns,
            "VALUE_TILE": self.values,
            "WARPS": self.warps,
            "CHUNK": chunk,
        }

    def shared(self, chunk: int, *, keys: bool, queries: bool) -> int:
        """Bytes of shared memory, as ``share`` in fused.cu lays it out."""
        wide, tall = self.dim + 8, self.values + 8
        size = self.columns * wide if self.family == "exponential" else 0
        if keys:
            size += 2 * chunk * (wide + tall)
        if queries:
            size += (1 if keys else 2) * chunk * wide + self.columns * tall
        if keys and queries:
            size += self.columns * (chunk + 8)
        return 2 * size + 4 * (5 * self.columns + chunk)


def _up(x: int, step: int) -> int:
    return -(-x // step) * step


def _variant(problem: Problem) -> _Variant | None:
    """How the kernels do a problem; None where they do not."""
    dim, value_dim = problem.query.shape[-1], problem.value.shape[-1]
    name = str(problem.query.dtype)
    family = family_of(problem.query_spec)
    if (
        family is None
        or problem.key_spec is not problem.query_spec
        or name not in ("float16", "bfloat16")
        or str(np.dtype(problem.dtype)) != "float32"
        or problem.query_change is not None
        or problem.key_change is not None
        or problem.exact_window is not None
        or problem.lazy
        or dim % PIECE
        or value_dim % PIECE
        or dim > LARGEST_DIM
        or value_dim > MOST_VALUES
        or 0 in (*problem.lead, problem.query.shape[-2], problem.key.shape[-2])
    ):
        return None
    columns = columns_of(problem.query_spec, dim)
    if columns > MOST_COLUMNS:
        return None
    least = max(columns, 1 if family == "exponential" else _up(dim, 16))
    strips = -(-least // (16 * MOST_WARPS))
    warps = -(-least // (16 * strips))
    return _Variant(
        family,
        name == "float16",
        _up(dim, 16),
        16 * strips * warps,
        min(VALUE_TILE, _up(value_dim, 16)),
        warps,
    )


def _ready(array: Array) -> Array:
    """Return the array where its rows can be copied 16 bytes at a time, else a copy."""
    steps = [
        step // array.dtype.itemsize
        for step, size in zip(array.strides[:-1], array.shape[:-1], strict=True)
        if size != 1
    ]
    aligned = (
        array.strides[-1] == array.dtype.itemsize
        and all(step % PIECE == 0 for step in steps)
        and device.address(array) % (PIECE * array.dtype.itemsize) == 0
    )
    return array if aligned else device.contiguous(array)


def _segments(heads: int, length: int, chunk: int, most: int) -> tuple[int, int]:
    """Segments a head and their length, whole chunks: enough blocks, in full waves."""
    chunks = -(-length // chunk)
    processors = device.processors()
    wanted = BLOCKS_A_PROCESSOR * processors

    def cost(segments: int) -> int:
        return -(-heads * segments // processors) * -(-chunks // segments)

    most = max(1, min(chunks, most, -(-2 * wanted // heads)))
    best = min(cost(segments) for segments in range(1, most + 1))
    segments = next(s for s in range(1, most + 1) if cost(s) <= 1.05 * best)
    per_segment = -(-chunks // segments)
    return -(-chunks // per_segment), per_segment * chunk


class _Work(NamedTuple):
    """A problem with all that its launches share."""

    problem: Problem
    variant: _Variant
    parameters: Parameters
    query: Array
    key: Array
    value: Array
    mask: Array | None
    heads: Heads
    state_heads: Heads

    @property
    def columns(self) -> int:
        return int(self.value.shape[-1]) + 1

    @property
    def tiles(self) -> int:
        return -(-int(self.value.shape[-1]) // self.variant.values)

    def spec_args(self, heads: Heads) -> list[Any]:
        spec = self.parameters
        return [spec.projection, spec.col, *unit_strides(heads, spec.lead)]

    def mask_args(self, heads: Heads) -> list[Any]:
        if self.mask is None:
            return [None, *[np.int64(0)] * 4]
        return [self.mask, *strides(heads, self.mask)]

    def sizes(self) -> list[Any]:
        """head_dim, value_dim, features."""
        dims = (self.query.shape[-1], self.value.shape[-1], self.problem.num_features)
        return [np.int32(x) for x in dims]

    def curvature(self) -> Any:
        return np.float32(self.parameters.curvature)

    def launch(
        self, function: str, blocks: int, chunk: int, args: list[Any], *, keys: bool, queries: bool
    ) -> None:
        device.launch(
            "fused.cu",
            function,
            self.variant.options(PARTS[function], chunk),
            (blocks, self.tiles, 1),
            (32 * self.variant.warps, 1, 1),
            self.variant.shared(chunk, keys=keys, queries=queries),
            args,
        )


@device.or_generic
def attention(problem: Problem) -> Any:
    """Linear attention of float16 and bfloat16, or NotImplemented.

    Full attention reads K and V once and Q once; causal attention reads K and V twice, once for the
    states of segments of the sequence, which are then walked side by side. Products are of bfloat16
    (queries, keys and the projection in the dtype of the inputs) and accumulated in float32.
    """
    variant = _variant(problem)
    heads, state_heads = heads_of(problem.lead), heads_of(problem.state_lead)
    if variant is None or heads is None or state_heads is None:
        return NotImplemented
    with device.on_device(problem.query):
        chunk = CAUSAL_CHUNK
        if variant.shared(chunk, keys=True, queries=problem.is_causal) > device.shared_bytes():
            return NotImplemented
        work = _Work(
            problem,
            variant,
            parameters_of(problem.query_spec, problem.query, variant.dim, variant.columns),
            _ready(problem.query),
            _ready(problem.key),
            _ready(problem.value),
            problem.key_mask,
            heads,
            state_heads,
        )
        return _causal(work) if problem.is_causal else _full(work)


def _initial(work: _Work) -> list[Any]:
    """Return the initial state as ``scan_states`` takes it."""
    state = work.problem.state
    if state is None:
        return [None, None, *[np.int64(0)] * 3]
    lead = tuple(state.kvz.shape[:-2])
    kvz, shift = (device.contiguous(a) for a in (state.kvz, state.log_scale))
    return [kvz, shift, *unit_strides(work.state_heads, lead)]


def _states(work: _Work, segments: int, segment_length: int, needed: int) -> tuple[Array, Array]:
    """States of the first ``needed`` of all segments of keys, and their shifts."""
    m, count = work.problem.num_features, work.state_heads.total
    kvz = device.empty((count, segments, m, work.columns), "float32")
    shifts = device.empty((count, segments, m), "float32")
    if needed:
        heads = work.state_heads
        args = [
            work.key,
            *strides(heads, work.key),
            work.value,
            *strides(heads, work.value),
            *work.mask_args(heads),
            *work.spec_args(heads),
            *heads.args,
            np.int64(work.key.shape[-2]),
            np.int64(segment_length),
            np.int32(segments),
            np.int32(needed),
            *work.sizes(),
            work.curvature(),
            kvz,
            shifts,
        ]
        work.launch("segment_states", count * needed, CAUSAL_CHUNK, args, keys=True, queries=False)
    return kvz, shifts


def _scan(work: _Work, segments: int, kvz: Array, shifts: Array, after: tuple[Any, Any]) -> Array:
    """States before all segments, in place, and their shifts; the last state to ``after``."""
    before = device.empty(shifts.shape, "float32")
    total = work.state_heads.total * work.problem.num_features * work.columns
    args = [
        *(kvz, shifts, before),
        *_initial(work),
        *work.state_heads.args,
        np.int32(segments),
        np.int32(work.problem.num_features),
        np.int32(work.columns),
        np.int64(total),
        *after,
    ]
    device.launch(
        "fused.cu",
        "scan_states",
        work.variant.options(PARTS["scan_states"], CAUSAL_CHUNK),
        (-(-total // 256), 1, 1),
        (256, 1, 1),
        0,
        args,
    )
    return before


def _outputs(work: _Work) -> tuple[Array, Array | None]:
    problem = work.problem
    shape = (*problem.lead, problem.query.shape[-2], problem.value.shape[-1])
    norms = device.empty(shape[:-1], "float32") if problem.want_log else None
    return device.empty(shape, problem.query.dtype), norms


def _after(work: _Work) -> tuple[Array, Array]:
    lead, m = work.problem.state_lead, work.problem.num_features
    return device.empty((*lead, m, work.columns), "float32"), device.empty((*lead, m), "float32")


def _answer(work: _Work, output: Array, after: tuple[Array, Array], norms: Array | None) -> Any:
    before = 0 if work.problem.state is None else work.problem.state.length
    return output, State(*after, before + work.problem.key.shape[-2]), norms


def _most_segments(work: _Work) -> int:
    state_bytes = 4 * work.state_heads.total * work.problem.num_features * work.columns
    return int(WORKSPACE // state_bytes)


def _full(work: _Work) -> Any:
    problem, heads = work.problem, work.heads
    count = work.state_heads.total * work.tiles
    most = _most_segments(work)
    segments, segment_length = _segments(count, problem.key.shape[-2], CAUSAL_CHUNK, most)
    kvz, shifts = _states(work, segments, segment_length, segments)
    after = _after(work)
    _scan(work, segments, kvz, shifts, after)
    output, norms = _outputs(work)
    length = problem.query.shape[-2]
    segments, segment_length = _segments(heads.total * work.tiles, length, READ_CHUNK, length)
    args = [
        work.query,
        *strides(heads, work.query),
        *work.spec_args(heads),
        *after,
        *unit_strides(heads, problem.state_lead),
        *heads.args,
        np.int64(length),
        np.int64(segment_length),
        np.int32(segments),
        *work.sizes(),
        work.curvature(),
        output,
        norms,
    ]
    work.launch("read_states", heads.total * segments, READ_CHUNK, args, keys=False, queries=True)
    return _answer(work, output, after, norms)


def _causal(work: _Work) -> Any:
    problem, heads = work.problem, work.heads
    length = problem.query.shape[-2]
    most = _most_segments(work)
    segments, segment_length = _segments(heads.total * work.tiles, length, CAUSAL_CHUNK, most)
    kvz, shifts = _states(work, segments, segment_length, segments - 1)
    before = _scan(work, segments, kvz, shifts, (None, None))
    output, norms = _outputs(work)
    after = _after(work)
    flags = device.full((heads.total, segments), 0, "int32")
    state_strides = unit_strides(heads, problem.state_lead)
    tokens = []
    for array in (work.query, work.key, work.value):
        tokens += [array, *strides(heads, array)]
    cut = [np.int64(length), np.int64(segment_length), np.int32(segments)]
    args = [
        *tokens,
        *work.mask_args(heads),
        *work.spec_args(heads),
        *(kvz, before),
        *state_strides,
        *heads.args,
        *cut,
        *work.sizes(),
        work.curvature(),
        *(output, norms),
        *after,
        flags,
    ]
    work.launch("causal_rows", heads.total * segments, CAUSAL_CHUNK, args, keys=True, queries=True)
    if problem.state_lead == problem.lead:
        room = (kvz, before)
    else:  # heads that share a state cannot write over it
        shape = (heads.total, segments, problem.num_features)
        room = device.empty((*shape, work.columns), "float32"), device.empty(shape, "float32")
    dims = (problem.query.shape[-1], problem.num_features, work.columns)
    rows = Rows(
        [*tokens, *work.mask_args(heads), None, *[np.int64(0)] * 4],
        [kvz, before, *state_strides],
        room,
        (output, None, norms),
    )
    exact = exact_map(problem.query_spec, dims[0], dims[1])
    redo(*exact, heads, flags, (length, segment_length, segments), dims, rows)
    return _answer(work, output, after, norms)

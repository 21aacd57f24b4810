"""Attention of 16-bit arrays by the fused kernels: matches problems, cuts them up, launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Problem, State
from linattn_cupy import device
from linattn_cupy.layout import Heads, heads_of, strides, unit_strides
from linattn_cupy.parameters import FAMILIES, Parameters, columns_of, family_of, parameters_of
from linattn_cupy.steps import MOST_VALUES, Rows, exact_map, redo

__all__ = [
    "CAUSAL_CHUNK",
    "READ_CHUNKS",
    "Before",
    "Work",
    "attention",
    "causal_rows",
    "cut",
    "full_rows",
    "full_state",
    "need_memory",
    "read_chunk",
    "ready",
    "scan",
    "states_before",
    "work_of",
]

LARGEST_DIM = 128
MOST_COLUMNS = 256
MOST_WARPS = 8
CAUSAL_CHUNK = 64
READ_CHUNKS = (128, 64)
"""The longest that fits is taken."""

VALUE_TILE = 64
PARTS = {"segment_states": 0, "scan_states": 0, "read_states": 1, "causal_rows": 2}
"""Option PART of the kernels: what is compiled together."""

PIECE = 8
"""Elements of 16 bits that are copied at once."""

BLOCKS_A_PROCESSOR = 2
"""Blocks that a multiprocessor should have to do, over its waves."""

WORKSPACE = 40 * 2**20
"""Bytes of states of segments beyond which there are no more segments."""


class Variant(NamedTuple):
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


def _variant(problem: Problem) -> Variant | None:
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
    return Variant(
        family,
        name == "float16",
        _up(dim, 16),
        16 * strips * warps,
        min(VALUE_TILE, _up(value_dim, 16)),
        warps,
    )


def ready(array: Array) -> Array:
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


def cut(heads: int, length: int, chunk: int, most: int) -> tuple[int, int]:
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


class Work(NamedTuple):
    """A problem with all that its launches share."""

    problem: Problem
    variant: Variant
    parameters: Parameters
    query: Array
    key: Array
    value: Array
    mask: Array | None
    heads: Heads
    state_heads: Heads

    @property
    def columns(self) -> int:
        """Columns of a state."""
        return int(self.value.shape[-1]) + 1

    @property
    def tiles(self) -> int:
        """Tiles of the values, each worked on by blocks of its own."""
        return -(-int(self.value.shape[-1]) // self.variant.values)

    def spec_args(self, heads: Heads) -> list[Any]:
        """Projection and offsets, as kernels take them."""
        spec = self.parameters
        return [spec.projection, spec.col, *unit_strides(heads, spec.lead)]

    def mask_args(self, heads: Heads) -> list[Any]:
        """Mask of the keys, or null."""
        if self.mask is None:
            return [None, *[np.int64(0)] * 4]
        return [self.mask, *strides(heads, self.mask)]

    def sizes(self) -> list[Any]:
        """head_dim, value_dim, features."""
        dims = (self.query.shape[-1], self.value.shape[-1], self.problem.num_features)
        return [np.int32(x) for x in dims]

    def curvature(self) -> Any:
        """Curvature of the map."""
        return np.float32(self.parameters.curvature)

    def most_segments(self) -> int:
        """Segments whose states fit the workspace."""
        state_bytes = 4 * self.state_heads.total * self.problem.num_features * self.columns
        return int(WORKSPACE // state_bytes)

    def room(self) -> tuple[Array, Array]:
        """Memory for a state of each head, and its shifts."""
        lead, m = self.problem.state_lead, self.problem.num_features
        kvz = device.empty((*lead, m, self.columns), "float32")
        return kvz, device.empty((*lead, m), "float32")

    def launch(
        self, function: str, blocks: int, chunk: int, args: list[Any], *, keys: bool, queries: bool
    ) -> None:
        """Launch a kernel whose blocks hold these tokens in shared memory."""
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
    with device.on_device(problem.query):
        work = work_of(problem)
        if work is None:
            return NotImplemented
        if problem.is_causal:
            before = states_before(work)
            output, norms, after, flags = causal_rows(work, before)
            _redo(work, before, flags, output, norms)
        else:
            after = full_state(work)
            output, norms = full_rows(work, after)
        seen = 0 if problem.state is None else problem.state.length
        return output, State(*after, seen + problem.key.shape[-2]), norms


def work_of(problem: Problem) -> Work | None:
    """Prepare the launches of a problem; None where the kernels do not do it.

    Raises
    ------
    KernelUnavailableError
        They do it on devices with more shared memory.
    """
    variant = _variant(problem)
    heads, state_heads = heads_of(problem.lead), heads_of(problem.state_lead)
    if variant is None or heads is None or state_heads is None:
        return None
    sizes = [variant.shared(CAUSAL_CHUNK, keys=True, queries=problem.is_causal)]
    if not problem.is_causal:
        sizes.append(variant.shared(READ_CHUNKS[-1], keys=False, queries=True))
    need_memory("attention", problem, max(sizes))
    return Work(
        problem,
        variant,
        parameters_of(problem.query_spec, problem.query, variant.dim, variant.columns),
        ready(problem.query),
        ready(problem.key),
        ready(problem.value),
        problem.key_mask,
        heads,
        state_heads,
    )


def need_memory(what: str, problem: Problem, size: int) -> None:
    """Raise KernelUnavailableError where a block may not have so much shared memory."""
    kind = "causal" if problem.is_causal else "full"
    shape = f"d = {problem.query.shape[-1]}, m = {problem.num_features}"
    device.need_shared(f"{kind} {what} with {shape}", size, device.shared_bytes())


def read_chunk(shared: Callable[[int], int]) -> int:
    """Tokens that a block reads at once, by the shared memory that a chunk of so many needs."""
    most = device.shared_bytes()
    return next((chunk for chunk in READ_CHUNKS if shared(chunk) <= most), READ_CHUNKS[-1])


def _initial(heads: Heads, state: State | None) -> list[Any]:
    """Return the initial state as ``scan_states`` takes it."""
    if state is None:
        return [None, None, *[np.int64(0)] * 3]
    lead = tuple(state.kvz.shape[:-2])
    kvz, shift = (device.contiguous(a) for a in (state.kvz, state.log_scale))
    return [kvz, shift, *unit_strides(heads, lead)]


def _states(work: Work, segments: int, segment_length: int, needed: int) -> tuple[Array, Array]:
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


def scan(
    work: Work,
    initial: State | None,
    segments: int,
    states: tuple[Array, Array],
    after: tuple[Any, Any],
) -> Array:
    """States before all segments, in place, and their shifts; the last state to ``after``.

    ``states``: of the segments, each by itself, and their shifts. With ``after`` None that of the
    last segment is not looked at.
    """
    before = device.empty(states[1].shape, "float32")
    total = work.state_heads.total * work.problem.num_features * work.columns
    args = [
        *(*states, before),
        *_initial(work.state_heads, initial),
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


def _outputs(work: Work) -> tuple[Array, Array | None]:
    problem = work.problem
    shape = (*problem.lead, problem.query.shape[-2], problem.value.shape[-1])
    norms = device.empty(shape[:-1], "float32") if problem.want_log else None
    return device.empty(shape, problem.query.dtype), norms


def full_state(work: Work) -> tuple[Array, Array]:
    """State of all keys, and its shifts."""
    count = work.state_heads.total * work.tiles
    segments, segment_length = cut(
        count, work.problem.key.shape[-2], CAUSAL_CHUNK, work.most_segments()
    )
    states = _states(work, segments, segment_length, segments)
    after = work.room()
    scan(work, work.problem.state, segments, states, after)
    return after


def full_rows(work: Work, state: tuple[Array, Array]) -> tuple[Array, Array | None]:
    """Output, and norms where they are wanted, of queries that read a state."""
    problem, heads = work.problem, work.heads
    output, norms = _outputs(work)
    length = problem.query.shape[-2]
    chunk = read_chunk(partial(work.variant.shared, keys=False, queries=True))
    segments, segment_length = cut(heads.total * work.tiles, length, chunk, length)
    args = [
        work.query,
        *strides(heads, work.query),
        *work.spec_args(heads),
        *state,
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
    work.launch("read_states", heads.total * segments, chunk, args, keys=False, queries=True)
    return output, norms


class Before(NamedTuple):
    """States before the segments of a causal problem, and how long those are."""

    kvz: Array
    shifts: Array
    segments: int
    segment_length: int


def states_before(work: Work) -> Before:
    """Make the states before all segments."""
    length = work.problem.query.shape[-2]
    count = work.heads.total * work.tiles
    segments, segment_length = cut(count, length, CAUSAL_CHUNK, work.most_segments())
    states = _states(work, segments, segment_length, segments - 1)
    before = scan(work, work.problem.state, segments, states, (None, None))
    return Before(states[0], before, segments, segment_length)


def _token_args(work: Work) -> list[Any]:
    args: list[Any] = []
    for array in (work.query, work.key, work.value):
        args += [array, *strides(work.heads, array)]
    return args


def causal_rows(
    work: Work, before: Before
) -> tuple[Array, Array | None, tuple[Array, Array], Array]:
    """Output, norms where they are wanted, the last state, and flags of spoilt segments."""
    problem, heads = work.problem, work.heads
    output, norms = _outputs(work)
    after = work.room()
    flags = device.full((heads.total, before.segments), 0, "int32")
    args = [
        *_token_args(work),
        *work.mask_args(heads),
        *work.spec_args(heads),
        *(before.kvz, before.shifts),
        *unit_strides(heads, problem.state_lead),
        *heads.args,
        np.int64(problem.query.shape[-2]),
        np.int64(before.segment_length),
        np.int32(before.segments),
        *work.sizes(),
        work.curvature(),
        *(output, norms),
        *after,
        flags,
    ]
    blocks = heads.total * before.segments
    work.launch("causal_rows", blocks, CAUSAL_CHUNK, args, keys=True, queries=True)
    return output, norms, after, flags


def _redo(work: Work, before: Before, flags: Array, output: Array, norms: Array | None) -> None:
    """Do the rows of flagged segments again, exactly."""
    problem, heads = work.problem, work.heads
    if problem.state_lead == problem.lead:
        room = (before.kvz, before.shifts)
    else:  # heads that share a state cannot write over it
        shape = (heads.total, before.segments, problem.num_features)
        room = device.empty((*shape, work.columns), "float32"), device.empty(shape, "float32")
    dims = (problem.query.shape[-1], problem.num_features, work.columns)
    rows = Rows(
        [*_token_args(work), *work.mask_args(heads), None, *[np.int64(0)] * 4],
        [before.kvz, before.shifts, *unit_strides(heads, problem.state_lead)],
        room,
        (output, None, norms),
    )
    sizes = (problem.query.shape[-2], before.segment_length, before.segments)
    redo(*exact_map(problem.query_spec, dims[0], dims[1]), heads, flags, sizes, dims, rows)

"""Attention of 16-bit arrays by the fused kernels: which problems they support, and launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Problem, State
from linattn_cupy import device
from linattn_cupy.device import cupy
from linattn_cupy.layout import Heads, Segments, heads_of, unit_strides, view
from linattn_cupy.parameters import FAMILIES, Parameters, family_of, num_features_of, parameters_of
from linattn_cupy.steps import (
    COORDINATES_CHANGE,
    DECAYS,
    EMPTY,
    MAPS_DIFFER,
    MAX_VALUE_DIM,
    Rows,
    float32_map,
    redo,
)

MAX_HEAD_DIM = 128
MAX_FEATURES = 256
MAX_WARPS = 8
MAX_DIM_OF_STRIPS = 64
"""Largest d of bfloat16 for which a warp of one strip of features spills no register."""

CAUSAL_TILE = 64
READ_TILES = (128, 64)
"""Tokens of a tile; the longest that fits into shared memory is taken."""

VALUE_TILE = 64
SOURCES = {
    "fused.cu": (("segment_states", "scan_states"), ("read_states",), ("causal_rows",)),
    "gradients.cu": (
        ("query_terms", "key_terms", "segment_adjoints"),
        ("read_gradients",),
        ("causal_gradients",),
    ),
}
"""Kernels by their source and its option PART: functions that are compiled together."""

PARTS = {k: (source, i) for source, x in SOURCES.items() for i, part in enumerate(x) for k in part}

COPIED_ELEMENTS = 8
"""Elements of 16 bits in one copy."""

BLOCKS_PER_PROCESSOR = 2
"""Blocks of threads that each multiprocessor should have, over all waves."""

TILE_COST = 3.0
"""Time of a tile's causal rows, and of starting a block, over the time of adding it to a state."""

STATE_COST = 0.017
"""Time to write and read a head's state over the time of adding a tile to it."""

SCAN_THREADS = 256

WORKSPACE = 40 * 2**20
"""Bytes that the states of all segments may take."""


class Variant(NamedTuple):
    """A way to compile the kernels, and its limits for a problem."""

    family: str
    float16: bool
    dim: int
    features: int
    values: int
    warps: int

    def options(self, part: int, tile: int) -> dict[str, int]:
        """Return what the kernel's source is compiled with."""
        return {
            "PART": part,
            "MAP": FAMILIES[self.family],
            "FP16": int(self.float16),
            "HEAD_DIM": self.dim,
            "FEATURES": self.features,
            "VALUE_TILE": self.values,
            "WARPS": self.warps,
            "TOKEN_TILE": tile,
        }

    def shared(self, tile: int, *, keys: bool, queries: bool) -> int:
        """Bytes of shared memory, as ``share`` in fused.cu lays it out."""
        token_row, value_row = self.dim + 8, self.values + 8
        size = self.features * token_row if self.family == "exponential" else 0
        if keys:
            size += 2 * tile * (token_row + value_row)
        if queries:
            size += (1 if keys else 2) * tile * token_row + self.features * value_row
        if keys and queries:
            size += self.features * (tile + 8)
        # A read alone has no shifts, sums and rows, which are the last.
        return 2 * size + 4 * (5 * self.features + tile if keys else 3 * self.features)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _variant(problem: Problem, least_dim: int = 16) -> Variant:
    """How the kernels are compiled for a problem; UnsupportedError where none takes it."""
    dim, value_dim = problem.query.shape[-1], problem.value.shape[-1]
    name, accumulated = str(problem.query.dtype), str(np.dtype(problem.dtype))
    device.require(name in ("float16", "bfloat16"), f"{name} is neither float16 nor bfloat16")
    device.require(accumulated == "float32", f"sums are in {accumulated}")
    device.require(problem.exact.window is None, "exact_window is given")
    device.require(problem.weights.log_decay is None, DECAYS)
    changes = problem.query_change, problem.key_change
    device.require(changes == (None, None), COORDINATES_CHANGE)
    family = family_of(problem.query_spec)
    device.require(problem.key_spec is problem.query_spec, MAPS_DIFFER)
    num_features = num_features_of(problem.query_spec, dim)
    device.require(num_features <= MAX_FEATURES, f"m = {num_features} is above {MAX_FEATURES}")
    for letter, size, largest in (("d", dim, MAX_HEAD_DIM), ("e", value_dim, MAX_VALUE_DIM)):
        device.require(size <= largest, f"{letter} = {size} is above {largest}")
        is_multiple = size % COPIED_ELEMENTS == 0
        device.require(is_multiple, f"{letter} = {size} is no multiple of {COPIED_ELEMENTS}")
    sizes = (*problem.lead, problem.query.shape[-2], problem.key.shape[-2])
    device.require(0 not in sizes, EMPTY)
    device.require(not problem.policy.lazy, "arrays are traced or lazy")
    least = max(num_features, 1 if family == "exponential" else _round_up(dim, 16))
    strips = -(-least // (16 * MAX_WARPS))
    warps = -(-least // (16 * strips))
    return Variant(
        family,
        name == "float16",
        max(_round_up(dim, 16), least_dim),
        16 * strips * warps,
        min(VALUE_TILE, _round_up(value_dim, 16)),
        warps,
    )


def aligned_rows(array: Array) -> Array:
    """Return the array where its rows can be copied 16 bytes at a time, else a copy."""
    steps = [
        step // array.dtype.itemsize
        for step, size in zip(array.strides[:-1], array.shape[:-1], strict=True)
        if size != 1
    ]
    aligned = (
        array.strides[-1] == array.dtype.itemsize
        and all(step % COPIED_ELEMENTS == 0 for step in steps)
        and device.address(array) % (COPIED_ELEMENTS * array.dtype.itemsize) == 0
    )
    return array if aligned else cupy.ascontiguousarray(array)


def segments_of(length: int, heads: int, tile: int, max_segments: int) -> Segments:
    """Cut each head's tokens into segments of whole tiles: enough blocks, in full waves."""
    tiles = -(-length // tile)
    processors = device.processors()
    wanted = BLOCKS_PER_PROCESSOR * processors

    def cost(segments: int) -> int:
        return -(-heads * segments // processors) * -(-tiles // segments)

    most = max(1, min(tiles, max_segments, -(-2 * wanted // heads)))
    best = min(cost(segments) for segments in range(1, most + 1))
    segments = next(s for s in range(1, most + 1) if cost(s) <= 1.05 * best)
    per_segment = -(-tiles // segments)
    return Segments(length, per_segment * tile, -(-tiles // per_segment))


class Cut(NamedTuple):
    """How a causal call is cut: into segments, each walked by a block of threads, side by side.

    Those before the last segment consist of whole parts, which get states of their own first.
    """

    segments: Segments
    parts: Segments

    @property
    def parts_per_segment(self) -> int:
        """How many parts make up a segment."""
        return self.parts.number // self.segments.number


def cut_of(length: int, heads: int, state_heads: int, max_states: int) -> Cut:
    """Cut the tokens of heads so that both passes over them fill the device."""
    tiles = -(-length // CAUSAL_TILE)
    part, number = _best_cut(tiles, heads, state_heads, device.processors(), max_states)
    segment = part * number
    segments = -(-tiles // segment)
    return Cut(
        Segments(length, segment * CAUSAL_TILE, segments),
        Segments(length, part * CAUSAL_TILE, segments * number),
    )


@lru_cache(maxsize=256)
def _best_cut(
    tiles: int, heads: int, state_heads: int, processors: int, max_states: int
) -> tuple[int, int]:
    """Tiles of a part, and parts of a segment, that take the least time."""
    wanted = BLOCKS_PER_PROCESSOR * processors
    best, found = math.inf, (tiles, 1)
    for segments in range(1, max(1, min(tiles, -(-2 * wanted // heads))) + 1):
        for number in range(1, max(1, wanted // (state_heads * max(1, segments - 1))) + 1):
            states = segments + (segments - 1) * number
            part = -(-tiles // (segments * number))
            if segments > 1 and states > max_states:
                break
            rows = -(-heads * segments // processors) * (part * number * TILE_COST + 1)
            sums = -(-state_heads * (segments - 1) * number // processors) * (part + 1)
            cost = rows + sums + state_heads * states * STATE_COST
            if cost < best:
                best, found = cost, (part, number)
    return found


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
    def value_tiles(self) -> int:
        """Tiles of the values, each worked on by blocks of its own."""
        return -(-int(self.value.shape[-1]) // self.variant.values)

    def spec_args(self, heads: Heads) -> list[Any]:
        """Projection and offsets, as kernels take them."""
        spec = self.parameters
        return [spec.projection, spec.col, *unit_strides(heads, spec.lead)]

    def dims(self) -> list[Any]:
        """head_dim, value_dim, features."""
        dims = (self.query.shape[-1], self.value.shape[-1], self.problem.num_features)
        return [np.int32(x) for x in dims]

    def sizes(self, heads: Heads, segments: Segments) -> list[Any]:
        """Return SIZES of the kernels."""
        return [*heads.args, *segments.args, *self.dims(), self.curvature()]

    def curvature(self) -> Any:
        """Curvature of the map."""
        return np.float32(self.parameters.curvature)

    def max_states(self) -> int:
        """States of each head that fit the workspace."""
        state_bytes = 4 * self.state_heads.total * self.problem.num_features * self.columns
        return int(WORKSPACE // state_bytes)

    def new_states(self, *lead: int) -> tuple[Array, Array]:
        """Allocate states with these leading axes, and their shifts."""
        shape = *lead, self.problem.num_features
        return cupy.empty((*shape, self.columns), "float32"), cupy.empty(shape, "float32")

    def new_state(self) -> tuple[Array, Array]:
        """Allocate a state of each head, and its shifts."""
        return self.new_states(*self.problem.state_lead)

    def launch(
        self, function: str, blocks: int, tile: int, args: list[Any], shared: int, **more: int
    ) -> None:
        """Launch a kernel: with shared memory, blocks of threads for each tile of the values."""
        variant, (source, part) = self.variant, PARTS[function]
        fits = variant.dim <= MAX_DIM_OF_STRIPS and not variant.float16
        fits = fits and device.capability() // 10 != 10  # where it spills 16 bytes
        if fits and function == "segment_states" and variant.features == 32 * variant.warps:
            variant = variant._replace(warps=2 * variant.warps)
        grid = blocks, self.value_tiles if shared else 1, 1
        block = 32 * variant.warps, 1, 1
        device.launch(
            source, function, {**variant.options(part, tile), **more}, grid, block, shared, args
        )


@device.or_generic
def attention(problem: Problem) -> Any:
    """Linear attention of float16 and bfloat16, or Declined.

    Full attention reads K and V once and Q once; causal attention reads K and V twice, once for the
    states of segments of the sequence, which are then walked side by side. Products are of bfloat16
    (queries, keys and the projection in the dtype of the inputs) and accumulated in float32.
    """
    work = work_of(problem)
    forward = first_pass(work)
    redo_rejected(work, forward, forward.output, forward.norms)
    seen = 0 if problem.state is None else problem.state.length
    state = State(*forward.after, seen + problem.key.shape[-2])
    return forward.output, state, forward.norms


def first_pass(work: Work) -> Forward:
    """Attend; rejected causal rows are flagged only."""
    if work.problem.sees.is_causal:
        return _causal_rows(work, _states_before(work))
    after = _full_state(work)
    return Forward(*_full_rows(work, after), after, None, None)


def work_of(problem: Problem, least_dim: int = 16) -> Work:
    """Prepare the launches of a problem, whose tokens are padded to this dim at least.

    Raises
    ------
    UnsupportedError
        No kernel takes it.
    KernelUnavailableError
        One does, on devices with more shared memory.
    """
    variant = _variant(problem, least_dim)
    heads, state_heads = heads_of(problem.lead), heads_of(problem.state_lead)
    sizes = [variant.shared(CAUSAL_TILE, keys=True, queries=problem.sees.is_causal)]
    if not problem.sees.is_causal:
        sizes.append(variant.shared(READ_TILES[-1], keys=False, queries=True))
    check_memory("attention", problem, max(sizes))
    return Work(
        problem,
        variant,
        parameters_of(problem.query_spec, problem.query, variant.dim, variant.features),
        aligned_rows(problem.query),
        aligned_rows(problem.key),
        aligned_rows(problem.value),
        problem.weights.key_mask,
        heads,
        state_heads,
    )


def check_memory(what: str, problem: Problem, size: int) -> None:
    """Raise KernelUnavailableError where a block may not have so much shared memory."""
    kind = "causal" if problem.sees.is_causal else "full"
    shape = f"d = {problem.query.shape[-1]}, m = {problem.num_features}"
    device.check_shared_memory(f"{kind} {what} with {shape}", size, device.shared_bytes())


def read_tile(shared: Callable[[int], int]) -> int:
    """Tokens of a tile, chosen by the shared memory that the tile needs."""
    available = device.shared_bytes()
    return next((tile for tile in READ_TILES if shared(tile) <= available), READ_TILES[-1])


def _initial(heads: Heads, state: State | None) -> list[Any]:
    """Return the initial state as ``scan_states`` takes it."""
    if state is None:
        return [None, None, *[np.int64(0)] * 3]
    lead = tuple(state.kvz.shape[:-2])
    kvz, shift = (cupy.ascontiguousarray(a) for a in (state.kvz, state.log_scale))
    return [kvz, shift, *unit_strides(heads, lead)]


def _states(work: Work, segments: Segments) -> tuple[Array, Array]:
    """States of the separate segments of keys, and their shifts."""
    heads = work.state_heads
    kvz, shifts = work.new_states(heads.total, segments.number)
    if segments.number:
        args = [
            *view(heads, work.key),
            *view(heads, work.value),
            *view(heads, work.mask),
            *work.spec_args(heads),
            *work.sizes(heads, segments),
            kvz,
            shifts,
        ]
        blocks = heads.total * segments.number
        shared = work.variant.shared(CAUSAL_TILE, keys=True, queries=False)
        work.launch("segment_states", blocks, CAUSAL_TILE, args, shared)
    return kvz, shifts


def scan_segments(
    work: Work,
    initial: State | None,
    states: tuple[Array, Array],
    cut: Cut,
    after: tuple[Any, Any] = (None, None),
) -> SegmentStates:
    """Merge the states of parts into those before the segments; the last one goes to ``after``."""
    before = work.new_states(work.state_heads.total, cut.segments.number)
    scan(work, initial, states, after, (cut.segments.number, cut.parts_per_segment), before)
    return SegmentStates(*before, cut)


def scan(
    work: Work,
    initial: State | None,
    states: tuple[Array, Array],
    after: tuple[Any, Any],
    segments: tuple[int, int] | None = None,
    before: tuple[Any, Any] = (None, None),
) -> None:
    """Merge states, in order, after an initial one; the last state goes to ``after``.

    ``segments``: how many get the state before them, and how many states are of each.
    """
    heads, m = work.state_heads, work.problem.num_features
    segments = segments or (1, states[1].shape[1])
    args = [
        *states,
        np.int32(states[1].shape[1]),
        *_initial(heads, initial),
        *heads.args,
        *(np.int32(number) for number in (*segments, m, work.columns)),
        *before,
        *after,
    ]
    device.launch(
        "fused.cu",
        "scan_states",
        work.variant.options(PARTS["scan_states"][1], CAUSAL_TILE),
        (heads.total, -(-m * work.columns // SCAN_THREADS), 1),
        (SCAN_THREADS, 1, 1),
        0,
        args,
    )


def _outputs(work: Work) -> tuple[Array, Array | None]:
    problem = work.problem
    shape = (*problem.lead, problem.query.shape[-2], problem.value.shape[-1])
    norms = cupy.empty(shape[:-1], "float32") if problem.want_log else None
    return cupy.empty(shape, problem.query.dtype), norms


def _full_state(work: Work) -> tuple[Array, Array]:
    """State of all keys, and its shifts."""
    count = work.state_heads.total * work.value_tiles
    segments = segments_of(work.key.shape[-2], count, CAUSAL_TILE, work.max_states())
    after = work.new_state()
    scan(work, work.problem.state, _states(work, segments), after)
    return after


def _full_rows(work: Work, state: tuple[Array, Array]) -> tuple[Array, Array | None]:
    """Output, and norms where they are wanted, of queries that read a state."""
    problem, heads = work.problem, work.heads
    output, norms = _outputs(work)
    length = problem.query.shape[-2]
    tile = read_tile(partial(work.variant.shared, keys=False, queries=True))
    segments = segments_of(length, heads.total * work.value_tiles, tile, length)
    args = [
        *view(heads, work.query),
        *work.spec_args(heads),
        *state,
        *unit_strides(heads, problem.state_lead),
        *work.sizes(heads, segments),
        output,
        norms,
    ]
    shared = work.variant.shared(tile, keys=False, queries=True)
    work.launch("read_states", heads.total * segments.number, tile, args, shared)
    return output, norms


class SegmentStates(NamedTuple):
    """States before the segments of a causal problem, or adjoint states after them."""

    kvz: Array
    shifts: Array
    cut: Cut


class Forward(NamedTuple):
    """Output, norms where they are wanted, and the last state of a first pass.

    Causal: also states before segments, and flags of rejected segments.
    """

    output: Array
    norms: Array
    after: tuple[Array, Array]
    before: SegmentStates | None
    flags: Array


def _states_before(work: Work) -> SegmentStates:
    """Make the states before all segments."""
    tiles = work.value_tiles
    cut = cut_of(
        work.problem.query.shape[-2],
        work.heads.total * tiles,
        work.state_heads.total * tiles,
        work.max_states(),
    )
    needed = cut.parts._replace(number=cut.parts.number - cut.parts_per_segment)
    return scan_segments(work, work.problem.state, _states(work, needed), cut)


def _token_args(work: Work) -> list[Any]:
    arrays = (work.query, work.key, work.value, work.mask)
    return [arg for array in arrays for arg in view(work.heads, array)]


def _causal_rows(work: Work, before: SegmentStates) -> Forward:
    problem, heads = work.problem, work.heads
    output, norms = _outputs(work)
    after = work.new_state()
    flags = cupy.zeros((heads.total, before.cut.segments.number), "int32")
    args = [
        *_token_args(work),
        *work.spec_args(heads),
        *(before.kvz, before.shifts),
        *unit_strides(heads, problem.state_lead),
        *work.sizes(heads, before.cut.segments),
        *(output, norms),
        *after,
        flags,
    ]
    blocks = heads.total * before.cut.segments.number
    shared = work.variant.shared(CAUSAL_TILE, keys=True, queries=True)
    work.launch("causal_rows", blocks, CAUSAL_TILE, args, shared)
    return Forward(output, norms, after, before, flags)


def redo_rejected(work: Work, forward: Forward, output: Array, norms: Array | None) -> None:
    """Compute the rows of flagged segments again, exactly."""
    problem, heads, before, flags = work.problem, work.heads, forward.before, forward.flags
    if before is None:
        return
    if problem.state_lead == problem.lead:
        workspace = (before.kvz, before.shifts)
    else:  # heads that share a state cannot write over it
        workspace = work.new_states(heads.total, before.cut.segments.number)
    dims = (problem.query.shape[-1], problem.num_features, work.columns)
    rows = Rows(
        [*_token_args(work), *view(heads, None)],
        [before.kvz, before.shifts, *unit_strides(heads, problem.state_lead)],
        workspace,
        (output, norms),
    )
    family, parameters = float32_map(problem.query_spec, dims[0], dims[1])
    redo(family, parameters, heads, flags, before.cut.segments, dims, rows)

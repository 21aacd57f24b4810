"""Exact pairs in float32: softmax attention, and causal windows of exact keys beside a map.

Scores of a block of queries are one product of all heads, a kernel makes weights of them in place,
and another product reads the values. The host waits for one flag at the end: a value that is not
finite reaches rows that do not see it, and such a call is left to the generic code.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Declined, Problem
from linattn_cupy import device
from linattn_cupy.device import cupy
from linattn_cupy.layout import heads_of
from linattn_cupy.planning import Block, blocks_of, scores_of, window_tokens_of
from linattn_cupy.products import multiply
from linattn_cupy.rows import (
    COPIES_AT_ONCE,
    HeadRows,
    Output,
    StateArrays,
    array_steps,
    element_blocks,
    int32,
    launch_rows,
)
from linattn_cupy.states import (
    QUERIES_SHARE,
    Work,
    add_block,
    log_weights_of,
    new_state,
    products_of,
    query_weights,
    work_of,
)
from linattn_cupy.steps import DECAYS

MIN_WINDOW, MAX_WINDOW = 32, 1024
NOT_FINITE = Declined("an output is not finite")


class _Pairs(NamedTuple):
    """Arrays of exact pairs, (heads, n, x), log weights (heads, s) or None, and where rows go."""

    query: HeadRows
    key: Array
    value: Array
    weights: Array | None
    scale: float
    out: Output

    def read(
        self, heads: slice, rows: slice, keys: slice, see: _Sees, mapped: _Mapped | None
    ) -> None:
        """Weigh the keys of some queries, and write their rows."""
        query, value = self.query.part(rows)[heads], self.value[heads, keys]
        (count, n), s = query.shape[:2], value.shape[1]
        scores = cupy.empty((count, n, s), "float32")
        multiply(query, self.key[heads, keys], scores, transpose_b=True)
        to = self.out.part(rows)
        output, norms = to.rows[heads], None if to.norms is None else to.norms[heads]
        weights = None if self.weights is None else self.weights[heads, keys]
        args = [scores, *int32(n, s), np.float32(self.scale), *int32(*see)]
        args += [*array_steps(weights, 1), *array_steps(norms, 1)]
        nums, dens, logs = mapped or (None, None, None)
        args += [nums, *array_steps(dens, 1), *array_steps(logs, 1)]
        args += [np.int64(0 if nums is None else nums.strides[0] // 4), np.int32(value.shape[-1])]
        args += array_steps(output, 2)
        launch_rows("softmax_rows", count * n, args, source="softmax.cu")
        multiply(scores, value, output, add=mapped is not None)


class _Sees(NamedTuple):
    """Which keys queries see: up to their own place or all; place of the first query."""

    is_causal: bool
    first: int


class _Mapped(NamedTuple):
    """What queries read by a map: numerators (heads, n, e), denominators and logs (heads, n)."""

    nums: Array
    dens: Array
    logs: Array


def _pairs(problem: Problem, scale: float, out: Output) -> _Pairs:
    heads, whole = heads_of(problem.lead), slice(None)
    weights = log_weights_of(problem)
    value = HeadRows(problem.value, heads)
    if weights is not None:
        weights = weights.reshape(heads.total, -1)
    return _Pairs(
        HeadRows(problem.query, heads),
        HeadRows(problem.key, heads).part(whole),
        value.part(whole) if weights is None else value.packed(whole, array_steps(weights, 1)),
        weights,
        scale,
        out,
    )


def _finished(problem: Problem, out: Output, state: Any, fine: Array) -> Any:
    blocks = element_blocks(1, out.rows.size, COPIES_AT_ONCE)
    args = [out.rows, np.int64(out.rows.size), fine]
    launch_rows("check_finite", blocks, args, source="softmax.cu")
    if not bool(fine):
        return NOT_FINITE
    output = out.rows.reshape(*problem.lead, *out.rows.shape[1:])
    norms = None if out.norms is None else out.norms.reshape(output.shape[:-1])
    return output, state, norms


@device.or_generic
def softmax_attention(problem: Problem) -> Any:
    """Softmax attention of float32, or Declined.

    Blocks of queries read all keys that any of them sees; scores of a block fit the workspace.
    """
    arrays = (problem.query, problem.key, problem.value)
    dtypes = {str(array.dtype) for array in arrays} | {str(np.dtype(problem.dtype))}
    device.require(dtypes == {"float32"}, f"dtypes are {', '.join(sorted(dtypes))}, not float32")
    device.require(problem.lead == problem.state_lead, QUERIES_SHARE)
    sizes = (*problem.lead, *(size for array in arrays for size in array.shape[-2:]))
    device.require(0 not in sizes, "an axis has length 0")
    fine = cupy.full((1,), 1, "int32")
    start, is_causal = problem.sees.query_start, problem.sees.is_causal
    device.require(start >= 0, "queries stand before the keys")
    (length, _), (size, e) = problem.query.shape[-2:], problem.value.shape[-2:]
    total = math.prod(problem.lead)
    norms = cupy.empty((total, length), "float32") if problem.want_log else None
    out = Output(cupy.empty((total, length, e), "float32"), norms, divides=True)
    pairs = _pairs(problem, problem.query_spec.scale, out)
    with products_of(problem):
        for heads, rows in scores_of(total, length, size, start if is_causal else None):
            stop = min(size, rows.stop + start) if is_causal else size
            sees = _Sees(is_causal, rows.start + start)
            pairs.read(heads, rows, slice(0, stop), sees, None)
    return _finished(problem, out, None, fine)


@device.or_generic
def window_attention(problem: Problem) -> Any:
    """Causal attention of float32 with an exact window, or Declined.

    With tiles as long as the window, queries of a tile read the state before the tile before
    theirs, which a scan of all tiles has made, and the keys of both tiles exactly.
    """
    window, spec = problem.exact.window, problem.exact.spec
    assert window is not None
    assert spec is not None
    device.require(problem.sees.is_causal, "a window on both sides")
    device.require(problem.state is None, "a window after a state")
    device.require(problem.lead == problem.state_lead, QUERIES_SHARE)
    device.require(problem.query.shape[-2] == problem.key.shape[-2], "lengths differ")
    device.require(problem.sees.query_start == 0, "queries and keys stand at other places")
    device.require(problem.exact.clusters is None, "exact_clusters is given")
    device.require(problem.weights.log_decay is None, DECAYS)
    is_supported = MIN_WINDOW <= window <= MAX_WINDOW
    device.require(is_supported, f"{window} tokens are not within {MIN_WINDOW} and {MAX_WINDOW}")
    fine, exact = cupy.full((1,), 1, "int32"), problem.exact._replace(window=None)
    work = work_of(problem.replace(exact=exact))
    length, e = problem.query.shape[-2], problem.value.shape[-1]
    out = work.output(length, e, problem.want_log)
    pairs = _pairs(problem, spec.scale, out)
    everything, state = slice(None), work.state
    with products_of(problem):
        first = slice(0, min(window, length))
        pairs.read(everything, first, first, _Sees(True, 0), None)
        for block in _window_blocks(problem, window):
            state = _window_block(work, pairs, block, state, window)
    return _finished(problem, out, new_state(state, problem.state_lead, length), fine)


def _window_blocks(problem: Problem, window: int) -> list[Block]:
    """Blocks of keys, so that the next tile of each is whole, but for the last two blocks."""
    length = problem.key.shape[-2]
    whole = (length // window - 1) * window
    blocks = []
    if whole > 0:
        blocks = blocks_of(whole, window_tokens_of(problem, window), is_causal=True, tile=window)
    ends = [max(whole, 0), max(whole, 0) + window, length]
    for start, stop in pairwise(ends):
        rows = slice(start, min(stop, length))
        blocks += [Block(rows, rows.stop - rows.start)] if rows.stop > rows.start else []
    return blocks


def _window_block(
    work: Work, pairs: _Pairs, block: Block, state: StateArrays, window: int
) -> StateArrays:
    """Add a block of keys to a state, and do the queries one tile after it."""
    rows, length = block.rows, pairs.value.shape[1]
    queries = slice(rows.start + window, min(rows.stop + window, length))
    count = queries.stop - queries.start
    if count <= 0:
        return add_block(work.keys, block, state, is_causal=False)[0]
    after, seen = add_block(work.keys, block, state, is_causal=True)
    assert seen is not None
    kvz, shifts = seen.before
    del seen
    heads, tiles, _, width = kvz.shape
    e, tile = width - 1, count // tiles
    dens, logs = (cupy.empty((heads, count), "float32") for _ in range(2))
    nums = cupy.empty((heads * tiles, tile, e), "float32")
    read = [shifts, kvz[..., e:], np.int64(width)]
    undivided = Output(nums, logs, divides=False)
    u = query_weights(work.queries, Block(queries, tile), read, dens[..., None], undivided)
    multiply(u.reshape(-1, tile, u.shape[-1]), kvz.reshape(-1, *kvz.shape[2:])[..., :e], nums)
    nums = nums.reshape(heads, count, e)
    for begin in range(0, count, tile):
        part = slice(begin, begin + tile)
        of_tile = slice(queries.start + begin, queries.start + begin + tile)
        keys = slice(of_tile.start - window, of_tile.stop)
        mapped = _Mapped(nums[:, part], dens[:, part], logs[:, part])
        pairs.read(slice(None), of_tile, keys, _Sees(True, window), mapped)
    return after

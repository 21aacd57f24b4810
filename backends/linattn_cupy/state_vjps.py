"""Gradients of float32 attention: batched products, and a kernel between two of them.

Blocks are cut into tiles as in :mod:`.states`. A causal pullback takes blocks from the last to the
first, each after the state before it. Queries give each tile a cotangent of the state that they
read; a scan of these from the last tile to the first makes the adjoint that the keys of a tile
read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Cotangent, Declined, Problem, State
from linattn_cupy import device
from linattn_cupy.device import cupy
from linattn_cupy.layout import sum_to
from linattn_cupy.parameters import FAMILIES
from linattn_cupy.planning import Block, gradient_blocks, gradient_tokens_of
from linattn_cupy.products import multiply
from linattn_cupy.rows import (
    HeadRows,
    Output,
    Side,
    StateArrays,
    array_steps,
    element_blocks,
    int32,
    launch_rows,
    row_blocks,
)
from linattn_cupy.states import (
    QUERIES_SHARE,
    Work,
    add_block,
    products_of,
    query_weights,
    scan_block,
    solve,
    state_arrays,
    values_of,
    weigh_keys,
    work_of,
)
from linattn_cupy.steps import DECAYS

SOURCE = "vjps.cu"
ALIGNED = 4
"""Columns of an adjoint are a multiple of this: products are slower where rows are not aligned."""


class Pullback(NamedTuple):
    """A problem in which no two heads share keys, cotangents of its output, and its gradients.

    ``adjoint``: (heads, m, width), on the scale of the state at hand; the columns after e + 1 are
    0. ``fine``: 1; becomes 0 where a row was rejected, or something is not finite.
    """

    work: Work
    grads: HeadRows
    adjoint: Array
    query: Array
    key: Array
    value: Array
    fine: Array

    @property
    def value_dim(self) -> int:
        """Length of a value."""
        return int(self.value.shape[-1])

    def cotangents(
        self, block: Block, output: Array, dens: Array | None, rejected: Array | None
    ) -> Array:
        """Cotangents of numerators and denominators, (heads, n, width)."""
        heads, n, e = output.shape
        width = self.adjoint.shape[-1]
        found = cupy.empty((heads, n, width), "float32")
        args = [*array_steps(self.grads.part(block.rows), 2), output, dens, rejected]
        args += int32(n, block.tile, e, width)
        blocks = row_blocks(heads, n)
        launch_rows("row_cotangents", blocks, [*args, found, self.fine], source=SOURCE)
        return found

    def pull_tokens(
        self,
        side: Side,
        tokens: HeadRows,
        block: Block,
        weights: Array,
        sums: Array,
        factors: Array | None,
        read: Array,
        to: Array,
    ) -> None:
        """Gradients of tokens from those of their weights, which ``sums`` and ``read`` make.

        ``factors``: of the last numbers that are read, one a token; None for keys.
        """
        heads, (n, d), m = to.shape[0], to[:, block.rows].shape[1:], weights.shape[-1]
        x, part = tokens.part(block.rows), to[:, block.rows]
        is_key, family = factors is None, FAMILIES[side.family]
        step = 0 if factors is None else factors.strides[-2] // 4
        args = [weights, sums, factors, np.int64(step)]
        args += [read, np.int64(read.strides[-2] // 4), *array_steps(x, 2)]
        args += [*int32(n, block.tile, d, m, family), side.curvature]
        curves = is_key and side.curvature != 0
        args += array_steps(part if family or curves else None, 2)
        launch_rows("pull_weights", row_blocks(heads, n), [*args, self.fine], source=SOURCE)
        if not family:
            gradients = sums.reshape(heads, n, m)
            multiply(gradients, side.map.projection, part, transpose_b=True, add=curves)


@device.or_generic
def float32_pullback(problem: Problem) -> Any:
    """Attention of float32, and its pullback, which begins with the states of the first pass."""
    device.require(problem.state_lead == problem.lead, QUERIES_SHARE)
    device.require(problem.weights.log_decay is None, DECAYS)
    states: list[StateArrays] = []
    return *solve(problem, states), partial(_pull_back, problem, states)


@device.or_generic
def float32_vjp(problem: Problem, cotangent: Cotangent) -> Any:
    """Gradients of float32 attention, or Declined: first the states that the pullback begins with.

    The host waits for a flag at the end: where rows were rejected, or a gradient is not finite,
    generic code computes all gradients.
    """
    shared_state = cotangent.state is not None and problem.state_lead != problem.lead
    device.require(not shared_state, "heads share a state that has a cotangent")
    device.require(problem.weights.log_decay is None, DECAYS)
    work, states = _unshared(problem), []
    blocks = gradient_blocks(problem)
    with products_of(problem):
        state = work.state
        for block in blocks:
            states.append(state)
            if block is not blocks[-1] or not problem.sees.is_causal:
                state, _ = add_block(work.keys, block, state, is_causal=False)
    if not problem.sees.is_causal:
        states = [state]
    return _pull_back(problem, states, cotangent)


def _unshared(problem: Problem) -> Work:
    return work_of(replace(problem, state_lead=problem.lead))


def _pull_back(problem: Problem, states: list[StateArrays], cotangent: Cotangent) -> Any:
    """Gradients from the states before the blocks, or in full attention from the last state."""
    work = _unshared(problem)
    heads, (length, d) = work.queries.tokens.heads, problem.query.shape[-2:]
    (size, e), m = problem.value.shape[-2:], work.keys.side.features
    width = -(-(e + 1) // ALIGNED) * ALIGNED
    query, key, value = (
        cupy.empty((heads.total, *shape), "float32")
        for shape in ((length, d), (size, d), (size, e))
    )
    adjoint, fine = (cupy.zeros((heads.total, m, width), "float32"), cupy.full((1,), 1, "int32"))
    grads = HeadRows(cotangent.output, heads)
    pull = Pullback(work, grads, adjoint, query, key, value, fine)
    with products_of(problem):
        if problem.sees.is_causal:
            _causal(problem, pull, states, cotangent.state)
        else:
            _full(problem, pull, states[0], cotangent.state)
    if not bool(pull.fine):
        return Declined("rows were rejected, or a gradient is not finite")
    arrays = (problem.query, problem.key, problem.value)
    found = [
        sum_to(x.reshape(*problem.lead, *x.shape[1:]), tuple(like.shape))
        for x, like in zip((pull.query, pull.key, pull.value), arrays, strict=True)
    ]
    state = None
    if problem.state is not None:
        by_state = pull.adjoint[..., : e + 1].reshape(*problem.lead, m, e + 1)
        state = sum_to(by_state, tuple(problem.state.kvz.shape))
    return *found, state


def _begin(problem: Problem, pull: Pullback, grad_state: State | None, shifts: Array) -> None:
    """Begin with the cotangent of the last state, whose shifts are given."""
    if grad_state is not None:
        kvz, less = state_arrays(grad_state, problem.lead)
        pull.adjoint[..., : kvz.shape[-1]] = kvz * problem.xp.exp(shifts + less)[..., None]


def _causal(
    problem: Problem, pull: Pullback, states: list[StateArrays], grad_state: State | None
) -> None:
    blocks = gradient_blocks(problem)
    for block, before in zip(reversed(blocks), reversed(states), strict=True):
        by_state = grad_state if block is blocks[-1] else None
        _pull_block(problem, pull, block, before, by_state)


def _pull_block(
    problem: Problem, pull: Pullback, block: Block, before: StateArrays, grad_state: State | None
) -> None:
    """Pull back a causal block after the state before it."""
    work, rows, tile = pull.work, block.rows, block.tile
    heads, e, m = work.queries.tokens.heads.total, pull.value_dim, work.keys.side.features
    n = rows.stop - rows.start
    output = cupy.empty((heads, n, e), "float32")
    to = Output(output, None, divides=True)
    scan = scan_block(work.queries, work.keys, block, (before, work.before + rows.start), to)
    after, seen, queries, scores, dens, flags = scan
    keys, values = seen.weights.reshape(-1, tile, m), seen.values.reshape(-1, tile, e)
    scales, kv, z = seen.scales, seen.kv, seen.z
    _begin(problem, pull, grad_state, after[1])
    del scan, seen, after

    rows_of_tiles = pull.cotangents(block, output, dens, flags).reshape(len(keys), tile, -1)
    grads, inner = rows_of_tiles[..., :e], rows_of_tiles[..., e:]
    of_values = output.reshape(len(keys), tile, e)  # the output is not needed any more
    multiply(scores, grads, of_values, transpose_a=True)
    multiply(grads, values, scores, transpose_b=True)
    width = rows_of_tiles.shape[-1]
    args = [scores, np.int32(tile), rows_of_tiles, *int32(e, width)]
    launch_rows("score_cotangents", row_blocks(len(keys), tile), args, source=SOURCE)
    adjoints = cupy.empty((len(keys), m, width), "float32")
    multiply(queries, rows_of_tiles, adjoints, transpose_a=True)
    args = [adjoints, pull.adjoint, scales, before[1], *int32(n // tile, m, width)]
    launch_rows("scan_adjoints", element_blocks(heads, m * width), args, source=SOURCE)

    sums = cupy.empty((len(keys), tile, m), "float32")
    multiply(scores, keys, sums)
    multiply(grads, kv, sums, transpose_b=True, add=True)
    side, tokens = work.queries
    pull.pull_tokens(side, tokens, block, queries, sums, inner, z[..., None], pull.query)
    multiply(scores, queries, sums, transpose_a=True)
    multiply(values, adjoints[..., :e], sums, transpose_b=True, add=True)
    multiply(keys, adjoints[..., :e], of_values, add=True)
    side, tokens = work.keys[:2]
    pull.pull_tokens(side, tokens, block, keys, sums, None, adjoints[..., e:], pull.key)
    pull.value[:, rows] = output


def _full(problem: Problem, pull: Pullback, state: StateArrays, grad_state: State | None) -> None:
    work, tokens = pull.work, gradient_tokens_of(problem)
    _begin(problem, pull, grad_state, state[1])
    kv, length = values_of(state), problem.query.shape[-2]
    for start in range(0, length, tokens):
        rows = slice(start, min(start + tokens, length))
        _pull_queries(pull, Block(rows, rows.stop - rows.start), kv, state)
    for block in gradient_blocks(problem):
        _pull_keys(pull, block, state)
    shifts = work.state[1]
    if problem.state is not None:
        # The one before all keys.
        zeros = cupy.zeros((shifts.shape[0], 1, *pull.adjoint.shape[1:]), "float32")
        args = [zeros, pull.adjoint, state[1], shifts, *int32(1, *pull.adjoint.shape[1:])]
        blocks_of_threads = element_blocks(len(shifts), pull.adjoint[0].size)
        launch_rows("scan_adjoints", blocks_of_threads, args, source=SOURCE)


def _pull_queries(pull: Pullback, block: Block, kv: Array, state: StateArrays) -> None:
    """Pull back queries that read a state, and add their cotangents of it."""
    kvz, shifts = state
    e = pull.value_dim
    heads, n = len(kvz), block.tile
    to = Output(cupy.empty((heads, n, e), "float32"), None, divides=True)
    u = query_weights(pull.work.queries, block, [shifts, kvz[..., e:], np.int64(e + 1)], None, to)
    multiply(u, kv, to.rows)
    cotangents = pull.cotangents(block, to.rows, None, None)
    multiply(u, cotangents, pull.adjoint, transpose_a=True, add=True)
    sums = cupy.empty(u.shape, "float32")
    multiply(cotangents[..., :e], kv, sums, transpose_b=True)
    side, tokens = pull.work.queries
    inner = cotangents[..., e:]
    pull.pull_tokens(side, tokens, block, u, sums, inner, kvz[..., e:], pull.query)


def _pull_keys(pull: Pullback, block: Block, state: StateArrays) -> None:
    """Pull back keys, all read by one adjoint on the scale of the last state."""
    keys, adjoint, e = pull.work.keys, pull.adjoint, pull.value_dim
    u, values, *_ = weigh_keys(keys, block, state[1], is_causal=False)
    sums = cupy.empty(u.shape, "float32")
    multiply(values, adjoint[..., :e], sums, transpose_b=True)
    multiply(u, adjoint[..., :e], pull.value[:, block.rows])
    whole = Block(block.rows, u.shape[1])  # all tiles read one adjoint
    pull.pull_tokens(*keys[:2], whole, u, sums, None, adjoint[..., e:], pull.key)

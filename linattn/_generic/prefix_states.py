"""Prefix merges: the state of all blocks before each block."""

from __future__ import annotations

import sys
from typing import Any

from linattn._arrays import namespace
from linattn._generic.decay import fade
from linattn._generic.states import merge
from linattn._numerics import finite_shift, rescaled
from linattn.typing import Array, State
from linattn.typing._shifts import largest

MAX_LOG_SPAN = 20.0
"""Logs of a feature that differ by no more than this may share one scale: nothing underflows."""


def weighted(state: State, bias: Array) -> State:
    """Give all that a state has seen a log weight; heads of it may be more than the state has."""
    if bias is None:
        return state
    xp, is_nothing = namespace(state.kvz), bias == -float("inf")
    log_scale = xp.where(is_nothing, bias, state.log_scale + bias)
    # A state that is left out must leave no NaN.
    kvz = xp.where((log_scale == -xp.inf)[..., None], xp.zeros_like(state.kvz), state.kvz)
    return State(kvz, log_scale, state.length)


def with_block_axis(state: State) -> State:
    return State(state.kvz[..., None, :, :], state.log_scale[..., None, :], 0)


def state_at(states: State, index: int) -> State:
    """Take one state out of an axis of blocks."""
    return State(states.kvz[..., index, :, :], states.log_scale[..., index, :], 0)


def flip_states(states: State) -> State:
    """Reverse the order of states along an axis of blocks."""
    xp = namespace(states.kvz)
    return State(xp.flip(states.kvz, axis=-3), xp.flip(states.log_scale, axis=-2), 0)


def prefix_merge(each: State, *, lazy: bool) -> State:
    """Merge states along an axis, log scales ``(..., n, m)``, each with all before it."""
    answer = None if lazy else _cumulative_on_one_scale(each)
    return _merge_pairwise(each) if answer is None else answer


def merge_in_turn(first: State, each: State, totals: Array | None) -> State:
    """Merge a state with states along an axis of blocks, one after the other, as JAX compiles it.

    ``totals``: log decay ``(..., blocks, 1)``, by which a state fades before each block. The axis
    of the result has one more: the first state comes first.
    """
    jax, xp = sys.modules["jax"], namespace(each.kvz)
    blocks = each.kvz, each.log_scale[..., None], None if totals is None else totals[..., None]

    def step(sums: Any, block: Any) -> Any:
        kvz, log_scale, total = block
        before = State(sums[0], sums[1], 0)
        if total is not None:
            before = fade(before, total[..., 0])
        after = merge(before, State(kvz, log_scale[..., 0], 0))
        return tuple(after[:2]), sums

    moved = jax.tree.map(lambda x: xp.moveaxis(x, -3, 0), blocks)
    last, before = jax.lax.scan(step, tuple(first[:2]), moved)
    kvz, log_scale = (xp.concat([x, y[None]]) for x, y in zip(before, last, strict=True))
    return State(xp.moveaxis(kvz, 0, -3), xp.moveaxis(log_scale, 0, -2), 0)


def _cumulative_on_one_scale(each: State) -> State | None:
    """Cumulative sum on the largest scale of each feature; None where that is too far from one."""
    xp = namespace(each.kvz)
    empty = each.log_scale == -xp.inf
    c = finite_shift(largest(each.log_scale, axis=-2, keepdims=True), xp)
    if not bool(xp.all(empty | (c - each.log_scale <= MAX_LOG_SPAN))):
        return None
    kvz = xp.cumulative_sum(rescaled(each.kvz, each.log_scale - c), axis=-3)
    unseen = xp.cumulative_sum(xp.astype(~empty, xp.int64), axis=-2) == 0
    return State(kvz, xp.where(unseen, xp.full_like(c, -xp.inf), c), 0)


def _merge_pairwise(each: State) -> State:
    """Merge pairs, find their prefix merges in the same way, and fill in every other one.

    At most 2 n merges, in 2 log2(n) steps; no branch depends on data.
    """
    n = each.log_scale.shape[-2]
    if n == 1:
        return each
    odd = blocks_of(each, slice(0, n - n % 2, 2))
    pairs = _merge_pairwise(merge(odd, blocks_of(each, slice(1, None, 2))))
    firsts = blocks_of(each, slice(0, 1))
    later = blocks_of(each, slice(2, None, 2))
    before = blocks_of(pairs, slice(0, later.log_scale.shape[-2]))
    firsts = stack_states([firsts, merge(before, later)]) if n > 2 else firsts
    return _interleaved(firsts, pairs)


def stack_states(states: list[State]) -> State:
    """Join states along their axis of blocks."""
    xp = namespace(states[0].kvz)
    kvz = xp.concat([state.kvz for state in states], axis=-3)
    return State(kvz, xp.concat([state.log_scale for state in states], axis=-2), 0)


def blocks_of(each: State, blocks: slice) -> State:
    """Take some of the states along an axis of blocks."""
    return State(each.kvz[..., blocks, :, :], each.log_scale[..., blocks, :], 0)


def _interleaved(odd: State, even: State) -> State:
    """First of the one, first of the other, and so on; the one may be longer by one."""
    xp = namespace(odd.kvz)
    n = even.log_scale.shape[-2]
    kvz = xp.stack([odd.kvz[..., :n, :, :], even.kvz], axis=-3)
    log_scale = xp.stack([odd.log_scale[..., :n, :], even.log_scale], axis=-2)
    *lead, _, m, width = odd.kvz.shape
    both = State(
        xp.reshape(kvz, (*lead, 2 * n, m, width)), xp.reshape(log_scale, (*lead, 2 * n, m)), 0
    )
    return stack_states([both, blocks_of(odd, slice(n, None))]) if odd.kvz.shape[-3] > n else both

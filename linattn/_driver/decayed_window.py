"""Near keys exactly and far ones by the map, all weighed down by the decay between key and query.

Blocks and groups are those of :mod:`linattn._driver.window`. What is far to the left of a block is
a state as it was at the end of the last far block, and each row lets it decay up to itself; to the
right it is the same from the end, with one decay for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import raw_tokens, token_block, values_and_one_block
from linattn._driver.clusters import ExactClusters
from linattn._driver.modifiers import decay_of_rows
from linattn._driver.token_blocks import decay_blocks, in_blocks, key_blocks
from linattn._driver.window import FarKeys, block_states, in_groups, no_keys, read_rows, window_of
from linattn._generic.decay import decay_since, decay_until, fade, near, weighed
from linattn._generic.exact import beside, exact_pairs, in_band
from linattn._generic.prefix_states import stack_states, state_at, with_block_axis
from linattn.typing import Array, Partial, Problem, State, Tokens

__all__ = ["decayed_window_rows"]


class _Group(NamedTuple):
    """Keys of some blocks, of the one before them and, in full attention, of the one after them."""

    key: Tokens
    values_and_one: Array
    log_decay: Array
    """``(..., blocks, w, 1)``; 0 outside the sequence."""

    @property
    def totals(self) -> Array:
        """Log decay of each block in all, ``(..., blocks, 1)``."""
        return _arrays.namespace(self.log_decay).sum(self.log_decay, axis=-2)


def decayed_window_rows(
    problem: Problem,
    state: State,
    block_size: int,
    functions: BlockFunctions,
    write: Callable[[slice, Partial], None],
    clusters: ExactClusters | None = None,
) -> State:
    """Attend to near keys exactly and to far ones by the map; return the state after all keys.

    Time as of :func:`linattn._driver.window.window_rows`, but full attention reads each query
    twice; memory too, and a state for each group.
    """
    problem, blocked, groups = in_groups(problem, block_size)
    length, w, start = problem.query.shape[-2], window_of(problem), state.length
    later: Iterable[State | None] = repeat(None, len(groups))
    if not problem.is_causal:
        later = reversed(list(_states_after(problem, functions, groups, start)))
    before = after_all = state
    for (first, g), after in zip(groups, later, strict=True):
        stop = first + g + (after is not None)
        group = _Group(
            *key_blocks(problem, first - 1, stop, w, start),
            decay_blocks(problem, first - 1, stop, w),
        )
        rows = slice(first * w, min((first + g) * w, length))
        flat = raw_tokens(problem, "query", rows, start)
        query = in_blocks(flat, g * w, w)
        left, before, after_all = _far_left(blocked, functions, group, before, g)
        sides = [left]
        if after is not None:
            sides.append(_far_right(blocked, functions, group, after, g))
        near_part = _near(problem, query, group)
        write(rows, read_rows(blocked, functions, query, flat, near_part, sides, clusters))
    return State(after_all.kvz, after_all.log_scale, start + length)


def _near(problem: Problem, query: Tokens, group: _Group) -> Partial:
    """Exact attention of blocks of queries to their own keys and those beside them."""
    xp, (g, w) = problem.xp, query.x.shape[-3:-1]
    key = Tokens(beside(group.key.x, g), beside(group.key.log_weight, g), group.key.start)
    since = decay_since(beside(group.log_decay, g))
    between = -xp.abs(since[..., w : 2 * w, :] - xp.matrix_transpose(since))
    bias = xp.astype(between, problem.dtype, copy=False)
    visible = in_band(query.x, w, key.x.shape[-2], (-w, w)) if problem.is_causal else None
    values_and_one = beside(group.values_and_one, g)
    assert problem.near_spec is not None
    return exact_pairs(problem.near_spec, query, key, values_and_one, visible, bias, problem.lazy)


def _far_left(
    blocked: Problem, functions: BlockFunctions, group: _Group, before: State, g: int
) -> tuple[FarKeys, State, State]:
    """All before the block beside each block; the same of the next group; and all keys so far."""
    totals, decay = group.totals, group.log_decay[..., 1 : g + 1, :, :]
    key = weighed(group.key, decay_until(group.log_decay))
    states = block_states(blocked, key, group.values_and_one, functions)
    seen = [before]
    for i in range(g + 1):
        seen.append(_generic.merge(fade(seen[-1], totals[..., i, :]), state_at(states, i)))
    log = totals[..., :g, None, :] + decay_since(decay)
    return _far_keys(blocked, seen[:g], log), seen[g], seen[g + 1]


def _far_right(
    blocked: Problem, functions: BlockFunctions, group: _Group, after: State, g: int
) -> FarKeys:
    """All behind the block beside each block; ``after`` is that of the last."""
    totals, decay = group.totals, group.log_decay[..., 1 : g + 1, :, :]
    key = weighed(group.key, _decay_from_first(group.log_decay))
    states = block_states(blocked, key, group.values_and_one, functions)
    seen = [after]
    for i in range(g + 1, 2, -1):
        seen.append(_generic.merge(state_at(states, i), fade(seen[-1], totals[..., i, :])))
    log = totals[..., 2 : g + 2, None, :] + decay_until(decay) + decay
    return _far_keys(blocked, seen[::-1], log)


def _far_keys(blocked: Problem, states: list[State], log: Array) -> FarKeys:
    state, top = near(stack_states([with_block_axis(state) for state in states]))
    return FarKeys(state, blocked.xp.astype(top + log, blocked.dtype, copy=False))


def _decay_from_first(log_decay: Array) -> Array:
    """Decay from the first token of a run to each of it, going back."""
    return decay_since(log_decay) - log_decay[..., :1, :]


def _states_after(
    problem: Problem, functions: BlockFunctions, groups: list[tuple[int, int]], start: int
) -> Iterator[State]:
    """For each group, the last first, all keys from the second block after it."""
    w = window_of(problem)
    after = no_keys(problem)
    for first, g in reversed(groups):
        yield after
        rows = slice((first + 1) * w, min((first + g + 1) * w, problem.key.shape[-2]))
        if first and rows.start < rows.stop:
            decay = decay_of_rows(problem, rows)
            key = weighed(token_block(problem, "key", rows, start), _decay_from_first(decay))
            block = key, values_and_one_block(problem, rows)
            run = functions.reduce_block(problem.key_spec, *block, no_keys(problem))
            after = _generic.merge(run, fade(after, problem.xp.sum(decay, axis=-2)))

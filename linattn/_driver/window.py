"""Near keys exactly, far keys by the feature map, one normalizer.

Tokens stand in blocks of the window's length; the keys of a query's own block and of those beside
it (causal: the one before) are near. Blocks are worked on by the group, with an axis of blocks
before that of tokens. What is far of a block is a sum of states before and states after it;
nothing is ever subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import array_api_compat

from linattn import _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.block_axis import for_blocks
from linattn._driver.blocks import in_map_coordinates, raw_tokens, token_block, values_and_one_block
from linattn._driver.clusters import ExactClusters
from linattn._driver.pairs import bias_block
from linattn._driver.token_blocks import flat_rows, in_blocks, key_blocks
from linattn._generic.exact import beside, exact_pairs, in_band
from linattn._generic.prefix_states import state_at
from linattn.typing import Array, Partial, Problem, State, Tokens

__all__ = [
    "FarKeys",
    "block_states",
    "in_groups",
    "no_keys",
    "read_rows",
    "window_of",
    "window_rows",
]

FAN_OUT = 64
"""Runs of groups whose states are held at once at each level of a division of what comes later."""


def window_rows(
    problem: Problem,
    state: State,
    block_size: int,
    functions: BlockFunctions,
    write: Callable[[slice, Partial], None],
    clusters: ExactClusters | None = None,
) -> State:
    """Attend to near keys exactly and to far ones by the map; return the state after all keys.

    The keys of the state are far from every query. O(L (w (d + e) + m (d + e))) time; memory
    for w < c, c tokens a group: O(c (w + m) + F m e log(L / c) / log(F)) with F = FAN_OUT.
    """
    problem, blocked, groups = in_groups(problem, block_size)
    length, w, start = problem.query.shape[-2], window_of(problem), state.length
    before = state
    later: Iterator[State | None] = repeat(None)
    if not problem.is_causal:
        later = _Groups(problem, functions, start, groups).states_after(
            0, len(groups), no_keys(problem)
        )
    for (first, g), after in zip(groups, later, strict=False):
        raw, values_and_one = key_blocks(
            problem, first - 1, first + g + (after is not None), w, start
        )
        states = block_states(blocked, raw, values_and_one, functions)
        rows = slice(first * w, min((first + g) * w, length))
        flat = raw_tokens(problem, "query", rows, start)
        query = in_blocks(flat, g * w, w)
        near = _near(problem, functions, query, raw, values_and_one)
        seen, before = _far_states(problem, functions, before, states, after)
        sides = [FarKeys(seen, None)]
        write(rows, read_rows(blocked, functions, query, flat, near, sides, clusters))
    if groups:
        before = _generic.merge(before, state_at(states, g))
    return State(before.kvz, before.log_scale, start + length)


def in_groups(problem: Problem, block_size: int) -> tuple[Problem, Problem, list[tuple[int, int]]]:
    """Problem on the true scale, that with an axis of blocks, and groups (first block, count)."""
    length, w = problem.query.shape[-2], window_of(problem)
    size, count = max(1, block_size // w), -(-length // w)
    # The near part needs far logs on the true scale, the query's own term included.
    problem = problem.replace(want_log=True)
    names = ("query_spec", "key_spec", "query_change", "key_change")
    blocked = problem.replace(**{name: for_blocks(getattr(problem, name)) for name in names})
    groups = [(first, min(size, count - first)) for first in range(0, count, size)]
    return problem, blocked, groups


def window_of(problem: Problem) -> int:
    """Tokens of a block."""
    assert problem.exact_window is not None
    return problem.exact_window


class FarKeys(NamedTuple):
    """What is far of each block, and the log weight ``(..., blocks, w, 1)`` of it for each row."""

    states: State
    log: Array | None


def read_rows(
    blocked: Problem,
    functions: BlockFunctions,
    query: Tokens,
    flat: Tokens,
    near: Partial,
    sides: list[FarKeys],
    clusters: ExactClusters | None,
) -> Partial:
    """Add to the near part of blocks of queries what is far of them, as rows on one axis."""
    if clusters is not None:
        return clusters.read_blocks(blocked, query, flat, near, sides)
    tokens = in_map_coordinates(blocked, "query", query)
    for states, log in sides:
        part = functions.read_block(blocked.query_spec, tokens, states, True)
        if log is not None:
            part = Partial(part.num_den, part.log + log)
        near = _generic.combine(near, part)
    return flat_rows(near, flat.x.shape[-2])


def _near(
    problem: Problem, functions: BlockFunctions, query: Tokens, key: Tokens, values_and_one: Array
) -> Partial:
    """Exact attention of blocks of queries to their own keys and those beside them."""
    spec, bias, w = problem.near_spec, problem.relative_bias, query.x.shape[-2]
    assert spec is not None
    if bias is None:
        # Backends may take a log weight for a mask.
        weighted = problem.key_bias is not None
        window_block: Any = _generic.window_block if weighted else functions.window_block
        return window_block(  # type: ignore[no-any-return]
            spec, query, key, values_and_one, problem.is_causal, problem.lazy
        )
    g = query.x.shape[-3]
    keys = Tokens(beside(key.x, g), beside(key.log_weight, g), key.start)
    s = keys.x.shape[-2]
    biases = bias_block(bias, -w, w, s)[..., None, :, :]
    visible = in_band(query.x, w, s, (-w, w)) if problem.is_causal else None
    return exact_pairs(spec, query, keys, beside(values_and_one, g), visible, biases, problem.lazy)


def _far_states(
    problem: Problem, functions: BlockFunctions, before: State, states: State, after: State | None
) -> tuple[State, State]:
    """State of all that is far of each block, and that of all keys before the last of them."""
    if problem.relative_bias is None:
        return functions.far_states(before, states, after, problem.lazy)  # type: ignore[no-any-return]
    table = problem.relative_bias.table
    ends = table[..., None, :1], table[..., None, -1:]
    return _generic.far_states(before, states, after, problem.lazy, ends)


# States -----------------------------------------------------------------------------------------


def no_keys(problem: Problem, *blocks: int) -> State:
    like = problem.xp.empty((0,), dtype=problem.dtype, device=array_api_compat.device(problem.key))
    lead, m = (*problem.state_lead, *blocks), problem.num_features
    return _generic.empty_state(lead, m, problem.value.shape[-1], like)


def block_states(
    problem: Problem, key: Tokens, values_and_one: Array, functions: BlockFunctions
) -> State:
    """State of every block by itself, with an axis of blocks."""
    empty = no_keys(problem, key.x.shape[-3])
    tokens = in_map_coordinates(problem, "key", key)
    return functions.reduce_block(problem.key_spec, tokens, values_and_one, empty)  # type: ignore[no-any-return]


class _Groups(NamedTuple):
    """A sequence in groups of blocks, whose states are made from the last to the first."""

    problem: Problem
    functions: BlockFunctions
    start: int
    """Position of the first token."""
    groups: list[tuple[int, int]]
    """First block and number of blocks of each."""

    def states_after(self, first: int, stop: int, after: State) -> Iterator[State]:
        """For groups first..stop - 1 the state of all keys from the second block after each.

        ``after`` is that of the last. The groups are divided into at most FAN_OUT runs, whose
        states are merged from the last to the first; each run is divided in the same way.
        """
        if stop - first == 1:
            yield after
            return
        size = -(-(stop - first) // FAN_OUT)
        firsts = range(first, stop, size)
        states = [after]
        for begin in reversed(firsts[1:]):
            state = self._state_of(begin, min(begin + size, stop))
            states.append(_generic.merge(state, states[-1]))
        for begin in firsts:
            yield from self.states_after(begin, min(begin + size, stop), states.pop())

    def _state_of(self, first: int, stop: int) -> State:
        """State of the keys of some groups, each from its second block to the first after it."""
        problem, w, length = self.problem, window_of(self.problem), self.problem.key.shape[-2]
        state = no_keys(problem)
        for begin, count in self.groups[first:stop]:
            rows = slice((begin + 1) * w, min((begin + count + 1) * w, length))
            if rows.start < rows.stop:
                tokens = token_block(problem, "key", rows, self.start)
                values_and_one = values_and_one_block(problem, rows)
                state = self.functions.reduce_block(problem.key_spec, tokens, values_and_one, state)
        return state

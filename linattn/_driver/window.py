"""Near keys exactly, far keys by the feature map, one normalizer.

Positions are cut into blocks of the window's length. The keys of a query's own block and of the
blocks beside it (causal: the one before) are near. A group of blocks is computed together, with an
axis of blocks before the axis of tokens. It reads three sources: near pairs, the keys to their left
and the keys to their right. The last two are sums of the states of blocks; nothing is subtracted.
With a decay, a sum is taken at the border of the near keys, and decays from there to each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import (
    add_key_blocks,
    block_slices,
    decay_blocks,
    decay_of_rows,
    flat_rows,
    in_blocks,
    in_map_coordinates,
    key_blocks,
    raw_tokens,
    token_block,
    values_and_one_block,
)
from linattn._driver.clusters import ChosenKeys, ExactClusters
from linattn._driver.pairs import Read, Source, bias_block, biased_keys, biased_queries, join
from linattn._driver.specs import for_blocks
from linattn._generic.decay import decay_since, decay_until, fade, near, weighed
from linattn._generic.exact import beside, exact_pairs, in_band
from linattn._generic.prefix_states import (
    blocks_of,
    flip,
    merge_in_turn,
    prefix_merge,
    stack_states,
    state_at,
    weighted,
    with_block_axis,
)
from linattn.typing import Array, Partial, Problem, State, Tokens

FAN_OUT = 64
"""Parts of a run of groups at each level of a division; the state after each part is held."""


class _Group(NamedTuple):
    """Queries in some blocks, which see the keys before a stop, or only near ones ahead of them."""

    rows: slice
    first: int
    """Number of the first block."""
    num_blocks: int
    stop: int | None
    """None where the last key that a query sees is near to it."""
    stops: Any = None
    """Of each query, ``(L,)``; None where they are causal or `stop`."""

    @property
    def ahead(self) -> bool:
        """Whether a query may see keys of the block after its own."""
        return self.stop is not None or self.stops is not None


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
    for w < c, c tokens a group: O(c (w + m) + F m e log(L / c) / log(F)) with F = FAN_OUT. With a
    decay full attention reads each query twice.
    """
    window = _Window.of(problem, functions, state.length, block_size)
    before = last = _Seen(state, 0)
    for groups in window.runs():
        for group, after in zip(groups, window.states_after(groups), strict=False):
            before = window.advance(before, window.clipped(group, group.first - 1))
            keys = window.keys(group)
            lefts = window.lefts(group, keys, before.state)
            sides = window.far_field(group, keys, lefts, after)
            write(group.rows, window.read(group, keys, sides, clusters))
            # A run may end within a block, in which the next one then begins.
            ahead = (group.rows.stop + problem.sees.query_start) // window.size - group.first
            before = window.seen(group, lefts, ahead, before)
            last = window.seen(group, lefts, group.num_blocks + 1, before)
    state_after = window.advance(last, window.length).state
    return State(state_after.kvz, state_after.log_scale, state.length + window.length)


class _Seen(NamedTuple):
    """State of all keys before a position."""

    state: State
    border: int


class _Keys(NamedTuple):
    """Keys of the blocks of a group, of the block before them and, not causal, of the one after."""

    key: Tokens
    values_and_one: Array
    log_decay: Array | None
    """``(..., blocks, w, 1)``; 0 outside the sequence."""

    @property
    def totals(self) -> Array | None:
        """Log decay of each block in all, ``(..., blocks, 1)``."""
        if self.log_decay is None:
            return None
        return _arrays.namespace(self.log_decay).sum(self.log_decay, axis=-2)


class _Window(NamedTuple):
    """A problem on the true scale, the same problem with an axis of blocks, and block sizes."""

    problem: Problem
    blocked: Problem
    functions: BlockFunctions
    size: int
    """Tokens of a block."""
    group_size: int
    """Blocks of a group."""
    start: int
    """Position of the first key for the map."""

    @classmethod
    def of(
        cls, problem: Problem, functions: BlockFunctions, start: int, block_size: int
    ) -> _Window:
        """Prepare a problem."""
        # The near part needs far logs on the true scale, the query's own term included.
        problem, size = problem.replace(want_log=True), problem.exact.window
        assert size is not None
        names = ("query_spec", "key_spec", "query_change", "key_change")
        blocked = problem.replace(**{name: for_blocks(getattr(problem, name)) for name in names})
        return cls(problem, blocked, functions, size, max(1, block_size // size), start)

    @property
    def length(self) -> int:
        """Count the keys."""
        return int(self.problem.key.shape[-2])

    def limit(self, group: _Group) -> int:
        """Position after the last key that queries of a group may see."""
        if group.stops is not None:
            return int(group.stops[group.rows.stop - 1])
        return self.length if group.stop is None else group.stop

    def clipped(self, group: _Group, block: int) -> int:
        """Position of the first key of a block, within those that a group may see."""
        return min(max(block * self.size, 0), self.limit(group))

    # How queries are cut

    def runs(self) -> Iterator[list[_Group]]:
        """Cut the queries into runs that are causal or have one stop, and these into groups."""
        problem, w, start = self.problem, self.size, self.problem.sees.query_start
        for rows, stop in _runs(problem):
            stops = problem.sees.key_stop if stop is None else None
            first, end = (rows.start + start) // w, -(-(rows.stop + start) // w)
            groups = []
            for block in range(first, end, self.group_size):
                count = min(self.group_size, end - block)
                places = block * w - start, (block + count) * w - start
                part = slice(max(places[0], rows.start), min(places[1], rows.stop))
                groups.append(_Group(part, block, count, stop, stops))
            yield groups

    # States

    def keys(self, group: _Group) -> _Keys:
        """Keys of a group's blocks and of the blocks beside it; keys it may not see are masked."""
        first, stop = group.first - 1, group.first + group.num_blocks + group.ahead
        blocks = first, stop, self.size, self.start, self.limit(group)
        key, values_and_one = key_blocks(self.problem, *blocks)
        decay = None
        if self.problem.weights.log_decay is not None:
            decay = decay_blocks(self.problem, first, stop, self.size)
        return _Keys(key, values_and_one, decay)

    def advance(self, seen: _Seen, border: int) -> _Seen:
        """Add all keys before a position to a state."""
        state, keys = seen.state, slice(seen.border, max(seen.border, border))
        size = self.size * self.group_size
        for after in add_key_blocks(self.problem, state, keys, self.start, size, self.functions):
            state = after
        return _Seen(state, keys.stop)

    def seen(self, group: _Group, lefts: State, count: int, before: _Seen) -> _Seen:
        """State of all keys before the group's block ``count - 1``; ``before`` if that is later."""
        border = min((group.first + count - 1) * self.size, self.length)
        if not before.border < border <= self.limit(group):
            return before
        return _Seen(state_at(lefts, count), border)

    def lefts(self, group: _Group, keys: _Keys, before: State) -> State:
        """State of all keys left of each block's near keys; also for the next two blocks."""
        key, totals = keys.key, keys.totals
        if keys.log_decay is not None:
            key = weighed(key, decay_until(keys.log_decay))
        states = _block_states(self.blocked, key, keys.values_and_one, self.functions)
        run = slice(0, group.num_blocks + 1)
        return _running(self.problem, before, blocks_of(states, run), totals, run)

    def rights(self, group: _Group, keys: _Keys, after: State) -> State:
        """State of all keys right of each block's near keys; ``after`` is the last of them."""
        key, totals = keys.key, keys.totals
        if keys.log_decay is not None:
            key = weighed(key, _decay_from_first(keys.log_decay))
        states = _block_states(self.blocked, key, keys.values_and_one, self.functions)
        run = slice(3, group.num_blocks + 2)
        states = flip(blocks_of(states, run))
        if totals is not None:
            totals = self.problem.xp.flip(totals[..., run, :], axis=-2)
        return flip(_running(self.problem, after, states, totals, slice(0, group.num_blocks - 1)))

    def states_after(self, groups: list[_Group]) -> Iterator[State | None]:
        """Yield for each group of a run the state of all keys from the second block after it on.

        The groups are divided into at most FAN_OUT parts, whose states are merged from the last to
        the first; each part is divided in the same way.
        """
        if groups[0].stop is None:
            return repeat(None)
        rest = slice(self._second_after(groups[-1:]).stop, groups[0].stop)
        return self._divided(groups, self._added(rest, _no_keys(self.problem)))

    def _divided(self, groups: list[_Group], after: State) -> Iterator[State]:
        if len(groups) == 1:
            yield after
            return
        size = -(-len(groups) // FAN_OUT)
        parts = [groups[i : i + size] for i in range(0, len(groups), size)]
        states = [after]
        for part in reversed(parts[1:]):
            states.append(self._added(self._second_after(part), states[-1]))
        for part in parts:
            yield from self._divided(part, states.pop())

    def _second_after(self, groups: list[_Group]) -> slice:
        """Keys from the second block of some groups to the first block after them."""
        blocks = groups[0].first + 1, groups[-1].first + groups[-1].num_blocks + 1
        return slice(*(self.clipped(groups[0], block) for block in blocks))

    def _added(self, keys: slice, state: State) -> State:
        """Add keys to the state of all keys after them, last block first."""
        problem = self.problem
        parts = block_slices(keys.stop - keys.start, self.size * self.group_size)
        for part in reversed(list(parts)):
            rows = slice(keys.start + part.start, keys.start + part.stop)
            key = token_block(problem, "key", rows, self.start)
            if problem.weights.log_decay is not None:
                decay = decay_of_rows(problem, rows)
                key = weighed(key, _decay_from_first(decay))
                state = fade(state, problem.xp.sum(decay, axis=-2))
            values_and_one = values_and_one_block(problem, rows)
            state = self.functions.reduce_block(problem.key_spec, key, values_and_one, state)
        return state

    # Sources

    def far_field(
        self, group: _Group, keys: _Keys, lefts: State, after: State | None
    ) -> list[Read]:
        """Return reads of the far keys to the left of each block, and to the right."""
        problem, count = self.problem, group.num_blocks
        left, right = blocks_of(lefts, slice(0, count)), None
        if after is not None and (group.first + 2) * self.size < self.limit(group):
            right = self.rights(group, keys, after)
        if keys.log_decay is not None:
            decay, totals = keys.log_decay[..., 1 : count + 1, :, :], keys.totals
            assert totals is not None
            reads = [_decayed(problem, left, totals[..., :count, None, :] + decay_since(decay))]
            if right is not None:
                log = totals[..., 2 : count + 2, None, :] + decay_until(decay) + decay
                reads.append(_decayed(problem, right, log))
            return reads
        if problem.weights.relative_bias is not None:
            table = problem.weights.relative_bias.table[..., None, :]
            left = weighted(left, table[..., :1])
            right = None if right is None else weighted(right, table[..., -1:])
        return [Read(left if right is None else _generic.merge(left, right))]

    def read(
        self, group: _Group, keys: _Keys, reads: list[Read], clusters: ExactClusters | None
    ) -> Partial:
        """Read all sources of a group, as rows on one axis."""
        problem, rows = self.problem, group.rows
        flat = raw_tokens(problem, "query", rows, self.start)
        front = rows.start + problem.sees.query_start - group.first * self.size
        query = in_blocks(flat, group.num_blocks * self.size, self.size, front)
        sources: list[Source] = [_Near(keys, self.visible(group, front)), *reads]
        if clusters is not None:
            sources[1:] = [ChosenKeys(clusters, flat, reads)]
        part = join(self.blocked, self.functions, query, sources)
        assert part is not None
        return flat_rows(part, rows.stop - rows.start, front)

    def visible(self, group: _Group, front: int) -> Array:
        """Which near keys the queries of each block see, ``(..., w, s)``; None for all."""
        problem, w, n = self.problem, self.size, group.num_blocks
        if group.stop is not None:
            return None
        if group.stops is None:
            return in_band(problem.key, w, 2 * w, (-w, w))
        of_rows = np.zeros(n * w, np.int64)
        of_rows[front : front + group.rows.stop - group.rows.start] = group.stops[group.rows]
        place = np.arange(group.first - 1, group.first - 1 + n)[:, None] * w + np.arange(3 * w)
        seen = place[:, None, :] < of_rows.reshape(n, w, 1)
        return problem.xp.asarray(seen, device=array_api_compat.device(problem.key))


class _Near(NamedTuple):
    """A source: the keys of each block of queries and of the blocks beside it."""

    keys: _Keys
    visible: Array

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Tokens, so_far: Partial | None
    ) -> Partial:
        """Read near pairs: those of each block side by side."""
        assert so_far is None
        assert problem.exact.spec is not None
        key, values_and_one, decay = self.keys
        spec, query = biased_queries(problem, problem.exact.spec, query)
        key = biased_keys(problem, key, padded=True)
        g, w = query.x.shape[-3:-1]
        keys = key.each(lambda x: beside(x, g))
        s, bias = keys.x.shape[-2], None
        if problem.weights.relative_bias is not None:
            bias = bias_block(problem.weights.relative_bias, -w, w, s)[..., None, :, :]
        elif decay is not None:
            xp, since = problem.xp, decay_since(beside(decay, g))
            bias = -xp.abs(since[..., w : 2 * w, :] - xp.matrix_transpose(since))
            bias = xp.astype(bias, problem.dtype, copy=False)
        pairs = beside(values_and_one, g), self.visible, bias, problem.policy.lazy
        return exact_pairs(spec, query, keys, *pairs, functions.exact_block)


def _runs(problem: Problem) -> Iterator[tuple[slice, int | None]]:
    """Cut queries into runs that see the keys before one stop, or, None, near keys at most."""
    stops, length, start = problem.sees.key_stop, problem.query.shape[-2], problem.sees.query_start
    if not length:
        return
    if stops is None:
        yield slice(0, length), problem.key.shape[-2] if problem.sees.ahead else None
        return
    w = problem.exact.window or 1
    block = np.arange(start, start + length) // w * w
    is_near = (block - w <= stops) & (stops <= block + 2 * w)
    is_new = np.diff(is_near, prepend=not is_near[0]) | (
        ~is_near & (np.diff(stops, prepend=-1) != 0)
    )
    firsts = np.flatnonzero(is_new).tolist()
    for first, end in zip(firsts, [*firsts[1:], length], strict=True):
        yield slice(first, end), None if is_near[first] else int(stops[first])


def _running(
    problem: Problem, first: State, states: State, totals: Array | None, run: slice
) -> State:
    """State before each block of a run, and after the last; ``totals``: log decay of each block."""
    if _arrays.is_staged(states.kvz):
        return merge_in_turn(first, states, None if totals is None else totals[..., run, :])
    if totals is None:
        joined = stack_states([with_block_axis(first), states])
        return prefix_merge(joined, lazy=problem.policy.lazy)
    seen = [first]
    for i in range(run.stop - run.start):
        faded = fade(seen[-1], totals[..., run.start + i, :])
        seen.append(_generic.merge(faded, state_at(states, i)))
    return stack_states([with_block_axis(state) for state in seen])


def _decayed(problem: Problem, states: State, log: Array) -> Read:
    states, top = near(states)
    return Read(states, problem.xp.astype(top + log, problem.dtype, copy=False))


def _decay_from_first(log_decay: Array) -> Array:
    """Decay from the first token of a run to each of it, going back."""
    return decay_since(log_decay) - log_decay[..., :1, :]


def _no_keys(problem: Problem, *blocks: int) -> State:
    like = problem.xp.empty((0,), dtype=problem.dtype, device=array_api_compat.device(problem.key))
    lead, m = (*problem.state_lead, *blocks), problem.num_features
    return _generic.empty_state(lead, m, problem.value.shape[-1], like)


def _block_states(
    problem: Problem, key: Tokens, values_and_one: Array, functions: BlockFunctions
) -> State:
    """State of each block, with an axis of blocks."""
    empty = _no_keys(problem, key.x.shape[-3])
    tokens = in_map_coordinates(problem, "key", key)
    return functions.reduce_block(problem.key_spec, tokens, values_and_one, empty)  # type: ignore[no-any-return]

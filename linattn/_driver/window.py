"""Near keys exactly, far keys by the feature map, one normalizer.

Positions are cut into blocks of the window's length. The keys of a query's own block and of the
blocks beside it (causal: the one before) are near. Queries are computed in groups of blocks: exact
pairs with the near keys, and two lines, which read the keys to the left of these and to the right.
Nothing is subtracted. Short windows take the steps of the lines, which hold many borders each, and
so do groups whose stops are not at borders of blocks. Long windows, and all but the shortest where
a library has no causal blocks of its own, read a state for each block, on an axis of blocks: the
states to the left and to the right are merged, so that each query reads once.

`runner` computes every problem with an exact window here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

import array_api_compat
import numpy as np

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import (
    decay_blocks,
    flat_rows,
    in_blocks,
    in_map_coordinates,
    key_blocks,
    raw_tokens,
)
from linattn._driver.clusters import ChosenKeys, ExactClusters
from linattn._driver.lines import Line
from linattn._driver.pairs import (
    Read,
    Source,
    bias_block,
    biased_keys,
    biased_queries,
    join,
    no_keys_seen,
)
from linattn._driver.short_runs import read_short_runs
from linattn._driver.specs import for_blocks, innermost, is_placed
from linattn._driver.steps import MIN_RUN, Step, states_before
from linattn._driver.stops import Stops, stops_of
from linattn._generic.decay import decay_since, decay_until, fade, near_one, weighed
from linattn._generic.exact import beside, exact_pairs
from linattn._generic.loops import Integers, Run
from linattn._generic.prefix_states import (
    blocks_of,
    flip_states,
    merge_in_turn,
    prefix_merge,
    stack_states,
    state_at,
    weighted,
    with_block_axis,
)
from linattn.typing import Array, Assigned, Partial, Problem, State, Tokens

MAX_APART = 4
"""Most runs of queries in a group that read keys to the right one run after the other."""

MAX_GENERIC = 4
"""Longest window that is read by steps where causal blocks are generic code."""

MAX_SHORT = 12
"""The same elsewhere, beside an eighth of the features, and below `MIN_RUN` in all.

A state for each block costs by the number of features.
"""

MIN_TILE = 64
"""Least tokens of a tile, whose near pairs are computed together; a tile has whole blocks."""


def window_rows(
    problem: Problem,
    state: State,
    block_size: int,
    functions: BlockFunctions,
    write: Callable[[slice, Partial], None],
    clusters: ExactClusters | None = None,
) -> Callable[[], State]:
    """Attend to near keys exactly and to far ones by the map.

    Returns a function that adds the keys that are still left and returns the state after all. The
    keys of ``state`` are far from every query. O(L (w (d + e) + m (d + e))) time; memory
    for w < c, c tokens a group: O(c (w + m) + F m e log(L / c) / log(F)) with F = MAX_STATES of
    `steps`.
    """
    window = Window.of(problem, functions, state.length, block_size)
    left = Reader(window.line(0), state, 0)
    for rows, sides in window.groups():
        if clusters is not None or window.takes_states(rows, sides):
            part = window.read_states(rows, left, sides, clusters)
        else:
            part = window.read_lines(rows, left, sides)
        write(rows, part)

    def after_all() -> State:
        last = left.advance(problem.key.shape[-2], block_size)
        return State(last.kvz, last.log_scale, state.length + problem.key.shape[-2])

    return after_all


class Reader:
    """A line on its way: the state of the keys before one of them, to which later rows add."""

    def __init__(self, line: Line, state: State, key: int) -> None:
        self.line, self.state, self.key = line, state, key

    def advance(self, key: int, block_size: int) -> State:
        """Add the keys before ``key``, and return the state."""
        self.state = self.line.add_all(slice(self.key, key), self.state, block_size)
        self.key = max(key, self.key)
        return self.state

    def read(self, rows: slice, stops: Integers, block_size: int) -> Partial:
        """Read the keys before the stop of each row, ``(n,)``."""
        keys = slice(self.key, int(stops[-1]))
        steps = self.line.steps(stops - self.key, block_size, keys=keys, queries=rows)
        part, self.state = _read(self.line, steps, self.state)
        self.key = keys.stop
        return part


class Side(NamedTuple):
    """Queries that read keys to the right of their near ones."""

    rows: slice
    stops: Stops
    line: Line
    """From the pivot to the near keys."""
    state: State
    """Keys before the pivot that all of the rows read."""
    pivot: int
    """The key from which a line goes back, and another one on."""
    beyond: Reader
    """Keys from the pivot on, those read by earlier queries of the run too."""

    def read(self, block_size: int) -> Partial:
        """Read all of these keys."""
        _, right, end = self.stops.of(self.rows)
        keys, stops = slice(int(right[0]), int(right[-1])), (right[-1] - right)[::-1]
        steps = self.line.steps(stops, block_size, keys=keys, queries=self.rows)
        part, _ = _read(self.line, steps, self.state)
        if end[-1] == self.pivot:
            return part
        return _generic.combine(part, self.beyond.read(self.rows, end, block_size))


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


class Window(NamedTuple):
    """A problem on the true scale, the same problem with an axis of blocks, and sizes."""

    problem: Problem
    blocked: Problem
    functions: BlockFunctions
    stops: Stops
    size: int
    """Tokens of a block."""
    tile: int
    """Tokens whose near pairs are computed together, whole blocks."""
    group_size: int
    """Tokens of a group, which has whole tiles."""
    in_place: bool
    """Whether the map must be given tokens at their positions."""
    short: bool
    """Whether blocks are read by the steps of lines."""
    start: int
    """Position of the first key for the map."""

    @classmethod
    def of(cls, problem: Problem, functions: BlockFunctions, start: int, block_size: int) -> Window:
        """Prepare a problem."""
        # The near part needs far logs on the true scale, the query's own term included.
        problem, size = problem.replace(want_log=True), problem.exact.window
        assert size is not None
        names = ("query_spec", "key_spec", "query_change", "key_change")
        blocked = problem.replace(**{name: for_blocks(getattr(problem, name)) for name in names})
        in_place = is_placed(problem)
        backend = functions.backend_alone("scan_block")
        # Causal blocks of keys that are assigned to columns are generic code, in every library.
        is_assigned = isinstance(innermost(problem.key_spec), Assigned)
        most = MAX_GENERIC
        if backend is not None and not is_assigned:
            most = min(MIN_RUN - 1, MAX_SHORT + problem.num_features // 8)
        short = size <= most and not (in_place or problem.policy.lazy)
        tile = size * -(-MIN_TILE // size) if short else size
        group = max(1, block_size // tile) * tile
        stops = stops_of(problem)
        return cls(problem, blocked, functions, stops, size, tile, group, in_place, short, start)

    def line(self, end: int, *, reverse: bool = False) -> Line:
        """Return a line of the keys to the left (``end`` 0) or to the right (-1) of a window."""
        bias = self.problem.weights.relative_bias
        weight = None if bias is None else bias.table[..., end, None, None]
        return Line(self.problem, self.functions, self.start, reverse, weight)

    # How queries are cut

    def groups(self) -> Iterator[tuple[slice, list[Side]]]:
        """Cut the queries into groups; yield each with its runs that read keys to the right."""
        rows = list(self._cut(slice(0, self.problem.query.shape[-2])))
        runs = [(list(self._cut(run)), pivot) for run, pivot in self.stops.runs_ahead()]
        sides = chain.from_iterable(self._sides(*run) for run in runs)
        starts = [part.start for parts, _ in runs for part in parts]
        counts = np.searchsorted(starts, [group.stop for group in rows])
        for group, count in zip(rows, np.diff(counts, prepend=0).tolist(), strict=True):
            yield group, list(islice(sides, count))

    def _cut(self, rows: slice) -> Iterator[slice]:
        """Cut queries where groups begin."""
        first = rows.start
        size, start = self.group_size, self.problem.sees.query_start
        while first < rows.stop:
            stop = min((first + start) // size * size + size - start, rows.stop)
            yield slice(first, stop)
            first = stop

    def _sides(self, parts: list[slice], pivot: int) -> Iterator[Side]:
        """Yield the parts of a run, each with the state of the keys that all of its rows read."""
        line = self.line(-1, reverse=True)
        lasts = [slice(part.stop - 1, part.stop) for part in parts]
        borders = [int(self.stops.of(last).right[0]) for last in lasts]
        nothing = no_keys(self.problem)
        beyond = Reader(self.line(-1), nothing, pivot)

        # In the order of the line; each with the keys that the part before it reads beside its own.
        items = list(zip(parts, map(slice, [0, *borders], borders), strict=False))[::-1]
        first = line.add_all(slice(borders[-1], pivot), nothing, self.group_size)

        def add(item: tuple[slice, slice], state: State) -> State:
            return line.add_all(item[1], state, self.group_size)

        for (rows, _), state in states_before(items, first, add):
            yield Side(rows, self.stops, line, state, pivot, beyond)

    def takes_states(self, rows: slice, sides: list[Side]) -> bool:
        """Whether each block of a group reads one state to its left, and one to its right."""
        if self.short:
            return False
        place = np.arange(rows.start, rows.stop) + self.problem.sees.query_start
        borders = np.maximum((place // self.size - 1) * self.size, 0)
        left, _, end = self.stops.of(rows)
        is_one = [side.rows for side in sides] in ([], [rows])
        regular = bool((left == np.minimum(borders, self.problem.key.shape[-2])).all())
        return regular and is_one and (not sides or bool((end == sides[0].pivot).all()))

    # By lines

    def read_lines(self, rows: slice, left: Reader, sides: list[Side]) -> Partial:
        """Read near pairs, and all others by the steps of lines."""
        part = _generic.combine(
            self.near(rows, self.tile), left.read(rows, self.stops.of(rows).left, self.group_size)
        )
        if not sides:
            return part
        parts, row = [], rows.start
        for side, found in zip(sides, self._read_sides(sides), strict=True):
            parts += [*self._no_keys(row, side.rows.start), found]
            row = side.rows.stop
        parts += self._no_keys(row, rows.stop)
        return _generic.combine(part, _joined(parts))

    def _read_sides(self, sides: list[Side]) -> Iterator[Partial]:
        """Read what some runs of queries see to the right; many short ones in one block."""
        short = {}
        for side in sides if len(sides) > MAX_APART and not self.in_place else []:
            _, right, end = self.stops.of(side.rows)
            if end[-1] - right[0] > self.group_size or self.problem.policy.lazy:
                continue
            pivot, rows = side.pivot, np.arange(side.rows.start, side.rows.stop)
            keys = np.arange(right[0], pivot)
            before = Run(keys[::-1], rows[::-1], (pivot - right)[::-1])
            after = Run(np.arange(pivot, end[-1]), rows, end - pivot)
            short[side.rows.start] = before, after
        if short:
            line = self.line(-1)._replace(problem=self.blocked)
            parts = [
                read_short_runs(line, list(runs)) for runs in zip(*short.values(), strict=True)
            ]
            found = dict(zip(short, map(_generic.combine, *parts), strict=True))
        for side in sides:
            is_read = side.rows.start in short
            yield found[side.rows.start] if is_read else side.read(self.group_size)

    def _no_keys(self, row: int, stop: int) -> list[Partial]:
        """Return what queries read of no keys, if there are such queries."""
        if row == stop:
            return []
        query = raw_tokens(self.problem, "query", slice(row, stop), 0)
        return [no_keys_seen(self.problem, query)]

    def near(self, rows: slice, tile: int) -> Partial:
        """Read near pairs only."""
        near, query, front = self._near(rows, tile)
        part = near.read(self.blocked, self.functions, query, None)
        return _copied(self.problem, flat_rows(part, rows.stop - rows.start, front))

    def _near(self, rows: slice, tile: int) -> tuple[_Near, Tokens, int]:
        """Return near keys of some queries, these in tiles, and the rows of padding before them."""
        start = self.problem.sees.query_start
        flat = raw_tokens(self.problem, "query", rows, self.start)
        first, count = self._tiles(rows, tile)
        front = rows.start + start - first * tile
        keys = self.keys(rows, tile)
        visible = self.visible(rows, tile, front, count)
        return _Near(keys, visible, self.size), in_blocks(flat, count * tile, tile, front), front

    def _tiles(self, rows: slice, tile: int) -> tuple[int, int]:
        """Return the number of the first tile of some queries, and how many there are."""
        start = self.problem.sees.query_start
        first = (rows.start + start) // tile
        return first, -(-(rows.stop + start) // tile) - first

    def end(self, rows: slice) -> int:
        """Return the first key that none of some queries sees, after all that one does."""
        return int(self.stops.of(slice(rows.stop - 1, rows.stop)).end[0])

    def keys(self, rows: slice, tile: int) -> _Keys:
        """Keys of some queries' tiles and of the tiles beside; keys that none sees are masked."""
        first, count = self._tiles(rows, tile)
        tiles = first - 1, first + count + self.stops.ahead, tile
        limit = self.end(rows) if self.stops.ahead else self.problem.key.shape[-2]
        key, values_and_one = key_blocks(self.problem, *tiles, self.start, limit)
        decay = None
        if self.problem.weights.log_decay is not None:
            decay = decay_blocks(self.problem, *tiles)
        return _Keys(key, values_and_one, decay)

    def visible(self, rows: slice, tile: int, front: int, count: int) -> Array:
        """Which near keys the queries of each tile see, ``(..., t, s)``; None for all."""
        w, problem = self.size, self.problem
        query, key = np.arange(tile)[:, None], np.arange(-w, tile + (w if self.stops.ahead else 0))
        seen = abs(query // w - key // w) <= 1
        if not self.stops.ahead:
            seen &= key <= query
        elif problem.sees.key_stop is not None:
            stops = np.zeros(count * tile, np.int64)
            stops[front : front + rows.stop - rows.start] = problem.sees.key_stop[rows]
            place = np.arange(count)[:, None, None] * tile + self._tiles(rows, tile)[0] * tile
            seen = seen & (key + place < stops.reshape(count, tile, 1))
        device = array_api_compat.device(problem.key)
        return None if seen.all() else problem.xp.asarray(seen, device=device)

    # By states of blocks

    def read_states(
        self, rows: slice, left: Reader, sides: list[Side], clusters: ExactClusters | None
    ) -> Partial:
        """Read near pairs, and states of all others on an axis of blocks."""
        near, query, front = self._near(rows, self.size)
        reads = self._far_keys(rows, near.keys, left, sides)
        sources: list[Source] = [near, *reads]
        if clusters is not None:
            flat = raw_tokens(self.problem, "query", rows, self.start)
            sources[1:] = [ChosenKeys(clusters, flat, reads)]
        part = join(self.blocked, self.functions, query, sources)
        assert part is not None
        return flat_rows(part, rows.stop - rows.start, front)

    def _far_keys(self, rows: slice, keys: _Keys, left: Reader, sides: list[Side]) -> list[Read]:
        """Return reads of the far keys to the left of each block, and to the right."""
        problem, (first, count) = self.problem, self._tiles(rows, self.size)
        states, totals = self._lefts(first, count, keys, left), keys.totals
        lefts = blocks_of(states, slice(0, count))
        border, end = (first + count - 1) * self.size, self.end(rows)
        if left.key < border <= end:
            left.state, left.key = state_at(states, count), border
        rights = self._rights(count, keys, sides[0].state) if sides else None
        if keys.log_decay is not None:
            assert totals is not None
            decay = keys.log_decay[..., 1 : count + 1, :, :]
            reads = [_decayed(problem, lefts, totals[..., :count, None, :] + decay_since(decay))]
            if rights is not None:
                log = totals[..., 2 : count + 2, None, :] + decay_until(decay) + decay
                reads.append(_decayed(problem, rights, log))
            return reads
        if problem.weights.relative_bias is not None:
            table = problem.weights.relative_bias.table[..., None, :]
            lefts = weighted(lefts, table[..., :1])
            rights = None if rights is None else weighted(rights, table[..., -1:])
        return [Read(lefts if rights is None else _generic.merge(lefts, rights))]

    def _lefts(self, first: int, count: int, keys: _Keys, left: Reader) -> State:
        """State of all keys left of each block's near keys, and of those of the block after."""
        border = min(max((first - 1) * self.size, 0), self.problem.key.shape[-2])
        before = left.advance(border, self.group_size)
        key, totals = keys.key, keys.totals
        if keys.log_decay is not None:
            key = weighed(key, decay_until(keys.log_decay))
        states = self._of_blocks(key, keys.values_and_one)
        return _running(self.problem, before, blocks_of(states, slice(0, count)), totals)

    def _rights(self, count: int, keys: _Keys, after: State) -> State:
        """State of all keys right of each block's near keys; ``after`` is the last of them."""
        key, totals = keys.key, keys.totals
        if keys.log_decay is not None:
            decay = decay_since(keys.log_decay)
            key = weighed(key, decay - keys.log_decay[..., :1, :])
        states = self._of_blocks(key, keys.values_and_one)
        run = slice(3, count + 2)
        states = flip_states(blocks_of(states, run))
        if totals is not None:
            totals = self.problem.xp.flip(totals[..., run, :], axis=-2)
        return flip_states(_running(self.problem, after, states, totals))

    def _of_blocks(self, key: Tokens, values_and_one: Array) -> State:
        """State of each block, with an axis of blocks."""
        empty = no_keys(self.problem, key.x.shape[-3])
        tokens = in_map_coordinates(self.blocked, "key", key)
        block = self.blocked.key_spec, tokens, values_and_one, empty
        return self.functions.reduce_block(*block)  # type: ignore[no-any-return]


class _Near(NamedTuple):
    """A source: keys of each tile of queries and of the blocks beside it."""

    keys: _Keys
    visible: Array
    size: int
    """Tokens of a block; a tile has one or more."""

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Tokens, so_far: Partial | None
    ) -> Partial:
        """Read near pairs, the tiles side by side."""
        assert so_far is None
        assert problem.exact.spec is not None
        key, values_and_one, decay = self.keys
        spec, query = biased_queries(problem, problem.exact.spec, query)
        g, t = query.x.shape[-3:-1]
        w, ahead = self.size, key.x.shape[-3] == g + 2
        within = slice(t - w, 2 * t + (w if ahead else 0))

        def near(x: Array) -> Array:
            return None if x is None else beside(x, g)[..., within, :]

        keys = biased_keys(problem, key, padded=True).each(near)
        s, bias = keys.x.shape[-2], None
        if problem.weights.relative_bias is not None:
            bias = bias_block(problem.weights.relative_bias, -w, t, s)[..., None, :, :]
        elif decay is not None:
            xp, since = problem.xp, decay_since(near(decay))
            bias = -xp.abs(since[..., w : w + t, :] - xp.matrix_transpose(since))
            bias = xp.astype(bias, problem.dtype, copy=False)
        pairs = near(values_and_one), self.visible, bias, problem.policy.lazy
        return exact_pairs(spec, query, keys, *pairs, functions.exact_block)


def _read(line: Line, steps: Iterable[Step], state: State) -> tuple[Partial, State]:
    """Take steps; return the sums of all their queries, and the state after them."""
    parts = []
    for step in steps:
        part, state = line.take(step, state)
        if part is not None:
            parts.append((step.queries.start, _copied(line.problem, part)))
    return _joined([part for _, part in sorted(parts, key=itemgetter(0))]), state


def _copied(problem: Problem, part: Partial) -> Partial:
    """Copy sums: a backend may make the next in the same place."""
    if problem.policy.lazy:
        return part
    # asarray(copy=True) leaves the tape of older versions of PyTorch, and warns in newer ones.
    return Partial(*(problem.xp.concat([x], axis=-2) for x in part[:2]))


def _joined(parts: list[Partial]) -> Partial:
    """Join sums of rows along their axis."""
    if len(parts) == 1:
        return parts[0]
    xp = _arrays.namespace(parts[0].num_den)
    logs = [xp.broadcast_to(part.log, (*part.num_den.shape[:-1], 1)) for part in parts]
    return Partial(xp.concat([part.num_den for part in parts], axis=-2), xp.concat(logs, axis=-2))


def _running(problem: Problem, first: State, states: State, totals: Array | None) -> State:
    """State before each block, and after the last; ``totals``: log decay of each, or of more."""
    count = states.kvz.shape[-3]
    if _arrays.is_staged(states.kvz):
        return merge_in_turn(first, states, None if totals is None else totals[..., :count, :])
    if totals is None:
        joined = stack_states([with_block_axis(first), states])
        return prefix_merge(joined, lazy=problem.policy.lazy)
    seen = [first]
    for i in range(count):
        faded = fade(seen[-1], totals[..., i, :])
        seen.append(_generic.merge(faded, state_at(states, i)))
    return stack_states([with_block_axis(state) for state in seen])


def _decayed(problem: Problem, states: State, log: Array) -> Read:
    states, top = near_one(states)
    return Read(states, problem.xp.astype(top + log, problem.dtype, copy=False))


def no_keys(problem: Problem, *blocks: int) -> State:
    """Return an empty state of a problem's heads, or one for each block."""
    like = problem.xp.empty((0,), dtype=problem.dtype, device=array_api_compat.device(problem.key))
    lead, m = (*problem.state_lead, *blocks), problem.num_features
    return _generic.empty_state(lead, m, problem.value.shape[-1], like)

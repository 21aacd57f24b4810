"""Walks: generators that compute the output of a problem block by block, one for each mode.

A walk yields the state after each block, so that a plan can run several in round-robin
order. It passes finished rows to `Walk.write`. The end of the file divides keys and queries with
`key_stop` into steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain, product
from typing import Any, NamedTuple, TypeAlias

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _generic
from linattn._dispatch import BlockFunctions, block_functions
from linattn._driver.blocks import (
    add_key_blocks,
    block_slices,
    change_keys,
    key_block,
    raw_tokens,
    rows_at,
    take_rows,
    token_block,
    values_and_one_block,
)
from linattn._driver.causal_blocks import RowsSoFar, causal_block, rows_from_the_end
from linattn._driver.clusters import choosing_by_sinks, sort_keys
from linattn._driver.near_keys import (
    Cancelled,
    Exchange,
    Sinks,
    without_sinks,
    without_window,
)
from linattn._driver.softmax import softmax_rows
from linattn._driver.specs import innermost, read_spec, select_rows
from linattn._driver.window import window_rows
from linattn.typing import Array, Index, Opaque, Partial, Plan, Problem, State

Read: TypeAlias = Callable[[Array], Array | None]
"""``read(out)`` writes divided rows into ``out`` and returns None, or returns the rows."""


class Walk(NamedTuple):
    """Arguments of a walk: the problem, the backend's block functions, and receivers of results."""

    problem: Problem
    functions: BlockFunctions
    block_size: int
    write: Callable[[slice, Partial], None]
    """``write(rows, part)`` receives the sums of finished rows, not divided yet."""
    write_read: Callable[[slice, Read], None] | None = None
    """``write_read(rows, read)`` calls ``read`` to compute and divide finished rows in one step.

    None if a walk must call `write` instead.
    """
    store: Callable[[int, State], None] | None = None
    """``store(row, state)`` receives the state before each block of a causal walk."""

    def segment(self, rows: slice) -> Walk:
        """Return the walk of some rows only; the receivers get row numbers of the whole.

        The walk contains no state: a caller passes the state before ``rows.start``.
        """
        store, write_read_rows = self.store, self.write_read

        def here(part_rows: slice) -> slice:
            return slice(rows.start + part_rows.start, rows.start + part_rows.stop)

        def write(part_rows: slice, part: Partial) -> None:
            self.write(here(part_rows), part)

        def write_read(part_rows: slice, read: Read) -> None:
            assert write_read_rows is not None
            write_read_rows(here(part_rows), read)

        def store_at(row: int, state: State) -> None:
            if store is not None:
                store(rows.start + row, state)

        return self._replace(
            problem=take_rows(self.problem, rows),
            write=write,
            write_read=None if write_read_rows is None else write_read,
            store=store_at,
        )


def initial_state(problem: Problem) -> State:
    """Return the initial state of a problem, broadcast to its leading axes; empty if not given."""
    xp, state, m, e = problem.xp, problem.state, problem.num_features, problem.value.shape[-1]
    if state is None and array_api_compat.is_numpy_namespace(xp):
        return _nothing((*problem.state_lead, m, e + 1), problem.dtype)
    if state is None:
        like = xp.empty((0,), dtype=problem.dtype, device=array_api_compat.device(problem.key))
        state = _generic.empty_state((), 1, 0, like)
    kvz = xp.broadcast_to(state.kvz, (*problem.state_lead, m, e + 1))
    log_scale = xp.broadcast_to(state.log_scale, (*problem.state_lead, m))
    return State(kvz, log_scale, state.length)


@lru_cache(64)
def _nothing(shape: tuple[int, ...], dtype: Any) -> State:
    """Return an empty state of read-only NumPy arrays; ``shape`` is ``(..., m, e + 1)``."""
    zero, log = np.zeros((), dtype), np.full((), -np.inf, dtype)
    return State(np.broadcast_to(zero, shape), np.broadcast_to(log, shape[:-1]), 0)


def update(
    problem: Problem, state: State, block_size: int, functions: BlockFunctions | None = None
) -> State:
    """Return a state with all keys and values of a problem added, block by block."""
    functions = block_functions(problem.xp) if functions is None else functions
    return run_walk(state_updates(problem, state, block_size, functions), state)


def run_walk(walk: Iterator[State], state: State) -> State:
    """Run a walk to its end and return the last state; ``state`` if the walk has no block."""
    return deque(chain([state], walk), maxlen=1).pop()


def _steps(walk: Iterator[Any]) -> Iterator[Any]:
    """Yield from a walk; only the walk, not its caller, runs without floating-point warnings."""
    while True:
        try:
            with _generic.ignore_fp_warnings():
                state = next(walk)
        except StopIteration:
            return
        yield state


def run_tasks(plan: Plan, walk_of: Callable[[Index], Iterator[Any]]) -> None:
    """Run the walk of each task of a plan.

    A resumable plan takes one block of each walk in turn; other plans run each walk to its end.
    Floating-point warnings are off inside the walks. ``walk_of(task)`` returns the walk.
    """

    def work(task: Index) -> Iterator[Any] | None:
        if plan.resumable:
            return _steps(walk_of(task))
        with _generic.ignore_fp_warnings():
            deque(walk_of(task), maxlen=0)
        return None

    plan.run(work, plan.tasks)


def state_updates(
    problem: Problem, state: State, block_size: int, functions: BlockFunctions
) -> Iterator[State]:
    """Add a problem's keys and values to a state; yield the state after each block."""
    keys = slice(0, problem.key.shape[-2])
    return add_key_blocks(problem, state, keys, state.length, block_size, functions)


def read_blocks(walk: Walk, state: State, start: int) -> Iterator[State]:
    """Read a state with all queries of a problem; yield the unchanged state after each block.

    ``start``: position of the first query.
    """
    problem, functions = walk.problem, walk.functions
    query_spec, seen = read_spec(problem, state)
    for rows in block_slices(problem.query.shape[-2], walk.block_size):
        tokens = token_block(problem, "query", rows, start)
        if walk.write_read is not None:
            walk.write_read(rows, partial(functions.read_output, query_spec, tokens, seen))
        else:
            part = functions.read_block(query_spec, tokens, seen, problem.want_log)
            walk.write(rows, select_rows(problem, part))
            del part
        del tokens
        yield state


def scan_blocks(walk: Walk, state: State) -> Iterator[State]:
    """Compute causal attention from a state on; yield the state after each block."""
    problem, functions, start = walk.problem, walk.functions, state.length
    for rows in block_slices(problem.query.shape[-2], walk.block_size):
        if walk.store is not None:
            walk.store(rows.start, state)
        part, state = causal_block(
            problem,
            functions,
            token_block(problem, "query", rows, start),
            key_block(problem, rows, start),
            values_and_one_block(problem, rows),
            state,
        )
        walk.write(rows, part)
        del part
        yield state


def _walk_full(walk: Walk) -> Iterator[State]:
    """Add all keys to the state, then read it with all queries."""
    state = before = initial_state(walk.problem)
    for state in state_updates(walk.problem, before, walk.block_size, walk.functions):
        yield state
    yield from read_blocks(walk, state, before.length)


def _walk_causal(walk: Walk) -> Iterator[State]:
    """Return the causal walk of the problem, from its initial state on."""
    return scan_blocks(walk, initial_state(walk.problem))


def _walk_stops(walk: Walk) -> Iterator[State]:
    """Take the steps of `steps_of`: query i reads the keys before ``key_stop[i]``."""
    problem, functions = walk.problem, walk.functions
    state = initial_state(problem)
    start = state.length
    for step in steps_of(problem, walk.block_size):
        part = step.problem(problem)
        if step.num_queries:
            tokens = token_block(part, "query", slice(0, None), start + step.queries.start)
        if not step.num_queries:
            keys = problem, state, step.keys, start, walk.block_size, functions
            state = run_walk(add_key_blocks(*keys), state)
        elif not step.num_keys:
            query_spec, seen = read_spec(problem, state)
            rows = functions.read_block(query_spec, tokens, seen, problem.want_log)
        else:
            key = key_block(part, slice(0, part.key.shape[-2]), start + step.keys.start)
            values = values_and_one_block(part, slice(0, None))
            rows, state = causal_block(part, functions, tokens, key, values, state)
            state = State(state.kvz, state.log_scale, start + step.keys.stop)
        if step.num_queries:
            walk.write(step.queries, step.queries_of_part(rows))
        yield state


def _walk_two_sided(walk: Walk) -> Iterator[State]:
    """Add a causal scan and a scan from the end: every key decays with its distance."""
    # Both scans must give rows on the true scale.
    problem = walk.problem.replace(want_log=True)
    nothing = initial_state(problem.replace(state=None))
    rows_so_far = RowsSoFar(problem, walk.functions)
    scan = walk._replace(problem=planned(problem), write=rows_so_far.write)
    for state in scan_blocks(scan, initial_state(problem)):
        yield state
    for rows, part in rows_from_the_end(
        problem, walk.functions, walk.block_size, nothing, rows_so_far.result()
    ):
        walk.write(rows, part)
        yield state


def _walk_exact(walk: Walk) -> Iterator[State | None]:
    """Compute softmax attention to the visible keys; yield None, as it has no state."""
    if walk.problem.exact.sinks:
        yield from _with_sinks(walk)
        return
    parts = softmax_rows(walk.problem, walk.block_size, walk.functions)
    for rows, part in parts:
        walk.write(rows, part)
        yield None


def _walk_window(walk: Walk) -> Iterator[State | None]:
    """Compute exact weights in a window and weights by the map outside of it.

    A window of one token tries `_walk_exchanged` first. `Cancelled` leads to `window_rows`, which
    writes all rows again.
    """
    if walk.problem.exact.sinks:
        yield from _with_sinks(walk)
        return
    bare = without_window(walk.problem)
    if bare is not None:
        with suppress(Cancelled):
            yield from _walk_exchanged(walk, bare)
            return
    state, clusters = initial_state(walk.problem), None
    if walk.problem.exact.clusters is not None:
        clusters, _ = sort_keys(walk.problem, state, walk.block_size, walk.functions)
    yield window_rows(walk.problem, state, walk.block_size, walk.functions, walk.write, clusters)


def _with_sinks(walk: Walk) -> Iterator[State | None]:
    """Run the walk with masked sinks, then add the sinks to each row and to the last state."""
    sinks, state = Sinks.of(walk.problem), None

    def write(rows: slice, part: Partial) -> None:
        walk.write(rows, sinks.add(rows, part))

    masked = without_sinks(walk.problem)
    if masked.exact.clusters is not None:
        args = initial_state(masked), walk.block_size, walk.functions
        masked = choosing_by_sinks(walk.problem, masked, *args)
    inner = walk._replace(problem=masked, write=write, write_read=None, store=None)
    for state in WALKS[masked.mode](inner):
        yield state
    if state is not None:
        yield sinks.added(state, initial_state(masked), walk.block_size, walk.functions)


def _walk_exchanged(walk: Walk, bare: Problem) -> Iterator[State | None]:
    """Run the walk of a problem without its window, and exchange the weights of near keys.

    ``bare``: the result of `without_window`.
    """
    exchange = Exchange(walk.problem.replace(want_log=True), initial_state(bare).length)
    if bare.exact.clusters is not None:
        return _walk_clusters(walk._replace(problem=bare), exchange)

    def write(rows: slice, part: Partial) -> None:
        walk.write(rows, exchange(rows, part))

    return WALKS[bare.mode](walk._replace(problem=bare, write=write, write_read=None, store=None))


def _walk_clusters(walk: Walk, exchange: Exchange | None = None) -> Iterator[State]:
    """Read the chosen clusters of keys exactly and all other keys by the map."""
    problem = walk.problem
    clusters, state = sort_keys(problem, initial_state(problem), walk.block_size, walk.functions)
    yield state
    for rows in block_slices(problem.query.shape[-2], walk.block_size):
        query = raw_tokens(problem, "query", rows, 0)
        chosen, rest = clusters.choose(problem, query, state, clusters.assigned.bias)
        part = clusters.add(query, chosen, rest)
        if exchange is not None:
            part = exchange(rows, part, partial(clusters.are_chosen, chosen, rows.start))
        walk.write(rows, part)
        yield state


WALKS: dict[str, Callable[[Walk], Iterator[State | None]]] = {
    "full": _walk_full,
    "causal": _walk_causal,
    "exact": _walk_exact,
    "stops": _walk_stops,
    "window": _walk_window,
    "clusters": _walk_clusters,
    "two-sided": _walk_two_sided,
}
"""The walk of each `Problem.mode`; the walk of softmax attention yields None for its states."""


# Steps along keys and queries whose stops differ --------------------------------------------------

# Query i sees the keys before ``key_stop[i]``, and stops never decrease. So keys and queries have a
# common order: each query comes after the keys that it sees and before all others. A walk takes
# steps in this order. A step adds keys to the state, reads the state with queries, or is a causal
# block of both. In a causal block, row i of the queries sees the keys up to row i. If keys and
# queries alternate in short runs of unequal lengths, each gets a row number of the block, its
# *position*. A query has a position at or after the keys that it sees, and before all others.
# Positions without a key are masked; the output of positions without a query is dropped.

MIN_RUN = 64
"""Shortest run of keys or of queries that gets steps of its own, without positions."""

Places = NDArray[np.int64]


class Positions(NamedTuple):
    """Row numbers of a causal block at which the keys and queries of a step are placed.

    ``size``: rows of the block; ``keys``, ``queries``: row number of each key and of each query.
    """

    size: int
    keys: Places
    queries: Places

    def place(self, rows: Array, at: Places) -> tuple[Array, Array]:
        """Return ``size`` rows with ``rows`` at the positions ``at``, and a mask ``(size, 1)``.

        The mask is True at these positions; all other positions repeat a neighboring row.
        """
        xp, device = array_api_compat.array_namespace(rows), array_api_compat.device(rows)
        nearest = np.maximum(np.searchsorted(at, np.arange(self.size), side="right") - 1, 0)
        filled = at[nearest] == np.arange(self.size)
        return rows_at(rows, nearest), xp.asarray(filled[:, None], device=device)


class Step(NamedTuple):
    """Keys to add, queries that read, or a causal block of both.

    In a causal block without ``positions``, key i of the step and query i have row i.
    """

    keys: slice
    queries: slice
    positions: Positions | None = None

    @property
    def num_keys(self) -> int:
        return int(self.keys.stop - self.keys.start)

    @property
    def num_queries(self) -> int:
        return int(self.queries.stop - self.queries.start)

    def problem(self, problem: Problem) -> Problem:
        """Return the problem of this step's keys and queries at their positions, without stops."""
        query, positions = problem.query[..., self.queries, :], self.positions
        part = problem.replace(query=query, sees=problem.sees._replace(key_stop=None))
        part = change_keys(part, lambda rows: rows[..., self.keys, :])
        if positions is None:
            return part
        query, _ = positions.place(query, positions.queries)
        _, filled = positions.place(part.key, positions.keys)
        part = change_keys(part, lambda rows: positions.place(rows, positions.keys)[0])
        mask = part.weights.key_mask
        weights = part.weights._replace(key_mask=filled if mask is None else mask & filled)
        return part.replace(query=query, weights=weights)

    def place_queries(self, rows: Array) -> Array:
        """Place rows of the step's queries at their positions; other positions are 0."""
        if self.positions is None:
            return rows
        placed, filled = self.positions.place(rows, self.positions.queries)
        xp = array_api_compat.array_namespace(rows)
        return xp.where(filled, placed, xp.zeros_like(placed))

    def queries_of(self, rows: Array) -> Array:
        """Return the rows at the positions of queries: the inverse of `place_queries`."""
        return rows if self.positions is None else rows_at(rows, self.positions.queries)

    def keys_of(self, rows: Array) -> Array:
        """Return the rows at the positions of keys."""
        return rows if self.positions is None else rows_at(rows, self.positions.keys)

    def queries_of_part(self, part: Partial) -> Partial:
        """Return a partial with only the rows at the positions of queries."""
        if self.positions is None:
            return part
        num_den = self.queries_of(part.num_den)
        log = part.log if part.log.shape[-2] == 1 else self.queries_of(part.log)
        return Partial(num_den, log)


def steps_of(problem: Problem, block_size: int) -> Iterator[Step]:
    """Yield steps through all keys and queries of a problem, each of at most ``block_size``."""
    # A function may depend on the position of a token.
    in_place = any(isinstance(innermost(s), Opaque) for s in (problem.query_spec, problem.key_spec))
    stops, num_keys = problem.sees.key_stop, problem.key.shape[-2]
    assert stops is not None
    # Queries that see the same keys: the first of each such run, and keys and queries of it.
    firsts = np.flatnonzero(np.diff(stops, prepend=-1))
    added = np.diff(stops[firsts], prepend=0)
    readers = np.diff(firsts, append=len(stops))
    longest = 2 if in_place else MIN_RUN
    key = query = run = 0

    def alone(keys: int, queries: int) -> Iterator[Step]:
        nonlocal key, query
        for rows in block_slices(keys, block_size):
            yield _moved(Step(rows, slice(0, 0)), key, query)
        key += keys
        for rows in block_slices(queries, block_size):
            yield _moved(Step(slice(0, 0), rows), key, query)
        query += queries

    def together(stop: int) -> Iterator[Step]:
        nonlocal key, query, run
        for step in _together(added[run:stop], readers[run:stop], block_size):
            yield _moved(step, key, query)
        key += int(added[run:stop].sum())
        query += int(readers[run:stop].sum())
        run = stop

    for i in np.flatnonzero((added >= longest) | (readers >= longest) | (added == 0)).tolist():
        keys, queries = int(added[i]), int(readers[i])
        if keys >= longest > queries:
            yield from together(i)
            # The last of the keys goes along with the queries.
            yield from alone(keys - 1, 0)
            added[i] = 1
        elif queries >= longest > keys > 0:
            readers[i] = 1
            yield from together(i + 1)
            yield from alone(0, queries - 1)
        else:
            yield from together(i)
            yield from alone(keys, queries)
            run = i + 1
    yield from together(len(firsts))
    yield from alone(num_keys - key, 0)


def _together(added: Places, readers: Places, block_size: int) -> Iterator[Step]:
    """Yield the steps of keys and queries that alternate in short runs, counted from 0.

    ``added``, ``readers``: lengths of the runs; run i of keys comes before run i of queries.
    """
    if (added == 1).all() and (readers == 1).all():
        yield from (Step(rows, rows) for rows in block_slices(len(added), block_size))
        return
    sizes = added + readers - 1
    starts = np.cumsum(sizes) - sizes
    key_at = np.repeat(starts - (np.cumsum(added) - added), added) + np.arange(added.sum())
    query_at = np.repeat(starts + added - 1 - (np.cumsum(readers) - readers), readers)
    query_at += np.arange(readers.sum())
    edges = np.append(np.arange(0, sizes.sum(), block_size), sizes.sum())
    key_edges, query_edges = np.searchsorted(key_at, edges), np.searchsorted(query_at, edges)
    for i, first in enumerate(edges[:-1].tolist()):
        keys = slice(int(key_edges[i]), int(key_edges[i + 1]))
        queries = slice(int(query_edges[i]), int(query_edges[i + 1]))
        count = int(edges[i + 1]) - first
        step = Step(keys, queries)
        if step.num_keys and step.num_queries and step.num_keys + step.num_queries < 2 * count:
            step = Step(
                keys, queries, Positions(count, key_at[keys] - first, query_at[queries] - first)
            )
        yield step


def _moved(step: Step, key: int, query: int) -> Step:
    """Return the step with ``key`` added to its key numbers and ``query`` to its query numbers."""
    keys, queries, positions = step
    return Step(
        slice(keys.start + key, keys.stop + key),
        slice(queries.start + query, queries.stop + query),
        positions,
    )


# Stops that differ between heads ------------------------------------------------------------------


def planned(problem: Problem) -> Problem:
    """Return a problem whose costs are about the same, for planning tasks and block sizes.

    A window of one token is left out; stops and two sides become causal attention.
    """
    problem = without_window(problem) or problem
    if problem.sees.key_stop is None and problem.mode != "two-sided":
        return problem
    return problem.replace(sees=problem.sees._replace(right=0))


def head_tasks(problem: Problem) -> list[Index]:
    """List one task for each entry along the leading axes of ``key_stop``."""
    lead = problem.sees.key_stop.shape[:-1]
    axes = [[slice(i, i + 1) for i in range(n)] if n > 1 else [slice(None)] for n in lead]
    return list(product(*axes))


def join_tasks(tasks: list[Index], arrays: list[Array], lead: tuple[int, ...]) -> Array:
    """Join one array for each task of `head_tasks` to an array with the leading axes ``lead``.

    Where ``lead`` has no such axis or an axis of 1, the arrays are added: sums of gradients.
    """
    xp, trailing = array_api_compat.array_namespace(arrays[0]), arrays[0].ndim - len(lead)
    for back in range(1, len(tasks[0]) + 1):
        size = len({task[-back].start for task in tasks})
        groups = [arrays[i : i + size] for i in range(0, len(arrays), size)]
        shared = back > len(lead) or lead[-back] == 1
        arrays = [
            sum(group[1:], group[0]) if shared else xp.concat(group, axis=-trailing - back)
            for group in groups
        ]
    return arrays[0]

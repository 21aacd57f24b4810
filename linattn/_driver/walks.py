"""Walks over the blocks of a problem, one for each mode: they stop after each block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import array_api_compat
import numpy as np

from linattn import _generic
from linattn._dispatch import BlockFunctions, block_functions
from linattn._driver.blocks import (
    add_block,
    block_slices,
    raw_tokens,
    token_block,
    transient_values_block,
)
from linattn._driver.causal_blocks import causal_block
from linattn._driver.clusters import sort_keys
from linattn._driver.decay import add_key_blocks, key_block
from linattn._driver.softmax import softmax_rows
from linattn._driver.stops import Step, steps_of
from linattn._driver.tasks import take_rows
from linattn._driver.two_sided import RowsSoFar, rows_from_the_end
from linattn._driver.window import window_rows
from linattn._driver.wrappers import read_spec, select_rows
from linattn.typing import Array, Index, Partial, Plan, Problem, State

__all__ = [
    "WALKS",
    "Walk",
    "add_keys",
    "initial_state",
    "read_blocks",
    "run_tasks",
    "run_walk",
    "scan_blocks",
    "state_updates",
    "update",
]


Read: TypeAlias = Callable[[Array], Array | None]
"""Given their place, reads rows; returns them or None as :meth:`BlockTier.divide` does."""


class Walk(NamedTuple):
    """What a walk is given: a problem, the functions of its blocks, and where results go."""

    problem: Problem
    functions: BlockFunctions
    block_size: int
    write: Callable[[slice, Partial], None]
    """Takes finished rows."""
    write_read: Callable[[slice, Read], None] | None = None
    """Takes a function that reads finished rows and divides, where that may be done at once."""
    store: Callable[[int, State], None] | None = None
    """Takes the state before a row of a causal walk, as a checkpoint or not."""

    def segment(self, rows: slice) -> Walk:
        """Walk over some rows only, whose state is handed around beside it."""
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
    """State before the first key of a problem, broadcast to all its leading axes."""
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
    """State before the first key, of arrays that cannot be written to."""
    zero, log = np.zeros((), dtype), np.full((), -np.inf, dtype)
    return State(np.broadcast_to(zero, shape), np.broadcast_to(log, shape[:-1]), 0)


def update(
    problem: Problem, state: State, block_size: int, functions: BlockFunctions | None = None
) -> State:
    """Add all keys and values of a problem to a state, block by block."""
    functions = block_functions(problem.xp) if functions is None else functions
    return run_walk(state_updates(problem, state, block_size, functions), state)


def run_walk(walk: Iterator[State], state: State) -> State:
    """Finish a walk: the state after it, or the one before it where there is no block."""
    return deque(chain([state], walk), maxlen=1).pop()


def _steps(walk: Iterator[Any]) -> Iterator[Any]:
    """Go through a walk without floating-point warnings, but not for what runs between blocks."""
    while True:
        try:
            with _generic.ignore_fp_warnings():
                state = next(walk)
        except StopIteration:
            return
        yield state


def run_tasks(plan: Plan, walk_of: Callable[[Index], Iterator[Any]]) -> None:
    """Run the walk of each task, block by block where the plan asks for resumable ones.

    Nothing warns of floating-point errors in a walk.
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
    """Add a problem's keys and values to a state: the state after each block."""
    keys = slice(0, problem.key.shape[-2])
    return add_key_blocks(problem, state, keys, state.length, block_size, functions)


def read_blocks(walk: Walk, state: State, start: int) -> Iterator[State]:
    """Read a state with all queries of a problem: the state again after each block."""
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
    """Go through a problem causally: the state after each block."""
    problem, functions, start = walk.problem, walk.functions, state.length
    for rows in block_slices(problem.query.shape[-2], walk.block_size):
        if walk.store is not None:
            walk.store(rows.start, state)
        part, state = causal_block(
            problem,
            functions,
            token_block(problem, "query", rows, start),
            key_block(problem, rows, start),
            transient_values_block(problem, rows, functions),
            state,
        )
        walk.write(rows, part)
        del part
        yield state


def _walk_full(walk: Walk) -> Iterator[State]:
    state = before = initial_state(walk.problem)
    for state in state_updates(walk.problem, before, walk.block_size, walk.functions):
        yield state
    yield from read_blocks(walk, state, before.length)


def _walk_causal(walk: Walk) -> Iterator[State]:
    return scan_blocks(walk, initial_state(walk.problem))


def _walk_stops(walk: Walk) -> Iterator[State]:
    problem, functions = walk.problem, walk.functions
    state = initial_state(problem)
    start = state.length
    for step in steps_of(problem, walk.block_size):
        part = step.problem(problem)
        if step.num_queries:
            tokens = token_block(part, "query", slice(0, None), start + step.queries.start)
        if not step.num_queries:
            state = add_keys(problem, functions, step, state, start)
        elif not step.num_keys:
            query_spec, seen = read_spec(problem, state)
            rows = functions.read_block(query_spec, tokens, seen, problem.want_log)
        else:
            key = token_block(part, "key", slice(0, None), start + step.keys.start)
            values = transient_values_block(part, slice(0, None), functions)
            rows, state = causal_block(part, functions, tokens, key, values, state)
            state = State(state.kvz, state.log_scale, start + step.keys.stop)
        if step.num_queries:
            walk.write(step.queries, step.queries_of_part(rows))
        yield state


def add_keys(
    problem: Problem, functions: BlockFunctions, step: Step, state: State, start: int
) -> State:
    """Add the keys of a step to a state."""
    if not step.num_keys:
        return state
    key = token_block(problem, "key", step.keys, start)
    return add_block(problem, step.keys, key, state, functions)


def _walk_two_sided(walk: Walk) -> Iterator[State]:
    # Both scans must give rows on the true scale.
    problem = walk.problem.replace(want_log=True)
    nothing = initial_state(problem.replace(state=None))
    rows_so_far = RowsSoFar(problem, walk.functions)
    from_the_start = problem.replace(is_causal=True)
    scan = walk._replace(problem=from_the_start, write=rows_so_far.write)
    for state in scan_blocks(scan, initial_state(problem)):
        yield state
    for rows, part in rows_from_the_end(
        problem, walk.functions, walk.block_size, nothing, rows_so_far.result()
    ):
        walk.write(rows, part)
        yield state


def _walk_exact(walk: Walk) -> Iterator[None]:
    parts = softmax_rows(walk.problem, walk.block_size, walk.functions)
    for rows, part in parts:
        walk.write(rows, part)
        yield


def _walk_window(walk: Walk) -> Iterator[State]:
    state, clusters = initial_state(walk.problem), None
    if walk.problem.exact_clusters is not None:
        clusters, _ = sort_keys(walk.problem, state, walk.block_size, walk.functions)
    yield window_rows(walk.problem, state, walk.block_size, walk.functions, walk.write, clusters)


def _walk_clusters(walk: Walk) -> Iterator[State]:
    problem = walk.problem
    clusters, state = sort_keys(problem, initial_state(problem), walk.block_size, walk.functions)
    for rows in block_slices(problem.query.shape[-2], walk.block_size):
        walk.write(rows, clusters.read(raw_tokens(problem, "query", rows, 0), state))
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
"""The walk of each mode of a problem; softmax attention has no state."""

"""Walks over the blocks of a problem, one for each mode: they stop after each block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TypeAlias

import array_api_compat

from linattn import _dispatch, _generic
from linattn._driver.blocks import block_slices, token_block, transient_values_block
from linattn._driver.causal_blocks import causal_block
from linattn._driver.exact import exact_rows
from linattn._driver.window import walk_window
from linattn._driver.wrappers import read_spec, select_rows
from linattn.typing import Index, Partial, Problem, State

__all__ = [
    "StoreState",
    "WriteRows",
    "_walk_window",
    "initial_state",
    "read_blocks",
    "run_walk",
    "scan_blocks",
    "update",
    "walk_causal",
    "walk_exact",
    "walk_full",
]

WriteRows: TypeAlias = Callable[[Index, slice, Partial], None]


StoreState: TypeAlias = Callable[[Index, int, State], None]


def initial_state(problem: Problem) -> State:
    """State before the first key of a problem, with all its leading axes."""
    m, e = problem.num_features, problem.value.shape[-1]
    if problem.state is None:
        like = problem.xp.empty(
            (0,), dtype=problem.dtype, device=array_api_compat.device(problem.key)
        )
        return _generic.empty_state(problem.state_lead, m, e, like)
    xp, state = problem.xp, problem.state
    kvz = xp.broadcast_to(state.kvz, (*problem.state_lead, m, e + 1))
    log_scale = xp.broadcast_to(state.log_scale, (*problem.state_lead, m))
    return State(kvz, log_scale, state.length)


def update(problem: Problem, state: State, block_size: int) -> State:
    """Add all keys and values of a problem to a state, block by block."""
    return run_walk(state_updates(problem, state, block_size), state)


def state_updates(problem: Problem, state: State, block_size: int) -> Iterator[State]:
    """Add a problem's keys and values to a state: the state after each block."""
    reduce_block = _dispatch.block_function("reduce_block", problem.xp)
    start = state.length
    for rows in block_slices(problem.key.shape[-2], block_size):
        # No name holds a block while the next is made, here and below.
        state = reduce_block(
            problem.key_spec,
            token_block(problem, "key", rows, start),
            transient_values_block(problem, rows),
            state,
        )
        yield state


def walk_full(problem: Problem, task: Index, block_size: int, put: WriteRows) -> Iterator[State]:
    state = before = initial_state(problem)
    for state in state_updates(problem, before, block_size):
        yield state
    yield from read_blocks(problem, state, before.length, task, block_size, put)


def read_blocks(
    problem: Problem, state: State, start: int, task: Index, block_size: int, put: WriteRows
) -> Iterator[State]:
    """Read a state with all queries of a problem: the state again after each block."""
    read_block = _dispatch.block_function("read_block", problem.xp)
    query_spec, seen = read_spec(problem, state)
    for rows in block_slices(problem.query.shape[-2], block_size):
        part = read_block(
            query_spec, token_block(problem, "query", rows, start), seen, problem.want_log
        )
        put(task, rows, select_rows(problem, part))
        del part
        yield state


def walk_causal(
    problem: Problem, task: Index, block_size: int, put: WriteRows, store: StoreState | None
) -> Iterator[State]:
    return scan_blocks(problem, initial_state(problem), task, block_size, put, store)


def scan_blocks(
    problem: Problem,
    state: State,
    task: Index,
    block_size: int,
    put: WriteRows,
    store: StoreState | None,
) -> Iterator[State]:
    """Go through a problem causally: the state after each block."""
    start = state.length
    for rows in block_slices(problem.query.shape[-2], block_size):
        if store is not None:
            store(task, rows.start, state)
        part, state = causal_block(
            problem,
            token_block(problem, "query", rows, start),
            token_block(problem, "key", rows, start),
            transient_values_block(problem, rows),
            state,
        )
        put(task, rows, part)
        del part
        yield state


def walk_exact(problem: Problem, task: Index, block_size: int, put: WriteRows) -> Iterator[None]:
    for rows in block_slices(problem.query.shape[-2], block_size):
        put(task, rows, exact_rows(problem, rows, block_size))
        yield None


def run_walk(walk: Iterator[State], state: State) -> State:
    """Finish a walk: the state after it, or the one before it where there is no block."""
    return deque(chain([state], walk), maxlen=1).pop()


def _walk_window(problem: Problem, task: Index, block_size: int, put: WriteRows) -> Iterator[State]:
    yield walk_window(problem, initial_state(problem), block_size, partial(put, task))

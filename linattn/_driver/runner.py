"""The runner: every mode of attention is lines of steps, exact pairs, or both, block by block.

`run` returns a generator of the state after each block, so that a plan can run several tasks in
round-robin order; a window is one block. It passes finished rows to `Run.write`. `forward` and the
pullbacks run it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, product
from typing import Any, NamedTuple, TypeAlias

import array_api_compat
import numpy as np

from linattn import _generic, _numerics
from linattn._dispatch import BlockFunctions, block_functions
from linattn._driver.blocks import OutputRows, block_slices, raw_tokens, take_rows, token_block
from linattn._driver.clusters import choosing_by_sinks, sort_keys
from linattn._driver.lines import Line
from linattn._driver.sinks import Sinks, without_sinks
from linattn._driver.softmax import softmax_rows
from linattn._driver.specs import read_spec
from linattn._driver.steps import Step
from linattn._driver.window import window_rows
from linattn.typing import Array, Index, Partial, Plan, Problem, State

ReadInto: TypeAlias = Callable[[Array], Array | None]
"""``read(out)`` writes divided rows into ``out`` and returns None, or returns the rows."""


class Run(NamedTuple):
    """Arguments of a run: the problem, the backend's block functions, and receivers of results."""

    problem: Problem
    functions: BlockFunctions
    block_size: int
    write: Callable[[slice, Partial], None]
    """``write(rows, part)`` receives the sums of finished rows, not divided yet."""
    write_read: Callable[[slice, ReadInto], None] | None = None
    """``write_read(rows, read)`` calls ``read`` to compute and divide finished rows in one step.

    None if a run must call `write` instead.
    """
    store: Callable[[int, State], None] | None = None
    """``store(row, state)`` receives the state before each causal block."""
    keeps_state: bool = False
    """Whether the state after all keys is needed, also of keys that no query reads."""

    def segment(self, rows: slice) -> Run:
        """Return the run of some rows only; the receivers get row numbers of the whole.

        The run contains no state: a caller passes the state before ``rows.start``.
        """
        store, write_read_rows = self.store, self.write_read

        def here(part_rows: slice) -> slice:
            return slice(rows.start + part_rows.start, rows.start + part_rows.stop)

        def write(part_rows: slice, part: Partial) -> None:
            self.write(here(part_rows), part)

        def write_read(part_rows: slice, read: ReadInto) -> None:
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


def run(run: Run) -> Iterator[State | None]:
    """Compute a problem; yield the state after each block.

    None in softmax attention, and after a window if the state is not kept.
    """
    problem = run.problem
    if problem.exact.sinks:
        return _with_sinks(run)
    if problem.mode == "exact":
        return _softmax(run)
    state = initial_state(problem)
    if problem.mode == "window":
        return _window(run, state)
    if problem.mode == "clusters":
        return _clusters(run, state)
    if problem.mode == "two-sided":
        return _two_sided(run, state)
    line = Line(problem, run.functions, state.length)
    return take_steps(run, line.steps(problem.sees.key_stop, run.block_size), state)


def take_steps(
    run: Run, steps: Iterable[Step], state: State, start: int | None = None
) -> Iterator[State]:
    """Take steps of a problem whose rows are read by one line; yield the state after each.

    ``start``: position of the first key; by default, of the first after ``state``.
    """
    problem, functions = run.problem, run.functions
    line = Line(problem, functions, state.length if start is None else start)
    read = seen = None
    for step in steps:
        if run.write_read is not None and not step.num_keys:
            if state is not read:
                read, (spec, seen) = state, read_spec(problem, state)
            tokens = token_block(problem, "query", step.queries, line.start)
            run.write_read(step.queries, partial(functions.read_output, spec, tokens, seen))
            del tokens
        else:
            if run.store is not None and step.num_queries and step.num_keys:
                run.store(step.queries.start, state)
            part, state = line.take(step, state)
            if part is not None:
                run.write(step.queries, part)
            del part
        yield state


def _two_sided(run: Run, state: State) -> Iterator[State]:
    """Add what each row reads of the keys up to it, and from the end: all decay with distance."""
    # Both lines must give rows on the true scale.
    problem = run.problem.replace(want_log=True)
    ahead = Line(problem, run.functions, state.length, reverse=True)
    length, xp = problem.query.shape[-2], problem.xp
    later = OutputRows(problem, problem.value.shape[-1] + 2, problem.dtype, run.functions)
    after = _nothing_yet(problem)
    for step in _steps_ahead(length, run.block_size):
        part, after = ahead.take(step, after)
        if part is not None:
            log = xp.broadcast_to(part.log, (*part.num_den.shape[:-1], 1))
            later.write((), step.queries, xp.concat([part.num_den, log], axis=-1))
        yield state
    numbers = later.result()

    def write(rows: slice, part: Partial) -> None:
        rest = numbers[..., rows, :]
        run.write(rows, _generic.combine(part, Partial(rest[..., :-1], rest[..., -1:])))

    before = run._replace(problem=problem, write=write, write_read=None, store=None)
    rows = block_slices(length, run.block_size)
    yield from take_steps(before, (Step(part, part) for part in rows), state)


def _steps_ahead(length: int, block_size: int) -> Iterator[Step]:
    """Let each query read the keys after it, from the last on, which reads none."""
    yield Step(slice(length, length), slice(max(length - 1, 0), length))
    for part in block_slices(length - 1, block_size):
        first, stop = length - part.stop, length - part.start
        yield Step(slice(first, stop), slice(first - 1, stop - 1))


def _softmax(run: Run) -> Iterator[None]:
    for rows, part in softmax_rows(run.problem, run.block_size, run.functions):
        run.write(rows, part)
        yield None


def _window(run: Run, state: State) -> Iterator[State | None]:
    clusters = None
    if run.problem.exact.clusters is not None:
        clusters, _ = sort_keys(run.problem, state, run.block_size, run.functions)
    last = window_rows(run.problem, state, run.block_size, run.functions, run.write, clusters)
    # No query reads the last keys by the map.
    yield last() if run.keeps_state else None


def _clusters(run: Run, state: State) -> Iterator[State]:
    """Read the chosen clusters of keys exactly and all other keys by the map."""
    problem = run.problem
    clusters, state = sort_keys(problem, state, run.block_size, run.functions)
    yield state
    for rows in block_slices(problem.query.shape[-2], run.block_size):
        query = raw_tokens(problem, "query", rows, 0)
        chosen, rest = clusters.choose(problem, query, state, clusters.assigned.bias)
        run.write(rows, clusters.add(query, chosen, rest))
        yield state


def _with_sinks(this: Run) -> Iterator[State | None]:
    """Run with masked sinks, then add the sinks to each row and to the last state."""
    sinks, state = Sinks.of(this.problem), None

    def write(rows: slice, part: Partial) -> None:
        this.write(rows, sinks.add(rows, part))

    masked = without_sinks(this.problem)
    args = initial_state(masked), this.block_size, this.functions
    if masked.exact.clusters is not None:
        masked = choosing_by_sinks(this.problem, masked, *args)
    for state in run(this._replace(problem=masked, write=write, write_read=None, store=None)):
        yield state
    if state is not None:
        yield sinks.added(state, *args)


# States and tasks ---------------------------------------------------------------------------------


def _nothing_yet(problem: Problem) -> State:
    """Return the state of a line from the end, which has seen nothing."""
    return initial_state(problem.replace(state=None))


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
    line = Line(problem, functions, state.length)
    return line.add_all(slice(0, problem.key.shape[-2]), state, block_size)


def last_of(states: Iterator[State], state: State) -> State:
    """Return the last of some states; ``state`` if there are none."""
    return deque(chain([state], states), maxlen=1).pop()


def _quietly(run: Iterator[Any]) -> Iterator[Any]:
    """Yield from a run; only the run, not its caller, goes without floating-point warnings."""
    while True:
        try:
            with _numerics.ignore_fp_warnings():
                state = next(run)
        except StopIteration:
            return
        yield state


def run_tasks(plan: Plan, run_of: Callable[[Index], Iterator[Any]]) -> None:
    """Run each task of a plan.

    A resumable plan takes one block of each task in turn; other plans run each task to its end.
    Floating-point warnings are off inside. ``run_of(task)`` returns what `run` does.
    """

    def work(task: Index) -> Iterator[Any] | None:
        if plan.resumable:
            return _quietly(run_of(task))
        with _numerics.ignore_fp_warnings():
            deque(run_of(task), maxlen=0)
        return None

    plan.run(work, plan.tasks)


# Stops that differ between heads ------------------------------------------------------------------


def planned(problem: Problem) -> Problem:
    """Return a problem whose costs are about the same, for planning tasks and block sizes.

    Stops and two sides become causal attention.
    """
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

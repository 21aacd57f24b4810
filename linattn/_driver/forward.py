"""The forward pass: a problem in tasks, each run block by block, and what comes of them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import array_api_compat
import numpy as np

from linattn import _arrays, _dispatch, _generic, _numerics
from linattn._driver import traced
from linattn._driver.blocks import (
    OutputRows,
    block_slices,
    numerators,
    take_problem,
    take_rows,
    task_index,
    token_block,
    total_decay,
)
from linattn._driver.clusters import AssignedKeys
from linattn._driver.packed import Batch, PackedRows, batches, join_states, solve_short
from linattn._driver.problem import linear_problem
from linattn._driver.runner import (
    Run,
    head_tasks,
    initial_state,
    join_tasks,
    last_of,
    planned,
    run,
    run_tasks,
    take_steps,
    update,
)
from linattn._driver.specs import read_spec
from linattn._driver.steps import Step
from linattn._generic import units
from linattn._generic.decay import fade
from linattn._generic.states import divide, log_normalizer
from linattn._home import at_home, exact, wants_gradients
from linattn.typing import Array, Corrected, FeatureMap, Index, Partial, Plan, Problem, State

if TYPE_CHECKING:
    # Loads threads, which a forward pass alone does not need.
    from linattn._driver.gradient_rows import Checkpoints


class _Solved(NamedTuple):
    output: Array
    state: State | None
    """After the last key, where it is asked for."""
    log_normalizer: Array | None
    is_negative: Array | None = None
    """Whether denominators are negative, ``(..., L)``; None where that is not inspected."""


def attend(
    problem: Problem, *, return_state: bool, return_log: bool = False
) -> tuple[Array, State | None, Array | None]:
    """Do as `solve`, as one node of torch's tape if torch asks for gradients."""
    if not return_log and wants_gradients(problem):
        from linattn._driver.backward import on_tape

        found = on_tape(solve, problem, return_state)
        if found is not None:
            return found
    return solve(problem, return_state=return_state)


@at_home(exact.solve)
def solve(
    problem: Problem, *, return_state: bool, checkpoints: Checkpoints | None = None
) -> tuple[Array, State | None, Array | None]:
    """Run a problem: (output, state after it, log normalizer), the last two where asked for.

    ``checkpoints`` stores states on the way.
    """
    checkpoints = checkpoints and checkpoints.of(problem)
    # Checkpoints have the units of the pullback.
    log = units.value_log(problem, whole=checkpoints is not None)
    output, state, norm = _solve(units.in_units(problem, log), return_state, checkpoints)
    if _overflowed(problem, output, log):
        return _solve(problem, return_state, checkpoints)
    return units.times_power(output, log, in_place=True), _in_ones(state, log), norm


def _overflowed(problem: Problem, output: Array, log: Any) -> bool:
    """Whether numerators in units may have: those of weights far above 1 do so first."""
    return not problem.normalize and bool(np.any(log) and not np.isfinite(output).all())


def _in_ones(state: Any, log: Any) -> Any:
    """Measure values that a state has seen in units of 1 again; None stays None."""
    return state if state is None else state._replace(kvz=units.numerators_times(state.kvz, log))


def _solve(
    problem: Problem, return_state: bool, checkpoints: Checkpoints | None
) -> tuple[Array, State | None, Array | None]:
    solver: Callable[..., _Solved] = _solve_tasks
    is_loop = traced.covers(problem)
    if problem.sees.cu_seqlens is not None and not is_loop:
        solver = _solve_packed
    elif not is_loop and problem.sees.key_stop is not None and problem.sees.key_stop.ndim > 1:
        solver = _solve_heads
    solved = solver(problem, return_state, checkpoints)
    warn_of_signs(solved.is_negative)
    return solved[:3]


@at_home()
def solve_in_parts(
    whole: Problem, length: int, log: Any = None
) -> tuple[Array, State, Array | None, list[State]]:
    """Run a causal problem: output, last state, log normalizer, and intermediate states.

    There is a state after each ``length`` tokens; each part starts from the state before it.
    ``log``: log2 of the units, or None for those of the values.
    """
    log = units.value_log(whole) if log is None else log
    problem = units.in_units(whole, log)
    if problem.mode != "causal" or problem.sees.cu_seqlens is not None:
        raise ValueError(
            f"return_states_every must be None unless causal, without a window, clusters, stops or "
            f"packed sequences, got {length!r}; call linear_attention part by part, each with the "
            f"state that the one before returned"
        )
    if traced.covers(problem):
        output, state, norm, states = traced.solve_in_parts(problem, length)
        output = units.times_power(output, log)
        return output, _in_ones(state, log), norm, [_in_ones(each, log) for each in states]
    xp, num_tokens = problem.xp, problem.query.shape[-2]
    state = initial_state(problem)
    parts, states = [], []
    # No tokens are one part too.
    for rows in block_slices(num_tokens, length) if num_tokens else [slice(0, 0)]:
        part = take_rows(problem, rows).replace(state=state)
        parts.append(_solve_tasks(part, True, None))
        assert parts[-1].state is not None
        state = parts[-1].state
        if rows.stop - rows.start == length:
            states.append(state)
    output = xp.concat([part.output for part in parts], axis=-2)
    signs = [part.is_negative for part in parts if part.is_negative is not None]
    warn_of_signs(xp.concat(signs, axis=-1) if signs else None)
    norms = [part.log_normalizer for part in parts]
    norm = xp.concat(norms, axis=-1) if problem.want_log else None
    if _overflowed(problem, output, log):
        return solve_in_parts(whole, length, 0)
    output, state = units.times_power(output, log), _in_ones(state, log)
    return output, state, norm, [_in_ones(each, log) for each in states]


def _solve_packed(problem: Problem, return_state: bool, checkpoints: Checkpoints | None) -> _Solved:
    """Solve the sequences of a packed problem, batch by batch."""
    shape = (*problem.lead, problem.query.shape[-2])
    output = PackedRows(problem, (*shape, problem.value.shape[-1]), problem.query.dtype)
    norms = PackedRows(problem, (*shape, 1), problem.dtype) if problem.want_log else None
    signs = PackedRows(problem, (*shape, 1), problem.xp.bool) if inspects_signs(problem) else None
    states: list[tuple[Batch, State]] = []
    left = None
    if not return_state and checkpoints is None:
        functions = _dispatch.block_functions(problem.xp)
        places = [None if rows is None else rows.array for rows in (output, norms, signs)]
        left = solve_short(problem, functions, _Results(problem, functions, *places).write)
    for number, batch in enumerate(batches(problem, left)):
        part = batch.problem(problem, keeps_state=return_state)
        store = None if checkpoints is None else checkpoints.part(number)
        place = output.place_of(batch)
        solved = _solve_tasks(part, return_state, store, place)
        if place is None or solved.output is not place:
            output.write(batch, solved.output)
        for rows, of_batch in ((norms, solved.log_normalizer), (signs, solved.is_negative)):
            if rows is not None and of_batch is not None:
                rows.write(batch, of_batch[..., None])
        if solved.state is not None:
            states.append((batch, solved.state))
    state = join_states(problem, states) if return_state else None
    norm, is_negative = (None if rows is None else rows.result()[..., 0] for rows in (norms, signs))
    return _Solved(output.result(), state, norm, is_negative)


def _solve_heads(problem: Problem, return_state: bool, checkpoints: Checkpoints | None) -> _Solved:
    """Solve heads apart that have other stops."""
    tasks = head_tasks(problem)
    parts = [_solve_tasks(take_problem(problem, task), return_state, None) for task in tasks]
    output = join_tasks(tasks, [part.output for part in parts], problem.lead)
    norm = None
    if problem.want_log:
        norm = join_tasks(tasks, [part.log_normalizer for part in parts], problem.lead)
    states = [part.state for part in parts if part.state is not None]
    state = None
    if return_state:
        kvz = join_tasks(tasks, [each.kvz for each in states], problem.state_lead)
        log_scale = join_tasks(tasks, [each.log_scale for each in states], problem.state_lead)
        state = State(kvz, log_scale, states[0].length)
    signs = [part.is_negative for part in parts if part.is_negative is not None]
    is_negative = join_tasks(tasks, signs, problem.lead) if signs else None
    return _Solved(output, state, norm, is_negative)


def _solve_tasks(
    problem: Problem,
    return_state: bool,
    checkpoints: Checkpoints | None,
    place: Array | None = None,
) -> _Solved:
    """Solve a problem, with its output in a place that may be given."""
    if checkpoints is not None and _dispatch.find("attention_pullback", problem.xp) is not None:
        pulled: Any = _dispatch.whole_function("attention_pullback", problem)
        answer = None if pulled is None else pulled(problem)
        if answer is not None and not _dispatch.is_declined(answer):
            *solved, checkpoints.pullback = answer
            return _Solved(*solved)
    whole = _dispatch.whole_function("attention", problem)
    if whole is not None:
        answer = whole(problem)
        if not _dispatch.is_declined(answer):
            return _Solved(*answer)

    functions = _dispatch.block_functions(problem.xp)
    if traced.covers(problem):
        with _numerics.ignore_fp_warnings():
            return _Solved(*traced.solve(problem, functions, return_state))
    plan = _plan(problem, functions)
    # A state that is returned is the caller's, who may change it.
    keeps_last = checkpoints is not None and problem.mode == "full" and not return_state
    if checkpoints is not None and problem.mode != "full":
        # Checkpoints are states before blocks of the pullback.
        plan = plan.for_gradients()
    results = _Results(problem, functions, place)
    states: list[tuple[Index, State]] = []

    def run_of(task: Index) -> Run:
        store = None
        if checkpoints is not None:
            store = partial(checkpoints.store, problem, plan.block_size, task)
        part = take_problem(problem, task)
        write_read = partial(results.output.write_read, task) if results.divides_reads else None
        write = partial(results.write, task)
        keeps = return_state or keeps_last
        return Run(part, functions, plan.block_size, write, write_read, store, keeps)

    def solve_task(task: Index) -> Iterator[State | None]:
        of_task = run_of(task)
        state = None
        for state in run(of_task):
            yield state
        if return_state or keeps_last:
            states.append((task, initial_state(of_task.problem) if state is None else state))

    if plan.segments > 1 and problem.mode in ("full", "causal"):
        states.append(((), run_segments(run_of(()), plan)))
    else:
        run_tasks(plan, solve_task)
    state = _join(problem, states) if return_state or keeps_last else None
    if checkpoints is not None and keeps_last:
        checkpoints.last = state
    norm, is_negative = (
        None if rows is None else rows.result()[..., 0] for rows in (results.norms, results.signs)
    )
    return _Solved(results.output.result(), state, norm, is_negative)


def _plan(problem: Problem, functions: Any) -> Plan:
    """Plan a problem, or take the plan of the last one like it."""
    known = problem.plans
    if known and known[0][0] is functions:
        return known[0][1]  # type: ignore[no-any-return]
    plan: Plan = functions.plan(planned(problem))
    if known is not None:
        known[:] = [(functions, plan)]
    return plan


class _Results:
    """Where the rows of a problem go, in places that may be given."""

    def __init__(
        self,
        problem: Problem,
        functions: Any,
        place: Array | None,
        norms: Array | None = None,
        signs: Array | None = None,
    ) -> None:
        dtype, width = problem.query.dtype, problem.value.shape[-1]
        self._problem = problem
        self.output = OutputRows(problem, width, dtype, functions, place)
        self.norms = None
        if problem.want_log:
            self.norms = OutputRows(problem, 1, problem.dtype, functions, norms)
        self.signs = None
        if inspects_signs(problem):
            self.signs = OutputRows(problem, 1, problem.xp.bool, functions, signs)
        needs_more = (
            problem.want_log or self.signs is not None or isinstance(problem.query_spec, Corrected)
        )
        self.divides_reads = problem.normalize and not needs_more and self.output.divides_reads
        """Whether one function reads rows and divides them."""

    def write(self, task: Index, rows: slice, part: Partial) -> None:
        if self._problem.normalize:
            self.output.write_divided(task, rows, part)
        else:
            self.output.write(task, rows, numerators(self._problem, part))
        if self.norms is not None:
            self.norms.write(task, rows, log_normalizer(part, self._problem))
        if self.signs is not None:
            self.signs.write(task, rows, part.num_den[..., -1:] < 0)


def _join(problem: Problem, states: list[tuple[Index, State]]) -> State:
    """Put the states of all tasks into one that shares no memory with the caller's."""
    xp, is_whole = problem.xp, len(states) == 1
    if is_whole and problem.key.shape[-2]:
        return states[0][1]
    nothing = states[0][1] if is_whole else initial_state(problem.replace(state=None))
    kvz, log_scale = (xp.asarray(a, copy=True) for a in (nothing.kvz, nothing.log_scale))
    if is_whole:
        return State(kvz, log_scale, nothing.length)
    for task, state in states:
        kvz[task_index(tuple(kvz.shape), 2, task)] = state.kvz
        log_scale[task_index(tuple(log_scale.shape), 1, task)] = state.log_scale
    before = 0 if problem.state is None else problem.state.length
    return State(kvz, log_scale, before + problem.key.shape[-2])


def attend_assigned(
    query: Array,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    assigned: AssignedKeys,
    num_exact: int,
    key_mask: Array | None,
) -> tuple[Array, Array]:
    """Read ``num_exact`` clusters exactly and all others by the map: output and log normalizer."""
    if num_exact:
        options = {"key_mask": key_mask, "exact_clusters": num_exact}
        problem = linear_problem(query, key, value, feature_map, want_log=True, **options)
        problem = problem.replace(exact=problem.exact._replace(assigned=assigned))
    else:
        # Their state has seen all keys.
        key, value = key[..., :0, :], value[..., :0, :]
        problem = linear_problem(query, key, value, feature_map, want_log=True)
        problem = problem.replace(state=assigned.state)
    output, _, log = solve(problem, return_state=False)
    assert log is not None
    return output, log


@at_home()
def step(problem: Problem, state: State) -> tuple[Array, State]:
    """One token: add its key and value to the state, then read with its query.

    The read sees the token itself and nothing later, so it needs no check.
    """
    if units.is_moderate(problem.value):
        return _step(problem, state)
    log = units.value_log(problem.replace(state=state))
    of_state = state._replace(kvz=units.numerators_times(state.kvz, -log))
    output, after = _step(units.in_units(problem.replace(state=None), log), of_state)
    return units.token_times(output, log), _in_ones(after, log)


def _step(problem: Problem, state: State) -> tuple[Array, State]:
    whole = _dispatch.whole_function("decode", problem)
    if whole is not None:
        # The caller's problem mostly has the state already.
        same = problem.state is state
        answer: Any = whole(problem if same else problem.replace(state=state))
        if not _dispatch.is_declined(answer):
            return answer  # type: ignore[no-any-return]
    row = slice(0, 1)
    start = state.length
    functions = _dispatch.block_functions(problem.xp)
    with _numerics.ignore_fp_warnings():
        state = update(problem, initial_state(problem.replace(state=state)), 1, functions)
        tokens = token_block(problem, "query", row, start)
        query_spec, seen = read_spec(problem, state)
        part = functions.read_block(query_spec, tokens, seen, problem.want_log)
        if inspects_signs(problem):
            warn_of_signs(part.num_den[..., 0, -1] < 0)
        divided = divide(part) if problem.normalize else numerators(problem, part)
        output = problem.xp.astype(divided, problem.query.dtype, copy=False)
    return output[..., 0, :], state


# One long sequence as segments side by side -------------------------------------------------------


def run_segments(whole: Run, plan: Plan) -> State:
    """Do a whole problem as segments of the sequence side by side; return the state after it.

    Full: states of the segments of keys, then reads of the segments of queries. Causal: states of
    all segments but the last, then each segment from the state of all before it; the keys of
    these segments are reduced twice.
    """
    problem = whole.problem
    before = initial_state(problem)
    keys = _segments(problem.key.shape[-2], plan)
    causal = problem.mode == "causal"
    queries = keys if causal else _segments(problem.query.shape[-2], plan)
    reduced = keys[:-1] if causal else keys
    nothing = initial_state(problem.replace(state=None))
    states = [before] * (len(keys) + 1)

    def reduce(i: int) -> None:
        with _numerics.ignore_fp_warnings():
            start = State(nothing.kvz, nothing.log_scale, before.length + keys[i].start)
            segment = whole.segment(keys[i]).problem
            after = update(segment, start, plan.block_size, whole.functions)
            states[i + 1] = State(after.kvz, after.log_scale, keys[i].stop - keys[i].start)

    def read(i: int) -> None:
        with _numerics.ignore_fp_warnings():
            segment = whole.segment(queries[i])
            if not causal:
                start = before.length + queries[i].start
                steps = [Step(slice(0, 0), rows) for rows in _blocks(queries[i], plan)]
                last_of(take_steps(segment, steps, states[-1], start), states[-1])
                return
            steps = [Step(rows, rows) for rows in _blocks(keys[i], plan)]
            after = last_of(take_steps(segment, steps, states[i]), states[i])
            if i + 1 == len(keys):
                states[-1] = after

    plan.run(reduce, range(len(reduced)))
    with _numerics.ignore_fp_warnings():
        for i in range(len(reduced)):
            earlier = states[i]
            if problem.weights.log_decay is not None:
                earlier = fade(earlier, total_decay(problem, keys[i])[..., None])
            states[i + 1] = _generic.merge(earlier, states[i + 1])
    plan.run(read, range(len(queries)))
    return states[-1]


def _blocks(segment: slice, plan: Plan) -> Iterator[slice]:
    """Blocks of a segment, counted from its first token."""
    return block_slices(segment.stop - segment.start, plan.block_size)


def _segments(length: int, plan: Plan) -> list[slice]:
    """Segments of whole blocks, as equal as they can be."""
    count = -(-length // plan.block_size)
    edges = [
        min(count * i // plan.segments * plan.block_size, length) for i in range(plan.segments)
    ]
    edges.append(length)
    return [slice(start, stop) for start, stop in pairwise(edges) if start < stop]


# Negative denominators ----------------------------------------------------------------------------

MAX_NEGATIVE_SHARE = 0.01
"""Share of negative denominators that is passed over in silence."""


def inspects_signs(problem: Problem) -> bool:
    """Whether to count negative denominators of this problem.

    Not on CuPy, where it would be a host synchronization, nor in a program of JAX, whose arrays
    have no values; Dask's blocks are problems of their own.
    """
    if not (problem.signed and problem.normalize):
        return False
    arrays = problem.query, problem.key, problem.value
    lazy = array_api_compat.is_cupy_array(arrays[0]) or array_api_compat.is_dask_array(arrays[0])
    return not (lazy or any(map(_arrays.is_staged, arrays)))


def warn_of_signs(is_negative: Array | None) -> None:
    """Warn where many denominators have cancelled: the rows are no averages of the values."""
    if is_negative is None:
        return
    negative = _count(is_negative)
    rows = prod(is_negative.shape)
    if negative > MAX_NEGATIVE_SHARE * rows:
        message = (
            f"{negative} of {rows} denominators are negative: the features take both signs, "
            f"and these rows are no averages of the values; use a positive map, such as "
            f"PositiveFeatures for the softmax or a Gaussian kernel, or more features"
        )
        warnings.warn(message, UserWarning, stacklevel=_arrays.caller_level())


def _count(flags: Array) -> int:
    """Count the True entries; 0 for a traced array, which has no values."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return 0
    xp = _arrays.namespace(flags)
    try:
        return int(xp.sum(xp.astype(flags, xp.int32)))
    except (RuntimeError, TypeError, ValueError):  # of torch, of JAX and of ndonnx
        return 0

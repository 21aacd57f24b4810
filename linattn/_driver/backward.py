"""The driver of gradients: walks over blocks, forwards for queries and backwards for keys.

Everything is computed again from query, key and value; beside the gradients themselves only a
state, and causal three numbers a row or some states of the forward pass, are stored. Block bodies
come from :mod:`linattn._dispatch`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import array_api_compat

from linattn import _arrays, _dispatch, _generic
from linattn._dispatch import BlockFunctions, block_functions
from linattn._driver.blocks import block_slices, raw_tokens, token_block, transient_values_block
from linattn._driver.causal_blocks import MAX_DECLINED_TOKENS
from linattn._driver.checkpoints import MAX_STATES, Checkpoints
from linattn._driver.decay_vjps import decay_gradient, numerator_rows, walk_rows
from linattn._driver.gradient_rows import GradientRows
from linattn._driver.modifiers import decay_of_rows
from linattn._driver.packed import Batch, PackedRows, batches, join_sequences
from linattn._driver.pairs import (
    is_banded,
    keys_of_rows,
    offset_bias,
    rows_of_keys,
    visible_pairs,
)
from linattn._driver.softmax import short_rows, softmax_rows
from linattn._driver.stops import (
    Step,
    head_tasks,
    join_tasks,
    planned,
    states_before,
    steps_of,
)
from linattn._driver.tasks import take, take_problem, take_state, task_index
from linattn._driver.walks import add_keys, initial_state, run_tasks, state_updates
from linattn._driver.wrappers import is_column_normalized, read_spec, read_spec_vjp
from linattn._generic.block_vjps import row_cotangent, row_scale
from linattn._generic.column_means import column_normalized_key_vjp, column_normalized_query_vjp
from linattn._generic.feature_vjps import change_coordinates_vjp, sum_to
from linattn._generic.hierarchical import pad
from linattn._generic.row_vjps import RowBlock, row_keys_vjp, row_queries_vjp, row_read_vjp
from linattn.typing import (
    Array,
    Cotangent,
    Exponential,
    Index,
    Pointwise,
    Problem,
    RowScale,
    State,
    Tokens,
)

__all__ = ["Gradients", "checkpoints_for", "pull"]


class Gradients(NamedTuple):
    """Gradients with the shapes of their arguments; ``state`` is that of ``kvz``, or None."""

    query: Array
    key: Array
    value: Array
    state: Array
    key_bias: Array = None
    """``(..., S, 1)``, or None without a bias."""
    log_decay: Array = None
    """``(..., S, 1)``, or None without a decay."""


class _Walk(NamedTuple):
    """What a walk is given: a task's share of the problem, and where its gradients go."""

    problem: Problem
    cotangent: Cotangent
    functions: BlockFunctions
    block_size: int
    task: Index
    rows: dict[str, GradientRows]
    """By the names that their arguments have in a problem."""

    def query_slices(self) -> list[slice]:
        return list(block_slices(self.problem.query.shape[-2], self.block_size))

    def key_slices(self, keys: slice) -> Iterator[slice]:
        for rows in block_slices(keys.stop - keys.start, self.block_size):
            yield slice(keys.start + rows.start, keys.start + rows.stop)

    def grad_output(self, rows: slice) -> Array:
        grad = self.cotangent.output[..., rows, :]
        return self.problem.xp.astype(grad, self.problem.dtype, copy=False)

    def tokens(self, rows: slice, start: int) -> tuple[Tokens, Tokens, Array]:
        """Return queries, keys and ``[v, 1]`` of a causal block."""
        query = token_block(self.problem, "query", rows, start)
        return query, *self.keys(rows, start)

    def keys(self, rows: slice, start: int) -> tuple[Tokens, Array]:
        key = token_block(self.problem, "key", rows, start)
        return key, transient_values_block(self.problem, rows, self.functions)

    def write_query(self, rows: slice, gradient: Array, term: Array = None) -> None:
        """Pull gradients of queries back to the caller's; ``term``: of a factor on a whole row."""
        affine = self.problem.query_change
        if affine is not None:
            gradient = change_coordinates_vjp(affine, gradient, term)
        self.rows["query"].write(self.task, rows, gradient)

    def write_key(
        self, rows: slice, values_and_one: Array, grad_key: Array, grad_values_and_one: Array
    ) -> None:
        """Pull gradients of keys back to the caller's; those of masked keys are exactly 0."""
        problem, xp = self.problem, self.problem.xp
        gradients = {"key": grad_key, "value": grad_values_and_one[..., :-1]}
        if problem.key_change is not None or problem.key_bias is not None:
            weight = xp.sum(values_and_one * grad_values_and_one, axis=-1, keepdims=True)
            if problem.key_bias is not None:
                gradients["key_bias"] = weight
            if problem.key_change is not None:
                moved = change_coordinates_vjp(problem.key_change, grad_key, weight)
                gradients["key"] = moved
        for name, gradient in gradients.items():
            if problem.key_mask is not None:
                mask = problem.key_mask[..., rows, :]
                gradient = xp.where(mask, gradient, xp.zeros_like(gradient))
            self.rows[name].write(self.task, rows, gradient)

    def last_adjoint(self, state: State, adjoint: State) -> State:
        """Adjoint with what a returned state adds to it."""
        grad_state = self.cotangent.state
        if grad_state is None:
            return adjoint
        return _generic.merge(adjoint, _broadcast(grad_state, adjoint))


def checkpoints_for(problem: Problem) -> Checkpoints | None:
    """Room for checkpoints, where a backend can do a block of this problem as a whole."""
    specs = (problem.query_spec, problem.key_spec)
    one_state = problem.mode == "full" and problem.cu_seqlens is None
    covered = (problem.is_causal or one_state) and problem.normalize and problem.log_decay is None
    if not covered or not all(isinstance(s, Exponential | Pointwise) for s in specs):
        return None
    return None if _dispatch.find("scan_vjp", problem.xp) is None else Checkpoints()


def pull(
    problem: Problem, cotangent: Cotangent, checkpoints: Checkpoints | None = None
) -> Gradients:
    """Gradients of a problem of linear attention; with states of its forward pass at hand."""
    if 0 in problem.lead:
        return _pull_state(problem, cotangent)
    if problem.cu_seqlens is not None:
        return _pull_packed(problem, cotangent, checkpoints)
    if problem.key_stop is not None and problem.key_stop.ndim > 1:
        return _pull_heads(problem, cotangent)
    whole = _dispatch.whole_function("attention_vjp", problem)
    if whole is not None:
        answer: Any = whole(problem, cotangent)
        if not _dispatch.is_declined(answer):
            return Gradients(*answer)

    functions = block_functions(problem.xp)
    # No segments: a causal one needs the adjoint of all after it, and to make that first takes
    # half of what the whole pullback takes. One head alone is done on one thread.
    plan = functions.plan(planned(problem)).for_gradients()
    arguments = _arguments(problem)
    if problem.log_decay is not None and cotangent.state is not None:
        arguments["last_state"] = arguments["log_decay"][..., : min(1, problem.key.shape[-2]), :]
    rows = {name: GradientRows(problem, array, plan.tasks) for name, array in arguments.items()}
    states: list[tuple[Index, Array]] = []

    def pull_task(task: Index) -> Iterator[State | None]:
        part, part_cotangent = take_problem(problem, task), _take_cotangent(cotangent, task)
        walk = _Walk(part, part_cotangent, functions, plan.block_size, task, rows)
        walked: Iterator[State | None]
        by_rows = problem.log_decay is not None or not problem.normalize
        if by_rows and problem.mode != "stops":
            walked = walk_rows(walk)
        elif problem.mode == "causal":
            walked = _walk_causal(walk, checkpoints)
        elif problem.mode == "full":
            walked = _walk_full(walk, None if checkpoints is None else checkpoints.last)
        else:
            walked = {"exact": _walk_exact, "stops": _walk_stops}[problem.mode](walk)
        for adjoint in walked:
            yield adjoint
        if problem.state is not None:
            assert adjoint is not None
            states.append((task, _state_gradient(initial_state(part), adjoint)))

    run_tasks(plan, pull_task)
    state = None if problem.state is None else _join(problem, states)
    found = {name: each.result() for name, each in rows.items()}
    if problem.log_decay is not None:
        last = found.pop("last_state", None)
        found["log_decay"] = decay_gradient(problem.xp, found["log_decay"], last)
    return Gradients(state=state, **found)


def _pull_state(problem: Problem, cotangent: Cotangent) -> Gradients:
    """Gradients where no head of the output is left: what the returned state has seen."""
    xp, device = problem.xp, array_api_compat.device(problem.query)
    if cotangent.state is None or 0 in problem.state_lead:
        state = None if problem.state is None else xp.zeros_like(problem.state.kvz)
        arguments = _arguments(problem)
        return Gradients(state=state, **{k: xp.zeros_like(x) for k, x in arguments.items()})
    # One query in place of none, whose output nobody reads.
    shape = (*problem.state_lead, problem.query.shape[-2], problem.value.shape[-1])
    query = xp.zeros(problem.query.shape[-2:], dtype=problem.query.dtype, device=device)
    unread = xp.zeros(shape, dtype=problem.query.dtype, device=device)
    part = problem.replace(query=query, lead=problem.state_lead)
    found = pull(part, cotangent._replace(output=unread))
    return found._replace(query=xp.zeros_like(problem.query))


def _pull_packed(
    problem: Problem, cotangent: Cotangent, checkpoints: Checkpoints | None
) -> Gradients:
    """Gradients of the sequences of a packed problem."""
    rows = {
        name: PackedRows(problem, tuple(array.shape), array.dtype)
        for name, array in _arguments(problem).items()
    }
    states: list[tuple[Batch, Array]] = []
    for number, batch in enumerate(batches(problem)):
        mask_rest = cotangent.state is not None or not problem.is_causal
        part = batch.problem(problem, mask_rest=mask_rest)
        store = None if checkpoints is None else checkpoints.part(number)
        gradients = pull(part, batch.cotangent(cotangent), store)
        for name, each in rows.items():
            # A backend's may be one number for all tokens: of what is summed in the end.
            each.write(batch, pad(getattr(gradients, name), batch.longest))
        states.append((batch, gradients.state))
    state = None if problem.state is None else join_sequences(problem, states, 2)
    return Gradients(state=state, **{name: each.result() for name, each in rows.items()})


def _pull_heads(problem: Problem, cotangent: Cotangent) -> Gradients:
    """Gradients of heads apart that have other stops."""
    tasks = head_tasks(problem)
    parts = [pull(take_problem(problem, task), _take_cotangent(cotangent, task)) for task in tasks]
    wholes = _arguments(problem)
    if problem.state is not None:
        wholes["state"] = problem.state.kvz
    joined = {
        name: join_tasks(tasks, [getattr(part, name) for part in parts], tuple(x.shape[:-2]))
        for name, x in wholes.items()
    }
    return Gradients(**{"state": None, **joined})


def _arguments(problem: Problem) -> dict[str, Array]:
    """Arrays of a problem that have gradients, but for its state."""
    names = ("query", "key", "value", "key_bias")
    arrays = {name: getattr(problem, name) for name in names}
    if problem.log_decay is not None:
        arrays["log_decay"] = decay_of_rows(problem, slice(0, problem.key.shape[-2]))
    return {name: array for name, array in arrays.items() if array is not None}


def _take_cotangent(cotangent: Cotangent, task: Index) -> Cotangent:
    output, state = cotangent
    if state is not None:
        state = State(take(state.kvz, 2, task), take(state.log_scale, 1, task), 0)
    return Cotangent(take(output, 2, task), state)


# Walks: the adjoint after each block ------------------------------------------------------------


def _walk_full(walk: _Walk, last: State | None) -> Iterator[State]:
    """Let queries read the state of all keys, and the adjoint of all queries read keys.

    ``last``: this state, of all tasks, where the forward pass has kept it.
    """
    problem, functions = walk.problem, walk.functions
    state = before = initial_state(problem)
    if last is not None:
        state = take_state(last, walk.task)
    else:
        for state in state_updates(problem, before, walk.block_size, functions):
            yield state
    query_spec, seen = read_spec(problem, state)
    adjoint = _empty_adjoint(problem, state)
    for rows in walk.query_slices():
        tokens = token_block(problem, "query", rows, before.length)
        gradient, adjoint = functions.read_block_vjp(
            query_spec, tokens, seen, walk.grad_output(rows), adjoint
        )
        walk.write_query(rows, gradient)
        yield adjoint
    adjoint = walk.last_adjoint(state, read_spec_vjp(problem, adjoint, state))
    yield adjoint
    for rows in walk.key_slices(slice(0, problem.key.shape[-2])):
        key, values_and_one = walk.keys(rows, before.length)
        gradients = functions.reduce_block_vjp(problem.key_spec, key, values_and_one, adjoint)
        walk.write_key(rows, values_and_one, *gradients)
        yield adjoint


def _walk_causal(walk: _Walk, checkpoints: Checkpoints | None) -> Iterator[State]:
    """One scan forwards for queries, and one backwards for keys; with checkpoints one for both."""
    problem, functions = walk.problem, walk.functions
    specs = (problem.query_spec, problem.key_spec)
    state = initial_state(problem)
    start = state.length
    adjoint = walk.last_adjoint(state, _empty_adjoint(problem, state))
    yield adjoint
    if is_column_normalized(problem):
        yield from _walk_column_normalized(walk, state, adjoint)
        return
    all_rows = walk.query_slices()
    if checkpoints is not None:
        yield from _walk_back(walk, checkpoints.segments(walk.task, all_rows, state), adjoint)
        return
    scales: list[RowScale] = []
    for rows in all_rows:
        block = (*specs, *walk.tokens(rows, start))
        gradient, scale, state = functions.scan_query_vjp(*block, state, walk.grad_output(rows))
        walk.write_query(rows, gradient)
        scales.append(scale)
        yield adjoint
    for rows in reversed(all_rows):
        tokens, scale = walk.tokens(rows, start), scales.pop()
        grad_num_den = row_cotangent(scale, walk.grad_output(rows))
        *gradients, adjoint = functions.scan_key_vjp(
            *specs, *tokens, adjoint, grad_num_den, scale.log
        )
        walk.write_key(rows, tokens[2], *gradients)
        yield adjoint


def _walk_back(
    walk: _Walk, segments: list[tuple[State, list[slice]]], adjoint: State
) -> Iterator[State]:
    """Pull back through queries and keys of a block at once, from the last block to the first.

    ``segments``: blocks, and the state before the first of each. A long one is cut again.
    """
    problem, functions = walk.problem, walk.functions
    start = initial_state(problem).length
    for first, all_rows in reversed(segments):
        count = -(-len(all_rows) // MAX_STATES)
        parts = [all_rows[i : i + count] for i in range(0, len(all_rows), count)]
        states = [first]
        for part in parts[:-1]:
            state = states[-1]
            for rows in part:
                block = walk.keys(rows, start)
                state = functions.reduce_block(problem.key_spec, *block, state)
            states.append(state)
        if count > 1:
            walked = _walk_back(walk, list(zip(states, parts, strict=True)), adjoint)
            for adjoint in walked:
                yield adjoint
        else:
            for rows in reversed(all_rows):
                adjoint = _pull_block(walk, rows, start, states.pop(), adjoint)
                yield adjoint


def _walk_stops(walk: _Walk) -> Iterator[State]:
    """Pull back through the steps of visible prefixes, from the last to the first."""
    problem, functions = walk.problem, walk.functions
    state = initial_state(problem)
    start = state.length
    adjoint = walk.last_adjoint(state, _empty_adjoint(problem, state))
    yield adjoint

    def add(step: Step, state: State) -> State:
        return add_keys(problem, functions, step, state, start)

    all_steps = list(steps_of(problem, walk.block_size))
    for step, before in states_before(all_steps, state, add) if all_steps else ():
        part = step.problem(problem)
        everything = slice(0, None)
        if step.num_queries:
            query = token_block(part, "query", everything, start + step.queries.start)
            grad_output = step.place_queries(walk.grad_output(step.queries))
        if step.num_keys:
            key = token_block(part, "key", everything, start + step.keys.start)
            values_and_one = transient_values_block(part, everything, functions)
        if not step.num_keys:
            of_query, adjoint = _read_vjp(walk, query, before, grad_output, adjoint)
        elif not step.num_queries:
            gradients = functions.reduce_block_vjp(problem.key_spec, key, values_and_one, adjoint)
        else:
            of_query, *gradients, adjoint = _scan_vjp(
                walk, (query, key, values_and_one), before, adjoint, grad_output
            )
        if step.num_queries:
            walk.write_query(step.queries, *map(step.queries_of, of_query))
        if step.num_keys:
            rows = (step.keys_of(x) for x in (values_and_one, *gradients))
            walk.write_key(step.keys, *rows)
        yield adjoint


def _read_vjp(
    walk: _Walk, query: Tokens, state: State, grad_output: Array, adjoint: State
) -> tuple[tuple[Array, ...], State]:
    """Gradient of queries that read a state, as it is written, and the adjoint with them."""
    problem = walk.problem
    if not problem.normalize:
        of_numerators = numerator_rows(problem, grad_output)
        *of_query, adjoint = row_read_vjp(problem.query_spec, query, of_numerators, state, adjoint)
        return tuple(of_query), adjoint
    query_spec, seen = read_spec(problem, state)
    nothing = _empty_adjoint(problem, state)
    gradient, read = walk.functions.read_block_vjp(query_spec, query, seen, grad_output, nothing)
    return (gradient,), _generic.merge(adjoint, read_spec_vjp(problem, read, state))


def _scan_vjp(
    walk: _Walk,
    block: tuple[Tokens, Tokens, Array],
    state: State,
    adjoint: State,
    grad_output: Array,
) -> tuple[tuple[Array, ...], Array, Array, State]:
    """Gradients of a causal block by queries, keys and ``[v, 1]``, and the adjoint before it."""
    problem = walk.problem
    specs = (problem.query_spec, problem.key_spec)
    if not problem.normalize:
        rows = RowBlock(specs, *block, numerator_rows(problem, grad_output))
        *of_query, _, _ = row_queries_vjp(rows, state)
        grad_key, grad_values_and_one, _, adjoint = row_keys_vjp(rows, adjoint)
        return tuple(of_query), grad_key, grad_values_and_one, adjoint
    if is_column_normalized(problem):
        gradient = column_normalized_query_vjp(*specs, *block, state, grad_output)
        return (gradient,), *column_normalized_key_vjp(*specs, *block, state, adjoint, grad_output)
    gradient, *rest = walk.functions.scan_vjp(*specs, *block, state, adjoint, grad_output)
    return (gradient,), *rest


def _pull_block(walk: _Walk, rows: slice, start: int, state: State, adjoint: State) -> State:
    """Write the gradients of a block after ``state``, and return the adjoint before it.

    A long one that a backend declines is done as two: what it declines costs the square.
    """
    problem, functions, n = walk.problem, walk.functions, rows.stop - rows.start
    query, key, values_and_one = walk.tokens(rows, start)
    block = (problem.query_spec, problem.key_spec, query, key, values_and_one)
    arguments = (*block, state, adjoint, walk.grad_output(rows))
    scan_vjp: Any = functions.scan_vjp
    if n > MAX_DECLINED_TOKENS and problem.lead == problem.state_lead:
        scan_vjp = functions.backend_alone("scan_vjp")
    answer = scan_vjp(*arguments)
    if _dispatch.is_declined(answer):
        middle = rows.start + n // 2
        first, last = slice(rows.start, middle), slice(middle, rows.stop)
        before_last = functions.reduce_block(problem.key_spec, *walk.keys(first, start), state)
        adjoint = _pull_block(walk, last, start, before_last, adjoint)
        return _pull_block(walk, first, start, state, adjoint)
    gradient, *gradients, adjoint = answer
    walk.write_query(rows, gradient)
    walk.write_key(rows, values_and_one, *gradients)
    return adjoint


def _walk_column_normalized(walk: _Walk, state: State, adjoint: State) -> Iterator[State]:
    """As :func:`_walk_causal`, for column-normalized reads: stores the state before each block."""
    problem = walk.problem
    specs = (problem.query_spec, problem.key_spec)
    start = state.length
    before: list[State] = []
    all_rows = walk.query_slices()
    for rows in all_rows:
        tokens = walk.tokens(rows, start)
        gradient = column_normalized_query_vjp(*specs, *tokens, state, walk.grad_output(rows))
        walk.rows["query"].write(walk.task, rows, gradient)
        before.append(state)
        state = walk.functions.reduce_block(problem.key_spec, *tokens[1:], state)
        yield adjoint
    for rows in reversed(all_rows):
        tokens = walk.tokens(rows, start)
        *gradients, adjoint = column_normalized_key_vjp(
            *specs, *tokens, before.pop(), adjoint, walk.grad_output(rows)
        )
        walk.write_key(rows, tokens[2], *gradients)
        yield adjoint


def _walk_exact(walk: _Walk) -> Iterator[None]:
    """Softmax attention: every query reads its keys again, then every key its queries."""
    problem, functions = walk.problem, walk.functions
    xp, spec, lead = problem.xp, problem.query_spec, problem.state_lead
    walk = walk._replace(block_size=short_rows(problem, walk.block_size))
    all_rows = walk.query_slices()
    scales = yield from _row_scales(walk, all_rows)
    for rows, scale in zip(all_rows, scales, strict=True):
        query = raw_tokens(problem, "query", rows, 0)
        grad_num_den = row_cotangent(scale, walk.grad_output(rows))
        gradient = xp.zeros_like(query.x)
        for keys in walk.key_slices(keys_of_rows(problem, rows)):
            block = (*_raw_keys(walk, keys), grad_num_den)
            pairs = _pair_logs(problem, rows, keys, scale)
            gradient = gradient + functions.exact_query_vjp(spec, query, *block, *pairs)
        walk.rows["query"].write(walk.task, rows, gradient)
        yield
    for keys in walk.key_slices(slice(0, problem.key.shape[-2])):
        key, values_and_one = _raw_keys(walk, keys)
        gradients = [xp.zeros_like(key.x), xp.zeros_like(values_and_one)]
        seen_by = rows_of_keys(problem, keys)
        for rows, scale in zip(all_rows, scales, strict=True):
            if rows.stop <= seen_by.start or rows.start >= seen_by.stop:
                continue
            grad_num_den = row_cotangent(scale, walk.grad_output(rows))
            query, pairs = (
                raw_tokens(problem, "query", rows, 0),
                _pair_logs(problem, rows, keys, scale),
            )
            more = functions.exact_key_vjp(spec, query, key, values_and_one, grad_num_den, *pairs)
            gradients = [x + sum_to(y, lead, 2) for x, y in zip(gradients, more, strict=True)]
        walk.write_key(keys, values_and_one, *gradients)
        yield


def _row_scales(walk: _Walk, all_rows: list[slice]) -> Generator[None, None, list[RowScale]]:
    """Scales of all rows of softmax attention, block by block."""
    problem, functions, scales = walk.problem, walk.functions, []
    for rows, part in softmax_rows(problem, walk.block_size, functions):
        scales.append(row_scale(part, walk.grad_output(rows)))
        yield
    if not is_banded(problem):
        return scales
    numbers = [problem.xp.concat(list(each), axis=-2) for each in zip(*scales, strict=True)]
    return [RowScale(*(each[..., rows, :] for each in numbers)) for rows in all_rows]


def _raw_keys(walk: _Walk, rows: slice) -> tuple[Tokens, Array]:
    values_and_one = transient_values_block(walk.problem, rows, walk.functions)
    return raw_tokens(walk.problem, "key", rows, 0), values_and_one


def _pair_logs(problem: Problem, rows: slice, keys: slice, scale: RowScale) -> tuple[Array, Array]:
    """Log scale of a block's pairs, their bias taken off, and which of them count, None for all."""
    log, bias = scale.log, offset_bias(problem, rows, keys)
    log = log if bias is None else log - bias
    return log, visible_pairs(problem, rows, keys)


# States -----------------------------------------------------------------------------------------


def _empty_adjoint(problem: Problem, like: State) -> State:
    m, e = problem.num_features, problem.value.shape[-1]
    return _generic.empty_state(problem.state_lead, m, e, like.kvz)


def _broadcast(state: State, like: State) -> State:
    xp = _arrays.namespace(like.kvz)
    kvz = xp.broadcast_to(state.kvz, tuple(like.kvz.shape))
    return State(kvz, xp.broadcast_to(state.log_scale, tuple(like.log_scale.shape)), 0)


def _state_gradient(before: State, adjoint: State) -> Array:
    """Cotangent of a state's ``kvz``, its log scale held constant."""
    xp = _arrays.namespace(adjoint.kvz)
    return adjoint.kvz * xp.exp(adjoint.log_scale + before.log_scale)[..., None]


def _join(problem: Problem, states: list[tuple[Index, Array]]) -> Array:
    """Put the state gradients of all tasks together, with the shape of the caller's state."""
    assert problem.state is not None
    lead = tuple(problem.state.kvz.shape[:-2])
    if len(states) == 1:
        return sum_to(states[0][1], lead, 2)
    whole = _empty_adjoint(problem, problem.state).kvz
    for task, gradient in states:
        whole[task_index(tuple(whole.shape), 2, task)] = gradient
    return sum_to(whole, lead, 2)

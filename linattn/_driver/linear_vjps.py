"""The pullback of linear attention: steps from the last to the first, each with the state before.

Queries of a step read that state, and keys the adjoint of the queries after them: features of a
step are made once for both. A weight has the decay ``exp(A_i - A_j)``, A_t the sum of log decays up
to token t. So the gradient of a log decay is a sum over its token and all later tokens. The terms
are the gradient by a log factor on the token's row, minus the gradient by one on its key.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from linattn import _dispatch, _generic
from linattn._driver.blocks import (
    OutputRows,
    add_block,
    decay_of_rows,
    key_block,
    token_block,
    values_and_one_block,
)
from linattn._driver.causal_blocks import MAX_DECLINED_TOKENS, causal_block, flip
from linattn._driver.gradient_rows import Checkpoints, GradientWalk, empty_adjoint, states_before
from linattn._driver.specs import is_column_normalized, read_spec, read_spec_vjp
from linattn._driver.walks import WALKS, Step, Walk, initial_state, steps_of
from linattn._generic.block_vjps import (
    Rows,
    divided_rows,
    numerator_rows,
    read_rows_vjp,
    row_cotangent,
    row_scale,
)
from linattn._generic.causal_vjps import CausalBlock
from linattn._generic.column_means import column_normalized_vjp
from linattn._generic.decay import decay_until, fade, weighed
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Array, Partial, RowScale, State, Tokens

MAX_ROWS = 128
"""Tokens of a causal block that is done by divide and conquer, from the cotangents of its rows."""


def pull_linear(walk: GradientWalk, checkpoints: Checkpoints | None) -> Iterator[State]:
    """Pull linear attention back; yield the adjoint after each step, last the first state's."""
    problem = walk.problem
    if problem.weights.log_decay is not None or not problem.normalize:
        # Rows are read on the true scale.
        size = walk.block_size if problem.mode == "full" else min(walk.block_size, MAX_ROWS)
        walk = walk._replace(problem=problem.replace(want_log=True), block_size=size)
    if problem.mode != "two-sided":
        yield from Scan(walk).walk_back(checkpoints)
        return
    numbers = yield from row_numbers(walk)
    # The scan from the start comes last: its adjoint belongs to the initial state.
    yield from Scan(walk, numbers, from_the_end=True).walk_back(None)
    yield from Scan(walk._replace(share=1), numbers).walk_back(None)


def row_numbers(walk: GradientWalk) -> Generator[Any, None, Array]:
    """Log, inverse and inner product of every row's scale, ``(..., L, 3)``; None if not divided."""
    problem = walk.problem
    if not problem.normalize:
        return None
    numbers = OutputRows(problem, 3, problem.dtype, walk.functions)

    def write(rows: slice, part: Partial) -> None:
        scale = row_scale(part, walk.grad_output(rows))
        numbers.write((), rows, problem.xp.concat(list(scale), axis=-1))

    yield from WALKS[problem.mode](Walk(problem, walk.functions, walk.block_size, write))
    return numbers.result()


def given_rows(walk: GradientWalk, rows: slice, numbers: Array) -> Rows:
    """Cotangents of rows; ``numbers`` are from :func:`row_numbers`, None if nothing is divided."""
    grad_output = walk.grad_output(rows)
    if numbers is None:
        return numerator_rows(grad_output)
    scale = RowScale(*(numbers[..., rows, i : i + 1] for i in range(3)))
    # A factor on the features of a query changes its far keys beside its near ones.
    divided = walk.problem.exact.window is None
    return Rows(row_cotangent(scale, grad_output), scale.log, divided)


class Scan(NamedTuple):
    """One direction in which queries read keys."""

    walk: GradientWalk
    numbers: Array = None
    """Scales of rows from :func:`row_numbers`, if rows also read outside of this scan."""
    from_the_end: bool = False
    steps: list[Step] | None = None
    """In the order of the scan; None for the usual steps of the problem's mode."""
    far_bias: Array = None
    """``(..., 1)``: log weight of all keys, or None."""

    def walk_back(self, checkpoints: Checkpoints | None) -> Iterator[State]:
        """Pull back through all steps; the adjoint after each."""
        walk = self.walk
        state = self._first_state()
        steps = self._steps() if self.steps is None else self.steps
        adjoint = empty_adjoint(walk.problem, state)
        if not self.from_the_end:
            adjoint = walk.last_adjoint(adjoint)
        yield adjoint
        segments = [(state, steps)]
        if checkpoints is not None:
            segments = checkpoints.segments(walk.task, steps, state)
        is_last = "last_state" in walk.rows and not self.from_the_end
        for first, run in reversed(segments):
            for step, before in states_before(run, first, self._add):
                if is_last:
                    self._write_last_state(self._add(step, before))
                    is_last = False
                adjoint = self._pull(step, before, adjoint)
                yield adjoint

    def _first_state(self) -> State:
        problem = self.walk.problem
        return initial_state(problem.replace(state=None) if self.from_the_end else problem)

    def _start(self) -> int:
        """Position of the first key."""
        state = self.walk.problem.state
        return 0 if state is None else state.length

    def _steps(self) -> list[Step]:
        """Return steps in the order of the scan."""
        problem, none = self.walk.problem, slice(0, 0)
        queries = self.walk.query_slices()
        if problem.mode == "stops":
            return list(steps_of(problem, self.walk.block_size))
        if problem.mode == "full":
            keys = self.walk.key_slices(slice(0, problem.key.shape[-2]))
            # Queries that read one state may have any order: adjoints add up from the first.
            readers = [Step(none, rows) for rows in reversed(queries)]
            return [Step(rows, none) for rows in keys] + readers
        return [Step(rows, rows) for rows in (reversed(queries) if self.from_the_end else queries)]

    def _add(self, step: Step, state: State) -> State:
        """Add the keys of a step to a state."""
        problem, rows = self.walk.problem, step.keys
        if not step.num_keys:
            return state
        key = token_block(problem, "key", rows, self._start())
        if problem.weights.log_decay is not None:
            decay = decay_of_rows(problem, rows)
            until = decay_until(decay)
            if self.from_the_end:
                until = flip(decay_until(flip(decay)))
            key, state = weighed(key, until), fade(state, problem.xp.sum(decay, axis=-2))
        return add_block(problem, rows, key, state, self.walk.functions)

    def _tokens(self, step: Step) -> tuple[Any, Any, Array]:
        """Return queries, keys and ``[v, 1]`` of a step; None for a side that it lacks."""
        problem, start = self.walk.problem, self._start()
        queries, keys, of_queries, of_keys = step.queries, step.keys, start, start
        if step.positions is not None:
            problem, queries, keys = step.problem(problem), slice(0, None), slice(0, None)
            of_queries, of_keys = start + step.queries.start, start + step.keys.start
        query = token_block(problem, "query", queries, of_queries) if step.num_queries else None
        if not step.num_keys:
            return query, None, None
        values_and_one = values_and_one_block(problem, keys)
        return query, key_block(problem, keys, of_keys), values_and_one

    def _pull(self, step: Step, state: State, adjoint: State) -> State:
        """Write the gradients of a step after a state, and return the adjoint before it."""
        walk, (query, key, values_and_one) = self.walk, self._tokens(step)
        if not step.num_queries:
            gradients = walk.functions.reduce_block_vjp(
                walk.problem.key_spec, key, values_and_one, adjoint
            )
            walk.write_key(step.keys, values_and_one, *gradients)
            return adjoint
        grad_output = step.place_queries(walk.grad_output(step.queries))
        if not step.num_keys:
            rows = self._rows(step, grad_output)
            of_query, adjoint = _pull_read(walk, query, state, rows, grad_output, adjoint)
            walk.write_query(step.queries, *of_query)
            return adjoint
        block = query, key, values_and_one
        rows = self._rows(step, grad_output)
        if walk.problem.weights.log_decay is not None and rows is None:
            part, _ = causal_block(walk.problem, walk.functions, *block, state)
            rows = divided_rows(part, grad_output)
        if rows is not None:
            return self._pull_rows(step, block, rows, state, adjoint)
        answer = _scan_vjp(walk, step, block, state, adjoint, grad_output)
        if _dispatch.is_declined(answer):
            first, last = _halves(step)
            adjoint = self._pull(last, self._add(first, state), adjoint)
            return self._pull(first, state, adjoint)
        gradient, *gradients, adjoint = answer
        walk.write_query(step.queries, step.queries_of(gradient))
        walk.write_key(step.keys, *map(step.keys_of, (values_and_one, *gradients)))
        return adjoint

    def _rows(self, step: Step, grad_output: Array) -> Rows | None:
        """Cotangents of rows; None if the rows read only here, so that the block finds them."""
        if not self.walk.problem.normalize:
            rows = numerator_rows(grad_output)
        elif self.numbers is not None:
            rows = given_rows(self.walk, step.queries, self.numbers)
        else:
            return None
        return (
            rows
            if self.far_bias is None
            else rows._replace(log=rows.log - self.far_bias[..., None])
        )

    def _pull_rows(
        self,
        step: Step,
        block: tuple[Tokens, Tokens, Array],
        rows: Rows,
        state: State,
        adjoint: State,
    ) -> State:
        """Pull back through rows of a causal block, and write the gradient of its decay."""
        walk, problem = self.walk, self.walk.problem
        specs, flipped = (problem.query_spec, problem.key_spec), self.from_the_end
        found = CausalBlock(specs, *block, from_the_end=flipped).pull(rows, state, adjoint)
        of_query = (x if x is None else step.queries_of(x) for x in (found.query, found.term))
        walk.write_query(step.queries, *of_query)
        gradients = block[-1], found.key, found.values_and_one
        walk.write_key(step.keys, *map(step.keys_of, gradients))
        if problem.weights.log_decay is not None:
            of_rows, of_keys = found.decayed
            change = sum_to(of_rows, problem.state_lead, 2) - of_keys
            walk.write("log_decay", step.keys, -change if self.from_the_end else change)
        return found.adjoint

    def _write_last_state(self, state: State) -> None:
        """Write the gradient by the log of a factor on the returned state."""
        walk, xp = self.walk, self.walk.problem.xp
        grad_state = walk.cotangent.state
        assert grad_state is not None
        scale = xp.exp(state.log_scale + grad_state.log_scale)
        change = xp.sum(xp.sum(grad_state.kvz * state.kvz, axis=-1) * scale, axis=-1)
        walk.rows["last_state"].write(walk.task, slice(0, 1), change[..., None, None])


def _halves(step: Step) -> tuple[Step, Step]:
    """Cut a step of keys and queries along each other."""
    n = step.num_queries // 2
    keys, queries = step.keys.start + n, step.queries.start + n
    first = Step(slice(step.keys.start, keys), slice(step.queries.start, queries))
    return first, Step(slice(keys, step.keys.stop), slice(queries, step.queries.stop))


def _scan_vjp(
    walk: GradientWalk,
    step: Step,
    block: tuple[Tokens, Tokens, Array],
    state: State,
    adjoint: State,
    grad_output: Array,
) -> Any:
    """Gradients of a causal block by queries, keys and ``[v, 1]``, and the adjoint before it.

    NotImplemented if the backend declines a long block: the generic code takes time and memory
    with the square of its length, so the caller cuts it in two.
    """
    problem = walk.problem
    arguments = (problem.query_spec, problem.key_spec, *block, state, adjoint, grad_output)
    if is_column_normalized(problem):
        return column_normalized_vjp(*arguments)
    is_long = step.num_queries > MAX_DECLINED_TOKENS and step.positions is None
    if not (is_long and problem.lead == problem.state_lead):
        return walk.functions.scan_vjp(*arguments)
    scan_vjp = walk.functions.backend_alone("scan_vjp")
    return NotImplemented if scan_vjp is None else scan_vjp(*arguments)


def _pull_read(
    walk: GradientWalk,
    query: Tokens,
    state: State,
    rows: Rows | None,
    grad_output: Array,
    adjoint: State,
) -> tuple[tuple[Array, ...], State]:
    """Arguments of ``write_query`` for queries that read a state, and the adjoint before it."""
    problem = walk.problem
    if rows is not None:
        *of_query, adjoint = read_rows_vjp(problem.query_spec, query, rows, state, adjoint)
        return tuple(of_query), adjoint
    query_spec, seen = read_spec(problem, state)
    if seen is state:
        gradient, adjoint = walk.functions.read_block_vjp(
            query_spec, query, seen, grad_output, adjoint
        )
        return (gradient,), adjoint
    nothing = empty_adjoint(problem, state)
    gradient, read = walk.functions.read_block_vjp(query_spec, query, seen, grad_output, nothing)
    return (gradient,), _generic.merge(adjoint, read_spec_vjp(problem, read, state))


def decay_gradient(xp: Any, terms: Array, last: Array | None) -> Array:
    """Gradient of each token's log decay, ``(..., S, 1)``, from its terms and the last state's."""
    later = xp.flip(xp.cumulative_sum(xp.flip(terms, axis=-2), axis=-2), axis=-2)
    return later if last is None else later + last

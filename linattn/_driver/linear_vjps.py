"""The pullback of lines: their steps from the last to the first, each with the state before.

Queries of a step read that state, and keys the adjoint of the queries after them: features of a
step are made once for both. A weight has the decay ``exp(A_i - A_j)``, A_t the sum of log decays up
to token t, so its log has the gradient of A at the query, and minus it at the key. Where rows read
several parts, a forward pass finds the scale of every row first; each part is pulled back alone.

`backward` calls `pull_linear` for problems of one line, and `pair_vjps` `pull_lines` for others.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

from linattn import _dispatch, _generic
from linattn._driver.blocks import OutputRows, block_slices, token_block, values_and_one_block
from linattn._driver.causal_blocks import MAX_DECLINED_TOKENS
from linattn._driver.gradient_rows import Checkpoints, Held, Pullback, empty_adjoint
from linattn._driver.lines import Line, flip
from linattn._driver.runner import Run, initial_state, run
from linattn._driver.specs import is_column_normalized, read_spec, read_spec_vjp
from linattn._driver.steps import Step, states_before
from linattn._driver.stops import Stops, stops_of
from linattn._generic.block_vjps import (
    Rows,
    divided_rows,
    inner_products,
    numerator_rows,
    read_rows_vjp,
    row_cotangent,
    row_scale,
)
from linattn._generic.causal_vjps import BlockPullback
from linattn._generic.column_means import column_normalized_vjp
from linattn._generic.decay import near_one
from linattn.typing import Array, Partial, Problem, RowScale, State, Tokens

MAX_PULLED = 128
"""Tokens of a causal block that is done by divide and conquer, from the cotangents of its rows."""

ROWS_AT_ONCE = 1024
"""Queries whose stops are held together."""

MIN_RUN = 9
"""As in `steps`: below it positions cost less than small steps, in divide and conquer too."""


def pull_linear(pull: Pullback, checkpoints: Checkpoints | None) -> Iterator[State]:
    """Pull a line back; yield the adjoint after each step, last the first state's."""
    problem = pull.problem
    if problem.weights.log_decay is not None or not problem.normalize:
        # Rows are read on the true scale.
        size = pull.block_size if problem.mode == "full" else min(pull.block_size, MAX_PULLED)
        pull = pull._replace(problem=problem.replace(want_log=True), block_size=size)
    state = initial_state(problem)
    line = Line(pull.problem, pull.functions, state.length)
    steps = list(line.steps(problem.sees.key_stop, pull.block_size))
    segments = [(state, steps)]
    if checkpoints is not None:
        segments = checkpoints.segments(pull.task, steps, state)
    yield from LinePullback(pull, line).back(segments, pull.last_adjoint(state))


def row_numbers(pull: Pullback) -> Generator[Any, None, Array]:
    """Log, inverse and inner product of every row's scale, ``(..., L, 3)``; None if not divided."""
    problem = pull.problem
    if not problem.normalize:
        return None
    numbers = OutputRows(problem, 3, problem.dtype, pull.functions)

    def write(rows: slice, part: Partial) -> None:
        scale = row_scale(part, pull.grad_output(rows))
        numbers.write((), rows, problem.xp.concat(list(scale), axis=-1))

    yield from run(Run(problem, pull.functions, pull.block_size, write))
    return numbers.result()


def given_rows(pull: Pullback, rows: slice, numbers: Array) -> Rows:
    """Cotangents of rows; ``numbers`` are from :func:`row_numbers`, None if nothing is divided."""
    grad_output = pull.grad_output(rows)
    if numbers is None:
        return numerator_rows(grad_output)
    scale = RowScale(*(numbers[..., rows, i : i + 1] for i in range(3)))
    # A factor on the features of a query changes this part of its row beside the others.
    return Rows(row_cotangent(scale, grad_output), scale.log, divided=False)


def pull_lines(pull: Pullback, numbers: Array) -> Iterator[State]:
    """Pull back all lines of rows that read several parts; last the one with the first state.

    ``numbers`` of :func:`row_numbers`.
    """
    problem = pull.problem
    stops, state = stops_of(problem), initial_state(problem)
    bias, left, right = problem.weights.relative_bias, None, None
    if bias is not None:
        left, right = bias.table[..., None, :1], bias.table[..., None, -1:]
    nothing = initial_state(problem.replace(state=None))
    size = min(pull.block_size, MAX_PULLED)

    def back(line: Line, steps: Iterable[Step], first: State, adjoint: State) -> Iterator[State]:
        return LinePullback(pull, line, numbers).back([(first, list(steps))], adjoint)

    for rows, pivot in stops.runs_ahead():
        _, rights, ends = stops.of(rows)
        keys, end = slice(int(rights[0]), pivot), int(ends[-1])
        line = Line(problem, pull.functions, state.length, True, right)
        steps = line.steps((pivot - rights)[::-1], size, keys=keys, queries=rows, min_run=MIN_RUN)
        yield from back(line, steps, nothing, empty_adjoint(problem, nothing))
        if end > pivot:
            line = line._replace(reverse=False)
            steps = line.steps(
                ends - pivot, size, keys=slice(pivot, end), queries=rows, min_run=MIN_RUN
            )
            yield from back(line, steps, nothing, empty_adjoint(problem, nothing))
    line = Line(problem, pull.functions, state.length, bias=left)
    yield from back(line, _left_steps(line, stops, size), state, pull.last_adjoint(state))


def _left_steps(line: Line, stops: Stops, size: int) -> Iterator[Step]:
    """Yield the steps of all queries; the numbers of some at a time are held."""
    key, num_keys = 0, line.problem.key.shape[-2]
    for rows in block_slices(stops.length, ROWS_AT_ONCE):
        left = stops.of(rows).left
        keys = slice(key, int(left[-1]))
        yield from line.steps(left - key, size, keys=keys, queries=rows, min_run=MIN_RUN)
        key = keys.stop
    for part in block_slices(num_keys - key, size):
        none = slice(stops.length, stops.length)
        yield Step(slice(key + part.start, key + part.stop), none)


class LinePullback(NamedTuple):
    """A line that is pulled back."""

    pull: Pullback
    line: Line
    numbers: Array = None
    """Scales of rows from :func:`row_numbers`, if rows also read outside of this line."""

    def back(self, segments: list[tuple[State, list[Step]]], adjoint: State) -> Iterator[State]:
        """Pull back through all steps; yield the adjoint after the last, then before each.

        ``segments``: runs of steps, each with the state before it.
        """
        yield adjoint
        decays = self.line.problem.weights.log_decay is not None
        is_last = decays and not self.line.reverse and self.pull.cotangent.state is not None
        for first, steps in reversed(segments):
            found = states_before(steps, first, self._after)
            if not any(step.num_queries for step in steps) and not is_last:
                # No state is needed.
                found = zip(reversed(steps), repeat(first), strict=False)
            for step, before in found:
                if is_last:
                    self.write_last(self._after(step, before), adjoint)
                    is_last = False
                adjoint = self._back(step, before, adjoint)
                yield adjoint

    def _after(self, step: Step, state: State) -> State:
        return self.line.add(step.keys, state) if step.num_keys else state

    def _back(self, step: Step, state: State, adjoint: State) -> State:
        """Write the gradients of a step after a state, and return the adjoint before it."""
        if not step.num_queries:
            return self.pull_keys(step.keys, adjoint)
        rows = self._rows(step)
        if not step.num_keys:
            return self._read(step, rows, state, adjoint)
        if rows is None and self.line.problem.weights.log_decay is not None:
            part, _ = self.line.scan(step, state)
            rows = divided_rows(part, self.pull.grad_output(step.queries))
        if rows is None:
            return self._block(step, state, adjoint)
        return self._block_of_rows(step, rows, state, adjoint)

    def _rows(self, step: Step) -> Rows | None:
        """Cotangents of rows; None if the rows read only here, so that the step finds them."""
        if self.numbers is None and self.line.problem.normalize:
            return None
        rows = given_rows(self.pull, step.queries, self.numbers)
        log = self.line.log_weight(step)
        if log is None:
            return rows
        xp = self.line.problem.xp
        return rows._replace(log=xp.astype(rows.log - log, rows.log.dtype, copy=False))

    def pull_keys(self, keys: slice, adjoint: State) -> State:
        """Let keys read the adjoint of all rows after them; return it as it was before them."""
        line = self.line
        tokens, values = line.keys_at_end(keys), values_and_one_block(line.problem, keys)
        vjp = self.pull.functions.reduce_block_vjp
        of_key, of_values = vjp(line.problem.key_spec, tokens, values, adjoint)
        self.pull.write_key(keys, values, of_key, of_values)
        self._write_times(keys, of_keys=inner_products(values, of_values))
        return line.faded(keys, adjoint)

    def _read(self, step: Step, rows: Rows | None, state: State, adjoint: State) -> State:
        """Pull back queries that read a state."""
        problem, pull = self.line.problem, self.pull
        query = token_block(problem, "query", step.queries, self.line.start)
        spec, seen = read_spec(problem, state)
        before = adjoint if seen is state else empty_adjoint(problem, state)
        if rows is None:
            grad = pull.grad_output(step.queries)
            of_query, before = pull.functions.read_block_vjp(spec, query, seen, grad, before)
            pull.write_query(step.queries, of_query)
        else:
            of_query, term, before = self._read_rows(spec, query, rows, seen, before)
            pull.write_query(step.queries, of_query, term)
            self._write_times(step.queries, of_rows=term)
        if seen is state:
            return before
        return _generic.merge(adjoint, read_spec_vjp(problem, before, state))

    def _read_rows(
        self, spec: Any, query: Tokens, rows: Rows, state: State, adjoint: State
    ) -> tuple[Array, Array, State]:
        """Pull rows back that read a state; a decayed one near 1, where logs keep digits."""
        if self.line.problem.weights.log_decay is None:
            return read_rows_vjp(spec, query, rows, state, adjoint)
        close, top = near_one(state)
        nothing = empty_adjoint(self.line.problem, state)
        moved = rows._replace(log=rows.log - top)
        of_query, term, of_state = read_rows_vjp(spec, query, moved, close, nothing)
        of_state = of_state._replace(log_scale=of_state.log_scale - top[..., 0])
        return of_query, term, _generic.merge(adjoint, of_state)

    def _block(self, step: Step, state: State, adjoint: State) -> State:
        """Pull back a causal block that finds the cotangents of its rows."""
        pull, line = self.pull, self.line
        block = line.block(step)
        grad_output = step.place_queries(pull.grad_output(step.queries))
        answer = _scan_vjp(pull, step, block, state, adjoint, grad_output)
        if _dispatch.is_declined(answer):
            return self._halves(step, state, adjoint)
        of_query, *of_keys, adjoint = answer
        pull.write_query(step.queries, step.queries_of(of_query))
        pull.write_key(step.keys, *map(step.keys_of, (block[-1], *of_keys)))
        return adjoint

    def _halves(self, step: Step, state: State, adjoint: State) -> State:
        """Pull back a step in two, and write its rows once."""
        pull, (first, last) = self.pull, step.halves()
        held = {name: Held(self.line.problem.xp) for name in pull.rows}
        inner = self._replace(pull=pull._replace(rows=held))
        adjoint = inner._back(last, self.line.add(first.keys, state), adjoint)
        adjoint = inner._back(first, state, adjoint)
        for name, parts in held.items():
            pull.write(name, step.queries if name == "query" else step.keys, parts.result())
        return adjoint

    def _block_of_rows(self, step: Step, rows: Rows, state: State, adjoint: State) -> State:
        """Pull back a causal block, from the cotangents of its rows."""
        pull, line = self.pull, self.line
        problem, (query, key, values) = line.in_order(), line.block(step)
        specs = problem.query_spec, problem.key_spec

        def turned(x: Array) -> Array:
            return flip(x) if line.reverse else x

        rows = rows._replace(
            g1=step.place_queries(turned(rows.g1)),
            log=step.place_queries(turned(rows.log), float("inf")),
        )
        found = BlockPullback(specs, query, key, values).pull(rows, state, adjoint)

        def of_queries(x: Array) -> Array:
            return None if x is None else turned(step.queries_of(x))

        def of_keys(x: Array) -> Array:
            return turned(step.keys_of(x))

        pull.write_query(step.queries, of_queries(found.query), of_queries(found.term))
        gradients = values, found.key, found.values_and_one
        pull.write_key(step.keys, *map(of_keys, gradients))
        if problem.weights.log_decay is not None:
            times = found.decayed
            if line.elapsed(step) is not None:
                times = found.term, inner_products(values, found.values_and_one)
            self._write_times(step.queries, of_rows=of_queries(times[0]))
            self._write_times(step.keys, of_keys=of_keys(times[1]))
        return found.adjoint

    # Gradients of times -------------------------------------------------------------------------

    def _write_times(self, tokens: slice, of_rows: Array = None, of_keys: Array = None) -> None:
        """Write gradients by the log decay up to some tokens: a row's adds to it, a key's takes.

        In the line from the end keys come later than the rows that read them.
        """
        if self.line.problem.weights.log_decay is None:
            return
        if of_rows is not None:
            start = self.line.problem.sees.query_start
            tokens = slice(tokens.start + start, tokens.stop + start)
        gradient = -of_keys if of_rows is None else of_rows
        self.pull.write("log_decay", tokens, -gradient if self.line.reverse else gradient)

    def write_last(self, state: State, adjoint: State) -> None:
        """Write the gradient by the log of a factor on the last state."""
        xp, end = self.line.problem.xp, self.line.problem.key.shape[-2]
        scale = xp.exp(state.log_scale + adjoint.log_scale)
        change = xp.sum(xp.sum(adjoint.kvz * state.kvz, axis=-1) * scale, axis=-1)
        self.pull.write("log_decay", slice(end - 1, end), change[..., None, None])


def _scan_vjp(
    pull: Pullback,
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
    problem: Problem = pull.problem
    arguments = (problem.query_spec, problem.key_spec, *block, state, adjoint, grad_output)
    if is_column_normalized(problem):
        return column_normalized_vjp(*arguments)
    is_long = step.num_queries > MAX_DECLINED_TOKENS and step.positions is None
    if not (is_long and problem.lead == problem.state_lead):
        return pull.functions.scan_vjp(*arguments)
    scan_vjp = pull.functions.backend_alone("scan_vjp")
    return NotImplemented if scan_vjp is None else scan_vjp(*arguments)

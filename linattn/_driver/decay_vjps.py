"""Gradients where the state decays, or numerators are not divided: rows first, then both sides.

The cotangent of each row's numerator and denominator is known from a forward pass, three numbers a
row. With it every direction in which tokens are read is two walks: one with the state, for queries,
and one back with the adjoint, for keys. With A_t the sum of log decays up to t a weight has the
factor ``exp(A_i - A_j)``, so that the gradient of a log decay is a sum over its token and all later
ones: of what a factor on their rows would change, less what one on their keys would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from linattn._driver.blocks import OutputRows, block_slices, token_block, values_and_one_block
from linattn._driver.decay import key_block
from linattn._driver.walks import WALKS, Walk, initial_state, state_updates
from linattn._generic.block_vjps import row_cotangent, row_scale
from linattn._generic.feature_vjps import sum_to
from linattn._generic.row_vjps import RowBlock, Rows, row_keys_vjp, row_queries_vjp, row_read_vjp
from linattn.typing import Array, Partial, Problem, RowScale, State

__all__ = ["decay_gradient", "numerator_rows", "walk_rows"]

BLOCK = 128
"""Tokens of a block, which is always done by divide and conquer."""


def walk_rows(walk: Any) -> Iterator[State]:
    """Pull back through rows whose cotangents are found first; the adjoint is the last state."""
    # The log of a row counts where it is not divided out of both directions alike.
    problem = walk.problem.replace(want_log=True)
    walk, numbers = walk._replace(problem=problem), None
    if problem.normalize:
        numbers = yield from _row_numbers(walk)
    if problem.mode == "full":
        yield from _walk_read(walk, numbers)
        return
    # The scan from the start is the last, whose adjoint is that of the state before.
    directions = (True, False) if problem.mode == "two-sided" else (False,)
    sums = _Sums(walk, len(directions))
    for from_the_end in directions:
        yield from _walk_direction(walk, numbers, sums, from_the_end)


def _row_numbers(walk: Any) -> Any:
    """Log, inverse and inner product of every row's scale, ``(..., L, 3)``."""
    problem = walk.problem
    numbers = OutputRows(problem, 3, problem.dtype, walk.functions)

    def write(rows: slice, part: Partial) -> None:
        scale = row_scale(part, walk.grad_output(rows))
        numbers.write((), rows, problem.xp.concat(list(scale), axis=-1))

    scan = Walk(problem, walk.functions, walk.block_size, write)
    yield from WALKS[problem.mode](scan)
    return numbers.result()


def _block_of(
    walk: Any, numbers: Array, rows: slice, start: int, *, from_the_end: bool = False
) -> RowBlock:
    problem = walk.problem
    query, key = token_block(problem, "query", rows, start), key_block(problem, rows, start)
    specs = problem.query_spec, problem.key_spec
    values_and_one = values_and_one_block(problem, rows)
    return RowBlock(specs, query, key, values_and_one, _rows(walk, numbers, rows), from_the_end)


def _rows(walk: Any, numbers: Array, rows: slice) -> Rows:
    grad_output = walk.grad_output(rows)
    if numbers is None:
        return numerator_rows(walk.problem, grad_output)
    scale = RowScale(*(numbers[..., rows, i : i + 1] for i in range(3)))
    return Rows(row_cotangent(scale, grad_output), scale.log)


def numerator_rows(problem: Problem, grad_output: Array) -> Rows:
    """Cotangents of rows that are not divided: numerators are on the true scale.

    A cotangent of 0 stays 0, also where weights overflow: on the scale inf all weights are 0.
    """
    xp, zero = problem.xp, problem.xp.zeros_like(grad_output[..., :1])
    is_zero = xp.all(grad_output == 0, axis=-1, keepdims=True)
    return Rows(xp.concat([grad_output, zero], axis=-1), xp.where(is_zero, zero + xp.inf, zero))


def _walk_direction(walk: Any, numbers: Array, sums: _Sums, from_the_end: bool) -> Iterator[State]:
    problem = walk.problem
    start = initial_state(problem).length
    state = initial_state(problem.replace(state=None) if from_the_end else problem)
    adjoint = initial_state(problem.replace(state=None))
    order = list(block_slices(problem.query.shape[-2], BLOCK))
    if from_the_end:
        order.reverse()
    for rows in order:
        block = _block_of(walk, numbers, rows, start, from_the_end=from_the_end)
        gradient, term, decayed, state = row_queries_vjp(block, state)
        sums.add_decay(rows, -decayed if from_the_end else decayed)
        sums.add_queries(rows, gradient, term)
        yield adjoint
    if not from_the_end:
        sums.add_last_state(state)
        adjoint = walk.last_adjoint(state, adjoint)
    yield adjoint
    for rows in reversed(order):
        block = _block_of(walk, numbers, rows, start, from_the_end=from_the_end)
        *gradients, decayed, adjoint = row_keys_vjp(block, adjoint)
        sums.add_decay(rows, decayed if from_the_end else -decayed)
        sums.add_keys(rows, block.values_and_one, *gradients)
        yield adjoint


def _walk_read(walk: Any, numbers: Array) -> Iterator[State]:
    """Full attention: queries read the state of all keys."""
    problem, functions = walk.problem, walk.functions
    state = before = initial_state(problem)
    for state in state_updates(problem, before, walk.block_size, functions):
        yield state
    adjoint = initial_state(problem.replace(state=None))
    for rows in walk.query_slices():
        query = token_block(problem, "query", rows, before.length)
        row = _rows(walk, numbers, rows)
        gradient, term, adjoint = row_read_vjp(problem.query_spec, query, row, state, adjoint)
        walk.write_query(rows, gradient, term)
        yield adjoint
    adjoint = walk.last_adjoint(state, adjoint)
    yield adjoint
    for rows in walk.key_slices(slice(0, problem.key.shape[-2])):
        key, values_and_one = walk.keys(rows, before.length)
        gradients = functions.reduce_block_vjp(problem.key_spec, key, values_and_one, adjoint)
        walk.write_key(rows, values_and_one, *gradients)
        yield adjoint


class _Sums:
    """Gradients of blocks, summed over directions and then written."""

    def __init__(self, walk: Any, directions: int) -> None:
        self._walk, self._directions = walk, directions
        self._sums: dict[tuple[str, int], tuple[int, tuple[Array, ...]]] = {}

    def _complete(self, name: str, rows: slice, *terms: Array) -> tuple[Array, ...] | None:
        """Add terms of a block; return their sums where there are no more to come."""
        place = name, rows.start
        count, before = self._sums.pop(place, (0, ()))
        sums = tuple(a + b for a, b in zip(before, terms, strict=True)) if count else terms
        if count + 1 == self._directions:
            return sums
        self._sums[place] = count + 1, sums
        return None

    def add_queries(self, rows: slice, gradient: Array, term: Array) -> None:
        sums = self._complete("query", rows, gradient, term)
        if sums is not None:
            self._walk.write_query(rows, *sums)

    def add_keys(self, rows: slice, values_and_one: Array, *gradients: Array) -> None:
        sums = self._complete("key", rows, *gradients)
        if sums is not None:
            self._walk.write_key(rows, values_and_one, *sums)

    def add_decay(self, rows: slice, term: Array) -> None:
        """Add what a factor on the rows, less one on the keys, would change."""
        walk = self._walk
        if walk.problem.log_decay is None:
            return
        term = sum_to(term, walk.problem.state_lead, 2)
        place = "log_decay", rows.start
        count, before = self._sums.pop(place, (0, ()))
        total = term + before[0] if count else term
        if count + 1 < 2 * self._directions:
            self._sums[place] = count + 1, (total,)
            return
        walk.rows["log_decay"].write(walk.task, rows, total)

    def add_last_state(self, state: State) -> None:
        """Write what a factor on the returned state would change."""
        walk, xp = self._walk, self._walk.problem.xp
        grad_state = walk.cotangent.state
        if walk.problem.log_decay is None or grad_state is None:
            return
        scale = xp.exp(state.log_scale + grad_state.log_scale)
        change = xp.sum(xp.sum(grad_state.kvz * state.kvz, axis=-1) * scale, axis=-1)
        walk.rows["last_state"].write(walk.task, slice(0, 1), change[..., None, None])


def decay_gradient(xp: Any, terms: Array, last: Array | None) -> Array:
    """Gradient of each token's log decay, ``(..., S, 1)``, from its terms and the last state's."""
    later = xp.flip(xp.cumulative_sum(xp.flip(terms, axis=-2), axis=-2), axis=-2)
    return later if last is None else later + last

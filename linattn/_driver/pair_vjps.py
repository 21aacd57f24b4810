"""The pullback of exact pairs: in softmax attention, near a query in an exact window, and of sinks.

A row may read several sources on one scale, so that its cotangent is found first, by a forward
pass. Exact pairs are weighed again, some keys at a time. Far keys of a window are pulled
back apart, those to the right and those to the left, and all gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from linattn._driver.blocks import raw_tokens, values_and_one_block
from linattn._driver.gradient_rows import GradientWalk
from linattn._driver.linear_vjps import Scan, given_rows, row_numbers
from linattn._driver.pairs import (
    offset_bias,
    rows_of_keys,
    visible_pairs,
)
from linattn._driver.softmax import short_rows
from linattn._driver.walks import Step
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Array, Exact, State

MAX_ROWS = 512
"""Most queries and most keys of a step, whose pairs are all in memory."""

Slices = list[slice]


def pull_exact(walk: GradientWalk) -> Iterator[Any]:
    """Pull softmax attention back, over all pairs that count."""
    problem = walk.problem
    walk = walk._replace(block_size=short_rows(problem, walk.block_size))
    numbers, queries = (yield from row_numbers(walk)), walk.query_slices()

    def rows_of(keys: slice) -> Slices:
        seen_by = rows_of_keys(problem, keys)
        return [q for q in queries if q.stop > seen_by.start and q.start < seen_by.stop]

    keys = _slices(walk, slice(0, problem.key.shape[-2]))
    yield from _pull_pairs(walk, problem.query_spec, numbers, (queries, keys), rows_of)


def pull_window(walk: GradientWalk) -> Iterator[State]:
    """Pull an exact window back; yield the adjoint after each step, last the first state's."""
    problem, bias = walk.problem.replace(want_log=True), walk.problem.weights.relative_bias
    numbers = yield from row_numbers(walk._replace(problem=problem))
    walk = walk._replace(problem=problem, block_size=min(walk.block_size, MAX_ROWS))
    blocks = _Blocks.of(walk)
    # Near keys are weighed in the coordinates of the caller.
    near = walk._replace(problem=problem.replace(query_change=None, key_change=None))
    assert problem.exact.spec is not None
    yield from _pull_pairs(near, problem.exact.spec, numbers, blocks.slices(), blocks.rows_of)
    left, right = (None, None) if bias is None else (bias.table[..., :1], bias.table[..., -1:])
    share = 1
    if problem.sees.ahead:
        steps = blocks.far_steps(-1)
        yield from Scan(walk._replace(share=1), numbers, True, steps, right).walk_back(None)
        share = 2
    # The scan from the start comes last: its adjoint belongs to the initial state.
    steps = blocks.far_steps(1)
    yield from Scan(walk._replace(share=share), numbers, False, steps, left).walk_back(None)


def _slices(walk: GradientWalk, keys: slice) -> Slices:
    """Blocks of some keys, none of them of sinks and of others."""
    cut = min(max(keys.start, walk.problem.exact.sinks), keys.stop)
    return walk.key_slices(slice(keys.start, cut)) + walk.key_slices(slice(cut, keys.stop))


def _joined(blocks: list[Slices]) -> Slices:
    return [part for block in blocks for part in block]


class _Blocks(NamedTuple):
    """Queries and keys of each block of the window's length, cut into steps."""

    queries: list[Slices]
    keys: list[Slices]
    num_sinks: int
    ahead: bool
    block_of_keys: dict[int, int]
    """Of a step of keys, by its start."""

    @classmethod
    def of(cls, walk: GradientWalk) -> _Blocks:
        """Cut the queries and keys of a problem."""
        problem, w = walk.problem, walk.problem.exact.window
        assert w is not None
        length, size = (int(x.shape[-2]) for x in (problem.query, problem.key))
        start = problem.sees.query_start
        count = max(-(-size // w), -(-(length + start) // w), 1)
        keys = [_slices(walk, slice(min(i * w, size), min(i * w + w, size))) for i in range(count)]
        # Queries before the first key see none, wherever they are put.
        ends = [0, *(min(max(i * w - start, 0), length) for i in range(1, count)), length]
        queries = [walk.key_slices(slice(*of)) for of in pairwise(ends)]
        return cls(
            queries,
            keys,
            problem.exact.sinks,
            problem.sees.ahead,
            {part.start: i for i, block in enumerate(keys) for part in block},
        )

    def slices(self) -> tuple[Slices, Slices]:
        """Return all steps of queries, and of keys."""
        return _joined(self.queries), _joined(self.keys)

    def rows_of(self, keys: slice) -> Slices:
        """Return steps of queries that some keys are near to, all for sinks."""
        if keys.start < self.num_sinks:
            return _joined(self.queries)
        i = self.block_of_keys[keys.start]
        return _joined(self.queries[max(i - self.ahead, 0) : i + 2])

    def far_steps(self, direction: int) -> list[Step]:
        """Let the queries of each block read the keys before the block beside it.

        Sinks come last: no query reads them by the map, but they are in the state.
        """
        steps: list[Step] = []
        sinks: list[Step] = []
        none = slice(0, 0)
        queries, keys = self.queries[::direction], self.keys[::direction]
        for i in range(len(keys) + 1):
            if i < len(keys):
                steps += [Step(none, rows) for rows in queries[i]]
            for part in keys[i - 1] if i else []:
                (sinks if part.start < self.num_sinks else steps).append(Step(part, none))
        return steps + sinks


def _pull_pairs(
    walk: GradientWalk,
    spec: Exact,
    numbers: Array,
    slices: tuple[Slices, Slices],
    rows_of: Callable[[slice], Slices],
) -> Iterator[Any]:
    """Pull back the pairs of all keys with the queries that see any of them.

    ``slices``: slices of queries and of keys; ``rows_of(keys)``: slices of queries that see them.
    """
    problem, xp, (queries, all_keys) = walk.problem, walk.problem.xp, slices
    steps = [(keys, rows_of(keys)) for keys in all_keys]
    last = {rows.start: i for i, (_, seen_by) in enumerate(steps) for rows in seen_by}
    # Gradients of queries that see keys of later steps.
    held: dict[int, Array] = {}
    for i, (keys, seen_by) in enumerate(steps):
        key, values_and_one = (
            raw_tokens(problem, "key", keys, 0),
            values_and_one_block(problem, keys),
        )
        of_keys = [xp.zeros_like(key.x), xp.zeros_like(values_and_one)]
        for rows in seen_by:
            query, pairs = raw_tokens(problem, "query", rows, 0), _pairs(walk, rows, keys, numbers)
            block = query, key, values_and_one, *pairs
            of_query, *more = walk.functions.exact_vjp(spec, *block)
            of_keys = [
                x + sum_to(y, problem.state_lead, 2) for x, y in zip(of_keys, more, strict=True)
            ]
            held[rows.start] = held.get(rows.start, 0) + of_query
            if last[rows.start] == i:
                walk.write_query(rows, held.pop(rows.start))
        walk.write_key(keys, values_and_one, *of_keys)
        yield None
    for rows in queries:
        if rows.start not in last:
            walk.write_query(rows, xp.zeros_like(raw_tokens(problem, "query", rows, 0).x))


def _pairs(walk: GradientWalk, rows: slice, keys: slice, numbers: Array) -> tuple[Any, ...]:
    """Cotangents of rows, log scales of pairs, their bias taken off, and which of them count."""
    row, bias = given_rows(walk, rows, numbers), offset_bias(walk.problem, rows, keys)
    log = row.log if bias is None else row.log - bias
    return row.g1, log, visible_pairs(walk.problem, rows, keys)

"""The pullback of exact pairs: in softmax attention, near a query in an exact window, and of sinks.

A row may read several sources on one scale, so that its cotangent is found first, by a forward
pass. Exact pairs are weighed again, from queries and from keys. Far keys of a window are pulled
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
    keys_of_rows,
    offset_bias,
    rows_of_keys,
    sinks_of_rows,
    visible_pairs,
)
from linattn._driver.softmax import short_rows
from linattn._driver.walks import Step
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Array, Exact, State

__all__ = ["pull_exact", "pull_window"]

MAX_ROWS = 512
"""Tokens of a step: the pairs of so many queries and keys are held at once."""

Slices = list[slice]


def pull_exact(walk: GradientWalk) -> Iterator[Any]:
    """Softmax attention: all pairs that count."""
    problem = walk.problem
    walk = walk._replace(block_size=short_rows(problem, walk.block_size))
    numbers, queries = (yield from row_numbers(walk)), walk.query_slices()

    def keys_of(rows: slice) -> Slices:
        runs = [keys_of_rows(problem, rows), *sinks_of_rows(problem, rows)]
        return [keys for run in runs for keys in walk.key_slices(run)]

    def rows_of(keys: slice) -> Slices:
        seen_by = rows_of_keys(problem, keys)
        return [q for q in queries if q.stop > seen_by.start and q.start < seen_by.stop]

    keys = _slices(walk, slice(0, problem.key.shape[-2]))
    yield from _pull_pairs(walk, problem.query_spec, numbers, (queries, keys), (keys_of, rows_of))


def pull_window(walk: GradientWalk) -> Iterator[State]:
    """Pull back, and yield the adjoint after each step; the last is that of the state before."""
    problem, bias = walk.problem.replace(want_log=True), walk.problem.weights.relative_bias
    numbers = yield from row_numbers(walk._replace(problem=problem))
    walk = walk._replace(problem=problem, block_size=min(walk.block_size, MAX_ROWS))
    blocks = _Blocks.of(walk)
    # Near keys are weighed in the coordinates of the caller.
    near = walk._replace(problem=problem.replace(query_change=None, key_change=None))
    slices, sides = blocks.slices(), (blocks.keys_of, blocks.rows_of)
    assert problem.exact.spec is not None
    yield from _pull_pairs(near, problem.exact.spec, numbers, slices, sides)
    left, right = (None, None) if bias is None else (bias.table[..., :1], bias.table[..., -1:])
    share = 1
    if not problem.sees.is_causal:
        steps = blocks.far_steps(-1)
        yield from Scan(walk._replace(share=1), numbers, True, steps, right).walk_back(None)
        share = 2
    # The scan from the start is the last, whose adjoint is that of the state before.
    steps = blocks.far_steps(1)
    yield from Scan(walk._replace(share=share), numbers, False, steps, left).walk_back(None)


def _slices(walk: GradientWalk, keys: slice) -> Slices:
    """Blocks of some keys, none of them of sinks and of others."""
    cut = min(max(keys.start, walk.problem.exact.sinks), keys.stop)
    return walk.key_slices(slice(keys.start, cut)) + walk.key_slices(slice(cut, keys.stop))


def _joined(blocks: list[Slices]) -> Slices:
    return [part for block in blocks for part in block]


def _places(blocks: list[Slices]) -> dict[int, int]:
    return {part.start: i for i, block in enumerate(blocks) for part in block}


class _Blocks(NamedTuple):
    """Queries and keys of each block of the window's length, cut into steps."""

    queries: list[Slices]
    keys: list[Slices]
    num_sinks: int
    is_causal: bool
    block_of_rows: dict[int, int]
    """Of a step of queries, by its start."""
    block_of_keys: dict[int, int]

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
            problem.sees.is_causal,
            _places(queries),
            _places(keys),
        )

    def slices(self) -> tuple[Slices, Slices]:
        """Return all steps of queries, and of keys."""
        return _joined(self.queries), _joined(self.keys)

    def keys_of(self, rows: slice) -> Slices:
        """Return steps of keys that are near some queries, and those of sinks."""
        i = self.block_of_rows[rows.start]
        near = _joined(self.keys[max(i - 1, 0) : i + 1 + (not self.is_causal)])
        sinks = [part for part in _joined(self.keys) if part.start < self.num_sinks]
        return near + [part for part in sinks if part not in near]

    def rows_of(self, keys: slice) -> Slices:
        """Return steps of queries that some keys are near to, all for sinks."""
        if keys.start < self.num_sinks:
            return _joined(self.queries)
        i = self.block_of_keys[keys.start]
        return _joined(self.queries[max(i - (not self.is_causal), 0) : i + 2])

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
    sides: tuple[Callable[[slice], Slices], Callable[[slice], Slices]],
) -> Iterator[Any]:
    """Every query reads its keys again, then every key its queries.

    ``slices``: those of queries and of keys; ``sides``: keys of queries, and queries of keys.
    """
    problem, functions, xp = walk.problem, walk.functions, walk.problem.xp
    (queries, all_keys), (keys_of, rows_of) = slices, sides
    for rows in queries:
        query = raw_tokens(problem, "query", rows, 0)
        gradient = xp.zeros_like(query.x)
        for keys in keys_of(rows):
            key, values_and_one = (
                raw_tokens(problem, "key", keys, 0),
                values_and_one_block(problem, keys),
            )
            pairs = _pairs(walk, rows, keys, numbers)
            found = functions.exact_query_vjp(spec, query, key, values_and_one, *pairs)
            gradient = gradient + found
        walk.write_query(rows, gradient)
        yield None
    for keys in all_keys:
        key, values_and_one = (
            raw_tokens(problem, "key", keys, 0),
            values_and_one_block(problem, keys),
        )
        gradients = [xp.zeros_like(key.x), xp.zeros_like(values_and_one)]
        for rows in rows_of(keys):
            query, pairs = (
                raw_tokens(problem, "query", rows, 0),
                _pairs(walk, rows, keys, numbers),
            )
            more = functions.exact_key_vjp(spec, query, key, values_and_one, *pairs)
            gradients = [
                x + sum_to(y, problem.state_lead, 2) for x, y in zip(gradients, more, strict=True)
            ]
        walk.write_key(keys, values_and_one, *gradients)
        yield None


def _pairs(walk: GradientWalk, rows: slice, keys: slice, numbers: Array) -> tuple[Any, ...]:
    """Cotangents of rows, log scales of pairs, their bias taken off, and which of them count."""
    row, bias = given_rows(walk, rows, numbers), offset_bias(walk.problem, rows, keys)
    log = row.log if bias is None else row.log - bias
    return row.g1, log, visible_pairs(walk.problem, rows, keys)

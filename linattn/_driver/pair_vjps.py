"""The pullback of exact pairs: in softmax attention, near a query in an exact window, and of sinks.

A row may read several parts on one scale, so that its cotangent is found first, by a forward pass.
Exact pairs are weighed again, some keys at a time. What rows read by the map beside pairs is pulled
back by `linear_vjps`, and all gradients are added. `backward` calls `pull_exact` and `pull_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import array_api_compat
import numpy as np

from linattn._driver.blocks import (
    block_slices,
    decay_of_rows,
    raw_tokens,
    rows_at,
    values_and_one_block,
)
from linattn._driver.gradient_rows import Pullback
from linattn._driver.linear_vjps import LinePullback, given_rows, pull_lines, row_numbers
from linattn._driver.lines import Line
from linattn._driver.pairs import offset_bias, rows_of_keys, visible_pairs
from linattn._driver.runner import initial_state
from linattn._driver.sinks import Sinks, without_sinks
from linattn._driver.softmax import short_rows
from linattn._driver.stops import Stops, stops_of
from linattn._generic.block_vjps import softmax_weights
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Array, Exact, Problem, State

MAX_TILE, MIN_TILE = 512, 128
"""Most queries and most keys of a step, whose pairs are all in memory; least queries near keys."""

Slices = list[slice]


def pull_exact(pull: Pullback) -> Iterator[Any]:
    """Pull softmax attention back, over all pairs that count."""
    problem = pull.problem
    pull = pull._replace(block_size=short_rows(problem, pull.block_size))
    numbers, queries = (yield from row_numbers(pull)), pull.query_slices()

    def rows_of(keys: slice) -> Slices:
        seen_by = rows_of_keys(problem, keys)
        return [q for q in queries if q.stop > seen_by.start and q.start < seen_by.stop]

    keys = _slices(pull, slice(0, problem.key.shape[-2]))
    yield from _pull_pairs(pull, problem.query_spec, numbers, (queries, keys), rows_of)


def _slices(pull: Pullback, keys: slice) -> Slices:
    """Blocks of some keys, none of them of sinks and of others."""
    cut = min(max(keys.start, pull.problem.exact.sinks), keys.stop)
    return pull.key_slices(slice(keys.start, cut)) + pull.key_slices(slice(cut, keys.stop))


def pull_parts(pull: Pullback) -> Iterator[State]:
    """Pull back rows that read several parts; yield the adjoint after each step of the lines.

    ``pull`` receives totals. The last adjoint is the first state's.
    """
    problem = pull.problem.replace(want_log=True)
    pull = pull._replace(problem=problem)
    numbers = yield from row_numbers(pull)
    if problem.exact.window is None:
        yield from pull_lines(pull, numbers)
        return
    # Near keys are weighed in the coordinates of the caller.
    unchanged = pull._replace(problem=problem.replace(query_change=None, key_change=None))
    stops = stops_of(problem)
    for rows, keys in _near_pairs(problem, pull.block_size):
        _pull_near(unchanged, stops, rows, keys, numbers)
    if not problem.exact.sinks:
        yield from pull_lines(pull, numbers)
        return
    sinks = Sinks.of(problem)
    for rows in block_slices(problem.query.shape[-2], min(pull.block_size, MAX_TILE)):
        _pull_pair(unchanged, rows, sinks.keys, numbers, sinks.visible(rows), sinks.bias(rows))
    if pull.cotangent.state is not None:
        _pull_sinks_of_state(pull, sinks.keys)
    yield from pull_lines(pull._replace(problem=without_sinks(problem)), numbers)


def _near_pairs(problem: Problem, block_size: int) -> Iterator[tuple[slice, slice]]:
    """Yield queries with keys that may be near to them; none of the keys is a sink."""
    w, start, length = problem.exact.window, problem.sees.query_start, problem.query.shape[-2]
    assert w is not None
    tile = w * -(-MIN_TILE // w)
    most = min(block_size, MAX_TILE)
    for i in range(start // tile, -(-(length + start) // tile)):
        places = slice(max(i * tile, start), min((i + 1) * tile, length + start))
        for part in block_slices(places.stop - places.start, most):
            first, stop = places.start + part.start, places.start + part.stop
            low = max((first // w - 1) * w, problem.exact.sinks, 0)
            high = min(((stop - 1) // w + 2) * w, problem.key.shape[-2])
            for keys in block_slices(high - low, most):
                yield slice(first - start, stop - start), slice(low + keys.start, low + keys.stop)


def _pull_near(pull: Pullback, stops: Stops, rows: slice, keys: slice, numbers: Array) -> None:
    """Pull back near pairs, and no others, of some queries and keys."""
    problem = pull.problem
    key, (left, right, end) = np.arange(keys.start, keys.stop), stops.of(rows)
    seen = (key >= left[:, None]) & (key < np.minimum(right, end)[:, None])
    if not seen.any():
        return
    device, bias = array_api_compat.device(problem.key), offset_bias(problem, rows, keys)
    if problem.weights.log_decay is not None:
        bias = _decay_between(problem, rows, keys)
    visible = None if seen.all() else problem.xp.asarray(seen, device=device)
    _pull_pair(pull, rows, keys, numbers, visible, bias)


def _decay_between(problem: Problem, rows: slice, keys: slice) -> Array:
    """Log decay between queries and keys, ``(..., n, s)``."""
    xp, start = problem.xp, problem.sees.query_start
    place = np.arange(rows.start, rows.stop) + start, np.arange(keys.start, keys.stop)
    first = min(of.min() for of in place)
    last = max(of.max() for of in place)
    decay = decay_of_rows(problem, slice(int(first) + 1, int(last) + 1))
    clock = xp.cumulative_sum(decay, axis=-2, include_initial=True)
    row, key = (rows_at(clock, of - first) for of in place)
    return xp.astype(-xp.abs(row - xp.matrix_transpose(key)), problem.dtype)


def _pull_pair(
    pull: Pullback, rows: slice, keys: slice, numbers: Array, visible: Array, bias: Array
) -> None:
    """Pull back all pairs of some queries and keys that are visible."""
    problem, xp = pull.problem, pull.problem.xp
    spec, row = problem.exact.spec, given_rows(pull, rows, numbers)
    assert spec is not None
    query, key = raw_tokens(problem, "query", rows, 0), raw_tokens(problem, "key", keys, 0)
    values, log = values_and_one_block(problem, keys), row.log if bias is None else row.log - bias
    pairs = spec, query, key, values, row.g1, log, visible
    of_query, of_key, of_values = pull.functions.exact_vjp(*pairs)
    pull.write_query(rows, of_query)
    pull.write_key(keys, values, *(sum_to(x, problem.state_lead, 2) for x in (of_key, of_values)))
    if problem.weights.log_decay is None:
        return
    of_log = softmax_weights(spec, query, key, log, visible)
    of_log = of_log * xp.matmul(row.g1, xp.matrix_transpose(values))
    start = problem.sees.query_start
    later = np.arange(rows.start, rows.stop)[:, None] + start - np.arange(keys.start, keys.stop)
    sign = xp.asarray(np.sign(later), dtype=of_log.dtype, device=array_api_compat.device(of_log))
    of_log = of_log * sign
    time = slice(rows.start + start, rows.stop + start)
    pull.write("log_decay", time, xp.sum(of_log, axis=-1, keepdims=True))
    of_keys = xp.matrix_transpose(xp.sum(of_log, axis=-2, keepdims=True))
    pull.write("log_decay", keys, -of_keys)


def _pull_sinks_of_state(pull: Pullback, keys: slice) -> None:
    """Pull back the sinks that are in the last state: no query reads them by the map."""
    problem = pull.problem
    back = LinePullback(pull, Line(problem, pull.functions, 0))
    nothing, rest = initial_state(problem), slice(keys.stop, problem.key.shape[-2])
    adjoint = pull.last_adjoint(nothing)
    if problem.weights.log_decay is not None:
        sinks = back.line.add_all(keys, nothing, pull.block_size)
        back.write_last(back.line.faded(rest, sinks), adjoint)
    back.pull_keys(keys, back.line.faded(rest, adjoint))


def _pull_pairs(
    pull: Pullback,
    spec: Exact,
    numbers: Array,
    slices: tuple[Slices, Slices],
    rows_of: Callable[[slice], Slices],
) -> Iterator[Any]:
    """Pull back the pairs of all keys with the queries that see any of them.

    ``slices``: slices of queries and of keys; ``rows_of(keys)``: slices of queries that see them.
    """
    problem, xp, (queries, all_keys) = pull.problem, pull.problem.xp, slices
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
            query, pairs = raw_tokens(problem, "query", rows, 0), _pairs(pull, rows, keys, numbers)
            block = query, key, values_and_one, *pairs
            of_query, *more = pull.functions.exact_vjp(spec, *block)
            of_keys = [
                x + sum_to(y, problem.state_lead, 2) for x, y in zip(of_keys, more, strict=True)
            ]
            held[rows.start] = held.get(rows.start, 0) + of_query
            if last[rows.start] == i:
                pull.write_query(rows, held.pop(rows.start))
        pull.write_key(keys, values_and_one, *of_keys)
        yield None
    for rows in queries:
        if rows.start not in last:
            pull.write_query(rows, xp.zeros_like(raw_tokens(problem, "query", rows, 0).x))


def _pairs(pull: Pullback, rows: slice, keys: slice, numbers: Array) -> tuple[Any, ...]:
    """Cotangents of rows, log scales of pairs, their bias taken off, and which of them count."""
    row, bias = given_rows(pull, rows, numbers), offset_bias(pull.problem, rows, keys)
    log = row.log if bias is None else row.log - bias
    return row.g1, log, visible_pairs(pull.problem, rows, keys)

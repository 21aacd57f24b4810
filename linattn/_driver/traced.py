"""Causal and full attention that JAX traces: loops over chunks, compiled alike at every length.

The driver calls `solve` for arrays of JAX inside a trace. What the other modes do block by block is
unrolled.
"""

from __future__ import annotations

import sys
from typing import Any

from linattn import _arrays
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import (
    decay_of_rows,
    key_block,
    numerators,
    raw_tokens,
    token_block,
    values_and_one_block,
)
from linattn._driver.causal_blocks import causal_block
from linattn._driver.pairs import biased_queries, exact_keys, is_banded
from linattn._driver.runner import initial_state, update
from linattn._driver.specs import read_spec, select_rows
from linattn._generic.exact import exact_pairs
from linattn._generic.states import divide, log_normalizer
from linattn.typing import Array, Partial, Problem, State, Weights

CHUNK = 128
"""Tokens of a chunk."""

_ALL = slice(0, CHUNK)


def covers(problem: Problem) -> bool:
    """Whether JAX compiles a problem that `solve` computes, of more than one chunk."""
    arrays = problem.query, problem.key, problem.value
    is_staged = problem.policy.lazy and any(map(_arrays.is_staged, arrays))
    sees = problem.sees
    is_simple = problem.mode in ("causal", "full") or (
        problem.mode == "exact"
        and not is_banded(problem)
        and not problem.exact.sinks
        and (sees.key_stop is None or sees.key_stop.ndim == 1)
    )
    if not is_staged or not is_simple:
        return False
    length = problem.query.shape[-2], problem.key.shape[-2]
    return max(length) > CHUNK and min(length) > 0 and 0 not in problem.lead


def solve(problem: Problem, functions: BlockFunctions) -> tuple[Array, State | None, Array | None]:
    """Return the output, the state after all keys, and the log normalizer or None."""
    if problem.mode == "exact":
        rows, _ = _scan(_of_queries(problem), (), _exact(problem, functions))
        return _results(problem, rows, None)
    first = initial_state(problem)
    if problem.mode == "causal":
        rows, sums = _scan(problem, first, _causal(problem, functions, first.length))
    else:
        keys = problem.replace(query=problem.key)
        _, sums = _scan(keys, first, _add(keys, functions, first.length))
        last = _state(sums, first.length + problem.key.shape[-2])
        rows, _ = _scan(_of_queries(problem), (), _read(problem, functions, last, first.length))
    return _results(problem, rows, _state(sums, first.length + problem.key.shape[-2]))


def _state(sums: Any, length: Any) -> State:
    kvz, log_scale = sums
    return State(kvz, log_scale, length)


def _of_queries(problem: Problem) -> Problem:
    """Return a problem whose chunks have queries of this one, and nothing else of it."""
    query = problem.query
    return problem.replace(key=query, value=query, weights=Weights())


def _results(
    problem: Problem, rows: Any, state: State | None
) -> tuple[Array, State | None, Array | None]:
    output = problem.xp.astype(rows[0], problem.query.dtype, copy=False)
    return output, state, rows[1][..., 0] if problem.want_log else None


def _scan(problem: Problem, first: Any, step: Any) -> tuple[Any, Any]:
    """Run ``step(sums, start, chunk)`` over the chunks of queries and keys of one length."""
    jax, xp, length = sys.modules["jax"], problem.xp, problem.query.shape[-2]
    missing, weights = -length % CHUNK, problem.weights
    mask, decay = weights.key_mask, weights.log_decay
    if mask is None and missing:
        mask = xp.ones((length, 1), dtype=xp.bool)
    if decay is not None:
        decay = decay_of_rows(problem, slice(0, length))

    def cut(x: Array) -> Array:
        x = xp.concat([x, xp.zeros((*x.shape[:-2], missing, x.shape[-1]), dtype=x.dtype)], axis=-2)
        chunks = xp.reshape(x, (*x.shape[:-2], -1, CHUNK, x.shape[-1]))
        return xp.moveaxis(chunks, -3, 0)

    tokens = problem.query, problem.key, problem.value, mask, weights.key_bias, decay
    starts = CHUNK * xp.arange((length + missing) // CHUNK)
    again = jax.checkpoint(lambda sums, chunk: step(sums, *chunk))
    sums, rows = jax.lax.scan(again, tuple(first[:2]), (starts, jax.tree.map(cut, tokens)))

    def joined(x: Array) -> Array:
        x = xp.moveaxis(x, 0, -3)
        return xp.reshape(x, (*x.shape[:-3], -1, x.shape[-1]))[..., :length, :]

    return jax.tree.map(joined, rows), sums


def _part(problem: Problem, chunk: Any) -> Problem:
    """Return the problem of one chunk."""
    query, key, value, mask, bias, decay = chunk
    weights = problem.weights._replace(key_mask=mask, key_bias=bias, log_decay=decay)
    return problem.replace(query=query, key=key, value=value, weights=weights, state=None)


def _causal(problem: Problem, functions: BlockFunctions, before: int) -> Any:
    def step(sums: Any, start: Any, chunk: Any) -> Any:
        part, start = _part(problem, chunk), before + start
        tokens = token_block(part, "query", _ALL, start), key_block(part, _ALL, start)
        state = _state(sums, start)
        rows, after = causal_block(
            part, functions, *tokens, values_and_one_block(part, _ALL), state
        )
        return tuple(after[:2]), _finished(problem, rows)

    return step


def _add(problem: Problem, functions: BlockFunctions, before: int) -> Any:
    def step(sums: Any, start: Any, chunk: Any) -> Any:
        part = _part(problem, chunk)
        after = update(part, _state(sums, before + start), CHUNK, functions)
        return tuple(after[:2]), ()

    return step


def _read(problem: Problem, functions: BlockFunctions, state: State, before: int) -> Any:
    spec, seen = read_spec(problem, state)

    def step(_: Any, start: Any, chunk: Any) -> Any:
        part = problem.replace(query=chunk[0], state=None)
        query = token_block(part, "query", _ALL, before + start)
        rows = functions.read_block(spec, query, seen, problem.want_log)
        return (), _finished(problem, select_rows(problem, rows))

    return step


def _exact(problem: Problem, functions: BlockFunctions) -> Any:
    """Read all keys, those from a query's stop on masked: twice the pairs, but few operations."""
    jax, xp, sees, size = sys.modules["jax"], problem.xp, problem.sees, problem.key.shape[-2]
    (keys, values), length = exact_keys(problem, slice(0, size)), problem.query.shape[-2]
    place, stops = xp.arange(size), sees.key_stop
    if stops is None:
        stops = xp.arange(length) + sees.query_start + 1
        stops = xp.full_like(stops, size) if sees.ahead else stops
    stops = xp.concat([xp.asarray(stops), xp.zeros(-length % CHUNK, dtype=stops.dtype)])

    def step(_: Any, start: Any, chunk: Any) -> Any:
        part = problem.replace(query=chunk[0])
        query = biased_queries(part, problem.query_spec, raw_tokens(part, "query", _ALL, 0))
        stop = jax.lax.dynamic_slice(stops, (start,), (CHUNK,))[:, None]
        visible = None if sees.ahead and sees.key_stop is None else place < stop
        pairs = values, visible, None, True, functions.exact_block
        return (), _finished(problem, exact_pairs(*query, keys, *pairs))

    return step


def _finished(problem: Problem, part: Partial) -> tuple[Array, ...]:
    """Return rows of the output, and their log normalizers where they are asked for."""
    output = divide(part) if problem.normalize else numerators(problem, part)
    if not problem.want_log:
        return (output,)
    return output, log_normalizer(part, problem)

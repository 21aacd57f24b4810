"""Causal attention of a block in place.

A block is *plain* if its exponents lie within ``+-REACH``, or if the norms of its queries bound
theirs: its features are made and used a piece at a time, on one scale with its state, and it is
checked here by the rule of the driver, on the scale of its largest product. Refused, it is done
again shifted, and the driver checks that.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import exp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Exponential, Partial, Spec, State, Tokens
from linattn_numpy.buffers import buffer
from linattn_numpy.features import (
    column_logs,
    is_known,
    largest_exponent,
    natural,
    plain_weights,
    row_log,
    row_term,
    shifted_log,
)
from linattn_numpy.limits import all_finite, finite, floor_of, in_place, tiny
from linattn_numpy.products import leading, product, transposed, weighted

__all__ = [
    "common_scale",
    "scan_block",
    "split",
    "sub_blocks",
]

Floats = NDArray[Any]


CACHE_NUMBERS = 1 << 17
"""Features of a side made at once: half a MB of float32, which a second-level cache holds.

In halves it takes 3 % longer.
"""

NEAR = {4: 20.0, 8: 80.0}
"""Column logs of a state that differ by no more than this may share one scale."""

MOST_KNOWN = {4: 50.0, 8: 300.0}
"""Where those of queries are known to be no larger, exponents are not looked at: 3 % of the time.

By bytes a number.
"""

SHIFTED_ROWS = 512
"""Rows that may share one shift however many columns they have; the driver cuts to as many."""

SUB_BLOCK = 32
"""Rows of a causal block that share one triangle; longer ones waste half a square."""


def scan_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    v1: Floats,
    state: State,
    want_log: bool,
) -> Any:
    """Causal attention of a block after the state, and the state after it."""
    if 0 in query.x.shape or 0 in v1.shape:
        return NotImplemented
    answer = _scan_plain(query_spec, key_spec, query, key, v1, state, want_log)
    if answer is not None:
        return answer
    # Longer ones, which come in pieces where they are plain, are tried again in shorter blocks.
    is_short = v1.shape[-2] <= max(SHIFTED_ROWS, CACHE_NUMBERS // state.kvz.shape[-2])
    if is_short and isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        return _scan_shifted(query_spec, key_spec, query, key, v1, state)
    return NotImplemented


def _scan_plain(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    v1: Floats,
    state: State,
    want_log: bool,
) -> tuple[Partial, State] | None:
    """Scan without shifts, on one scale for block and state; None where that is not sound."""
    if not (is_known(query_spec) and is_known(key_spec)):
        return None
    column = column_logs(query_spec, v1.dtype)
    logs = column_logs(key_spec, v1.dtype)
    common = common_scale(column, logs, row_term(key_spec, key), v1, state)
    if common is None:
        return None
    n, highest, nd = v1.shape[-2], 0.0, None
    largest = _without_a_look(query_spec, key_spec, query, key, common)
    kvz = state.kvz * common.scale[..., None]
    size = max(SUB_BLOCK, CACHE_NUMBERS // (kvz.size // kvz.shape[-1]) // SUB_BLOCK * SUB_BLOCK)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        some, others = query.x[..., rows, :], key.x[..., rows, :]
        if largest is not None:
            q, k = natural(query_spec, some, "query"), natural(key_spec, others, "key")
        else:
            queries = plain_weights(query_spec, some, "query")
            keys = None if queries is None else plain_weights(key_spec, others, "key")
            if queries is None or keys is None:
                return None
            highest = max(highest, queries.highest + keys.highest)
            q, k = queries.weights, keys.weights
        v = common.v1[..., rows, :]
        if common.column is not None:
            k = in_place(np.multiply, k, common.column[..., None, :])
        if nd is None:
            lead = leading(*(a.shape[:-2] for a in (q, k, v, kvz)))
            nd = buffer("rows", (*lead, n, v.shape[-1]), v.dtype)
        kvz = _triangles(q, k, v, kvz, nd[..., rows, :])
    assert nd is not None
    terms = kvz.shape[-2] * (state.length + n)
    lost = exp(highest) if largest is None else 2 * exp(largest)
    if not (nd[..., -1].min() >= floor_of(nd.dtype) * terms * lost and all_finite(nd)):
        return None
    log = row_log(query_spec, query, common.g[..., None], want_log)
    c = np.zeros(kvz.shape[:-1], kvz.dtype) + (common.g - column)
    if not (sees := kvz[..., -1].any(axis=-1, keepdims=True)).all():
        c = np.where(sees, c, c.dtype.type(-np.inf))
    return Partial(nd, log, sound=True), State(kvz, c, state.length + n)


def _without_a_look(
    query_spec: Spec, key_spec: Spec, query: Tokens, key: Tokens, common: Common
) -> float | None:
    """Bound on the exponents of queries where exponents need no look, or None where they do.

    A key's weight must be a normal number, and so must every feature of a query. What underflow can
    take then is twice the smallest number for each key and column, in its feature and in what it
    adds to the state, times the largest feature of the query; exponents of keys need no bound,
    since what is too large for a float shows as inf.
    """
    if key.log_weight is None and isinstance(key_spec, Exponential):
        least = float(common.v1[..., -1].min())
        if common.column is not None:
            least *= float(common.column.min())
        largest = largest_exponent(query_spec, query.x)
        if least >= tiny(query.x.dtype) and largest <= MOST_KNOWN[query.x.itemsize]:
            return largest
    return None


class Common(NamedTuple):
    """A causal block of keys and the state before it on one scale."""

    g: Floats
    """``(..., 1)``: a column's log is g less its log in the weights of the queries."""
    column: Floats | None
    """What the columns of the keys' weights are yet to be multiplied with; None for 1."""
    v1: Floats
    """``[v, 1]`` with all else that the keys' weights lack."""
    scale: Floats
    """What the columns of the state are multiplied with."""


def common_scale(
    query_logs: Floats, key_logs: Floats, row: Floats | None, v1: Floats, state: State
) -> Common | None:
    """Put a plain causal block and its state on one scale; None where that is not sound.

    ``query_logs``, ``key_logs``: logs that columns have beside their weights; ``row``: the keys'
    own terms.
    """
    near = NEAR[v1.itemsize]
    # In the common scale g every column log, of the state and of this block, is at most 0.
    before = state.log_scale + query_logs
    block = key_logs + query_logs
    if row is not None:
        top = row.max(axis=-2, keepdims=True)
        row = row - finite(top)
        block = block + top[..., 0]
    g = np.maximum(before.max(axis=-1, keepdims=True), block.max(axis=-1, keepdims=True))
    if not (_all_near(before, g, near) and _all_near(block, g, near)):
        return None
    g = finite(g)
    block = np.exp(block - g)
    first = block[..., :1]
    if (block == first).all():
        v1 = weighted(v1, first[..., None] if row is None else np.exp(row) * first[..., None])
        return Common(g, None, v1, np.exp(before - g))
    v1 = v1 if row is None else weighted(v1, np.exp(row))
    return Common(g, block, v1, np.exp(before - g))


def _all_near(log: Floats, g: Floats, near: float) -> bool:
    """Whether all columns of each head are within reach of g, or all hold nothing."""
    below = g - log
    if below.max() <= near:
        return True
    empty = log.max(axis=-1, keepdims=True) == -np.inf
    return bool(np.all((below.max(axis=-1, keepdims=True) <= near) | empty))


def _scan_shifted(
    query_spec: Exponential,
    key_spec: Exponential,
    query: Tokens,
    key: Tokens,
    v1: Floats,
    state: State,
) -> tuple[Partial, State]:
    """Scan on the running maximum of each column, each row on its own largest."""
    log_k = shifted_log(key_spec, key, "key")
    c = np.maximum(state.log_scale, log_k.max(axis=-2) + key_spec.col)
    shift = finite(c)
    log_k = in_place(np.add, log_k, (key_spec.col - shift)[..., None, :])
    np.exp(log_k, out=log_k)
    log_q = shifted_log(query_spec, query, "query")
    log_q = in_place(np.add, log_q, (c + query_spec.col)[..., None, :])
    row = log_q.max(axis=-1, keepdims=True)
    log_q -= finite(row)
    np.exp(log_q, out=log_q)
    kvz = state.kvz * np.exp(state.log_scale - shift)[..., None]
    lead = leading(*(a.shape[:-2] for a in (log_q, log_k, v1, kvz)))
    nd = buffer("rows", (*lead, *v1.shape[-2:]), v1.dtype)
    kvz = _triangles(log_q, log_k, v1, kvz, nd)
    return Partial(nd, row), State(kvz, c, state.length + v1.shape[-2])


def _triangles(q: Floats, k: Floats, v: Floats, kvz: Floats, out: Floats) -> Floats:
    """Causal sums by sub-blocks, ``out_i = q_i (kvz + sum_(j<=i) k_j v_j)``, and the state after.

    They may go into a buffer, and the state is one where another call follows.
    """
    for rows, size in sub_blocks(v.shape[-2]):
        first, second, values, into = (split(x, rows, size) for x in (q, k, v, out))
        kvz = _triangle_row(first, second, values, kvz, into)
    return kvz


def sub_blocks(n: int) -> list[tuple[slice, int]]:
    """Rows of a block in pieces of one sub-block length each: whole ones, and the rest."""
    whole = n - n % SUB_BLOCK
    parts = [(slice(0, whole), SUB_BLOCK), (slice(whole, n), n - whole)]
    return [(rows, size) for rows, size in parts if rows.start < rows.stop]


def split(x: Floats, rows: slice, size: int) -> Floats:
    """Give some rows an axis of sub-blocks."""
    x = x[..., rows, :]
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _triangle_row(q: Floats, k: Floats, v: Floats, kvz: Floats, out: Floats) -> Floats:
    """Do sub-blocks of one size: their triangles at once, their states one after the other."""
    count, size = q.shape[-3:-1]
    scores = product(q, transposed(k), "scores")
    scores *= _lower(size, scores.dtype)
    np.matmul(scores, v, out=out)
    lead = leading(k.shape[:-3], v.shape[:-3], kvz.shape[:-2])
    states = buffer("states", (*lead, count + 1, *kvz.shape[-2:]), kvz.dtype)
    states[..., 0, :, :] = kvz
    np.matmul(transposed(k), v, out=states[..., 1:, :, :])
    for before, after in pairwise(np.moveaxis(states, -3, 0)):
        np.add(before, after, out=after)
    out += product(q, states[..., :count, :, :], "more")
    return states[..., count, :, :].copy()


@cache
def _lower(size: int, dtype: Any) -> Floats:
    return np.tri(size, dtype=dtype)

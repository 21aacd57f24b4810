"""Causal attention of a block in place.

A block is *plain* if its exponents lie within ``+-REACH``. It shares one scale with its state, so
it is checked here by the rule of the driver, on the scale of its largest product; refused, it is
done again shifted, and the driver checks that.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Exponential, Partial, Spec, State, Tokens
from linattn_numpy.buffers import buffer
from linattn_numpy.features import Plain, plain_weights, row_log, row_term, shifted_log
from linattn_numpy.limits import all_finite, finite, floor_of, in_place
from linattn_numpy.products import leading, product, transposed, weighted

__all__ = [
    "SUB_BLOCK",
    "above_diagonal",
    "common_scale",
    "scan_block",
]

Floats = NDArray[Any]


NEAR = {4: 20.0, 8: 80.0}
"""Column logs of a state that differ by no more than this may share one scale."""

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
    if answer is None and isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        return _scan_shifted(query_spec, key_spec, query, key, v1, state)
    return NotImplemented if answer is None else answer


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
    queries = plain_weights(query_spec, query.x, "query")
    keys = None if queries is None else plain_weights(key_spec, key.x, "key")
    if queries is None or keys is None:
        return None
    common = common_scale(queries, keys, row_term(key_spec, key), v1, state)
    if common is None:
        return None
    g, weights, v1, scale, floor = common
    nd, kvz = _triangles(queries.weights, weights, v1, state.kvz, scale)
    if not (nd[..., -1].min() >= floor and all_finite(nd)):
        return None
    log = row_log(query_spec, query, g[..., None], want_log)
    c = g - queries.col
    if not (sees := kvz[..., -1].any(axis=-1, keepdims=True)).all():
        c = np.where(sees, c, c.dtype.type(-np.inf))
    return Partial(nd, log, sound=True), State(kvz, c, state.length + v1.shape[-2])


class Common(NamedTuple):
    """A causal block of keys and the state before it on one scale."""

    g: Floats
    """``(..., 1)``: a column's log is g less its log in the weights of the queries."""
    weights: Floats
    v1: Floats
    """``[v, 1]`` with all that the keys' weights lack."""
    scale: Floats
    """What the columns of the state are multiplied with."""
    floor: float
    """Least sound denominator."""


def common_scale(
    queries: Plain, keys: Plain, row: Floats | None, v1: Floats, state: State
) -> Common | None:
    """Put a plain causal block and its state on one scale; None where that is not sound.

    ``row``: the keys' own terms. Their weights are ours to change.
    """
    near = NEAR[v1.itemsize]
    # In the common scale g every column log, of the state and of this block, is at most 0.
    before = state.log_scale + queries.col
    block = keys.col + queries.col
    if row is not None:
        top = row.max(axis=-2, keepdims=True)
        row = row - finite(top)
        block = block + top[..., 0]
    g = np.maximum(before.max(axis=-1, keepdims=True), block.max(axis=-1, keepdims=True))
    if not (_all_near(before, g, near) and _all_near(block, g, near)):
        return None
    g = finite(g)
    block = np.exp(block - g)
    weights, first = keys.weights, block[..., :1]
    if (block == first).all():
        v1 = weighted(v1, first[..., None] if row is None else np.exp(row) * first[..., None])
    else:
        weights = in_place(np.multiply, weights, block[..., None, :])
        v1 = v1 if row is None else weighted(v1, np.exp(row))
    terms = weights.shape[-1] * (state.length + v1.shape[-2])
    floor = floor_of(v1.dtype) * terms * np.exp(queries.highest + keys.highest)
    return Common(g, weights, v1, np.exp(before - g), floor)


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
    nd, kvz = _triangles(log_q, log_k, v1, state.kvz, np.exp(state.log_scale - shift))
    return Partial(nd, row), State(kvz, c, state.length + v1.shape[-2])


def _triangles(
    q: Floats, k: Floats, v1: Floats, kvz: Floats, scale: Floats
) -> tuple[Floats, Floats]:
    """Causal sums of a block, by sub-blocks: ``nd_i = q_i (scale kvz + sum_{j<=i} k_j v1_j)``."""
    n = v1.shape[-2]
    whole = n // SUB_BLOCK * SUB_BLOCK
    if whole == n:
        return _triangle_row(q, k, v1, kvz, scale, SUB_BLOCK)
    parts: list[Floats] = []
    for rows, size in ((slice(0, whole), SUB_BLOCK), (slice(whole, n), n - whole)):
        if rows.start < rows.stop:
            some = [x[..., rows, :] for x in (q, k, v1)]
            nd, kvz = _triangle_row(some[0], some[1], some[2], kvz, scale, size)
            # The next one is made in the same buffer.
            parts.append(nd if rows.stop == n else nd.copy())
            scale = np.ones_like(scale)
    return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)), kvz


def _triangle_row(
    q: Floats, k: Floats, v1: Floats, kvz: Floats, scale: Floats, size: int
) -> tuple[Floats, Floats]:
    """Do sub-blocks of one size: their triangles at once, their states one after the other."""
    q, k, v = (x.reshape(*x.shape[:-2], -1, size, x.shape[-1]) for x in (q, k, v1))
    count = q.shape[-3]
    scores = product(q, transposed(k), "scores")
    np.copyto(scores, 0, where=above_diagonal(size))
    nd = product(scores, v, "nd")
    lead = leading(leading(k.shape[:-3], v.shape[:-3]), kvz.shape[:-2])
    states = buffer("states", (*lead, count + 1, *kvz.shape[-2:]), kvz.dtype)
    np.multiply(kvz, scale[..., None], out=states[..., 0, :, :])
    np.matmul(transposed(k), v, out=states[..., 1:, :, :])
    for before, after in pairwise(np.moveaxis(states, -3, 0)):
        np.add(before, after, out=after)
    more = product(q, states[..., :count, :, :], "more")
    if more.shape != nd.shape:
        nd = nd + more
    else:
        nd += more
    return nd.reshape(*nd.shape[:-3], -1, nd.shape[-1]), states[..., count, :, :].copy()


@cache
def above_diagonal(size: int) -> NDArray[np.bool_]:
    """Pairs of a later key and an earlier query of a sub-block."""
    return np.triu(np.ones((size, size), dtype=bool), 1)

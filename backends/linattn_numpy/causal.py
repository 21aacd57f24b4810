"""Causal attention of a block in place.

A block is *plain* if its exponents lie within ``+-REACH``, or if the norms of its queries bound
theirs: its features are made and used a piece at a time, on one scale with its state, and it is
checked here by the rule of the driver, on the scale of its largest product. Of a block that is
refused each head is done by itself; a head that is refused is done again shifted, and the driver
checks that.
"""

from __future__ import annotations

from itertools import repeat
from math import exp, inf, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.typing import HEAD_BY_HEAD, Exponential, Partial, Pointwise, Spec, State, Tokens
from linattn_numpy.buffers import buffer
from linattn_numpy.features import (
    FeatureMaker,
    column_logs,
    halves_of,
    is_known,
    largest_exponents,
    query_exponents,
    row_log,
    row_term,
    shifted_log,
)
from linattn_numpy.limits import all_finite, finite, floor_of, in_place, tiny
from linattn_numpy.pieces import pieces, sub_blocks
from linattn_numpy.products import leading
from linattn_numpy.triangles import Triangles

__all__ = ["common_scale", "scan_block"]

Floats = NDArray[Any]


CACHE_NUMBERS = 1 << 17
"""Features of a side made at once: half a MB of float32, which a second-level cache holds.

In halves it takes 3 % longer.
"""

LEAST_APART = 1 << 14
"""Features of a head from which heads are done one by one where one of them is refused.

It does not depend on how many heads there are, so that grouping them changes no bit.
"""

NEAR = {4: 20.0, 8: 80.0}
"""Column logs of a state that differ by no more than this may share one scale."""

MOST_KNOWN = {4: 50.0, 8: 300.0}
"""Where those of queries are known to be no larger, exponents are not looked at: 3 % of the time.

By bytes a number.
"""

SHIFTED_ROWS = 512
"""Rows that may share one shift however many columns they have; the driver cuts to as many."""


def scan_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    want_log: bool,
) -> Any:
    """Causal attention of a block after the state, and the state after it."""
    if 0 in query.x.shape or 0 in values_and_one.shape:
        return NotImplemented
    if is_known(query_spec) and is_known(key_spec) and halves_of(query_spec) == halves_of(key_spec):
        answer = _scan_plain(query_spec, key_spec, query, key, values_and_one, state, want_log)
        if answer is not None:
            return answer
        *heads, m, _ = state.kvz.shape
        if prod(heads) > 1 and values_and_one.shape[-2] * m >= LEAST_APART:
            return HEAD_BY_HEAD
    # Longer ones, which come in pieces where they are plain, are tried again in shorter blocks.
    is_short = values_and_one.shape[-2] <= max(SHIFTED_ROWS, CACHE_NUMBERS // state.kvz.shape[-2])
    if is_short and isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        return _scan_shifted(query_spec, key_spec, query, key, values_and_one, state, want_log)
    return NotImplemented


def _scan_plain(
    query_spec: Exponential | Pointwise,
    key_spec: Exponential | Pointwise,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    want_log: bool,
) -> tuple[Partial, State] | None:
    """Scan without shifts, on one scale for block and state; None where that is not accurate."""
    column = column_logs(query_spec, values_and_one.dtype)
    logs = column_logs(key_spec, values_and_one.dtype)
    common = common_scale(column, logs, row_term(key_spec, key), state)
    if common is None:
        return None
    n, highest, num_den = values_and_one.shape[-2], 0.0, None
    bounds = _known_bounds(query_spec, key_spec, query, key, common)
    looks = bool((bounds == inf).any())
    if looks and (bounds < inf).any() and prod(state.kvz.shape[:-2]) > 1:
        return None  # alone, some heads are looked at and some are not
    kvz = state.kvz * common.scale[..., None]
    # elu + 1 takes 1.4 % less where values that weigh 1 are not copied.
    weighs = common.weights.shape[-2] == n or bool((common.weights != 1).any())
    lead = leading(values_and_one.shape[:-2], common.weights.shape[:-2] if weighs else ())
    for rows, length, size in pieces(n, CACHE_NUMBERS // kvz[..., 0].size):
        queries = FeatureMaker(query_spec, query.x, length, "query", merges=False)
        keys = FeatureMaker(key_spec, key.x, length, "key", merges=False)
        k, factor = _scaled(keys.weights, common.column)
        sums = Triangles(queries.weights, k, lead, kvz, size)
        if num_den is None:
            num_den = buffer(
                "rows", (*sums.lead, n, values_and_one.shape[-1]), values_and_one.dtype
            )
        weights: Any = repeat(common.weights[..., None])
        if common.weights.shape[-2] == n:
            weights = sums.cut(common.weights[..., rows, :])
        v = (
            buffer(
                "values_and_one",
                (*lead, length // size, size, values_and_one.shape[-1]),
                values_and_one.dtype,
            )
            if weighs
            else None
        )
        arrays = (
            queries.cut(query.x[..., rows, :]),
            keys.cut(key.x[..., rows, :]),
            sums.cut(values_and_one[..., rows, :]),
            sums.cut(num_den[..., rows, :]),
        )
        for some, others, values, out, weight in zip(*arrays, weights, strict=False):
            reach = queries.make(some, looks=looks)
            if reach < inf:
                reach += keys.make(others, looks=looks)
            if reach == inf:
                return None
            highest = max(highest, reach)
            if factor is not None:
                np.multiply(keys.weights, factor, out=k)
            sums.add(values if v is None else np.multiply(values, weight, out=v), out)
        kvz = sums.state()
    assert num_den is not None
    terms = kvz.shape[-2] * (state.length + n)
    lost = exp(highest) if looks else 2 * exp(float(bounds.max()))
    if not (
        num_den[..., -1].min() >= floor_of(num_den.dtype) * terms * lost and all_finite(num_den)
    ):
        return None
    log = row_log(query_spec, query, common.g[..., None], want_log)
    c = np.zeros(kvz.shape[:-1], kvz.dtype) + (common.g - column)
    if not (sees := kvz[..., -1].any(axis=-1, keepdims=True)).all():
        c = np.where(sees, c, c.dtype.type(-np.inf))
    return Partial(num_den, log, accepted=True), State(kvz, c, state.length + n)


def _known_bounds(
    query_spec: Spec, key_spec: Spec, query: Tokens, key: Tokens, common: Common
) -> Floats:
    """Bounds on the exponents of each head's queries, ``(...)``; inf where they need a look.

    A key's weight must be a normal number, and so must every feature of a query. What underflow can
    take then is twice the smallest number for each key and column, in its feature and in what it
    adds to the state, times the largest feature of the query; exponents of keys need no bound,
    since what is too large for a float shows as inf.
    """
    if key.log_weight is not None or not (
        isinstance(key_spec, Exponential) and isinstance(query_spec, Exponential)
    ):
        return np.asarray(inf)
    least = common.weights.min(axis=(-2, -1))
    if common.column is not None:
        least = least * common.column.min(axis=-1)
    bounds = largest_exponents(query_spec, query.x)
    is_known_enough = (least >= tiny(query.x.dtype)) & (bounds <= MOST_KNOWN[query.x.itemsize])
    return np.where(is_known_enough, bounds, inf)


class Common(NamedTuple):
    """A causal block of keys and the state before it on one scale."""

    g: Floats
    """``(..., 1)``: a column's log is g less its log in the weights of the queries."""
    column: Floats | None
    """What the columns of the keys' weights are yet to be multiplied with; None for 1."""
    weights: Floats
    """``(..., n, 1)`` or ``(..., 1, 1)``: all else that the keys' weights lack."""
    scale: Floats
    """What the columns of the state are multiplied with."""


def common_scale(
    query_logs: Floats, key_logs: Floats, row: Floats | None, state: State
) -> Common | None:
    """Put a plain causal block and its state on one scale; None where that is not accurate.

    ``query_logs``, ``key_logs``: logs that columns have beside their weights; ``row``: the keys'
    own terms.
    """
    near = NEAR[state.kvz.itemsize]
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
    even = (block == first).all(axis=-1)
    if even.any() and not even.all():
        return None  # alone, some heads would be given their factors in another way
    if even.all():
        weights = first[..., None] if row is None else np.exp(row) * first[..., None]
        return Common(g, None, weights, np.exp(before - g))
    weights = np.ones((1, 1), g.dtype) if row is None else np.exp(row)
    return Common(g, block, weights, np.exp(before - g))


def _scaled(k: Floats, column: Floats | None) -> tuple[Floats, Floats | None]:
    """Room for features ``(..., h, n, r)`` times a factor a column, and the factors for them."""
    if column is None:
        return k, None
    factor = column.reshape(*column.shape[:-1], k.shape[-3], 1, -1)
    shape = np.broadcast_shapes(k.shape, factor.shape)
    return k if shape == k.shape else buffer("columns", shape, k.dtype), factor


def _all_near(log: Floats, g: Floats, near: float) -> bool:
    """Whether all columns of each head are within reach of g, or all hold nothing."""
    below = g - log
    if below.max() <= near or log.max() == -np.inf:
        return True
    empty = log.max(axis=-1, keepdims=True) == -np.inf
    return bool(((below.max(axis=-1, keepdims=True) <= near) | empty).all())


def _scan_shifted(
    query_spec: Exponential,
    key_spec: Exponential,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    want_log: bool,
) -> tuple[Partial, State]:
    """Scan on the running maximum of each column, each row on its own largest."""
    log_k = shifted_log(key_spec, key, "key")
    c = np.maximum(state.log_scale, log_k.max(axis=-2) + key_spec.col)
    shift = finite(c)
    log_k = in_place(np.add, log_k, (key_spec.col - shift)[..., None, :])
    np.exp(log_k, out=log_k)
    log_q = query_exponents(query_spec, query, "query")
    log_q = in_place(np.add, log_q, (c + query_spec.col)[..., None, :])
    row = log_q.max(axis=-1, keepdims=True)
    log_q -= finite(row)
    np.exp(log_q, out=log_q)
    kvz = state.kvz * np.exp(state.log_scale - shift)[..., None]
    n, num_den = values_and_one.shape[-2], None
    for rows, size in sub_blocks(n):
        q, k = (log[..., None, rows, :] for log in (log_q, log_k))
        sums = Triangles(q, k, values_and_one.shape[:-2], kvz, size)
        if num_den is None:
            num_den = buffer(
                "rows", (*sums.lead, n, values_and_one.shape[-1]), values_and_one.dtype
            )
        sums.add(*sums.cut(values_and_one[..., rows, :]), *sums.cut(num_den[..., rows, :]))
        kvz = sums.state()
    assert num_den is not None
    return Partial(num_den, row_log(query_spec, query, row, want_log)), State(
        kvz, c, state.length + n
    )

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.typing import HEAD_BY_HEAD, Exponential, Partial, Pointwise, Spec, State, Tokens
from linattn_numpy.buffers import buffer
from linattn_numpy.causal_scales import CommonScale, common_scale, stabilize
from linattn_numpy.features import (
    FeatureMaker,
    exponent_bounds,
    log_features,
    log_offsets,
    num_sign_halves,
    query_exponents,
    row_log,
    row_term,
    supports,
)
from linattn_numpy.limits import (
    MAX_UNINSPECTED_EXPONENT,
    all_finite,
    all_large,
    floor_of,
    tiny,
)
from linattn_numpy.products import broadcast_lead
from linattn_numpy.tiles import sub_blocks, tiles
from linattn_numpy.triangles import Triangles
from linattn_numpy.tuning import CAUSAL_TILE_ELEMENTS, MAX_STABILIZED_ROWS, MIN_APART_ELEMENTS

__all__ = ["scan_block"]

Floats = NDArray[Any]


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
    if (
        supports(query_spec)
        and supports(key_spec)
        and num_sign_halves(query_spec) == num_sign_halves(key_spec)
    ):
        answer = _scan_unshifted(query_spec, key_spec, query, key, values_and_one, state, want_log)
        if answer is not None:
            return answer
        *heads, m, _ = state.kvz.shape
        if prod(heads) > 1 and values_and_one.shape[-2] * m >= MIN_APART_ELEMENTS:
            return HEAD_BY_HEAD
    # Longer ones, which come in pieces where they are plain, are tried again in shorter blocks.
    is_short = values_and_one.shape[-2] <= max(
        MAX_STABILIZED_ROWS, CAUSAL_TILE_ELEMENTS // state.kvz.shape[-2]
    )
    if is_short and isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        return _scan_stabilized(query_spec, key_spec, query, key, values_and_one, state, want_log)
    return NotImplemented


def _scan_unshifted(
    query_spec: Exponential | Pointwise,
    key_spec: Exponential | Pointwise,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    want_log: bool,
) -> tuple[Partial, State] | None:
    """Scan without shifts, on one scale for block and state; None where that is not accurate."""
    column = log_offsets(query_spec, values_and_one.dtype)
    logs = log_offsets(key_spec, values_and_one.dtype)
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
    lead = broadcast_lead(values_and_one.shape[:-2], common.weights.shape[:-2] if weighs else ())
    for rows, length, size in tiles(n, CAUSAL_TILE_ELEMENTS // kvz[..., 0].size):
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
            weights = sums.split(common.weights[..., rows, :])
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
            queries.split(query.x[..., rows, :]),
            keys.split(key.x[..., rows, :]),
            sums.split(values_and_one[..., rows, :]),
            sums.split(num_den[..., rows, :]),
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
    floor = floor_of(num_den.dtype) * terms * lost
    # Exponents of keys that nobody has inspected may make up for small weights.
    least_weight = 1.0 if looks else float(common.weights.min())
    if not (
        all_large(num_den[..., -1:], values_and_one, state.kvz, floor, least_weight)
        and all_finite(num_den)
    ):
        return None
    log = row_log(query_spec, query, common.g[..., None], want_log)
    c = np.zeros(kvz.shape[:-1], kvz.dtype) + (common.g - column)
    if not (sees := kvz[..., -1].any(axis=-1, keepdims=True)).all():
        c = np.where(sees, c, c.dtype.type(-np.inf))
    return Partial(num_den, log, accepted=True), State(kvz, c, state.length + n)


def _known_bounds(
    query_spec: Spec, key_spec: Spec, query: Tokens, key: Tokens, common: CommonScale
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
    bounds = exponent_bounds(query_spec, query.x)
    is_known_enough = (least >= tiny(query.x.dtype)) & (
        bounds <= MAX_UNINSPECTED_EXPONENT[query.x.itemsize]
    )
    return np.where(is_known_enough, bounds, inf)


def _scaled(k: Floats, column: Floats | None) -> tuple[Floats, Floats | None]:
    """Room for features ``(..., h, n, r)`` times a factor a column, and the factors for them."""
    if column is None:
        return k, None
    factor = column.reshape(*column.shape[:-1], k.shape[-3], 1, -1)
    shape = np.broadcast_shapes(k.shape, factor.shape)
    return k if shape == k.shape else buffer("columns", shape, k.dtype), factor


def _scan_stabilized(
    query_spec: Exponential,
    key_spec: Exponential,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    want_log: bool,
) -> tuple[Partial, State]:
    """Scan on the running maximum of each column, each row on its own largest."""
    log_k = log_features(key_spec, key, "key")
    log_q = query_exponents(query_spec, query, "query")
    queries, keys, kvz, row, c = stabilize(query_spec, key_spec, log_q, log_k, state)
    n, num_den = values_and_one.shape[-2], None
    for rows, size in sub_blocks(n):
        q, k = (x[..., None, rows, :] for x in (queries, keys))
        sums = Triangles(q, k, values_and_one.shape[:-2], kvz, size)
        if num_den is None:
            num_den = buffer(
                "rows", (*sums.lead, n, values_and_one.shape[-1]), values_and_one.dtype
            )
        sums.add(*sums.split(values_and_one[..., rows, :]), *sums.split(num_den[..., rows, :]))
        kvz = sums.state()
    assert num_den is not None
    return Partial(num_den, row_log(query_spec, query, row, want_log)), State(
        kvz, c, state.length + n
    )

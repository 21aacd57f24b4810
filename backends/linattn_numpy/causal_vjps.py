"""Gradients of a causal block in place: of its queries, of its keys, and of both at once.

Block and state, before it for queries or after it for keys, are put on one scale, unshifted or
max-stabilized; then one scan over sub-blocks forwards pulls back to queries, one backwards to keys.
A block whose scale would cost a row or a key its digits is left to the generic code, which divides
and conquers.

With the state before the block at hand, and the adjoint after it, both sides of an unshifted block
share features, and the weights and cotangents of the pairs within a sub-block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Declined, Exponential, RowScale, Spec, State, Tokens
from linattn_numpy.block_vjps import UNDERFLOWED_KEYS, max_scale, relative_rows
from linattn_numpy.buffers import buffer
from linattn_numpy.causal_scales import common_scale, stabilize
from linattn_numpy.feature_vjps import (
    NO_VJP,
    Unshifted,
    features_vjp,
    has_vjp,
    sum_to,
    unshifted_features,
)
from linattn_numpy.features import log_features, row_log
from linattn_numpy.limits import (
    EMPTY,
    EXP_LOSS,
    MAX_LOG_LEAD,
    UNDERFLOWED,
    all_finite,
    all_large,
    exp,
    finite_shift,
    floor_of,
    in_place,
    row_sizes,
)
from linattn_numpy.products import product, transposed, weighted
from linattn_numpy.tiles import split_sub_blocks, sub_blocks

__all__ = ["scan_key_vjp", "scan_query_vjp", "scan_vjp"]

Floats = NDArray[Any]
Bools = NDArray[np.bool_]

SHARED = Declined("arguments share leading axes")
# Gradients of pointwise maps are taken from the features themselves.
UNEVEN = Declined("features of a pointwise map are on several log scales")


class _Block(NamedTuple):
    """A causal block as it came."""

    query_spec: Any
    key_spec: Any
    query: Tokens
    key: Tokens
    values_and_one: Floats

    def unsupported(self) -> Declined | None:
        if 0 in self.query.x.shape:
            return EMPTY
        return None if has_vjp(self.query_spec) and has_vjp(self.key_spec) else NO_VJP

    def is_exponential(self) -> bool:
        return isinstance(self.query_spec, Exponential) and isinstance(self.key_spec, Exponential)

    def unshifted(self) -> tuple[Unshifted, Unshifted] | Declined:
        """Features of queries and of keys."""
        queries = unshifted_features(self.query_spec, self.query, "query")
        if isinstance(queries, Declined):
            return queries
        keys = unshifted_features(self.key_spec, self.key, "key")
        return keys if isinstance(keys, Declined) else (queries, keys)


def scan_query_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    grad_output: Floats,
) -> tuple[Floats, RowScale, State] | Declined:
    """Gradient of a causal block of queries, their scales, and the state after the block."""
    block = _Block(query_spec, key_spec, query, key, values_and_one)
    if declined := block.unsupported():
        return declined
    rows = _unshifted_rows(block, state)
    if isinstance(rows, Declined) and block.is_exponential():
        rows = _stabilized_rows(block, state)
    if isinstance(rows, Declined):
        return rows
    found = _query_pairs(block, rows, state, grad_output)
    if isinstance(found, Declined):
        return found
    cotangent, inverse, g1, _, after = found
    empty = ~np.any(after[..., -1:] != 0, axis=-2)
    log_scale = np.where(empty, rows.log_scale.dtype.type(-np.inf), rows.log_scale)
    gradient = features_vjp(query_spec, query.x, rows.q, rows.positive[0], cotangent, None)
    gradient *= inverse
    length = state.length + values_and_one.shape[-2]
    scale = RowScale(rows.log_row, inverse, -g1[..., -1:])
    return gradient, scale, State(after, log_scale, length)


def scan_key_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    adjoint: State,
    grad_num_den: Floats,
    log: Floats,
) -> tuple[Floats, Floats, State] | Declined:
    """Gradients of a causal block of keys and of ``[v, 1]``, and the adjoint before the block."""
    block = _Block(query_spec, key_spec, query, key, values_and_one)
    if declined := block.unsupported():
        return declined
    keys = _unshifted_keys(block, adjoint, grad_num_den, log)
    if isinstance(keys, Declined) and block.is_exponential():
        keys = _stabilized_keys(block, adjoint, grad_num_den, log)
    if isinstance(keys, Declined):
        return keys
    return _keys_vjp(block, keys, _key_pairs(keys), adjoint.length)


def scan_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    adjoint: State,
    grad_output: Floats,
) -> tuple[Floats, Floats, Floats, State] | Declined:
    """Gradients of an unshifted block by queries, keys and ``[v, 1]``, and the adjoint before it.

    ``state`` is the one before the block, ``adjoint`` the one after it. Other blocks, and those of
    arguments that share leading axes, go one side at a time.
    """
    block = _Block(query_spec, key_spec, query, key, values_and_one)
    if declined := block.unsupported():
        return declined
    lead = state.kvz.shape[:-2]
    if any(x.shape[:-2] != lead for x in (query.x, key.x, values_and_one, grad_output)):
        return SHARED
    rows = _unshifted_rows(block, state)
    if isinstance(rows, Declined):
        return rows
    q, k, v = rows.q, rows.k, rows.v
    # The adjoint's own scale: that of the rows, whose queries lack the log of their features.
    log_factor = adjoint.log_scale + rows.log_scale
    if k.shape[:-2] != lead or q.shape[:-2] != lead:
        return SHARED
    if not log_factor.max() <= MAX_LOG_LEAD:
        return Declined(f"the adjoint is more than {MAX_LOG_LEAD:g} above the scale of the block")
    if not (isinstance(key_spec, Exponential) or np.all(rows.log_scale == rows.log_scale[..., :1])):
        return UNEVEN
    found = _query_pairs(block, rows, state, grad_output)
    if isinstance(found, Declined):
        return found
    cotangent, inverse, g1, pairs, _ = found
    grad_query = features_vjp(query_spec, query.x, q, rows.positive[0], cotangent, None)
    grad_query *= inverse
    start = adjoint.kvz * np.exp(log_factor)[..., None]
    keys = _Keys(q, k, v, g1, v[..., -1:], start, -rows.log_scale, rows.positive[1])
    return grad_query, *_keys_vjp(block, keys, reversed(pairs), adjoint.length)


# Queries ----------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """A causal block and the state before it on one scale."""

    q: Floats
    k: Floats
    v: Floats
    start: Floats
    log_row: Floats
    """True log scale of each row, the query's own term included."""
    log_scale: Floats
    """Of the features of ``start`` and of what is added to it."""
    floor: float
    """Least denominator that is accepted."""
    positive: tuple[Bools | None, Bools | None] = (None, None)
    """Where inputs of a ReLU are, of queries and of keys."""


class _Pairs(NamedTuple):
    """Pairs of a key and a query within some sub-blocks, ``(..., count, size, size)``.

    0 where the query does not see the key.
    """

    rows: slice
    size: int
    weights: Floats
    cotangents: Floats


def _unshifted_rows(block: _Block, state: State) -> _Rows | Declined:
    features = block.unshifted()
    if isinstance(features, Declined):
        return features
    queries, keys = features
    common = common_scale(queries.col, keys.col, keys.row, state)
    if isinstance(common, Declined):
        return common
    g, feature_scale, weights, state_scale = common
    v = weighted(block.values_and_one, weights)
    k = keys.weights
    if feature_scale is not None:
        k = in_place(np.multiply, k, feature_scale[..., None, :])
    floor = _floor(block, k, state) * math.exp(queries.max_log + keys.max_log)
    start = state.kvz * state_scale[..., None]
    log_row = g[..., None] if queries.row is None else g[..., None] + queries.row
    log_row = np.broadcast_to(log_row, (*log_row.shape[:-2], block.query.x.shape[-2], 1))
    log_scale = np.broadcast_to(g - queries.col, state.log_scale.shape).astype(v.dtype)
    positive = queries.positive, keys.positive
    return _Rows(queries.weights, k, v, start, log_row, log_scale, floor, positive)


def _stabilized_rows(block: _Block, state: State) -> _Rows:
    q, k, start, log_row, log_scale = stabilize(*block[:4], state)
    log_row = row_log(block.query_spec, block.query, log_row, want_log=True)
    floor = EXP_LOSS * _floor(block, k, state)
    return _Rows(q, k, block.values_and_one, start, log_row, log_scale, floor)


def _floor(block: _Block, k: Floats, state: State) -> float:
    """Least denominator of features and keys that weigh at most 1."""
    keys = state.length + block.values_and_one.shape[-2]
    return floor_of(block.values_and_one.dtype) * float(k.shape[-1] * keys)


def _query_pairs(
    block: _Block, rows: _Rows, state: State, grad_output: Floats
) -> tuple[Floats, Floats, Floats, list[_Pairs], Floats] | Declined:
    """Cotangents of ``q`` times their denominators, inverses of these, g1, pairs, the state after.

    Numerators need not be formed: with the state before a row in two parts, ``g.num`` is the sum of
    ``q * (g.S)``.
    """
    q, k, v, start = rows.q, rows.k, rows.v, transposed(rows.start)
    lead, n = np.broadcast_shapes(grad_output.shape[:-2], start.shape[:-2]), v.shape[-2]
    cotangent = buffer("read", (*lead, n, k.shape[-1]), k.dtype)
    g1, inverses = np.empty((*lead, n, v.shape[-1]), v.dtype), np.empty((*lead, n, 1), v.dtype)
    pairs: list[_Pairs] = []
    for part, size in sub_blocks(v.shape[-2]):
        qs, ks, vs, gs, out, g1s = (
            split_sub_blocks(x, part, size) for x in (q, k, v, grad_output, cotangent, g1)
        )
        states = _prefix_states(start, ks, vs)
        before, above = states[..., :-1, :, :], above_diagonal(size)
        weights = np.matmul(qs, transposed(ks))
        np.copyto(weights, 0, where=above)
        z = before[..., -1:, :]
        denominator = np.matmul(weights, vs[..., -1:]) + np.matmul(qs, transposed(z))
        if not rows.floor <= denominator.min() <= denominator.max() < np.inf:
            return UNDERFLOWED
        inverse = np.divide(1, denominator, out=split_sub_blocks(inverses, part, size))
        np.matmul(gs, before[..., :-1, :], out=out)
        cotangents = np.matmul(gs, transposed(vs[..., :-1]))
        inner = np.vecdot(weights, cotangents) + np.vecdot(qs, out)
        inner = inner[..., None] * inverse
        cotangents -= inner * transposed(vs[..., -1:])
        np.copyto(cotangents, 0, where=above)
        more = buffer("more", out.shape, out.dtype)
        out -= np.multiply(z, inner, out=more)
        out += np.matmul(cotangents, ks, out=more)
        cotangents *= inverse
        np.multiply(gs, inverse, out=g1s[..., :-1])
        np.multiply(inner, -inverse, out=g1s[..., -1:])
        if not all_finite(g1s[..., -1]):
            return UNDERFLOWED
        pairs.append(_Pairs(part, size, transposed(weights), transposed(cotangents)))
        start = states[..., -1, :, :]
    # Cotangents and the values that their rows see must be large enough for underflow to leave
    # their products. They are divided by denominators for queries, and not for keys.
    sizes = row_sizes(grad_output) / np.maximum(inverses, 1)
    if not all_large(sizes, block.values_and_one, state.kvz, rows.floor):
        return UNDERFLOWED
    return cotangent, inverses, g1, pairs, transposed(start).copy()


def _prefix_states(start: Floats, ks: Floats, vs: Floats) -> Floats:
    """States before each sub-block and after the last, ``(..., count + 1, e + 1, m)``.

    By rows of values: a product of few rows with a transposed view takes twice as long.
    """
    count = ks.shape[-3]
    states = buffer("states", (*start.shape[:-2], count + 1, *start.shape[-2:]), start.dtype)
    states[..., 0, :, :] = start
    np.matmul(transposed(vs), ks, out=states[..., 1:, :, :])
    for i in range(count):
        states[..., i + 1, :, :] += states[..., i, :, :]
    return states


@cache
def above_diagonal(size: int) -> Bools:
    """Pairs of a later key and an earlier query of a sub-block."""
    return np.triu(np.ones((size, size), dtype=bool), 1)


# Keys -------------------------------------------------------------------------------------------


class _Keys(NamedTuple):
    """A causal block and the adjoint after it on one scale."""

    q: Floats
    k: Floats
    v: Floats
    g1: Floats
    """Cotangents of the rows' ``[num, den]``."""
    factor: Floats | None
    """What gradients of ``[v, 1]`` have yet to be multiplied with; ``v`` has been."""
    start: Floats
    log_scale: Floats
    """Of the features of ``start`` and of what is added to it."""
    positive: Bools | None = None
    """Where inputs of a ReLU are."""


def _unshifted_keys(
    block: _Block, adjoint: State, grad_num_den: Floats, log_row: Floats
) -> _Keys | Declined:
    features = block.unshifted()
    if isinstance(features, Declined):
        return features
    queries, keys = features
    lead, dtype = adjoint.kvz.shape[:-2], block.values_and_one.dtype
    row = log_row if queries.row is None else log_row - queries.row
    # A scale for each head: on that of another the rows of a head far above it would vanish, and
    # those of earlier keys that count for them overflow. It is -inf where no row has a gradient.
    highest = _max_to(-row.min(axis=-2), lead)
    if not np.all(highest < np.inf):
        return Declined("the scale of a row is not finite")
    block_scale = np.broadcast_to(queries.col + highest, adjoint.log_scale.shape)
    log_scale = np.maximum(adjoint.log_scale, block_scale)
    shift = finite_shift(log_scale)
    factor, top = relative_rows(keys.row)
    scale = log_scale + keys.col + top
    g1 = grad_num_den * np.exp(-row - finite_shift(highest)[..., None])
    start = adjoint.kvz * np.exp(adjoint.log_scale - shift)[..., None]
    limit = _max_scale(block, adjoint, g1, start)
    if not scale.max() + queries.max_log + keys.max_log <= limit:
        return UNDERFLOWED_KEYS
    q, k = queries.weights, keys.weights
    factors = np.exp(block_scale - shift)
    if np.all(factors == factors[..., :1]) and factors.shape[:-1] == lead:
        g1 = g1 * factors[..., :1, None]
    else:
        q = in_place(np.multiply, q, factors[..., None, :])
    scale = np.exp(scale)
    if np.all(scale == scale[..., :1]):
        scale = scale[..., :1, None]
        factor = np.broadcast_to(scale, (*lead, 1, 1)) if factor is None else factor * scale
    elif isinstance(block.key_spec, Exponential):
        k = in_place(np.multiply, k, scale[..., None, :])
    else:
        return UNEVEN
    v = block.values_and_one if factor is None else block.values_and_one * factor
    return _Keys(q, k, v, g1, factor, start, log_scale.astype(dtype), keys.positive)


def _stabilized_keys(
    block: _Block, adjoint: State, grad_num_den: Floats, log_row: Floats
) -> _Keys | Declined:
    q = log_features(block.query_spec, block.query, "query")
    q = in_place(np.add, q, block.query_spec.col[..., None, :])
    q = in_place(np.subtract, q, log_row)
    log_scale = np.maximum(adjoint.log_scale, _max_to(q.max(axis=-2), adjoint.kvz.shape[:-2]))
    shift = finite_shift(log_scale)
    q = exp(in_place(np.subtract, q, shift[..., None, :]))
    k = log_features(block.key_spec, block.key, "key")
    k = in_place(np.add, k, (block.key_spec.col + shift)[..., None, :])
    start = adjoint.kvz * np.exp(adjoint.log_scale - shift)[..., None]
    limit = _max_scale(block, adjoint, grad_num_den, start) - math.log(EXP_LOSS)
    if not k.max() <= limit:
        return UNDERFLOWED_KEYS
    return _Keys(q, exp(k), block.values_and_one, grad_num_den, None, start, log_scale)


def _max_scale(block: _Block, adjoint: State, g1: Floats, start: Floats) -> float:
    """Log of the largest scale, of cotangents and an adjoint of their sizes."""
    rows = adjoint.length + block.values_and_one.shape[-2]
    sizes = np.maximum(np.abs(g1).max(axis=-2), np.abs(start).max(axis=-2))
    terms = adjoint.log_scale.shape[-1] * rows
    return max_scale(block.values_and_one.dtype, terms, sizes)


def _max_to(x: Floats, lead: tuple[int, ...]) -> Floats:
    """Largest over leading axes along which ``(*lead, m)`` was broadcast."""
    extra = max(x.ndim - 1 - len(lead), 0)
    x = np.asarray(x.max(axis=tuple(range(extra))))
    lead = lead[len(lead) - x.ndim + 1 :]
    axes = tuple(i for i, n in enumerate(lead) if n == 1 and x.shape[i] != 1)
    return np.asarray(x.max(axis=axes, keepdims=True))


def _key_pairs(keys: _Keys) -> Iterator[_Pairs]:
    """Weights and cotangents of pairs, from the last sub-blocks to the first."""
    for rows, size in reversed(sub_blocks(keys.v.shape[-2])):
        qs, ks, vs, gs = (
            split_sub_blocks(x, rows, size) for x in (keys.q, keys.k, keys.v, keys.g1)
        )
        hidden = transposed(above_diagonal(size))
        weights = product(ks, transposed(qs), "scores")
        np.copyto(weights, 0, where=hidden)
        cotangents = product(vs, transposed(gs), "cotangents")
        np.copyto(cotangents, 0, where=hidden)
        yield _Pairs(rows, size, weights, cotangents)


def _keys_vjp(
    block: _Block, keys: _Keys, pairs: Iterable[_Pairs], length: int
) -> tuple[Floats, Floats, State]:
    """Gradients of keys and of ``[v, 1]``, and the adjoint before the block; ``pairs`` last first.

    ``length``: of the adjoint after it.
    """
    k, v, start = keys.k, keys.v, keys.start
    lead, n = start.shape[:-2], v.shape[-2]
    grad_values_and_one = np.empty((*lead, n, v.shape[-1]), v.dtype)
    cotangent = buffer("read", (*lead, n, k.shape[-1]), k.dtype)
    for rows, size, weights, cotangents in pairs:
        qs, ks, vs, gs = (split_sub_blocks(x, rows, size) for x in (keys.q, k, v, keys.g1))
        states = _adjoint_states(start, qs, gs)
        later, inner = states[..., 1:, :, :], (*lead, states.shape[-3] - 1)
        out = split_sub_blocks(grad_values_and_one, rows, size)
        np.matmul(ks, later, out=out)
        out += sum_to(np.matmul(weights, gs), inner)
        out = split_sub_blocks(cotangent, rows, size)
        np.matmul(vs, _transposed_copy(later), out=out)
        out += sum_to(product(cotangents, qs, "more"), inner)
        start = states[..., 0, :, :]
    adjoint = State(start.copy(), keys.log_scale, length + n)
    if keys.factor is not None:
        grad_values_and_one *= keys.factor
    total = np.vecdot(block.values_and_one, grad_values_and_one)[..., None]
    grad_key = features_vjp(block.key_spec, block.key.x, k, keys.positive, cotangent, total)
    return grad_key, grad_values_and_one, adjoint


def _adjoint_states(start: Floats, qs: Floats, gs: Floats) -> Floats:
    """Adjoints before each sub-block and after the last, ``(..., count + 1, m, e + 1)``."""
    count = qs.shape[-3]
    states = buffer("states", (*start.shape[:-2], count + 1, *start.shape[-2:]), start.dtype)
    states[..., -1, :, :] = start
    sums = states[..., :-1, :, :]
    if np.broadcast_shapes(qs.shape[:-2], gs.shape[:-2]) == sums.shape[:-2]:
        np.matmul(transposed(qs), gs, out=sums)
    else:
        sums[...] = sum_to(np.matmul(transposed(qs), gs), sums.shape[:-2])
    for i in reversed(range(count)):
        states[..., i, :, :] += states[..., i + 1, :, :]
    return states


def _transposed_copy(states: Floats) -> Floats:
    """In a buffer: a product of few rows with a transposed view takes twice as long."""
    copy = buffer("transposed", (*states.shape[:-2], *states.shape[:-3:-1]), states.dtype)
    np.copyto(copy, transposed(states))
    return copy

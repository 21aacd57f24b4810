"""Gradients of block bodies in place, for exponential maps, elu + 1 and ReLU.

As the forward bodies, a block is *plain* where its exponents are moderate: no shift is made, a
key's row term goes onto ``[v, 1]`` and a query's row scale onto its cotangent. Any other block of
an exponential map is *shifted* by exact maxima. A causal block whose common scale would cost a row
or a key its digits is left to the generic code, which goes by halves.

What may be lost to underflow is bounded in units of attention weights, which sum to 1 over the keys
of a query: the largest product of scales times the smallest normal number, once a term.
"""

from __future__ import annotations

from functools import cache
from math import log, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.typing import RELU, Exact, Exponential, Pointwise, RowScale, Spec, State, Tokens
from linattn_numpy.buffers import buffer
from linattn_numpy.causal_scales import common_scale, stabilize
from linattn_numpy.features import (
    UnshiftedFeatures,
    log_features,
    row_term,
    supports_pointwise,
    unshifted_features,
)
from linattn_numpy.limits import all_finite, finite_shift, floor_of, in_place
from linattn_numpy.products import (
    broadcast_lead,
    multiply,
    product,
    transposed,
    weighted,
    weighted_sum,
)
from linattn_numpy.tiles import split_sub_blocks, sub_blocks

__all__ = [
    "above_diagonal",
    "exact_key_vjp",
    "exact_query_vjp",
    "read_block_vjp",
    "reduce_block_vjp",
    "scan_key_vjp",
    "scan_query_vjp",
]

Floats = NDArray[Any]
Bools = NDArray[np.bool_]

REACH = {4: 20.0, 8: 200.0}
"""Exponents of plain blocks, by bytes a number: the range is four of them and a cotangent's own."""


class _Block(NamedTuple):
    """A block of one side on its natural scale."""

    plain: UnshiftedFeatures
    row: Floats | None
    """Log that all features of a token share, ``(..., n, 1)``; None for 0."""


def _known(spec: Spec) -> bool:
    return isinstance(spec, Exponential) or (
        supports_pointwise(spec) and (spec.f == RELU or spec.offset == 0.0)
    )


def _plain_block(spec: Spec, tokens: Tokens, name: str) -> _Block | None:
    plain = unshifted_features(spec, tokens.x, name)
    if plain is None or plain.max_log > REACH[tokens.x.itemsize]:
        return None
    return _Block(plain, row_term(spec, tokens))


def _largest_scale(dtype: Any, terms: float) -> float:
    """Log of the largest scale from which underflow cannot take more than rounding of 1."""
    return -log(floor_of(dtype)) - log(terms)


def _sum_to(x: Floats, lead: tuple[int, ...], trailing: int = 2) -> Floats:
    """Sum over leading axes along which an array with axes ``lead`` was broadcast."""
    shape = x.shape[: x.ndim - trailing]
    if shape == lead:
        return x
    extra = len(shape) - len(lead)
    axes = [extra + i for i, n in enumerate(lead) if n != shape[extra + i]]
    summed = x.sum(axis=(*range(extra), *axes), keepdims=True)
    return np.asarray(summed.reshape(*lead, *x.shape[x.ndim - trailing :]))


def _max_to(x: Floats, lead: tuple[int, ...]) -> Floats:
    """Largest over those axes, of an array with one axis behind the leading ones."""
    shape = x.shape[:-1]
    extra = max(len(shape) - len(lead), 0)
    x = np.asarray(x.max(axis=tuple(range(extra))))
    own = lead[len(lead) - x.ndim + 1 :]
    axes = tuple(i for i, n in enumerate(own) if n == 1 and x.shape[i] != 1)
    return np.asarray(x.max(axis=axes, keepdims=True))


# From cotangents of features to tokens ----------------------------------------------------------


def _to_tokens(
    spec: Spec,
    x: Floats,
    weights: Floats,
    positive: Bools | None,
    read: Floats,
    total: Floats | None,
) -> Floats:
    """Gradient of tokens whose features, ``weights`` as evaluated, have cotangent ``read``.

    ``read`` is ours to change. ``positive``: where inputs of a ReLU are. ``total``: sum of the
    products of features and cotangents over a row, None for 0.
    """
    if isinstance(spec, Exponential):
        read = in_place(np.multiply, read, weights)
        r = spec.P.shape[-1]
        if spec.paired:
            read[..., :r] -= read[..., r:]
        gradient = np.asarray(np.matmul(read[..., :r], transposed(spec.P)))
        if total is None or (isinstance(spec.Q, float) and spec.Q == 0.0):
            return gradient
        if isinstance(spec.Q, float):
            return in_place(np.subtract, gradient, total * spec.Q * x)
        return in_place(np.subtract, gradient, total * (x @ ((spec.Q + transposed(spec.Q)) / 2)))
    assert isinstance(spec, Pointwise)
    if positive is not None:
        read = in_place(np.multiply, read, positive)
        slope: Any = spec.factor
    else:
        read = in_place(np.multiply, read, np.minimum(weights, spec.factor))
        slope = 1.0
    if isinstance(spec.P, float):
        read *= slope * spec.P
        return read.copy()
    return np.asarray(np.matmul(read, transposed(spec.P) * slope))


# Rows -------------------------------------------------------------------------------------------


def _rows(
    weights: Floats, denominator: Floats, read: Floats, z: Floats, floor: float
) -> tuple[Floats, Floats] | None:
    """``1 / den`` and ``g.out / den`` of rows, or None where one has lost digits or overflowed.

    Numerators need not be formed: with the state of a row in two parts, ``read = g.S`` and the
    normalizers ``z`` of its columns, ``g.num`` is the sum of ``weights * read``. In its place
    ``read`` is left with the cotangent ``read / den - (g.out / den) z`` of the weights.
    """
    if not floor <= denominator.min() <= denominator.max() < np.inf:
        return None
    inverse = 1 / denominator
    inner = np.vecdot(weights, read)[..., None] * inverse
    inner *= inverse
    if not all_finite(inner):
        return None
    read *= inverse
    read -= np.multiply(z, inner, out=buffer("more", read.shape, read.dtype))
    return inverse, inner


# Full attention ---------------------------------------------------------------------------------


def read_block_vjp(
    query_spec: Spec, tokens: Tokens, state: State, grad_output: Floats, adjoint: State
) -> Any:
    """Gradient of queries that read a state, and the adjoint with them added."""
    if 0 in tokens.x.shape or not _known(query_spec):
        return NotImplemented
    block = _plain_block(query_spec, tokens, "query")
    if block is not None:
        c = state.log_scale + block.plain.col
        top = finite_shift(c.max(axis=-1, keepdims=True))
        weights, kvz, highest = block.plain.weights, state.kvz, np.exp(block.plain.max_log)
        if not np.all(c == top):
            kvz = kvz * np.exp(c - top)[..., None]
        column = block.plain.col - top
    elif isinstance(query_spec, Exponential):
        weights = log_features(query_spec, tokens, "query")
        c = state.log_scale + query_spec.col
        weights = in_place(np.add, weights, c[..., None, :])
        weights -= finite_shift(weights.max(axis=-1, keepdims=True))
        np.exp(weights, out=weights)
        # A column without keys has no scale, and no key to ask for one.
        column, kvz, highest = -finite_shift(state.log_scale), state.kvz, 1.0
    else:
        return NotImplemented
    positive = None if block is None else block.plain.positive
    z = kvz[..., -1:]
    read = product(grad_output, transposed(kvz[..., :-1]), "read")
    # Underflow takes at most the smallest number times the largest weight or sum, once a term.
    floor = floor_of(z.dtype) * z.shape[-2] * max(highest, z.max())
    rows = _rows(weights, np.matmul(weights, z), read, transposed(z), floor)
    if rows is None:
        return NotImplemented
    inverse, inner = rows
    g1 = np.concatenate([grad_output * inverse, -inner], axis=-1)
    sums = _sum_to(weighted_sum(weights, g1), adjoint.kvz.shape[:-2])
    adjoint = _added(adjoint, sums, column, g1.shape[-2])
    return _to_tokens(query_spec, tokens.x, weights, positive, read, None), adjoint


def _added(adjoint: State, sums: Floats, column: Floats, n: int) -> State:
    """Add a block's sums, on the log scale ``column``, to an adjoint; ``sums`` is written over."""
    length = adjoint.length + n
    if np.array_equal(adjoint.log_scale, column):
        sums += adjoint.kvz
        return State(sums, adjoint.log_scale, length)
    after = np.maximum(adjoint.log_scale, column)
    shift = finite_shift(after)
    sums *= np.exp(column - shift)[..., None]
    sums += adjoint.kvz * np.exp(adjoint.log_scale - shift)[..., None]
    return State(sums, after, length)


def reduce_block_vjp(key_spec: Spec, tokens: Tokens, values_and_one: Floats, adjoint: State) -> Any:
    """Gradients of keys and of ``[v, 1]`` that an adjoint has read."""
    if 0 in tokens.x.shape or not _known(key_spec):
        return NotImplemented
    scale = _largest_scale(
        values_and_one.dtype, prod(adjoint.log_scale.shape[-1:]) * max(adjoint.length, 1)
    )
    block = _plain_block(key_spec, tokens, "key")
    if block is not None:
        factor, top = _row_factor(block.row)
        column = adjoint.log_scale + block.plain.col + top
        if not column.max() + block.plain.max_log <= scale:
            return NotImplemented
        kvz = adjoint.kvz * np.exp(column)[..., None]
        weights = block.plain.weights
    elif isinstance(key_spec, Exponential):
        factor, kvz = None, adjoint.kvz
        weights = log_features(key_spec, tokens, "key")
        weights = in_place(np.add, weights, (adjoint.log_scale + key_spec.col)[..., None, :])
        if not weights.max() <= scale:
            return NotImplemented
        np.exp(weights, out=weights)
    else:
        return NotImplemented
    shape = (*broadcast_lead(weights.shape[:-2], kvz.shape[:-2]), *values_and_one.shape[-2:])
    grad_values_and_one = multiply(weights, kvz, np.empty(shape, values_and_one.dtype))
    scaled = values_and_one if factor is None else values_and_one * factor
    if factor is not None:
        grad_values_and_one *= factor
    total = np.vecdot(values_and_one, grad_values_and_one)[..., None]
    read = product(scaled, transposed(kvz), "read")
    positive = None if block is None else block.plain.positive
    return _to_tokens(key_spec, tokens.x, weights, positive, read, total), grad_values_and_one


def _row_factor(row: Floats | None) -> tuple[Floats | None, Any]:
    """Rows relative to their largest ``(..., 1)``, which is 0 where there is none."""
    if row is None:
        return None, 0.0
    top = finite_shift(row.max(axis=-2, keepdims=True))
    return np.exp(row - top), top[..., 0]


# Causal blocks ----------------------------------------------------------------------------------


def scan_query_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    grad_output: Floats,
) -> Any:
    """Gradient of a causal block of queries, their scales, and the state after the block."""
    if 0 in query.x.shape or not (_known(query_spec) and _known(key_spec)):
        return NotImplemented
    args = (query_spec, key_spec, query, key, values_and_one, state)
    common = _plain_scale(*args)
    if common is None and isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        common = _shifted_scale(query_spec, key_spec, query, key, values_and_one, state)
    if common is None:
        return NotImplemented
    q, k, v, start, log_row, c, floor, (positive, _) = common
    read, z, after = _read_causally(grad_output, k, v, start)
    rows = _rows(q, np.vecdot(q, z)[..., None], read, z, floor)
    if rows is None:
        return NotImplemented
    empty = ~np.any(after[..., -1:] != 0, axis=-2)
    c = np.where(empty, c.dtype.type(-np.inf), c)
    gradient = _to_tokens(query_spec, query.x, q, positive, read, None)
    return gradient, RowScale(log_row, *rows), State(after, c, state.length + v.shape[-2])


class _Common(NamedTuple):
    """A causal block and the state before it on one scale."""

    q: Floats
    k: Floats
    v: Floats
    start: Floats
    log_row: Floats
    """True log scale of each row, the query's own term included."""
    c: Floats
    """Log scale of the columns of ``start`` and of what is added to it."""
    floor: float
    """Least sound denominator."""
    positive: tuple[Bools | None, Bools | None] = (None, None)
    """Where inputs of a ReLU are, of queries and of keys."""


def _plain_scale(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
) -> _Common | None:
    queries = _plain_block(query_spec, query, "query")
    keys = None if queries is None else _plain_block(key_spec, key, "key")
    if queries is None or keys is None:
        return None
    common = common_scale(queries.plain.col, keys.plain.col, keys.row, state)
    if common is None:
        return None
    g, column, weights, scale = common
    v = weighted(values_and_one, weights)
    k = keys.plain.weights
    if column is not None:
        k = in_place(np.multiply, k, column[..., None, :])
    highest = np.exp(queries.plain.max_log + keys.plain.max_log)
    floor = (
        floor_of(values_and_one.dtype)
        * k.shape[-1]
        * (state.length + values_and_one.shape[-2])
        * highest
    )
    start = state.kvz * scale[..., None]
    log_row = g[..., None] if queries.row is None else g[..., None] + queries.row
    shape = (*log_row.shape[:-2], query.x.shape[-2], 1)
    c = np.broadcast_to(g - queries.plain.col, state.log_scale.shape).astype(values_and_one.dtype)
    log_row = np.broadcast_to(log_row, shape)
    positive = queries.plain.positive, keys.plain.positive
    return _Common(queries.plain.weights, k, v, start, log_row, c, floor, positive)


def _shifted_scale(
    query_spec: Exponential,
    key_spec: Exponential,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
) -> _Common:
    log_k = log_features(key_spec, key, "key")
    log_q = log_features(query_spec, query, "query")
    q, k, start, row, c = stabilize(query_spec, key_spec, log_q, log_k, state)
    floor = floor_of(values_and_one.dtype) * k.shape[-1] * (state.length + values_and_one.shape[-2])
    return _Common(q, k, values_and_one, start, row, c, floor)


def scan_key_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    adjoint: State,
    grad_num_den: Floats,
    log_row: Floats,
) -> Any:
    """Gradients of a causal block of keys and of ``[v, 1]``, and the adjoint before the block."""
    if 0 in query.x.shape or not (_known(query_spec) and _known(key_spec)):
        return NotImplemented
    args = (query_spec, key_spec, query, key, values_and_one, adjoint, grad_num_den, log_row)
    common = _plain_adjoint(*args)
    if common is None and isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        common = _shifted_adjoint(query_spec, key_spec, *args[2:])
    if common is None:
        return NotImplemented
    q, k, v, g1, factor, start, h, positive = common
    lead = adjoint.kvz.shape[:-2]
    rows = sub_blocks(v.shape[-2])
    grad_values_and_one = np.empty((*lead, *values_and_one.shape[-2:]), values_and_one.dtype)
    read = buffer("read", (*lead, values_and_one.shape[-2], k.shape[-1]), k.dtype)
    for part, size in reversed(rows):
        qs, ks, vs, gs = (split_sub_blocks(x, part, size) for x in (q, k, v, g1))
        inner = (*lead, (part.stop - part.start) // size)
        states = buffer("states", (*lead, inner[-1] + 1, *start.shape[-2:]), start.dtype)
        states[..., -1, :, :] = start
        own = states[..., :-1, :, :]
        if np.broadcast_shapes(qs.shape[:-2], gs.shape[:-2]) == inner:
            np.matmul(transposed(qs), gs, out=own)
        else:
            own[...] = _sum_to(np.matmul(transposed(qs), gs), inner)
        for i in range(inner[-1] - 1, -1, -1):
            states[..., i, :, :] += states[..., i + 1, :, :]
        later, hidden = states[..., 1:, :, :], transposed(above_diagonal(size))
        out = split_sub_blocks(grad_values_and_one, part, size)
        np.matmul(ks, later, out=out)
        scores = product(ks, transposed(qs), "scores")
        np.copyto(scores, 0, where=hidden)
        out += _sum_to(product(scores, gs, "more"), inner)
        out = split_sub_blocks(read, part, size)
        np.matmul(vs, _turned(later), out=out)
        scores = product(vs, transposed(gs), "scores")
        np.copyto(scores, 0, where=hidden)
        out += _sum_to(product(scores, qs, "more"), inner)
        start = states[..., 0, :, :].copy()
    if factor is not None:
        grad_values_and_one *= factor
    total = np.vecdot(values_and_one, grad_values_and_one)[..., None]
    gradient = _to_tokens(key_spec, key.x, k, positive, read, total)
    return gradient, grad_values_and_one, State(start, h, adjoint.length + values_and_one.shape[-2])


class _Suffix(NamedTuple):
    """A causal block and the adjoint behind it on one scale."""

    q: Floats
    k: Floats
    v: Floats
    g1: Floats
    factor: Floats | None
    """What gradients of ``[v, 1]`` have yet to be multiplied with; ``v`` has been."""
    start: Floats
    h: Floats
    """Log scale of the columns of ``start`` and of what is added to it."""
    positive: Bools | None = None
    """Where inputs of a ReLU are, of keys."""


def _plain_adjoint(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    adjoint: State,
    grad_num_den: Floats,
    log_row: Floats,
) -> _Suffix | None:
    queries = _plain_block(query_spec, query, "query")
    keys = None if queries is None else _plain_block(key_spec, key, "key")
    if queries is None or keys is None:
        return None
    lead, dtype = adjoint.kvz.shape[:-2], values_and_one.dtype
    row = log_row if queries.row is None else log_row - queries.row
    # A scale for each head: on that of another the rows of a head far above it would vanish, and
    # those of earlier keys that count for them overflow. It is -inf where no row has a gradient.
    highest = _max_to(-row.min(axis=-2), lead)
    if not np.all(highest < np.inf):
        return None
    column = np.broadcast_to(queries.plain.col + highest, adjoint.log_scale.shape)
    h = np.maximum(adjoint.log_scale, column)
    shift = finite_shift(h)
    factor, top = _row_factor(keys.row)
    scale = h + keys.plain.col + top
    terms = h.shape[-1] * (adjoint.length + values_and_one.shape[-2])
    if not scale.max() + queries.plain.max_log + keys.plain.max_log <= _largest_scale(dtype, terms):
        return None
    q, k = queries.plain.weights, keys.plain.weights
    g1 = grad_num_den * np.exp(-row - finite_shift(highest)[..., None])
    column = np.exp(column - shift)
    if np.all(column == column[..., :1]) and column.shape[:-1] == lead:
        g1 = g1 * column[..., :1, None]
    else:
        q = in_place(np.multiply, q, column[..., None, :])
    scale = np.exp(scale)
    if np.all(scale == scale[..., :1]):
        scale = scale[..., :1, None]
        factor = np.broadcast_to(scale, (*lead, 1, 1)) if factor is None else factor * scale
    elif isinstance(key_spec, Exponential):
        k = in_place(np.multiply, k, scale[..., None, :])
    else:
        return None  # these gradients are taken from the features themselves
    v = values_and_one if factor is None else values_and_one * factor
    start = adjoint.kvz * np.exp(adjoint.log_scale - shift)[..., None]
    return _Suffix(q, k, v, g1, factor, start, h.astype(dtype), keys.plain.positive)


def _shifted_adjoint(
    query_spec: Exponential,
    key_spec: Exponential,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    adjoint: State,
    grad_num_den: Floats,
    log_row: Floats,
) -> _Suffix | None:
    lead = adjoint.kvz.shape[:-2]
    q = log_features(query_spec, query, "query")
    q = in_place(np.add, q, query_spec.col[..., None, :])
    q = in_place(np.subtract, q, log_row)
    h = np.maximum(adjoint.log_scale, _max_to(q.max(axis=-2), lead))
    shift = finite_shift(h)
    q = in_place(np.subtract, q, shift[..., None, :])
    np.exp(q, out=q)
    k = log_features(key_spec, key, "key")
    k = in_place(np.add, k, (key_spec.col + shift)[..., None, :])
    terms = h.shape[-1] * (adjoint.length + values_and_one.shape[-2])
    if not k.max() <= _largest_scale(values_and_one.dtype, terms):
        return None
    np.exp(k, out=k)
    start = adjoint.kvz * np.exp(adjoint.log_scale - shift)[..., None]
    return _Suffix(q, k, values_and_one, grad_num_den, None, start, h)


# Triangles --------------------------------------------------------------------------------------


@cache
def above_diagonal(size: int) -> NDArray[np.bool_]:
    """Pairs of a later key and an earlier query of a sub-block."""
    return np.triu(np.ones((size, size), dtype=bool), 1)


def _turned(states: Floats) -> Floats:
    """Transposed copy in a buffer: a product of few rows with a view takes twice as long."""
    turned = buffer("transposed", (*states.shape[:-2], *states.shape[:-3:-1]), states.dtype)
    np.copyto(turned, transposed(states))
    return turned


def _read_causally(
    grad_output: Floats, k: Floats, v: Floats, start: Floats
) -> tuple[Floats, Floats, Floats]:
    """``g.S`` and z of the state S of each row, both (..., n, m), and the state after the block."""
    lead = np.broadcast_shapes(grad_output.shape[:-2], start.shape[:-2])
    read = buffer("read", (*lead, *k.shape[-2:]), k.dtype)
    z = buffer("z", read.shape, k.dtype)
    for part, size in sub_blocks(v.shape[-2]):
        gs, ks, vs = (split_sub_blocks(x, part, size) for x in (grad_output, k, v))
        count, above = (part.stop - part.start) // size, above_diagonal(size)
        # By rows of values: a product of few rows with a transposed view takes twice as long.
        shape = (*start.shape[:-2], count + 1, *start.shape[:-3:-1])
        states = buffer("states", shape, v.dtype)
        states[..., 0, :, :] = transposed(start)
        np.matmul(transposed(vs), ks, out=states[..., 1:, :, :])
        for i in range(count):
            states[..., i + 1, :, :] += states[..., i, :, :]
        before = states[..., :count, :, :]
        # What is visible of the block's own keys, for cotangents and for normalizers: one product.
        scores = buffer("scores", (*lead, count, 2 * size, size), k.dtype)
        np.matmul(gs, transposed(vs[..., :-1]), out=scores[..., :size, :])
        scores[..., size:, :] = transposed(vs[..., -1:])
        np.copyto(scores, 0, where=np.concatenate([above, above]))
        both = product(scores, ks, "more")
        out = split_sub_blocks(read, part, size)
        np.matmul(gs, before[..., :-1, :], out=out)
        out += both[..., :size, :]
        np.add(both[..., size:, :], before[..., -1:, :], out=split_sub_blocks(z, part, size))
        start = transposed(states[..., count, :, :])
    return read, z, start.copy()


# Softmax attention ------------------------------------------------------------------------------


def exact_query_vjp(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    grad_num_den: Floats,
    log_row: Floats,
    visible: Any,
) -> Floats:
    """Gradient of a block of queries through their softmax weights for a block of keys."""
    weights = _softmax_weights(spec, query, key, log_row, visible)
    grad_logits = in_place(
        np.multiply, product(grad_num_den, transposed(values_and_one), "read"), weights
    )
    return np.asarray(np.matmul(grad_logits, key.x * spec.scale))


def exact_key_vjp(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    grad_num_den: Floats,
    log_row: Floats,
    visible: Any,
) -> tuple[Floats, Floats]:
    """Gradients of a block of keys and of ``[v, 1]`` by the softmax weights of queries."""
    weights = _softmax_weights(spec, query, key, log_row, visible)
    grad_logits = in_place(
        np.multiply, product(grad_num_den, transposed(values_and_one), "read"), weights
    )
    return np.matmul(transposed(grad_logits), query.x * spec.scale), np.matmul(
        transposed(weights), grad_num_den
    )


def _softmax_weights(
    spec: Exact, query: Tokens, key: Tokens, log_row: Floats, visible: Any
) -> Floats:
    """Weights of visible keys on the scale of their rows; 0 for the others."""
    logits = product(query.x * spec.scale, transposed(key.x), "logits")
    if key.log_weight is not None:
        logits = in_place(np.add, logits, transposed(key.log_weight))
    if visible is not None:
        np.copyto(logits, -np.inf, where=~visible)
    logits = in_place(np.subtract, logits, log_row)
    np.exp(logits, out=logits)
    return logits

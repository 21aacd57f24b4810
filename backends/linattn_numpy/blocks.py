"""Block bodies in place: buffers kept by each thread, shifts only where the range needs them.

A block of full attention is done on its *natural* scale: exponents ``u = x P`` are exponentiated
as they are, and what was lost shows in the sums. The row term (curvature and log weight) goes onto
``[v, 1]``, relative to its largest in the block; that largest and the constants of the columns go
into log_scale. A key side is sound if every column's sum lies within COLUMN_SUMS: underflow has
then taken less than rounding, and all that follows has room. A row is sound if its denominator is
beyond what underflow can have taken from it, by the rule of the driver, and nothing is infinite.
Any other block is done again *shifted* by the exact running maximum of each column.

A causal block is *plain* if its exponents lie within ``+-REACH``. It shares one scale with its
state, so it is checked here by the rule of the driver, on the scale of its largest product;
refused, it is done again shifted, and the driver checks that. Blocks with NaN or inf go to the
generic code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Assigned, Exact, Exponential, Partial, Pointwise, Spec, State, Tokens
from linattn_numpy.assigned import assigned_sums
from linattn_numpy.buffers import buffer, zeros
from linattn_numpy.products import leading, multiply, product, transposed, weighted_sum

__all__ = [
    "AHEAD",
    "LEAST_READ",
    "Common",
    "Plain",
    "activated",
    "common_scale",
    "divide",
    "exact_block",
    "exact_more",
    "inputs",
    "is_simple",
    "read_block",
    "reduce_block",
    "scan_block",
    "values_block",
    "window_block",
]

Floats = NDArray[Any]

REACH = {4: 30.0, 8: 300.0}
"""Exponents of a causal block up to this size need no shift; the range is about 3 REACH."""

COLUMN_SUMS = {4: (1e-12, 1e12), 8: (1e-130, 1e130)}
"""Sums of a column that need no shift, by bytes a number.

Whatever scale a later read chooses, it loses less than rounding of columns that differ so much.
"""

CACHE_NUMBERS = 1 << 17
"""Exponentials made at once: half a MB of float32, which a second-level cache holds."""

POINTWISE_NUMBERS = 1 << 18
"""Other features made at once: in two pieces elu + 1 takes 2 % longer."""

AHEAD = 10.0
"""How far above the log scale of a state a block may be that is added without rescaling it."""

NEAR = {4: 20.0, 8: 80.0}
"""Column logs of a state that differ by no more than this may share one scale."""

LEAST_READ = {4: 1e-13, 8: 1e-130}
"""A read with a denominator below it is done again shifted: small values may have underflowed."""

LOWEST = {4: -80.0, 8: -700.0}
"""elu + 1 below this is hardly a normal number."""

LARGE = 1e10
"""Blocks of pointwise features beyond this, or all below its inverse, go to the generic code."""

SUB_BLOCK = 32
"""Rows of a causal block that share one triangle; longer ones waste half a square."""


class Plain(NamedTuple):
    """Weights of a block on their natural scale: ``phi = weights * exp(col)`` without row term."""

    weights: Floats
    col: Floats
    highest: float
    """Log of the largest weight, at least 0."""


def _exponents(spec: Exponential, x: Floats, name: str) -> Floats:
    """Return ``x P`` in a buffer, for one sign of a paired map."""
    return _project(x, spec.P, name)


def _project(x: Floats, P: Floats, name: str) -> Floats:
    """Return ``x P`` in a buffer; blocks that share their P are one product, not one each."""
    lead = leading(x.shape[:-2], P.shape[:-2])
    u = buffer(name, (*lead, x.shape[-2], P.shape[-1]), x.dtype)
    out = u
    while x.ndim > 2 and P.ndim > 2 and P.shape[-3] == 1:
        x, out = (a.reshape(*a.shape[:-3], -1, a.shape[-1]) for a in (x, out))
        P = P[..., 0, :, :]
    if P.ndim == 2:
        x, out = (a.reshape(-1, a.shape[-1]) for a in (x, out))
    multiply(x, P, out)
    return u


def _features(
    spec: Exponential | Pointwise, x: Floats, name: str
) -> Iterator[tuple[slice, Floats]]:
    """Weights of a block, some rows at a time: they are still in cache when they are multiplied."""
    lead, m = x.shape[:-2], x.shape[-1]
    if not isinstance(spec.P, float):
        lead, m = leading(lead, spec.P.shape[:-2]), spec.P.shape[-1]
    paired = isinstance(spec, Exponential) and spec.paired
    n, count = x.shape[-2], prod(lead)
    numbers = CACHE_NUMBERS if isinstance(spec, Exponential) else POINTWISE_NUMBERS
    size = max(1, numbers // ((2 * m if paired else m) * count))
    if isinstance(spec, Exponential) and not paired and count == 1:
        u = buffer(name, (*lead, min(size, n), m), x.dtype)
        for start in range(0, n, size):
            rows = slice(start, min(start + size, n))
            some = u[..., : rows.stop - start, :]
            multiply(x[..., rows, :], spec.P, some)
            yield rows, np.exp(some, out=some)
        return
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        yield rows, _natural(spec, x[..., rows, :], name)


def _natural(spec: Exponential | Pointwise, x: Floats, name: str) -> Floats:
    """Weights of some rows on their natural scale: what is beyond the range is inf or 0."""
    if isinstance(spec, Exponential):
        return _exponentiated(spec, _exponents(spec, x, name), name)
    return activated(spec, inputs(spec, x, name), name)


def _plain(spec: Spec | Exact, x: Floats, name: str) -> Plain | None:
    """Weights of a block, or None where it needs a shift or generic code."""
    if isinstance(spec, Exponential):
        u = _exponents(spec, x, name)
        reach = max(float(u.max()), -float(u.min()))
        if not reach <= REACH[u.itemsize]:
            return None
        return Plain(_exponentiated(spec, u, name), spec.col, reach)
    if not is_simple(spec):
        return None
    u = inputs(spec, x, name)
    low, high = float(u.min()), float(u.max())
    if not (LOWEST[u.itemsize] <= low if spec.f.name == "elu_plus_one" else low > -np.inf):
        return None
    # Sums and products of features far from 1 would leave the range of float32.
    if not (high < LARGE and (spec.offset != 0.0 or spec.f.name != "relu" or high > 1 / LARGE)):
        return None
    weights = activated(spec, u, name)
    highest = max(1.0, (max(high, 0.0) + 1 + abs(spec.offset)) * spec.factor)
    return Plain(weights, np.zeros(weights.shape[-1], weights.dtype), float(np.log(highest)))


def _exponentiated(spec: Exponential, u: Floats, name: str) -> Floats:
    """Exponentials of all columns; those of the second half of a paired map are reciprocals."""
    if not spec.paired:
        return np.exp(u, out=u)
    r = u.shape[-1]
    both = buffer(name + "_both", (*u.shape[:-1], 2 * r), u.dtype)
    np.exp(u, out=both[..., :r])
    np.divide(1.0, both[..., :r], out=both[..., r:])
    return both


def is_simple(spec: Spec | Exact) -> TypeGuard[Pointwise]:
    """Whether a spec is one of the pointwise maps that are made here."""
    return (
        isinstance(spec, Pointwise)
        and spec.f.name in ("elu_plus_one", "relu")
        and spec.quad is None
        and spec.bias is None
        and isinstance(spec.factor, float)
    )


def inputs(spec: Pointwise, x: Floats, name: str) -> Floats:
    """Return what the activation is applied to; it is not ours to change."""
    if not isinstance(spec.P, float):
        return _project(x, spec.P, name)
    return x if spec.P == 1.0 else np.multiply(x, spec.P, out=buffer(name, x.shape, x.dtype))


def activated(spec: Pointwise, u: Floats, name: str) -> Floats:
    """Features of what the activation is applied to, in a buffer."""
    weights = buffer(name + "_both", u.shape, u.dtype)
    if spec.f.name == "relu":
        np.maximum(u, zeros(u.shape, u.dtype), out=weights)
    else:
        high = np.maximum(u, zeros(u.shape, u.dtype), out=buffer(name + "_high", u.shape, u.dtype))
        np.subtract(u, high, out=weights)
        np.exp(weights, out=weights)
        weights += high
    if spec.offset != 0.0:
        weights += spec.offset
    if spec.factor != 1.0:
        weights *= spec.factor
    return weights


def _column_logs(spec: Exponential | Pointwise, dtype: Any) -> Floats:
    """Return what the logs of a map's columns have beside those of their weights."""
    if isinstance(spec, Exponential):
        return np.asarray(spec.col)
    return np.zeros((), dtype)


def _row_term(spec: Spec | Exact, tokens: Tokens) -> Floats | None:
    """Log that all features of a token share, ``(..., n, 1)``; None for 0; NaN past range."""
    row: Floats | None = tokens.log_weight
    if isinstance(spec, Exponential):
        x = tokens.x
        if isinstance(spec.Q, float):
            quad = np.einsum("...i,...i->...", x, x)[..., None] * (-0.5 * spec.Q)
        else:
            quad = np.einsum("...i,...i->...", x, x @ spec.Q)[..., None] * -0.5
        quad += quad - quad
        row = quad if row is None else quad + row
    return row


def _all_finite(x: Floats) -> bool:
    return bool(np.isfinite(x, out=buffer("finite", x.shape, bool)).all())


def values_block(value: Floats, mask: Any, dtype: Any) -> Any:
    """``[v, 1]`` in a buffer, for the block of this moment."""
    lead = value.shape[:-2] if mask is None else np.broadcast_shapes(value.shape, mask.shape)[:-2]
    v1 = buffer("values", (*lead, value.shape[-2], value.shape[-1] + 1), dtype)
    v1[..., :-1] = value
    v1[..., -1] = 1
    if mask is not None:
        np.copyto(v1[..., :-1], 0, where=~mask)
    return v1


def _weighted(v1: Floats, weights: Floats) -> Floats:
    """Multiply in a buffer."""
    shape = (*leading(v1.shape[:-2], weights.shape[:-2]), *v1.shape[-2:])
    return np.asarray(np.multiply(v1, weights, out=buffer("v1", shape, v1.dtype)))


def _finite(log: Floats) -> Floats:
    """Replace -inf, nothing seen, by 0."""
    return np.where(log == -np.inf, log.dtype.type(0), log)


def _in_place(operation: np.ufunc, x: Floats, y: Floats) -> Floats:
    """Put the result into x, unless y has leading axes (of a state, of weights) beyond its."""
    fits = np.broadcast_shapes(x.shape, y.shape) == x.shape
    return np.asarray(operation(x, y, out=x if fits else None))


def _shifted_log(spec: Exponential, tokens: Tokens, name: str) -> Floats:
    """Full log features of a block, but for ``col``, in a buffer."""
    u = _exponents(spec, tokens.x, name)
    if spec.paired:
        r = u.shape[-1]
        both = buffer(name + "_both", (*u.shape[:-1], 2 * r), u.dtype)
        both[..., :r] = u
        np.negative(u, out=both[..., r:])
        u = both
    row = _row_term(spec, tokens)
    assert row is not None
    return _in_place(np.add, u, row)


def reduce_block(key_spec: Spec, tokens: Tokens, v1: Floats, state: State) -> Any:
    """Add a block of keys to the state."""
    if 0 in tokens.x.shape:
        return NotImplemented
    if isinstance(key_spec, Assigned):
        sums = assigned_sums(key_spec, tokens, v1)
        return NotImplemented if sums is None else _merged(state, *sums, v1.shape[-2])
    if not isinstance(key_spec, Exponential) and not is_simple(key_spec):
        return NotImplemented
    c, row, shares = _column_logs(key_spec, v1.dtype), _row_term(key_spec, tokens), None
    lost = False
    if row is not None:
        top = row.max(axis=-2, keepdims=True)
        shares = np.exp(row - (top if tokens.log_weight is None else _finite(top)))
        if not (top - row).max() < -LOWEST[row.itemsize]:
            lost = bool(np.any((shares < _tiny(shares.dtype)) & (row > -np.inf)))
        c = c + top[..., 0]
    kvz, largest = np.zeros(()), 0.0
    for rows, weights in _features(key_spec, tokens.x, "key"):
        some = v1[..., rows, :]
        if shares is not None:
            some = _weighted(some, shares[..., rows, :])
        if rows.start == 0:
            kvz = weighted_sum(weights, some)
        else:
            kvz += weighted_sum(weights, some)
        if lost:
            largest = max(largest, float(weights.max()))
    z, (least, most) = kvz[..., -1], COLUMN_SUMS[kvz.itemsize]
    if isinstance(key_spec, Pointwise) and key_spec.f.name == "relu":
        z = np.where(z == 0, 1, z)
    if lost:
        # A row whose share has underflowed may have features as large as they come.
        least = max(least, _floor(z.dtype) * v1.shape[-2] * largest)
    if not (least <= z.min() <= z.max() <= most and _all_finite(kvz)):
        return _reduce_shifted(key_spec, tokens, v1, state)
    return _merged(state, kvz, c, v1.shape[-2])


def _reduce_shifted(key_spec: Spec, tokens: Tokens, v1: Floats, state: State) -> Any:
    if not isinstance(key_spec, Exponential):
        return NotImplemented
    log = _shifted_log(key_spec, tokens, "key")
    top = log.max(axis=-2)
    if not np.isfinite(log.max(initial=-np.inf)) and not np.all(top == -np.inf):
        return NotImplemented
    log -= _finite(top)[..., None, :]
    np.exp(log, out=log)
    return _merged(state, weighted_sum(log, v1), top + key_spec.col, v1.shape[-2])


def _merged(state: State, kvz: Floats, c: Floats, n: int) -> State:
    """Add a block's sum, on the scale ``c``, to a state; ``kvz`` is ours to change.

    The state after it is an array of its own throughout: not a parameter of the map, spread over
    the heads, and not the log scale of the state before.
    """
    same = kvz.shape == state.kvz.shape
    ahead = c - state.log_scale
    if same and ahead.max() <= AHEAD:
        # A little past its scale, or below it, a block joins the state as it stands.
        kvz *= np.exp(ahead)[..., None]
        kvz += state.kvz
        return State(kvz, state.log_scale.copy(), state.length + n)
    if same and state.log_scale.max() == -np.inf:
        return State(kvz, np.broadcast_to(c, state.log_scale.shape).copy(), state.length + n)
    after = np.maximum(state.log_scale, c)
    shift = _finite(after)
    kvz = kvz * np.exp(c - shift)[..., None]
    kvz = kvz + state.kvz * np.exp(state.log_scale - shift)[..., None]
    return State(kvz, after, state.length + n)


def read_block(query_spec: Spec, tokens: Tokens, state: State, want_log: bool) -> Any:
    """Read the state with a block of queries."""
    if 0 in tokens.x.shape:
        return NotImplemented
    if not isinstance(query_spec, Exponential) and not is_simple(query_spec):
        return NotImplemented
    c = state.log_scale + _column_logs(query_spec, state.kvz.dtype)
    top = c.max(axis=-1, keepdims=True)
    kvz = state.kvz
    if not (c == top).all():
        kvz = kvz * np.exp(c - _finite(top))[..., None]
        # A column far below the top one may still be the one that counts for a query.
        if np.any((kvz[..., -1] < _floor(kvz.dtype)) & (c > -np.inf)):
            return _read_shifted(query_spec, tokens, state)
    nd = np.zeros(())
    for rows, weights in _features(query_spec, tokens.x, "query"):
        if rows.start == 0:
            lead = leading(weights.shape[:-2], kvz.shape[:-2])
            nd = buffer("nd", (*lead, tokens.x.shape[-2], kvz.shape[-1]), kvz.dtype)
        multiply(weights, kvz, nd[..., rows, :])
    floor = _floor(nd.dtype) * kvz.shape[-2] * max(1.0, kvz[..., -1].max())
    floor = max(floor, LEAST_READ[nd.itemsize])
    if not (nd[..., -1].min() >= floor and _all_finite(nd)):
        return _read_shifted(query_spec, tokens, state)
    return Partial(nd, _row_log(query_spec, tokens, top[..., None], want_log))


def _read_shifted(query_spec: Spec, tokens: Tokens, state: State) -> Any:
    if not isinstance(query_spec, Exponential):
        return NotImplemented
    log = _shifted_log(query_spec, tokens, "query")
    log = _in_place(np.add, log, (state.log_scale + query_spec.col)[..., None, :])
    row = log.max(axis=-1, keepdims=True)
    log -= _finite(row)
    np.exp(log, out=log)
    return Partial(product(log, state.kvz, "nd"), row)


def _row_log(spec: Spec, tokens: Tokens, log: Floats, want_log: bool) -> Floats:
    """Log of the rows of a plain block, as an axis of 1 where nobody asks for it."""
    if not want_log:
        return log
    row = _row_term(spec, tokens)
    if row is not None:
        return log + row
    return np.broadcast_to(log, (*log.shape[:-2], tokens.x.shape[-2], 1))


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
    queries = _plain(query_spec, query.x, "query")
    keys = None if queries is None else _plain(key_spec, key.x, "key")
    if queries is None or keys is None:
        return None
    common = common_scale(queries, keys, _row_term(key_spec, key), v1, state)
    if common is None:
        return None
    g, weights, v1, scale, floor = common
    nd, kvz = _triangles(queries.weights, weights, v1, state.kvz, scale)
    if not (nd[..., -1].min() >= floor and _all_finite(nd)):
        return None
    log = _row_log(query_spec, query, g[..., None], want_log)
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
        row = row - _finite(top)
        block = block + top[..., 0]
    g = np.maximum(before.max(axis=-1, keepdims=True), block.max(axis=-1, keepdims=True))
    if not (_all_near(before, g, near) and _all_near(block, g, near)):
        return None
    g = _finite(g)
    block = np.exp(block - g)
    weights, first = keys.weights, block[..., :1]
    if (block == first).all():
        v1 = _weighted(v1, first[..., None] if row is None else np.exp(row) * first[..., None])
    else:
        weights = _in_place(np.multiply, weights, block[..., None, :])
        v1 = v1 if row is None else _weighted(v1, np.exp(row))
    terms = weights.shape[-1] * (state.length + v1.shape[-2])
    floor = _floor(v1.dtype) * terms * np.exp(queries.highest + keys.highest)
    return Common(g, weights, v1, np.exp(before - g), floor)


def _floor(dtype: Any) -> float:
    """Smallest sum from which underflow cannot have taken more than rounding, for one term."""
    return _tiny(dtype) / float(np.finfo(dtype).eps)


def _tiny(dtype: Any) -> float:
    return float(np.finfo(dtype).smallest_normal)


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
    log_k = _shifted_log(key_spec, key, "key")
    c = np.maximum(state.log_scale, log_k.max(axis=-2) + key_spec.col)
    shift = _finite(c)
    log_k = _in_place(np.add, log_k, (key_spec.col - shift)[..., None, :])
    np.exp(log_k, out=log_k)
    log_q = _shifted_log(query_spec, query, "query")
    log_q = _in_place(np.add, log_q, (c + query_spec.col)[..., None, :])
    row = log_q.max(axis=-1, keepdims=True)
    log_q -= _finite(row)
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
    np.copyto(scores, 0, where=_above(size))
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
def _above(size: int) -> NDArray[np.bool_]:
    """Pairs of a later key and an earlier query of a sub-block."""
    return np.triu(np.ones((size, size), dtype=bool), 1)


def _logits(
    spec: Exact, query: Tokens, key: Tokens, visible: NDArray[np.bool_] | None = None
) -> Floats:
    """Logits in a buffer, -inf where a query does not see a key."""
    x = query.x if spec.scale == 1.0 else query.x * spec.scale
    logits = product(x, transposed(key.x), "logits")
    if key.log_weight is not None:
        masked = np.broadcast_to(transposed(key.log_weight) == -np.inf, logits.shape)
        np.copyto(logits, -np.inf, where=masked)
    if visible is not None:
        np.copyto(logits, -np.inf, where=~visible)
    return logits


def exact_more(spec: Exact, query: Tokens, key: Tokens, v1: Floats, part: Partial) -> Any:
    """Add a block of keys to a partial of the same queries, on its scale."""
    if 0 in query.x.shape or 0 in v1.shape:
        return NotImplemented
    if part.log.shape[:-1] != query.x.shape[:-1]:
        return NotImplemented
    # The scale as one more coordinate: a pass over the logits less.
    x = np.concatenate([query.x * spec.scale, -part.log], axis=-1)
    y = np.concatenate([key.x, np.ones_like(key.x[..., :1])], axis=-1)
    logits = _logits(Exact(1.0), query._replace(x=x), key._replace(x=y))
    more = product(np.exp(logits, out=logits), v1, "more")
    if more.shape != part.nd.shape:
        return NotImplemented
    nd = more + part.nd
    # What is inf or NaN is so by itself, or because the scale is too low for this block.
    return Partial(nd, part.log) if _all_finite(nd) else NotImplemented


def exact_block(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    v1: Floats,
    visible: NDArray[np.bool_] | None = None,
) -> Any:
    """Softmax attention of a block of queries to a block of keys, or to the visible ones."""
    if 0 in query.x.shape or 0 in v1.shape:
        return NotImplemented
    logits = _logits(spec, query, key, visible)
    row = logits.max(axis=-1, keepdims=True)
    if not np.isfinite(row).all():
        return NotImplemented
    logits -= row
    np.exp(logits, out=logits)
    return Partial(np.matmul(logits, v1), row)


def window_block(
    spec: Exact, query: Tokens, key: Tokens, v1: Floats, is_causal: bool, lazy: bool
) -> Any:
    """Exact part of a window: keys of neighbouring blocks are views that overlap, not copies."""
    if 0 in query.x.shape or 0 in v1.shape:
        return NotImplemented
    g, w = query.x.shape[-3:-1]
    width = 2 if is_causal else 3
    keys = Tokens(_beside(key.x, g, width), _beside(key.log_weight, g, width), key.start)
    visible = np.tri(w, 2 * w, w, dtype=bool) if is_causal else None
    part = exact_block(spec, query, keys, _beside(v1, g, width), visible)
    if is_causal and part is not NotImplemented and not np.isfinite(part.nd).all():
        return NotImplemented
    return part


def _beside(x: Any, g: int, width: int) -> Any:
    """View of each block and those behind it, ``(..., g, width w, .)``; None stays None."""
    if x is None:
        return None
    x = np.ascontiguousarray(x)
    *lead, _, w, d = x.shape
    return np.lib.stride_tricks.as_strided(x, (*lead, g, width * w, d), x.strides, writeable=False)


def divide(part: Partial, out: Floats | None = None) -> Any:
    """Numerator over denominator, into ``out``."""
    size = np.abs(part.nd[..., -1:])
    if out is None or not 0 < size.min(initial=1.0) <= size.max(initial=1.0) < np.inf:
        return NotImplemented
    np.divide(part.nd[..., :-1], part.nd[..., -1:], out=out, casting="same_kind")
    return None

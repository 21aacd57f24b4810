"""One block of tokens against a state: reduce, read, merge, combine, divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np

from linattn._arrays import dtype_bits, namespace
from linattn._generic.features import query_features, row_features
from linattn._numerics import FAINT, LEAST, exp_or_zero, finite_shift, flushed, rescaled
from linattn.typing import Array, Features, Partial, Problem, Spec, State, Tokens
from linattn.typing._shifts import constant, largest, largest_of_rows


def empty_state(lead: tuple[int, ...], m: int, e: int, like: Array) -> State:
    """Return the identity of :func:`merge`, in the namespace, dtype and device of an array."""
    xp = namespace(like)
    device = array_api_compat.device(like)
    kvz = xp.zeros((*lead, m, e + 1), dtype=like.dtype, device=device)
    log_scale = xp.full((*lead, m), -float("inf"), dtype=like.dtype, device=device)
    return State(kvz, log_scale, 0)


def merge(first: State, second: State) -> State:
    """Merge two states: rescale both to the larger shift of each feature, and add."""
    xp = namespace(first.kvz)
    c = xp.maximum(first.log_scale, second.log_scale)
    shift = finite_shift(c, xp)
    kvz = rescaled(first.kvz, first.log_scale - shift) + rescaled(
        second.kvz, second.log_scale - shift
    )
    return State(kvz, c, first.length + second.length)


def combine(first: Partial, second: Partial) -> Partial:
    """Add two numerators and denominators that are on different scales."""
    xp = namespace(first.num_den)
    first, second = _unscaled_where_zero(first), _unscaled_where_zero(second)
    log = xp.maximum(first.log, second.log)
    shift = finite_shift(log, xp)
    num_den = first.num_den * xp.exp(first.log - shift) + second.num_den * xp.exp(
        second.log - shift
    )
    return Partial(num_den, log)


def _unscaled_where_zero(part: Partial) -> Partial:
    """Give rows that are all 0 the log -inf, so that their scale does not enter a sum."""
    xp = namespace(part.num_den)
    is_something = xp.any(part.num_den != 0, axis=-1, keepdims=True)
    return part._replace(log=xp.where(is_something, part.log, xp.full_like(part.log, -xp.inf)))


LARGE_FEATURE = {16: 2.0**20, 32: 2.0**20, 64: 2.0**200}
"""Largest number of a feature's state; above it, or below its inverse, the scale misleads."""


def key_weights(
    features: Features, log_scale: Array | None, bits: int = 0, least: dict[int, float] = LEAST
) -> tuple[Array, Array, Array]:
    """Put keys on the shift ``c`` that their state will have: (weights, c, finite c).

    ``bits``: weights are multiplied by ``2^bits``; ``least``: smaller weights are 0.
    """
    log, values = features
    xp = namespace(log)
    c = largest(log, axis=-2)
    if log_scale is not None:
        c = xp.maximum(log_scale, c)
    shift = finite_shift(c, xp)
    weights = exp_or_zero(log - shift[..., None, :], bits, least)
    return (weights if values is None else flushed(values * weights, least)), c, shift


def query_weights(
    features: Features, log_scale: Array, bits: int = 0, least: dict[int, float] = LEAST
) -> tuple[Array, Array]:
    """Put queries on a state's shift, the largest of each row at ``2^bits``: (weights, row log)."""
    log, values = features
    xp = namespace(log)
    e = log + log_scale[..., None, :]
    row = largest_of_rows(e)
    weights = exp_or_zero(e - finite_shift(row, xp), bits, least)
    return (weights if values is None else flushed(values * weights, least)), row


def absorb(features: Features, values_and_one: Array, state: State | None) -> State:
    """Add evaluated keys and their ``[v, 1]`` to a state (None: nothing seen before)."""
    xp = namespace(values_and_one)
    state = None if state is None else by_feature(state)
    log_scale = None if state is None else state.log_scale
    weights, c, shift = key_weights(features, log_scale, least=FAINT)
    kvz, n = xp.matmul(xp.matrix_transpose(weights), values_and_one), values_and_one.shape[-2]
    if state is not None:
        kvz = rescaled(state.kvz, state.log_scale - shift) + kvz
        n = state.length + n
    return State(kvz, c, n)


def by_feature(state: State) -> State:
    """Put features that are far from 1 on their scales on others, on which they are 1.

    A backend may have put all of them on one scale: that of NumPy does, so only its arrays change.
    """
    kvz = state.kvz
    if not isinstance(kvz, np.ndarray):
        return state
    most = LARGE_FEATURE[dtype_bits(kvz.dtype)]
    least = kvz[..., -1].min(initial=most)
    if least >= 1 / most and kvz.max(initial=0) <= most and kvz.min(initial=0) >= -most:
        return state
    sizes = np.abs(kvz)
    size, normalizer = np.max(sizes, axis=-1), sizes[..., -1]
    has_values = np.max(sizes[..., :-1], axis=-1, initial=0) > 0
    if np.all(has_values != (normalizer > 0)) and has_values.any() and normalizer.any():
        # Of a separate denominator: each half would lose the size of the other.
        return state
    # Midway where values are large: neither numerators nor normalizers become small.
    middle = np.sqrt(size) * np.sqrt(normalizer)
    size = np.where(normalizer > 0, middle, size)
    is_off = (size > 0) & (size < np.inf) & ((size < 1 / most) | (size > most))
    if not is_off.any():
        return state
    size = np.where(is_off, size, np.ones_like(size))
    log_scale = state.log_scale + np.log(size)
    return state._replace(kvz=kvz / size[..., None], log_scale=log_scale)


def read(features: Features, state: State) -> Partial:
    """Read a state with evaluated queries."""
    xp, state = namespace(state.kvz), by_feature(state)
    weights, row = query_weights(features, state.log_scale)
    return Partial(xp.matmul(weights, state.kvz), row)


def reduce_block(key_spec: Spec, tokens: Tokens, values_and_one: Array, state: State) -> State:
    """Add a block of keys to the state. O(n m (d + e)) time, O(n m) memory."""
    return absorb(row_features(key_spec, tokens), values_and_one, state)


def read_block(query_spec: Spec, tokens: Tokens, state: State, want_log: bool) -> Partial:
    """Read the state with a block of queries. O(n m (d + e)) time, O(n m) memory."""
    queries, log_row = query_features(query_spec, tokens)
    part = read(queries, state)
    return Partial(part.num_den, part.log + log_row)


def values_block(value: Array, mask: Array | None, dtype: Any) -> Array:
    """``[v, 1]`` in this dtype; of a masked key all is 0."""
    xp = namespace(value)
    v = xp.astype(value, dtype, copy=False)
    v = xp.concat([v, xp.ones_like(v[..., :1])], axis=-1)
    return v if mask is None else xp.where(mask, v, xp.zeros_like(mask, dtype=dtype))


def divide(part: Partial, out: Array | None = None) -> Array:
    """Numerator over denominator; exactly 0 where the denominator is, NaN where it overflowed.

    A backend's may put the result into ``out`` and return None.
    """
    xp = namespace(part.num_den)
    numerator, denominator = part.num_den[..., :-1], part.num_den[..., -1:]
    empty = denominator == 0
    infinite = xp.abs(denominator) == xp.inf
    # inf - inf: a constant NaN would alarm JAX's debug_nans in every call.
    divisor = xp.where(infinite, denominator - denominator, denominator)
    divisor = xp.where(empty, xp.ones_like(divisor), divisor)
    size = constant(divisor)
    if size is not divisor:
        # Autograd squares a divisor, JAX's at once and torch's the second time: it may underflow.
        numerator, divisor = numerator / size, divisor / size
    output = numerator / divisor
    return xp.where(empty & xp.isfinite(numerator), xp.zeros_like(output), output)


def reduce_values(
    key_spec: Spec,
    tokens: Tokens,
    value: Array,
    mask: Array | None,
    state: State,
    *,
    reduce_block: Callable[..., State] = reduce_block,
) -> State:
    """Add a block of keys and values to the state."""
    values_and_one = values_block(value, mask, state.kvz.dtype)
    return reduce_block(key_spec, tokens, values_and_one, state)


def read_output(
    query_spec: Spec,
    tokens: Tokens,
    state: State,
    out: Array | None = None,
    *,
    read_block: Callable[..., Partial] = read_block,
    divide: Callable[..., Array] = divide,
) -> Array:
    """Read the state with a block of queries and divide; ``out`` as for :func:`divide`."""
    return divide(read_block(query_spec, tokens, state, False), out)


def log_normalizer(part: Partial, problem: Problem) -> Array:
    xp, total = problem.xp, part.num_den[..., -1:]
    # A query that sees nothing: log(0) would make NaN of a gradient of 0.
    is_nothing = total == 0
    log = xp.log(xp.where(is_nothing, xp.ones_like(total), total))
    return part.log + xp.where(is_nothing, xp.full_like(total, -xp.inf), log)

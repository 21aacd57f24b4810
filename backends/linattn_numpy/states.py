"""Sums and reads of blocks in place: max-stabilized only where the range needs it.

A block of full attention is first done *unshifted*: nothing is subtracted from the exponents
``u = x P``, and underflow shows in the sums. The row term (curvature and log weight), less its
largest in the block, multiplies ``[v, 1]``. The largest row term and the constants of the features
are added to ``log_scale``. A block of keys is accepted if the sums of all features lie in
FEATURE_SUM_RANGE: then underflow has taken less than rounding, and no later step overflows. A row
is accepted if it is finite and its denominator is so large, by the rule of the driver, that
underflow cannot have changed it. Any other block is done again *max-stabilized*, by the exact
maximum of each feature. Blocks with NaN or inf go to the generic code.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from linattn.typing import (
    RELU,
    Assigned,
    Declined,
    Exponential,
    Partial,
    Pointwise,
    Spec,
    State,
    Tokens,
)
from linattn_numpy import limits, tuning
from linattn_numpy.assigned import assigned_sums
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.features import (
    Supported,
    are_moderate,
    exponents,
    feature_tiles,
    features_shape,
    floor_of,
    log_offsets,
    num_sign_halves,
    row_log,
    row_term,
    supports,
    tiles_by_head,
    unsupported,
)
from linattn_numpy.products import broadcast_lead, read_halves, weighted, weighted_sum
from linattn_numpy.tiles import ones_column

Ones: TypeAlias = Floats | None
"""Weights of values, ``(..., n, 1)``: 1, or 0 where masked; None where all are 1."""


def reduce_block(
    key_spec: Spec, tokens: Tokens, values_and_one: Floats, state: State
) -> State | Declined:
    """Add a block of keys to the state."""
    if isinstance(key_spec, Assigned):
        sums = assigned_sums(key_spec, tokens, values_and_one)
        return sums if isinstance(sums, Declined) else add_sums(state, *sums, tokens.x.shape[-2])
    if not supports(key_spec):
        return unsupported(key_spec)
    return _add_keys(key_spec, tokens, values_and_one[..., :-1], values_and_one[..., -1:], state)


def reduce_values(
    key_spec: Spec, tokens: Tokens, value: Floats, mask: Any, state: State
) -> State | Declined:
    """Add a block of keys to the state, without forming ``[v, 1]``."""
    if not supports(key_spec):
        return unsupported(key_spec)
    dtype, ones = state.kvz.dtype, None
    if mask is not None:
        value = np.where(mask, value, 0)
        ones = np.broadcast_to(mask.astype(dtype), (*value.shape[:-1], 1))
    v = value.astype(dtype, copy=False)
    row, number = v.strides[-2:]
    # BLAS takes matrices whose rows do not overlap and have adjacent numbers.
    v = v if number == v.itemsize and row >= v.shape[-1] * number else v.copy()
    return _add_keys(key_spec, tokens, v, ones, state)


def _add_keys(
    key_spec: Supported, tokens: Tokens, value: Floats, ones: Ones, state: State
) -> State | Declined:
    sums = _unshifted_sums(key_spec, tokens, value, ones)
    if not isinstance(sums, Declined):
        return add_sums(state, *sums, tokens.x.shape[-2])
    if isinstance(key_spec, Pointwise):
        return sums
    return _add_stabilized(key_spec, tokens, value, ones, state)


def _unshifted_sums(
    key_spec: Supported, tokens: Tokens, value: Floats, ones: Ones
) -> tuple[Floats, Floats] | Declined:
    """Sum a block of keys by feature; return the sums and their log scale."""
    if not are_moderate(key_spec, tokens.x).all():
        return limits.LARGE_EXPONENTS
    e, dtype, leads = value.shape[-1], value.dtype, [value.shape[:-2]]
    row, top = row_term(key_spec, tokens), np.zeros(1, dtype)
    if row is not None:
        leads.append(row.shape[:-2])
        top = row.max(axis=-2)
        row = row - limits.finite_shift(top)[..., None]
        if limits.are_far_apart(row):
            return limits.SMALL_SHARES
        row = np.exp(row)
    *features_lead, m = features_shape(key_spec, tokens.x)
    kvz = np.empty((*broadcast_lead(tuple(features_lead), *leads), m, e + 1), dtype)
    halves, is_paired = _in_halves(key_spec, kvz), num_sign_halves(key_spec) == 2
    for heads, place, weights in feature_tiles(key_spec, tokens.x, "features", *leads):
        v, sums, add = value[place], halves[heads], place[-2].start > 0
        w = ones_column(v.shape[-2], dtype) if ones is None else ones[place]
        if row is not None:
            of_rows = row[place]
            v, w = weighted(v, of_rows), of_rows if ones is None else w * of_rows
        if is_paired:
            v, w = v[..., None, :, :], w[..., None, :, :]
        _put_sums(weights, v, w, sums, add)
    z, (least, most) = kvz[..., -1].copy(), limits.FEATURE_SUM_RANGE[kvz.itemsize]
    least = max(least, floor_of(dtype, key_spec) * tokens.x.shape[-2])
    log_scale = log_offsets(key_spec, dtype) + top
    if not z.min() > 0:
        # A feature without keys has no digits to lose, and no scale.
        is_relu = isinstance(key_spec, Pointwise) and key_spec.f == RELU
        # The feature of a key that weighs less than others may have underflowed.
        is_even = row is None or not np.any((row != 0) & (row != 1))
        nothing = (z == 0) & ((is_relu and is_even) | (top == -np.inf))
        z, log_scale = np.where(nothing, 1, z), np.where(nothing, -np.inf, log_scale)
    if not (least <= z.min() <= z.max() <= most and limits.all_finite(kvz)):
        return Declined(f"sums of features are not in {least:g} to {most:g}")
    return kvz, log_scale


def _put_sums(weights: Floats, v: Floats, w: Floats, out: Floats, add: bool = False) -> None:
    """Write ``weights^T [v, w]``; w is apart because BLAS is faster if vectors divide the width."""
    weighted_sum(weights, v, out[..., :-1], add)
    weighted_sum(weights, w, out[..., -1:], add)


def _add_stabilized(
    key_spec: Exponential, tokens: Tokens, value: Floats, ones: Ones, state: State
) -> State | Declined:
    """Add a block of keys max-stabilized: each tile on the largest log of each feature."""
    x, row = tokens.x, row_term(key_spec, tokens)
    assert row is not None
    arrays = [each for each in (value, ones, row, state.kvz) if each is not None]
    leads = [each.shape[:-2] for each in arrays]
    lead = broadcast_lead(features_shape(key_spec, x)[:-1], *leads)
    kvz = np.broadcast_to(state.kvz, (*lead, *state.kvz.shape[-2:])).copy()
    log_scale = np.broadcast_to(state.log_scale, kvz.shape[:-1]).copy()
    col = np.broadcast_to(key_spec.col, kvz.shape[:-1])
    for heads, place in tiles_by_head(key_spec, x, *tuning.STABILIZED_TILE, *leads):
        log = exponents(key_spec, x[place], row[place], "features", ordered_by_feature=True)
        top = log.max(axis=-2)
        if not np.isfinite(top.max()) and not np.all(top == -np.inf):
            return Declined("log features are not finite")
        log -= limits.finite_shift(top)[..., None, :]
        # They are multiplied by values only.
        weights, sums = limits.weights(log, None, limits.FAINT_SUMMED), np.empty_like(kvz[heads])
        w = ones_column(log.shape[-2], value.dtype) if ones is None else ones[place]
        _put_sums(weights, value[place], w, sums)
        part = add_sums(State(kvz[heads], log_scale[heads], 0), sums, top + col[heads], 0)
        kvz[heads], log_scale[heads] = part.kvz, part.log_scale
    return State(kvz, log_scale, state.length + x.shape[-2])


def add_sums(state: State, kvz: Floats, c: Floats, n: int) -> State:
    """Add a block's sum ``kvz``, on the scale ``c``, to a state; overwrite ``kvz``.

    Nothing in the new state is a view of the map's parameters or of the state before.
    """
    if kvz.shape == state.kvz.shape and state.log_scale.max() == -np.inf:
        log_scale = np.empty_like(state.log_scale)
        log_scale[...] = c
        return State(kvz, log_scale, state.length + n)
    after = np.maximum(state.log_scale, c)
    shift = limits.finite_shift(after)
    kvz = kvz * np.exp(c - shift)[..., None]
    kvz = kvz + state.kvz * np.exp(state.log_scale - shift)[..., None]
    return State(kvz, after, state.length + n)


def read_block(
    query_spec: Spec, tokens: Tokens, state: State, want_log: bool
) -> Partial | Declined:
    """Read the state with a block of queries."""
    if not supports(query_spec):
        return unsupported(query_spec)
    kvz, top = _on_one_scale(query_spec, tokens, state)
    if kvz is not None:
        lead = broadcast_lead(features_shape(query_spec, tokens.x)[:-1], kvz.shape[:-2])
        num_den = buffer("num_den", (*lead, tokens.x.shape[-2], kvz.shape[-1]), kvz.dtype)
        num, den = num_den[..., :-1], num_den[..., -1:]
        if _put_read(query_spec, tokens.x, kvz, num, den, divided=False):
            return Partial(num_den, row_log(query_spec, tokens, top[..., None], want_log))
    return _read_stabilized(query_spec, tokens, state, want_log)


def _on_one_scale(
    query_spec: Supported, tokens: Tokens, state: State
) -> tuple[Floats | None, Floats]:
    """Put features of a state on one log scale; None where queries must be max-stabilized."""
    c = state.log_scale + log_offsets(query_spec, state.kvz.dtype)
    if not are_moderate(query_spec, tokens.x).all():
        return None, c
    if (c == c[..., :1]).all():
        return state.kvz, c[..., :1]
    top = c.max(axis=-1, keepdims=True)
    kvz = state.kvz * np.exp(c - limits.finite_shift(top))[..., None]
    # A feature far below the top one may still be the largest for a query.
    is_lost = np.any((kvz[..., -1] < limits.floor_of(kvz.dtype)) & (c > -np.inf))
    return None if is_lost else kvz, top


def _in_halves(spec: Supported, kvz: Floats) -> Floats:
    """Give the features of a paired map an axis of their sign halves."""
    h, (*lead, m, e) = num_sign_halves(spec), kvz.shape
    return kvz if h == 1 else kvz.reshape(*lead, h, m // h, e)


def _put_read(
    query_spec: Supported, x: Floats, kvz: Floats, num: Floats, den: Floats, *, divided: bool
) -> bool:
    """Read a state on one scale into ``num`` and ``den``; return whether the rows are right.

    Denominators above a bound show that underflow took no digits. If features are positive, a
    numerator is at most ``den max |kvz| / min z``, and so finite. If they are not, a denominator
    for which this bound fails has lost all of its digits.
    """
    read = read_halves if num_sign_halves(query_spec) == 2 else np.matmul
    halves = _in_halves(query_spec, kvz)
    for heads, place, weights in feature_tiles(query_spec, x, "features", kvz.shape[:-2]):
        sums, of_rows, divisor = halves[heads], num[place], den[place]
        read(weights, sums[..., :-1], out=of_rows)
        read(weights, sums[..., -1:], out=divisor)
        if divided:
            np.divide(of_rows, divisor, out=of_rows)
    z, itemsize = kvz[..., -1], kvz.itemsize
    floor = floor_of(kvz.dtype, query_spec) * kvz.shape[-2] * max(1.0, z.max())
    if not den.min() >= max(floor, limits.MIN_READ_DENOMINATOR[itemsize]):
        return False
    most, largest = den.max(), limits.size_bound(kvz)
    is_bounded = most * largest <= z.min() * limits.MAX_READ[itemsize]
    return bool(is_bounded or (most < np.inf and limits.all_finite(num)))


def _read_stabilized(
    query_spec: Supported, tokens: Tokens, state: State, want_log: bool
) -> Partial | Declined:
    if isinstance(query_spec, Pointwise):
        return limits.UNDERFLOWED
    state = by_feature(state)
    kvz, x = state.kvz, tokens.x
    # The row term cancels. Added to the square of a large query, offsets would be rounded away.
    offsets = (state.log_scale + query_spec.col)[..., None, :]
    lead = broadcast_lead(kvz.shape[:-2], x.shape[:-2], offsets.shape[:-2])
    num_den = buffer("num_den", (*lead, x.shape[-2], kvz.shape[-1]), kvz.dtype)
    row = np.empty((*lead, x.shape[-2], 1), kvz.dtype)
    leads = kvz.shape[:-2], offsets.shape[:-2]
    for heads, place in tiles_by_head(query_spec, x, *tuning.STABILIZED_TILE, *leads):
        log = exponents(query_spec, x[place], offsets[heads], "features", ordered_by_feature=True)
        row[place] = log.max(axis=-1, keepdims=True)
        log -= limits.finite_shift(row[place])
        np.matmul(limits.weights(log), kvz[heads], out=num_den[place])
    return Partial(num_den, row_log(query_spec, tokens, row, want_log))


def by_feature(state: State) -> State:
    """Rescale the features whose sums are far from 1 on their scales.

    Normalizers are sums too, unless their terms cancel: then their numerators are far larger beside
    them than those of other features.
    """
    (least, most), z = limits.FEATURE_SCALES, np.abs(state.kvz[..., -1])
    top = np.abs(state.kvz).max(axis=-1)
    means = np.divide(top, z, out=np.full_like(z, np.inf), where=z > 0)
    size = np.maximum(z, top / means.min(axis=-1, keepdims=True))
    is_far = (size > 0) & (size < np.inf) & ~((size >= least) & (size <= most))
    if not is_far.any():
        return state
    size = np.where(is_far, size, size.dtype.type(1))
    kvz, log_scale = state.kvz / size[..., None], state.log_scale + np.log(size)
    return state._replace(kvz=kvz, log_scale=log_scale)


def read_output(
    query_spec: Spec, tokens: Tokens, state: State, out: Floats | None = None
) -> Declined | None:
    """Read the state with a block of queries and divide, each tile while it is in cache."""
    if not supports(query_spec):
        return unsupported(query_spec)
    if out is None:
        return Declined("there is no place for the output")
    kvz, _ = _on_one_scale(query_spec, tokens, state)
    if kvz is not None:
        num = out if out.dtype == kvz.dtype else np.empty(out.shape, kvz.dtype)
        den = buffer("den", (*out.shape[:-1], 1), kvz.dtype)
        if _put_read(query_spec, tokens.x, kvz, num, den, divided=True):
            if num is not out:
                out[...] = num
            return None
    part = _read_stabilized(query_spec, tokens, state, False)
    return part if isinstance(part, Declined) else divide(part, out)


def divide(part: Partial, out: Floats | None = None) -> Declined | None:
    """Numerator over denominator, into ``out``."""
    divisor = part.num_den[..., -1:]
    sizes = np.abs(divisor)
    if out is None or not 0 < sizes.min(initial=1.0) <= sizes.max(initial=1.0) < np.inf:
        return Declined("a denominator is 0 or not finite")
    np.divide(part.num_den[..., :-1], divisor, out=out, casting="same_kind")
    return None

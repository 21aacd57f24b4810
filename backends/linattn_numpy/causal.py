"""Causal attention of a block in place.

A block stays *unshifted* if its exponents lie within ``+-MAX_EXPONENT``, or if the norms of its
queries bound theirs: its features are made and used a tile at a time, on one scale with its state,
and it is checked here by the rule of the driver, on the scale of its largest product. Of a rejected
block each head is done by itself; a rejected head is done again max-stabilized, and the driver
checks that. The generic twin is ``scan_block`` of ``linattn/_generic/states.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from math import exp, inf, log, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Declined, Exponential, Partial, Pointwise, Spec, State, Tokens
from linattn_numpy import tuning
from linattn_numpy.buffers import buffer
from linattn_numpy.causal_scales import CommonScale, common_scale, stabilize
from linattn_numpy.decay import decay_of_tiles
from linattn_numpy.features import (
    FeatureMaker,
    are_moderate,
    log_offsets,
    num_sign_halves,
    row_log,
    row_term,
    supports,
    unsupported,
)
from linattn_numpy.limits import (
    EMPTY,
    EXP_LOSS,
    MAX_UNINSPECTED_EXPONENT,
    UNDERFLOWED,
    all_finite,
    all_large,
    floor_of,
    tiny,
)
from linattn_numpy.products import broadcast_lead
from linattn_numpy.tiles import sub_blocks, tiles
from linattn_numpy.triangles import Triangles

__all__ = ["scan_block", "scan_decayed_block"]

Floats = NDArray[Any]

LARGE_EXPONENTS = Declined("exponents or features are out of the range of unshifted ones")


def scan_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    want_log: bool,
) -> tuple[Partial, State] | Declined:
    """Causal attention of a block after the state, and the state after it.

    Keys may have a decay.
    """
    if 0 in query.x.shape or 0 in values_and_one.shape:
        return EMPTY
    if not (supports(query_spec) and supports(key_spec)):
        return unsupported(query_spec, key_spec)
    args = query, key, values_and_one, state, want_log
    (*heads, m, _), n = state.kvz.shape, values_and_one.shape[-2]
    answer: tuple[Partial, State] | Declined = Declined("one side is paired, the other is not")
    if num_sign_halves(query_spec) == num_sign_halves(key_spec):
        answer = _scan_unshifted(query_spec, key_spec, *args)
        if not isinstance(answer, Declined):
            return answer
        if prod(heads) > 1 and n * m >= tuning.MIN_APART_ELEMENTS:
            return Declined(answer.reason, by_head=True)
    # The driver tries a longer block again as shorter ones, which may stay unshifted.
    is_short = n <= max(tuning.MAX_STABILIZED_ROWS, tuning.CAUSAL_TILE_ELEMENTS // m)
    if is_short and isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        return _scan_stabilized(query_spec, key_spec, *args)
    return answer


scan_decayed_block = scan_block


def _scan_unshifted(
    query_spec: Exponential | Pointwise,
    key_spec: Exponential | Pointwise,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    want_log: bool,
) -> tuple[Partial, State] | Declined:
    """Scan on one scale for block and state."""
    n, offsets = values_and_one.shape[-2], log_offsets(query_spec, values_and_one.dtype)
    key_offsets = log_offsets(key_spec, values_and_one.dtype)
    common = common_scale(offsets, key_offsets, row_term(key_spec, key), state)
    if isinstance(common, Declined):
        return common
    bounds = _exponent_bounds(query_spec, key_spec, query, key, common)
    inspect = bool((bounds == inf).any())
    if inspect and not (are_moderate(query_spec, query.x) and are_moderate(key_spec, key.x)):
        return LARGE_EXPONENTS
    if inspect and (bounds < inf).any() and prod(state.kvz.shape[:-2]) > 1:
        # Alone, some heads are inspected and some are not.
        return Declined("exponents of some heads only need to be inspected")
    bound = 0.0 if inspect else log(2) + float(bounds.max())
    sums = _scan_tiles(query_spec, key_spec, query.x, key, values_and_one, state, common, bound)
    if isinstance(sums, Declined):
        return sums
    num_den, kvz, floor = sums
    # Exponents of keys that nobody has inspected may make up for small weights.
    least_weight = 1.0 if inspect else float(common.value_weights.min())
    den = num_den[..., -1:]
    is_large = all_large(den, values_and_one, state.kvz, floor, least_weight)
    if not (is_large and all_finite(num_den) and _is_kept(key_spec, key, kvz, floor)):
        return UNDERFLOWED
    log_row = row_log(query_spec, query, common.log_scale[..., None], want_log)
    c = np.zeros(kvz.shape[:-1], kvz.dtype) + (common.log_scale - offsets)
    if not (sees := kvz[..., -1].any(axis=-1, keepdims=True)).all():
        c = np.where(sees, c, c.dtype.type(-np.inf))
    return Partial(num_den, log_row, accepted=True), State(kvz, c, state.length + n)


def _scan_tiles(
    query_spec: Exponential | Pointwise,
    key_spec: Exponential | Pointwise,
    query: Floats,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    common: CommonScale,
    max_log: float,
) -> tuple[Floats, Floats, float] | Declined:
    """Rows of a block, the state after it and the least denominator that underflow leaves.

    ``max_log``: a bound on the log of the largest product; 0: to be inspected.
    """
    (n, e), num_den, inspect = values_and_one.shape[-2:], None, max_log == 0
    kvz = state.kvz * common.state_factors[..., None]
    least = floor_of(kvz.dtype) * kvz.shape[-2] * (state.length + n)
    if key.log_decay is not None:
        least *= EXP_LOSS
    lead = broadcast_lead(values_and_one.shape[:-2], common.value_weights.shape[:-2])
    for rows, length, size in tiles(n, tuning.CAUSAL_TILE_ELEMENTS // kvz[..., 0].size):
        queries = FeatureMaker(query_spec, query, length, "query")
        keys = FeatureMaker(key_spec, key.x, length, "key", factors=common.key_factors)
        sums = Triangles(queries.weights, keys.weights, lead, kvz, size)
        if num_den is None:
            num_den = buffer("rows", (*sums.lead, n, e), values_and_one.dtype)
        values = _weighted_tiles(values_and_one, common.value_weights, rows, sums)
        arrays = (
            queries.split(query[..., rows, :]),
            keys.split(key.x[..., rows, :]),
            sums.split(num_den[..., rows, :]),
        )
        decays = decay_of_tiles(key.log_decay, rows, length // size, size, kvz.dtype)
        for q, k, out in zip(*arrays, strict=True):
            max_log = max(max_log, queries.make(q, inspect=inspect) + keys.make(k, inspect=inspect))
            if max_log == inf:
                return LARGE_EXPONENTS
            sums.add(next(values), out, next(decays))
            # The floor does not fall from tile to tile.
            if not out[..., -1].min() >= least * exp(max_log):
                return UNDERFLOWED
        kvz = sums.state()
    assert num_den is not None
    return num_den, kvz, least * exp(max_log)


def _weighted_tiles(
    values_and_one: Floats, weights: Floats, rows: slice, sums: Triangles
) -> Iterator[Floats]:
    """Multiply some rows of values by their weights, a tile at a time; no copy if all are 1."""
    parts = sums.split(values_and_one[..., rows, :])
    if weights.shape[-2] == 1 and (weights == 1).all():
        yield from parts
        return
    lead = broadcast_lead(values_and_one.shape[:-2], weights.shape[:-2])
    out = buffer("values_and_one", (*lead, *parts.shape[-3:]), parts.dtype)
    each: Iterable[Floats] = repeat(weights[..., None])
    if weights.shape[-2] > 1:
        each = sums.split(weights[..., rows, :])
    for part, weight in zip(parts, each, strict=False):
        yield np.multiply(part, weight, out=out)


def _exponent_bounds(
    query_spec: Spec, key_spec: Spec, query: Tokens, key: Tokens, common: CommonScale
) -> Floats:
    """Bounds on the exponents of each head's queries by norms, ``(...)``; inf: to be inspected.

    A key's weight must be a normal number, and so must every feature of a query. What underflow can
    take then is twice the smallest number for each key and feature, in itself and in what it adds
    to the state, times the largest feature of the query; exponents of keys need no bound, since
    what is too large for a float shows as inf.
    """
    if (
        key.log_weight is not None
        or key.log_decay is not None
        or not (isinstance(key_spec, Exponential) and isinstance(query_spec, Exponential))
    ):
        return np.asarray(inf)
    least = common.value_weights.min(axis=(-2, -1))
    if common.key_factors is not None:
        least = least * common.key_factors.min(axis=-1)
    token = np.vecdot(query.x, query.x).max(axis=-1)
    bounds = np.sqrt(token * np.square(query_spec.P).sum(axis=-2).max(axis=-1))
    is_small = bounds <= MAX_UNINSPECTED_EXPONENT[query.x.itemsize]
    return np.where((least >= tiny(query.x.dtype)) & is_small, bounds, inf)


def _scan_stabilized(
    query_spec: Exponential,
    key_spec: Exponential,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    want_log: bool,
) -> tuple[Partial, State] | Declined:
    """Scan on the maximum so far of each feature, each row on its own largest."""
    queries, keys, before, row, c = stabilize(query_spec, key_spec, query, key, state)
    (n, e), kvz, num_den = values_and_one.shape[-2:], before, None
    for rows, size in sub_blocks(n):
        q, k = (x[..., None, rows, :] for x in (queries, keys))
        sums = Triangles(q, k, values_and_one.shape[:-2], kvz, size)
        if num_den is None:
            num_den = buffer("rows", (*sums.lead, n, e), values_and_one.dtype)
        decays = decay_of_tiles(key.log_decay, rows, q.shape[-2] // size, size, kvz.dtype)
        (v,), (out,) = (sums.split(x[..., rows, :]) for x in (values_and_one, num_den))
        sums.add(v, out, next(decays))
        kvz = sums.state()
    assert num_den is not None
    z = before[..., -1].sum(axis=-1).max()
    floor = EXP_LOSS * floor_of(kvz.dtype) * (kvz.shape[-2] * (state.length + n) + z)
    if not _is_kept(key_spec, key, kvz, floor):
        return UNDERFLOWED
    is_large = all_large(num_den[..., -1:], values_and_one, state.kvz, floor)
    log_row = row_log(query_spec, query, row, want_log)
    part = Partial(num_den, log_row, accepted=is_large and all_finite(num_den))
    return part, State(kvz, c, state.length + n)


def _is_kept(key_spec: Spec, key: Tokens, kvz: Floats, floor: float) -> bool:
    """Whether no feature of a state has decayed to what underflow may have changed.

    Without decay a feature holds what it held; those of other specs share one log scale anyway.
    """
    if key.log_decay is None or not isinstance(key_spec, Exponential):
        return True
    return bool(kvz[..., -1].min() >= floor)

"""Causal attention of a block in place.

A block is *unshifted* if its exponents lie within ``+-MAX_EXPONENT``. Its features are made and
used a tile at a time, on one scale with its state. The rule of the driver checks it here, on the
scale of its largest product. If no head is in range, the block is *max-stabilized*: its scale grows
from sub-block to sub-block, and rows are checked one by one. If only some heads are in range, or
the block is rejected, each head is done alone. The generic twin is ``scan_block`` of
``linattn/_generic/causal.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import RELU, Declined, Exponential, Partial, Pointwise, Spec, State, Tokens
from linattn_numpy import limits, tuning
from linattn_numpy.borders import Lengths, borders_of_tiles
from linattn_numpy.buffers import Bools, Floats, buffer
from linattn_numpy.causal_scales import (
    CommonScale,
    GivenBlock,
    StabilizedBlock,
    common_scale,
    stabilize,
)
from linattn_numpy.decay import decay_of_tiles, weak_decay
from linattn_numpy.features import (
    FeatureMaker,
    are_moderate,
    floor_of,
    least_of,
    log_offsets,
    num_sign_halves,
    preactivations,
    row_log,
    row_term,
    supports,
    unsupported,
)
from linattn_numpy.products import broadcast_lead, weighted
from linattn_numpy.states import by_feature
from linattn_numpy.tiles import split_tiles, sub_blocks, tiles
from linattn_numpy.triangles import Triangles

LARGE_SAMPLE = Declined("exponents of a few tokens are out of the range of unshifted ones")


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
    if not (supports(query_spec) and supports(key_spec)):
        return unsupported(query_spec, key_spec)
    block = GivenBlock(query_spec, key_spec, query, key, values_and_one)
    (*heads, m, _), n = state.kvz.shape, values_and_one.shape[-2]
    # If true, each head must have the bits that it would have alone.
    are_apart = prod(heads) > 1 and n * m >= tuning.MIN_APART_ELEMENTS
    answer: tuple[Partial, State] | Declined = Declined("one side is paired, the other is not")
    if num_sign_halves(query_spec) == num_sign_halves(key_spec):
        answer = _scan_unshifted(block, state, want_log)
        if not isinstance(answer, Declined):
            return answer
        if are_apart and (answer is not LARGE_SAMPLE or key.log_decay is not None):
            return Declined(answer.reason, by_head=True)
    # Most of a longer block may be in range: the driver tries it again in shorter blocks.
    is_short = n <= _tile_rows(m) or (answer is LARGE_SAMPLE and key.log_decay is None)
    if is_short and isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        answer = _scan_stabilized(block, state, want_log)
        if are_apart and isinstance(answer, Declined):
            return Declined(limits.UNDERFLOWED.reason, by_head=True)
    return answer


scan_decayed_block = scan_block


def _scan_unshifted(
    block: GivenBlock, state: State, want_log: bool
) -> tuple[Partial, State] | Declined:
    """Scan on one scale for block and state."""
    query_spec, key_spec, query, key, values_and_one = block
    n, offsets = values_and_one.shape[-2], log_offsets(query_spec, values_and_one.dtype)
    key_offsets = log_offsets(key_spec, values_and_one.dtype)
    row = row_term(key_spec, key)
    common = common_scale(offsets, key_offsets, row, state)
    if isinstance(common, Declined):
        return common
    if key.log_weight is not None and isinstance(key_spec, Pointwise) and key_spec.f == RELU:
        # A feature may be 0 in all other keys of a row, but not in these light ones.
        vanishes = common.value_weights < limits.floor_of(values_and_one.dtype)
        if np.any(vanishes & (key.log_weight > -inf)):
            return limits.UNDERFLOWED
    moderate = are_moderate(query_spec, query.x) & are_moderate(key_spec, key.x)
    if not moderate.all():
        return limits.LARGE_EXPONENTS if moderate.any() else LARGE_SAMPLE
    if row is not None and limits.are_far_apart(row - row.max(axis=-2, keepdims=True)):
        return limits.SMALL_SHARES
    since = None
    if key.log_decay is not None:
        since, is_weak = weak_decay(key.log_decay, values_and_one.dtype)
        if not is_weak.all():
            since = None
            if is_weak.any() and n * state.kvz.shape[-2] >= tuning.MIN_APART_ELEMENTS:
                # Alone, some heads are done in another way.
                return Declined("the decay of some heads only is weak")
        else:
            common = common._replace(value_weights=common.value_weights * np.exp(-since))
    sums = scan_tiles(block, state, common, since=since)
    if isinstance(sums, Declined):
        return sums
    (num_den, floor, state_floor, _), kvz = sums
    den = num_den[..., -1:]
    rejected = limits.underflowed_rows(den, values_and_one, state.kvz, floor)
    is_large = rejected is None and _is_kept(key_spec, key, state.kvz, kvz, state_floor)
    if not (is_large and limits.all_finite(num_den)):
        return limits.UNDERFLOWED
    log = common.log_scale[..., None]
    log_row = row_log(query_spec, query, log if since is None else log + since, want_log)
    c = np.where(kvz[..., -1] != 0, common.log_scale - offsets, -inf)
    return Partial(num_den, log_row, accepted=True), State(kvz, c, state.length + n)


class Sums(NamedTuple):
    """Rows of a block, and the bounds that check them for underflow."""

    num_den: Floats
    floor: float
    """Least denominator that underflow cannot have changed."""
    state_floor: float = 0.0
    """Least normalizer of a feature after the block that underflow cannot have changed."""
    least_weight: float = 1.0
    """Least weight of a key in the state that rows read."""


def scan_tiles(
    block: GivenBlock,
    state: State,
    common: CommonScale,
    lengths: Lengths | None = None,
    since: Floats | None = None,
) -> tuple[Sums, Floats] | Declined:
    """Scan a block tile by tile: its sums and the state after it.

    ``lengths``: lengths of packed sequences. ``since``: weak decay, by which value weights are
    divided.
    """
    query_spec, key_spec, query, key, values_and_one = block
    (n, e), num_den, max_log, max_key = values_and_one.shape[-2:], None, 0.0, 0.0
    kvz = state.kvz * common.state_factors[..., None]
    smallest, least = least_of(query_spec, key_spec), floor_of(kvz.dtype, query_spec, key_spec)
    if since is not None:
        least *= math.exp(-since.min())
    elif key.log_decay is not None:
        least = max(least, limits.weights_floor(kvz.dtype, smallest))
    least *= kvz.shape[-2] * (state.length + n)
    weights = common.value_weights
    is_weighted, lead = not (weights == 1).all(), weights.shape[:-2]
    is_small = smallest is limits.LEAST and weights.min() < smallest[kvz.itemsize] ** 0.5
    weights = np.broadcast_to(weights, (*lead, n, 1))
    lead = broadcast_lead(values_and_one.shape[:-2], lead)
    for rows, length, size in tiles(n, tuning.CAUSAL_TILE_ELEMENTS // kvz[..., 0].size):
        queries = FeatureMaker(query_spec, query.x, length, "query")
        keys = FeatureMaker(key_spec, key.x, length, "key", factors=common.key_factors)
        sums = Triangles(queries.weights, keys.weights, lead, kvz, size)
        if num_den is None:
            num_den = buffer("rows", (*sums.lead, n, e), values_and_one.dtype)
        arrays = (
            split_tiles(query.x[..., rows, :], length),
            split_tiles(key.x[..., rows, :], length),
            sums.split(values_and_one[..., rows, :]),
            sums.split(weights[..., rows, :]),
            sums.split(num_den[..., rows, :]),
        )
        shape = length // size, size, kvz.dtype
        decays = decay_of_tiles(key.log_decay, rows, *shape, since, smallest)
        borders = iter(repeat(()) if lengths is None else borders_of_tiles(lengths, rows, *shape))
        for q, k, v, weight, out in zip(*arrays, strict=True):
            log = keys.make(k, inspect=True)
            max_key = max(max_key, log)
            max_log = max(max_log, queries.make(q, inspect=True) + log)
            if max_log == inf:
                return limits.LARGE_EXPONENTS
            if is_weighted:
                v = weighted(v, weight)
                if is_small:
                    limits.rounded(v, smallest[v.itemsize])
            sums.add(v, out, next(decays), (), next(borders))
            # The floor does not fall from tile to tile.
            if not out[..., -1].min() >= least * math.exp(max_log):
                return limits.UNDERFLOWED
        kvz = sums.state()
    assert num_den is not None
    of_state = least / kvz.shape[-2] * math.exp(max_key)
    return Sums(num_den, least * math.exp(max_log), of_state), kvz


def _scan_stabilized(
    block: GivenBlock, state: State, want_log: bool
) -> tuple[Partial, State] | Declined:
    """Scan on the maximum so far of each feature, each row on its own largest."""
    query_spec, key_spec, query, key, values_and_one = block
    state = by_feature(state)
    (n, e), before = values_and_one.shape[-2:], state.kvz
    leads = query.x.shape[:-2], query_spec.P.shape[:-2], values_and_one.shape[:-2]
    lead = broadcast_lead(state.kvz.shape[:-2], *leads)
    num_den = buffer("rows", (*lead, n, e), values_and_one.dtype)
    part, accepted = Partial(num_den, np.empty((*lead, n, 1), num_den.dtype)), True
    for group, length, size in tiles(n, _tile_rows(state.kvz.shape[-2])):
        for start in range(group.start, group.stop, length):
            rows = slice(start, start + length)
            state, is_large = _scan_rows(block, rows, size, state, part)
            accepted = accepted and is_large
    z = state.kvz[..., -1]
    terms = float(z.shape[-1] * state.length + z.sum(axis=-1).max())
    floor = limits.weights_floor(z.dtype) * terms
    is_kept = accepted and _is_kept(key_spec, key, before, state.kvz, floor)
    if not (is_kept and limits.all_finite(num_den)):
        return limits.UNDERFLOWED
    return Partial(num_den, row_log(query_spec, query, part.log, want_log), accepted=True), state


def _tile_rows(m: int) -> int:
    """Most rows of a tile of max-stabilized features."""
    return max(tuning.MAX_STABILIZED_ROWS, tuning.CAUSAL_TILE_ELEMENTS // m)


def _scan_rows(
    block: GivenBlock, rows: slice, size: int, state: State, out: Partial
) -> tuple[State, bool]:
    """Scan some rows by sub-blocks; return the state after them, and whether all are accepted."""
    n, v = rows.stop - rows.start, block.values_and_one[..., rows, :]
    num_den, log_row = out.num_den[..., rows, :], out.log[..., rows, :]
    query, key = block.query.rows(rows), block.key.rows(rows)
    found = stabilize(block._replace(query=query, key=key), state, sub_blocks(n, size))
    q, k = (
        _exp_by_head(log, name)[..., None, :, :]
        for log, name in ((found.query, "queries"), (found.key, "keys"))
    )
    sums = Triangles(q, k, v.shape[:-2], found.state, size, limits.LEAST[v.itemsize])
    shape = n // size, size, v.dtype
    decay = next(decay_of_tiles(block.key.log_decay, rows, *shape))
    (values,), (sub_blocks_out,) = sums.split(v), sums.split(num_den)
    before = [state.kvz, *sums.add(values, sub_blocks_out, decay, found.rises)]
    log_row[...] = found.log_row
    after = State(sums.state(), found.log_scale[..., -1, :], state.length + n)

    # A decay takes from denominators on any scale.
    for may_redo in (decay is None, False):
        floor = found.floor if decay is None else 2 * found.floor
        rejected = limits.underflowed_rows(num_den[..., -1:], v, state.kvz, floor)
        # A row that sees no key is 0.
        if rejected is None or not (rejected := rejected & (log_row > -inf)).any():
            return after, True
        if may_redo:
            logs = [state.log_scale, *np.moveaxis(found.log_scale, -2, 0)]
            _sum_pairs(found, zip(before, logs, strict=False), v, rejected, num_den, log_row)
    return after, False


def _sum_pairs(
    found: StabilizedBlock,
    states: Iterable[tuple[Floats, Floats]],
    v: Floats,
    rejected: Bools,
    num_den: Floats,
    log_row: Floats,
) -> None:
    """Sum rejected rows again, each on the scale of its own largest product.

    ``states``: the state before each sub-block, and its log scales from the sub-block before.
    """
    lead, size = rejected.shape[:-2], v.shape[-2] // found.log_scale.shape[-2]
    for i, (kvz, c) in enumerate(states):
        rows = slice(i * size, (i + 1) * size)
        *heads, row, _ = np.nonzero(rejected[..., rows, :])
        if row.size == 0:
            continue

        def take(x: Floats, *places: Any, heads: Any = tuple(heads)) -> Any:
            if x.shape[:-2] != lead:
                x = np.broadcast_to(x, (*lead, *x.shape[-2:]))
            return x[(*heads, *places)]

        q = take(found.query[..., rows, :], row)[:, None, :]
        pairs = q + take(found.key[..., rows, :])
        # On scales that are ahead of their sums, the largest product would not show.
        kvz = take(kvz)
        z = np.where(kvz[..., -1] > 0, kvz[..., -1], kvz.dtype.type(1))
        before = q + take((c - limits.finite_shift(found.log_scale[..., i, :]))[..., None, :])
        before += np.log(z)[..., None, :]
        pairs[np.arange(size) > row[:, None]] = -inf
        top = np.maximum(
            pairs.max(axis=(-2, -1), keepdims=True), before.max(axis=-1, keepdims=True)
        )
        shift = limits.finite_shift(top)
        pairs, before = (limits.weights(x - shift) for x in (pairs, before))
        sums = np.matmul(pairs.sum(axis=-1)[:, None, :], take(v[..., rows, :]))
        sums += np.matmul(before, kvz / z[..., None])
        index = (*heads, rows.start + row)
        num_den[index] = sums[:, 0, :]
        log_row[index] += top[:, 0, :]


def _exp_by_head(log: Floats, name: str) -> Floats:
    """Exponentials in a buffer, with the bits of each head computed alone."""
    out = buffer(name, log.shape, log.dtype)
    shape = -1, *log.shape[-2:]
    for x, y in zip(log.reshape(shape), out.reshape(shape), strict=True):
        limits.weights(x, y)
    return out


def _is_kept(key_spec: Spec, key: Tokens, before: Floats, kvz: Floats, floor: float) -> bool:
    """Whether no feature of the state has decayed so far that underflow may have changed it.

    Always true without decay. Always true too for pointwise maps but ReLU: their features share a
    log scale, and no key has a feature of 0.
    """
    is_relu = isinstance(key_spec, Pointwise) and key_spec.f == RELU
    if key.log_decay is None or not (is_relu or isinstance(key_spec, Exponential)):
        return True
    is_small = ~(kvz[..., -1] >= floor)
    if is_small.any() and isinstance(key_spec, Pointwise):
        # A feature that no key has is exactly 0.
        has = preactivations(key_spec, key.x, "features") > 0
        if key.log_weight is not None:
            has = has & (key.log_weight > -inf)
        is_small &= (before[..., -1] != 0) | has.any(axis=-2)
    return not is_small.any()

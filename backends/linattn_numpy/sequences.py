"""Attention within each of short sequences that lie end to end.

Features are made for several sequences at once, unshifted; keys are on the scale of the largest of
their sequence. A sequence that is short beside features and values goes by its square of weights, a
longer one by its state. All are accepted by the rule of causal blocks, or none is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import exp, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Declined, Partial, Spec, State, Tokens
from linattn_numpy import tuning
from linattn_numpy.buffers import buffer
from linattn_numpy.causal_scales import common_scale
from linattn_numpy.features import (
    FeatureMaker,
    is_moderate,
    log_offsets,
    num_sign_halves,
    row_log,
    row_term,
    supports,
    unsupported,
)
from linattn_numpy.limits import (
    EMPTY,
    MIN_EXPONENT,
    SMALL_VALUES,
    UNDERFLOWED,
    all_finite,
    finite_shift,
    floor_of,
    tiny,
)
from linattn_numpy.products import (
    broadcast_lead,
    multiply,
    product,
    transposed,
    weighted,
    weighted_sum,
)
from linattn_numpy.tiles import lower

__all__ = ["sequences_block"]

Floats = NDArray[Any]
Lengths = NDArray[np.int64]

LARGE_EXPONENTS = Declined("exponents or features are out of the range of unshifted ones")


def sequences_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    lengths: Lengths,
    is_causal: bool,
    want_log: bool,
) -> Partial | Declined:
    """Attention within each sequence, full or causal."""
    if 0 in query.x.shape or 0 in values_and_one.shape:
        return EMPTY
    if not (supports(query_spec) and supports(key_spec)):
        return unsupported(query_spec, key_spec)
    if num_sign_halves(query_spec) != num_sign_halves(key_spec):
        return Declined("one side is paired, the other is not")
    if not (is_moderate(query_spec, query.x) and is_moderate(key_spec, key.x)):
        return LARGE_EXPONENTS
    dtype = values_and_one.dtype
    offsets = log_offsets(query_spec, dtype), log_offsets(key_spec, dtype)
    no_keys = np.full(max(len(each.T) for each in offsets), -np.inf, dtype)
    common = common_scale(*offsets, None, State(np.zeros((1, 1), dtype), no_keys, 0))
    if isinstance(common, Declined):
        return common
    starts = np.cumsum(lengths) - lengths
    log_row, row, values = common.log_scale[..., None], row_term(key_spec, key), values_and_one
    if row is not None:
        top = np.maximum.reduceat(row, starts, axis=-2)
        top = np.repeat(top, lengths, axis=-2)
        row = row - finite_shift(top)
        if np.any((row < MIN_EXPONENT[row.itemsize]) & (row > -np.inf)):
            return LARGE_EXPONENTS
        values, log_row = weighted(values, np.exp(row)), log_row + top

    queries = FeatureMaker(query_spec, query.x, 1, "query").weights
    keys = FeatureMaker(key_spec, key.x, 1, "key", factors=common.key_factors).weights
    lead = broadcast_lead(queries.shape[:-3], keys.shape[:-3], values.shape[:-2])
    num_den = buffer("rows", (*lead, *values.shape[-2:]), dtype)
    numbers, max_log = max(queries[..., 0, :].size, keys[..., 0, :].size), 0.0
    for rows, each in _tiles(lengths, tuning.CAUSAL_TILE_ELEMENTS // numbers):
        makers = (
            FeatureMaker(query_spec, query.x, each.sum(), "query"),
            FeatureMaker(key_spec, key.x, each.sum(), "key", factors=common.key_factors),
        )
        q, k = (x[..., rows, :] for x in (query.x, key.x))
        max_log = max(max_log, makers[0].make(q, inspect=True) + makers[1].make(k, inspect=True))
        if max_log == inf:
            return LARGE_EXPONENTS
        features = makers[0].weights, makers[1].weights
        _attend(*features, values[..., rows, :], each, is_causal, num_den[..., rows, :])
    num_features = queries.shape[-3] * queries.shape[-1]
    floor = floor_of(dtype) * num_features * int(lengths.max()) * exp(max_log)
    least = num_den[..., -1].min()
    if not (least >= floor and all_finite(num_den)):
        return UNDERFLOWED
    # What underflow may have taken from values. All rows of a sequence see its first ones: hardly
    # ever must others be inspected.
    small = max(floor / least, tiny(dtype)) / SMALL_VALUES
    if not np.abs(values_and_one[..., starts, :]).min() >= small:
        sizes = np.abs(values_and_one)
        if ((sizes < small) & (sizes != 0)).any():
            return UNDERFLOWED
    return Partial(num_den, row_log(query_spec, query, log_row, want_log))


def _tiles(lengths: Lengths, max_rows: int) -> Iterator[tuple[slice, Lengths]]:
    """Rows and lengths of sequences of at most so many tokens, or of one sequence."""
    stops = np.cumsum(lengths)
    first = start = 0
    while first < len(lengths):
        count = max(1, int(np.searchsorted(stops, start + max_rows, side="right")) - first)
        stop = int(stops[first + count - 1])
        yield slice(start, stop), lengths[first : first + count]
        first, start = first + count, stop


def _attend(
    q: Floats, k: Floats, v: Floats, lengths: Lengths, is_causal: bool, out: Floats
) -> None:
    """Put the sums of each sequence into ``out``; features are ``(..., h, n, m / h)``."""
    (h, _, r), e, start = q.shape[-3:], v.shape[-1], 0
    edges = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for first, stop in pairwise(edges):
        n = int(lengths[first])
        rows = slice(start, start + (stop - first) * n)
        start = rows.stop
        alike = [
            x[..., rows, :].reshape(*x.shape[:-2], stop - first, n, x.shape[-1])
            for x in (q, k, v, out)
        ]
        if is_causal:
            _scan(*alike)
        elif n * (h * r + e) < 2 * h * r * e:
            _read_pairs(*alike)
        else:
            _read(alike[0], weighted_sum(alike[1], alike[2][..., None, :, :, :]), alike[3])


def _scan(q: Floats, k: Floats, v: Floats, out: Floats) -> None:
    """Sum up to each token of sequences of one length, by squares of weights and states."""
    n, state = v.shape[-2], None
    for first in range(0, n, tuning.SQUARE_ROWS):
        rows = slice(first, min(first + tuning.SQUARE_ROWS, n))
        part = q[..., rows, :], k[..., rows, :], v[..., rows, :]
        _read_pairs(*part, out[..., rows, :], lower(rows.stop - first, v.dtype))
        if state is not None:
            out[..., rows, :] += _read(part[0], state, np.empty_like(out[..., rows, :]))
        if rows.stop < n:
            added = weighted_sum(part[1], part[2][..., None, :, :, :])
            state = added if state is None else np.add(state, added, out=state)


def _read_pairs(
    q: Floats, k: Floats, v: Floats, out: Floats, visible: Floats | None = None
) -> None:
    """Read values by the products of all features, of visible pairs or of all."""
    scores = product(q, transposed(k), "scores")
    weights = scores[..., 0, :, :, :]
    for half in range(1, q.shape[-4]):
        np.add(weights, scores[..., half, :, :, :], out=weights)
    if visible is not None:
        np.multiply(weights, visible, out=weights)
    multiply(weights, v, out)


def _read(q: Floats, kvz: Floats, out: Floats) -> Floats:
    """Read states ``(..., h, g, m / h, e)``."""
    if q.shape[-4] == 1:
        return multiply(q[..., 0, :, :, :], kvz[..., 0, :, :, :], out)
    return np.asarray(np.add.reduce(product(q, kvz, "halves"), axis=-4, out=out))

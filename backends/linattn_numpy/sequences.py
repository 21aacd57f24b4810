"""Attention within each of several packed sequences.

Features are made for several sequences together, unshifted; keys are on the scale of the largest
key of their sequence. Causal sequences are scanned as one, dropping the state at every border. Full
sequences, and short causal ones of one length, are computed by all pairs if they are short compared
with features and values, else by their states. All sequences are accepted, by the rules of blocks,
or the whole call is declined.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import exp, inf

import numpy as np

from linattn.typing import Declined, Partial, Spec, State, Tokens
from linattn_numpy import limits, tuning
from linattn_numpy.borders import Lengths
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.causal import Sums, scan_tiles
from linattn_numpy.causal_scales import CommonScale, GivenBlock, common_scale
from linattn_numpy.features import (
    FeatureMaker,
    are_moderate,
    features_shape,
    floor_of,
    log_offsets,
    num_sign_halves,
    row_log,
    row_term,
    supports,
    unsupported,
)
from linattn_numpy.products import (
    broadcast_lead,
    product,
    read_halves,
    sum_products,
    transposed,
    weighted,
)
from linattn_numpy.tiles import Run, lower, runs_of


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
    if not (supports(query_spec) and supports(key_spec)):
        return unsupported(query_spec, key_spec)
    if num_sign_halves(query_spec) != num_sign_halves(key_spec):
        return Declined("one side is paired, the other is not")
    if not (are_moderate(query_spec, query.x) & are_moderate(key_spec, key.x)).all():
        return limits.LARGE_EXPONENTS
    dtype = values_and_one.dtype
    offsets = log_offsets(query_spec, dtype), log_offsets(key_spec, dtype)
    no_keys = np.full(max(len(each.T) for each in offsets), -np.inf, dtype)
    common = common_scale(*offsets, None, State(np.zeros((1, 1), dtype), no_keys, 0))
    if isinstance(common, Declined):
        return common
    starts = np.cumsum(lengths) - lengths
    log_row, row = common.log_scale[..., None], row_term(key_spec, key)
    if row is not None:
        top = np.repeat(np.maximum.reduceat(row, starts, axis=-2), lengths, axis=-2)
        row = row - limits.finite_shift(top)
        if limits.are_far_apart(row):
            return limits.SMALL_SHARES
        common, log_row = common._replace(value_weights=np.exp(row)), log_row + top
    block = GivenBlock(query_spec, key_spec, query, key, values_and_one)
    longest = int(lengths.max())
    if is_causal and (longest > tuning.SQUARE_ROWS or lengths.min() < longest):
        sums = _scan_all(block, common, lengths)
    else:
        sums = _Apart(block, common).attend(lengths, is_causal)
    if isinstance(sums, Declined):
        return sums
    num_den, floor, _, least_weight = sums
    least = num_den[..., -1].min()
    if not (least >= floor and limits.all_finite(num_den)):
        return limits.UNDERFLOWED
    # Underflow may have taken digits of small values. All rows of a sequence see its first value:
    # hardly ever must others be inspected.
    small = max(floor / least, limits.tiny(dtype) / least_weight) / limits.SMALL_VALUES
    if not np.abs(values_and_one[..., starts, :]).min() >= small:
        sizes = np.abs(values_and_one)
        if ((sizes < small) & (sizes != 0)).any():
            return limits.UNDERFLOWED
    return Partial(num_den, row_log(query_spec, query, log_row, want_log))


def _scan_all(block: GivenBlock, common: CommonScale, lengths: Lengths) -> Sums | Declined:
    """Scan all sequences as one, dropping the state at every border."""
    values = block.values_and_one
    *heads, m = features_shape(block.key_spec, block.key.x)
    lead = broadcast_lead(tuple(heads), values.shape[:-2])
    nothing = State(np.zeros((*lead, m, values.shape[-1]), values.dtype), np.zeros(()), 0)
    sums = scan_tiles(block, nothing, common, lengths)
    return sums if isinstance(sums, Declined) else sums[0]


def _tiles(
    lengths: list[int], least: int, max_rows: int, max_pairs: float
) -> Iterator[tuple[slice, list[Run], bool]]:
    """Yield rows and runs of sequences, at most ``max_rows`` tokens, all of them short or none.

    A longer sequence is a tile of its own. One of more than ``max_pairs`` tokens is not short, and
    counts as ``least`` tokens at least, the size of its state.
    """
    start = stop = size = 0
    sizes: list[int] = []
    was_short = False
    for n in lengths:
        is_short = n <= max_pairs
        added = n if is_short else max(n, least)
        if sizes and (size + added > max_rows or is_short != was_short):
            yield slice(start, stop), runs_of(sizes), was_short
            sizes, start, size = [], stop, 0
        sizes.append(n)
        stop, size, was_short = stop + n, size + added, is_short
    yield slice(start, stop), runs_of(sizes), was_short


class _Apart:
    """Attention of sequences, a tile of them at a time: short ones by pairs, others by states."""

    def __init__(self, block: GivenBlock, common: CommonScale) -> None:
        query_spec, key_spec, query, key, values = self._block = block
        if not (common.value_weights == 1).all():
            values = weighted(values, common.value_weights)
        self._values, factors = values, common.key_factors
        self._keys = partial(FeatureMaker, key_spec, key.x, name="key", factors=factors)
        self._queries = partial(FeatureMaker, query_spec, query.x, name="query")
        k, q = self._keys(n=1).weights, self._queries(n=1).weights
        self._max_rows = tuning.TILE_ELEMENTS // max(q.size, k.size)
        self._lead = broadcast_lead(k.shape[:-3], values.shape[:-2])
        self._widths = k.shape[-3], k.shape[-1], values.shape[-1]
        lead = broadcast_lead(q.shape[:-3], self._lead)
        self._num_den = buffer("rows", (*lead, *values.shape[-2:]), values.dtype)
        self._max_log, self._least_sum, self._largest_sum = 0.0, inf, 0.0

    def attend(self, lengths: Lengths, is_causal: bool) -> Sums | Declined:
        """Attend within all sequences; causal ones must be short and of one length."""
        (h, r, e), dtype, longest = self._widths, self._values.dtype, int(lengths.max())
        m, visible = h * r, None
        max_pairs = 1.5 * m * e / (m + e)
        if is_causal:
            visible, max_pairs = lower(longest, dtype), inf
        for rows, runs, is_short in _tiles(lengths.tolist(), e, self._max_rows, max_pairs):
            if is_short:
                self._read_pairs(rows, runs, visible)
            else:
                self._read_states(rows, runs)
            if self._max_log == inf:
                return limits.LARGE_EXPONENTS
        per_term = floor_of(dtype, self._block.query_spec, self._block.key_spec)
        floor = per_term * m
        floor_of_pairs = floor * min(longest, max_pairs) * exp(self._max_log)
        if self._largest_sum == 0:
            return Sums(self._num_den, floor_of_pairs)
        least, most = limits.FEATURE_SUM_RANGE[dtype.itemsize]
        least = max(least, per_term * longest)
        if not (least <= self._least_sum <= self._largest_sum <= most):
            return limits.UNDERFLOWED
        floor_of_states = floor * max(1.0, self._largest_sum)
        floors = floor_of_pairs, floor_of_states, limits.MIN_READ_DENOMINATOR[dtype.itemsize]
        least_weight = min(1.0, self._least_sum / longest)
        return Sums(self._num_den, max(floors), least_weight=least_weight)

    def _read_pairs(self, rows: slice, runs: list[Run], visible: Floats | None) -> None:
        """Read by the weights of all pairs, or of the visible ones."""
        query, key, n = self._block.query.x, self._block.key.x, rows.stop - rows.start
        queries, keys = self._queries(n=n), self._keys(n=n)
        log_q = queries.make(query[..., rows, :], inspect=True)
        self._max_log = max(self._max_log, log_q + keys.make(key[..., rows, :], inspect=True))
        if self._max_log == inf:
            return
        values, num_den = self._values[..., rows, :], self._num_den[..., rows, :]
        arrays = queries.weights, keys.weights, values, num_den
        for run in runs:
            q, k, v, out = map(run.split, arrays)
            scores = product(q, transposed(k), "scores")
            weights = scores[..., 0, :, :, :]
            for half in range(1, q.shape[-4]):
                np.add(weights, scores[..., half, :, :, :], out=weights)
            if visible is not None:
                np.multiply(weights, visible, out=weights)
            np.matmul(weights, v, out=out)

    def _read_states(self, rows: slice, runs: list[Run]) -> None:
        """Read states; the features of keys are used before the features of queries are made."""
        (h, r, e), n = self._widths, rows.stop - rows.start
        count = runs[-1].places.stop
        kvz = buffer("states", (*self._lead, h, count, r, e), self._values.dtype)
        keys, v = self._keys(n=n), self._values[..., None, rows, :]
        keys.make(self._block.key.x[..., rows, :], inspect=False)
        for run in runs:
            sum_products(run.split(keys.weights), run.split(v), kvz[..., run.places, :, :])
        z = kvz[..., -1]
        self._least_sum = min(self._least_sum, float(z.min()))
        self._largest_sum = max(self._largest_sum, float(z.max()))
        queries, out = self._queries(n=n), self._num_den[..., rows, :]
        queries.make(self._block.query.x[..., rows, :], inspect=False)
        for run in runs:
            weights, states = run.split(queries.weights), kvz[..., run.places, :, :]
            read_halves(weights, states, run.split(out), axis=-4)

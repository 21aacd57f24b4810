"""The range of each dtype, and bounds on the loss of a sum to underflow.

Bounds that depend on the dtype are given by bytes a number. They are read as ``limits.NAME``.
"""

from __future__ import annotations

from functools import cache
from math import log
from typing import Any

import numpy as np

from linattn.typing import Declined
from linattn_numpy.buffers import Bools, Floats

EMPTY = Declined("an axis has length 0")
LARGE_EXPONENTS = Declined("exponents or features are out of the range of unshifted ones")
UNDERFLOWED = Declined("a denominator may have underflowed, or a sum is not finite")

# Exponents.
MIN_EXPONENT = {4: -80.0, 8: -700.0}  # exponentials of less are hardly normal numbers
MIN_ROW_TERM = {4: -40.0, 8: -350.0}  # of unshifted keys, beside the largest of a block
MAX_EXPONENT = {4: 30.0, 8: 300.0}  # of unshifted features; the range is about three times that
MAX_VJP_EXPONENT = {4: 20.0, 8: 200.0}  # in gradients: four of them and a cotangent's own
MIN_TOKEN_LOGS = {4: (-43.0, -35.0), 8: (-350.0, -300.0)}  # of a query and a key: normal products
MAX_QUERY_LOG = {4: 1e15, 8: 1e150}  # of a decoded query; beyond, the generic code decodes

# Log scales: how far apart those may be that share one.
MAX_LOG_LEAD = 10.0  # of a block above a state that it joins without rescaling it
MAX_LOG_SPREAD = {4: 20.0, 8: 80.0}  # of the features of a causal block and of its state
MAX_PREFIX_LOG_LEAD = 10.0  # of a scale above what has been seen so far: few rows are redone

# Decay.
MAX_WEAK_DECAY = {4: 17.0, 8: 170.0}  # of a sub-block, by whose inverse its values are multiplied

# Recurrences.
MAX_DECAY_EXPONENT = 10.0  # of half a chunk: its exponential keeps 1e-6 in float32
MAX_TOKEN_DECAY_EXPONENT = 20.0  # one number a token: float64 sums, so only range
MAX_SHORT_KEY = 16  # dimensions of keys that delta rules solve in float64: they lean on each other

# Features, sums and denominators, beyond which a block is done again in another way.
MAX_FEATURE = 1e10  # of a pointwise map; one feature of a block must be above the inverse
FEATURE_SUM_RANGE = {4: (1e-12, 1e12), 8: (1e-130, 1e130)}  # any read loses less than rounding
MIN_EXP_SUM = {4: 1e-30, 8: 1e-290}  # sum of exponentials that are not stabilized
MIN_READ_DENOMINATOR = {4: 1e-13, 8: 1e-130}  # below, small values may have underflowed
MAX_READ = {4: 1e30, 8: 1e290}  # numerators that are known to be finite; products stay in range
MAX_EXACT_DENOMINATOR = {4: 1e20, 8: 1e200}  # of unshifted ones: the range is far from used up
MIN_EXACT_DENOMINATOR = 1e-3  # of softmax attention, where 1 is what a shifted row has at least

LEAST = {4: 2.0**-63, 8: 2.0**-511}
"""Smallest weights that are not 0: products of two, or with values, are normal numbers."""

FAINT_SUMMED = {4: 2.0**-75, 8: 2.0**-600}
"""The same beside unshifted features in gradients, within MAX_VJP_EXPONENT."""

FADED = {4: 2.0**-100, 8: 2.0**-900}
"""The same for strong decays beside unshifted features."""

DECAYED = {4: 2.0**-40, 8: 2.0**-400}
"""The same for decays in recurrences, as in the generic code."""

FEATURE_SCALES = 2.0**-20, 2.0**20
"""Range of a feature's sums on its scale; outside it, the scale does not tell which are small."""

SMALL_SHARES = Declined("log weights of keys are far apart")

SMALL_VALUES = 2.0**10
"""Rounding units that underflow may take of the largest value that a row sees, as in the driver."""


@cache
def tiny(dtype: Any) -> float:
    """Smallest normal number."""
    return float(np.finfo(dtype).smallest_normal)


@cache
def floor_of(dtype: Any) -> float:
    """Smallest sum from which underflow cannot have taken more than rounding, for one term."""
    return tiny(dtype) / float(np.finfo(dtype).eps)


def weights_floor(dtype: Any, least: dict[int, float] = LEAST) -> float:
    """`floor_of` where each term is a product of two :func:`weights`, and small sums are 0."""
    return 2 * least[dtype.itemsize] / float(np.finfo(dtype).eps)


def weights(x: Floats, out: Floats | None = None, least: dict[int, float] = LEAST) -> Floats:
    """Exponentials, in place without ``out``; the smallest are multiples of ``least``.

    Smaller weights are negligible beside the largest weight of a row or feature, 1. Numbers below
    the smallest normal one, and products of them, may take a hundred times as long.
    """
    out = x if out is None else out
    start, lowest = log(least[x.itemsize]), x.min(initial=0.0)
    if lowest >= start:  # not with NaN
        return np.asarray(np.exp(x, out=out))
    if not lowest >= log(tiny(x.dtype)):
        x = x.clip(start - 0.8, np.inf, out=out)
    return rounded(np.exp(x, out=out), least[x.itemsize])


def rounded(x: Floats, least: float | Floats) -> Floats:
    """Round small numbers to multiples of ``least`` in place, by adding a step and taking it."""
    # 1.5, because the numbers just below a power of two, for negative x, lie twice as close.
    step = least * (1.5 / float(np.finfo(x.dtype).eps))
    x += step
    x -= step
    return x


def rescale(kvz: Floats, factor: Floats, least: float) -> None:
    """Multiply a state in place by the factors of its features; results below ``least`` are 0."""
    kvz *= factor
    kvz[np.abs(kvz) < least] = 0


def rescaled(kvz: Floats, log_factor: Floats, least: dict[int, float] = LEAST) -> Floats:
    """Multiply the features of a state by ``exp(log_factor)``; results below ``least`` are 0."""
    kvz = kvz * np.exp(log_factor)[..., None]
    kvz[np.abs(kvz) < least[kvz.itemsize]] = 0
    return kvz


def are_far_apart(row: Floats) -> bool:
    """Whether row terms, relative to their largest, are too small for unshifted features."""
    return bool(np.any((row < MIN_ROW_TERM[row.itemsize]) & (row > -np.inf)))


def finite_shift(log: Floats) -> Floats:
    """Replace -inf, the log of no keys, by 0."""
    return np.where(log == -np.inf, log.dtype.type(0), log)


def row_max(x: Floats) -> Floats:
    """Largest of each row, ``(..., n, 1)``, by ``argmax``, which takes half the time of ``max``."""
    return np.take_along_axis(x, x.argmax(axis=-1, keepdims=True), axis=-1)


def size_bound(x: Floats) -> float:
    """Root of the sum of squares, a bound on all sizes; inf or NaN if these are large."""
    flat = x.reshape(-1)
    return float(np.dot(flat, flat) ** 0.5)


def all_finite(x: Floats) -> bool:
    """Whether nothing is inf or NaN."""
    # Faster than isfinite.
    return size_bound(x) < np.inf or bool(np.isfinite(x).all())


def in_place(operation: np.ufunc, x: Floats, y: Floats) -> Floats:
    """Put the result into x, unless y has leading axes (of a state, of weights) beyond its."""
    fits = np.broadcast_shapes(x.shape, y.shape) == x.shape
    return np.asarray(operation(x, y, out=x if fits else None))


def row_sizes(x: Floats) -> Floats:
    """Largest size in each row, ``(..., n, 1)``; inf in a row of zeros, which has no digits."""
    sizes = np.abs(x).max(axis=-1, keepdims=True)
    return np.asarray(np.where(sizes == 0, sizes.dtype.type(np.inf), sizes))


def underflowed_rows(
    denominators: Floats,
    values_and_one: Floats,
    kvz: Floats,
    floor: float | Floats,
) -> Bools | None:
    """Return which rows, ``(..., n, 1)``, underflow may have changed; None if none.

    ``denominators``: ``(..., n, 1)``; ``values_and_one``: the block's; ``kvz``: the state before
    it; ``floor``: least denominator, of all heads or of each. A row of small
    values needs a larger denominator.
    """
    rejected, taken = ~(denominators >= floor), tiny(values_and_one.dtype)
    # Share that underflow may take of values of size 1, in accepted rows.
    loss = np.where(rejected, 0, np.maximum(floor / denominators, taken) / SMALL_VALUES)
    # All rows see the first values: hardly ever must others be inspected.
    if not loss.max() <= np.abs(values_and_one[..., 0, :]).min():
        sizes, z = np.abs(values_and_one), np.abs(kvz[..., -1:])
        before = np.divide(np.abs(kvz), z, out=np.zeros_like(kvz), where=z != 0)
        before = before.max(axis=-2, keepdims=True)
        # No more than the largest that each row sees.
        seen = np.maximum(np.maximum.accumulate(sizes, axis=-2), before)
        rejected |= ((seen < loss) & (seen != 0)).any(axis=-1, keepdims=True)
    return rejected if rejected.any() else None

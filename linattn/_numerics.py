"""Helpers that keep exponentials in range, for any array library."""

from __future__ import annotations

from functools import partial
from math import inf, log
from types import ModuleType

import numpy as np

from linattn._arrays import dtype_bits, is_staged, namespace
from linattn.typing import Array

ignore_fp_warnings = partial(
    np.errstate, over="ignore", under="ignore", invalid="ignore", divide="ignore"
)
"""Overflow and NaN show in the result, by contract; NumPy's warnings would only repeat it."""


LEAST = {16: 2.0**-14, 32: 2.0**-63, 64: 2.0**-511}
"""Smallest weights that are not flushed, by bits of a dtype: products of two are normal numbers.

Arithmetic below the smallest normal number takes some processors a hundred times as long.
"""

FAINT = {16: 2.0**-14, 32: 2.0**-85, 64: 2.0**-900}
"""The same for weights that are only multiplied by values, of about 1."""

DECAYED = {16: 2.0**-14, 32: 2.0**-40, 64: 2.0**-400}
"""The same for decays: a product may have two of them, a query, a key and a value."""

NORMAL = {16: 2.0**-14, 32: 2.0**-126, 64: 2.0**-1022}
"""Smallest normal numbers."""

LIFT = {32: 40, 64: 400}
"""log2 of the largest weights where both factors of a product are weights, for more of them."""


def finite_shift(log: Array, xp: ModuleType) -> Array:
    """Replace -inf (nothing seen) by 0, so that ``exp(-inf - shift)`` is 0 and not NaN."""
    return xp.where(log == -xp.inf, xp.zeros_like(log), log)


def exp_or_zero(x: Array, bits: int = 0, least: dict[int, float] = LEAST) -> Array:
    """``2^bits exp(x)``, and 0 where that is below ``least``.

    Beside the largest of the numbers that it is added to it is nothing.
    """
    xp = namespace(x)
    start = log(least[dtype_bits(x.dtype)]) - bits * log(2)
    if is_staged(x) or (isinstance(x, np.ndarray) and x.min(initial=inf) >= start):
        weights: Array = xp.exp(x)
    else:
        weights = xp.exp(xp.maximum(x, xp.full_like(x[..., :1], start)))
        weights = xp.where(x < start, xp.zeros_like(weights), weights)
    return weights * 2.0**bits if bits else weights


def flushed(x: Array, least: dict[int, float] = LEAST) -> Array:
    """Put 0 where a number is smaller than ``least``; XLA does so itself for what is not normal."""
    xp = namespace(x)
    if is_staged(x):
        return x
    # What is 0 stays as it is: through a constant a framework would pass no gradient.
    is_small = (xp.abs(x) < least[dtype_bits(x.dtype)]) & (x != 0)
    if isinstance(x, np.ndarray) and not is_small.any():
        return x
    return xp.where(is_small, xp.zeros_like(x), x)


def lift_of(like: Array) -> tuple[int, dict[int, float]]:
    """log2 of the largest weights of a causal triangle, and the smallest that are not 0.

    Other arrays than NumPy's may hold values of any size, and are not lifted.
    """
    return (LIFT[dtype_bits(like.dtype)], LEAST) if isinstance(like, np.ndarray) else (0, NORMAL)


def rescaled(
    kvz: Array, log_factor: Array, least: dict[int, float] = NORMAL, bits: int = 0
) -> Array:
    """Multiply the features of a state by ``2^bits exp(log_factor)``; small results are 0.

    The power is a factor of its own: added to the exponent it would cost digits.
    """
    return flushed(kvz * (namespace(kvz).exp(log_factor) * 2.0**bits)[..., None], least)


def divisor(size: Array, xp: ModuleType) -> Array:
    """Sizes of rows, clipped where XLA, which multiplies by reciprocals, would make these 0."""
    most = 1 / float(xp.finfo(size.dtype).smallest_normal)
    return xp.where((size > most) & (size < xp.inf), xp.full_like(size, most), size)

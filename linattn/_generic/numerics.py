"""What keeps exponentials in range, whatever the array library."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import numpy as np

from linattn.typing import Array

__all__ = ["divisor", "exp_up_to", "finite_shift", "ignore_fp_warnings"]

ignore_fp_warnings = partial(
    np.errstate, over="ignore", under="ignore", invalid="ignore", divide="ignore"
)
"""Overflow and NaN show in the result, by contract; NumPy's warnings would only repeat it."""


def finite_shift(log: Array, xp: ModuleType) -> Array:
    """Replace -inf (nothing seen) by 0, so that ``exp(-inf - shift)`` is 0 and not NaN."""
    return xp.where(log == -xp.inf, xp.zeros_like(log), log)


def exp_up_to(x: Array, top: Array, xp: ModuleType) -> Array:
    """``exp(x - top)``; 0 instead of any denormal number, which may take eight times as long.

    Beside the largest, 1, it is nothing; a normal number might be something, times a large value.
    """
    least = float(np.log(xp.finfo(top.dtype).smallest_normal)) + 1
    x = x - finite_shift(top, xp)
    weights = xp.exp(xp.maximum(x, xp.full_like(top, least)))
    return xp.where(x < least, xp.zeros_like(weights), weights)


def divisor(size: Array, xp: ModuleType) -> Array:
    """Sizes of rows, those cut whose reciprocal, by which XLA multiplies, it would make 0."""
    most = 1 / float(xp.finfo(size.dtype).smallest_normal)
    return xp.where((size > most) & (size < xp.inf), xp.full_like(size, most), size)

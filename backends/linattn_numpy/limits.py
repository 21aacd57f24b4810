"""What numbers of a dtype can hold, and what underflow may take from a sum."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_numpy.buffers import zeros

__all__ = [
    "AHEAD",
    "LEAST_READ",
    "LOWEST",
    "all_finite",
    "finite",
    "floor_of",
    "in_place",
    "tiny",
]

Floats = NDArray[Any]

AHEAD = 10.0
"""How far above the log scale of a state a block may be that is added without rescaling it."""

LEAST_READ = {4: 1e-13, 8: 1e-130}
"""A read with a denominator below it is done again shifted: small values may have underflowed."""

LOWEST = {4: -80.0, 8: -700.0}
"""Exponentials of less are hardly normal numbers, by bytes a number."""


@cache
def tiny(dtype: Any) -> float:
    """Smallest normal number."""
    return float(np.finfo(dtype).smallest_normal)


@cache
def floor_of(dtype: Any) -> float:
    """Smallest sum from which underflow cannot have taken more than rounding, for one term."""
    return tiny(dtype) / float(np.finfo(dtype).eps)


def finite(log: Floats) -> Floats:
    """Replace -inf, nothing seen, by 0."""
    return np.where(log == -np.inf, log.dtype.type(0), log)


def all_finite(x: Floats) -> bool:
    """Whether nothing is inf or NaN."""
    # Times 0, what is finite is 0 and all else NaN: elu + 1 takes 2 % less than by asking each.
    return not np.matmul(x, zeros(x.shape[-1], x.dtype)).any()


def in_place(operation: np.ufunc, x: Floats, y: Floats) -> Floats:
    """Put the result into x, unless y has leading axes (of a state, of weights) beyond its."""
    fits = np.broadcast_shapes(x.shape, y.shape) == x.shape
    return np.asarray(operation(x, y, out=x if fits else None))

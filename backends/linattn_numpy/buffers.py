"""Arrays that each thread keeps from block to block, so that no block pays for fresh pages."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_numpy import tuning

__all__ = ["buffer", "zeros"]

_scratch = threading.local()


def buffer(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return this thread's buffer of that name; what it held before is lost."""
    count = prod(shape)
    if count * np.dtype(dtype).itemsize > tuning.MAX_CACHED_BYTES:
        return np.empty(shape, dtype)
    kept = getattr(_scratch, name, None)
    if kept is None or kept.size < count or kept.dtype != dtype:
        kept = np.empty(count, dtype)
        setattr(_scratch, name, kept)
    return kept[:count].reshape(shape)


def zeros(count: int, dtype: Any) -> NDArray[Any]:
    """Return zeros that nobody may write to."""
    kept = getattr(_scratch, "zeros", None)
    if kept is None or kept.size < count or kept.dtype != dtype:
        kept = np.zeros(count, dtype)
        kept.flags.writeable = False
        _scratch.zeros = kept
    return np.asarray(kept[:count])

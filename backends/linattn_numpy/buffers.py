"""Workspaces that each thread caches, so that no block pays for fresh pages."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_numpy import tuning

__all__ = ["buffer"]

_scratch = threading.local()


def buffer(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return this thread's buffer of that name; what it held before is lost."""
    count = prod(shape)
    if count * np.dtype(dtype).itemsize > tuning.MAX_CACHED_BYTES:
        return np.empty(shape, dtype)
    cached = getattr(_scratch, name, None)
    if cached is None or cached.size < count or cached.dtype != dtype:
        # The old one goes before the new one comes.
        cached = None
        setattr(_scratch, name, None)
        cached = _aligned(count, np.dtype(dtype))
        setattr(_scratch, name, cached)
    return cached[:count].reshape(shape)


def _aligned(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array that begins with a cache line, so that no vector lies across two."""
    size = count * dtype.itemsize
    memory = np.empty(size + tuning.CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % tuning.CACHE_LINE_BYTES
    return memory[start : start + size].view(dtype)

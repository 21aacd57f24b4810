"""Types of arrays, and buffers that each thread caches, since fresh memory pages cost time."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_numpy import tuning

Floats = NDArray[Any]
Bools = NDArray[np.bool_]

_scratch = threading.local()

IS_POISONED = False
"""Tests set it: each buffer is filled with NaN, so that a read of old contents shows."""


def buffer(name: str, shape: tuple[int, ...], dtype: Any) -> Floats:
    """Return this thread's buffer of a name, whose earlier contents are overwritten."""
    cached: dict[Any, Any] = _scratch.__dict__
    view: Floats | None = cached.get((name, shape, dtype))
    if view is not None:
        return _poisoned(view) if IS_POISONED else view
    count = prod(shape)
    size = count * np.dtype(dtype).itemsize
    if size > tuning.MAX_CACHED_BYTES:
        return _poisoned(np.empty(shape, dtype)) if IS_POISONED else np.empty(shape, dtype)
    whole, is_full = cached.get(name), len(cached) >= tuning.MAX_CACHED_VIEWS
    if whole is not None and (is_full or whole.size < count or whole.dtype != dtype):
        # Old buffers and their views are freed before the new one is made.
        whole = None
        cached.clear()
    if whole is None:
        # It begins with a cache line, so that no vector lies across two.
        memory = np.empty(size + tuning.CACHE_LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % tuning.CACHE_LINE_BYTES
        whole = cached[name] = memory[start : start + size].view(dtype)
    cached[name, shape, dtype] = view = whole[:count].reshape(shape)
    return _poisoned(view) if IS_POISONED else view


def _poisoned(view: Floats) -> Floats:
    view.fill(np.nan if view.dtype.kind == "f" else np.iinfo(view.dtype).max)
    return view

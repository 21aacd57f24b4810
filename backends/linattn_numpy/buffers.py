"""Workspaces that each thread caches, so that no block pays for fresh pages."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_numpy import tuning

__all__ = ["buffer"]


class _Workspace(threading.local):
    """Buffers of a thread by name, and what was asked for of them."""

    def __init__(self) -> None:
        self.buffers: dict[str, NDArray[Any]] = {}
        self.views: dict[tuple[str, tuple[int, ...], Any], NDArray[Any]] = {}


_workspace = _Workspace()


def buffer(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return this thread's buffer of that name; what it held before is lost."""
    view = _workspace.views.get((name, shape, dtype))
    return _new_view(name, shape, dtype) if view is None else view


def _new_view(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    count, (buffers, views) = prod(shape), (_workspace.buffers, _workspace.views)
    if count * np.dtype(dtype).itemsize > tuning.MAX_CACHED_BYTES:
        return np.empty(shape, dtype)
    cached, is_full = buffers.get(name), len(views) >= tuning.MAX_CACHED_VIEWS
    if is_full or cached is None or cached.size < count or cached.dtype != dtype:
        # The old one goes before the new one comes.
        cached = None
        views.clear()
        buffers.pop(name, None)
        buffers[name] = cached = _aligned(count, np.dtype(dtype))
    views[name, shape, dtype] = view = cached[:count].reshape(shape)
    return view


def _aligned(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array that begins with a cache line, so that no vector lies across two."""
    size = count * dtype.itemsize
    memory = np.empty(size + tuning.CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % tuning.CACHE_LINE_BYTES
    return memory[start : start + size].view(dtype)

"""Forget what calls have cached, everywhere at once. docs/design.md lists the caches."""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from weakref import WeakKeyDictionary

_PACKAGES = ("linattn", "linattn_numpy", "linattn_cupy", "linattn_dask")


def clear_caches() -> None:
    """Clear every cache of the modules loaded: no result changes, the next calls are slower.

    Caches of this thread and context are cleared, caches of other threads stay. Arrays that a
    feature map caches (its specs) live as long as the map.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _PACKAGES:
            continue
        for attribute, value in list(vars(module).items()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            elif isinstance(value, WeakKeyDictionary) or attribute == "_namespaces":
                value.clear()
            elif isinstance(value, threading.local):
                value.__dict__.clear()
            elif isinstance(value, ContextVar) and value.name.startswith("last "):
                value.set(None)

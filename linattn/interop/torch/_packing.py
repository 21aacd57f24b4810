"""Feature maps and options as text that any process can read; reading it runs no code.

For calls in an exported program, and for the map in the state dict of a module.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from linattn import feature_maps


def pack(value: Any) -> str:
    """Return a map, or options, as text.

    Raises
    ------
    TypeError
        A value is neither an array, a number, a text, a map nor a collection of them.
    """
    return json.dumps(_packed(value))


def unpack(text: str, like: Any = None) -> Any:
    """Return what was packed, with tuples in place of lists.

    ``like``: a map whose class the packed one may have.
    """
    return _unpacked(json.loads(text), like)


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = base64.b64encode(value.tobytes()).decode()
        return {"array": data, "dtype": value.dtype.str, "shape": value.shape}
    if hasattr(value, "fingerprint") and hasattr(value, "__setstate__"):
        parts = {name: _packed(part) for name, part in value.__getstate__().items()}
        return {"map": type(value).__qualname__, "parts": parts}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [*map(_packed, value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"the parameters of a feature map in a state dict must be arrays, numbers, texts or maps, "
        f"got {type(value).__name__}; save the weights without it and pickle the map"
    )


def _unpacked(value: Any, like: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(item, None) for item in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        data = base64.b64decode(value["array"])
        return np.frombuffer(data, value["dtype"]).reshape(value["shape"]).copy()
    name = value["map"]
    kind: Any = type(like)
    if name != kind.__qualname__:
        kind = getattr(feature_maps, name) if name in feature_maps.__all__ else None
    if kind is None:
        raise RuntimeError(
            f"the map must be one of linattn.feature_maps in another process than the one that "
            f"made it, got {name}; make the call again here"
        )
    found = kind.__new__(kind)
    parts = value["parts"].items()
    found.__setstate__({n: _unpacked(part, getattr(like, n, None)) for n, part in parts})
    return found

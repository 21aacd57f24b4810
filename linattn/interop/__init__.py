"""Attention inside frameworks with a gradient of their own, in constant extra memory.

On arrays of torch and JAX :func:`linattn.linear_attention` is differentiated by the framework,
which keeps every block for the backward pass. The functions here are the same functions with
linattn's pullback in its place: nothing but the arguments is stored. Neither framework is imported
before its module, :mod:`linattn.interop.torch` or :mod:`linattn.interop.jax`, is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linattn.interop import jax as jax
    from linattn.interop import torch as torch

# Without its modules: a star must not import the frameworks.
__all__: list[str] = []

_SUBMODULES = ("jax", "torch")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"linattn.interop.{name}")
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    from importlib.util import find_spec

    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *filter(find_spec, _SUBMODULES)})

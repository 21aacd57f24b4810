"""Attention inside frameworks with a gradient of their own, in constant extra memory.

The functions of :mod:`linattn.interop.torch` and :mod:`linattn.interop.jax` are those of linattn.
Compilers and transforms of torch see one operator there, with linattn's pullback. On arrays of
JAX they take arrays of NumPy too.
:mod:`linattn.interop.transformers` puts attention into the models of transformers, and
:mod:`linattn.interop.onnx` writes model files. No framework is imported before its module, such as
:mod:`linattn.interop.torch` or :mod:`linattn.interop.jax`, is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linattn.interop import jax as jax
    from linattn.interop import onnx as onnx
    from linattn.interop import torch as torch
    from linattn.interop import transformers as transformers

# Without its modules: a star must not import the frameworks.
__all__: list[str] = []

_NEEDS = {
    "jax": ["jax"],
    "onnx": ["ndonnx"],
    "torch": ["torch"],
    "transformers": ["torch", "transformers"],
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS:
        return importlib.import_module(f"linattn.interop.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from importlib.util import find_spec

    dunders = (name for name in globals() if name.startswith("__"))
    there = (name for name, needs in _NEEDS.items() if all(map(find_spec, needs)))
    return sorted({*dunders, *there})

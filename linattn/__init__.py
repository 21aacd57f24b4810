"""Attention in linear time for any array.

Start with one of three functions, on arrays ``(..., length, dim)`` of NumPy, torch, JAX, CuPy or
Dask:

* :func:`attention` approximates softmax attention: you give a tolerance, it chooses the method;
* :func:`linear_attention` uses the feature map that you give, and can be causal with a state;
* :func:`softmax_attention` is exact, in quadratic time and little memory.

>>> import numpy as np
>>> import linattn
>>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 1024, 64))
>>> phi = linattn.feature_maps.EluFeatures()
>>> linattn.linear_attention(query, key, value, phi, is_causal=True).shape
(8, 1024, 64)

Read next: ``help(linattn.attention)``; ``help(linattn.feature_maps)`` to choose a map;
``help(linattn.diagnostics)`` to measure the error on your own arrays before you rely on it. In a
shell, ``linattn --help`` lists the commands that do the same on files.

Modules, each loaded at its first use:

* ``feature_maps`` and ``sampling``: kernels as inner products, and how random ones are drawn;
* ``diagnostics``: errors on your arrays; ``reference`` and ``baselines``: what to compare with;
* ``gradients`` without a framework; ``interop`` with torch, JAX and transformers;
* ``layers`` of transformers, and ``positions`` of their tokens;
* ``kernels``: densities, regression, transport; ``sklearn``: estimators;
* ``stream``: attention between files; ``datasets``: small ones for examples;
* ``testing``: checks for a feature map or a backend of your own; ``typing``: types.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linattn import baselines as baselines
    from linattn import (
        datasets,
        diagnostics,
        feature_maps,
        layers,
        positions,
        reference,
        sampling,
        stream,
    )
    from linattn import gradients as gradients
    from linattn import interop as interop
    from linattn import kernels as kernels
    from linattn import sklearn as sklearn
    from linattn import testing as testing
    from linattn import typing as typing
    from linattn._dispatch import Explanation, explain, registered_backends, without_backends
    from linattn._settings import config
    from linattn.automatic import AttentionReport, attention
    from linattn.coreset import CoresetAttention
    from linattn.files import StateFileError, load_state, save_state
    from linattn.functional import decode_step, linear_attention, softmax_attention
    from linattn.gradients import linear_attention_vjp, softmax_attention_vjp
    from linattn.merging import merge_outputs
    from linattn.recurrences import linear_recurrence, linear_recurrence_vjp, recurrence_step
    from linattn.state import (
        Decoder,
        State,
        init_state,
        merge_states,
        read_state,
        update_state,
    )

__all__ = [
    "AttentionReport",
    "CoresetAttention",
    "Decoder",
    "Explanation",
    "State",
    "StateFileError",
    "__version__",
    "attention",
    "config",
    "datasets",
    "decode_step",
    "diagnostics",
    "explain",
    "feature_maps",
    "init_state",
    "layers",
    "linear_attention",
    "linear_attention_vjp",
    "linear_recurrence",
    "linear_recurrence_vjp",
    "load_state",
    "merge_outputs",
    "merge_states",
    "positions",
    "read_state",
    "recurrence_step",
    "reference",
    "registered_backends",
    "sampling",
    "save_state",
    "softmax_attention",
    "softmax_attention_vjp",
    "stream",
    "update_state",
    "without_backends",
]

__version__ = "0.1.0"

# Loaded by their first use, as SciPy's are: the import of linattn adds little to that of NumPy.
_SUBMODULES = (
    "baselines",
    "datasets",
    "diagnostics",
    "feature_maps",
    "gradients",
    "interop",
    "kernels",
    "layers",
    "positions",
    "reference",
    "sampling",
    "sklearn",
    "stream",
    "testing",
    "typing",
)
_NEEDS = {"sklearn": "sklearn", "testing": "hypothesis"}
_NAMES = {
    "_dispatch": ("Explanation", "explain", "registered_backends", "without_backends"),
    "_settings": ("config",),
    "automatic": ("AttentionReport", "attention"),
    "coreset": ("CoresetAttention",),
    "files": ("StateFileError", "load_state", "save_state"),
    "functional": ("decode_step", "linear_attention", "softmax_attention"),
    "gradients": ("linear_attention_vjp", "softmax_attention_vjp"),
    "merging": ("merge_outputs",),
    "recurrences": ("linear_recurrence", "linear_recurrence_vjp", "recurrence_step"),
    "state": (
        "Decoder",
        "State",
        "init_state",
        "merge_states",
        "read_state",
        "update_state",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"linattn.{name}")
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(f"linattn.{_MODULE_OF[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from importlib.util import find_spec

    dunders = (name for name in globals() if name.startswith("__"))
    # help() reads each of them: those that cannot be imported are left out.
    missing = {name for name, library in _NEEDS.items() if find_spec(library) is None}
    return sorted({*dunders, *__all__, *_SUBMODULES} - missing)

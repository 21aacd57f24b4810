"""Attention in linear time for any array."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from linattn._dispatch import Explanation, explain, registered_backends, without_backends
from linattn._settings import config
from linattn.files import StateFileError, load_state, save_state
from linattn.functional import decode_step, linear_attention, softmax_attention
from linattn.state import (
    Decoder,
    State,
    init_state,
    merge_states,
    read_state,
    update_state,
)

if TYPE_CHECKING:
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
    from linattn.automatic import AttentionReport, attention
    from linattn.coreset import CoresetAttention
    from linattn.gradients import linear_attention_vjp, softmax_attention_vjp
    from linattn.merging import merge_outputs
    from linattn.recurrences import linear_recurrence, linear_recurrence_vjp, recurrence_step

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

# Loaded by their first use, as SciPy's are: together they cost as much as all the rest.
_SUBMODULES = (
    "datasets",
    "diagnostics",
    "feature_maps",
    "layers",
    "positions",
    "reference",
    "sampling",
    "stream",
)
_FROM = {
    "AttentionReport": "automatic",
    "CoresetAttention": "coreset",
    "attention": "automatic",
    "linear_attention_vjp": "gradients",
    "merge_outputs": "merging",
    "linear_recurrence": "recurrences",
    "linear_recurrence_vjp": "recurrences",
    "recurrence_step": "recurrences",
    "softmax_attention_vjp": "gradients",
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"linattn.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(f"linattn.{_FROM[name]}"), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    hidden = {"Any", "TYPE_CHECKING", "annotations", "importlib"}
    return sorted({*globals(), *_SUBMODULES, *_FROM} - hidden)

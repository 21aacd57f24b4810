"""Attention in linear time for any array."""

from __future__ import annotations

from linattn import datasets, feature_maps, reference, sampling
from linattn._dispatch import config, registered_backends, without_backends
from linattn.attention import decode_step, linear_attention, softmax_attention
from linattn.files import StateFileError, load_state, save_state
from linattn.state import (
    Decoder,
    State,
    init_state,
    merge_states,
    read_state,
    update_state,
)

__all__ = [
    "Decoder",
    "State",
    "StateFileError",
    "__version__",
    "config",
    "datasets",
    "decode_step",
    "feature_maps",
    "init_state",
    "linear_attention",
    "load_state",
    "merge_states",
    "read_state",
    "reference",
    "registered_backends",
    "sampling",
    "save_state",
    "softmax_attention",
    "update_state",
    "without_backends",
]

__version__ = "0.1.0"

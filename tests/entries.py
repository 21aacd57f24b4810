"""Every public function that takes arrays or a state, and what an error must say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import array_api_strict
import numpy as np
import pytest

import linattn
from tests.attentions import DIM, LENGTH, PHI, VALUE_DIM, state_of, tokens


def saying(*patterns: str) -> str:
    """Regular expression of a message that says all of these, in any order."""
    return "".join(rf"(?=[\s\S]*{pattern})" for pattern in patterns)


def word(name: str) -> str:
    return rf"\b{re.escape(name)}\b"


@dataclass(frozen=True)
class Entry:
    """A public function, the shapes of its array arguments, and how to call it."""

    shapes: Mapping[str, tuple[int, ...]]
    call: Callable[..., Any]

    def arrays(self, make: Callable[[Any], Any] = np.asarray) -> dict[str, Any]:
        rng = np.random.default_rng(5)
        return {
            name: make((0.6 * rng.standard_normal(shape)).astype(np.float32))
            for name, shape in self.shapes.items()
        }


def good_state(make, lead=()):
    return state_of(PHI, like=make(np.ones(DIM, dtype=np.float32)), batch_shape=lead)


def _whole(**named):
    return {"query": (LENGTH, DIM), "key": (LENGTH, DIM), "value": (LENGTH, VALUE_DIM), **named}


_TOKEN = {"query": (DIM,), "key": (DIM,), "value": (VALUE_DIM,)}
_PAIR = {"x": (LENGTH, DIM), "y": (LENGTH, DIM)}


def _entries() -> dict[str, Entry]:
    keys = {name: shape for name, shape in _whole().items() if name != "query"}
    return {
        "linear_attention": Entry(
            _whole(), lambda make, **a: linattn.linear_attention(**a, feature_map=PHI)
        ),
        "linear_attention-causal": Entry(
            _whole(),
            lambda make, **a: linattn.linear_attention(**a, feature_map=PHI, is_causal=True),
        ),
        "softmax_attention": Entry(_whole(), lambda make, **a: linattn.softmax_attention(**a)),
        "decode_step": Entry(
            _TOKEN,
            lambda make, **a: linattn.decode_step(**a, state=good_state(make), feature_map=PHI),
        ),
        "Decoder.step": Entry(
            _TOKEN, lambda make, **a: linattn.Decoder(PHI, good_state(make)).step(**a)
        ),
        "update_state": Entry(
            keys, lambda make, **a: linattn.update_state(good_state(make), **a, feature_map=PHI)
        ),
        "read_state": Entry(
            {"query": (LENGTH, DIM)},
            lambda make, **a: linattn.read_state(**a, state=good_state(make), feature_map=PHI),
        ),
        "init_state": Entry(
            {"like": (LENGTH, DIM)},
            lambda make, **a: linattn.init_state(PHI, VALUE_DIM, **a),
        ),
        "query_features": Entry({"x": (LENGTH, DIM)}, lambda make, x: PHI.query_features(x)),
        "key_features": Entry({"x": (LENGTH, DIM)}, lambda make, x: PHI.key_features(x)),
        "kernel": Entry(_PAIR, lambda make, x, y: PHI.kernel(x, y)),
        "estimate": Entry(_PAIR, lambda make, x, y: PHI.estimate(x, y)),
        "variance": Entry(_PAIR, lambda make, x, y: PHI.variance(x, y)),
    }


ENTRIES = _entries()
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
every_argument = pytest.mark.parametrize(
    ("entry", "argument"),
    [
        pytest.param(entry, argument, id=f"{name}-{argument}")
        for name, entry in ENTRIES.items()
        for argument in entry.shapes
    ],
)
every_argument_of_several = pytest.mark.parametrize(
    ("entry", "argument"),
    [
        pytest.param(entry, argument, id=f"{name}-{argument}")
        for name, entry in ENTRIES.items()
        for argument in entry.shapes
        if len(entry.shapes) > 1
    ],
)


def state_calls(make=np.asarray) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Public functions that take a state: name of the argument, and a call."""
    query, key, value = (make(array) for array in tokens(lead=()))
    return {
        "linear_attention": (
            "initial_state",
            lambda state: linattn.linear_attention(query, key, value, PHI, initial_state=state),
        ),
        "linear_attention-causal": (
            "initial_state",
            lambda state: linattn.linear_attention(
                query, key, value, PHI, is_causal=True, initial_state=state
            ),
        ),
        "decode_step": (
            "state",
            lambda state: linattn.decode_step(
                query[0, ...], key[0, ...], value[0, ...], state, PHI
            ),
        ),
        "Decoder": (
            "state",
            lambda state: linattn.Decoder(PHI, state).step(
                query[0, ...], key[0, ...], value[0, ...]
            ),
        ),
        "update_state": ("state", lambda state: linattn.update_state(state, key, value, PHI)),
        "read_state": ("state", lambda state: linattn.read_state(query, state, PHI)),
        "merge_states-first": (
            "first",
            lambda state: linattn.merge_states(state, good_state(make)),
        ),
        "merge_states-second": (
            "second",
            lambda state: linattn.merge_states(good_state(make), state),
        ),
    }


every_state_call = pytest.mark.parametrize("name", state_calls())
CPU, DEVICE1 = array_api_strict.Device("CPU_DEVICE"), array_api_strict.Device("device1")


def on_device(device):
    return partial(array_api_strict.asarray, device=device)

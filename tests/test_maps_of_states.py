"""Every public function that is given a state and a map rejects the state of another map."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import diagnostics, layers, stream
from linattn.feature_maps import PositiveFeatures
from tests.entries import saying

DIM, LENGTH = 4, 6
PHI, OTHER = (PositiveFeatures(DIM, 16, rng=seed) for seed in range(2))
TOKENS = np.random.default_rng(0).standard_normal((3, 2, LENGTH, DIM))
X = np.random.default_rng(1).standard_normal((LENGTH, 2 * DIM))
STEP = TOKENS[..., 0, :]


def state_of(phi):
    return linattn.linear_attention(*TOKENS, phi, return_state=True)[1]


def by_interop(name):
    def call(state):
        library = pytest.importorskip(name)
        attend = importlib.import_module(f"linattn.interop.{name}").linear_attention
        make = library.tensor if name == "torch" else library.numpy.asarray
        arrays = [make(a) for a in TOKENS]
        fields = [make(a) for a in state[:2]]
        return attend(*arrays, PHI, initial_state=linattn.State(*fields, *state[2:]))

    return call


def of_layers(function, init, *counts, x=X, memory=None):
    """Stream a layer with the state that it left with another map."""
    params = getattr(layers, init)(
        np.random.default_rng(0),
        *counts,
        2 * DIM,
        2,
        dtype=np.float64,
        **({} if memory is None else {"has_memory": True}),
    )
    call: Any = getattr(layers, function)

    def streamed(phi, state=None):
        attention = layers.LinearAttention(phi)
        options = {"initial_state": state, "num_heads": 2, "attention": attention}
        if function == "multi_head_attention":
            options["is_causal"] = True
        given = (x,) if memory is None or state is not None else (x, memory)
        return call(params, *given, return_state=True, **options)

    return lambda state: streamed(PHI, streamed(OTHER if state is None else PHI)[1])


def saved(state):
    linattn.save_state("never-written.npz", state, PHI)


TOKEN_IDS = np.array([1, 2, 0])
CALLS = {
    "linattn.functional.linear_attention": lambda s: linattn.linear_attention(
        *TOKENS, PHI, initial_state=s
    ),
    "linattn.functional.decode_step": lambda s: linattn.decode_step(*STEP, s, PHI),
    "linattn.gradients.linear_attention_vjp": lambda s: linattn.linear_attention_vjp(
        *TOKENS, PHI, initial_state=s
    ),
    "linattn.state.update_state": lambda s: linattn.update_state(s, *TOKENS[1:], PHI),
    "linattn.state.read_state": lambda s: linattn.read_state(TOKENS[0], s, PHI),
    "linattn.state.merge_states": lambda s: linattn.merge_states(state_of(PHI), s),
    "linattn.state.Decoder": lambda s: linattn.Decoder(PHI, s),
    "linattn.files.save_state": saved,
    "linattn.diagnostics.outputs.output_error": lambda s: diagnostics.output_error(
        TOKENS[0], s, PHI
    ),
    "linattn.diagnostics.outputs.effective_features": lambda s: diagnostics.effective_features(
        TOKENS[0], s, PHI
    ),
    "linattn.stream.attend": lambda s: stream.attend(
        *TOKENS, np.zeros_like(TOKENS[2]), PHI, initial_state=s
    ),
    "linattn.interop.torch.functions.linear_attention": by_interop("torch"),
    "linattn.interop.jax.linear_attention": by_interop("jax"),
}
OF_LAYERS = {
    "linattn.layers.attention.multi_head_attention": of_layers(
        "multi_head_attention", "init_multi_head_attention"
    ),
    "linattn.layers.decoders.decoder_layer": of_layers("decoder_layer", "init_decoder_layer"),
    "linattn.layers.decoders.decoder": of_layers("decoder", "init_decoder", 1, memory=X),
    "linattn.layers.generation.language_model": of_layers(
        "language_model", "init_language_model", 5, 1, x=TOKEN_IDS
    ),
}


def public_functions():
    """Functions and classes of public modules that take a state beside arrays, by their names.

    Those of `linattn.typing` are records and protocols, which check nothing.
    """
    found = {}
    for info in pkgutil.walk_packages(linattn.__path__, "linattn."):
        parts = info.name.split(".")[1:]
        if any(part.startswith("_") for part in parts) or parts[0] in ("cli", "typing"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        for name in getattr(module, "__all__", []):
            thing = getattr(module, name)
            if callable(thing) and takes_a_state(thing):
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
    return found


def takes_a_state(thing):
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return False
    is_record = isinstance(thing, type) and issubclass(thing, tuple)
    return not is_record and any(
        re.fullmatch(r"[\w.]*State( \| None)?", str(p.annotation)) for p in parameters
    )


def test_every_public_function_is_here():
    found = {name for name in public_functions() if not name.startswith("linattn.typing")}
    assert found - {*CALLS, *OF_LAYERS} == set()
    here = {name for name in (*CALLS, *OF_LAYERS) if ".interop." not in name}
    assert here - found == set()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.frameworks] if ".interop." in name else [])
        for name in CALLS
    ],
)
def test_the_state_of_another_map_is_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=saying("state|first and second", "map", "fingerprint")):
        CALLS[name](state_of(OTHER))
    assert not list(tmp_path.iterdir())
    CALLS[name](state_of(PHI))
    # Of unknown origin: nothing is rejected.
    CALLS[name](state_of(OTHER)._replace(fingerprint=None))


@pytest.mark.parametrize("name", OF_LAYERS)
def test_the_state_of_a_layer_with_another_map_is_rejected(name):
    with pytest.raises(ValueError, match=saying("state", "feature_map", "fingerprint")):
        OF_LAYERS[name](None)
    OF_LAYERS[name]("of the same map")

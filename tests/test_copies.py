"""Copies of maps and states, in memory and in files, go on as the original would."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import diagnostics, kernels
from tests.attentions import (
    DIM,
    HEADS,
    PHI,
    assert_equal_and_native,
    every_map,
    filled_state,
    in_library,
    some_maps,
    state_of,
    tokens,
)
from tests.entries import saying

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "pickle-0": lambda thing: pickle.loads(pickle.dumps(thing, protocol=0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
every_copy = pytest.mark.parametrize("clone", COPIES.values(), ids=COPIES)


@every_map
@every_copy
def test_copies_of_maps_are_bit_equal(feature_map, clone):
    twin = clone(feature_map)
    assert twin == feature_map
    assert repr(twin) == repr(feature_map)
    assert hash(twin) == hash(feature_map)
    assert twin.fingerprint() == feature_map.fingerprint()
    arrays = tokens()
    out, twin_out = (linattn.linear_attention(*arrays, phi) for phi in (feature_map, twin))
    np.testing.assert_array_equal(out, twin_out)
    with pytest.raises(AttributeError, match=saying("immutable", "scale")):
        twin.scale = 3.0
    if getattr(twin, "projection", None) is not None:
        np.testing.assert_array_equal(twin.projection, feature_map.projection)
        with pytest.raises(ValueError, match="read-only"):
            twin.projection[0, 0] = 1


@every_copy
def test_copies_of_states_are_bit_equal(clone):
    state = filled_state(PHI)
    twin = clone(state)
    assert type(twin) is linattn.State
    assert_equal_and_native(twin, state)


def test_states_of_every_library_copy(xp):
    query, key, value = in_library(xp, tokens())
    state = state_of(PHI, like=query, batch_shape=(HEADS,))
    state = linattn.update_state(state, key, value, PHI)
    twin = copy.deepcopy(state)
    assert type(twin) is linattn.State
    np.testing.assert_array_equal(xp.numpy(twin.kvz), xp.numpy(state.kvz))
    np.testing.assert_array_equal(xp.numpy(twin.log_scale), xp.numpy(state.log_scale))


@some_maps
def test_maps_keep_no_device_handles(xp, feature_map):
    before = pickle.dumps(feature_map)
    linattn.linear_attention(*in_library(xp, tokens()), feature_map)
    feature_map.query_features(in_library(xp, tokens())[0])
    assert pickle.dumps(feature_map) == before


# Every other object that a public call returns ----------------------------------------------------


def public_objects() -> dict[str, Any]:
    """Return one object of each public class that users get or make, but for maps."""
    rows = np.random.default_rng(0).standard_normal((40, DIM))
    query, key, value = tokens()
    _, report = linattn.attention(rows, rows, rows, return_report=True)
    with linattn.explain() as explanation:
        out, state = linattn.linear_attention(
            query, key, value, PHI, is_causal=True, return_state=True
        )
    decoder = linattn.Decoder(PHI, state)
    decoder.step(query[..., 0, :], key[..., 0, :], value[..., 0, :])
    coreset = linattn.CoresetAttention(8, block_size=4, rng=0)
    coreset.extend(rows, rows, rows)
    cache = linattn.layers.AttentionState(state, 12)
    whole = linattn.linear_attention(query, key, value, PHI, return_state=True)[1]
    return {
        "AttentionReport": report,
        "CoresetAttention": coreset,
        "Decoder": decoder,
        "Explanation": explanation,
        "State": state,
        "StateFileError": linattn.StateFileError("message"),
        "Transport": kernels.sinkhorn(rows, rows + 1, reg=9.0),
        "kernel_density": kernels.kernel_density(rows),
        "AttendedNorms": diagnostics.attended_norms(query, key),
        "Denominators": diagnostics.denominators(query, key, PHI),
        "HeldOutError": diagnostics.held_out_error(
            out, query=query, key=key, value=value, is_causal=True
        ),
        "OutputError": diagnostics.output_error(query, whole, PHI),
        "Recommendation": diagnostics.recommend_num_features(query, key, PHI, tolerance=1.0),
        "RelativeVariance": diagnostics.relative_variance(query, key, PHI),
        "KernelSums": linattn.reference.kernel_sums(query, key, value, PHI.kernel),
        "Alibi": linattn.layers.Alibi(),
        "AttentionState": cache,
        "AutomaticAttention": linattn.layers.AutomaticAttention(),
        "BoundedAttention": linattn.layers.BoundedAttention(),
        "DecoderState": linattn.layers.DecoderState((), 0),
        "LandmarkAttention": linattn.layers.LandmarkAttention(16),
        "LayerState": linattn.layers.LayerState(cache, None),
        "LinearAttention": linattn.layers.LinearAttention(PHI),
        "Rotary": linattn.layers.Rotary(),
        "Scope": linattn.layers.Scope(True, None, (), None),
        "SoftmaxAttention": linattn.layers.SoftmaxAttention(),
    }


def content(thing: Any) -> Any:
    """Everything that an object consists of, as nested lists; modules and locks are not data."""
    if isinstance(thing, np.ndarray | np.generic):
        return thing.tolist()
    if isinstance(thing, list | tuple):
        return [type(thing).__name__, *map(content, thing)]
    if isinstance(thing, dict):
        return [[str(name), content(value)] for name, value in thing.items()]
    kept = thing.__getstate__() if hasattr(thing, "__dict__") else None
    return [type(thing).__name__, content(kept)] if kept else repr(thing)


PUBLIC = {
    name
    for module in (linattn, kernels, diagnostics, linattn.layers, linattn.reference)
    for name in module.__all__
    if isinstance(getattr(module, name), type)
}
"""Public classes; `layers.Attention` is abstract."""


@every_copy
def test_copies_of_every_object_are_equal(clone):
    objects = public_objects()
    assert objects.keys() == PUBLIC - {"Attention"}
    for name, thing in objects.items():
        twin = clone(thing)
        assert type(twin) is type(thing), name
        assert repr(content(twin)) == repr(content(thing)), name
    density = objects["kernel_density"]
    twin = clone(density)
    np.testing.assert_array_equal(twin(density.dataset), density(density.dataset))
    twin.set_bandwidth(0.1)
    assert density.factor != 0.1

"""Inputs stay as they are, and no output shares memory with one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import linattn
from linattn.feature_maps import ActivationFeatures
from tests.attentions import (
    CHUNK,
    LENGTH,
    MAPS,
    VALUE_DIM,
    assert_equal_and_native,
    every_attention,
    every_map,
    filled_state,
    in_library,
    some_attentions,
    state_of,
    tokens,
)


@some_attentions
def test_inputs_are_unchanged(xp, attend):
    arrays = in_library(xp, tokens())
    mask = xp.array(np.arange(LENGTH) % 3 > 0)
    before = [xp.numpy(array) for array in (*arrays, mask)]
    attend(*arrays, key_mask=mask, chunk_size=CHUNK)
    for array, kept in zip((*arrays, mask), before, strict=True):
        np.testing.assert_array_equal(xp.numpy(array), kept)


@every_attention
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_query_is_key_is_value(attend, dtype):
    x = tokens(dtype=dtype)[0]
    out = attend(x, x, x)
    np.testing.assert_array_equal(out, attend(x.copy(), x.copy(), x.copy()))
    assert not np.shares_memory(out, x)


def leaves(result):
    """Arrays in whatever a public function returns."""
    if isinstance(result, np.ndarray):
        return [result]
    return [a for part in result for a in leaves(part)] if isinstance(result, tuple) else []


def calls_with_states(feature_map, dtype) -> dict[str, Callable[..., Any]]:
    def attention(query, key, value, kvz, log_scale, **options):
        return linattn.linear_attention(
            query,
            key,
            value,
            feature_map,
            initial_state=linattn.State(kvz, log_scale, 3),
            return_state=True,
            return_log_normalizer=True,
            **options,
        )

    def masked(query, key, value, kvz, log_scale):
        mask = np.zeros(key.shape[-2], dtype=bool)
        return attention(query, key, value, kvz, log_scale, key_mask=mask)

    def update(query, key, value, kvz, log_scale):
        return linattn.update_state(linattn.State(kvz, log_scale, 3), key, value, feature_map)

    def update_nothing(query, key, value, kvz, log_scale):
        state = linattn.State(kvz, log_scale, 3)
        return linattn.update_state(state, key[:, :0], value[:, :0], feature_map)

    def full_nothing(query, key, value, kvz, log_scale):
        return attention(query, key[:, :0], value[:, :0], kvz, log_scale)

    def causal_nothing(query, key, value, kvz, log_scale):
        return attention(query[:, :0], key[:, :0], value[:, :0], kvz, log_scale, is_causal=True)

    def step(query, key, value, kvz, log_scale):
        state = linattn.State(kvz, log_scale, 3)
        return linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map)

    def decoder(query, key, value, kvz, log_scale):
        stream = linattn.Decoder(feature_map, linattn.State(kvz, log_scale, 3))
        outs = tuple(stream.step(query[:, t], key[:, t], value[:, t]) for t in range(3))
        return outs, stream.state

    def read(query, key, value, kvz, log_scale):
        return linattn.read_state(query, linattn.State(kvz, log_scale, 3), feature_map)

    def merge(query, key, value, kvz, log_scale):
        state = linattn.State(kvz, log_scale, 3)
        empty = state_of(feature_map, like=key, batch_shape=kvz.shape[:-2])
        return linattn.merge_states(state, empty), linattn.merge_states(empty, state)

    def features(query, key, value, kvz, log_scale):
        return feature_map.query_features(query), feature_map.key_features(key)

    def pairs(query, key, value, kvz, log_scale):
        return feature_map.estimate(query, key), feature_map.estimate(query, query)

    return {
        "full": attention,
        "causal": partial(attention, is_causal=True),
        "masked": masked,
        "update": update,
        "update with nothing": update_nothing,
        "full with nothing": full_nothing,
        "causal with nothing": causal_nothing,
        "step": step,
        "decoder": decoder,
        "read": read,
        "merge": merge,
        "features": features,
        "pairs": pairs,
    }


@pytest.mark.parametrize("name", [*MAPS, "identity"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_outputs_alias_no_input_and_inputs_stay(name, dtype, length):
    identity = ActivationFeatures(sampler=None, activation=_identity, epsilon=0.0)
    feature_map = MAPS.get(name, identity)
    query, key, value = tokens(length=max(length, 3), dtype=dtype)
    query, key, value = (array[:, :length] for array in (query, key, value))
    state = filled_state(feature_map, dtype=dtype)
    inputs = [query, key, value, state.kvz, state.log_scale]
    before = [array.copy() for array in inputs]
    for call_name, call in calls_with_states(feature_map, dtype).items():
        if call_name == "decoder" and length < 3:
            continue
        outputs = leaves(call(*inputs))
        assert outputs
        for out in outputs:
            assert not any(np.shares_memory(out, array) for array in inputs), call_name
            assert out.flags.writeable, call_name
            out[...] = 7
        for array, kept in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(array, kept, err_msg=call_name)


def _identity(u):
    return u


@every_map
def test_a_rejected_step_leaves_the_decoder_as_it_was(feature_map):
    query, key, value = (array[0, 0] for array in tokens())
    decoder = linattn.Decoder(feature_map, state_of(feature_map, like=query))
    for _ in range(3):
        decoder.step(query, key, value)
        before = decoder.state
        for bad in (
            (query, key, value[:2]),
            (query.astype(float), key, value),
            (query, key, None),
            (query, key, np.ones(VALUE_DIM, dtype=int)),
            (query[0], key, value),
        ):
            with pytest.raises((TypeError, ValueError), match="must"):
                decoder.step(*bad)
        for one, other in zip(decoder.state, before, strict=True):
            np.testing.assert_array_equal(one, other)


@every_map
def test_earlier_states_of_a_decoder_stay(feature_map):
    query, key, value = tokens(lead=())
    decoder = linattn.Decoder(feature_map, state_of(feature_map, like=query))
    seen = [(decoder.state, copy.deepcopy(decoder.state))]
    outs = []
    for token in zip(query, key, value, strict=True):
        out = decoder.step(*token)
        outs.append((out, out.copy()))
        seen.append((decoder.state, copy.deepcopy(decoder.state)))
    for now, then in (*seen, *outs):
        assert_equal_and_native(now, then)
    assert [state.length for state, _ in seen] == list(range(LENGTH + 1))

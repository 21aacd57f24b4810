"""Drafts that are taken back, snapshots, and states on the way of one call."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

import copy

import numpy as np
import pytest

import linattn
from linattn.testing import assert_rollback
from tests.attentions import maps

MAPS = maps(4, 16, "positive", "hyperbolic", "elu", "trigonometric")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MAPS)
def test_rollback_of_a_decoder(name, dtype):
    """Hundreds of drafts and rejections leave the bits of never having drafted."""
    evidence = assert_rollback(
        MAPS[name], num_drafts=200 if name == "positive" else 60, dtype=dtype
    )
    assert "drafts taken back" in evidence.detail


def test_rollback_without_backends():
    with linattn.without_backends():
        assert_rollback(MAPS["positive"], num_drafts=40)


def test_rollback_of_a_coreset():
    assert_rollback(
        begin=lambda: linattn.CoresetAttention(4, block_size=8, rng=0),
        step=linattn.CoresetAttention.step,
        snapshot=copy.deepcopy,
        num_drafts=80,
    )


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_rollback_of_a_recurrence(rule):
    """Its state is an array that nothing writes to: a snapshot is a name."""
    gates = {"log_decay": np.full(2, -0.1)} if "gated" in rule else {}
    gates |= {"beta": np.full(2, 0.3)} if "delta" in rule else {}

    def step(stream, *token):
        output, stream[0] = linattn.recurrence_step(*token, stream[0], update_rule=rule, **gates)
        return output

    start = np.zeros((2, 4, 4))
    num_drafts = 150 if rule == "gated_delta" else 60
    assert_rollback(
        begin=lambda: [start], step=step, snapshot=list, num_drafts=num_drafts, dtype="float64"
    )


def test_the_kit_finds_a_snapshot_that_is_none():
    with pytest.raises(AssertionError, match="assert_rollback: token 0 after a rollback"):
        assert_rollback(
            begin=lambda: linattn.CoresetAttention(8, block_size=4, rng=0),
            step=linattn.CoresetAttention.step,
            snapshot=lambda stream: stream,
        )
    with pytest.raises(TypeError, match="want a feature_map, or begin=, step= and snapshot="):
        assert_rollback(begin=dict)


def test_a_copy_goes_on_by_itself():
    phi, rng = MAPS["positive"], np.random.default_rng(0)
    state = linattn.init_state(phi, 4, batch_shape=(2,), like=np.zeros(4))
    decoder = linattn.Decoder(phi, state)
    tokens = rng.standard_normal((50, 3, 2, 4))
    for token in tokens[:20]:
        decoder.step(*token)
    twin = decoder.copy()
    assert isinstance(twin, linattn.Decoder)
    got = [twin.step(*token) for token in tokens[20:]]
    want = [decoder.step(*token) for token in tokens[20:]]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(twin.state.kvz, decoder.state.kvz)
    assert twin.state.length == decoder.state.length == 50


def test_a_stepper_without_copy_goes_on_from_its_state(monkeypatch):
    import linattn_numpy.decoding

    monkeypatch.delattr(linattn_numpy.decoding.Stepper, "copy")
    phi = MAPS["positive"]
    state = linattn.init_state(phi, 4, batch_shape=(2,), like=np.zeros(4))
    decoder = linattn.Decoder(phi, state)
    decoder.step(*np.ones((3, 2, 4)))
    twin = decoder.copy()
    np.testing.assert_allclose(twin.step(*np.ones((3, 2, 4))), decoder.step(*np.ones((3, 2, 4))))
    assert twin.state.length == 2


# States on the way --------------------------------------------------------------------------


def test_a_state_on_the_way_is_one_to_go_on_from():
    phi, rng = MAPS["positive"], np.random.default_rng(0)
    tokens = rng.standard_normal((3, 2, 50, 4)).astype(np.float32)
    options = {"is_causal": True, "return_log_normalizer": True}
    output, norm, states = linattn.linear_attention(*tokens, phi, **options, return_states_every=16)
    want, want_norm = linattn.linear_attention(*tokens, phi, **options)
    np.testing.assert_allclose(output, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm, want_norm, rtol=1e-4, atol=1e-5)
    rest = linattn.linear_attention(
        *tokens[:, :, 32:], phi, is_causal=True, initial_state=states[1]
    )
    np.testing.assert_allclose(rest, want[:, 32:], rtol=1e-4, atol=1e-5)
    states[0].kvz[...] = 0  # shares no memory with the others
    again = linattn.linear_attention(
        *tokens[:, :, 32:], phi, is_causal=True, initial_state=states[1]
    )
    np.testing.assert_array_equal(again, rest)


def test_states_on_the_way_need_a_causal_walk():
    x, phi = np.ones((2, 8, 4)), MAPS["positive"]
    every = {"return_states_every": 4}
    for options in (
        {},
        {"is_causal": True, "exact_window": 2},
        {"is_causal": True, "cu_seqlens": [0, 8]},
    ):
        with pytest.raises(ValueError, match="return_states_every must be None unless causal"):
            linattn.linear_attention(x, x, x, phi, **options, **every)
    with pytest.raises(ValueError, match="return_states_every must be at least 1"):
        linattn.linear_attention(x, x, x, phi, is_causal=True, return_states_every=0)

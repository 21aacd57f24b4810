"""What a user's type checker sees: mypy reads this file, and `test_types.py` runs it."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import State
from linattn.automatic import AttentionReport
from linattn.feature_maps import EluFeatures
from linattn.gradients import Pullback
from linattn.typing import FeatureMap

Floats = NDArray[np.float32]


def check(query: Floats, key: Floats, value: Floats, flag: bool) -> None:
    """Call what users call; each result has the type that is claimed, and the one that it is."""
    phi: FeatureMap = EluFeatures()

    output = linattn.linear_attention(query, key, value, phi, is_causal=True)
    assert_type(output, Floats)
    assert isinstance(output, np.ndarray)
    pair = linattn.linear_attention(query, key, value, phi, return_state=True)
    assert_type(pair, tuple[Floats, State])
    assert isinstance(pair[1], State)
    logs = linattn.linear_attention(query, key, value, phi, return_log_normalizer=True)
    assert_type(logs, tuple[Floats, Any])
    assert len(logs) == 2
    three = linattn.linear_attention(
        query, key, value, phi, return_state=True, return_log_normalizer=True
    )
    assert_type(three, tuple[Floats, State, Any])
    assert len(three) == 3
    assert_type(linattn.linear_attention(query, key, value, phi, return_state=flag), Any)

    assert_type(linattn.softmax_attention(query, key, value), Floats)
    assert_type(linattn.attention(query, key, value, rng=0), Floats)
    reported = linattn.attention(query, key, value, return_report=True)
    assert_type(reported, tuple[Floats, AttentionReport])
    assert isinstance(reported[1], AttentionReport)

    result = linattn.linear_attention_vjp(query, key, value, phi)
    assert_type(result, tuple[Floats, Pullback])
    both = linattn.linear_attention_vjp(query, key, value, phi, return_state=True)
    assert_type(both, tuple[tuple[Floats, State], Pullback])
    assert isinstance(both[0][1], State)
    assert_type(linattn.softmax_attention_vjp(query, key, value), tuple[Floats, Pullback])

    state = linattn.init_state(phi, value.shape[-1], like=key)
    assert_type(state, State)
    state = linattn.update_state(state, key, value, phi)
    assert_type(linattn.merge_states(state, state), State)
    assert_type(linattn.read_state(query, state, phi), Floats)
    stepped = linattn.decode_step(query[0], key[0], value[0], state, phi)
    assert_type(stepped, tuple[Any, State])
    decoder = linattn.Decoder(phi, state)
    assert isinstance(decoder.step(query[0], key[0], value[0]), np.ndarray)
    assert_type(decoder.state, State)
    assert_type(linattn.testing.assert_causal(phi), linattn.testing.Evidence)
    assert linattn.gradients.Pullback is Pullback


def refused(query: Floats, key: Floats, value: Floats) -> None:
    """Call what is an error: an ignored one that mypy does not see is an error of its own."""
    phi: FeatureMap = EluFeatures  # type: ignore[assignment]
    linattn.linear_attention(query, key, value, phi, is_causal="no")  # type: ignore[call-overload]
    linattn.linear_attention(query, key, value, phi, is_casual=True)  # type: ignore[call-overload]

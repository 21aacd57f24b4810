"""The first keys of a sequence stay exact, or visible, outside of a window."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import linattn
from linattn.feature_maps import PositiveFeatures
from tests import dense_oracle
from tests.attentions import full_and_causal

PHI = PositiveFeatures(4, 16, rng=0)
LOCAL: dict[str, Any] = {"local_window_size": (5, 0), "sinks": 3}
WINDOW: dict[str, Any] = {"exact_window": 4, "sinks": 6}


def tokens(length=70, seed=0):
    return np.random.default_rng(seed).standard_normal((3, 2, length, 4))


def moved(arrays, number, options, phi):
    """Derivatives along a random direction, by a complex step of the dense formula."""
    direction = np.random.default_rng(7).standard_normal(arrays[number].shape)
    q, k, v = (x + 1e-30j * direction if i == number else x for i, x in enumerate(arrays))
    return direction, dense_oracle.evaluate(q, k, v, phi, **options).output.imag * 1e30


@full_and_causal
@pytest.mark.parametrize(("phi", "options"), [(None, LOCAL), (PHI, WINDOW)])
def test_sinks_are_those_of_the_dense_formula(xp, is_causal, phi, options):
    arrays = tokens(24)
    options = options | {"is_causal": is_causal}
    maps = [] if phi is None else [phi]
    function = linattn.softmax_attention if phi is None else linattn.linear_attention
    out = function(*map(xp.array, arrays), *maps, **options)
    want = dense_oracle.evaluate(arrays[0], arrays[1], arrays[2], phi, **options).output
    np.testing.assert_allclose(xp.numpy(out), want, rtol=1e-11, atol=1e-12)


@full_and_causal
@pytest.mark.parametrize(("phi", "options"), [(None, LOCAL), (PHI, WINDOW)])
def test_gradients_through_sinks(is_causal, phi, options):
    arrays = tokens(40)
    options = options | {"is_causal": is_causal}
    maps = [] if phi is None else [phi]
    function = linattn.softmax_attention_vjp if phi is None else linattn.linear_attention_vjp
    out, pullback = function(*arrays, *maps, **options)
    cotangent = np.random.default_rng(8).standard_normal(out.shape)
    for number, gradient in enumerate(pullback(cotangent)):
        direction, change = moved(arrays, number, options, phi)
        want = np.vdot(cotangent, change)
        np.testing.assert_allclose(np.vdot(gradient, direction), want, rtol=1e-10)


def test_each_packed_sequence_has_sinks_of_its_own():
    arrays, borders = tokens(), [0, 2, 45, 70]
    for maps, options in ([], LOCAL), ([PHI], WINDOW):
        function = linattn.linear_attention if maps else linattn.softmax_attention
        out = function(*arrays, *maps, is_causal=True, cu_seqlens=borders, **options)
        for a, b in pairwise(borders):
            part = arrays[..., a:b, :]
            want = function(*part, *maps, is_causal=True, **options)
            np.testing.assert_allclose(out[..., a:b, :], want, rtol=1e-12, atol=1e-13)


def test_sinks_are_seen_by_the_last_queries_of_a_cache():
    query, key, value = tokens()
    for maps, options in ([], LOCAL), ([PHI], WINDOW):
        function = linattn.linear_attention if maps else linattn.softmax_attention
        whole = function(query, key, value, *maps, is_causal=True, **options)
        options = options | {"is_causal": "lower_right"}
        last = function(query[..., -9:, :], key, value, *maps, **options)
        np.testing.assert_allclose(last, whole[..., -9:, :], rtol=1e-12, atol=1e-13)


def test_the_state_holds_sinks_by_the_map():
    q, k, v = tokens()
    options: dict[str, Any] = {"is_causal": True, "log_decay": -0.01, "return_state": True}
    state = linattn.linear_attention(q, k, v, PHI, **WINDOW, **options)[1]
    want = linattn.linear_attention(q, k, v, PHI, **options)[1]
    scale = np.exp(state.log_scale - want.log_scale)[..., None]
    np.testing.assert_allclose(state.kvz * scale, want.kvz, rtol=1e-11, atol=1e-12)
    assert state.length == want.length


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sinks": 2}, ValueError, "sinks must be 0 without exact_window, got 2"),
        ({"sinks": -1, "exact_window": 4}, ValueError, "sinks must be at least 0, got -1"),
        ({"sinks": 1.5, "exact_window": 4}, TypeError, "sinks must be an integer"),
        ({"sinks": np.zeros(2), "exact_window": 4}, TypeError, "return_log_normalizer"),
    ],
)
def test_sinks_that_are_none(options, error, match):
    q, k, v = tokens(8)
    with pytest.raises(error, match=match):
        linattn.linear_attention(q, k, v, PHI, **options)


def test_a_stream_that_goes_on_has_lost_its_sinks():
    q, k, v = tokens(8)
    state = linattn.linear_attention(q, k, v, PHI, is_causal=True, return_state=True)[1]
    with pytest.raises(ValueError, match="sinks must be 0 with initial_state, got 6"):
        linattn.linear_attention(q, k, v, PHI, is_causal=True, initial_state=state, **WINDOW)
    with pytest.raises(ValueError, match="sinks must be 0 without local_window_size, got 3"):
        linattn.softmax_attention(q, k, v, sinks=3)


def test_long_dask_arrays_with_sinks_are_refused():
    da = pytest.importorskip("dask.array")
    q, k, v = (da.from_array(x, chunks=(2, 20, 4)) for x in tokens())
    with pytest.raises(ValueError, match="one chunk of at most 1024 rows for sinks"):
        linattn.linear_attention(q, k, v, PHI, is_causal=True, **WINDOW)
    with pytest.raises(ValueError, match="one chunk of at most 1024 rows for sinks"):
        linattn.softmax_attention(q, k, v, **LOCAL)

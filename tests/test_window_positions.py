"""Windows and biases of offsets where queries and keys stand at positions: stops, L != S."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
from linattn.feature_maps import PositiveFeatures
from tests import dense_oracle

DIM, LENGTH = 4, 300
PHI = PositiveFeatures(DIM, 6, rng=0)

RULES: dict[str, dict[str, Any]] = {
    "end of the keys": {"is_causal": "lower_right"},
    "prefix": {"prefix_length": 90},
    "short prefix": {"prefix_length": 3},
    "blocks": {"causal_block": 70},
    "single blocks": {"causal_block": 2},
    "behind": {"key_stop": np.maximum(np.arange(LENGTH) - 60, 0)},
    "ahead": {"key_stop": np.minimum(np.arange(LENGTH) + 60, LENGTH)},
    "steps": {"key_stop": np.repeat([0, 10, 10, 300], 75)},
    "a prefix a head": {"prefix_length": np.array([5, 120])},
}
WINDOWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "local": (None, {"local_window_size": (20, 7)}),
    "long local": (None, {"local_window_size": (250, 0)}),
    "local, no bound": (None, {"local_window_size": (None, 2)}),
    "bias": (None, {"window_bias": np.linspace(-1, 2, 41)}),
    "both": (None, {"local_window_size": 30, "window_bias": np.ones(3), "far_bias": (2.0, -1.0)}),
    "exact window": (PHI, {"exact_window": 16}),
    "window of one": (PHI, {"exact_window": 1}),
    "long window": (PHI, {"exact_window": 200}),
    "window and bias": (PHI, {"exact_window": 16, "window_bias": np.linspace(-1, 2, 9)}),
}


def tokens(rule, length=LENGTH):
    """Return queries, keys and values; fewer queries where a rule has them at the end."""
    arrays = np.random.default_rng(0).standard_normal((3, 2, length, DIM))
    return arrays[0][:, 130:] if rule == "end of the keys" else arrays[0], *arrays[1:]


def attend(phi, arrays, options, **more):
    if phi is None:
        return linattn.softmax_attention(*arrays, **options, **more)
    return linattn.linear_attention(*arrays, phi, **options, **more)


@pytest.mark.usefixtures("numpy_path")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rule", RULES)
def test_windows_with_stops_are_the_dense_formula(rule, window):
    phi, options = WINDOWS[window]
    options, arrays = RULES[rule] | options, tokens(rule)
    want = dense_oracle.evaluate(*arrays, phi, **options)
    found, norm = attend(phi, arrays, options, return_log_normalizer=True)
    assert_allclose(found, want.output, rtol=1e-12, atol=1e-12)
    assert_allclose(norm, want.log_normalizer, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("numpy_path")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [3, 40, 10**6])
def test_states_after_a_window_with_stops_hold_all_keys(rule, size):
    query, key, value = tokens(rule)
    options = RULES[rule] | {"exact_window": size}
    nothing = linattn.init_state(PHI, DIM, batch_shape=(2,), like=key)
    before = linattn.update_state(nothing, key[:, :9], value[:, :9], PHI)
    _, state = linattn.linear_attention(
        query, key, value, PHI, initial_state=before, return_state=True, chunk_size=32, **options
    )
    want = linattn.update_state(before, key, value, PHI)
    assert state.length == want.length
    shift = np.exp(state.log_scale - want.log_scale)[..., None]
    assert_allclose(state.kvz * shift, want.kvz, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("count", [1, 7, 129])
def test_the_second_part_of_a_prefill_is_the_end_of_the_whole(window, count):
    phi, options = WINDOWS[window]
    query, key, value = tokens("whole")
    whole = attend(phi, (query, key, value), options, is_causal=True)
    arrays = query[:, -count:], key, value
    part = attend(phi, arrays, options, is_causal="lower_right")
    assert_allclose(part, whole[:, -count:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", ["local", "both", "exact window"])
def test_more_queries_than_keys_see_nothing_at_first(window):
    phi, options = WINDOWS[window]
    query, key, value = tokens("whole")
    arrays = query, key[:, :250], value[:, :250]
    out = attend(phi, arrays, options, is_causal="lower_right")
    assert_allclose(out[:, :50], 0)
    whole = attend(phi, (query[:, 50:], *arrays[1:]), options, is_causal=True)
    assert_allclose(out[:, 50:], whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", ["local", "bias", "both"])
def test_gradients_of_windows_with_stops(rule, window):
    options = RULES[rule] | WINDOWS[window][1]
    query, key, value = arrays = tokens(rule)
    out, pullback = linattn.softmax_attention_vjp(*arrays, **options)
    rng, step = np.random.default_rng(1), 1e-30
    cotangent = rng.standard_normal(out.shape)
    for i, gradient in enumerate(pullback(cotangent)):
        moved: list[Any] = [query, key, value]
        direction = rng.standard_normal(moved[i].shape)
        moved[i] = moved[i] + 1j * step * direction
        slope = dense_oracle.evaluate(*moved, None, **options).output.imag / step
        assert_allclose((gradient * direction).sum(), (cotangent * slope).sum(), rtol=1e-10)


@pytest.mark.parametrize("window", ["local", "bias", "exact window"])
def test_what_hides_beyond_stops_does_not_matter(window):
    phi, options = WINDOWS[window]
    query, key, value = tokens("whole", 80)
    key, value = key.copy(), value.copy()
    options = options | {"key_stop": np.minimum(np.arange(80), 50)}
    want = attend(phi, (query, key, value), options)
    key[:, 50:], value[:, 50:] = np.nan, np.inf
    assert_allclose(attend(phi, (query, key, value), options), want, rtol=1e-13)


@pytest.mark.usefixtures("numpy_path")
@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.parametrize("most", [1, 14])
def test_near_stops_of_every_query_take_as_few_blocks_as_one_rule(window, most):
    """Not a run of blocks for each query."""
    jitter = np.random.default_rng(0).integers(-most, most + 1, LENGTH)
    stops = np.maximum.accumulate(np.clip(np.arange(LENGTH) + jitter, 0, LENGTH))

    def calls(**options):
        with linattn.explain() as report:
            linattn.linear_attention(*tokens(""), PHI, exact_window=window, **options)
        return sum(row.calls for row in report.choices)

    assert calls(key_stop=stops) < 3 * calls(is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_short_windows_take_as_few_blocks_as_longer_ones(is_causal):
    """No block, and no state, for each window."""

    def calls(window):
        with linattn.explain() as report:
            linattn.linear_attention(*tokens(""), PHI, exact_window=window, is_causal=is_causal)
        return sum(row.calls for row in report.choices)

    assert max(map(calls, (1, 2, 8))) <= 1.4 * calls(32)

"""Exact near keys and linear far ones under one denominator, against the dense form."""

# mypy: disable-error-code="arg-type, call-arg, call-overload, misc"

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn._driver import steps
from linattn._generic import prefix_states
from linattn.feature_maps import (
    CosformerFeatures,
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
)
from linattn.typing import State
from tests.attentions import full_and_causal
from tests.pairs import check_weights as check
from tests.pairs import window_weights as dense_weights


@full_and_causal
@pytest.mark.parametrize("length", [1, 31, 700])
def test_every_library(xp, is_causal, length, monkeypatch):
    if xp.name in {"dask", "jax"}:
        # A graph, or a compilation for each operation.
        length = min(length, 100)
    monkeypatch.setattr(steps, "MAX_STATES", 3)
    rng = np.random.default_rng(2)
    query, key, value = rng.standard_normal((3, 2, length, 8)).astype(np.float32)
    phi = HyperbolicFeatures(8, 16, rng=0)
    arrays = [xp.array(x) for x in (query, key, value)]
    if xp.name == "dask":  # chunks of whole blocks
        arrays = [x.rechunk({-2: 48}) for x in arrays]

    def attend(*qkv):
        return linattn.linear_attention(
            *qkv, phi, is_causal=is_causal, exact_window=16, chunk_size=64
        )

    # One of JAX is eager.
    out = (attend if length == 31 and is_causal else xp.compiled(attend))(*arrays)
    xp.assert_like(out, arrays[0])
    doubles = [x.astype(np.float64) for x in (query, key, value)]
    weights = dense_weights(*doubles[:2], phi, 16, is_causal)
    check(xp.numpy(out), weights, doubles[2], 1e-5)


@full_and_causal
@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
def test_one_normalizer_at_any_scale(is_causal, backend):
    """Growing keys and values of 1e4: no scale of far or later keys spoils a row."""
    rng = np.random.default_rng(3)
    length = 600
    query, key, value = rng.standard_normal((3, length, 8))
    key = key * np.linspace(0.5, 12, length)[:, None]
    value = 1e4 * value
    phi = PositiveFeatures(8, 64, rng=0)
    floats = [x.astype(np.float32) for x in (query, key, value)]
    with linattn.config() if backend else linattn.without_backends():
        out = linattn.linear_attention(*floats, phi, is_causal=is_causal, exact_window=8)
    doubles = [x.astype(np.float64) for x in floats]
    check(out.astype(np.float64), dense_weights(*doubles[:2], phi, 8, is_causal), doubles[2], 3e-5)


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
@pytest.mark.parametrize("size", [1.0, 1e-29], ids=["values", "small values"])
@pytest.mark.parametrize("gap", [19, 19.9, 20.1, 25, 30, 60, 85, 94])
def test_far_keys_below_those_that_follow(gap, size, backend):
    """On the scale of later keys, which they do not see, earlier rows would lose their far keys."""
    length, window = 96, 8
    norm = np.sqrt(2 * gap)
    phi = PositiveFeatures.from_projection([[norm, 0], [norm, 0]], scale=1.0)
    query, key = np.zeros((2, length, 2), dtype=np.float32)
    key[length // 2 :, 0] = norm
    value = size * np.random.default_rng(0).standard_normal((length, 3))
    value = value.astype(np.float32)
    with linattn.config() if backend else linattn.without_backends():
        out = linattn.linear_attention(query, key, value, phi, is_causal=True, exact_window=window)
    doubles = [x.astype(np.float64) for x in (query, key)]
    weights = dense_weights(*doubles, phi, window, True)
    check(out / np.float64(size), weights, value / np.float64(size), 1e-6)


@full_and_causal
def test_memory_does_not_grow_with_the_length(is_causal):
    """Four times the length: the same memory beyond the output, but for a few states."""
    phi = PositiveFeatures(8, 16, rng=0)
    peaks = []
    for length in (1 << 15, 1 << 17):
        x = np.random.default_rng(0).standard_normal((length, 8), dtype=np.float32)
        tracemalloc.start()
        try:
            out = linattn.linear_attention(x, x, x, phi, is_causal=is_causal, exact_window=32)
            peaks.append(tracemalloc.get_traced_memory()[1] - out.nbytes)
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


@given(data=st.data())
def test_prefix_states_are_merges_one_by_one(draws, data):
    """Both ways, and at scales where only the way by pairs will do."""
    rng = np.random.default_rng(data.draw(draws.seeds))
    n = data.draw(st.integers(1, 12))
    log_scale = data.draw(st.sampled_from([0.0, 5.0, 400.0])) * rng.standard_normal((2, n, 3))
    log_scale[rng.random(log_scale.shape) < 0.3] = -np.inf
    kvz = np.where(log_scale[..., None] > -np.inf, rng.random((2, n, 3, 4)), 0)
    expected = State(np.zeros((2, 3, 4)), np.full((2, 3), -np.inf), 0)
    answers = [
        prefix_states.prefix_merge(State(kvz, log_scale, 0), lazy=lazy) for lazy in (False, True)
    ]
    for i in range(n):
        expected = linattn.merge_states(
            expected, State(kvz[:, i].copy(), log_scale[:, i].copy(), 0)
        )
        for answer in answers:
            scale = np.where(expected.log_scale == -np.inf, 0, expected.log_scale)
            shift = np.exp(answer.log_scale[:, i] - scale)
            assert_allclose(
                answer.kvz[:, i] * shift[..., None], expected.kvz, rtol=1e-12, atol=1e-300
            )


def test_errors():
    query, key, value = np.zeros((3, 8, 4))
    phi = PositiveFeatures(4, rng=0)
    with pytest.raises(ValueError, match="exact_window must be at least 1, got 0"):
        linattn.linear_attention(query, key, value, phi, exact_window=0)
    with pytest.raises(TypeError, match=r"exact_window must be a positive integer, got 2\.5"):
        linattn.linear_attention(query, key, value, phi, exact_window=2.5)
    with pytest.raises(
        ValueError, match=r"under exact_window query and key must have equal length"
    ):
        linattn.linear_attention(query[:5], key, value, phi, exact_window=2)
    with pytest.raises(ValueError, match=r"map of the softmax kernel .* got EluFeatures"):
        linattn.linear_attention(query, key, value, EluFeatures(), exact_window=2)


@full_and_causal
def test_a_window_longer_than_the_sequence_costs_no_more(is_causal):
    query, key, value = np.random.default_rng(0).standard_normal((3, 50, 4))
    phi = PositiveFeatures(4, 8, rng=0)
    tracemalloc.start()
    out = linattn.linear_attention(query, key, value, phi, is_causal=is_causal, exact_window=10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    exact = linattn.softmax_attention(query, key, value, is_causal=is_causal)
    assert_allclose(out, exact, rtol=1e-12, atol=1e-13)
    assert peak < 2e7


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [3, 6])
def test_what_lies_outside_the_sequence_has_no_say_in_its_scale(xp, length, is_causal):
    # All logits are -200: beside a logit of 0 nothing would be left of them in float32.
    host = np.zeros((3, 1, length, 4))
    host[0, ..., 0], host[1, ..., 0] = 10, -20
    host[2] = np.arange(4 * length).reshape(1, length, 4)
    query, key, value = (xp.array(x, "float32") for x in host)
    if xp.name == "dask":  # chunks of whole blocks
        query, key, value = (x.rechunk({-2: 6}) for x in (query, key, value))
    phi = PositiveFeatures(4, 8, scale=1.0, rng=0)

    def attend(*qkv):
        return linattn.linear_attention(*qkv, phi, exact_window=6, is_causal=is_causal)

    out = xp.compiled(attend)(query, key, value)
    exact = linattn.reference.softmax_attention(*host, scale=1.0, is_causal=is_causal)
    np.testing.assert_allclose(xp.numpy(out), exact, rtol=1e-5)


@pytest.mark.parametrize("number", [np.float64, np.float32])
@pytest.mark.parametrize("attend", ["linear", "softmax"])
def test_far_biases_may_be_scalars_of_numpy(xp, number, attend):
    arrays = [xp.array(x) for x in np.random.default_rng(0).standard_normal((3, 1, 12, 4))]
    table, phi = xp.array(np.zeros(3)), PositiveFeatures(4, 8, rng=0)

    def output(*far):
        options: dict[str, Any] = {"window_bias": table, "far_bias": far}
        if attend == "softmax":
            return xp.compiled(partial(linattn.softmax_attention, **options))(*arrays)
        options |= {"feature_map": phi, "exact_window": 6}
        return xp.compiled(partial(linattn.linear_attention, **options))(*arrays)

    got, want = output(number(0.5), number(-np.inf)), output(0.5, -np.inf)
    np.testing.assert_array_equal(xp.numpy(got), xp.numpy(want))


@full_and_causal
@pytest.mark.parametrize("right", [0.5, -np.inf])
@pytest.mark.parametrize("column", [5, 40])
def test_what_is_masked_by_a_bias_leaves_no_trace(is_causal, right, column):
    """-inf near by, and for all far keys of a side: then they are left out, NaN values included."""
    query, key, value = np.random.default_rng(4).standard_normal((3, 60, 4))
    phi, near = PositiveFeatures(4, 8, rng=1), np.zeros(9)
    near[2] = -np.inf
    value[column] = np.nan
    out = linattn.linear_attention(
        query,
        key,
        value,
        phi,
        is_causal=is_causal,
        exact_window=4,
        window_bias=near,
        far_bias=(-np.inf, right),
    )
    offset = np.arange(60) - np.arange(60)[:, None]
    bias = np.where(offset < 0, -np.inf, right)
    bias = np.where(abs(offset) <= 4, near[np.clip(offset, -4, 4) + 4], bias)
    weights = dense_weights(query, key, phi, 4, is_causal) * np.exp(bias)
    seen = weights[:, column] > 0
    assert_array_equal(out[seen], np.nan)
    check(out[~seen], weights[~seen], np.nan_to_num(value), 1e-12)


def test_biases_of_heads_that_only_the_state_has():
    rng, phi = np.random.default_rng(5), PositiveFeatures(4, 8, rng=1)
    before, tokens = rng.standard_normal((3, 5, 9, 4)), rng.standard_normal((3, 20, 4))
    state = linattn.init_state(phi, 4, like=before[0])
    state = linattn.update_state(state, *before[1:], phi)
    options: dict[str, Any] = {"initial_state": state, "window_bias": rng.standard_normal((5, 3))}
    options |= {"feature_map": phi, "exact_window": 4, "is_causal": True}
    got = linattn.linear_attention(*tokens, **options)
    each = np.broadcast_to(tokens[:, None], (3, 5, 20, 4))
    assert_array_equal(got, linattn.linear_attention(*each, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_bias": np.zeros(3)}, "r no larger than exact_window.*exact_window=None"),
        ({"window_bias": np.zeros(7), "exact_window": 2}, "r = 3 and exact_window=2"),
        ({"far_bias": (0.0, 0.0), "exact_window": 2}, "far_bias needs window_bias"),
        ({"window_bias": np.zeros((3, 5)), "exact_window": 2}, "window_bias must broadcast"),
    ],
)
def test_biases_that_do_not_fit_are_named(options, message):
    query = np.zeros((2, 10, 4))
    with pytest.raises(ValueError, match=message):
        linattn.linear_attention(query, query, query, PositiveFeatures(4, 8, rng=0), **options)


def test_t5_and_alibi_are_near_on_the_real_sample():
    """Landmarks and a window of 32: as near with these biases as without, 0.05, against 0.6."""
    query, key, value = linattn.datasets.pretrained_qkv()
    length, heads = query.shape[-2], query.shape[1]
    phi = linattn.feature_maps.LandmarkFeatures.fit(query, key, num_features=64, rng=0)

    def median_error(window_bias, exact_bias, **options):
        exact = linattn.softmax_attention(query, key, value, window_bias=exact_bias)
        out = linattn.linear_attention(
            query, key, value, phi, exact_window=32, window_bias=window_bias, **options
        )
        error, size = (np.linalg.norm(x, axis=(-2, -1)) for x in (out - exact, exact))
        return np.median(error / size)

    near = np.arange(-32, 33)
    # As T5 has it, constant from 32 on.
    t5 = 2 * np.random.default_rng(9).standard_normal((heads, 65), dtype=np.float32)
    assert median_error(t5, t5) < 0.05
    assert median_error(np.zeros(1, dtype=np.float32), t5) > 0.5
    slopes = linattn.positions.alibi_slopes(heads)[:, None].astype(np.float32)
    alibi = -slopes * abs(np.arange(1 - length, length))
    far = -64 * slopes[:, 0]
    assert median_error(-slopes * abs(near), alibi, far_bias=(far, far)) < 0.06


class Positioned(CosformerFeatures):
    """A map of one's own that weighs far keys by their positions."""

    softmax_kernel = True


@full_and_causal
@pytest.mark.parametrize("with_backends", [True, False], ids=["backends", "generic"])
@pytest.mark.parametrize("chunk_size", [None, 4, 12])
def test_far_keys_have_their_positions(is_causal, with_backends, chunk_size):
    rng, window = np.random.default_rng(0), 4
    query, key, value = rng.standard_normal((3, 2, 41, 4))
    phi = Positioned(4, max_length=100)
    i, j = np.ogrid[:41, :41]
    exact = np.exp(phi.scale * query @ np.swapaxes(key, -2, -1))
    weights = np.where(abs(i // window - j // window) <= 1, exact, phi.kernel(query, key))
    weights = np.where(j <= i, weights, 0) if is_causal else weights
    with nullcontext() if with_backends else linattn.without_backends():
        out = linattn.linear_attention(
            query, key, value, phi, is_causal=is_causal, exact_window=4, chunk_size=chunk_size
        )
    assert_allclose(out, weights @ value / weights.sum(-1, keepdims=True), rtol=1e-11, atol=1e-11)


@full_and_causal
@pytest.mark.parametrize("size", [1.0, 7.0])
def test_a_window_of_one_token_keeps_its_digits(is_causal, size):
    """A key along a projection weighs more by the map than all that is left without it."""
    rng = np.random.default_rng(3)
    query, key, value = rng.standard_normal((3, 2, 100, 4))
    projection = size * np.eye(4)
    query[:, ::7] = key[:, ::7] = projection[1] / 2
    phi = PositiveFeatures.from_projection(projection, scale=1.0)
    out = linattn.linear_attention(query, key, value, phi, is_causal=is_causal, exact_window=1)
    check(out, dense_weights(query, key, phi, 1, is_causal), value, 1e-14)

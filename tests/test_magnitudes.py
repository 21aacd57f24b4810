"""Numbers of any size: denormal, equal, far apart, and beyond the range of exp."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn import reference
from linattn.feature_maps import (
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
)
from tests.attentions import (
    CHUNK,
    HEADS,
    LENGTH,
    MAPS,
    Attention,
    every_attention,
    every_map,
    fetched,
    in_library,
    some_attentions,
    state_of,
    tokens,
)

# Arrays are unpacked into their places, which no type checker can follow.
linear_vjp: Any = linattn.linear_attention_vjp


@some_attentions
@pytest.mark.parametrize(("dtype", "size"), [("float32", 30.0), ("float16", 8.0)])
def test_logits_beyond_the_range_of_exp(xp, attend, dtype, size):
    if attend.name == "trigonometric" and dtype == "float16":
        size = 5.0
    query, key, value = tokens()
    query, key = (size * a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (query, key))
    query, key, value = (a.astype(dtype) for a in (query, key, value))
    logits = query.astype(float) @ np.swapaxes(key.astype(float), -1, -2) / 2
    limit = {"float32": 88.7, "float16": 11.09}[dtype]
    assert np.max(logits) > limit or size == 5.0
    out = attend(*(xp.array(a, dtype) for a in (query, key, value)), chunk_size=CHUNK)
    xp.assert_like(out, xp.array(value, dtype))
    tolerance = 2e-3 if dtype == "float16" else 2e-4
    attend.check(xp.numpy(out), query, key, value, tolerance=tolerance)


@every_map
def test_states_of_large_logits(feature_map):
    query, key, value = tokens(lead=())
    query, key = 30 * query, 30 * key
    state = linattn.update_state(state_of(feature_map, like=key), key, value, feature_map)
    assert_array_equal(np.isfinite(state.kvz), True)
    attend = Attention("", feature_map, False)
    out = linattn.read_state(query, state, feature_map)
    attend.check(out, query, key, value, tolerance=3e-4)
    attend = Attention("", feature_map, True)
    decoder = linattn.Decoder(feature_map, state_of(feature_map, like=key))
    steps = [decoder.step(*token) for token in zip(query, key, value, strict=True)]
    attend.check(np.stack(steps), query, key, value, tolerance=3e-4)


def dense_elu(query, key, value):
    """Causal attention by elu + 1, from logs of features, and gradients of its sum."""
    log_q, log_k = (np.where(x > 0, np.log1p(np.maximum(x, 0)), x) for x in (query, key))
    logs = log_q[:, None, :] + log_k[None, :, :]
    logs[np.triu_indices(len(query), 1)] = -np.inf
    pairs = np.exp(logs - logs.max(axis=(1, 2), keepdims=True))
    pairs /= pairs.sum(axis=(1, 2), keepdims=True)
    weights = pairs.sum(axis=-1)
    output = weights @ value
    grad = pairs * (value.sum(axis=-1)[None, :] - output.sum(axis=-1)[:, None])[..., None]
    slopes = (1 / (1 + np.maximum(x, 0)) for x in (query, key))
    return output, *(g * s for g, s in zip((grad.sum(1), grad.sum(0)), slopes, strict=True))


@pytest.mark.parametrize(
    ("size", "backends"), [(1.0, True), (300.0, True), (300.0, False), (3000.0, True)]
)
def test_elu_of_rows_whose_features_are_far_apart(xp, size, backends):
    """All negative: a feature that is nothing beside the largest of its row may decide alone."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 40, 4)).astype(np.float32)
    query, key = -size * abs(query), np.where(rng.random(key.shape) < 0.1, 1, -size) * abs(key)
    arrays = [x.astype(np.float32) for x in (query, key, value)]
    given = [xp.array(x, "float32") for x in arrays]
    if xp.name == "dask" and not (backends and size == 300):
        pytest.skip("dask: one graph says what all do")
    with nullcontext() if backends else linattn.without_backends():
        output, pull = linear_vjp(*given, EluFeatures(), is_causal=True, chunk_size=16)
        grads = pull(xp.array(np.ones_like(value), "float32"))
    want, *want_grads = dense_elu(*(x.astype(float) for x in arrays))
    tolerance = 2e-6 * max(size, 10.0)
    np.testing.assert_allclose(xp.numpy(output), want, rtol=0, atol=tolerance)
    for grad, wanted in zip(grads, want_grads, strict=False):
        limit = tolerance * (1 + abs(wanted).max())
        np.testing.assert_allclose(xp.numpy(grad), wanted, rtol=0, atol=limit)


@dataclass(frozen=True)
class RowShifted:
    """A map without the query's common factor, which cancels, and costs the oracle its digits."""

    feature_map: Any

    @property
    def num_features(self):
        return self.feature_map.num_features

    def query_features(self, x):
        phi = self.feature_map
        log, values = phi.query_features(x)
        if isinstance(phi, PositiveFeatures | HyperbolicFeatures):
            # Beside the square of a large query float64 has no room for its exponents, which are
            # linear: those of a small one times as much.
            size = 1 + 2 * np.max(np.abs(x), axis=-1, keepdims=True)
            plus, minus = (phi.query_features(sign * x / size).log for sign in (1, -1))
            log = size * (plus - minus) / 2 + phi.query_features(0 * x).log
        if log is not None:
            log = log - np.max(log, axis=-1, keepdims=True)
        return log, values

    def key_features(self, y):
        return self.feature_map.key_features(y)


def assert_right_or_rejected(attend, query, key, value, function=None):
    """Each row is right, or holds a NaN: never plausible and wrong."""
    try:
        out = (function or attend)(query, key, value)
    except ValueError:
        return
    assert_array_equal(np.isinf(out), False)
    q, k, v = (np.asarray(array, dtype=np.float64) for array in (query, key, value))
    with np.errstate(all="ignore"):
        if attend.feature_map is None:
            expected = reference.softmax_attention(q, k, v, is_causal=attend.is_causal)
        else:
            expected = reference.kernel_attention(
                q, k, v, RowShifted(attend.feature_map), is_causal=attend.is_causal
            )
    flagged = np.isnan(out).any(axis=-1, keepdims=True)
    wrong = np.any(~flagged & ~(np.abs(out - expected) <= 1e-3 * np.max(np.abs(value))), axis=-1)
    said = f"neither NaN nor right: {out[wrong].tolist()}, should be {expected[wrong].tolist()}"
    assert_array_equal(wrong, False, err_msg=said)


def largest(array):
    return array / np.max(np.abs(array)) * 3e38


HUGE: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "both": lambda q, k: (q * 1e20, k * 1e20),
    "query": lambda q, k: (q * 1e20, k),
    "key": lambda q, k: (q, k * 1e20),
    "alike": lambda q, k: (np.abs(q) * 1e20, np.abs(k) * 1e20),
    "opposed": lambda q, k: (np.abs(q) * 1e20, -np.abs(k) * 1e20),
    "one query": lambda q, k: (np.where(np.arange(LENGTH)[:, None] == 3, q * 1e20, q), k),
    "one key": lambda q, k: (q, np.where(np.arange(LENGTH)[:, None] == 3, k * 1e20, k)),
    "largest": lambda q, k: (largest(q), largest(k)),
    "largest opposed": lambda q, k: (np.abs(largest(q)), -np.abs(largest(k))),
    "largest query": lambda q, k: (largest(q), k),
    "largest key": lambda q, k: (q, largest(k)),
}


@every_attention
@pytest.mark.parametrize("huge", HUGE)
def test_huge_inputs_are_right_nan_or_rejected(attend, huge):
    query, key, value = tokens()
    query, key = (a.astype(np.float32) for a in HUGE[huge](query, key))
    assert_right_or_rejected(attend, query, key, value)


@some_attentions
@pytest.mark.parametrize("huge", ["both", "opposed"])
def test_huge_inputs_in_every_library(xp, attend, huge):
    query, key, value = tokens()
    query, key = (a.astype(np.float32) for a in HUGE[huge](query, key))

    def in_library_and_back(*arrays):
        return fetched(xp, attend(*in_library(xp, arrays), chunk_size=CHUNK))

    assert_right_or_rejected(attend, query, key, value, in_library_and_back)


@every_map
@pytest.mark.parametrize("huge", HUGE)
def test_huge_inputs_in_states(feature_map, huge):
    query, key, value = tokens(lead=())
    query, key = (a.astype(np.float32) for a in HUGE[huge](query, key))

    def through_a_state(query, key, value):
        state = linattn.update_state(state_of(feature_map, like=key), key, value, feature_map)
        return linattn.read_state(query, state, feature_map)

    def through_steps(query, key, value):
        decoder = linattn.Decoder(feature_map, state_of(feature_map, like=key))
        return np.stack([decoder.step(*token) for token in zip(query, key, value, strict=True)])

    full, causal = Attention("", feature_map, False), Attention("", feature_map, True)
    assert_right_or_rejected(full, query, key, value, through_a_state)
    assert_right_or_rejected(causal, query, key, value, through_steps)


@every_attention
@pytest.mark.parametrize("size", [1e-20, 1e-25, 1e-30])
def test_minute_inputs_are_right_nan_or_rejected(attend, size):
    query, key, value = tokens()
    query, key = (a * np.float32(size) for a in (query, key))
    assert_right_or_rejected(attend, query, key, value)


@every_map
def test_estimates_are_right_or_not_finite(feature_map):
    x, y, _ = tokens(lead=())
    for size in (1e20, 3e38):
        for sign in (1, -1):
            a, b = (np.minimum(np.abs(array), 1) * np.float32(size) for array in (x, y))
            b = sign * b
            estimate = feature_map.estimate(a, b)
            wide = feature_map.estimate(a.astype(np.float64), b.astype(np.float64))
            with np.errstate(over="ignore", invalid="ignore"):
                right = np.isclose(estimate, wide.astype(np.float32), rtol=1e-3, equal_nan=True)
            assert_array_equal(right | ~np.isfinite(estimate), True)


def tiny_then_huge(name, length):
    """Keys whose features are exp(-115) to exp(-40) of those of the second half.

    The early rows pass through every level where a shared scale would cost them digits.
    """
    query, key, value = tokens(3, lead=(), length=length)
    half = length // 2
    gap = np.concatenate([np.linspace(115, 40, half), np.zeros(length - half)])[:, None]
    unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
    if name in ("positive", "hyperbolic"):
        key = 2 * np.sqrt(gap) * unit
    elif name == "trigonometric":
        key = 2 * np.sqrt(115 - gap) * unit
    elif name == "elu":
        key = key - gap
    elif name == "softmax":
        query, key = query + 1, key - gap
    else:
        query, key = np.abs(query), np.abs(key) * np.exp(-0.7 * gap)
    return query, key.astype(np.float32), value


@pytest.mark.parametrize("name", [*MAPS, "softmax"])
@pytest.mark.parametrize("length", [16, 200])
def test_tiny_keys_early_and_huge_keys_later(name, length):
    attend = Attention(name, MAPS.get(name), True)
    query, key, value = tiny_then_huge(name, length)
    out = attend(query, key, value)
    attend.check(out, query, key, value, tolerance=2e-4, rows=slice(0, length // 2))
    attend.check(out, query, key, value, tolerance=2e-4)


def test_tiny_keys_early_in_every_library(xp):
    attend = Attention("positive", MAPS["positive"], True)
    arrays = [np.stack([array] * HEADS) for array in tiny_then_huge("positive", LENGTH)]
    out = xp.numpy(attend(*in_library(xp, arrays), chunk_size=CHUNK))
    attend.check(out, *arrays, tolerance=2e-4)


@every_attention
@pytest.mark.parametrize("which", ["zero", "positive", "negative"])
def test_identical_keys_give_the_uniform_average(attend, which):
    query, _, value = tokens(dtype="float64")
    key = {"zero": 0.0, "positive": 0.7, "negative": -0.7}[which] * np.ones_like(query)
    out = attend(query, key, value)
    counts = np.arange(1, LENGTH + 1)[:, None]
    means = np.cumsum(value, axis=-2) / counts
    expected = means if attend.is_causal else np.broadcast_to(means[..., -1:, :], value.shape)
    if attend.name == "relu":
        alive = np.any(query > 0, axis=-1, keepdims=True) & (which == "positive")
        expected = np.where(alive, expected, 0.0)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_zero_queries_give_the_uniform_average_of_softmax(is_causal):
    query, key, value = tokens(dtype="float64")
    out = linattn.softmax_attention(query * 0, key, value, is_causal=is_causal)
    means = np.cumsum(value, axis=-2) / np.arange(1, LENGTH + 1)[:, None]
    expected = means if is_causal else np.broadcast_to(means[..., -1:, :], value.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-13)


@every_map
def test_everything_zero(feature_map):
    query, key, value = (np.zeros_like(array) for array in tokens())
    for is_causal in (False, True):
        out = linattn.linear_attention(query, key, value, feature_map, is_causal=is_causal)
        np.testing.assert_array_equal(out, 0)


@some_attentions
def test_denormal_queries_and_keys(xp, attend):
    compilers = {"jax": "XLA", "cupy": "CuPy's compiler"}
    if xp.name in compilers and attend.name == "relu":
        who = f"{xp.name}: {compilers[xp.name]}"
        pytest.skip(f"{who} flushes denormals to zero, and a query of zeros has no feature")
    query, key, value = tokens()
    query, key = (a * np.float32(1e-40) for a in (query, key))
    out = attend(*in_library(xp, (query, key, value)), chunk_size=CHUNK)
    attend.check(xp.numpy(out), query, key, value, tolerance=1e-5)


@every_attention
@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e-40), ("float64", 1e-310)])
def test_denormal_queries_or_keys(attend, dtype, size):
    query, key, value = tokens(dtype=dtype)
    small_query, small_key = (a * a.dtype.type(size) for a in (query, key))
    for q, k in ((small_query, small_key), (small_query, key), (query, small_key)):
        attend.check(attend(q, k, value), q, k, value, tolerance=1e-5)


def test_values_of_keys_that_are_too_far_to_count(xp):
    """Exponentials that are no normal numbers are 0, and not the least normal number."""
    key, value = np.array([[[[0.0], [-300.0]]], [[[1.0], [1e37]]]], np.float32)
    arrays = (xp.array(x, "float32") for x in (np.ones_like(key), key, value))
    out = linattn.softmax_attention(*arrays, scale=1.0)
    np.testing.assert_allclose(xp.numpy(out), 1, rtol=1e-6)


@every_attention
def test_denormal_values(attend):
    query, key, value = tokens()
    value = value * np.float32(1e-39)
    attend.check(attend(query, key, value), query, key, value, tolerance=2e-2)

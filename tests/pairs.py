"""Dense weights of pairs of tokens, which biases and decays stand for, and how to compare."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn import reference
from linattn.feature_maps import PositiveFeatures, Reparametrized
from tests.attentions import assert_at_most, inputs, maps

DIM, LENGTH = 4, 40
BOUNDS = {"float64": 1e-11, "float32": 3e-5}
MAPS: dict[str, Any] = {
    **maps(DIM, 16, "positive", "elu"),
    **maps(DIM, 256, "trigonometric"),
    "reparametrized": Reparametrized(PositiveFeatures(DIM, 16, rng=0), [0.3] * DIM, [-0.2] * DIM),
}
PHI = MAPS["positive"]

every_dtype = pytest.mark.parametrize("dtype", BOUNDS)


def tokens(lead=(2,), length=LENGTH, seed=0):
    """Queries, keys and values of moderate size."""
    return inputs(length, DIM, lead=lead, seed=seed, scale=0.7)


# Dense log weights ------------------------------------------------------------------------------


def offsets(length):
    """How far key j stands behind query i, (L, L)."""
    return np.arange(length) - np.arange(length)[:, None]


def dense_decay(log_decay, length, *, is_causal=True):
    """Log weights of pairs: what lies between the two tokens."""
    steps = np.broadcast_to(log_decay, (*np.shape(log_decay)[:-1], length))
    since = np.cumsum(steps, axis=-1)
    between = since[..., :, None] - since[..., None, :]
    return np.where(offsets(length) > 0, -np.inf if is_causal else -between, between)


def decays(kind, lead, length):
    """Log decays ``(..., length)`` or ``(..., 1)``."""
    rng = np.random.default_rng(4)
    if kind == "each token":
        return -rng.exponential(1.0, (*lead, length))
    if kind == "a few are strong":
        weak = -0.01 * rng.random((*lead, length))
        return np.where(rng.random((1, length)) < 0.05, -200.0, weak)
    return float(kind) * np.linspace(1.0, 0.2, int(np.prod(lead))).reshape(*lead, 1)


def window_weights(query, key, phi, window, is_causal, key_mask=None):
    """Every pair's weight, one by one: exact where near, the map's own estimate elsewhere."""
    length = query.shape[-2]
    block = np.arange(length) // window
    apart = block[:, None] - block[None, :]
    near = (apart >= 0) & (apart <= 1) if is_causal else abs(apart) <= 1
    exact = np.exp(phi.scale * query @ np.swapaxes(key, -1, -2))
    weights = np.where(near, exact, phi.estimate(query, key))
    if is_causal:
        weights = np.where(offsets(length) <= 0, weights, 0)
    if key_mask is not None:
        weights = np.where(np.broadcast_to(key_mask, key.shape[:-1])[..., None, :], weights, 0)
    return weights


# Comparisons ------------------------------------------------------------------------------------


def check_weights(out, weights, value, bound):
    """Numerator and denominator to a bound times their sums of absolute terms."""
    numerator, denominator = weights @ value, weights.sum(axis=-1, keepdims=True)
    unit = abs(weights) @ abs(value) + abs(out) * abs(weights).sum(axis=-1, keepdims=True)
    assert out.shape == numerator.shape
    assert_at_most(abs(out * denominator - numerator), bound * unit + 1e-300)


def check_sums(out, phi, arrays, dtype, **options):
    """Compare an output with the oracle, relative to the terms behind it."""
    check_ratio(out, reference.kernel_sums(*arrays, phi, **options), dtype)


def check_ratio(out, sums, dtype):
    """Compare an output with the sums of the oracle, which may serve several outputs."""
    assert out.dtype == dtype
    unit = np.maximum(sums.absolute_denominator * (1 + np.abs(out)), 1e-300)
    assert_array_equal(np.isfinite(out), True)
    error = np.abs(out * sums.denominator - sums.numerator) / unit
    assert error.max() <= BOUNDS[dtype]


def check_float32_gradients(arrays, phi, name, weight, **options):
    """Gradients of values, and of a weight by its name, keep their digits in float32."""
    both = []
    for dtype in ("float64", "float32"):
        *qkv, given = (a.astype(dtype) for a in (*arrays, weight))
        out, pullback = linattn.linear_attention_vjp(*qkv, phi, **{name: given}, **options)
        both.append(pullback(out))
    for wide, narrow in zip(*both, strict=True):
        assert narrow.dtype == np.float32
        # Of a token that reads itself alone the gradient is 0.
        assert np.linalg.norm(wide - narrow) <= 3e-5 * max(float(np.linalg.norm(wide)), 1.0)

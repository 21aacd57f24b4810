"""Hedgehog features against their exponentials written out."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.feature_maps.hedgehog import HedgehogFeatures
from tests.attentions import full_and_causal, masked

HEADS, LENGTH, DIM, ROWS, VALUE_DIM = 2, 13, 4, 3, 5

_rng = np.random.default_rng(11)
W, KEY_W = (0.6 * _rng.standard_normal((HEADS, ROWS, DIM)) for _ in range(2))
B, KEY_B = (0.5 * _rng.standard_normal((HEADS, ROWS)) for _ in range(2))

MAPS = {
    "shared": (HedgehogFeatures(W[0]), (W[0], 0, W[0], 0)),
    "biased": (HedgehogFeatures(W[0], bias=B[0]), (W[0], B[0], W[0], B[0])),
    "heads": (HedgehogFeatures(W, bias=B), (W, B, W, B)),
    "two-sided": (
        HedgehogFeatures(W, bias=B, key_weights=KEY_W, key_bias=KEY_B),
        (W, B, KEY_W, KEY_B),
    ),
    "key-weights": (HedgehogFeatures(W, bias=B, key_weights=KEY_W[0]), (W, B, KEY_W[0], 0)),
    "key-bias": (HedgehogFeatures(W[0], bias=B, key_bias=KEY_B), (W[0], B, W[0], KEY_B)),
}

every_map = pytest.mark.parametrize("name", MAPS)


def inputs(seed=0):
    return masked(LENGTH, DIM, VALUE_DIM, seed=seed)


def exponentials(x, weights, bias):
    bias = np.zeros(ROWS) if isinstance(bias, int) else bias
    u = x @ np.swapaxes(weights, -1, -2) + bias[..., None, :]
    return np.concatenate([np.exp(u), np.exp(-u)], axis=-1)


def kernel(name, query, key):
    weights, bias, key_weights, key_bias = MAPS[name][1]
    phi, psi = exponentials(query, weights, bias), exponentials(key, key_weights, key_bias)
    return phi @ np.swapaxes(psi, -1, -2)


@pytest.mark.parametrize("name", ["biased", "two-sided"])
def test_features_and_kernel_in_every_library(xp, name):
    phi, (weights, bias, key_weights, key_bias) = MAPS[name]
    query, key, _, _ = inputs(3)
    x, y = xp.array(query), xp.array(key)
    for features, expected in (
        (phi.query_features(x), exponentials(query, weights, bias)),
        (phi.key_features(y), exponentials(key, key_weights, key_bias)),
    ):
        assert features.values is None
        assert features.log.shape[-1] == phi.num_features == 2 * ROWS
        assert_allclose(np.exp(xp.numpy(features.log)), expected, rtol=1e-13)
    for result in (phi.kernel(x, y), phi.estimate(x, y), phi.mean(x, y)):
        xp.assert_like(result, x, shape=(HEADS, LENGTH, LENGTH))
        assert_allclose(xp.numpy(result), kernel(name, query, key), rtol=1e-12)
    variance = xp.numpy(phi.variance(x, y))
    assert_array_equal(variance, 0)


@every_map
def test_kernel_is_the_estimate(name):
    phi = MAPS[name][0]
    query, key, _, _ = inputs(3)
    expected = kernel(name, query, key)
    assert_allclose(phi.kernel(query, key), expected, rtol=1e-12)
    assert_allclose(phi.estimate(query, key), expected, rtol=1e-12)


@full_and_causal
def test_exponents_of_any_size(is_causal):
    """Far out of the range of exp, one exponential is all that counts for each pair."""
    query, key, value, _ = inputs(4)
    phi = HedgehogFeatures(1000 * np.eye(DIM))
    out = linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
    for head, i in np.ndindex(HEADS, LENGTH):
        seen = slice(i + 1 if is_causal else None)
        exponents = np.abs(query[head, i] + key[head, seen]).max(axis=-1)
        assert_allclose(out[head, i], value[head, seen][exponents.argmax()], rtol=1e-9)


def test_weights_are_copied_and_read_only():
    weights = W.copy()
    phi = HedgehogFeatures(weights)
    weights[...] = 0
    assert_array_equal(phi.weights, W)
    with pytest.raises(ValueError, match="read-only"):
        phi.weights[...] = 0


def test_maps_are_values():
    phi = MAPS["two-sided"][0]
    assert (phi.dim, phi.num_features, phi.scale, phi.positive) == (4, 6, 1.0, True)
    for name, (other, _) in MAPS.items():
        assert (other == phi) == (name == "two-sided")
        assert (other.fingerprint() == phi.fingerprint()) == (name == "two-sided")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: HedgehogFeatures(W[0, 0]), r"weights must have shape \(..., rows, dim\), got"),
        (lambda: HedgehogFeatures(W[:, :0]), r"weights must have shape \(..., rows, dim\), got"),
        (lambda: HedgehogFeatures(W * np.nan), "weights must be finite"),
        (lambda: HedgehogFeatures(W, bias=B[0, :2]), r"bias must have last axes \(3,\), got"),
        (lambda: HedgehogFeatures(W, bias=1.0), r"bias must have last axes \(3,\), got shape \(\)"),
        (lambda: HedgehogFeatures(W, key_weights=W[0, :2]), "key_weights must have last axes"),
        (lambda: HedgehogFeatures(W, key_bias=B * np.inf), "key_bias must be finite"),
        (lambda: HedgehogFeatures(W, bias=np.zeros((3, ROWS))), "leading axes must broadcast"),
    ],
)
def test_bad_arguments(make, said):
    with pytest.raises(ValueError, match=said):
        make()

"""Full attention on NumPy where keys' shares, or exponents, leave the range of numbers."""

import numpy as np
import pytest

import linattn
from linattn.feature_maps import EluFeatures, PositiveFeatures, ReluFeatures
from tests.test_numpy_backend import agree

NO_SHIFT = {"unshifted": 0, "stabilized": 0, "generic": 0}
"""Of full attention the branches that go beyond its usual one are counted."""


@pytest.mark.parametrize(
    ("dtype", "reach", "gap", "factor"), [(np.float64, 235, 720, 1e107), (np.float32, 23, 90, 1e17)]
)
def test_keys_whose_shares_underflow_count(dtype, reach, gap, factor, calls):
    """The second key's share does: by features exp(2 reach) larger and its value it counts."""
    phi = PositiveFeatures.from_projection(np.eye(1), scale=1.0)
    key = np.array([[-reach], [reach]], dtype)
    value = np.array([[1], [2 * factor]], dtype)
    bias = np.array([0, -gap], dtype)
    out = linattn.linear_attention(0 * key[:1], key, value, phi, key_bias=bias)
    weight = np.exp(2.0 * reach - gap)
    assert weight * factor > 0.005
    agree(out, np.array([[(1 + weight * 2 * factor) / (1 + weight)]]), 100 * np.finfo(dtype).eps)
    assert calls["stabilized"] == 1


@pytest.mark.parametrize("phi", [ReluFeatures(), EluFeatures()], ids=["relu", "elu"])
@pytest.mark.parametrize(
    ("dtype", "gap", "size"),
    [
        ("float32", 200, 1),
        ("float32", 90, 1),
        ("float64", 1500, 1),
        ("float32", 79, 1e-12),
        ("float32", 40, 1e-30),
        ("float32", 0, 1e-30),
    ],
)
def test_features_of_which_all_shares_underflow_are_kept(phi, dtype, gap, size):
    """Of ReLU features the second is that of one key alone, whatever it weighs."""
    key = np.array([[1, 0], [0, size], [1, 0]], dtype)
    query = np.array([[0, 1], [1, 0]], dtype)
    value = np.array([[1], [2], [4]], dtype)
    bias = np.array([0, -gap, 0], dtype)
    out = linattn.linear_attention(query, key, value, phi, key_bias=bias)
    with linattn.without_backends():
        want = linattn.linear_attention(query, key, value, phi, key_bias=bias)
    if isinstance(phi, ReluFeatures):
        assert want[0] == 2
    agree(out, want, 1e-6)


@pytest.mark.parametrize("name", ["positive", "hyperbolic"])
@pytest.mark.parametrize("scale", [8.0, 16.0, 20.0])
def test_float64_takes_no_shift_where_exponents_are_moderate(name, scale, calls):
    """Keys are up to 1,000 apart by their squares, or 350, and exponents of features below 300."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 300, 64))
    phi = {"positive": PositiveFeatures, "hyperbolic": linattn.feature_maps.HyperbolicFeatures}
    arrays = scale * query, scale * key, value, phi[name](64, 64, rng=0)
    out = linattn.linear_attention(*arrays)
    agree(out, linattn.reference.kernel_attention(*arrays), 1e-12)
    assert (calls == NO_SHIFT) == (scale == 8)

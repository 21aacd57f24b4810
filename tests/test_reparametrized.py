"""Exact changes of coordinates: softmax is unchanged, and the map inside is told the truth."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
from linattn.feature_maps import (
    DenseExponentialFeatures,
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    Reparametrized,
    TaylorFeatures,
)

D, HEADS = 6, 3
RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((HEADS, 40, D)) + 1.5
KEY = RNG.standard_normal((HEADS, 40, D)) + 1.0
CENTRES = (QUERY.mean(axis=-2), KEY.mean(axis=-2))
TRANSFORM = RNG.standard_normal((HEADS, D, D)) + 2 * np.eye(D)
INSIDE = {
    "positive": PositiveFeatures(D, 24, rng=0),
    "hyperbolic": HyperbolicFeatures(D, 24, rng=0),
    "taylor": TaylorFeatures(D),
    "dense": DenseExponentialFeatures.fit(QUERY, KEY, num_features=24, rng=0),
}


def changed(x, shift, transform):
    return (x - shift[..., None, :]) @ transform


@pytest.fixture(params=list(INSIDE))
def feature_map(request):
    return Reparametrized(INSIDE[request.param], *CENTRES, TRANSFORM)


def test_estimates_are_those_inside_times_exact_factors(feature_map):
    c, b = CENTRES
    q = changed(QUERY, c, TRANSFORM)
    k = changed(KEY, b, np.linalg.inv(TRANSFORM).swapaxes(-1, -2))
    rows = np.einsum("hnd,hd->hn", QUERY, b)[..., :, None]
    columns = np.einsum("hnd,hd->hn", KEY - b[:, None], c)[..., None, :]
    factor = np.exp(feature_map.scale * (rows + columns))
    inside = feature_map.feature_map
    assert_allclose(feature_map.estimate(QUERY, KEY), inside.estimate(q, k) * factor, rtol=1e-11)
    assert_allclose(feature_map.kernel(QUERY, KEY), inside.kernel(q, k) * factor, rtol=1e-11)


@pytest.mark.parametrize("name", ["positive", "hyperbolic"])
def test_the_kernel_is_softmax_whatever_the_coordinates(name):
    feature_map = Reparametrized(INSIDE[name], *CENTRES, TRANSFORM)
    logits = feature_map.scale * QUERY @ KEY.swapaxes(-1, -2)
    assert_allclose(np.log(feature_map.kernel(QUERY, KEY)), logits, rtol=1e-10, atol=1e-10)
    x, y = 0.3 * QUERY[:, :4], 0.3 * KEY[:, :3]
    small = Reparametrized(INSIDE[name], *(0.3 * c for c in CENTRES))
    estimates = np.stack([small.redraw(seed).estimate(x, y) for seed in range(400)])
    deviation = (estimates.mean(axis=0) - small.mean(x, y)) / np.sqrt(small.variance(x, y) / 400)
    assert np.abs(deviation).max() < 6


def test_identity_redraw_equality_and_pickle():
    inside = PositiveFeatures(D, 24, rng=0)
    same = Reparametrized(inside)
    assert_allclose(same.estimate(QUERY, KEY), inside.estimate(QUERY, KEY), rtol=1e-12)
    feature_map = Reparametrized(inside, *CENTRES, TRANSFORM)
    assert feature_map == Reparametrized(inside, *CENTRES, TRANSFORM)
    assert feature_map != same
    assert feature_map.redraw(7) == Reparametrized(inside.redraw(7), *CENTRES, TRANSFORM)
    with pytest.raises(AttributeError, match="redraw"):
        Reparametrized(TaylorFeatures(D)).redraw(7)
    kept = pickle.loads(pickle.dumps(feature_map))
    assert kept == feature_map
    assert kept.fingerprint() == feature_map.fingerprint()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((EluFeatures(),), TypeError, "feature_map must be a map of the softmax kernel"),
        ((INSIDE["positive"], np.ones(5)), ValueError, r"query_shift must have last axes \(6,\)"),
        ((INSIDE["positive"], None, np.full(6, np.inf)), ValueError, "key_shift must be finite"),
        (
            (INSIDE["positive"], None, None, np.ones((6, 6))),
            ValueError,
            "transform must be invertible",
        ),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Reparametrized(*arguments)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [1, 300])
def test_only_the_weights_have_heads(scale, is_causal):
    """The queries' shift is per head, so keys have one set of features and many of weights."""
    rng = np.random.default_rng(0)
    query, key, value = scale * rng.standard_normal((3, 50, 4))
    phi = Reparametrized(PositiveFeatures(4, 8, rng=0), rng.standard_normal((3, 4)))
    out = linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
    want = linattn.reference.kernel_attention(query, key, value, phi, is_causal=is_causal)
    assert out.shape == (3, 50, 4)
    assert_allclose(out, want, rtol=0, atol=1e-9 * scale)

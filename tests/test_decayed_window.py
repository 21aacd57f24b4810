"""Exact windows under decay, and exact clusters under biases of offsets."""

# mypy: disable-error-code="arg-type, call-arg, call-overload, misc"

from __future__ import annotations

import numpy as np
import pytest

import linattn
from benchmarks import offsets
from linattn.feature_maps import LandmarkFeatures
from tests import pairs
from tests.attentions import full_and_causal
from tests.pairs import MAPS, PHI, every_dtype


@every_dtype
@full_and_causal
@pytest.mark.parametrize("jump", [0.0, 30.0])
@pytest.mark.parametrize("kind", ["-0.5", "-200.0", "each token", "a few are strong"])
def test_any_strength_and_any_size(kind, jump, is_causal, dtype):
    if not is_causal and kind not in {"-0.5", "-200.0"}:
        pytest.skip("one a head in full attention")
    arrays, decay = pairs.tokens((2,), 150), pairs.decays(kind, (2,), 150)
    jumps = np.where(np.random.default_rng(5).random(150) < 0.1, jump, 0.0)
    mask = np.ones(150, bool)
    mask[20:70] = mask[100:140] = False  # all near keys of some
    for name, window in (("positive", 7), ("reparametrized", 1)):
        out = linattn.linear_attention(
            *(a.astype(dtype) for a in arrays),
            MAPS[name],
            is_causal=is_causal,
            key_bias=jumps.astype(dtype),
            key_mask=mask,
            log_decay=decay if decay.shape[-1] > 1 else decay[..., 0],
            exact_window=window,
            chunk_size=32,
        )
        bias = pairs.dense_decay(decay, 150, is_causal=is_causal) + jumps
        bias = np.where(mask, bias, -np.inf)
        query, key, value = arrays
        weights = pairs.window_weights(query, key, MAPS[name], window, is_causal)
        weights = weights * np.exp(bias - bias.max(axis=-1, keepdims=True))
        pairs.check_weights(out, weights, value, pairs.BOUNDS[dtype])


# The real sample --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["T5", "ALiBi"])
def test_the_bias_of_far_keys_is_exact(kind):
    """With a landmark for every key nothing else could be off."""
    arrays = [x[:12] for x in offsets.real_sample(dtype=np.float64)]
    phi = LandmarkFeatures.fit(*arrays[:2], num_features=256, rng=0)
    assert offsets.head_errors(kind, arrays, phi, 32, None).max() < 1e-11
    assert offsets.head_errors(kind, arrays, phi, 32, 8).max() < 1e-11


@pytest.mark.parametrize(
    ("kind", "clusters", "median", "worst"),
    [
        ("ALiBi", None, 5e-4, 0.04),
        ("ALiBi", 16, 3e-4, 0.021),
        ("ALiBi", 32, 5e-5, 0.007),
        ("T5", None, 0.032, 0.3),
        ("T5", 16, 0.01, 0.037),
        ("T5", 32, 0.003, 0.01),
    ],
)
def test_the_real_sample_is_near(kind, clusters, median, worst):
    """64 landmarks for 24 heads of 256 tokens, and a window of 32."""
    arrays = offsets.real_sample()
    phi = LandmarkFeatures.fit(*arrays[:2], num_features=64, rng=0)
    errors = offsets.head_errors(kind, arrays, phi, 32, clusters)
    assert np.median(errors) < median
    assert errors.max() < worst


# Mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact_clusters": 3}, "exact_clusters needs exact_window under log_decay, got .*=3"),
        (
            {"exact_window": 4, "window_bias": np.zeros(3)},
            "window_bias must be None with log_decay",
        ),
    ],
)
def test_what_does_not_go_together_is_named(options, message):
    query, key, value = pairs.tokens(length=8)
    phi = LandmarkFeatures.fit(query, key, num_features=4, rng=0)
    with pytest.raises(ValueError, match=message):
        linattn.linear_attention(query, key, value, phi, log_decay=-0.1, **options)
    with pytest.raises(ValueError, match="one a head in full attention"):
        linattn.linear_attention(
            *(query, key, value), PHI, log_decay=np.zeros((2, 8)), exact_window=4
        )

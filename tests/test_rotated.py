"""RoFormer's linear attention: numerators of rotated features, denominators without rotation."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
from linattn.feature_maps import (
    EluFeatures,
    PositiveFeatures,
    RotatedFeatures,
    SoftmaxFeatures,
)


def test_weights_of_both_signs():
    """What the map says of itself: rotated weights may be negative."""
    query, key, value = np.random.default_rng(2).standard_normal((3, 60, 4))
    phi = RotatedFeatures(EluFeatures(4))
    assert not phi.positive
    weights = phi.kernel(query, key)
    assert weights.min() < 0 < weights.max()
    assert_allclose(np.diagonal(weights), np.diagonal(EluFeatures(4).kernel(query, key)))
    rows = linattn.diagnostics.attention_weights(query, key, phi, rows=slice(None), is_causal=True)
    out = linattn.linear_attention(query, key, value, phi, is_causal=True)
    assert_allclose(rows @ value, out, rtol=1e-10, atol=1e-12)


MISTAKES = [
    (EluFeatures(), ValueError, "even num_features, .*got None"),
    (EluFeatures(3), ValueError, "even num_features, .*got 3"),
    (SoftmaxFeatures(4), TypeError, "read feature by feature"),
    (PositiveFeatures.from_projection(np.ones((3, 8, 4))), ValueError, r"one set .*\(3,\)"),
    (EluFeatures, TypeError, "feature_map must have num_features"),
]


@pytest.mark.parametrize(("inside", "error", "message"), MISTAKES)
def test_mistakes_are_named(inside, error, message):
    with pytest.raises(error, match=message):
        RotatedFeatures(inside)


def test_gradients_say_what_is_missing():
    x = np.zeros((5, 4))
    with pytest.raises(NotImplementedError, match="rotate queries and keys before the map instead"):
        linattn.linear_attention_vjp(x, x, x, RotatedFeatures(EluFeatures(4)))

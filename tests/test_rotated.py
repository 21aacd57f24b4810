"""RoFormer's linear attention: numerators of rotated features, denominators without rotation."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import linattn
from linattn.feature_maps import (
    EluFeatures,
    PositiveFeatures,
    ReluFeatures,
    RotatedFeatures,
    SoftmaxFeatures,
)
from linattn.reference import kernel_sums

MAPS = {"elu": EluFeatures(4), "relu": ReluFeatures(4), "positive": PositiveFeatures(4, 6, rng=0)}


def rotation(m, position, base=10_000.0):
    """The matrix R of a position, (m, m)."""
    matrix = np.zeros((m, m))
    for c in range(m // 2):
        angle = position * base ** (-2 * c / m)
        pair = [c, c + m // 2]
        matrix[np.ix_(pair, pair)] = [
            [np.cos(angle), -np.sin(angle)],
            [np.sin(angle), np.cos(angle)],
        ]
    return matrix


def by_definition(query, key, value, phi, is_causal, key_mask=None):
    """Numerators and denominators pair by pair, in float64, and the bound of rounding."""
    features = []
    for log, values in (phi.query_features(query), phi.key_features(key)):
        values = np.exp(log) if values is None else values * (1 if log is None else np.exp(log))
        features.append(values)
    m = features[0].shape[-1]
    rotated = [np.stack([rotation(m, t) @ x[t] for t in range(len(x))]) for x in features]
    visible = np.tril(np.ones((len(query), len(key)))) if is_causal else 1.0
    visible = visible if key_mask is None else visible * key_mask
    weights = (rotated[0] @ rotated[1].T) * visible
    denominator = kernel_sums(query, key, value, phi, is_causal=is_causal, key_mask=key_mask)
    total = denominator.denominator * np.exp(denominator.log_scale)
    empty = total == 0
    return np.where(empty, 0, weights @ value / np.where(empty, 1, total))


@pytest.mark.parametrize("name", MAPS)
@given(data=st.data())
def test_equals_its_definition(xp_any_shape, draws, data, name):
    xp, phi = xp_any_shape, MAPS[name]
    length, is_causal = data.draw(st.integers(1, 60)), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(draws.seeds))
    query, key, value = rng.standard_normal((3, length, 4))
    key_mask = rng.random(length) < 0.8
    out = linattn.linear_attention(
        *(xp.array(x) for x in (query, key, value)),
        RotatedFeatures(phi),
        is_causal=is_causal,
        key_mask=xp.array(key_mask),
        chunk_size=data.draw(draws.chunks(length)),
    )
    expected = by_definition(query, key, value, phi, is_causal, key_mask)
    assert_allclose(xp.numpy(out), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_library(xp, is_causal):
    host = np.random.default_rng(0).standard_normal((3, 2, 30, 4)).astype(np.float32)
    arrays = [xp.array(x) for x in host]
    out = linattn.linear_attention(*arrays, RotatedFeatures(MAPS["elu"]), is_causal=is_causal)
    xp.assert_like(out, arrays[0])
    doubles = host.astype(np.float64)
    expected = [
        by_definition(q, k, v, MAPS["elu"], is_causal) for q, k, v in zip(*doubles, strict=True)
    ]
    assert_allclose(xp.numpy(out), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
def test_streams_and_single_tokens_are_the_whole(backend, tmp_path):
    query, key, value = np.random.default_rng(1).standard_normal((3, 2, 50, 4))
    phi = RotatedFeatures(PositiveFeatures(4, 8, rng=0), base=100)
    whole = linattn.linear_attention(query, key, value, phi, is_causal=True)
    with linattn.config() if backend else linattn.without_backends():
        first, state = linattn.linear_attention(
            query[:, :30], key[:, :30], value[:, :30], phi, is_causal=True, return_state=True
        )
        linattn.save_state(tmp_path / "state.npz", state, phi)
        decoder = linattn.Decoder(phi, linattn.load_state(tmp_path / "state.npz", phi))
        rest = [decoder.step(query[:, t], key[:, t], value[:, t]) for t in range(30, 50)]
    out = np.concatenate([first, np.stack(rest, axis=-2)], axis=-2)
    assert_allclose(out, whole, rtol=1e-11, atol=1e-12)


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

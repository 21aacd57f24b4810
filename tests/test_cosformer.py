"""Cosine reweighting against the kernel written out: positions must be the same in every mode."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.feature_maps.cosformer import CosformerFeatures
from tests.attentions import assert_at_most, full_and_causal, masked

LENGTH, MAX_LENGTH, DIM, VALUE_DIM = 13, 17, 5, 3
SCALE = 2.0
PHI = CosformerFeatures(DIM, max_length=MAX_LENGTH, scale=SCALE)


def inputs(seed=0, length=LENGTH):
    """One query has no feature."""
    query, *others = masked(length, DIM, VALUE_DIM, seed=seed)
    query[0, 3] = -np.abs(query[0, 3])
    return query, *others


def kernel(query, key, first_query=0):
    """``s relu(q_i) . relu(k_j) cos(pi (i - j) / (2 M))``, keys from position 0 on."""
    i = first_query + np.arange(query.shape[-2])[:, None]
    j = np.arange(key.shape[-2])
    products = np.maximum(query, 0) @ np.swapaxes(np.maximum(key, 0), -1, -2)
    return SCALE * products * np.cos(np.pi * (i - j) / (2 * MAX_LENGTH))


def attend(arrays, feature_map, **options):
    query, key, value = arrays
    return linattn.linear_attention(query, key, value, feature_map, **options)


def quadratic(query, key, value, *, is_causal=False, first_query=0):
    weights = kernel(query, key, first_query)
    if is_causal:
        weights = np.tril(weights)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ value / np.where(total == 0, 1, total)


def stretch(arrays, rows):
    return [a[:, rows, :] for a in arrays]


def test_queries_of_read_state_follow_its_keys():
    query, key, value, _ = inputs(4)
    state = linattn.init_state(PHI, VALUE_DIM, batch_shape=(2,), like=query)
    for rows in (slice(0, 5), slice(5, 9)):
        state = linattn.update_state(state, key[:, rows], value[:, rows], PHI)
    key, value = stretch((key, value), slice(0, 9))
    out = linattn.read_state(query[:, :4], state, PHI)
    assert_allclose(out, quadratic(query[:, :4], key, value, first_query=9), rtol=0, atol=1e-13)


@full_and_causal
def test_max_length_is_where_it_ends(xp, is_causal):
    """17 positions are no power of two; the query without features has the causal block redone."""
    query, key, value, _ = inputs(6, MAX_LENGTH + 1)
    arrays = [xp.array(a) for a in (query, key, value)]
    fitting = stretch((query, key, value), slice(None, MAX_LENGTH))
    out, state = attend(
        stretch(arrays, slice(None, MAX_LENGTH)), PHI, is_causal=is_causal, return_state=True
    )
    expected = quadratic(*fitting, is_causal=is_causal)
    assert_allclose(xp.numpy(out), expected, rtol=0, atol=1e-13)
    last = arrays[0][:, -1, :], arrays[1][:, -1, :], arrays[2][:, -1, :]
    said = "max_length must be at least .* got max_length=17 for positions up to 17"
    with pytest.raises(ValueError, match=said):
        attend(arrays, PHI, is_causal=is_causal)
    with pytest.raises(ValueError, match=said):
        linattn.read_state(arrays[0][:, :1, :], state, PHI)
    with pytest.raises(ValueError, match=said):
        linattn.decode_step(*last, state, PHI)
    decoder = linattn.Decoder(PHI, state)
    with pytest.raises(ValueError, match=said):
        decoder.step(*last)
    for one, other in zip(decoder.state[:2], state[:2], strict=True):
        assert_allclose(xp.numpy(one), xp.numpy(other), rtol=0, atol=0)
    assert decoder.state.length == state.length


def test_too_many_rows_for_a_kernel():
    query, key, _, _ = inputs(6, MAX_LENGTH + 1)
    for method in (PHI.kernel, PHI.estimate):
        with pytest.raises(ValueError, match="max_length must be at least"):
            method(query, key[:, :3])


def test_features_are_not_negative_and_are_the_kernel(xp):
    query, key, _, _ = inputs(7, MAX_LENGTH)
    x, y = xp.array(query), xp.array(key[:, :9])
    for result in (PHI.kernel(x, y), PHI.estimate(x, y), PHI.mean(x, y)):
        xp.assert_like(result, x, shape=(2, MAX_LENGTH, 9))
        assert_allclose(xp.numpy(result), kernel(query, key[:, :9]), rtol=0, atol=1e-13)
    variance = xp.numpy(PHI.variance(x, y))
    assert_array_equal(variance, 0)
    features = PHI.query_features(x)
    assert features.values.shape[-1] == PHI.num_features == 2 * DIM
    values = xp.numpy(features.values)
    assert PHI.positive
    assert_at_most(0, values)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"dim": 0}, ValueError, "dim must be at least 1, got 0"),
        ({"max_length": 0}, ValueError, "max_length must be at least 1, got 0"),
        ({"max_length": 2.5}, TypeError, "max_length must be a positive integer, got 2"),
        ({"scale": 0}, ValueError, "scale must be a positive finite number, got 0"),
    ],
)
def test_bad_arguments(arguments, error, said):
    with pytest.raises(error, match=said):
        CosformerFeatures(**{"dim": 3, "max_length": 3} | arguments)

"""Efficient attention against its two softmaxes written out."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.feature_maps.normalized import SoftmaxFeatures
from tests.attentions import full_and_causal, masked

LENGTH, DIM, VALUE_DIM = 13, 5, 3
LEAD = (2,)


def inputs(seed=0, length=LENGTH, lead=LEAD):
    return masked(length, DIM, VALUE_DIM, lead=lead, seed=seed)


def softmax(x, axis):
    weights = np.exp(x - x.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


def one_query(query, key, value, scale):
    """``sum_r softmax_r(q) sum_j softmax_j(k_r) v_j`` of one head and one query."""
    if not len(key):
        return np.zeros(value.shape[-1])
    return softmax(scale**0.5 * query, 0) @ (softmax(scale**0.5 * key, 0).T @ value)


def attend(arrays, feature_map, **options):
    query, key, value = arrays
    return linattn.linear_attention(query, key, value, feature_map, **options)


def quadratic(query, key, value, mask=None, *, is_causal=False, scale=1.0):
    mask = np.ones(key.shape[:-1], dtype=bool) if mask is None else mask
    out = np.zeros((*query.shape[:-1], value.shape[-1]))
    for row in np.ndindex(*query.shape[:-1]):
        head, i = row[:-1], row[-1]
        stop = i + 1 if is_causal else None
        keys, values = (a[head][:stop][mask[head][:stop]] for a in (key, value))
        out[row] = one_query(query[row], keys, values, scale)
    return out


@full_and_causal
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [10.0, 60.0, 100.0, 1e4, 1e20])
def test_keys_of_any_size(size, dtype, is_causal):
    """One key dwarfs those before it: a column of keys is a maximum, and queries keep weight."""
    query, key, value, _ = (a.astype(dtype) for a in inputs(6, 40, lead=()))
    key[20:, 1] += np.dtype(dtype).type(size)
    key[30:, 2] -= np.dtype(dtype).type(size)
    arrays = (query, key, value)
    expected = quadratic(*(a.astype(np.float64) for a in arrays), is_causal=is_causal)
    for chunk_size in (None, 8):
        out = attend(arrays, SoftmaxFeatures(), is_causal=is_causal, chunk_size=chunk_size)
        assert_allclose(out, expected, rtol=0, atol={"float64": 1e-13, "float32": 5e-6}[dtype])


def test_early_weights_keep_their_digits():
    """On the scale of the last key the first is a denormal number, and the others are less."""
    key = np.full((200, 1), -103.5, dtype=np.float32)
    key[0], key[-1] = -88, 0
    value = np.ones((200, 1), dtype=np.float32)
    value[0] = 0
    out = attend((key, key, value), SoftmaxFeatures(), is_causal=True, chunk_size=200)
    others = np.arange(199) * np.exp(-15.5)
    assert_allclose(out[:199, 0], others / (1 + others), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_where_it_is(bad):
    query, key, value, mask = inputs(8)
    phi = SoftmaxFeatures()
    poisoned = query.copy()
    poisoned[1, 4, 2] = bad
    for is_causal in (False, True):
        expected = quadratic(query, key, value, is_causal=is_causal)
        out = linattn.linear_attention(poisoned, key, value, phi, is_causal=is_causal)
        assert_array_equal(out[1, 4], np.nan)
        expected[1, 4] = np.nan
        assert_allclose(out, expected, rtol=0, atol=1e-14)

    late = key.copy()
    late[1, 6, 2] = bad
    out = linattn.linear_attention(query, late, value, phi, is_causal=True)
    expected = quadratic(query, key, value, is_causal=True)
    assert_allclose(out[0], expected[0], rtol=0, atol=1e-14)
    assert_allclose(out[1, :6], expected[1, :6], rtol=0, atol=1e-14)
    assert_array_equal(out[1, 6:], np.nan)

    mask[1, 6] = False
    for is_causal in (False, True):
        out = linattn.linear_attention(query, late, value, phi, is_causal=is_causal, key_mask=mask)
        expected = quadratic(query, key, value, mask, is_causal=is_causal)
        assert_allclose(out, expected, rtol=0, atol=1e-14)


def test_kernel_and_estimate_are_the_weights(xp):
    query, key, value, _ = inputs(10)
    phi = SoftmaxFeatures(DIM, scale=0.5)
    x, y = xp.array(query), xp.array(key)
    each = np.stack(
        [
            quadratic(query, key, np.broadcast_to(one, (2, LENGTH, 1)), scale=0.5)[..., 0]
            for one in np.eye(LENGTH)[:, :, None]
        ],
        axis=-1,
    )
    for result in (phi.kernel(x, y), phi.estimate(x, y), phi.mean(x, y)):
        xp.assert_like(result, x, shape=(2, LENGTH, LENGTH))
        weights = xp.numpy(result)
        assert_allclose(weights, each, rtol=1e-13)
        assert_allclose(weights.sum(axis=-1), 1, rtol=1e-13)
    variance = xp.numpy(phi.variance(x, y))
    assert_array_equal(variance, 0)
    out = linattn.linear_attention(x, y, xp.array(value), phi)
    assert_allclose(xp.numpy(out), weights @ value, rtol=0, atol=1e-13)


def test_a_column_without_keys_has_no_say():
    query, key, value, _ = (a.astype(np.float32) for a in inputs(11))
    phi = SoftmaxFeatures()
    state = linattn.init_state(phi, VALUE_DIM, batch_shape=LEAD, like=key)
    state = linattn.update_state(state, key, value, phi)
    state.kvz[:, 2], state.log_scale[:, 2] = 0, -np.inf
    query[..., 2] = 200
    others = [np.delete(a, 2, axis=-1).astype(np.float64) for a in (query, key)]
    out = linattn.read_state(query, state, phi)
    assert_allclose(out, quadratic(others[0], others[1], value), rtol=0, atol=3e-6)


def test_features_are_the_exponentials():
    query, _, _, _ = inputs(11)
    phi = SoftmaxFeatures(scale=4.0)
    for features in (phi.query_features(query), phi.key_features(query)):
        assert features.values is None
        assert_array_equal(features.log, 2 * query)


def test_bad_arguments():
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        SoftmaxFeatures(0)
    with pytest.raises(ValueError, match="scale must be a positive finite number, got -1"):
        SoftmaxFeatures(scale=-1)
    query, key, value, _ = inputs()
    with pytest.raises(ValueError, match="4 coordinates, the dim of feature_map"):
        linattn.linear_attention(query, key, value, SoftmaxFeatures(4))

"""NaN and infinity reach the rows that they belong to and no other; they never become zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn import reference
from tests.attentions import (
    CHUNK,
    DIM,
    MAPS,
    Attention,
    every_attention,
    every_map,
    fetched,
    filled_state,
    in_library,
    some_attentions,
    tokens,
)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_relu_query_with_zero_denominator(xp, is_causal):
    query, key, value = tokens()
    query[0, 3] = -np.abs(query[0, 3])
    attend = Attention("relu", MAPS["relu"], is_causal)
    out = xp.numpy(attend(*in_library(xp, (query, key, value)), chunk_size=CHUNK))
    np.testing.assert_array_equal(out[0, 3], 0)
    attend.check(out, query, key, value, tolerance=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_never_becomes_zero_in_a_row_with_zero_denominator(xp, is_causal):
    query, key, value = tokens()
    query[0, 3] = -np.abs(query[0, 3])
    value[0, 1, 0] = np.nan
    out = linattn.linear_attention(
        *in_library(xp, (query, key, value)), MAPS["relu"], is_causal=is_causal, chunk_size=CHUNK
    )
    assert np.isnan(xp.numpy(out)[0, 3, 0])


@every_attention
@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_nan_never_becomes_zero(attend, side):
    arrays = dict(zip(("query", "key", "value"), tokens(), strict=True))
    arrays[side][...] = np.nan
    assert_array_equal(attend(**arrays), np.nan)


@some_attentions
@pytest.mark.parametrize("coordinates", [slice(2, 3), slice(None)], ids=["one", "all"])
def test_inf_in_one_query(xp, attend, coordinates):
    query, key, value = tokens()
    poisoned = query.copy()
    poisoned[1, 3, coordinates] = np.inf
    out = fetched(xp, attend(*in_library(xp, (poisoned, key, value)), chunk_size=CHUNK))
    assert_array_equal(out[1, 3], np.nan)
    rows = [0, 1, 2, 4, 5]
    attend.check(out, query, key, value, tolerance=1e-5, rows=rows)
    attend.check(out[:1], query[:1], key[:1], value[:1], tolerance=1e-5)


@every_attention
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("key_sign", [1, -1])
def test_inf_in_one_query_against_keys_of_one_sign(attend, sign, key_sign):
    query, key, value = tokens()
    key = key_sign * np.abs(key)
    poisoned = query.copy()
    poisoned[1, 3, 2] = sign * np.inf
    out = attend(poisoned, key, value)
    limits = sign < 0 and attend.name in ("elu", "relu", "activation-unprojected")
    if limits:
        # f(-inf) is a number: the row may have its value.
        query[1, 3, 2] = -1e4
        if np.isnan(out[1, 3]).all():
            out[1, 3] = attend(query, key, value)[1, 3]
    else:
        assert_array_equal(out[1, 3], np.nan)
        out[1, 3] = attend(query, key, value)[1, 3]
    attend.check(out, query, key, value, tolerance=1e-5)


@every_map
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_query_in_a_step(feature_map, bad):
    query, key, value = (array[:, 0] for array in tokens())
    query[1, 2] = bad
    state = filled_state(feature_map)
    out, after = linattn.decode_step(query, key, value, state, feature_map)
    assert_array_equal(out[1], np.nan)
    assert_array_equal(np.isfinite(out[0]), True)
    assert_array_equal(np.isfinite(after.kvz), True)


@some_attentions
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_live_key(xp, attend, bad):
    query, key, value = tokens()
    poisoned = key.copy()
    poisoned[1, 3] = bad
    out = fetched(xp, attend(*in_library(xp, (query, poisoned, value)), chunk_size=CHUNK))
    first = 3 if attend.is_causal else 0
    assert_array_equal(out[1, first:], np.nan)
    attend.check(out[:1], query[:1], key[:1], value[:1], tolerance=1e-5)
    attend.check(out, query, key, value, tolerance=1e-5, rows=slice(first))


@every_map
@pytest.mark.parametrize("chunk_size", [64, None])
def test_nan_in_one_coordinate_of_a_state_leaves_the_others_causal(feature_map, chunk_size):
    """One coordinate of the state is NaN; in another, NaN still reaches no earlier row."""
    query, key, value = tokens(length=300)
    value[:, 0, 0] = np.nan
    options: dict[str, Any] = dict(is_causal=True, chunk_size=chunk_size)
    clean = linattn.linear_attention(query, key, value, feature_map, **options)
    value[:, 290, 1] = np.nan
    out = linattn.linear_attention(query, key, value, feature_map, **options)
    assert_array_equal(out[..., 0], np.nan)
    assert_array_equal(out[:, 290:, 1], np.nan)
    np.testing.assert_allclose(out[:, :290, 1:], clean[:, :290, 1:], rtol=1e-3, atol=1e-5)
    assert_array_equal(np.isfinite(out[..., 2]), True)


def test_nan_in_one_coordinate_costs_the_others_no_digits():
    """Early rows of a block whose late keys have far larger features are still done again."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 200, DIM), dtype=np.float32)
    key[:100] *= 15
    value[0, 0] = np.nan
    phi = MAPS["positive"]
    state = linattn.init_state(phi, DIM, like=key)
    state = linattn.update_state(state, key[:1], value[:1], phi)
    rest = (query[1:], key[1:], value[1:], phi)
    out = linattn.linear_attention(*rest, is_causal=True, initial_state=state, chunk_size=200)
    want = reference.kernel_attention(query, key, value, phi, is_causal=True)[1:]
    assert_array_equal(out[:, 0], np.nan)
    np.testing.assert_allclose(out[:, 1:], want[:, 1:], rtol=0, atol=2e-4)


@every_map
def test_nan_in_a_state_stays(feature_map):
    query, key, value = tokens()
    state = filled_state(feature_map)
    state.kvz[1] = np.nan
    out, after = linattn.linear_attention(
        query, key, value, feature_map, is_causal=True, initial_state=state, return_state=True
    )
    assert_array_equal(out[1], np.nan)
    assert_array_equal(np.isfinite(out[0]), True)
    assert_array_equal(after.kvz[1], np.nan)
    assert_array_equal(linattn.merge_states(state, filled_state(feature_map)).kvz[1], np.nan)

"""What may not change a result: the order of keys and heads, other heads, later tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.attentions import Attention, every_attention, tokens


@every_attention
def test_permuted_keys(attend):
    if attend.is_causal:
        attend = Attention(attend.name, attend.feature_map, False)
    query, key, value = tokens(length=40)
    order = np.random.default_rng(0).permutation(40)
    mask = np.arange(40) % 5 > 0
    out = attend(query, key[:, order], value[:, order], key_mask=mask[order])
    attend.check(out, query, key, value, tolerance=1e-5, key_mask=mask)


@every_attention
def test_permuted_batch(attend):
    arrays = tokens(lead=(5, 2), length=30)
    order = np.array([3, 1, 4, 0, 2])
    out = attend(*arrays)
    np.testing.assert_array_equal(attend(*(array[order] for array in arrays)), out[order])


@every_attention
@pytest.mark.parametrize(("short", "long"), [(1, 2), (6, 9), (127, 128), (128, 129), (100, 300)])
def test_future_tokens_change_nothing(attend, short, long):
    attend = Attention(attend.name, attend.feature_map, True)
    arrays = tokens(length=long, dtype="float64")
    prefix = [array[:, :short] for array in arrays]
    whole = attend(*arrays)
    attend.check(whole[:, :short], *prefix, tolerance=1e-12)
    arrays[1][:, short:] *= 30
    arrays[2][:, short:] = 1e6
    attend.check(attend(*arrays)[:, :short], *prefix, tolerance=1e-12)


@every_attention
def test_other_batch_entries_do_not_matter(attend):
    query, key, value = tokens(length=140)
    out = attend(query, key, value)
    key[1], value[1], query[1] = np.nan, np.inf, 1e20
    changed = attend(query, key, value)
    attend.check(changed[:1], query[:1], key[:1], value[:1], tolerance=1e-5)
    np.testing.assert_allclose(changed[0], out[0], rtol=1e-4, atol=1e-5)

"""What may not change a result: the order of keys and heads, other heads, later tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import linattn
from tests.attentions import Attention, every_attention, tokens


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


def test_attention_to_a_tolerance_ignores_later_tokens(monkeypatch):
    """The same methods: rows that judge a head must not show in the outputs of earlier tokens."""
    monkeypatch.setattr("linattn.automatic._costs.MAX_SEARCH", 1.0)
    monkeypatch.setattr("linattn.automatic._call.MAX_VAIN", 2.0)
    monkeypatch.setattr("linattn.automatic._call.MAX_PROMISED", 4.0)
    rng = np.random.default_rng(0)
    which = rng.integers(12, size=4096)
    qkv = rng.standard_normal((3, 1, 12, 16))[:, :, which] + 0.3 * rng.standard_normal(
        (3, 1, 4096, 16)
    )
    changed = qkv * np.where(np.arange(4096) < 2500, 1, 1.02)[:, None]
    options: Any = dict(is_causal=True, tolerance=0.5, rng=0, return_report=True)
    (before, report), (after, other) = (linattn.attention(*x, **options) for x in (qkv, changed))
    assert report.head_clusters == other.head_clusters
    assert report.head_features == other.head_features == 64
    np.testing.assert_allclose(after[:, :2500], before[:, :2500], rtol=1e-9, atol=1e-12)
    assert np.abs(after - before).max() > 1e-3


@every_attention
def test_permuted_batch(attend):
    arrays = tokens(lead=(5, 2), length=30)
    order = np.array([3, 1, 4, 0, 2])
    out = attend(*arrays)
    np.testing.assert_array_equal(attend(*(array[order] for array in arrays)), out[order])

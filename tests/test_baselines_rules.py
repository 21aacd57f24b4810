"""What all published attentions have in common, for each of them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from linattn import baselines

L, D = 22, 6
DRAW = np.random.default_rng(0).standard_normal
BIAS: dict[str, Any] = {"position_bias": DRAW((L, L))}
CLUSTERS: dict[str, Any] = {"num_clusters": 5, "rng": 0}
HIDDEN: dict[str, Any] = {"hidden_weight": DRAW((D, D)), "hidden_bias": DRAW(D)}
OPTIONS: dict[str, dict[str, Any]] = {
    "aft_full": BIAS,
    "aft_local": BIAS | {"window_size": 3},
    "aft_simple": {},
    "bigbird": {"block_size": 4, "num_random": 1, "rng": 0},
    "clustered": CLUSTERS,
    "compressive": {"block_size": 4, "memory_size": 4, "compressed_size": 3},
    "dense_synthesizer": HIDDEN | {"weight": DRAW((L, D)), "bias": DRAW(L)},
    "external": {"key_memory": DRAW((7, D)), "value_memory": np.ones((7, D))},
    "factorized_dense_synthesizer": {"first_weight": DRAW((2, D)), "second_weight": DRAW((11, D))},
    "factorized_random_synthesizer": {"left": DRAW((L, 3)), "right": DRAW((L, 3))},
    "fixed": {"stride": 5},
    "improved_clustered": CLUSTERS | {"num_keys": 4},
    "linformer": {"num_landmarks": 5, "projection": "random", "rng": 0},
    "local_window": {"window_size": 3},
    "longformer": {"window_size": 2},
    "nystromformer": {"num_landmarks": 5},
    "random_synthesizer": {"logits": DRAW((L, L))},
    "reformer": {"num_buckets": 4, "rng": 0},
    "routing": CLUSTERS,
    "strided": {"stride": 5},
    "thinformer": {"oversampling": 0, "rng": 0},
    "top_k": {"num_keys": 4},
    "truncated_svd": {"rank": 3},
    "wildcat": {"num_keys": 5, "rng": 0},
}
# What they reject, by their papers; and where later tokens choose the members, as published.
CAUSAL_ONLY = {"compressive", "fixed", "strided"}
FULL_ONLY = {"bigbird", "clustered", "external", "improved_clustered", "linformer", "longformer"}
FULL_ONLY |= {"nystromformer", "thinformer", "wildcat"}
CHOSEN_BY_ALL = {"reformer", "routing", "truncated_svd"}
# Weights of these rows do not sum up to 1: gates, low rank, drawn projections.
OTHER_SUMS = {"aft_full", "aft_local", "aft_simple", "linformer", "nystromformer", "truncated_svd"}

MODES = [
    (name, is_causal)
    for name in baselines.__all__
    for is_causal in (False, True)
    if name not in (FULL_ONLY if is_causal else CAUSAL_ONLY)
]
each_mode = pytest.mark.parametrize(("name", "is_causal"), MODES)


def attend(name, is_causal, query, key, value):
    call = getattr(baselines, name)
    arrays = {"query": query, "key": key, "value": value}
    given = [arrays[n] for n in inspect.signature(call).parameters if n in arrays]
    options = {
        n: a.astype(value.dtype) if isinstance(a, np.ndarray) else a
        for n, a in OPTIONS[name].items()
    }
    return call(*given, **options, is_causal=is_causal)


def tokens(seed, scale=1.5):
    return scale * np.random.default_rng(seed).standard_normal((3, 2, 3, L, D))


@each_mode
def test_a_batch_is_its_elements_by_one_seed(name, is_causal):
    query, key, value = tokens(0)
    whole = attend(name, is_causal, query, key, value)
    for at in np.ndindex(2, 3):
        alone = attend(name, is_causal, query[at], key[at], value[at])
        assert_allclose(whole[at], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "is_causal"), [m for m in MODES if m[0] not in OTHER_SUMS])
def test_ones_stay_ones_where_a_query_sees_a_key(name, is_causal):
    query, key, value = tokens(0)
    out = attend(name, is_causal, query, key, np.ones_like(value))
    is_seen = np.ones(out.shape, dtype=bool)
    if name in ("reformer", "routing"):
        is_seen = np.round(out) > 0  # in no cluster, or in none with an earlier key
        assert is_seen.mean() > 0.2
    assert_allclose(out, is_seen, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [n for n, c in MODES if c and n not in CHOSEN_BY_ALL])
def test_later_tokens_change_no_earlier_row(name):
    arrays, later = tokens(0), tokens(1)
    changed = np.concatenate([arrays[..., :15, :], later[..., 15:, :]], axis=-2)
    first, second = (attend(name, True, *x)[..., :15, :] for x in (arrays, changed))
    assert_allclose(second, first, rtol=1e-12, atol=1e-12)


@each_mode
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1, 30, 1e4])
def test_no_floating_point_error(name, is_causal, scale):
    for dtype in (np.float32, np.float64):
        with np.errstate(all="raise"):
            attend(name, is_causal, *tokens(0, scale).astype(dtype))


@each_mode
@pytest.mark.parametrize("scale", [1e-2, 1, 3])
def test_float16_is_computed_in_float32(name, is_causal, scale, monkeypatch):
    given = tokens(0, scale).astype(np.float16)
    rounded = {n: {m: _rounded(a) for m, a in o.items()} for n, o in OPTIONS.items()}
    monkeypatch.setattr("tests.test_baselines_rules.OPTIONS", rounded)
    out = attend(name, is_causal, *given)
    assert out.dtype == np.float16
    wanted = attend(name, is_causal, *given.astype(np.float32))
    assert_allclose(out, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


def _rounded(array):
    return array.astype(np.float16) if isinstance(array, np.ndarray) else array

"""Queries and keys of any size: outputs keep their digits, exponentials are normal numbers or 0.

A processor may take ten times as long for numbers below the smallest normal one.
"""

# Tests call with star arguments.
# mypy: disable-error-code="arg-type, call-overload"

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import linattn
from linattn import reference
from linattn.feature_maps import HyperbolicFeatures, PositiveFeatures, ReluFeatures
from linattn_numpy import limits, tuning
from tests.attentions import assert_at_most, maps

DIM = 16
MAPS = maps(DIM, 32, "positive", "hyperbolic", "elu")
EPS = {"float32": 1.2e-7, "float64": 2.3e-16}
LEAST = {"float32": -104.0, "float64": -746.0}
"""Exponentials of little more are below the smallest normal number."""


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=5)
@given(scale=st.floats(1, 16), length=st.sampled_from([40, 300]), seed=st.integers(0, 2**32))
def test_outputs_keep_their_digits_at_any_scale(
    numpy_path, name, is_causal, dtype, scale, length, seed
):
    rng = np.random.default_rng(seed)
    query, key, value = rng.standard_normal((3, length, DIM))
    query, key, value = (x.astype(dtype) for x in (scale * query, scale * key, value))
    out = linattn.linear_attention(query, key, value, MAPS[name], is_causal=is_causal)
    want = reference.kernel_attention(query, key, value, MAPS[name], is_causal=is_causal)
    # Exponents are rounded in units of the largest, half the square of a token's norm.
    largest = 1 + np.max(np.sum(key.astype(float) ** 2, axis=-1)) / 2
    assert np.max(np.abs(out - want)) <= 40 * EPS[dtype] * largest


@pytest.mark.parametrize("dtype", EPS)
def test_exponentials_are_normal_or_zero(dtype):
    x = np.linspace(LEAST[dtype], 0, 4096, dtype=dtype).reshape(64, 64)
    x[0, :2] = -np.inf, -1e4
    x[1, 0] = np.nan
    found, want = limits.weights(x.copy()), np.exp(x.astype(float))
    tiny = np.finfo(dtype).smallest_normal
    assert_array_equal((found != 0) & (np.abs(found) < tiny), False)
    assert np.isnan(found[1, 0])
    assert_array_equal(found[0, :2], 0)
    # Half of what the smallest are multiples of.
    lost = np.abs(found - want)[2:]
    least = limits.LEAST[x.itemsize]
    assert_at_most(lost, least / 2 + 2 * EPS[dtype] * want[2:])
    # Where none is that small, these are exponentials to the last bit.
    np.testing.assert_array_equal(limits.weights(x[48:].copy()), np.exp(x[48:]))


def test_rows_are_rejected_where_rounded_exponentials_would_show():
    """The last key is far above the first, and that above the others: these are rounded to 0."""
    query, key, value = np.zeros((3, 32, 2), np.float32)
    query[:, 0] = 64  # out of the range of unshifted exponents
    # Logs -67.8 and -85.3, which float32 holds without error: the first denominator is 38 times
    # what would do without rounding, each other key 7.7 times the smallest normal number.
    key[0, 1], key[1:-1, 1] = 745 / 64, 209 / 16
    key[8, 1] = 14  # so small that exponentials are rounded
    value[1:] = 1
    phi = PositiveFeatures.from_projection(np.array([[1.0, 0.0]] * 8), scale=1.0)
    out = linattn.linear_attention(query, key, value, phi, is_causal=True)
    want = reference.kernel_attention(query, key, value, phi, is_causal=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=EPS["float32"])


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_and_features_of_keys_that_are_all_small(is_causal, dtype):
    """The unshifted features of ``elu + 1`` are not as small as these."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 64, 8)).astype(dtype)
    least = LEAST[dtype] / 2
    query[::7] = least + 5 * query[::7]
    key[:, 2] = least - 5 * np.abs(key[:, 2])
    phi = MAPS["elu"]
    out = linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
    want = reference.kernel_attention(query, key, value, phi, is_causal=is_causal)
    np.testing.assert_allclose(out, want, rtol=0, atol=2 * abs(LEAST[dtype]) * EPS[dtype])


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", ["elu", "relu"])
def test_rows_that_see_decayed_keys_only(name, dtype):
    """Decays below a bound are 0, and so are features: such rows are computed in another way."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 32, 8)).astype(dtype)
    query, key[4:] = np.abs(query), key[4:] + 0.7 * LEAST[dtype]
    log_decay = (LEAST[dtype] / 50 * rng.uniform(0.5, 1.5, 32)).astype(dtype)
    log_decay[0] = LEAST[dtype] / 2
    phi = {"elu": MAPS["elu"], "relu": ReluFeatures()}[name]
    out = linattn.linear_attention(query, key, value, phi, is_causal=True, log_decay=log_decay)
    feature = {
        "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        "relu": lambda x: np.maximum(x, 0),
    }[name]
    since = np.cumsum(log_decay.astype(np.longdouble))
    weights = np.tril(np.exp(np.minimum(since[:, None] - since, 0)))
    weights *= feature(query.astype(np.longdouble)) @ feature(key.astype(np.longdouble)).T
    want = weights @ value / weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=abs(LEAST[dtype]) / 3 * EPS[dtype])


@pytest.mark.parametrize("dtype", EPS)
def test_later_keys_far_above_the_first_are_added_without_generic_code(dtype):
    """A query's nearest key is in a later block: its scale rises, as for narrow kernels."""
    rng = np.random.default_rng(0)
    x = 50 * rng.standard_normal((1500, 4)).astype(dtype)
    value = rng.standard_normal((1500, 3)).astype(dtype)
    bias = -np.square(x).sum(axis=-1) / 2
    with linattn.explain() as report:
        out = linattn.softmax_attention(x, x, value, scale=1.0, key_bias=bias)
    assert report.ran("exact_more") == {"linattn_numpy"}
    logits = x.astype(float) @ x.T.astype(float) + bias.astype(float)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    want = weights @ value / weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=4 * EPS[dtype] * np.abs(bias).max())


@pytest.mark.parametrize("heads_of", ["one map, one mask", "own masks", "own maps"])
@pytest.mark.parametrize("paired", [False, True])
def test_stabilized_heads_beside_each_other(heads_of, paired, monkeypatch):
    """Heads that go one after the other, or together where what they need is not one a head."""
    monkeypatch.setattr(tuning, "STABILIZED_TILE", (300 * 24, 128))
    rng = np.random.default_rng(9)
    query, key, value = rng.standard_normal((3, 2, 3, 500, DIM)).astype(np.float32)
    query, key = 9 * query, 9 * key
    shape = {"own masks": (2, 3, 500), "own maps": (2, 3, 500)}.get(heads_of, (2, 1, 500))
    mask = rng.random(shape) < 0.8
    rows = rng.standard_normal((3, 24, DIM) if heads_of == "own maps" else (24, DIM))
    cls = HyperbolicFeatures if paired else PositiveFeatures
    phi = cls.from_projection(rows)
    out = linattn.linear_attention(query, key, value, phi, key_mask=mask)
    want = reference.kernel_attention(query, key, value, phi, key_mask=mask)
    largest = 1 + np.max(np.sum(key.astype(float) ** 2, axis=-1)) / 2
    assert np.max(np.abs(out - want)) <= 40 * EPS["float32"] * largest

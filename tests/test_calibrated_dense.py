"""Dense exponential features with statistics calibrated on other sequences."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, call-arg"

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

import linattn
from linattn.feature_maps import DenseExponentialFeatures, HyperbolicFeatures, Reparametrized
from tests.option_draws import Case
from tests.test_fuzz_options import check_forward

HEADS, DIM = 3, 5
SCALE = 1 / np.sqrt(DIM)
MIXES = np.random.default_rng(0).standard_normal((2, HEADS, DIM, DIM))


def sequence(seed, length):
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, HEADS, length, DIM)) @ MIXES
    return 0.4 * query + 1, 0.3 * key + 1.5, rng.standard_normal((HEADS, length, 4))


SAMPLES = [sequence(1, 60), sequence(2, 90)]


@pytest.fixture(scope="module")
def calibrated():
    return DenseExponentialFeatures.calibrate(SAMPLES, num_features=20, rng=0)


def statistics(h, temperature):
    """Means and covariances of one head, token by token."""
    queries = np.concatenate([q[h] for q, _, _ in SAMPLES])
    c = queries.mean(axis=0)
    keys, weights = [], []
    for _, key, _ in SAMPLES:
        share = np.array([np.exp(temperature * SCALE * c @ k) for k in key[h]])
        keys.extend(key[h])
        weights.extend(share / share.sum() * len(key[h]) / 150)
    b = sum(w * k for w, k in zip(weights, keys, strict=True))
    covariance = sum(w * np.outer(k - b, k - b) for w, k in zip(weights, keys, strict=True))
    return c, np.cov(queries.T, bias=True), b, covariance


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_statistics_are_centred_balanced_and_diagonal(temperature):
    found = DenseExponentialFeatures.calibrate(
        SAMPLES, num_features=20, temperature=temperature, rng=0
    )
    inside = found.feature_map
    assert isinstance(found, Reparametrized)
    assert isinstance(inside, DenseExponentialFeatures)
    for h in range(HEADS):
        c, S_q, b, S_k = statistics(h, temperature)
        assert_allclose(found.query_shift[h], c, rtol=1e-12)
        assert_allclose(found.key_shift[h], b, rtol=1e-10, atol=1e-12)
        M = found.transform[h]
        inverse = np.linalg.inv(M)
        eye = np.eye(DIM)
        S_q, S_k = (S + 1e-3 * np.trace(S) / DIM * eye for S in (S_q, S_k))
        one, two = SCALE * M.T @ S_q @ M, SCALE * inverse @ S_k @ inverse.T
        assert_allclose(one, two, atol=1e-12)
        assert_allclose(one, np.diag(np.diag(one)), atol=1e-12)
        t = 2 * np.diag(one)
        tilt = (1 - 2 * t - np.sqrt((2 * t + 1) ** 2 + 8 * t)) / 16
        assert_allclose(inside.A[h], tilt, rtol=1e-9)


def test_it_is_unbiased_for_the_softmax_kernel(calibrated):
    assert (calibrated.unbiased, calibrated.causal, calibrated.positive) == (True, True, True)
    rng = np.random.default_rng(3)
    # Near the centres, where 300 draws of 20 features are enough for normal means.
    x, y = 0.2 * rng.standard_normal((2, HEADS, 4, DIM))
    x, y = x + calibrated.query_shift[:, None], y + calibrated.key_shift[:, None]
    kernel = calibrated.kernel(x, y)
    assert_allclose(kernel, np.exp(SCALE * x @ y.swapaxes(-1, -2)), rtol=1e-11)
    draws = np.stack([calibrated.redraw(seed).estimate(x, y) for seed in range(300)]) / kernel
    spread = draws.std(axis=0) / np.sqrt(300)
    assert spread.max() < 0.1
    # 48 means, each within 6 standard errors: one false failure in some millions.
    assert_array_less(np.abs(draws.mean(axis=0) - 1), 6 * spread)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_the_dense_formula(calibrated, is_causal):
    options = {"is_causal": True} if is_causal else {}
    case = Case(0, "linear", *sequence(4, 30), calibrated, options)
    assert check_forward(case) == "compared"


def test_it_beats_features_that_have_seen_nothing(calibrated):
    query, key, value = sequence(5, 200)
    exact = linattn.softmax_attention(query, key, value)

    def error(make):
        outs = [linattn.linear_attention(query, key, value, make(seed)) for seed in range(5)]
        return np.mean([np.linalg.norm(out - exact) for out in outs])

    plain = error(lambda seed: HyperbolicFeatures(DIM, 20, rng=seed))
    assert error(calibrated.redraw) < 0.7 * plain


def test_heads_lists_and_options():
    query, key, _ = sequence(8, 30)
    shared = DenseExponentialFeatures.calibrate((query, key[:1]), num_features=8, rng=1)
    pooled = (query.reshape(1, -1, DIM), key[:1])
    assert shared == DenseExponentialFeatures.calibrate([pooled], num_features=8, rng=1)
    assert shared.query_shift.shape == (1, DIM)
    options = dict(num_features=7, antithetic=False, scale=0.2, sampler="gaussian", rng=2)
    found = DenseExponentialFeatures.calibrate((query[0], key[0]), **options)
    inside = found.feature_map
    assert isinstance(inside, DenseExponentialFeatures)
    assert (found.num_features, found.scale, inside.antithetic) == (7, 0.2, False)
    assert inside.sampler == "gaussian"
    assert found == DenseExponentialFeatures.calibrate((query[0], key[0]), **options)


def test_few_tokens_are_enough_to_go_on():
    query, key, value = sequence(9, 2)
    found = DenseExponentialFeatures.calibrate((query, key), num_features=8, rng=0)
    assert_array_equal(np.isfinite(linattn.linear_attention(query, key, value, found)), True)
    one = DenseExponentialFeatures.calibrate((query[:, :1], key[:, :1]), num_features=8, rng=0)
    assert_array_equal(np.isfinite(one.estimate(query[:, :1], key[:, :1])), True)


@pytest.mark.parametrize(
    ("samples", "options", "error", "said"),
    [
        ([], {}, ValueError, "samples must hold at least one sequence"),
        (None, {}, TypeError, "samples must be a list of sequences"),
        (SAMPLES, {"temperature": np.inf}, ValueError, "temperature must be a finite number"),
        (SAMPLES, {"scale": -1.0}, ValueError, "scale must be a positive finite number"),
        (SAMPLES, {"num_features": 7}, ValueError, "num_features must be even"),
        (SAMPLES, {"sampler": "no"}, ValueError, "sampler must be one of"),
        ((SAMPLES[0][0] * np.nan, SAMPLES[0][1]), {}, ValueError, "query must be finite"),
    ],
)
def test_bad_arguments(samples, options, error, said):
    with pytest.raises(error, match=said):
        DenseExponentialFeatures.calibrate(samples, **options)

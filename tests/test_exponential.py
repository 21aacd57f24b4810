"""Tilted exponential maps: known answers, the fitted optimum, exact laws, and what they refuse."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

import linattn
from linattn.feature_maps import (
    DenseExponentialFeatures,
    GeneralizedExponentialFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    Reparametrized,
    TrigonometricFeatures,
)
from tests.attentions import assert_at_most

# The reference inputs of the project's known answers: v = |x + y|^2 = 1.06.
X = np.array([[0.3, -0.2, 0.5, 0.1]])
Y = np.array([[-0.1, 0.4, 0.2, 0.6]])
BEST = -0.10263026741384224


def tilted(rows, *, A=BEST, antithetic=False, sampler="gaussian"):
    columns = 2 * rows if antithetic else rows
    return GeneralizedExponentialFeatures(
        4, columns, A=A, antithetic=antithetic, scale=1.0, sampler=sampler, rng=0
    )


def sample(seed=0):
    """Heads whose axes differ in size, and whose queries and keys are not centred."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((2, 60, 6)) * [1, 2, 0.5, 1, 0.2, 1] + 0.4
    key = rng.standard_normal((2, 50, 6)) * [0.3, 1, 2, 1, 2, 0.1] - 0.3
    return query, key


@pytest.mark.parametrize(
    ("feature_map", "variance"),
    [
        (tilted(1), 1.25587133082556434),
        (tilted(1, A=-0.15), 1.31761474371022104),
        (tilted(4, sampler="orthogonal"), 0.254389830933133555),
        (tilted(4, A=-0.0885, antithetic=True, sampler="orthogonal"), 0.0153219735368855766),
    ],
    ids=["best", "A=-0.15", "orthogonal", "antithetic-orthogonal"],
)
def test_known_variances(feature_map, variance):
    assert_allclose(feature_map.variance(X, Y), [[variance]], rtol=1e-10)


@pytest.mark.parametrize(
    ("x", "y"), [(40, -10), (27, -0.5), (15, 11.6), (-26, -0.6), (300, -299), (40, -40), (1e-9, 0)]
)
@pytest.mark.parametrize("tilt", [0.0, -0.1, -3.0, 0.1])
@pytest.mark.parametrize("antithetic", [False, True])
def test_variances_of_which_a_factor_is_out_of_range(x, y, tilt, antithetic):
    phi = GeneralizedExponentialFeatures(
        1, 4, A=tilt, antithetic=antithetic, scale=1.0, sampler="gaussian", rng=0
    )
    v, rho = (x + y) ** 2, 1 / (1 - 8 * tilt)
    moment = Decimal((rho + 1) ** 2 / (4 * rho)).sqrt()
    relative = moment * (Decimal(rho) * Decimal(v)).exp() - 1
    if antithetic:
        relative = (relative + moment * (-Decimal(v)).exp() - 1) / 2
    want = (2 * Decimal(x) * Decimal(y)).exp() * relative / phi.projection.shape[0]
    got = phi.variance(np.array([[float(x)]]), np.array([[float(y)]]))
    if want > Decimal("1.7e308"):
        assert_array_equal(np.abs(got), np.inf)
    else:
        assert_allclose(got, float(want), rtol=1e-9, atol=1e-300)


def test_variances_of_trigonometric_features_out_of_range():
    phi = TrigonometricFeatures(1, 4, scale=1.0, sampler="gaussian", rng=0)
    x = np.array([[40.0]])
    assert phi.variance(x, x) == 0
    assert phi.variance(x, x - 1) == np.inf
    changed = Reparametrized(phi, np.array([0.0]), np.array([-60.0]), np.eye(1))
    assert changed.variance(x, x - 60) == 0


def test_the_best_tilt_of_one_pair_is_the_known_one():
    fitted = GeneralizedExponentialFeatures.fit(X, Y, num_features=8, scale=1.0, rng=0)
    assert_allclose(fitted.A, BEST, rtol=1e-12)


def test_the_formula_of_the_features():
    feature_map = tilted(3, A=-0.2, antithetic=True)
    log = feature_map.query_features(X).log[0]
    for i, omega in enumerate(feature_map.projection):
        for column, sign in ((i, 1), (i + 3, -1)):
            want = -0.2 * omega @ omega + np.sqrt(1.8) * sign * omega @ X[0] - X[0] @ X[0] / 2
            assert_allclose(log[column], want + np.log(1.8) - np.log(6) / 2, rtol=1e-13)


def test_without_tilt_it_is_the_maps_it_generalizes():
    x, y = sample()[0][0, :7], sample(1)[0][0, :5]
    for antithetic, cls in ((True, HyperbolicFeatures), (False, PositiveFeatures)):
        ours = GeneralizedExponentialFeatures(6, 24, antithetic=antithetic, rng=3)
        theirs = cls(6, 24, rng=3)
        assert_allclose(ours.estimate(x, y), theirs.estimate(x, y), rtol=1e-13)
        assert_allclose(ours.variance(x, y), theirs.variance(x, y), rtol=1e-12)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("A", [-1.0, -0.3, 0.0, 0.05, 0.1])
def test_mean_and_variance_by_quadrature(A, antithetic):
    nodes, weights = np.polynomial.hermite_e.hermegauss(180)
    weights = weights / weights.sum()
    x, y = np.array([[0.4], [-0.7]]), np.array([[0.3], [1.1]])

    def from_rows(rows, log_weights=None):
        return GeneralizedExponentialFeatures.from_projection(
            rows, A=A, antithetic=antithetic, scale=1.0, log_weights=log_weights
        )

    feature_map = from_rows(nodes[:, None], np.log(180 * weights))
    kernel = feature_map.kernel(x, y)
    assert_allclose(feature_map.estimate(x, y), kernel, rtol=1e-12)
    each = np.stack([from_rows([node]).estimate(x, y) for node in nodes[:, None]])
    variance = np.tensordot(weights, each**2, axes=1) - kernel**2
    one_row = GeneralizedExponentialFeatures(
        1, 1 + antithetic, A=A, antithetic=antithetic, scale=1.0, sampler="gaussian", rng=0
    )
    # At A = 0.1 the square is integrable by a hair, which these nodes see to eleven digits.
    assert_allclose(one_row.variance(x, y), variance, rtol=1e-10 if A == 0.1 else 1e-12)


def fits(query, key, rng=0, **options):
    return {
        "generalized": GeneralizedExponentialFeatures.fit(query, key, rng=rng, **options),
        "symmetric": DenseExponentialFeatures.fit(query, key, rng=rng, **options),
        "balanced": DenseExponentialFeatures.fit(query, key, rng=rng, symmetric=False, **options),
    }


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("name", ["generalized", "symmetric", "balanced"])
def test_fitted_maps_are_unbiased_with_the_variance_they_state(name, antithetic):
    query, key = sample()
    x, y = 0.4 * query[:, :6], 0.4 * key[:, :5]
    options = dict(num_features=200, antithetic=antithetic, sampler="gaussian")
    feature_map = fits(0.4 * query, 0.4 * key, **options)[name]
    estimates = np.stack([feature_map.redraw(seed).estimate(x, y) for seed in range(300)])
    kernel, variance = feature_map.kernel(x, y), feature_map.variance(x, y)
    # 60 correlated entries at 6 exact standard errors of 300 estimates with 200 columns each.
    assert np.abs((estimates.mean(axis=0) - kernel) / np.sqrt(variance / 300)).max() < 6
    assert_allclose(np.median(estimates.var(axis=0) / variance), 1, atol=0.15)


def test_each_refinement_lowers_the_mean_log_second_moment():
    query, key = sample()
    maps = fits(query, key, num_features=1, antithetic=False, sampler="gaussian")
    maps["none"] = PositiveFeatures(6, 1, sampler="gaussian", rng=0)
    moments = {}
    for name, feature_map in maps.items():
        relative = feature_map.variance(query, key) / feature_map.kernel(query, key) ** 2
        moments[name] = np.log1p(relative).mean(axis=(-2, -1))
    assert_array_less(moments["generalized"], moments["none"])
    assert_array_less(moments["symmetric"], moments["generalized"])
    assert_array_less(moments["balanced"], moments["symmetric"])


def test_the_tilt_of_the_fit_is_a_minimum():
    query, key = sample()
    fitted = GeneralizedExponentialFeatures.fit(
        query, key, num_features=1, antithetic=False, sampler="gaussian", rng=0
    )

    def moment(A):
        feature_map = GeneralizedExponentialFeatures(
            6, 1, A=A, antithetic=False, sampler="gaussian", rng=0
        )
        relative = feature_map.variance(query, key) / feature_map.kernel(query, key) ** 2
        return np.log1p(relative).mean(axis=(-2, -1))

    best = moment(fitted.A)
    for step in (-0.02, 0.02):
        assert_array_less(best, moment(fitted.A + step))


def test_balancing_equalises_the_second_moments():
    query, key = sample()
    feature_map = fits(query, key, num_features=12)["balanced"]
    T, T_k = feature_map.transform, np.linalg.inv(feature_map.transform).swapaxes(-1, -2)
    moments = [x.swapaxes(-1, -2) @ x / x.shape[-2] for x in (query, key)]
    ours = [t @ m @ t.swapaxes(-1, -2) for t, m in zip((T, T_k), moments, strict=True)]
    assert_allclose(ours[0], ours[1], atol=1e-10)


@pytest.mark.parametrize("name", ["generalized", "symmetric", "balanced"])
def test_attention_with_fitted_maps(name):
    query, key = sample()
    value = np.random.default_rng(5).standard_normal((2, 50, 3))
    feature_map = fits(query, key, num_features=24)[name]
    out = linattn.linear_attention(query, key, value, feature_map)
    want = linattn.reference.kernel_attention(query, key, value, feature_map)
    assert_allclose(out, want, atol=1e-12)
    with pytest.raises(ValueError, match="is_causal needs a feature map that has not seen"):
        linattn.linear_attention(query[:, :50], key, value, feature_map, is_causal=True)
    with pytest.raises(ValueError, match="has not seen"):
        linattn.linear_attention(query[:, :50], key, value, feature_map.redraw(1), is_causal=True)
    kept = pickle.loads(pickle.dumps(feature_map))
    assert kept == feature_map
    assert kept.fingerprint() == feature_map.fingerprint()
    assert kept.causal is False


def test_a_frozen_tilt_is_causal():
    query, key = sample()
    fitted = GeneralizedExponentialFeatures.fit(query, key, num_features=24, rng=0)
    frozen = GeneralizedExponentialFeatures(6, 24, A=fitted.A, rng=0)
    assert fitted == frozen
    assert frozen.causal
    value = np.ones((2, 50, 3))
    out = linattn.linear_attention(query[:, :50], key, value, frozen, is_causal=True)
    assert_allclose(out, 1, rtol=1e-13)


def test_variance_of_heads_is_that_of_each():
    query, key = sample()
    feature_map = GeneralizedExponentialFeatures(6, 24, A=[-0.1, -0.3], rng=0)
    both = feature_map.variance(query, key)
    for head, A in enumerate(feature_map.A):
        alone = GeneralizedExponentialFeatures(6, 24, A=float(A), rng=0)
        assert_allclose(both[head], alone.variance(query[head], key[head]), rtol=1e-12)
    assert feature_map.variance(query[0, None, None], key[0, None, None]).shape == (1, 2, 60, 50)


def test_a_variance_that_is_not_known_says_what_is_missing():
    query, key = sample()
    feature_map = fits(query, key, num_features=24)["symmetric"]
    with pytest.raises(NotImplementedError, match="all axes of a head have one tilt A"):
        feature_map.variance(query, key)
    one_tilt = DenseExponentialFeatures(
        6, 24, A=np.full(6, -0.2), transform=feature_map.transform[0], rng=0
    )
    assert_at_most(0, one_tilt.variance(query[0], key[0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(A=0.125), "A must be finite and below 1/8.*got 0.125"),
        (dict(A=float("nan")), "A must be finite"),
        (dict(num_features=7), "num_features must be even"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        GeneralizedExponentialFeatures(4, **{"num_features": 8, "rng": 0, **options})


@pytest.mark.parametrize(
    ("A", "transform", "message"),
    [
        (np.zeros(3), np.eye(4), r"A must have shape \(..., 4\)"),
        (np.zeros(4), np.eye(3), r"transform \(..., 4, 4\), got"),
        (np.zeros(4), np.ones((4, 4)), "transform must be invertible"),
    ],
)
def test_bad_axes(A, transform, message):
    with pytest.raises(ValueError, match=message):
        DenseExponentialFeatures(4, 8, A=A, transform=transform, rng=0)


def test_an_empty_sample_cannot_be_fitted():
    with pytest.raises(ValueError, match="at least one token"):
        GeneralizedExponentialFeatures.fit(np.ones((0, 4)), np.ones((3, 4)))


# Large queries ----------------------------------------------------------------------------------

_ROTATION = np.linalg.qr(np.random.default_rng(3).standard_normal((8, 8)))[0]
LARGE = {
    "positive": PositiveFeatures(8, 32, rng=0),
    "hyperbolic": HyperbolicFeatures(8, 32, rng=0),
    "generalized": GeneralizedExponentialFeatures(8, 32, A=-0.1, rng=0),
    "dense": DenseExponentialFeatures(8, 32, A=-0.1 * np.ones(8), transform=_ROTATION, rng=0),
    "reparametrized": Reparametrized(
        PositiveFeatures(8, 32, rng=0), np.full(8, 0.3), np.full(8, -0.2), np.eye(8)
    ),
}


def read_in_every_way(query: Any, key: Any, value: Any, phi: Any) -> Any:
    """Outputs of full and causal attention, each by all that there is."""
    state = linattn.init_state(phi, 8, batch_shape=query.shape[:-2], like=key)
    filled = linattn.update_state(state, key, value, phi)
    full = {
        "full": linattn.linear_attention(query, key, value, phi),
        "read_state": linattn.read_state(query, filled, phi),
        "log": linattn.linear_attention(query, key, value, phi, return_log_normalizer=True)[0],
    }
    causal, decoder = {}, linattn.Decoder(phi, state)
    for chunk_size in (None, 1, 16):
        causal[f"causal, {chunk_size}"] = linattn.linear_attention(
            query, key, value, phi, is_causal=True, chunk_size=chunk_size
        )
    steps = [(query[..., i, :], key[..., i, :], value[..., i, :]) for i in range(key.shape[-2])]
    causal["Decoder"] = np.stack([decoder.step(q, k, v) for q, k, v in steps], axis=-2)
    out = []
    for q, k, v in steps:
        row, state = linattn.decode_step(q, k, v, state, phi)
        out.append(row)
    causal["decode_step"] = np.stack(out, axis=-2)
    return full, causal


@pytest.mark.parametrize("generic", [False, True], ids=["numpy", "generic"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", LARGE)
def test_large_queries_are_not_lost_beside_their_square(name, dtype, generic):
    """A query's square cancels. From 1e4 on each row reads the feature that is its largest."""
    rng, phi = np.random.default_rng(0), LARGE[name]
    query, key, value = (x.astype(dtype) for x in rng.standard_normal((3, 2, 20, 8)))
    arrays = (query * np.asarray(1e6, dtype), key, value)
    q, k, v = (x.astype(np.float64) for x in arrays)
    with linattn.without_backends():
        limits = [
            linattn.linear_attention(q, k, v, phi, is_causal=is_causal)
            for is_causal in (False, True)
        ]
    if dtype == "float32":
        # A row past range has its head divided.
        beyond = query * np.float32(1e15)
        beyond[0, 10] = 3e38
        out = linattn.linear_attention(beyond, key, value, phi, is_causal=True)
        rows = np.arange(20) != 10
        assert_allclose(out[:, rows], limits[1][:, rows], rtol=0, atol=1e-3)
    for exponent in (5, 9, 20):
        large = query * np.asarray(10.0**exponent, dtype)
        with linattn.without_backends() if generic else nullcontext():
            answers = read_in_every_way(large, key, value, phi)
        for outputs, want in zip(answers, limits, strict=True):
            for way, out in outputs.items():
                assert_allclose(out, want, rtol=0, atol=1e-3, err_msg=f"{way}, 1e{exponent}")

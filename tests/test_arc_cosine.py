"""Arc-cosine kernels of order 0, 1 and 2 through `ActivationFeatures`.

Expectations come from quadrature over the plane of two vectors, which shares nothing with the
closed forms. That rows are drawn by their law is tested in test_sampling.py.
"""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from linattn import sampling
from linattn.feature_maps import ActivationFeatures

X = np.array([[0.3, -0.2, 0.5, 0.1]])
Y = np.array([[-0.1, 0.4, 0.2, 0.6]])

FUNCTIONS = {
    "heaviside": lambda u: (u > 0).astype(float),
    "relu": lambda u: np.maximum(u, 0),
    "squared_relu": lambda u: np.maximum(u, 0) ** 2,
}
each_activation = pytest.mark.parametrize("activation", FUNCTIONS)
each_epsilon = pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.7, -0.2])


def made(activation, num_features=1, *, epsilon=0.0, sampler="gaussian", rng=0, **options):
    return ActivationFeatures(
        4,
        num_features,
        activation=activation,
        epsilon=epsilon,
        sampler=sampler,
        rng=rng,
        **options,
    )


def expectation(function, x, y):
    """``E function(w.x, w.y)``, w ~ N(0, I), by Gauss-Legendre in polar coordinates.

    The plane is cut where w.x or w.y changes sign; within a sector the integrand is smooth.
    """
    a, b = np.linalg.norm(x), np.linalg.norm(y)
    theta = 2 * math.atan2(np.linalg.norm(x / a - y / b), np.linalg.norm(x / a + y / b))
    cuts = np.sort([-math.pi / 2, math.pi / 2, theta - math.pi / 2, theta + math.pi / 2])
    cuts = np.append(cuts, cuts[0] + 2 * math.pi)
    unit, weights = np.polynomial.legendre.leggauss(120)
    r, r_weights = 10 * (unit + 1), 10 * weights
    density = r_weights * r * np.exp(-r * r / 2) / (2 * math.pi)
    total = 0.0
    for low, high in itertools.pairwise(cuts):
        half = (high - low) / 2
        phi = low + half * (unit + 1)
        values = function(a * np.outer(r, np.cos(phi)), b * np.outer(r, np.cos(phi - theta)))
        total += half * density @ values @ weights
    return total


def pairs():
    """Vectors at many angles and lengths, the ends 0 and pi and their neighbourhoods included."""
    rng = np.random.default_rng(5)
    for angle in (0.0, 1e-9, 1e-4, 0.3, 1.0, math.pi / 2, 2.0, 3.0, math.pi - 1e-4, math.pi):
        first, second = np.linalg.qr(rng.standard_normal((4, 2)))[0].T
        a, b = rng.uniform(0.3, 2, 2)
        yield a * first, b * (math.cos(angle) * first + math.sin(angle) * second)


# Closed forms -----------------------------------------------------------------------------------


@each_activation
@each_epsilon
def test_kernel_and_variance_are_what_quadrature_gives(activation, epsilon):
    f = FUNCTIONS[activation]
    phi = made(activation, 5, epsilon=epsilon)
    for x, y in pairs():
        mean = expectation(lambda u, v: (f(u) + epsilon) * (f(v) + epsilon), x, y)
        square = expectation(lambda u, v: ((f(u) + epsilon) * (f(v) + epsilon)) ** 2, x, y)
        kernel, variance = phi.kernel(x[None], y[None]), phi.variance(x[None], y[None])
        assert_allclose(kernel, [[mean]], rtol=1e-11, atol=1e-13)
        assert_allclose(variance, [[(square - mean**2) / 5]], rtol=1e-11, atol=1e-13)


@each_activation
def test_scale_is_a_factor_of_the_inputs(activation):
    n = [*FUNCTIONS].index(activation)
    one, four = made(activation), made(activation, scale=4.0)
    assert_allclose(four.kernel(X, Y), 4.0**n * one.kernel(X, Y), rtol=1e-14)
    assert_allclose(four.variance(X, Y), 16.0**n * one.variance(X, Y), rtol=1e-13)
    assert_allclose(four.estimate(X, Y), 4.0**n * one.estimate(X, Y), rtol=1e-14)


@each_activation
@each_epsilon
def test_a_vector_of_zeros_has_no_angle(activation, epsilon):
    zero = np.zeros((1, 4))
    phi = made(activation, 400, epsilon=epsilon)
    f = FUNCTIONS[activation]
    assert_allclose(phi.query_features(zero).values, epsilon / 20, rtol=1e-14)
    mean = expectation(lambda u, v: f(v) + epsilon, X[0], Y[0])
    square = expectation(lambda u, v: (f(v) + epsilon) ** 2, X[0], Y[0])
    assert_allclose(phi.kernel(zero, Y), [[epsilon * mean]], rtol=1e-12)
    variance = epsilon**2 * (square - mean**2) / 400
    assert_allclose(phi.variance(zero, Y), [[variance]], rtol=1e-10, atol=1e-18)
    assert_allclose(phi.kernel(zero, zero), [[epsilon**2]], rtol=1e-14)
    assert_allclose(phi.variance(zero, zero), [[0]], atol=1e-18)


# Features ---------------------------------------------------------------------------------------


@each_activation
@pytest.mark.parametrize("sampler", ["gaussian", "orthogonal", None])
def test_features_are_the_formula(activation, sampler):
    phi = ActivationFeatures(
        4, activation=activation, epsilon=0.2, scale=2.0, sampler=sampler, rng=0
    )
    u = math.sqrt(2.0) * X
    if phi.projection is not None:
        u = u @ phi.projection.T
    expected = FUNCTIONS[activation](u) + 0.2
    if phi.projection is not None:
        expected /= math.sqrt(len(phi.projection))
    assert_allclose(phi.query_features(X).values, expected, rtol=1e-14)
    assert_allclose(phi.estimate(X, Y), phi.estimate(Y, X), rtol=1e-14)
    assert phi.positive
    assert phi.unbiased
    assert phi.fingerprint() != made("relu").fingerprint()
    again = pickle.loads(pickle.dumps(phi))
    assert again == phi
    assert f"activation={activation!r}" in repr(phi)


@each_activation
def test_what_may_be_relied_on(activation):
    assert not made(activation, epsilon=-0.1).positive
    assert not ActivationFeatures.from_projection(np.eye(4), activation=activation).unbiased
    assert made(activation).redraw(1).activation == activation
    phi = made(activation, sampler="orthogonal")
    assert_array_equal(phi.mean(X, Y), phi.kernel(X, Y))
    unprojected = ActivationFeatures(activation=activation, sampler=None)
    assert_array_equal(unprojected.kernel(X, Y), unprojected.estimate(X, Y))
    assert_array_equal(unprojected.variance(X, Y), [[0.0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_heaviside_of_what_is_not_finite_is_not_a_plausible_step(xp, bad):
    x = np.ones((2, 4))
    x[1, 2] = bad
    with np.errstate(invalid="ignore"):  # Dask computes only when asked
        values = xp.numpy(made("heaviside", 6).query_features(xp.array(x)).values)
    assert_array_equal(values[1], np.nan)
    assert_array_equal(np.isfinite(values[0]), True)


# Refusals ---------------------------------------------------------------------------------------


@each_activation
@pytest.mark.parametrize("sampler", ["orthogonal", sampling.orthogonal])
def test_variance_of_coupled_rows_says_what_is_missing(activation, sampler):
    message = f"variance of {activation} .*two rows of one block.*sampler='gaussian'"
    with pytest.raises(NotImplementedError, match=message):
        made(activation, sampler=sampler).variance(X, Y)

"""Taylor and polynomial features against the polynomials themselves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

import linattn
from linattn.feature_maps.polynomial import PolynomialFeatures, TaylorFeatures
from tests.attentions import assert_at_most, full_and_causal, masked

DIM, LENGTH, VALUE_DIM = 5, 13, 3
SCALE = 0.7


def taylor(t, order):
    return sum(t**k / math.factorial(k) for k in range(order + 1))


KERNELS = {
    "taylor-0": (TaylorFeatures(DIM, 0, scale=SCALE), lambda t: np.ones_like(t)),
    "taylor-1": (TaylorFeatures(DIM, 1, scale=SCALE), lambda t: 1 + t),
    "taylor-2": (TaylorFeatures(DIM, scale=SCALE), lambda t: 1 + t + t**2 / 2),
    "taylor-3": (TaylorFeatures(DIM, 3, scale=SCALE), lambda t: 1 + t + t**2 / 2 + t**3 / 6),
    "taylor-6": (TaylorFeatures(DIM, 6, scale=SCALE), lambda t: taylor(t, 6)),
    "square": (PolynomialFeatures(DIM, scale=SCALE), lambda t: (t + 1) ** 2),
    "quartic": (PolynomialFeatures(DIM, 4, 0.3, scale=SCALE), lambda t: (t + 0.3) ** 4),
    "homogeneous": (PolynomialFeatures(DIM, 2, 0, scale=SCALE), lambda t: t**2),
    "cubic": (PolynomialFeatures(DIM, 3, 2.0, scale=SCALE), lambda t: (t + 2) ** 3),
}
COLUMNS = {
    "taylor-0": 1,
    "taylor-1": 6,
    "taylor-2": 21,
    "taylor-3": 56,
    "taylor-6": 462,
    "square": 21,
    "quartic": 126,
    "homogeneous": 15,
    "cubic": 56,
}
every_kernel = pytest.mark.parametrize("name", KERNELS)


def inputs(seed=0):
    return masked(LENGTH, DIM, VALUE_DIM, seed=seed)


def attend(arrays, feature_map, **options):
    query, key, value = arrays
    return linattn.linear_attention(query, key, value, feature_map, **options)


def quadratic(name, query, key, value, visible):
    """Attention by the formula, and the size of the terms that its rounding comes from."""
    t = SCALE * query @ np.swapaxes(key, -1, -2)
    weights = np.where(visible, KERNELS[name][1](t), 0)
    total = weights.sum(axis=-1, keepdims=True)
    out = np.where(total == 0, 0, weights @ value / np.where(total == 0, 1, total))
    largest = SCALE * np.abs(query) @ np.swapaxes(np.abs(key), -1, -2)
    terms = np.where(visible, KERNELS[name][1](largest), 0)
    size = terms @ np.abs(value) + np.abs(out) * terms.sum(axis=-1, keepdims=True)
    return out, np.abs(total), size


def visible_pairs(mask, *, is_causal):
    seen = np.broadcast_to(mask[:, None, :], (2, LENGTH, LENGTH))
    return seen & np.tri(LENGTH, dtype=bool) if is_causal else seen


@every_kernel
def test_columns_are_packed(name):
    phi = KERNELS[name][0]
    features = phi.query_features(inputs()[0])
    assert phi.num_features == features.values.shape[-1] == COLUMNS[name]


@pytest.mark.parametrize("order", range(5))
def test_each_monomial_once_with_its_multinomial_weight(order):
    x = inputs()[0][0]
    features = TaylorFeatures(DIM, order, scale=1.0).key_features(x)
    expected = []
    for exponents in itertools.product(range(order + 1), repeat=DIM):
        if sum(exponents) <= order:
            weight = math.prod(math.factorial(a) for a in exponents) ** -0.5
            expected.append(weight * np.prod(x**exponents, axis=-1))
    phi = features.values * np.exp(features.log)
    assert_allclose(np.sort(phi, axis=-1), np.sort(np.stack(expected, -1), axis=-1), atol=1e-13)


@every_kernel
def test_kernel_and_estimate_are_the_polynomial(name):
    phi, polynomial = KERNELS[name]
    x, y, _, _ = inputs()
    expected = polynomial(SCALE * x @ np.swapaxes(y, -1, -2))
    for result in (phi.kernel(x, y), phi.estimate(x, y), phi.mean(x, y)):
        assert_allclose(result, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
    assert_array_equal(phi.variance(x, y), 0)


@pytest.mark.parametrize("order", [2, 4, 6])
def test_even_orders_are_positive_although_features_are_signed(order):
    phi = TaylorFeatures(1, order, scale=1.0)
    t = np.linspace(-30, 30, 6001)[:, None]
    kernel = phi.kernel(t, np.ones((1, 1)))
    assert_array_less(0, kernel)
    assert not phi.positive
    assert (phi.query_features(-np.ones((1, 1))).values < 0).any()
    if order == 2:
        assert_allclose(kernel.min(), 0.5)


def test_what_is_positive():
    assert TaylorFeatures(3, 0).positive
    assert not PolynomialFeatures(3, 1).positive
    assert TaylorFeatures(1, 3, scale=1.0).kernel(-5 * np.ones((1, 1)), np.ones((1, 1))) < 0


@pytest.mark.parametrize("size", [1e15, 1e20, 1e-15])
@full_and_causal
@pytest.mark.parametrize("name", ["taylor-2", "quartic", "homogeneous"])
def test_coordinates_of_any_size(name, is_causal, size):
    query, key, value, mask = inputs(3)
    query, key = (size * a for a in (query, key))
    visible = visible_pairs(np.ones_like(mask), is_causal=is_causal)
    expected = quadratic(name, query, key, value, visible)
    arrays = (a.astype(np.float32) for a in (query, key, value))
    out = attend(arrays, KERNELS[name][0], is_causal=is_causal)
    want, total, terms = expected
    assert_at_most(np.abs(out - want) * total, 1e-4 * terms)


def test_scale_defaults():
    assert TaylorFeatures(16).scale == 0.25
    assert PolynomialFeatures(16).scale == 1.0


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "said"),
    [
        (TaylorFeatures, {"dim": 0}, ValueError, "dim must be at least 1, got 0"),
        (TaylorFeatures, {"order": -1}, ValueError, "order must be at least 0, got -1"),
        (TaylorFeatures, {"order": 2.0}, TypeError, "order must be an integer .* got 2.0"),
        (TaylorFeatures, {"order": True}, TypeError, "order must be an integer .* got True"),
        (TaylorFeatures, {"scale": 0}, ValueError, "scale must be a positive"),
        (PolynomialFeatures, {"degree": 0}, ValueError, "degree must be at least 1, got 0"),
        (PolynomialFeatures, {"c": -1}, ValueError, "c must be at least 0.* got -1"),
        (PolynomialFeatures, {"c": "1"}, TypeError, "c must be a real number"),
    ],
)
def test_bad_arguments(kind, arguments, error, said):
    with pytest.raises(error, match=said):
        kind(**{"dim": 4} | arguments)


def test_other_dims_are_refused():
    with pytest.raises(ValueError, match="x must have 4 coordinates"):
        TaylorFeatures(4).kernel(np.ones((2, 3)), np.ones((2, 3)))

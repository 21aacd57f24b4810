"""Kernel sums, densities, regression and transport, against dense formulas in float64."""

from __future__ import annotations

import inspect
import re
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp, ndtri
from scipy.stats import gaussian_kde

from linattn.kernels import (
    kernel_density,
    local_regression,
    log_sum_exp,
    mean_shift,
    mmd,
    sinkhorn,
)

TOLERANCE = {"float64": 1e-12, "float32": 2e-6}


# The dense formulas: differences of all pairs, in float64 -----------------------------------------


def log_kernel(x, y, bandwidth):
    difference = (
        np.asarray(x, float)[..., :, None, :] - np.asarray(y, float)[..., None, :, :]
    ) / bandwidth
    return -np.sum(difference**2, axis=-1) / 2


def dense_log_sum(x, y, bandwidth, weights):
    return logsumexp(log_kernel(x, y, bandwidth), axis=-1, b=weights[..., None, :])


def dense_weights(x, y, bandwidth, weights):
    with np.errstate(divide="ignore"):
        log = log_kernel(x, y, bandwidth) + np.log(weights)[..., None, :]
    weight = np.exp(log - np.max(log, axis=-1, keepdims=True))
    return weight / np.sum(weight, axis=-1, keepdims=True)


def dense_line(query, x, y, bandwidth, weights, ridge=1e-3):
    """Weighted least squares around each query, from differences to the query."""
    weight = dense_weights(query, x, bandwidth, weights)
    d, found = x.shape[-1], []
    for q, w in zip(query, weight, strict=True):
        rows = np.concatenate([np.ones((len(x), 1)), (x - q) / bandwidth], axis=1)
        penalty = np.diag([0.0, *[ridge] * d])
        found.append(
            np.linalg.solve(rows.T @ (w[:, None] * rows) + penalty, rows.T @ (w[:, None] * y))
        )
    return np.stack(found)[:, 0]


def dense_sinkhorn(x, y, reg, a, b, num_iterations):
    cost = -2 * log_kernel(x, y, 1.0)
    g = np.zeros(len(y))
    for _ in range(num_iterations):
        f = -reg * logsumexp((g - cost) / reg, axis=1, b=b)
        g = -reg * logsumexp((f[:, None] - cost) / reg, axis=0, b=a[:, None])
    return -reg * logsumexp((g - cost) / reg, axis=1, b=b), g, cost


def problem(seed, n=40, d=3, num_queries=17, near=0.1):
    """Half of the queries are near rows, where a narrow bandwidth sees one row only."""
    rng = np.random.default_rng(seed)
    y = rng.standard_normal((n, d)) + rng.standard_normal(d)
    x = rng.standard_normal((num_queries, d))
    x[::2] = y[rng.integers(0, n, len(x[::2]))] + near * rng.standard_normal((len(x[::2]), d))
    return x, y, rng.exponential(size=n), rng.random(n) < 0.8


# Log sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_log_sums_on_every_library(xp, dtype):
    x, y, weights, mask = problem(0, d=4)
    x, y = x.astype(dtype), y.astype(dtype)
    mask[0], weights[0], y[0] = False, np.nan, np.nan
    args = xp.array(x), xp.array(y)
    given = {"weights": xp.array(np.where(mask, weights, 1.0)), "key_mask": xp.array(mask)}
    found = log_sum_exp(*args, bandwidth=0.3, **given)
    xp.assert_like(found, args[0], shape=(17,))
    expected = dense_log_sum(x, y[mask], 0.3, weights[mask])
    assert_allclose(xp.numpy(found), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    found = log_sum_exp(*args, scale=0.7, **given)
    logits = 0.7 * x.astype(float) @ y[mask].astype(float).T
    expected = logsumexp(logits, axis=1, b=weights[mask])
    assert_allclose(xp.numpy(found), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@settings(max_examples=60)
@example(seed=0, n=6, d=20, bandwidth=0.01, log_scale=0, shift=0.0)  # an order of its own in a BLAS
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 70),
    d=st.sampled_from([1, 2, 3, 5, 8, 9, 14, 20, 40]),
    bandwidth=st.sampled_from([0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]),
    log_scale=st.integers(-30, 30),
    shift=st.sampled_from([0.0, 3.0, 1000.0]),
)
def test_log_sums_keep_all_digits(dtype, seed, n, d, bandwidth, log_scale, shift):
    scale = 10.0**log_scale if dtype == "float64" else 10.0 ** (log_scale // 3)
    x, y, weights, _ = problem(seed, n, d, near=bandwidth)
    x, y = ((scale * (p + shift)).astype(dtype) for p in (x, y))
    weights[1:2] = 0
    h = scale * bandwidth * (1 + np.random.default_rng(seed).random(d))
    expected = dense_log_sum(x, y, h, weights)
    found = log_sum_exp(x, y, bandwidth=h, weights=weights)
    # The centre is subtracted from points that are this much larger.
    tolerance = TOLERANCE[dtype] * max(1, (shift if dtype == "float64" else 0) / bandwidth / 100)
    assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_leading_axes_broadcast():
    rng = np.random.default_rng(0)
    x, y, weights = rng.random((2, 1, 5, 3)), rng.random((4, 7, 3)), rng.random((4, 7))
    found = log_sum_exp(x, y, bandwidth=0.5, weights=weights)
    assert_allclose(found, dense_log_sum(x, y[None], 0.5, weights[None]), rtol=1e-12)


def test_where_nothing_counts_the_log_sum_is_minus_infinity():
    x = np.ones((3, 2))
    assert_array_equal(log_sum_exp(x, x, bandwidth=1.0, weights=np.zeros(3)), -np.inf)
    assert_array_equal(log_sum_exp(x, x[:0], bandwidth=1.0), -np.inf)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_far_away_the_log_sum_is_finite_and_right(dtype):
    x, y = np.array([[1e9], [-1e15]], dtype), np.array([[0.0], [2.0]], dtype)
    expected = dense_log_sum(x, y, 0.5, np.ones(2))
    assert_allclose(log_sum_exp(x, y, bandwidth=0.5), expected, rtol=TOLERANCE[dtype])
    most = np.full((1, 1), np.finfo(dtype).max)
    assert_array_equal(np.isnan(log_sum_exp(most, y, bandwidth=0.5)), False)
    assert_array_equal(np.isnan(log_sum_exp(y, -most, bandwidth=0.5)), False)


def test_memory_does_not_grow_with_pairs():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 5_000, 3))
    tracemalloc.start()
    try:
        log_sum_exp(x, y, bandwidth=0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * 2**20  # 8 bytes a pair would be 190 MiB


# Densities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_densities_are_those_of_scipy_on_every_library(xp, dtype):
    x, y, weights, _ = problem(1, n=60)
    y = (y @ np.array([[2.0, 0.5, 0.1], [0, 1.0, 0.3], [0, 0, 0.2]])).astype(dtype)
    x = (y[:17] + 0.1 * x).astype(dtype)
    weights[3] = 0
    ours = kernel_density(xp.array(y), weights=xp.array(weights), bw_method="silverman")
    theirs = gaussian_kde(y.astype(float).T, weights=weights, bw_method="silverman")
    near: Any = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    found = ours.logpdf(xp.array(x))
    xp.assert_like(found, ours.dataset, shape=(17,))
    assert_allclose(xp.numpy(found), theirs.logpdf(x.T.astype(float)), **near)
    for name in ("pdf", "evaluate", "__call__"):
        assert_allclose(
            xp.numpy(getattr(ours, name)(xp.array(x))), theirs.pdf(x.T.astype(float)), **near
        )
    for name in ("covariance", "weights"):
        assert_allclose(xp.numpy(getattr(ours, name)), getattr(theirs, name), **near)
    assert_allclose((ours.factor, ours.neff, ours.n, ours.d), (theirs.factor, theirs.neff, 60, 3))
    mean, cov = np.array([0.5, 0, 1]), np.diag([1.0, 2, 3]) + 0.5
    expected = theirs.integrate_gaussian(mean, cov)
    assert_allclose(xp.numpy(ours.integrate_gaussian(mean, cov)), expected, **near)
    other = kernel_density(xp.array(x), 0.5)
    expected = theirs.integrate_kde(gaussian_kde(x.astype(float).T, 0.5))
    assert_allclose(xp.numpy(ours.integrate_kde(other)), expected, **near)
    xp.assert_like(ours.resample(5, rng=0), ours.dataset, shape=(5, 3))


def test_the_layout_of_scipy_is_an_option():
    x, y, weights, _ = problem(2)
    rows = kernel_density(y, weights=weights)
    columns = kernel_density(y.T, weights=weights, layout="scipy")
    assert_array_equal(columns.logpdf(x.T), rows.logpdf(x))
    assert_array_equal(columns.resample(4, rng=1), rows.resample(4, rng=1).T)
    assert_array_equal(columns.dataset, y)
    assert_array_equal(columns.pdf(x[0]), rows.pdf(x[:1]))


@pytest.mark.parametrize("layout", ["rows", "scipy"])
def test_one_coordinate_needs_one_axis(layout):
    data, points = [1.0, 2.0, 4.0], [0.0, 3.0]
    found = kernel_density(data, layout=layout)(points)
    assert_allclose(found, gaussian_kde(data)(points), rtol=1e-12)
    assert_allclose(kernel_density(data, layout=layout)(3.0), found[1:])


@pytest.mark.parametrize("method", [None, "scott", "silverman", 0.3, lambda kde: kde.n**-0.5])
def test_bandwidths_are_those_of_scipy(method):
    _, y, weights, _ = problem(3)
    ours, theirs = kernel_density(y, method, weights), gaussian_kde(y.T, method, weights)
    assert_allclose(ours.factor, theirs.factor, rtol=1e-14)
    for kde in (ours, theirs):
        kde.set_bandwidth(0.7)
    assert_allclose(ours.covariance, theirs.covariance, rtol=1e-12)
    assert_allclose(ours.logpdf(y), theirs.logpdf(y.T), rtol=1e-12, atol=1e-12)


# A normal mean of m draws is beyond 5 standard errors once in 1.7 million: some 20 of them here.
FIVE = -ndtri(3e-7)


def test_resampled_points_have_the_moments_of_the_density():
    _, y, weights, _ = problem(4, n=30)
    weights[:3] = [0, 10, 5]
    kde = kernel_density(y, 0.5, weights)
    drawn, m = kde.resample(40_000, rng=0), 40_000
    mean = kde.weights @ y
    centred = y - mean
    cov = centred.T @ (kde.weights[:, None] * centred) + kde.covariance
    error = (np.mean(drawn, axis=0) - mean) / np.sqrt(np.diag(cov) / m)
    assert np.max(np.abs(error)) < FIVE
    products = (drawn - mean)[:, :, None] * (drawn - mean)[:, None, :]
    error = (np.mean(products, axis=0) - cov) / (np.std(products, axis=0) / np.sqrt(m))
    assert np.max(np.abs(error)) < FIVE
    # A defect that this sees: noise a tenth too small, or weights not used.
    assert_array_equal(kde.resample(7, rng=3), kde.resample(7, rng=np.random.default_rng(3)))
    assert len(kde.resample(rng=0)) == int(kde.neff)


def degenerate(kind, offset):
    """Rows whose covariance has the rank that is returned."""
    z, other = np.random.default_rng(0).standard_normal((2, 60))
    one = np.full(60, 0.3)
    return {
        "constant": (np.stack([one, 2 * one], axis=1) + offset, 0),
        "one constant": (np.stack([z, one], axis=1) + offset, 1),
        "collinear": (np.stack([z + offset, 2.1 * (z + offset) + 0.3], axis=1), 1),
        "nearly collinear": (np.stack([z, z + 1e-8 * other], axis=1) + offset, 1),
        "a sum": (np.stack([z + offset, other - offset, z + other], axis=1), 2),
        "few rows": (np.random.default_rng(0).standard_normal((3, 4)) + offset, 2),
        "nan": (np.stack([z, np.where(z > 1, np.nan, z)], axis=1), 0),
    }[kind]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
@pytest.mark.parametrize(
    "kind",
    ["constant", "one constant", "collinear", "nearly collinear", "a sum", "few rows", "nan"],
)
def test_data_of_too_small_a_rank_have_no_density(kind, offset, dtype):
    rows, rank = degenerate(kind, offset)
    said = rf"dataset must .* vary in {rows.shape[1]} .* rank {rank} to within rounding; leave out"
    with pytest.raises(np.linalg.LinAlgError, match=said):
        kernel_density(rows.astype(dtype), weights=np.linspace(1, 2, len(rows)))


def test_small_ranks_are_found_on_every_library(xp):
    for kind in ("one constant", "collinear"):
        with pytest.raises(np.linalg.LinAlgError, match="rank 1 to within rounding"):
            kernel_density(xp.array(degenerate(kind, 100.0)[0], "float32"), 0.5)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("near", [1.0, 1e-3])
def test_data_of_full_rank_have_one(offset, scale, near):
    z = np.random.default_rng(1).standard_normal((60, 2))
    z[:, 1] = z[:, 0] + near * z[:, 1]
    wanted = gaussian_kde(z.T, 0.5).logpdf(z[:9].T) - np.log(scale) - np.log(7)
    rows = (z + offset) * [scale, 7.0]
    # The rounding of the data, in the deviation of the narrow direction.
    tolerance = 1e-13 * max(1, offset) / near**2 + 1e-10
    assert_allclose(kernel_density(rows, 0.5).logpdf(rows[:9]), wanted, atol=tolerance)


# Regression ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("degree", [0, 1])
def test_regression_is_weighted_least_squares_on_every_library(xp, degree, dtype):
    query, x, weights, mask = problem(6)
    query, x = query.astype(dtype), x.astype(dtype)
    y = np.sin(x[:, :2]) + 5
    given = {"weights": xp.array(weights), "key_mask": xp.array(mask)}
    args = [xp.array(a) for a in (query, x, y)]
    found = local_regression(*args, bandwidth=0.8, degree=degree, **given)
    xp.assert_like(found, args[0], shape=(17, 2))
    query, x, y = (a.astype(float) for a in (query, x, y))
    if degree == 1:
        expected = dense_line(query, x[mask], y[mask], 0.8, weights[mask])
    else:
        expected = dense_weights(query, x[mask], 0.8, weights[mask]) @ y[mask]
    tolerance = {"float64": 1e-10, "float32": 2e-6}[dtype] if degree else TOLERANCE[dtype]
    assert_allclose(xp.numpy(found), expected, rtol=tolerance)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 70),
    d=st.sampled_from([1, 2, 5, 20, 40]),
    bandwidth=st.sampled_from([0.01, 0.1, 0.3, 1.0, 3.0, 10.0]),
)
def test_regression_is_right_at_every_bandwidth(seed, n, d, bandwidth):
    query, x, weights, _ = problem(seed, n, d, near=bandwidth)
    y = x[:, :1] ** 2
    found = local_regression(query, x, y, bandwidth=bandwidth, degree=0, weights=weights)
    assert_allclose(found, dense_weights(query, x, bandwidth, weights) @ y, rtol=1e-9, atol=1e-12)
    found = local_regression(query, x, y, bandwidth=bandwidth, weights=weights)
    # Moments of points u are subtracted, and the smallest pivot is the ridge, 1e-3.
    u = np.max(np.sum(((x - x.mean(0)) / bandwidth) ** 2, axis=1)) + 1
    expected = dense_line(query, x, y, bandwidth, weights)
    size = 1 + np.max(np.abs(y)) + np.max(np.abs(expected))
    assert_allclose(found / size, expected / size, atol=1e-12 * u)


def test_a_line_is_right_at_the_border_and_a_mean_is_not():
    x = np.linspace(0, 1, 200)[:, None]
    end = np.array([[0.0]])
    line = local_regression(end, x, 4 * x, bandwidth=0.1, ridge=1e-9)
    assert_allclose(line, 0, atol=1e-8)
    assert local_regression(end, x, 4 * x, bandwidth=0.1, degree=0)[0, 0] > 0.3


def test_regression_by_blocks_is_regression_at_once(monkeypatch):
    query, x, _, _ = problem(7)
    y = np.sin(x)
    expected = local_regression(query, x, y, bandwidth=0.5)
    monkeypatch.setattr("linattn.kernels._regression.BLOCK_NUMBERS", 50)
    assert_array_equal(local_regression(query, x, y, bandwidth=0.5), expected)


# Transport ----------------------------------------------------------------------------------------


def test_transport_is_that_of_the_dense_loop_on_every_library(xp):
    x, y, b, _ = problem(8, n=23, d=2)
    a, b = np.arange(17.0), b / np.sum(b)
    a /= np.sum(a)
    plan = sinkhorn(
        xp.array(x), xp.array(y), reg=12.0, a=3 * xp.array(a), b=xp.array(b), tolerance=1e-8
    )
    assert 3 < plan.num_iterations < 30
    f, g, cost = dense_sinkhorn(x, y, 12.0, a, b, plan.num_iterations)
    assert_allclose(xp.numpy(plan.f), f, rtol=1e-12, atol=1e-12)
    assert_allclose(xp.numpy(plan.g), g, rtol=1e-12, atol=1e-12)
    dense = a[:, None] * b * np.exp((f[:, None] + g - cost) / 12.0)
    assert_allclose(np.sum(dense, axis=1), a, atol=1e-13)
    error = np.sum(np.abs(np.sum(dense, axis=0) - b))
    assert error <= 1e-8
    assert_allclose(plan.marginal_error, error, atol=1e-14)
    values = np.random.default_rng(0).standard_normal((23, 4))
    near: Any = {"rtol": 1e-12, "atol": 1e-13}
    found = plan.apply(xp.array(values))
    xp.assert_like(found, xp.array(x), shape=(17, 4))
    assert_allclose(xp.numpy(found), dense @ values, **near)
    back = plan.apply_transpose(xp.array(values[:17]))
    assert_allclose(xp.numpy(back), dense.T @ values[:17], **near)
    assert_allclose(xp.numpy(plan.cost()), np.sum(dense * cost), rtol=1e-12)
    means = xp.numpy(plan.barycentric(xp.array(values)))[1:]
    assert_allclose(means, (dense @ values)[1:] / a[1:, None], **near)


def test_transport_says_where_it_stopped_too_early():
    x, y, _, _ = problem(9)
    with pytest.warns(RuntimeWarning, match="stopped after 2 iterations with marginals wrong by"):
        plan = sinkhorn(x, y, reg=0.1, max_iterations=2)
    assert plan.num_iterations == 2
    assert plan.marginal_error > 1e-9
    fixed = sinkhorn(x, y, reg=0.1, max_iterations=2, tolerance=None)
    assert_array_equal(fixed.g, plan.g)
    assert np.isnan(fixed.marginal_error)


def test_batches_of_transport_are_one_by_one():
    x, y = np.random.default_rng(0).standard_normal((2, 3, 12, 2))
    plans = sinkhorn(x, y, reg=0.5, max_iterations=20, tolerance=None)
    for i in range(3):
        plan = sinkhorn(x[i], y[i], reg=0.5, max_iterations=20, tolerance=None)
        assert_allclose(plans.f[i], plan.f, rtol=1e-11)
        assert_allclose(plans.cost()[i], plan.cost(), rtol=1e-11)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reg", [1.0, 1e-2])
def test_transport_of_a_cloud_to_itself_takes_few_updates(reg, weighted):
    x = np.random.default_rng(0).standard_normal((30, 2))
    a = np.arange(1.0, 31.0) if weighted else np.ones(30)
    plan = sinkhorn(x, x.copy(), reg=reg, a=a, b=a if weighted else None)
    assert plan.num_iterations <= 30  # alternating updates: more than 1,000
    a, square = a / np.sum(a), -2 * log_kernel(x, x, 1.0)
    dense = a[:, None] * a * np.exp((plan.f[:, None] + plan.g - square) / reg)
    assert_allclose(np.sum(dense, axis=0), a, atol=1e-9)
    assert_allclose(plan.apply(np.eye(30)), dense, atol=1e-12)
    assert_allclose(dense, dense.T, atol=1e-9)


def test_transport_broadcasts_and_masses_of_0_have_means():
    x, y, _, _ = problem(9, d=2)
    a = np.stack([np.ones(17), np.arange(17.0)])
    plans = sinkhorn(x, y, reg=9.0, a=a)
    single = sinkhorn(x, y, reg=9.0, a=a[1])
    assert_allclose(plans.barycentric(y)[1], single.barycentric(y), rtol=1e-8)
    log = single.g / 9.0 - np.sum((x[0] - y) ** 2, axis=1) / 9.0
    weight = np.exp(log - np.max(log))
    assert_allclose(single.barycentric(y)[0], weight @ y / np.sum(weight), rtol=1e-9)


# Mean shift and discrepancies ---------------------------------------------------------------------


def test_mean_shift_is_the_dense_loop_on_every_library(xp):
    x, y, weights, mask = problem(10, d=2)
    expected = x
    for _ in range(5):
        expected = dense_weights(expected, y[mask], 0.8, weights[mask]) @ y[mask]
    given = {"weights": xp.array(weights), "key_mask": xp.array(mask), "tolerance": None}
    found = mean_shift(xp.array(x), xp.array(y), bandwidth=0.8, max_iterations=5, **given)
    xp.assert_like(found, xp.array(x))
    assert_allclose(xp.numpy(found), expected, rtol=1e-12, atol=1e-12)


def test_mean_shift_stops_at_the_modes():
    rng = np.random.default_rng(0)
    data = np.concatenate([rng.normal(c, 1, (80, 2)) for c in (-5, 0, 5)])
    modes = mean_shift(data, data, bandwidth=1.5, tolerance=1e-6)
    near = np.rint(modes.mean(axis=1) / 5)
    assert_array_equal(near, np.repeat([-1, 0, 1], 80))
    # A step from a mode goes nowhere, and one from elsewhere does.
    again = mean_shift(modes, data, bandwidth=1.5, max_iterations=1)
    assert np.max(np.abs(again - modes)) < 1e-5
    early = mean_shift(data, data, bandwidth=1.5, tolerance=0.5)
    assert np.max(np.abs(early - modes)) > 0.01


def test_mean_shift_says_where_it_stopped_too_early():
    x, y, _, _ = problem(10, d=2)
    with pytest.warns(RuntimeWarning, match=r"mean_shift stopped after 2 steps .* max_iterations"):
        early = mean_shift(x, y, bandwidth=0.8, max_iterations=2)
    fixed = mean_shift(x, y, bandwidth=0.8, max_iterations=2, tolerance=None)
    assert_array_equal(fixed, early)


@pytest.mark.parametrize("unbiased", [False, True])
def test_discrepancies_are_the_dense_sums_on_every_library(xp, unbiased):
    x, y, b, _ = problem(11)
    a, b = np.arange(17.0), b / np.sum(b)
    a /= np.sum(a)

    def mean(x, y, a, b, same):
        kernel = np.exp(log_kernel(x, y, 0.9))
        if same and unbiased:
            np.fill_diagonal(kernel, 0)
            return a @ kernel @ b / (1 - np.sum(a * a))
        return a @ kernel @ b

    expected = mean(x, x, a, a, True) + mean(y, y, b, b, True) - 2 * mean(x, y, a, b, False)
    weights = {"x_weights": xp.array(a), "y_weights": xp.array(b)}
    found = mmd(xp.array(x), xp.array(y), bandwidth=0.9, unbiased=unbiased, **weights)
    assert found.dtype == xp.array(x).dtype
    assert_allclose(xp.numpy(found), expected, rtol=1e-12, atol=1e-14)


# Gradients ----------------------------------------------------------------------------------------


def losses(xp, x, y, bandwidth, w):
    """Something of every function, as one number, without a value inspected."""
    plan = sinkhorn(x, y, reg=0.7, b=w, max_iterations=1, tolerance=None)
    shifted = mean_shift(x, y, bandwidth=bandwidth, max_iterations=1, tolerance=None)
    fitted = local_regression(x, y, xp.sin(y), bandwidth=bandwidth, weights=w)
    log = log_sum_exp(x, y, bandwidth=bandwidth, weights=w)
    parts = [plan.cost(), shifted, fitted, log, mmd(x, y, bandwidth=bandwidth)]
    return sum(xp.sum(part * (i + 1)) for i, part in enumerate(parts))


def numerical(x, y, bandwidth, w):
    """Central differences of the loss in NumPy, one for each argument, along one direction."""
    rng, args = np.random.default_rng(1), [x, y, np.asarray(bandwidth), w]
    for i, array in enumerate(args):
        step = rng.standard_normal(array.shape)
        ends = []
        for sign in (1, -1):
            moved = [a + sign * 1e-6 * step if j == i else a for j, a in enumerate(args)]
            ends.append(losses(np, *moved))
        yield step, (ends[0] - ends[1]) / 2e-6


@pytest.mark.frameworks
def test_gradients_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, y, w, _ = problem(12, n=12, num_queries=7, near=0.5)
    args = [torch.asarray(a, dtype=torch.float64).requires_grad_() for a in (x, y, 0.8, w)]
    losses(torch, *args).backward()
    for argument, (step, expected) in zip(args, numerical(x, y, 0.8, w), strict=True):
        assert_allclose(np.sum(argument.grad.numpy() * step), expected, rtol=1e-6, atol=1e-7)
    kde_points = torch.asarray(x).requires_grad_()
    kernel_density(torch.asarray(y), 0.5).logpdf(kde_points).sum().backward()
    moved = gaussian_kde(y.T, 0.5)
    expected = [
        (moved.logpdf(x.T + 1e-6 * e[:, None]) - moved.logpdf(x.T - 1e-6 * e[:, None])) / 2e-6
        for e in np.eye(3)
    ]
    assert_allclose(kde_points.grad.numpy(), np.transpose(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.frameworks
def test_gradients_of_jax_inside_jit():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x, y, w, _ = problem(12, n=12, num_queries=7, near=0.5)
    with jax.enable_x64(True):
        args = [jax.numpy.asarray(a) for a in (x, y, 0.8, w)]
        gradient = jax.jit(jax.grad(lambda *a: losses(jax.numpy, *a), argnums=(0, 1, 2, 3)))
        found = [np.asarray(g) for g in gradient(*args)]
    for argument, (step, expected) in zip(found, numerical(x, y, 0.8, w), strict=True):
        assert_allclose(np.sum(argument * step), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.frameworks
def test_jax_without_float64_stays_in_float32():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x, y, w, _ = problem(13)
    with jax.enable_x64(False), warnings.catch_warnings():
        warnings.simplefilter("error")
        args = [jax.numpy.asarray(a, dtype="float32") for a in (x, y)]
        found = log_sum_exp(*args, bandwidth=0.1, weights=w)
    assert found.dtype == np.float32
    x, y = x.astype(np.float32), y.astype(np.float32)
    assert_allclose(found, dense_log_sum(x, y, 0.1, w), rtol=1e-5)


@pytest.mark.frameworks
def test_traced_values_without_a_result_are_nan():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = jax.numpy.asarray(problem(13)[0])
    calls = {
        "one constant": lambda z: kernel_density(z * jax.numpy.asarray([1, 1, 0]) + 0.3).pdf(z),
        "weights": lambda z: local_regression(z, z, z, bandwidth=1.0, weights=0 * z[:, 0]),
    }
    for name, call in calls.items():
        assert_array_equal(jax.jit(call)(x), np.nan, err_msg=name)
    with pytest.raises(np.linalg.LinAlgError, match="rank 2"):
        kernel_density(x * jax.numpy.asarray([1, 1, 0]))


@pytest.mark.frameworks
def test_integers_of_torch_are_not_rounded_to_its_default_dtype():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    times = 1_700_000_000 + torch.arange(6)[:, None]
    found = log_sum_exp(times, times, bandwidth=2.0)
    assert found.dtype == torch.float32
    expected = dense_log_sum(times.numpy(), times.numpy(), 2.0, np.ones(6))
    assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert kernel_density(times).logpdf(times).dtype == torch.float32


# Integers, empty arrays and mistakes --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int64", "bool"])
def test_integers_and_booleans_count_as_numbers(xp_any_shape, kind):
    xp = xp_any_shape
    rng = np.random.default_rng(0)
    x, y, points = (rng.integers(0, 5 if kind == "int64" else 2, (n, 2)) for n in (8, 9, 7))
    exact = [xp.array(a.astype(kind), kind) for a in (x, y, points)]
    floats = [xp.array(a.astype(float)) for a in (x, y, points)]
    w = np.arange(1, 10)
    calls = {
        "log": lambda x, y, p: log_sum_exp(x, y, bandwidth=1, weights=w),
        "shift": lambda x, y, p: mean_shift(p, y, bandwidth=1, tolerance=None, max_iterations=2),
        "mmd": lambda x, y, p: mmd(x, y, bandwidth=1, unbiased=True),
        "line": lambda x, y, p: local_regression(p, y, y, bandwidth=1),
        "plan": lambda x, y, p: sinkhorn(x, y, reg=1, tolerance=None, max_iterations=3).apply(y),
        "density": lambda x, y, p: kernel_density(y, weights=w)(p),
    }
    for name, call in calls.items():
        wanted = xp.numpy(call(*floats))
        assert_allclose(xp.numpy(call(*exact)), wanted, rtol=1e-6, err_msg=name)
        mixed = call(exact[0], floats[1], floats[2]) if name != "plan" else call(*exact)
        assert_allclose(xp.numpy(mixed), wanted, rtol=1e-6, err_msg=name)


ROWS = np.random.default_rng(0).standard_normal((6, 2))
PLAN, DENSITY = sinkhorn(ROWS, ROWS + 1, reg=4.0), kernel_density(ROWS)
ONES: Any = np.ones(6)
MASK = np.ones(6, dtype=bool)
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "log_sum_exp": (log_sum_exp, {"query": ROWS, "key": ROWS, "bandwidth": 1.0, "weights": ONES}),
    "scaled": (log_sum_exp, {"query": ROWS, "key": ROWS, "scale": 1.0, "key_mask": MASK}),
    "mean_shift": (
        mean_shift,
        {
            "points": ROWS,
            "data": ROWS,
            "bandwidth": 1.0,
            "weights": ONES,
            "key_mask": MASK,
            "max_iterations": 99,
            "tolerance": 1e-2,
        },
    ),
    "mmd": (
        mmd,
        {
            "x": ROWS,
            "y": ROWS,
            "bandwidth": 1.0,
            "x_weights": ONES,
            "y_weights": ONES,
            "unbiased": True,
        },
    ),
    "sinkhorn": (sinkhorn, {"x": ROWS, "y": ROWS, "reg": 1.0, "a": ONES, "b": ONES}),
    "local_regression": (
        local_regression,
        {
            "query": ROWS,
            "x": ROWS,
            "y": ROWS,
            "bandwidth": 1.0,
            "degree": 1,
            "weights": ONES,
            "key_mask": MASK,
            "ridge": 1.0,
        },
    ),
    "kernel_density": (kernel_density, {"dataset": ROWS, "weights": ONES, "layout": "rows"}),
    "logpdf": (DENSITY.logpdf, {"x": ROWS}),
    "evaluate": (DENSITY.evaluate, {"points": ROWS}),
    "integrate_gaussian": (DENSITY.integrate_gaussian, {"mean": ROWS[0], "cov": np.eye(2)}),
    "integrate_kde": (DENSITY.integrate_kde, {"other": DENSITY}),
    "resample": (DENSITY.resample, {"size": 3, "rng": 0}),
    "apply": (PLAN.apply, {"values": ROWS}),
    "apply_transpose": (PLAN.apply_transpose, {"values": ROWS}),
    "barycentric": (PLAN.barycentric, {"values": ROWS}),
}
MISTAKES: dict[str, Any] = {
    "text": "a",
    "negative": -1,
    "nan": np.nan,
    "flag": True,
    "object": object(),
    "texts": ["a", "b"],
    "complex": ROWS.astype(complex),
    "dates": np.ones((6, 2), "M8[s]"),
    "masked": np.ma.masked_array(ONES, ONES > 0),
    "short": ONES[:5],
    "few": ROWS[:5],
    "wide": np.ones((6, 3)),
    "axes": np.ones((3, 6, 2)),
    "weightless": 0 * ONES,
    "not finite": np.full((6, 2), np.inf),
    "empty": ROWS[:0],
    "no coordinate": ROWS[:, :0],
}
OF_THE_CORE = {"query", "key", "value", "key_bias", "feature_map", "points", "is_causal"}


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_is_named_by_the_argument_of_the_caller(name):
    function, good = CALLS[name]
    function(**good)
    foreign = OF_THE_CORE - set(inspect.signature(function).parameters)
    for argument in good:
        for mistake, wrong in MISTAKES.items():
            try:
                with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                    function(**{**good, argument: wrong})
            except (TypeError, ValueError) as error:
                said = str(error).partition(";")[0]
                words = set(re.findall(r"\w+", said))
                assert argument in words, (argument, mistake, said)
                assert not foreign & words, (argument, mistake, said)


NONE: Any = np.ones((0, 2))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mmd(ROWS[:1], ROWS, bandwidth=1.0, unbiased=True), "x must have at least 2 rows"),
        (lambda: mmd(ROWS, ROWS[:1], bandwidth=1.0, unbiased=True), "y must have at least 2 rows"),
        (lambda: mmd(NONE, ROWS, bandwidth=1.0), "x must have at least 1 rows"),
        (lambda: mmd(ROWS, NONE, bandwidth=1.0), "y must have at least 1 rows"),
        (
            lambda: mmd(ROWS, ROWS, bandwidth=1.0, unbiased=True, y_weights=np.eye(6)[0]),
            "y must have at least 2 rows that count .y_weights",
        ),
        (
            lambda: mmd(ROWS, ROWS, bandwidth=1.0, unbiased=True, x_weights=[1] + [1e-20] * 5),
            "x must have at least 2 rows",
        ),
        (lambda: mmd(ROWS, ROWS, bandwidth=1.0, x_weights=0 * ONES), "x must .*x_weights"),
        (lambda: sinkhorn(ROWS, ROWS, reg=1.0, a=0 * ONES), r"x must .* that count \(a positive"),
        (lambda: sinkhorn(ROWS, ROWS, reg=1.0, b=0 * ONES), r"y must .* that count \(b positive"),
        (lambda: sinkhorn(NONE, ROWS, reg=1.0), "x must have at least 1 rows"),
        (lambda: sinkhorn(ROWS, NONE, reg=1.0), "y must have at least 1 rows"),
        (lambda: sinkhorn(ROWS, np.nan * ROWS, reg=1.0), "x and y must be finite"),
        (lambda: mean_shift(ROWS, NONE, bandwidth=1.0), "data must have at least 1 rows"),
        (lambda: mean_shift(ROWS, ROWS, bandwidth=1.0, key_mask=~MASK), "data must have at"),
        (lambda: local_regression(ROWS, NONE, NONE, bandwidth=1.0), "x must have at least 1 rows"),
        (lambda: kernel_density(NONE), "dataset must have at least 2 rows"),
        (lambda: kernel_density(ROWS, weights=np.eye(6)[0]), "dataset must have at least 2 rows"),
        (lambda: kernel_density(ROWS, weights=np.ones((2, 6))), r"weights must have shape \(6,\)"),
        (lambda: DENSITY.integrate_gaussian([0, 0], -np.eye(2)), "cov must be positive semi-def"),
    ],
)
def test_sums_over_nothing_are_errors(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize("lead", [(), (0,)])
def test_sums_for_nothing_are_empty(lead):
    none, rows = np.ones((*lead, 0, 2)), np.ones((*lead, 6, 2))
    assert mean_shift(none, rows, bandwidth=1.0).shape == none.shape
    assert local_regression(none, rows, rows, bandwidth=1.0).shape == none.shape
    assert log_sum_exp(none, rows, bandwidth=1.0).shape == none.shape[:-1]
    if lead:
        assert mmd(rows, rows, bandwidth=1.0, unbiased=True).shape == lead
        assert sinkhorn(rows, rows, reg=1.0).apply(rows).shape == rows.shape


# Errors -------------------------------------------------------------------------------------------


X: Any = np.ones((4, 2))
WRONG: Any = 1


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: log_sum_exp(X, X), ValueError, "give scale or bandwidth, one of them"),
        (
            lambda: log_sum_exp(X, X, scale=1.0, bandwidth=1.0),
            ValueError,
            "give scale or bandwidth",
        ),
        (lambda: log_sum_exp(X, X, bandwidth=[1.0, -1]), ValueError, "bandwidth must be positive"),
        (lambda: log_sum_exp(X, X, bandwidth=[1.0] * 3), ValueError, r"one for each of 2 coord"),
        (lambda: log_sum_exp(X, X[:, :1], bandwidth=1.0), ValueError, "coordinates"),
        (lambda: sinkhorn(X, X, reg=1.0, max_iterations=0), ValueError, "max_iterations must be"),
        (lambda: local_regression(X, X, X, bandwidth=1.0, degree=2), ValueError, "degree must be"),
        (
            lambda: local_regression(X, X, X[:, 0], bandwidth=1.0),
            ValueError,
            r"y must have at least 2 axes .*; for one number in each row pass y\[:, None\]",
        ),
        (lambda: local_regression(X, X, X, bandwidth=1.0, ridge=0.0), ValueError, "ridge must be"),
        (lambda: kernel_density(X, "best"), ValueError, "bw_method must be 'scott'"),
        (lambda: kernel_density(X, layout=WRONG), ValueError, "layout must be 'rows' or 'scipy'"),
        (lambda: kernel_density(np.eye(4)[:, :3]).pdf(X), ValueError, "x must have 3 coordinates"),
        (
            lambda: kernel_density(np.eye(3)[:, :2]).integrate_gaussian([0.0], 1.0),
            ValueError,
            "mean",
        ),
    ],
)
def test_errors_say_what_was_wanted(call, error, said):
    with pytest.raises(error, match=said):
        call()

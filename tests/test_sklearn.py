"""Estimators for scikit-learn, against a dense float64 Nadaraya-Watson estimator."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less
from scipy.special import logsumexp
from sklearn import neighbors
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits
from sklearn.kernel_approximation import RBFSampler
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from linattn.sklearn import KernelClassifier, KernelDensity, KernelRegressor, RandomFeatures
from tests.attentions import assert_at_most

# Landmarks of so few rows are exact, so that what a check wants of a fit it gets.
ESTIMATORS = [
    KernelRegressor(),
    KernelRegressor(degree=1),
    KernelDensity(),
    KernelDensity(bandwidth="loo"),
    KernelRegressor(bandwidth=0.5, method="landmarks"),
    KernelClassifier(),
    KernelClassifier(bandwidth=0.5, method="landmarks"),
    RandomFeatures(),
    RandomFeatures(kernel="matern32", sampler="gaussian", compute_variance=True),
]


def log_kernel(X, rows, bandwidth):
    """Logarithm of the Gaussian of all distances, from the differences."""
    difference = (np.asarray(X)[:, None] - np.asarray(rows)) / bandwidth
    return -np.sum(difference.astype(np.float64) ** 2, axis=-1) / 2


def weighted_means(log_weight, y):
    """Dense means: weights relative to the largest of a row."""
    weight = np.exp(log_weight - np.max(log_weight, axis=1, keepdims=True))
    return weight @ y / np.sum(weight, axis=1, keepdims=True)


def nadaraya_watson(X, rows, y, bandwidth, weight):
    """The definition, in n_queries x n_rows memory."""
    return weighted_means(log_kernel(X, rows, bandwidth) + np.log(weight), y)


def brute_force_error(rows, y, bandwidth, weight):
    """Mean square error of each row from all others: one fit a row, one repeat less of it."""
    total = 0.0
    for i in range(len(rows)):
        less = weight.copy()
        less[i] = max(weight[i] - 1, 0)
        there = less > 0
        mean = nadaraya_watson(rows[i : i + 1], rows[there], y[there], bandwidth, less[there])
        total += weight[i] * np.mean((mean[0] - y[i]) ** 2)
    return total / np.sum(weight)


def problem(seed, n=60, d=3, outputs=2, scale=1.0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    X = scale * (rng.standard_normal((n, d)) + 3)
    y = np.sin(X[:, :1] / scale) + 0.1 * rng.standard_normal((n, outputs))
    queries = scale * (1.5 * rng.standard_normal((17, d)) + 3)
    return X.astype(dtype), y.astype(dtype), rng.exponential(size=n) + 0.1, queries.astype(dtype)


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_accepts(estimator: Any, check: Any) -> None:
    check(estimator)


# Kernel regression --------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 80),
    d=st.integers(1, 5),
    outputs=st.integers(1, 3),
    log_bandwidth=st.floats(-4, 3),
    log_scale=st.floats(-20, 20),
)
def test_means_are_those_of_the_dense_formula(seed, n, d, outputs, log_bandwidth, log_scale):
    scale = np.exp(log_scale)
    X, y, weight, queries = problem(seed, n, d, outputs, scale)
    bandwidth = scale * np.exp(log_bandwidth + np.random.default_rng(seed).random(d))
    model = KernelRegressor(bandwidth).fit(X, y, sample_weight=weight)
    expected = nadaraya_watson(queries, X, y, bandwidth, weight)
    assert_allclose(model.predict(queries), expected, rtol=1e-8, atol=1e-8)
    assert (model.method_, model.num_landmarks_, model.error_) == ("exact", None, 0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("distance", [1e3, 1e10, 1e30])
def test_far_from_all_rows_the_mean_is_that_of_the_nearest(dtype, distance):
    X = np.array([[0.0, 0.0], [1.0, 0.5], [-1.0, 3.0]], dtype=dtype)
    model = KernelRegressor(1e-2).fit(X, [1.0, 2.0, 3.0])
    queries = distance * np.array([[1.0, 0.1], [-1.0, 0.1], [0.0, 1.0]], dtype=dtype)
    assert_allclose(model.predict(queries), [2.0, 3.0, 3.0], rtol=1e-6)
    largest = np.full((1, 2), np.finfo(dtype).max / 4)
    assert_array_equal(np.isfinite(model.predict([*largest, *-largest])), True)


def test_float32_is_kept_and_near():
    X, y, weight, queries = problem(1, dtype=np.float32)
    model = KernelRegressor(0.5).fit(X, y, weight)
    means = model.predict(queries)
    assert means.dtype == np.float32
    assert_allclose(means, nadaraya_watson(queries, X, y, 0.5, weight), atol=1e-4)
    assert model.predict(queries.astype(np.float64)).dtype == np.float32
    assert KernelRegressor().fit(X, y[:, 0]).predict(queries).dtype == np.float32


def test_targets_far_from_zero_keep_their_digits():
    X, y, _, queries = problem(2, dtype=np.float32)
    shift = np.float32(4096)
    means = KernelRegressor(0.5).fit(X, y + shift).predict(queries)
    assert_allclose(means - shift, KernelRegressor(0.5).fit(X, y).predict(queries), atol=2e-3)


def test_rows_without_weight_do_not_count():
    X, y, weight, queries = problem(3)
    weight[::3] = 0
    X[0] = 1e9
    there = weight > 0
    expected = KernelRegressor().fit(X[there], y[there], weight[there])
    model = KernelRegressor().fit(X, y, weight)
    assert_array_equal(model.predict(queries), expected.predict(queries))


def test_a_fit_keeps_nothing_of_the_callers_arrays():
    X, y, _, queries = problem(4)
    model = KernelRegressor().fit(X, y)
    expected = model.predict(queries)
    X[:], y[:] = 0, 0
    model._choice = None
    assert_array_equal(model.predict(queries), expected)


def test_memory_does_not_grow_with_pairs():
    rng = np.random.default_rng(0)
    X, queries = rng.standard_normal((20_000, 4)), rng.standard_normal((4_000, 4))
    model = KernelRegressor(0.5, method="exact").fit(X, X[:, 0])
    tracemalloc.start()
    try:
        model.predict(queries)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20  # 8 bytes a pair would be 610 MiB


# Leave one out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_leave_one_out_is_that_of_one_fit_a_row(weighted, scale):
    X, y, weight, _ = problem(5, n=25, scale=scale)
    X[:3] *= 20  # rows whose own term would be all of their sum
    X[5] = X[4]
    weight = np.ceil(2 * weight) if weighted else np.ones(len(X))
    weight[7] = 0.3 if weighted else 1
    model = KernelRegressor().fit(X, y, weight)
    errors = [brute_force_error(X, y, h, weight) for h in model.loo_bandwidths_]
    assert_allclose(model.loo_errors_, errors, rtol=1e-8)
    assert model.bandwidth_ == model.loo_bandwidths_[np.argmin(errors)]
    assert 0 < np.argmin(errors) < len(errors) - 1
    assert_array_less(np.diff(model.loo_bandwidths_), 0)


def test_leave_one_out_of_drawn_rows_is_near_that_of_all():
    X, y, _, _ = problem(6, n=400)
    some = KernelRegressor(loo_samples=100, random_state=0).fit(X, y)
    every = KernelRegressor(loo_samples=400).fit(X, y)
    assert 0.5 < some.bandwidth_ / every.bandwidth_ < 2
    assert some.loo_errors_[0] != every.loo_errors_[0]


def test_equal_rows_have_a_bandwidth():
    model = KernelRegressor().fit(np.ones((4, 2)), [1.0, 2.0, 3.0, 4.0])
    assert_allclose(model.predict([[1.0, 1.0], [5.0, 1.0]]), 2.5)


# One batch after another --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"bandwidth": 0.4},
        {"method": "landmarks", "num_landmarks": 8},
        {"num_landmarks": 4, "tolerance": 0.5, "bandwidth": 2.0},
    ],
    ids=str,
)
def test_partial_fit_is_fit(parameters):
    X, y, weight, queries = problem(7, n=90)
    model = KernelRegressor(**parameters, random_state=3)
    whole = clone(model).fit(X, y, weight)
    for part in np.split(np.arange(90), [10, 11, 60]):
        model.partial_fit(X[part], y[part], weight[part])
    assert_array_equal(model.predict(queries), whole.predict(queries))
    assert model.bandwidth_ == whole.bandwidth_
    assert model.num_landmarks_ == whole.num_landmarks_ is not ("landmarks" in str(parameters))
    classes = np.array(["c", "a", "b"])[(y[:, 0] > 0).astype(int) + (y[:, 1] > 0.5)]
    whole_classes = KernelClassifier(**parameters, random_state=3).fit(X, classes, weight)
    parts = KernelClassifier(**parameters, random_state=3)
    for part in np.split(np.argsort(classes), [5, 50]):
        parts.partial_fit(X[part], classes[part], sample_weight=weight[part])
    assert_array_equal(parts.classes_, ["a", "b", "c"])
    order = np.argsort(classes)
    whole_classes.fit(X[order], classes[order], weight[order])
    assert_array_equal(parts.predict_proba(queries), whole_classes.predict_proba(queries))


def test_a_fit_forgets_what_was_there():
    X, y, _, queries = problem(8)
    model = KernelRegressor().fit(X, y)
    again = model.fit(X[:30, :2], y[:30]).predict(queries[:, :2])
    assert_array_equal(again, KernelRegressor().fit(X[:30, :2], y[:30]).predict(queries[:, :2]))


def test_batches_take_the_dtype_and_the_outputs_of_the_first():
    X, y, _, _ = problem(9, dtype=np.float32)
    model = KernelRegressor(0.5).partial_fit(X, y).partial_fit(X.astype(float), y)
    assert model.predict(X).dtype == np.float32
    with pytest.raises(ValueError, match="y must have the outputs of the rows before, 2, got None"):
        model.partial_fit(X, y[:, 0])


@pytest.mark.parametrize("weighted", [False, True])
def test_leave_one_out_of_lines_is_that_of_one_fit_a_row(weighted):
    X, y, weight, _ = problem(5, n=25, scale=1e3)
    weight = np.ceil(2 * weight) if weighted else np.ones(len(X))
    weight[7] = 0.3 if weighted else 1
    model = KernelRegressor(degree=1).fit(X, y, weight)
    errors = []
    for h in model.loo_bandwidths_:
        errors.append(0.0)
        for i in range(len(X)):
            less = weight.copy()
            less[i] = max(weight[i] - 1, 0)
            there = less > 0
            mean = dense_line(X[i : i + 1], X[there], y[there], h, less[there])
            errors[-1] += weight[i] * np.mean((mean[0] - y[i]) ** 2) / np.sum(weight)
    assert_allclose(model.loo_errors_, errors, rtol=1e-6)
    assert model.bandwidth_ == model.loo_bandwidths_[np.argmin(errors)]
    assert 0 < np.argmin(errors) < len(errors) - 1
    assert model.bandwidth_ > KernelRegressor().fit(X, y, weight).bandwidth_


# Lines --------------------------------------------------------------------------------------------


def dense_line(queries, rows, y, bandwidth, weight, ridge=1e-3):
    """Weighted least squares around each query, from differences to the query."""
    found = []
    for q in queries:
        log = log_kernel(q[None], rows, bandwidth) + np.log(weight)
        w = weighted_means(log, np.eye(len(rows)))[0]
        u = np.concatenate([np.ones((len(rows), 1)), (rows - q) / bandwidth], axis=1)
        penalty = np.diag([0.0, *[ridge] * rows.shape[1]])
        found.append(np.linalg.solve(u.T @ (w[:, None] * u) + penalty, u.T @ (w[:, None] * y))[0])
    return np.array(found)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 1e-5)])
def test_lines_are_weighted_least_squares(dtype, tolerance):
    X, y, weight, queries = problem(13, dtype=dtype)
    bandwidth = np.array([0.7, 0.9, 1.2])
    model = KernelRegressor(bandwidth, degree=1, ridge=1e-2).fit(X, y, weight)
    found = model.predict(queries)
    assert found.dtype == dtype
    expected = dense_line(queries, X, y, bandwidth, weight, ridge=1e-2)
    assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_lines_by_landmarks_are_near_exact_ones():
    X, y = surface(2000)
    exact = KernelRegressor(0.5, degree=1, method="exact").fit(X, y)
    model = KernelRegressor(0.5, degree=1, method="landmarks", random_state=0).fit(X, y)
    queries, _ = surface(300)
    difference = np.sqrt(np.mean((model.predict(queries) - exact.predict(queries)) ** 2))
    assert 0 < difference < 0.05 * np.std(y)
    assert difference < 2 * model.error_ * np.std(y)


# Densities ----------------------------------------------------------------------------------------


def brute_force_density(queries, rows, bandwidth, weight):
    log = log_kernel(queries, rows, bandwidth) + np.log(weight / np.sum(weight))
    volume = rows.shape[1] * np.log(bandwidth * np.sqrt(2 * np.pi))
    return logsumexp(log, axis=1) - volume


@pytest.mark.parametrize("bandwidth", [0.05, 0.3, 2.0, "scott", "silverman"])
def test_densities_are_those_of_scikit_learn(bandwidth):
    X, _, weight, queries = problem(14, d=2)
    ours = KernelDensity(bandwidth).fit(X, sample_weight=weight)
    # Where it is right: the algorithm that takes every row.
    theirs = neighbors.KernelDensity(bandwidth=bandwidth, algorithm="ball_tree", leaf_size=10_000)
    theirs.fit(X, sample_weight=weight)
    assert_allclose(ours.bandwidth_, theirs.bandwidth_, rtol=1e-15)
    assert_allclose(ours.score_samples(queries), theirs.score_samples(queries), rtol=1e-12)
    assert_allclose(ours.score(queries), theirs.score(queries), rtol=1e-12)
    expected = brute_force_density(queries, X, ours.bandwidth_, weight)
    assert_allclose(ours.score_samples(queries), expected, rtol=1e-12)
    X32, queries = X.astype(np.float32), queries.astype(np.float32)
    found = ours.fit(X32, sample_weight=weight).score_samples(queries)
    assert found.dtype == np.float32
    expected = brute_force_density(queries, X32, ours.bandwidth_, weight)
    assert_allclose(found, expected, rtol=1e-6)


def test_densities_of_eight_coordinates_are_right():
    rng = np.random.default_rng(0)
    X, queries = rng.standard_normal((1000, 8)), rng.standard_normal((200, 8))
    found = KernelDensity(0.3).fit(X).score_samples(queries)
    # scikit-learn 1.9.1 is off by up to 10 here: its row 140 is -36.037.
    assert_allclose(found[140], -39.394, atol=1e-3)
    assert_allclose(found, brute_force_density(queries, X, 0.3, np.ones(1000)), rtol=1e-12)


@pytest.mark.parametrize("bandwidth", ["scott", "silverman", "loo"])
def test_rows_without_weight_do_not_widen_a_density(bandwidth):
    X, _, _, queries = problem(14, d=2)
    weight = np.arange(60) % 3 == 0
    ours = KernelDensity(bandwidth).fit(X, sample_weight=weight)
    expected = KernelDensity(bandwidth).fit(X[weight])
    assert ours.bandwidth_ == expected.bandwidth_
    assert_allclose(ours.score_samples(queries), expected.score_samples(queries), rtol=1e-12)


def test_equal_rows_have_no_likeliest_bandwidth():
    with pytest.raises(ValueError, match=r"bandwidth='loo' must have rows that differ.*a number"):
        KernelDensity("loo").fit(np.full((5, 2), 0.1))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1e6])
def test_leave_one_out_of_densities_is_that_of_one_fit_a_row(weighted, scale):
    X, _, weight, _ = problem(15, n=25, scale=scale)
    weight = np.ceil(2 * weight) if weighted else np.ones(len(X))
    weight[7] = 0.3 if weighted else 1
    model = KernelDensity("loo").fit(X, sample_weight=weight)
    errors = []
    for h in model.loo_bandwidths_:
        errors.append(0.0)
        for i in range(len(X)):
            less = weight.copy()
            less[i] = max(weight[i] - 1, 0)
            there = less > 0
            log = brute_force_density(X[i : i + 1], X[there], h, less[there])[0]
            errors[-1] -= weight[i] * log / np.sum(weight)
    assert_allclose(model.loo_errors_, errors, rtol=1e-9)
    assert model.bandwidth_ == model.loo_bandwidths_[np.argmin(errors)]
    assert 0 < np.argmin(errors) < len(errors) - 1
    assert not hasattr(model.set_params(bandwidth=1.0).fit(X), "loo_errors_")


def test_samples_have_the_moments_of_the_density():
    # A mean of 40,000 draws is beyond 5 standard errors once in 1.7 million; six of them here.
    X, _, weight, _ = problem(16, n=30, d=2)
    weight[:3] = [0, 10, 5]
    model = KernelDensity(0.5).fit(X, sample_weight=weight)
    drawn, w = model.sample(40_000, random_state=0), weight / np.sum(weight)
    mean = w @ X
    cov = (X - mean).T @ (w[:, None] * (X - mean)) + 0.25 * np.eye(2)
    products = (drawn - mean)[:, :, None] * (drawn - mean)[:, None, :]
    for values, expected in ((drawn, mean), (products.reshape(-1, 4), cov.ravel())):
        error = (np.mean(values, axis=0) - expected) / (np.std(values, axis=0) / 200)
        assert np.max(np.abs(error)) < 5
    assert_array_equal(model.sample(3, random_state=1), model.sample(3, random_state=1))


# Landmarks ----------------------------------------------------------------------------------------


def surface(n):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (n, 2))
    return X, np.sin(2 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.standard_normal(n)


def test_landmarks_are_near_exact_where_the_bandwidth_is_wide():
    X, y = surface(4000)
    exact = KernelRegressor(0.5, method="exact").fit(X, y)
    model = KernelRegressor(0.5, tolerance=0.05, num_landmarks=64, random_state=0).fit(X, y)
    assert model.method_ == "landmarks"
    assert model.error_ <= 0.05
    queries, _ = surface(500)
    wanted = exact.predict(queries)
    difference = np.sqrt(np.mean((model.predict(queries) - wanted) ** 2)) / np.std(wanted)
    assert difference < 2 * model.error_


@pytest.mark.parametrize(("shift", "unit"), [(0, 8), (1024, 1), (-3, 0.25)])
def test_the_error_of_landmarks_is_in_deviations_of_exact(shift, unit):
    X, y = surface(1000)
    model = KernelRegressor(0.5, method="landmarks", num_landmarks=32, random_state=0)
    error = model.fit(X, y).error_
    assert error > 0
    assert_allclose(model.fit(X, unit * y + shift).error_, error, rtol=1e-6)


def test_auto_is_exact_where_the_bandwidth_is_narrow():
    X, y = surface(4000)
    model = KernelRegressor(0.01, num_landmarks=64, random_state=0).fit(X, y)
    assert model.method_ == "exact"
    failing = KernelRegressor(0.01, method="landmarks", num_landmarks=64, random_state=0)
    assert failing.fit(X, y).error_ > 0.2


# Kernel classification ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "landmarks"])
def test_probabilities_are_means_of_indicators(method):
    X, y, weight, queries = problem(10, n=200)
    labels = np.array(["no", "yes"])[(y[:, 0] > 0).astype(int)]
    model = KernelClassifier(0.3, method=method, num_landmarks=20, random_state=0)
    proba = model.fit(X, labels, weight).predict_proba(queries)
    assert_at_most(0, proba)
    assert_allclose(np.sum(proba, axis=1), 1, rtol=1e-12)
    assert model.method_ == method
    if method == "exact":
        indicators = (labels[:, None] == model.classes_).astype(float)
        assert_allclose(proba, nadaraya_watson(queries, X, indicators, 0.3, weight), atol=1e-10)
    assert_array_equal(model.predict(queries), model.classes_[np.argmax(proba, axis=1)])
    X32 = X.astype(np.float32)
    assert model.fit(X32, labels).predict_proba(queries).dtype == np.float32


def test_classes_may_be_named_before_they_come():
    X, _, _, queries = problem(11)
    model = KernelClassifier(0.5).partial_fit(X, np.ones(60, dtype=int), classes=[0, 1, 5])
    assert_array_equal(model.predict_proba(queries), np.tile([0.0, 1.0, 0.0], (17, 1)))


def test_classes_that_come_later_may_stand_before_others():
    X, y, _, queries = problem(12)
    labels = np.where(y[:, 0] > 0, "b", "d")
    labels[40:] = np.where(y[40:, 0] > 0, "a", "c")
    parts = KernelClassifier(0.5).partial_fit(X[:40], labels[:40]).partial_fit(X[40:], labels[40:])
    whole = KernelClassifier(0.5).fit(X, labels)
    assert_array_equal(parts.classes_, ["a", "b", "c", "d"])
    assert_array_equal(parts.predict_proba(queries), whole.predict_proba(queries))


def test_digits_are_recognized():
    X, y = load_digits(return_X_y=True)
    model = KernelClassifier().fit(X[:900], y[:900])
    assert model.score(X[900:], y[900:]) > 0.95


# In scikit-learn ----------------------------------------------------------------------------------


def test_pipelines_and_searches():
    X, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), KernelRegressor())
    search = GridSearchCV(pipeline, {"kernelregressor__bandwidth": [0.01, 2.0, "loo"]}, cv=3)
    search.fit(X, y)
    scores = search.cv_results_["mean_test_score"]
    assert scores[0] < 0.3 < scores[1] <= scores[2] + 0.02
    assert clone(search.best_estimator_).get_params().keys() == pipeline.get_params().keys()


def test_frames_of_pandas():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    model = KernelRegressor(0.05).fit(X, y)
    assert_array_equal(model.feature_names_in_, X.columns)
    values = KernelRegressor(0.05).fit(X.to_numpy(), y.to_numpy()).predict(X.to_numpy())
    assert_array_equal(model.predict(X), values)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X[X.columns[::-1]])
    frame = RandomFeatures(num_features=6).set_output(transform="pandas").fit_transform(X)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == [f"randomfeatures{i}" for i in range(6)]


@pytest.mark.parametrize(
    ("parameters", "error", "said"),
    [
        ({"degree": 2}, ValueError, "degree must be 0 or 1, got 2"),
        ({"ridge": 0.0}, ValueError, "ridge must be a positive finite number"),
        ({"bandwidth": 0}, ValueError, "bandwidth must be a positive finite number, got 0"),
        ({"bandwidth": "scott"}, ValueError, "bandwidth must be 'loo', .*, got 'scott'"),
        ({"bandwidth": [1.0, 2.0]}, ValueError, r"each of 3 coordinates, got shape \(2,\)"),
        ({"bandwidth": [1.0, -2.0, 1.0]}, ValueError, "bandwidth must be positive and finite"),
        ({"method": "fast"}, ValueError, "method must be one of auto, exact, .*, got 'fast'"),
        ({"num_landmarks": 0}, ValueError, "num_landmarks must be at least 1, got 0"),
        ({"num_landmarks": 2.5}, TypeError, "num_landmarks must be a positive integer"),
        ({"loo_samples": 0}, ValueError, "loo_samples must be at least 1, got 0"),
        ({"tolerance": -1}, ValueError, "tolerance must be a positive finite number"),
    ],
)
def test_wrong_parameters(parameters, error, said):
    X, y, _, _ = problem(0)
    with pytest.raises(error, match=said):
        KernelRegressor(**parameters).fit(X, y)


def test_wrong_rows():
    X, y, weight, _ = problem(0)
    with pytest.raises(ValueError, match="Negative values"):
        KernelRegressor().fit(X, y, -weight)
    with pytest.raises(ValueError, match=r"[Ww]eight"):
        KernelRegressor().fit(X, y, 0 * weight)
    with pytest.raises(ValueError, match=r"sample_weight must .* finite sum"):
        KernelRegressor().fit(X, y, 0 * weight + 1e308)
    with pytest.raises(ValueError, match=r"at least 2 rows .* got n_samples = 1; give a number"):
        KernelRegressor().fit(X[:1], y[:1])
    with pytest.raises(AttributeError, match="no bandwidth was tried: bandwidth=1 was given"):
        _ = KernelRegressor(1).fit(X, y).loo_errors_


# Random features ----------------------------------------------------------------------------------


def test_features_are_those_of_the_map():
    X, _, _, queries = problem(12)
    model = RandomFeatures(num_features=32, random_state=0).fit(X)
    features = model.transform(queries)
    assert features.shape == (17, 32)
    estimate = model.feature_map_.estimate(queries, queries)
    assert_allclose(features @ features.T, estimate, atol=1e-12)
    assert model.transform(queries.astype(np.float32)).dtype == np.float32
    assert model.bandwidth_ == pytest.approx(np.sqrt(3 * np.var(X) / 2))
    assert not hasattr(model, "variance_")


def test_bandwidth_is_that_of_gamma():
    X, _, _, queries = problem(13)
    ours = RandomFeatures(num_features=4000, random_state=0).fit(X).transform(queries)
    theirs = RBFSampler(gamma="scale", n_components=4000, random_state=0).fit(X).transform(queries)
    assert_allclose(ours @ ours.T, theirs @ theirs.T, atol=0.1)


@pytest.mark.parametrize("sampler", ["gaussian", "orthogonal", "stratified"])
def test_variance_is_that_of_the_map(sampler):
    """Of pairs of two rows; tests of the map compare it with draws."""
    X, _, _, _ = problem(14, n=40, d=4)
    model = RandomFeatures(num_features=16, sampler=sampler, compute_variance=True, random_state=0)
    pairs = ~np.eye(len(X), dtype=bool)
    wanted = np.mean(model.fit(X).feature_map_.variance(X, X)[pairs])
    assert model.variance_ == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("parameters", "error", "said"),
    [
        ({"num_features": 7}, ValueError, "num_features"),
        ({"kernel": "rbf"}, ValueError, "kernel must be one of"),
        ({"bandwidth": "loo"}, ValueError, "bandwidth must be 'scale' or a positive number"),
        ({"bandwidth": -1.0}, ValueError, "bandwidth must be a positive finite number"),
        ({"sampler": "normal"}, ValueError, "sampler"),
        ({"compute_variance": 1}, TypeError, "compute_variance must be True or False, got 1"),
        ({"sampler": "sobol", "compute_variance": True}, NotImplementedError, "sobol"),
    ],
)
def test_wrong_parameters_of_features(parameters, error, said):
    with pytest.raises(error, match=said):
        RandomFeatures(**parameters).fit(problem(0)[0])

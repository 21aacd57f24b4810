"""Random Fourier features: kernels against their spectra, exact variances, attention.

The tests of chance draw from fixed seeds; with fresh ones each comparison would fail falsely less
than once in 1e9 (`FALSE_ALARM`): all that is compared is bounded, so that the thresholds come from
exact variances by Bernstein's inequality, or from the Dvoretzky-Kiefer-Wolfowitz inequality.
"""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import integrate, stats

import linattn
from linattn import reference, sampling
from linattn.feature_maps.fourier import RandomFourierFeatures
from tests.attentions import assert_at_most

X = np.array([[0.3, -0.2, 0.5, 0.1]])
Y = np.array([[-0.1, 0.4, 0.2, 0.6]])
FALSE_ALARM = 1e-9

# Each kernel of t in one dimension, and the law of a coordinate of its rows.
KERNELS = {
    "gaussian": (lambda t: math.exp(-t * t / 2), stats.norm()),
    "laplace": (lambda t: math.exp(-t), stats.cauchy()),
    "exponential": (lambda t: math.exp(-t), stats.cauchy()),
    "cauchy": (lambda t: 1 / (1 + t * t), stats.laplace()),
    "matern32": (lambda t: (1 + math.sqrt(3) * t) * math.exp(-math.sqrt(3) * t), stats.t(3)),
    "matern52": (
        lambda t: (1 + math.sqrt(5) * t + 5 * t * t / 3) * math.exp(-math.sqrt(5) * t),
        stats.t(5),
    ),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
ISOTROPIC = ["gaussian", "exponential", "matern32", "matern52"]


def independent(kernel, columns=2, dim=4, *, rng=0, **options):
    return RandomFourierFeatures(
        dim, columns, kernel=kernel, sampler="gaussian", rng=rng, **options
    )


def box(num, dim, rng):
    """Rows uniform on [-1, 1]^d: the spectrum of a product of sin(t) / t."""
    return rng.uniform(-1, 1, (num, dim))


def box_kernel(x, y):
    t = x[..., :, None, :] - y[..., None, :, :]
    return np.prod(np.sinc(t / np.pi), axis=-1)


# Kernels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "answer"),
    [
        ("gaussian", 0.650509094723316545),
        ("exponential", 0.395595976643453647),
        ("matern32", 0.522918269595599941),
        ("matern52", 0.566647766825331103),
        ("laplace", math.exp(-1.8)),
        ("cauchy", 1 / (1.16 * 1.36 * 1.09 * 1.25)),
    ],
)
def test_known_kernels(kernel, answer):
    assert_allclose(RandomFourierFeatures(4, kernel=kernel).kernel(X, Y), [[answer]], rtol=1e-13)


def test_known_variances():
    assert_allclose(independent("gaussian").variance(X, Y), [[0.166370991637997796]], rtol=1e-13)
    # Four orthogonal rows: that of the softmax kernel without its factor exp(|x|^2 + |y|^2).
    answer = 0.045309579395857401 * math.exp(-0.96)
    phi = RandomFourierFeatures(4, 8, sampler="orthogonal")
    assert_allclose(phi.variance(X, Y), [[answer]], rtol=1e-12)


@each_kernel
@pytest.mark.parametrize("length", [1e-8, 1.0, 1e8])
def test_the_kernel_is_1_at_0_and_no_more_elsewhere(kernel, length):
    x = length * np.random.default_rng(0).standard_normal((40, 4))
    phi = independent(kernel, bandwidth=0.7)
    k = phi.kernel(x, x)
    assert_array_equal(np.diag(k), np.ones(40))
    assert_at_most(k, 1)
    assert_at_most(0, k)
    assert_array_equal(np.diag(phi.variance(x, x)), np.zeros(40))
    assert_at_most(0, phi.variance(x, x + 1e-5 * length * x[::-1]))
    assert_allclose(np.diag(phi.estimate(x, x)), np.ones(40), rtol=1e-14)


@each_kernel
def test_far_apart_the_kernel_is_0(kernel):
    x, y = np.full((1, 4), 1e200), np.full((1, 4), -1e200)
    phi = independent(kernel, 6)
    assert_array_equal(phi.kernel(x, y), [[0.0]])
    assert_array_equal(phi.variance(x, y), [[1 / 6]])


@each_kernel
def test_the_spectrum_has_the_kernel_as_its_mean(kernel):
    formula, law = KERNELS[kernel]
    phi = independent(kernel, dim=1)
    for t in (0.1, 0.7, 1.5, 4.0):
        x, y = np.array([[t / 2]]), np.array([[-t / 2]])
        mean, _ = integrate.quad(law.pdf, 0, np.inf, weight="cos", wvar=t, epsabs=1e-11)
        assert_allclose(phi.kernel(x, y), [[2 * mean]], rtol=0, atol=1e-9)
        assert_allclose(phi.kernel(x, y), [[formula(t)]], rtol=1e-13)
        # E cos^2 = (1 + E cos 2t) / 2
        twice, _ = integrate.quad(law.pdf, 0, np.inf, weight="cos", wvar=2 * t, epsabs=1e-11)
        variance = (1 + 2 * twice) / 2 - (2 * mean) ** 2
        assert_allclose(phi.variance(x, y), [[variance]], rtol=0, atol=1e-9)


def test_quadrature_nodes_as_rows_give_the_exact_mean_and_variance():
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights /= weights.sum()
    phi = RandomFourierFeatures.from_projection(
        nodes[:, None], bandwidth=1.3, log_weights=np.log(weights * 60)
    )
    x, y = np.array([[0.9]]), np.array([[-0.8], [0.2]])
    assert_allclose(phi.estimate(x, y), phi.kernel(x, y), rtol=1e-12)
    one_row = [
        RandomFourierFeatures.from_projection([[node]], bandwidth=1.3).estimate(x, y)
        for node in nodes
    ]
    square = np.tensordot(weights, np.square(one_row), axes=1)
    claimed = independent("gaussian", dim=1, bandwidth=1.3).variance(x, y)
    assert_allclose(square - phi.kernel(x, y) ** 2, claimed, rtol=1e-11)


@each_kernel
def test_bandwidth_divides_the_inputs(kernel):
    wide, one = (independent(kernel, 8, bandwidth=bandwidth) for bandwidth in (2.0, 1.0))
    assert wide.scale == 0.25
    for what in ("kernel", "variance", "estimate"):
        result = getattr(wide, what)(X, Y)
        assert_allclose(result, getattr(one, what)(X / 2, Y / 2), rtol=1e-13)


# Features ---------------------------------------------------------------------------------------


@each_kernel
def test_features_are_the_formula(kernel):
    phi = independent(kernel, 10, bandwidth=0.5)
    u = X @ phi.projection.T / 0.5
    expected = np.concatenate([np.cos(u), np.sin(u)], axis=-1) / math.sqrt(5)
    log, values = phi.query_features(X)
    assert_array_equal(log, [[0.0]])
    assert_allclose(values, expected, rtol=1e-13, atol=1e-15)
    mean = np.cos((X - Y) @ phi.projection.T / 0.5).mean()
    assert_allclose(phi.estimate(X, Y), [[mean]], rtol=1e-12)


def test_heads_have_rows_of_their_own():
    rows = np.random.default_rng(4).standard_normal((3, 6, 4))
    heads = RandomFourierFeatures.from_projection(rows, kernel="matern32")
    x, y = np.random.default_rng(5).standard_normal((2, 3, 8, 4))
    out = linattn.linear_attention(x, y, y, heads)
    for h in range(3):
        phi = RandomFourierFeatures.from_projection(rows[h], kernel="matern32")
        assert_allclose(heads.estimate(x, y)[h], phi.estimate(x[h], y[h]), rtol=1e-12, atol=1e-14)
        assert_allclose(out[h], reference.kernel_attention(x[h], y[h], y[h], phi), rtol=1e-9)


# Chance -----------------------------------------------------------------------------------------


def bernstein(variance, draws):
    """What the mean of draws within 2 of their mean may be off by."""
    log = math.log(2 / FALSE_ALARM)
    first = 2 * log / (3 * draws)
    return first + math.sqrt(first**2 + 2 * variance * log / draws)


@each_kernel
def test_coordinates_of_the_rows_follow_their_law(kernel):
    # Sees a distribution function that is off by 0.03 anywhere.
    allowed = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * 50_000))
    direction = np.array([0.6, 0.0, -0.8])
    for sampler in ("gaussian", "orthogonal"):
        phi = RandomFourierFeatures(3, 300_000, kernel=kernel, sampler=sampler, rng=13)
        # Every third row: those of one block depend on each other.
        rows = phi.projection[::3]
        assert stats.kstest(rows[:, 1], KERNELS[kernel][1].cdf).statistic < allowed
        if kernel in ISOTROPIC:
            assert stats.kstest(rows @ direction, KERNELS[kernel][1].cdf).statistic < allowed


@each_kernel
@pytest.mark.parametrize("sampler", ["gaussian", "orthogonal"])
def test_the_estimate_is_unbiased(kernel, sampler):
    # Sees a bias of 0.025, and of 0.05 with orthogonal rows. Rows at one place of their blocks are
    # independent, and by convexity the bound at one place holds for the mean over places.
    rows = 150_000
    draws = rows if sampler == "gaussian" else rows // 3
    rng = np.random.default_rng(17)
    phi = RandomFourierFeatures(3, 2 * rows, kernel=kernel, sampler=sampler, rng=rng)
    one = independent(kernel, 2, dim=3)
    x, y = rng.standard_normal((2, 6, 3))
    for a, b in zip(0.6 * x, 0.6 * y, strict=True):
        kernel_value = one.kernel(a[None], b[None])
        variance = one.variance(a[None], b[None])
        error = np.abs(phi.estimate(a[None], b[None]) - kernel_value)
        assert error < bernstein(float(variance[0, 0]), draws)


def test_coupled_rows_of_the_gaussian_kernel_have_the_claimed_variance():
    # Squares of block means lie in [0, 1]. The rows' coupling takes away more than twice what
    # chance is allowed.
    d, blocks = 3, 40_000
    x, y = np.array([[0.9, 0.0, 0.6]]), np.array([[-0.4, 0.5, -0.1]])
    phi = RandomFourierFeatures(d, 2 * d)
    claimed, kernel = phi.variance(x, y), phi.kernel(x, y)
    allowed = bernstein(0.25, blocks)
    assert independent("gaussian", 2 * d, d).variance(x, y) - claimed > 2 * allowed
    rows = sampling.orthogonal(d, d, 23, batch_shape=(blocks,))
    means = np.cos(rows @ (x - y)[0]).mean(axis=-1)
    assert abs(np.mean(means**2) - kernel**2 - claimed) < allowed


# Samplers that know less ------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "gaussian"])
def test_the_variance_of_coupled_rows_says_what_is_missing(kernel):
    phi = RandomFourierFeatures(4, kernel=kernel)
    message = f"kernel='{kernel}' needs .*two rows of one block.*sampler='gaussian'"
    with pytest.raises(NotImplementedError, match=message):
        phi.variance(X, Y)
    assert_array_equal(phi.mean(X, Y), phi.kernel(X, Y))


@each_kernel
def test_of_a_sampler_of_normal_rows_without_claims_nothing_is_known(kernel):
    phi = RandomFourierFeatures(
        4, 8, kernel=kernel, sampler=lambda num, dim, rng: box(num, dim, rng)
    )
    assert not phi.unbiased
    for what in (phi.variance, phi.mean):
        with pytest.raises(NotImplementedError, match="known"):
            what(X, Y)
    given = RandomFourierFeatures.from_projection(phi.projection, kernel=kernel)
    assert given == phi
    assert_array_equal(given.kernel(X, Y), phi.kernel(X, Y))
    for what in (given.variance, given.mean):
        with pytest.raises(NotImplementedError, match="known"):
            what(X, Y)
    with pytest.raises(ValueError, match="redraw needs a sampler"):
        given.redraw(0)


def test_a_biased_sampler_states_the_mean(monkeypatch):
    asked = []

    def mean_factor(self, kind, sq_norm, num, dim, *, A=0.0):
        asked.append((kind, round(float(sq_norm[0, 0]), 12), num, dim))
        return np.full_like(sq_norm, 0.5)

    monkeypatch.setattr(sampling.Sampler, "mean_factor", mean_factor)
    biased = dataclasses.replace(sampling.gaussian, unbiased=False)
    phi = RandomFourierFeatures(4, 8, bandwidth=2.0, sampler=biased, rng=0)
    assert not phi.unbiased
    assert_allclose(phi.mean(X, Y), 0.5 * phi.kernel(X, Y), rtol=1e-14)
    assert asked == [("trigonometric", 0.215, 4, 4)]
    mixed = RandomFourierFeatures(4, 8, kernel="matern32", sampler=biased, rng=0)
    with pytest.raises(NotImplementedError, match="not known to be unbiased"):
        mixed.mean(X, Y)


# A spectrum of the user's own -------------------------------------------------------------------


def test_a_spectrum_of_the_users():
    phi = RandomFourierFeatures(4, 200_000, kernel=box_kernel, sampler=box, bandwidth=0.5, rng=0)
    assert np.abs(phi.projection).max() <= 1
    assert_allclose(phi.kernel(X, Y), box_kernel(2 * X, 2 * Y), rtol=1e-14)
    k, k2 = box_kernel(2 * X, 2 * Y), box_kernel(4 * X, 4 * Y)
    assert_allclose(phi.variance(X, Y), (1 + k2 - 2 * k**2) / 200_000, rtol=1e-12)
    variance = 100_000 * float(phi.variance(X, Y)[0, 0])
    assert abs(phi.estimate(X, Y) - k) < bernstein(variance, 100_000)
    assert phi.unbiased
    assert_array_equal(phi.mean(X, Y), phi.kernel(X, Y))
    assert phi == phi.redraw(0)
    assert phi == pickle.loads(pickle.dumps(phi))


def test_a_spectrum_whose_kernel_is_not_known():
    phi = RandomFourierFeatures(4, 8, kernel=None, sampler=box, rng=0)
    assert not phi.unbiased
    assert_allclose(np.diag(phi.estimate(X, X)), 1, rtol=1e-14)
    for what in ("kernel", "variance"):
        with pytest.raises(NotImplementedError, match=f"the {what} needs the kernel"):
            getattr(phi, what)(X, Y)
    with pytest.raises(NotImplementedError, match="known"):
        phi.mean(X, Y)
    assert phi.redraw(0) == phi


# Random Feature Attention -----------------------------------------------------------------------


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@each_kernel
def test_normalizing_is_the_same_as_normalized_inputs(kernel):
    plain = independent(kernel, 8, bandwidth=0.7)
    phi = independent(kernel, 8, bandwidth=0.7, normalize=True)
    assert phi != plain
    assert phi.fingerprint() != plain.fingerprint()
    for what in ("kernel", "variance", "estimate"):
        expected = getattr(plain, what)(unit(X), unit(Y))
        assert_allclose(getattr(phi, what)(3 * X, Y / 7), expected, rtol=1e-12)
    again = RandomFourierFeatures.from_projection(
        phi.projection, kernel=kernel, bandwidth=0.7, normalize=True
    )
    assert again == phi == phi.redraw(0)
    assert_array_equal(again.query_features(X).values, phi.query_features(X).values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normalizing_what_is_zero_tiny_huge_or_not_finite(xp, dtype):
    phi = RandomFourierFeatures(4, 8, bandwidth=0.5, normalize=True, rng=0)
    rows = np.array([X[0], 1e-35 * X[0], 1e35 * X[0], 0 * X[0], X[0], X[0], X[0]])
    rows[4, 1], rows[5, 1], rows[6, 1] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):  # Dask computes only when asked
        values = xp.numpy(phi.query_features(xp.array(rows, dtype)).values)
    assert_allclose(values[1:3], values[[0, 0]], rtol=0, atol=1e-5)
    # No direction: the cosines are 1 and the sines 0.
    assert_allclose(values[3], [0.5] * 4 + [0.0] * 4, rtol=1e-6)
    assert_array_equal(values[4:], np.nan)
    zero = np.zeros((1, 4))
    assert_allclose(phi.kernel(zero, Y), [[math.exp(-1 / (2 * 0.25))]], rtol=1e-13)
    assert_allclose(phi.kernel(zero, zero), [[1.0]], rtol=0)


def test_a_row_whose_phases_have_no_digits_is_nan(xp):
    phi = RandomFourierFeatures(4, 8, rng=0)
    x = np.array([X[0], 1e20 * X[0]], dtype=np.float32)
    log, _ = phi.query_features(xp.array(x))
    with np.errstate(over="ignore", invalid="ignore"):  # Dask computes only when asked
        log = xp.numpy(log)
    assert log[0] == 0
    assert np.isnan(log[1])


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": "rbf"}, ValueError, r"kernel must be one of \['cauchy', .*got 'rbf'"),
        ({"kernel": 3}, TypeError, "kernel must be one of .* got 3"),
        ({"kernel": box_kernel}, ValueError, "sampler must be a callable .*'orthogonal'"),
        ({"kernel": None}, ValueError, "sampler must be a callable .*kernel=None"),
        ({"bandwidth": 0}, ValueError, "bandwidth must be a positive finite number, got 0"),
        ({"bandwidth": np.inf}, ValueError, "bandwidth must be a positive finite number, got inf"),
        ({"bandwidth": "1"}, TypeError, "bandwidth must be a real number"),
        ({"normalize": 1}, TypeError, "normalize must be True or False, got 1"),
        ({"num_features": 7}, ValueError, "num_features must be even.*got 7"),
        ({"dim": 0}, ValueError, "dim must be at least 1"),
        ({"sampler": "normal"}, ValueError, "sampler must be one of"),
        ({"rng": True}, TypeError, "rng must be"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        RandomFourierFeatures(**{"dim": 4} | options)


def test_bad_projections():
    make = RandomFourierFeatures.from_projection
    rows = np.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"\(rows, dim\) with normalize=True, got \(2, 3, 4\)"):
        make(rows, normalize=True)
    with pytest.raises(ValueError, match=r"log_weights must be .*\(3,\).*got shape \(2,\)"):
        make(rows[0], log_weights=[0.0, 0.0])
    with pytest.raises(ValueError, match="log_weights must be finite"):
        make(rows[0], log_weights=[0.0, 0.0, np.nan])
    with pytest.raises(ValueError, match="projection must be finite"):
        make(rows[0] * np.inf)
    with pytest.raises(ValueError, match="kernel must be one of"):
        make(rows, kernel="rbf")

"""Feature maps: formulas, kernels and variances, and what a map is as an object."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, assignment, attr-defined, call-arg, union-attr"

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import sampling
from linattn.feature_maps import (
    ActivationFeatures,
    EluFeatures,
    HyperbolicFeatures,
    PolynomialFeatures,
    PositiveFeatures,
    RandomFourierFeatures,
    ReluFeatures,
    TaylorFeatures,
    TrigonometricFeatures,
)
from tests.attentions import assert_at_most, normals
from tests.every_map import EVERY, ignored

SOFTMAX_MAPS = [PositiveFeatures, HyperbolicFeatures, TrigonometricFeatures]
RANDOM_MAPS = [*SOFTMAX_MAPS, ActivationFeatures]
PAIRED = {HyperbolicFeatures, TrigonometricFeatures}
FOURIER = ("gaussian", "laplace", "exponential", "cauchy", "matern32", "matern52")
STEPS = ("heaviside", "relu", "squared_relu")

each_softmax_map = pytest.mark.parametrize("cls", SOFTMAX_MAPS)
each_random_map = pytest.mark.parametrize("cls", RANDOM_MAPS)

MAPS = {
    "positive": PositiveFeatures(4, 6, rng=1, scale=0.7),
    "positive-gaussian": PositiveFeatures(4, 6, rng=1, sampler="gaussian"),
    "hyperbolic": HyperbolicFeatures(4, 6, rng=1),
    "trigonometric": TrigonometricFeatures(4, 6, rng=1),
    "weights": PositiveFeatures.from_projection(
        np.random.default_rng(2).standard_normal((6, 4)), log_weights=np.linspace(-1, 1, 6)
    ),
    "heads": HyperbolicFeatures.from_projection(
        np.random.default_rng(2).standard_normal((2, 3, 4))
    ),
    "activation": ActivationFeatures(4, 6, rng=1, epsilon=0.01),
    "activation-unprojected": ActivationFeatures(sampler=None, epsilon=0.25, scale=2.0),
    "elu": EluFeatures(scale=2.0),
    "relu": ReluFeatures(4),
}
each_map = pytest.mark.parametrize("name", MAPS)


def rows_of(cls, columns):
    return columns // 2 if cls in PAIRED else columns


def phi(feature_map, x, side="query"):
    """Features as plain numbers."""
    log, values = getattr(feature_map, f"{side}_features")(x)
    if values is None:
        return np.exp(log)
    return values if log is None else values * np.exp(log)


# Known answers ----------------------------------------------------------------------------------
# Closed forms, checked against quadrature when they were derived; d = 4, scale = 1.

X = np.array([[0.3, -0.2, 0.5, 0.1]])
Y = np.array([[-0.1, 0.4, 0.2, 0.6]])


def made(cls, columns, sampler, **options):
    return cls(4, columns, scale=1.0, sampler=sampler, rng=0, **options)


@pytest.mark.parametrize(
    ("feature_map", "answer"),
    [
        (made(PositiveFeatures, 1, "gaussian"), 2.08476235804053705),
        (made(HyperbolicFeatures, 2, "gaussian"), 0.681242162970000723),
        (made(TrigonometricFeatures, 2, "gaussian"), 0.434510532140865851),
        (made(PositiveFeatures, 4, "orthogonal"), 0.46161258773687673),
        (made(PositiveFeatures, 8, "orthogonal"), 0.230806293868438365),
        (made(PositiveFeatures, 6, "orthogonal"), 0.31656809579099301),
        (made(HyperbolicFeatures, 8, "orthogonal"), 0.110732538969242649),
        (made(TrigonometricFeatures, 8, "orthogonal"), 0.045309579395857401),
        (made(ActivationFeatures, 1, "gaussian", epsilon=0.0), 0.064123759142774094),
    ],
    ids=lambda p: repr(p) if not isinstance(p, float) else "",
)
def test_known_variances(feature_map, answer):
    assert_allclose(feature_map.variance(X, Y), [[answer]], rtol=1e-10)
    # Independent rows: the variance is that of one row over their number.
    if feature_map.sampler == "gaussian":
        more = made(type(feature_map), 7 * feature_map.num_features, "gaussian")
        if isinstance(feature_map, ActivationFeatures):
            more = made(ActivationFeatures, 7, "gaussian", epsilon=0.0)
        assert_allclose(more.variance(X, Y), [[answer / 7]], rtol=1e-10)


# Formulas by hand -------------------------------------------------------------------------------


def by_hand(feature_map, x):
    """Features of one vector as the docstrings state them, in Python floats."""
    root = math.sqrt(feature_map.scale)
    x = [root * float(c) for c in x]
    square = sum(c * c for c in x)
    if isinstance(feature_map, EluFeatures):
        return [c + 1 if c > 0 else math.exp(c) for c in x]
    if isinstance(feature_map, ReluFeatures):
        return [max(c, 0.0) for c in x]
    if isinstance(feature_map, ActivationFeatures) and feature_map.projection is None:
        return [max(c, 0.0) + feature_map.epsilon for c in x]
    dots = [sum(w * c for w, c in zip(row, x, strict=True)) for row in feature_map.projection]
    r = len(dots)
    if isinstance(feature_map, ActivationFeatures):
        return [(max(u, 0.0) + feature_map.epsilon) / math.sqrt(r) for u in dots]
    log_weights = feature_map.log_weights
    weights = [1.0] * r if log_weights is None else [math.exp(w / 2) for w in log_weights]
    pairs = list(zip(weights, dots, strict=True))
    if isinstance(feature_map, PositiveFeatures):
        return [w * math.exp(u - square / 2) / math.sqrt(r) for w, u in pairs]
    if isinstance(feature_map, HyperbolicFeatures):
        norm = math.sqrt(2 * r)
        return [w * math.exp(sign * u - square / 2) / norm for sign in (1, -1) for w, u in pairs]
    return [
        w * f(u) * math.exp(square / 2) / math.sqrt(r)
        for f in (math.cos, math.sin)
        for w, u in pairs
    ]


@pytest.mark.parametrize("name", [n for n in MAPS if n != "heads"])
def test_features_and_estimate_by_hand(name):
    feature_map = MAPS[name]
    x, y = normals((3, 4), (5, 4))
    expected = np.array([by_hand(feature_map, row) for row in x])
    for side in ("query", "key"):
        assert_allclose(phi(feature_map, x, side), expected, rtol=1e-13)
    products = np.array(
        [
            [math.fsum(a * b for a, b in zip(p, q, strict=True)) for q in map_rows(feature_map, y)]
            for p in expected.tolist()
        ]
    )
    scale = np.abs(expected).max() * np.abs(map_rows(feature_map, y)).max()
    assert_allclose(feature_map.estimate(x, y), products, rtol=1e-12, atol=1e-13 * scale)


def map_rows(feature_map, y):
    return [by_hand(feature_map, row) for row in y]


def test_heads_have_projections_of_their_own():
    feature_map = MAPS["heads"]
    x, y = normals((3, 4), (2, 5, 4))
    estimate = feature_map.estimate(x, y)
    assert estimate.shape == (2, 3, 5)
    for head in range(2):
        alone = HyperbolicFeatures.from_projection(feature_map.projection[head])
        assert_allclose(estimate[head], alone.estimate(x, y[head]), rtol=1e-14)
        assert_array_equal(phi(feature_map, x)[head], phi(alone, x))


def test_features_of_large_inputs_stay_in_the_log():
    x = np.array([[1e3, 0.0]])
    log = PositiveFeatures.from_projection([[3.0, 4.0]], scale=1.0).query_features(x).log
    assert_allclose(log, [[3e3 - 5e5]], rtol=1e-15)
    # Elu features that would underflow are logs.
    log, values = EluFeatures().query_features(np.array([[-1000.0, -1001.0, 1.0]]))
    assert_allclose(log, [[-1000.0, -1001.0, math.log(2)]], rtol=1e-15)
    assert values is None


def test_estimate_has_no_stabilizer_left():
    # One feature is e^800, the other e^-800: neither is a float64, their product is 1.
    feature_map = PositiveFeatures.from_projection([[40.0]], scale=1.0)
    x, y = np.array([[40.0]]), np.array([[40 - math.sqrt(3200)]])
    assert_allclose(feature_map.query_features(x).log, [[800]], rtol=1e-14)
    assert_allclose(feature_map.key_features(y).log, [[-800]], rtol=1e-14)
    assert_allclose(feature_map.estimate(x, y), [[1.0]], rtol=1e-11)


# Exact means and variances by quadrature ---------------------------------------------------------


def normal_nodes(number):
    """Gauss-Hermite nodes and weights of N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(number)
    return nodes, weights / weights.sum()


@each_softmax_map
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_quadrature_rows_with_weights_give_the_kernel(cls, scale):
    nodes, weights = normal_nodes(40)
    feature_map = cls.from_projection(
        nodes[:, None], scale=scale, log_weights=np.log(weights * len(nodes))
    )
    x = np.linspace(-1.2, 1.2, 9)[:, None]
    exact = np.exp(scale * x * x.T)
    assert_allclose(feature_map.kernel(x, x), exact, rtol=1e-14)
    assert_allclose(feature_map.estimate(x, x), exact, rtol=1e-12)


@each_softmax_map
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_variance_of_one_row_by_quadrature(cls, scale):
    nodes, weights = normal_nodes(60)
    # A head for each node, with that one row.
    rows = cls.from_projection(nodes[:, None, None], scale=scale)
    x, y = np.linspace(-1.2, 1.2, 5)[:, None], np.linspace(-1, 0.8, 4)[:, None]
    estimates = rows.estimate(x, y)
    mean = np.tensordot(weights, estimates, axes=1)
    assert_allclose(mean, rows.kernel(x, y), rtol=1e-12)
    variance = np.tensordot(weights, (estimates - mean) ** 2, axes=1)
    # In one dimension blocks are single rows: both samplers draw them independently.
    for sampler in ("gaussian", "orthogonal"):
        single = cls(
            1,
            len(rows.projection[0]) * (2 if cls in PAIRED else 1),
            scale=scale,
            sampler=sampler,
            rng=0,
        )
        assert_allclose(single.variance(x, y), variance, rtol=1e-11, atol=1e-14)


def chi_nodes(number):
    """Nodes and weights for the norm of a normal vector of the plane."""
    nodes, weights = np.polynomial.legendre.leggauss(number)
    r = 6 * (nodes + 1)
    return r, 6 * weights * r * np.exp(-r * r / 2)


@each_softmax_map
def test_variance_of_an_orthogonal_block_by_quadrature(cls):
    # d = 2: a rotation, a reflection, two norms; every block of two rows is one head.
    r, weights = chi_nodes(40)
    angles = 2 * np.pi * np.arange(48) / 48
    first = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    second = np.stack([-np.sin(angles), np.cos(angles)], axis=-1)
    blocks = [
        np.stack([first, sign * second], axis=-2)[:, None, None]
        * np.stack(np.broadcast_arrays(r[:, None], r[None, :]), axis=-1)[None, ..., None]
        for sign in (1, -1)
    ]
    feature_map = cls.from_projection(np.stack(blocks), scale=1.0)
    x, y = np.array([[0.5, -0.3]]), np.array([[0.2, 0.4], [-0.5, 0.3], [0.5, -0.3]])
    estimates = feature_map.estimate(x, y).mean(axis=(0, 1))[..., 0, :]
    squares = (feature_map.estimate(x, y) ** 2).mean(axis=(0, 1))[..., 0, :]
    mean, square = (np.einsum("i,j,ijk->k", weights, weights, a) for a in (estimates, squares))
    kernel = feature_map.kernel(x, y)[0]
    assert_allclose(mean, kernel, rtol=1e-11)
    drawn = cls(2, 4 if cls in PAIRED else 2, scale=1.0, rng=0)
    assert_allclose(drawn.variance(x, y)[0], square - kernel**2, rtol=1e-9, atol=1e-11)


# Chance -----------------------------------------------------------------------------------------


def kurtosis_of_one_row(cls, x, y):
    """Fourth standardized moment of one row's estimate, exact: it depends on one projection."""
    nodes, weights = normal_nodes(80)
    along = x - y if cls is TrigonometricFeatures else x + y
    size = float(np.linalg.norm(along))
    # In one dimension: the same |x|, |y| terms are a constant factor that drops out.
    f = np.cos if cls is TrigonometricFeatures else np.cosh if cls in PAIRED else np.exp
    values = f(size * nodes)
    values = values - weights @ values
    return (weights @ values**4) / (weights @ values**2) ** 2


@each_softmax_map
@pytest.mark.parametrize("sampler", ["gaussian", "orthogonal"])
def test_empirical_variance_is_the_closed_form(cls, sampler):
    # Squared norm of x + y (x - y) .25: there the sample variance of 20,000 draws is known to
    # 1 %; six of its standard errors fail by chance less than once in 1e8.
    d, draws = 16, 20_000
    rows = sampling.SAMPLERS[sampler](d, d, 11, batch_shape=(draws,))
    x = np.full((1, d), 0.25 / math.sqrt(d))
    y = -x if cls is TrigonometricFeatures else x.copy()
    estimates = cls.from_projection(rows, scale=1.0).estimate(x, y)[:, 0, 0]
    columns = 2 * d if cls in PAIRED else d
    exact = cls(d, columns, scale=1.0, sampler=sampler, rng=0).variance(x, y)[0, 0]
    # Orthogonal blocks have lighter tails than independent rows (2.70 against 3.37 for exp).
    kurtosis = 3 + (kurtosis_of_one_row(cls, x, y) - 3) / d
    standard_error = math.sqrt((max(kurtosis, 3) - 1) / draws)
    assert abs(estimates.var() / exact - 1) < 6 * standard_error
    kernel = cls.from_projection(rows[0], scale=1.0).kernel(x, y)[0, 0]
    assert abs(estimates.mean() - kernel) < 6 * math.sqrt(exact / draws)


# The scale --------------------------------------------------------------------------------------


@each_softmax_map
def test_the_scale_is_that_of_the_logits(cls):
    assert cls(16, rng=0).scale == 0.25
    assert cls.from_projection(np.ones((3, 16))).scale == 0.25
    x, y = normals((3, 4), (5, 4))
    unit, scaled = cls(4, 8, scale=1.0, rng=0), cls(4, 8, scale=0.3, rng=0)
    root = math.sqrt(0.3)
    assert_array_equal(unit.projection, scaled.projection)
    assert_allclose(scaled.kernel(x, y), np.exp(0.3 * x @ y.T), rtol=1e-14)
    for what in ("kernel", "estimate", "variance"):
        expected = getattr(unit, what)(root * x, root * y)
        assert_allclose(getattr(scaled, what)(x, y), expected, rtol=1e-11)


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: EluFeatures(scale=scale),
        lambda scale: ReluFeatures(scale=scale),
        lambda scale: ActivationFeatures(4, 8, scale=scale, sampler="gaussian", rng=0),
        lambda scale: ActivationFeatures(sampler=None, scale=scale),
    ],
)
def test_other_maps_scale_both_sides_by_its_root(make):
    assert make(1.0).scale == 1.0
    x, y = normals((3, 4), (5, 4))
    root = math.sqrt(2.5)
    assert_allclose(phi(make(2.5), x), phi(make(1.0), root * x), rtol=1e-14)
    for what in ("kernel", "variance"):
        expected = getattr(make(1.0), what)(root * x, root * y)
        assert_allclose(getattr(make(2.5), what)(x, y), expected, rtol=1e-13)


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("cls", [*RANDOM_MAPS, EluFeatures, ReluFeatures])
def test_scales_that_are_refused(cls, scale):
    with pytest.raises(ValueError, match="scale must be a positive finite number"):
        cls(4, scale=scale)
    with pytest.raises(TypeError, match="scale must be a real number"):
        cls(4, scale="1")
    with pytest.raises(TypeError, match="scale must be a real number"):
        cls(4, scale=True)


# Sizes ------------------------------------------------------------------------------------------


@each_random_map
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 16, 64, 100])
def test_default_number_of_features(cls, dim):
    # dim ln dim, rounded up to whole orthogonal blocks of rows, at least one block.
    block = 2 * dim if cls in PAIRED else dim
    feature_map = cls(dim, rng=0)
    m = feature_map.num_features
    assert m % block == 0
    assert m >= dim * math.log(dim)
    assert m == block or m - block < dim * math.log(dim)
    assert feature_map.projection.shape == (rows_of(cls, m), dim)
    assert phi(feature_map, np.ones((3, dim))).shape == (3, m)


@each_random_map
@pytest.mark.parametrize("columns", [2, 6, 10])
def test_num_features_counts_columns(cls, columns):
    feature_map = cls(4, columns, rng=0)
    assert feature_map.num_features == columns
    assert feature_map.projection.shape == (rows_of(cls, columns), 4)
    assert phi(feature_map, np.ones((3, 4))).shape == (3, columns)
    assert cls.from_projection(feature_map.projection).num_features == columns


@pytest.mark.parametrize("cls", [EluFeatures, ReluFeatures])
def test_coordinate_maps_take_any_dim_or_one(cls):
    free, fixed = cls(), cls(4)
    assert (free.dim, free.num_features) == (None, None)
    assert (fixed.dim, fixed.num_features) == (4, 4)
    (x,) = normals((3, 4))
    assert_array_equal(phi(free, x), phi(fixed, x))
    assert phi(free, x[:, :3]).shape == (3, 3)
    with pytest.raises(ValueError, match=r"x must have 4 coordinates.*\(3, 3\)"):
        fixed.query_features(x[:, :3])
    with pytest.raises(ValueError, match="dim must be at least 1"):
        cls(0)


@each_map
def test_inputs_that_are_refused(name):
    feature_map = MAPS[name]
    x, y = normals((3, 4), (5, 4))
    for call in (feature_map.query_features, feature_map.key_features):
        with pytest.raises(TypeError, match="x must be an array"):
            call([[1.0, 2.0, 3.0, 4.0]])
        with pytest.raises(TypeError, match="x must have dtype"):
            call(np.ones((3, 4), dtype=int))
    for call in (feature_map.kernel, feature_map.estimate):
        with pytest.raises(ValueError, match="one dtype"):
            call(x, y.astype(np.float32))
        with pytest.raises(ValueError, match=r"coordinates|one dim"):
            call(x, y[:, :3])
        with pytest.raises(ValueError, match="at least 2 axes"):
            call(x, y[0])


# Samplers and seeds -----------------------------------------------------------------------------


@each_random_map
def test_redraw(cls):
    options = {"scale": 0.3, "sampler": "gaussian"}
    if cls is ActivationFeatures:
        options["epsilon"] = 0.2
    first = cls(4, 8, rng=0, **options)
    before = first.projection.copy()
    again = first.redraw(rng=5)
    assert again == cls(4, 8, rng=5, **options)
    assert again != first
    assert (again.scale, again.sampler, again.num_features) == (0.3, "gaussian", 8)
    assert_array_equal(first.projection, before)
    assert first.redraw(rng=0) == first


@each_random_map
def test_redraw_needs_a_sampler(cls):
    with pytest.raises(ValueError, match="redraw needs a sampler"):
        cls.from_projection(np.ones((3, 4))).redraw(0)


def test_redraw_needs_a_projection():
    with pytest.raises(ValueError, match="redraw needs a sampler"):
        ActivationFeatures(4, sampler=None).redraw(0)


@each_random_map
def test_a_sampler_of_the_users(cls):
    rows = np.random.default_rng(0).standard_normal((4, 4))

    def mine(num, dim, rng=None):
        assert (num, dim, rng) == (4, 4, 7)
        return rows

    feature_map = cls(4, 8 if cls in PAIRED else 4, sampler=mine, rng=7)
    assert_array_equal(feature_map.projection, rows)
    assert feature_map.unbiased is False
    with pytest.raises(NotImplementedError, match="how the projection was drawn"):
        feature_map.variance(np.ones((1, 4)), np.ones((1, 4)))
    with pytest.raises(ValueError, match=r"sampler must return shape.*\(4, 4\)"):
        cls(4, 24, sampler=lambda num, dim, rng=None: rows, rng=7)
    # The array stays the sampler's own: it may write to it, and the map does not change.
    rows[0, 0] = 99.0
    assert feature_map.projection[0, 0] != 99.0


@each_random_map
def test_flags(cls):
    for sampler in ("orthogonal", "gaussian", sampling.orthogonal):
        feature_map = cls(4, 8, sampler=sampler, rng=0)
        assert feature_map.unbiased is True
        assert feature_map.causal is True
        assert feature_map.positive is (cls is not TrigonometricFeatures)
    assert cls.from_projection(np.ones((3, 4))).unbiased is False


def test_flags_of_activations():
    assert ActivationFeatures(4, rng=0, epsilon=-0.1).positive is False
    tanh = ActivationFeatures(4, rng=0, activation=np.tanh)
    assert tanh.positive is False
    assert tanh.unbiased is False
    assert ActivationFeatures(sampler=None, activation=np.tanh).unbiased is True
    for cls in (EluFeatures, ReluFeatures):
        assert cls().positive is True
        assert cls().unbiased is True
        assert cls().causal is True


# Projections that are given ----------------------------------------------------------------------


@each_random_map
def test_from_projection(cls):
    drawn = cls(4, 8, scale=1.0, rng=0)
    given_rows = cls.from_projection(drawn.projection, scale=1.0)
    assert given_rows == drawn
    assert given_rows.sampler is None
    x, y = normals((3, 4), (5, 4))
    assert_array_equal(given_rows.estimate(x, y), drawn.estimate(x, y))
    assert_array_equal(given_rows.kernel(x, y), drawn.kernel(x, y))
    with pytest.raises(NotImplementedError, match="sampler=None, of which nothing is known"):
        given_rows.variance(x, y)
    rows = np.ones((3, 4))
    mine = cls.from_projection(rows)
    rows[:] = 0
    assert_array_equal(mine.projection, 1)
    assert cls.from_projection(np.ones((2, 1, 3, 4))).projection.shape == (2, 1, 3, 4)


@each_random_map
@pytest.mark.parametrize(
    ("projection", "match"),
    [
        (np.ones(4), r"shape \(\.\.\., rows, dim\), got \(4,\)"),
        (np.ones((0, 4)), r"shape \(\.\.\., rows, dim\), got \(0, 4\)"),
        (np.ones((4, 0)), r"shape \(\.\.\., rows, dim\), got \(4, 0\)"),
        ([[1.0, math.nan]], "projection must be finite"),
        ([[1.0, math.inf]], "projection must be finite"),
    ],
)
def test_projections_that_are_refused(cls, projection, match):
    with pytest.raises(ValueError, match=match):
        cls.from_projection(projection)


@each_softmax_map
@pytest.mark.parametrize("weights", [np.ones(2), np.ones((3, 1)), [0.0, math.nan, 0.0], 1.0])
def test_log_weights_that_are_refused(cls, weights):
    with pytest.raises(ValueError, match=r"log_weights must be finite and of shape \(3,\)"):
        cls.from_projection(np.ones((3, 4)), log_weights=weights)


@each_softmax_map
def test_log_weights_weigh_the_rows(cls):
    rows, x, y = normals((5, 4), (3, 4), (2, 4))
    log_weights = np.linspace(-2, 1, 5)
    weighted = cls.from_projection(rows, log_weights=log_weights).estimate(x, y)
    singles = [cls.from_projection(row[None]).estimate(x, y) for row in rows]
    expected = np.mean([np.exp(w) * e for w, e in zip(log_weights, singles, strict=True)], axis=0)
    assert_allclose(weighted, expected, rtol=1e-12, atol=1e-14)
    none = cls.from_projection(rows, log_weights=np.zeros(5)).estimate(x, y)
    assert_allclose(none, cls.from_projection(rows).estimate(x, y), rtol=1e-14)


# Activations ------------------------------------------------------------------------------------


def softplus(u):
    return np.logaddexp(u, 0.0)


@pytest.mark.parametrize("sampler", [None, "orthogonal"])
def test_an_activation_of_the_users(sampler):
    feature_map = ActivationFeatures(
        4, activation=softplus, epsilon=0.1, scale=2.0, sampler=sampler, rng=0
    )
    x, y = normals((30, 4), (30, 4))
    root = math.sqrt(2.0)
    if sampler is None:
        expected = softplus(root * x) + 0.1
    else:
        m = feature_map.num_features
        expected = (softplus(root * x @ feature_map.projection.T) + 0.1) / math.sqrt(m)
    assert_allclose(phi(feature_map, x), expected, rtol=1e-14)
    if sampler is None:
        assert_array_equal(feature_map.kernel(x, y), feature_map.estimate(x, y))
        assert_array_equal(feature_map.variance(x, y), np.zeros((30, 30)))
    else:
        for what in ("kernel", "variance"):
            with pytest.raises(NotImplementedError, match=f"the {what} is known.*'relu' only"):
                getattr(feature_map, what)(x, y)


def test_the_variance_of_relu_features_says_what_is_missing():
    for feature_map in (
        ActivationFeatures(4, rng=0),
        ActivationFeatures(4, sampler=sampling.orthogonal),
    ):
        with pytest.raises(NotImplementedError, match=r"two rows of one block.*sampler='gaussian'"):
            feature_map.variance(X, Y)
    same = ActivationFeatures(4, 8, rng=0, sampler=sampling.gaussian).variance(X, Y)
    named = ActivationFeatures(4, 8, rng=0, sampler="gaussian").variance(X, Y)
    assert_array_equal(same, named)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"activation": "gelu"},
            ValueError,
            "activation must be one of .* or a callable, got 'gelu'",
        ),
        ({"activation": 3}, TypeError, "activation must be one of .* or a callable, got 3"),
        ({"epsilon": math.nan}, ValueError, "epsilon must be a finite number"),
        ({"epsilon": "1"}, TypeError, "epsilon must be a real number"),
        ({"num_features": 3, "sampler": None}, ValueError, "num_features=3 and dim=4"),
    ],
)
def test_activations_that_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        ActivationFeatures(4, **options)


def test_without_a_projection_the_dim_may_be_open():
    free, fixed = ActivationFeatures(sampler=None), ActivationFeatures(4, 4, sampler=None)
    assert (free.dim, free.num_features, free.projection) == (None, None, None)
    assert (fixed.dim, fixed.num_features, fixed.projection) == (4, 4, None)
    with pytest.raises(ValueError, match="x must have 4 coordinates"):
        fixed.query_features(np.ones((2, 3)))


# Maps as objects --------------------------------------------------------------------------------


def test_maps_that_differ_are_not_equal():
    base = PositiveFeatures(4, 8, rng=0)
    others = [
        PositiveFeatures(4, 8, rng=1),
        PositiveFeatures(4, 8, rng=0, scale=0.3),
        PositiveFeatures(4, 12, rng=0),
        PositiveFeatures.from_projection(base.projection, log_weights=np.ones(8)),
        HyperbolicFeatures.from_projection(base.projection),
        ActivationFeatures.from_projection(base.projection, scale=0.5),
        "PositiveFeatures",
        None,
    ]
    assert base == PositiveFeatures(4, 8, rng=0)
    for other in others:
        assert base != other
    assert len({base, *others[:6], PositiveFeatures(4, 8, rng=0)}) == 7
    assert EluFeatures() != ReluFeatures()
    assert EluFeatures(4) != EluFeatures(scale=2.0)


@pytest.mark.parametrize("name", EVERY)
def test_maps_are_immutable(name):
    feature_map = EVERY[name]
    for attribute in ("scale", "projection", "dim", "anything"):
        with pytest.raises(AttributeError, match=f"immutable: make a new map.*{attribute}"):
            setattr(feature_map, attribute, 1)
    with pytest.raises(AttributeError, match="immutable: scale cannot be deleted"):
        del feature_map.scale
    for attribute in ("projection", "log_weights"):
        array = getattr(feature_map, attribute, None)
        if array is not None:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_a_fingerprint_needs_functions_with_names():
    feature_map = ActivationFeatures(4, 8, activation=lambda u: u, rng=0)
    with pytest.raises(ValueError, match="top of a module"):
        feature_map.fingerprint()


# Every library ----------------------------------------------------------------------------------

ALONE = {"rotated", "softmax"}
"""Maps whose weights of a pair are no products of its features."""


@ignored
@pytest.mark.parametrize("name", EVERY)
def test_namespace_dtype_and_device_are_kept(xp, name):
    feature_map = EVERY[name]
    host = [a.astype(np.float32).astype(np.float64) for a in normals((2, 3, 4), (2, 5, 4))]
    x, y = (xp.array(a, "float32") for a in host)
    # A float32 estimate is off by rounding of its terms, and of what cancels inside of them.
    features = [np.abs(phi(feature_map, host[0])), np.abs(phi(feature_map, host[1], "key"))]
    terms = 1 if name in ALONE else 1 + features[0] @ features[1].mT
    for what in ("kernel", "estimate", "variance", "mean"):
        try:
            expected = getattr(feature_map, what)(*host)
        except NotImplementedError:
            continue
        result = getattr(feature_map, what)(x, y)
        xp.assert_like(result, x, shape=(2, 3, 5))
        error = np.abs(xp.numpy(result) - expected)
        assert_at_most(error, 2e-6 * np.maximum(np.abs(expected), terms))
    log, values = feature_map.query_features(x)
    for array in (log, values):
        if array is not None:
            xp.assert_like(array, x, shape=tuple(array.shape))
    found = 1.0 if values is None else xp.numpy(values)
    found = found * (1.0 if log is None else np.exp(xp.numpy(log)))
    assert_allclose(found, phi(feature_map, host[0]), rtol=6e-6, atol=2e-6)


GAUSSIAN: dict[str, Any] = {"sampler": "gaussian", "rng": 0}
CLOSED = {
    **{name: RandomFourierFeatures(4, 10, kernel=name, **GAUSSIAN) for name in FOURIER},
    **{name: ActivationFeatures(4, 9, activation=name, **GAUSSIAN) for name in STEPS},
}


@pytest.mark.parametrize("name", CLOSED)
def test_all_pairs_and_leading_axes(name):
    x, y = normals((2, 1, 3, 4), (5, 7, 4))
    for what in (CLOSED[name].kernel, CLOSED[name].variance, CLOSED[name].mean):
        together = what(x, y)
        assert together.shape == (2, 5, 3, 7)
        assert_allclose(together[1, 2, 0, 3], what(x[1, 0, :1], y[2, 3:4])[0, 0], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_result_beyond_the_dtype_is_inf_without_a_warning(dtype):
    feature_map = PositiveFeatures(1, 1, scale=1.0, rng=0)
    x = np.full((1, 1), 11.0, dtype=dtype)
    assert_array_equal(feature_map.kernel(x, x), np.inf)
    # e^96, which float64 still holds.
    x = np.full((1, 1), 4.0, dtype=dtype)
    assert_array_equal(feature_map.variance(x, x), np.inf)
    x = np.full((1, 1), 12.0, dtype=dtype)
    large = PositiveFeatures.from_projection([[12.0]], scale=1.0)
    assert_array_equal(large.estimate(x, x), np.inf)


# A map of the user's own -------------------------------------------------------------------------


@pytest.mark.frameworks
@pytest.mark.parametrize("size", [8e37, 9e37, 3e38])
@pytest.mark.parametrize(
    "phi",
    [EluFeatures(), ReluFeatures(), TaylorFeatures(4), PolynomialFeatures(4, 2)],
    ids=["elu", "relu", "taylor", "polynomial"],
)
def test_jax_does_not_lose_rows_past_the_inverse_of_its_smallest_number(phi, size):
    """XLA divides by a number that many share by multiplying: subnormal inverses count as 0."""
    jnp = pytest.importorskip("jax.numpy")
    rng = np.random.default_rng(0)
    rows, others, value = rng.random((3, 5, 4), dtype=np.float32)
    rows[:, 0] = 1
    large = rows * np.float32(size)
    for query, key in ((large, others), (others, large)):
        q, k, v = (jnp.asarray(x) for x in (query, key, value))
        out = linattn.linear_attention(q, k, v, phi)
        q, k, v = (x.astype(np.float64) for x in (query, key, value))
        want = linattn.linear_attention(q, k, v, phi)
        assert_allclose(np.asarray(out), want, rtol=2e-5)

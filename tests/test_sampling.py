"""Projections: their law, their randomness, and what is known exactly about them.

Statistical tests use fixed seeds and exact standard errors: "within 6" is a false alarm of about
2e-9 for a draw from a normal law.
Where only an estimated error is to be had (variances, nets) the test says so.

The closed forms are judged by `oracle`: the sum over rows and pairs of rows, each integrated over
the norms by brute force.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal, assert_array_less

from linattn import sampling
from linattn.sampling import (
    SAMPLERS,
    Sampler,
    as_generator,
    fixed_norm,
    gaussian,
    halton,
    num_pairs,
    orthogonal,
    quantile,
    simplex,
    sobol,
    stratified,
)

special = pytest.importorskip("scipy.special")
stats = pytest.importorskip("scipy.stats")

KINDS = ["positive", "paired", "trigonometric"]
NETS = (sobol, halton)
"""Samplers without a closed form of the variance."""
BIASED = (quantile, fixed_norm)
NEEDS_SCIPY = (stratified, quantile, sobol, halton)
PREFIX = (gaussian, orthogonal, fixed_norm, sobol, halton)
"""Samplers whose first rows do not depend on how many follow."""


def each(samplers: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sampler", samplers, ids=[s.name for s in samplers])


every_sampler = each(list(SAMPLERS.values()))
every_closed_form = each([s for s in SAMPLERS.values() if s not in NETS])
every_unbiased = each([s for s in SAMPLERS.values() if s not in BIASED])
every_net = each(NETS)
every_kind = pytest.mark.parametrize("kind", KINDS)
pair_functions = each([gaussian, orthogonal])

# Entries (0, 0), (3, 1) and (5, 3) of six rows drawn with seed 20261120, by sampler and dim.
GOLDEN = {
    ("gaussian", 4): [1.3821777529494055, -1.708626879861378, 0.044536689744098086],
    ("gaussian", 5): [1.3821777529494055, -0.9600753728297599, 0.94762638581639],
    ("orthogonal", 4): [1.2318962790259882, -0.7019596396845934, 0.17422580551591627],
    ("orthogonal", 5): [1.6549272609128365, -0.9942230866094363, 0.16814103426781293],
    ("simplex", 4): [0.7098937269604024, -1.076846323912227, 0.7836804996692486],
    ("simplex", 5): [0.9687933006631267, -0.7358703997914664, 0.16814103426781293],
    ("stratified", 4): [1.0319312026390854, -1.0767476137234666, 0.6436015235596562],
    ("stratified", 5): [1.9430928561575216, -1.3873609032435281, 0.48558135596041196],
    ("quantile", 4): [1.9393014931426256, -0.8658234254334902, 1.0831620096123837],
    ("quantile", 5): [1.1539178188369261, -1.5164896078250725, 0.7153667744909806],
    ("sobol", 4): [1.2238711949788272, -1.1568754649786621, 0.3476967900236048],
    ("sobol", 5): [1.2238711949788272, -1.1568754649786621, 0.3476967900236048],
    ("halton", 4): [1.6668702369778126, -0.9471148653880558, -0.5847249177886948],
    ("halton", 5): [1.6668702369778126, -0.9471148653880558, -0.5847249177886948],
    ("fixed_norm", 4): [1.4796576110030375, -1.1901972097036664, 1.2679083120699686],
    ("fixed_norm", 5): [1.513283185114652, -1.3600337958916657, 0.7228461210728457],
}


# --- oracles -------------------------------------------------------------------------------------


def kummer(dim: int, argument: Decimal) -> Decimal:
    """Sum 1F1(d; d/2; argument) as it is defined."""
    term = total = Decimal(1)
    for k in itertools.count(1):
        term *= argument * 2 * (dim + k - 1) / ((dim + 2 * k - 2) * k)
        total += term
        if k > 3 * abs(argument) and abs(term) < Decimal("1e-360"):
            break
    return total


def exact_gap(v: float, dim: int) -> float:
    with localcontext(prec=800):
        x = Decimal(v)
        return float(1 - (-x).exp() * kummer(dim, x / 2))


def exact_gap_trig(s: float, dim: int) -> float:
    with localcontext(prec=800):
        x = Decimal(s)
        return float((-x).exp() - kummer(dim, -x / 2))


def independent_variance(kind: str, sq_norm: Any, A: float = 0.0, dim: int = 1) -> np.ndarray:
    """Var of the estimate of one N(0, I) row, as `Sampler.variance_gap` states it."""
    v, rho = np.asarray(sq_norm, dtype=float), 1 / (1 - 8 * A)
    tilt = dim / 2 * np.log((rho + 1) ** 2 / (4 * rho))
    if kind == "trigonometric":
        return np.asarray(np.expm1(-v) ** 2 / 2)
    row = np.expm1(tilt + rho * v)
    return np.asarray(row if kind == "positive" else (row + np.expm1(tilt - v)) / 2)


def variance(
    sampler: Sampler, kind: str, sq_norm: Any, num: int, dim: int, A: float = 0.0
) -> np.ndarray:
    gap = sampler.variance_gap(kind, sq_norm, num, dim, A=A)
    return np.asarray(independent_variance(kind, sq_norm, A, dim) / num - gap)


def norm_nodes(sampler: Sampler, num: int, dim: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Nodes and weights of the norm in each stratum: one for the norm of all rows, or m."""
    if sampler is fixed_norm:
        return [(np.array([dim**0.5]), np.ones(1))]
    if sampler is quantile:
        levels = np.arange(1, num + 1) / (num + 1)
        return [(np.array([r]), np.ones(1)) for r in stats.chi(dim).ppf(levels)]
    strata = num if sampler is stratified else 1
    edges = stats.chi(dim).ppf(np.arange(strata) / strata)
    ends = np.append(np.maximum(edges, dim**0.5 - 10), dim**0.5 + 12)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    pieces = []
    for low, high in itertools.pairwise(ends):
        r = low + (high - low) * (nodes + 1) / 2
        pieces.append((r, weights * (high - low) / 2 * strata * stats.chi(dim).pdf(r)))
    return pieces


def oracle(
    sampler: Sampler, kind: str, sq_norm: float, num: int, dim: int, A: float = 0.0
) -> tuple[float, float]:
    """Mean and variance of the estimate over K, summed over rows and pairs of rows."""
    sign = -1 if kind == "trigonometric" else 1

    def sphere(square: Any) -> Any:  # the mean of exp(w.z), or of cos(w.z), with |w|^2 = square
        return special.hyp0f1(dim / 2, sign * (1 - 4 * A) * sq_norm * square / 4)

    def weight(r: Any) -> Any:
        unit = 1.0 if kind == "trigonometric" else np.exp(-sq_norm / 2)
        return unit * (1 - 4 * A) ** (dim / 2) * np.exp(2 * A * r**2)

    def second(r: Any) -> Any:
        of_both = sphere(4 * r**2)
        return weight(r) ** 2 * (of_both if kind == "positive" else (1 + of_both) / 2)

    def pair(r: Any, q: Any, cosine: float) -> Any:
        cosines = (cosine,) if kind == "positive" else (cosine, -cosine)
        squares = [r**2 + q**2 + 2 * c * r * q for c in cosines]
        return weight(r) * weight(q) * sum(map(sphere, squares)) / len(squares)

    laws = norm_nodes(sampler, num, dim)
    means = np.array([w @ (weight(r) * sphere(r**2)) for r, w in laws])
    seconds = np.array([w @ second(r) for r, w in laws])
    total = np.mean(seconds - means**2) / num

    strata = [(0, 0)] if len(laws) == 1 else list(itertools.permutations(range(num), 2))
    blocks, rest = divmod(num, dim)
    for count, rows in ((blocks, dim), (1, rest)):
        if sampler is not gaussian and count * rows * (rows - 1):
            cosine = -1 / (rows - 1) if sampler is simplex else 0.0
            covariance = np.mean(
                [
                    laws[i][1] @ pair(laws[i][0][:, None], laws[j][0], cosine) @ laws[j][1]
                    - means[i] * means[j]
                    for i, j in strata
                ]
            )
            total += count * rows * (rows - 1) / num**2 * covariance
    kernel = np.exp(-sq_norm / 2) if kind == "trigonometric" else 1.0
    return float(means.mean() / kernel), float(total)


def raw_qr(num: int, dim: int, seed: int, draws: int) -> np.ndarray:
    """The common defect: orthogonal blocks from QR, its signs left as LAPACK chose them."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((draws, dim, dim)))
    norms = np.linalg.norm(rng.standard_normal((draws, dim, dim)), axis=-1, keepdims=True)
    rows: np.ndarray = q * norms
    return rows[:, :num]


# --- pair functions ------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 4096])
def test_pair_gaps_equal_the_exact_series(dim):
    points = np.array([1e-9, 1e-3, 0.25, 1.0, 1.001, 4.0, 16.0, 50.0, 200.0])
    expected = [exact_gap(point, dim) for point in points]
    np.testing.assert_allclose(orthogonal.pair_gap(points, dim), expected, rtol=1e-14)

    points = np.append(points, 700.0)
    expected_trig = np.array([exact_gap_trig(point, dim) for point in points])
    gap_trig = orthogonal.pair_gap_trig(points, dim)
    np.testing.assert_allclose(gap_trig, expected_trig, rtol=0, atol=1e-15)
    near = points <= 1
    np.testing.assert_allclose(gap_trig[near], expected_trig[near], rtol=1e-14)


@pair_functions
@pytest.mark.parametrize("method", ["pair_gap", "pair_gap_trig"])
def test_pair_gaps_keep_shape_and_take_any_squared_norm(sampler, method):
    gap = getattr(sampler, method)
    assert gap(0.0, 3) == 0
    assert gap(1, 3).dtype == gap([1, 2], 3).dtype == np.float64
    for shape in [(), (0,), (2, 3)]:
        assert gap(np.full(shape, 0.5), 3).shape == shape
    v = np.array([0.5, 1e9, np.inf])
    assert_array_equal(np.isfinite(gap(v, 3)), True)
    assert_array_equal(v, [0.5, 1e9, np.inf])
    with pytest.raises(ValueError, match=r"squared norm must be at least 0, got -0\.5"):
        gap([-0.5, 1.0], 3)
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        gap(1.0, 0)


def test_nan_in_a_pair_gap_stays_where_it_is():
    for gap in (orthogonal.pair_gap, orthogonal.pair_gap_trig):
        values = gap([0.5, np.nan, 2.0], 3)
        assert np.isnan(values[1])
        assert_array_equal(values[::2], gap([0.5, 2.0], 3))


def test_independent_rows_have_no_gap():
    v = np.linspace(0, 9, 4)
    assert_array_equal(gaussian.pair_gap(v, 3), 0)
    assert_array_equal(gaussian.pair_gap_trig(v, 3), 0)


@settings(deadline=None)
@given(num=st.integers(1, 40), dim=st.integers(1, 12))
def test_num_pairs_counts_pairs_of_one_block(num, dim):
    pairs = [(i, j) for i in range(num) for j in range(num) if i != j and i // dim == j // dim]
    assert num_pairs(num, dim) == len(pairs)


def test_blocks_are_independent():
    """One rotation for two blocks would give cos(w1.z) cos(w3.z) another mean."""
    n, s, z = 40_000, 1.0, np.array([1.0, 0.0])
    rows = orthogonal(4, 2, 6, batch_shape=(n,))
    draws = np.cos(rows[:, 0] @ z) * np.cos(rows[:, 2] @ z)
    variance = ((1 + np.exp(-2 * s)) / 2) ** 2 - np.exp(-2 * s)
    error = np.sqrt(variance / n)
    assert abs(draws.mean() - np.exp(-s)) < 6 * error

    norms = np.linalg.norm(rows, axis=-1)
    shared = rows[:, 0] * (norms[:, 2] / norms[:, 0])[:, None]
    draws = np.cos(rows[:, 0] @ z) * np.cos(shared @ z)
    assert abs(draws.mean() - np.exp(-s)) > 10 * error


# --- moments of estimates ------------------------------------------------------------------------

CASES = [
    (kind, A) for kind in KINDS for A in ((0.0,) if kind == "trigonometric" else (0.0, -0.1, 0.03))
]
every_case = pytest.mark.parametrize(("kind", "A"), CASES, ids=str)


@every_closed_form
@every_case
@pytest.mark.parametrize(("num", "dim"), [(4, 4), (5, 3), (1, 2), (3, 1)], ids=str)
def test_mean_and_variance_equal_the_oracle(sampler, kind, A, num, dim):
    for sq_norm in (0.2, 4.0):
        mean, expected = oracle(sampler, kind, sq_norm, num, dim, A)
        row = float(independent_variance(kind, sq_norm, A, dim)) / num
        assert abs(variance(sampler, kind, sq_norm, num, dim, A) - expected) < 1e-11 * row
        factor = sampler.mean_factor(kind, sq_norm, num, dim, A=A)
        assert factor == pytest.approx(mean, rel=1e-12)


@every_closed_form
@every_kind
def test_mean_and_variance_equal_the_oracle_in_many_dimensions(sampler, kind):
    for num, dim in ((3, 40), (42, 40) if sampler not in (stratified, quantile) else (7, 40)):
        mean, expected = oracle(sampler, kind, 24.0, num, dim)
        row = float(independent_variance(kind, 24.0)) / num
        assert abs(variance(sampler, kind, 24.0, num, dim) - expected) < 1e-11 * row
        assert sampler.mean_factor(kind, 24.0, num, dim) == pytest.approx(mean, rel=1e-7)


@pytest.mark.parametrize("kind", ["positive", "paired"])
@pytest.mark.parametrize(("A", "v"), [(-0.5, 40.0), (-0.5, 1e-3), (-2.0, 90.0), (-300.0, 4.0)])
def test_moments_of_tilted_points_equal_the_oracle(kind, A, v):
    """The series are long here, and the variance is a small part of what its terms add up to."""
    for sampler, num, dim in ((quantile, 60, 2), (quantile, 9, 7), (fixed_norm, 3, 2)):
        mean, expected = oracle(sampler, kind, v, num, dim, A)
        row = float(independent_variance(kind, v, A, dim)) / num
        assert abs(variance(sampler, kind, v, num, dim, A) - expected) < 1e-12 * row
        factor = sampler.mean_factor(kind, v, num, dim, A=A)
        assert factor == pytest.approx(mean, rel=1e-11)


@every_kind
@pytest.mark.parametrize("sampler", [stratified, quantile], ids=["stratified", "quantile"])
def test_gaps_vanish_like_a_power(sampler, kind):
    """No rounding stands in for the leading term, v for biased norms of one sign and else v^2."""
    power = 1 if sampler is quantile and kind == "positive" else 2
    for num in (1, 2, 3, 4, 7, 29):
        small, large = sampler.variance_gap(kind, [1e-9, 1e-8], num, 3)
        assert small * 10**power == pytest.approx(large, rel=1e-5, abs=1e-22)


def exact_fixed_norm(sq_norm: float, num: int, dim: int, kind: str) -> float:
    """Gap of norms sqrt(d), from its definition in many digits."""
    with localcontext(prec=80):
        x, d, one = Decimal(sq_norm), Decimal(dim), Decimal(1)

        def f(c: int) -> Decimal:
            argument = (-1 if kind == "trigonometric" else 1) * c * d * x / 4
            term, total = one, one
            for k in range(1, 400):
                term *= argument / (k * (d / 2 + k - 1))
                total += term
            return total

        second = f(4) if kind == "positive" else (1 + f(4)) / 2
        pairs = Decimal(num_pairs(num, dim)) / num
        ours = (second - f(1) ** 2 + pairs * (f(2) - f(1) ** 2)) / num
        if kind == "trigonometric":
            return float((1 - (-x).exp()) ** 2 / 2 / num - ours)
        row = x.exp() - 1 if kind == "positive" else (x.exp() + (-x).exp()) / 2 - 1
        return float(row / num - (-x).exp() * ours)


@every_kind
@pytest.mark.parametrize("sq_norm", [1e-9, 1e-4, 0.7, 5.0, 40.0])
def test_small_gaps_keep_their_digits(kind, sq_norm):
    for num, dim in ((4, 4), (7, 5), (3, 24)):
        gap = fixed_norm.variance_gap(kind, sq_norm, num, dim)
        tolerance = 1e-12 * abs(gap) + 1e-15 * independent_variance(kind, sq_norm)
        assert abs(gap - exact_fixed_norm(sq_norm, num, dim, kind)) <= tolerance


@lru_cache
def drawn(sampler: Sampler) -> np.ndarray:
    """Projections w.z of 40,000 draws of 7 rows in 4 dimensions, |z| = 1."""
    z = np.array([0.1, -0.5, 0.7, 0.5])
    return np.asarray(sampler(7, 4, 20, batch_shape=(40_000,)) @ z)


FEATURES: dict[str, Callable[[Any, float], Any]] = {
    "positive": lambda u, v: np.exp(u - v / 2),
    "paired": lambda u, v: np.cosh(u) * np.exp(-v / 2),
    "trigonometric": lambda u, s: np.cos(u) * np.exp(s / 2),
}


@every_closed_form
@every_kind
def test_drawn_estimates_have_the_stated_moments(sampler, kind):
    """The mean's error is exact, that of the variance estimated, of a moderate kurtosis."""
    v = 0.25
    draws = FEATURES[kind](drawn(sampler) * np.sqrt(v), v).mean(axis=-1)
    factor = float(sampler.mean_factor(kind, v, 7, 4))
    expected = variance(sampler, kind, v, 7, 4) * (np.exp(v) if kind == "trigonometric" else 1)
    squares = (draws - factor) ** 2
    assert abs(draws.mean() - factor) < 6 * np.sqrt(expected / draws.size)
    assert abs(squares.mean() - expected) < 6 * squares.std() / np.sqrt(draws.size)


@every_closed_form
@every_kind
def test_moments_keep_shape_and_take_any_squared_norm(sampler, kind):
    for function, at_zero in ((sampler.variance_gap, 0), (sampler.mean_factor, 1)):
        assert function(kind, 0.0, 5, 3) == at_zero
        assert function(kind, 1, 5, 3).dtype == function(kind, [1, 2], 5, 3).dtype == np.float64
        for shape in [(), (0,), (2, 3)]:
            values = function(kind, np.full(shape, 0.5), 5, 3)
            assert values.shape == shape
            assert_array_equal(values, function(kind, 0.5, 5, 3))
        v = np.array([0.5, 1e9, np.inf, np.nan])
        values = function(kind, v, 5, 3)
        assert_array_equal(np.isfinite(values[:3]), True)
        assert values[0] == pytest.approx(float(function(kind, 0.5, 5, 3)), rel=1e-13)
        assert_array_equal(v, [0.5, 1e9, np.inf, np.nan])
        assert function(kind, 0.5, 1, 3).shape == function(kind, 0.5, 4, 1).shape == ()


@every_sampler
def test_moments_check_their_arguments(sampler):
    for function, limit in ((sampler.variance_gap, 0.125), (sampler.mean_factor, 0.25)):
        with pytest.raises(ValueError, match=r"kind must be 'positive', .* got 'cosh'"):
            function("cosh", 1.0, 4, 4)
        with pytest.raises(ValueError, match=rf"A must be finite .* below {limit}.* got {limit}"):
            function("positive", 1.0, 4, 4, A=limit)
        with pytest.raises(ValueError, match=r"A must be finite .* got nan"):
            function("paired", 1.0, 4, 4, A=np.nan)
        with pytest.raises(ValueError, match="A must be 0 for trigonometric"):
            function("trigonometric", 1.0, 4, 4, A=-0.1)
        with pytest.raises(ValueError, match=r"squared norm must be at least 0, got -1\.0"):
            function("positive", [-1.0, 1.0], 4, 4)
        with pytest.raises(ValueError, match="num must be at least 1, got 0"):
            function("positive", 1.0, 0, 4)
        with pytest.raises(TypeError, match=r"dim must be an int, got 4\.0"):
            function("positive", 1.0, 4, 4.0)


@every_net
@every_kind
def test_nets_have_no_closed_form(sampler, kind):
    message = f"no closed form .* sampler '{sampler.name}': estimate it from independent draws"
    with pytest.raises(NotImplementedError, match=message):
        sampler.variance_gap(kind, 1.0, 4, 4)
    assert sampler.mean_factor(kind, [0.5, 1.0], 4, 4).tolist() == [1.0, 1.0]


@each([s for s in SAMPLERS.values() if s not in (gaussian, orthogonal)])
def test_only_blocks_of_like_pairs_have_a_pair_function(sampler):
    for function in (sampler.pair_gap, sampler.pair_gap_trig):
        with pytest.raises(NotImplementedError, match="no function of one pair"):
            function(1.0, 4)


def test_a_sampler_of_ones_own_states_what_it_knows():
    def halved(num, dim, rng=None, /, *, batch_shape=()):
        return gaussian(num, dim, rng, batch_shape=batch_shape) / 2

    unknown = Sampler(halved, unbiased=False)
    assert unknown(3, 2, 0).shape == (3, 2)
    with pytest.raises(NotImplementedError, match="mean is known for the biased sampler 'halved'"):
        unknown.mean_factor("positive", 1.0, 3, 2)
    with pytest.raises(NotImplementedError, match="variance is known for the sampler 'halved'"):
        unknown.variance_gap("positive", 1.0, 3, 2)
    known = Sampler(halved, unbiased=False, mean=lambda kind, v, num, dim, A: np.exp(-3 * v / 8))
    assert known.mean_factor("positive", 1.0, 3, 2) == np.exp(-3 / 8)


# --- law of the rows -----------------------------------------------------------------------------


@settings(deadline=None)
@given(num=st.integers(1, 40), dim=st.integers(1, 17), seed=st.integers(0, 2**32))
def test_every_block_is_orthogonal(num, dim, seed):
    rows = orthogonal(num, dim, seed)
    assert rows.shape == (num, dim)
    assert rows.dtype == np.float64
    for start in range(0, num, dim):
        block = rows[start : start + dim]
        norms = np.linalg.norm(block, axis=1)
        gram = block @ block.T / np.outer(norms, norms)
        np.testing.assert_allclose(gram, np.eye(len(block)), rtol=0, atol=1e-12)
    norms = np.linalg.norm(rows, axis=1)
    assert len(np.unique(np.round(norms, 12))) == num


@every_unbiased
@pytest.mark.parametrize("row", [0, 2, 3, 6], ids="row {}".format)
def test_each_row_is_standard_normal(sampler, row):
    """Cramer-Wold: projections on axes and diagonals, each tested at a false alarm of 1e-6."""
    dim, n = 4, 4_000
    directions = np.array([[1, 0, 0, 0], [0, 0, 0, 1], [0.5] * 4, [0.5, -0.5, 0.5, -0.5]])
    rows = sampler(7, dim, 8, batch_shape=(n,))[:, row]
    for direction in directions:
        assert stats.kstest(rows @ direction, stats.norm.cdf).pvalue > 1e-6
    if row == 0:
        raw = raw_qr(1, dim, 8, n)[:, 0] @ directions[0]
        assert stats.kstest(raw, stats.norm.cdf).pvalue < 1e-6


def test_truncated_blocks_and_the_smallest_sizes():
    assert orthogonal(3, 8, 0).shape == (3, 8)
    assert orthogonal(11, 8, 0).shape == (11, 8)
    assert orthogonal(1, 1, 0).shape == (1, 1)
    signs = np.sign(orthogonal(400, 1, 0))
    assert set(signs.ravel()) == {-1.0, 1.0}
    assert abs(signs.sum()) < 6 * np.sqrt(400)


def gram(rows: np.ndarray) -> np.ndarray:
    """Cosines between rows."""
    units = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(units @ np.swapaxes(units, -1, -2))


@settings(deadline=None)
@given(num=st.integers(1, 40), dim=st.integers(1, 17), seed=st.integers(0, 2**32))
def test_every_block_is_a_simplex(num, dim, seed):
    rows = simplex(num, dim, seed)
    for start in range(0, num, dim):
        block = rows[start : start + dim]
        count = len(block)
        expected = np.full((count, count), -1 / (count - 1) if count > 1 else 1.0)
        np.fill_diagonal(expected, 1.0)
        np.testing.assert_allclose(gram(block), expected, rtol=0, atol=1e-12)
    # The norms are those of `orthogonal`, and do not know the directions.
    norms = np.linalg.norm(orthogonal(num, dim, seed), axis=1)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), norms, rtol=1e-12)


@each([stratified, quantile, fixed_norm])
@settings(deadline=None)
@given(num=st.integers(1, 40), dim=st.integers(1, 17), seed=st.integers(0, 2**32))
def test_coupled_norms_have_orthogonal_directions(sampler, num, dim, seed):
    rows = sampler(num, dim, seed)
    for start in range(0, num, dim):
        block = rows[start : start + dim]
        np.testing.assert_allclose(gram(block), np.eye(len(block)), rtol=0, atol=1e-12)
    levels = np.sort(stats.chi(dim).cdf(np.linalg.norm(rows, axis=1)))
    if sampler is stratified:
        assert_array_equal(np.floor(levels * num), np.arange(num))
    elif sampler is quantile:
        np.testing.assert_allclose(levels, np.arange(1, num + 1) / (num + 1), rtol=1e-9)
    else:
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), np.sqrt(dim), rtol=1e-14)


@each([stratified, quantile])
def test_rows_get_the_strata_at_random(sampler):
    num, dim, n = 6, 3, 6_000
    norms = np.linalg.norm(sampler(num, dim, 13, batch_shape=(n,)), axis=-1)
    ranks = np.argsort(np.argsort(norms, axis=-1), axis=-1)
    for row in range(num):
        assert stats.chisquare(np.bincount(ranks[:, row], minlength=num)).pvalue > 1e-6
    # Two rows of one block are as often neighbours in rank as two of different blocks.
    near = [np.mean(np.abs(ranks[:, 0] - ranks[:, other]) == 1) for other in (1, 3)]
    assert np.abs(np.array(near) - 1 / 3).max() < 6 * np.sqrt(2 / 9 / n)


# --- nets ----------------------------------------------------------------------------------------


def test_scrambled_sobol_points_are_a_net():
    """Of 2^k points each dyadic interval of length 2^-k holds one, in each coordinate.

    In the first two coordinates, a (0, k, 2)-net, so does each dyadic rectangle of that area.
    """
    points = stats.norm.cdf(sobol(64, 5, 14, batch_shape=(20,)))
    for k in range(7):
        cells = np.sort(np.floor(points[:, : 2**k] * 2**k), axis=1)
        assert_array_equal(cells, np.broadcast_to(np.arange(2**k)[:, None], cells.shape))
    for k in range(7):
        cells = np.floor(points[..., 0] * 2**k) * 2 ** (6 - k) + np.floor(
            points[..., 1] * 2 ** (6 - k)
        )
        assert_array_equal(np.sort(cells), np.broadcast_to(np.arange(64.0), cells.shape))


def test_scrambled_halton_points_are_even_in_each_base():
    points = stats.norm.cdf(halton(125, 3, 14, batch_shape=(20,)))
    for j, base in enumerate((2, 3, 5)):
        for count in (base, base**2, base**3):
            cells = np.sort(np.floor(points[:, :count, j] * count), axis=1)
            assert_array_equal(cells, np.broadcast_to(np.arange(count), cells.shape))


def test_sobol_digits_are_mixed_and_not_only_shifted():
    """The first two points differ in the first digit, and in all others at random."""
    points = stats.norm.cdf(sobol(2, 3, 15, batch_shape=(4_000,)))
    bits = np.floor(points * 2**40).astype(np.int64)
    differences = (bits[:, 0] ^ bits[:, 1]) / 2**39 - 1
    for difference in differences.T:
        assert stats.kstest(difference, stats.uniform.cdf).pvalue > 1e-6


@pytest.mark.parametrize("place", [0, 1, 2])
def test_halton_digits_are_permuted_anew_at_each_place(place):
    """Which of its three digits point 0 has at one place does not depend on the places before."""
    points = stats.norm.cdf(halton(1, 2, 15, batch_shape=(4_000,)))[:, 0, 1]
    digits = np.floor(points * 3 ** (place + 1)).astype(np.int64) % 3
    before = np.floor(points * 3**place).astype(np.int64) % 3
    counts = np.bincount(3 * before + digits, minlength=9)
    assert stats.chisquare(counts[counts > 0]).pvalue > 1e-6


class Stuck(np.random.Generator):
    """A generator whose numbers are all as small or as large as they may be."""

    def __init__(self, last: bool):
        super().__init__(np.random.PCG64(0))
        self.last = last

    def integers(self, high: Any, *, size: Any, dtype: Any) -> Any:  # type: ignore[override]
        return np.full(size, high - 1 if self.last else 0, dtype=dtype)

    def random(self, size: Any) -> Any:  # type: ignore[override]
        keys = np.broadcast_to(np.linspace(0, 1, size[-1], endpoint=False), size)
        return keys[..., ::-1] if self.last else keys


@every_net
@pytest.mark.parametrize("last", [False, True])
def test_nets_reach_neither_end_of_the_unit_interval(sampler, last):
    rows = sampler(1, 9, Stuck(last))
    assert_array_equal(np.isfinite(rows), True)
    assert_array_less(7.5, np.abs(rows))


@every_net
@pytest.mark.parametrize("num", [7, 32])
@pytest.mark.parametrize("sign", [1, -1])
def test_nets_are_unbiased(sampler, num, sign):
    """The error is estimated from independent scrambles, of small kurtosis at v = 1/4."""
    z = sign * np.array([0.25] * 4)
    draws = np.exp(sampler(num, 4, 16, batch_shape=(4_000,)) @ z - 0.125).mean(axis=-1)
    assert abs(draws.mean() - 1) < 6 * draws.std() / np.sqrt(draws.size)
    assert draws.var() < 0.5 * np.expm1(0.25) / num
    if num == 32:  # the first point, unscrambled, is 0, and its quantile -inf: often left out
        points = stats.qmc.Sobol(4, scramble=False).random_base2(5)
        plain = np.exp(stats.norm.ppf(np.maximum(points, 2.0**-31)) @ z - 0.125).mean()
        assert abs(plain - 1) > 6 * draws.std() / np.sqrt(draws.size)


def test_sobol_states_its_limits():
    with pytest.raises(ValueError, match=r"at most 21201 dimensions and 2.30 rows, got dim"):
        sobol(1, 21202, 0)


@each(NEEDS_SCIPY)
def test_missing_scipy_is_named_with_its_extra(sampler, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    message = rf"sampler '{sampler.name}' needs SciPy, .* pip install '\.\[qmc\]'"
    with pytest.raises(ImportError, match=message):
        sampler(4, 4, 0)
    if sampler not in NETS:
        with pytest.raises(ImportError, match=message):
            sampler.variance_gap("positive", 1.0, 4, 4)


def test_the_other_samplers_load_no_scipy():
    code = (
        "import sys; from linattn.sampling import SAMPLERS\n"
        "for name in ['gaussian', 'orthogonal', 'simplex', 'fixed_norm']:\n"
        "    SAMPLERS[name](3, 2, 0)\n"
        "    for kind in ['positive', 'paired', 'trigonometric']:\n"
        "        SAMPLERS[name].variance_gap(kind, 1.0, 3, 2)\n"
        "print([name for name in sys.modules if name.startswith('scipy')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- seeds ---------------------------------------------------------------------------------------


@every_sampler
@pytest.mark.parametrize("dim", [4, 5])
def test_golden_values(sampler, dim):
    """LAPACK's last digits vary by CPU, hence 1e-12."""
    golden = GOLDEN[sampler.name, dim]
    rows = sampler(6, dim, 20261120)
    np.testing.assert_allclose(rows[[0, 3, 5], [0, 1, 3]], golden, rtol=0, atol=1e-12)


@every_sampler
@settings(deadline=None)
@given(num=st.integers(1, 20), dim=st.integers(1, 9), seed=st.integers(0, 2**64))
def test_one_seed_one_answer(sampler, num, dim, seed):
    rows = sampler(num, dim, seed)
    assert_array_equal(rows, sampler(num, dim, seed))
    assert_array_equal(rows, sampler(num, dim, np.random.default_rng(seed)))
    assert_array_equal(rows, sampler(num, dim, np.random.SeedSequence(seed)))
    assert_array_equal(rows, sampler(num, dim, np.random.PCG64(seed)))
    if dim > 1:  # else the signs may be all that is left to chance
        assert not np.array_equal(rows, sampler(num, dim, seed + 1))


@every_sampler
@settings(deadline=None)
@given(
    num=st.integers(1, 20),
    dim=st.integers(1, 9),
    batch_shape=st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
def test_batches_are_draws_in_a_row(sampler, num, dim, batch_shape):
    generator = np.random.default_rng(11)
    batch = sampler(num, dim, 11, batch_shape=batch_shape)
    assert batch.shape == (*batch_shape, num, dim)
    for index in np.ndindex(batch_shape):
        np.testing.assert_allclose(batch[index], sampler(num, dim, generator), rtol=1e-11)


@each(PREFIX)
@settings(deadline=None)
@given(num=st.integers(1, 20), more=st.integers(0, 20), dim=st.integers(1, 9))
def test_longer_draws_start_alike(sampler, num, more, dim):
    longer = sampler(num + more, dim, 11)
    np.testing.assert_allclose(longer[:num], sampler(num, dim, 11), rtol=1e-12)


@every_sampler
def test_a_generator_moves_on(sampler):
    generator = np.random.default_rng(0)
    assert as_generator(generator) is generator
    first, second = sampler(6, 4, generator), sampler(6, 4, generator)
    assert not np.array_equal(first, second)


@every_sampler
def test_no_seed_gives_fresh_rows(sampler):
    assert not np.array_equal(sampler(6, 4), sampler(6, 4))


# --- samplers as objects -------------------------------------------------------------------------


def test_samplers_are_found_by_their_names():
    assert set(SAMPLERS.values()) == {*PREFIX, simplex, stratified, quantile}
    for name, sampler in SAMPLERS.items():
        assert isinstance(sampler, Sampler)
        assert sampler.name == name
        assert sampler.unbiased is (sampler not in BIASED)
        assert getattr(sampling, name) is sampler
        assert name in sampling.__all__


@every_sampler
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4), ValueError, "num must be at least 1, got 0"),
        ((4, 0), ValueError, "dim must be at least 1, got 0"),
        ((4, -3), ValueError, "dim must be at least 1, got -3"),
        ((True, 4), TypeError, "num must be an int, got the bool True"),
        ((4, False), TypeError, "dim must be an int, got the bool False"),
        ((4.0, 4), TypeError, r"num must be an int, got 4\.0 of type float"),
        ((4, "4"), TypeError, "dim must be an int, got '4' of type str"),
        ((None, 4), TypeError, "num must be an int, got None of type NoneType"),
    ],
)
def test_bad_sizes(sampler, arguments, error, message):
    with pytest.raises(error, match=message):
        sampler(*arguments, 0)
    with pytest.raises(error, match=message):
        num_pairs(*arguments)


@every_sampler
@pytest.mark.parametrize(
    ("batch_shape", "error", "message"),
    [
        (3, TypeError, "batch_shape must be a tuple of ints, got 3 of type int"),
        ((2, 1.5), TypeError, r"axis of batch_shape must be an int, got 1\.5"),
        ((2, True), TypeError, "axis of batch_shape must be an int, got the bool"),
        ((-1,), ValueError, "axis of batch_shape must be at least 0, got -1"),
    ],
)
def test_bad_batch_shapes(sampler, batch_shape, error, message):
    with pytest.raises(error, match=message):
        sampler(2, 2, 0, batch_shape=batch_shape)

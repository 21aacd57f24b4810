"""Projections: their law, their randomness, and what is known exactly about them.

Statistical tests use fixed seeds and exact standard errors: "within 6" is a false alarm of about
2e-9 for a draw from a normal law, and the twin tests show what the same check makes of a defect.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn import sampling
from linattn.sampling import SAMPLERS, Sampler, as_generator, gaussian, num_pairs, orthogonal

every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)

# Entries (0, 0), (3, 1) and (5, 3) of six rows drawn with seed 20261120, by sampler and dim.
GOLDEN = {
    ("gaussian", 4): [1.3821777529494055, -1.708626879861378, 0.044536689744098086],
    ("gaussian", 5): [1.3821777529494055, -0.9600753728297599, 0.94762638581639],
    ("orthogonal", 4): [1.2318962790259882, -0.7019596396845934, 0.17422580551591627],
    ("orthogonal", 5): [1.6549272609128365, -0.9942230866094363, 0.16814103426781293],
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


def positive_variance(sampler: Sampler, v: float, num: int, dim: int) -> float:
    """Var of the mean of exp(w.z - v/2) over one draw (theory: section B, in units of K^2)."""
    pairs = num_pairs(num, dim) / num**2
    return float(np.expm1(v) / num - pairs * sampler.pair_gap(v, dim))


def positive_z_score(rows: np.ndarray, z: np.ndarray, variance: float) -> float:
    """How many exact standard errors the mean of exp(w.z - v/2) over draws is off 1."""
    draws = np.exp(rows @ z - z @ z / 2).mean(axis=-1)
    return float((draws.mean() - 1) / np.sqrt(variance / len(draws)))


def raw_qr(num: int, dim: int, seed: int, draws: int) -> np.ndarray:
    """The common defect: orthogonal blocks from QR, its signs left as LAPACK chose them."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((draws, dim, dim)))
    norms = np.linalg.norm(rng.standard_normal((draws, dim, dim)), axis=-1, keepdims=True)
    rows: np.ndarray = q * norms
    return rows[:, :num]


# --- pair functions ------------------------------------------------------------------------------


def test_known_answers():
    x, y = np.array([0.3, -0.2, 0.5, 0.1]), np.array([-0.1, 0.4, 0.2, 0.6])
    kernel, v, s = np.exp(x @ y), (x + y) @ (x + y), (x - y) @ (x - y)
    gap, gap_trig = orthogonal.pair_gap(v, 4), orthogonal.pair_gap_trig(s, 4)

    def known(value, answer):
        assert value == pytest.approx(answer, rel=1e-13)

    known(np.exp(v) * (1 - gap), 2.67890477976820765)
    known(np.exp(-s) - gap_trig, 0.390836705928013969)
    known(gap, 0.0718778737283415543)
    for num, answer in [(4, 0.46161258773687673), (8, 0.230806293868438365)]:
        known(kernel**2 * positive_variance(orthogonal, v, num, 4), answer)
    known(kernel**2 * positive_variance(orthogonal, v, 6, 4), 0.31656809579099301)
    paired = np.exp(-v) * np.expm1(v) ** 2 / 8 - num_pairs(4, 4) / 16 * gap
    known(kernel**2 * paired, 0.110732538969242649)
    trig = np.expm1(-s) ** 2 / 8 - num_pairs(4, 4) / 16 * gap_trig
    known(np.exp(x @ x + y @ y) * trig, 0.045309579395857401)


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 7, 16, 64, 4096])
def test_pair_gaps_equal_the_exact_series(dim):
    points = np.array([1e-9, 1e-3, 0.25, 0.999, 1.0, 1.001, 4.0, 16.0, 50.0, 200.0, 700.0])
    expected = [exact_gap(point, dim) for point in points]
    np.testing.assert_allclose(orthogonal.pair_gap(points, dim), expected, rtol=1e-14)

    points = np.append(points, 1400.0)
    expected_trig = np.array([exact_gap_trig(point, dim) for point in points])
    gap_trig = orthogonal.pair_gap_trig(points, dim)
    np.testing.assert_allclose(gap_trig, expected_trig, rtol=0, atol=1e-15)
    near = points <= 1
    np.testing.assert_allclose(gap_trig[near], expected_trig[near], rtol=1e-14)


def test_pair_gaps_agree_with_scipy():
    special = pytest.importorskip("scipy.special")
    v = np.linspace(0, 50, 101)
    for dim in range(1, 65):
        gap = 1 - np.exp(-v) * special.hyp1f1(dim, dim / 2, v / 2)
        np.testing.assert_allclose(orthogonal.pair_gap(v, dim), gap, rtol=0, atol=1e-14)
        gap_trig = np.exp(-v) - special.hyp1f1(dim, dim / 2, -v / 2)
        np.testing.assert_allclose(orthogonal.pair_gap_trig(v, dim), gap_trig, rtol=0, atol=2e-15)


@settings(deadline=None)
@given(v=st.floats(0, 1e6), dim=st.integers(1, 300))
def test_positive_gap_keeps_its_bounds(v, dim):
    gap = float(orthogonal.pair_gap(v, dim))
    assert gap <= 1 + 1e-14
    if dim > 1:  # Performer, Theorem 2, of which the gap is the exact form
        assert gap >= 2 / (dim + 2) * np.expm1(-v / 2) ** 2 * (1 - 1e-13)


def test_trigonometric_gap_may_be_negative():
    assert orthogonal.pair_gap_trig(16.0, 4) < 0 < orthogonal.pair_gap_trig(1.0, 4)


@every_sampler
@pytest.mark.parametrize("method", ["pair_gap", "pair_gap_trig"])
def test_pair_gaps_keep_shape_and_take_any_squared_norm(sampler, method):
    gap = getattr(sampler, method)
    assert gap(0.0, 3) == 0
    assert gap(1, 3).dtype == gap([1, 2], 3).dtype == np.float64
    for shape in [(), (0,), (2, 3)]:
        assert gap(np.full(shape, 0.5), 3).shape == shape
    v = np.array([0.5, 1e9, np.inf])
    assert np.all(np.isfinite(gap(v, 3)))
    assert np.array_equal(v, [0.5, 1e9, np.inf])
    with pytest.raises(ValueError, match=r"squared norm must be at least 0, got -0\.5"):
        gap([-0.5, 1.0], 3)
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        gap(1.0, 0)


def test_nan_in_a_pair_gap_stays_where_it_is():
    for gap in (orthogonal.pair_gap, orthogonal.pair_gap_trig):
        values = gap([0.5, np.nan, 2.0], 3)
        assert np.isnan(values[1])
        assert np.array_equal(values[::2], gap([0.5, 2.0], 3))


def test_independent_rows_have_no_gap():
    v = np.linspace(0, 9, 4)
    assert not gaussian.pair_gap(v, 3).any()
    assert not gaussian.pair_gap_trig(v, 3).any()


@settings(deadline=None)
@given(num=st.integers(1, 40), dim=st.integers(1, 12))
def test_num_pairs_counts_pairs_of_one_block(num, dim):
    pairs = [(i, j) for i in range(num) for j in range(num) if i != j and i // dim == j // dim]
    assert num_pairs(num, dim) == len(pairs)


@pytest.mark.parametrize("dim", [2, 4])
def test_drawn_pairs_have_the_stated_gaps(dim):
    """Both gaps are more than 8 standard errors from 0 here, the gap of independent rows."""
    n, v, z = 40_000, 1.0, np.eye(dim)[0]
    rows = orthogonal(dim, dim, 5, batch_shape=(n,)) @ z

    # cosh has the mean of exp and a smaller variance: E cosh^2 u = (1 + E cosh 2u)/2.
    draws = np.exp(-v) * np.cosh(rows[:, 0] + rows[:, -1])
    gap = orthogonal.pair_gap(v, dim)
    second = np.exp(-2 * v) * (1 + np.exp(4 * v) * (1 - orthogonal.pair_gap(4 * v, dim))) / 2
    error = np.sqrt((second - (1 - gap) ** 2) / n)
    assert abs(draws.mean() - (1 - gap)) < 6 * error
    assert gap > 8 * error

    # cos a cos b = (cos(a + b) + cos(a - b))/2, both of one law; bounded, so its own error will do.
    draws = np.cos(rows[:, 0]) * np.cos(rows[:, -1])
    gap = orthogonal.pair_gap_trig(v, dim)
    error = draws.std() / np.sqrt(n)
    assert abs(draws.mean() - (np.exp(-v) - gap)) < 6 * error
    assert gap > 8 * error


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


@every_sampler
def test_squared_norms_follow_chi_squared(sampler):
    stats = pytest.importorskip("scipy.stats")
    dim = 5
    norms = (sampler(4_000, dim, 7) ** 2).sum(axis=1)
    assert stats.kstest(norms, stats.chi2(dim).cdf).pvalue > 1e-6
    # The correlation of independent norms of neighbours is 0 with standard error 1/sqrt(n).
    assert abs(np.corrcoef(norms[::2], norms[1::2])[0, 1]) < 6 / np.sqrt(2_000)
    # Norms all equal to their root mean square, a common shortcut, are another law.
    assert stats.kstest(np.full(4_000, dim), stats.chi2(dim).cdf).pvalue < 1e-6


@every_sampler
@pytest.mark.parametrize("row", [0, 2, 3, 6], ids="row {}".format)
def test_each_row_is_standard_normal(sampler, row):
    """Cramer-Wold: projections on axes and diagonals, each tested at a false alarm of 1e-6."""
    stats = pytest.importorskip("scipy.stats")
    dim, n = 4, 4_000
    directions = np.array([[1, 0, 0, 0], [0, 0, 0, 1], [0.5] * 4, [0.5, -0.5, 0.5, -0.5]])
    rows = sampler(7, dim, 8, batch_shape=(n,))[:, row]
    for direction in directions:
        assert stats.kstest(rows @ direction, stats.norm.cdf).pvalue > 1e-6
    if row == 0:
        raw = raw_qr(1, dim, 8, n)[:, 0] @ directions[0]
        assert stats.kstest(raw, stats.norm.cdf).pvalue < 1e-6


@every_sampler
@pytest.mark.parametrize("num", [1, 8, 11, 16], ids="num {}".format)
@pytest.mark.parametrize("sign", [1, -1])
def test_odd_estimates_are_unbiased(sampler, num, sign):
    dim = 8
    z = sign * np.ones(dim) / np.sqrt(dim)
    rows = sampler(num, dim, 9, batch_shape=(4_000,))
    assert abs(positive_z_score(rows, z, positive_variance(sampler, 1.0, num, dim))) < 6


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dim", [8, 16])
def test_odd_estimates_reveal_qr_without_its_signs(dim, sign):
    z = sign * np.ones(dim) / np.sqrt(dim)
    variance = positive_variance(orthogonal, 1.0, dim, dim)
    score = positive_z_score(raw_qr(dim, dim, 9, 4_000), z, variance)
    assert -sign * score > 10
    assert -sign * score * np.sqrt(variance / 4_000) > 0.1  # the bias itself, relative


@pytest.mark.parametrize("sign", [1, -1])
def test_mean_of_the_positive_estimate_over_6000_draws(sign):
    dim, num = 16, 48
    z = sign * 0.7 * np.ones(dim) / np.sqrt(dim)
    variance = positive_variance(orthogonal, z @ z, num, dim)
    rows = orthogonal(num, dim, 10, batch_shape=(6_000,))
    assert abs(positive_z_score(rows, z, variance)) < 6


def test_truncated_blocks_and_the_smallest_sizes():
    assert orthogonal(3, 8, 0).shape == (3, 8)
    assert orthogonal(11, 8, 0).shape == (11, 8)
    assert orthogonal(1, 1, 0).shape == (1, 1)
    signs = np.sign(orthogonal(400, 1, 0))
    assert set(signs.ravel()) == {-1.0, 1.0}
    assert abs(signs.sum()) < 6 * np.sqrt(400)


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
    assert np.array_equal(rows, sampler(num, dim, seed))
    assert np.array_equal(rows, sampler(num, dim, np.random.default_rng(seed)))
    assert np.array_equal(rows, sampler(num, dim, np.random.SeedSequence(seed)))
    assert np.array_equal(rows, sampler(num, dim, np.random.PCG64(seed)))
    assert not np.array_equal(rows, sampler(num, dim, seed + 1))


@every_sampler
@settings(deadline=None)
@given(
    num=st.integers(1, 20),
    more=st.integers(0, 20),
    dim=st.integers(1, 9),
    batch_shape=st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
def test_batches_and_longer_draws_start_alike(sampler, num, more, dim, batch_shape):
    generator = np.random.default_rng(11)
    batch = sampler(num, dim, 11, batch_shape=batch_shape)
    assert batch.shape == (*batch_shape, num, dim)
    for index in np.ndindex(batch_shape):
        np.testing.assert_allclose(batch[index], sampler(num, dim, generator), rtol=1e-12)
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


@every_sampler
@pytest.mark.parametrize("rng", [True, False, np.True_])
def test_bool_is_no_seed(sampler, rng):
    with pytest.raises(TypeError, match=r"rng must be .* got the bool"):
        as_generator(rng)
    with pytest.raises(TypeError, match=r"rng must be .* got the bool"):
        sampler(2, 2, rng)


@pytest.mark.parametrize(("rng", "error"), [(-1, ValueError), (1.5, TypeError), ("a", TypeError)])
def test_other_bad_seeds_are_refused_as_numpy_does(rng, error):
    with pytest.raises(error) as numpys:
        np.random.default_rng(rng)
    with pytest.raises(error) as ours:
        orthogonal(2, 2, rng)
    assert str(ours.value) == str(numpys.value)


def test_large_seeds_are_not_truncated():
    rows = [orthogonal(2, 2, seed).tobytes() for seed in (5, 2**32 + 5, 2**64 + 5)]
    assert len(set(rows)) == 3


def test_spawned_seeds_are_distinct():
    layers = np.random.SeedSequence(0).spawn(6)
    seeds = [head for layer in layers for head in layer.spawn(8)]
    assert len({orthogonal(6, 4, seed).tobytes() for seed in seeds}) == 48
    # The trap that spawning avoids: appending a layer's number, which may be 0, to a seed.
    parent, child = np.random.SeedSequence(3), np.random.SeedSequence([3, 0])
    assert np.array_equal(orthogonal(6, 4, parent), orthogonal(6, 4, child))


@every_sampler
def test_global_random_state_is_untouched(sampler):
    legacy, standard = np.random.get_state(), random.getstate()  # noqa: NPY002
    sampler(6, 4)
    sampler(6, 4, 0)
    for before, after in zip(legacy, np.random.get_state(), strict=True):  # noqa: NPY002
        assert np.array_equal(before, after)
    assert random.getstate() == standard


@every_sampler
def test_threads_agree(sampler):
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda _: sampler(40, 16, 12), range(8)))
    assert len({draw.tobytes() for draw in rows}) == 1


# --- samplers as objects -------------------------------------------------------------------------


def test_samplers_are_found_by_their_names():
    assert {"gaussian": gaussian, "orthogonal": orthogonal} == SAMPLERS
    for name, sampler in SAMPLERS.items():
        assert isinstance(sampler, Sampler)
        assert sampler.name == name
        assert sampler.unbiased
        assert getattr(sampling, name) is sampler
        assert name in sampling.__all__


@every_sampler
def test_samplers_pickle_copy_compare_and_freeze(sampler):
    for twin in (pickle.loads(pickle.dumps(sampler)), copy.copy(sampler), copy.deepcopy(sampler)):
        assert twin == sampler
        assert hash(twin) == hash(sampler)
        assert np.array_equal(twin(6, 4, 0), sampler(6, 4, 0))
    assert gaussian != orthogonal
    assert repr(sampler) == f"Sampler(name={sampler.name!r}, unbiased=True)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.name = "other"


def test_samplers_document_themselves():
    assert Sampler.__doc__ is not None
    for sampler in SAMPLERS.values():
        assert sampler.__doc__ is not None
        assert "float64, shape ``(*batch_shape, num, dim)``" in sampler.__doc__
        assert sampler.__doc__ != Sampler.__doc__


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


@every_sampler
def test_numpy_integers_are_ints(sampler):
    rows = sampler(np.int64(6), np.uint8(4), np.int32(0), batch_shape=(np.int64(2),))
    assert np.array_equal(rows, sampler(6, 4, 0, batch_shape=(2,)))

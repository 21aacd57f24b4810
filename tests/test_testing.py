"""`linattn.testing`: thresholds against known answers, strategies, refusals and the report.

What chance decides fails in at most `TOTAL_FALSE_ALARM_RATE` of all runs. Fresh draws:

    LINATTN_TEST_SEED=1 HYPOTHESIS_PROFILE=fresh pytest tests/test_testing.py
"""

from __future__ import annotations

import inspect
import os
import re
from math import comb, exp, expm1, sqrt
from typing import Any

import array_api_compat
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal, assert_array_less

import linattn
from linattn import testing
from linattn.feature_maps import (
    ActivationFeatures,
    DenseExponentialFeatures,
    EluFeatures,
    GeneralizedExponentialFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    RandomFourierFeatures,
    Reparametrized,
    SoftmaxFeatures,
    TrigonometricFeatures,
)
from linattn.sampling import SAMPLERS, gaussian, orthogonal
from linattn.testing._attention_cases import LENGTHS
from linattn.testing.check import CHECKS, Row
from linattn.testing.moments import block_kurtosis, exponential_moments, orthogonal_block_moment
from linattn.testing.statistics import (
    at_most_test,
    bernstein_bound,
    betting_test,
    detectable_shift,
    moment_bound,
    score_test,
    variance_bound,
)
from linattn.typing import Features

CHANCE = ("mean", "variance")
SEED = int(os.environ.get("LINATTN_TEST_SEED", "0"))

# At most 250 runs of assertions at 1e-9 (one property, in the profile "fresh", has 200 examples
# at 1e-11), and twelve counts of errors that a binomial law exceeds with less than 1e-9 each.
TOTAL_FALSE_ALARM_RATE = 3e-7

UNBIASED = sorted(name for name, sampler in SAMPLERS.items() if sampler.unbiased)


@pytest.fixture
def rng():
    return np.random.default_rng(SEED)


class TestKnownAnswers:
    @pytest.mark.parametrize(
        ("v", "rate", "num_draws", "expected"),
        [
            (0.1, 1e-6, 4096, 5.34),
            (0.5, 1e-6, 256, 7.35),
            (1.0, 1e-6, 2**20, 6.24),
            (4.0, 1e-6, 256, 436),
            (1.0, 1e-9, 4096, 19.9),
        ],
    )
    def test_moment_bound_in_standard_errors(self, v, rate, num_draws, expected):
        bound = moment_bound(exponential_moments(v, 60), num_draws, false_alarm_rate=rate)
        assert bound / sqrt(expm1(v) / num_draws) == pytest.approx(expected, rel=3e-3)

    def test_moments_of_a_row(self):
        v = 1.06
        moments = exponential_moments(v, 4)
        assert moments[:2] == [1.0, 0.0]
        assert moments[2] == pytest.approx(expm1(v), rel=1e-14)
        assert moments[4] == pytest.approx(exp(6 * v) - 4 * exp(3 * v) + 6 * exp(v) - 3, rel=1e-13)

    def test_moments_do_not_cancel_at_small_norms(self):
        double_factorial = 3 * 5 * 7 * 9 * 11 * 13 * 15 * 17 * 19
        moments = exponential_moments(1e-6, 20)
        assert moments[20] == pytest.approx(double_factorial * 1e-60, rel=1e-3)

    @pytest.mark.parametrize(
        ("powers", "v", "expected"),
        [
            ((1, 1), 1.06, 2.67890477976820765),
            ((1, 1), -0.86, 0.390836705928013969),
            ((2, 1, 1), 0.25, 2.0357329137795991),
            ((3,), 0.5, exp(9 * 0.25)),
        ],
    )
    def test_joint_moment_of_a_block(self, powers, v, expected):
        assert orthogonal_block_moment(powers, v, 4) == pytest.approx(expected, rel=1e-13)

    def test_fourth_moment_of_a_block(self):
        x = np.full((1, 4), 0.25 / sqrt(4) * 1.0)
        feature_map = PositiveFeatures(4, 4, scale=1.0, rng=0)
        v = float(np.sum((2 * x) ** 2))
        relative = feature_map.variance(x, x)[0, 0] / feature_map.kernel(x, x)[0, 0] ** 2
        assert v == pytest.approx(0.25)
        kurtosis = block_kurtosis("positive", v, 4, 4, orthogonal=True)
        assert kurtosis * relative**2 == pytest.approx(0.0141045230799416574, rel=1e-9)

    @pytest.mark.parametrize(
        ("v", "dim", "together", "alone"),
        [(0.25, 4, 3.11, 4.47), (0.25, 8, 2.69, 3.74), (0.25, 16, 2.70, 3.37), (1, 8, 17, None)],
    )
    def test_kurtosis_of_blocks(self, v, dim, together, alone):
        assert block_kurtosis("positive", v, dim, dim, orthogonal=True) == pytest.approx(
            together, rel=5e-3
        )
        if alone is not None:
            assert block_kurtosis("positive", v, dim, dim, orthogonal=False) == pytest.approx(
                alone, rel=2e-3
            )

    @pytest.mark.parametrize("kind", ["positive", "paired", "trigonometric"])
    @pytest.mark.parametrize("A", [0.0, -0.2])
    def test_kurtosis_of_one_row_by_quadrature(self, kind, A):
        if kind == "trigonometric" and A:
            pytest.skip("trigonometric: no tilt")
        nodes, weights = np.polynomial.hermite_e.hermegauss(200)
        weights = weights / weights.sum()
        v = 0.7
        u = sqrt(v * (1 - 4 * A)) * nodes
        row = {"positive": np.exp(u), "paired": np.cosh(u), "trigonometric": np.cos(u)}[kind]
        row = row * np.exp(2 * A * nodes**2)
        row = row - weights @ row
        expected = (weights @ row**4) / (weights @ row**2) ** 2
        for is_orthogonal in (False, True):
            got = block_kurtosis(kind, v, 1, 1, orthogonal=is_orthogonal, A=A)
            assert got == pytest.approx(expected, rel=1e-9)

    def test_blocks_of_one_row_are_independent_rows(self):
        one = block_kurtosis("paired", 0.5, 1, 3, orthogonal=False)
        many = block_kurtosis("paired", 0.5, 7, 3, orthogonal=False)
        assert many - 3 == pytest.approx((one - 3) / 7, rel=1e-9)
        partial = block_kurtosis("positive", 0.5, 5, 4, orthogonal=True)
        assert partial != pytest.approx(block_kurtosis("positive", 0.5, 4, 4, orthogonal=True))

    def test_bernstein(self):
        variance = 0.166370991637997796
        bound = bernstein_bound(variance, 2.0, 4096, false_alarm_rate=1e-6)
        assert bound == pytest.approx(0.0368, abs=5e-5)

    def test_score_is_a_mean_of_six_and_a_half_standard_errors(self):
        deviations = np.full(10**6, 6.6e-3)
        assert not score_test(deviations, 1.0).passed
        assert not score_test(-deviations, 1.0).passed
        assert score_test(deviations * (6.4 / 6.6), 1.0).passed
        assert score_test(-deviations, 1.0, side="above").passed
        assert score_test(deviations, 1.0, rounding=1e-3).passed
        assert not score_test(np.append(np.zeros(99), np.nan), 1.0).passed

    def test_one_refuted_entry_refutes_all(self):
        deviations = np.zeros((10**4, 50))
        deviations[:, 7] = 0.08
        test = score_test(deviations, 1.0)
        assert not test.passed
        assert np.flatnonzero(test.score >= test.threshold).tolist() == [7]

    def test_entries_that_agree_refute_together(self):
        """What a union bound lets through: no score alone is at the threshold."""
        many = score_test(np.full((10**5, 50), 6.75e-3 * sqrt(10)), 1.0)
        assert_array_less(many.score, many.threshold)
        assert not many.passed
        few = score_test(np.full((10**5, 50), 6.4e-3 * sqrt(10)), 1.0)
        assert few.passed

    def test_betting_known_answers(self):
        n = 4000
        coin = np.where(np.arange(n) % 2, 1.0, -1.0)
        assert betting_test(coin, 1.0).passed
        assert not betting_test(coin * 0.1 + 0.05, 1.0).passed
        assert not betting_test(coin * 0.1 - 0.05, 1.0).passed
        assert not betting_test(np.append(coin, np.nan), 1.0).passed
        # All at one bound: each draw wins up to three quarters of the money.
        log_wealth = float(betting_test(np.ones((200, 1)), 1.0).score[0])
        assert 70 < log_wealth < 200 * np.log(1.75)
        with pytest.raises(ValueError, match=r"deviations must be at most bound, got 0\.5 more"):
            betting_test(np.full(9, 1.5), 1.0)

    def test_variance_bound_known_answers(self):
        # One draw in kappa is not 0: (1 - 1 / kappa)^n = alpha has no non-zero draw at all.
        n = int(np.log(1e-9) / np.log1p(-1 / 25))
        assert variance_bound(np.ones(n), 25.0) == np.inf
        assert np.isfinite(variance_bound(np.ones(n + 1), 25.0))
        assert variance_bound(np.ones(2000), 25.0) == pytest.approx(2.62, abs=0.01)
        assert variance_bound(np.ones(10**8), 25.0) == pytest.approx(1.0, abs=5e-3)
        for kurtosis in (1.0, -3.0, float("nan")):
            with pytest.raises(ValueError, match="kurtosis must be above 1"):
                variance_bound(np.ones(9), kurtosis)

    @pytest.mark.parametrize("rate", [0.0, 1.0, 2.0, -1e-9, 1, "1e-9"])
    def test_rates_are_checked(self, rate):
        for call in (
            lambda: score_test(np.zeros(9), 1.0, false_alarm_rate=rate),
            lambda: betting_test(np.zeros(9), 1.0, false_alarm_rate=rate),
            lambda: variance_bound(np.zeros(9), 9.0, false_alarm_rate=rate),
            lambda: moment_bound([1, 0, 1], 9, false_alarm_rate=rate),
            lambda: bernstein_bound(1, 1, 9, false_alarm_rate=rate),
            lambda: at_most_test(np.zeros(9), 1.0, 2.0, false_alarm_rate=rate),
            lambda: detectable_shift(1.0, 9, false_alarm_rate=rate),
        ):
            with pytest.raises(ValueError, match="false_alarm_rate must be"):
                call()

    def test_arguments_are_checked(self):
        with pytest.raises(ValueError, match="side must be"):
            score_test(np.zeros(9), 1.0, side="below")
        with pytest.raises(ValueError, match="central_moments must have"):
            moment_bound([1, 0], 9)
        with pytest.raises(ValueError, match="want a kind"):
            block_kurtosis("even", 0.5, 4, 4, orthogonal=True)


def exceeds(trials, rate):
    """Count that a binomial law of this rate exceeds with probability below 1e-9."""
    tail, count = 1.0, 0
    while tail >= 1e-9:
        tail -= comb(trials, count) * rate**count * (1 - rate) ** (trials - count)
        count += 1
    return count - 1


class TestErrorRates:
    """Rates large enough to be counted: at 1 % each, over many repetitions at once."""

    REPEATS, DRAWS, RATE = 4000, 300, 0.01

    def draws(self, rng, law):
        shape = (self.REPEATS, self.DRAWS)
        if law == "two points":
            return np.where(rng.random(shape) < 1 / 6000, 5999.0, -1.0), 5999.0
        return np.exp(rng.standard_normal(shape) - 0.5) - 1, expm1(1.0)

    @pytest.mark.parametrize("law", ["lognormal", "two points"])
    def test_score_test_keeps_its_rate_and_its_promise(self, rng, law):
        draws, variance = self.draws(rng, law)
        shift = detectable_shift(variance, self.DRAWS, false_alarm_rate=self.RATE)
        alarms, misses = 0, 0
        for row in draws:
            alarms += not score_test(row, variance, false_alarm_rate=self.RATE).passed
            moved = row + shift
            misses += score_test(moved, variance, false_alarm_rate=self.RATE).passed
        assert alarms <= exceeds(self.REPEATS, self.RATE)
        assert misses <= exceeds(self.REPEATS, 0.01)

    @pytest.mark.parametrize("name", ["score", "betting", "at most", "variance"])
    def test_rate_is_that_of_all_entries_together(self, rng, name):
        """Without a bound over the entries, each of 300 would raise the alarm at the rate of all.

        Of Gaussian draws 2 to 8 % are then beyond an entry's own threshold for 20 %: nearly every
        run of 300 independent entries would fail.
        """
        repeats, rate, shape = 300, 0.2, (60, 300)
        alarms = 0
        for _ in range(repeats):
            g = rng.standard_normal(shape)
            if name == "score":
                alarms += not score_test(g, 1.0, false_alarm_rate=rate).passed
            elif name == "betting":
                coin = np.where(g > 0, 1.0, -1.0)
                alarms += not betting_test(coin, 1.0, false_alarm_rate=rate).passed
            elif name == "at most":
                coin = np.where(g > 0, 1.0, 0.0)
                alarms += not at_most_test(coin, 0.5, 1.0, false_alarm_rate=rate).passed
            else:
                two_points = np.where(rng.random(shape) < 1 / 3, 3.0, 0.0)
                alarms += bool(np.any(variance_bound(two_points, 3.0, false_alarm_rate=rate) < 1))
        assert alarms <= exceeds(repeats, rate)

    def test_variance_bound_keeps_its_rate(self, rng):
        """At the law for which it is sharp: two points."""
        squares = np.where(rng.random((400, self.REPEATS)) < 1 / 25, 25.0, 0.0)
        below = sum(
            float(variance_bound(row, 25.0, false_alarm_rate=self.RATE)) < 1 for row in squares.T
        )
        assert below <= exceeds(self.REPEATS, self.RATE)

    def test_betting_keeps_its_rate_and_sees_small_errors(self, rng):
        draws = np.where(rng.random((self.REPEATS, self.DRAWS)) < 0.02, 0.98, -0.02)
        alarms = sum(
            not betting_test(row, 0.98, false_alarm_rate=self.RATE).passed for row in draws
        )
        assert alarms <= exceeds(self.REPEATS, self.RATE)
        narrow = 0.01 * rng.standard_normal(4000).clip(-3, 3)
        assert not betting_test(narrow + 0.02, 1.0).passed
        assert bernstein_bound(1.0, 1.0, 4000) > 5 * 0.02

    def test_at_most(self, rng):
        draws, _ = self.draws(rng, "lognormal")
        y = draws + 1
        alarms = sum(
            not at_most_test(row, 1.0, 20.0, false_alarm_rate=self.RATE).passed for row in y
        )
        assert alarms <= exceeds(self.REPEATS, self.RATE)
        assert not at_most_test(y[0], 0.3, 6.0).passed
        assert not at_most_test(np.full(50, 9.0), 1.0, 2.0).passed


TRANSFORM = np.array([[1.2, 0.1, 0.0], [0.0, 0.9, -0.1], [0.1, 0.0, 1.0]])
MAPS = {
    "positive": lambda sampler: PositiveFeatures(3, 6, sampler=sampler, rng=SEED),
    "hyperbolic": lambda sampler: HyperbolicFeatures(3, 8, sampler=sampler, rng=SEED),
    "trigonometric": lambda sampler: TrigonometricFeatures(3, 8, sampler=sampler, rng=SEED),
    "tilted": lambda sampler: GeneralizedExponentialFeatures(
        3, 8, A=-0.1, sampler=sampler, rng=SEED
    ),
    "shifted": lambda sampler: Reparametrized(
        PositiveFeatures(3, 6, sampler=sampler, rng=SEED), np.full(3, 0.1), np.full(3, -0.2)
    ),
    "dense": lambda sampler: DenseExponentialFeatures(
        3, 8, A=[-0.1, -0.05, 0.02], transform=TRANSFORM, sampler=sampler, rng=SEED
    ),
    "fourier": lambda sampler: RandomFourierFeatures(3, 8, sampler=sampler, rng=SEED),
    "heaviside": lambda sampler: ActivationFeatures(
        3, 6, activation="heaviside", sampler=sampler, rng=SEED
    ),
    "relu": lambda sampler: ActivationFeatures(3, 6, sampler=sampler, rng=SEED),
    "squared_relu": lambda sampler: ActivationFeatures(
        3, 6, activation="squared_relu", sampler=sampler, rng=SEED
    ),
}
STEADY = {"hyperbolic", "trigonometric", "tilted", "dense", "fourier"}

UNBIASED_PAIRS = [(m, s) for m in MAPS for s in UNBIASED if m == "hyperbolic" or s == "orthogonal"]


class TestEstimates:
    @pytest.mark.parametrize(("name", "sampler"), UNBIASED_PAIRS)
    def test_every_unbiased_pair(self, name, sampler):
        """Every map with one sampler, and every sampler with one map: it draws rows alone."""
        feature_map = MAPS[name](sampler)
        assert feature_map.unbiased
        # Where a draw varies little, a third of the draws sees smaller a bias than all the others.
        num_draws, detectable = (500, 0.45) if name in STEADY else (1500, 0.5)
        evidence = testing.assert_unbiased(feature_map, num_draws=num_draws, rng=SEED)
        assert evidence.false_alarm_rate == 1e-9
        assert 0 < evidence.detectable < detectable

    @pytest.mark.parametrize("name", ["positive", "trigonometric"])
    def test_exact_variance(self, name):
        evidence = testing.assert_variance(MAPS[name]("orthogonal"), num_draws=3000, rng=SEED)
        assert "approximate" not in evidence.detail
        assert 0 < evidence.detectable < 0.6

    @given(
        feature_map=testing.feature_maps(samplers=("gaussian", "orthogonal")),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_any_map_is_unbiased(self, feature_map, seed):
        try:
            testing.assert_unbiased(feature_map, num_draws=600, false_alarm_rate=1e-11, rng=seed)
        except testing.UntestableError:
            assume(False)

    def test_seed_repeats_the_draws(self):
        feature_map = PositiveFeatures(3, 6, rng=0)
        messages = []
        for seed in (1, 1, 2):
            with pytest.raises(AssertionError) as caught:
                testing.assert_unbiased(
                    feature_map,
                    x=np.full((1, 3), 0.3),
                    y=np.full((1, 3), 0.3),
                    kernel=lambda x, y: 1.5 * feature_map.kernel(x, y),
                    num_draws=1500,
                    rng=seed,
                )
            messages.append(str(caught.value))
        assert messages[0] == messages[1] != messages[2]
        assert messages[0].startswith("assert_unbiased: mean ")

    def test_long_vectors_are_refused(self):
        x = np.full((1, 4), 1.0)
        feature_map = PositiveFeatures(4, 64, rng=0)
        with pytest.raises(testing.UntestableError, match=r"at most 2, got 8.*no test of means"):
            testing.assert_unbiased(feature_map, x, x)
        with pytest.raises(testing.UntestableError, match="at most 2"):
            testing.assert_variance(feature_map, x, x)
        assert testing.assert_unbiased(feature_map, x, -x, num_draws=400).detectable < 1e-6

    def test_too_few_draws_are_refused(self):
        x = np.full((1, 4), 0.4)
        with pytest.raises(testing.UntestableError, match="num_draws is too small"):
            testing.assert_unbiased(PositiveFeatures(4, 4, rng=0), x, x, num_draws=60)
        with pytest.raises(testing.UntestableError, match="num_draws is too small"):
            testing.assert_variance(PositiveFeatures(4, 4, rng=0), x, x, num_draws=200)

    @pytest.mark.parametrize("num_draws", [1, 10, 60])
    def test_pairs_that_never_vary_are_no_evidence(self, num_draws):
        """Opposite vectors give every draw the same product; they are among the default pairs."""
        with pytest.raises(testing.UntestableError, match="num_draws is too small"):
            testing.assert_unbiased(PositiveFeatures(4, 4, rng=0), num_draws=num_draws)

    def test_measured_variance(self):
        """Rows of a sampler of which nothing is known, by an assumption about the kurtosis."""
        sampler = lambda num, dim, rng: gaussian(num, dim, rng)  # noqa: E731
        feature_map = PositiveFeatures(4, 8, sampler=sampler, rng=0)
        evidence = testing.assert_unbiased(feature_map, kurtosis=25.0, rng=SEED)
        assert "variance measured, for a kurtosis of at most 25" in evidence.detail
        known = testing.assert_unbiased(PositiveFeatures(4, 8, sampler="gaussian", rng=0), rng=SEED)
        assert known.detectable < evidence.detectable < 4 * known.detectable
        assert known.detectable_sd < evidence.detectable_sd < 0.5
        with pytest.raises(AssertionError, match=r"variance measured, for a kurtosis"):
            testing.assert_unbiased(
                feature_map, kernel=lambda x, y: 1.2 * feature_map.kernel(x, y), kurtosis=25.0
            )
        with pytest.raises(testing.UntestableError, match="any bias could pass"):
            testing.assert_unbiased(feature_map, kurtosis=25.0, num_draws=900)

    def test_large_claim_of_a_variance_shows(self):
        """The bias that passes, in standard deviations of a draw as they are, not as claimed."""
        feature_map = PositiveFeatures(4, 64, rng=0)
        larger = lambda x, y: 25 * feature_map.variance(x, y)  # noqa: E731
        right, wide = (
            testing.assert_unbiased(feature_map, variance=claim, num_draws=2000, rng=SEED)
            for claim in (None, larger)
        )
        assert wide.detectable_sd == pytest.approx(5 * right.detectable_sd, rel=0.1)
        assert right.detectable_sd < 0.5 < wide.detectable_sd

    def test_failure_says_in_words_what_was_seen(self):
        feature_map = PositiveFeatures(4, 8, rng=0)

        def claim(x, y):
            return feature_map.kernel(x, y) + 2 * feature_map.variance(x, y)

        with pytest.raises(AssertionError) as caught:
            testing.assert_unbiased(feature_map, kernel=claim, rng=SEED)
        message = str(caught.value)
        number = r"[-+.\de]+"
        found = re.fullmatch(
            rf"assert_unbiased: mean of phi\(x\) \. psi\(y\) over 4000 draws is ({number}), the "
            rf"kernel is ({number}) \({number} %\): ({number}) standard errors away\. One standard "
            rf"error is ({number}), from a variance of {number} \(as stated\); these draws have "
            rf"{number}\. A map with this kernel and variance fails in at most 1e-09 of all runs\. "
            rf"pair (\d+) of linattn\.testing\.(standard_pairs\(.*?\)): x = .*, y = .*",
            message,
        )
        assert found is not None, message
        mean, kernel, errors, error, index = (float(text) for text in found.groups()[:5])
        assert abs(mean - kernel) / error == pytest.approx(errors, rel=0.02)
        # The pair can be made again from the message.
        x, y = eval(found[6], {"standard_pairs": testing.standard_pairs})
        at = int(index)
        assert claim(x[at : at + 1], y[at : at + 1]) == pytest.approx(kernel, rel=1e-5)

    def test_failure_names_given_pairs_and_heads(self):
        feature_map = GeneralizedExponentialFeatures(4, 16, A=[-0.1, 0.0], rng=0)
        x = 0.1 * np.ones((3, 4))
        with pytest.raises(AssertionError, match=r"pair \d of the pairs given for head \(\d,\): x"):
            testing.assert_unbiased(
                feature_map, x, x, kernel=lambda x, y: 2 * feature_map.kernel(x, y), rng=SEED
            )

    def test_variance_failure_in_words(self):
        feature_map = PositiveFeatures(4, 8, rng=0)
        claim = lambda x, y: 3 * feature_map.variance(x, y)  # noqa: E731
        with pytest.raises(
            AssertionError,
            match=r"variance of phi.* over 3000 draws is .*, want equal .* a standard error, as "
            r"measured, is .* 1e-09 of all runs\. pair \d of linattn\.testing\.standard_pairs\(",
        ):
            testing.assert_variance(feature_map, variance=claim, num_draws=3000, rng=SEED)

    @pytest.mark.parametrize("num_draws", [0, -3, 2.5])
    def test_draws_are_checked(self, num_draws):
        feature_map = PositiveFeatures(4, 8, rng=0)
        for call in (
            lambda: testing.assert_unbiased(feature_map, num_draws=num_draws),
            lambda: testing.assert_variance(feature_map, num_draws=num_draws),
            lambda: testing.assert_gaussian_rows(gaussian, num_draws=num_draws),
        ):
            with pytest.raises((TypeError, ValueError), match="num_draws"):
                call()

    @given(dim=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
    def test_standard_pairs(self, dim, seed):
        x, y = testing.standard_pairs(dim, 0.25, seed)
        powers = sum(1 for k in range(1, 10) if 2**k < dim)
        assert x.shape == y.shape == (8 + powers, dim)
        v = 0.25 * np.sum((x + y) ** 2, axis=-1)
        assert v.max() <= 0.5 + 1e-12
        assert_array_equal(x, testing.standard_pairs(dim, 0.25, seed)[0])
        with pytest.raises(ValueError, match="scale must be a positive finite number"):
            testing.standard_pairs(dim, 0.0, seed)

    def test_given_projection_is_refused(self):
        feature_map = PositiveFeatures.from_projection(np.eye(4))
        with pytest.raises(testing.UntestableError, match="whose projection was given"):
            testing.assert_unbiased(feature_map)

    def test_no_variance_is_refused(self):
        sampler = lambda num, dim, rng: gaussian(num, dim, rng)  # noqa: E731
        feature_map = PositiveFeatures(4, 8, sampler=sampler, rng=0)
        with pytest.raises(testing.UntestableError, match="variance= must be given"):
            testing.assert_unbiased(feature_map)
        known = PositiveFeatures(4, 8, sampler="gaussian", rng=0)
        testing.assert_unbiased(feature_map, variance=known.variance, num_draws=1000, rng=SEED)

    def test_deterministic_map(self):
        assert testing.assert_unbiased(EluFeatures()).false_alarm_rate == 0
        with pytest.raises(AssertionError, match="the map is deterministic here"):
            testing.assert_unbiased(EluFeatures(), kernel=lambda x, y: x @ np.swapaxes(y, -1, -2))
        with pytest.raises(testing.UntestableError, match="must be random"):
            testing.assert_variance(EluFeatures())

    @pytest.mark.parametrize("wrong", [3, "PositiveFeatures", lambda rng: 3])
    def test_not_a_map(self, wrong):
        with pytest.raises(TypeError, match="map_or_factory must be"):
            testing.assert_unbiased(wrong)

    def test_pairs_are_checked(self):
        with pytest.raises(ValueError, match="pairs of shape"):
            testing.assert_unbiased(EluFeatures(), np.ones((2, 3)), np.ones((3, 3)))
        with pytest.raises(ValueError, match="must not be negative"):
            testing.assert_unbiased(PositiveFeatures(3, 6, rng=0), variance=-1.0)
        with pytest.raises(ValueError, match="relation must be"):
            testing.assert_variance(PositiveFeatures(3, 6, rng=0), relation="about")

    def test_variance_without_a_known_kurtosis(self):
        feature_map = PositiveFeatures(4, 8, sampler="simplex", rng=0)
        evidence = testing.assert_variance(feature_map, num_draws=2000, rng=SEED)
        assert "approximate rate" in evidence.detail
        evidence = testing.assert_variance(
            feature_map, relation="at_most", num_draws=2000, rng=SEED
        )
        assert "approximate" not in evidence.detail
        known = testing.assert_variance(
            feature_map, kurtosis=12.0, relation="at_most", num_draws=2000, rng=SEED
        )
        assert known.detectable < evidence.detectable
        with pytest.raises(AssertionError, match="want at most"):
            testing.assert_variance(
                feature_map,
                variance=lambda x, y: feature_map.variance(x, y) / 4,
                relation="at_most",
                num_draws=2000,
                rng=SEED,
            )

    def test_map_of_each_head(self, rng):
        feature_map = GeneralizedExponentialFeatures(
            4, 16, A=[-0.1, -0.02, 0.01], sampler="gaussian", rng=0
        )
        testing.assert_unbiased(feature_map, num_draws=1500, rng=SEED)
        assert testing.check_feature_map(feature_map, skip=CHANCE, length=33).passed

    @pytest.mark.parametrize("sampler", UNBIASED)
    def test_rows_of_unbiased_samplers(self, sampler):
        testing.assert_gaussian_rows(SAMPLERS[sampler], 6, 4, num_draws=3000, rng=SEED)

    @pytest.mark.parametrize(("num", "dim"), [(1, 64), (64, 64), (8, 4)])
    def test_rows_of_a_raw_qr(self, num, dim):
        """Signs that are not fixed: at 64 rows each is off by 5 % of its length, all alike."""

        def raw_qr(num, dim, rng):
            q, _ = np.linalg.qr(rng.standard_normal((-(-num // dim), dim, dim)))
            norms = np.linalg.norm(rng.standard_normal((num, dim)), axis=-1)
            return q.reshape(-1, dim)[:num] * norms[:, None]

        with pytest.raises(AssertionError, match=r"mean of sin\(omega \. delta\) over 1500 draws"):
            testing.assert_gaussian_rows(raw_qr, num, dim, num_draws=1500, rng=SEED)
        evidence = testing.assert_gaussian_rows(orthogonal, num, dim, num_draws=1500, rng=SEED)
        assert "of a mean of cos or sin" in evidence.detail
        assert evidence.detectable < 0.35

    def test_detectable_of_rows_is_detected(self):
        """What is said to be seen is: a mean of the rows that moves the sine by as much."""

        def moved(num, dim, rng):
            rows = gaussian(num, dim, rng)
            rows[:, -1] += 2.5 * evidence.detectable
            return rows

        evidence = testing.assert_gaussian_rows(gaussian, 16, 64, num_draws=2000, rng=SEED)
        assert evidence.detectable < 0.1
        with pytest.raises(AssertionError, match="mean of sin"):
            testing.assert_gaussian_rows(moved, 16, 64, num_draws=2000, rng=SEED)

    def test_rows_of_biased_samplers(self):
        for sampler in ("quantile", "fixed_norm"):
            with pytest.raises(AssertionError, match="assert_gaussian_rows"):
                testing.assert_gaussian_rows(SAMPLERS[sampler], 4, 4, rng=SEED)
        with pytest.raises(AssertionError, match=r"want rows of shape \(8, 4\)"):
            testing.assert_gaussian_rows(lambda num, dim, rng: np.zeros((num, dim + 1)))


class TestStrategies:
    @given(data=st.data())
    def test_query_key_value_belong_together(self, xp_any_shape, data):
        xp = xp_any_shape.xp
        arrays = data.draw(testing.query_key_value(xp=xp, dtype="float32", max_length=9, dim=3))
        query, key, value = arrays
        assert {str(a.dtype).removeprefix("array_api_strict.") for a in arrays} == {"float32"}
        assert query.shape[-1] == key.shape[-1] == 3
        assert key.shape[-2] == value.shape[-2] <= 9
        output = linattn.linear_attention(query, key, value, EluFeatures())
        assert tuple(output.shape) == (*query.shape[:-1], value.shape[-1])

    @given(arrays=testing.query_key_value(same_length=True, max_length=7))
    def test_same_length_suits_causal_attention(self, arrays):
        query, key, value = arrays
        output = linattn.linear_attention(query, key, value, EluFeatures(), is_causal=True)
        assert_array_equal(np.isfinite(output), True)

    @given(data=st.data(), dtype=st.sampled_from(["float32", "float64"]))
    def test_vectors_are_bounded(self, xp_any_shape, data, dtype):
        vectors = data.draw(
            testing.norm_bounded_vectors(num=4, max_norm=0.25, xp=xp_any_shape.xp, dtype=dtype)
        )
        host = xp_any_shape.numpy(vectors) if xp_any_shape.name != "dask" else np.asarray(vectors)
        assert host.shape[0] == 4
        assert np.linalg.norm(host, axis=-1).max() <= 0.25

    @given(feature_map=testing.feature_maps(dim=3, softmax_kernel=True, samplers=("gaussian",)))
    def test_maps_are_as_asked(self, feature_map):
        assert feature_map.softmax_kernel
        assert feature_map.dim == 3
        assert feature_map.sampler == "gaussian"

    @settings(max_examples=4)
    @given(feature_map=testing.feature_maps())
    def test_any_map_holds_together(self, feature_map):
        """Everything that chance does not decide, on maps of any size."""
        skip = {"mean", "variance", "namespace"}
        assert testing.check_feature_map(feature_map, skip=skip, length=33).passed


class Own:
    """The least that a map of the user's must have."""

    num_features = 4

    def query_features(self, x):
        return Features(None, np.exp(x))

    key_features = query_features


class OwnPositional(Own):
    def key_features(self, x):
        return Features(None, np.exp(x) * 0.9 ** np.arange(x.shape[-2])[:, None])


class OwnBroken(Own):
    def key_features(self, x):
        raise KeyError("no keys today")


class TestCheckFeatureMap:
    @pytest.fixture(autouse=True)
    def one_length(self, monkeypatch):
        """Rows that chance does not decide: all lengths in the first test, one in the others."""
        monkeypatch.setitem(inspect.unwrap(testing.check_feature_map).__kwdefaults__, "length", 33)

    def test_report(self):
        report = testing.check_feature_map(
            PositiveFeatures(4, 8, rng=0), num_draws=800, length=LENGTHS, rng=SEED
        )
        assert report.passed
        assert [row.check for row in report.rows] == [*CHECKS]
        assert {row.result for row in report.rows} == {"passed"}
        assert report.false_alarm_rate == pytest.approx(2e-9)
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("PositiveFeatures(dim=4")
        assert "15 passed, 0 FAILED, 0 skipped" in str(report)
        assert all(isinstance(row, Row) for row in report.rows)

    def test_biased_map_is_held_to_its_own_mean(self):
        feature_map = PositiveFeatures(4, 16, sampler="fixed_norm", rng=0)
        skip = set(CHECKS) - {"mean"}
        report = testing.check_feature_map(feature_map, num_draws=800, rng=SEED, skip=skip)
        (row,) = (row for row in report.rows if row.check == "mean")
        assert (row.result, row.detail.split(";")[0]) == ("passed", "biased as it says")

    def test_deterministic_rows_are_skipped_and_say_so(self):
        report = testing.check_feature_map(EluFeatures(3))
        skipped = {row.check: row.detail for row in report.rows if row.result == "skipped"}
        assert skipped == dict.fromkeys(("variance", "redraw"), "the map is deterministic")
        assert report.false_alarm_rate == 0

    def test_map_without_a_kernel_of_pairs(self):
        report = testing.check_feature_map(SoftmaxFeatures(4))
        skipped = {row.check for row in report.rows if row.result == "skipped"}
        assert skipped == {"mean", "variance", "redraw"}
        with pytest.raises(testing.UntestableError, match="depend on all keys"):
            testing.assert_unbiased(SoftmaxFeatures(4))

    def test_own_map(self):
        skip = ("mean", "namespace")
        report = testing.check_feature_map(Own(), skip=skip)
        assert report.passed
        assert [row.check for row in report.rows if row.detail == "as asked"] == [*skip]

    @pytest.mark.parametrize(
        ("query", "key", "words"),
        [
            (
                lambda x: x,
                None,
                r"Given\.query_features must return Features\(log, values\), got nda",
            ),
            (None, lambda x: [x], r"Given\.key_features must return Features.* got list"),
            (lambda x: Features(None, None), None, "got None for both"),
            (
                lambda x: Features(None, x[..., :1, :]),
                None,
                r"values of shape \(\.\.\., 9, features\)",
            ),
            (lambda x: Features(x, x), None, r"a log of shape \(\.\.\., n, 1\) beside values"),
            (lambda x: Features(None, x[..., :3]), None, "as many features, got 3 and 4"),
        ],
    )
    def test_malformed_features_are_named_once(self, query, key, words):
        class Given(Own):
            def query_features(self, x):
                return super().query_features(x) if query is None else query(x)

            def key_features(self, x):
                return super().query_features(x) if key is None else key(x)

        report = testing.check_feature_map(Given(), on_fail="return")
        assert [row.result for row in report.rows] == ["FAILED"] + ["skipped"] * (len(CHECKS) - 1)
        assert re.search(words, report.rows[0].detail), report.rows[0].detail

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ({"num_features": 5}, "want num_features = 5 columns, got 4"),
            ({"key_features": lambda x: Features(None, np.full(x.shape, np.inf))}, "not finite"),
            ({"estimate": lambda x, y: x @ np.swapaxes(y, -1, -2)}, "estimate.x, y. against"),
        ],
    )
    def test_features_that_are_not_as_stated(self, wrong, words):
        subject = Own()
        vars(subject).update(wrong)
        skip = set(CHECKS) - {"features"}
        with pytest.raises(AssertionError, match=words):
            testing.check_feature_map(subject, skip=skip)

    def test_report_says_that_the_mean_was_not_checked(self):
        assert testing.check_feature_map(EluFeatures(3)).mean_checked
        for subject, skip in ((Own(), ("namespace",)), (EluFeatures(3), ("mean",))):
            report = testing.check_feature_map(subject, skip=skip)
            assert not report.mean_checked
            assert str(report).splitlines()[-1].startswith("The mean was not checked")

    @pytest.mark.parametrize("num_draws", [100, 500, 3000])
    def test_few_draws_are_no_check_of_the_mean(self, num_draws):
        known = PositiveFeatures(8, 8, sampler="gaussian", rng=0)

        class Unknown(PositiveFeatures):
            def variance(self, x, y):
                raise NotImplementedError("not known")

        skip = set(CHECKS) - {"mean"}
        options = {"num_draws": num_draws, "rng": SEED, "skip": skip}
        report = testing.check_feature_map(known, **options)
        assert report.mean_checked == (num_draws == 3000)
        report = testing.check_feature_map(
            lambda rng: Unknown(8, 8, sampler="gaussian", rng=rng), **options
        )
        assert not report.mean_checked

    def test_map_with_positions(self):
        report = testing.check_feature_map(
            OwnPositional(), skip=("mean", "namespace", "streaming"), on_fail="return"
        )
        results = {row.check: row.result for row in report.rows}
        assert results["permutation"] == results["merge"] == "skipped"

    def test_what_a_map_raises_is_in_the_report(self):
        with pytest.raises(AssertionError, match="KeyError: 'no keys today'"):
            testing.check_feature_map(OwnBroken())
        report = testing.check_feature_map(OwnBroken(), on_fail="return")
        assert not report.passed
        assert report.rows[0].result == "FAILED"

    def test_steps_are_announced(self):
        steps: list[str] = []
        report = testing.check_feature_map(EluFeatures(3), notify=steps.append)
        assert steps == [row.what for row in report.rows]

    def test_arguments_are_checked(self):
        with pytest.raises(ValueError, match="skip must name checks out of features, signs"):
            testing.check_feature_map(EluFeatures(), skip=("speed",))
        with pytest.raises(ValueError, match="on_fail must be"):
            testing.check_feature_map(EluFeatures(), on_fail="warn")
        with pytest.raises(TypeError, match="map_or_factory must be"):
            testing.check_feature_map(7)  # type: ignore[arg-type]


class Whole(Own):
    """Features that pass every check but that of the mean, and one change to spoil them."""

    dim = 4

    def __init__(self, change=lambda x, side: x):
        self.change = change

    def features(self, x, side):
        xp = array_api_compat.array_namespace(x)
        return Features(None, xp.exp(0.1 * self.change(x, side)))

    def query_features(self, x):
        return self.features(x, "query")

    def key_features(self, x):
        return self.features(x, "key")


def unchanged(x, side):
    return x


def in_place(x, side):
    x -= 1.0
    return x


def by_position(side_wanted):
    def change(x, side):
        return x * (1 + np.arange(x.shape[-2])[:, None]) if side == side_wanted else x

    return change


def to_mean(axes):
    return lambda x, side: x - np.mean(x, axis=axes, keepdims=True)


class TestEveryRowCanFail:
    """One planted defect for each row of the report that chance does not decide."""

    def failed(self, subject):
        report = testing.check_feature_map(subject, skip=CHANCE, length=33, on_fail="return")
        return {row.check for row in report.rows if row.result == "FAILED"}

    def test_without_a_defect(self):
        assert self.failed(Whole(unchanged)) == set()

    @pytest.mark.parametrize(
        ("row", "change"),
        [
            ("features", lambda x, side: x * np.inf),
            ("causal", to_mean(-2)),
            ("streaming", to_mean(-2)),
            ("mask", lambda x, side: np.sort(x, axis=-2)),
            ("merge", to_mean((-1, -2))),
            ("permutation", by_position("query")),
            ("batch", to_mean(0)),
            ("normalized", lambda x, side: 1e3 * x),
            ("namespace", lambda x, side: x.view(np.float64)),
            ("inputs", in_place),
            ("pickle", lambda x, side: x),
        ],
    )
    def test_row_fails(self, row, change):
        with np.errstate(all="ignore"):
            assert row in self.failed(Whole(change))

    def test_redraw(self):
        fixed = Whole(unchanged)
        factory = lambda rng: fixed  # noqa: E731
        assert self.failed(factory) == {"redraw"}

    def test_signs(self):
        signed: Any = Whole(unchanged)
        signed.positive = True
        signed.key_features = lambda x: Features(None, -Whole(unchanged).key_features(x).values)
        assert self.failed(signed) >= {"signs"}

    def test_every_row_is_here(self):
        (rows,) = (
            mark.args[1] for mark in self.test_row_fails.pytestmark if mark.name == "parametrize"
        )
        covered = {row for row, _ in rows} | {"redraw", "mean", "variance", "signs"}
        assert covered == set(CHECKS)


class TestNothingToTry:
    """What is tried on nothing cannot fail, and so is refused."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda: testing.assert_causal(EluFeatures(), magnitudes=()),
            lambda: testing.assert_normalized(EluFeatures(), magnitudes=()),
            lambda: testing.assert_mask_is_slice(EluFeatures(), garbage=()),
            lambda: testing.assert_inputs_unchanged(np.sin),
            lambda: testing.assert_namespace_preserved(np.sin),
            lambda: testing.assert_gradient(np.sin, lambda: (0.0, tuple)),
        ],
    )
    def test_empty(self, call):
        with pytest.raises(ValueError, match="must not be empty"):
            call()

    @pytest.mark.parametrize("length", [0, 1])
    @pytest.mark.parametrize(
        "assertion",
        [
            testing.assert_batch_independent,
            testing.assert_causal,
            testing.assert_mask_is_slice,
            testing.assert_permutation_invariant,
            testing.assert_streaming,
        ],
    )
    def test_one_token(self, assertion, length):
        with pytest.raises(ValueError, match="length must be at least 2"):
            assertion(EluFeatures(), length=length)

    @pytest.mark.parametrize("rtol", [0.0, 1.0, float("inf"), float("nan")])
    def test_any_difference_allowed(self, rtol):
        with pytest.raises(ValueError, match="rtol must be between 0 and 1"):
            testing.assert_causal(EluFeatures(), rtol=rtol)

    def test_no_directions(self):
        with pytest.raises(ValueError, match="num_directions must be"):
            testing.assert_gradient(
                np.sin, lambda x: (np.sin(x), lambda g: (g,)), np.ones(3), num_directions=0
            )


class TestOtherAssertions:
    @pytest.mark.parametrize(
        "assertion",
        [
            testing.assert_batch_independent,
            testing.assert_causal,
            testing.assert_mask_is_slice,
            testing.assert_merge_associative,
            testing.assert_normalized,
            testing.assert_permutation_invariant,
            testing.assert_streaming,
        ],
    )
    def test_something_to_test_is_needed(self, assertion):
        with pytest.raises(TypeError, match="want a feature_map"):
            assertion()

    def test_streaming_needs_a_step(self):
        with pytest.raises(TypeError, match="want step="):
            testing.assert_streaming(attention=lambda query, key, value, is_causal: value)

    def test_softmax_attention(self):
        attention = linattn.softmax_attention
        testing.assert_causal(attention=attention)
        testing.assert_mask_is_slice(attention=attention)
        testing.assert_normalized(attention=attention)
        testing.assert_permutation_invariant(attention=attention)
        testing.assert_batch_independent(attention=attention, is_causal=True)

    def test_shapes_and_nan_fail(self):
        with pytest.raises(AssertionError, match="want shape"):
            testing.assert_normalized(attention=lambda q, k, v: v[..., :1])
        with pytest.raises(AssertionError, match="largest difference nan"):
            testing.assert_normalized(attention=lambda q, k, v: v * np.nan)

    def test_gradient(self):
        x, y = np.linspace(0.5, 2, 6).reshape(2, 3), np.linspace(1, 2, 6).reshape(2, 3)

        def function(x, y):
            return np.sin(x) * y

        def vjp(x, y):
            return function(x, y), lambda g: (g * np.cos(x) * y, g * np.sin(x))

        testing.assert_gradient(function, vjp, x, y, rng=SEED)
        with pytest.raises(TypeError, match="must be float64"):
            testing.assert_gradient(function, vjp, *(a.astype(np.float32) for a in (x, y)))
        for wrong, words in (
            (lambda x, y: (2 * function(x, y), vjp(x, y)[1]), "output of vjp"),
            (lambda x, y: (function(x, y), lambda g: (g * np.cos(x) * y,)), "want 2 gradients"),
            (lambda x, y: (function(x, y), lambda g: (g[:1], g)), "of shape"),
            (lambda x, y: (function(x, y), lambda g: (g * np.cos(x) * y, g)), "gradient 1: slope"),
        ):
            with pytest.raises(AssertionError, match=words):
                testing.assert_gradient(function, wrong, x, y, rng=SEED)

    def test_namespace(self):
        with pytest.raises(AssertionError, match="returned no array"):
            testing.assert_namespace_preserved(lambda x: 3, np.ones(3))


def test_total_false_alarm_rate():
    assert 250 * 1e-9 + 200 * 1e-11 + 12 * 1e-9 <= TOTAL_FALSE_ALARM_RATE < 1e-6

"""`assert_estimator` and `draws_for`: any function that returns estimates.

Right estimators fail in at most 1e-7 of all runs, all tests together: assertions at 1e-9, and
counts of rejections that a binomial distribution exceeds with less than 1e-9.
"""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc, operator, var-annotated, index"

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import estimators_of_others
from linattn.testing import (
    UntestableError,
    assert_at_most,
    assert_estimator,
    assert_estimator_covariance,
    assert_estimator_variance,
    assert_unbiased,
    draws_for,
)
from linattn.testing.statistics import at_most_test, mean_bound
from linattn.typing import Features
from tests.attentions import assert_at_most as assert_bounded


def exponential(rng, shape=()):
    return rng.exponential(2.0, shape)


CLAIMS = {
    "variance": (exponential, 2.0, {"variance": 4.0}),
    "kurtosis": (exponential, 2.0, {"kurtosis": 9.0}),
    "bounds": (lambda rng, shape=(): rng.random(shape), 0.5, {"bounds": (0, 1)}),
}


class TestEstimator:
    @pytest.mark.parametrize("claim", CLAIMS)
    def test_a_right_one_passes_and_says_its_power_first(self, claim):
        draw, mean, noise = CLAIMS[claim]
        evidence = assert_estimator(draw, mean, **noise)
        assert evidence.detail.startswith("sees a relative bias of ")
        assert "with probability 0.99: 4000 draws of 1 entry" in evidence.detail
        assert evidence.false_alarm_rate == 1e-9
        assert 0 < evidence.detectable < 0.4
        percent = float(evidence.detail.split()[5])
        assert percent == pytest.approx(100 * evidence.detectable, rel=5e-3)

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("claim", CLAIMS)
    def test_a_wrong_mean_fails_as_announced(self, claim, sign):
        draw, mean, noise = CLAIMS[claim]
        seen = assert_estimator(draw, mean, **noise).detectable
        with pytest.raises(AssertionError, match=r"^assert_estimator: mean of the estimate"):
            assert_estimator(lambda rng: (1 + sign * seen) * draw(rng), mean, **wide(noise, seen))

    def test_a_message_says_where_what_and_how_far(self):
        def draw(rng):
            return rng.standard_normal((2, 3)) + 5 + np.array([[0, 0, 0], [0, 2.5, 0]])

        with pytest.raises(AssertionError) as caught:
            assert_estimator(draw, np.full((2, 3), 5.0), variance=1.0, num_draws=1000)
        text = str(caught.value)
        assert "entry [1, 1], the worst of 6 entries, over 1000 draws is 7.49" in text
        assert "the expected value is 5 (+49.9 %)" in text
        assert "standard errors away" in text
        assert "fails in at most 1e-09 of all runs" in text
        assert "with probability 0.99" in text

    def test_small_values_are_judged_on_the_scale_of_the_noise(self):
        small = np.array([0.0, 1e-9, 0.3])
        evidence = assert_estimator(
            lambda rng: rng.standard_normal(3) + small, small, variance=1, num_draws=1000
        )
        assert evidence.detectable < 0.5

    def test_expected_may_be_a_function_and_draws_of_any_library(self):
        xp = pytest.importorskip("array_api_strict")

        def draw(rng):
            return xp.asarray(rng.standard_normal((2, 2)))

        assert_estimator(draw, lambda: xp.zeros((2, 2)), variance=1)
        with pytest.raises(AssertionError):
            assert_estimator(draw, lambda: xp.ones((2, 2)), variance=1)

    def test_one_seed_gives_one_answer(self):
        seen = []
        for rng in (7, 7, 8):
            draws = []
            assert_estimator(lambda g, d=draws: d.append(g.random()) or d[-1], 0.5, variance=1 / 12,
                             num_draws=500, rng=rng)  # fmt: skip
            seen.append(draws)
        assert seen[0] == seen[1] != seen[2]

    def test_entries_without_variance_must_be_exact(self):
        def draw(rng):
            return np.array([rng.standard_normal(), 1 / 3])

        assert_estimator(draw, [0, 1 / 3], variance=[1, 0])
        with pytest.raises(AssertionError, match=r"entry \[1\].*no draw may differ"):
            assert_estimator(draw, [0, 1 / 3 + 1e-6], variance=[1, 0])

    def test_nan_never_passes(self):
        for noise in ({"variance": 1.0}, {"kurtosis": 3.0}):
            with pytest.raises((AssertionError, UntestableError)):
                assert_estimator(lambda rng: np.nan * rng.random(), 0.0, **noise)


def wide(noise, seen):
    """The claim that a wrong estimator of that relative bias still keeps."""
    return {"bounds": (0, 1 + seen)} if "bounds" in noise else noise


class TestRefusals:
    def test_no_claim_names_what_to_try(self):
        with pytest.raises(UntestableError, match=r"try kurtosis=25$"):
            assert_estimator(exponential, 2.0)
        with pytest.raises(ValueError, match="got variance and kurtosis"):
            assert_estimator(exponential, 2.0, variance=4.0, kurtosis=9)

    def test_too_few_draws_say_how_many_would_do(self):
        for count, noise in (
            (80, {"variance": 4.0}),
            (150, {"variance": 4.0}),
            (20, {"kurtosis": 9}),
            (2, {"bounds": (0, 1e3)}),
        ):
            with pytest.raises(UntestableError, match=r"of about [\d,]+ would show") as caught:
                assert_estimator(exponential, 2.0, num_draws=count, **noise)
            enough = int(re.search(r"of about ([\d,]+)", str(caught.value))[1].replace(",", ""))
            evidence = assert_estimator(exponential, 2.0, num_draws=2 * enough, **noise)
            assert evidence.detectable < 0.5

    def test_a_draw_that_ignores_its_generator(self):
        with pytest.raises(UntestableError, match="every draw is the same"):
            assert_estimator(lambda rng: 2.01, 2.0, variance=4.0)

    @pytest.mark.parametrize(
        ("kind", "match", "draw", "expected", "noise"),
        [
            (TypeError, "real numbers, got complex128", lambda rng: 1j, 0.0, {"variance": 1}),
            (TypeError, "expected must be real numbers", exponential, "two", {"variance": 1}),
            (ValueError, r"shape of expected, \(2,\), got shape \(\)", exponential, [2, 2],
             {"variance": 1}),
            (ValueError, "variance must not be negative", exponential, 2.0, {"variance": -1}),
            (ValueError, "variance must be a number, or one for each", exponential, 2.0,
             {"variance": [1, 2]}),
            (ValueError, "expected must be finite", exponential, np.inf, {"variance": 1}),
            (ValueError, "kurtosis must be above 1", exponential, 2.0, {"kurtosis": 1.0}),
            (ValueError, "with expected between them", exponential, 2.0, {"bounds": (3, 4)}),
            (ValueError, "num_draws must be", exponential, 2.0, {"variance": 4, "num_draws": 0}),
            (ValueError, "rate must be a float", exponential, 2.0,
             {"variance": 4, "false_alarm": 2}),
            (AssertionError, "a draw is .* outside its bounds 0 and 3", exponential, 2.0,
             {"bounds": (0, 3)}),
        ],
    )  # fmt: skip
    def test_bad_arguments(self, kind, match, draw, expected, noise):
        with pytest.raises(kind, match=match):
            assert_estimator(draw, expected, **noise)


class TestPlans:
    @pytest.mark.parametrize("claim", CLAIMS)
    def test_as_many_draws_as_planned_see_the_bias(self, claim):
        draw, mean, noise = CLAIMS[claim]
        guess = noise | ({"variance": 4.0} if claim == "kurtosis" else {})
        count = draws_for(0.1, mean, **guess)
        got = assert_estimator(draw, mean, num_draws=count, **noise).detectable
        assert got == pytest.approx(0.1, rel=0.02 if claim == "variance" else 0.5)

    def test_draws_grow_as_the_square_of_the_bias(self):
        few, many = (draws_for(bias, variance=1.0) for bias in (0.02, 0.01))
        assert many / few == pytest.approx(4, rel=0.05)
        assert draws_for(0.1, [1.0, 3.0], variance=[1.0, 9.0]) >= draws_for(0.1, variance=1.0)

    def test_a_kurtosis_needs_a_guess(self):
        with pytest.raises(UntestableError, match="variance must be given beside kurtosis"):
            draws_for(0.1, kurtosis=9.0)
        with pytest.raises(ValueError, match="bias must be"):
            draws_for(0.0, variance=1.0)
        with pytest.raises(ValueError, match="large enough"):
            draws_for(1e-9, variance=1.0)


class TestRates:
    """Declared rates against what happens: the kit is an estimator too."""

    @settings(max_examples=3, deadline=None)
    @given(
        kind=st.sampled_from(sorted(CLAIMS)),
        size=st.integers(1, 4),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_right_ones_are_rejected_at_most_as_often_as_declared(self, kind, size, seed):
        draw, mean, noise = CLAIMS[kind]
        rng = np.random.default_rng(seed)
        options = {"num_draws": 400, "false_alarm": 0.05, "rng": rng}
        rejected = 0
        for _ in range(60):
            try:
                assert_estimator(lambda g: draw(g, (size,)), [mean] * size, **noise, **options)
            except AssertionError:
                rejected += 1
        # More than 18 of 60 at 5 % happen with a probability below 1e-9.
        assert rejected <= 18

    @settings(max_examples=3, deadline=None)
    @given(kind=st.sampled_from(sorted(CLAIMS)), seed=st.integers(0, 2**32 - 1))
    def test_the_announced_bias_is_found(self, kind, seed):
        draw, mean, noise = CLAIMS[kind]
        rng = np.random.default_rng(seed)
        options = {"num_draws": 1000, "false_alarm": 0.01, "rng": rng}
        seen = assert_estimator(draw, mean, **noise, **(options | {"false_alarm": 1e-9})).detectable
        missed = 0
        for _ in range(30):
            try:
                assert_estimator(
                    lambda g: draw(g) + seen * mean, mean, **wide(noise, seen * mean), **options
                )
            except AssertionError:
                continue
            missed += 1
        # More than 6 of 30 at 1 % happen with a probability below 1e-8.
        assert missed <= 6


class TestOfOthers:
    """Twelve estimators of other fields, each right, and wrong by 1 to 3 %."""

    @pytest.mark.parametrize("name", estimators_of_others.KINDS)
    def test_no_right_one_fails_and_no_wrong_one_passes_in_silence(self, name):
        kind = estimators_of_others.KINDS[name]
        count = estimators_of_others.num_draws(kind)
        right = estimators_of_others.tried(kind, is_wrong=False, count=count)
        assert right != "fails"
        percent = float(right.split()[5])
        assert percent <= 100 * kind.bias * 1.01
        wrong = estimators_of_others.tried(kind, is_wrong=True, count=count)
        if name == "stochastic rounding":
            # Nobody can see it: 5e-4 is never rounded to 1, and so the message names that entry.
            assert "% of the largest mean at entry [8] (515 % of the mean there)" in wrong
            assert wrong.endswith("; no draw differs at entry [8]")
            assert "no draw differs" not in right
        else:
            assert wrong == "fails"

    def test_there_are_twelve(self):
        assert len(estimators_of_others.KINDS) == 12


class TestAnnounced:
    """What a pass says: where a bias could hide, in which unit, and what was seen."""

    def test_units_and_entries(self):
        mean = np.array([0.0, 0.2, 5.0, 0.01])

        def draw(rng):
            return mean + [2, 2, 1, 0.001] * rng.standard_normal(4)

        variance = np.array([4, 4, 1, 1e-6])
        evidence = assert_estimator(draw, mean, variance=variance)
        assert re.match(
            r"sees a relative bias of 3.45 % at entry \[2\] and a bias of 6.9 % of the largest "
            r"mean at entry \[0\] \(172 % of the mean at entry \[1\]\) with probability 0.99: "
            r"4000 draws of 4 entries; seen: a bias of [-+]",
            evidence.detail,
        )
        small = assert_estimator(lambda rng: draw(rng)[:2], mean[:2], variance=4)
        assert small.detail.startswith(
            "sees a bias of 17 % of a draw's standard deviation at entry [0] (170 % of the mean "
            "at entry [1]) with probability"
        )

    @pytest.mark.parametrize("claim", CLAIMS)
    def test_the_interval_holds_the_true_bias(self, claim):
        draw, mean, noise = CLAIMS[claim]
        for shift in (0.0, 0.03 * mean):
            inside = 0
            for seed in range(12):
                found = assert_estimator(
                    lambda rng, shift=shift: draw(rng) + shift, mean, rng=seed, num_draws=1500,
                    **wide(noise, shift),
                )  # fmt: skip
                low, high = found.interval
                assert low < found.estimate < high
                inside += low <= shift <= high
            # Fewer than 9 of 12 at 95 % happen with a probability of 2e-4, each of them fixed.
            assert inside >= 9

    def test_the_interval_is_of_the_entry_furthest_away(self):
        mean = np.zeros(5)
        shift = np.array([0, 0, 0.1, 0, 0])
        evidence = assert_estimator(
            lambda rng: shift + rng.standard_normal(5), mean, variance=1, num_draws=2000
        )
        assert evidence.entry == (2,)
        low, high = evidence.interval
        assert 0.0 < low < 0.1 < high < 0.2
        assert "at entry [2], from +" in evidence.detail

    def test_bounds_and_a_kurtosis_see_more_than_either(self):
        def draw(rng):
            return rng.binomial(40, 0.1) / 40

        seen = {
            name: assert_estimator(draw, 0.1, num_draws=2000, **noise).detectable
            for name, noise in {
                "bounds": {"bounds": (0, 1)},
                "kurtosis": {"kurtosis": 3.2},
                "both": {"bounds": (0, 1), "kurtosis": 3.2},
                "both, loose": {"bounds": (-99, 99), "kurtosis": 3.2},
            }.items()
        }
        assert seen["both"] < min(seen["bounds"], 1.02 * seen["kurtosis"])
        assert seen["both, loose"] == pytest.approx(seen["kurtosis"], rel=0.03)
        with pytest.raises(AssertionError, match="outside its bounds"):
            assert_estimator(draw, 0.1, bounds=(0, 0.15), kurtosis=3.2)
        assert draws_for(0.1, 0.1, bounds=(0, 1), kurtosis=3.2, variance=0.09 / 40) > 1000


class TestWarnings:
    """A pass that is worth less than it says."""

    def test_a_variance_that_the_draws_contradict(self):
        with pytest.warns(UserWarning, match=r"contradict variance=1 at entry \[1\]: they have 3"):
            assert_estimator(
                lambda rng: rng.standard_normal(2) * [1, 1.9], np.zeros(2), variance=1, rng=2
            )

    @pytest.mark.parametrize("lag", [0, 1])
    def test_draws_that_depend(self, lag):
        """Antithetic pairs, whichever draw begins one."""
        state = {"count": lag, "last": 0.5}

        def draw(rng):
            state["count"] += 1
            fresh = rng.standard_normal()
            state["last"] = -state["last"] if state["count"] % 2 == 0 else fresh
            return state["last"]

        with (
            pytest.warns(UserWarning, match="two results for one seed"),
            pytest.warns(UserWarning, match=r"neighbours have a correlation of about -(1|0\.9)"),
        ):
            assert_estimator(draw, 0.0, variance=1)

    @pytest.mark.parametrize(
        "call",
        [
            lambda draw: assert_estimator(draw, 0.0, variance=1),
            lambda draw: assert_estimator_variance(draw, 1.0, kurtosis=3),
            lambda draw: assert_at_most(draw, 3.0, 0.1),
        ],
    )
    def test_a_seed_that_gives_two_results(self, call):
        elsewhere = np.random.default_rng(3)
        with pytest.warns(UserWarning, match="gives two results for one seed"):
            call(lambda rng: elsewhere.standard_normal())
        call(lambda rng: rng.standard_normal())

    def test_right_draws_of_heavy_tails_are_not_doubted(self):
        """Warnings are errors here."""
        for seed in range(10):
            assert_estimator(lambda rng: rng.standard_t(4.5), 0.0, variance=1.8, rng=seed)


class TestAtMost:
    def test_a_promise_that_is_kept_and_its_power(self):
        evidence = assert_at_most(lambda rng: rng.standard_normal(3), 1.96, 0.0501)
        assert evidence.detail.startswith("sees errors above 1.96 in 8.77 % of runs in place of")
        low, high = evidence.interval
        assert low < evidence.estimate < high
        assert low < -0.0001 < high

    def test_the_announced_frequency_is_found(self):
        found = assert_at_most(lambda rng: rng.random() < 0.05, 0.5, 0.05).detectable
        for seed in range(3):
            with pytest.raises(AssertionError, match=r"^assert_at_most: errors are above 0.5 in"):
                assert_at_most(lambda rng: rng.random() < 0.05 * (1 + found), 0.5, 0.05, rng=seed)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -7.0])
    def test_no_number_is_a_small_error(self, bad):
        with pytest.raises(AssertionError, match=r"100 % of .* at entry \[1\], at most 10 %"):
            assert_at_most(lambda rng: np.array([rng.random(), bad]), 1.0, 0.1, num_draws=50)

    def test_refusals(self):
        with pytest.raises(UntestableError, match="about 1,600 draws would show twice delta"):
            assert_at_most(lambda rng: rng.random(), 0.5, 0.05, num_draws=5)
        for eps, delta in ((-1.0, 0.1), (1.0, 0.0), (1.0, 1.0), (np.nan, 0.1)):
            with pytest.raises(ValueError, match=r"^(eps|delta) must be"):
                assert_at_most(lambda rng: rng.random(), eps, delta)
        with pytest.raises(ValueError, match="false_alarm must be"):
            assert_at_most(lambda rng: rng.random(), 0.5, 0.9, false_alarm=1.0)


ROOT = np.array([[1.0, 0, 0], [0.5, 1, 0], [-0.3, 0.4, 2]])


def correlated(rng):
    return 3 + ROOT @ rng.standard_normal(3)


class TestSpread:
    """Variance and covariance of any estimator."""

    @pytest.mark.parametrize("mean", [None, 3.0])
    def test_right_claims_pass_with_an_interval(self, mean):
        covariance = ROOT @ ROOT.T
        for claim, check in (
            (np.diag(covariance), assert_estimator_variance),
            (covariance, assert_estimator_covariance),
        ):
            found = check(correlated, claim, mean, kurtosis=3)
            assert found.detail.startswith("sees an error of ")
            low, high = found.interval
            assert low < 0 < high
            assert low < found.estimate < high

    @pytest.mark.parametrize("mean", [None, 3.0])
    @pytest.mark.parametrize("pair", [(0, 0), (0, 1), (1, 2)])
    def test_a_wrong_covariance_is_named(self, mean, pair):
        covariance = ROOT @ ROOT.T
        seen = assert_estimator_covariance(correlated, covariance, mean, kurtosis=3).detectable
        shift = seen * np.sqrt(covariance[pair[0], pair[0]] * covariance[pair[1], pair[1]])
        covariance[pair] += shift
        covariance[pair[::-1]] = covariance[pair]
        with pytest.raises(AssertionError, match=rf"covariance at entry \[{pair[0]}, {pair[1]}\]"):
            assert_estimator_covariance(correlated, covariance, mean, kurtosis=3)

    def test_relations(self):
        def draw(rng):
            return rng.uniform(-1, 1, 2)

        claim = np.array([1 / 3, 1 / 2])
        with pytest.raises(AssertionError, match=r"at entry \[1\] .* want equal 0.5 \(-33"):
            assert_estimator_variance(draw, claim, bounds=(-1, 1))
        assert_estimator_variance(draw, claim, bounds=(-1, 1), relation="at_most")
        with pytest.raises(AssertionError, match=r"want at most 0\.2"):
            assert_estimator_variance(draw, 0.2, [0, 0], bounds=(-1, 1), relation="at_most")

    def test_bounds_are_as_good_as_the_kurtosis_that_follows(self):
        def draw(rng):
            return float(rng.random() < 0.2)

        options = {"mean": 0.2, "num_draws": 4000}
        of_bounds = assert_estimator_variance(draw, 0.16, bounds=(0, 1), **options).detectable
        of_kurtosis = assert_estimator_variance(draw, 0.16, kurtosis=4, **options).detectable
        assert of_bounds == pytest.approx(of_kurtosis)
        with pytest.raises(AssertionError, match="outside the bounds"):
            assert_estimator_variance(draw, 0.16, bounds=(0, 0.5))

    def test_refusals(self):
        with pytest.raises(UntestableError, match="try kurtosis=25"):
            assert_estimator_variance(correlated, np.ones(3))
        with pytest.raises(UntestableError, match="a variance twice the claim could pass"):
            assert_estimator_variance(correlated, np.ones(3), kurtosis=3, num_draws=40)
        with pytest.raises(UntestableError, match="an entry that is not 0"):
            assert_estimator_variance(lambda rng: 0.0 * rng.random(), 0.0, kurtosis=3)
        for claim in (np.ones(3), np.array([[1.0, 0.5], [0, 1]])):
            with pytest.raises(ValueError, match="covariance must"):
                assert_estimator_covariance(correlated, claim, kurtosis=3)
        for wrong in ({"kurtosis": 1.0}, {"kurtosis": 3, "relation": "below"}):
            with pytest.raises(ValueError, match="must be"):
                assert_estimator_variance(correlated, np.ones(3), **wrong)
        with pytest.raises(ValueError, match=r"shape of the claim, \(2,\), got shape \(3,\)"):
            assert_estimator_variance(correlated, np.ones(2), kurtosis=3)
        with pytest.raises(ValueError, match="not negative"):
            assert_estimator_variance(correlated, -np.ones(3), kurtosis=3)


def test_the_page_needs_no_other_knowledge():
    page = Path(__file__).parents[1].joinpath("docs", "estimators.md").read_text(encoding="utf-8")
    paragraphs = page.strip().split("\n\n")
    assert not any("attention" in paragraph.lower() for paragraph in paragraphs[:-2])


def test_the_bound_of_a_mean_is_where_the_test_of_it_turns():
    average, bound, count = np.array([0.0, 0.01, 0.5, 1.0]), 2.0, 300
    limit = mean_bound(average * bound, bound, count, false_alarm_rate=1e-6)
    assert_bounded(0, np.diff(limit))
    assert limit[-1] == pytest.approx(bound)
    mirrored = np.full(count, bound - average[1] * bound)
    for factor, passed in ((1 - 1e-6, True), (1 + 1e-6, False)):
        mean = bound - limit[1] * factor
        assert at_most_test(mirrored, mean, bound, false_alarm_rate=1e-6 / 4).passed is passed
    assert limit[0] == pytest.approx(bound * -np.expm1(np.log(1e-6 / 4) / count))


class Fourier:
    """Random Fourier features with an offset, as scikit-learn has them."""

    dim, num_features = 4, 100

    def __init__(self, rng, gamma=1.0):
        self.omega = np.sqrt(2 * gamma) * rng.standard_normal((self.dim, self.num_features))
        self.offset = rng.uniform(0, 2 * np.pi, self.num_features)

    def query_features(self, x):
        columns = np.cos(x @ self.omega + self.offset)
        return Features(None, np.sqrt(2 / self.num_features) * columns)

    key_features = query_features


def test_kernels_of_differences_are_tried_where_they_fall():
    def kernel(x, y):
        return np.exp(-np.sum((x - y) ** 2, axis=-1))

    assert "14 pairs" in assert_unbiased(Fourier, kernel=kernel, kurtosis=25.0).detail
    for gamma in (0.9, 1.1):
        with pytest.raises(AssertionError, match="or along which the kernel falls"):
            assert_unbiased(lambda rng, g=gamma: Fourier(rng, g), kernel=kernel, kurtosis=25.0)


def test_pairs_that_are_left_out_are_named():
    def kernel(x, y):
        return np.exp(-np.sum((x - y) ** 2, axis=-1))

    detail = assert_unbiased(Fourier, kernel=kernel, variance=0.02, num_draws=260).detail
    assert re.search(r"; pairs left out: \d+ \(a bias of \d+% could pass\)", detail), detail

"""How good an approximation is: exact formulas against Monte Carlo, verdicts, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn import diagnostics
from linattn.diagnostics import (
    attention_weights,
    crossover_length,
    denominators,
    effective_features,
    output_error,
    recommend_num_features,
    relative_variance,
)
from linattn.feature_maps import (
    EluFeatures,
    GeneralizedExponentialFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    ReluFeatures,
    Reparametrized,
    TrigonometricFeatures,
)
from linattn.feature_maps.normalized import SoftmaxFeatures

DIM = 8


def inputs(scale: float, *shape: int, seed: int = 0) -> Any:
    """Return normal queries, keys and values of that scale; values of scale 1."""
    rng = np.random.default_rng(seed)
    query, key, value = rng.standard_normal((3, *shape, DIM))
    return scale * query, scale * key, value


def state_of(key: Any, value: Any, phi: Any) -> linattn.State:
    empty = linattn.init_state(phi, value.shape[-1], batch_shape=key.shape[:-2], like=key)
    return linattn.update_state(empty, key, value, phi)


class TestRelativeVariance:
    def test_is_the_closed_form_weighted_by_attention(self):
        query, key, _ = inputs(0.7, 2, 20)
        phi = PositiveFeatures(DIM, 24, rng=0)
        ratio = phi.variance(query, key) / phi.kernel(query, key) ** 2
        weights = attention_weights(query, key, rows=slice(None)) / 20
        found = relative_variance(query, key, phi)
        np.testing.assert_allclose(found.mean, np.sum(weights * ratio, axis=(-2, -1)), rtol=1e-12)
        for head in range(2):
            order = np.argsort(ratio[head], axis=None)
            share = np.cumsum(weights[head].ravel()[order])
            for level, value in zip(diagnostics.PERCENTILES, found.percentiles[head], strict=True):
                at = ratio[head].ravel()[order][np.searchsorted(share, level / 100)]
                assert value == pytest.approx(at, rel=1e-12)
        np.testing.assert_array_equal(found.median, found.percentiles[..., 2])
        np.testing.assert_array_equal(found.bias, 0)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_masked_and_later_keys_count_for_nothing(self, is_causal):
        query, key, _ = inputs(0.5, 2, 12)
        phi = PositiveFeatures(DIM, 16, rng=0)
        mask = np.array([True] * 9 + [False] * 3)
        spoiled = np.where(mask[:, None], key, np.nan)
        found = relative_variance(query, spoiled, phi, key_mask=mask, is_causal=is_causal)
        weights = attention_weights(
            query, key, rows=slice(None), key_mask=mask, is_causal=is_causal
        )
        ratio = phi.variance(query, key) / phi.kernel(query, key) ** 2
        expected = np.sum(weights * ratio, axis=(-2, -1)) / 12
        np.testing.assert_allclose(found.mean, expected, rtol=1e-12)

    def test_a_sample_stands_for_all(self):
        query, key, _ = inputs(0.5, 400)
        phi = PositiveFeatures(DIM, 16, rng=0)
        every = relative_variance(query, key, phi, num_samples=400)
        some = relative_variance(query, key, phi, num_samples=100)
        assert 0 < abs(some.median / every.median - 1) < 0.2
        one = relative_variance(query[:1], key[:1], phi)
        assert one.mean == relative_variance(query, key, phi, num_samples=1).mean

    def test_the_bias_of_a_biased_sampler_is_reported(self):
        query, key, _ = inputs(0.5, 10)
        phi = PositiveFeatures(DIM, 16, sampler="fixed_norm", rng=0)
        weights = attention_weights(query, key, rows=slice(None)) / 10
        bias = phi.mean(query, key) / phi.kernel(query, key) - 1
        found = relative_variance(query, key, phi)
        assert found.bias == pytest.approx(np.sum(weights * bias), rel=1e-12)
        assert found.bias < -1e-4

    def test_the_verdict_follows_the_median_of_each_head(self):
        query, key, _ = inputs(1.0, 2, 30)
        size = np.array([0.2, 3.0])[:, None, None]
        phi = PositiveFeatures(DIM, 64, rng=0)
        mixed = relative_variance(size * query, size * key, phi)
        assert mixed.median[0] < 1 < mixed.median[1]
        assert mixed.verdict.startswith("use exact softmax attention in 1 of 2 heads: ")
        worst = relative_variance(3 * query, 3 * key, phi)
        assert worst.verdict.startswith("use exact softmax attention: ")
        best = relative_variance(0.2 * query, 0.2 * key, phi)
        assert best.verdict.startswith("linear attention: ")

    def test_what_overflows_is_infinite_and_what_is_not_seen_is_nan(self):
        query, _, _ = inputs(40.0, 2, 5)
        mask = np.array([[True] * 5, [False] * 5])
        phi = PositiveFeatures(DIM, 16, sampler="gaussian", rng=0)
        found = relative_variance(query, query, phi, key_mask=mask)
        assert found.mean[0] == np.inf
        assert found.verdict.startswith("use exact softmax attention in 1 of 2 heads: ")
        assert np.isnan(found.mean[1])
        assert_array_equal(found.percentiles[1], np.nan)

    def test_a_deterministic_map_has_none(self):
        query, key, _ = inputs(1.0, 5)
        found = relative_variance(query, key, EluFeatures())
        assert found.mean == found.median == 0
        assert found.verdict.startswith("linear attention: ")

    def test_a_reparametrized_map_lowers_it(self):
        query, key, _ = inputs(0.3, 30)
        query, key = query + 1.0, key + 1.0
        inside = PositiveFeatures(DIM, 16, rng=0)
        centred = Reparametrized(inside, np.full(DIM, 1.0), np.full(DIM, 1.0))
        plain, better = (relative_variance(query, key, phi) for phi in (inside, centred))
        assert better.mean < plain.mean / 10
        # The variance of the shifted pairs with the attention of the given ones.
        moved = query - 1, key - 1
        ratio = inside.variance(*moved) / inside.kernel(*moved) ** 2
        weights = attention_weights(query, key, rows=slice(None)) / 30
        assert better.mean == pytest.approx(np.sum(weights * ratio), rel=1e-9)

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            ({"key": np.zeros((5, 3))}, ValueError, "query and key must have one last axis"),
            ({"key": np.zeros((0, DIM))}, ValueError, "query and key must have a token"),
            ({"query": np.full((5, DIM), np.nan)}, ValueError, "query must be finite"),
            ({"key": np.full((5, DIM), np.inf)}, ValueError, "key must be finite"),
            ({"is_causal": True, "key": np.zeros((4, DIM))}, ValueError, "equal length, got 5"),
            ({"num_samples": 0}, ValueError, "num_samples must be at least 1"),
            ({"feature_map": PositiveFeatures}, TypeError, "the class PositiveFeatures"),
            ({"key_mask": np.ones((5, 5), bool)}, ValueError, "key_mask must have shape"),
            (
                {"feature_map": PositiveFeatures.from_projection(np.ones((2, DIM)))},
                NotImplementedError,
                "sampler=None",
            ),
        ],
    )
    def test_refusals(self, change, error, match):
        given = {"query": np.zeros((5, DIM)), "key": np.zeros((5, DIM))}
        arguments = given | {"feature_map": PositiveFeatures(DIM, rng=0)} | change
        with pytest.raises(error, match=match):
            relative_variance(**arguments)

    def test_a_map_without_variance_is_refused(self):
        class Bare:
            num_features = DIM

            def query_features(self, x):
                raise AssertionError

            key_features = query_features

        with pytest.raises(TypeError, match=r"kernel\(x, y\) and variance\(x, y\), got Bare"):
            relative_variance(np.zeros((5, DIM)), np.zeros((5, DIM)), Bare())


class TestRecommendation:
    def test_the_columns_meet_the_tolerance_and_fewer_do_not(self):
        query, key, _ = inputs(0.5, 60)
        small = PositiveFeatures(DIM, DIM, rng=0)
        options: Any = {"tolerance": 0.2, "length": 10**6}
        found = recommend_num_features(query, key, small, **options)
        weights = attention_weights(query, key, rows=slice(None))

        def share_met(m: int) -> float:
            phi = PositiveFeatures(DIM, m, rng=0)
            deviation = np.sqrt(phi.variance(query, key)) / phi.kernel(query, key)
            return float(np.mean(np.sum(weights * deviation, axis=-1) <= 0.2))

        assert found.num_features is not None
        assert found.num_features % DIM == 0
        assert found.per_head == found.num_features
        assert share_met(found.num_features) >= 0.9 > share_met(found.num_features - DIM)
        wanted = f"linear attention: a tolerance of 0.2 takes {found.num_features} columns"
        assert found.verdict == wanted
        again = recommend_num_features(query, key, PositiveFeatures(DIM, 40, rng=0), **options)
        assert again.num_features == found.num_features

    def test_the_bound_holds_for_the_exact_variance_of_the_denominator(self):
        # H_jl = exp((q + k_j).(q + k_l)): with independent rows m relVar D = p^T H p - 1.
        query, key, _ = inputs(0.5, 30)
        scaled_query, scaled_key = query * DIM**-0.25, key * DIM**-0.25
        phi = PositiveFeatures(DIM, 16, sampler="gaussian", rng=0)
        weights = attention_weights(query, key, rows=slice(None))
        deviation = np.sqrt(phi.variance(query, key)) / phi.kernel(query, key)
        bound = np.sum(weights * deviation, axis=-1)
        for q, p, r in zip(scaled_query, weights, bound, strict=True):
            H = np.exp((q + scaled_key) @ (q + scaled_key).T)
            exact = (p @ H @ p - 1) / 16
            assert exact < r**2 < 10 * exact

    def test_heads_that_are_not_worth_it_are_told_from_others(self):
        query, key, _ = inputs(1.0, 2, 60)
        size = np.array([0.2, 4.0])[:, None, None]
        phi = HyperbolicFeatures(DIM, 16, rng=0)
        found = recommend_num_features(size * query, size * key, phi, tolerance=0.1, length=4000)
        np.testing.assert_array_equal(found.hopeless, [False, True])
        assert found.num_features is not None
        assert found.num_features == found.per_head[0] < 1000 < found.per_head[1]
        assert found.verdict.startswith("use exact softmax attention in 1 of 2 heads: ")
        assert "exact attention to 4000 keys" in found.verdict
        assert crossover_length(DIM, DIM, found.num_features) <= 4000

    def test_a_short_sequence_is_for_exact_attention(self):
        query, key, _ = inputs(0.2, 10)
        found = recommend_num_features(query, key, PositiveFeatures(DIM, rng=0), tolerance=0.1)
        assert found.num_features is None
        assert found.verdict.startswith("use exact softmax attention: ")

    def test_a_bias_is_taken_off_the_tolerance(self):
        query, key, _ = inputs(0.2, 20)
        biased = PositiveFeatures(DIM, 16, sampler="fixed_norm", rng=0)
        options: Any = {"length": 10**7, "tolerance": 0.05}
        found = recommend_num_features(query, key, biased, **options)
        weights = attention_weights(query, key, rows=slice(None))
        kernel = biased.kernel(query, key)
        spread = np.sum(weights * np.sqrt(biased.variance(query, key)) / kernel, axis=-1)
        bias = np.sum(weights * np.abs(biased.mean(query, key) / kernel - 1), axis=-1)
        # 18 of 20 queries must meet it.
        columns = np.sort(16 * (spread / (0.05 - bias)) ** 2)[17]
        assert found.per_head == DIM * np.ceil(columns / DIM)
        assert columns > 16 * np.sort(spread / 0.05)[17] ** 2 + DIM
        below = float(abs(relative_variance(query, key, biased).bias)) / 2
        hopeless = recommend_num_features(query, key, biased, length=10**7, tolerance=below)
        assert hopeless.per_head == np.inf
        assert hopeless.verdict.startswith("use exact softmax attention: ")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"tolerance": 0.0}, "tolerance must be a positive"),
            ({"coverage": 1.5}, "coverage must be above 0 and at most 1, got 1.5"),
            ({"length": 0}, "length must be at least 1"),
            ({"feature_map": EluFeatures()}, "feature_map must be random"),
        ],
    )
    def test_refusals(self, change, match):
        given: Any = {"feature_map": PositiveFeatures(DIM, rng=0), "tolerance": 0.1}
        x = np.zeros((5, DIM))
        with pytest.raises(ValueError, match=match):
            recommend_num_features(x, x, **(given | change))


class TestCrossoverLength:
    def test_the_counts_cross_there(self):
        d, e, m, c = 64, 48, 100, 128

        def exact(n: int, is_causal: bool) -> int:
            pairs = n * (n + 1) // 2 if is_causal else n * n
            return 2 * pairs * (d + e)

        def linear(n: int, is_causal: bool) -> int:
            features, sums = 2 * (2 * n * m * d), 2 * (2 * n * m * (e + 1))
            return features + sums + (2 * n * c * (m + e + 1) if is_causal else 0)

        for is_causal in (False, True):
            n = crossover_length(d, e, m, is_causal=is_causal)
            assert linear(n, is_causal) < exact(n, is_causal)
            assert linear(n - 1, is_causal) >= exact(n - 1, is_causal)

    def test_refusals(self):
        with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
            crossover_length(8, 8, 0)
        with pytest.raises(ValueError, match="exact_rate must be a positive"):
            crossover_length(8, 8, 8, exact_rate=0.0)


class TestAttentionWeights:
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize(
        "phi",
        [
            None,
            PositiveFeatures(DIM, 24, rng=0),
            HyperbolicFeatures(DIM, 16, rng=0),
            TrigonometricFeatures(DIM, 64, rng=0),
            EluFeatures(),
            Reparametrized(PositiveFeatures(DIM, 16, rng=0), np.ones(DIM), -np.ones(DIM)),
        ],
        ids=lambda phi: type(phi).__name__,
    )
    def test_times_the_values_they_are_attention(self, phi, masked, is_causal):
        query, key, value = inputs(0.5, 2, 3, 7)
        mask = np.array([False, True, True, True, False, True, True]) if masked else None
        options: Any = {"key_mask": mask, "is_causal": is_causal}
        if phi is None:
            expected = linattn.softmax_attention(query, key, value, **options)
        else:
            expected = linattn.linear_attention(query, key, value, phi, **options)
        weights = attention_weights(query, key, phi, rows=slice(None), **options)
        np.testing.assert_allclose(weights @ value, expected, rtol=1e-9, atol=1e-12)
        some = attention_weights(query, key, phi, rows=[-1, 2], **options)
        np.testing.assert_allclose(some, weights[..., [6, 2], :], rtol=1e-12)
        one = attention_weights(query, key, phi, rows=3, **options)
        np.testing.assert_allclose(one, weights[..., 3:4, :], rtol=1e-12)
        assert attention_weights(query, key, phi, rows=[], **options).shape == (2, 3, 0, 7)

    def test_column_normalized_maps(self):
        query, key, value = inputs(0.7, 9)
        phi = SoftmaxFeatures(DIM)
        weights = attention_weights(query, key, phi, rows=slice(None))
        np.testing.assert_allclose(
            weights @ value, linattn.linear_attention(query, key, value, phi), rtol=1e-10
        )

    def test_rows_with_zero_denominator_and_huge_inputs(self):
        x = -np.ones((3, DIM))
        np.testing.assert_array_equal(attention_weights(x, -x, ReluFeatures(), rows=[0]), 0)
        query, key, _ = inputs(60.0, 4)
        weights = attention_weights(query, key, PositiveFeatures(DIM, 8, rng=0), rows=slice(None))
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-12)

    def test_every_library(self, xp):
        query, key, _ = inputs(0.5, 5)
        phi = PositiveFeatures(DIM, 16, rng=0)
        mask = np.array([True, True, False, True, True])
        expected = attention_weights(query, key, phi, rows=[1], key_mask=mask)
        found = attention_weights(
            xp.array(query), xp.array(key), phi, rows=[1], key_mask=xp.array(mask)
        )
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        half = attention_weights(xp.array(query, "float32"), xp.array(key, "float32"), rows=0)
        np.testing.assert_allclose(half, attention_weights(query, key, rows=0), rtol=1e-5)

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"rows": [5]}, ValueError, "rows must be from -5 to 4 for 5 queries"),
            ({"rows": [0.5]}, TypeError, "rows must be an int, a slice or a sequence of ints"),
            ({"rows": 0, "scale": 1.0, "feature_map": EluFeatures()}, ValueError, "scale must be"),
            ({"rows": 0, "feature_map": PositiveFeatures(3, rng=0)}, ValueError, "3 coordinates"),
        ],
    )
    def test_refusals(self, options, error, match):
        with pytest.raises(error, match=match):
            attention_weights(np.zeros((5, DIM)), np.zeros((5, DIM)), **options)


class TestOutputError:
    """Against many draws of the projection, at errors where first order is enough."""

    DRAWS = 600

    def study(self, make: Any, scale: float = 0.3) -> tuple[Any, Any, Any]:
        query, key, value = inputs(scale, 40, seed=1)
        query = query[:5]
        found = []
        for seed in range(self.DRAWS):
            phi = make(seed)
            found.append(output_error(query, state_of(key, value, phi), phi))
        return found, query, (key, value)

    @pytest.mark.parametrize(
        ("make", "num_blocks"),
        [
            (lambda rng: PositiveFeatures(DIM, 64, rng=rng), 8),
            (lambda rng: PositiveFeatures(DIM, 60, rng=rng), 8),
            (lambda rng: PositiveFeatures(DIM, 96, sampler="gaussian", rng=rng), 96),
            (lambda rng: GeneralizedExponentialFeatures(DIM, 64, A=-0.02, rng=rng), 4),
        ],
        ids=["orthogonal", "partial block", "gaussian", "generalized"],
    )
    def test_variance_and_coverage(self, make, num_blocks):
        found, query, (key, value) = self.study(make)
        outputs = np.stack([f.output for f in found])
        exact = linattn.softmax_attention(query, key, value)
        assert {f.num_blocks for f in found} == {num_blocks}
        true = outputs.var(axis=0).mean()
        assert np.mean([f.variance for f in found]) == pytest.approx(true, rel=0.12)
        assert np.mean([f.jackknife for f in found]) == pytest.approx(true, rel=0.12)
        ends = [f.interval() for f in found]
        covered = np.mean([(low <= exact) & (exact <= high) for low, high in ends])
        assert 0.93 < covered < 0.965
        ends = [f.interval(0.5) for f in found]
        covered = np.mean([(low <= exact) & (exact <= high) for low, high in ends])
        assert 0.47 < covered < 0.53

    def test_the_output_is_that_of_read_state(self):
        query, key, value = inputs(0.6, 2, 3, 10)
        phi = TrigonometricFeatures(DIM, 64, rng=0)
        state = state_of(key, value, phi)
        found = output_error(query, state, phi)
        np.testing.assert_allclose(
            found.output, linattn.read_state(query, state, phi), rtol=1e-9, atol=1e-12
        )
        assert found.variance.shape == found.bias.shape == (2, 3, 10, DIM)
        assert found.denominator_variance.shape == found.effective_features.shape == (2, 3, 10)
        np.testing.assert_allclose(found.corrected, found.output - found.bias)

    def test_corrections_cut_the_bias(self):
        # Values that grow with the weight of their key's noise make the bias as large as it gets.
        rng = np.random.default_rng(1)
        query, key = 0.5 * rng.standard_normal((2, 30, DIM))
        query = query[:1]
        value = np.sum((key + query) ** 2, axis=-1, keepdims=True)
        exact = linattn.softmax_attention(query, key, value)
        rows = linattn.sampling.gaussian(16, DIM, 0, batch_shape=(8000,))
        phi = PositiveFeatures.from_projection(rows)
        state = linattn.init_state(phi, 1, batch_shape=(8000,), like=key)
        state = linattn.update_state(state, key, value, phi)
        found = output_error(query, state, phi, block_size=1)
        bias = (found.output - exact)[:, 0, 0]
        left = (found.corrected - exact)[:, 0, 0]
        assert abs(np.mean(bias)) > 8 * np.std(bias) / 8000**0.5
        assert abs(np.mean(left)) < abs(np.mean(bias)) / 2

    def test_the_variance_of_the_denominator(self):
        # Independent rows: m relVar D = p^T H p - 1 exactly.
        scale, m = 0.3, 96
        found, query, (key, _) = self.study(
            lambda rng: PositiveFeatures(DIM, m, sampler="gaussian", rng=rng), scale
        )
        estimates = np.mean([f.denominator_variance for f in found], axis=0)
        for q, p, estimate in zip(
            query, attention_weights(query, key, rows=slice(None)), estimates, strict=True
        ):
            z = (q + key) * DIM**-0.25
            exact = (p @ np.exp(z @ z.T) @ p - 1) / m
            assert estimate == pytest.approx(exact, rel=0.1)
        # For single rows it is what the effective features say.
        one = found[0]
        np.testing.assert_allclose(
            one.denominator_variance,
            m / (m - 1) * (1 / one.effective_features - 1 / m),
            rtol=1e-9,
        )

    def test_the_verdict(self):
        query, key, value = inputs(1.0, 2, 40)
        size = np.array([0.2, 4.0])[:, None, None]
        phi = PositiveFeatures(DIM, 64, rng=0)
        query, key = size * query, size * key
        mixed = output_error(query, state_of(key, value, phi), phi)
        assert mixed.verdict.startswith("use exact softmax attention in 1 of 2 heads: ")
        easy = output_error(query[0], state_of(key[0], value[0], phi), phi)
        assert easy.verdict.startswith("linear attention: ")
        hard = output_error(query[1], state_of(key[1], value[1], phi), phi)
        assert hard.verdict.startswith("use exact softmax attention: ")

    def test_every_library(self, xp):
        query, key, value = inputs(0.3, 6)
        phi = PositiveFeatures(DIM, 32, rng=0)
        arrays = [xp.array(a, "float32") for a in (query, key, value)]
        state = state_of(arrays[1], arrays[2], phi)
        found = output_error(arrays[0], state, phi)
        expected = output_error(query, state_of(key, value, phi), phi)
        for array, wanted in zip(found[:6], expected[:6], strict=True):
            assert array.dtype == np.float64
            np.testing.assert_allclose(array, wanted, rtol=2e-3, atol=1e-6)

    def test_an_empty_state(self):
        query, key, value = inputs(0.3, 6)
        phi = PositiveFeatures(DIM, 32, rng=0)
        found = output_error(query, state_of(key[:0], value[:0], phi), phi)
        np.testing.assert_array_equal(found.output, 0)
        assert_array_equal(found.variance, np.nan)
        assert_array_equal(found.effective_features, np.nan)

    def test_refusals(self):
        query, key, value = inputs(0.3, 6)
        phi = PositiveFeatures(DIM, 32, rng=0)
        state = state_of(key, value, phi)
        one = PositiveFeatures(DIM, DIM, rng=0)
        with pytest.raises(ValueError, match="two or more independent blocks"):
            output_error(query, state_of(key, value, one), one)
        with pytest.raises(ValueError, match="feature_map must be random for its output to vary"):
            output_error(query, state_of(key, value, EluFeatures()), EluFeatures())
        net = PositiveFeatures(DIM, 32, sampler="stratified", rng=0)
        with pytest.raises(ValueError, match="block_size must say"):
            output_error(query, state_of(key, value, net), net)
        with pytest.raises(ValueError, match="state must have 8 columns, those of feature_map"):
            output_error(query, state, one)
        with pytest.raises(TypeError, match=r"state must be a linattn\.State, got ndarray"):
            output_error(query, query, phi)
        with pytest.raises(ValueError, match="level must be between 0 and 1, got 2"):
            output_error(query, state, phi).interval(2)


class TestEffectiveFeatures:
    def test_one_and_all(self):
        key, value = np.zeros((4, DIM)), np.ones((4, 2))
        phi = PositiveFeatures(DIM, 32, rng=0)
        found = effective_features(np.zeros((1, DIM)), state_of(key, value, phi), phi)
        np.testing.assert_allclose(found, 32)
        far = 200.0 * np.ones((1, DIM))
        found = effective_features(far, state_of(far, value[:1], phi), phi)
        np.testing.assert_allclose(found, 1)

    def test_is_the_formula(self):
        query, key, value = inputs(0.5, 7)
        phi = TrigonometricFeatures(DIM, 32, rng=0)
        features = [phi.query_features(query), phi.key_features(key)]
        dense = [f.values * np.exp(f.log) for f in features]
        terms = dense[0] * dense[1].sum(axis=0)
        pi = terms / terms.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(
            effective_features(query, state_of(key, value, phi), phi),
            1 / np.sum(pi**2, axis=-1),
            rtol=1e-9,
        )


class TestDenominators:
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_counts_what_the_sums_say(self, is_causal):
        query, key, _ = inputs(1.5, 3, 40)
        phi = TrigonometricFeatures(DIM, 16, rng=0)
        mask = np.arange(40) % 3 > 0
        options: Any = {"is_causal": is_causal, "key_mask": mask}
        sums = linattn.reference.kernel_sums(query, key, key, phi, **options)
        negative = sums.denominator[..., int(is_causal) :, 0] < 0
        found = denominators(query, key, phi, **options)
        np.testing.assert_allclose(found.negative, negative.mean(axis=-1))
        np.testing.assert_array_equal(found.zero, 0)
        assert found.negative.min() > 0
        assert found.verdict.startswith("use exact softmax attention: the denominator is negative")

    def test_zero_denominators_are_told_and_positive_maps_have_neither(self):
        x = np.concatenate([np.ones((3, DIM)), -np.ones((1, DIM))])
        found = denominators(x, np.ones((4, DIM)), ReluFeatures())
        assert found.negative == 0
        assert found.zero == 0.25
        query, key, _ = inputs(3.0, 30)
        found = denominators(query, key, PositiveFeatures(DIM, rng=0), is_causal=True)
        assert found.negative == found.zero == 0
        assert found.verdict.startswith("linear attention: ")

    def test_no_key_at_all(self):
        query, key, _ = inputs(1.0, 4)
        phi = TrigonometricFeatures(DIM, rng=0)
        found = denominators(query, key, phi, key_mask=np.zeros(4, bool))
        assert np.isnan(found.negative)

    def test_nan_is_refused(self):
        x = np.full((4, DIM), np.nan)
        with pytest.raises(ValueError, match="query must be finite"):
            denominators(x, x, TrigonometricFeatures(DIM, rng=0))

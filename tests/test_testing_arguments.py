"""What the kit does with the wrong kind of thing, and with claims of any shape."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from linattn import _generic, testing
from linattn.feature_maps import PositiveFeatures
from linattn.typing import Features


def _misused(given):
    """Call every public assertion and check with the wrong kind of thing as its first argument."""
    x = np.ones((3, 4))
    return {
        "assert_batch_independent": lambda: testing.assert_batch_independent(given),
        "assert_causal": lambda: testing.assert_causal(given),
        "assert_mask_is_slice": lambda: testing.assert_mask_is_slice(given),
        "assert_merge_associative": lambda: testing.assert_merge_associative(given),
        "assert_normalized": lambda: testing.assert_normalized(given),
        "assert_permutation_invariant": lambda: testing.assert_permutation_invariant(given),
        "assert_rollback": lambda: testing.assert_rollback(given),
        "assert_streaming": lambda: testing.assert_streaming(given),
        "assert_picklable": lambda: testing.assert_picklable(given),
        "assert_mean": lambda: testing.assert_mean(given),
        "assert_unbiased": lambda: testing.assert_unbiased(given),
        "assert_variance": lambda: testing.assert_variance(given),
        "check_feature_map": lambda: testing.check_feature_map(given),
        "assert_gaussian_rows": lambda: testing.assert_gaussian_rows(given),
        "assert_estimator": lambda: testing.assert_estimator(given, 0.0, variance=1.0),
        "assert_at_most": lambda: testing.assert_at_most(given, 0.1, 0.1),
        "assert_estimator_variance": lambda: testing.assert_estimator_variance(
            given, 1.0, kurtosis=3
        ),
        "assert_estimator_covariance": lambda: testing.assert_estimator_covariance(
            given, np.eye(2), kurtosis=3
        ),
        "assert_gradient": lambda: testing.assert_gradient(given, given, x),
        "assert_inputs_unchanged": lambda: testing.assert_inputs_unchanged(given, x),
        "assert_namespace_preserved": lambda: testing.assert_namespace_preserved(given, x),
        "check_backend": lambda: testing.check_backend(given),
        "check_recurrence": lambda: testing.check_recurrence(given, update_rule="delta"),
        "standard_pairs": lambda: testing.standard_pairs(given, 1.0, 0),
    }


def _three_arguments(query, key, value):
    return value


WRONG = {"function": _three_arguments, "class": PositiveFeatures, "array": np.ones((3, 4))}
FIRST = {
    "assert_gaussian_rows": "sampler",
    "assert_estimator": "draw",
    "assert_at_most": "error",
    "assert_estimator_variance": "draw",
    "assert_estimator_covariance": "draw",
    "assert_gradient": "function",
    "assert_inputs_unchanged": "function",
    "assert_namespace_preserved": "function",
    "check_backend": "module",
    "check_recurrence": "function",
    "standard_pairs": "dim",
    **dict.fromkeys(
        ("assert_mean", "assert_unbiased", "assert_variance", "check_feature_map"),
        "map_or_factory",
    ),
}
TAKE_FUNCTIONS = {
    name for name, argument in FIRST.items() if argument in ("function", "sampler", "draw", "error")
}


class TestArguments:
    @pytest.mark.parametrize("kind", [*WRONG, "None"])
    @pytest.mark.parametrize("name", _misused(None))
    def test_the_wrong_kind_of_thing_is_named(self, name, kind):
        if kind == "function" and name in TAKE_FUNCTIONS:
            return
        argument = FIRST.get(name, "feature_map")
        with pytest.raises(TypeError, match=rf"\b{argument}\b") as caught:
            _misused(WRONG.get(kind))[name]()
        if kind == "class":
            assert "PositiveFeatures" in str(caught.value) or name == "standard_pairs"

    def test_every_function_is_tried(self):
        names = {name for name in testing.__all__ if name.startswith(("assert_", "check_"))}
        assert names | {"standard_pairs"} == set(_misused(None))

    def test_a_function_is_attention(self):
        with pytest.raises(TypeError, match=r"got function; give a function as attention="):
            testing.assert_causal(_three_arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["begin", "step", "snapshot"])
    def test_parts_of_a_stream_are_functions(self, name):
        given: dict[str, Any] = dict.fromkeys(("begin", "step", "snapshot"), lambda *_: None)
        with pytest.raises(TypeError, match=f"{name} must be a function"):
            testing.assert_rollback(**{**given, name: 3})

    def test_inputs_are_arrays(self):
        with pytest.raises(TypeError, match=r"arrays\[1\] must be an array, got NoneType"):
            testing.assert_inputs_unchanged(print, np.ones(3), None)


def _products(x, y):
    return np.sum(x * y, axis=-1)


class TestPairs:
    """Claims of one number a pair, kernels near 0, and shapes that are refused before a draw."""

    map = PositiveFeatures(4, 16, rng=0)
    x, y = 0.3 * np.random.default_rng(0).standard_normal((2, 6, 4))

    def _kernel(self, x, y):
        return np.exp(0.5 * np.sum(x * y, axis=-1))

    @pytest.mark.parametrize("shape", [(), (1, 1)])
    def test_claims_of_one_number_a_pair(self, shape):
        wanted = testing.assert_unbiased(self.map, self.x, self.y, num_draws=500)

        def kernel(x, y):
            return self._kernel(x, y).reshape(6, *shape)

        def variance(x, y):
            return self.map.variance(x, y).reshape(6, *shape)

        options: Any = {"variance": variance, "num_draws": 500}
        assert testing.assert_unbiased(self.map, self.x, self.y, kernel=kernel, **options) == wanted
        assert testing.assert_mean(self.map, self.x, self.y, mean=kernel, **options).detectable > 0
        assert testing.assert_variance(self.map, self.x, self.y, mean=kernel, **options).detectable
        with pytest.raises(AssertionError, match="pair"):
            testing.assert_unbiased(
                self.map, self.x, self.y, kernel=lambda x, y: 1.3 * kernel(x, y), num_draws=500
            )

    @pytest.mark.parametrize("name", ["kernel", "variance", "mean", "kurtosis"])
    @pytest.mark.parametrize(
        ("claim", "error"),
        [
            (np.ones(3), ValueError),
            (lambda x, y: np.ones(7), ValueError),
            (lambda x, y: np.ones((6, 6)), ValueError),
            ("large", TypeError),
        ],
    )
    def test_other_shapes_are_refused_before_a_draw(self, name, claim, error):
        draws: list[int] = []

        def factory(rng):
            draws.append(1)
            return PositiveFeatures(4, 16, rng=rng)

        calls: dict[str, Any] = {
            "kernel": testing.assert_unbiased,
            "variance": testing.assert_unbiased,
            "mean": testing.assert_mean,
            "kurtosis": testing.assert_variance,
        }
        call = calls[name]
        with pytest.raises(error, match=f"{name} must be"):
            call(factory, self.x, self.y, **{name: claim})
        assert len(draws) == 1

    @pytest.mark.parametrize("shift", [0.0, 1e-12, 1e-3])
    def test_a_kernel_near_0_is_judged_on_an_absolute_scale(self, shift):
        """Signs of products: an estimate of 0 has a standard deviation like any other."""
        x, y = np.eye(4)[[0, 0, 1]], np.eye(4)[[0, 1, 2]]
        y[1, 0] = y[2, 1] = shift

        class Rows:
            num_features, dim = 16, 4

            def __init__(self, rng):
                self._rows = rng.standard_normal((4, 16)) / 4

            def query_features(self, x):
                return Features(None, x @ self._rows)

            key_features = query_features

        def variance(x, y):
            return (np.sum(x * x, -1) * np.sum(y * y, -1) + _products(x, y) ** 2) / 16

        options: Any = {"kernel": _products, "variance": variance}
        evidence = testing.assert_unbiased(Rows, x, y, **options)
        assert 0 < evidence.detectable < 0.5
        for only in (slice(1, 2), slice(1, 3)):
            assert testing.assert_unbiased(Rows, x[only], y[only], **options).detectable < 0.5
        with pytest.raises(AssertionError, match="standard errors away"):
            testing.assert_unbiased(
                Rows, x, y, kernel=lambda x, y: _products(x, y) + 0.1, variance=variance
            )
        with pytest.raises(testing.UntestableError, match="num_draws is too small"):
            testing.assert_unbiased(Rows, x, y, num_draws=20, **options)

    def test_sketch_of_scikit_learn(self):
        kernel_approximation = pytest.importorskip("sklearn.kernel_approximation")

        class Sketch:
            num_features, dim = 64, 4

            def __init__(self, rng):
                self._sketch = kernel_approximation.PolynomialCountSketch(
                    degree=2, n_components=64, random_state=int(rng.integers(2**31))
                ).fit(np.zeros((1, 4)))

            def query_features(self, x):
                rows = self._sketch.transform(x.reshape(-1, 4))
                return Features(None, rows.reshape(*x.shape[:-1], 64))

            key_features = query_features

        def squares(x, y):
            return _products(x, y) ** 2

        x, y = np.random.default_rng(0).standard_normal((2, 20, 4))
        options: Any = {"kernel": squares, "kurtosis": 25}
        assert testing.assert_unbiased(Sketch, x, y, **options).detectable < 0.5
        report = testing.check_feature_map(Sketch, kernel=squares, length=33, on_fail="return")
        results = {row.check: row.result for row in report.rows}
        assert report.passed, str(report)
        assert (results["mean"], results["batch"]) == ("passed", "passed")
        assert results["namespace"] == results["pickle"] == "skipped"
        details = {row.check: row.detail for row in report.rows}
        assert "array-api-strict" in details["namespace"]
        assert "rejects NaN: ValueError" in details["batch"]


def _module(**attributes):
    module = types.ModuleType("mine")
    vars(module).update(attributes)
    return module


class TestBackends:
    @pytest.mark.parametrize(
        ("attributes", "words"),
        [
            ({}, "is in what is made in 'mine'"),
            ({"read_block": _generic.read_block}, "name functions made elsewhere in __all__"),
            ({"read_block": _generic.read_block, "__all__": []}, "is in __all__"),
            ({"helper": _three_arguments, "__all__": ["helper"]}, "is in __all__"),
        ],
    )
    def test_a_module_without_functions_fails(self, attributes, words):
        report = testing.check_backend(
            _module(**attributes), num_problems=1, extras=["helper"], on_fail="return"
        )
        assert not report.passed
        assert report.rows[0].detail.startswith("no function of linattn.typing.Backend, such as")
        assert words in report.rows[0].detail
        named = _module(read_block=_generic.read_block, __all__=["read_block"])
        assert testing.check_backend(named, num_problems=3).passed

    def test_no_dtypes_are_no_check(self):
        with pytest.raises(ValueError, match="dtypes must not be empty"):
            testing.check_backend(_module(), dtypes=())


class OfNumPy:
    """A map of one's own that calls NumPy, whatever arrays it is given."""

    num_features, dim, positive = 8, 4, True

    def query_features(self, x):
        values = np.asarray(x, np.float64)
        return Features(None, np.concatenate([np.exp(values), np.exp(-values)], axis=-1))

    key_features = query_features


class TestOwnMaps:
    def test_a_map_for_numpy_alone_is_skipped_for_other_libraries(self):
        report = testing.check_feature_map(OfNumPy(), length=33, on_fail="return")
        assert report.passed, str(report)
        row = next(row for row in report.rows if row.check == "namespace")
        assert row.result == "skipped"
        assert row.detail.startswith("out as in: NumPy's float64, float32, float16; the map does")
        assert "array-api-strict: " in row.detail

    def test_without_the_library_it_passes(self, monkeypatch):
        monkeypatch.setattr("linattn.testing.check.find_spec", lambda name: None)
        report = testing.check_feature_map(OfNumPy(), length=33, on_fail="return")
        assert {row.result for row in report.rows if row.check == "namespace"} == {"passed"}

    def test_a_failed_report_says_that_the_mean_passed(self):
        def kernel(x, y):
            return 2 * np.sum(np.cosh(x[..., :, None, :] + y[..., None, :, :]), axis=-1)

        report = testing.check_feature_map(OfNumPy(), kernel=kernel, length=33, on_fail="return")
        assert report.passed
        assert report.reservation == ""
        subject = OfNumPy()
        subject.num_features = 7
        report = testing.check_feature_map(subject, kernel=kernel, length=33, on_fail="return")
        assert not report.passed
        assert str(report).splitlines()[-1] == "The mean passed: no bias was found."

"""Rows of zeros, as padding has them, on the CuPy backend: right, and not computed again."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import linattn
from linattn._driver.problem import linear_problem
from linattn.feature_maps import ReluFeatures
from linattn.typing import Cotangent
from linattn_cupy import gradients
from tests.fake_gpu.device import Device

pytestmark = pytest.mark.fake_gpu

RELU = ReluFeatures()
DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}


def inputs(width: int = 24) -> list[Any]:
    """Query, key, value and cotangent; every third query is without features."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 150, x)) for x in (16, 16, width, width)]
    query, *rest = (x.astype(ml_dtypes.bfloat16).astype(np.float16).astype(float) for x in arrays)
    query[:, ::6] = 0
    query[:, 3::6] = -np.abs(query[:, 3::6])
    return [query, *rest]


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_without_features_are_not_computed_again(gpu, dtype):
    query, key, value, _ = inputs()
    settings: Any = {"is_causal": True, "return_log_normalizer": True}
    expected, norm = linattn.linear_attention(query, key, value, RELU, **settings)
    arrays = [x.astype(DTYPES[dtype]) for x in (query, key, value)]
    out, log = Device.run(linattn.linear_attention, *arrays, RELU, **settings)
    assert gpu.redone == 0
    np.testing.assert_array_equal(out[:, ::3].astype(float), 0)
    np.testing.assert_array_equal(log[:, ::3].astype(float), -np.inf)
    rest = np.arange(150) % 3 != 0
    np.testing.assert_allclose(log[:, rest].astype(float), norm[:, rest], atol=0.05)
    np.testing.assert_allclose(out.astype(float), expected, atol=0.05)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_queries_without_features_stay_in_the_kernels(gpu, dtype):
    query, key, value, grad = inputs()
    _, pullback = linattn.linear_attention_vjp(query, key, value, RELU, is_causal=True)

    def work(query, key, value, grad):
        problem = linear_problem(query, key, value, RELU, is_causal=True)
        return gradients.attention_vjp(problem, Cotangent(grad, None))

    found = Device.run(work, *(x.astype(DTYPES[dtype]) for x in (query, key, value, grad)))
    assert isinstance(found, tuple), found
    for got, wanted in zip(found[:3], pullback(grad), strict=True):
        error = np.linalg.norm(got.astype(float) - wanted) / np.linalg.norm(wanted)
        assert error < 2e-2
    np.testing.assert_array_equal(found[0][:, ::3].astype(float), 0)


def test_a_row_that_is_not_finite_is_no_row_of_zeros(gpu):
    query, key, value, _ = (x.astype(np.float32) for x in inputs())
    value[:, 0] = np.inf
    Device.run(linattn.linear_attention, query, key, value, RELU, is_causal=True)
    assert gpu.redone > 0

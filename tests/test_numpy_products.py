"""Products cut into small ones are the products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linattn_numpy import products, tuning

PRODUCTS = products.KINDS
MAX_SMALL_MATMUL = 4_000
"""Small enough that small inputs are cut too."""


def _array(rng: np.random.Generator, shape: tuple[int, ...], layout: str, dtype: str) -> Any:
    """An array of one of the layouts that come up: whole, turned, a slice of wider rows."""
    if layout == "turned":
        return np.swapaxes(rng.standard_normal((*shape[:-2], *shape[:-3:-1])), -1, -2).astype(
            dtype, order="K"
        )
    if layout == "slice":
        return rng.standard_normal((*shape[:-1], shape[-1] + 3)).astype(dtype)[..., 1:-2]
    return rng.standard_normal(shape).astype(dtype)


LAYOUTS = st.sampled_from(["whole", "turned", "slice"])


@pytest.fixture(params=[True, False], ids=["cut", "whole"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setattr(tuning, "MAX_SMALL_MATMUL", MAX_SMALL_MATMUL)
    monkeypatch.setattr(products, "small_products", lambda dtype: PRODUCTS if request.param else ())
    monkeypatch.setattr(tuning, "MIN_SUM_ROWS", 4)
    caches = (products._rows_per_small_product, products._tokens_and_features)
    for cached in caches:
        cached.cache_clear()
    yield request.param
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    lead=st.sampled_from([((), ()), ((2,), ()), ((), (2,)), ((2, 3), (3,)), ((2, 1), (1, 3))]),
    n=st.integers(0, 70),
    k=st.integers(1, 20),
    j=st.integers(1, 20),
    layouts=st.tuples(LAYOUTS, LAYOUTS),
)
def test_product_and_sum(
    cut: bool, dtype: str, lead: Any, n: int, k: int, j: int, layouts: tuple[str, str]
) -> None:
    rng = np.random.default_rng(n * 400 + k * 20 + j)
    x = _array(rng, (*lead[0], n, k), layouts[0], dtype)
    y = _array(rng, (*lead[1], k, j), layouts[1], dtype)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    wanted = np.matmul(x.astype(float), y.astype(float))
    out = products.product(x, y, "product")
    np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=tolerance * k)

    v = _array(rng, (*lead[1], n, j), layouts[1], dtype)
    wanted = np.matmul(np.swapaxes(x, -1, -2).astype(float), v.astype(float))
    total = products.weighted_sum(x, v)
    assert total.dtype == x.dtype
    np.testing.assert_allclose(total, wanted, rtol=tolerance, atol=tolerance * max(n, 1))


def test_large_products_are_cut(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    matmul = np.matmul

    def spy(x: Any, y: Any, out: Any = None) -> Any:
        shapes.append((*x.shape[-2:], y.shape[-1]))
        return matmul(x, y, out=out)

    monkeypatch.setattr(np, "matmul", spy)
    x, y = np.ones((100, 16)), np.ones((16, 12))
    assert np.array_equal(products.product(x, y, "product"), x @ y)
    assert np.array_equal(products.weighted_sum(x, np.ones((100, 2))), np.full((16, 2), 100.0))
    # Too many tokens for 32 columns at once: the tokens are cut too.
    long = np.arange(300.0)[:, None] * np.ones(2)
    assert np.array_equal(products.weighted_sum(np.ones((300, 40)), long), np.full((40, 2), 44850))
    largest = max(int(np.prod(shape)) for shape in shapes)
    assert (largest <= MAX_SMALL_MATMUL) == cut


@pytest.mark.usefixtures("cut")
def test_a_product_with_a_column_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    column = np.arange(300.0)[:, None]
    whole = mock.Mock(wraps=np.matmul)
    monkeypatch.setattr(np, "matmul", whole)
    sums = products.weighted_sum(np.ones((300, 40)), column)
    assert np.array_equal(sums, np.full((40, 1), 44850))
    whole.assert_called_once()

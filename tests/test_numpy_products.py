"""Products in buffers, of arrays of any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linattn_numpy import products


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    lead=st.sampled_from([((), ()), ((2,), ()), ((), (2,)), ((2, 3), (3,)), ((2, 1), (1, 3))]),
    n=st.integers(0, 70),
    k=st.integers(1, 20),
    j=st.integers(1, 20),
    layouts=st.tuples(LAYOUTS, LAYOUTS),
)
def test_product_and_sum(
    dtype: str, lead: Any, n: int, k: int, j: int, layouts: tuple[str, str]
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

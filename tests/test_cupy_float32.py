"""Float32 on the fake GPU: how many launches and how much memory calls take, exact pairs, decays.

The oracle is the generic code in float64. Sizes of the counts are those of docs/gpu.md; nothing is
computed there.
"""

# mypy: disable-error-code="arg-type, call-arg, call-overload"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn._driver.problem import linear_problem
from linattn.feature_maps import EluFeatures, PositiveFeatures
from linattn.typing import Cotangent, Declined
from linattn_cupy import exact as exact_pairs
from linattn_cupy import products, whole
from tests.fake_gpu.device import F32, Device, cupy, error, exact
from tests.fake_gpu.log import recorded, uncomputed

pytestmark = pytest.mark.fake_gpu

MIB = 2**20


class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """Most bytes of arrays at one time."""

    name = "peak"

    def __init__(self) -> None:
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}

    def malloc_postprocess(self, **told: Any) -> None:
        self.sizes[told["mem_ptr"]] = told["mem_size"]
        self.now += told["mem_size"]
        self.most = max(self.most, self.now)

    def free_postprocess(self, **told: Any) -> None:
        self.now -= self.sizes.pop(told["mem_ptr"], 0)


HEADS, LENGTH, DIM = 64, 8192, 64
PHI = PositiveFeatures(DIM, num_features=256, rng=0)
LARGE = {
    "full": (40, 256),
    "causal": (150, 256),
    "full elu": (25, 256),
    "causal elu": (60, 256),
    "gradients": (400, 512 + 256),
    "full gradients": (400, 512 + 256),
    "softmax": (300, 256),
    "causal softmax": (300, 256),
    "log_decay": (1000, 256),
    "window": (300, 256),
}
"""Launches, fills and products at most, and MiB beside inputs and outputs: those of the page.

Gradients besides keep value and cotangent in units, where either is far from 1.
"""


def large(name: str, x: Any) -> Any:
    """Run a call of 64 heads of 8,192 tokens."""
    if "gradients" in name:
        output, pullback = linattn.linear_attention_vjp(x, x, x, PHI, is_causal="full" not in name)
        return output, pullback(x)
    if "softmax" in name:
        return linattn.softmax_attention(x, x, x, is_causal="causal" in name)
    options: dict[str, Any] = {"exact_window": 256} if name == "window" else {}
    options |= {"log_decay": -0.1} if name == "log_decay" else {}
    phi = EluFeatures() if "elu" in name else PHI
    return linattn.linear_attention(x, x, x, phi, is_causal="full" not in name, **options)


@pytest.mark.parametrize("name", LARGE)
def test_launches_and_memory_of_large_calls(name):
    most, mebibytes = LARGE[name]
    x = cupy.empty((HEADS, LENGTH, DIM), F32)
    with uncomputed():
        large(name, x[:1, :256])  # parameters are made once
        with recorded() as log, Peak() as peak:
            results = large(name, x)
    arrays = len(results) if "gradients" not in name else 4
    outputs = x.nbytes * (arrays if "gradients" in name else 1)
    assert 10 < len(log.of("LAUNCH", "FILL", "GEMM")) <= most
    assert log.of("ERROR", "NOTE") == []
    assert (peak.most - outputs) / MIB <= 1.1 * mebibytes


def test_70_000_heads():
    """Grids count heads along their longest axis, and no product has more heads than cuBLAS."""
    x = cupy.empty((70_000, 4, 8), F32)
    for is_causal in (False, True):
        with uncomputed(), recorded() as log:
            linattn.linear_attention(x, x, x, EluFeatures(), is_causal=is_causal)
            linattn.softmax_attention(x, x, x, is_causal=is_causal)
        assert not log.of("ERROR")
        batches = [int(line.split(" batch ")[1].split()[0]) for line in log.of("GEMM")]
        assert max(batches) <= products.MAX_BATCH
        assert sum(batches) % 70_000 == 0


def inputs(*shape: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(F32) for _ in range(3)]


def test_more_heads_than_a_product_takes(gpu, monkeypatch):
    monkeypatch.setattr(products, "MAX_BATCH", 3)
    arrays = inputs(7, 20, 8)
    phi = PositiveFeatures(8, 16, rng=0)
    for is_causal in (False, True):
        settings = {"is_causal": is_causal}
        found = Device.run(linattn.linear_attention, *arrays, phi, **settings)
        assert error(found, exact(linattn.linear_attention, *arrays, phi, **settings)) < 1e-5


@pytest.mark.parametrize("place", ["key", "value", "query", "all logits"])
def test_softmax_of_what_is_not_finite_is_generic(gpu, place):
    """NaN reaches its own rows only, and logits that all overflow have no known weights."""
    query, key, value = inputs(1, 70, 16)
    if place == "all logits":
        query[0, 3], key[...] = 1e30, -np.abs(key) * F32(1e20)
    else:
        {"key": key, "value": value, "query": query}[place][0, 30, 3] = np.nan
    with np.errstate(all="ignore"), linattn.without_backends():
        expected = linattn.softmax_attention(query, key, value, is_causal=True)
    output = Device.run(linattn.softmax_attention, query, key, value, is_causal=True)
    assert_array_equal(np.isnan(output), np.isnan(expected))
    assert np.isnan(output).any()
    assert not np.isnan(output).all()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "a window on both sides"),
        ({"is_causal": True, "exact_window": 20}, "20 tokens are not within 32 and 1024"),
        ({"is_causal": True, "log_decay": -0.1}, "log_decay is given"),
    ],
    ids=["full", "short", "decay"],
)
def test_windows_that_are_left_to_generic_code(gpu, settings, reason):
    settings = {"exact_window": 32} | settings
    arrays = [cupy.asarray(x) for x in inputs(2, 50, 16)]
    problem = linear_problem(*arrays, PositiveFeatures(16, 40, rng=0), **settings)
    assert exact_pairs.window_attention(problem) == Declined(reason)


@pytest.mark.parametrize("dtype", [np.float16, F32])
def test_decays_are_declined_where_no_kernel_knows_them(gpu, dtype):
    arrays = [cupy.asarray(x.astype(dtype)) for x in inputs(2, 50, 16)]
    phi = PositiveFeatures(16, 40, rng=0)
    problem = linear_problem(*arrays, phi, is_causal=True, log_decay=-0.1)
    assert isinstance(whole.attention_vjp(problem, Cotangent(arrays[0], None)), Declined)
    assert isinstance(whole.attention_pullback(problem), Declined)
    assert isinstance(whole.attention(problem), Declined) is (dtype is np.float16)

"""Speed of linattn on NumPy arrays: batch 1, 8 heads, float32, one thread.

taskset -c 0 python -m pytest benchmarks --benchmark-only [--long] [-k causal]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import linattn
from linattn.feature_maps import EluFeatures, HyperbolicFeatures, PositiveFeatures

pytest.importorskip("pytest_benchmark", reason="benchmarks need the extra bench")

HEADS = 8
LENGTHS = [512, 1024, 2048, 4096, 8192]
LONG = [16384, 32768, 65536]
CONTEXTS = [1024, 16384]

lengths = pytest.mark.parametrize(
    "length", [*LENGTHS, *(pytest.param(n, marks=pytest.mark.long) for n in LONG)], ids="N{}".format
)
dims = pytest.mark.parametrize("dim", [64, 128], ids="d{}".format)
columns = pytest.mark.parametrize("columns", [128, 256], ids="m{}".format)
kinds = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let neither linattn nor BLAS use a second thread."""
    with linattn.config(num_threads=1):
        yield


def normals(*shape: int) -> list[Any]:
    """Return standard normal query, key and value."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(3)]


@lengths
@dims
@columns
@kinds
def test_favor(benchmark: Any, length: int, dim: int, columns: int, is_causal: bool) -> None:
    """FAVOR+."""
    arrays = normals(1, HEADS, length, dim)
    phi = PositiveFeatures(dim, columns, rng=0)
    benchmark(linattn.linear_attention, *arrays, phi, is_causal=is_causal)


@lengths
@kinds
def test_hyperbolic(benchmark: Any, length: int, is_causal: bool) -> None:
    """Paired exponentials."""
    arrays = normals(1, HEADS, length, 64)
    phi = HyperbolicFeatures(64, 256, rng=0)
    benchmark(linattn.linear_attention, *arrays, phi, is_causal=is_causal)


@lengths
@dims
@kinds
def test_elu(benchmark: Any, length: int, dim: int, is_causal: bool) -> None:
    """Coordinate-wise, elu + 1."""
    arrays = normals(1, HEADS, length, dim)
    benchmark(linattn.linear_attention, *arrays, EluFeatures(), is_causal=is_causal)


@dims
@columns
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("how", ["Decoder", "decode_step"])
def test_decode(benchmark: Any, context: int, dim: int, columns: int, how: str) -> None:
    """One token of 8 heads."""
    _, key, value = normals(HEADS, context, dim)
    phi = PositiveFeatures(dim, columns, rng=0)
    state = linattn.init_state(phi, dim, batch_shape=(HEADS,), like=key)
    state = linattn.update_state(state, key, value, phi)
    token = normals(HEADS, dim)
    if how == "Decoder":
        benchmark(linattn.Decoder(phi, state).step, *token)
    else:
        benchmark(linattn.decode_step, *token, state, phi)

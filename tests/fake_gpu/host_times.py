"""What a call asks of CuPy and how long the host takes for it, on the fake GPU.

    FAKE_GPU_FAST=1 tests/fake_gpu/run.sh python tests/fake_gpu/host_times.py [DTYPE ...]

Nothing is computed: no time here is a GPU's.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import cupy

import linattn
from linattn.feature_maps import EluFeatures, PositiveFeatures

# Of the folder of this script, which is no package.
recorded: Any = importlib.import_module("log").recorded

SHAPE = (4, 16, 8192, 64)
"""Batch, heads, tokens and dims."""

ROUNDS = 15
MAPS: dict[str, Any] = {"FAVOR+": PositiveFeatures(64, 256, rng=0), "elu + 1": EluFeatures()}


def _describe(dtype: str, name: str, is_causal: bool) -> str:
    """Say for a warm call how many launches, allocations and copies it makes, and its time."""
    kind = "float32" if dtype == "tf32" else dtype
    if kind == "bfloat16":
        import ml_dtypes

        kind = ml_dtypes.bfloat16
    query, key, value = (cupy.empty(SHAPE, kind) for _ in range(3))
    call = partial(linattn.linear_attention, query, key, value, MAPS[name], is_causal=is_causal)
    with linattn.config(precision="tf32") if dtype == "tf32" else nullcontext():
        call()
        call()
        times = []
        for _ in range(ROUNDS):
            begun = time.process_time()
            call()
            times.append(time.process_time() - begun)
        with recorded() as log:
            call()
    kernels, products = len(log.of("LAUNCH")), len(log.of("GEMM"))
    what = f"{dtype:9} {name:8} {'causal' if is_causal else 'full':7}"
    numbers = f"{kernels + products:6} launches ({products} of cuBLAS) {log.allocations:6} arrays"
    copies = len(log.of("COPY", "FILL"))
    return f"{what}{numbers} {copies:4} copies and fills {1e3 * statistics.median(times):8.2f} ms"


def main() -> None:
    """Print a line for each call."""
    for dtype in sys.argv[1:] or ["float32", "tf32", "float64", "bfloat16"]:
        for name in MAPS:
            for is_causal in (False, True):
                print(_describe(dtype, name, is_causal), flush=True)


if __name__ == "__main__":
    main()

"""Time of attention that needs no retraining against exact attention, one core, in one run.

    python benchmarks/dropin.py [--heads 2] [--lengths 2048 4096 16384 65536] [--out FILE.json]

Fitting is included. Full: 64 landmarks and a window of 32 against linattn's exact attention and,
where it is installed, torch's scaled_dot_product_attention. Causal: a coreset of 64 entries and
blocks of 128 against the same. Inputs are the shipped sample, its tokens repeated at random with
fresh noise. Each figure is the median of calls made in turn, so that a slow moment of the machine
falls on all alike.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import linattn

COLUMNS, WINDOW, BLOCK = 64, 32, 128


def inputs(heads: int, length: int) -> tuple[Any, Any, Any]:
    """Return query, key and value, ``(heads, length, 32)``."""
    rng = np.random.default_rng(0)
    arrays = [x[0, :heads] for x in linattn.datasets.pretrained_qkv()]
    tokens = rng.integers(arrays[0].shape[-2], size=length)
    noisy = (
        x[:, tokens] + 0.1 * x.std() * rng.standard_normal((heads, length, x.shape[-1]))
        for x in arrays
    )
    query, key, value = (np.ascontiguousarray(x, dtype=np.float32) for x in noisy)
    return query, key, value


def methods(query: Any, key: Any, value: Any) -> dict[str, Callable[[], object]]:
    """Return the calls by name."""

    def landmarks() -> object:
        phi = linattn.feature_maps.LandmarkFeatures.fit(query, key, num_features=COLUMNS, rng=0)
        return linattn.linear_attention(query, key, value, phi, exact_window=WINDOW)

    def coreset() -> object:
        stream = linattn.CoresetAttention(COLUMNS, block_size=BLOCK, rng=0)
        return stream.extend(query, key, value)

    calls: dict[str, Callable[[], object]] = {
        "landmarks": landmarks,
        "exact": lambda: linattn.softmax_attention(query, key, value),
        "coreset": coreset,
        "exact causal": lambda: linattn.softmax_attention(query, key, value, is_causal=True),
    }
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        tensors = [torch.from_numpy(x)[None] for x in (query, key, value)]
        attend = torch.nn.functional.scaled_dot_product_attention
        calls["torch"] = lambda: attend(*tensors)
        calls["torch causal"] = lambda: attend(*tensors, is_causal=True)
    return calls


def measure(heads: int, length: int, seconds: float) -> dict[str, float]:
    """Return the median time of each method, called in turn for about so many seconds."""
    calls = methods(*inputs(heads, length))
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun = perf_counter()
    while perf_counter() - begun < seconds or not all(times.values()):
        for name, call in calls.items():
            start = perf_counter()
            call()
            times[name].append(perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    """Measure, print a table, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 16384, 65536])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each length")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with linattn.config(num_threads=1):
        found = {n: measure(options.heads, n, options.seconds) for n in options.lengths}
    names = list(next(iter(found.values())))
    print(f"{options.heads} heads of 32, float32, one core; milliseconds, median")
    print("tokens ".rjust(8), *(name.rjust(13) for name in names))
    for length, times in found.items():
        print(f"{length:>7,} ", *(f"{1e3 * times[name]:13.1f}" for name in names))
    lengths = sorted(found)
    for name in names:
        span = math.log(lengths[-1] / lengths[0])
        power = (
            math.log(found[lengths[-1]][name] / found[lengths[0]][name]) / span
            if span
            else math.nan
        )
        print(f"{name}: grows as N^{power:.2f}")
    if options.out is not None:
        options.out.write_text(json.dumps({str(n): times for n, times in found.items()}, indent=1))


if __name__ == "__main__":
    main()

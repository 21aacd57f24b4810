"""Time of attention that needs no retraining against exact attention, one core, in one run.

    python benchmarks/dropin.py [--heads 2] [--lengths 2048 4096 16384 65536] [--out FILE.json]
    python benchmarks/dropin.py --published [--seconds 10]

Fitting is included. Full: 64 landmarks and a window of 32 against linattn's exact attention and,
where it is installed, torch's scaled_dot_product_attention. Causal: a coreset of 64 entries and
blocks of 128 against the same. Inputs are the shipped sample, its tokens repeated at random with
fresh noise. Each figure is the median of calls made in turn, so that a slow moment of the machine
falls on all alike.

``--published`` prints error and time of keys chosen by WildCat and by Thinformer beside as many
landmarks, on the real samples: by the formulas of linattn.baselines and, where they are installed,
by their authors' packages, which need torch and are installed from their repositories only (see
`PACKAGES`; the package ``wildcat`` of PyPI is another one). Those two calls follow the packages'
own READMEs and have been run with stand-ins, never yet with the packages themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import linattn
from linattn import baselines

COLUMNS, WINDOW, BLOCK = 64, 32, 128

PACKAGES = {
    "wildcat": ("WildCat", "https://github.com/microsoft/wildcat.git"),
    "thinformer": ("ThinformerAttention", "https://github.com/microsoft/thinformer.git"),
}
"""Published attentions with a package of their own: its class, and where it is."""


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


def missing(package: str) -> str:
    """Return why the authors' package cannot be run here; "" if it can."""
    name, address = PACKAGES[package]
    remedy = f"pip install git+{address}"
    if find_spec("torch") is None:
        return f"{package}: torch is not installed, which it needs"
    if find_spec(package) is None:
        return f"{package}: not installed; {remedy}"
    if not hasattr(import_module(package), name):
        return f"{package}: another package of this name is installed; {remedy}"
    return ""


def authors_calls(
    query: Any, key: Any, value: Any, num_keys: int, oversampling: int
) -> dict[str, Callable[[], Any]]:
    """Return the calls of the authors' packages that are installed, on arrays ``(H, L, d)``."""
    calls: dict[str, Callable[[], Any]] = {}
    if not missing("wildcat"):
        import torch

        tensors = [torch.from_numpy(x)[None] for x in (query, key, value)]  # (1, H, L, d)
        wildcat = import_module("wildcat").WildCat(r=num_keys)
        calls["WildCat, its package"] = lambda: wildcat(*tensors)[0].detach().numpy()
    if not missing("thinformer"):
        import torch

        by_token = [torch.from_numpy(x.swapaxes(0, 1).copy())[None] for x in (query, key, value)]
        thinformer = import_module("thinformer").ThinformerAttention(g=oversampling)
        calls["Thinformer, its package"] = lambda: (
            thinformer(*by_token)[0][0].detach().numpy().swapaxes(0, 1)
        )
    return calls


def published_calls(query: Any, key: Any, value: Any, num_keys: int) -> dict[str, Any]:
    """Return the calls that choose so many keys, by name."""
    root = 2 ** ((key.shape[-2].bit_length() - 1) // 2)
    oversampling = max(0, round(math.log2(num_keys / root)))
    inputs = query, key, value

    def landmarks(window: int | None) -> Any:
        phi = linattn.feature_maps.LandmarkFeatures.fit(query, key, num_features=num_keys, rng=0)
        return linattn.linear_attention(*inputs, phi, exact_window=window)

    return {
        "landmarks": lambda: landmarks(None),
        f"landmarks, window {WINDOW}": lambda: landmarks(WINDOW),
        "WildCat's formula": lambda: baselines.wildcat(*inputs, num_keys=num_keys, rng=0),
        "Thinformer's formula": lambda: baselines.thinformer(
            *inputs, oversampling=oversampling, rng=0
        ),
        **authors_calls(*inputs, num_keys, oversampling),
    }


def compare_published(seconds: float) -> None:
    """Print error and time on both real samples, at equal numbers of keys."""
    samples = {
        "24 heads of 256 tokens": linattn.datasets.pretrained_qkv(),
        "heads of 2,560 tokens": linattn.datasets.pretrained_long_qkv(),
    }
    for title, arrays in samples.items():
        query, key, value = (np.ascontiguousarray(x.reshape(-1, *x.shape[-2:])) for x in arrays)
        wide = (x.astype(np.float64) for x in (query, key, value))
        exact = linattn.softmax_attention(*wide)
        size = np.linalg.norm(exact, axis=(-2, -1))
        print(f"{title}, dim 32, float32, one core: median relative error, milliseconds")
        for num_keys in (COLUMNS, 2 * COLUMNS):
            for name, call in published_calls(query, key, value, num_keys).items():
                error = np.median(np.linalg.norm(call() - exact, axis=(-2, -1)) / size)
                times: list[float] = []
                while not times or sum(times) < seconds / 10:
                    start = perf_counter()
                    call()
                    times.append(perf_counter() - start)
                took = 1e3 * statistics.median(times)
                print(f"{num_keys:>5} keys  {name:24} {error:8.3f} {took:10.1f}")
    for reason in filter(None, map(missing, PACKAGES)):
        print(f"not run: {reason}")


def main() -> None:
    """Measure, print a table, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 16384, 65536])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each length")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--published", action="store_true", help="WildCat, Thinformer, landmarks")
    options = parser.parse_args()
    if options.published:
        with linattn.config(num_threads=1):
            compare_published(options.seconds)
        return
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

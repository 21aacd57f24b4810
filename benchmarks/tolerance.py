"""How often a head of `linattn.attention` exceeds a tolerance, and what it costs to know.

    python benchmarks/tolerance.py [--seeds 20] [--length 8192] [--inputs NAME ...]

Five inputs, each with the tolerances .02, .05 and .1 and with the hardest: its usual error, the
median of what 64 landmarks have in the worst head, which a lucky estimate would pass in half of all
calls. In a cell stand the heads of all calls that took landmarks, those among them that exceeded
the tolerance against exact attention of all rows, and the largest error over the tolerance. Last,
the share of the time of calls on the text that fits and exact rows take.

Needs scikit-learn (extra ``examples``) for the photograph.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn.automatic import _full

TOLERANCES = (0.02, 0.05, 0.1)


def gaussian_kernel(points: NDArray[Any], values: NDArray[Any]) -> tuple[Any, ...]:
    """Query, key and value, at a scale of 1, of a mean weighted by ``exp(-|x - y|^2 / 2)``."""
    centred = points - points.mean(axis=0)
    query = np.concatenate([centred, np.ones_like(centred[:, :1])], axis=1)
    squares = np.sum(centred**2, axis=1, keepdims=True)
    key = np.concatenate([centred, -squares / 2], axis=1)
    return query.astype(np.float32), key.astype(np.float32), values.astype(np.float32), 1.0


def photograph(length: int) -> tuple[Any, ...]:
    """Non-local means: pixels by their noisy patches of 3 x 3, on 6 principal components."""
    from sklearn.datasets import load_sample_image

    side = int(length**0.5)
    grey = np.asarray(load_sample_image("china.jpg"), dtype=float)[80:, 120:].mean(axis=-1) / 255
    grey = grey[:side, :side]
    noisy = grey + 0.1 * np.random.default_rng(0).standard_normal(grey.shape)
    padded = np.pad(noisy, 1, mode="reflect")
    patches = np.lib.stride_tricks.sliding_window_view(padded, (3, 3)).reshape(side * side, 9)
    patches = patches - patches.mean(axis=0)
    axes = np.linalg.svd(patches, full_matrices=False)[2][:6]
    return gaussian_kernel(patches @ axes.T / 0.3, noisy.reshape(-1, 1))


def gaussian(length: int) -> tuple[Any, ...]:
    """Two heads of independent Gaussian tokens, dim 8, whose logits have a deviation of .7."""
    query, key, value = np.random.default_rng(1).standard_normal((3, 2, length, 8))
    arrays = (0.7 * query, key, value + 1)
    return *(x.astype(np.float32) for x in arrays), None


def clustered(length: int) -> tuple[Any, ...]:
    """Three heads of keys around 24 centres, dim 16."""
    rng = np.random.default_rng(2)
    centres = rng.standard_normal((3, 24, 16))
    which = rng.integers(24, size=length)
    key = centres[:, which] + 0.3 * rng.standard_normal((3, length, 16))
    query = 1.5 * centres[:, which] + rng.standard_normal((3, length, 16))
    value = rng.standard_normal((3, 24, 16))[:, which] + 1
    return *(x.astype(np.float32) for x in (query, key, value)), None


def text(length: int) -> tuple[Any, ...]:
    """Six heads of the shipped sample, a token for each byte of an English text, with noise."""
    from pydoc_data.topics import topics

    letters = "".join(topics[name] for name in sorted(topics)).encode()[:length]
    tokens = np.frombuffer(letters, dtype=np.uint8)
    rng = np.random.default_rng(0)
    arrays = [x[1, :6] for x in linattn.datasets.pretrained_qkv()]
    noisy = [x[:, tokens] + 0.2 * x.std() * rng.standard_normal((6, length, 32)) for x in arrays]
    return *(x.astype(np.float32) for x in noisy), None


def time_series(length: int) -> tuple[Any, ...]:
    """Kernel regression of the next value of Lorenz' attractor on the 8 before it, with noise."""
    position, path = np.ones(3), []
    for _ in range(length + 8):
        for _ in range(5):
            x, y, z = position
            position = position + 0.01 * np.array(
                [10 * (y - x), x * (28 - z) - y, x * y - 8 * z / 3]
            )
        path.append(position[0])
    series = np.array(path) / 8 + 0.1 * np.random.default_rng(3).standard_normal(length + 8)
    before = np.lib.stride_tricks.sliding_window_view(series[:-1], 8)
    return gaussian_kernel(before[:length] / 0.5, series[8:, None])


INPUTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "photograph": photograph,
    "Gaussian": gaussian,
    "clustered": clustered,
    "text": text,
    "time series": time_series,
}


def errors(output: Any, exact: Any) -> NDArray[np.float64]:
    """Return the relative error of each head."""
    square = np.sum((output.astype(float) - exact) ** 2, axis=(-2, -1))
    return np.asarray(np.sqrt(square / np.sum(exact.astype(float) ** 2, axis=(-2, -1))))


def measure(name: str, length: int, seeds: int) -> str:
    """Return the row of the table of one input."""
    query, key, value, scale = INPUTS[name](length)
    exact = linattn.softmax_attention(query, key, value, scale=scale)

    def attention(**options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return linattn.attention(query, key, value, scale=scale, return_report=True, **options)

    accepted = [attention(tolerance=None, rng=seed)[0] for seed in range(seeds)]
    usual = float(np.median([errors(output, exact).max() for output in accepted]))
    cells = [name, f"{usual:.3g}"]
    for tolerance in (*TOLERANCES, usual):
        linear, ratios = 0, []
        for seed in range(seeds):
            output, report = attention(tolerance=tolerance, rng=seed)
            linear += np.sum(report.head_methods != "exact")
            ratios += np.atleast_1d(errors(output, exact) / tolerance).tolist()
        exceeded = sum(ratio > 1 for ratio in ratios)
        cells.append(f"{linear}, {exceeded} ({max(ratios):.2f})")
    return f"| {' | '.join(cells)} |"


def share(length: int, repeats: int = 7) -> str:
    """Return the share of the time of a call that goes into fits and exact rows."""
    query, key, value, scale = text(length)
    spent = [0.0]
    search = _full.Search.try_landmarks

    def timed(*args: Any) -> Any:
        begun = perf_counter()
        found = search(*args)
        spent[0] += perf_counter() - begun
        return found

    ratios = []
    for seed in range(repeats):
        spent[0], begun = 0.0, perf_counter()
        with mock.patch.object(_full.Search, "try_landmarks", timed):
            linattn.attention(query, key, value, scale=scale, rng=seed)
        ratios.append(spent[0] / (perf_counter() - begun))
    return f"{length:,} tokens: {statistics.median(ratios):.0%}"


def main() -> None:
    """Print the table and the shares of time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS), default=list(INPUTS))
    options = parser.parse_args()
    print(f"{options.length:,} tokens, {options.seeds} seeds, one core")
    heads = ["input", "usual error", *(f"tolerance {t:g}" for t in TOLERANCES), "the usual error"]
    print(f"| {' | '.join(heads)} |")
    print("| --- " * len(heads) + "|")
    with linattn.config(num_threads=1):
        for name in options.inputs:
            print(measure(name, options.length, options.seeds), flush=True)
        print("Share of the time of a call on the text that fits and exact rows take:")
        for length in (options.length, 2 * options.length):
            print(share(length), flush=True)


if __name__ == "__main__":
    main()

"""Time by numbers, ``python -m benchmarks.peers.numbers``: small or large ones over ordinary ones.

All calls take turns in one process, each round in another order; medians of ratios are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from time import process_time
from typing import Any

import numpy as np

import linattn
from linattn.feature_maps import PositiveFeatures

__all__ = ["CASES", "main", "ratios", "table"]

SCALES, SMALL, BANDWIDTH = (2, 4, 6, 8, 16), (1e-30, 1e-40), 0.02
HEADS, DIM, FEATURES = 8, 64, 256

Case = Callable[[Any, Any, Any, float], Any]
Cases = dict[str, tuple[Case, tuple[float, ...], str]]
"""Calls ``(query, key, value, number)``, the numbers that they take beside 1, and a dtype."""


def _attention(query: Any, key: Any, value: Any, s: float, **options: Any) -> Any:
    phi = PositiveFeatures(DIM, FEATURES, rng=0)
    return linattn.linear_attention(query * s, key * s, value, phi, **options)


def _packed(query: Any, key: Any, value: Any, s: float) -> Any:
    borders = np.linspace(0, query.shape[-2], 9).astype(int).tolist()
    return _attention(query, key, value, s, is_causal=True, cu_seqlens=borders)


def _decay(query: Any, key: Any, value: Any, s: float) -> Any:
    decay = -0.01 * s * np.abs(query[..., 0])
    return _attention(query, key, value, 1, is_causal=True, log_decay=decay)


def _values(query: Any, key: Any, value: Any, s: float, **options: Any) -> Any:
    value = (value.astype(float) * s).astype(value.dtype)
    return _attention(query, key, value, 1, is_causal=True, **options)


def _gradients(query: Any, key: Any, value: Any, s: float, *, of_values: bool) -> Any:
    phi, scaled = PositiveFeatures(DIM, FEATURES, rng=0), value * value.dtype.type(s)
    values, grad = (scaled, value) if of_values else (value, scaled)
    _, pullback = linattn.linear_attention_vjp(query, key, values, phi, is_causal=True)
    return pullback(grad)


def _narrow(query: Any, key: Any, value: Any, bandwidth: float) -> Any:
    query, key = query / value.dtype.type(bandwidth), key / value.dtype.type(bandwidth)
    bias = np.vecdot(key, key) / -2
    return linattn.softmax_attention(query, key, value, key_bias=bias, scale=1.0)


def _cases() -> Iterator[tuple[str, Any]]:
    for mode, is_causal in (("full", False), ("causal", True)):
        attend = partial(_attention, is_causal=is_causal)
        yield f"queries and keys, {mode}", (attend, SCALES, "float32")
    yield "queries and keys, packed, causal", (_packed, (4,), "float32")
    yield "decay of .01, causal", (_decay, (300,), "float32")
    yield "values, causal", (_values, SMALL, "float32")
    yield "values, causal, not divided", (partial(_values, normalize=False), SMALL, "float32")
    yield "values, causal gradient", (partial(_gradients, of_values=True), (1e20, 1e30), "float32")
    yield "cotangents, causal gradient", (partial(_gradients, of_values=False), (1e-25,), "float32")
    for dtype in ("float32", "float64"):
        yield f"bandwidth, softmax, {dtype}", (_narrow, (BANDWIDTH,), dtype)


CASES: Cases = dict(_cases())
"""Everything that is timed."""


def ratios(length: int, rounds: int, heads: int = HEADS) -> dict[tuple[str, float], float]:
    """Return processor time of each case and number over that of the case with the number 1."""
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, heads, length, DIM))
    calls: dict[tuple[str, float], Callable[[], Any]] = {}
    for name, (case, numbers, dtype) in CASES.items():
        query, key, value = arrays.astype(dtype)
        for s in (1.0, *numbers):
            calls[name, s] = partial(case, query, key, value, s)
    keys, taken = list(calls), {key: np.empty(rounds) for key in calls}
    with linattn.config(num_threads=1):
        for turn in range(-1, rounds):  # the first is not counted
            for place in rng.permutation(len(keys)):
                begun = process_time()
                calls[keys[place]]()
                taken[keys[place]][turn] = process_time() - begun
    return {
        (name, s): float(np.median(seconds / taken[name, 1.0]))
        for (name, s), seconds in taken.items()
        if s != 1
    }


def table(found: dict[tuple[str, float], float]) -> str:
    """Return the ratios as a table of Markdown."""
    head = ["| multiplied or divided | by | time over that of 1 |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {name} | {s:g} | {x:.2f} |" for (name, s), x in found.items())])


def main(arguments: list[str] | None = None) -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.numbers")
    parser.add_argument("--length", type=int, default=2048, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    print(table(ratios(options.length, options.rounds)))


if __name__ == "__main__":
    main()

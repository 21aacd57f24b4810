"""What each constant of ``linattn_numpy.tuning`` is worth: time with half of it and with twice.

    python -m benchmarks.tuning [--only TEXT] [--rounds 15]

For each constant, the calls below that read it run with its value, with half and with twice, in
turn; the median of the ratios of their times is printed for the call that minds most. ``.80 2.10``
says that a call takes .80 of the time with half of the value. A constant whose row stays between
.95 and 1.05 may go. One thread, float32; NumPy's integers stay integers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import linattn
from linattn import feature_maps as maps
from linattn.cli.info import machine
from linattn.testing._caches import clear_caches
from linattn.typing import Array, FeatureMap
from linattn_numpy import tuning

Thunk = Callable[[], Any]
LENGTH, HEADS, DIM = 2048, 8, 64


class Watched(ModuleType):
    """The module of constants, noting which ones are read."""

    def __getattribute__(self, name: str) -> Any:
        """Note a name, and return what it is."""
        if name.isupper():
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


def gradient(query: Array, key: Array, value: Array, phi: FeatureMap, is_causal: bool) -> Any:
    """Attend, and pull a cotangent back."""
    _, pullback = linattn.linear_attention_vjp(query, key, value, phi, is_causal=is_causal)
    return pullback(value)


def calls() -> dict[str, Thunk]:
    """Return calls of every kind, some ten to a hundred milliseconds each."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, HEADS, LENGTH, DIM)).astype(np.float32)
    token = query[:, 0], key[:, 0], value[:, 0]
    found: dict[str, Thunk] = {}
    families = {
        "FAVOR+": maps.PositiveFeatures(DIM, 256, rng=0),
        "elu+1": maps.EluFeatures(),
        "landmarks": maps.LandmarkFeatures.fit(query, key, num_features=64, rng=0),
    }
    for name, phi in families.items():
        for causal in (False, True) if name != "landmarks" else (False,):
            kind = f"{name}, {'causal' if causal else 'full'}"
            found[kind] = partial(
                linattn.linear_attention, query, key, value, phi, is_causal=causal
            )
            found[kind + ", gradient"] = partial(gradient, query, key, value, phi, causal)
    favor, landmarks = families["FAVOR+"], families["landmarks"]
    decay = np.full((HEADS, LENGTH), -0.05, np.float32)
    borders = np.arange(0, LENGTH + 1, 64)
    _, state = linattn.linear_attention(query, key, value, favor, return_state=True)
    more: dict[str, dict[str, Any]] = {
        "decay": {"is_causal": True, "log_decay": decay},
        "packed": {"cu_seqlens": borders, "is_causal": True},
        "blocks": {"causal_block": 128},
    }
    for name, options in more.items():
        found[name] = partial(linattn.linear_attention, query, key, value, favor, **options)
    found |= {
        "window": lambda: linattn.linear_attention(query, key, value, landmarks, exact_window=32),
        "clusters": lambda: linattn.linear_attention(
            query, key, value, landmarks, exact_clusters=8
        ),
        "softmax": lambda: linattn.softmax_attention(query, key, value),
        "softmax, local": lambda: linattn.softmax_attention(
            query, key, value, is_causal=True, local_window_size=(128, 0)
        ),
        "one token": lambda: [
            linattn.decode_step(token[0], token[1], token[2], state, favor) for _ in range(64)
        ],
        "gated delta": lambda: linattn.linear_recurrence(
            query, key / 8, value, update_rule="gated_delta", beta=-decay, log_decay=decay
        ),
    }
    return found


def timed(call: Thunk) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def scaled(value: Any, factor: float) -> Any:
    """Scale a constant and keep its type; a tuple's first entry is what varies."""
    if isinstance(value, tuple):
        return (scaled(value[0], factor), *value[1:])
    return value * factor if isinstance(value, float) else max(1, int(value * factor))


def ratios(name: str, call: Thunk, rounds: int) -> tuple[float, float]:
    """Median ratios of time with half and with twice of a constant."""
    value = getattr(tuning, name)
    values = [value, scaled(value, 0.5), scaled(value, 2.0)]
    times: list[list[float]] = [[], [], []]
    for turn in range(rounds):
        for i in np.roll(range(3), turn):
            setattr(tuning, name, values[i])
            clear_caches()
            call()
            times[i].append(timed(call))
    setattr(tuning, name, value)
    half, twice = (
        statistics.median(b / a for a, b in zip(times[0], other, strict=True))
        for other in times[1:]
    )
    return half, twice


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    names = [name for name in vars(tuning) if name.isupper() and arguments.only in name]
    sys.modules["linattn_numpy.tuning"].__class__ = Watched
    readers: dict[str, dict[str, Thunk]] = {name: {} for name in names}
    with linattn.config(num_threads=1):
        for kind, call in calls().items():
            clear_caches()
            READ.clear()
            call()
            for name in READ & set(names):
                readers[name][kind] = call
        print(f"{machine()['processor']}, {LENGTH} tokens, {HEADS} heads, d = {DIM}\n")
        print("| constant | value | call that minds most | half | twice |")
        print("| --- " * 5 + "|")
        for name, found in readers.items():
            rows = [(kind, *ratios(name, call, arguments.rounds)) for kind, call in found.items()]
            most = max(rows, key=lambda row: max(abs(row[1] - 1), abs(row[2] - 1)), default=None)
            cells = "- | - | -" if most is None else f"{most[0]} | {most[1]:.2f} | {most[2]:.2f}"
            print(f"| `{name}` | {getattr(tuning, name)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

"""Medians of times on the device: warmed up, in batches, over inputs that the cache cannot hold."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

__all__ = [
    "BUSY",
    "Clock",
    "CupyClock",
    "Thunk",
    "captured",
    "input_sets",
    "kernel_seconds",
    "measure",
]

BUSY = r"""
extern "C" __global__ void busy(long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""
BUSY_SECONDS = 0.1
"""How long the device is busy while the host launches kernels that are timed one by one."""


Thunk = Callable[[], Any]

BATCH_SECONDS = 3e-3
"""How long a batch takes at least, so that starting it counts for little."""

MIN_BATCHES, MAX_BATCHES = 5, 100
"""Batches."""

MAX_CALLS = 200
"""Calls a batch."""

MAX_SETS = 16
CACHES = 3
"""Caches full of inputs that a rotation goes through."""


class Clock(Protocol):
    """Times work on the device."""

    def seconds(self, work: Thunk) -> float:
        """Run work and return how long the device took."""


class CupyClock:
    """Events on CuPy's current stream."""

    def __init__(self) -> None:
        import cupy

        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._elapsed = cupy.cuda.get_elapsed_time

    def seconds(self, work: Thunk) -> float:
        """Run work and return how long the device took."""
        start, end = self._events
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(self._elapsed(start, end)) / 1e3


def measure(clock: Clock, calls: Sequence[Thunk], budget: float = 0.4) -> dict[str, Any]:
    """Time calls that do the same on different inputs, alternately, for ``budget`` seconds.

    ``seconds`` is the median over batches of the mean of a batch, ``spread`` the distance between
    quartiles over the median.
    """
    for _ in range(2):
        for call in calls:
            call()
    once = clock.seconds(calls[0])
    count = min(MAX_CALLS, max(1, math.ceil(BATCH_SECONDS / max(once, 1e-7))))
    rotation = itertools.cycle(calls)

    def batch() -> None:
        for _ in range(count):
            next(rotation)()

    times: list[float] = []
    stop = time.perf_counter() + budget
    while len(times) < MIN_BATCHES or (len(times) < MAX_BATCHES and time.perf_counter() < stop):
        times.append(clock.seconds(batch) / count)
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "seconds": middle,
        "spread": (high - low) / middle,
        "batches": len(times),
        "calls": count,
    }


def input_sets(bytes_each: int, cache_bytes: int, free_bytes: int) -> int:
    """Count sets of inputs that go through the cache and fit into memory; 0 where none does."""
    most = int(free_bytes // max(1, bytes_each))
    wanted = max(2, math.ceil(CACHES * cache_bytes / max(1, bytes_each)))
    return max(0, min(wanted, most, MAX_SETS))


def captured(call: Thunk) -> Thunk:
    """Capture a call in CuPy's current stream, which is not the default one, as a graph."""
    import linattn_cupy

    return linattn_cupy.capture(call).launch


def kernel_seconds(call: Thunk) -> dict[str, float]:
    """Time each of linattn's kernels in a warm call, by name; those that run twice are summed.

    Matrix products of cuBLAS count as one, "products". The device is kept busy until all are
    launched, so that no time of the host is among theirs.
    """
    import cupy

    import linattn_cupy.device
    import linattn_cupy.states

    device: Any = linattn_cupy.device
    states: Any = linattn_cupy.states
    events: list[tuple[str, Any, Any]] = []
    launch, multiply = device.launch, states.multiply

    def timed(name: str, work: Thunk) -> None:
        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        before.record()
        work()
        after.record()
        events.append((name, before, after))

    def timed_launch(source: str, function: str, *rest: Any) -> None:
        timed(function, partial(launch, source, function, *rest))

    def timed_multiply(*arrays: Any, **options: Any) -> None:
        timed("products", partial(multiply, *arrays, **options))

    busy = cupy.RawKernel(BUSY, "busy")
    device.launch, states.multiply = timed_launch, timed_multiply
    try:
        busy((1,), (1,), (np.int64(1e9 * BUSY_SECONDS),))
        call()
    finally:
        device.launch, states.multiply = launch, multiply
    cupy.cuda.get_current_stream().synchronize()
    found: dict[str, float] = {}
    for function, before, after in events:
        took = float(cupy.cuda.get_elapsed_time(before, after)) / 1e3
        found[function] = found.get(function, 0.0) + took
    return found

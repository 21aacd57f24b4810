"""How long a call takes and how much memory it needs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

__all__ = ["Timing", "fastest", "peak_memory"]


class Timing(NamedTuple):
    """The fastest of a few calls.

    Attributes
    ----------
    seconds : float
        Wall-clock time of the fastest call.
    calls : int
        Calls made.
    total_seconds : float
        Wall-clock time of all of them.
    """

    seconds: float
    calls: int
    total_seconds: float


def fastest(call: Callable[[], object], *, max_calls: int, max_seconds: float) -> Timing:
    """Time a call; repeat it while another one fits into the time, and keep the fastest.

    The minimum is what the code needs; everything above it is other work of the machine.

    Parameters
    ----------
    call : callable
        Made at least once.
    max_calls : int
        Calls at most.
    max_seconds : float
        No call starts that would probably end later than this.
    """
    best = float("inf")
    spent = 0.0
    calls = 0
    while calls == 0 or (calls < max_calls and spent + best <= max_seconds):
        start = perf_counter()
        call()
        seconds = perf_counter() - start
        best = min(best, seconds)
        spent += seconds
        calls += 1
    return Timing(best, calls, spent)


def peak_memory(call: Callable[[], object]) -> int:
    """Return the bytes that Python and NumPy held at most during one call, its result included.

    What was allocated before the call does not count. Measured with tracemalloc, which slows the
    call down: time it separately.
    """
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not was_tracing:
            tracemalloc.stop()
    return peak - before

"""The process of one peer: pins itself, then does what it is told, one line of JSON at a time.

Started by :mod:`benchmarks.peers.processes` as ``python -m benchmarks.peers.worker NAME THREADS
CORES``. Imports nothing but the standard library before it is pinned: thread pools are made by the
cores that a library sees when it is imported.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import statistics
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.peers.problem import Inputs, Prepared

__all__ = ["Worker", "main"]

CHECK_SIZES = (2, 3, 16, 32)
CHECK_LENGTH = 301
"""Longer than a causal block and no multiple of any."""

WARM_LENGTH = 128
"""What is computed before memory is measured, so that libraries have set themselves up."""

BURST = 0.05
"""Seconds for which calls that are shorter are repeated, to be timed as one.

What else the machine does falls between short calls, where their median does not see it, and into
long ones: both wait for it alike in bursts.
"""

WARM = 0.1
"""Seconds of calls that are not timed before those of a turn.

The first two or three of 80 ms take a fifth longer than those that follow.
"""


class Worker:
    """What one process keeps between commands; each public method is a command."""

    def __init__(self, name: str, threads: int) -> None:
        from benchmarks.peers.registry import PEERS

        self._name = name
        self._module = importlib.import_module(f"benchmarks.peers.{PEERS[name].module}")
        if hasattr(self._module, "set_threads"):
            self._module.set_threads(threads)
        self._inputs: Inputs | None = None
        self._prepared: dict[str, Prepared] = {}
        self._estimates: dict[str, float] = {}

    def check(self, kind: str) -> float:
        """Return the largest error on a small input, relative to the largest number wanted."""
        import numpy as np

        from benchmarks.peers.problem import Inputs, Sizes

        prepared = self._prepare(kind, Inputs(Sizes(*CHECK_SIZES), CHECK_LENGTH))
        found = prepared.fetch(prepared.call())
        wanted = prepared.wanted()
        if found.shape != wanted.shape:
            raise ValueError(f"{self._name}, {kind}: want shape {wanted.shape}, got {found.shape}")
        return float(np.abs(found - wanted).max() / np.abs(wanted).max())

    def prepare(self, kind: str, sizes: list[int], length: int) -> float:
        """Make the inputs, call twice, and return the seconds of the second call."""
        from benchmarks.peers.problem import Inputs, Sizes

        if self._inputs is None or self._inputs.length != length:
            self.release()
            self._inputs = Inputs(Sizes(*sizes), length)
        self._prepared[kind] = self._prepare(kind, self._inputs)
        self._prepared[kind].call()
        self._estimates[kind] = _seconds(self._prepared[kind].call)
        return self._estimates[kind]

    def time(self, kind: str, seconds: float) -> tuple[float, float]:
        """Call for about so many seconds, in bursts, at least one, after some that are not timed.

        Neither a burst nor what is not timed lasts longer than `seconds`, or than one call.

        Those find the cache as other peers left it, and pages of an output that the system has
        taken back (256 MiB cost 350 ms after a pause, 19 ms right after the last). Returns the
        median seconds of a call, and the processor time of all over their wall time.
        """
        call, estimate = self._prepared[kind].call, self._estimates[kind]
        repeats = max(1, round(min(BURST, seconds) / estimate))
        bursts = max(1, int(seconds / (repeats * estimate)))
        for _ in range(max(1, round(min(WARM, seconds) / estimate))):
            call()
        started, computed = perf_counter(), process_time()
        taken = [_seconds(call, repeats) for _ in range(bursts)]
        share = (process_time() - computed) / (perf_counter() - started)
        return statistics.median(taken), share

    def release(self) -> None:
        """Forget inputs and calls."""
        self._inputs = None
        self._prepared.clear()
        gc.collect()

    def memory(self, kind: str, sizes: list[int], length: int, method: str) -> int:
        """Return the bytes that one call takes at most, its output not counted.

        ``"resident"`` is the growth of the process, ``"traced"`` what Python and NumPy allocate.
        To be asked once of a fresh process: what earlier calls left would hide growth.
        """
        from benchmarks.peers.problem import Inputs, Sizes

        small = self._prepare(kind, Inputs(Sizes(*sizes), WARM_LENGTH))
        small.call()
        prepared = self._prepare(kind, Inputs(Sizes(*sizes), length))
        gc.collect()
        measure = {"resident": _resident_growth, "traced": _traced_growth}[method]
        output, growth = measure(prepared.call)
        return max(0, growth - prepared.fetch(output).nbytes)

    def scales(
        self, case: str, dtype: str, path: str, sizes: list[int], *arguments: Any
    ) -> list[list[float]]:
        """Return seconds of a case by scales of inputs, in rounds."""
        from benchmarks.peers.problem import Sizes
        from benchmarks.peers.scales import seconds_by_scale

        return seconds_by_scale(case, dtype, path, Sizes(*sizes), *arguments)

    def about(self) -> list[dict[str, Any]]:
        """Return what threadpoolctl knows of the libraries that this process has loaded."""
        try:
            from threadpoolctl import threadpool_info
        except ImportError:
            return []
        keys = ("internal_api", "version", "architecture", "num_threads")
        return [{key: found.get(key) for key in keys} for found in threadpool_info()]

    def _prepare(self, kind: str, inputs: Inputs) -> Prepared:
        prepared: Prepared = self._module.prepare(self._name, kind, inputs)
        return prepared


def _seconds(call: Callable[[], object], repeats: int = 1) -> float:
    start = perf_counter()
    for _ in range(repeats):
        call()
    return (perf_counter() - start) / repeats


def _resident_growth(call: Callable[[], Any]) -> tuple[Any, int]:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        # Then it is the peak of the whole life, which inputs and imports may have set.
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        output = call()
        return output, unit * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    resident = _status("VmRSS")
    output = call()
    return output, _status("VmHWM") - resident


def _status(name: str) -> int:
    """Return a size in bytes from Linux's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _traced_growth(call: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    output = call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return output, peak


def main() -> None:
    """Serve the commands that come in on standard input until it ends."""
    name, threads, cores = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    # Answers go where standard output went; what libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            if worker is None:
                worker = Worker(name, threads)
            answer = {"answer": getattr(worker, command)(*arguments)}
        except Exception as error:  # whatever a peer raises is reported, and the run goes on
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""All variants of the kernels that the checks launch, compiled in threads before the first check.

Which ones those are is found out by calling everything with launches left out; what comes out of
the calls then means nothing. CuPy caches compiled kernels on disk for later processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.gpu import parity
from benchmarks.gpu.cases import Case
from benchmarks.gpu.library import host_dtype
from benchmarks.gpu.record import Item

__all__ = ["MAX_SECONDS", "build", "items", "variants"]

MAX_SECONDS = 120
"""What has not begun by then is compiled when it is first launched."""

Variant = tuple[str, str, tuple[tuple[str, int], ...]]
"""Source, function and options."""


def items(cases: Iterable[Case]) -> Iterator[Item]:
    """Yield the one item."""
    yield Item("kernels", partial(_compile, cases), MAX_SECONDS)


def _compile(cases: Iterable[Case]) -> dict[str, Any]:
    found = variants(cases)
    begun = time.perf_counter()
    compiled, errors = build(found)
    took = time.perf_counter() - begun
    report: dict[str, Any] = {"variants": len(found), "compiled": compiled, "seconds": took}
    if errors:
        report["exception"] = "\n".join(errors)
    return report


def variants(cases: Iterable[Case]) -> list[Variant]:
    """Return what the cases launch, each once."""
    import cupy

    from linattn_cupy import device

    found: dict[Variant, None] = {}
    launch: Any = device.launch

    def note(source: str, function: str, options: Any, *rest: Any) -> None:
        found[source, function, tuple(options.items())] = None

    device.launch = note  # type: ignore[assignment]
    try:
        for case in cases:
            phi = parity.feature_map_of(case.feature_map, case.dim, case.features)
            host = parity.host_inputs(case)
            kind = host_dtype(case.dtype)
            query, key, value, gradient = (cupy.asarray(a.astype(kind)) for a in host[:4])
            mask = None if host.mask is None else cupy.asarray(host.mask)
            with parity.precision(case):
                parity.run(case, phi, parity.Inputs(query, key, value, gradient, mask))
    finally:
        device.launch = launch
    return list(found)


def build(wanted: list[Variant]) -> tuple[int, list[str]]:
    """Compile in threads, one alone first: how many were compiled, and the errors of the rest."""
    import cupy

    from linattn_cupy import device

    device.open_compiler()
    stop = time.perf_counter() + MAX_SECONDS
    here = cupy.cuda.runtime.getDevice()

    def compile_variant(variant: Variant) -> str | None:
        """Return the error, "" for none; None where time was up."""
        if time.perf_counter() > stop:
            return None
        source, function, options = variant
        try:
            with cupy.cuda.Device(here):
                kernel = device._kernel(source, function, options, here)
        except device.KernelUnavailableError as error:
            return str(error)
        return kernel if isinstance(kernel, str) else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [text for text in pool.map(compile_variant, wanted) if text is not None]
    errors = [text for text in results if text]
    return len(results) - len(errors), errors

"""All variants of the kernels that the checks launch, compiled in threads before the first check.

Which ones those are is found out by calling everything with launches left out; what comes out of
the calls then means nothing. CuPy keeps compiled kernels on disk, where later processes find them.
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

__all__ = ["LONGEST_SECONDS", "build", "items", "variants"]

LONGEST_SECONDS = 120
"""What is not begun by then is compiled when it is first launched."""

Variant = tuple[str, str, tuple[str, ...]]
"""Source, function and options of the compiler."""


def items(cases: Iterable[Case]) -> Iterator[Item]:
    """Yield the one item."""
    yield Item("kernels", partial(_compile, cases), LONGEST_SECONDS)


def _compile(cases: Iterable[Case]) -> dict[str, Any]:
    found = variants(cases)
    begun = time.perf_counter()
    compiled, errors = build(found)
    took = time.perf_counter() - begun
    told: dict[str, Any] = {"variants": len(found), "compiled": compiled, "seconds": took}
    if errors:
        told["exception"] = "\n".join(errors)
    return told


def variants(cases: Iterable[Case]) -> list[Variant]:
    """Return what the cases launch, each once."""
    import cupy

    from linattn_cupy import device

    found: dict[Variant, None] = {}
    launch: Any = device.launch

    def noted(source: str, function: str, options: Any, *rest: Any) -> None:
        found[source, function, device.compile_options(options)] = None

    device.launch = noted  # type: ignore[assignment]
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
    """Compile in threads, one alone first: how many were, and what went wrong with others."""
    import cupy

    from linattn_cupy import device

    device.open_compiler()
    stop = time.perf_counter() + LONGEST_SECONDS
    here = cupy.cuda.runtime.getDevice()

    def one(variant: Variant) -> str | None:
        """Return what went wrong, "" for nothing, None where it was too late."""
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
        said = [text for text in pool.map(one, wanted) if text is not None]
    errors = [text for text in said if text]
    return len(said) - len(errors), errors

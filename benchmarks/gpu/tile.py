"""The kernels in cuTile beside the others: ``python -m benchmarks.gpu.tile --out FILE``.

Each call is compared with its definition in float64 on the host, and timed in turns with the other
way. ``backends/linattn_cupy/tile.json`` is such a FILE: by it calls are chosen. The exit code is 1
if a call is wrong, 2 where there is no GPU or no ``cuda.tile``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.paths import unable

__all__ = ["main"]

HEADS, LENGTH, DIM, FEATURES = 64, 8192, 64, 256
SMALL = 500
"""Tokens of two heads that are compared: they fill no tile, and have few pairs."""

REPEATS = 20


def main(arguments: list[str] | None = None) -> int:
    """Compare and time all calls; write the record."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args(arguments).out
    reason = unable()
    if reason is None and (find_spec("cuda") is None or find_spec("cuda.tile") is None):
        reason = "cuda.tile is missing: pip install 'linattn[tile]'"
    if reason is not None:
        print(f"benchmarks.gpu.tile: {reason}", file=sys.stderr)
        return 2
    from benchmarks.gpu.library import register

    register()
    from linattn_cupy import device, hardware

    calls = {}
    for dtype in ("bfloat16", "float32"):
        for is_causal in (False, True):
            for is_gradient in (False, True):
                name = hardware.call_of(dtype, is_causal, is_gradient)
                try:
                    calls[name] = _measured(dtype, is_causal, is_gradient)
                except Exception as error:  # of CUDA, of compilers: none may end the run
                    calls[name] = {"right": False, "why": repr(error)[:300]}
                print(name, calls[name], flush=True)
    kernels = hashlib.sha256(hardware.SOURCE.read_bytes()).hexdigest()
    found = {"device": device.name(), "kernels": kernels, "calls": calls}
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not all(call["right"] for call in calls.values()))


def _measured(dtype: str, is_causal: bool, is_gradient: bool) -> dict[str, Any]:
    """Compare a call, and time both ways in milliseconds."""
    import numpy as np

    from benchmarks.gpu import formulas, parity
    from benchmarks.gpu.cases import Case

    case = Case(
        "tile", "favor", dtype, "gradient" if is_gradient else "attention", is_causal=is_causal,
        lead=(2,), queries=SMALL, keys=SMALL, dim=DIM, features=FEATURES, value_dim=DIM,
    )  # fmt: skip
    ours, _ = _ways(case)
    host = parity.host_inputs(case)
    found = [x.get().astype(np.float64) for x in ours()]
    query, key, value, grad = (x.astype(np.float64) for x in host[:4])
    seen = np.ones((2, SMALL, SMALL), bool)
    seen = np.tril(seen) if is_causal else seen
    formula = parity.formula_of(case, parity.map_of(case))
    wanted = [formulas.attend(formula, query, key, value, seen).output]
    if is_gradient:
        wanted = list(formulas.gradients(formula, query, key, value, seen, grad))
    error = max(parity.relative_error(x, y) for x, y in zip(found, wanted, strict=True))
    large = Case(**{**vars(case), "lead": (HEADS,), "queries": LENGTH, "keys": LENGTH})
    ms, other = _times(*_ways(large))
    return {"right": error <= case.bound, "error": error, "ms": ms, "other_ms": other}


def _ways(case: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return calls of the two ways on the arrays of a case, of output or gradients."""
    from benchmarks.gpu import parity
    from benchmarks.gpu.library import CupyLibrary
    from linattn._driver.problem import linear_problem
    from linattn.typing import Cotangent
    from linattn_cupy import fused, gradients, state_vjps, states, tile

    library = CupyLibrary(0)
    query, key, value, grad = (library.array(x, case.dtype) for x in parity.host_inputs(case)[:4])
    phi = parity.map_of(case)
    problem = linear_problem(query, key, value, phi, is_causal=case.is_causal)
    wide = case.dtype == "float32"
    if case.operation == "gradient":
        cotangent = Cotangent(grad, None)
        other = state_vjps.float32_vjp if wide else gradients.attention_vjp
        return (
            lambda: tile.attention_vjp(problem, cotangent)[:3],
            lambda: other(problem, cotangent)[:3],
        )
    forward = states.float32_attention if wide else fused.attention
    return lambda: tile.attention(problem)[:1], lambda: forward(problem)[:1]


def _times(*ways: Callable[[], Any]) -> list[float]:
    """Return median milliseconds of each, taken in turns."""
    import cupy

    taken: list[list[float]] = [[] for _ in ways]
    for repeat in range(REPEATS + 2):
        for way, times in zip(ways, taken, strict=True):
            begun = time.perf_counter()
            way()
            cupy.cuda.Device().synchronize()
            if repeat > 1:
                times.append(1e3 * (time.perf_counter() - begun))
    return [statistics.median(times) for times in taken]


if __name__ == "__main__":
    sys.exit(main())

"""The kernels in cuTile beside the others: ``python -m benchmarks.gpu.tile --out FILE``.

Each call is compared with its definition in float64 on the host, and timed beside the other way.
``backends/linattn_cupy/tile.json`` is such a FILE: by it calls are chosen. The exit code is 1 if a
call is wrong, 2 where there is no GPU or no ``cuda.tile``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.paths import unable

__all__ = ["main"]

HEADS, LENGTH = 64, 8192
SMALL = 500
"""Tokens of two heads that are compared: they fill no tile, and have few pairs."""


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
    from benchmarks.gpu import parity, times
    from benchmarks.gpu.cases import Case
    from benchmarks.gpu.library import CupyLibrary
    from linattn_cupy import whole

    ways: Any = whole
    library = CupyLibrary()
    ms: dict[bool, float] = {}
    operation = "gradient" if is_gradient else "attention"
    case = Case("small", "favor", dtype, operation, is_causal, (2,), queries=SMALL, keys=SMALL)
    large = replace(case, lead=(HEADS,), distinct=2, queries=LENGTH, keys=LENGTH)
    for is_tile in (False, True):
        ways.chosen = lambda problem, is_tile=is_tile, **kind: is_tile
        ms[is_tile] = times.measure(times.seconds, [parity.call_of(library, large)])["ms"]
    found = parity.check(library, case)
    # What cuTile declines, the other kernels do.
    right = not found["kernels"] and found["deterministic"]
    right = right and all(error <= case.bound for error in found["errors"].values())
    return {"right": right, "errors": found["errors"], "ms": ms[True], "other_ms": ms[False]}


if __name__ == "__main__":
    sys.exit(main())

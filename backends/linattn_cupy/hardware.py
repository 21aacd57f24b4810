"""Where these kernels were last checked, as far as the files of the package tell.

``measured.json`` is what ``python -m benchmarks.gpu.first_contact --out FILE`` wrote on a GPU, and
``tile.json`` what ``python -m benchmarks.gpu.tile --out FILE`` did: it chooses the calls that the
kernels in cuTile take. Without it, or after a change of these kernels, they take none.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from linattn.typing import Problem
from linattn_cupy import device

MEASURED = Path(__file__).with_name("measured.json")
RECORD = Path(__file__).with_name("tile.json")
SOURCE = Path(__file__).with_name("tile_kernels.py")


def kernel_hashes() -> dict[str, str]:
    """Return the SHA-256 of each source of the kernels, by file name."""
    sources = sorted(path for path in device.KERNELS.iterdir() if path.suffix in (".cu", ".cuh"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}


def kernel_status() -> str:
    """Say where and when these kernels were last checked, and whether they changed since."""
    if not MEASURED.exists():
        return f"never run on hardware; {tile_status()}"
    run = json.loads(MEASURED.read_text(encoding="utf-8"))
    failed = f"{len(run['failures'])} of {run['checks']} checks failed"
    changed = ", kernels changed since" if run["kernels"] != kernel_hashes() else ""
    return f"run on {run['device']} on {run['date']}, {failed}{changed}; {tile_status()}"


# Kernels in cuTile ------------------------------------------------------------------------------


def call_of(dtype: Any, is_causal: bool, is_gradient: bool) -> str:
    """Name of a call in the record."""
    kind = "causal" if is_causal else "full"
    return f"{dtype} {kind}{' gradients' if is_gradient else ''}"


@cache
def record() -> dict[str, Any]:
    """Return calls that a GPU chose for these kernels, and its name; empty without a record."""
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    hashed = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    return found if found.get("kernels") == hashed else {}


def chosen(problem: Problem, *, is_gradient: bool = False) -> bool:
    """Whether the record of the device at hand says that this way is right, and faster."""
    if not record() or problem.mode not in ("full", "causal") or not _installed():
        return False
    call = call_of(problem.query.dtype, problem.sees.is_causal, is_gradient)
    found = record()["calls"].get(call, {})
    faster = found.get("right") is True and found["ms"] < found["other_ms"]
    return faster and record()["device"] == device.name()


@cache
def _installed() -> bool:
    return find_spec("cuda") is not None and find_spec("cuda.tile") is not None


def tile_status() -> str:
    """Say for ``linattn info`` what was run, and which calls take this way."""
    if not record():
        return "cuTile kernels never run on hardware, not used"
    calls = record()["calls"].items()
    names = [name for name, x in calls if x["right"] and x["ms"] < x["other_ms"]]
    used = ", ".join(names) or "no call"
    return f"cuTile kernels run on {record()['device']}, used there for {used}"

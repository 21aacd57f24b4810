"""Where these kernels were last checked, as far as the files of the package tell.

``measured.json`` is what ``python -m benchmarks.gpu.first_contact --out FILE`` wrote on a GPU.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from linattn_cupy.device import KERNELS

MEASURED = Path(__file__).with_name("measured.json")


def kernel_hashes() -> dict[str, str]:
    """Return the SHA-256 of each source of the kernels, by file name."""
    sources = sorted(path for path in KERNELS.iterdir() if path.suffix in (".cu", ".cuh"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}


def kernel_status() -> str:
    """Say where and when these kernels were last checked, and whether they changed since."""
    if not MEASURED.exists():
        return "never run on hardware"
    run = json.loads(MEASURED.read_text(encoding="utf-8"))
    failed = f"{len(run['failures'])} of {run['checks']} checks failed"
    changed = ", kernels changed since" if run["kernels"] != kernel_hashes() else ""
    return f"run on {run['device']} on {run['date']}, {failed}{changed}"

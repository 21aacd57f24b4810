"""What a run says of the machine and the software it ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import REMOVED, ROOT
from linattn.cli import info

__all__ = ["describe", "slug"]

UNTOLD = r"\((R|TM)\)|@.*?Hz|\d+-Core|\b(CPU|Processor|family|model|avx512f)\b"
"""What the name of a file leaves out of a processor's."""

PACKAGES = (
    "linattn",
    "numpy",
    "array-api-compat",
    "threadpoolctl",
    "torch",
    "jax",
    "performer-pytorch",
    "pytorch-fast-transformers",
)


def describe(cores: Sequence[int]) -> dict[str, Any]:
    """Describe the machine, the versions of every library, and what children do not inherit."""
    return {
        "cpu": info.machine()["processor"],
        "cores": os.cpu_count(),
        "cores_used": list(cores),
        "caches": _caches(cores[0]),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "removed_from_environment": {
            name: os.environ[name] for name in REMOVED if name in os.environ
        },
    }


def slug(cpu: str) -> str:
    """Name a processor's record: ``"amd-epyc-25-17"``, family and model last.

    Its widest vectors come after them where they are not those of AVX-512.
    """
    return "-".join(re.findall(r"[a-z0-9]+", re.sub(UNTOLD, " ", cpu, flags=re.I).lower()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _caches(core: int) -> list[str]:
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/cache")
    try:
        return [
            f"L{(index / 'level').read_text().strip()} {(index / 'type').read_text().strip()} "
            f"{(index / 'size').read_text().strip()}"
            for index in sorted(folder.glob("index*"))
        ]
    except OSError:
        return []


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    return round(total / 2**30, 1)


def _commit() -> str | None:
    """Return the commit that was measured, with a plus where files differ from it."""
    try:
        finished = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()

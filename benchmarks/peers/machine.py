"""What a run says of the machine and the software it ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import REMOVED, ROOT

__all__ = ["describe"]

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
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "cores_used": list(cores),
        "caches": _caches(cores[0]),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "removed_from_environment": {
            name: os.environ[name] for name in REMOVED if name in os.environ
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """Return the model with family and instruction sets, which a virtual machine may not name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in lines if ":" in line)
    found: dict[str, str] = {}
    for key, _, value in pairs:
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name", platform.machine())
    if "cpu family" in found:
        name += f", family {found['cpu family']} model {found['model']}"
    flags = set(found.get("flags", "").split())
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), None)
    return f"{name}, {widest}" if widest else name


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

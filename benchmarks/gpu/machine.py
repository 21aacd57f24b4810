"""What a run says of the device and the software it ran on. Settings are read, never changed."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

from benchmarks.gpu.paths import ROOT

__all__ = ["clocks", "describe"]

PACKAGES = (
    "numpy",
    "array-api-compat",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
    "triton",
    "flash-linear-attention",
)
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,power.limit"


def describe() -> dict[str, Any]:
    """Describe the device, the versions of all that takes part, and the kernels by their hashes."""
    import linattn
    from linattn_cupy.hardware import kernel_hashes

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _command("git", "-C", str(ROOT), "describe", "--always", "--dirty=+"),
        "kernels": kernel_hashes(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"linattn": linattn.__version__} | _versions(),
        "device": _device(),
        "clocks_before": clocks(),
    }


def clocks() -> dict[str, str] | None:
    """Read clocks, temperature and power; None where nvidia-smi does not tell."""
    line = _command("nvidia-smi", "--id=0", f"--query-gpu={CLOCKS}", "--format=csv,noheader")
    if line is None:
        return None
    return dict(zip(CLOCKS.split(","), line.split(", "), strict=False))


def _device() -> dict[str, Any]:
    import cupy

    runtime = cupy.cuda.runtime
    found = runtime.getDeviceProperties(0)
    return {
        "name": found["name"].decode(),
        "capability": f"{found['major']}.{found['minor']}",
        "processors": found["multiProcessorCount"],
        "memory_bytes": found["totalGlobalMem"],
        "l2_bytes": found["l2CacheSize"],
        "driver": _command(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _command(*words: str) -> str | None:
    if shutil.which(words[0]) is None:
        return None
    try:
        finished = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()

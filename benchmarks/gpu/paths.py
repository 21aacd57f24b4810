"""Where the checkout is, how its processes find it, and whether they can run here."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

__all__ = ["IS_FAKE", "ROOT", "child_environment", "unable"]

ROOT = Path(__file__).resolve().parents[2]
IS_FAKE = hasattr(ctypes.CDLL(None), "fake_gpu_record")
"""Whether the GPU is that of tests/fake_gpu, which interprets kernels."""

NEEDED = ("numpy", "cupy", "array_api_compat", "ml_dtypes")


def child_environment() -> dict[str, str]:
    """Return this process's environment, for a child that runs from the checkout."""
    known = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, known))}


def unable() -> str | None:
    """Say why nothing can run here; None if it can."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"needs {', '.join(NEEDED)}; {', '.join(missing)} cannot be imported"
    import cupy

    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # without a driver CuPy raises its errors
        return f"cupy {cupy.__version__} finds no usable NVIDIA driver: {error}"
    return None if count else "there is a driver but no device"

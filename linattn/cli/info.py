"""Which packages are installed, and which backends can run. Prints nothing, and never fails."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import warnings
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import linattn
from linattn._extras import remedy
from linattn.cli.text import count, wrap

__all__ = [
    "BackendStatus",
    "backends",
    "blas",
    "gpus",
    "machine",
    "record",
    "text",
    "threads",
    "version",
    "versions",
]

DISTRIBUTIONS = (
    "numpy",
    "array-api-compat",
    "threadpoolctl",
    "typer",
    "rich",
    "matplotlib",
    "hypothesis",
    "array-api-strict",
    "dask",
    "torch",
    "jax",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cupy",
)
"""Distributions whose versions are told where they are installed; none of them is imported."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class BackendStatus(NamedTuple):
    """A registered backend.

    Attributes
    ----------
    library : str
        Root module of the array library that it serves.
    module : str
        The backend's module.
    runs : bool
        Whether it can run here.
    detail : str
        The device it runs on, or the reason why it does not run.
    kernels : str
        Where its kernels have run, for a backend that says so (``kernel_status``); else empty.
    """

    library: str
    module: str
    runs: bool
    detail: str
    kernels: str = ""


def version() -> str:
    """Return what ``--version`` prints."""
    return f"linattn {linattn.__version__}"


def text() -> str:
    """Return everything as text, which needs no extra and pastes well into a bug report."""
    can_run = []
    for entry in backends():
        told = f"{'yes' if entry.runs else 'no'}: {entry.detail}"
        lines = [told, f"kernels: {entry.kernels}"] if entry.kernels else [told]
        can_run.append((f"{entry.library} ({entry.module})", lines))
    here = machine()
    facts = [
        ("system", [str(here["system"])]),
        ("processor", [str(here["processor"])]),
        ("cores", [f"{here['cores']}, {here['usable_cores']} usable by this process"]),
        ("BLAS", [blas()]),
        ("threads", threads()),
        ("GPU", gpus() or ["none found (nvidia-smi)"]),
    ]
    sections = [
        ("Versions", [(name, [found]) for name, found in versions().items()]),
        ("Backends: can they run here?", can_run),
        ("Machine", facts),
    ]
    return "\n\n".join(_section(title, entries) for title, entries in sections)


def record() -> dict[str, Any]:
    """Return everything as dictionaries, lists and numbers."""
    return {
        "versions": versions(),
        "machine": {**machine(), "blas": blas(), "threads": threads()},
        "backends": [backend._asdict() for backend in backends()],
        "gpus": gpus(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, linattn and the libraries that are installed."""
    found = {"python": platform.python_version(), "linattn": linattn.__version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int | None]:
    """Return the system, the processor and how many cores this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
    }


def blas() -> str:
    """Return the BLAS that NumPy was built with."""
    try:
        config: Any = np.show_config(mode="dicts")
        entry = config["Build Dependencies"]["blas"]
        return f"{entry['name']} {entry['version']}"
    except (KeyError, TypeError):
        return "unknown"


def threads() -> list[str]:
    """Return the thread pools of this process, and the variables that set their size."""
    lines = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    if find_spec("threadpoolctl") is None:
        return [*lines, f"pools unknown: {remedy('threads')} to see and cap them"]
    from threadpoolctl import threadpool_info

    for pool in threadpool_info():
        name = f"{pool.get('internal_api', 'pool')} {pool.get('version') or ''}".strip()
        lines.append(f"{name}: {count(pool.get('num_threads') or 0, 'thread')}")
    return lines


def backends() -> list[BackendStatus]:
    """Return every registered backend, and whether it can run here.

    A backend runs if its library and its own module can be imported, a CuPy backend if there is a
    device as well. An array library that is installed is imported for this.
    """
    return [
        BackendStatus(library, module, *_status(library, module), _kernels(module))
        for library, module in sorted(linattn.registered_backends().items())
    ]


def gpus() -> list[str]:
    """Return the NVIDIA GPUs that the driver lists."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        result = subprocess.run(
            [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]


def _section(title: str, entries: list[tuple[str, list[str]]]) -> str:
    width = max(40, shutil.get_terminal_size().columns)
    column = 2 + max(len(name) for name, _ in entries) + 2
    lines = [title]
    for name, facts in entries:
        first = f"  {name}".ljust(column)
        for fact in facts:
            lines.append(wrap(first + fact, width, " " * column))
            first = " " * column
    return "\n".join(lines)


def _status(library: str, module: str) -> tuple[bool, str]:
    try:
        if find_spec(library) is None:
            return False, f"{library} is not installed{_remedy(library)}"
    except (ImportError, ValueError):
        return False, f"{library} is broken"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array_library = importlib.import_module(library)
            importlib.import_module(module)
    except Exception as error:  # a broken installation may raise anything, and is to be reported
        return False, f"import fails: {_short(error)}"
    if library == "cupy":
        return _cupy_devices(array_library)
    return True, f"{library} {getattr(array_library, '__version__', '')}".strip()


def _kernels(module: str) -> str:
    try:
        status = getattr(importlib.import_module(module), "kernel_status", None)
    except Exception:  # what _status reports
        return ""
    try:
        return "" if status is None else str(status())
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"unknown: {_short(error)}"


def _cupy_devices(cupy: Any) -> tuple[bool, str]:
    version = getattr(cupy, "__version__", "")
    try:
        runtime = cupy.cuda.runtime
        found = int(runtime.getDeviceCount())
        names = [runtime.getDeviceProperties(index)["name"].decode() for index in range(found)]
    except Exception as error:  # without a driver CuPy raises errors of its own
        what = f"cupy {version}".strip()
        return False, f"{what} is installed, but no usable NVIDIA driver: {_short(error)}"
    if not names:
        return False, "no device"
    return True, f"{count(len(names), 'device')}: {', '.join(names)}"


def _remedy(library: str) -> str:
    return f" ({remedy('cuda13', 'cuda12')})" if library == "cupy" else ""


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 120 else text[:117] + "..."


def _processor() -> str:
    """Return the model with family and widest vectors, which many a virtual machine leaves out."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for key, _, value in (line.partition(":") for line in lines):
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name", platform.machine())
    if "cpu family" in found:
        name += f", family {found['cpu family']} model {found['model']}"
    flags = found.get("flags", "").split()
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), None)
    return f"{name}, {widest}" if widest else name

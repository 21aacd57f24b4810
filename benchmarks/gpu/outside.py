"""Other processes: a fork of one that used the GPU, compute-sanitizer's tools on a small case."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.paths import ROOT, child_environment
from benchmarks.gpu.record import Item, LeftOut

__all__ = ["items"]

TOOLS = ("memcheck", "racecheck")
MAX_SECONDS = 120

Found = dict[str, Any]


def items() -> Iterator[Item]:
    """Yield the checks."""
    yield Item("forked process", _fork, 30.0)
    for tool in TOOLS:
        yield Item(f"compute-sanitizer {tool}", partial(_sanitizer, tool), MAX_SECONDS)


def _small_case(*words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "benchmarks.gpu.small", *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MAX_SECONDS,
    )


def _fork() -> Found:
    finished = _small_case("--fork")
    said = finished.stdout.strip()[-1500:]
    return {"passed": "forked from one that has used it" in said, "said": said}


def _sanitizer(tool: str) -> Found:
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(path, os.X_OK):
        reason = "compute-sanitizer is not installed"
        raise LeftOut(reason)
    before = (path, "--tool", tool, "--error-exitcode", "99")
    finished = _small_case(before=before)
    said = finished.stdout.strip()[-1500:]
    if "Device not supported" in said:
        raise LeftOut(said.splitlines()[0])
    return {"passed": finished.returncode == 0, "said": said, "code": finished.returncode}

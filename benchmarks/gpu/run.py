"""Run the checks and timings on a GPU: ``python -m benchmarks.gpu.run --help``.

The first process only watches. Each section runs in a separate one; another goes on with the next
item if a kernel broke the device or never ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.paths import ROOT, child_environment
from benchmarks.gpu.record import SECTIONS, STOPPED, Record

__all__ = ["main", "unable"]

COMPILED = ("parity", "timings", "behaviour")
"""Sections before which all kernels are compiled."""

MAX_DEATHS = 5
"""Processes of a section that may end badly."""

NEEDED = ("numpy", "cupy", "array_api_compat", "ml_dtypes")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run",
        description="Check and time linattn on the first GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "build" / "gpu.json", help="file of the results")
    add("--quick", action="store_true", help="one length, two dtypes, no large arrays")
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    add("--seconds", type=float, default=420.0, help="leave out what would end later than that")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sections; 1 if a check failed, 2 if nothing can run here."""
    options = _arguments(arguments)
    reason = unable()
    if reason is not None:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return 2
    # Not at the top: it needs what may be missing.
    from benchmarks.gpu.tables import report

    options.out = options.out.resolve()
    record = Record.read(options.out) if options.out.exists() else Record(options.out)
    reason = _mismatch(record, quick=options.quick)
    if reason is not None:
        print(f"benchmarks.gpu: {options.out} {reason}", file=sys.stderr)
        return 2
    record.resume()
    # Another machine lacks the compiled kernels that CuPy cached on this one.
    record.sections.pop("compilation", None)
    record.save()
    stop = time.time() + options.seconds
    first = ["compilation"] if set(options.only) & set(COMPILED) else []
    for section in [*first, *options.only]:
        _watch(options, section, stop)
    record = Record.read(options.out)
    print(report(record))
    print(f"wrote {options.out}")
    return 1 if record.failures() else 0


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


def _mismatch(record: Record, *, quick: bool) -> str | None:
    """Say why what is found now cannot stand beside what the record holds."""
    if not record.machine:
        return None
    import cupy

    from benchmarks.gpu.library import register

    register()
    from linattn_cupy.hardware import kernel_hashes

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    remedy = "give another --out or remove it"
    if record.machine["device"]["name"] != name:
        return f"is of {record.machine['device']['name']}, this is {name}; {remedy}"
    if record.machine["kernels"] != kernel_hashes():
        return f"is of other kernels than these; {remedy}"
    if bool(record.machine.get("quick")) != quick:
        return f"was begun {'without' if quick else 'with'} --quick; {remedy}"
    return None


def _watch(options: argparse.Namespace, section: str, stop: float) -> None:
    """Run a section in other processes, as many as it takes."""
    words = [section, str(options.out), str(stop), *(["--quick"] if options.quick else [])]
    command = [sys.executable, "-m", "benchmarks.gpu.section", *words]
    done = -1
    for _ in range(MAX_DEATHS):
        print(f"{section} ...", flush=True)
        code = subprocess.run(command, cwd=ROOT, env=child_environment()).returncode
        record = Record.read(options.out)
        blamed = record.blame(f"its process ended with code {code}")
        if code == 0:
            return
        before, done = done, len(record.items(section))
        if not blamed and done == max(before, 0):
            # It died before an item began; another would do so too.
            found = {"exception": f"the process ended with code {code}", "passed": False}
            record.store(section, "begin", found)
            return
    record.store(section, "the rest", {"left_out": STOPPED})


if __name__ == "__main__":
    sys.exit(main())

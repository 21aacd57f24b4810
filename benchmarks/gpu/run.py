"""Run the checks and timings on a GPU: ``python -m benchmarks.gpu.run --help``.

The first process only watches. Each section runs in one of its own, which goes on with the next
item where the last one stopped, if a kernel broke the device or never ended.
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
from benchmarks.gpu.record import SECTIONS, Record

__all__ = ["main"]

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
    add("--seconds", type=float, default=570.0, help="leave out what would begin later than that")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sections; 1 if a check failed, 2 if nothing can run here."""
    options = _arguments(arguments)
    reason = _unable()
    if reason is not None:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return 2
    # Not at the top: it needs what may be missing.
    from benchmarks.gpu.tables import report

    options.out = options.out.resolve()
    record = Record(options.out)
    record.save()
    stop = time.time() + options.seconds
    for section in options.only:
        _watch(options, section, stop)
    record = Record.read(options.out)
    print(report(record))
    print(f"wrote {options.out}")
    return 1 if record.failures() else 0


def _unable() -> str | None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"needs {', '.join(NEEDED)}; {', '.join(missing)} cannot be imported"
    import cupy

    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # without a driver CuPy raises errors of its own
        return f"cupy {cupy.__version__} finds no usable NVIDIA driver: {error}"
    return None if count else "there is a driver but no device"


def _watch(options: argparse.Namespace, section: str, stop: float) -> None:
    """Have a section done by other processes, as many as it takes."""
    words = [section, str(options.out), str(stop), *(["--quick"] if options.quick else [])]
    command = [sys.executable, "-m", "benchmarks.gpu.section", *words]
    done = -1
    while True:
        print(f"{section} ...", flush=True)
        code = subprocess.run(command, cwd=ROOT, env=child_environment()).returncode
        record = Record.read(options.out)
        blamed = record.lost(f"its process ended with code {code}")
        if code == 0:
            return
        before, done = done, len(record.items(section))
        if not blamed and done == max(before, 0):
            # It died before an item began; another would do so too.
            found = {"exception": f"the process ended with code {code}", "passed": False}
            record.put(section, "begin", found)
            return


if __name__ == "__main__":
    sys.exit(main())

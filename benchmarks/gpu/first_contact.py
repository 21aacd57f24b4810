"""What to run first on a GPU: ``python -m benchmarks.gpu.first_contact``, at most five minutes.

Compares results with dense formulas in float64 on the host, the most telling cases first. A case
fails where an error is not within its bound, where a result differs between two runs of one call,
or where generic code ran in the place of a kernel. The cases run in another process; where a kernel
breaks the device or never ends, the next process goes on with the next case. Kernels are compiled
meanwhile, by a process for each core.

On the fake GPU (tests/fake_gpu/run.sh) cases are small, and one fails too where the interpreter
found a race, a wrong address or a value that nobody wrote. ``FAKE_GPU_SMS=1`` (132 unless set) lets
one block walk several tiles, ``PTX_SEED`` (1) draws another order of warps and blocks.

Prints "begun NAME" and the result of each case, then what was left out for lack of time and all
failures again. The exit code is 1 if anything failed, or nothing ran, and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.paths import IS_FAKE, ROOT, child_environment, unable

__all__ = ["main"]

CASE_SECONDS = 1000 if IS_FAKE else 100
"""A case that takes longer ends its process."""

BROKEN = 3
"""Exit code of a process whose device no longer answers."""

Cases = dict[str, Any]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.first_contact",
        description="Compare linattn on the first GPU with dense formulas on the host.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("words", nargs="*", help="what names of cases must hold, all of them")
    add("--random", type=int, metavar="SEED", help="cases drawn from this seed on, not the list")
    add("--count", type=int, default=100, help="how many of them")
    seconds = 1e9 if IS_FAKE else 200.0
    add("--seconds", type=float, default=seconds, help="begin no case after that")
    add("--only", nargs="+", metavar="NAME", help="cases to run in place of all")
    add("--out", type=Path, help="file for what was found, as `linattn info` reads it")
    # How this script starts itself.
    add("--run", action="store_true", help=argparse.SUPPRESS)
    add("--compile", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, or those that are named."""
    options = _arguments(arguments)
    reason = unable()
    if reason is not None:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return 2
    cases = _cases(options)
    unknown = [name for name in options.only or () if name not in cases]
    if unknown:
        print(f"benchmarks.gpu: no case is named {'; '.join(unknown)}", file=sys.stderr)
        return 2
    if options.compile:
        return _compile(cases)
    if options.run:
        return _run(cases, time.time() + options.seconds)
    drawn = [] if options.random is None else ["--random", str(options.random)]
    return _watch(list(cases), options, [*drawn, "--count", str(options.count)])


def _cases(options: argparse.Namespace) -> Cases:
    """Return the cases that are asked for, by name."""
    # Not at the top: it needs what may be missing.
    from benchmarks.gpu import cases

    if options.random is None:
        found = cases.telling_first()
    else:
        found = [cases.drawn(options.random + i) for i in range(options.count)]
    known = {case.name: cases.small(case) if IS_FAKE else case for case in found}
    return {
        name: case
        for name, case in known.items()
        if set(options.words) <= set(name.split()) and name in (options.only or known)
    }


# In the process that watches ----------------------------------------------------------------------


def _watch(names: list[str], options: argparse.Namespace, drawn: Sequence[str] = ()) -> int:
    """Start processes until all cases are done or time is up, then print what failed."""
    begun, found = time.time(), None if options.out is None else _machine()
    left, failed = list(names), list[str]()
    compilers = [] if IS_FAKE else _compilers(names, drawn)
    while left and (rest := begun + options.seconds - time.time()) > 0:
        before = len(left)
        command = _command("--run", *drawn, "--seconds", str(rest), "--only", *left)
        code, running = _listen(command, left, failed)
        if running is not None or (code and len(left) == before):
            what = running or left[0]
            left.remove(what)
            failed.append(f"FAIL  {what}: its process ended with code {code}")
            print(failed[-1], flush=True)
            if running is None:
                break  # others would end before their first case too
        elif code == 0:
            break
    for process in compilers:
        process.kill()
        process.wait()
    done = len(names) - len(left)
    if found is not None:
        found |= {"checks": done, "failures": failed}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if left:
        print(f"----- {len(left)} of {len(names)} not run: {'; '.join(left)}")
    print(f"----- {len(failed)} of {done} failed, {time.time() - begun:.0f} s")
    print(*failed, sep="\n", end="\n" if failed else "")
    return int(bool(failed) or not done)


def _machine() -> dict[str, Any]:
    """Return what a record says of the machine; taken first: little time may be left at the end."""
    from benchmarks.gpu.library import describe, register

    register()
    machine = describe()
    return {key: machine[key] for key in ("device", "date", "commit", "kernels")}


def _listen(command: list[str], left: list[str], failed: list[str]) -> tuple[int, str | None]:
    """Print what a process says; return its exit code, and the case that it left unfinished."""
    running = None
    with subprocess.Popen(
        command, cwd=ROOT, env=child_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            word, _, rest = line.strip().partition(" ")
            if word == "begun" and rest in left:
                running = rest
            elif running and word in ("ok", "FAIL") and rest.strip().startswith(f"{running}:"):
                left.remove(running)
                running = None
                if word == "FAIL":
                    failed.append(line.strip())
    return process.returncode, running


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.first_contact", *words]


def _compilers(names: list[str], drawn: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start a process for each core but one, which compile the kernels of the cases in turns."""
    count = min(len(names), (os.cpu_count() or 1) - 1)
    return [
        subprocess.Popen(
            _command("--compile", *drawn, "--only", *names[first::count]),
            cwd=ROOT,
            env=child_environment() | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for first in range(count)
    ]


# In the other processes ---------------------------------------------------------------------------


def _compile(cases: Cases) -> int:
    """Compile what cases launch; CuPy's cache on disk passes it on to other processes."""
    import cupy

    from benchmarks.gpu import parity
    from benchmarks.gpu.library import CupyLibrary, register

    register()
    library = CupyLibrary()
    from linattn_cupy import device

    here = cupy.cuda.runtime.getDevice()

    def build(source: str, function: str, options: Any, *rest: Any) -> None:
        device._kernel(source, function, tuple(options.items()), here)

    device.launch = build  # type: ignore[assignment]
    device.open_compiler()
    for case in cases.values():
        # What fails here fails again where it is reported.
        with suppress(Exception):
            parity.call_of(library, case)()
    return 0


def _run(cases: Cases, stop: float) -> int:
    """Run cases one after another until ``stop``."""
    from benchmarks.gpu import parity
    from benchmarks.gpu.library import CupyLibrary, describe, register

    register()
    library = CupyLibrary()
    if IS_FAKE:
        import cupy

        cupy.cuda.set_allocator(None)  # each array has memory of its own
    print(*(f"{name} {what};" for name, what in describe().items() if name != "kernels"))
    for name, case in cases.items():
        if time.time() > stop:
            break
        print(f"begun {name}", flush=True)
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        begun, passed, answers = time.time(), False, True
        try:
            found = parity.check(library, case)
            passed, said = found["passed"], _said(found)
        except Exception:  # of CUDA, of compilers: none may end the run
            lines = [line.strip() for line in traceback.format_exc().splitlines() if line.strip()]
            place = next((line for line in lines[::-1] if line.startswith("File ")), "")
            said, answers = f"{lines[-1][:600]} ({place})", _answers()
        faulthandler.cancel_dump_traceback_later()
        word = "ok   " if passed else "FAIL "
        print(f"{word} {name}: {said}  [{time.time() - begun:.1f} s]", flush=True)
        if not answers:
            return BROKEN
    return 0


def _said(found: dict[str, Any]) -> str:
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
    rows = max(found["row_errors"].values(), key=lambda error: (error != error, error))
    said = [
        f"{errors} (at most {found['bound']:.0e})",
        f"a row {rows:.1e} ({found['row_bound']:.0e})",
        f"same bits {found['deterministic']}",
        f"{1e3 * found['seconds']:.1f} ms",
    ]
    if not found["passed"]:
        said.append(f"launched {', '.join(found['kernels']) or 'nothing'}")
    return "; ".join([*said, *found["findings"][:3]])


def _answers() -> bool:
    import cupy

    try:
        cupy.ones(10).sum().get()
    except Exception:  # a device that is gone raises errors of all kinds
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

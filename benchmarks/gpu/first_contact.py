"""What to run first on a GPU: ``python -m benchmarks.gpu.first_contact``, at most five minutes.

Compares results with dense formulas in float64 on the host, the most telling cases first. An item
fails where an error is not within its bound, where a result differs between two runs of one call,
or where generic code ran in the place of a kernel. The items run in another process; where a kernel
breaks the device or never ends, the next process goes on with the next item. Kernels are compiled
meanwhile, by a process for each core.

Prints "begun NAME" and the result of each item, then what was left out for lack of time and all
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.paths import ROOT, child_environment, unable

__all__ = ["main"]

ITEM_SECONDS = 100
"""An item that takes longer ends its process."""

BROKEN = 3
"""Exit code of a process whose device no longer answers."""

Found = dict[str, Any]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.first_contact",
        description="Compare linattn on the first GPU with dense formulas on the host.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=300.0 - ITEM_SECONDS, help="begin no item after that")
    add("--few", action="store_true", help="small cases of each kind, for an interpreter")
    add("--only", nargs="+", metavar="NAME", help="items to run in place of all")
    add("--out", type=Path, help="file for what was found, as `linattn info` reads it")
    # How this script starts itself.
    add("--run", action="store_true", help=argparse.SUPPRESS)
    add("--compile", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all items, or those that are named."""
    options = _arguments(arguments)
    reason = unable()
    if reason is not None:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return 2
    items = _items(few=options.few)
    names = options.only or list(items)
    unknown = [name for name in names if name not in items]
    if unknown:
        print(f"benchmarks.gpu: no item is named {'; '.join(unknown)}", file=sys.stderr)
        return 2
    if options.compile:
        return _compile(names)
    if options.run:
        stop = time.time() + options.seconds
        return _run({name: items[name] for name in names}, stop, few=options.few)
    return _watch(names, options.seconds, few=options.few, out=options.out)


# In the process that watches ----------------------------------------------------------------------


def _watch(names: list[str], seconds: float, *, few: bool, out: Path | None = None) -> int:
    """Start processes until all items are done or time is up, then print what failed."""
    begun = time.time()
    left, failed = list(names), list[str]()
    compilers = [] if few else _compilers(names)
    while left and (rest := begun + seconds - time.time()) > 0:
        before = len(left)
        command = _command("--run", "--seconds", str(rest), *["--few"][: int(few)], "--only", *left)
        code, running = _listen(command, left, failed)
        if running is not None or (code and len(left) == before):
            what = running or left[0]
            left.remove(what)
            failed.append(f"FAIL  {what}: its process ended with code {code}")
            print(failed[-1], flush=True)
            if running is None:
                break  # others would end before their first item too
        elif code == 0:
            break
    for process in compilers:
        process.kill()
        process.wait()
    done = len(names) - len(left)
    if left:
        print(f"----- {len(left)} of {len(names)} not run: {'; '.join(left)}")
    print(f"----- {len(failed)} of {done} failed, {time.time() - begun:.0f} s")
    print(*failed, sep="\n", end="\n" if failed else "")
    if out is not None:
        from benchmarks.gpu.library import describe, register

        register()
        machine = describe()
        found = {key: machine[key] for key in ("device", "date", "commit", "kernels")}
        found |= {"checks": done, "failures": failed}
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(bool(failed) or not done)


def _listen(command: list[str], left: list[str], failed: list[str]) -> tuple[int, str | None]:
    """Print what a process says; return its exit code, and the item that it left unfinished."""
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


def _compilers(names: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start a process for each core but one, which compile the kernels of the items in turns."""
    count = min(len(names), (os.cpu_count() or 1) - 1)
    return [
        subprocess.Popen(
            _command("--compile", "--only", *names[first::count]),
            cwd=ROOT,
            env=child_environment() | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for first in range(count)
    ]


# In the other processes ---------------------------------------------------------------------------


def _items(*, few: bool) -> dict[str, Any]:
    """Items by name: functions, and cases of attention."""
    # Not at the top: it needs what may be missing.
    from benchmarks.gpu import cases

    ours = cases.few() if few else cases.telling_first()
    return {**ENVIRONMENT, **{case.name: case for case in ours}}


def _compile(names: list[str]) -> int:
    """Compile what items launch; CuPy's cache on disk passes it on to other processes."""
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
    items = _items(few=False)
    for name in names:
        if name not in ENVIRONMENT:
            # What fails here fails again where it is reported.
            with suppress(Exception):
                parity.run_on(library, items[name])
    return 0


def _run(items: dict[str, Any], stop: float, *, few: bool) -> int:
    """Run items one after another until ``stop``."""
    from benchmarks.gpu import parity
    from benchmarks.gpu.library import CupyLibrary, register

    register()
    library = CupyLibrary(2**24 if few else 2**28)
    for name, item in items.items():
        if time.time() > stop:
            break
        print(f"begun {name}", flush=True)
        faulthandler.dump_traceback_later(ITEM_SECONDS, exit=True)
        begun = time.time()
        work: Callable[[], Found] = item if callable(item) else partial(parity.check, library, item)
        try:
            found = work()
        except Exception:  # of CUDA, of compilers: none may end the run
            found = {"exception": traceback.format_exc()[-3000:], "passed": False}
        faulthandler.cancel_dump_traceback_later()
        word = "ok   " if found["passed"] else "FAIL "
        print(f"{word} {name}: {_said(found)}  [{time.time() - begun:.1f} s]", flush=True)
        if "exception" in found and not _answers():
            return BROKEN
    return 0


def _said(found: Found) -> str:
    if "exception" in found:
        lines = [line.strip() for line in found["exception"].splitlines() if line.strip()]
        return f"{lines[-1][:600]} ({next((x for x in lines[::-1] if x.startswith('File ')), '')})"
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
    said = [f"{errors} (at most {found['bound']:.0e})"]
    if "kernels" in found:
        rows = max(found["row_errors"].values(), key=lambda error: (error != error, error))
        said.append(f"a row {rows:.1e} ({found['row_bound']:.0e})")
        said.append(f"same bits {found['deterministic']}")
        said.append(f"{1e3 * found['seconds']:.1f} ms")
        if not found["passed"]:
            said.append(f"launched {', '.join(found['kernels']) or 'nothing'}")
    return "; ".join([*said, *found.get("more", [])])


def _answers() -> bool:
    import cupy

    try:
        cupy.ones(10).sum().get()
    except Exception:  # a device that is gone raises errors of all kinds
        return False
    return True


# What everything else needs -----------------------------------------------------------------------


def _kernel_of_cupy() -> Found:
    import cupy
    import numpy as np

    from benchmarks.gpu.library import describe
    from benchmarks.gpu.parity import relative_error

    got, wanted = cupy.arange(1000, dtype="float64") * 2 + 1, 2.0 * np.arange(1000) + 1
    errors = {"result": relative_error(got.get(), wanted)}
    more = [f"{name} {what}" for name, what in describe().items() if name != "kernels"]
    return {"errors": errors, "bound": 0.0, "more": more, "passed": errors["result"] == 0}


ENVIRONMENT: dict[str, Callable[[], Found]] = {
    "a kernel of CuPy": _kernel_of_cupy,
}


if __name__ == "__main__":
    sys.exit(main())

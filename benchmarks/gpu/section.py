"""One section, in a process that :mod:`benchmarks.gpu.run` starts and watches."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu import (
    behaviour,
    cases,
    ceilings,
    compilation,
    machine,
    parity,
    peers,
    timings,
)
from benchmarks.gpu.library import CupyLibrary, register
from benchmarks.gpu.record import OUT_OF_TIME, Item, Record, attempt

__all__ = ["BROKEN", "main", "run_section"]

ITEM_SECONDS = 150
"""An item that takes longer ends its process."""

BROKEN = 3
"""Exit code of a process whose device answers no more."""


def main() -> int:
    """Run a section: its name, the file, and when to stop."""
    section, path, stop, *more = sys.argv[1:]
    quick = more == ["--quick"]
    installed = not register()
    record = Record.read(Path(path))
    if not record.machine:
        record.machine = machine.describe() | {"installed": installed, "quick": quick}
        record.save()
    code = run_section(record, section, _items(section, quick=quick), float(stop))
    record.machine["clocks_after"] = machine.clocks()
    record.save()
    return code


def _items(section: str, *, quick: bool) -> Iterator[Item]:
    if section == "ceilings":
        return ceilings.items(quick=quick)
    if section == "peers":
        return peers.items(quick=quick)
    if section == "compilation":
        return compilation.items(cases.cases(quick=quick))
    library = CupyLibrary()
    if section == "parity":
        return parity.items(library, cases.cases(quick=quick))
    if section == "timings":
        return timings.items(quick=quick)
    return behaviour.items(library, quick=quick)


def run_section(
    record: Record,
    section: str,
    items: Iterator[Item],
    stop: float,
    alive: Callable[[], bool] | None = None,
) -> int:
    """Do what the record does not hold yet and ends before ``stop``; ``alive()`` after failures."""
    done = set(record.items(section))
    for item in items:
        if item.name in done:
            continue
        if time.time() + item.seconds > stop:
            record.store(section, item.name, {"left_out": OUT_OF_TIME})
            continue
        record.begin(section, item.name)
        faulthandler.dump_traceback_later(ITEM_SECONDS, exit=True)
        begun = time.perf_counter()
        found = attempt(item)
        faulthandler.cancel_dump_traceback_later()
        took = round(time.perf_counter() - begun, 3)
        record.store(section, item.name, {**found, "seconds_taken": took})
        if "exception" in found:
            print(f"{section}: {item.name}: {found['exception'].splitlines()[-1]}", flush=True)
            if not (alive or _alive)():
                return BROKEN
    return 0


def _alive() -> bool:
    import cupy

    try:
        return float(cupy.ones(10).sum()) == 10
    except Exception:  # a device that is gone raises errors of all kinds
        return False


if __name__ == "__main__":
    sys.exit(main())

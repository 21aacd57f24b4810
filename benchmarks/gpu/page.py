"""Publish a run's results: ``python -m benchmarks.gpu.page FILE``.

Copies the file to ``benchmarks/results/gpu/<device>.json``, puts its tables between the two marks
of docs/performance.md, and tells the backend that its kernels have run, which ``linattn info``
prints. A run of some sections only is rejected.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from benchmarks.gpu.library import register
from benchmarks.gpu.paths import ROOT
from benchmarks.gpu.record import Record
from benchmarks.gpu.tables import tables
from benchmarks.peers.tables import as_markdown

__all__ = ["END", "PAGE", "RESULTS", "START", "publish", "render"]

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- gpu: start -->\n", "<!-- gpu: end -->\n"
WANTED = ("ceilings", "parity", "timings", "behaviour")


def render(record: Record) -> str:
    """Return the part of the page that holds numbers."""
    machine = record.machine
    device = machine["device"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"Measured on {device['name']} ({device['memory_bytes'] / 2**30:.0f} GiB, "
        f"{device['processors']} multiprocessors, driver {device['driver']}, NVRTC "
        f"{device['nvrtc']}), Python {machine['python']}, {versions}; commit {machine['commit']}, "
        f"{machine['date']}.",
        "",
    ]
    return "\n".join([*lines, *map(as_markdown, tables(record))])


def publish(record: Record, *, results: Path, page: Path, measured: Path) -> Path:
    """Write the copy, the page and the backend's file; return the copy's path.

    Raises
    ------
    ValueError
        The run is quick, or lacks a section.
    """
    missing = [section for section in WANTED if not record.sections.get(section)]
    if missing or record.machine.get("quick"):
        what = f"no {', '.join(missing)}" if missing else "--quick"
        message = f"record must be of a whole run, got one with {what}"
        raise ValueError(message)
    machine = record.machine
    slug = re.sub(r"[^a-z0-9]+", "-", machine["device"]["name"].lower()).strip("-")
    record.path = results / f"{slug}.json"
    record.save()
    text = page.read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}{render(record)}{END}{after}", encoding="utf-8")
    run = {
        "device": machine["device"]["name"],
        "date": machine["date"],
        "failures": record.failures(),
        "kernels": machine["kernels"],
    }
    measured.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return record.path


def main() -> None:
    """Publish the run of a file."""
    register()
    from linattn_cupy.hardware import MEASURED

    record = Record.read(Path(sys.argv[1]))
    print(f"wrote {publish(record, results=RESULTS, page=PAGE, measured=MEASURED)}")


if __name__ == "__main__":
    main()

"""Put what a run found into docs/performance.md, so that nobody copies a number by hand.

    python -m benchmarks.peers.page [RESULTS.json]

Replaces what stands between the page's two marks by the tables of the record, and draws its
picture for the page. Without a file it takes the one that a run writes by default.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import ROOT
from benchmarks.peers.record import Record
from benchmarks.peers.tables import as_markdown, tables

__all__ = ["END", "PAGE", "RESULTS", "START", "between_marks", "render"]

RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "peers.png"
START, END = "<!-- peers: start -->\n", "<!-- peers: end -->\n"


def render(record: Record) -> str:
    """Return the part of the page that holds numbers."""
    picture = f"![Time and memory against the number of tokens](images/{PICTURE.name})"
    return "\n".join([_machine(record), picture, "", *map(as_markdown, tables(record))])


def _machine(record: Record) -> str:
    machine, settings, sizes = record.machine, record.settings, record.sizes
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v is not None)
    removed = ", ".join(f"{k}={v}" for k, v in machine["removed_from_environment"].items())
    kernels = sorted({_kernels(library) for library in machine["libraries"]} - {""})
    lines = [
        f"Measured on {machine['cpu']} ({machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"{', '.join(machine['caches'])}), {machine['system']}, Python {machine['python']}, "
        f"{versions}; commit {machine['commit']}.",
        *([f"BLAS of NumPy: {', '.join(kernels)}."] if kernels else []),
        *([f"Removed from the environment: {removed}."] if removed else []),
        f"Batch {sizes.batch}, {sizes.heads} heads, d = {sizes.dim}, m = {sizes.features}, "
        f"float32, standard normal inputs; medians over {settings['rounds']} rounds.",
    ]
    return "\n".join([*lines, ""])


def _kernels(library: dict[str, Any]) -> str:
    if library["architecture"] is None:
        return ""
    return f"{library['internal_api']} {library['version']}, {library['architecture']}"


def between_marks(text: str) -> str:
    """Return what stands between the two marks of a page."""
    return text.split(START)[1].split(END)[0]


def main() -> None:
    """Write the page and its picture."""
    from benchmarks.peers.plot import picture

    record = Record.read(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{START}{render(record)}{END}{after}", encoding="utf-8")
    picture(record, PICTURE, threads=record.threads()[0])


if __name__ == "__main__":
    main()

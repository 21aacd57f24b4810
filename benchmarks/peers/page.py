"""Put what runs found into docs/record.md, so that nobody copies a number by hand.

    python -m benchmarks.peers.page

Replaces what stands between the page's two marks by the tables of all records that are kept, one a
machine, and draws the picture of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.machines import side_by_side
from benchmarks.peers.processes import ROOT
from benchmarks.peers.record import Record
from benchmarks.peers.tables import Table, as_markdown, tables

__all__ = ["END", "PAGE", "RESULTS", "START", "between_marks", "records", "render"]

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "record.md"
START, END = "<!-- peers: start -->\n", "<!-- peers: end -->\n"


def records() -> dict[str, Record]:
    """Return the record of each machine, by the name of its file; others lie there too."""
    paths = sorted(RESULTS.glob("*.json"))
    return {path.stem: Record.read(path) for path in paths if '"timings"' in path.read_text()}


def render(found: Mapping[str, Record]) -> str:
    """Return the part of the page that holds numbers: machines side by side, then one by one."""
    parts = [as_markdown(table) for table in side_by_side(found)]
    for name, record in found.items():
        parts += [f"### {record.machine['cpu']}", "", _machine(record)]
        parts += [f"![Time and memory against the number of tokens](images/peers-{name}.png)", ""]
        kept = [table for table in tables(record) if not _is_elsewhere(table)]
        parts += [as_markdown(table, level=4) for table in kept]
    return "\n".join(parts)


def _is_elsewhere(table: Table) -> bool:
    """Whether the page has it side by side, or it is left to the results."""
    is_other_path = "scale of inputs" in table.title and "float32, backend" not in table.title
    is_small = table.title in ("512 tokens, 2 threads", "1,024 tokens, 2 threads")
    return table.title == "Goals" or is_other_path or is_small


def _machine(record: Record) -> str:
    machine, sizes = record.machine, record.sizes
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v is not None)
    removed = ", ".join(f"{k}={v}" for k, v in machine["removed_from_environment"].items())
    kernels = sorted({_kernels(library) for library in machine["libraries"]} - {""})
    lines = [
        f"Measured on {machine['cpu']} ({machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"{', '.join(machine['caches'])}), {machine['system']}, Python {machine['python']}, "
        f"{versions}; commit {machine['commit']}, {machine['date']}.",
        *([f"BLAS of NumPy: {', '.join(kernels)}."] if kernels else []),
        *_choices(machine.get("choices", {})),
        *([f"Removed from the environment: {removed}."] if removed else []),
        f"Batch {sizes.batch}, {sizes.heads} heads, d = {sizes.dim}, m = {sizes.features}, "
        f"float32, standard normal inputs; medians over {_rounds(record)} rounds.",
    ]
    return "\n".join([*lines, ""])


def _choices(found: Mapping[str, Sequence[str]]) -> list[str]:
    """Say what the processes of linattn have chosen, and who where they differ."""
    if len(found) < 2:
        return [f"linattn: {chosen}." for chosen in found]
    return [f"linattn: {chosen}: {', '.join(who)}." for chosen, who in found.items()]


def _rounds(record: Record) -> str:
    """Say how many rounds there were; of long calls fewer."""
    counts = {len(timing.rounds) for timing in record.timings}
    fewest, most = min(counts), max(counts)
    return f"{most}" if fewest == most else f"{fewest} to {most}"


def _kernels(library: dict[str, Any]) -> str:
    if library["architecture"] is None:
        return ""
    return f"{library['internal_api']} {library['version']}, {library['architecture']}"


def between_marks(text: str) -> str:
    """Return what stands between the two marks of a page."""
    return text.split(START)[1].split(END)[0]


def main() -> None:
    """Write the page and its pictures."""
    from benchmarks.peers.plot import picture

    found = records()
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{START}{render(found)}{END}{after}", encoding="utf-8")
    for name, record in found.items():
        path = PAGE.parent / "images" / f"peers-{name}.png"
        picture(record, path, threads=record.threads()[0])


if __name__ == "__main__":
    main()

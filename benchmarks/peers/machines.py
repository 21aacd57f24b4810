"""The records of several machines side by side: one table, a column for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product

from benchmarks.peers.goals import goals
from benchmarks.peers.record import Cell, Record
from benchmarks.peers.registry import ATTENTION, GRADIENT, LOOPS, PEERS
from benchmarks.peers.scales import CASES
from benchmarks.peers.tables import CROSSING, EXACT, Table, crossing, percent, times

__all__ = ["LENGTHS", "side_by_side"]

LENGTHS = (512, 1024, 4096)
"""Tokens at which machines are compared; growth tells of more."""

Figure = Callable[[Record], str]


def side_by_side(records: Mapping[str, Record]) -> list[Table]:
    """Tabulate the goals and the main ratios of every machine."""
    names = [record.machine["cpu"] for record in records.values()]
    lengths = ", ".join(f"{length:,}" for length in LENGTHS)
    return [
        Table("Goals, by machine", [["", "wanted", *names], *_goal_rows(records)], []),
        Table(
            "Ratios by machine",
            [["", *names], *_figure_rows(records)],
            [f"three numbers: at {lengths} tokens, on one thread"],
        ),
    ]


def _goal_rows(records: Mapping[str, Record]) -> Iterator[list[str]]:
    found = [{goal.of: goal for goal in goals(record)} for record in records.values()]
    for of, wanted in dict.fromkeys((goal.of, goal.wanted) for by in found for goal in by.values()):
        yield [of, wanted, *(by[of].told if of in by else "" for by in found)]


def _figure_rows(records: Mapping[str, Record]) -> Iterator[list[str]]:
    for label, figure in _figures():
        cells = [figure(record) for record in records.values()]
        if any(cells):
            yield [label, *cells]


def _figures() -> Iterator[tuple[str, Figure]]:
    yield "commit", lambda record: record.machine["commit"] or ""
    yield "date", lambda record: record.machine["date"]
    for name, kind in product(CROSSING, ATTENTION):
        yield f"share of the limit: {_what(name, kind)}", partial(_limit, name, kind)
    for name, kind in product((*LOOPS, "torch-favor", "torch-elu", EXACT), ATTENTION):
        yield f"time over linattn's: {_what(name, kind)}", partial(_ratio, name, kind)
    for name, kind in product(
        ("torch-chunks", "torch-backward", "jax-favor", "jax-backward"), GRADIENT
    ):
        yield f"time over linattn's: {_what(name, kind)}", partial(_ratio, name, kind)
    for name, kind in product(CROSSING, ATTENTION):
        yield f"one thread over two: {_what(name, kind)}", partial(_gain, name, kind)
    for name, kind in product(CROSSING, ATTENTION):
        yield f"growth: {_what(name, kind)}", partial(_growth, name, kind)
    for name, kind in product(CROSSING, ATTENTION):
        yield f"crossover: {_what(name, kind)}", partial(_crossover, name, kind)

    for case in CASES:
        yield f"largest time over the time at scale 1: {case}", partial(_by_scale, case)


def _what(name: str, kind: str) -> str:
    return f"{PEERS[name].label}, {kind}"


def _limit(name: str, kind: str, record: Record) -> str:
    return _by_length(percent(record.limit_fraction(name, kind, n)) for n in LENGTHS)


def _ratio(name: str, kind: str, record: Record) -> str:
    cells = [Cell(name, kind, n, 1) for n in LENGTHS]
    ours = PEERS[name].beside
    return _by_length(times(record.ratio(cell, cell._replace(peer=ours))) for cell in cells)


def _gain(name: str, kind: str, record: Record) -> str:
    cells = [Cell(name, kind, n, 1) for n in LENGTHS]
    return _by_length(times(record.ratio(cell, cell._replace(threads=2))) for cell in cells)


def _growth(name: str, kind: str, record: Record) -> str:
    found = record.growth(name, kind, 1)
    return "" if found is None else f"{found[0]:.2f}"


def _crossover(name: str, kind: str, record: Record) -> str:
    return crossing(record.crossover(name, EXACT, kind, 1))


def _by_scale(case: str, record: Record) -> str:
    """Show the largest of all dtypes and paths."""
    ratios = [max(item.ratios(), default=1.0) for item in record.scaled if item.case == case]
    return times(max(ratios, default=None))


def _by_length(cells: Iterable[str]) -> str:
    """Join the cells of all lengths, of which some may not have been timed."""
    found = [cell or "-" for cell in cells]
    return ", ".join(found) if set(found) != {"-"} else ""

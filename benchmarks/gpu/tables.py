"""A record as tables: for a terminal of 80 columns, and for docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gpu.goals import executed_of, floor_of, goals
from benchmarks.gpu.record import CHECKED, Record
from benchmarks.gpu.timings import MAIN
from benchmarks.peers.tables import Table, as_text, duration

__all__ = ["report", "tables"]

MAX_NAME_LENGTH = 60
MAX_ROWS = 20
UNITS = {"byte": (1e12, "TB/s"), "flop": (1e12, "TFLOP/s"), "exp": (1e12, "10^12 exp/s")}
MAPS = {"favor": "FAVOR+", "elu": "elu + 1", "exact": "exact"}


def report(record: Record) -> str:
    """Lay out all that a run found for a terminal."""
    lines = [headline(record), ""]
    return "\n".join([*lines, *map(as_text, tables(record))])


def headline(record: Record) -> str:
    """Say on what it ran."""
    machine = record.machine
    if not machine:
        return "nothing ran"
    device = machine["device"]
    return f"{device['name']}, driver {device['driver']}, {machine['date']}"


def tables(record: Record) -> Iterator[Table]:
    """Yield every table that the record has something for."""
    found = [
        _ceilings(record),
        _parity(record),
        *_attention(record),
        _executed(record),
        _kernels(record),
        _decode(record),
        _goals(record),
        _behaviour(record),
        _failures(record),
        _left_out(record),
    ]
    yield from (table for table in found if len(table.rows) > 1)


def _ceilings(record: Record) -> Table:
    rows = [["", "rate", "spread"]]
    for name, item in record.items("ceilings").items():
        if "rate" in item:
            factor, unit = UNITS[item["unit"]]
            rows.append([name, f"{item['rate'] / factor:.3g} {unit}", _percent(item["spread"])])
    return Table("What the device does at best", rows, ["spread: between quartiles"])


def _parity(record: Record) -> Table:
    rows = [["", "cases", "passed", "worst error", "bound", "deterministic"]]
    cases = [item for item in record.items("parity").values() if "errors" in item]
    for dtype in dict.fromkeys(item["dtype"] for item in cases):
        items = [item for item in cases if item["dtype"] == dtype]
        worst = _worst(error for item in items for error in item["errors"].values())
        rows.append(
            [
                dtype,
                str(len(items)),
                str(sum(item["passed"] for item in items)),
                f"{worst:.1e}",
                f"{items[0]['bound']:.0e}",
                str(sum(item["deterministic"] for item in items)),
            ]
        )
    return Table("Against float64", rows, ["worst error: norm of the difference over the norm"])


def _attention(record: Record) -> Iterator[Table]:
    """Tabulate times by length of each way through the code, and what of the floor they reach."""
    timed = [
        item
        for section in ("timings", "peers")
        for item in record.items(section).values()
        if "seconds" in item and item["kind"] != "decode"
    ]
    lengths = sorted({item["length"] for item in timed})
    for length in lengths:
        rows = [["", "map", "full", "floor", "causal", "floor"]]
        rows_of_length = [item for item in timed if item["length"] == length]
        for way, feature_map in dict.fromkeys(
            (item["way"], item["map"]) for item in rows_of_length
        ):
            cells = []
            for kind in ("full", "causal"):
                item = next(
                    (
                        item
                        for item in rows_of_length
                        if (item["way"], item["map"], item["kind"]) == (way, feature_map, kind)
                    ),
                    None,
                )
                cells += (
                    ["", ""] if item is None else [duration(item["seconds"]), _share(record, item)]
                )
            rows.append([way, MAPS[feature_map], *cells])
        notes = ["floor: the least possible time over that taken"]
        yield Table(f"{length:,} tokens, 4 x 16 heads, d = 64, m = 256", rows, notes)


def _share(record: Record, item: dict[str, Any]) -> str:
    if item["map"] == "exact" or item["way"].startswith("fla"):
        return ""
    least = floor_of(record, item)
    return "" if least is None else _percent(least.seconds / item["seconds"])


def _executed(record: Record) -> Table:
    """Tabulate what the fused kernels execute beside the ceiling of their instruction."""
    rows = [["", "map", "tokens", "executed", "at mma.sync's ceiling", "of the time"]]
    for item in record.items("timings").values():
        known = "seconds" in item and item["kind"] != "decode"
        executed = executed_of(record, item) if known else None
        if executed is not None:
            flops, least = executed
            way = f"{item['way']} {item['kind']}"
            cells = [f"{item['length']:,}", f"{flops / 1e9:,.0f} GFLOP", duration(least)]
            rows.append([way, MAPS[item["map"]], *cells, _percent(least / item["seconds"])])
    return _shortened("Products that the fused kernels execute", rows)


def _kernels(record: Record) -> Table:
    """Tabulate each kernel's time at the main length, and in decoding."""
    rows = [["", "kernel", "device"]]
    for name, item in record.items("timings").items():
        if item.get("length", MAIN) == MAIN and "step 2" not in name:
            rows += [
                [name, kernel, duration(took)] for kernel, took in item.get("kernels", {}).items()
            ]
    return Table("Kernels by themselves", rows, [])


def _decode(record: Record) -> Table:
    rows = [["", "dtype", "device", "from Python", "floor"]]
    for item in record.items("timings").values():
        if item.get("kind") == "decode" and "seconds" in item:
            times = [duration(item["seconds"]), duration(item["eager_seconds"])]
            rows.append([item["way"], item["dtype"], *times, _share(record, item)])
    notes = ["device: replayed as a graph"]
    return Table("One token of 64 x 16 states, d = 64, m = 256", rows, notes)


def _goals(record: Record) -> Table:
    rows = [["", "reached", ""]]
    words = {True: "met", False: "missed", None: ""}
    if record.items("timings"):
        rows += [[goal.wanted, goal.reached, words[goal.met]] for goal in goals(record)]
    return Table("What was wanted", rows, [])


def _behaviour(record: Record) -> Table:
    """Count checks by what stands before the comma of their names."""
    rows = [["", "checks", "passed"]]
    items = record.items("behaviour")
    for topic in dict.fromkeys(name.partition(", ")[0] for name in items):
        checks = [item for name, item in items.items() if name.partition(", ")[0] == topic]
        done = [item for item in checks if "left_out" not in item]
        if done:
            rows.append([topic, str(len(done)), str(sum(bool(i.get("passed")) for i in done))])
    return Table("Behaviour", rows, [])


def _failures(record: Record) -> Table:
    rows = [["", "why"]]
    for section, items in record.sections.items():
        for name, item in items.items():
            if "exception" in item:
                last = item["exception"].strip().splitlines()[-1]
                rows.append([f"{section}: {name}"[:MAX_NAME_LENGTH], last])
            elif section in CHECKED and "left_out" not in item and not item["passed"]:
                rows.append([f"{section}: {name}"[:MAX_NAME_LENGTH], _why(item)])
    return _shortened("Failed", rows)


def _why(item: dict[str, Any]) -> str:
    if "errors" not in item or not isinstance(item["errors"], dict):
        told = {key: value for key, value in item.items() if key not in ("passed", "seconds_taken")}
        return str(told)[:120]
    worst = _worst(item["errors"].values())
    kernels = " ".join(item["kernels"]) or "none"
    steady = "" if item["deterministic"] else ", differs between runs"
    return f"error {worst:.1e}{steady}, kernels: {kernels}"


def _worst(errors: Iterable[float]) -> float:
    """Return the largest error, NaN before all."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def _left_out(record: Record) -> Table:
    rows = [["", "why"]]
    for section, items in record.sections.items():
        reasons: dict[str, int] = {}
        for item in items.values():
            if "left_out" in item:
                reasons[item["left_out"]] = reasons.get(item["left_out"], 0) + 1
        rows += [[f"{section}: {count} items", reason] for reason, count in reasons.items()]
    return _shortened("Left out", rows)


def _shortened(title: str, rows: list[list[str]]) -> Table:
    more = len(rows) - 1 - MAX_ROWS
    notes = [f"and {more} more, in the file"] if more > 0 else []
    return Table(title, rows[: MAX_ROWS + 1], notes)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

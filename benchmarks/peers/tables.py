"""A record as tables: rows of cells, printed at 80 columns or as Markdown."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.peers.goals import MIN_GAIN, goals
from benchmarks.peers.limits import product_shapes
from benchmarks.peers.record import MIN_CORE_SHARE, Cell, Crossover, Record
from benchmarks.peers.registry import ATTENTION, GRADIENT, PEERS, RATES, TEXT

__all__ = [
    "CROSSING",
    "EXACT",
    "Table",
    "as_markdown",
    "as_text",
    "crossing",
    "duration",
    "percent",
    "size",
    "tables",
    "times",
]

EXACT = "torch-exact"
COLUMNS = 80
TEXT_EXACT = "torch-text"
CROSSING = ("linattn-favor", "linattn-hyperbolic", "linattn-elu")


class Table(NamedTuple):
    """A title and rows of cells, the first row the head; sentences to stand below."""

    title: str
    rows: list[list[str]]
    notes: list[str]


def tables(record: Record) -> Iterator[Table]:
    """Yield every table that the record has numbers for."""
    candidates = [
        _goals(record),
        *(_attention(record, length, t) for t in record.threads() for length in _lengths(record)),
        *(_gradient(record, n, t) for t in record.threads() for n in _lengths(record, GRADIENT)),
        *(_decode(record, t) for t in record.threads()),
        *(_text(record, t) for t in record.threads()),
        _limits(record),
        _threads(record),
        _lengths_table(record),
        _memory(record),
        *_by_scale(record),
        _rates(record),
        _left_out(record),
    ]
    yield from (table for table in candidates if len(table.rows) > 1)


def as_text(table: Table) -> str:
    """Lay a table out for a terminal of 80 columns."""
    widths = [max(map(len, column)) for column in zip(*table.rows, strict=True)]
    lines = [table.title, ""]
    for row in table.rows:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        line = "  ".join([first, *others]).rstrip()
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent="    ") if line else [""]
    for note in table.notes:
        lines += textwrap.wrap(f"({note})", COLUMNS)
    return "\n".join([*lines, ""])


def as_markdown(table: Table, level: int = 3) -> str:
    """Lay a table out for a page, under a heading of this level."""
    head, *rows = table.rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = [f"{'#' * level} {table.title}", ""]
    lines += [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
    for note in table.notes:
        lines += ["", f"{note[0].upper()}{note[1:]}."]
    return "\n".join([*lines, ""])


def duration(seconds: float) -> str:
    """Show seconds with three digits and the unit that fits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def size(number: float) -> str:
    """Show bytes with three digits and the unit that fits."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if number >= 2**power:
            return f"{_three(number / 2**power)} {unit}"
    return f"{number / 2**10:.0f} KiB"


def _three(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def times(ratio: float | None) -> str:
    """Show a ratio with three digits, nothing for none."""
    return "" if ratio is None else _three(ratio)


def _lengths(record: Record, kinds: tuple[str, ...] = ATTENTION) -> list[int]:
    return sorted({length for kind in kinds for length in record.lengths(kind)})


def _count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _attention(record: Record, length: int, threads: int) -> Table:
    """Tabulate the times of one length, ratios to linattn and shares of the limit."""
    rows = [["", "full", "ratio", "limit", "causal", "ratio", "limit"]]
    for name, peer in PEERS.items():
        cells: list[str] = []
        for kind in ATTENTION:
            timing = record.timing(name, kind, length, threads)
            if timing is None:
                cells += ["", "", ""]
                continue
            share = record.limit_fraction(name, kind, length) if threads == 1 else None
            ratio = record.ratio(timing.cell, timing.cell._replace(peer=peer.beside))
            cells += [duration(timing.seconds), times(ratio), percent(share)]
        if any(cells):
            rows.append([peer.label, *cells])
    notes = []
    if len(rows) > 1:
        notes = [
            "ratio: the peer's time over linattn's with FAVOR+; for elu+1 and NumPy loops, over "
            "linattn's with the same map"
        ]
        if any(row[3] or row[6] for row in rows[1:]):
            notes.append("limit: share of the machine's limit that is reached, with whole products")
        if threads == 1:
            notes += _disturbed(record, length, ATTENTION)
    return Table(f"{length:,} tokens, {_count(threads)}", rows, notes)


def _limits(record: Record) -> Table:
    """Tabulate shares of the limit with products as a whole and in small ones."""
    rows = [["", "tokens", "full", "small", "causal", "small"]]
    for name, peer in PEERS.items():
        for length in _lengths(record):
            shares = [
                record.limit_fraction(name, kind, length, small=small)
                for kind in ATTENTION
                for small in (False, True)
            ]
            if any(shares):
                rows.append([peer.label, f"{length:,}", *map(percent, shares)])
    notes = [
        "small: share of the limit with products in batches of 32 tokens, for which this BLAS "
        "may have faster kernels; on one thread"
    ]
    return Table("Share of the machine's limit", rows, notes)


def _disturbed(record: Record, length: int, kinds: tuple[str, ...]) -> list[str]:
    """Say so where other work of the machine took part of a core."""
    shares = [
        min(timing.shares)
        for timing in record.timings
        if timing.length == length and timing.threads == 1 and timing.kind in kinds
    ]
    low = [share for share in shares if share < MIN_CORE_SHARE]
    if not low:
        return []
    return [
        f"the machine was busy: {len(low)} of {len(shares)} calls on one thread were disturbed, "
        f"the worst had {100 * min(low):.0f} % of its core in one round"
    ]


def _gradient(record: Record, length: int, threads: int) -> Table:
    """Tabulate the times of output and gradients, and how long the backward pass is."""
    rows = [["", "full", "ratio", "causal", "ratio"]]
    for name, peer in PEERS.items():
        timings = [record.timing(name, kind, length, threads) for kind in GRADIENT]
        if not any(timings):
            continue
        cells: list[str] = []
        for timing in timings:
            if timing is None:
                cells += ["", ""]
            else:
                ratio = record.ratio(timing.cell, timing.cell._replace(peer=peer.beside))
                cells += [duration(timing.seconds), times(ratio)]
        rows.append([peer.label, *cells])
    notes = ["ratio: the peer's time over linattn's with FAVOR+"]
    shares = {kind: record.pullback_share(kind, length, threads) for kind in GRADIENT}
    shown = [f"{times(x)} ({kind.partition(' ')[0]})" for kind, x in shares.items() if x]
    if shown:
        notes.append(f"linattn's pullback takes {' and '.join(shown)} times the forward pass")
    if threads == 1:
        notes += _disturbed(record, length, GRADIENT)
    return Table(f"Output and gradients, {length:,} tokens, {_count(threads)}", rows, notes)


def _decode(record: Record, threads: int) -> Table:
    contexts = record.lengths("decode")
    rows = [["", *(head for n in contexts for head in (f"after {n:,}", "ratio"))]]
    for name, peer in PEERS.items():
        cells: list[str] = []
        for n in contexts:
            timing = record.timing(name, "decode", n, threads)
            if timing is None:
                cells += ["", ""]
            else:
                ratio = record.ratio(timing.cell, timing.cell._replace(peer=peer.beside))
                cells += [duration(timing.seconds), times(ratio)]
        if any(cells):
            rows.append([peer.label, *cells])
    return Table(f"One token of all heads, by context, {_count(threads)}", rows, [])


def _text(record: Record, threads: int) -> Table:
    """Tabulate softmax attention of a text, exact and not, and where they cross."""
    exact, others = PEERS[TEXT_EXACT].label, [n for n, p in PEERS.items() if p.kinds == TEXT]
    others.remove(TEXT_EXACT)
    heads = (head for name in others for head in (PEERS[name].label, "ratio"))
    rows = [["tokens", exact, *heads]]
    for n in _lengths(record, TEXT):
        cells = [Cell(name, *TEXT, n, threads) for name in (TEXT_EXACT, *others)]
        timings = [record.timing(*cell) for cell in cells]
        first, *shown = ("" if timing is None else duration(timing.seconds) for timing in timings)
        ratios = (times(record.ratio(cell, cells[0])) for cell in cells[1:])
        pairs = zip(shown, ratios, strict=True)
        if any(timings):
            rows.append([f"{n:,}", first, *(cell for pair in pairs for cell in pair)])
    crossings = [
        f"{PEERS[name].label} {at} tokens"
        for name in others
        if (at := crossing(record.crossover(name, TEXT_EXACT, *TEXT, threads)))
    ]
    notes = [
        f"ratio: time over the time of {exact}",
        f"crossover, the length from which it is faster than {exact}: "
        f"{', '.join(crossings) or 'not seen'}",
    ]
    return Table(f"Softmax attention of a text, {_count(threads)}", rows, notes)


def _goals(record: Record) -> Table:
    """Tabulate the goals, and the worst case of each."""
    rows = [["", "wanted", "worst", "of"]]
    rows += [[goal.of, goal.wanted, goal.told, goal.where] for goal in goals(record)]
    notes = [
        "the peer's time over linattn's; of threads, linattn's on one over its time on more; "
        "by scale, linattn's over its time at scale 1"
    ]
    return Table("Goals", rows, notes)


def _threads(record: Record) -> Table:
    """How many times faster linattn is on more threads, both in one rotation."""
    counts = [t for t in record.threads() if t > 1]
    rows = [["", "tokens", *(f"{kind}, {t}" for kind in ATTENTION for t in counts)]]
    for name, peer in PEERS.items():
        for kinds, suffix in ((ATTENTION, ""), (GRADIENT, ", gradients")):
            for n in _lengths(record, kinds) if peer.feature_map else []:
                gains = [
                    record.ratio(Cell(name, kind, n, 1), Cell(name, kind, n, t))
                    for kind in kinds
                    for t in counts
                ]
                if any(gains):
                    rows.append([f"{peer.label}{suffix}", f"{n:,}", *map(times, gains)])
    slower = [
        f"{label}, {tokens} tokens, {column} threads ({gain})"
        for label, tokens, *gains in rows[1:]
        for column, gain in zip(rows[0][2:], gains, strict=True)
        if gain and float(gain) < MIN_GAIN
    ]
    told = f"slower on more threads than on one: {'; '.join(slower) or 'nothing'}"
    return Table("Time on one thread over time on more, back to back", rows, [told])


def _lengths_table(record: Record) -> Table:
    """How time grows, and from which length linattn is ahead of exact attention."""
    rows = [["", "threads", "full", "causal"]]
    for threads in record.threads():
        for name, peer in PEERS.items():
            grown = [record.growth(name, kind, threads) for kind in ATTENTION]
            if any(grown):
                shown = ("" if g is None else f"{g[0]:.2f} ({_k(g[1])}-{_k(g[2])})" for g in grown)
                rows.append([f"growth, {peer.label}", str(threads), *shown])
        for name in CROSSING:
            found = [record.crossover(name, EXACT, kind, threads) for kind in ATTENTION]
            if any(found):
                label = f"crossover, {PEERS[name].label}"
                rows.append([label, str(threads), *map(crossing, found)])
    notes = [
        "growth: p where time grows as N^p, between the lengths in brackets",
        f"crossover: tokens from which it is faster than {PEERS[EXACT].label}",
    ]
    return Table("Growth and crossover", rows, notes)


def _k(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def percent(share: float | None) -> str:
    """Show a share, nothing for none."""
    return "" if share is None else f"{100 * share:.0f} %"


def crossing(found: Crossover | None) -> str:
    """Show from which length on one is ahead of the other, nothing for none."""
    if found is None:
        return ""
    if found.length is not None:
        return f"{float(f'{found.length:.2g}'):,.0f}"
    return f"≤ {found.lowest:,}" if found.is_ahead else f"> {found.highest:,}"


def _memory(record: Record) -> Table:
    lengths = sorted({item.length for item in record.memory})
    rows = [["", "tokens", "full", "traced", "causal", "traced"]]
    found = {(item.peer, item.kind, item.length): item for item in record.memory}
    for name, peer in PEERS.items():
        for length in lengths:
            items = [found.get((name, kind, length)) for kind in ATTENTION]
            if any(items):
                cells: list[str] = []
                for item in items:
                    cells.append("" if item is None else size(item.resident))
                    traced = None if item is None else item.traced
                    cells.append("" if traced is None else size(traced))
                rows.append([peer.label, f"{length:,}", *cells])
    notes = ["memory of one call beyond its inputs and output; traced: as tracemalloc sees it"]
    return Table("Workspace", rows, notes)


def _by_scale(record: Record) -> Iterator[Table]:
    """Tabulate times over those at scale 1, a table for each dtype and path."""
    kinds: dict[tuple[Any, ...], list[list[str]]] = {}
    for item in record.scaled:
        first = statistics.median(row[0] for row in item.rounds)
        row = [item.case, duration(first), *(f"{ratio:.2f}" for ratio in item.ratios())]
        kinds.setdefault((item.length, item.scales, item.dtype, item.path), []).append(row)
    for (length, scales, dtype, path), rows in kinds.items():
        head = ["", "at 1", *(f"at {scale:g}" for scale in scales[1:])]
        title = f"Time by the scale of inputs, {length:,} tokens, {dtype}, {path}"
        notes = [
            "time of a call; then, with queries and keys times the number above, the time over it; "
            "linattn on one thread, one head"
        ]
        yield Table(title, [head, *rows], notes)


def _rates(record: Record) -> Table:
    shapes = product_shapes(record.sizes)
    labels = [f"{a}x{b} by {b}x{c}" for a, b, c in shapes.values()]
    labels[-1] = "in 32s"
    rows = [["", "tokens", *labels, "exp"]]
    for name in ("numpy-rates", "torch-rates"):
        for length in record.lengths("exp"):
            rates = [record.rate(name, kind, length) for kind in RATES]
            if any(rates):
                shown = ["" if rate is None else f"{rate / 1e9:.3g}" for rate in rates]
                rows.append([PEERS[name].label.partition(" ")[0], f"{length:,}", *shown])
    notes = ["GFLOP/s of float32 products, 10^9 exponentials a second, in each length's rotation"]
    return Table("What the machine does on one core", rows, notes)


def _left_out(record: Record) -> Table:
    rows = [["left out", "threads", "tokens", "why"]]
    rows += [
        [
            f"{PEERS[item.peer].label}, {item.kind}",
            str(item.threads),
            "" if item.length is None else f"{item.length:,}",
            item.reason,
        ]
        for item in record.left_out
    ]
    return Table("Not measured", rows, [])


def joined(found: Iterable[Table]) -> str:
    """Join tables for a terminal."""
    return "\n".join(map(as_text, found))

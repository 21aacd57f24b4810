"""Results as rich tables that fit into 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from linattn.cli.compare import GOOD_ENOUGH, MAX_EXACT_SHARE, Row, best_row, frontier
from linattn.cli.inputs import NOISE, Inputs, size_text
from linattn.cli.sweep import Sweep
from linattn.cli.text import count, duration
from linattn.diagnostics import PERCENTILES, AttendedNorms

__all__ = [
    "WIDTH",
    "cost_table",
    "crossover_text",
    "duration",
    "error_table",
    "failures_text",
    "left_out_methods_text",
    "left_out_text",
    "memory",
    "norms_text",
    "time_table",
]


WIDTH = 80
"""What the tables need."""

MANY_FEATURES = 4096
"""Columns beyond which random features are not worth it: exact attention is cheaper."""


def error_table(rows: Sequence[Row], inputs: Inputs, *, is_causal: bool) -> Table:
    """Return error, time and memory of every case, the best one marked."""
    draws = max(len(row.heads) for row in rows)
    notes = [
        f"{size_text(inputs)}, {inputs.query.dtype}{', causal' if is_causal else ''}; error: "
        f"Frobenius, each head and each of {count(draws, 'draw')} by itself; time (fastest call) "
        "and peak memory: all heads in one call. "
        f"* lowest median of the maps; good enough to use unretrained: <= {GOOD_ENOUGH:g}."
    ]
    if any(row.exact_share > MAX_EXACT_SHARE for row in rows):
        notes.append(
            f"† more than {MAX_EXACT_SHARE:.0%} of the pairs need no approximation at this size: "
            "this error says nothing about longer sequences, and cannot win."
        )
    if any(row.method.startswith("landmarks") for row in rows):
        notes.append("Landmarks are fitted in every call.")
    if any(row.held_out for row in rows):
        notes.append(
            "Calibrated maps are fitted once, to the first half of the tokens, and judged on the "
            "second by itself: they cannot win."
        )
    table = Table(
        title="Relative output error against exact softmax attention",
        caption_justify="left",
        caption=" ".join(notes),
    )
    table.add_column("map", min_width=max(len(row.label) for row in rows))
    for name in ("columns", "median", "90th pct.", "time", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    best = best_row(rows)
    for index, row in enumerate(rows):
        following = rows[index + 1] if index + 1 < len(rows) else None
        mark = "*" if row is best else "†" if row.exact_share > MAX_EXACT_SHARE else " "
        numbers = (
            ["failed ", "", "", ""]
            if row.failure
            else [
                f"{_error(row.median)}{mark}",
                _error(row.percentile_90),
                duration(row.seconds),
                memory(row.peak_bytes),
            ]
        )
        table.add_row(
            Text(row.label),
            "" if row.num_features is None else str(row.num_features),
            *numbers,
            style="bold" if row is best else "dim" if row.kind == "reference" else "",
            end_section=following is not None and _section(row) != _section(following),
        )
    return table


def cost_table(rows: Sequence[Row], inputs: Inputs, *, is_causal: bool) -> Table:
    """Return error, cost, time and memory of maps and published attentions, at equal keys.

    A section holds what meets the same number of keys, landmarks or columns a query, in the order
    of the error.
    """
    draws = max(len(row.heads) for row in rows)
    kind = "causal" if is_causal else "full"
    notes = (
        f"{size_text(inputs)}, {inputs.query.dtype}, {kind}. keys: so many keys, landmarks or "
        "columns are met by a query. cost: multiplications as a share of those of exact attention, "
        "choosing the keys included. Error, time and memory as in the table of maps, over "
        f"{count(draws, 'draw')}. Times are those of short formulas, made to be compared with. "
        "• on the frontier: no other has less error for no more multiplications. † more than "
        f"{MAX_EXACT_SHARE:.0%} of the pairs need no approximation, or judged on half of the "
        "tokens: does not count. Bounds are quadratic."
    )
    table = Table(
        title="Published attentions beside the maps, by keys of a query",
        caption_justify="left",
        caption=notes,
        pad_edge=False,
    )
    table.add_column("attention", min_width=max(len(row.label) for row in rows))
    for name in ("keys", "cost", "median", "90th", "time", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    best = frontier(rows)
    ordered = sorted(rows, key=_by_keys)
    for index, row in enumerate(ordered):
        following = ordered[index + 1] if index + 1 < len(ordered) else None
        mark = "•" if row in best else " " if row.counts or row.kind == "reference" else "†"
        numbers = ["", "failed ", "", "", ""]
        if not row.failure:
            numbers = [
                f"{row.cost:.0%}" if row.cost < 10 else f"{row.cost:.0f}x",
                f"{_error(row.median)}{mark}",
                _error(row.percentile_90),
                duration(row.seconds),
                memory(row.peak_bytes),
            ]
        table.add_row(
            Text(row.label),
            "" if row.num_features is None else str(row.num_features),
            *numbers,
            style="bold" if row in best else "dim" if row.kind in ("reference", "bound") else "",
            end_section=following is not None and _by_keys(row)[:2] != _by_keys(following)[:2],
        )
    return table


def _by_keys(row: Row) -> tuple[bool, float, float]:
    """Order rows by keys, then by error, with references at the end."""
    keys = math.inf if row.num_features is None else row.num_features
    return row.kind == "reference", keys, row.median


def left_out_methods_text(left_out: Sequence[tuple[str, str]], need_training: str) -> str:
    """Return which published attentions were not measured, each reason once."""
    told = [f"{labels} ({why.removeprefix('is ')})" for why, labels in _by_reason(left_out)]
    return f"Not measured: {'; '.join([*told, need_training])}."


def failures_text(rows: Sequence[Row]) -> str:
    """Return which rows failed, and why, each reason once."""
    failed = [(row.full_label, row.failure) for row in rows if row.failure]
    return f"Failed: {'; '.join(f'{labels}: {why}' for why, labels in _by_reason(failed))}."


def _by_reason(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return each reason with the labels that have it."""
    reasons: dict[str, list[str]] = {}
    for label, why in pairs:
        reasons.setdefault(why, []).append(label)
    return [(why, ", ".join(labels)) for why, labels in reasons.items()]


def norms_text(norms: AttendedNorms) -> str:
    """Return what the size of attended pairs means for random features."""
    low, median, high = np.nanquantile(norms.percentiles[..., PERCENTILES.index(50)], (0, 0.5, 1))
    too_many = norms.num_features > MANY_FEATURES
    return (
        f"Attended |q + k|^2 / sqrt(dim): median over heads {_norm(median)}, from {_norm(low)} to "
        f"{_norm(high)}. One positive random feature has relative variance exp of that less 1: in "
        f"{int(too_many.sum())} of {count(too_many.size, 'head')} they would take more than "
        f"{MANY_FEATURES:,} columns."
    )


def time_table(found: Sweep, *, is_causal: bool) -> Table:
    """Return the measured times by length."""
    queries, keys = found.sizes
    cross = f" Queries: {queries:,} for every {keys:,} keys." if queries != keys else ""
    table = Table(
        title=f"Time of one head against sequence length: {found.label}",
        caption_justify="left",
        min_width=76,
        caption=(
            f"Fastest call{', causal' if is_causal else ''}; beyond the first head's own "
            f"{count(found.num_real, found.unit)} these are repeated at random with {NOISE:.0%} "
            f"Gaussian noise: for times only, since keys that repeat are easy to cluster.{cross}"
        ),
    )
    for name in (f"{found.unit}s", "this map", "exact softmax", "exact / map"):
        table.add_column(name, justify="right", no_wrap=True)
    linear, exact = found.seconds("linear"), found.seconds("exact")
    for length in found.lengths:
        both = length in linear and length in exact
        table.add_row(
            f"{length:,}",
            duration(linear[length]) if length in linear else "left out",
            duration(exact[length]) if length in exact else "left out",
            _ratio(exact[length] / linear[length]) if both else "",
        )
    return table


def crossover_text(found: Sweep) -> str:
    """Return one sentence about the crossover."""
    result = found.crossover
    low, high = result.between
    match result.status:
        case "crossed":
            return (
                f"Crossover: {found.label} is faster than exact attention from about "
                f"{result.rounded:,} {found.unit}s on (interpolated between "
                f"{low:,} and {high:,})."
            )
        case "below":
            return (
                f"Crossover: below {count(high or 0, found.unit)}; {found.label} was faster at "
                "every length measured."
            )
        case "not reached":
            return (
                f"Crossover: not reached; exact attention was faster at "
                f"{count(low or 0, found.unit)}, the longest length where both were measured."
            )
    return "Crossover: not reached; no length was measured with both."


def left_out_text(found: Sweep) -> str:
    """Return what was left out of the time against length, and why; "" if nothing was."""
    labels = {"linear": found.label, "exact": "exact softmax"}
    late: dict[str, list[str]] = {}
    failed = []
    for point in found.left_out:
        label, length = labels[point.curve], count(point.length, found.unit)
        if point.failure:
            failed.append(f"{label} at {length} fails: {point.failure}")
        else:
            expected = f"{length} (expected {duration(point.expected_seconds)})"
            late.setdefault(label, []).append(expected)
    sentences = []
    if late:
        named = "; ".join(f"{label} at {', '.join(points)}" for label, points in late.items())
        sentences.append(f"Left out, beyond the time budget of {found.time_budget:g} s: {named}.")
    if failed:
        sentences.append(f"Left out: {'; '.join(failed)}.")
    return " ".join(sentences)


def memory(size: float) -> str:
    """Return a size with its unit."""
    if size < 2**20:
        return f"{size / 2**10:.0f} KiB"
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def _section(row: Row) -> str:
    """Return what rows that are not parted by a line have in common."""
    if row.kind == "reference":
        return "references"
    return "no columns" if row.num_features is None else row.method


def _ratio(number: float) -> str:
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def _norm(number: float) -> str:
    return f"{number:.1f}" if number < 1e4 else f"{number:.1e}"


def _error(error: float) -> str:
    if not math.isfinite(error):
        return "not finite"
    if error != 0 and (error < 1e-3 or error >= 1e3):
        return f"{error:.1e}"
    return f"{error:.3f}" if error < 10 else f"{error:.1f}"

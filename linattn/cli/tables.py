"""Results as rich tables that fit into 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from linattn.cli.compare import GOOD_ENOUGH, Row, best_row
from linattn.cli.inputs import NOISE, Inputs
from linattn.cli.sweep import Sweep
from linattn.diagnostics import PERCENTILES, AttendedNorms

__all__ = [
    "crossover_text",
    "duration",
    "error_table",
    "facts_table",
    "left_out_text",
    "memory",
    "norms_text",
    "time_table",
]


MANY_COLUMNS = 4096
"""Columns beyond which random features are called hopeless: exact attention is cheaper."""


def error_table(rows: Sequence[Row], inputs: Inputs, *, is_causal: bool) -> Table:
    """Return error, time and memory of every case, the best one marked."""
    draws = max(len(row.heads) for row in rows)
    sizes = inputs.describe()
    length = (
        f"{sizes['key_length']} tokens"
        if sizes["query_length"] == sizes["key_length"]
        else f"{sizes['query_length']} queries and {sizes['key_length']} keys"
    )
    table = Table(
        title="Relative output error against exact softmax attention",
        caption_justify="left",
        caption=(
            f"{sizes['heads']} heads, {length}, dim {sizes['dim']}, {sizes['dtype']}"
            f"{', causal' if is_causal else ''}; error: Frobenius, each head and each of "
            f"{draws} draw{'s' if draws > 1 else ''} by itself; "
            "time (fastest call) and peak memory: all heads in one call. "
            f"* lowest median of the maps; good enough to use unretrained: <= {GOOD_ENOUGH:g}. "
            "Landmarks are fitted in every call; calibrated maps once to the first half of the "
            "tokens, and judged on the second by itself, which is no race with the others."
        ),
    )
    table.add_column("map")
    for name in ("columns", "median", "90th pct.", "time", "peak memory"):
        table.add_column(name, justify="right")
    best = best_row(rows)
    for index, row in enumerate(rows):
        following = rows[index + 1] if index + 1 < len(rows) else None
        table.add_row(
            Text(row.label),
            "" if row.num_features is None else str(row.num_features),
            f"{_error(row.median)}{'*' if row is best else ' '}",
            _error(row.percentile_90),
            duration(row.seconds),
            memory(row.peak_bytes),
            style="bold" if row is best else "dim" if row.is_baseline else "",
            end_section=following is not None and _section(row) != _section(following),
        )
    return table


def norms_text(norms: AttendedNorms) -> str:
    """Return what the size of attended pairs means for random features."""
    low, median, high = np.nanquantile(norms.percentiles[..., PERCENTILES.index(50)], (0, 0.5, 1))
    hopeless = norms.num_features > MANY_COLUMNS
    return (
        f"Attended |q + k|^2 / sqrt(dim): median over heads {median:.1f}, from {low:.1f} to "
        f"{high:.1f}. One positive random feature has relative variance exp of that less 1: in "
        f"{int(hopeless.sum())} of {hopeless.size} heads they would take more than "
        f"{MANY_COLUMNS:,} columns."
    )


def time_table(found: Sweep, *, is_causal: bool) -> Table:
    """Return the measured times by length."""
    table = Table(
        title="Time of one head against sequence length",
        caption_justify="left",
        min_width=76,
        caption=(
            f"Fastest call{', causal' if is_causal else ''}; beyond the first head's own tokens: "
            f"its tokens repeated at random with {NOISE:.0%} Gaussian noise."
        ),
    )
    for name in ("tokens", found.label, "exact softmax", "exact / linear"):
        table.add_column(name, justify="right")
    linear, exact = found.seconds("linear"), found.seconds("exact")
    for length in found.lengths:
        both = length in linear and length in exact
        table.add_row(
            f"{length:,}",
            duration(linear[length]) if length in linear else "left out",
            duration(exact[length]) if length in exact else "left out",
            f"{exact[length] / linear[length]:.1f}" if both else "",
        )
    return table


def facts_table(title: str, facts: Sequence[tuple[str, str]]) -> Table:
    """Return names and what is to be said about them."""
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column()
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(Text(name), Text(text))
    return table


def crossover_text(found: Sweep) -> str:
    """Return one sentence about the crossover."""
    result = found.crossover
    low, high = result.between
    match result.status:
        case "crossed":
            return (
                f"Crossover: {found.label} is faster than exact attention from about "
                f"{_two_digits(result.length or math.nan):,} tokens on (interpolated between "
                f"{low:,} and {high:,})."
            )
        case "below":
            return (
                f"Crossover: below {high:,} tokens; {found.label} was faster at every length "
                "measured."
            )
        case "not reached":
            return (
                f"Crossover: not reached; exact attention was faster at {low:,} tokens, the "
                "longest length where both were measured."
            )
    return "Crossover: not reached; no length was measured with both."


def left_out_text(found: Sweep) -> str:
    """Return what was left out of the time against length, and why; "" if nothing was."""
    if not found.left_out:
        return ""
    named = []
    for curve, label in (("linear", found.label), ("exact", "exact softmax")):
        points = [
            f"{point.length:,} tokens (expected {duration(point.expected_seconds)})"
            for point in found.left_out
            if point.curve == curve
        ]
        if points:
            named.append(f"{label} at {', '.join(points)}")
    return f"Left out, beyond the time budget of {found.time_budget:g} s: {'; '.join(named)}."


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def memory(size: int) -> str:
    """Return a size with its unit."""
    if size < 2**20:
        return f"{size / 2**10:.0f} KiB"
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def _section(row: Row) -> str:
    """Return what rows that are not parted by a line have in common."""
    if row.is_baseline:
        return "baselines"
    return "no columns" if row.num_features is None else row.method


def _error(error: float) -> str:
    if not math.isfinite(error):
        return "not finite"
    if error != 0 and (error < 1e-3 or error >= 1e3):
        return f"{error:.1e}"
    return f"{error:.3f}" if error < 10 else f"{error:.1f}"


def _two_digits(number: float) -> int:
    return int(float(f"{number:.2g}"))

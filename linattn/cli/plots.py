"""Results as two pictures, legible without colour."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from linattn.cli.compare import GOOD_ENOUGH, Row, frontier, uniform_row
from linattn.cli.inputs import Inputs, size_text
from linattn.cli.methods import METHODS
from linattn.cli.published import PUBLISHED
from linattn.cli.sweep import Crossover, Sweep

__all__ = ["COLORS", "error_figure", "frontier_figure", "png", "time_figure"]

# A method has one colour, marker and dash in every picture. The first seven colours are those of
# Okabe and Ito, which people with any colour vision tell apart; markers and dashes say the same.
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
    "#332288",
    "#882255",
    "#8B8B00",
    "#00DDDD",
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
_DASHES = (
    "-",
    "--",
    "-.",
    (0, (1, 1)),
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (8, 3)),
    (0, (3, 1)),
    (0, (2, 2)),
    (0, (6, 2, 2, 2)),
    (0, (10, 2)),
    (0, (4, 4)),
)

_RANGE = (1e-3, 3.0)
"""Errors outside are named instead of drawn: the axis is there to tell the others apart."""


def error_figure(rows: Sequence[Row], inputs: Inputs, *, is_causal: bool) -> Figure:
    """Draw median and quartiles of the error against the number of columns."""
    figure, axes = _axes()
    counts = sorted({row.num_features for row in rows if row.num_features is not None})
    # Left of the numbers: maps without a choice.
    without = counts[0] / 2 if counts else 1
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind == "map":
            by_method.setdefault(row.method, []).append(row)
    outside = []
    for index, group in enumerate(by_method.values()):
        drawn = [row for row in group if _RANGE[0] <= row.median <= _RANGE[1]]
        if len(drawn) < len(group):
            named = [_row_text(row) for row in group if row not in drawn]
            outside.append(f"{group[0].label} {', '.join(named)}")
        # Beside each other, so that their quartiles do not hide each other.
        offset = 2 ** (0.5 * ((index + 0.5) / len(by_method) - 0.5))
        if drawn:
            _draw_curve(axes, drawn, [offset * (row.num_features or without) for row in drawn])
    _draw_references(axes, uniform_row(rows))
    ticks: dict[float, str] = {number: f"{number:,}" for number in counts}
    if any(row.num_features is None and row.kind == "map" for row in rows):
        ticks[without] = "no choice"
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(ticks) / 1.4, max(ticks) * 1.4)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("columns of the feature map (log scale)")
    _error_axis(axes)
    axes.set_title(
        "Error against exact softmax attention: median and quartiles\n"
        f"{size_text(inputs)}{', causal' if is_causal else ''}"
    )
    if outside:
        _footnote(figure, f"Not drawn: {'; '.join(outside)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def _error_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(max(axes.get_ylim()[0], _RANGE[0]), _RANGE[1])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("relative output error (log scale)")


def _draw_curve(axes: Axes, rows: Sequence[Row], positions: Sequence[float]) -> None:
    """Draw the rows of one method, with quartiles."""
    low, high = zip(*map(_quartiles, rows), strict=True)
    median = [row.median for row in rows]
    axes.errorbar(
        positions,
        median,
        yerr=[
            [middle - end for middle, end in zip(median, low, strict=True)],
            [end - middle for middle, end in zip(median, high, strict=True)],
        ],
        elinewidth=0.8,
        capsize=1.5,
        label=rows[0].label,
        **_style(rows[0].method),
    )


def _draw_references(axes: Axes, uniform: Row) -> None:
    """Draw the error of uniform attention, and the one that is good enough."""
    if uniform.median >= _RANGE[0]:
        axes.axhspan(*_quartiles(uniform), color="black", alpha=0.08, linewidth=0)
        axes.axhline(uniform.median, color="black", linewidth=1.5, label="uniform attention")
    axes.axhline(
        GOOD_ENOUGH,
        color="black",
        linewidth=1,
        linestyle=":",
        label=f"good enough: {GOOD_ENOUGH:g}",
    )


def frontier_figure(rows: Sequence[Row], inputs: Inputs, *, is_causal: bool) -> Figure:
    """Draw the error against multiplications, with the line that nothing measured is below."""
    figure, axes = _axes()
    figure.set_size_inches(9, 5.6)
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind != "reference" and _RANGE[0] <= row.median <= _RANGE[1]:
            by_method.setdefault(row.method, []).append(row)
    for group in by_method.values():
        axes.plot(
            [row.cost for row in group],
            [row.median for row in group],
            label=group[0].label,
            **_style(group[0].method),
        )
    best = frontier(rows)
    axes.step(
        [row.cost for row in best],
        [row.median for row in best],
        where="post",
        color="black",
        linewidth=5,
        alpha=0.15,
        label="frontier",
        zorder=0,
    )
    _draw_references(axes, uniform_row(rows))
    axes.axvline(1, color="black", linewidth=1, linestyle="--", label="cost of exact attention")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:.0%}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("multiplications, of those of exact attention (log scale)")
    _error_axis(axes)
    axes.set_title(
        "Error against cost: maps (filled), published attentions (hollow), bounds (grey)\n"
        f"{size_text(inputs)}{', causal' if is_causal else ''}"
    )
    # Of two methods that differ by a hair the names say which is which.
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=8)
    return figure


def time_figure(found: Sweep, inputs: Inputs, *, is_causal: bool) -> Figure:
    """Draw time against sequence length, with the crossover."""
    figure, axes = _axes()
    for index, (curve, label) in enumerate((("linear", found.label), ("exact", "exact softmax"))):
        times = found.seconds(curve)
        if times:
            axes.plot(
                list(times),
                list(times.values()),
                color=COLORS[index],
                linestyle=_DASHES[index],
                marker=_MARKERS[index],
                label=label,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = found.lengths
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: _tick(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"sequence length ({found.unit}s, log scale)")
    axes.set_ylabel("time of one call, one head (log scale)")
    sizes = inputs.describe()
    axes.set_title(
        f"Time against sequence length\n"
        f"one head, dim {sizes['dim']}, {sizes['dtype']}{', causal' if is_causal else ''}"
    )
    result = found.crossover
    if result.length is not None:
        axes.axvline(result.length, color="black", linewidth=1, linestyle=":")
    axes.text(0.98, 0.03, _crossover_label(result), transform=axes.transAxes, ha="right")
    if found.left_out:
        labels = {"linear": found.label, "exact": "exact softmax"}
        named = []
        for curve, label in labels.items():
            points = [point for point in found.left_out if point.curve == curve]
            for reason, chosen in (
                ("time budget", [point for point in points if not point.failure]),
                ("failed", [point for point in points if point.failure]),
            ):
                if chosen:
                    tokens = ", ".join(f"{point.length:,}" for point in chosen)
                    named.append(f"{label} at {tokens} {found.unit}s ({reason})")
        _footnote(figure, f"Left out: {'; '.join(named)}")
    if found.points:
        axes.legend(loc="upper left")
    return figure


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _style(method: str) -> dict[str, Any]:
    index = [known.name for known in (*METHODS, *PUBLISHED)].index(method)
    style: dict[str, Any] = {"markersize": 5}
    if index < len(METHODS):
        dashes = _DASHES[index]
        return {**style, "color": COLORS[index], "marker": _MARKERS[index], "linestyle": dashes}
    published = PUBLISHED[index - len(METHODS)]
    number = index - len(METHODS)
    color = "#7F7F7F" if published.kind == "bound" else COLORS[number % 6]
    marker = _MARKERS[number % len(_MARKERS)]
    hollow = {"markerfacecolor": "white", "linewidth": 0.8, "linestyle": "-"}
    return {**style, **hollow, "color": color, "marker": marker}


def _row_text(row: Row) -> str:
    what = "failed" if row.failure else f"{row.median:.3g}"
    return what if row.num_features is None else f"{what} at {row.num_features}"


def _quartiles(row: Row) -> tuple[float, float]:
    errors = [error for heads in row.heads for error in heads]
    low, high = (float(np.quantile(errors, share, method="nearest")) for share in (0.25, 0.75))
    return low, min(high, 2 * _RANGE[1])


def _tick(seconds: float) -> str:
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms")):
        if seconds < limit * 0.999:
            return f"{round(seconds * factor, 6):g} {unit}"
    return f"{seconds:,.6g} s"


def _crossover_label(result: Crossover) -> str:
    low, high = result.between
    if result.length is not None:
        return f"crossover: about {result.rounded:,} {result.unit}s"
    if result.status == "below":
        return f"crossover: below {high:,} {result.unit}s"
    return "crossover: not reached" + (f" up to {low:,} {result.unit}s" if low else "")


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def _footnote(figure: Figure, text: str) -> None:
    lines = textwrap.wrap(text, 115)
    figure.text(0.01, 0.01, "\n".join(lines), fontsize=9)
    bottom = 0.02 + 0.033 * len(lines)
    figure.set_layout_engine("constrained", rect=(0, bottom, 1, 1 - bottom))

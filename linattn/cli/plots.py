"""Results as two PNG pictures, legible without colour."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from linattn.cli.compare import GOOD_ENOUGH, Row, uniform_row
from linattn.cli.inputs import Inputs
from linattn.cli.sweep import EXPONENTS, Crossover, Sweep
from linattn.cli.tables import duration

__all__ = ["error_plot", "time_plot"]

# The palette of Okabe and Ito, which people with any colour vision tell apart; markers and dashes
# say the same again, and go on where the colours begin anew.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
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

_CEILING = 1.6
"""Errors above this are named instead of drawn: they would flatten everything else."""


def error_plot(rows: Sequence[Row], inputs: Inputs, *, is_causal: bool) -> bytes:
    """Return a PNG of the median error against the number of columns."""
    figure, axes = _axes()
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        if not row.is_baseline:
            by_method.setdefault(row.method, []).append(row)
    off_scale = []
    for index, group in enumerate(by_method.values()):
        color, label = _COLORS[index % len(_COLORS)], group[0].label
        dashes = _DASHES[index % len(_DASHES)]
        high = [row for row in group if not row.median <= _CEILING]
        if high:
            values = ", ".join(f"{row.median:.3g}{_at(row)}" for row in high)
            off_scale.append(f"{label} {values}")
        drawn = [row for row in group if row.median <= _CEILING]
        if not drawn:
            continue
        if drawn[0].num_features is None:
            level = drawn[0].median
            axes.axhline(level, linestyle=dashes, color=color, label=f"{label}: {level:.2f}")
        else:
            axes.plot(
                [row.num_features or 0 for row in drawn],
                [row.median for row in drawn],
                linestyle=dashes,
                marker=_MARKERS[index % len(_MARKERS)],
                color=color,
                label=label,
            )
    uniform = uniform_row(rows).median
    axes.axhline(uniform, color="black", linewidth=2, label=f"uniform attention: {uniform:.2f}")
    axes.axhline(
        GOOD_ENOUGH,
        color="black",
        linewidth=1,
        linestyle=":",
        label=f"good enough: {GOOD_ENOUGH:g}",
    )
    columns = sorted({row.num_features for row in rows if row.num_features is not None})
    if columns:
        axes.set_xscale("log", base=2)
        axes.set_xlim(columns[0] / 1.3, columns[-1] * 1.3)
        axes.set_xlabel("columns of the feature map (number, log scale)")
    axes.set_xticks(columns, [f"{number:,}" for number in columns])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, None)
    axes.set_ylabel("relative output error, median (no unit)")
    sizes = inputs.describe()
    causal = ", causal" if is_causal else ""
    axes.set_title(
        f"Error against exact softmax attention\n"
        f"{sizes['heads']} heads, {sizes['key_length']} tokens, dim {sizes['dim']}{causal}"
    )
    if off_scale:
        _footnote(figure, f"Above the axis: {'; '.join(off_scale)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _png(figure)


def time_plot(found: Sweep, inputs: Inputs, *, is_causal: bool) -> bytes:
    """Return a PNG of time against sequence length, with the crossover."""
    figure, axes = _axes()
    for index, (curve, label) in enumerate((("linear", found.label), ("exact", "exact softmax"))):
        times = found.seconds(curve)
        if times:
            axes.plot(
                list(times),
                list(times.values()),
                color=_COLORS[index],
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
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: duration(value)))
    axes.set_xlabel("sequence length (tokens, log scale)")
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
        named = [
            f"{curve} at {', '.join(tokens)} tokens"
            for curve in EXPONENTS
            if (tokens := [f"{p.length:,}" for p in found.left_out if p.curve == curve])
        ]
        _footnote(figure, f"Left out (time budget): {'; '.join(named)}")
    if found.points:
        axes.legend(loc="upper left")
    return _png(figure)


def _crossover_label(result: Crossover) -> str:
    low, high = result.between
    if result.length is not None:
        return f"crossover: about {float(f'{result.length:.2g}'):,.0f} tokens"
    if result.status == "below":
        return f"crossover: below {high:,} tokens"
    return "crossover: not reached" + (f" up to {low:,} tokens" if low else "")


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


def _at(row: Row) -> str:
    return "" if row.num_features is None else f" at {row.num_features}"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()

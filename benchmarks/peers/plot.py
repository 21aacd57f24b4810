"""A record as one picture: time against length, and workspace against length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from benchmarks.peers.record import Record
from benchmarks.peers.registry import ATTENTION, PEERS
from benchmarks.peers.tables import EXACT, duration, size

__all__ = ["picture"]

STYLES = {
    "linattn-favor": ("#0072B2", "o", "-"),
    "numpy-loop": ("#0072B2", "x", ":"),
    "linattn-hyperbolic": ("#56B4E9", "s", "-"),
    "torch-exact": ("#000000", "X", "--"),
    "performer": ("#D55E00", "^", "-."),
    "jax-favor": ("#E69F00", "v", "-."),
    "torch-favor": ("#CC79A7", "D", ":"),
    "linattn-elu": ("#009E73", "P", "-"),
    "torch-elu": ("#7F7F7F", "*", ":"),
}
"""Of the peers that are drawn: a colour of Okabe and Ito's, and marker and dashes without it."""


def picture(record: Record, path: Path, *, threads: int) -> None:
    """Draw full attention, causal attention and the workspace of both side by side."""
    panels = len(ATTENTION) * (2 if record.memory else 1)
    figure = Figure(figsize=(11, 4.6 * panels / 2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(panels // 2, 2, squeeze=False, sharey="row")
    for axes, kind in zip(grid[0], ATTENTION, strict=True):
        _times(axes, record, kind, threads)
    if record.memory:
        for axes, kind in zip(grid[1], ATTENTION, strict=True):
            _workspace(axes, record, kind)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    sizes = record.sizes
    count = "one core" if threads == 1 else f"{threads} cores"
    figure.suptitle(
        f"One call: {sizes.batch * sizes.heads} heads, d = {sizes.dim}, m = {sizes.features}, "
        f"float32, {count}, {record.machine['cpu']}",
        fontsize=10,
    )
    figure.savefig(path)


def _style(name: str) -> dict[str, Any]:
    color, marker, dashes = STYLES[name]
    return {
        "color": color,
        "marker": marker,
        "linestyle": dashes,
        "markersize": 5,
        "label": PEERS[name].label,
    }


def _times(axes: Axes, record: Record, kind: str, threads: int) -> None:
    for name in STYLES:
        curve = record.curve(name, kind, threads)
        if curve:
            axes.plot(list(curve), list(curve.values()), **_style(name))
    crossover = record.crossover("linattn-favor", EXACT, kind, threads)
    if crossover is not None and crossover.length is not None:
        axes.axvline(crossover.length, color="black", linewidth=1, linestyle=":")
        axes.text(
            crossover.length,
            0.97,
            f" FAVOR+ ahead of exact\n from {float(f'{crossover.length:.2g}'):,.0f} tokens",
            transform=axes.get_xaxis_transform(),
            va="top",
            fontsize=8,
        )
    _axes(axes, record.lengths(kind), f"{kind}: time of one call", duration, base=10)


def _workspace(axes: Axes, record: Record, kind: str) -> None:
    """Draw what tracemalloc saw where it sees all, in NumPy, and the process's growth elsewhere."""
    lengths = sorted({item.length for item in record.memory})
    for name in STYLES:
        found = {
            item.length: max(item.resident if item.traced is None else item.traced, 1 << 12)
            for item in record.memory
            if (item.peer, item.kind) == (name, kind)
        }
        if found:
            axes.plot(list(found), list(found.values()), **_style(name))
    _axes(axes, lengths, f"{kind}: memory beyond inputs and output", size, base=2)


def _axes(axes: Axes, lengths: list[int], title: str, unit: Any, *, base: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=base)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: unit(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)

"""The section and the picture of docs/dask.md that `python -m benchmarks.distributed` makes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.distributed import DIM, HEADS, KINDS, NUM_FEATURES, ROWS, on_paper

__all__ = ["draw", "replace_section", "section"]

HEADING = "## What it costs\n"

SECTION = f"""{HEADING}
`python -m benchmarks.distributed` calls {{tokens:,}} tokens of {HEADS} heads,
d = e = {DIM}, m = {NUM_FEATURES}, float32, on NumPy arrays in memory and on Dask arrays
in memory with the scheduler of threads
({{cpu}}, two cores, BLAS on one thread; outputs stay in blocks).
Load {{load}}; ratios are medians within {{rounds}} rounds:

| | full, s | over NumPy | causal, s | over NumPy |
| --- | ---: | ---: | ---: | ---: |
{{times}}

![Time against rows a block, and on paper against workers](images/dask.png)

Making the graph is counted, making Dask arrays of NumPy arrays is not: `da.from_array` copies them,
which took {{copy:.2f}} s here. In causal attention keys are featured twice. The graph of a thousand
blocks takes {{built[full]:.2f}} ms a block to build in full attention and {{built[causal]:.2f}} ms
in causal attention, for {{tasks[full]:.1f}} and {{tasks[causal]:.1f}} tasks a block before Dask
fuses them.

### A billion tokens on a thousand workers, on paper

From the measured parts: seconds a row on one thread; tasks a block; {{empty:,.0f}} microseconds
of an empty task on a local cluster of two processes, {{chained:.1f}} ms of one that waits for
another; a state of 4 m (e + 1) bytes for each block and head, {{state:,}} for two heads.

| | blocks | states, GB | work, s | scheduler, s | waiting, s | together, s |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{{paper}}

Reading the rows and writing the outputs is left out. States are little: a network of 1 GB/s moves
the states of a worker in milliseconds. The bound is the scheduler, which is one process: it keeps a
thousand workers at work only with blocks of {{balance[full]}} rows (full) and {{balance[causal]}}
rows (causal) at these figures, or in proportion to what a task costs it. So take as long blocks
as fit a worker; beyond that, [MPI or `shard_map`](recipes.md#mpi) has no scheduler. Waiting is a
chain of about 2 sqrt(blocks) merges in causal attention and log8(blocks) in full attention.

"""


def _label(name: str) -> str:
    """Name a row of the table, as ``Dask, 32000 rows, 2 threads`` of the record."""
    *what, threads = name.split(", ")
    said = {"1 threads": "one thread", "2 threads": "two threads"}[threads]
    if len(what) == 1:
        return f"NumPy in memory, {said}"
    return f"Dask, {int(what[1].split()[0]):,} rows a block, {said}"


def _times(record: dict[str, Any]) -> str:
    rows = [
        f"| {_label(name)} | "
        + " | ".join(
            f"{record[kind]['seconds'][name]:.2f} | "
            f"{record[kind]['over NumPy on 2 threads'][name]:.2f}"
            for kind in KINDS
        )
        + " |"
        for name in record["full"]["seconds"]
    ]
    return "\n".join(rows)


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _paper(record: dict[str, Any]) -> str:
    rows = [
        f"| {kind}, {int(rows):,} rows | {parts['blocks']:,.0f} | "
        f"{parts['bytes of states'] / 1e9:.2f} | "
        + " | ".join(_number(parts[n]) for n in ("work", "scheduler", "waiting", "seconds"))
        + " |"
        for kind, by_rows in record["on paper"].items()
        for rows, parts in by_rows.items()
    ]
    return "\n".join(rows)


def _rows_of_balance(record: dict[str, Any], kind: str) -> str:
    """Rows of a block with which a thousand workers and their scheduler take equally long."""
    seconds = 1e-6 * record["microseconds a task"]["many"] * record["graph"][kind]["tasks a block"]
    row = record[kind]["seconds"]["Dask, 32000 rows, 1 threads"] / record["tokens"]
    return f"{round(1000 * seconds / row, -3):,.0f}"


def section(record: dict[str, Any]) -> str:
    """Return the section of the page."""
    task = record["microseconds a task"]
    return SECTION.format(
        **record,
        cpu=record["machine"]["cpu"],
        copy=record["seconds to copy"],
        load=f"{record['load before']:.1f} before and {record['load after']:.1f} after",
        times=_times(record),
        built={kind: record["graph"][kind]["milliseconds a block"] for kind in KINDS},
        tasks={kind: record["graph"][kind]["tasks a block"] for kind in KINDS},
        empty=task["many"],
        chained=1e-3 * task["chain"],
        state=4 * NUM_FEATURES * (DIM + 1) * HEADS,
        paper=_paper(record),
        balance={kind: _rows_of_balance(record, kind) for kind in KINDS},
    )


def replace_section(page: Path, record: dict[str, Any]) -> None:
    """Put the section into the page, in the place of what it had."""
    text = page.read_text(encoding="utf-8")
    old = re.compile(rf"^{HEADING}.*?(?=^## )", re.DOTALL | re.MULTILINE)
    if len(old.findall(text)) != 1:
        raise ValueError(f"{page} must have one section {HEADING.strip()!r} before another one")
    page.write_text(old.sub(lambda _: section(record), text), encoding="utf-8")


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw time by block length, and on paper by workers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    measured, paper = figure.subplots(1, 2)
    workers = [2**i for i in range(13)]
    for kind, colour in zip(KINDS, ("C0", "C1"), strict=True):
        seconds = record[kind]["seconds"]
        times = [seconds[f"Dask, {rows} rows, 2 threads"] for rows in ROWS]
        measured.plot(ROWS, times, ".-", color=colour, label=f"{kind}, Dask")
        numpy = seconds["NumPy, 2 threads"]
        measured.axhline(numpy, ls="--", color=colour, label=f"{kind}, NumPy")
        for rows, style in ((32_000, ":"), (256_000, "-")):
            curve = [on_paper(record, kind == "causal", rows, n, 1e9)["seconds"] for n in workers]
            paper.plot(workers, curve, style, color=colour, label=f"{kind}, {rows:,} rows a block")
    measured.set(xscale="log", xlabel="rows a block", ylabel="seconds", ylim=(0, None))
    measured.set_xticks(ROWS, [f"{rows:,}" for rows in ROWS])
    measured.minorticks_off()
    measured.set_title(f"{record['tokens']:,} tokens on two threads", fontsize=10)
    paper.set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds")
    paper.set_title("on paper: 1,000,000,000 tokens", fontsize=10)
    for axes in (measured, paper):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)

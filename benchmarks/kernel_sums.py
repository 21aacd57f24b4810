"""Kernel sums beside SciPy, scikit-learn, POT and KeOps: equal to what, time, memory.

    python -m benchmarks.kernel_sums [--rounds 3] [--parts lines large] [--pictures docs/images]

Prints the table of docs/kernel_sums.md and what stands below it. Times are of one process's CPU,
each the median over rounds of both ways in turn; memory is NumPy's peak beyond inputs. POT and
KeOps are left out where they are not installed. Set OMP_NUM_THREADS=1. ``--pictures`` only draws
the pictures of that page, and needs matplotlib.
"""

from __future__ import annotations

import argparse
import importlib
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.kernels import (
    kernel_density,
    local_regression,
    log_sum_exp,
    mean_shift,
    sinkhorn,
)

Floats = NDArray[np.float64]

MEBIBYTE = 2**20


class Row(NamedTuple):
    """One line of the table."""

    what: str
    difference: float
    seconds: tuple[float, float]
    mebibytes: tuple[float, float | None]
    beside: str

    def text(self) -> str:
        """Return it as Markdown."""
        (ours, theirs), (memory, their_memory) = self.seconds, self.mebibytes
        beyond = "" if their_memory is None else f"{their_memory:,.1f} MiB"
        return (
            f"| {self.what} | {self.beside} | {self.difference:.0e} | {ours:.2f} s | "
            f"{theirs:.2f} s | {theirs / ours:.1f} | {memory:.1f} MiB | {beyond} |"
        )


def peak(call: Callable[[], Any]) -> float:
    """MiB that NumPy allocates at most beyond what is there."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / MEBIBYTE
    finally:
        tracemalloc.stop()


def compare(
    what: str,
    beside: str,
    calls: tuple[Callable[[], Any], Callable[[], Any]],
    rounds: int,
    *,
    traced: bool = True,
) -> Row:
    """Run both in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    results: list[Any] = [None, None]
    # KeOps compiles in its first call.
    for i in range(rounds if traced else rounds + 1):
        for side, call in enumerate(calls):
            begin = process_time()
            results[side] = np.asarray(call())
            if traced or i > 0:
                seconds[side].append(process_time() - begin)
    difference = float(np.max(np.abs(results[0] - results[1])))
    theirs = peak(calls[1]) if traced else None
    memory = (peak(calls[0]), theirs)
    return Row(what, difference, (median(seconds[0]), median(seconds[1])), memory, beside)


def densities(rounds: int) -> list[Row]:
    """Log densities of 20,000 rows at 5,000 points."""
    from scipy.stats import gaussian_kde
    from sklearn.neighbors import KernelDensity as Theirs

    from linattn.sklearn import KernelDensity

    rng, rows = np.random.default_rng(0), []
    for d in (1, 3, 8):
        data, points = rng.standard_normal((20_000, d)), rng.standard_normal((5_000, d))
        ours, theirs = kernel_density(data), gaussian_kde(data.T)
        calls = partial(ours.logpdf, points), partial(theirs.logpdf, points.T)
        rows.append(compare(f"log density, d = {d}", "SciPy `gaussian_kde`", calls, rounds))
    data, points = rng.standard_normal((20_000, 3)), rng.standard_normal((5_000, 3))
    models = (KernelDensity(0.2).fit(data), Theirs(bandwidth=0.2).fit(data))
    calls = partial(models[0].score_samples, points), partial(models[1].score_samples, points)
    rows.append(compare("log density, d = 3", "scikit-learn `KernelDensity`", calls, rounds))
    return rows


def transport(rounds: int) -> list[Row]:
    """20 updates of Sinkhorn between 4,000 points each."""
    try:
        pot = importlib.import_module("ot")
    except ImportError:
        print("POT is not installed")
        return []
    rng = np.random.default_rng(0)
    x, y = rng.random((4_000, 3)), rng.random((4_000, 3)) + 0.2
    equal = np.full(4_000, 1 / 4_000)

    def theirs() -> Floats:
        cost = pot.dist(x, y)
        log = pot.bregman.sinkhorn_log(
            equal, equal, cost, 0.05, numItermax=20, stopThr=0, log=True, warn=False
        )[1]
        return centred(log["log_u"])

    def ours() -> Floats:
        # POT updates the side of y first.
        return centred(sinkhorn(y, x, reg=0.05, max_iterations=20, tolerance=None).g / 0.05)

    def centred(potential: Floats) -> Floats:
        # A constant may move from one potential to the other.
        return np.asarray(potential - np.mean(potential))

    return [compare("20 updates of Sinkhorn, d = 3", "POT `sinkhorn_log`", (ours, theirs), rounds)]


def keops(rounds: int) -> list[Row]:
    """Log sums of 4,096 x 4,096 kernels by compiled code."""
    try:
        lazy = importlib.import_module("pykeops.numpy").LazyTensor
    except Exception as error:  # its import looks for a compiler
        print(f"KeOps is left out: {error!r}")
        return []
    rng, rows = np.random.default_rng(0), []
    for d in (3, 32):
        x, y = rng.standard_normal((2, 4_096, d))

        def theirs(x: Floats = x, y: Floats = y) -> Floats:
            square = ((lazy(x[:, None, :]) - lazy(y[None, :, :])) ** 2).sum(-1)
            return np.asarray((-square / 2).logsumexp(dim=1))[:, 0]

        calls = partial(log_sum_exp, x, y, bandwidth=1.0), theirs
        row = compare(f"log sums, 4,096 x 4,096, d = {d}", "KeOps", calls, rounds, traced=False)
        rows.append(row)
    return rows


def wrong_queries() -> None:
    """Count queries that scikit-learn's KernelDensity gets wrong, and ours."""
    from scipy.special import logsumexp
    from sklearn.neighbors import KernelDensity as Theirs

    from linattn.sklearn import KernelDensity

    print("| bandwidth | scikit-learn: off by 1e-3 | largest | linattn: off by 1e-9 | largest |")
    print("| --- | --- | --- | --- | --- |")
    for h in (0.2, 0.3, 0.5):
        errors: dict[Any, list[Floats]] = {Theirs: [], KernelDensity: []}
        for seed in range(6):
            rng = np.random.default_rng(seed)
            X, x = rng.standard_normal((1_000, 8)), rng.standard_normal((200, 8))
            square = np.sum(((x[:, None] - X) / h) ** 2, axis=-1)
            log = logsumexp(-square / 2, axis=1)
            right = log - np.log(1_000) - 8 * np.log(h * np.sqrt(2 * np.pi))
            for kind, found in errors.items():
                found.append(np.abs(kind(bandwidth=h).fit(X).score_samples(x) - right))
        cells = []
        for kind, least in ((Theirs, 1e-3), (KernelDensity, 1e-9)):
            error = np.concatenate(errors[kind])
            cells.append(f"{np.sum(error > least)} of {len(error):,} | {np.max(error):.1e}")
        print(f"| {h} | {' | '.join(cells)} |")


def smooth(X: Floats) -> Floats:
    """Return the smooth surface of docs/sklearn.md."""
    a, b, c, d = X.T
    return np.asarray(10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d)


def lines() -> None:
    """Distance from the surface of means and of lines, each with the best of nine bandwidths."""
    print("| rows | degree 0 | bandwidth | degree 1 | bandwidth | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for n, middle in ((2_000, 0.12), (20_000, 0.07), (100_000, 0.055)):
        rng = np.random.default_rng(0)
        X, queries = rng.random((n, 4)), rng.random((1_000, 4))
        y, truth = smooth(X) + rng.standard_normal(n), smooth(queries)
        best = []
        for degree in (0, 1):
            tried = []
            for h in middle * 2.0 ** (np.arange(-4, 5) / 3):
                found = local_regression(queries, X, y[:, None], bandwidth=h, degree=degree)
                tried.append((float(np.sqrt(np.mean((found[:, 0] - truth) ** 2))), float(h)))
            best.append(min(tried))
        (mean, wide), (line, narrow) = best
        print(
            f"| {n:,} | {mean:.3f} | {wide:.3f} | {line:.3f} | {narrow:.3f} | {line / mean:.2f} |"
        )


def large() -> None:
    """Memory and time of 20,000 x 20,000 pairs, which would be 3,052 MiB."""
    x, y = np.random.default_rng(0).standard_normal((2, 20_000, 3))
    plan: Any = None

    def updates() -> None:
        nonlocal plan
        plan = sinkhorn(x, y, reg=2.0, tolerance=1e-8)

    print("20,000 x 20,000 points of 3 coordinates: MiB beyond inputs, CPU seconds")
    calls = {
        "log_sum_exp": lambda: log_sum_exp(x, y, bandwidth=0.5),
        "sinkhorn": updates,
        "apply": lambda: plan.apply(y),
    }
    log_sum_exp(x[:9], y[:9], bandwidth=0.5)  # modules that a first call imports are no arrays
    for name, call in calls.items():
        begin = process_time()
        mebibytes = peak(call)
        print(f"{name}: {mebibytes:.1f} MiB, {process_time() - begin:.1f} s")
    rows = plan.apply(np.ones((20_000, 1)))[:, 0] * 20_000 - 1
    columns = plan.apply_transpose(np.ones((20_000, 1)))[:, 0] * 20_000 - 1
    print(
        f"marginals after {plan.num_iterations} updates: wrong by {np.mean(np.abs(rows)):.0e} "
        f"and {np.mean(np.abs(columns)):.0e}, sums over points"
    )


def draw(folder: Path) -> None:
    """Draw a density, a regression, a transport and a mean shift."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rng = np.random.default_rng(0)
    angle = rng.uniform(0, np.pi, 600)
    moon = np.stack([np.cos(angle), np.sin(angle)], 1) + 0.12 * rng.standard_normal((600, 2))
    data = np.concatenate([moon[:300], np.array([1.0, 0.4]) - moon[300:]])

    def density(axes: Any) -> None:
        sides = np.linspace(-1.7, 2.6, 150), np.linspace(-1.2, 1.7, 110)
        grid = np.stack(np.meshgrid(*sides), -1)
        values = kernel_density(data, 0.2).pdf(grid.reshape(-1, 2)).reshape(110, 150)
        axes.contourf(*sides, values, levels=12, cmap="Blues")
        axes.plot(*data.T, ".", color="black", markersize=1.5)
        axes.set_title("kernel_density(data, 0.2)")

    def regression(axes: Any) -> None:
        x = np.sort(rng.random(150))[:, None]
        truth = 2 * x + np.sin(12 * x)
        y = truth + 0.25 * rng.standard_normal(x.shape)
        at = np.linspace(0, x[-1], 300).reshape(-1, 1)
        axes.plot(x, y, ".", color="silver", label="data")
        axes.plot(x, truth, "--", color="black", linewidth=1, label="truth")
        for degree, colour in ((0, "tab:orange"), (1, "tab:blue")):
            fit = local_regression(at, x, y, bandwidth=0.07, degree=degree)
            axes.plot(at, fit, color=colour, label=f"degree {degree}")
        axes.legend(frameon=False)
        axes.set_title("local_regression, bandwidth 0.07")

    def transported(axes: Any) -> None:
        x, y = moon[:120] * 0.8, rng.normal((3.2, 0.6), (0.25, 0.5), (150, 2))
        to = sinkhorn(x, y, reg=0.05, tolerance=1e-6, max_iterations=5_000).barycentric(y)
        axes.plot(*np.stack([x, to]).transpose(2, 0, 1), color="silver", linewidth=0.5, zorder=0)
        for points, colour in ((x, "tab:blue"), (y, "tab:orange")):
            axes.plot(*points.T, ".", color=colour)
        axes.plot(*to.T, "x", color="black", markersize=3)
        axes.set_title("sinkhorn(x, y, reg=0.05).barycentric(y)")

    def shifted(axes: Any) -> None:
        centres = np.array([[0, 0], [3, 0.5], [1.2, 2.6]])
        points = np.concatenate([c + 0.6 * rng.standard_normal((60, 2)) for c in centres])
        paths = [points]
        for _ in range(30):
            step = mean_shift(paths[-1], points, bandwidth=0.6, max_iterations=1, tolerance=None)
            paths.append(step)
        modes = np.rint(paths[-1] * 2)
        _, label = np.unique(modes, axis=0, return_inverse=True)
        axes.plot(*np.stack(paths).transpose(2, 0, 1), color="silver", linewidth=0.5, zorder=0)
        axes.scatter(*points.T, c=np.ravel(label), s=8, cmap="Dark2")
        axes.plot(*paths[-1].T, "x", color="black")
        axes.set_title("mean_shift(points, points, bandwidth=0.6)")

    pictures = {
        "kernel-density": density,
        "kernel-lines": regression,
        "kernel-transport": transported,
        "kernel-mean-shift": shifted,
    }
    for name, picture in pictures.items():
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        picture(figure.add_subplot())
        figure.savefig(folder / f"{name}.png", dpi=100)


PARTS: dict[str, Callable[..., Any]] = {
    "densities": densities,
    "transport": transport,
    "keops": keops,
    "wrong": wrong_queries,
    "lines": lines,
    "large": large,
}


def main() -> None:
    """Print the tables, or draw the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    if given.pictures is not None:
        draw(given.pictures)
        return
    for name in given.parts:
        part = PARTS[name]
        print(f"\n{name}", flush=True)
        if part in (densities, transport, keops):
            rows = part(given.rounds)
            print("| what | beside | difference | linattn | theirs | ratio | memory | theirs |")
            print("| --- | --- | --- | --- | --- | --- | --- | --- |")
            print(*(row.text() for row in rows), sep="\n", flush=True)
        else:
            part()


if __name__ == "__main__":
    main()

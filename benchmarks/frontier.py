"""Error against cost on a text encoder, a speech encoder and photographs: a table and a picture.

    python -m benchmarks.frontier [--length 4096] [--inputs minilm whisper photographs]
        [--heads 2] [--out FILE.png] [--record FILE.json] [--against FILE.json]

The cost is what a query is weighed against, in the mean: exact keys, and columns of a map or of a
low rank. Errors are relative Frobenius errors of a head's output, of the median head and of the
worst; each head takes the best settings of a way. The ways:

* linattn's landmarks, with exact clusters, and with the query's own key exact too;
* "k-means, twenty lines": a cluster counts as its mean key and value, with half the variance of its
  keys in its logit, and the clusters of largest weight count exactly;
* the largest keys of each row, and a truncated singular value decomposition: both need all weights,
  and bound what is sparse and what has a low rank;
* the clusters of `linattn.attention`, which chooses among these settings by its estimates.

``--record FILE.json`` measures landmarks, exact clusters and the twenty lines only, and writes the
curves. They need public names only: an older revision runs them once `by_attention` and its imports
are cut out. ``--against FILE.json`` compares with such a record: at equal cost, the median error of
linattn's best way over the better of the recorded ones, and the geometric mean of these ratios over
the inputs. Inputs are those of real_inputs.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

import linattn
from benchmarks.real_inputs import INPUTS
from linattn._driver.problem import exact_problem
from linattn.automatic._curves import error_curve
from linattn.automatic._fit import Clusters
from linattn.automatic._heads import Given
from linattn.automatic._tokens import HostTokens, Rectangle
from linattn.feature_maps import LandmarkFeatures

Floats = NDArray[Any]

MODELS = ("minilm", "whisper", "photographs")
SIZES = (32, 64, 128, 256, 512)
EXACT = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CLUSTERS = (32, 64, 128, 256)
STEPS = 4
"""Lloyd steps of the twenty lines."""

MARKED, SMALL, SAME, MOST_QUERIES = 256, 1e-6, 1e-8, 0.95
"""How many keys are drawn to count exact ones, the size of their marks over the values, the largest
difference of logs that are the same, and the share of queries that no choice of keys suits."""

FITTED, OWN, MEANS = "exact clusters", "own key, exact clusters", "k-means, twenty lines"
ALONE, CALL, LARGEST, LOW_RANK = "landmarks", "attention", "largest keys", "low rank"
OURS, BEFORE = (ALONE, FITTED, OWN, CALL), (ALONE, FITTED, MEANS)
COSTS = (128, 256, 512)
"""Keys and columns at which ways are compared."""

Curve = list[tuple[float, float]]
"""Cost and error of a head, for each setting."""


class Head(NamedTuple):
    """One head: query, key and value ``(L, d or e)``, its options, and all weights of its keys."""

    query: Floats
    key: Floats
    value: Floats
    options: dict[str, Any]
    logits: Floats
    weights: Floats

    def error(self, output: Any) -> float:
        """Relative error of an output."""
        exact = self.weights @ self.value.astype(float)
        return float(np.linalg.norm(output - exact) / np.linalg.norm(exact))


def heads(name: str, length: int, count: int) -> Iterator[Head]:
    """Yield some heads of each case of an input."""
    for case in INPUTS[name](length, 0):
        number = len(case.query)
        for i in np.unique(np.linspace(0, number - 1, min(count, number)).round().astype(int)):
            query, key, value = case.query[i], case.key[i], case.value[i]
            options = {"scale": query.shape[-1] ** -0.5, **case.options}
            if "key_bias" in options:
                options["key_bias"] = options["key_bias"][i]
            logits = options["scale"] * query.astype(float) @ key.T.astype(float)
            logits += options.get("key_bias", 0)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            yield Head(query, key, value, options, logits, weights)


# Ways -------------------------------------------------------------------------------------------

Point = tuple[str, float, float]
"""Way, cost and error."""


def exact_of(m: int) -> list[int]:
    """Return the numbers of exact clusters for m clusters: at most half of them."""
    return [c for c in EXACT if 2 * c <= m]


def by_landmarks(head: Head, windows: tuple[int | None, ...] = (None, 1)) -> Iterator[Point]:
    """Landmarks of linattn, with exact clusters, and with a window of one token."""
    biases = {name: head.options[name] for name in ("key_bias",) if name in head.options}
    marked, attend = Marked(head), cast("Any", linattn.linear_attention)
    for m in CLUSTERS:
        phi = LandmarkFeatures.fit(
            head.query, head.key, num_features=m, rng=0, scale=head.options["scale"], **biases
        )
        for own, c in product(windows, exact_of(m)):
            if c or own is None:
                chosen = {"exact_clusters": c or None, "exact_window": own, **biases}
                output = attend(*marked.arrays, phi, **chosen)
                way = OWN if own else FITTED if c else ALONE
                yield way, m + marked.exact_pairs(output), marked.error(output)


class Marked:
    """A head with values of its own for some keys, which show the weights of an output.

    These values are too small to change a choice. Logs of weights less their logits are the log
    normalizer of a query for every key that it weighs exactly. So exact keys are counted without
    any knowledge of how they are chosen. Keys that are exact for all queries are not counted: they
    are alone in their cluster, whose column counts.
    """

    def __init__(self, head: Head) -> None:
        length, self.head = len(head.key), head
        self.drawn = np.random.default_rng(1).choice(length, min(MARKED, length), replace=False)
        marks = np.zeros((length, len(self.drawn)))
        marks[self.drawn, np.arange(len(self.drawn))] = SMALL * np.abs(head.value).mean()
        value = np.concatenate([head.value, marks], axis=-1)
        self.arrays = tuple(x.astype(float) for x in (head.query, head.key, value))

    def error(self, output: Floats) -> float:
        """Relative error of an output."""
        return self.head.error(output[:, : self.head.value.shape[-1]])

    def exact_pairs(self, output: Floats) -> float:
        """Return the mean number of keys that a query weighs exactly."""
        with np.errstate(divide="ignore"):
            logs = np.log(np.maximum(output[:, self.head.value.shape[-1] :], 0))
        off = logs - self.head.logits[:, self.drawn]
        ordered = np.sort(np.where(np.isfinite(off), off, np.inf), axis=-1)
        with np.errstate(invalid="ignore"):
            equal = np.diff(ordered, axis=-1) < SAME
        run = most = np.ones(len(off))
        normalizer = np.full(len(off), np.nan)
        for column, value in zip(equal.T, ordered[:, 1:].T, strict=True):
            run = np.where(column, run + 1, 1)
            normalizer = np.where(run > most, value, normalizer)
            most = np.maximum(most, run)
        exact = np.abs(off - normalizer[:, None]) < SAME * off.shape[-1]
        counted = exact[:, exact.mean(axis=0) < MOST_QUERIES]
        return float(len(self.head.key) * counted.sum() / exact.size)


def by_means(head: Head) -> Iterator[Point]:
    """Cluster keys by a few Lloyd steps: the twenty lines."""
    scale, bias = head.options["scale"], head.options.get("key_bias", np.zeros(len(head.key)))
    centred = head.query - head.query.mean(axis=0)
    sizes, axes = np.linalg.eigh((centred.T @ centred / len(centred)).astype(float))
    root = np.sqrt(np.maximum(sizes, 1e-6 * sizes.max()))
    key, query = head.key @ axes * root, scale * (head.query @ axes / root)
    values, mass = np.c_[head.value, key], np.exp(bias - bias.max())
    for m in CLUSTERS:
        centre = key[np.random.default_rng(0).choice(len(key), m, replace=False)]
        for step in range(STEPS + 1):
            of_key = np.argmin(np.sum(centre**2, -1) - 2 * key @ centre.T, axis=-1)
            if step < STEPS:
                found = np.unique(of_key)
                centre[found] = [key[of_key == c].mean(axis=0) for c in found]
        total = np.bincount(of_key, mass, minlength=m)
        member = (of_key == np.arange(m)[:, None]) * mass / np.maximum(total, 1e-300)[:, None]
        mean = member @ values
        variance = member @ key**2 - mean[:, head.value.shape[-1] :] ** 2
        with np.errstate(divide="ignore"):
            logs = query @ mean[:, head.value.shape[-1] :].T + query**2 @ variance.T / 2
            logs += np.log(total) + bias.max()
        order = np.argsort(-logs, axis=-1)
        top = head.logits.max(axis=-1, keepdims=True)
        weights, coarse = np.exp(head.logits - top), np.exp(np.minimum(logs - top, 50))
        for c in exact_of(m):
            near = np.zeros(logs.shape, bool)
            np.put_along_axis(near, order[:, :c], values=True, axis=1)
            exact, rest = weights * near[:, of_key], np.where(near, 0, coarse)
            output = exact @ head.value + rest @ mean[:, : head.value.shape[-1]]
            output /= (exact.sum(axis=-1) + rest.sum(axis=-1))[:, None]
            pairs = m + near[:, of_key].sum(axis=-1).mean()
            yield MEANS, float(pairs), head.error(output)


def by_all_weights(head: Head) -> Iterator[Point]:
    """Largest keys and low rank."""
    left, sizes, right = low_rank(head.weights.astype(np.float32), max(SIZES))
    for r in SIZES:
        yield LOW_RANK, r, head.error((left[:, :r] * sizes[:r]) @ (right[:r] @ head.value))
        least = np.partition(head.weights, -r, axis=-1)[:, -r, None]
        kept = np.where(head.weights >= least, head.weights, 0)
        output = kept @ head.value / kept.sum(axis=-1, keepdims=True)
        yield LARGEST, r, head.error(output)


def low_rank(weights: Floats, rank: int) -> tuple[Floats, Floats, Floats]:
    """Return a truncated singular value decomposition, by two subspace iterations."""
    basis = np.random.default_rng(0).standard_normal((weights.shape[-1], rank + 16))
    for _ in range(3):
        basis = np.linalg.qr(weights @ basis.astype(weights.dtype))[0]
        last = basis
        basis = np.linalg.qr(weights.T @ basis)[0]
    left, sizes, right = np.linalg.svd(last.T @ weights, full_matrices=False)
    return (last @ left)[:, :rank], sizes[:rank], right[:rank]


def by_attention(head: Head) -> Iterator[Point]:
    """Clusters of `linattn.attention`, judged on all rows by the code that judges a call."""
    arrays = (x.astype(float) for x in (head.query, head.key, head.value))
    scale, bias = head.options["scale"], head.options.get("key_bias")
    rng = np.random.default_rng(0)
    problem = exact_problem(*arrays, is_causal=False, scale=scale, key_bias=bias)
    given = Given(problem, None, scale, None, rng, bias).with_bias_in_keys()
    tokens = HostTokens(given.problem, None, rng)
    rows, where = tokens.rows((), len(head.query)), Rectangle(0, len(head.query), 0, len(head.key))
    for m in CLUSTERS:
        of_call, levels = tokens.head((), rows, where), tuple(exact_of(m))
        clusters = Clusters.of(of_call, tokens.queries(()), m, scale, rng)
        curve = error_curve(of_call, clusters, scale, levels)
        for share, error in zip(curve.share, curve.error, strict=True):
            yield CALL, m + share * len(head.key), float(error)


Way = Callable[[Head], Iterator[Point]]
WAYS: tuple[Way, ...] = (by_landmarks, by_means, by_all_weights, by_attention)
RECORDED: tuple[Way, ...] = (partial(by_landmarks, windows=(None,)), by_means)

Curves = dict[str, list[Curve]]
"""Curves of heads by ways; a way may lack heads that were exact."""


# Curves -----------------------------------------------------------------------------------------


def measure(name: str, length: int, count: int, ways: tuple[Way, ...]) -> Curves:
    """Return the curves of all heads by ways."""
    curves: Curves = {}
    for number, head in enumerate(heads(name, length, count)):
        print(f"{name}, head {number}", file=sys.stderr, flush=True)
        found: dict[str, Curve] = {}
        for way in ways:
            for method, cost, error in way(head):
                found.setdefault(method, []).append((cost, error))
        for method, curve in found.items():
            curves.setdefault(method, []).append(curve)
    return curves


def at(curve: Curve, cost: float) -> float:
    """Return the least error within a cost, interpolated in logarithms; NaN if none is so cheap."""
    kept: Curve = []
    for point in sorted(curve):
        if not kept or point[1] < kept[-1][1]:
            kept.append((point[0], point[1]))
    costs, errors = np.log(np.transpose(kept))
    return (
        float("nan") if np.log(cost) < costs[0] else np.exp(np.interp(np.log(cost), costs, errors))
    )


def over_heads(curves: list[Curve], cost: float, take: Callable[[Any], Any] = np.median) -> float:
    """Return the median error of heads at a cost, or another number; NaN unless all have one."""
    return float(take([at(curve, cost) for curve in curves]))


def table(curves: Curves) -> Iterator[str]:
    """Yield the rows of the table of one input: median error (largest) by cost."""
    yield f"{'':<24}  {'  '.join(f'{cost:>14}' for cost in COSTS)}"
    for way, of_heads in curves.items():
        cells = []
        for cost in COSTS:
            most = over_heads(of_heads, cost, np.max)
            cells.append(f"{over_heads(of_heads, cost):.3f} ({most:.2f})")
        yield f"{way:<24}  {'  '.join(f'{cell:>14}' for cell in cells)}"


def against(now: dict[str, Curves], then: dict[str, Curves]) -> Iterator[str]:
    """Yield the ratios of median errors at equal cost, by input, and their geometric means."""
    names = [name for name in now if name in then]
    yield f"{'cost':>6}  {'  '.join(f'{name:>12}' for name in names)}  {'mean':>6}"
    for cost in COSTS:
        ratios = []
        for name in names:
            ours = [over_heads(now[name][way], cost) for way in OURS if way in now[name]]
            theirs = [over_heads(then[name][way], cost) for way in BEFORE]
            ratios.append(float(np.nanmin(ours) / np.nanmin(theirs)))
        cells = "  ".join(f"{ratio:>12.2f}" for ratio in ratios)
        yield f"{cost:>6}  {cells}  {np.exp(np.mean(np.log(ratios))):>6.2f}"


def draw(panels: dict[str, Curves], length: int, path: Path) -> None:
    """Draw errors against costs, a column for each input: median heads above, worst ones below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(4.2 * len(panels), 7.4), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False)
    costs = np.geomspace(32, length / 2, 60)
    for column, (name, curves) in zip(all_axes.T, panels.items(), strict=True):
        for number, (way, of_heads) in enumerate(curves.items()):
            style = "--" if way in (MEANS, LARGEST, LOW_RANK) else "-"
            takes: tuple[Callable[[Any], Any], ...] = (np.median, np.max)
            for axes, take in zip(column, takes, strict=True):
                errors = [over_heads(of_heads, cost, take) for cost in costs]
                axes.plot(costs, errors, style, label=way, color=f"C{number}")
        column[0].set_title(f"{name}, {length:,} tokens")
        for axes in column:
            axes.set(xscale="log", yscale="log", xlim=(30, length / 2))
            axes.grid(alpha=0.3)
            ticks = [2**i for i in range(5, length.bit_length() - 1)]
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
        column[1].set_xlabel("keys and columns a query is weighed against")
    for axes, what in zip(all_axes[:, 0], ("median", "worst"), strict=True):
        axes.set(ylabel=f"error of the {what} head", ylim=(1e-3, 2))
    handles = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncol=4)
    figure.savefig(path)


def main() -> None:
    """Print a table for each input, compare, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS), default=list(MODELS))
    parser.add_argument("--heads", type=int, default=2, help="of each layer or photograph")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    panels, ways = {}, WAYS if options.record is None else RECORDED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name in options.inputs:
            panels[name] = measure(name, options.length, options.heads, ways)
            print(f"\n{name}, {options.length:,} tokens: median error (largest) by cost")
            print("\n".join(table(panels[name])), flush=True)
    if options.record is not None:
        options.record.write_text(json.dumps(panels) + "\n", encoding="utf-8")
    if options.against is not None:
        then = json.loads(options.against.read_text(encoding="utf-8"))
        print(f"\nmedian error over the better way of {options.against.name}, at equal cost")
        print("\n".join(against(panels, then)))
    if options.out is not None:
        draw(panels, options.length, options.out)


if __name__ == "__main__":
    main()

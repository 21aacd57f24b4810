"""Error against cost on a text encoder, a speech encoder and photographs: a table and a picture.

    python -m benchmarks.frontier [--length 2048] [--inputs minilm whisper photographs]
        [--heads 3] [--out FILE.png] [--record FILE.json] [--against FILE.json]

The cost is what a query is weighed against, in the mean: exact keys, and columns of a map or of a
low rank. Errors are relative Frobenius errors of a head's output, of the median head and of the
worst. Each curve is the best that a way reaches over its settings. The ways:

* linattn's landmarks, with exact clusters, and with the query's own key exact too;
* "k-means, twenty lines": a cluster counts as its mean key and value, with half the variance of its
  keys in its logit, and the clusters of largest weight count exactly;
* the largest keys of each row, and a truncated singular value decomposition: both need all weights,
  and bound what is sparse and what has a low rank;
* `linattn.attention` at several tolerances; its cost includes fits and the rows that judge it.

``--record FILE.json`` measures landmarks, exact clusters and the twenty lines only, and writes the
curves. Every call is of a public name, so that it runs in older revisions. ``--against FILE.json``
compares with such a record: at equal cost, the median error of linattn's best way over the better
of the recorded ones, and the geometric mean of these ratios over the inputs. Inputs are those of
real_inputs.py.
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import linattn
from benchmarks.real_inputs import INPUTS
from linattn.feature_maps import LandmarkFeatures

Floats = NDArray[Any]

MODELS = ("minilm", "whisper", "photographs")
SIZES = (32, 64, 128, 256, 512)
CLUSTERS = (0, 2, 4, 8, 16, 32)
LANDMARKS = (64, 128, 256)
TOLERANCES = (0.02, 0.05, 0.1, 0.2)
STEPS, COUNTED = 4, 96
"""Lloyd steps of the twenty lines, and how many keys are drawn to count exact pairs."""

FITTED, OWN, MEANS = "exact clusters", "own key, exact clusters", "k-means, twenty lines"
ALONE, CALL, LARGEST, LOW_RANK = "landmarks", "attention", "largest keys", "low rank"
OURS, BEFORE = (ALONE, FITTED, OWN), (ALONE, FITTED, MEANS)
COSTS = (128, 256, 512)
"""Keys and columns at which ways are compared."""

Curve = list[list[float]]
"""Cost, median error and largest error, a row for each setting."""


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

Point = tuple[str, str, float, float]
"""Way, setting, cost and error."""


def by_landmarks(head: Head, windows: tuple[int | None, ...] = (None, 1)) -> Iterator[Point]:
    """Landmarks of linattn, with exact clusters, and with a window of one token."""
    options = head.options
    attend: Any = linattn.linear_attention
    for m in LANDMARKS:
        fit = {name: options[name] for name in ("scale", "key_bias") if name in options}
        phi = LandmarkFeatures.fit(head.query, head.key, num_features=m, rng=0, **fit)
        biases = {name: options[name] for name in ("key_bias",) if name in options}
        free = 0.0
        for own, c in product(windows, CLUSTERS):
            if own and not c:
                continue
            chosen: dict[str, Any] = {"exact_clusters": c or None, "exact_window": own, **biases}
            pairs = exact_pairs(head, phi, chosen)
            if not c:
                free = pairs
            output = attend(head.query, head.key, head.value, phi, **chosen)
            way = OWN if own else FITTED if c else ALONE
            yield way, f"{m}, {c}", m + pairs - free, head.error(output)


def exact_pairs(head: Head, phi: LandmarkFeatures, chosen: dict[str, Any]) -> float:
    """Return the mean number of keys that a query weighs exactly, from keys drawn at random.

    Values of 1 at one key and 0 elsewhere make the output the weights of these keys. A weight is
    exact if it is the exponential of the logit less the log normalizer. So no knowledge of how keys
    are chosen is needed. Keys alone in their cluster count as well: what landmarks find without
    exact clusters is to be subtracted.
    """
    length = len(head.key)
    drawn = np.random.default_rng(1).choice(length, min(COUNTED, length), replace=False)
    value = np.zeros((length, len(drawn)))
    value[drawn, np.arange(len(drawn))] = 1
    query, key = head.query.astype(float), head.key.astype(float)
    attend: Any = linattn.linear_attention
    found, log = attend(query, key, value, phi, return_log_normalizer=True, **chosen)
    with np.errstate(divide="ignore"):
        off = np.abs(np.log(found) + log[:, None] - head.logits[:, drawn])
    return float(length * np.mean(off < 1e-7))


def by_means(head: Head) -> Iterator[Point]:
    """Cluster keys by a few Lloyd steps: the twenty lines."""
    scale, bias = head.options["scale"], head.options.get("key_bias", np.zeros(len(head.key)))
    centred = head.query - head.query.mean(axis=0)
    sizes, axes = np.linalg.eigh((centred.T @ centred / len(centred)).astype(float))
    root = np.sqrt(np.maximum(sizes, 1e-6 * sizes.max()))
    key, query = head.key @ axes * root, scale * (head.query @ axes / root)
    values, mass = np.c_[head.value, key], np.exp(bias - bias.max())
    for m in LANDMARKS:
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
        for c in CLUSTERS:
            near = np.zeros(logs.shape, bool)
            np.put_along_axis(near, order[:, :c], values=True, axis=1)
            exact, rest = weights * near[:, of_key], np.where(near, 0, coarse)
            output = exact @ head.value + rest @ mean[:, : head.value.shape[-1]]
            output /= (exact.sum(axis=-1) + rest.sum(axis=-1))[:, None]
            pairs = m + near[:, of_key].sum(axis=-1).mean()
            yield MEANS, f"{m}, {c}", float(pairs), head.error(output)


def by_all_weights(head: Head) -> Iterator[Point]:
    """Largest keys and low rank."""
    left, sizes, right = low_rank(head.weights.astype(np.float32), max(SIZES))
    for r in SIZES:
        yield LOW_RANK, str(r), r, head.error((left[:, :r] * sizes[:r]) @ (right[:r] @ head.value))
        least = np.partition(head.weights, -r, axis=-1)[:, -r, None]
        kept = np.where(head.weights >= least, head.weights, 0)
        output = kept @ head.value / kept.sum(axis=-1, keepdims=True)
        yield LARGEST, str(r), r, head.error(output)


def low_rank(weights: Floats, rank: int) -> tuple[Floats, Floats, Floats]:
    """Return a truncated singular value decomposition, by two subspace iterations."""
    basis = np.random.default_rng(0).standard_normal((weights.shape[-1], rank + 16))
    for _ in range(3):
        basis = np.linalg.qr(weights @ basis.astype(weights.dtype))[0]
        last = basis
        basis = np.linalg.qr(weights.T @ basis)[0]
    left, sizes, right = np.linalg.svd(last.T @ weights, full_matrices=False)
    return (last @ left)[:, :rank], sizes[:rank], right[:rank]


def by_call(head: Head) -> Iterator[Point]:
    """Call `linattn.attention`: the cost is of all that it computes."""
    arrays = (head.query[None], head.key[None], head.value[None])
    options = dict(head.options)
    if "key_bias" in options:
        options["key_bias"] = options["key_bias"][None]
    attend: Any = linattn.attention
    for tolerance in TOLERANCES:
        output, report = attend(*arrays, tolerance=tolerance, rng=0, return_report=True, **options)
        pairs = float(np.mean(report.head_pairs)) / len(head.query)
        yield CALL, str(tolerance), pairs, head.error(output[0])


Way = Callable[[Head], Iterator[Point]]
WAYS: tuple[Way, ...] = (by_landmarks, by_means, by_all_weights, by_call)
RECORDED: tuple[Way, ...] = (partial(by_landmarks, windows=(None,)), by_means)


# Curves -----------------------------------------------------------------------------------------


def measure(name: str, length: int, count: int, ways: tuple[Way, ...]) -> dict[str, Curve]:
    """Return the curve of each way, all settings."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number, head in enumerate(heads(name, length, count)):
        print(f"{name}, head {number}", file=sys.stderr, flush=True)
        for way in ways:
            for method, setting, cost, error in way(head):
                found.setdefault((method, setting), []).append((cost, error))
    curves: dict[str, Curve] = {}
    for (method, _), points in found.items():
        cost, error = np.transpose(points)
        row = [float(np.median(cost)), float(np.median(error)), float(error.max())]
        curves.setdefault(method, []).append(row)
    return curves


def best(curve: Curve, column: int = 1) -> Floats:
    """Return the settings that no cheaper one beats, ``(2, n)``: costs and errors."""
    kept: list[tuple[float, float]] = []
    for row in sorted(curve):
        if not kept or row[column] < kept[-1][1]:
            kept.append((row[0], row[column]))
    return np.transpose(kept)


def at(curve: Curve, cost: float, column: int = 1) -> float:
    """Return the error at a cost, interpolated in logarithms; NaN if no setting is so cheap."""
    costs, values = best(curve, column)
    if cost < costs[0]:
        return float("nan")
    return float(np.exp(np.interp(np.log(cost), np.log(costs), np.log(values))))


def table(curves: dict[str, Curve]) -> Iterator[str]:
    """Yield the rows of the table of one input: median error (largest) by cost."""
    for way, curve in curves.items():
        if way == CALL:
            cells = [f"{cost:.0f}: {mid:.3f} ({most:.2f})" for cost, mid, most in curve]
        else:
            cells = [f"{at(curve, cost):.3f} ({at(curve, cost, 2):.2f})" for cost in COSTS]
        yield f"{way:<24}  {'  '.join(f'{cell:>14}' for cell in cells)}"


def against(now: dict[str, dict[str, Curve]], then: dict[str, dict[str, Curve]]) -> Iterator[str]:
    """Yield the ratios of median errors at equal cost, by input, and their geometric means."""
    names = [name for name in now if name in then]
    yield f"{'cost':>6}  {'  '.join(f'{name:>12}' for name in names)}  {'mean':>6}"
    for cost in COSTS:
        ratios = []
        for name in names:
            ours = np.nanmin([at(now[name][way], cost) for way in OURS if way in now[name]])
            theirs = np.nanmin([at(then[name][way], cost) for way in BEFORE])
            ratios.append(float(ours / theirs))
        cells = "  ".join(f"{ratio:>12.2f}" for ratio in ratios)
        yield f"{cost:>6}  {cells}  {np.exp(np.mean(np.log(ratios))):>6.2f}"


def draw(panels: dict[str, dict[str, Curve]], length: int, path: Path) -> None:
    """Draw errors against costs, a column for each input: median heads above, worst ones below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(4.2 * len(panels), 7.4), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False)
    for column, (name, curves) in zip(all_axes.T, panels.items(), strict=True):
        for number, (way, curve) in enumerate(curves.items()):
            for place, axes in enumerate(column, start=1):
                dashed = way in (MEANS, LARGEST, LOW_RANK)
                style = "x" if way == CALL else ".--" if dashed else ".-"
                points = np.transpose(curve)[[0, place]] if way == CALL else best(curve, place)
                axes.plot(*points, style, label=way, color=f"C{number}")
        column[0].set_title(f"{name}, {length:,} tokens")
        for axes in column:
            axes.set(xscale="log", yscale="log", xlim=(30, 1.1 * length))
            axes.grid(alpha=0.3)
            ticks = [2**i for i in range(5, length.bit_length())]
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
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS), default=list(MODELS))
    parser.add_argument("--heads", type=int, default=3, help="of each layer or photograph")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    panels, ways = {}, WAYS if options.record is None else RECORDED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name in options.inputs:
            panels[name] = measure(name, options.length, options.heads, ways)
            print(f"\n{name}, {options.length:,} tokens: median error (largest) at a cost of "
                  f"{', '.join(map(str, COSTS))}; attention at its own")  # fmt: skip
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

"""Error against cost on long real sequences: the frontier, as a table and a picture.

    python benchmarks/frontier.py [--lengths 1024 3584 7168] [--layers 1 3 5] [--heads 4]
        [--out FILE.png]

Queries, keys and values of all-MiniLM-L6-v2 (see examples/minilm.py for what it needs) on windows
of 512 tokens of unlike documents, documentation and source code in turn, one after the other. The
cost is what a query is weighed against, in the mean: landmarks, keys, or columns of a low rank.
Errors are relative Frobenius errors of a head's output: the median over heads, and the largest.

Landmarks alone, with an exact window of 32, and with exact clusters are linattn's. The others are
dense forms: the Nystrom weights of pivoted keys (WildCat's formula), the largest keys of each row,
and a truncated singular value decomposition of all weights. The last two need all pairs to be made:
bounds of what is sparse and of what has a low rank.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn.feature_maps import LandmarkFeatures

Floats = NDArray[Any]

TOKENS, WINDOW = 512, 32
SIZES = (32, 64, 128, 256, 512)
CLUSTERS = (2, 4, 8, 16, 32)


class Point(NamedTuple):
    """One method at one setting, on one head."""

    method: str
    setting: int
    pairs: float
    error: float


class Summary(NamedTuple):
    """One method at one setting: medians over heads, and the largest error."""

    pairs: float
    error: float
    largest: float


# Inputs -----------------------------------------------------------------------------------------


def documents(tokenize: Callable[[str], list[int]], count: int) -> NDArray[np.int64]:
    """Return so many documents of documentation and source code in turn, ``(count, 512)``."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    kinds = [
        [topics[name] for name in sorted(topics)],
        [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))],
    ]
    start, end = tokenize("")
    found: list[list[list[int]]] = []
    for texts in kinds:
        tokens = (tokenize(text[: 8 * TOKENS])[1:-1] for text in texts)
        long = (ids for ids in tokens if len(ids) >= TOKENS - 2)
        found.append([[start, *ids[: TOKENS - 2], end] for ids in islice(long, count)])
    both = [document for pair in zip(*found, strict=False) for document in pair]
    return np.asarray(both[:count], dtype=np.int64)


def inputs(length: int, layers: list[int], heads: int) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield a name, query, key and value of each head, ``(length, 32)``."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    minilm: Any = import_module("minilm_model")

    encoder, tokenize = minilm.load()
    trace = minilm.Trace.of(encoder, documents(tokenize, -(-length // TOKENS)))
    for layer in layers:
        arrays = [np.concatenate(list(x), axis=-2)[:, :length] for x in trace.inputs[layer]]
        for head in np.linspace(0, len(arrays[0]) - 1, heads).round().astype(int):
            q, k, v = (np.ascontiguousarray(x[head]) for x in arrays)
            yield f"layer {layer} head {head}", q, k, v


# Methods ----------------------------------------------------------------------------------------


def by_landmarks(q: Floats, k: Floats, v: Floats, error: Callable[[Any], float]) -> Iterator[Point]:
    """Landmarks alone, with a window, and with exact clusters."""
    for m in SIZES:
        phi = LandmarkFeatures.fit(q, k, num_features=m, num_probes=max(128, m), rng=0)
        yield Point("landmarks", m, m, error(linattn.linear_attention(q, k, v, phi)))
        out = linattn.linear_attention(q, k, v, phi, exact_window=WINDOW)
        yield Point(f"landmarks, window of {WINDOW}", m, m + 3 * WINDOW, error(out))
        for c in CLUSTERS:
            out = linattn.linear_attention(q, k, v, phi, exact_clusters=c)
            yield Point(f"{m} landmarks", c, m + exact_keys(q, k, phi, c), error(out))


def exact_keys(q: Floats, k: Floats, phi: LandmarkFeatures, c: int) -> float:
    """Keys that are exact for a query, in the mean: those of the clusters that it chooses."""
    log = phi.key_features(k).log
    assigned, weight = log.argmax(axis=-1), np.exp(log.max(axis=-1))
    apart = k - phi.landmarks[assigned]
    distance = np.sum((apart @ phi.metric) * apart, axis=-1)
    size, weight, distance = (
        np.bincount(assigned, weights=w, minlength=log.shape[-1]) for w in (None, weight, distance)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        bias = np.where(size > 0, np.log(weight / size) + np.log(distance / size) / 2, -np.inf)
    scores = phi.query_features(q).log + bias
    chosen = scores >= np.partition(scores, -c, axis=-1)[:, -c, None]
    return float((chosen @ size).mean())


def by_dense_forms(
    q: Floats, k: Floats, v: Floats, error: Callable[[Any], float]
) -> Iterator[Point]:
    """Pivoted keys, largest keys and low rank, from all weights."""
    logits = q @ k.T / q.shape[-1] ** 0.5
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    left, sizes, right = low_rank(weights, max(SIZES))
    pivots = pivoted_keys(k, max(SIZES))
    for r in SIZES:
        yield Point("low rank", r, r, error((left[:, :r] * sizes[:r]) @ (right[:r] @ v)))
        least = np.partition(weights, -r, axis=-1)[:, -r, None]
        largest = np.where(weights >= least, weights, 0)
        yield Point("largest keys", r, r, error(largest @ v / largest.sum(axis=-1, keepdims=True)))
        yield Point("pivoted keys (WildCat)", r, r, error(nystrom(q, k, v, pivots[:r])))


def low_rank(weights: Floats, rank: int) -> tuple[Floats, Floats, Floats]:
    """Return a truncated singular value decomposition, by two subspace iterations."""
    basis = np.random.default_rng(0).standard_normal((weights.shape[-1], rank + 16))
    for _ in range(3):
        basis = np.linalg.qr(weights @ basis.astype(weights.dtype))[0]
        last = basis
        basis = np.linalg.qr(weights.T @ basis)[0]
    left, sizes, right = np.linalg.svd(last.T @ weights, full_matrices=False)
    return (last @ left)[:, :rank], sizes[:rank], right[:rank]


def kernel(x: Floats, y: Floats) -> Floats:
    """Softmax kernel of centred keys."""
    return np.asarray(np.exp(x @ y.T / x.shape[-1] ** 0.5))


def pivoted_keys(k: Floats, count: int) -> NDArray[np.intp]:
    """Randomly pivoted Cholesky on the kernel of the keys."""
    rng = np.random.default_rng(0)
    k = (k - k.mean(axis=0)).astype(np.float64)
    left = np.exp(np.sum(k * k, axis=-1) / k.shape[-1] ** 0.5)
    factor, chosen = np.zeros((len(k), count)), np.zeros(count, dtype=np.intp)
    for i in range(count):
        chosen[i] = pivot = rng.choice(len(k), p=left / left.sum())
        column = kernel(k, k[pivot, None])[:, 0] - factor[:, :i] @ factor[pivot, :i]
        factor[:, i] = column / max(column[pivot], 1e-300) ** 0.5
        left = np.maximum(left - factor[:, i] ** 2, 0)
        left[pivot] = 0
    return chosen


def nystrom(q: Floats, k: Floats, v: Floats, pivots: NDArray[np.intp]) -> Floats:
    """Attention to pivots with Nystrom weights, its outputs kept in the range of the values."""
    centre = k.mean(axis=0)
    b, k = ((x - centre).astype(np.float64) for x in (k[pivots], k))
    gram = kernel(b, b)
    gram += 1e-10 * np.trace(gram) / len(gram) * np.eye(len(gram))
    both = np.linalg.solve(gram, kernel(b, k) @ np.concatenate([v, np.ones_like(v[:, :1])], -1))
    logits = q @ b.T / q.shape[-1] ** 0.5
    read = np.exp(logits - logits.max(axis=-1, keepdims=True)) @ both
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(read[:, -1:] > 0, read[:, :-1] / read[:, -1:], v.mean(axis=0))
    return np.asarray(np.clip(out, v.min(axis=0), v.max(axis=0)))


# Tables and picture -----------------------------------------------------------------------------


def measure(length: int, layers: list[int], heads: int) -> dict[tuple[str, int], list[Point]]:
    """Return the points of all heads by method and setting."""
    found: dict[tuple[str, int], list[Point]] = {}
    for name, q, k, v in inputs(length, layers, heads):
        print(f"{length:,} tokens, {name}", file=sys.stderr, flush=True)
        exact = linattn.softmax_attention(q, k, v)

        def error(out: Any, exact: Any = exact) -> float:
            return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))

        for method in (by_landmarks, by_dense_forms):
            for point in method(q, k, v, error):
                found.setdefault((point.method, point.setting), []).append(point)
    return found


def summary(found: dict[tuple[str, int], list[Point]]) -> dict[str, list[Summary]]:
    """Sum up each method, setting by setting."""
    curves: dict[str, list[Summary]] = {}
    for (method, _), points in found.items():
        errors = [point.error for point in points]
        pairs = float(np.median([point.pairs for point in points]))
        curves.setdefault(method, []).append(Summary(pairs, float(np.median(errors)), max(errors)))
    return curves


def draw(panels: dict[int, dict[str, list[Summary]]], path: Path) -> None:
    """Draw errors against pairs, a column for each length: median heads above, worst ones below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(4.8 * len(panels), 8), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(2, len(panels), sharey="row", sharex="col", squeeze=False)
    for column, (length, curves) in zip(all_axes.T, panels.items(), strict=True):
        clusters = [name for name in curves if name.endswith(" landmarks")]
        for name, curve in curves.items():
            pairs, *errors = zip(*curve, strict=True)
            for axes, values in zip(column, errors, strict=True):
                if name in clusters:
                    shade = 0.85 - 0.16 * clusters.index(name)
                    label, style = f"{name}, exact clusters", {"color": (shade, 0.1, 0.2)}
                    axes.plot(pairs, values, ".-", label=label, **style)
                else:
                    axes.plot(pairs, values, "--", label=name)
        column[0].set_title(f"{length:,} tokens")
        for axes in column:
            axes.set(xscale="log", yscale="log", ylim=(1e-2, 1), xlim=(30, 1100))
            axes.grid(alpha=0.3)
            axes.xaxis.set_major_locator(FixedLocator([2**i for i in range(5, 11)]))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
        column[1].set_xlabel("keys and columns a query is weighed against")
    all_axes[0, 0].set_ylabel("error of the median head")
    all_axes[1, 0].set_ylabel("error of the worst head")
    handles = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncol=2 + len(panels) // 3)
    figure.savefig(path)


def main() -> None:
    """Print a table for each length, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 3584, 7168])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--heads", type=int, default=4, help="of each layer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    panels = {}
    for length in options.lengths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            panels[length] = summary(measure(length, options.layers, options.heads))
        print(f"\n{length:,} tokens: pairs a query, median error (largest)")
        for name, curve in panels[length].items():
            cells = (f"{p:.0f}: {mid:.3f} ({most:.2f})" for p, mid, most in curve)
            clusters = ", exact clusters" if name.endswith(" landmarks") else ""
            print(f"| {name}{clusters} | {' | '.join(cells)} |")
    if options.out is not None:
        draw(panels, options.out)


if __name__ == "__main__":
    main()

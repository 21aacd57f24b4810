"""Attention of a trained encoder on long inputs: errors, and times beside exact attention.

    python benchmarks/at_length.py [--kinds manual code] [--lengths 1024 7168] [--layers 0 5] ...
    python benchmarks/at_length.py --sample FILE.npz

Windows of 512 tokens of unlike documents go through all-MiniLM-L6-v2, each by itself, and the
queries, keys and values of its layers are put on end. Four kinds of text that are on any machine
with Python and SciPy: "manual" (prose of CPython's manual), "code" (its library), which the numbers
in the code were chosen by, and "licences" (of installed packages) and "docstrings" (of SciPy),
which nothing was chosen by.

For each kind and length, over all heads of the layers and ``--seeds`` seeds of the landmarks: how
many are within the tolerance of a call with its defaults, the largest error over the tolerance, the
heads that were exact, the pairs worked out over those of exact attention, and the median over
layers and seeds of the time over that of linattn's exact attention and of torch's, on one core, in
turn. Heads of one call share the numbers their landmarks are drawn by, so one seed can be good or
bad luck for a whole layer.

``--sample`` writes the long sample that ships with the package instead: two layers and two heads
of 2,560 tokens of the manual.

Needs the weights: examples/minilm_model.py says how to install them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import linattn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
minilm: Any = import_module("minilm_model")

WINDOW, WINDOWS_A_TEXT = 512, 4
TOLERANCE = 0.1


def manual() -> Iterator[str]:
    """Prose of CPython's manual, a topic a text."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield " ".join(dict.fromkeys(minilm.paragraphs(topics[name])))


def code() -> Iterator[str]:
    """Modules of CPython's library, each a text."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def licences() -> Iterator[str]:
    """Licences of installed packages, each text once."""
    found = set()
    for distribution in distributions():
        for file in distribution.files or ():
            if file.name.upper().startswith(("LICEN", "COPYING", "NOTICE")):
                path = Path(str(file.locate()))
                if path.is_file() and path.suffix in ("", ".txt", ".md", ".rst", ".APACHE", ".BSD"):
                    found.add(path.read_text(encoding="utf-8", errors="replace"))
    yield from sorted(found)


def docstrings() -> Iterator[str]:
    """Docstrings of SciPy's functions and classes."""
    names = "fft integrate interpolate linalg ndimage optimize signal sparse spatial special stats"
    for name in names.split():
        module = import_module(f"scipy.{name}")
        for thing in sorted(getattr(module, "__all__", ())):
            yield inspect.getdoc(getattr(module, thing)) or ""


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "manual": manual,
    "code": code,
    "licences": licences,
    "docstrings": docstrings,
}


def windows(
    kind: str, tokenize: Callable[[str], list[int]], count: int, seed: int
) -> NDArray[np.int64]:
    """Windows of 512 tokens, at most four of one text, in random order; no two overlap."""
    start, end = tokenize("")
    inner, found = WINDOW - 2, []
    for text in KINDS[kind]():
        tokens = tokenize(text[: 8 * WINDOWS_A_TEXT * WINDOW])[1:-1]
        cuts = range(0, len(tokens) - inner + 1, inner)[:WINDOWS_A_TEXT]
        found += [[start, *tokens[i : i + inner], end] for i in cuts]
    if len(found) < count:
        # Texts on end, where few are long enough for a window of their own.
        tokens = [token for text in KINDS[kind]() for token in tokenize(text)[1:-1]]
        cuts = range(0, len(tokens) - inner + 1, inner)
        found = [[start, *tokens[i : i + inner], end] for i in cuts]
    order = np.random.default_rng(seed).permutation(len(found))[:count]
    return np.asarray(found, dtype=np.int64)[order]


def inputs(kind: str, length: int, layers: list[int], seed: int = 0) -> NDArray[np.float32]:
    """Put queries, keys and values on end, ``(layers, 3, heads, length, dim)``."""
    encoder, tokenize = minilm.load()
    tokens = windows(kind, tokenize, -(-length // WINDOW), seed)
    if len(tokens) * WINDOW < length:
        message = f"--lengths: {kind} has {len(tokens) * WINDOW:,} tokens, got {length:,}"
        raise SystemExit(message)
    parts = []
    for window in tokens:
        trace = minilm.Trace.of(encoder, window[None])
        parts.append(np.stack([np.stack(trace.inputs[layer])[:, 0] for layer in layers]))
    return np.concatenate(parts, axis=-2)[..., :length, :]


def errors(output: Any, exact: Any) -> NDArray[np.float64]:
    """Relative error of each head."""
    square = np.sum((output.astype(float) - exact) ** 2, axis=(-2, -1))
    return np.asarray(np.sqrt(square / np.sum(exact.astype(float) ** 2, axis=(-2, -1))))


class Layer(NamedTuple):
    """What was measured of one layer and seed: errors, exact heads, pairs, and times."""

    error: NDArray[np.float64]
    exact: int
    cost: float
    seconds: dict[str, float]


def measure(qkv: NDArray[np.float32], rounds: int, seeds: int, is_causal: bool) -> list[Layer]:
    """Call attention with each seed and exact attention in turn; keep the shortest times."""
    query, key, value = (np.ascontiguousarray(x) for x in qkv)

    def attention(seed: int) -> Any:
        return linattn.attention(
            query, key, value, is_causal=is_causal, rng=seed, return_report=True
        )

    calls: dict[str, Callable[[], Any]] = {
        f"seed {seed}": partial(attention, seed) for seed in range(seeds)
    }
    calls["exact"] = lambda: linattn.softmax_attention(query, key, value, is_causal=is_causal)
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        tensors = [torch.from_numpy(x)[None] for x in (query, key, value)]
        attend = torch.nn.functional.scaled_dot_product_attention
        calls["torch"] = lambda: attend(*tensors, is_causal=is_causal)
    times: dict[str, list[float]] = {name: [] for name in calls}
    answers = {name: call() for name, call in calls.items()} if query.shape[-2] < 4096 else {}
    for _ in range(rounds):
        for name, call in calls.items():
            begun = process_time()
            answers[name] = call()
            times[name].append(process_time() - begun)
    shortest = {name: min(seconds) for name, seconds in times.items()}
    peers = {name: shortest[name] for name in shortest if not name.startswith("seed")}
    found = []
    for seed in range(seeds):
        output, report = answers[f"seed {seed}"]
        error = errors(output, answers["exact"])
        exact = int(np.sum(report.head_methods == "exact"))
        seconds = peers | {"attention": shortest[f"seed {seed}"]}
        found.append(Layer(error, exact, report.cost, seconds))
    return found


def row(kind: str, length: int, layers: list[Layer]) -> dict[str, Any]:
    """Put the layers and seeds of one kind and length together."""
    error = np.concatenate([layer.error for layer in layers])
    ratios = {
        name: statistics.median(one.seconds["attention"] / one.seconds[name] for one in layers)
        for name in layers[0].seconds
        if name != "attention"
    }
    return {
        "kind": kind,
        "length": length,
        "heads": len(error),
        "within": float(np.mean(error <= TOLERANCE)),
        "largest": float(error.max() / TOLERANCE),
        "exact": sum(layer.exact for layer in layers),
        "cost": statistics.mean(layer.cost for layer in layers),
        "time": ratios,
        "slowest": max(one.seconds["attention"] / one.seconds["exact"] for one in layers),
    }


def write_sample(path: Path) -> None:
    """Write the sample that ships with the package."""
    layers, heads = [1, 4], [0, 6]
    qkv = inputs("manual", 5 * WINDOW, layers).astype(np.float16)[:, :, heads]
    arrays = dict(zip(("query", "key", "value"), qkv.swapaxes(0, 1), strict=True))
    np.savez_compressed(path, **arrays, layers=np.array(layers), heads=np.array(heads))


def main() -> None:
    """Measure and print a table, or write the sample."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 3584, 7168, 16384])
    parser.add_argument("--layers", nargs="+", type=int, default=list(range(minilm.LAYERS)))
    parser.add_argument("--heads", type=int, default=12, help="the first ones of each layer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--sample", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.sample is not None:
        write_sample(options.sample)
        return
    print("kind         tokens  within  largest  exact    pairs  time/exact (most)  time/torch")
    rows = []
    with linattn.config(num_threads=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for kind in options.kinds:
            whole = inputs(kind, max(options.lengths), options.layers)[:, :, : options.heads]
            for length in options.lengths:
                layers = [
                    layer
                    for x in whole
                    for layer in measure(
                        x[..., :length, :], options.rounds, options.seeds, options.causal
                    )
                ]
                found = row(kind, length, layers)
                rows.append(found)
                print(
                    f"{kind:<11} {length:>7,}  {found['within']:>6.1%}  {found['largest']:>7.2f}  "
                    f"{found['exact']:>3}/{found['heads']:<3}  {found['cost']:>5.2f}  "
                    f"{found['time']['exact']:>10.2f} ({found['slowest']:.2f})  "
                    f"{found['time'].get('torch', np.nan):>9.2f}",
                    flush=True,
                )
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

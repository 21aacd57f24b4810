"""Embeddings of a trained encoder whose attention is approximated in all layers, 512 tokens each.

    python -m benchmarks.documents [--kinds licences docstrings] [--documents 12] [--seeds 2]
        [--filled-up 8192]

Cosine between the embedding of a document and that by exact attention, mean and lowest, for
`linattn.attention` made to take its linear path: at 512 tokens it would be exact, as that is
cheaper there, so masked tokens fill each document up to --filled-up. Beside it, landmarks of a
fixed number with a window. Texts and weights are those of texts.py.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import linattn
from benchmarks.real_inputs import FilledUp, errors
from benchmarks.texts import KINDS, minilm, windows
from linattn import layers

TOLERANCE = 0.1


class Linear(layers.Attention):
    """linattn.attention with its defaults, on documents that are filled up."""

    def __init__(self, length: int, seed: int) -> None:
        self.search = FilledUp(TOLERANCE, length, seed)
        self.errors: list[float] = []

    def __call__(self, query: Any, key: Any, value: Any, scope: layers.Scope) -> Any:
        """Attend."""
        output = self.search(query, key, value)
        exact = linattn.softmax_attention(query, key, value)
        self.errors += list(errors(output, exact).ravel())
        return output


def landmarks(m: int, seed: int) -> layers.Attention:
    """Landmarks and a window of 32."""
    return layers.LandmarkAttention(m, exact_window=32, rng=seed)


def embeddings(encoder: Any, tokens: Any, used: layers.Attention) -> Any:
    """Embed one document at a time: filled up, they take memory."""
    return np.concatenate([encoder(document[None], attention=used) for document in tokens])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=["licences", "docstrings"]
    )
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--filled-up", type=int, default=8192)
    options = parser.parse_args()
    encoder, tokenize = minilm.load()
    ways: dict[str, Callable[[int], layers.Attention]] = {
        "attention, linear": lambda seed: Linear(options.filled_up, seed),
        "landmarks 64, window 32": lambda seed: landmarks(64, seed),
        "landmarks 128, window 32": lambda seed: landmarks(128, seed),
    }
    print("kind         attention                    mean   lowest  exact heads  heads within 0.1")
    warnings.simplefilter("ignore", UserWarning)
    for kind in options.kinds:
        tokens = windows(kind, tokenize, options.documents, 0)
        exact = encoder(tokens)
        for name, way in ways.items():
            used = [way(seed) for seed in range(options.seeds)]
            cosines = [np.sum(embeddings(encoder, tokens, x) * exact, axis=-1) for x in used]
            line = f"{kind:<12} {name:<26} {np.mean(cosines):>7.4f} {np.min(cosines):>7.4f}"
            linear = [x for x in used if isinstance(x, Linear)]
            if linear:
                share = sum(x.search.exact for x in linear) / sum(x.search.heads for x in linear)
                within = np.mean(np.concatenate([x.errors for x in linear]) <= TOLERANCE)
                line += f"  {share:>11.1%}  {within:>16.1%}"
            print(line, flush=True)


if __name__ == "__main__":
    main()

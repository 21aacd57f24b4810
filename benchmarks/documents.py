"""Embeddings of a trained encoder whose attention is approximated in all layers, 512 tokens each.

    python -m benchmarks.documents [--kinds licences docstrings] [--documents 12] [--seeds 2]

Cosine between the embedding of a document and that by exact attention, mean and lowest, for
`linattn.attention` made to take its linear path: at 512 tokens it would be exact, as that is
cheaper there, so exact attention is made to look as if it took for ever. A head then is exact only
where no landmarks and exact clusters meet the tolerance. Beside it, landmarks of a fixed number
with a window. Texts and weights are those of at_length.py.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

import linattn
from benchmarks.at_length import KINDS, TOLERANCE, errors, minilm, windows
from linattn import layers
from linattn.automatic import _costs, _search


class Counted(layers.Attention):
    """linattn.attention with its defaults, which counts heads that are exact."""

    def __init__(self, seed: int) -> None:
        self.seed, self.heads, self.exact = seed, 0, 0
        self.errors: list[float] = []

    def __call__(self, query: Any, key: Any, value: Any, scope: layers.Scope) -> Any:
        """Attend."""
        output, report = linattn.attention(query, key, value, rng=self.seed, return_report=True)
        exact = linattn.softmax_attention(query, key, value)
        self.errors += list(errors(output, exact).ravel())
        self.heads += report.head_methods.size
        self.exact += int(np.sum(report.head_methods == "exact"))
        return output


@contextmanager
def no_exact_attention() -> Iterator[None]:
    """Let exact attention look dearer than anything else."""

    def pairs(problem: Any) -> float:
        return 1e30

    with (
        patch.object(_costs, "exact_pairs", pairs),
        patch.object(_search, "exact_pairs", pairs),
        patch.object(_search, "MAX_FEATURES", 256),
    ):
        yield


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=["licences", "docstrings"]
    )
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    encoder, tokenize = minilm.load()
    print("kind         attention                    mean   lowest  exact heads  heads within 0.1")
    warnings.simplefilter("ignore", UserWarning)
    for kind in options.kinds:
        tokens = windows(kind, tokenize, options.documents, 0)
        exact = encoder(tokens)
        for name in ("attention, linear", "landmarks 64, window 32", "landmarks 128, window 32"):
            cosines, counts = [], []
            for seed in range(options.seeds):
                if name.startswith("landmarks"):
                    m = int(name.split()[1].rstrip(","))
                    used = layers.LandmarkAttention(m, exact_window=32, rng=seed)
                    found = encoder(tokens, attention=used)
                else:
                    counted = Counted(seed)
                    with no_exact_attention():
                        found = encoder(tokens, attention=counted)
                    counts.append(counted)
                cosines.append(np.sum(found * exact, axis=-1))
            share = within = ""
            if counts:
                share = f"{sum(c.exact for c in counts) / sum(c.heads for c in counts):.1%}"
                within = f"{np.mean(np.concatenate([c.errors for c in counts]) <= TOLERANCE):.1%}"
            print(
                f"{kind:<12} {name:<26} {np.mean(cosines):>7.4f} {np.min(cosines):>7.4f}  "
                f"{share:>11}  {within:>16}",
                flush=True,
            )


if __name__ == "__main__":
    main()

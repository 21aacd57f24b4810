"""Twelve estimators from other fields, right ones and ones that are wrong by 1 to 3 %.

    python -m benchmarks.estimators_of_others

Prints the table of docs/estimators.md. `linattn.testing.draws_for` plans the number of draws for
the bias of each wrong one. The exit code is 1 if a right one fails, or if a wrong one neither fails
nor is announced as not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import e, sqrt
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.testing import assert_estimator, draws_for

Rng = np.random.Generator
Floats = NDArray[np.float64]


class Kind(NamedTuple):
    """An estimator, right and wrong."""

    draw: Callable[[Rng, bool], Any]
    """``draw(rng, is_wrong)``: one estimate."""
    expected: Any
    claim: dict[str, Any]
    bias: float
    """Relative, for which the draws are planned."""
    mistake: str
    guess: Mapping[str, Any] = MappingProxyType({})
    """A variance for the plan, where none is claimed."""


def importance(rng: Rng, is_wrong: bool) -> float:
    """Estimate E x^2 = 1 under N(0, 1) from 16 draws of N(0, 1.5^2)."""
    x = 1.5 * rng.standard_normal(16)
    w = 1.5 * np.exp(-(x**2) * (1 - 1 / 1.5**2) / 2)
    return float(w @ x**2 / (w.sum() if is_wrong else 16))


def reservoir(rng: Rng, is_wrong: bool) -> float:
    """Estimate the mean of 1 to 48 from a reservoir of 12."""
    kept = np.arange(12)
    slot = rng.integers(0, np.arange(12, 48) + (0 if is_wrong else 1))
    taken = np.flatnonzero(slot < 12)
    kept[slot[taken]] = 12 + taken  # the last one of a slot stays
    return float(np.mean(kept + 1))


def count_sketch(rng: Rng, is_wrong: bool) -> float:
    """Estimate |x|^2 of eight equal entries from four rows of 8 buckets."""
    signs = np.where(rng.random((4, 8)) < (0.585 if is_wrong else 0.5), 1.0, -1.0)
    bucket = rng.integers(8, size=(4, 8)) + 8 * np.arange(4)[:, None]
    return float(np.sum(np.bincount(bucket.ravel(), signs.ravel(), 32) ** 2) / 32)


def projection(rng: Rng, is_wrong: bool) -> float:
    """Estimate the square of a unit vector's norm from 64 Gaussian rows."""
    rows = rng.standard_normal((64, 4)) @ np.full(4, 0.5)
    return float(rows @ rows / (63 if is_wrong else 64))


ROUNDED = np.array([0.3, 0.5, 0.7, 0.25, 0.6, -0.4, -0.5, 0.8, 0.0005])


def rounding(rng: Rng, is_wrong: bool) -> Floats:
    """Round to integers at random; the wrong one has 8 bits of randomness."""
    noise = rng.integers(256, size=9) / 256 + (1 / 512 if is_wrong else rng.random(9) / 256)
    return np.floor(ROUNDED + noise)


def dropout(rng: Rng, is_wrong: bool) -> float:
    """Estimate the mean of 64 units of 1, of which half are dropped."""
    bits = rng.integers(128, size=64)
    return float(np.mean(bits <= 64 if is_wrong else bits < 64) / 0.5)


def minhash(rng: Rng, is_wrong: bool) -> float:
    """Estimate a Jaccard similarity of 20 / 40 from 64 hashes."""
    hashes = rng.integers(700 if is_wrong else 2**40, size=(64, 40))
    return float(np.mean(hashes[:, :30].min(1) == hashes[:, 10:].min(1)))


def distinct(rng: Rng, is_wrong: bool) -> float:
    """Estimate a number of 500 distinct items from the 64 smallest hashes."""
    return float((64 if is_wrong else 63) / np.partition(rng.random(500), 63)[63])


DATA = np.random.default_rng(1).standard_normal((49, 3)) * [0.5, 0.5, 0.5] + 1
GRADIENTS = (DATA @ [1.0, 1.0, 1.0])[:, None] * DATA
GRADIENTS = np.concatenate([GRADIENTS, 2 * GRADIENTS.mean(axis=0, keepdims=True)])


def minibatch(rng: Rng, is_wrong: bool) -> Floats:
    """Estimate the gradient of 50 examples from 25; the wrong one never draws the last."""
    return np.asarray(GRADIENTS[rng.choice(49 if is_wrong else 50, 25, replace=False)].mean(axis=0))


def antithetic(rng: Rng, is_wrong: bool) -> float:
    """Estimate E exp(Z) from 16 pairs; the wrong one cuts tails at 2.5."""
    z = rng.standard_normal(16)
    return float(np.mean(np.cosh(np.clip(z, -2.5, 2.5) if is_wrong else z)))


def lattice(rng: Rng, is_wrong: bool) -> float:
    """Integrate 4 x y over the unit square with 64 points of a shifted lattice."""
    shift = rng.integers(64, size=2) / 64 if is_wrong else rng.random(2)
    i = np.arange(64)
    points = (np.stack([i / 64, i * 19 / 64]) + shift[:, None]) % 1
    return float(np.mean(4 * points[0] * points[1]))


LAGS = np.array([0.25, 0.5, 0.8])


def fourier(rng: Rng, is_wrong: bool) -> Floats:
    """Estimate a Matern kernel of 5/2 at three lags; the wrong one draws that of 7/2."""
    degrees = 7 if is_wrong else 5
    omega = rng.standard_t(degrees, 64)
    return np.asarray(np.mean(np.cos(omega * LAGS[:, None]), axis=-1))


def _matern52(lag: Floats) -> Floats:
    r = sqrt(5) * lag
    return np.asarray((1 + r + r * r / 3) * np.exp(-r))


_MATERN = _matern52(LAGS)

KINDS: dict[str, Kind] = {
    "importance weights": Kind(
        importance, 1.0, {"kurtosis": 25}, 0.027, "normalized by their own sum",
        {"variance": 0.0307},
    ),
    "reservoir": Kind(
        reservoir, 24.5, {"variance": (48**2 - 1) / 12 / 12 * 36 / 47}, 0.02,
        "an index too small by one",
    ),
    "count-sketch": Kind(
        count_sketch, 1.0, {"variance": 2 * 7 / 8 / 8 / 4}, 0.025, "58.5 % of signs are +1"
    ),
    "Johnson-Lindenstrauss": Kind(
        projection, 1.0, {"variance": 2 / 64}, 1 / 63, "divided by m - 1"
    ),
    "stochastic rounding": Kind(
        rounding, ROUNDED, {"variance": np.abs(ROUNDED) * (1 - np.abs(ROUNDED))}, 0.2,
        "8 bits: .0005 is never rounded up",
    ),
    "dropout": Kind(dropout, 1.0, {"variance": 1 / 64}, 1 / 64, "a threshold of 65 / 128"),
    "MinHash": Kind(minhash, 0.5, {"variance": 0.25 / 64}, 0.02, "700 hash values: ties"),
    "distinct counts": Kind(
        distinct, 500.0, {"variance": 500 * 437 / 62}, 1 / 63, "k in place of k - 1"
    ),
    "minibatch gradients": Kind(
        minibatch, GRADIENTS.mean(axis=0), {"variance": GRADIENTS.var(axis=0, ddof=1) / 50},
        0.02, "the last example is left out",
    ),
    "antithetic": Kind(
        antithetic, sqrt(e), {"variance": ((1 + e**2) / 2 - e) / 16}, 0.02, "tails cut at 2.5"
    ),
    "lattice": Kind(
        lattice, 1.0, {"bounds": (0, 4), "kurtosis": 25}, 0.03, "shifted along the lattice",
        {"variance": 0.001},
    ),
    "Fourier features": Kind(
        fourier, _MATERN, {"variance": ((1 + _matern52(2 * LAGS)) / 2 - _MATERN**2) / 64}, 0.02,
        "rows of another kernel",
    ),
}  # fmt: skip


def num_draws(kind: Kind) -> int:
    """Plan the draws that show the bias."""
    return draws_for(kind.bias, kind.expected, **{**kind.guess, **kind.claim})


def tried(kind: Kind, *, is_wrong: bool, count: int) -> str:
    """Return "fails", or what a pass says."""
    try:
        return assert_estimator(
            lambda rng: kind.draw(rng, is_wrong), kind.expected, num_draws=count, **kind.claim
        ).detail
    except AssertionError:
        return "fails"


def main() -> int:
    """Print the table."""
    missed = False
    print("| estimator | claim | what is wrong | draws | the right one | the wrong one |")
    print("|---|---|---|---|---|---|")
    for name, kind in KINDS.items():
        count = num_draws(kind)
        right, wrong = (tried(kind, is_wrong=flag, count=count) for flag in (False, True))
        missed |= right == "fails" or not (wrong == "fails" or "% of the mean" in wrong)
        sees, _, hidden = right.partition(" with probability")[0].partition(" and ")
        if wrong != "fails":
            wrong = f"passes; could hide: {hidden}"
        claim = " and ".join(kind.claim)
        print(f"| {name} | {claim} | {kind.mistake} | {count:,} | {sees} | {wrong} |")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

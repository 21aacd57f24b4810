"""Declared rates of `assert_estimator` against simulation, and `SignFeatures` against its formulas.

    python -m benchmarks.estimators [RUNS [PLANTED]]

Prints how often right estimators of six kinds are rejected at a declared 5 %, how often planted
biases of the announced size are found, and mean and variance of one-bit keys. The exit code is 1
where a rate is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.feature_maps import SignFeatures
from linattn.sampling import fixed_norm
from linattn.testing.estimators import CHECK, assert_draws, claimed

Floats = NDArray[np.float64]

DECLARED = 0.05
POWER = 0.99
NUM_DRAWS = 400

DIM = 8
X = np.full(DIM, DIM**-0.5)
Y = np.sqrt(np.arange(1, DIM + 1) / (DIM * (DIM + 1) / 2))
SIGNS = SignFeatures(DIM, DIM, rng=0)


class Kind(NamedTuple):
    """A right estimator: ``draws(rng, n)`` makes n estimates, and one claim holds for them."""

    draws: Callable[[np.random.Generator, int], Floats]
    mean: float
    claim: dict[str, Any]


def haar(rng: np.random.Generator, count: int) -> Floats:
    """Return squares of the first entries of Haar matrices, 3 x 3."""
    rows = fixed_norm(3, 3, rng, batch_shape=(count,))
    return np.asarray(rows[:, 0, 0] ** 2 / 3)


def sketch(rng: np.random.Generator, count: int) -> Floats:
    """Return inner products of two vectors in 8 buckets of random signs."""
    bucket = rng.integers(8, size=(count, DIM))
    signs = rng.choice([-1.0, 1.0], (count, DIM))
    same = (bucket[:, :, None] == bucket[:, None]) * signs[:, :, None] * signs[:, None]
    return np.asarray(same @ Y @ X)


def quantized(rng: np.random.Generator, count: int) -> Floats:
    """Return dot products with one-bit keys, from their formula."""
    rows = fixed_norm(DIM, DIM, rng, batch_shape=(count,))
    factor = SIGNS._constant() / DIM
    return np.asarray(factor * np.sum((rows @ X) * np.sign(rows @ Y), axis=-1))


KINDS = {
    "Gaussian": Kind(lambda rng, n: rng.normal(2, 1, n), 2.0, {"variance": 1.0}),
    "bounded": Kind(lambda rng, n: rng.beta(0.5, 0.5, n), 0.5, {"bounds": (0, 1)}),
    "heavy-tailed": Kind(lambda rng, n: 2 + rng.standard_t(5, n), 2.0, {"kurtosis": 9.0}),
    "Haar": Kind(haar, 1 / 3, {"variance": 1 / 5 - 1 / 9}),
    "sketch": Kind(sketch, float(X @ Y), {"kurtosis": 25.0}),
    "quantized": Kind(
        quantized, float(X @ Y), {"variance": float(SIGNS.variance(X[None], Y[None])[0, 0])}
    ),
}


def run(kind: Kind, draws: Floats) -> float:
    """Test draws at the declared rate; return the bias announced, or NaN if they are rejected."""
    mean = np.asarray(kind.mean)
    claims = (kind.claim.get(name) for name in ("variance", "bounds", "kurtosis"))
    halves = iter((draws[NUM_DRAWS // 2 :], draws[: NUM_DRAWS // 2]))

    def take(count: int) -> Floats:
        return draws if count == NUM_DRAWS else next(halves)

    try:
        return assert_draws(
            CHECK, take, mean, claimed(mean, *claims), NUM_DRAWS, DECLARED
        ).detectable
    except AssertionError:
        return float("nan")


def planted(kind: Kind, draws: Floats, bias: float, rng: np.random.Generator) -> Floats:
    """Return draws with a mean that is too large by ``bias``, within their bounds."""
    if "bounds" not in kind.claim:
        return draws + bias
    return np.where(rng.random(draws.shape) < bias / (1 - kind.mean), 1.0, draws)


def rates(kind: Kind, runs: int, num_planted: int, seed: int = 0) -> tuple[int, int]:
    """Return how many right ones are rejected and how many planted biases are found."""
    rng = np.random.default_rng(seed)
    rejected, announced = 0, []
    for _ in range(runs):
        seen = run(kind, kind.draws(rng, NUM_DRAWS))
        rejected += int(np.isnan(seen))
        announced += [] if np.isnan(seen) else [seen]
    found = 0
    for share in announced[:num_planted]:
        draws = planted(kind, kind.draws(rng, NUM_DRAWS), share * abs(kind.mean), rng)
        found += int(np.isnan(run(kind, draws)))
    return rejected, found


def one_bit_keys(dim: int, sampler: str, draws: int) -> tuple[float, float, float]:
    """Return bias, its standard error, and measured over stated variance, by the map itself."""
    keys = np.random.default_rng(3).standard_normal((64, dim))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    phi = SignFeatures(dim, dim, sampler=sampler, rng=0)
    estimates = np.stack([phi.redraw(seed).estimate(keys, keys) for seed in range(draws)])
    means = np.mean(np.diagonal(estimates, axis1=1, axis2=2), axis=1)
    ratio = np.mean(np.var(estimates, axis=0, ddof=1) / phi.variance(keys, keys))
    return float(np.mean(means) - 1), float(np.std(means) / sqrt(draws)), float(ratio)


def main() -> int:
    """Print the tables."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3400
    num_planted = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    missed = False
    print(
        f"| {NUM_DRAWS} draws | claim | rejected, declared {DECLARED:.0%} | planted biases found |"
    )
    print("|---|---|---|---|")
    for name, kind in KINDS.items():
        rejected, found = rates(kind, runs, num_planted)
        missed |= rejected > DECLARED * runs or found < POWER * num_planted
        claim = next(iter(kind.claim))
        print(f"| {name} | {claim} | {rejected} of {runs} | {found} of {num_planted} |", flush=True)
    print("\n| one-bit keys, d = m | rows | draws | bias | variance / stated |")
    print("|---|---|---|---|---|")
    for dim, draws in ((8, 40_000), (64, 5_000), (128, 2_500)):
        for sampler in ("gaussian", "orthogonal"):
            bias, error, ratio = one_bit_keys(dim, sampler, draws)
            missed |= abs(bias) > 1e-3 or abs(ratio - 1) > 0.02
            print(f"| {dim} | {sampler} | {draws} | {bias:+.5f} ± {error:.5f} | {ratio:.4f} |")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

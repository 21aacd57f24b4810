"""How often `linattn.attention` exceeds its tolerance and its bound, by kinds of input.

    python -m benchmarks.tolerance [--inputs NAME ...] [--length 9216] [--seeds 2]
        [--tolerances 0.02 0.05 0.1] [--ways full cross causal] [--times]
    python -m benchmarks.tolerance --inputs "rare retrieval" "near duplicates"
        --ways full cross causal --tolerances 0.1 --seeds 18

For each kind of input (benchmarks/real_inputs.py and rare_inputs.py), way and tolerance: the heads
of all calls, those that were approximate, the share of these within the tolerance and the share
above ``report.bound``, both with their 95 % intervals (Clopper and Pearson), the largest error over
the tolerance, the pairs worked out over those of exact attention, and the counted time over that of
exact attention (benchmarks/constants.py), in the mean and of the call with most. Cross attention
has the last three quarters of the queries. ``--times`` adds the time over
that of exact attention, the median and the largest over calls. Errors are against exact attention
of all rows.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import beta

import linattn
from benchmarks.constants import counted
from benchmarks.rare_inputs import RARE
from benchmarks.real_inputs import INPUTS, errors

TOLERANCES = (0.02, 0.05, 0.1)
WAYS = ("full", "cross", "causal")


class Call(NamedTuple):
    """What one call did, its heads one after the other."""

    error: Any
    bound: Any
    linear: Any
    cost: float
    counted: float
    seconds: float
    exact_seconds: float


def interval(count: int, total: int) -> str:
    """Share of a total and its 95 % interval, in percent."""
    if not total:
        return "-"
    low = beta.ppf(0.025, count, total - count + 1) if count else 0.0
    high = beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    return f"{count / total:.1%} ({low:.1%} to {high:.1%})"


def calls(
    name: str, way: str, length: int, seeds: int, tolerances: list[float]
) -> dict[float, list[Call]]:
    """Call attention on all cases of an input, with each seed and tolerance."""
    found: dict[float, list[Call]] = {tolerance: [] for tolerance in tolerances}
    for seed in range(seeds):
        for case in (INPUTS | RARE)[name](length, seed):
            options: Any = dict(case.options, is_causal=way == "causal")
            first = length // 4 if way == "cross" else 0
            arrays = case.query[:, first:], case.key, case.value
            begun = process_time()
            exact = linattn.softmax_attention(*arrays, **options)
            exact_seconds = process_time() - begun
            for tolerance in tolerances:
                begun = process_time()
                output, report, time = counted(*arrays, tolerance=tolerance, rng=seed, **options)
                seconds = process_time() - begun
                error, linear = errors(output, exact), report.head_methods != "exact"
                costs = report.cost, time, seconds, exact_seconds
                found[tolerance].append(Call(error, report.bound, linear, *costs))
    return found


def row(name: str, tolerance: float, found: list[Call], times: bool) -> str:
    """Return the row of the table of one input and tolerance."""
    linear = np.concatenate([call.linear for call in found])
    error = np.concatenate([call.error for call in found])[linear]
    bound = np.concatenate([call.bound for call in found])[linear]
    cells = [name, f"{tolerance:g}", str(len(linear)), str(len(error))]
    cells.append(interval(int(np.sum(error <= tolerance)), len(error)))
    cells.append(interval(int(np.sum(error > bound)), len(error)))
    cells.append(f"{np.max(error, initial=0.0) / tolerance:.2f}")
    cells.append(f"{statistics.mean(call.cost for call in found):.2f}")
    times_of = [call.counted for call in found]
    cells.append(f"{statistics.mean(times_of):.2f} ({max(times_of):.2f})")
    if times:
        ratios = [call.seconds / call.exact_seconds for call in found]
        cells.append(f"{statistics.median(ratios):.2f} ({max(ratios):.2f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--length", type=int, default=9216)
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS | RARE), default=list(INPUTS))
    parser.add_argument("--tolerances", nargs="+", type=float, default=list(TOLERANCES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["full"])
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args()
    print(f"{options.length:,} tokens, {options.seeds} seeds, one core")
    heads = ["input", "tolerance", "heads", "approximate", "within", "above the bound"]
    heads += ["largest error, of the tolerance", "pairs", "counted time (most)"]
    heads += ["time, of exact (most)"] if options.times else []
    print(f"| {' | '.join(heads)} |")
    print("| --- " * len(heads) + "|")
    with linattn.config(num_threads=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, way in itertools.product(options.inputs, options.ways):
            found = calls(name, way, options.length, options.seeds, options.tolerances)
            label = name if way == "full" else f"{name}, {way}"
            for tolerance, of_tolerance in found.items():
                print(row(label, tolerance, of_tolerance, options.times), flush=True)


if __name__ == "__main__":
    main()

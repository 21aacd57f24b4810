"""What the constants of :func:`linattn.attention` are worth: costs with half and twice of each.

    python -m benchmarks.constants [--length 9216] [--inputs NAME ...] [--only CONSTANT ...]

A cost is the time of a call over that of exact attention, by the counts and the times of
linattn/automatic/_costs.py: no clock has a say. For each constant and tolerance the costs with
half and with twice of it are printed over those with its value, as geometric means over calls.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from typing import Any

import numpy as np

import linattn
from benchmarks.real_inputs import INPUTS, Case
from linattn.automatic import _costs

CONSTANTS: tuple[str, ...] = (
    "MIN_FEATURES",
    "MAX_SEARCH",
    "MAX_VAIN",
    "MIN_HELD_OUT",
    "MAX_HELD_OUT",
)
CONSTANTS += ("MAX_PROMISED", "SAMPLED_KEYS", "DRAWS", "LLOYD_STEPS", "LEVELS_NEAR", "MARGIN")
TOLERANCES = (0.05, 0.1)


def set_constant(name: str, value: Any) -> None:
    """Set a constant in each module of the package that reads it."""
    for module in [x for n, x in sys.modules.items() if n.startswith("linattn.automatic.")]:
        if hasattr(module, name):
            setattr(module, name, value)


def cost(case: Case, tolerance: float, seed: int) -> float:
    """Return the counted time of a call over that of exact attention."""
    options: Any = dict(case.options, tolerance=tolerance, rng=seed)
    return counted(*case[:3], **options)[2]


def counted(*arrays: Any, **options: Any) -> tuple[Any, Any, float]:
    """Call attention; return output, report, and counted time over that of exact attention."""
    spent: list[float] = []
    module: Any = linattn.automatic
    make = module.make_report

    def spy(problem: Any, heads: Any) -> Any:
        exact = _costs.exact_pairs(problem)
        spent.append(np.mean([_costs.cost_of(head.work, problem) / exact for head in heads]))
        return make(problem, heads)

    module.make_report = spy
    try:
        output, report = linattn.attention(*arrays, return_report=True, **options)
    finally:
        module.make_report = make
    return output, report, spent[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=9216)
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS), default=list(INPUTS))
    parser.add_argument("--only", nargs="+", choices=CONSTANTS, default=CONSTANTS)
    options = parser.parse_args()
    cases = [case for name in options.inputs for case in INPUTS[name](options.length, 0)]
    print(f"{len(cases)} calls of {options.length:,} tokens: {', '.join(options.inputs)}")
    warnings.simplefilter("ignore", UserWarning)

    def costs(tolerance: float) -> Any:
        return np.array([cost(case, tolerance, 0) for case in cases])

    with linattn.config(num_threads=1):
        usual = {tolerance: costs(tolerance) for tolerance in TOLERANCES}
        for tolerance, found in usual.items():
            print(f"at {tolerance:g}: {np.exp(np.log(found).mean()):.2f} of exact attention")
        for name, tolerance in itertools.product(options.only, TOLERANCES):
            value = next(
                getattr(x, name)
                for n, x in sys.modules.items()
                if n.startswith("linattn.automatic.") and hasattr(x, name)
            )
            ratios = []
            for factor in (0.5, 2):
                set_constant(name, type(value)(max(1e-9, factor * value)))
                ratios.append(np.exp(np.log(costs(tolerance) / usual[tolerance]).mean()))
            set_constant(name, value)
            print(f"{name:14} {tolerance:4g}  {ratios[0]:.2f} {ratios[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()

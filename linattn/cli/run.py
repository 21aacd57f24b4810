"""One whole run of ``linattn compare``: what is measured, in which order, and its record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import numpy as np

from linattn.cli import info
from linattn.cli.compare import (
    Case,
    Row,
    Verdict,
    best_row,
    cases,
    exact_output,
    judge,
    measure,
    prepare,
)
from linattn.cli.inputs import Inputs, continued, limited
from linattn.cli.methods import EXACT, METHODS, Method, select
from linattn.cli.settings import Settings
from linattn.cli.sweep import Sweep, sweep

__all__ = ["CURVE_COLUMNS", "CURVE_METHOD", "Results", "run", "steps"]

CURVE_METHOD = METHODS[0].name
"""The method of the time curve, if it is among those measured; otherwise the best of them."""

CURVE_COLUMNS = 256
"""Its number of columns: the nearest of those measured."""

FORMAT = 1
"""Version of the JSON file's layout."""


@dataclass(frozen=True)
class Results:
    """Everything that a run found out.

    Attributes
    ----------
    settings : Settings
        What was asked for.
    inputs : Inputs
        What the error table is about.
    rows : tuple of Row
        The error table.
    sweep : Sweep
        The time against sequence length.
    verdict : Verdict
        What follows from the rows.
    started : datetime
        In UTC.
    seconds : float
        Time of the whole run, tables, plots and imports aside.
    """

    settings: Settings
    inputs: Inputs
    rows: tuple[Row, ...]
    sweep: Sweep
    verdict: Verdict
    started: datetime
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return it all, and where it was measured, as plain dictionaries, lists and numbers."""
        return {
            "format": FORMAT,
            "command": self.settings.command(),
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": self.seconds,
            "seed": self.settings.seed,
            "is_causal": self.settings.is_causal,
            "versions": info.versions(),
            "machine": {**info.machine(), "blas": info.blas(), "threads": info.threads()},
            "input": self.inputs.describe(),
            "errors": [asdict(row) for row in self.rows],
            "lengths": {**asdict(self.sweep), "crossover": asdict(self.sweep.crossover)},
            "verdict": asdict(self.verdict),
        }


def steps(settings: Settings) -> int:
    """Return how often `run` notifies."""
    return (
        1
        + sum(1 for _ in cases(select(settings.maps), settings.num_features))
        + 2 * len(settings.lengths)
    )


def run(settings: Settings, given: Inputs, notify: Callable[[str], None]) -> Results:
    """Measure everything.

    Parameters
    ----------
    settings : Settings
        What to measure.
    given : Inputs
        What to measure it on, all heads and tokens.
    notify : callable
        Called with a description before each step.

    Raises
    ------
    CommandError
        The settings do not fit the inputs.
    """
    started = datetime.now(UTC)
    start = perf_counter()
    is_causal, seed = settings.is_causal, settings.seed
    inputs = limited(
        given,
        max_heads=settings.max_heads,
        max_tokens=settings.max_tokens,
        is_causal=is_causal,
    )
    chosen = select(settings.maps)
    notify("exact attention in float64")
    exact = exact_output(inputs, is_causal=is_causal)
    rows = []
    for case in cases(chosen, settings.num_features):
        notify(case.label)
        rows.append(
            measure(case, inputs, exact, is_causal=is_causal, seed=seed, draws=settings.draws)
        )

    case = _curve_case(chosen, settings.num_features, rows)
    arrays = continued(given, settings.lengths[-1], np.random.default_rng(seed))
    curves = {
        "linear": prepare(case, inputs, seed=seed),
        "exact": prepare(Case(EXACT, None), inputs, seed=seed),
    }
    curve = sweep(
        arrays,
        settings.lengths,
        curves,
        label=case.label,
        is_causal=is_causal,
        time_budget=settings.time_budget,
        notify=notify,
    )
    return Results(
        settings, inputs, tuple(rows), curve, judge(rows), started, perf_counter() - start
    )


def _curve_case(chosen: Sequence[Method], num_features: Sequence[int], rows: Sequence[Row]) -> Case:
    by_name = {method.name: method for method in chosen}
    best = best_row(rows)
    if CURVE_METHOD in by_name or best is None:
        method = by_name.get(CURVE_METHOD, chosen[0])
    else:
        method = by_name[best.method]
    if not method.has_columns:
        return Case(method, None)
    nearest = min(num_features, key=lambda columns: abs(math.log(columns / CURVE_COLUMNS)))
    return Case(method, nearest)

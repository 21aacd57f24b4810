"""One run of ``linattn compare``: the cases, their order, and the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from linattn.cli import info
from linattn.cli.compare import (
    CHECKED_ROWS,
    Case,
    Row,
    Verdict,
    best_row,
    cases,
    cheapest_row,
    check,
    error_on_rows,
    exact_output,
    judge,
    measure,
    multiplications,
    prepare,
    refuted,
)
from linattn.cli.errors import CommandError
from linattn.cli.inputs import Inputs, continued, limited, size_text
from linattn.cli.method import FAILURES, Method
from linattn.cli.methods import EXACT, METHODS, REFERENCES, select
from linattn.cli.settings import Settings
from linattn.cli.sweep import Sweep, sweep
from linattn.cli.text import count
from linattn.diagnostics import AttendedNorms, attended_norms

__all__ = ["Results", "run", "steps"]

ALL = {method.name for method in METHODS}
"""Methods measured without ``--maps``; methods that do not fit are left out."""

MAX_MULTIPLICATIONS = 4e9
"""Of a call of a published attention, over all heads: some seconds."""

PUBLISHED_SECONDS = 60.0
"""After so long no further published attention is measured."""

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
    norms : AttendedNorms
        How large attended pairs are.
    sweep : Sweep
        The time against sequence length.
    verdict : Verdict
        What follows from the rows.
    started : datetime
        In UTC.
    seconds : float
        Time of the whole run, tables, plots and imports aside.
    left_out : tuple of tuple of str
        Published attentions that could not be measured, and why.
    """

    settings: Settings
    inputs: Inputs
    rows: tuple[Row, ...]
    norms: AttendedNorms
    sweep: Sweep
    verdict: Verdict
    started: datetime
    seconds: float
    left_out: tuple[tuple[str, str], ...]

    def record(self) -> dict[str, Any]:
        """Return it all, and where it was measured, as dictionaries, lists and numbers."""
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
            "left_out": dict(self.left_out),
            "errors": [asdict(row) for row in self.rows],
            "attended_norms": {
                "percentiles": self.norms.percentiles.tolist(),
                "logit_range": self.norms.logit_range.tolist(),
                "num_features": self.norms.num_features.tolist(),
            },
            "lengths": {**asdict(self.sweep), "crossover": asdict(self.sweep.crossover)},
            "verdict": asdict(self.verdict),
        }


def steps(settings: Settings, given: Inputs) -> int:
    """Return how often `run` notifies."""
    return 2 + len(_cases(settings, given)) + 2 * len(settings.lengths)


def _inputs(settings: Settings, given: Inputs) -> Inputs:
    return limited(
        given,
        max_heads=settings.max_heads,
        max_tokens=settings.max_tokens,
        is_causal=settings.is_causal,
    )


def _cases(settings: Settings, given: Inputs) -> list[Case]:
    """Cases of the error table; methods that do not fit are left out unless asked for by name.

    Raises
    ------
    CommandError
        A method was asked for by name and does not fit, or nothing is left.
    """
    inputs = _inputs(settings, given)
    by_default = ALL if set(settings.maps) >= ALL else set()
    fitting = []
    for method, obstacle in _obstacles(settings, inputs):
        if not obstacle:
            fitting.append(method)
        elif method.name in set(settings.maps) - by_default:
            raise CommandError(f"--maps: {method.name} {obstacle}")
    found = list(cases(fitting, settings.num_features, inputs))
    if all(case.method in REFERENCES for case in found):
        most = max(method.max_features(inputs.key.shape[-2]) for method in fitting)
        raise CommandError(
            f"--num-features: want at most {most} for {', '.join(m.name for m in fitting)} on "
            f"{count(inputs.key.shape[-2], 'key')}, got {settings.num_features[0]} or more"
        )
    return found


def _obstacles(settings: Settings, inputs: Inputs) -> list[tuple[Method, str]]:
    """Return the methods that are wanted, each with why it cannot be measured here."""
    is_causal, has_key_bias = settings.is_causal, inputs.key_bias is not None
    aligned = inputs.query.shape[-2] == inputs.key.shape[-2]
    return [
        (method, method.obstacle(is_causal=is_causal, aligned=aligned, has_key_bias=has_key_bias))
        for method in select(settings.maps, with_published=settings.baselines)
    ]


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
        The settings do not fit the inputs, or no map can do with them.
    """
    started = datetime.now(UTC)
    start = perf_counter()
    is_causal, seed = settings.is_causal, settings.seed
    inputs = _inputs(settings, given)
    cases = _cases(settings, given)
    check(cases, inputs)
    notify("exact attention in float64")
    exact = exact_output(inputs, is_causal=is_causal)
    rows, late = _rows(settings, inputs, cases, exact, notify)

    maps = [row for row in rows if row.kind != "reference"]
    if not maps:
        told = "; ".join(f"{label}: {reason}" for label, reason in late)
        raise CommandError(f"{inputs.source}: nothing could be measured; {told}")
    if all(row.failure for row in maps):
        raise CommandError(
            f"{inputs.source}: every map fails; {maps[0].full_label}: {maps[0].failure}"
        )

    notify("norms of attended pairs")
    seen = None if inputs.key_bias is None else inputs.key_bias > -np.inf
    norms = attended_norms(inputs.query, inputs.key, is_causal=is_causal, key_mask=seen)

    case = _curve_case(cases, rows)
    real = given.longer or given
    sizes = real.lengths
    most = settings.lengths[-1]
    arrays = continued(
        real, most, np.random.default_rng(seed), round(most * sizes[0] / sizes[1]) or 1
    )
    first_head = limited(inputs, max_heads=1, max_tokens=settings.max_tokens, is_causal=is_causal)
    curves = {
        "linear": prepare(case, first_head, seed=seed),
        "exact": prepare(Case(EXACT, None), first_head, seed=seed),
    }
    curve = sweep(
        arrays,
        settings.lengths,
        curves,
        label=case.label,
        num_real=sizes[1],
        sizes=sizes,
        is_causal=is_causal,
        time_budget=settings.time_budget,
        notify=notify,
    )
    verdict = judge(rows, curve.crossover, degenerate=inputs.degenerate)
    seconds = next(row.seconds for row in rows if row.full_label == case.label)
    verdict = _on_all(settings, verdict, inputs, given, case, seconds)
    if inputs.question:
        verdict = replace(verdict, sentence=f"{verdict.sentence} But {inputs.question}.")
    left_out = tuple(
        (method.label, obstacle)
        for method, obstacle in _obstacles(settings, inputs)
        if obstacle and method.kind != "map"
    )
    seconds = perf_counter() - start
    return Results(
        settings, inputs, tuple(rows), norms, curve, verdict, started, seconds, (*left_out, *late)
    )


def _on_all(
    settings: Settings, verdict: Verdict, inputs: Inputs, given: Inputs, case: Case, seconds: float
) -> Verdict:
    """Say on what part of the inputs a verdict was found, and whether its map does for all."""
    most, heads = max(given.lengths), (len(inputs.query), len(given.query))
    sizes = list(zip(inputs.lengths, given.lengths, strict=True))
    queries, keys = (f"{first:,} of {total:,}" for first, total in sizes)
    tokens = f"{queries} tokens" if queries == keys else f"{queries} queries and {keys} keys"
    told, remedy = [], ""
    if heads[0] < heads[1]:
        told.append(f"{heads[0]:,} of {heads[1]:,} heads")
        remedy += f" --max-heads {heads[1]}"
    if inputs.lengths != given.lengths:
        told.append(f"the first {tokens}")
        remedy += f" --max-tokens {most}"
    if not told:
        judged = (
            f" Judged on all of them: {size_text(inputs)}." if verdict.median is not None else ""
        )
        return replace(verdict, sentence=verdict.sentence + judged)
    sentence = f"{verdict.sentence} This was judged on {', '.join(told)}"
    error = None
    share = min(first / total for first, total in sizes)
    if share < 1 and verdict.good_enough and seconds <= share * settings.time_budget:
        whole = _inputs(replace(settings, max_tokens=most), given)
        with suppress(*FAILURES):
            error = error_on_rows(case, whole, is_causal=settings.is_causal, seed=settings.seed)
    if error is None:
        return replace(verdict, sentence=f"{sentence} only:{remedy} judges all.")
    sentence += f"; on all tokens the median error of {case.label} is {error:.2g}"
    if error <= verdict.threshold:
        return replace(verdict, sentence=f"{sentence} ({CHECKED_ROWS} rows of each head).")
    return refuted(verdict, f"{sentence}, not good enough")


def _rows(
    settings: Settings,
    inputs: Inputs,
    cases: Sequence[Case],
    exact: npt.NDArray[np.float64],
    notify: Callable[[str], None],
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Measure all cases, published ones last and while there is time; name the ones left out."""
    is_causal = settings.is_causal
    first = ("map", "reference")
    published = [case for case in cases if case.method.kind not in first]
    rows: list[Row] = []
    late: list[tuple[str, str]] = []
    begun = math.inf
    for case in (
        *(case for case in cases if case.method.kind in first),
        *sorted(published, key=lambda case: case.num_features or 0),
    ):
        notify(case.label)
        if case.method.kind not in first:
            begun = min(begun, perf_counter())
            if multiplications(case, inputs, is_causal=is_causal) > MAX_MULTIPLICATIONS:
                late.append((case.label, "too many multiplications, take fewer tokens or heads"))
                continue
            if perf_counter() - begun > PUBLISHED_SECONDS:
                late.append((case.label, f"no time left of {PUBLISHED_SECONDS:g} s"))
                continue
        seed, draws = settings.seed, settings.draws
        rows.append(measure(case, inputs, exact, is_causal=is_causal, seed=seed, draws=draws))
    return rows, late


def _curve_case(cases: Sequence[Case], rows: Sequence[Row]) -> Case:
    """Return the cheapest map that is good enough, else the one of least error, else the first."""
    done = [row for row in rows if row.kind != "reference" and not row.failure]
    maps = [row for row in done if row.kind == "map"]
    chosen = cheapest_row(rows) or best_row(rows) or (maps or done)[0]
    wanted = (chosen.method, chosen.num_features)
    return next(case for case in cases if (case.method.name, case.num_features) == wanted)

"""Error, time and memory of each method on given inputs; the verdict. Prints nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

import linattn
from linattn.cli.errors import CommandError
from linattn.cli.inputs import Inputs
from linattn.cli.methods import BASELINES, UNIFORM, Attend, Method
from linattn.cli.timing import fastest, peak_memory

__all__ = [
    "GOOD_ENOUGH",
    "Case",
    "Row",
    "Verdict",
    "best_row",
    "cases",
    "cheapest_row",
    "exact_output",
    "judge",
    "measure",
    "prepare",
    "relative_error",
    "uniform_row",
]

GOOD_ENOUGH = 0.1
"""Largest median relative output error with which a map may replace softmax without retraining."""

Float64: TypeAlias = npt.NDArray[np.float64]


class Case(NamedTuple):
    """One row to be measured: a method, and its number of columns if that is a choice."""

    method: Method
    num_features: int | None

    @property
    def label(self) -> str:
        """The method with its number of columns, for people."""
        if self.num_features is None:
            return self.method.label
        return f"{self.method.label} with {self.num_features} columns"


@dataclass(frozen=True)
class Row:
    """What was measured for one case.

    Attributes
    ----------
    method, label : str
        The method's name and label.
    num_features : int or None
        Columns; None where they are no choice.
    is_baseline : bool
        Whether the row is there to be compared with, not to win.
    held_out : bool
        Whether the map was fitted to the first half of the tokens and judged on the second, so
        that its errors are those of shorter sequences: it cannot win either.
    median, percentile_90 : float
        Of the relative output error over heads and draws; inf where too many are not finite.
    heads : tuple of tuple of float
        For each draw the error of each head; inf where its output is not finite.
    setup_seconds : float
        Time to draw or fit the map, the fastest of the draws.
    seconds : float
        Time of the fastest call over all heads.
    calls : int
        Calls of which it is the fastest.
    peak_bytes : int
        Memory that one call allocated at most, its output included.
    """

    method: str
    label: str
    num_features: int | None
    is_baseline: bool
    held_out: bool
    median: float
    percentile_90: float
    heads: tuple[tuple[float, ...], ...]
    setup_seconds: float
    seconds: float
    calls: int
    peak_bytes: int


@dataclass(frozen=True)
class Verdict:
    """Which map is best, and whether it may replace softmax without retraining.

    Attributes
    ----------
    best, num_features, median
        The fastest map that is good enough, else the one with the lowest median error; None if no
        map has a finite one.
    uniform : float
        The median error of uniform attention.
    threshold : float
        `GOOD_ENOUGH`.
    good_enough : bool
        Whether median <= threshold.
    sentence : str
        The same for people.
    """

    best: str | None
    num_features: int | None
    median: float | None
    uniform: float
    threshold: float
    good_enough: bool
    sentence: str


def cases(methods: Iterable[Method], num_features: Sequence[int], inputs: Inputs) -> Iterator[Case]:
    """Yield every method with every number of columns that makes sense, then the baselines."""
    for method in (*methods, *BASELINES):
        most = method.most_columns(inputs.key.shape[-2])
        for columns in num_features if method.has_columns else (None,):
            if columns is None or columns <= most:
                yield Case(method, columns)


def exact_output(inputs: Inputs, *, is_causal: bool) -> Float64:
    """Return softmax attention in float64, ``(H, L, e)``: the truth that errors refer to.

    Raises
    ------
    CommandError
        The logits overflow, so that there is no truth.
    """
    query, key, value = (
        array.astype(np.float64) for array in (inputs.query, inputs.key, inputs.value)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        output: Float64 = linattn.softmax_attention(query, key, value, is_causal=is_causal)
    if not np.isfinite(output).all():
        message = f"{inputs.source}: exact softmax attention overflows: the numbers are too large"
        raise CommandError(message)
    return output


def relative_error(output: npt.NDArray[np.floating], exact: Float64) -> Float64:
    """Return ``|output - exact|_F / |exact|_F`` of each head.

    It is inf where the output is not finite, and where exact is all zero while output is not.
    """
    with np.errstate(all="ignore"):
        # Largest magnitudes go first, so that no square overflows.
        scale = np.maximum(np.max(np.abs(exact), axis=(-2, -1)), np.finfo(np.float64).tiny)
        difference = (output.astype(np.float64) - exact) / scale[..., None, None]
        distance = np.sqrt(np.sum(difference**2, axis=(-2, -1)))
        norm = np.sqrt(np.sum((exact / scale[..., None, None]) ** 2, axis=(-2, -1)))
        error = np.where(distance == 0, 0.0, distance / norm)
    return np.where(np.isnan(error), np.inf, error)


def prepare(case: Case, inputs: Inputs, *, seed: int, draw: int = 0) -> Attend:
    """Draw or fit the map of a case.

    What is drawn depends on the seed, the number of columns and the number of the draw only, not on
    what else is measured; maps with the same columns share it.

    Raises
    ------
    CommandError
        The map refuses this number of columns or these inputs.
    """
    rng = np.random.default_rng([seed, case.num_features or 0, draw])
    try:
        return case.method.make(inputs.query, inputs.key, case.num_features, rng)
    except ValueError as error:
        message = f"{case.label}: {error}"
        raise CommandError(message) from error


def measure(
    case: Case, inputs: Inputs, exact: Float64, *, is_causal: bool, seed: int, draws: int
) -> Row:
    """Measure one case: error per draw and head, then time, then memory, in separate calls.

    A method without a choice of columns, or without chance, is not drawn again.

    Raises
    ------
    CommandError
        The map refuses its number of columns or the inputs.
    """
    judged, truth = inputs, exact
    if case.method.held_out:
        half = max(1, inputs.key.shape[-2] // 2)
        names = ("query", "key", "value")
        judged = replace(inputs, **{name: getattr(inputs, name)[:, half:] for name in names})
        truth = exact_output(judged, is_causal=is_causal)
    errors = []
    setup_seconds = math.inf
    for draw in range(draws if case.method.has_columns and case.method.is_random else 1):
        start = perf_counter()
        attend = prepare(case, inputs, seed=seed, draw=draw)
        setup_seconds = min(setup_seconds, perf_counter() - start)
        call = partial(attend, inputs.query, inputs.key, inputs.value, is_causal=is_causal)
        try:
            output = attend(judged.query, judged.key, judged.value, is_causal=is_causal)
            errors.append(relative_error(output, truth))
        except ValueError as error:
            message = f"{case.label}: {error}"
            raise CommandError(message) from error
    timing = fastest(call, max_calls=10, max_seconds=0.5)
    over_all = np.concatenate(errors)
    return Row(
        method=case.method.name,
        label=case.method.label,
        num_features=case.num_features,
        is_baseline=case.method in BASELINES,
        held_out=case.method.held_out,
        median=_quantile(over_all, 0.5),
        percentile_90=_quantile(over_all, 0.9),
        heads=tuple(tuple(heads.tolist()) for heads in errors),
        setup_seconds=setup_seconds,
        seconds=timing.seconds,
        calls=timing.calls,
        peak_bytes=peak_memory(call),
    )


def best_row(rows: Iterable[Row]) -> Row | None:
    """Return the row with the lowest finite median error of those that may win."""
    finite = [row for row in _candidates(rows) if math.isfinite(row.median)]
    return min(finite, key=lambda row: row.median, default=None)


def cheapest_row(rows: Iterable[Row]) -> Row | None:
    """Return the fastest row that is good enough, of those that may win."""
    enough = [row for row in _candidates(rows) if row.median <= GOOD_ENOUGH]
    return min(enough, key=lambda row: row.seconds, default=None)


def _candidates(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if not (row.is_baseline or row.held_out)]


def uniform_row(rows: Iterable[Row]) -> Row:
    """Return the row of uniform attention."""
    return next(row for row in rows if row.method == UNIFORM.name)


def judge(rows: Sequence[Row]) -> Verdict:
    """Say which map is best and whether it is good enough to be used unretrained."""
    uniform = uniform_row(rows).median
    best = cheapest_row(rows) or best_row(rows)
    if best is None:
        sentence = "no map gave a finite error: use exact softmax attention."
        return Verdict(None, None, None, uniform, GOOD_ENOUGH, False, sentence)
    columns = "" if best.num_features is None else f" with {best.num_features} columns"
    name = f"{best.label}{columns}"
    good_enough = best.median <= GOOD_ENOUGH
    if good_enough:
        sentence = (
            f"{name} is the cheapest map that is good enough to use unretrained "
            f"(median error {best.median:.2g} <= {GOOD_ENOUGH:g})."
        )
    elif best.median >= uniform:
        sentence = (
            f"{name} is the best map but no better than uniform attention "
            f"(median error {best.median:.2f} >= {uniform:.2f}): use exact softmax attention."
        )
    else:
        sentence = (
            f"{name} is the best map but not good enough to use unretrained "
            f"(median error {best.median:.2f} > {GOOD_ENOUGH:g}): use exact softmax attention."
        )
    return Verdict(
        best.method, best.num_features, best.median, uniform, GOOD_ENOUGH, good_enough, sentence
    )


def _quantile(errors: Float64, fraction: float) -> float:
    with np.errstate(invalid="ignore"):
        value = float(np.quantile(errors, fraction))
    # Between a finite and an infinite head, interpolation may give inf - inf.
    return math.inf if math.isnan(value) else value

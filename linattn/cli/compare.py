"""Error, time and memory of each method on given inputs; the verdict. Prints nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

import linattn
from linattn.cli.errors import CommandError
from linattn.cli.exact import ExactMap, attend_exactly
from linattn.cli.inputs import Inputs
from linattn.cli.method import FAILURES, Attend, Method, Sizes, exact_multiplications
from linattn.cli.methods import EXACT, REFERENCES, UNIFORM
from linattn.cli.sweep import Crossover
from linattn.cli.text import duration, reason
from linattn.cli.timing import fastest, peak_memory
from linattn.diagnostics import held_out_rows
from linattn.stream._inputs import Inputs as StreamInputs

__all__ = [
    "CHECKED_ROWS",
    "GOOD_ENOUGH",
    "MAX_EXACT_SHARE",
    "TIE",
    "Case",
    "Row",
    "Verdict",
    "best_row",
    "cases",
    "cheapest_row",
    "check",
    "error_on_rows",
    "exact_output",
    "frontier",
    "judge",
    "measure",
    "multiplications",
    "prepare",
    "refuted",
    "relative_error",
    "uniform_row",
]

GOOD_ENOUGH = 0.1
"""Largest median relative output error with which a map may replace softmax without retraining."""

CHECKED_ROWS = 64
"""Rows of each head that judge an output too long to be compared as a whole."""

MAX_EXACT_SHARE = 0.5
"""Largest share of pairs that a row may need no approximation for, if it is to win."""

MAX_DRAW_SECONDS = 2.0
"""After so long a published attention is not drawn again."""

TIE = 1.1
"""Errors, and times, whose ratio is smaller are a tie: another run may rank them the other way."""

_median, _seconds = attrgetter("median"), attrgetter("seconds")

Float64: TypeAlias = npt.NDArray[np.float64]


class Case(NamedTuple):
    """One row to be measured: a method, and its number of columns if that is a choice."""

    method: Method
    num_features: int | None

    @property
    def label(self) -> str:
        """The method with its number of columns, for people."""
        return _with_number(self.method.label, self.num_features, self.method.kind)


@dataclass(frozen=True)
class Row:
    """What was measured for one case.

    Attributes
    ----------
    method, label : str
        The method's name and label.
    num_features : int or None
        Columns; None where they are no choice.
    kind : str
        As in `linattn.cli.method.Method`: only rows of the kind "map" can win.
    cost : float
        Multiplications, as a share of the number in exact attention.
    held_out : bool
        Whether the map was fitted to the first half of the tokens and judged on the second, so
        that its errors belong to shorter sequences: it cannot win either.
    exact_share : float
        Share of the pairs of a query and a key that need no approximation at this size. Above
        `MAX_EXACT_SHARE` the row cannot win: its error says nothing about longer sequences.
    failure : str
        Why there is nothing to tell of it, all numbers being inf; else empty.
    median, percentile_90 : float
        Of the relative output error over heads and draws; inf where too many are not finite.
    heads : tuple of tuple of float
        For each draw the error of each head; inf where its output is not finite.
    setup_seconds : float
        Time to draw or fit the map, the fastest of the draws.
    seconds : float
        Time of the fastest call over all heads.
    calls : int
        Number of calls; the time is the fastest of them.
    peak_bytes : int
        Memory that one call allocated at most, its output included.
    """

    method: str
    label: str
    num_features: int | None
    kind: str
    cost: float
    held_out: bool
    exact_share: float
    failure: str = ""
    median: float = math.inf
    percentile_90: float = math.inf
    heads: tuple[tuple[float, ...], ...] = ()
    setup_seconds: float = math.inf
    seconds: float = math.inf
    calls: int = 0
    peak_bytes: float = math.inf

    @property
    def full_label(self) -> str:
        """The label with the number of columns, for people."""
        return _with_number(self.label, self.num_features, self.kind)

    @property
    def may_win(self) -> bool:
        """Whether the row is a map that approximated every judged pair, and did not fail."""
        return self.kind == "map" and self.counts

    @property
    def counts(self) -> bool:
        """Whether the error says something about longer sequences."""
        barred = self.held_out or self.exact_share > MAX_EXACT_SHARE
        return not barred and math.isfinite(self.median)


@dataclass(frozen=True)
class Verdict:
    """Which map is best, and whether it should replace softmax without retraining.

    Attributes
    ----------
    best, num_features, median
        The fastest map that is good enough, else the one with the lowest median error; None if
        there is no such map, or the inputs tell none apart.
    uniform : float
        The median error of uniform attention.
    threshold : float
        `GOOD_ENOUGH`.
    good_enough : bool
        Whether median <= threshold.
    use : str
        "map" if the best one is good enough and faster than exact attention, "exact" if not;
        "" if the inputs do not tell.
    sentence : str
        The same for people.
    """

    best: str | None
    num_features: int | None
    median: float | None
    uniform: float
    threshold: float
    good_enough: bool
    use: str
    sentence: str


def cases(methods: Iterable[Method], num_features: Sequence[int], inputs: Inputs) -> Iterator[Case]:
    """Yield every method with every number of columns that makes sense, then the references."""
    for method in (*methods, *REFERENCES):
        most = method.max_features(inputs.key.shape[-2])
        for m in num_features if method.has_num_features else (None,):
            if m is None or m <= most:
                yield Case(method, m)


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
    bias = None if inputs.key_bias is None else inputs.key_bias.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        output: Float64 = linattn.softmax_attention(
            query, key, value, is_causal=is_causal, key_bias=bias
        )
    if not np.isfinite(output).all():
        raise CommandError(
            f"{inputs.source}: exact softmax attention overflows: the numbers are too large"
        )
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


def error_on_rows(case: Case, inputs: Inputs, *, is_causal: bool, seed: int) -> float:
    """Return the median over heads of the error of a call, on some rows that are exact."""
    attend = prepare(case, inputs, seed=seed)
    output = attend(*inputs.arrays, is_causal=is_causal, key_bias=inputs.key_bias)
    rows = held_out_rows(output.shape[-2], CHECKED_ROWS, seed)
    bias = inputs.key_bias
    weights = {} if bias is None else {"key_bias": bias.astype(np.float64)}
    given = StreamInputs(*inputs.arrays, ExactMap(), weights, is_causal, None)
    exact = attend_exactly(given, inputs.query[:, rows].astype(np.float64), rows)
    return _quantile(relative_error(output[:, rows], exact), 0.5)


def prepare(case: Case, inputs: Inputs, *, seed: int, draw: int = 0) -> Attend:
    """Draw or fit the map of a case.

    A draw depends on the seed, the number of columns and the number of the draw only, not on
    the other measurements; maps with the same columns share it.
    """
    rng = np.random.default_rng([seed, case.num_features or 0, draw])
    return case.method.make(inputs.query, inputs.key, case.num_features, rng)


def multiplications(case: Case, inputs: Inputs, *, is_causal: bool) -> float:
    """Return about how many multiplications one call takes, over all heads."""
    return len(inputs.query) * case.method.multiplications(_sizes(case, inputs, is_causal))


def _sizes(case: Case, inputs: Inputs, is_causal: bool) -> Sizes:
    (_, L, d), (_, S, e) = inputs.query.shape, inputs.value.shape
    return Sizes(L, S, d, e, case.num_features or 0, is_causal)


def check(cases: Iterable[Case], inputs: Inputs) -> None:
    """Find out before anything is measured whether the maps take their numbers of columns.

    Raises
    ------
    CommandError
        One does not.
    """
    first_token = replace(inputs, query=inputs.query[:, :1], key=inputs.key[:, :1])
    for case in cases:
        if not case.method.held_out:  # whose numbers are limited by the tokens that there are
            try:
                prepare(case, first_token, seed=0)
            except ValueError as error:
                raise CommandError(f"--num-features: {case.label}: {error}") from None


def measure(
    case: Case, inputs: Inputs, exact: Float64, *, is_causal: bool, seed: int, draws: int
) -> Row:
    """Measure one case: error per draw and head, then time, then memory, in separate calls.

    A method without a choice of columns, or without chance, is not drawn again. One that fails
    gives a row that says so.
    """
    method, num_keys = case.method, inputs.key.shape[-2]
    sizes = _sizes(case, inputs, is_causal)
    row = Row(
        method=method.name,
        label=method.label,
        num_features=case.num_features,
        kind=method.kind,
        cost=method.multiplications(sizes) / exact_multiplications(sizes),
        held_out=method.held_out,
        exact_share=method.exact_share(num_keys, case.num_features or 0, is_causal),
    )
    try:
        return _measured(row, case, inputs, exact, is_causal=is_causal, seed=seed, draws=draws)
    except FAILURES as error:
        return replace(row, failure=reason(error))


def _measured(
    row: Row,
    case: Case,
    inputs: Inputs,
    exact: Float64,
    *,
    is_causal: bool,
    seed: int,
    draws: int,
) -> Row:
    judged, truth = inputs, exact
    if row.held_out:
        half = max(1, inputs.key.shape[-2] // 2)
        judged = inputs.tokens(slice(half, None))
        truth = exact_output(judged, is_causal=is_causal)
    errors = []
    setup_seconds = math.inf
    begun = perf_counter()
    for draw in range(draws if case.method.has_num_features and case.method.is_random else 1):
        if draw and case.method.kind != "map" and perf_counter() - begun > MAX_DRAW_SECONDS:
            break
        start = perf_counter()
        attend = prepare(case, inputs, seed=seed, draw=draw)
        setup_seconds = min(setup_seconds, perf_counter() - start)
        output = attend(*judged.arrays, is_causal=is_causal, key_bias=judged.key_bias)
        errors.append(relative_error(output, truth))
    call = partial(attend, *inputs.arrays, is_causal=is_causal, key_bias=inputs.key_bias)
    timing = fastest(call, max_calls=10, max_seconds=0.5)
    over_all = np.concatenate(errors)
    return replace(
        row,
        cost=getattr(attend, "cost", row.cost),
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
    return min((row for row in rows if row.may_win), key=_median, default=None)


def cheapest_row(rows: Iterable[Row]) -> Row | None:
    """Return the fastest row that is good enough, of those that may win."""
    return min(_good_enough(rows), key=_seconds, default=None)


def uniform_row(rows: Iterable[Row]) -> Row:
    """Return the row of uniform attention."""
    return next(row for row in rows if row.method == UNIFORM.name)


def judge(
    rows: Sequence[Row], crossover: Crossover | None = None, *, degenerate: str = ""
) -> Verdict:
    """Say which map is best, and whether to use it without retraining.

    Parameters
    ----------
    rows : sequence of Row
        Rows, references included.
    crossover : Crossover, optional
        Crossover of the cheapest good map.
    degenerate : str
        Why any map would do on these inputs, if that is so.
    """
    uniform = uniform_row(rows).median
    published = _published(rows)
    if degenerate or uniform <= GOOD_ENOUGH:
        why = degenerate or f"even uniform attention has a median error of {uniform:.2g} here"
        sentence = (
            f"none: {why}, so that these inputs do not tell maps apart; measure on queries, "
            "keys and values of a trained model."
        )
        return Verdict(None, None, None, uniform, GOOD_ENOUGH, False, "", sentence)
    if not any(row.kind == "map" for row in rows):
        return Verdict(None, None, None, uniform, GOOD_ENOUGH, False, "", published.lstrip())
    cheapest, best = cheapest_row(rows), best_row(rows)
    use = "exact"
    if cheapest is not None:
        use, sentence = _worth(cheapest, rows, crossover)
        best = cheapest
    elif best is not None:
        sentence = _not_enough(best, rows, uniform)
    else:
        sentence = "no map gave a finite error: use exact softmax attention."
        if any(row.exact_share > MAX_EXACT_SHARE for row in rows):
            use, sentence = "", "none: no map approximated enough to be judged."
    if cheapest is None and any(row.exact_share > MAX_EXACT_SHARE for row in rows):
        sentence += (
            " Maps that need no approximation for most pairs at this size are left out: measure "
            "them on more tokens."
        )
    sentence += published
    good_enough = cheapest is not None
    found: tuple[Any, Any, Any] = (None, None, None)
    if best is not None:
        found = (best.method, best.num_features, best.median)
    return Verdict(*found, uniform, GOOD_ENOUGH, good_enough, use, sentence)


def refuted(verdict: Verdict, why: str) -> Verdict:
    """Return the verdict against a map that is not good enough for all tokens."""
    sentence = f"{why}: use exact softmax attention, or linattn.attention()."
    return replace(verdict, sentence=sentence, use="exact", good_enough=False)


def frontier(rows: Iterable[Row]) -> list[Row]:
    """Return the rows than which no other one has less error at no more multiplications.

    In the order of their cost; of rows whose errors count, bounds and references aside.
    """
    found: list[Row] = []
    measured = [row for row in rows if row.counts and row.kind in ("map", "published")]
    for row in sorted(measured, key=lambda row: (row.cost, row.median)):
        if not found or row.median < found[-1].median:
            found.append(row)
    return found


def _published(rows: Sequence[Row]) -> str:
    """Say how near published attentions come, and what bounds them."""
    measured = [row for row in rows if row.kind == "published" and row.counts]
    if not measured:
        return ""
    best = min(measured, key=_median)
    text = (
        f" Of published attentions {best.full_label} comes nearest (median error "
        f"{best.median:.2g}, {best.cost:.0%} of the multiplications of exact attention)"
    )
    equal = [row for row in rows if row.num_features == best.num_features and not row.failure]
    ours = best_row(equal)
    if ours is not None:
        text += f"; with as many {ours.label} has {ours.median:.2g} ({ours.cost:.0%})"
    bounds = [
        f"{row.label.removeprefix('bound: ')} {row.median:.2g}"
        for row in equal
        if row.kind == "bound"
    ]
    return f"{text}; bounds: {', '.join(bounds)}." if bounds else f"{text}."


def _worth(row: Row, rows: Sequence[Row], crossover: Crossover | None) -> tuple[str, str]:
    """Say whether the cheapest good row is worth using: it must be faster than exact attention."""
    tied = _tied(row, _good_enough(rows), _seconds)
    enough = (
        f"{row.full_label} is the cheapest map that is good enough to use unretrained "
        f"(median error {row.median:.2g} <= {GOOD_ENOUGH:g}, 90th percentile "
        f"{row.percentile_90:.2g}{f'; tied in time with {tied}' if tied else ''})"
    )
    exact = next(other for other in rows if other.method == EXACT.name).seconds
    ours, theirs = duration(row.seconds), duration(exact)
    if row.seconds * TIE < exact:
        return "map", f"{enough}: it takes {ours}, exact softmax attention {theirs}."
    if row.seconds < exact * TIE:
        why = f"about as fast on these tokens ({theirs}; the map {ours})"
    else:
        why = f"faster on these tokens ({theirs}; the map {ours})"
    sentence = f"{enough}, but exact attention is {why}: use exact softmax attention."
    if crossover is not None and crossover.length is not None:
        sentence += (
            f" On one head the map is the faster one from about {crossover.rounded:,} "
            f"{crossover.unit}s on: for such lengths, measure on such sequences."
        )
    return "exact", sentence


def _not_enough(row: Row, rows: Iterable[Row], uniform: float) -> str:
    best = f"{row.full_label} is the best map"
    errors = f"median error {row.median:.2f}"
    if row.median >= uniform:
        why = f"no better than uniform attention ({errors} >= {uniform:.2f})"
        return f"{best} but {why}: use exact softmax attention."
    tied = _tied(row, [other for other in rows if other.may_win], _median)
    if tied:
        best += f" (tied with {tied})"
    if row.median * TIE >= uniform:
        why = f"hardly better than uniform attention ({errors} against {uniform:.2f})"
    else:
        why = f"not good enough to use unretrained ({errors} > {GOOD_ENOUGH:g})"
    return f"{best} but {why}: use exact softmax attention."


def _good_enough(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.may_win and row.median <= GOOD_ENOUGH]


def _with_number(label: str, number: int | None, kind: str) -> str:
    """Name a method with its columns, or its keys where it is no map."""
    if number is None:
        return label
    return f"{label} with {number} {'columns' if kind == 'map' else 'keys'}"


def _tied(row: Row, rows: Iterable[Row], number: Callable[[Row], float]) -> str:
    """Name the rows that another run may put before this one."""
    names = [
        other.full_label
        for other in sorted(rows, key=number)
        if other is not row and number(other) <= number(row) * TIE
    ]
    if len(names) > 2:
        names[2:] = [f"{len(names) - 2} more"]
    return " and ".join(names)


def _quantile(errors: Float64, fraction: float) -> float:
    with np.errstate(invalid="ignore"):
        value = float(np.quantile(errors, fraction))
    # Between a finite and an infinite head, interpolation may give inf - inf.
    return math.inf if math.isnan(value) else value

"""Time of one head against sequence length, linear and exact; the crossover. Prints nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from linattn.cli.method import FAILURES, Attend
from linattn.cli.text import reason
from linattn.cli.timing import fastest

__all__ = ["EXPONENTS", "WARM_UP", "Crossover", "LeftOut", "Point", "Sweep", "crossover", "sweep"]

EXPONENTS: Mapping[str, int] = {"linear": 1, "exact": 2}
"""The two curves, and the power of the length with which each grows."""

WARM_UP = 1024
"""Length of the first call of each curve, which is not reported: shorter ones say nothing about
longer ones, since their time does not depend on the length."""


@dataclass(frozen=True)
class Point:
    """One measured time.

    Attributes
    ----------
    curve : str
        "linear" or "exact".
    length : int
        Tokens.
    seconds : float
        Time of the fastest call.
    calls : int
        Number of calls; the time is the fastest of them.
    """

    curve: str
    length: int
    seconds: float
    calls: int


@dataclass(frozen=True)
class LeftOut:
    """A point that was not measured, mostly because it would not fit into the time budget.

    Attributes
    ----------
    curve, length
        As in `Point`.
    expected_seconds : float
        Time of the longest measured call, times the length's ratio to the curve's exponent. It
        decides which lengths are measured and is never plotted or used for the crossover.
    failure : str
        Why the call failed, if it was made; else empty.
    """

    curve: str
    length: int
    expected_seconds: float
    failure: str = ""


@dataclass(frozen=True)
class Crossover:
    """From which length on linear attention is faster, as far as it was measured.

    Attributes
    ----------
    status : str
        "crossed": linear was slower at between[0], and faster from between[1] on; "below": linear
        was faster at every length, between[1] and longer; "not reached": exact was
        faster at the longest length where both were measured, between[0]; "not measured".
    length : float or None
        Where the lines through the two points around it meet in log-log axes, if crossed.
    between : tuple of (int or None)
        The measured lengths around it.
    unit : str
        "token", or "key" in cross attention.
    """

    status: str
    length: float | None = None
    between: tuple[int | None, int | None] = (None, None)
    unit: str = "token"

    @property
    def rounded(self) -> int | None:
        """The length with the two digits that it deserves."""
        return None if self.length is None else int(float(f"{self.length:.2g}"))


@dataclass(frozen=True)
class Sweep:
    """Time against sequence length.

    Attributes
    ----------
    label : str
        The linear method.
    points : tuple of Point
        What was measured.
    left_out : tuple of LeftOut
        What was not.
    time_budget : float
        Seconds that were allowed.
    num_real : int
        Keys that no further key repeats.
    sizes : tuple of int
        Queries and keys as given: in cross attention a length counts keys, and queries are in this
        proportion to them.
    """

    label: str
    points: tuple[Point, ...]
    left_out: tuple[LeftOut, ...]
    time_budget: float
    num_real: int
    sizes: tuple[int, int] = (1, 1)

    @property
    def unit(self) -> str:
        """What a length counts."""
        return "token" if self.sizes[0] == self.sizes[1] else "key"

    @property
    def crossover(self) -> Crossover:
        """Where linear attention overtakes exact attention."""
        found = crossover(self.seconds("linear"), self.seconds("exact"))
        return replace(found, unit=self.unit)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every length that was asked for, ascending."""
        measured = {point.length for point in self.points}
        return tuple(sorted(measured | {point.length for point in self.left_out}))

    def seconds(self, curve: str) -> dict[int, float]:
        """Return the measured times of a curve by length."""
        return {point.length: point.seconds for point in self.points if point.curve == curve}


def sweep(
    arrays: Sequence[Any],
    lengths: Sequence[int],
    curves: Mapping[str, Attend],
    *,
    label: str,
    num_real: int,
    is_causal: bool,
    time_budget: float,
    sizes: tuple[int, int] = (1, 1),
    notify: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Time both curves at every length that is expected to fit into the time budget.

    The next point of a curve is expected to take the time of its longest one so far, times the
    ratio of the lengths to the power in `EXPONENTS`. The exact curve leaves what the rest of
    the linear one is expected to need, or half of what there is. The budget decides which calls
    start; a call that has started is not stopped.

    Parameters
    ----------
    arrays : sequence of ndarray
        Query, key and value of one head, at least as long as the longest length, and log weights of
        keys or None.
    lengths : sequence of int
        Ascending.
    curves : mapping
        The call for "linear" and for "exact".
    label : str
        Name of the linear method.
    num_real : int
        Keys of the arrays before those that repeat them.
    is_causal : bool
        Passed on to the calls.
    time_budget : float
        Seconds.
    sizes : tuple of int
        As in `Sweep`.
    notify : callable
        Called with a description before each of the ``2 * len(lengths)`` points.
    """
    last: dict[str, tuple[int, float]] = {}
    for curve, attend in curves.items():
        length = min(lengths[-1], WARM_UP)
        last[curve] = (length, 0.0)
        with suppress(*FAILURES):  # told of the points themselves
            call = _call(attend, arrays, length, sizes, is_causal)
            timing = fastest(call, max_calls=2, max_seconds=0.1)
            last[curve] = (length, timing.seconds)

    points: list[Point] = []
    left_out: list[LeftOut] = []
    remaining = time_budget
    for index, length in enumerate(lengths):
        for curve, attend in curves.items():
            notify(f"{curve} attention, {length:,} tokens")
            expected = _expected(curve, last[curve], length)
            reserve = 0.0
            if curve == "exact":
                later = lengths[index + 1 :]
                rest = sum(_expected("linear", last["linear"], tokens) for tokens in later)
                reserve = min(rest, remaining / 2)
            if expected > remaining - reserve:
                left_out.append(LeftOut(curve, length, expected))
                continue
            try:
                call = _call(attend, arrays, length, sizes, is_causal)
                timing = fastest(call, max_calls=20, max_seconds=min(1.0, remaining - reserve))
            except FAILURES as error:
                left_out.append(LeftOut(curve, length, expected, reason(error)))
                continue
            remaining -= timing.total_seconds
            last[curve] = max(last[curve], (length, timing.seconds))
            points.append(Point(curve, length, timing.seconds, timing.calls))

    return Sweep(label, tuple(points), tuple(left_out), time_budget, num_real, sizes)


def crossover(linear: Mapping[int, float], exact: Mapping[int, float]) -> Crossover:
    """Find from which length on linear attention is faster than exact attention.

    Only lengths where both were measured count. Between the last of them where linear is not
    faster and the next, log(linear / exact) is interpolated over log(length), linearly; beyond the
    measured lengths nothing is said.

    Parameters
    ----------
    linear, exact : mapping
        Seconds by length.
    """
    lengths = sorted(linear.keys() & exact.keys())
    if not lengths:
        return Crossover("not measured")
    ratio = [math.log(linear[length] / exact[length]) for length in lengths]
    slower = [index for index, value in enumerate(ratio) if value >= 0]
    if not slower:
        return Crossover("below", between=(None, lengths[0]))
    low = slower[-1]
    if low == len(lengths) - 1:
        return Crossover("not reached", between=(lengths[low], None))
    left, right = math.log(lengths[low]), math.log(lengths[low + 1])
    share = ratio[low] / (ratio[low] - ratio[low + 1])
    length = math.exp(left + share * (right - left))
    return Crossover("crossed", length, (lengths[low], lengths[low + 1]))


def _expected(curve: str, last: tuple[int, float], length: int) -> float:
    last_length, seconds = last
    return seconds * float(length / last_length) ** EXPONENTS[curve]


def _call(
    attend: Attend, arrays: Sequence[Any], length: int, sizes: tuple[int, int], is_causal: bool
) -> Callable[[], object]:
    query, *rest = arrays
    query = query[: round(length * sizes[0] / sizes[1]) or 1]
    key, value, bias = (None if array is None else array[:length] for array in rest)
    return lambda: attend(query, key, value, is_causal=is_causal, key_bias=bias)

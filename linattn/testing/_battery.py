"""What all batteries share: their report, and how a row of it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.testing._evidence import Evidence
from linattn.testing._means import Noise
from linattn.testing.check import Report, check_on_fail, outcome, row_of
from linattn.testing.estimators import assert_draws

Check = tuple[str, str, Callable[[], Evidence]]
"""Name, claim, and the check."""


@dataclass(frozen=True)
class BatteryReport(Report):
    """What a battery found; printed, a table of 80 columns.

    Attributes
    ----------
    title, rows
        See :class:`linattn.testing.Report`.
    declared : float
        Probability that a right estimator fails, all rows together.
    """

    declared: float = 0.0

    @property
    def false_alarm_rate(self) -> float:
        """Probability that a right estimator fails, as declared."""
        return self.declared

    @property
    def summary(self) -> str:
        """One sentence: how many checks ended how, and the false-alarm rate."""
        return super().summary.replace("a right map", "a right estimator")

    @property
    def reservation(self) -> str:
        """Which checks could not be made, as a sentence; empty for none."""
        return f"Not tested: {self.idle}." if self.idle else ""


def run(title: str, checks: Sequence[Check], false_alarm: float, on_fail: str) -> BatteryReport:
    """Make a report of all checks, and raise it if one failed and that was asked for."""
    check_on_fail(on_fail)
    report = BatteryReport(title, tuple(row_of(*check) for check in checks), false_alarm)
    return outcome(report, on_fail)


def title_of(battery: str, draw: Any) -> str:
    """Name the battery and the function."""
    return f"{battery}: {getattr(draw, '__qualname__', type(draw).__name__)}"


def arity_of(draw: Any, allowed: tuple[int, ...], call: str) -> int:
    """Count the arguments that a function must be given."""
    try:
        parameters = inspect.signature(draw).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [p for p in parameters if p.kind in kinds]
    required = sum(p.default is p.empty for p in taken)
    if not callable(draw) or required not in allowed:
        raise TypeError(f"draw must be a function {call}, got {draw!r}; wrap yours in a lambda")
    return required


def assert_stated(
    check: str, draws: NDArray[Any], expected: Any, variance: Any, false_alarm: float
) -> Evidence:
    """Test draws ``(n, ...)`` of known mean and variance."""
    want = np.broadcast_to(np.asarray(expected, dtype=np.float64), draws.shape[1:])
    noise = Noise(np.broadcast_to(np.asarray(variance, dtype=np.float64), want.shape))
    return assert_draws(check, lambda count: draws[:count], want, noise, len(draws), false_alarm)


def weakest(check: str, found: list[Evidence]) -> Evidence:
    """Sum up what several assertions have shown."""
    least = max(found, key=lambda evidence: evidence.detectable)
    rate = sum(evidence.false_alarm_rate for evidence in found)
    return Evidence(check, least.detail, rate, least.detectable, least.detectable_sd)

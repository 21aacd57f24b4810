"""What an assertion returns when it passes, and how it fails."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from math import nan
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays


class UntestableError(ValueError):
    """No valid test exists of what was asked, or none that could fail; the message says why.

    Examples
    --------
    >>> from linattn.feature_maps import PositiveFeatures
    >>> from linattn.testing import UntestableError, assert_unbiased
    >>> try:
    ...     assert_unbiased(PositiveFeatures(4, num_features=8, rng=0), num_draws=2)
    ... except UntestableError as error:
    ...     print("num_draws is too small" in str(error))
    True
    """


class CheckFailedError(AssertionError):
    """A check of a table failed: the message is the whole table, ``error.report`` the report.

    Examples
    --------
    >>> from linattn.testing import CheckFailedError, check_recurrence
    >>> def kernel(query, key, value, **gates):
    ...     return value, None
    >>> try:
    ...     check_recurrence(kernel, update_rule="linear")
    ... except CheckFailedError as error:
    ...     print(error.report.passed, error.report.rows[0].check)
    False golden
    """

    @property
    def report(self) -> Any:
        """What the function would have returned with ``on_fail="return"``."""
        return self.args[0]


class MalformedFeaturesError(TypeError):
    """A map returned an object that is no valid ``Features``; the message describes it."""


@dataclass(frozen=True)
class Evidence:
    """What a passed assertion has shown.

    Attributes
    ----------
    check : str
        Name of the assertion.
    detail : str
        What was compared, in words.
    false_alarm_rate : float
        Probability that it would fail although all is right; 0 for deterministic checks.
    detectable : float
        Smallest relative error that it finds.
    detectable_sd : float
        For means: the same in standard deviations of one draw, as they were measured; 0 where
        nothing is random.
    estimate : float
        For means, variances and covariances: what was measured less what was claimed, at the entry
        or pair that is furthest from its claim. NaN where nothing was estimated.
    interval : tuple of float
        Holds the true difference there with a probability of 95 %, all entries together.
    entry : tuple of int
        Index of that entry.

    Examples
    --------
    >>> from linattn.feature_maps import PositiveFeatures
    >>> from linattn.testing import assert_unbiased
    >>> evidence = assert_unbiased(PositiveFeatures(4, num_features=8, rng=0), num_draws=200)
    >>> evidence.check, evidence.false_alarm_rate
    ('assert_unbiased', 1e-09)
    """

    check: str
    detail: str
    false_alarm_rate: float = 0.0
    detectable: float = 0.0
    detectable_sd: float = 0.0
    estimate: float = nan
    interval: tuple[float, float] = (nan, nan)
    entry: tuple[int, ...] = ()


def fail(check: str, message: str) -> NoReturn:
    """Raise what every assertion raises; the message begins with its name."""
    raise AssertionError(f"{check}: {message}")


def on_host(array: Any) -> NDArray[np.float64]:
    """Float64 NumPy copy of an array of any library."""
    return np.array(_arrays.to_numpy(array), dtype=np.float64)


def assert_close(check: str, what: str, actual: Any, expected: Any, rtol: float) -> None:
    """Compare on the scale of the largest entry; NaN and inf never pass."""
    if not 0 < rtol < 1:
        raise ValueError(f"rtol must be between 0 and 1, got {rtol!r}")
    got, want = on_host(actual), on_host(expected)
    if got.shape != want.shape:
        fail(check, f"{what}: want shape {want.shape}, got {got.shape}")
    error = largest(got - want)
    allowed = rtol * max(1.0, largest(want))
    if not error <= allowed:
        fail(check, f"{what}: largest difference {error:.3g}, want at most {allowed:.3g}")


def name_of(given: Any) -> str:
    """Name what was given in the place of something else."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def check_function(name: str, function: Any, call: str) -> None:
    """Reject what cannot be called as ``call`` says: a class makes an object, not a result."""
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{name} must be a function {call}, got {name_of(function)}")


def check_not_empty(name: str, values: Sized) -> None:
    """Raise an error for an empty sequence: a check of nothing cannot fail."""
    if not len(values):
        raise ValueError(f"{name} must not be empty: what is tried on nothing cannot fail")


def largest(array: ArrayLike) -> float:
    """Largest absolute entry; NaN if there is one."""
    return float(np.max(np.abs(array), initial=0.0))

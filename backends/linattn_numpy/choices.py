"""Choices between two ways to compute, by what the machine does: its name does not tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from math import log
from timeit import Timer
from typing import Any, TypeAlias

import numpy as np

from linattn_numpy import tuning

__all__ = ["choose", "gain", "power_and_unit"]

Kinds: TypeAlias = tuple[str, ...]

_found: dict[tuple[str, Any], Kinds] = {}


def choose(variable: str, kinds: Kinds, measure: Callable[[Any], Kinds], dtype: Any) -> Kinds:
    """Kinds of work that are done in the other way, measured at the first use of a dtype.

    A variable of the environment overrides it: kinds with commas between.
    """
    if (variable, dtype) not in _found:
        asked = os.environ.get(variable)
        words = () if asked is None else map(str.strip, asked.split(","))
        found = measure(dtype) if asked is None else tuple(filter(None, words))
        if not set(found) <= set(kinds):
            message = (
                f"the environment variable {variable} must be some of {', '.join(kinds)}, "
                f"separated by commas, or empty for none, got {asked!r}"
            )
            raise ValueError(message)
        # The first of several threads decides for all.
        _found.setdefault((variable, dtype), found)
    return _found[variable, dtype]


def gain(usual: Callable[[], Any], other: Callable[[], Any]) -> float:
    """How many times as long the usual way takes: least times, as others have the core too."""
    timers = Timer(usual), Timer(other)
    turns = [[timer.timeit(1) for timer in timers] for _ in range(tuning.MEASURED_TURNS)]
    return float(np.divide(*np.min(turns, axis=0)))


def _measured(dtype: Any) -> Kinds:
    x = np.linspace(-20, 20, tuning.MEASURED_EXPONENTS, dtype=dtype)
    times = gain(partial(np.exp, x, np.empty_like(x)), partial(np.exp2, x, np.empty_like(x)))
    return ("float32",) if times > tuning.MIN_EXP2_GAIN else ()


def power_and_unit(dtype: Any) -> tuple[np.ufunc, float]:
    """Exponentials of x are ``power(x / unit)``: of 2 where that takes less time.

    In float64 it gains little, and what goes into a factor is rounded: errors would double.
    """
    is_two = dtype == np.float32 and choose("LINATTN_EXP2", ("float32",), _measured, dtype)
    return (np.exp2, log(2)) if is_two else (np.exp, 1.0)

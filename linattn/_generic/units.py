"""Powers of two that make values and cotangents moderate: exact, and taken back at the end.

Attention is linear in its values, and gradients in cotangents. Products of a weight with a number
far from 1 may be smaller than the smallest normal number, and then take some processors a hundred
times as long. Each head has a unit of its own where no array is shared by heads. Only NumPy
arrays get units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from linattn._generic.numerics import ignore_fp_warnings
from linattn.typing import Array, Problem, Recurrence

__all__ = [
    "in_units",
    "is_moderate",
    "numerators_times",
    "recurrence_in_units",
    "times_power",
    "token_times",
    "unit_log",
    "value_log",
]

SMALL, LARGE = 2.0**-20, 2.0**10
"""Sizes of the largest number that needs no unit."""


def is_moderate(value: Array) -> bool:
    """Whether the first or the last number of a token says that it needs no unit."""
    if not isinstance(value, np.ndarray) or value.size == 0:
        return True
    return any(SMALL <= abs(float(value.item(i))) <= LARGE for i in (0, -1))


def unit_log(lead: tuple[int, ...], *arrays: Array) -> Any:
    """Return log2 of each head's unit, ``(*lead, 1, 1)``: the largest numbers are about 1 in it.

    0 if one row of each head of the first array is moderate, or if a number would be rounded.
    """
    given = [x for x in arrays if isinstance(x, np.ndarray) and x.size and x.dtype.itemsize > 2]
    if not given:
        return 0
    few = np.abs(given[0][..., given[0].shape[-2] // 2, :]).max(axis=-1)
    if few.min() >= SMALL and few.max() <= LARGE:
        return 0
    tops, leasts = [], []
    for x in given:
        sizes = np.where(np.isfinite(x), np.abs(x), 0)
        axes = (*range(x.ndim - 2 - len(lead)), -2, -1)
        tops.append(sizes.max(axis=axes))
        leasts.append(np.where(sizes == 0, np.inf, sizes).min(axis=axes))
    top, least = np.maximum.reduce(tops), np.minimum.reduce(leasts)
    log = np.where((top >= SMALL) & (top <= LARGE), 0, np.frexp(top)[1])
    tiny = np.finfo(given[0].dtype).smallest_normal
    log = np.where((log > 0) & (np.ldexp(least, -log) < tiny), 0, log)
    return log[..., None, None] if log.any() else 0


def times_power(x: Array, log: Any) -> Array:
    """``x 2^log``, in two steps: a float may not hold the power."""
    if x is None or not np.any(log):
        return x
    half, unit = log // 2, np.ones((), x.dtype)
    return x * np.ldexp(unit, half) * np.ldexp(unit, log - half)


def token_times(x: Array, log: Any) -> Array:
    """``x 2^log`` of one token, ``(..., e)``."""
    return times_power(x, log[..., 0] if np.ndim(log) else log)


def numerators_times(kvz: Array, log: Any, of_normalizers: Any = 0) -> Array:
    """Multiply numerators of a state with ``2^log`` and its normalizers with another power."""
    if kvz is None or not (np.any(log) or np.any(of_normalizers)):
        return kvz
    z = times_power(kvz[..., -1:], of_normalizers)
    return np.concatenate([times_power(kvz[..., :-1], log), z], axis=-1)


# Attention --------------------------------------------------------------------------------------


def heads_of(problem: Problem) -> tuple[int, ...]:
    """Leading axes of units: the axes of the heads if all arrays have them, else none."""
    weights = problem.weights
    arrays = [problem.query, problem.key, problem.value, weights.key_bias, weights.log_decay]
    leads = [x.shape[:-2] for x in arrays if x is not None]
    if problem.state is not None:
        leads.append(problem.state.kvz.shape[:-2][-len(problem.lead) :] if problem.lead else ())
    return problem.lead if all(lead == problem.lead for lead in leads) else ()


def value_log(problem: Problem) -> Any:
    """Return log2 of the units of a problem's values, with the values in its state."""
    value, state = problem.value, problem.state
    # Numerators that are not divided may overflow in other units.
    if problem.policy.lazy or problem.exact.assigned is not None or not problem.normalize:
        return 0
    if not isinstance(value, np.ndarray):
        return 0
    lead = heads_of(problem)
    log = unit_log(lead, value)
    if state is None or (value.size and not np.any(log)):
        return log
    with ignore_fp_warnings():
        middle = state.kvz.shape[-2] // 2
        few = _means(state.kvz[..., middle : middle + 1, :])
        if value.size == 0 and not np.any(unit_log(lead, few)):
            return 0
        return unit_log(lead, value, _means(state.kvz))


def _means(kvz: Array) -> Array:
    z = kvz[..., -1:]
    return kvz[..., :-1] / np.where(z == 0, 1, z)


def in_units(problem: Problem, log: Any) -> Problem:
    """Divide the values of a problem, and of its state, by ``2^log``."""
    if not np.any(log):
        return problem
    state = problem.state
    if state is not None:
        state = state._replace(kvz=numerators_times(state.kvz, -log))
    return problem.replace(value=times_power(problem.value, -log), state=state)


# Recurrences ------------------------------------------------------------------------------------


def recurrence_heads(problem: Recurrence) -> tuple[int, ...]:
    """As :func:`heads_of`."""
    names = ("query", "key", "value", "log_decay", "beta")
    leads = [x.shape[:-2] for name in names if (x := getattr(problem, name)) is not None]
    if problem.initial_state is not None:
        front = 0 if problem.borders is None else 1
        leads.append(problem.initial_state.shape[front:-2])
    return problem.lead if all(lead == problem.lead for lead in leads) else ()


def recurrence_in_units(problem: Recurrence) -> tuple[Recurrence, Any]:
    """Measure values, and the state before them, in units that make them moderate; their log2."""
    value, state = problem.value, problem.initial_state
    log = unit_log(recurrence_heads(problem), value, state)
    if not np.any(log):
        return problem, 0
    value, state = (times_power(x, -log) for x in (value, state))
    return replace(problem, value=value, initial_state=state), log

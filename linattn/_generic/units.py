"""Units: powers of two by which values and cotangents are divided before a computation.

The result is multiplied by the unit, which is exact: attention is linear in its values, gradients
in cotangents. Units avoid subnormal products, which some processors compute a hundred times as
slowly. Each head has its own unit if heads share no array. Only NumPy arrays get units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from linattn._generic.numerics import ignore_fp_warnings
from linattn.typing import Array, Declined, Problem, Recurrence

__all__ = [
    "TokenUnit",
    "in_units",
    "is_moderate",
    "numerators_times",
    "recurrence_in_units",
    "times_power",
    "token_times",
    "token_unit",
    "unit_log",
    "value_log",
]

SMALL = 2.0**-20
"""An array whose largest absolute number is at least this needs no unit."""

LARGE = 2.0**60
"""Largest sum of squares of values in units: sums of them do not overflow."""


def is_moderate(value: Array) -> bool:
    """Return whether the first or the last number of one token shows that it needs no unit."""
    if not isinstance(value, np.ndarray) or value.size == 0:
        return True
    return any(abs(float(value.item(i))) >= SMALL for i in (0, -1))


def unit_log(lead: tuple[int, ...], *arrays: Array) -> Any:
    """Return log2 of each head's unit, ``(*lead, 1, 1)``, or the number 0 for no units.

    A head's largest absolute number divided by its unit is between 1/2 and 1. Only heads of small
    numbers get a unit: a large number, masked or later than a query, must not make others small.
    No head gets one if the middle row of the first array has a number of `SMALL` or more in each.
    """
    given = [x for x in arrays if isinstance(x, np.ndarray) and x.size and x.dtype.itemsize > 2]
    if not given:
        return 0
    few = np.abs(given[0][..., given[0].shape[-2] // 2, :]).max(axis=-1)
    if few.min() >= SMALL:
        return 0
    tops = []
    for x in given:
        sizes = np.where(np.isfinite(x), np.abs(x), 0)
        tops.append(sizes.max(axis=(*range(x.ndim - 2 - len(lead)), -2, -1)))
    top = np.maximum.reduce(tops)
    log = np.where(top >= SMALL, 0, np.frexp(top)[1])
    return log[..., None, None] if log.any() else 0


def times_power(x: Array, log: Any) -> Array:
    """Return ``x 2^log`` by two multiplications, as ``2^log`` may overflow; None for None."""
    if x is None or not np.any(log):
        return x
    half, unit = log // 2, np.ones((), x.dtype)
    return x * np.ldexp(unit, half) * np.ldexp(unit, log - half)


def token_times(x: Array, log: Any) -> Array:
    """Return ``x 2^log`` for one token ``(..., e)``, which has no axis of length."""
    return times_power(x, log[..., 0] if np.ndim(log) else log)


def numerators_times(kvz: Array, log: Any, of_normalizers: Any = 0) -> Array:
    """Multiply numerators of a state by ``2^log``, its normalizers by ``2^of_normalizers``."""
    if kvz is None or not (np.any(log) or np.any(of_normalizers)):
        return kvz
    z = times_power(kvz[..., -1:], of_normalizers)
    return np.concatenate([times_power(kvz[..., :-1], log), z], axis=-1)


# Attention --------------------------------------------------------------------------------------


def heads_of(problem: Problem) -> tuple[int, ...]:
    """Return the leading axes of units: ``problem.lead`` if all arrays have them, else ``()``."""
    weights = problem.weights
    arrays = [problem.query, problem.key, problem.value, weights.key_bias, weights.log_decay]
    leads = [x.shape[:-2] for x in arrays if x is not None]
    if problem.state is not None:
        leads.append(problem.state.kvz.shape[:-2][-len(problem.lead) :] if problem.lead else ())
    return problem.lead if all(lead == problem.lead for lead in leads) else ()


def value_log(problem: Problem) -> Any:
    """Return log2 of the units for a problem's values and the mean values in its state."""
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
    """Return the mean value of each feature of a state: numerator over normalizer."""
    z = kvz[..., -1:]
    return kvz[..., :-1] / np.where(z == 0, 1, z)


def in_units(problem: Problem, log: Any) -> Problem:
    """Return a problem with its values, and the numerators of its state, divided by ``2^log``."""
    if not np.any(log):
        return problem
    state = problem.state
    if state is not None:
        state = state._replace(kvz=numerators_times(state.kvz, -log))
    return problem.replace(value=times_power(problem.value, -log), state=state)


class TokenUnit(NamedTuple):
    """Units of a stream, with factors ``(*lead, 1)`` that take a value to its unit and back."""

    log: Array
    into: Array
    back: Array

    def step(self, stepper: Any, query: Array, key: Array, value: Array) -> Array | Declined:
        """Take a step in units; decline a value that is far larger than those before."""
        with ignore_fp_warnings():
            value = value * self.into
            flat = value.reshape(-1)
            if not flat.dot(flat) <= LARGE:
                return Declined("a value needs another unit")
            output = stepper.step(query, key, value)
            return output if isinstance(output, Declined) else output * self.back


def token_unit(problem: Problem) -> TokenUnit | None:
    """Return the unit of a stream by its first value and the state before it; None for 1."""
    log = value_log(problem)
    if not np.any(log):
        return None
    # The factors are normal numbers.
    info = np.finfo(problem.value.dtype)
    log = np.maximum(log, info.minexp)
    into, back = (np.ldexp(info.dtype.type(1), x[..., 0]) for x in (-log, log))
    return TokenUnit(log, into, back)


# Recurrences ------------------------------------------------------------------------------------


def recurrence_heads(problem: Recurrence) -> tuple[int, ...]:
    """Return the leading axes of units of a recurrence, as `heads_of` does for a problem."""
    names = ("query", "key", "value", "log_decay", "beta")
    leads = [x.shape[:-2] for name in names if (x := getattr(problem, name)) is not None]
    if problem.initial_state is not None:
        front = 0 if problem.borders is None else 1
        leads.append(problem.initial_state.shape[front:-2])
    return problem.lead if all(lead == problem.lead for lead in leads) else ()


def recurrence_in_units(problem: Recurrence) -> tuple[Recurrence, Any]:
    """Return a recurrence with values and initial state divided by units, and log2 of the units."""
    value, state = problem.value, problem.initial_state
    log = unit_log(recurrence_heads(problem), value, state)
    if not np.any(log):
        return problem, 0
    value, state = (times_power(x, -log) for x in (value, state))
    return replace(problem, value=value, initial_state=state), log

"""Units: powers of two by which values and cotangents are divided before a computation.

The result is multiplied by the unit, which is exact: attention is linear in its values, gradients
in cotangents. Units avoid subnormal products, which some processors compute a hundred times as
slowly, and products that overflow. Each head has its own unit if heads share no array. Outputs
get units on NumPy, gradients in every library but Dask; elsewhere than on NumPy only
`are_far_apart` reads a number.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from linattn._arrays import dtype_bits, namespace
from linattn._numerics import ignore_fp_warnings
from linattn.typing import Array, Declined, Problem, Recurrence

SMALL = 2.0**-20
"""An array whose largest absolute number is at least this is not small."""

LARGE = {16: 40, 32: 40, 64: 400}
"""log2 of the largest numbers that are left in a head, by bits of a dtype.

The products of two, of values and cotangents, do not overflow. Further down, small numbers beside
a large one would lose their digits.
"""

MAX_SQUARES = {32: 2.0**90, 64: 2.0**810}
"""Largest sum of squares of values in units: sums of them do not overflow."""


def is_moderate(value: Array) -> bool:
    """Return whether the first or the last number of one token shows that it needs no unit."""
    if not isinstance(value, np.ndarray) or value.size == 0:
        return True
    most = 2.0 ** LARGE[8 * value.dtype.itemsize]
    return any(SMALL <= abs(float(value.item(i))) <= most for i in (0, -1))


def unit_log(lead: tuple[int, ...], *arrays: Array, seen: Array = None, whole: bool = False) -> Any:
    """Return log2 of each head's unit, ``(*lead, 1, 1)``, or the number 0 for no units.

    In its unit, the largest absolute number of a head of small numbers is between 1/2 and 1, and
    that of a head of large ones `LARGE`. A larger number beside small ones, which a query may not
    see, must not cost them their digits.

    ``seen``, ``(..., S, 1)``: rows of the first array that are not masked, or None. ``whole``:
    whether to inspect all rows. If not, no head gets a unit if the middle row of the first array is
    neither small nor large in any.
    """
    first, given = arrays[0], [x for x in arrays if x is not None and 0 not in x.shape]
    xp, bits, is_numpy = namespace(first), dtype_bits(first.dtype), isinstance(first, np.ndarray)
    most = 2.0 ** LARGE[bits]
    has_units = bits > 16 if is_numpy else whole and not array_api_compat.is_dask_array(first)
    if array_api_compat.is_cupy_array(first):
        # CuPy's functions know no bfloat16.
        has_units = has_units and bits > 16
    if not given or not has_units:
        return 0
    if str(first.dtype).rpartition(".")[2] == "float16":
        # Its largest number is less than that.
        return 0
    if not whole:
        middle = given[0].shape[-2] // 2
        few = np.abs(given[0][..., middle, :]).max(axis=-1)
        if seen is not None and given[0] is first:
            few = np.where(seen[..., middle, 0], few, 0)
        if few.min() >= SMALL and few.max() <= most:
            return 0
    tops = [_largest(x, seen if x is first else None, len(lead)) for x in given]
    top = tops[0] if len(tops) == 1 else xp.maximum(*tops)
    log = _exponent(top)
    log = xp.where(top < SMALL, log, xp.where(top > most, log - LARGE[bits], 0 * log))
    return log[..., None, None] if not is_numpy or log.any() else 0


def _largest(x: Array, mask: Array, num_lead: int) -> Array:
    """Largest finite absolute number of each head, of rows that are not masked."""
    xp = namespace(x)
    if mask is None and isinstance(x, np.ndarray):
        # Without copies.
        axes = (*range(x.ndim - 2 - num_lead), -2, -1)
        top = np.maximum(x.max(axis=axes), -x.min(axis=axes))
        if np.isfinite(top).all():
            return top
    counts = xp.isfinite(x) if mask is None else xp.isfinite(x) & mask
    sizes = xp.where(counts, xp.abs(x), xp.zeros_like(x))
    # A mask may have axes that the array lacks.
    return xp.max(sizes, axis=(*range(sizes.ndim - 2 - num_lead), -2, -1))


def _exponent(x: Array) -> Array:
    """Return the exponents of positive numbers, as ``frexp`` does, which the standard lacks."""
    xp = namespace(x)
    if hasattr(xp, "frexp"):
        return xp.frexp(x)[1]
    logs = xp.log2(xp.where(x > 0, x, xp.ones_like(x)))
    return xp.astype(xp.floor(logs), xp.int32) + 1


def _power(log: Array, dtype: Any) -> Array:
    """Return ``2^log``."""
    xp = namespace(log)
    if hasattr(xp, "ldexp"):
        return xp.ldexp(xp.ones_like(log, dtype=dtype), log)
    return xp.pow(xp.full_like(log, 2.0, dtype=dtype), xp.astype(log, dtype))


def times_power(x: Array, log: Any, *, in_place: bool = False) -> Array:
    """Return ``x 2^log`` by two multiplications, as ``2^log`` may overflow; None for None.

    ``in_place``: ``x`` may be overwritten.
    """
    if x is None or isinstance(log, int):
        return x
    half = log // 2
    first, second = (_power(each, x.dtype) for each in (half, log - half))
    with ignore_fp_warnings():
        if in_place:
            x *= first
        else:
            x = x * first
        x *= second
    return x


def token_times(x: Array, log: Any) -> Array:
    """Return ``x 2^log`` for one token ``(..., e)``, which has no axis of length."""
    return times_power(x, log[..., 0] if np.ndim(log) else log)


def numerators_times(kvz: Array, log: Any, of_normalizers: Any = 0) -> Array:
    """Multiply numerators of a state by ``2^log``, its normalizers by ``2^of_normalizers``."""
    if kvz is None or (isinstance(log, int) and isinstance(of_normalizers, int)):
        return kvz
    z = times_power(kvz[..., -1:], of_normalizers)
    return namespace(kvz).concat([times_power(kvz[..., :-1], log), z], axis=-1)


# Attention --------------------------------------------------------------------------------------


def heads_of(problem: Problem) -> tuple[int, ...]:
    """Return the leading axes of units: ``problem.lead`` if all arrays have them, else ``()``."""
    weights, state = problem.weights, problem.state
    arrays = [problem.query, problem.key, problem.value, weights.key_bias, weights.log_decay]
    leads = [x.shape[:-2] for x in arrays if x is not None]
    if state is not None:
        front = 0 if problem.sees.cu_seqlens is None else 1
        leads.append(state.kvz.shape[front:-2])
    return problem.lead if all(lead == problem.lead for lead in leads) else ()


def value_log(problem: Problem, *, whole: bool = False) -> Any:
    """Return log2 of the units for a problem's values and the mean values in its state.

    ``whole``, for gradients: as for :func:`unit_log`; numbers of torch and JAX get units too.
    """
    value, state, seen = problem.value, problem.state, problem.weights.key_mask
    if problem.exact.assigned is not None or not (isinstance(value, np.ndarray) or whole):
        return 0
    lead, is_empty = heads_of(problem), 0 in value.shape
    log = unit_log(lead, value, seen=seen, whole=whole)
    if not (problem.normalize or whole) and np.max(log) > 0:
        # Weights far below 1 would lose the digits of numerators.
        return 0
    if state is None or not (whole or is_empty or np.any(log)):
        return log
    with ignore_fp_warnings():
        few = _means(state.kvz[..., state.kvz.shape[-2] // 2, None, :])
        if is_empty and not whole and isinstance(unit_log(lead, few), int):
            return 0
        return unit_log(lead, value, _means(state.kvz), seen=seen, whole=whole)


def are_far_apart(sizes: list[tuple[Array, Any]], lead: tuple[int, ...]) -> bool:
    """Whether arrays, each divided by its ``2^log``, differ in some head by more than `LARGE`."""
    xp, last = namespace(sizes[0][0]), sizes[-1][0]
    if array_api_compat.is_dask_array(last):
        return False
    sizes = [(x, log) for x, log in sizes if 0 not in x.shape]
    tops = [_largest(x, None, len(lead))[..., None, None] for x, _ in sizes]
    logs = [_exponent(top) - log for top, (_, log) in zip(tops, sizes, strict=True)]
    most = LARGE[dtype_bits(last.dtype)]
    return any(
        bool(xp.any((first > 0) & (second > 0) & (abs(x - y) > most)))
        for (first, x), (second, y) in combinations(zip(tops, logs, strict=True), 2)
    )


def _means(kvz: Array) -> Array:
    """Return the mean value of each feature of a state: numerator over normalizer."""
    xp, z = namespace(kvz), kvz[..., -1:]
    return kvz[..., :-1] / xp.where(z == 0, xp.ones_like(z), z)


def in_units(problem: Problem, log: Any) -> Problem:
    """Return a problem with its values, and the numerators of its state, divided by ``2^log``."""
    if isinstance(log, int):
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
            if not flat.dot(flat) <= MAX_SQUARES[8 * flat.itemsize]:
                return Declined("a value needs another unit")
            output = stepper.step(query, key, value)
            return output if isinstance(output, Declined) else output * self.back


def token_unit(problem: Problem) -> TokenUnit | None:
    """Return the unit of a stream by its first value and the state before it; None for 1."""
    log = value_log(problem)
    if isinstance(log, int):
        return None
    # The factors are normal numbers.
    info = np.finfo(problem.value.dtype)
    log = np.maximum(log, info.minexp)
    into, back = (np.ldexp(info.dtype.type(1), x[..., 0]) for x in (-log, log))
    return TokenUnit(log, into, back)


# Recurrences ------------------------------------------------------------------------------------


def recurrence_heads(problem: Recurrence) -> tuple[int, ...]:
    """Return the leading axes of units of a recurrence, as `heads_of` does for a problem."""
    leads = [x.shape[:-2] for name in problem.TOKENS if (x := getattr(problem, name)) is not None]
    if problem.initial_state is not None:
        front = 0 if problem.borders is None else 1
        leads.append(problem.initial_state.shape[front:-2])
    return problem.lead if all(lead == problem.lead for lead in leads) else ()


def recurrence_in_units(problem: Recurrence) -> tuple[Recurrence, Any]:
    """Return a recurrence with values and initial state divided by units, and log2 of the units."""
    value, state = problem.value, problem.initial_state
    log = unit_log(recurrence_heads(problem), value, state)
    if isinstance(log, int):
        return problem, 0
    value, state = (times_power(x, -log) for x in (value, state))
    return replace(problem, value=value, initial_state=state), log

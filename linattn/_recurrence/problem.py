"""From a caller's arguments to a :class:`Recurrence`: all checks, no work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from linattn import _arrays, _checks, _settings
from linattn.typing import Array, Recurrence

RULES = ("linear", "gated", "delta", "gated_delta")
GATED_RULES = ("gated", "gated_delta")
DELTA_RULES = ("delta", "gated_delta")

MAX_CHUNK = 64
"""Tokens of a chunk: longer chunks multiply more, shorter ones more often."""

MIN_SOLVED, MAX_SOLVED = 16, 32
"""Tokens of a solved triangle: half the dimensions of a key, between these bounds.

More keys lean on each other, and their system is worse conditioned.
"""


def sequences(problem: Recurrence) -> list[Recurrence]:
    """Each packed sequence as a problem of its own."""
    assert problem.borders is not None
    arrays = ("query", "key", "value", "log_decay", "beta")
    given = [name for name in arrays if getattr(problem, name) is not None]
    state = problem.initial_state
    return [
        replace(
            problem,
            **{name: getattr(problem, name)[..., start:stop, :] for name in given},
            initial_state=None if state is None else state[i, ...],
            borders=None,
        )
        for i, (start, stop) in enumerate(pairwise(problem.borders))
    ]


def recurrence_problem(
    tokens: Iterable[Any],
    *,
    update_rule: Any,
    log_decay: Any,
    beta: Any,
    scale: Any,
    initial_state: Any,
    chunk_size: Any = None,
    cu_seqlens: Any = None,
) -> Recurrence:
    """Check the arguments of a recurrence; ``tokens`` are query, key and value."""
    query, key, value = tokens
    xp, (query, key, value) = _checks.check_arrays(query=query, key=key, value=value)
    if query.shape[-2:] != key.shape[-2:] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"query, key and value must have one length, and query and key one dim, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if update_rule not in RULES:
        raise ValueError(f"update_rule must be one of {', '.join(RULES)}, got {update_rule!r}")
    _check_given("log_decay", log_decay, update_rule, GATED_RULES)
    _check_given("beta", beta, update_rule, DELTA_RULES)
    (length, dim), value_dim = key.shape[-2:], value.shape[-1]
    leads = {"key": tuple(key.shape[:-2]), "value": tuple(value.shape[:-2])}
    if log_decay is not None:
        log_decay = _checks.check_log_decay(log_decay, key, by_channel=True)
        leads["log_decay"] = tuple(log_decay.shape[:-2])
    if beta is not None:
        beta = _checks.check_token_numbers("beta", beta, key)
        leads["beta"] = tuple(beta.shape[:-2])
    settings = _settings.current_settings()
    dtype = _arrays.accumulation_dtype(xp, query.dtype, settings.precision, query)
    if initial_state is not None:
        initial_state = _check_state("initial_state", initial_state, (dim, value_dim), dtype, key)
        leads["initial_state"] = tuple(initial_state.shape[:-2])
    borders = None
    if cu_seqlens is not None:
        borders = _checks.check_cu_seqlens(cu_seqlens, length).tolist()
        if initial_state is not None:
            _check_packed_state(initial_state, len(borders) - 1)
            leads["initial_state"] = leads["initial_state"][1:]
    state_lead = _checks.check_leading_axes(**leads)
    lead = _checks.check_leading_axes(query=tuple(query.shape[:-2]), **leads)
    scale = dim**-0.5 if scale is None else _checks.check_finite_number("scale", scale)
    if chunk_size is None:
        chunk_size = MAX_CHUNK if beta is None else min(max(dim // 2, MIN_SOLVED), MAX_SOLVED)
    chunk_size = _checks.check_positive_int("chunk_size", chunk_size)
    return Recurrence(
        *(xp, query, key, value, log_decay, beta, initial_state),
        *(scale, dtype, state_lead, lead, chunk_size, settings.num_threads, borders),
    )


def _check_given(name: str, array: Any, update_rule: str, rules: tuple[str, ...]) -> None:
    if (array is not None) != (update_rule in rules):
        wanted = "given" if array is None else "None"
        came = "None" if array is None else "an array"
        raise ValueError(f"{name} must be {wanted} for update_rule={update_rule!r}, got {came}")


def _check_packed_state(state: Array, count: int) -> None:
    if state.ndim < 3 or state.shape[0] != count:
        raise ValueError(
            f"initial_state must have an axis of {count} in front, one for each sequence of "
            f"cu_seqlens, got shape {tuple(state.shape)}"
        )


def _check_state(name: str, state: Any, shape: tuple[int, int], dtype: Any, like: Array) -> Array:
    """Check a state of a recurrence, ``(..., d, e)`` in the accumulation dtype."""
    state = _checks.check_like_key(name, state, like)
    if state.ndim < 2 or tuple(state.shape[-2:]) != shape:
        raise ValueError(
            f"{name} must have shape (..., {shape[0]}, {shape[1]}), got {tuple(state.shape)}"
        )
    if state.dtype != dtype:
        raise ValueError(
            f"{name} must have the accumulation dtype {getattr(dtype, '__name__', dtype)}, got "
            f"{state.dtype}; a state is float64 for float64 inputs and float32 for all narrower "
            f"ones"
        )
    return state

"""Metadata of a state: fingerprint of its map, its log decay, its number of sequences."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import array_api_compat

from linattn import _arrays
from linattn._driver.blocks import total_decay
from linattn._fingerprints import known_integer, map_fingerprint
from linattn.typing import Array, FeatureMap, Problem, State
from linattn.typing._shifts import constant


def check_map_of_state(name: str, state: State, feature_map: FeatureMap) -> None:
    """Check that a state is of this map, as far as both are known."""
    came = known_integer(state.fingerprint)
    wanted = None if came is None else map_fingerprint(feature_map)
    if wanted is not None and came != wanted:
        raise ValueError(
            f"{name} must be a state of feature_map, {feature_map!r} with the fingerprint "
            f"{wanted}, got one of another map, with the fingerprint {came}; use the map that "
            f"made the state"
        )


def known_sequences(state: State) -> int | None:
    """Return the number of packed sequences of a state: 0 if it is of none, None if unknown.

    A state that has seen nothing goes with any call. A number that the shape does not have comes
    from a state that was cut by hand.
    """
    number, shape = known_integer(state.num_sequences), tuple(state.kvz.shape)
    if number == 0:
        return None if known_integer(state.length) == 0 else 0
    return number if len(shape) > 2 and shape[0] == number else None


def check_sequences(name: str, state: State, count: int | None, **arrays: Array) -> None:
    """Check that a state has one entry for each of `count` packed sequences, or None for no such.

    ``arrays``: the arrays of the call that may have the axis of the sequences.
    """
    number, shape = known_sequences(state), tuple(state.kvz.shape)
    if count is not None:
        if len(shape) < 3 or shape[0] != count:
            raise ValueError(
                f"{name} must have a first axis of {count} beside cu_seqlens, one state for each "
                f"sequence, got kvz of shape {shape}"
            )
        if number == 0:
            raise ValueError(
                f"{name} must be a state of {count} packed sequences beside cu_seqlens, got one "
                f"that a call without cu_seqlens made, with kvz of shape {shape}; if its first "
                f"axis is that of the sequences, give {name}._replace(num_sequences={count})"
            )
    elif number and max(array.ndim for array in arrays.values()) < len(shape):
        came = " and ".join(f"{n} {tuple(array.shape)}" for n, array in arrays.items())
        raise ValueError(
            f"{name} of {number} packed sequences must be given with cu_seqlens, or with arrays "
            f"that have its first axis, of {number}, and all behind it, {shape[:-2]}, got {came}; "
            f"for one sequence give State({name}.kvz[i], {name}.log_scale[i], {name}.length)"
        )


def stamped(
    state: State, before: State | None, feature_map: FeatureMap, problem: Problem | None = None
) -> State:
    """Return a state with metadata from the state before it, its map and its problem.

    A state without a fingerprint stays without one, so that a loop of JAX carries one pytree
    structure. If ``problem`` is given, its log decays are added to the log decay of ``before``.
    """
    fingerprint = map_fingerprint(feature_map) if before is None else before.fingerprint
    kvz, log_scale = _of_constant_scale(state)
    return State(
        kvz,
        log_scale,
        state.length,
        fingerprint,
        _log_decay(state, before, problem),
        _num_sequences(state, before, problem),
    )


def _of_constant_scale(state: State) -> tuple[Array, Array]:
    """Let all derivatives of a state pass through ``kvz``, none by its scale."""
    if not _arrays.is_tracked(state.log_scale):
        return state.kvz, state.log_scale
    xp, held = _arrays.namespace(state.kvz), constant(state.log_scale)
    moved = xp.where(held == -xp.inf, xp.zeros_like(held), state.log_scale - held)
    return state.kvz * xp.exp(moved)[..., None], held


def _num_sequences(state: State, before: State | None, problem: Problem | None) -> Any:
    if problem is not None and problem.sees.cu_seqlens is not None:
        return len(problem.sees.cu_seqlens) - 1
    if before is None or before.num_sequences is None:
        return 0 if before is None else None
    # A new first axis is not the axis of sequences.
    return before.num_sequences if before.kvz.ndim == state.kvz.ndim else 0


def _log_decay(state: State, before: State | None, problem: Problem | None) -> Array | None:
    """Log decay since the state began."""
    parts = [] if before is None or before.log_decay is None else [before.log_decay]
    if problem is not None and problem.weights.log_decay is not None:
        parts.append(_total_decay(problem))
    packed = problem is not None and problem.sees.cu_seqlens is not None
    return broadcast_decay(parts, state, packed=packed)


def broadcast_decay(parts: list[Array], state: State, *, packed: bool = False) -> Array | None:
    """Sum log decays, broadcast to the leading axes of a state; None for no parts.

    Axes align to the right, except for the first axis of packed sequences.
    """
    if not parts:
        return None
    xp, lead = _arrays.namespace(state.kvz), tuple(state.kvz.shape[:-2])
    if packed:
        parts = [part[axes_behind_first(len(lead) - part.ndim)] for part in parts]
    total = xp.astype(sum(parts[1:], parts[0]), state.kvz.dtype, copy=False)
    if tuple(total.shape) != lead:
        total = total + xp.zeros(lead, dtype=total.dtype, device=array_api_compat.device(total))
    return total


def axes_behind_first(count: int) -> tuple[Any, ...]:
    """Index that inserts ``count`` axes of 1 after the first axis."""
    return (slice(None), *[None] * count, ...)


def _total_decay(problem: Problem) -> Array:
    """Log decay of all tokens; of packed sequences each, along a first axis."""
    decay, borders = problem.weights.log_decay, problem.sees.cu_seqlens
    assert decay is not None
    ends = [0, problem.key.shape[-2]] if borders is None else borders.tolist()
    sequences = [slice(*pair) for pair in pairwise(ends)]
    if decay.shape[-2] == 1:
        # Dask's expressions have no `broadcast_to`.
        totals = [decay[..., 0, 0] * (rows.stop - rows.start) for rows in sequences]
    else:
        totals = [total_decay(problem, rows) for rows in sequences]
    return totals[0] if borders is None else problem.xp.stack(totals, axis=0)

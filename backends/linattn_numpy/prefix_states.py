"""Prefix scan over the states of blocks: all that is far of each block of an exact window."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Declined, State
from linattn_numpy.buffers import buffer
from linattn_numpy.limits import MAX_PREFIX_LOG_SPREAD, finite_shift

__all__ = ["far_states"]

Floats = NDArray[Any]


def far_states(
    before: State, states: State, after: State | None, lazy: bool
) -> tuple[State, State] | Declined:
    """Add up the far blocks before and behind each block, on one scale a feature."""
    ends = [before] if after is None else [before, after]
    g = states.log_scale.shape[-2] - len(ends)
    logs = [end.log_scale[..., None, :] for end in ends] + [states.log_scale]
    c = np.max([log.max(axis=-2) for log in logs], axis=0)[..., None, :]
    shift = finite_shift(c)
    if not all(np.all((log == -np.inf) | (shift - log <= MAX_PREFIX_LOG_SPREAD)) for log in logs):
        return Declined(f"log scales of a feature are more than {MAX_PREFIX_LOG_SPREAD:g} apart")
    *factors, inner = (np.exp(log - shift)[..., None] for log in logs)
    lead = np.broadcast_shapes(*(end.kvz.shape[:-2] for end in ends), states.kvz.shape[:-3])
    size, kind = states.kvz.shape[-2:], states.kvz.dtype
    scaled = buffer("scaled", states.kvz.shape, kind)
    np.multiply(states.kvz, inner, out=scaled)
    # A loop: np.cumsum does not add whole states at once.
    front = np.empty((*lead, g + 1, *size), kind)
    front[..., 0, :, :] = before.kvz * factors[0][..., 0, :, :]
    for i in range(g):
        np.add(front[..., i, :, :], scaled[..., i, :, :], out=front[..., i + 1, :, :])
    kvz, whole = front[..., :g, :, :], front[..., g, :, :].copy()
    if after is not None:
        behind = np.broadcast_to(after.kvz * factors[1][..., 0, :, :], whole.shape).copy()
        for i in reversed(range(g)):
            kvz[..., i, :, :] += behind
            behind += scaled[..., i + 2, :, :]

    has_keys = [log > -np.inf for log in logs]
    seen = _any_before(has_keys[0], has_keys[-1][..., : g - 1, :])
    if after is not None:
        seen = seen | _any_before(has_keys[1], has_keys[-1][..., g + 1 : 2 : -1, :])[..., ::-1, :]
    empty = c.dtype.type(-np.inf)
    any_key = has_keys[0] | has_keys[-1][..., :g, :].any(axis=-2, keepdims=True)
    last = State(whole, np.where(any_key, c, empty)[..., 0, :], 0)
    return State(kvz, np.where(seen, c, empty), 0), last


def _any_before(first: NDArray[np.bool_], later: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether a feature has seen a key in ``first`` or the others up to each of them."""
    lead = np.broadcast_shapes(first.shape[:-2], later.shape[:-2])
    joined = [np.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (first, later)]
    return np.asarray(np.logical_or.accumulate(np.concatenate(joined, axis=-2), axis=-2))

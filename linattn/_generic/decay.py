"""Decay: before each token the state is multiplied by e^g, g <= 0, kept as a shift of its logs.

Sums are made in the dtype that ``log_decay``, ``(..., n, 1)``, comes in, float64 wherever a library
has it: those of a block in float32 would be off by what their terms round to, all to one side.
"""

from __future__ import annotations

from typing import Any

from linattn._arrays import namespace
from linattn.typing import Array, Features, State, Tokens

__all__ = ["decay_since", "decay_until", "fade", "faded_keys", "faded_rows", "near", "weighed"]


def decay_since(log_decay: Array) -> Array:
    """Decay from the start of a block up to each of its tokens, that of the token included."""
    return namespace(log_decay).cumulative_sum(log_decay, axis=-2)


def decay_until(log_decay: Array) -> Array:
    """Decay after each token of a block up to its end."""
    xp = namespace(log_decay)
    later = xp.concat([log_decay[..., 1:, :], xp.zeros_like(log_decay[..., :1, :])], axis=-2)
    return xp.flip(xp.cumulative_sum(xp.flip(later, axis=-2), axis=-2), axis=-2)


def fade(state: State, log: Array) -> State:
    """Let a state decay by ``(..., 1)``; what its log scale rounds away goes to its numbers."""
    xp, dtype = namespace(state.kvz), state.kvz.dtype
    log_scale = state.log_scale + xp.astype(log, dtype, copy=False)
    moved = xp.where(log_scale == -xp.inf, xp.zeros_like(log_scale), log_scale - state.log_scale)
    rest = xp.where(log_scale == -xp.inf, xp.zeros_like(moved), log - moved)
    kvz = state.kvz * xp.exp(xp.astype(rest, dtype, copy=False))[..., None]
    return State(kvz, log_scale, state.length)


def near(state: State) -> tuple[State, Array]:
    """State on the scale of its largest feature, and the log of that scale, ``(..., 1, 1)``.

    A state that has decayed far has logs beside which those of queries would be rounded away.
    """
    xp = namespace(state.kvz)
    top = xp.max(state.log_scale, axis=-1, keepdims=True)
    top = xp.where(top == -xp.inf, xp.zeros_like(top), top)
    return state._replace(log_scale=state.log_scale - top), top[..., None]


def weighed(tokens: Tokens, log: Any) -> Tokens:
    """Add to the log weights of tokens."""
    xp = namespace(tokens.x)
    log = xp.astype(log, tokens.x.dtype, copy=False)
    weight = log if tokens.log_weight is None else tokens.log_weight + log
    return tokens._replace(log_weight=weight)


def faded_keys(keys: Features, log_decay: Array | None) -> Features:
    """Let keys decay to the end of their run."""
    if log_decay is None:
        return keys
    xp = namespace(keys.log)
    return keys._replace(log=keys.log + xp.astype(decay_until(log_decay), keys.log.dtype))


def faded_rows(log: Array, log_decay: Array | None) -> Array:
    """Let logs of rows decay from the start of their run."""
    if log_decay is None:
        return log
    return log + namespace(log).astype(decay_since(log_decay), log.dtype)

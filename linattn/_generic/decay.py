"""Decay: before each token the state is multiplied by e^g, g <= 0, kept as a shift of its logs.

Sums are made in the dtype that ``log_decay``, ``(..., n, 1)``, comes in, float64 wherever a library
has it: those of a block in float32 would be off by what their terms round to, all to one side.
"""

from __future__ import annotations

from typing import Any

from linattn._arrays import namespace
from linattn.typing import Array, State, Tokens

__all__ = ["decay_since", "decay_until", "fade", "weighed"]


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


def weighed(tokens: Tokens, log: Any) -> Tokens:
    """Add to the log weights of tokens."""
    xp = namespace(tokens.x)
    log = xp.astype(log, tokens.x.dtype, copy=False)
    weight = log if tokens.log_weight is None else tokens.log_weight + log
    return tokens._replace(log_weight=weight)

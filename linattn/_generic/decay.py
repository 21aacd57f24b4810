"""Decay: before each token the state is multiplied by e^g, g <= 0, by a shift of its log scales.

Sums have the dtype of ``log_decay``, ``(..., n, 1)``: float64 wherever a library has it. In float32
the rounding errors of a block's terms have one sign, and would add up.
"""

from __future__ import annotations

from typing import Any

from linattn._arrays import is_staged, namespace
from linattn.typing import Array, Features, State, Tokens
from linattn.typing._shifts import largest

MAX_ROWS = 128
"""Most rows that a program of JAX sums up by a triangle.

It would compile a cumulative sum as many steps.
"""


def decay_since(log_decay: Array) -> Array:
    """Log decay from the start of a block up to each of its tokens, the token's own included."""
    xp, n = namespace(log_decay), log_decay.shape[-2]
    if n <= MAX_ROWS and is_staged(log_decay):
        rows = xp.broadcast_to(xp.matrix_transpose(log_decay), (*log_decay.shape[:-2], n, n))
        return xp.sum(xp.tril(rows), axis=-1, keepdims=True)
    return xp.cumulative_sum(log_decay, axis=-2)


def decay_until(log_decay: Array) -> Array:
    """Log decay after each token of a block, up to the end of the block."""
    xp = namespace(log_decay)
    later = xp.concat([log_decay[..., 1:, :], xp.zeros_like(log_decay[..., :1, :])], axis=-2)
    return xp.flip(decay_since(xp.flip(later, axis=-2)), axis=-2)


def fade(state: State, log: Array) -> State:
    """Multiply a state by ``exp(log)``, ``(..., 1)``; ``kvz`` takes the rounding error."""
    xp, dtype = namespace(state.kvz), state.kvz.dtype
    log_scale = state.log_scale + xp.astype(log, dtype, copy=False)
    empty, nothing = log_scale == -xp.inf, xp.zeros_like(log_scale)
    # Chosen before they are subtracted: -inf - (-inf) is NaN, which frameworks may report.
    after, before = (xp.where(empty, nothing, logs) for logs in (log_scale, state.log_scale))
    rest = xp.where(empty, nothing, log - (after - before))
    kvz = state.kvz * xp.exp(xp.astype(rest, dtype, copy=False))[..., None]
    return State(kvz, log_scale, state.length)


def near_one(state: State) -> tuple[State, Array]:
    """State on the scale of its largest feature, and the log of that scale, ``(..., 1, 1)``.

    The log scales of a decayed state may be so large that adding them would round a query's logs.
    """
    xp = namespace(state.kvz)
    top = largest(state.log_scale, keepdims=True)
    top = xp.where(top == -xp.inf, xp.zeros_like(top), top)
    return state._replace(log_scale=state.log_scale - top), top[..., None]


def weighed(tokens: Tokens, log: Any) -> Tokens:
    """Add to the log weights of tokens."""
    xp = namespace(tokens.x)
    log = xp.astype(log, tokens.x.dtype, copy=False)
    weight = log if tokens.log_weight is None else tokens.log_weight + log
    return tokens._replace(log_weight=weight)


def faded_keys(keys: Features, log_decay: Array | None) -> Features:
    """Let keys decay from their token to the end of the block."""
    if log_decay is None:
        return keys
    xp = namespace(keys.log)
    return keys._replace(log=keys.log + xp.astype(decay_until(log_decay), keys.log.dtype))


def faded_rows(log: Array, log_decay: Array | None) -> Array:
    """Add to logs of rows the decay from the start of the block."""
    if log_decay is None:
        return log
    return log + namespace(log).astype(decay_since(log_decay), log.dtype)

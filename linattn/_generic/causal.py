"""Causal attention of one block after a state, on one scale."""

from __future__ import annotations

from linattn._arrays import namespace
from linattn._generic.decay import decay_since, fade, faded_keys
from linattn._generic.features import query_features, row_features
from linattn._generic.states import absorb, by_feature, key_weights, query_weights
from linattn._numerics import FAINT, flushed, lift_of, rescaled
from linattn.typing import Array, Features, Partial, Spec, State, Tokens


def scan_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    want_log: bool,
) -> tuple[Partial, State]:
    """Causal attention of a block under one shift. O(n m (d + e) + n^2 (m + e)) time.

    The shift includes later keys, so an early row may come out small or non-finite; the caller
    checks it, on a scale where no product of a query feature and a key feature exceeds 1.

    With a decay every factor is at most 1. Rows and state then have separate scales: after a strong
    decay the scale of the state is far lower.
    """
    keys = row_features(key_spec, key)
    queries, log_row = query_features(query_spec, query)
    part, after = scan_features(queries, keys, values_and_one, state, key.log_decay)
    return part._replace(log=part.log + log_row), after


def scan_features(
    queries: Features,
    keys: Features,
    values_and_one: Array,
    state: State,
    decay: Array | None = None,
) -> tuple[Partial, State]:
    """:func:`scan_block` of a block that has been evaluated."""
    xp, state = namespace(values_and_one), by_feature(state)
    weights_q, weights_k, c, shift, row = _weights(queries, keys, state)
    bits, least = lift_of(values_and_one)
    before = rescaled(state.kvz, state.log_scale - shift, least, bits)

    scores = xp.matmul(weights_q, xp.matrix_transpose(weights_k))
    of_state = xp.matmul(weights_q, before)
    if decay is not None:
        since = decay_since(decay)
        between = since - xp.matrix_transpose(since)
        between = xp.astype(xp.minimum(between, xp.zeros_like(between)), values_and_one.dtype)
        scores = scores * xp.exp(between)
        of_state = of_state * xp.exp(xp.astype(since, values_and_one.dtype))
    num_den = xp.matmul(flushed(xp.tril(scores), least), values_and_one) + of_state
    part = Partial(num_den * 4.0**-bits, row)
    if decay is not None:
        faded = fade(state, since[..., -1, :])
        return part, absorb(faded_keys(keys, decay), values_and_one, faded)
    weights_k = flushed(weights_k * 2.0**-bits, FAINT)
    added = xp.matmul(xp.matrix_transpose(weights_k), values_and_one)
    before = rescaled(state.kvz, state.log_scale - shift)
    return part, State(before + added, c, state.length + values_and_one.shape[-2])


scan_decayed_block = scan_block


def _weights(
    queries: Features, keys: Features, state: State
) -> tuple[Array, Array, Array, Array, Array]:
    """Weights of both sides, the scale of the state after them, also finite, and rows' logs.

    Both are factors of one product. Multiplied by a power of two, fewer of them are flushed to 0.
    """
    bits, least = lift_of(state.kvz)
    weights_k, c, shift = key_weights(keys, state.log_scale, bits, least)
    weights_q, row = query_weights(queries, c, bits, least)
    return weights_q, weights_k, c, shift, row

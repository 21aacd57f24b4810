"""Causal attention of one block after a state, on one scale."""

from __future__ import annotations

from linattn._arrays import namespace
from linattn._generic.decay import decay_since, fade, faded_keys
from linattn._generic.features import query_features, row_features
from linattn._generic.states import absorb, key_weights, query_weights
from linattn.typing import Array, Partial, Spec, State, Tokens

__all__ = ["scan_block", "scan_decayed_block"]


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
    """
    xp = namespace(values_and_one)
    keys = row_features(key_spec, key)
    queries, log_row = query_features(query_spec, query)
    weights_k, c, shift = key_weights(keys, state.log_scale)
    weights_q, row = query_weights(queries, c)
    before = state.kvz * xp.exp(state.log_scale - shift)[..., None]

    scores = xp.matmul(weights_q, xp.matrix_transpose(weights_k))
    scores = xp.tril(scores)
    num_den = xp.matmul(scores, values_and_one) + xp.matmul(weights_q, before)
    after = before + xp.matmul(xp.matrix_transpose(weights_k), values_and_one)
    return Partial(num_den, row + log_row), State(after, c, state.length + values_and_one.shape[-2])


def scan_decayed_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    want_log: bool,
) -> tuple[Partial, State]:
    """:func:`scan_block` of keys with a decay: every factor is at most 1.

    The state is made on a scale of its own, which a strong decay leaves far below that of the rows.
    """
    xp, dtype = namespace(values_and_one), values_and_one.dtype
    keys = row_features(key_spec, key)
    queries, log_row = query_features(query_spec, query)
    weights_k, c, shift = key_weights(keys, state.log_scale)
    weights_q, row = query_weights(queries, c)
    before = state.kvz * xp.exp(state.log_scale - shift)[..., None]

    since = decay_since(key.log_decay)
    between = since - xp.matrix_transpose(since)
    between = xp.astype(xp.minimum(between, xp.zeros_like(between)), dtype)
    scores = xp.matmul(weights_q, xp.matrix_transpose(weights_k)) * xp.exp(between)
    left = xp.exp(xp.astype(since, dtype))
    num_den = xp.matmul(xp.tril(scores), values_and_one) + xp.matmul(weights_q, before) * left
    faded = fade(state, since[..., -1, :])
    after = absorb(faded_keys(keys, key.log_decay), values_and_one, faded)
    return Partial(num_den, row + log_row), after

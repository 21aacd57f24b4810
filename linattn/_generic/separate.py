"""Numerators from one half of the features, denominators from the other."""

from __future__ import annotations

from linattn._arrays import namespace
from linattn._generic.features import query_features, row_features
from linattn._generic.hierarchical import scan_features_hierarchical
from linattn._generic.states import by_feature
from linattn._numerics import finite_shift
from linattn.typing import Array, Features, Partial, SeparateDenominator, Spec, State, Tokens


def separate_state(state: State) -> State:
    """Zero the weights in the first half of the features, and the values in the second."""
    state = by_feature(state)
    xp, kvz = namespace(state.kvz), state.kvz
    m = kvz.shape[-2] // 2
    first = xp.concat([kvz[..., :m, :-1], xp.zeros_like(kvz[..., :m, -1:])], axis=-1)
    second = xp.concat([xp.zeros_like(kvz[..., m:, :-1]), kvz[..., m:, -1:]], axis=-1)
    return State(xp.concat([first, second], axis=-2), state.log_scale, state.length)


def scan_separate(
    query_spec: SeparateDenominator,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
) -> tuple[Partial, State]:
    """Causal attention of a block, by divide and conquer in each half.

    No row's scale depends on a later key. O(n m (d + e log n)) time, O(n m) memory.
    """
    xp = namespace(values_and_one)
    queries, log_row = query_features(query_spec.spec, query)
    keys = row_features(key_spec, key)
    m = state.log_scale.shape[-1] // 2
    parts, states = [], []
    for half in (slice(0, m), slice(m, 2 * m)):
        part, after = scan_features_hierarchical(
            _half(queries, half),
            _half(keys, half),
            values_and_one,
            State(state.kvz[..., half, :], state.log_scale[..., half], state.length),
        )
        parts.append(part)
        states.append(after)
    (numerator, log_numerator, _), (denominator, log_denominator, _) = parts
    log = xp.maximum(log_numerator, log_denominator)
    shift = finite_shift(log, xp)
    sums = [
        numerator[..., :-1] * xp.exp(log_numerator - shift),
        denominator[..., -1:] * xp.exp(log_denominator - shift),
    ]
    kvz = xp.concat([each.kvz for each in states], axis=-2)
    log_scale = xp.concat([each.log_scale for each in states], axis=-1)
    after = State(kvz, log_scale, states[0].length)
    return Partial(xp.concat(sums, axis=-1), log + log_row), after


def _half(features: Features, half: slice) -> Features:
    """Half of the features; logs ``(..., n, 1)``, shared by a row, stay whole."""
    log = features.log if features.log.shape[-1] == 1 else features.log[..., half]
    return Features(log, features.values[..., half])

"""Numerators from one half of the features, denominators from the other."""

from __future__ import annotations

from collections.abc import Callable

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
    scan: Callable[..., tuple[Partial, State]] = scan_features_hierarchical,
) -> tuple[Partial, State]:
    """Causal attention of a block; ``scan`` of features does both halves at once.

    Its rows have no scale that depends on a later key. By divide and conquer in
    O(n m (d + e log n)) time, O(n m) memory.
    """
    xp = namespace(values_and_one)
    queries, log_row = query_features(query_spec.spec, query)
    keys = row_features(key_spec, key)
    # The halves are on an axis before that of tokens.
    *lead, m, width = state.kvz.shape
    kvz = xp.reshape(state.kvz, (*lead, 2, m // 2, width))
    log_scale = xp.reshape(state.log_scale, (*lead, 2, m // 2))
    before = State(kvz, log_scale, state.length)
    values_and_one = values_and_one[..., None, :, :]
    part, after = scan(_halves_of(queries), _halves_of(keys), values_and_one, before)
    logs, (first, second) = part.log, (part.num_den[..., i, :, :] for i in range(2))
    log = xp.max(logs, axis=-3)
    first_weight, second_weight = (
        xp.exp(logs[..., i, :, :] - finite_shift(log, xp)) for i in range(2)
    )
    sums = first[..., :-1] * first_weight, second[..., -1:] * second_weight
    kvz = xp.reshape(after.kvz, (*after.kvz.shape[:-3], m, width))
    log_scale = xp.reshape(after.log_scale, (*kvz.shape[:-2], m))
    return Partial(xp.concat(sums, axis=-1), log + log_row), State(kvz, log_scale, after.length)


def _halves_of(features: Features) -> Features:
    """Cut features in halves; logs ``(..., n, 1)``, shared by a row, are those of both."""
    log, values = features
    log = log[..., None, :, :] if log.shape[-1] == 1 else _halves(log)
    return Features(log, _halves(values))


def _halves(x: Array) -> Array:
    """Cut columns in two, ``(..., n, 2 m)`` to ``(..., 2, n, m)``."""
    m = x.shape[-1] // 2
    return namespace(x).stack([x[..., :m], x[..., m:]], axis=-3)

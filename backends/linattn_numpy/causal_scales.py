"""Scales that a causal block and the state before it share, for outputs and for gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Declined, Exponential, State, Tokens
from linattn_numpy.features import log_features, query_exponents
from linattn_numpy.limits import MAX_LOG_SPREAD, exp, feature_max, finite_shift, in_place, row_max

__all__ = ["CommonScale", "StabilizedBlock", "common_scale", "stabilize"]

Floats = NDArray[Any]


class CommonScale(NamedTuple):
    """A causal block of keys and the state before it on one scale."""

    log_scale: Floats
    """``(..., 1)``: a feature's log scale is this less its log in the weights of the queries."""
    key_factors: Floats | None
    """What the features of the keys are yet to be multiplied with; None for 1."""
    value_weights: Floats
    """``(..., n, 1)`` or ``(..., 1, 1)``: all else that the keys' weights lack."""
    state_factors: Floats
    """What the features of the state are multiplied with."""


def common_scale(
    query_logs: Floats, key_logs: Floats, row: Floats | None, state: State
) -> CommonScale | Declined:
    """Put an unshifted causal block and its state on one scale.

    ``query_logs``, ``key_logs``: logs that features have beside their weights; ``row``: the keys'
    own terms.
    """
    # In the common scale g every log, of the state's features and of this block's, is at most 0.
    before = state.log_scale + query_logs
    block = key_logs + query_logs
    if row is not None:
        top = row.max(axis=-2, keepdims=True)
        row = row - finite_shift(top)
        block = block + top[..., 0]
    g = np.maximum(before.max(axis=-1, keepdims=True), block.max(axis=-1, keepdims=True))
    limit = MAX_LOG_SPREAD[state.kvz.itemsize]
    if not (_is_near(before, g, limit) and _is_near(block, g, limit)):
        return Declined(f"log scales of features are more than {limit:g} apart")
    g = finite_shift(g)
    block, factors = np.exp(block - g), np.exp(before - g)
    first = block[..., :1]
    is_even = (block == first).all(axis=-1)
    if is_even.any() and not is_even.all():
        # Alone, some heads would be given their factors in another way.
        return Declined("only some heads have one log scale for all features")
    weights = np.ones((1, 1), g.dtype) if row is None else np.exp(row)
    if is_even.all():
        return CommonScale(g, None, weights * first[..., None], factors)
    return CommonScale(g, block, weights, factors)


def _is_near(log: Floats, g: Floats, limit: float) -> bool:
    """Whether all features of each head are within the limit of g, or all hold nothing."""
    below = g - log
    empty = log.max(axis=-1, keepdims=True) == -np.inf
    return bool(((below.max(axis=-1, keepdims=True) <= limit) | empty).all())


class StabilizedBlock(NamedTuple):
    """Features of a causal block and the state before it, relative to the largest logs."""

    query: Floats
    key: Floats
    state: Floats
    log_row: Floats
    """Log scale of each query, ``(..., n, 1)``."""
    log_scale: Floats
    """Log scale of each feature, of ``state`` and of what the keys add to it."""


def stabilize(
    query_spec: Exponential, key_spec: Exponential, query: Tokens, key: Tokens, state: State
) -> StabilizedBlock:
    """Exponentiate keys on the maximum so far of each feature, and each query on its own largest.

    The row terms of queries, which cancel, are left out.
    """
    k = log_features(key_spec, key, "key")
    c = np.maximum(state.log_scale, feature_max(k) + key_spec.col)
    shift = finite_shift(c)
    k = in_place(np.add, k, (key_spec.col - shift)[..., None, :])
    q = query_exponents(query_spec, query.x, c + query_spec.col, "query")
    row = row_max(q)
    q -= finite_shift(row)
    before = state.kvz * np.exp(state.log_scale - shift)[..., None]
    return StabilizedBlock(exp(q), exp(k), before, row, c)

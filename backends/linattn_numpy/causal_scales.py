"""Scales that a causal block and the state before it share, for outputs and for gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Declined, State, Tokens
from linattn_numpy import limits
from linattn_numpy.buffers import Floats
from linattn_numpy.features import exponents, log_features
from linattn_numpy.products import broadcast_lead
from linattn_numpy.tiles import Run


class CommonScale(NamedTuple):
    """A causal block of keys and the state before it on one scale."""

    log_scale: Floats
    """``(..., 1)``: a feature's log scale is this minus its log offset in the queries."""
    key_factors: Floats | None
    """Factors of the keys' features that are still missing; None for 1."""
    value_weights: Floats
    """``(..., n, 1)`` or ``(..., 1, 1)``: all other missing factors of the keys' weights."""
    state_factors: Floats
    """Factors that put the features of the state on the common scale."""


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
        row = row - limits.finite_shift(top)
        block = block + top[..., 0]
    g = np.maximum(before.max(axis=-1, keepdims=True), block.max(axis=-1, keepdims=True))
    limit = limits.MAX_LOG_SPREAD[state.kvz.itemsize]
    if not (_is_near(before, g, limit) and _is_near(block, g, limit)):
        return Declined(f"log scales of features are more than {limit:g} apart")
    g = limits.finite_shift(g)
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
    """Whether all features of each head are within the limit of g, or hold nothing."""
    return bool(((g - log <= limit) | (log == -np.inf)).all())


class GivenBlock(NamedTuple):
    """The specs, tokens and ``[v, 1]`` of a causal block, unchanged."""

    query_spec: Any
    key_spec: Any
    query: Tokens
    key: Tokens
    values_and_one: Floats


class StabilizedBlock(NamedTuple):
    """Logs of a causal block and the state before it, relative to the largest logs so far."""

    query: Floats
    key: Floats
    state: Floats
    """The state itself on the new scale, not its logs."""
    log_row: Floats
    """Log scale of each query, ``(..., n, 1)``."""
    log_scale: Floats
    """Log scales of features in each sub-block, ``(..., count, m)``."""
    rises: list[Floats | None]
    """Factors ``(..., m, 1)`` that put the state after each sub-block but the last on the scale of
    the next; None for 1."""
    floor: Floats
    """Least denominator from which underflow takes no more than rounding does, ``(..., 1, 1)``."""


def stabilize(block: GivenBlock, state: State, runs: list[Run]) -> StabilizedBlock:
    """Put keys on the maximum so far of each feature, and each query on its own largest.

    The maximum runs to the end of a sub-block, or of the block within MAX_PREFIX_LOG_LEAD.
    The row terms of queries cancel, and are left out.
    """
    query_spec, key_spec, query, key, _ = block
    k = log_features(key_spec, key, "key")
    top = np.concatenate([run.split(k).max(axis=-2) for run in runs], axis=-2)
    top = np.maximum(top + key_spec.col[..., None, :], state.log_scale[..., None, :])
    last = top.max(axis=-2, keepdims=True)
    c = np.maximum.accumulate(top, axis=-2)
    # `last` may be NaN because of later tokens, which must not reach earlier ones.
    c = np.where(c >= last - limits.MAX_PREFIX_LOG_LEAD, last, c)
    shift = limits.finite_shift(c)
    rising = (c[..., :-1, :] != c[..., 1:, :]).any(axis=(*range(c.ndim - 2), -1))
    rises = [
        np.exp(c[..., i, :] - shift[..., i + 1, :])[..., None] if is_rising else None
        for i, is_rising in enumerate(rising.tolist())
    ]
    k = _add_by_run(k, key_spec.col[..., None, :] - shift, runs)
    q = exponents(query_spec, query.x, np.zeros((1, 1), k.dtype), "query")
    q = _add_by_run(q, c + query_spec.col[..., None, :], runs)
    row = limits.row_max(q)
    q -= limits.finite_shift(row)
    before = limits.rescaled(state.kvz, state.log_scale - shift[..., 0, :])
    terms = k.shape[-1] * (state.length + k.shape[-2]) + before[..., -1].sum(axis=-1)
    floor = limits.weights_floor(k.dtype) * terms[..., None, None]
    return StabilizedBlock(q, k, before, row, c, rises, floor)


def _add_by_run(x: Floats, logs: Floats, runs: list[Run]) -> Floats:
    """Add its own row of ``logs`` to each sub-block, in place if the shapes allow it."""
    lead = broadcast_lead(x.shape[:-2], logs.shape[:-2])
    out = x if lead == x.shape[:-2] else np.empty((*lead, *x.shape[-2:]), x.dtype)
    for run in runs:
        np.add(run.split(x), logs[..., run.places, None, :], out=run.split(out))
    return out

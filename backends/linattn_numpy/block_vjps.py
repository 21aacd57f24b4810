"""Gradients of full and of softmax attention for blocks in place; causal blocks: causal_vjps.

A block whose exponents are not moderate is *max-stabilized*, if its map is exponential: exponents
are taken less their exact maxima.

The loss to underflow is bounded in units of attention weights, which sum to 1 over the keys of a
query: for each term, the largest product of scales times the smallest normal number.
"""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from linattn.typing import Declined, Exact, Exponential, Spec, State, Tokens
from linattn_numpy import limits
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.feature_vjps import NO_VJP, features_vjp, has_vjp, sum_to, unshifted_features
from linattn_numpy.features import exponents, floor_of, log_features
from linattn_numpy.products import broadcast_lead, product, transposed, weighted_sum
from linattn_numpy.states import add_sums, by_feature

UNDERFLOWED_KEYS = Declined("features of keys may have underflowed beside the largest weight")


def _max_scale(floor: float, terms: float, sizes: Floats) -> float:
    """Log of the largest scale from which underflow cannot take digits of cotangents.

    ``sizes``: largest cotangent of each head and column. A cotangent of 1 keeps all digits; a
    smaller one may lose ``SMALL_VALUES`` rounding units.
    """
    least = sizes.min(where=sizes != 0, initial=1 / limits.SMALL_VALUES)
    return log(least * limits.SMALL_VALUES) - log(floor * terms)


# Full attention ---------------------------------------------------------------------------------


def read_block_vjp(
    query_spec: Spec, tokens: Tokens, state: State, grad_output: Floats, adjoint: State
) -> tuple[Floats, State] | Declined:
    """Return the gradient of queries that read a state, and the adjoint with these queries."""
    if not has_vjp(query_spec):
        return NO_VJP
    kvz, least, floor = state.kvz, 0.0, floor_of(state.kvz.dtype, query_spec)
    features = unshifted_features(query_spec, tokens, "query")
    if not isinstance(features, Declined):
        c = state.log_scale + features.col
        top = limits.finite_shift(c.max(axis=-1, keepdims=True))
        kvz = kvz * np.exp(c - top)[..., None]
        log_scale, max_weight = features.col - top, np.exp(features.max_log)
        weights = features.weights
    elif isinstance(query_spec, Exponential):
        state = by_feature(state)
        offsets = (state.log_scale + query_spec.col)[..., None, :]
        weights = exponents(query_spec, tokens.x, offsets, "query")
        weights -= limits.finite_shift(limits.row_max(weights))
        weights, kvz = limits.weights(weights), state.kvz
        # A feature without keys has no scale, and no key to ask for one.
        log_scale, max_weight = -limits.finite_shift(state.log_scale), 1.0
        least, floor = limits.LEAST[kvz.itemsize], limits.weights_floor(kvz.dtype)
    else:
        return features
    z = kvz[..., -1:]
    cotangent = product(grad_output, transposed(kvz[..., :-1]), "read")
    # For each term, underflow takes at most one smallest number times the largest factor.
    floor *= z.shape[-2] * max(max_weight, z.max())
    denominator = np.matmul(weights, z)
    if not floor <= denominator.min() <= denominator.max() < np.inf:
        return limits.UNDERFLOWED
    inverse = 1 / denominator
    # ``g.out / den`` without numerators: with the state S of a row, which is in ``cotangent`` as
    # ``g.S``, ``g.num`` is the sum of ``weights * (g.S)``.
    inner = np.vecdot(weights, cotangent)[..., None] * inverse
    inner *= inverse
    if not limits.all_finite(inner):
        return limits.UNDERFLOWED
    # The cotangent of the weights: ``g.S / den - (g.out / den) z``.
    cotangent *= inverse
    more = buffer("more", cotangent.shape, cotangent.dtype)
    cotangent -= np.multiply(transposed(z), inner, out=more)
    sums = kvz.sum(axis=-2, keepdims=True)
    sizes = denominator * limits.row_sizes(grad_output)
    if limits.underflowed_rows(sizes, sums / sums[..., -1:], kvz, floor) is not None:
        return limits.UNDERFLOWED
    g1 = np.concatenate([grad_output * inverse, -inner], axis=-1)
    sums = sum_to(weighted_sum(weights, g1), adjoint.kvz.shape[:-2])
    adjoint = add_sums(adjoint, sums, log_scale, g1.shape[-2])
    return features_vjp(query_spec, tokens.x, weights, cotangent, None, least), adjoint


def reduce_block_vjp(
    key_spec: Spec, tokens: Tokens, values_and_one: Floats, adjoint: State
) -> tuple[Floats, Floats] | Declined:
    """Gradients of keys and of ``[v, 1]`` that an adjoint has read."""
    if not has_vjp(key_spec):
        return NO_VJP
    kvz, factor, least, dtype = adjoint.kvz, None, 0.0, values_and_one.dtype
    terms = adjoint.log_scale.shape[-1] * max(adjoint.length, 1)
    limit = _max_scale(floor_of(dtype, key_spec), terms, np.abs(kvz).max(axis=-2))
    features = unshifted_features(key_spec, tokens, "key")
    if not isinstance(features, Declined):
        scale = adjoint.log_scale + features.col
        if features.row is not None:
            top = limits.finite_shift(features.row.max(axis=-2, keepdims=True))
            factor, scale = np.exp(features.row - top), scale + top[..., 0]
        if not scale.max() + features.max_log <= limit:
            return UNDERFLOWED_KEYS
        kvz = limits.rescaled(kvz, scale, limits.FAINT_SUMMED)
        weights = features.weights
    elif isinstance(key_spec, Exponential):
        weights = log_features(key_spec, tokens, "key")
        weights = limits.in_place(np.add, weights, (adjoint.log_scale + key_spec.col)[..., None, :])
        if not weights.max() <= limit + log(limits.floor_of(dtype) / limits.weights_floor(dtype)):
            return UNDERFLOWED_KEYS
        weights, least = limits.weights(weights), limits.LEAST[kvz.itemsize]
        kvz = limits.rounded(kvz.copy(), least)
    else:
        return features
    shape = (*broadcast_lead(weights.shape[:-2], kvz.shape[:-2]), *values_and_one.shape[-2:])
    grad_values_and_one = np.matmul(weights, kvz, out=np.empty(shape, dtype))
    v = values_and_one
    if factor is not None:
        v = v * factor
        grad_values_and_one *= factor
    total = np.vecdot(values_and_one, grad_values_and_one)[..., None]
    cotangent = product(v, transposed(kvz), "read")
    grad_key = features_vjp(key_spec, tokens.x, weights, cotangent, total, least)
    return grad_key, grad_values_and_one


# Softmax attention ------------------------------------------------------------------------------


def exact_vjp(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    grad_num_den: Floats,
    log: Floats,
    visible: Any,
) -> tuple[Floats, Floats, Floats]:
    """Gradients of blocks of queries, keys and ``[v, 1]`` through their softmax weights."""
    weights = product(query.x * spec.scale, transposed(key.x), "logits")
    if key.log_weight is not None:
        weights = limits.in_place(np.add, weights, transposed(key.log_weight))
    if visible is not None:
        np.copyto(weights, -np.inf, where=~visible)
    weights = limits.weights(limits.in_place(np.subtract, weights, log))
    cotangent = product(grad_num_den, transposed(values_and_one), "read")
    grad_logits = limits.in_place(np.multiply, cotangent, weights)
    return (
        np.asarray(np.matmul(grad_logits, key.x * spec.scale)),
        np.asarray(np.matmul(transposed(grad_logits), query.x * spec.scale)),
        np.asarray(np.matmul(transposed(weights), grad_num_den)),
    )

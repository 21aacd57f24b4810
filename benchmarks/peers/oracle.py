"""Quadratic attention in float64: what each peer is held to before it is timed.

Written from the formulas and not from linattn, which is one of the peers.
"""

from __future__ import annotations

import numpy as np

from benchmarks.peers.problem import Floats, Inputs

__all__ = [
    "attention",
    "elu_plus_one",
    "exponentials",
    "hyperbolic",
    "next_token",
    "recipe_vjp",
    "softmax_attention",
    "softmax_vjp",
    "softmax_weights",
    "stabilized",
]


def attention(
    weights: Floats, value: Floats, *, is_causal: bool, epsilon: float | Floats = 0.0
) -> Floats:
    """``out_i = sum_j w_ij v_j / (sum_j w_ij + epsilon_i)`` over all j, or over j <= i.

    A scalar epsilon or one a row, ``(..., L, 1)``, is what some peers add to their denominators.
    """
    if is_causal:
        weights = np.tril(weights)
    return np.asarray(weights @ value / (weights.sum(axis=-1, keepdims=True) + epsilon))


def softmax_weights(query: Floats, key: Floats) -> Floats:
    """``w_ij = exp(q_i . k_j / sqrt(d))``."""
    q, k = query.astype(np.float64), key.astype(np.float64)
    return np.asarray(np.exp(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])))


def softmax_attention(query: Floats, key: Floats, value: Floats) -> Floats:
    """Exact full attention."""
    return attention(softmax_weights(query, key), value, is_causal=False)


def exponentials(x: Floats, rows: Floats) -> Floats:
    """FAVOR+: ``phi_r(x) = exp(w_r . y - |y|^2 / 2) / sqrt(m)`` with ``y = x / d^(1/4)``."""
    y = x.astype(np.float64) * x.shape[-1] ** -0.25
    half = np.sum(y * y, axis=-1, keepdims=True) / 2
    return np.asarray(np.exp(y @ rows.T.astype(np.float64) - half) / np.sqrt(len(rows)))


def hyperbolic(x: Floats, rows: Floats) -> Floats:
    """FAVOR+ with every row and its opposite."""
    return exponentials(x, np.concatenate([rows, -rows]))


def stabilized(x: Floats, rows: Floats, epsilon: float, *, is_query: bool) -> Floats:
    """FAVOR+ as Google's JAX code and performer-pytorch have it.

    ``phi_r(x) = (exp(w_r . y - |y|^2 / 2 - c) + epsilon) / sqrt(m)`` where c is the largest
    ``w_r . y`` of the query, for keys the largest of all keys of the head.
    """
    y = x.astype(np.float64) * x.shape[-1] ** -0.25
    exponent = y @ rows.T.astype(np.float64)
    shift = exponent.max(axis=-1 if is_query else (-2, -1), keepdims=True)
    half = np.sum(y * y, axis=-1, keepdims=True) / 2
    return np.asarray((np.exp(exponent - half - shift) + epsilon) / np.sqrt(len(rows)))


def elu_plus_one(x: Floats) -> Floats:
    """``x + 1`` above 0, ``exp(x)`` below."""
    y = x.astype(np.float64)
    return np.where(y > 0, y + 1, np.exp(np.minimum(y, 0)))


def softmax_vjp(inputs: Inputs, *, is_causal: bool) -> list[Floats]:
    """Return the output of softmax attention and its gradients by query, key and value."""
    q, k = inputs.query.astype(np.float64), inputs.key.astype(np.float64)
    weights = softmax_weights(q, k)
    out, grad_weights, grad_value = _attention_vjp(weights, inputs, is_causal=is_causal)
    grad_logits = weights * grad_weights / np.sqrt(q.shape[-1])
    return [out, grad_logits @ k, grad_logits.swapaxes(-1, -2) @ q, grad_value]


def recipe_vjp(
    inputs: Inputs, rows: Floats, *, is_causal: bool, epsilon: float = 0.0
) -> list[Floats]:
    """Return the output of FAVOR+ and its gradients by query, key and value.

    With an epsilon the features are :func:`stabilized`, their shift c held constant.
    """
    x = (inputs.query, inputs.key)
    if epsilon:
        q, k = (
            stabilized(y, rows, epsilon, is_query=is_query)
            for y, is_query in zip(x, (True, False), strict=True)
        )
    else:
        q, k = (exponentials(y, rows) for y in x)
    weights = q @ k.swapaxes(-1, -2)
    out, grad_weights, grad_value = _attention_vjp(weights, inputs, is_causal=is_causal)
    cotangents = (grad_weights @ k, grad_weights.swapaxes(-1, -2) @ q)
    added = epsilon / np.sqrt(len(rows))
    grad_query, grad_key = (
        _exponentials_vjp(y, rows, (features - added) * cotangent)
        for y, features, cotangent in zip(x, (q, k), cotangents, strict=True)
    )
    return [out, grad_query, grad_key, grad_value]


def _attention_vjp(
    weights: Floats, inputs: Inputs, *, is_causal: bool
) -> tuple[Floats, Floats, Floats]:
    """``dL/dw_ij = g_i . (v_j - out_i) / sum_j w_ij`` and ``dL/dv_j = sum_i w_ij g_i / sum``."""
    value, cotangent = inputs.value.astype(np.float64), inputs.cotangent.astype(np.float64)
    out = attention(weights, value, is_causal=is_causal)
    if is_causal:
        weights = np.tril(weights)
    total = weights.sum(axis=-1, keepdims=True)
    inner = np.sum(cotangent * out, axis=-1, keepdims=True)
    grad_weights = (cotangent @ value.swapaxes(-1, -2) - inner) / total
    if is_causal:
        grad_weights = np.tril(grad_weights)
    return out, grad_weights, (weights / total).swapaxes(-1, -2) @ cotangent


def _exponentials_vjp(x: Floats, rows: Floats, cotangent: Floats) -> Floats:
    """Pull back through ``w_r . y - |y|^2 / 2`` and ``y = x / d^(1/4)``."""
    factor = x.shape[-1] ** -0.25
    y = x.astype(np.float64) * factor
    total = cotangent.sum(axis=-1, keepdims=True)
    return np.asarray((cotangent @ rows.astype(np.float64) - total * y) * factor)


def next_token(inputs: Inputs) -> tuple[Floats, Floats, Floats]:
    """Return query, key and value for one more token after the context.

    The query is ``(..., 1, d)``; key and value hold the context and the token.
    """
    query, key, value = (x[..., None, :] for x in inputs.token)
    return (
        query,
        np.concatenate([inputs.key, key], axis=-2),
        np.concatenate([inputs.value, value], axis=-2),
    )

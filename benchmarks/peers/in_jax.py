"""Google's formula of FAVOR+ in jitted JAX.

Features as :func:`benchmarks.peers.oracle.stabilized` with epsilon 1e-4. Full attention sums over
keys, then reads. Causal attention makes numerator and denominator each by a scan over the tokens
that carries the running sum: ``P_t = P_(t-1) + phi(k_t) v_t^T``, read by ``phi(q_t)``. The rows are
linattn's: the formula leaves them open.

Gradients hold the shift of the exponents constant. Those of the scans are either JAX's own, for
which it keeps the sums after every token, or written by hand: a scan backwards, for which no sums
are kept, each token being subtracted from the last one again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import oracle
from benchmarks.peers.problem import Floats, Inputs, Prepared
from benchmarks.peers.registry import GRADIENT

__all__ = ["EPSILON", "prepare"]

EPSILON = 1e-4

Array = Any


def features(x: Array, rows: Array, *, is_query: bool) -> Array:
    """Stabilized positive features, ``(..., n, m)``."""
    x = x * x.shape[-1] ** -0.25
    exponent = jnp.einsum("...nd,md->...nm", x, rows)
    half = jnp.sum(x * x, axis=-1, keepdims=True) / 2
    shift = jnp.max(exponent, axis=-1 if is_query else (-2, -1), keepdims=True)
    shift = jax.lax.stop_gradient(shift)
    return (jnp.exp(exponent - half - shift) + EPSILON) * len(rows) ** -0.5


def full(query: Array, key: Array, value: Array, rows: Array) -> Array:
    """Attention to all keys."""
    q, k = features(query, rows, is_query=True), features(key, rows, is_query=False)
    sums = jnp.einsum("...nm,...ne->...me", k, value)
    numerator = jnp.einsum("...nm,...me->...ne", q, sums)
    denominator = jnp.einsum("...nm,...m->...n", q, k.sum(axis=-2))
    return numerator / denominator[..., None]


def causal(
    query: Array, key: Array, value: Array, rows: Array, scan: Callable[..., Array]
) -> Array:
    """Attention to the keys so far, by two scans."""
    q, k = features(query, rows, is_query=True), features(key, rows, is_query=False)
    q, k, v = (jnp.moveaxis(x, -2, 0) for x in (q, k, value))
    numerator, denominator = scan(q, k, v), scan(q, k, jnp.ones_like(v[..., :1]))
    return jnp.moveaxis(numerator / denominator, 0, -2)


def running(q: Array, k: Array, v: Array) -> Array:
    """``phi(q_t) . sum_(s <= t) phi(k_s) v_s^T``; tokens are the first axis."""
    return _forward(q, k, v)[0]


def _forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    def step(sums: Array, token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q_t, k_t, v_t = token
        sums = sums + k_t[..., :, None] * v_t[..., None, :]
        return sums, jnp.einsum("...m,...me->...e", q_t, sums)

    start = jnp.zeros((*k.shape[1:], v.shape[-1]), v.dtype)
    sums, out = jax.lax.scan(step, start, (q, k, v))
    return out, (q, k, v, sums)


def _backward(kept: tuple[Array, ...], grad_out: Array) -> tuple[Array, ...]:
    q, k, v, sums = kept

    def step(
        carry: tuple[Array, Array], token: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        (sums, grad_sums), (q_t, k_t, v_t, g_t) = carry, token
        grad_q = jnp.einsum("...me,...e->...m", sums, g_t)
        grad_sums = grad_sums + q_t[..., :, None] * g_t[..., None, :]
        grad_k = jnp.einsum("...me,...e->...m", grad_sums, v_t)
        grad_v = jnp.einsum("...me,...m->...e", grad_sums, k_t)
        return (sums - k_t[..., :, None] * v_t[..., None, :], grad_sums), (grad_q, grad_k, grad_v)

    _, gradients = jax.lax.scan(
        step, (sums, jnp.zeros_like(sums)), (q, k, v, grad_out), reverse=True
    )
    return tuple(gradients)


running_by_hand = jax.custom_vjp(running)
running_by_hand.defvjp(_forward, _backward)


def prepare(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Prepare a peer of this module; compiled here, so that no call compiles."""
    is_causal = kind.startswith("causal")
    arrays = [
        jnp.asarray(x, dtype=jnp.float32)
        for x in (inputs.query, inputs.key, inputs.value, inputs.rows)
    ]
    scan = running_by_hand if name == "jax-backward" else running
    attend = partial(causal, scan=scan) if is_causal else full
    if kind in GRADIENT:
        return _gradient(attend, arrays, inputs, is_causal=is_causal)
    compiled = jax.jit(attend).lower(*arrays).compile()

    def wanted() -> Floats:
        q = oracle.stabilized(inputs.query, inputs.rows, EPSILON, is_query=True)
        k = oracle.stabilized(inputs.key, inputs.rows, EPSILON, is_query=False)
        weights = np.asarray(q @ k.swapaxes(-1, -2))
        return oracle.attention(weights, inputs.value, is_causal=is_causal)

    return Prepared(lambda: compiled(*arrays).block_until_ready(), wanted)


def _gradient(
    attend: Callable[..., Array], arrays: list[Array], inputs: Inputs, *, is_causal: bool
) -> Prepared:
    """Output and gradients in one compiled function."""

    def value_and_gradients(
        query: Array, key: Array, value: Array, rows: Array, cotangent: Array
    ) -> tuple[Array, ...]:
        out, pullback = jax.vjp(lambda *tokens: attend(*tokens, rows), query, key, value)
        return out, *pullback(cotangent)

    arguments = (*arrays, jnp.asarray(inputs.cotangent))
    compiled = jax.jit(value_and_gradients).lower(*arguments).compile()

    def wanted() -> Floats:
        results = oracle.recipe_vjp(inputs, inputs.rows, is_causal=is_causal, epsilon=EPSILON)
        return np.stack(results)

    return Prepared(lambda: jax.block_until_ready(compiled(*arguments)), wanted, np.stack)

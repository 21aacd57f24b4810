"""Google's formula of FAVOR+ in jitted JAX.

Features as :func:`benchmarks.peers.oracle.stabilised` with epsilon 1e-4. Full attention sums over
keys, then reads. Causal attention makes numerator and denominator each by a scan over the tokens
that carries the running sum: ``P_t = P_(t-1) + phi(k_t) v_t^T``, read by ``phi(q_t)``. The rows are
linattn's: the formula leaves them open.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import oracle
from benchmarks.peers.problem import Floats, Inputs, Prepared

__all__ = ["EPSILON", "prepare"]

EPSILON = 1e-4

Array = Any


def features(x: Array, rows: Array, *, is_query: bool) -> Array:
    """Stabilised positive features, ``(..., n, m)``."""
    x = x * x.shape[-1] ** -0.25
    exponent = jnp.einsum("...nd,md->...nm", x, rows)
    half = jnp.sum(x * x, axis=-1, keepdims=True) / 2
    shift = jnp.max(exponent, axis=-1 if is_query else (-2, -1), keepdims=True)
    return (jnp.exp(exponent - half - shift) + EPSILON) * len(rows) ** -0.5


def full(query: Array, key: Array, value: Array, rows: Array) -> Array:
    """Attention to all keys."""
    q, k = features(query, rows, is_query=True), features(key, rows, is_query=False)
    sums = jnp.einsum("...nm,...ne->...me", k, value)
    numerator = jnp.einsum("...nm,...me->...ne", q, sums)
    denominator = jnp.einsum("...nm,...m->...n", q, k.sum(axis=-2))
    return numerator / denominator[..., None]


def causal(query: Array, key: Array, value: Array, rows: Array) -> Array:
    """Attention to the keys so far, by two scans."""
    q, k = features(query, rows, is_query=True), features(key, rows, is_query=False)
    q, k, v = (jnp.moveaxis(x, -2, 0) for x in (q, k, value))

    def numerator(sums: Array, token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q_t, k_t, v_t = token
        sums = sums + k_t[..., :, None] * v_t[..., None, :]
        return sums, jnp.einsum("...m,...me->...e", q_t, sums)

    def denominator(sums: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
        q_t, k_t = token
        sums = sums + k_t
        return sums, jnp.einsum("...m,...m->...", q_t, sums)

    _, above = jax.lax.scan(numerator, jnp.zeros((*k.shape[1:], v.shape[-1]), v.dtype), (q, k, v))
    _, below = jax.lax.scan(denominator, jnp.zeros(k.shape[1:], k.dtype), (q, k))
    return jnp.moveaxis(above / below[..., None], 0, -2)


def prepare(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Prepare the one peer of this module; compiled here, so that no call compiles."""
    is_causal = kind == "causal"
    arrays = [
        jnp.asarray(x, dtype=jnp.float32)
        for x in (inputs.query, inputs.key, inputs.value, inputs.rows)
    ]
    compiled = jax.jit(causal if is_causal else full).lower(*arrays).compile()

    def wanted() -> Floats:
        q = oracle.stabilised(inputs.query, inputs.rows, EPSILON, is_query=True)
        k = oracle.stabilised(inputs.key, inputs.rows, EPSILON, is_query=False)
        weights = np.asarray(q @ k.swapaxes(-1, -2))
        return oracle.attention(weights, inputs.value, is_causal=is_causal)

    return Prepared(lambda: compiled(*arrays).block_until_ready(), wanted)

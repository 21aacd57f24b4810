"""Plain NumPy: the rates that the limit is made of, and softmax attention over a KV cache."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.peers import oracle
from benchmarks.peers.limits import CAUSAL_BLOCK, product_shapes
from benchmarks.peers.problem import Floats, Inputs, Prepared

__all__ = ["EXPONENTIALS", "factors", "prepare"]

EXPONENTIALS = 1 << 15
"""Numbers in one call of exp: 128 kB in and as much out stay in a second-level cache."""


def prepare(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Prepare a peer of this module."""
    if kind == "decode":
        return _cache(inputs)
    if kind == "exp":
        x = np.random.default_rng(0).standard_normal(EXPONENTIALS, dtype=np.float32)
        y = np.empty_like(x)
        return Prepared(lambda: np.exp(x, out=y), lambda: np.exp(x.astype(np.float64)))
    a, b = factors(kind, inputs)
    product = np.empty((*a.shape[:-1], b.shape[-1]), np.float32)
    return Prepared(
        lambda: np.matmul(a, b, out=product),
        lambda: a.astype(np.float64) @ b.astype(np.float64),
    )


def factors(kind: str, inputs: Inputs) -> tuple[Floats, Floats]:
    """Return two matrices to multiply; the sum over keys has its first one transposed.

    Small products are one batch: its first axis.
    """
    rows, inner, columns = product_shapes(inputs.sizes)[kind]
    rng = np.random.default_rng(0)
    if kind == "sum":
        a = rng.standard_normal((inner, rows), dtype=np.float32).T
    else:
        a = rng.standard_normal((rows, inner), dtype=np.float32)
    if kind == "small":
        a = a.reshape(-1, CAUSAL_BLOCK, inner)
    return a, rng.standard_normal((inner, columns), dtype=np.float32)


def _cache(inputs: Inputs) -> Prepared:
    """One token over a cache that has room for it, all heads in two products."""
    n = inputs.length
    token, key, value = inputs.token
    padding = [(0, 0), (0, 0), (0, 1), (0, 0)]
    keys, values = np.pad(inputs.key, padding), np.pad(inputs.value, padding)
    scale = np.float32(1 / math.sqrt(inputs.sizes.dim))

    def call() -> Floats:
        keys[..., n, :] = key
        values[..., n, :] = value
        logits = np.matmul(keys, (token * scale)[..., None])[..., 0]
        logits -= logits.max(axis=-1, keepdims=True)
        np.exp(logits, out=logits)
        sums = np.matmul(logits[..., None, :], values)[..., 0, :]
        return np.asarray(sums / logits.sum(axis=-1, keepdims=True))

    def wanted() -> Floats:
        q, all_keys, all_values = oracle.next_token(inputs)
        weights = oracle.softmax_weights(q, all_keys)
        return oracle.attention(weights, all_values, is_causal=False)[..., 0, :]

    return Prepared(call, wanted)

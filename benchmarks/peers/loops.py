"""The naive loop: linear attention in fifteen lines of NumPy, as one who knows NumPy writes it.

A head at a time, a tile of tokens at a time, features in one buffer that stays in cache. Nothing is
safe: exponents are taken as they come. It is the line that linattn must never fall behind, so tiles
are of the length that was fastest: in full attention of 128 to 2,048 tokens, in causal attention of
triangles of 32 to 256, by themselves or inside tiles of up to 512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.peers import oracle
from benchmarks.peers.problem import Floats, Inputs, Prepared

__all__ = ["prepare"]

CAUSAL_ROWS = 512
"""Tokens whose features are made at once in causal attention."""

MapFeatures = Callable[[Floats, Floats], Floats]
"""Writes features of a tile into a buffer of as many rows, and returns it."""


class Map(NamedTuple):
    """Features of queries and keys, how keys weigh values, and lengths of tiles and triangles."""

    features: MapFeatures
    weigh: Callable[[Floats, Floats], Floats]
    num_features: int
    rows: int
    triangle: int


def prepare(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Prepare a peer of this module."""
    is_causal, (_, _, d, m) = kind == "causal", inputs.sizes
    rows = inputs.rows[: m // 2 if name == "numpy-loop-hyperbolic" else m]
    projection = np.ascontiguousarray(rows.T * d**-0.25, dtype=np.float32)
    phi, oracle_features = {
        "numpy-loop": (Map(exponentials(projection), weighed, m, 512, 32), oracle.exponentials),
        "numpy-loop-hyperbolic": (
            Map(hyperbolic(projection), weighed, m, 1024, 32),
            oracle.hyperbolic,
        ),
        "numpy-loop-elu": (
            Map(elu_plus_one, with_one, d, 2048, 64),
            lambda x, rows: oracle.elu_plus_one(x),
        ),
    }[name]
    attend = causal if is_causal else full

    def call() -> Floats:
        out = np.empty_like(inputs.query)
        for head in np.ndindex(out.shape[:2]):
            attend(inputs.query[head], inputs.key[head], inputs.value[head], out[head], phi)
        return out

    def wanted() -> Floats:
        q, k = (oracle_features(x, rows) for x in (inputs.query, inputs.key))
        return oracle.attention(q @ k.swapaxes(-1, -2), inputs.value, is_causal=is_causal)

    return Prepared(call, wanted)


def full(q: Floats, k: Floats, v: Floats, out: Floats, phi: Map) -> None:
    """Attend to all keys."""
    buffer = np.empty((phi.rows, phi.num_features), np.float32)
    state = np.zeros((phi.num_features, v.shape[-1] + 1), np.float32)
    for tile in tiles(len(k), phi.rows):
        state += phi.features(k[tile], buffer[: len(k[tile])]).T @ phi.weigh(k[tile], v[tile])
    for tile in tiles(len(q), phi.rows):
        sums = phi.features(q[tile], buffer[: len(q[tile])]) @ state
        np.divide(sums[:, :-1], sums[:, -1:], out=out[tile])


def causal(q: Floats, k: Floats, v: Floats, out: Floats, phi: Map) -> None:
    """Attend to the keys so far."""
    buffers = np.empty((2, CAUSAL_ROWS, phi.num_features), np.float32)
    lower = np.tri(phi.triangle, dtype=np.float32)
    state = np.zeros((phi.num_features, v.shape[-1] + 1), np.float32)
    for tile in tiles(len(q), CAUSAL_ROWS):
        n = len(q[tile])
        phi_q, phi_k = (phi.features(x[tile], u[:n]) for x, u in zip((q, k), buffers, strict=True))
        values_and_one = phi.weigh(k[tile], v[tile])
        for part in tiles(n, phi.triangle):
            weights = phi_q[part] @ phi_k[part].T
            weights *= lower[: len(weights), : len(weights)]
            sums = weights @ values_and_one[part]
            sums += phi_q[part] @ state
            np.divide(sums[:, :-1], sums[:, -1:], out=out[tile][part])
            state += phi_k[part].T @ values_and_one[part]


def tiles(length: int, rows: int) -> Iterator[slice]:
    """Yield one tile after the other."""
    return (slice(start, start + rows) for start in range(0, length, rows))


def exponentials(projection: Floats) -> MapFeatures:
    """Features of FAVOR+ without the factor of the token's length: see :func:`weighed`."""

    def features(x: Floats, u: Floats) -> Floats:
        np.matmul(x, projection, out=u)
        return np.exp(u, out=u)

    return features


def hyperbolic(projection: Floats) -> MapFeatures:
    """Features of each row and its opposite, whose features are the reciprocals."""
    half = projection.shape[-1]

    def features(x: Floats, u: Floats) -> Floats:
        positive = u[:, :half]
        np.matmul(x, projection, out=positive)
        np.exp(positive, out=positive)
        np.reciprocal(positive, out=u[:, half:])
        return u

    return features


def elu_plus_one(x: Floats, u: Floats) -> Floats:
    """``x + 1`` above 0, ``exp(x)`` below."""
    np.minimum(x, 0, out=u)
    np.exp(u, out=u)
    u += np.maximum(x, 0)
    return u


def weighed(k: Floats, v: Floats) -> Floats:
    """Return ``[v w, w]`` with ``w = exp(-|k|^2 / (2 sqrt(d)))``; a query's own factor cancels."""
    w = np.exp(np.vecdot(k, k)[:, None] * np.float32(-0.5 * k.shape[-1] ** -0.5))
    return np.concatenate([v * w, w], axis=-1)


def with_one(k: Floats, v: Floats) -> Floats:
    """Return ``[v, 1]``."""
    return np.concatenate([v, np.ones_like(v[:, :1])], axis=-1)

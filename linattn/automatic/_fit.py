"""Clusters of the keys of one head: Lloyd steps on drawn keys, then the mean of each cluster.

A cluster counts as its mean key, each key with the weight that the mean query gives it:
``exp(s q.k_j) ~ exp(s q.K_c + s q'.(k_j - K_c))`` with the mean query q'. Beside exact clusters, a
query q' for each cluster or half the variance of its keys takes less than a tenth from the errors
of MiniLM, Whisper and photographs together; variance multiplies those of heavy tails by 2 to 100.
Letters: ``S`` keys, ``C`` clusters, ``d`` dim, ``e`` value dim, ``s`` scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.automatic._costs import ALONE, DRAWS, LLOYD_STEPS, SAMPLED_KEYS
from linattn.automatic._tokens import Head, about_mean, draw
from linattn.feature_maps._clusters import centroids, nearest

Floats = NDArray[Any]

TILE = 1 << 17
"""How many logits are computed in one tile."""


class Clusters(NamedTuple):
    """Keys of one head in the order of their clusters; clusters without a key are left out.

    Attributes
    ----------
    positions, of_key : ndarray of int, (S,)
        Unmasked keys, and their clusters.
    starts, sizes : ndarray of int, (C,)
    key, values_and_one : ndarray, (S, d), (S, e + 1)
        Sorted.
    centre : ndarray, (C, d)
        Means, scaled.
    log_scale, sums : ndarray, (C,), (C, e + 1)
        State after all keys: sums of values and ones in units of ``exp(log_scale)``.
    bias : ndarray, (C,)
        Log of the mean weight of a cluster's keys times the root mean square of their logits about
        the logit of the centre: added to a query's logits before it chooses clusters.
    """

    positions: NDArray[np.intp]
    of_key: NDArray[np.intp]
    starts: NDArray[np.intp]
    sizes: NDArray[np.intp]
    key: Floats
    values_and_one: Floats
    centre: Floats
    log_scale: Floats
    sums: Floats
    bias: Floats

    @classmethod
    def of(
        cls, head: Head, query: Floats, m: int, scale: float, generator: np.random.Generator
    ) -> Clusters:
        """Find m clusters of the keys of a head, for some of its queries.

        O(S m d + S d^2) time, O(S (d + e)) memory.
        """
        mean, root = _moments(query, scale)
        y = (head.key - head.key.mean(axis=0)) @ root.astype(head.key.dtype)
        cell, score = nearest(y, _centroids(y, m, generator))
        squares = np.maximum(np.vecdot(y, y) - 2 * score, 0)
        alone = _alone(squares, head.values_and_one[:, :-1], len(query), y.shape[-1])
        cell[alone] = m + np.arange(len(alone))
        # Numbers of two bytes are sorted by counting.
        dtype = np.uint16 if m + ALONE <= 1 << 16 else np.intp
        order = np.argsort(cell.astype(dtype), kind="stable")
        sizes = np.bincount(cell)
        number = np.cumsum(sizes > 0) - 1
        sizes = sizes[sizes > 0]
        starts = np.cumsum(sizes) - sizes
        key, values_and_one = head.key.take(order, axis=0), head.values_and_one.take(order, axis=0)
        log = key @ (scale * mean).astype(key.dtype)
        top = np.maximum.reduceat(log, starts)
        weight = np.exp(log - np.repeat(top, sizes))[:, None]
        sums = np.add.reduceat(weight * values_and_one, starts)
        total = sums[:, -1:]
        centre = np.add.reduceat(weight * key, starts) / total
        log_scale = top - centre @ (scale * mean).astype(key.dtype)
        y = y.take(order, axis=0)
        y -= np.repeat(np.add.reduceat(weight * y, starts) / total, sizes, axis=0)
        squares = np.add.reduceat(weight[:, 0] * np.vecdot(y, y), starts)
        bias = log_scale + np.log(total[:, 0] * np.maximum(squares, 0)) / 2 - np.log(sizes)
        return cls(
            positions=head.positions,
            of_key=number[cell],
            starts=starts,
            sizes=sizes,
            key=key,
            values_and_one=values_and_one,
            centre=(scale * centre).astype(key.dtype),
            log_scale=log_scale,
            sums=sums,
            bias=bias.astype(key.dtype),
        )


def _alone(squares: Floats, values: Floats, num_queries: int, d: int) -> NDArray[np.intp]:
    """Return the keys whose cluster may do most damage in their place.

    The logits of key j less its cluster's have a mean square over queries: ``squares``.
    For the most distant of L normal queries they are ``r_j = sqrt(2 log L squares_j)``. So the
    damage is ``exp(r_j) |v_j - v'|``. The usual damage has the mean distance of a value, and the
    most distant of S normal keys.
    """
    apart = values - values.mean(axis=0)
    sizes = (x.astype(np.float64) for x in (np.vecdot(apart, apart), squares))
    size, distance = ((x / (x.mean() or 1)) ** 0.5 for x in sizes)
    rate = (2 * np.log(num_queries) * float(squares.mean())) ** 0.5
    usual = 1 + (2 * np.log(len(squares)) / d) ** 0.5
    damage = np.log(np.maximum(size, 1e-9)) + rate * (distance - usual)
    most = np.argpartition(damage, -min(ALONE, len(damage)))[-ALONE:]
    return np.asarray(most[damage[most] > 0])


def _moments(query: Floats, scale: float) -> tuple[Floats, Floats]:
    """Return the mean of queries, and a root R of the covariance of their logits.

    ``|(k - k') R|^2`` is the variance over queries of the difference of two keys' logits.
    """
    mean, unit, square = about_mean(query)[1:]
    # A mean that is not finite makes clusters that are not, and is not taken.
    values, axes = np.linalg.eigh(np.nan_to_num(square) / len(query))
    return mean, scale * unit * axes * np.sqrt(np.maximum(values, 0))


def _centroids(y: Floats, m: int, generator: np.random.Generator) -> Floats:
    """Return centroids from drawn keys: k-means++ in rounds, then Lloyd steps.

    Half of a key's odds are equal for all, half are proportional to its squared distance to the
    mean key: rare keys that queries tell from all others are drawn. Drawn keys weigh 1 / odds.

    References
    ----------
    Bachem, Lucic, Krause, "Scalable k-Means Clustering via Lightweight Coresets" (2018), section 3.
    """
    num = SAMPLED_KEYS * m
    noise, gumbel = generator.random(num), generator.gumbel(size=num)
    squares = np.vecdot(y, y).astype(np.float64)
    odds = (1 + squares / (squares.mean() or 1)) / 2 if len(y) > num else np.ones(len(y))
    if len(y) > num:
        drawn = draw(odds, noise)
        y, odds = y.take(drawn, axis=0), odds[drawn]
    weights, metric = (1 / odds).astype(y.dtype), np.eye(y.shape[-1])
    return centroids(y, weights, metric, gumbel, m, steps=LLOYD_STEPS, rounds=DRAWS)

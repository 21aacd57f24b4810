"""Error of clusters on held-out rows, for every number of exact clusters.

The exact row of a query is the sum of the exact parts of its clusters. So the gain of each exact
cluster costs no further products. Letters: ``h`` rows, ``S`` keys, ``C`` clusters, ``e`` value dim,
``l`` levels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.automatic._fit import TILE, Clusters
from linattn.automatic._tokens import Head

__all__ = ["ErrorCurve", "error_curve"]

Floats = NDArray[Any]

LEAST_LOG, SEEN = -80.0, (1e-10, 1e15)
"""Smallest log weight that is not clipped, and the range of the sums of weights of a row. A clipped
weight is then lost in rounding, and no number leaves the range."""


class ErrorCurve(NamedTuple):
    """Errors of one head by the number of clusters that count exactly.

    Attributes
    ----------
    error, bound : ndarray, (l,)
        Relative output error on the held-out rows, and its upper bound.
    share : ndarray, (l,)
        Share of all keys in the exact clusters, in the mean over rows.
    floor : float
        Bound of rows without any error.
    rows : int
        Number of rows.
    """

    error: NDArray[np.float64]
    bound: NDArray[np.float64]
    share: NDArray[np.float64]
    floor: float = 0.0
    rows: int = 0


def error_curve(
    head: Head, clusters: Clusters | None, scale: float, levels: tuple[int, ...], probability: float
) -> ErrorCurve:
    """Compute the error of one head on its held-out rows for each number of exact clusters.

    Without keys there are no clusters, and no error. O(h S (d + e)) time, O(h C e) memory.
    """
    if clusters is None:
        return ErrorCurve(*np.zeros((3, len(levels))))
    # Weights out of range make an error that is not finite, and is not taken.
    with np.errstate(all="ignore"):
        logs = head.query @ clusters.centre.T
        order = np.argsort(-_scores(head, clusters, logs, scale), axis=-1)
        logs += clusters.log_scale
        sums, shift = _exact_sums(head.query, clusters, scale, logs.max(axis=-1))
        exact = sums.sum(axis=0)
        weights = np.exp(logs - shift[:, None])
        parts = np.empty((len(levels), *exact.shape), exact.dtype)
        parts[:] = weights @ clusters.sums
        share = _add_clusters(parts, sums, weights, order, clusters, levels)
        if head.beside is not None:
            beside, log = head.beside
            top = np.maximum(shift, log)
            for x in (exact, parts):
                x *= np.exp(shift - top)[:, None]
                x += beside * np.exp(log - top)[:, None]
        exact, parts = (x[..., :-1] / x[..., -1:] for x in (exact, parts))
        wide = exact.astype(np.float64)
        apart = parts - wide
        squares, units = np.vecdot(apart, apart), np.vecdot(wide, wide)
        unseen = head.unseen(wide) if head.beside is None else 0.0
        error, bound = head.error_and_bound(squares, units, probability, unseen)
        _, floor = head.error_and_bound(np.zeros_like(units), units, probability, unseen)
        return ErrorCurve(error, bound, share, float(floor), len(head.rows))


def _scores(head: Head, clusters: Clusters, logs: Floats, scale: float) -> Floats:
    """Return scores of clusters: those of the largest are exact. Own keys raise their clusters."""
    scores = logs + clusters.bias
    if head.beside is None and head.diagonal is not None:
        place = np.searchsorted(clusters.positions, head.rows)
        place = np.minimum(place, len(clusters.positions) - 1)
        is_key = clusters.positions[place] == head.rows
        diagonal = np.where(is_key, scale * np.vecdot(head.query, head.diagonal), -np.inf)
        at = np.arange(len(scores)), clusters.of_key[place]
        scores[at] = np.maximum(scores[at], diagonal)
    return scores


def _exact_sums(
    query: Floats, clusters: Clusters, scale: float, shift: Floats
) -> tuple[Floats, Floats]:
    """Sum exact weights times values and ones by cluster, (C, h, e + 1), in units of exp(shift).

    ``shift``: the largest logs of rows by clusters, near enough, mostly; that spares a pass.
    """
    rows = np.ascontiguousarray((query * query.dtype.type(scale)).T)
    sums = np.empty((len(clusters.starts), len(query), clusters.sums.shape[-1]), query.dtype)
    _sum_clusters(rows, clusters, shift, sums)
    seen = sums[..., -1].sum(axis=0)
    if not (seen.min(initial=1.0) > SEEN[0] and seen.max(initial=1.0) < SEEN[1]):
        size = max(16, TILE // rows.shape[-1])
        tiles = (clusters.key[start : start + size] for start in range(0, len(clusters.key), size))
        shift = np.max([(keys @ rows).max(axis=0) for keys in tiles], axis=0)
        _sum_clusters(rows, clusters, shift, sums)
    return sums, shift


def _sum_clusters(rows: Floats, clusters: Clusters, shift: Floats, sums: Floats) -> None:
    h, bounds = rows.shape[-1], [*clusters.starts.tolist(), len(clusters.key)]
    # Clusters of about so many keys are worked on together: each has few by itself.
    parts = clusters.starts // max(16, TILE // max(1, h))
    first = np.flatnonzero(np.diff(parts, prepend=-1))
    for begin, end in pairwise([*first.tolist(), len(clusters.starts)]):
        start, stop = bounds[begin], bounds[end]
        width = max(16, 2 * TILE // (stop - start))
        for tile in (slice(i, i + width) for i in range(0, h, width)):
            weights = clusters.key[start:stop] @ rows[:, tile]
            weights -= shift[tile]
            # Numbers that are not normal take ten times as long; a few keys tell.
            if weights[::8].min() < LEAST_LOG:
                weights.clip(LEAST_LOG, np.inf, out=weights)
            np.exp(weights, out=weights)
            for i in range(begin, end):
                of_cluster = weights[bounds[i] - start : bounds[i + 1] - start]
                values_and_one = clusters.values_and_one[bounds[i] : bounds[i + 1]]
                np.matmul(of_cluster.T, values_and_one, out=sums[i, tile])


def _add_clusters(
    parts: Floats,
    sums: Floats,
    weights: Floats,
    order: NDArray[np.intp],
    clusters: Clusters,
    levels: tuple[int, ...],
) -> NDArray[np.float64]:
    """Replace the parts of the best clusters by exact parts; return their share of the keys."""
    most = min(max(levels), len(clusters.starts))
    if not most:
        return np.zeros(len(levels))
    best, rows = np.ascontiguousarray(order[:, :most].T), np.arange(len(order))
    gained = sums.reshape(-1, parts.shape[-1]).take(best * len(rows) + rows, axis=0)
    gained -= weights[rows, best][..., None] * clusters.sums.take(best, axis=0)
    total, counted = np.zeros_like(parts[0]), 0
    for part, level in zip(parts, levels, strict=True):
        total += gained[counted:level].sum(axis=0)
        part += total
        counted = level
    sizes = np.cumsum(clusters.sizes[best].mean(axis=1)) / len(clusters.key)
    reached = np.append(0.0, sizes)
    share: NDArray[np.float64] = reached[np.minimum(levels, most)]
    return share

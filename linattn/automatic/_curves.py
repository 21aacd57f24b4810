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

from linattn.automatic._costs import LEAST_LOG
from linattn.automatic._fit import TILE, Clusters
from linattn.automatic._tokens import Head

Floats = NDArray[Any]

PROBABILITY = 0.95
"""Probability that a head meets the tolerance."""

SEEN = (1e-10, 1e15)
"""Range of the sums of weights of a row. A weight below LEAST_LOG is then arbitrary in rounding,
and no number leaves the range."""


class ErrorCurve(NamedTuple):
    """Errors of one head by the number of clusters that count exactly.

    Attributes
    ----------
    error : ndarray, (l,)
        Relative output error on the held-out rows.
    likely : ndarray, (l,)
        Bound of the error on other such rows, at a probability of 1 / 2.
    bound : ndarray, (l,)
        Bound of the error of all rows, drawn or not.
    share : ndarray, (l,)
        Share of all keys in the exact clusters, in the mean over rows.
    floor : float
        Squared bound of rows without any error, times their number.
    exact : ndarray, (h, e), or None
        Exact outputs of the rows.
    """

    error: NDArray[np.float64]
    likely: NDArray[np.float64]
    bound: NDArray[np.float64]
    share: NDArray[np.float64]
    floor: float = 0.0
    exact: Floats | None = None


def error_curve(
    head: Head, clusters: Clusters | None, scale: float, levels: tuple[int, ...]
) -> ErrorCurve:
    """Compute the error of one head on its held-out rows for each number of exact clusters.

    Without keys or rows there is no error; it is infinite for clusters that are not finite.
    O(h S (d + e)) time, O(h C e) memory.
    """
    if clusters is None or not head.inside.any():
        return ErrorCurve(*np.zeros((4, len(levels))))
    if not (clusters.bias < np.inf).all():
        return ErrorCurve(*np.full((4, len(levels)), np.inf))
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
        if head.total is None:
            output = (exact[:, :-1] / exact[:, -1:]).astype(np.float64)
            units, unseen = np.vecdot(output, output), head.rows.unseen(output)
            share_here = 1 / exact[:, -1:]
        else:
            output, units, unseen = head.total.output[head.inside], head.total.units, 0.0
            share_here = np.exp(shift - head.total.log[head.inside])[:, None]
        # The weights here change by so much of those of all keys.
        parts -= exact
        parts *= share_here
        apart = (parts[..., :-1] - parts[..., -1:] * output) / (1 + parts[..., -1:])
        squares = np.zeros((len(levels), len(head.inside)))
        found = np.vecdot(apart, apart)
        # All weights by clusters vanish beside exact ones: the output may be anything.
        seen = np.isfinite(found)
        squares[:, head.inside] = np.where(seen, found, 4 * np.vecdot(output, output))
        error, likely = head.rows.error_and_bound(squares, units, 1 / 2)
        _, bound = head.rows.error_and_bound(squares, units, PROBABILITY, unseen)
        _, floor = head.rows.error_and_bound(0 * units, units, PROBABILITY, unseen)
        bound = np.where(seen.all(axis=-1), bound, np.inf)
        return ErrorCurve(error, likely, bound, share, float(floor**2 * len(units)), output)


def _scores(head: Head, clusters: Clusters, logs: Floats, scale: float) -> Floats:
    """Return scores of clusters: those of the largest are exact. Own keys raise their clusters."""
    scores = logs + clusters.bias
    if head.same_place is not None:
        place = np.searchsorted(clusters.positions, head.rows.places)
        place = np.minimum(place, len(clusters.positions) - 1)
        is_key = clusters.positions[place] == head.rows.places
        diagonal = np.where(is_key, scale * np.vecdot(head.query, head.same_place), -np.inf)
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
                np.copyto(weights, -np.inf, where=weights < LEAST_LOG)
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

"""Weighted clusters of keys in a metric: k-means++ initialization and Lloyd's iteration.

Host arrays of ``H`` heads. Letters: ``C`` sampled tokens, ``m`` landmarks, ``p`` probes, ``d`` dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.feature_maps._landmark_fit import Sample

__all__ = ["LLOYD_STEPS", "clusters", "kmeans_plus_plus", "lloyd", "move_centroids", "power_of_two"]

Floats = NDArray[np.float64]

MAX_CLUSTER_ELEMENTS = 1 << 19
"""Sampled keys times probes, of a batch of heads: 2 MB of float32."""

LLOYD_STEPS = 3

NUM_ROUNDS = 4
"""In which the first landmarks are drawn: with 64 landmarks, 2, 4 and 8 rounds give the shipped
sample a median error of .164, .156 and .157."""


def clusters(
    probes: Floats,
    lognorm: Floats,
    keys: Sample,
    metric: Floats,
    gumbel: Floats,
    *,
    m: int,
    steps: int,
) -> tuple[Floats, NDArray[np.bool_]]:
    """Landmarks ``(..., m, d)`` and which of them are used, a batch of heads at a time."""
    lead = lognorm.shape[:-1]
    log_weight = np.where(keys.valid, 0.0 if keys.log_weight is None else keys.log_weight, -np.inf)
    arrays = (probes, lognorm[..., None], keys.x, log_weight[..., None], metric)
    flat = [np.broadcast_to(a, (*lead, *a.shape[-2:])).reshape(-1, *a.shape[-2:]) for a in arrays]
    heads, d = len(flat[0]), probes.shape[-1]
    landmarks, used = np.zeros((heads, m, d)), np.zeros((heads, m), dtype=bool)
    width = max(probes.shape[-2], m) * keys.x.shape[-2]
    size = max(1, MAX_CLUSTER_ELEMENTS // width)
    for start in range(0, heads, size):
        batch = slice(start, start + size)
        b, live = _cluster_heads(*(a[batch] for a in flat), gumbel=gumbel, m=m, steps=steps)
        landmarks[batch, : b.shape[-2]], used[batch, : b.shape[-2]] = b, live
    return landmarks.reshape(*lead, m, d), used.reshape(*lead, m)


def _cluster_heads(
    probes: Floats,
    lognorm: Floats,
    x: NDArray[Any],
    log_weight: Floats,
    metric: Floats,
    *,
    gumbel: Floats,
    m: int,
    steps: int,
) -> tuple[Floats, NDArray[np.bool_]]:
    """Draw landmarks by importance and move them to the weighted centres of their keys.

    ``log_weight``: of tokens, ``(..., C, 1)``; -inf in slots that hold none.
    """
    C = x.shape[-2]
    valid = log_weight[..., 0] > -np.inf
    count = np.sum(valid, axis=-1)[:, None, None]
    if m >= C:
        return np.where(valid[..., None], x, 0.0).astype(np.float64), valid
    # Centred: what is computed is as small as the distances of the keys allow.
    centre = np.sum(x, axis=-2, keepdims=True, dtype=np.float64) / np.maximum(count, 1)
    centred = x - centre.astype(x.dtype)
    offset = np.sum(probes * centre, axis=-1, keepdims=True) - lognorm
    twice, shift = ((2 * a).astype(x.dtype) for a in (probes, offset))
    ones = np.ones((1, probes.shape[-2]), x.dtype)

    def squared_attention(tokens: NDArray[Any]) -> NDArray[Any]:
        A = twice @ np.swapaxes(tokens, -1, -2)
        A += shift
        # A product with ones: sums across rows take four times as long.
        return np.asarray((ones @ np.exp(A, out=A))[..., 0, :])

    tokens, bias = centred, np.where(log_weight == -np.inf, 0.0, log_weight)
    if bias.any():
        # One more coordinate of tokens and probes, so that nothing leaves the range of numbers.
        tokens = np.concatenate([centred, bias.astype(x.dtype)], axis=-1)
        twice = np.concatenate([twice, np.full_like(twice[..., :1], 2)], axis=-1)
    weights = _by_tile(squared_attention, tokens, probes.shape[-2]) * valid

    # Squares of what is far from 1 would leave the range of float32.
    size = np.abs(np.where(valid[..., None], centred, 0)).max(axis=(-2, -1), keepdims=True)
    unit = power_of_two(size)
    centred /= unit.astype(x.dtype)
    with_one = np.concatenate([centred, np.ones_like(centred[..., :1])], axis=-1)
    chosen, cells = kmeans_plus_plus(with_one, weights, valid, metric, gumbel[:C], m)
    used = np.take_along_axis(valid, chosen, axis=-1)
    first = np.take_along_axis(centred, chosen[..., None], axis=-2).astype(np.float64)
    b = lloyd(with_one, weights, first, cells, used, metric, steps) * unit + centre
    return np.where(used[..., None], b, 0.0), used


class _Centroids(NamedTuple):
    """Centroids of H heads, as scores of nearness want them."""

    images: NDArray[Any]
    """``(H, d + 1, m)``: the last row, of biases, meets the ones after a token."""

    @classmethod
    def of(cls, b: Floats, used: NDArray[np.bool_], metric: Floats, dtype: Any) -> _Centroids:
        images = b @ metric
        bias = np.where(used, -0.5 * np.vecdot(images, b), -np.inf)[..., None]
        whole = np.concatenate([images, bias], axis=-1)
        return cls(np.ascontiguousarray(np.swapaxes(whole, -1, -2), dtype=dtype))

    def nearest(self, tokens: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[Any]]:
        """Nearest centroid of each token, and ``x.(M b) - b.(M b) / 2`` of it.

        With ``x.(M x)`` that makes the squared distance: ``|x - b|^2 = x.(M x) - 2 nearness``.
        """
        index = np.empty(tokens.shape[:-1], np.intp)
        score = np.empty(tokens.shape[:-1], tokens.dtype)
        size = max(64, MAX_CLUSTER_ELEMENTS // (self.images.shape[-1] * len(tokens)))
        for start in range(0, tokens.shape[-2], size):
            tile = slice(start, start + size)
            scores = tokens[:, tile] @ self.images
            index[:, tile] = scores.argmax(axis=-1)
            found = np.take_along_axis(scores, index[:, tile, None], axis=-1)
            score[:, tile] = found[..., 0]
        return index, score


def _by_tile(
    function: Callable[[NDArray[Any]], NDArray[Any]], x: NDArray[Any], width: int
) -> NDArray[Any]:
    """Compute one number per token from its row, in tiles of tokens that fit in the cache."""
    size = max(64, MAX_CLUSTER_ELEMENTS // (width * len(x)))
    tiles = range(0, x.shape[-2], size)
    return np.concatenate([function(x[:, i : i + size]) for i in tiles], axis=-1)


def kmeans_plus_plus(
    x: NDArray[Any],
    weights: NDArray[Any],
    valid: NDArray[np.bool_],
    metric: Floats,
    gumbel: Floats,
    num: int,
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Draw tokens without replacement in rounds, heavy ones that are far from those drawn.

    In the first round the odds are the weights; later they are weights times the squared distance
    to the nearest token drawn in earlier rounds (Gumbel top-k, the noise is kept). Letters as in
    :func:`lloyd`; ``num < C``. Time O(H C num d).

    Returns
    -------
    chosen : ndarray of int, (H, num)
        In the order of the sequence. Tokens of weight 0 come after all others, slots without a
        token after those.
    cells : ndarray of int, (H, C)
        Of each token the nearest one of these.

    References
    ----------
    Odds: Arthur, Vassilvitskii, "k-means++" (2007); rounds: Bahmani et al., "Scalable K-Means++"
    (2012).
    """
    tokens = x[..., :-1]
    squares = np.vecdot(tokens, tokens @ metric.astype(x.dtype))
    log_weights = np.log(weights.astype(np.float64))
    log_odds, nearest = log_weights, np.full(weights.shape, -np.inf, x.dtype)
    cells = np.zeros(weights.shape, np.intp)
    taken = np.zeros(weights.shape, dtype=bool)
    drawn: list[NDArray[np.int64]] = []
    for i in range(NUM_ROUNDS):
        first, stop = num * i // NUM_ROUNDS, num * (i + 1) // NUM_ROUNDS
        if first == stop:
            continue
        odds = np.maximum(log_odds + gumbel, -1e200)
        odds = np.where(taken, -np.inf, np.where(valid, odds, -1e300))
        new = np.argsort(-odds, axis=-1, kind="stable")[:, : stop - first]
        np.put_along_axis(taken, new, True, axis=-1)
        drawn.append(new)
        b = np.take_along_axis(tokens, new[..., None], axis=-2).astype(np.float64)
        used = np.take_along_axis(valid, new, axis=-1)
        index, scores = _Centroids.of(b, used, metric, x.dtype).nearest(x)
        cells = np.where(scores > nearest, first + index, cells)
        nearest = np.maximum(nearest, scores)
        log_odds = log_weights + np.log(np.maximum(squares - 2 * nearest, 0))
    chosen = np.concatenate(drawn, axis=-1)
    order = np.argsort(chosen, axis=-1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(num)[None, :], axis=-1)
    cells = np.take_along_axis(place, cells, axis=-1)
    return np.take_along_axis(chosen, order, axis=-1), cells


def move_centroids(b: Floats, total: NDArray[Any], sums: NDArray[Any]) -> Floats:
    """Centroids at the weighted means of their tokens; one whose tokens weigh nothing stays."""
    return np.where(total > 0, sums / np.where(total > 0, total, 1.0), b)


def lloyd(
    x: NDArray[Any],
    weights: NDArray[Any],
    start: Floats,
    cells: NDArray[np.intp],
    used: NDArray[np.bool_],
    metric: Floats,
    steps: int,
) -> Floats:
    """Weighted Lloyd steps in a metric: assign each token to its nearest centroid, average.

    Parameters
    ----------
    x : ndarray, (H, C, d + 1)
        Tokens of H heads, each with a one after it; distances are computed in their dtype.
    weights : ndarray, (H, C)
        0 for slots that hold no token.
    start : ndarray, (H, m, d)
        First centroids.
    cells : ndarray of int, (H, C)
        Of each token the nearest of these.
    used : ndarray of bool, (H, m)
        Centroids that take tokens.
    metric : ndarray, (H, d, d)
        Symmetric positive.
    steps : int
        Lloyd steps.

    Returns
    -------
    ndarray, (H, m, d)
        A centroid whose tokens weigh nothing stays where it was.

    Notes
    -----
    One matrix product a step but for the first, and one weighted count a coordinate. Time
    O(steps H C m d).
    """
    H, m, d = start.shape
    total_of = weights.astype(np.float64).ravel()
    coordinates = np.moveaxis(x[..., :-1], -1, 0).reshape(d, -1) * total_of
    first = m * np.arange(H)[:, None]
    b = start
    for step in range(steps):
        if step:
            cells = _Centroids.of(b, used, metric, x.dtype).nearest(x)[0]
        flat = (cells + first).ravel()
        total = np.bincount(flat, weights=total_of, minlength=H * m)
        sums = [np.bincount(flat, weights=z, minlength=H * m) for z in coordinates]
        b = move_centroids(b, total.reshape(H, m, 1), np.stack(sums, axis=-1).reshape(H, m, d))
    return b


def power_of_two(x: NDArray[Any]) -> Floats:
    """Largest powers of 2 up to positive numbers, 1 for 0: dividing by them rounds nothing."""
    x = np.asarray(x, dtype=np.float64)
    return np.asarray(np.ldexp(np.where(x > 0, 1.0, 2.0), np.frexp(x)[1] - 1))

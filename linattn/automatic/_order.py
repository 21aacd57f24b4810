"""An order of the queries in which neighbors have similar logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CHOICE_ROWS", "MIN_ORDERED", "order_of_queries"]

Floats = NDArray[Any]

CHOICE_ROWS, MIN_ORDERED = 8, 8192
"""How many queries choose clusters together, and the length from which they do."""

WAYS, MAX_DIRECTIONS, MAX_MOMENTS = 4, 8, 4096
"""Parts of a division, how many directions it may choose, and tokens sampled to find these."""

RARE = 16
"""One in this many queries is an outlier, ordered separately."""


def order_of_queries(query: Floats, key: Floats, counts: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return positions of the queries in their new order, ``(L,)``; masked queries come last.

    Distances are in the metric of the keys: the variance, over keys, of the difference of logits.
    Outliers follow the other queries, in their own order. O(L log L) time.
    """
    whole = np.flatnonzero(counts)
    if not len(key) or not len(whole):
        return np.arange(len(query))
    metric, _ = _moments(key)
    x, rest = _coordinates(query.take(whole, axis=0), metric)
    few = len(whole) // RARE // CHOICE_ROWS * CHOICE_ROWS
    # The others fill their runs.
    few += (len(whole) - few) % CHOICE_ROWS
    by_rest = np.argpartition(rest, len(whole) - few) if few else np.arange(len(whole))
    common, rare = np.sort(by_rest[: len(whole) - few]), np.sort(by_rest[len(whole) - few :])
    parts = [whole[common[_in_tree(x[common])]]]
    if few:
        places = whole[rare]
        parts.append(places[_in_tree(_coordinates(query.take(places, axis=0), metric)[0])])
    return np.concatenate([*parts, np.flatnonzero(~counts)])


def _in_tree(x: Floats) -> NDArray[np.intp]:
    """Order by a tree of parts of equal size, each divided along the axis in which it is widest."""
    n, levels, parts = len(x), 0, 1
    while parts * CHOICE_ROWS < n:
        levels, parts = levels + 1, parts * WAYS
    # Some stand for themselves twice, so that all parts are of one size.
    more = -n % max(1, parts // WAYS)
    place = np.append(np.arange(n), np.arange(more) * n // max(1, more))
    is_copy = np.arange(n + more) >= n
    x, parts = x.take(place, axis=0), 1
    for _ in range(levels):
        in_parts = x.reshape(parts, -1, x.shape[-1])
        means = np.einsum("pnd->pd", in_parts) / in_parts.shape[1]
        squares = np.einsum("pnd,pnd->pd", in_parts, in_parts) / in_parts.shape[1]
        widest = np.argmax(squares - means * means, axis=-1)
        along = np.take_along_axis(in_parts, widest[:, None, None], axis=2)[..., 0]
        order = np.argsort(along, axis=-1) + along.shape[1] * np.arange(parts)[:, None]
        order = order.ravel()
        x, place, is_copy = x.take(order, axis=0), place[order], is_copy[order]
        parts *= WAYS
    return np.asarray(place[~is_copy])


def _coordinates(query: Floats, metric: Floats) -> tuple[Floats, Floats]:
    """Return coordinates in the few directions of largest variance, and squared remainders."""
    queries, middle = _moments(query)
    # The variances over keys of queries' logits are the squares of these.
    size, axes = np.linalg.eigh(metric)
    root = axes * np.sqrt(np.maximum(size, 0))
    directions = np.linalg.eigh(root.T @ queries @ root)[1][:, ::-1]
    x = (query - middle) @ (root @ directions).astype(query.dtype)
    rest = x[:, MAX_DIRECTIONS:]
    return np.ascontiguousarray(x[:, :MAX_DIRECTIONS]), np.vecdot(rest, rest)


def _moments(x: Floats) -> tuple[Floats, Floats]:
    """Return the covariance of some tokens, up to a safe factor, and their mean."""
    drawn = x[:: max(1, len(x) // MAX_MOMENTS)].astype(np.float64)
    middle = drawn.mean(axis=0)
    drawn -= middle
    drawn /= np.abs(drawn).max(initial=0.0) or 1
    return drawn.T @ drawn, middle.astype(x.dtype)

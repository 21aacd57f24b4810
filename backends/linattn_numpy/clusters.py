"""Exact keys by content: a product for each cluster, of the queries that chose it with its keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.typing import (
    Assigned,
    Clusters,
    Declined,
    Exact,
    Exponential,
    Partial,
    Spec,
    State,
    Tokens,
)
from linattn_numpy import tuning
from linattn_numpy.assigned import features_and_logs, sums_by_feature
from linattn_numpy.buffers import buffer
from linattn_numpy.limits import EMPTY, all_finite, exp, finite_shift, row_max
from linattn_numpy.products import broadcast_lead, multiply
from linattn_numpy.states import add_sums

__all__ = ["assign_block", "choose_block", "clusters_block"]

Floats = NDArray[Any]


def assign_block(
    key_spec: Assigned, tokens: Tokens, values_and_one: Floats, state: State
) -> tuple[State, NDArray[np.intp], Floats] | Declined:
    """Add a block of keys to the state; the column of each, and its squared distance to it."""
    if 0 in tokens.x.shape or 0 in state.kvz.shape:
        return EMPTY
    if key_spec.dense or key_spec.landmarks is None or key_spec.metric is None:
        return Declined("corrected landmarks, or none, have no clusters")
    found = features_and_logs(key_spec, tokens)
    if isinstance(found, Declined):
        return found
    index, log = found
    m, d = key_spec.landmarks.shape[-2:]
    landmarks = np.broadcast_to(key_spec.landmarks, (*index.shape[:-1], m, d)).reshape(-1, d)
    heads = m * np.arange(len(landmarks) // m).reshape(*index.shape[:-1], 1)
    apart = tokens.x - landmarks[index + heads]
    distance = np.vecdot(apart @ key_spec.metric, apart)
    sums = sums_by_feature(index, log, values_and_one, m)
    return add_sums(state, *sums, values_and_one.shape[-2]), index, distance


def choose_block(
    query_spec: Spec, tokens: Tokens, state: State, bias: Floats, count: int
) -> tuple[NDArray[np.bool_], Partial] | Declined:
    """Choose columns by the largest log features and bias; read the others of the state."""
    if 0 in tokens.x.shape or 0 in state.kvz.shape:
        return EMPTY
    if not (isinstance(query_spec, Exponential) and isinstance(query_spec.Q, float)):
        return Declined("features that are not exponentials, or a curvature that is a matrix")
    if query_spec.paired or query_spec.Q != 0.0:
        return Declined("exponential features with pairs or a curvature")
    x, P, kvz = tokens.x, query_spec.P, state.kvz
    lead = broadcast_lead(x.shape[:-2], P.shape[:-2], kvz.shape[:-2], bias.shape[:-1]) or (1,)
    n, m, e = x.shape[-2], P.shape[-1], kvz.shape[-1]
    x, P, kvz = (np.broadcast_to(a, lead + a.shape[-2:]) for a in (x, P, kvz))
    bias, scale = (
        np.broadcast_to((a + query_spec.col)[..., None, :], (*lead, 1, m))
        for a in (bias, state.log_scale)
    )
    chosen = np.empty((*lead, n, m), bool)
    num_den, row = np.empty((*lead, n, e), x.dtype), np.empty((*lead, n, 1), x.dtype)
    for heads, tile in _tiles(lead, n, m):
        of = (*heads, tile)
        logs = multiply(x[of], P[heads], buffer("logs", chosen[of].shape, x.dtype))
        scores = np.add(logs, bias[heads], out=buffer("scores", logs.shape, x.dtype))
        ordered = buffer("ordered", logs.shape, x.dtype)
        np.copyto(ordered, scores)
        ordered.partition(m - count, axis=-1)
        np.greater_equal(scores, ordered[..., m - count, None], out=chosen[of])
        logs += scale[heads]
        np.copyto(logs, -np.inf, where=chosen[of])
        top = row_max(logs)
        row[of] = top
        logs -= finite_shift(top)
        multiply(exp(logs), kvz[heads], num_den[of])
    shape = broadcast_lead(tokens.x.shape[:-2], query_spec.P.shape[:-2], state.kvz.shape[:-2])
    chosen, num_den, row = (a.reshape(*shape, *a.shape[-2:]) for a in (chosen, num_den, row))
    return chosen, Partial(num_den, row if tokens.log_weight is None else row + tokens.log_weight)


def _tiles(lead: tuple[int, ...], n: int, m: int) -> Iterator[tuple[tuple[Any, ...], slice]]:
    """Heads, or blocks, and their tokens, as many as the cache holds."""
    rows = max(1, tuning.CHOICE_TILE_ELEMENTS // m)
    heads = max(1, rows // n)
    last = (slice(i, i + heads) for i in range(0, lead[-1], heads))
    for index in product(*(range(size) for size in lead[:-1]), list(last)):
        for start in range(0, n, rows):
            yield index, slice(start, start + rows)


def clusters_block(
    spec: Exact,
    query: Tokens,
    chosen: NDArray[np.bool_],
    clusters: Clusters,
    exact_window: int | None,
    part: Partial,
) -> Partial | Declined:
    """Add keys of the clusters that queries of one head have chosen to a partial of the queries."""
    if 0 in query.x.shape or 0 in clusters.key.x.shape:
        return EMPTY
    if clusters.key.log_weight is not None:
        return Declined("keys have log weights")
    n, m = chosen.shape
    # The log of what a row has read so far as one more coordinate: weights beside it are in range.
    seen = part.num_den[..., -1:]
    log = part.log + np.log(np.where(seen > 0, seen, 1))
    log = np.where(log > -np.inf, log, log.dtype.type(0))
    x = np.concatenate([query.x * spec.scale, -log], axis=-1)
    key = np.concatenate([clusters.key.x, np.ones_like(clusters.key.x[..., :1])], axis=-1)
    key, values_and_one = np.ascontiguousarray(key.T), clusters.values_and_one
    num_den = part.num_den * np.exp(part.log - log)
    pairs = np.flatnonzero(np.ascontiguousarray(chosen.T))
    ends, bounds = np.searchsorted(pairs, n * np.arange(m + 1)), clusters.bounds
    rows_of = pairs % n
    for rows, keys in _visits(rows_of, ends, bounds):
        shape = (len(rows), keys.stop - keys.start)
        queries = x.take(rows, axis=0)
        weights = np.matmul(queries, key[:, keys], out=buffer("weights", shape, x.dtype))
        exp(weights)
        if exact_window is not None:
            _leave_out_near(weights, query.start + rows, clusters.positions[keys], exact_window)
        num_den[rows] += np.matmul(weights, values_and_one[keys])
    # What is inf or NaN is so by itself, or because the scale is too low.
    return Partial(num_den, log) if all_finite(num_den) else Declined("sums are not finite")


def _visits(
    rows: NDArray[np.intp], ends: NDArray[np.intp], bounds: NDArray[np.intp]
) -> Iterator[tuple[NDArray[np.intp], slice]]:
    """For each cluster its keys and the queries that chose it, as many as the cache holds."""
    for (first, end), keys in zip(pairwise(ends), starmap(slice, pairwise(bounds)), strict=True):
        count = keys.stop - keys.start
        size = max(tuning.MIN_VISIT_ROWS, tuning.VISIT_TILE_ELEMENTS // max(1, count))
        for start in range(first, end if count else first, size):
            yield rows[start : min(start + size, end)], keys


def _leave_out_near(
    weights: Floats, rows: NDArray[np.intp], positions: NDArray[np.intp], exact_window: int
) -> None:
    """Put 0 where a key is in a query's window: both are in order, so that such keys are too."""
    block = rows // exact_window
    of_key = positions // exact_window
    first = np.searchsorted(of_key, block - 1)
    count = np.searchsorted(of_key, block + 2) - first
    ends = np.cumsum(count)
    if ends[-1]:
        starts = first + weights.shape[-1] * np.arange(len(rows)) - (ends - count)
        weights.reshape(-1)[np.repeat(starts, count) + np.arange(ends[-1])] = 0

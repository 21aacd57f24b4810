"""Exact keys by content: a product for each cluster, of the queries that chose it with its keys."""

from __future__ import annotations

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
from linattn_numpy import limits, tuning
from linattn_numpy.assigned import features_and_logs, sums_by_feature
from linattn_numpy.buffers import Bools, Floats, buffer
from linattn_numpy.products import broadcast_lead
from linattn_numpy.states import add_sums
from linattn_numpy.tiles import head_tiles


def assign_block(
    key_spec: Assigned, tokens: Tokens, values_and_one: Floats, state: State
) -> tuple[State, NDArray[np.intp], Floats] | Declined:
    """Add a block of keys to the state; return also each key's column and its squared distance."""
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
    query_spec: Spec,
    tokens: Tokens,
    state: State,
    bias: Floats,
    count: int,
    diagonal: tuple[NDArray[np.intp], Floats] | None,
) -> tuple[Bools, Partial] | Declined:
    """Choose columns by the largest log features and bias; read the others of the state."""
    if not isinstance(query_spec, Exponential) or query_spec.paired or np.any(query_spec.Q != 0.0):
        return Declined("features that are not exponentials, or have pairs or a curvature")
    x, P, kvz = tokens.x, query_spec.P, state.kvz
    lead = broadcast_lead(x.shape[:-2], P.shape[:-2], kvz.shape[:-2], bias.shape[:-1]) or (1,)
    n, m, e = x.shape[-2], P.shape[-1], kvz.shape[-1]
    x, P, kvz = (np.broadcast_to(a, lead + a.shape[-2:]) for a in (x, P, kvz))
    bias, scale = (
        np.broadcast_to((a + query_spec.col)[..., None, :], (*lead, 1, m))
        for a in (bias, state.log_scale)
    )
    if diagonal is not None:
        least = diagonal[1] if tokens.log_weight is None else diagonal[1] - tokens.log_weight
        column, least = (np.broadcast_to(a, (*lead, n, 1)) for a in (diagonal[0][..., None], least))
    chosen = np.empty((*lead, n, m), bool)
    num_den, row = np.empty((*lead, n, e), x.dtype), np.empty((*lead, n, 1), x.dtype)
    most = tuning.CHOICE_TILE_ELEMENTS // m
    for heads, of in head_tiles(lead, n, most, 1, are_apart=True):
        logs = buffer("logs", (*x[of].shape[:-1], m), x.dtype)
        np.matmul(x[of], P[heads], out=logs)
        scores = np.add(logs, bias[heads], out=buffer("scores", logs.shape, logs.dtype))
        if diagonal is not None:
            raised = np.maximum(np.take_along_axis(scores, column[of], axis=-1), least[of])
            np.put_along_axis(scores, column[of], raised, axis=-1)
        chosen[of] = _largest(scores, count)
        logs += scale[heads]
        np.putmask(logs, chosen[of], -np.inf)
        row[of] = limits.row_max(logs)
        logs -= limits.finite_shift(row[of])
        np.matmul(limits.weights(logs), kvz[heads], out=num_den[of])
    shape = broadcast_lead(tokens.x.shape[:-2], query_spec.P.shape[:-2], state.kvz.shape[:-2])
    chosen, num_den, row = (a.reshape(*shape, *a.shape[-2:]) for a in (chosen, num_den, row))
    return chosen, Partial(num_den, row if tokens.log_weight is None else row + tokens.log_weight)


def _largest(scores: Floats, count: int) -> Bools:
    """Mark the ``count`` largest entries of each row."""
    ordered = buffer("ordered", scores.shape, scores.dtype)
    np.copyto(ordered, scores)
    ordered.partition(scores.shape[-1] - count, axis=-1)
    return np.asarray(scores >= ordered[..., -count, None])


def clusters_block(
    spec: Exact,
    query: Tokens,
    chosen: Bools,
    clusters: Clusters,
    exact_window: int | None,
    part: Partial,
) -> Partial | Declined:
    """Add keys of the clusters that queries of one head have chosen to a partial of the queries."""
    if clusters.key.log_weight is not None:
        return Declined("keys have log weights")
    if not len(clusters.positions):
        return part
    # The log denominator so far as one more coordinate: weights relative to it are in range.
    seen, x = part.num_den[..., -1:], query.x * spec.scale
    log = part.log + np.log(np.where(seen > 0, seen, 1))
    if not (seen > 0).all():
        # A row that has seen nothing is relative to the first key that it adds.
        has_keys = chosen & (np.diff(clusters.bounds) > 0)
        first = clusters.bounds[has_keys.argmax(axis=-1)]
        first_key = clusters.key.x.take(first, axis=0, mode="clip")
        alone = np.where(has_keys.any(axis=-1), np.vecdot(x, first_key), -np.inf)
        log = np.where(seen > 0, log, alone[:, None])
    x = np.concatenate([x, -limits.finite_shift(log)], axis=-1)
    key = np.concatenate([clusters.key.x, np.ones_like(clusters.key.x[..., :1])], axis=-1)
    key, values_and_one = np.ascontiguousarray(key.T), clusters.values_and_one
    num_den = part.num_den * np.exp(part.log - limits.finite_shift(log))
    # A row as one element: numbers one by one take three times as long to scatter.
    row = np.dtype((np.void, num_den.shape[-1] * num_den.itemsize))
    rows = num_den.view(row)[:, 0]
    for chose, keys in clusters.visits(chosen, tuning.VISIT_TILE_ELEMENTS, tuning.MIN_VISIT_ROWS):
        weights = limits.weights(x.take(chose, axis=0) @ key[:, keys])
        if exact_window is not None:
            _leave_out_near(weights, query.start + chose, clusters.positions[keys], exact_window)
        sums = weights @ values_and_one[keys]
        sums += num_den.take(chose, axis=0)
        rows[chose] = sums.view(row)[:, 0]
    # A sum is inf or NaN because of its values, or because the scale is too low.
    return Partial(num_den, log) if limits.all_finite(num_den) else Declined("sums are not finite")


def _leave_out_near(
    weights: Floats, rows: NDArray[np.intp], positions: NDArray[np.intp], exact_window: int
) -> None:
    """Zero weights of keys in a query's window: they are adjacent, since positions are sorted."""
    block = rows // exact_window
    of_key = positions // exact_window
    first = np.searchsorted(of_key, block - 1)
    count = np.searchsorted(of_key, block + 2) - first
    ends = np.cumsum(count)
    if ends[-1]:
        starts = first + weights.shape[-1] * np.arange(len(rows)) - (ends - count)
        weights.reshape(-1)[np.repeat(starts, count) + np.arange(ends[-1])] = 0

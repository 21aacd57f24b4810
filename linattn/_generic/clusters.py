"""Exact keys by content: keys in clusters, queries that choose clusters, both together.

The clusters of keys and the choices of queries are arrays on the host. Sums over queries, keys and
values are computed in the library that the arrays come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn._arrays import namespace, to_numpy
from linattn._generic import exact
from linattn._generic.features import query_features, row_features
from linattn._generic.states import absorb, combine, read
from linattn._numerics import finite_shift
from linattn.typing import (
    Array,
    Assigned,
    Clusters,
    Exact,
    Exponential,
    Features,
    Partial,
    State,
    Tokens,
)
from linattn.typing._shifts import largest


def assign_block(
    key_spec: Assigned, tokens: Tokens, values_and_one: Array, state: State
) -> tuple[State, NDArray[np.intp], NDArray[Any]]:
    """Add a block of keys to the state; return also each key's column and squared distance to it.

    O(n m (d + e)) time, O(n m) memory.
    """
    xp = namespace(tokens.x)
    features = row_features(key_spec, tokens)
    index = xp.argmax(xp.matmul(tokens.x, key_spec.P) + key_spec.bias[..., None, :], axis=-1)
    assert key_spec.landmarks is not None
    features_index = xp.arange(features.log.shape[-1], device=array_api_compat.device(index))
    assigned = xp.astype(index[..., None] == features_index, tokens.x.dtype)
    # A product with one 1 in each row is exact.
    apart = tokens.x - xp.matmul(assigned, key_spec.landmarks)
    distance = xp.sum(xp.matmul(apart, key_spec.metric) * apart, axis=-1)
    return absorb(features, values_and_one, state), to_numpy(index), to_numpy(distance)


def choose_block(
    query_spec: Exponential,
    tokens: Tokens,
    state: State,
    bias: Array,
    count: int,
    diagonal: tuple[NDArray[np.intp], NDArray[Any]] | None,
) -> tuple[NDArray[np.bool_], Partial]:
    """Choose for queries the columns with the largest log features and bias; read the others.

    The choice is a mask ``(..., n, m)`` of the ``count`` largest columns, and of columns equal to
    the last of them. ``diagonal``: a column for each query, ``(..., n)``, and the least value of
    its log feature and bias, ``(..., n, 1)``. O(n m (d + e)) time, O(n m) memory.
    """
    features, log_row = query_features(query_spec, tokens)
    xp = namespace(features.log)
    scores = to_numpy(features.log + bias[..., None, :])
    if diagonal is not None:
        is_raised = diagonal[0][..., None] == np.arange(scores.shape[-1])
        least = (diagonal[1] - to_numpy(log_row)).astype(scores.dtype)
        scores = np.where(is_raised, np.maximum(scores, least), scores)
    last = scores.shape[-1] - count
    chosen = scores >= np.partition(scores, last, axis=-1)[..., last, None]
    masked = xp.asarray(chosen, device=array_api_compat.device(features.log))
    log = xp.where(masked, xp.full_like(features.log, -float("inf")), features.log)
    rest = read(Features(log, None), state)
    return chosen, Partial(rest.num_den, rest.log + log_row)


def clusters_block(
    spec: Exact,
    query: Tokens,
    chosen: NDArray[np.bool_],
    clusters: Clusters,
    exact_window: int | None,
    part: Partial,
    exact_block: Any = exact.exact_block,
    bias_of: Callable[[NDArray[np.intp]], Array] | None = None,
) -> Partial:
    """Add the keys of the clusters that queries of one head chose to a partial of the queries.

    Keys in a query's window are left out. ``bias_of`` gives log weights of pairs by the offsets
    j - i of their keys. O(sum of the chosen clusters' sizes (d + e)) time,
    O(n c e) memory for c clusters a query.
    """
    xp = namespace(query.x)
    device = array_api_compat.device(query.x)
    n = query.x.shape[0]
    key, values_and_one = clusters.key, clusters.values_and_one
    if key.log_weight is not None:
        # Backends may take a log weight for a mask.
        exact_block = exact.exact_block
    nothing = xp.zeros((1, values_and_one.shape[-1]), dtype=values_and_one.dtype, device=device)
    parts, seen = ([nothing], [nothing[..., -1:] - xp.inf]), 1
    # The parts of each row, in the order of its clusters; the rest are `nothing`.
    where = np.zeros((n, int(chosen.sum(axis=-1).max(initial=1))), np.int64)
    filled = np.zeros(n, np.int64)
    for rows, members in clusters.visits(chosen):
        x = xp.take(query.x, xp.asarray(rows, device=device), axis=0)
        weight = None if key.log_weight is None else key.log_weight[members, :]
        offset, visible = clusters.positions[members] - (query.start + rows)[:, None], None
        if exact_window is not None:
            blocks = clusters.positions[members] // exact_window
            near = abs(((query.start + rows) // exact_window)[:, None] - blocks) <= 1
            visible = xp.asarray(~near, device=device) if near.any() else None
        keys = Tokens(key.x[members, :], weight, 0)
        block = spec, Tokens(x, None, 0), keys, values_and_one[members, :], visible
        if bias_of is None:
            found = exact_block(*block)
        else:
            found = exact.exact_pairs(*block, bias_of(offset), False)
        for arrays, array in zip(parts, found[:2], strict=True):
            arrays.append(array)
        where[rows, filled[rows]] = seen + np.arange(len(rows))
        filled[rows] += 1
        seen += len(rows)
    index = xp.asarray(where.ravel(), device=device)
    num_den, logs = (
        xp.reshape(xp.take(xp.concat(arrays, axis=0), index, axis=0), (*where.shape, -1))
        for arrays in parts
    )
    log = largest(logs, axis=-2)
    num_den = num_den * xp.exp(logs - finite_shift(log, xp)[:, None, :])
    return combine(part, Partial(xp.sum(num_den, axis=-2), log))

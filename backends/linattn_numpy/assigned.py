"""Sparse key sides: each key has one feature, found by a product, weighed by a gather.

The generic code makes a row of m logs for each key, all but one of them -inf, and exponentiates
them; here the one weight is put where it belongs.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Assigned, Declined, Tokens
from linattn_numpy import limits, tuning
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.products import broadcast_lead, product, transposed, weighted_sum


def assigned_sums(
    spec: Assigned, tokens: Tokens, values_and_one: Floats
) -> tuple[Floats, Floats] | Declined:
    """Sum a block by feature: sums and their log scale."""
    if spec.dense:
        return Declined("corrected landmarks have dense features beside the sparse ones")
    found = features_and_logs(spec, tokens)
    if isinstance(found, Declined):
        return found
    return sums_by_feature(*found, values_and_one, spec.P.shape[-1])


def sums_by_feature(
    index: NDArray[np.intp], log: Floats, values_and_one: Floats, m: int
) -> tuple[Floats, Floats]:
    """Sum values, each at the feature of its key and by the key's weight there."""
    if index.shape[-1] < tuning.MIN_SORTED_ROWS:
        return _sums_of_few(index, log, values_and_one, m)
    lead = broadcast_lead(index.shape[:-1], values_and_one.shape[:-2])
    (n, e), heads = values_and_one.shape[-2:], prod(lead)
    places = np.broadcast_to(index, (*lead, n)).reshape(heads, n) + m * np.arange(heads)[:, None]
    # Numbers of two bytes are sorted by counting.
    place = places.astype(np.uint16 if heads * m <= 1 << 16 else np.intp).ravel()
    order = np.argsort(place, kind="stable")
    place = place[order]
    starts = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    found, log = place[starts], np.broadcast_to(log, (*lead, n, 1)).reshape(-1)[order]
    top = np.full(heads * m, -np.inf, log.dtype)
    top[found] = np.maximum.reduceat(log, starts)
    values = np.broadcast_to(values_and_one, (*lead, n, e)).reshape(-1, e)
    weighted = buffer("weighted", values.shape, values.dtype)
    values.take(order, axis=0, out=weighted, mode="clip")
    weighted *= np.exp(log - limits.finite_shift(top)[place])[:, None]
    sums = np.zeros((heads * m, e), values.dtype)
    sums[found] = np.add.reduceat(weighted, starts, axis=0)
    return sums.reshape(*lead, m, e), top.reshape(*lead, m)


def _sums_of_few(
    index: NDArray[np.intp], log: Floats, values_and_one: Floats, m: int
) -> tuple[Floats, Floats]:
    """Sum blocks so short that a product with all features takes less time than sorting."""
    top = np.full((*index.shape[:-1], m), -np.inf, log.dtype)
    places = index + m * np.arange(top.size // m).reshape(*top.shape[:-1], 1)
    np.maximum.at(top.reshape(-1), places, log[..., 0])
    weights = buffer("weights", (*index.shape, m), log.dtype)
    weights.fill(0)
    shares = np.exp(log[..., 0] - limits.finite_shift(top).reshape(-1)[places])
    weights.reshape(-1)[np.arange(index.size) * m + index.ravel()] = shares.ravel()
    return weighted_sum(weights, values_and_one), top


def features_and_logs(spec: Assigned, tokens: Tokens) -> tuple[NDArray[np.intp], Floats] | Declined:
    """Feature of each key, ``(..., n)``, and its log weight there, ``(..., n, 1)``."""
    x, P, probes, table = tokens.x, spec.P, spec.probes, spec.table
    bias, offset = spec.bias[..., None, :], spec.offset[..., None, :]
    lead = np.broadcast_shapes(*(a.shape[:-2] for a in (x, P, bias, probes, offset, table)))
    # In the order of rows: one in another is copied whole for each tile.
    rows = np.add(transposed(table), offset, order="C")
    m, p = rows.shape[-2:]
    offsets = m * np.arange(prod(rows.shape[:-2])).reshape(*rows.shape[:-2], 1)
    rows = rows.reshape(-1, p)
    n = x.shape[-2]
    index, log = np.empty((*lead, n), np.intp), np.empty((*lead, n, 1), x.dtype)
    size = max(64, tuning.ASSIGNED_TILE_ELEMENTS // (p * prod(lead)))
    for start in range(0, n, size):
        tile = slice(start, min(start + size, n))
        scores = product(x[..., tile, :], P, "scores")
        scores += bias
        index[..., tile] = scores.argmax(axis=-1)
        terms = buffer("terms", (*lead, tile.stop - start, p), x.dtype)
        workspace = buffer("workspace", terms.shape, x.dtype)
        np.matmul(x[..., tile, :], probes, out=terms)
        # "clip" spares a copy of what is taken; every index is in range.
        terms += np.take(rows, offsets + index[..., tile], axis=0, out=workspace, mode="clip")
        total = _log_sum(terms, workspace)
        if isinstance(total, Declined):
            return total
        log[..., tile, :] = total
    if tokens.log_weight is not None:
        log = log + tokens.log_weight
    # Probes, and weights of a change of coordinates, may have leading axes that scores have not.
    return np.broadcast_to(index, log.shape[:-1]), log


def _log_sum(x: Floats, workspace: Floats) -> Floats | Declined:
    """Log of the sum of exponentials along the last axis."""
    # A few rows tell whether some may be so small that the attempt would take long.
    if not x[..., ::8, :].min(initial=0.0) < limits.MIN_EXPONENT[x.itemsize]:
        total = np.exp(x, out=workspace) @ np.ones((x.shape[-1], 1), x.dtype)
        least = limits.MIN_EXP_SUM[x.itemsize]
        if least < total.min(initial=1.0) <= total.max(initial=1.0) < np.inf:
            return np.asarray(np.log(total))
    shift = limits.row_max(x)
    if not np.isfinite(shift).all():
        return Declined("log weights of keys are not finite")
    x -= shift
    return np.asarray(np.log(limits.weights(x).sum(axis=-1, keepdims=True)) + shift)

"""Sparse key sides: each key goes to one column, found by a product, weighed by a gather.

The generic code makes a row of m logs for each key, all but one of them -inf, and exponentiates
them; here the one weight is put where it belongs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Assigned, Tokens

__all__ = ["assigned_sums"]

Floats = NDArray[Any]

LEAST_SUM = {4: 1e-30, 8: 1e-290}
"""Sums of exponentials below this are made anew with a shift, by bytes a number."""

SPREAD = {4: 30.0, 8: 300.0}
"""Log weights of a block that differ by no more than this may share one scale."""


def assigned_sums(spec: Assigned, tokens: Tokens, v1: Floats) -> tuple[Floats, Floats] | None:
    """Sum a block by column: sums and their log scale; None where generic code must do it."""
    x = tokens.x
    if spec.dense:
        return None
    scores = np.matmul(x, spec.P)
    scores += spec.bias[..., None, :]
    column = scores.argmax(axis=-1)
    log = _log_weights(spec, x, column)
    if log is None:
        return None
    if tokens.log_weight is not None:
        log = log + tokens.log_weight
    top = log.max(axis=-2, keepdims=True)
    top = np.where(top == -np.inf, log.dtype.type(0), top)
    if np.min(log, where=log > -np.inf, initial=np.inf) < top.max() - SPREAD[log.itemsize]:
        return None
    weights = np.zeros((*column.shape, spec.P.shape[-1]), x.dtype)
    flat = weights.reshape(-1, weights.shape[-1])
    flat[np.arange(len(flat)), column.ravel()] = np.exp(log - top).ravel()
    sums = np.matmul(np.swapaxes(weights, -1, -2), v1)
    seen = sums[..., -1] > 0
    return sums, np.where(seen, top[..., 0], log.dtype.type(-np.inf))


def _log_weights(spec: Assigned, x: Floats, column: NDArray[np.intp]) -> Floats | None:
    """Log weight of each key at its column, ``(..., n, 1)``; None for what is not finite."""
    terms = np.matmul(x, spec.probes)
    terms += spec.offset[..., None, :]
    terms += _gathered(spec.table, column)
    total = np.exp(terms).sum(axis=-1, keepdims=True)
    if not LEAST_SUM[x.itemsize] < total.min(initial=1.0) <= total.max(initial=1.0) < np.inf:
        shift = terms.max(axis=-1, keepdims=True)
        if not np.isfinite(shift).all():
            return None
        terms -= shift
        return np.asarray(np.log(np.exp(terms, out=terms).sum(axis=-1, keepdims=True)) + shift)
    return np.asarray(np.log(total))


def _gathered(table: Floats, column: NDArray[np.intp]) -> Floats:
    """Column of the table of each key, ``(..., n, p)``."""
    lead, (p, m) = table.shape[:-2], table.shape[-2:]
    rows = np.ascontiguousarray(np.swapaxes(table, -1, -2)).reshape(-1, p)
    first = m * np.arange(len(rows) // m).reshape(*lead, 1)
    return np.asarray(np.take(rows, first + column, axis=0))

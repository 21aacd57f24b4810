"""Matrix products into buffers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from linattn_numpy import tuning
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.tiles import equal_parts, moveaxis


def transposed(x: Floats) -> Floats:
    """Swap the last two axes."""
    return x.swapaxes(-1, -2)


def broadcast_lead(first: tuple[int, ...], *rest: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast leading axes; equal ones, the usual case, cost nothing."""
    for shape in rest:
        if shape and shape != first:
            first = np.broadcast_shapes(first, shape)
    return first


@lru_cache(128)
def small_parts(n: int, numbers: int) -> list[slice]:
    """Cut n rows into parts so that a product with ``numbers`` elements is small for BLAS."""
    most = tuning.MAX_SMALL_MATMUL // max(1, numbers)
    return equal_parts(n, n if most < tuning.MIN_SUM_ROWS else most)


def product(x: Floats, y: Floats, name: str) -> Floats:
    """Multiply into a buffer: fresh memory pages would cost more time than the product."""
    lead = broadcast_lead(x.shape[:-2], y.shape[:-2])
    out = buffer(name, (*lead, x.shape[-2], y.shape[-1]), x.dtype)
    return np.asarray(np.matmul(x, y, out=out))


def read_halves(weights: Floats, kvz: Floats, out: Floats, axis: int = -3) -> Floats:
    """``weights kvz``, summed over the sign halves along an axis of both."""
    if weights.shape[axis] > 1:
        # A sum of two arrays takes half as long as one along an axis of 2.
        first, last = moveaxis(product(weights, kvz, "halves"), axis, 0)
        return np.asarray(np.add(first, last, out=out))
    return np.asarray(np.matmul(weights.squeeze(axis), kvz.squeeze(axis), out=out))


def sum_products(x: Floats, y: Floats, out: Floats) -> Floats:
    """``x^T y`` into ``out``; a product over one row alone would not go to BLAS."""
    if x.shape[-2] == 1:
        x, y = (np.concatenate([rows, np.zeros_like(rows)], axis=-2) for rows in (x, y))
    return np.matmul(transposed(x), y, out=out)


def weighted_sum(weights: Floats, v: Floats, out: Any = None, add: bool = False) -> Floats:
    """``weights^T v`` into ``out`` or a new array, or added to ``out``."""
    if add:
        return np.asarray(np.add(out, weighted_sum(weights, v), out=out))
    return np.asarray(np.matmul(transposed(weights), v, out=out))


def weighted(values_and_one: Floats, weights: Floats, name: str = "values_and_one") -> Floats:
    """Multiply ``[v, 1]`` by weights, into a buffer."""
    lead = broadcast_lead(values_and_one.shape[:-2], weights.shape[:-2])
    out = buffer(name, (*lead, *values_and_one.shape[-2:]), values_and_one.dtype)
    return np.asarray(np.multiply(values_and_one, weights, out=out))

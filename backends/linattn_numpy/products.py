"""Matrix products, cut into small ones where BLAS is faster on those.

OpenBLAS has kernels for AVX-512 that multiply ``(a, b)`` by ``(b, c)`` as they lie where
``a b c <= 10^6``, and packs larger matrices first. Which of the two is faster depends on processor
and kind of product, which the name of the kernels does not tell: it is measured.
"""

from __future__ import annotations

import os
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from linattn_numpy import tuning
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.choices import choose, gain, power_and_unit
from linattn_numpy.threads import limited_threads
from linattn_numpy.tiles import equal_parts, moveaxis

__all__ = [
    "KINDS",
    "broadcast_lead",
    "kernel_status",
    "multiply",
    "product",
    "read_halves",
    "small_parts",
    "small_products",
    "sum_products",
    "transposed",
    "weighted",
    "weighted_sum",
]


KINDS = ("project", "read")
"""Products ``x P`` to more features than it has dimensions, and those over features or tokens."""


def kernel_status() -> str:
    """Say which products are cut here and how exponentials are computed, and why."""
    dtype = np.dtype(np.float32)
    asked = [name for name in ("LINATTN_SMALL_PRODUCTS", "LINATTN_EXP2") if name in os.environ]
    return (
        f"products cut into small ones: {', '.join(small_products(dtype)) or 'none'}; exponentials "
        f"in {dtype} by {power_and_unit(dtype)[0].__name__} ({', '.join([*asked, 'measured'][:2])})"
    )


def _measured(dtype: Any) -> tuple[str, ...]:
    n, *sizes = tuning.MEASURED_SIZES
    with limited_threads():
        gains = [_gain(n, k, j, dtype) for k, j in pairwise(sizes)]
    return tuple(kind for kind, found in zip(KINDS, gains, strict=True) if found > tuning.MIN_GAIN)


small_products = partial(choose, "LINATTN_SMALL_PRODUCTS", KINDS, _measured)
"""Kinds of products that are cut into small ones; the measurement takes 2 to 4 ms."""


def _gain(n: int, k: int, j: int, dtype: Any) -> float:
    arrays = np.ones((n, k), dtype), np.ones((k, j), dtype), np.empty((n, j), dtype)
    return gain(partial(np.matmul, *arrays), partial(_multiply_cut, *arrays))


def transposed(x: Floats) -> Floats:
    """Swap the last two axes."""
    return x.swapaxes(-1, -2)


def broadcast_lead(first: tuple[int, ...], *rest: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast leading axes, at no cost where they are alike, as they mostly are."""
    for shape in rest:
        if shape and shape != first:
            first = np.broadcast_shapes(first, shape)
    return first


def multiply(x: Floats, y: Floats, out: Floats) -> Floats:
    """``x y`` into ``out``, in batches of rows where that is faster."""
    n, k, j = *x.shape[-2:], y.shape[-1]
    kind = "project" if k < j else "read"
    if n * k * j <= tuning.MAX_SMALL_MATMUL or kind not in small_products(y.dtype):
        return np.matmul(x, y, out=out)
    # Kernels for small matrices are slow on a transposed second factor.
    can_cut = _rows_per_small_product(k * j) and y.strides[-1] == y.itemsize
    return _multiply_cut(x, y, out) if can_cut else np.matmul(x, y, out=out)


def _multiply_cut(x: Floats, y: Floats, out: Floats) -> Floats:
    n, (k, j) = x.shape[-2], y.shape[-2:]
    size = _rows_per_small_product(k * j)
    whole = n - n % size
    batches = out[..., :whole, :].reshape(*out.shape[:-2], -1, size, j)
    x_batches = x[..., :whole, :].reshape(*x.shape[:-2], -1, size, k)
    np.matmul(x_batches, y if y.ndim == 2 else y[..., None, :, :], out=batches)
    if whole < n:
        np.matmul(x[..., whole:, :], y, out=out[..., whole:, :])
    return out


@cache
def _rows_per_small_product(numbers: int) -> int:
    """Rows of a small product with a factor of so many elements: a power of two, or 0."""
    size = tuning.MAX_PRODUCT_ROWS
    while size * numbers > tuning.MAX_SMALL_MATMUL:
        size //= 2
    return size if size >= tuning.MIN_PRODUCT_ROWS else 0


@cache
def small_parts(n: int, numbers: int) -> list[slice]:
    """Cut n rows into parts whose products with a factor of so many elements are small."""
    most = tuning.MAX_SMALL_MATMUL // max(1, numbers)
    return equal_parts(n, n if most < tuning.MIN_SUM_ROWS else most)


def product(x: Floats, y: Floats, name: str) -> Floats:
    """Multiply in a buffer: pages of a fresh array cost more than what is done to them."""
    lead = broadcast_lead(x.shape[:-2], y.shape[:-2])
    return multiply(x, y, buffer(name, (*lead, x.shape[-2], y.shape[-1]), x.dtype))


def read_halves(weights: Floats, kvz: Floats, out: Floats, axis: int = -3) -> Floats:
    """``weights kvz``, summed over the sign halves along an axis of both."""
    if weights.shape[axis] > 1:
        # A sum of two arrays takes half as long as one along an axis of 2.
        first, last = moveaxis(product(weights, kvz, "halves"), axis, 0)
        return np.asarray(np.add(first, last, out=out))
    return multiply(weights.squeeze(axis), kvz.squeeze(axis), out)


def sum_products(x: Floats, y: Floats, out: Floats) -> Floats:
    """``x^T y`` into ``out``; a product over one row alone would not go to BLAS."""
    if x.shape[-2] == 1:
        x, y = (np.concatenate([rows, np.zeros_like(rows)], axis=-2) for rows in (x, y))
    return np.matmul(transposed(x), y, out=out)


def weighted_sum(weights: Floats, v: Floats, out: Any = None, add: bool = False) -> Floats:
    """``weights^T v`` into ``out`` or a new array, or added to ``out``.

    By batches of tokens and of features where that is faster.
    """
    if add:
        return np.asarray(np.add(out, weighted_sum(weights, v), out=out))
    if "read" in small_products(v.dtype):
        size, r = _tokens_and_features(*weights.shape[-2:], v.shape[-1])
        if r < weights.shape[-1]:
            return _weighted_sum_cut(weights, v, size, r, out)
    return np.asarray(np.matmul(transposed(weights), v, out=out))


def _weighted_sum_cut(weights: Floats, v: Floats, size: int, r: int, out: Floats | None) -> Floats:
    (n, m), j = weights.shape[-2:], v.shape[-1]
    lead, count = broadcast_lead(weights.shape[:-2], v.shape[:-2]), n // size
    whole = count * size
    batches = weights[..., :whole, :].reshape(*weights.shape[:-2], count, size, m // r, r)
    values = v[..., :whole, :].reshape(*v.shape[:-2], count, 1, size, j)
    sums = buffer("sums", (*lead, count, m // r, r, j), v.dtype)
    np.matmul(transposed(np.swapaxes(batches, -3, -2)), values, out=sums)
    first, *rest = moveaxis(sums, -4, 0).reshape(count, *lead, m, j)
    total: Floats = np.positive(first, out=out)
    for part in rest:
        total += part
    if whole < n:
        total += np.matmul(transposed(weights[..., whole:, :]), v[..., whole:, :])
    return total


@cache
def _tokens_and_features(n: int, m: int, j: int) -> tuple[int, int]:
    """Tokens and features of a small product, powers of two; all features where there is none."""
    features, size = tuning.MAX_PRODUCT_ROWS, 1
    while m % features:
        features //= 2
    while 2 * size * features * j <= tuning.MAX_SMALL_MATMUL:
        size *= 2
    fits = tuning.MIN_PRODUCT_ROWS <= features < m and min(n, size) >= tuning.MIN_SUM_ROWS
    # A product with a column is a sum of rows, which takes twice as long in parts.
    return (min(size, n), features) if fits and j > 1 else (n, m)


def weighted(values_and_one: Floats, weights: Floats, name: str = "values_and_one") -> Floats:
    """Multiply in a buffer."""
    lead = broadcast_lead(values_and_one.shape[:-2], weights.shape[:-2])
    out = buffer(name, (*lead, *values_and_one.shape[-2:]), values_and_one.dtype)
    return np.asarray(np.multiply(values_and_one, weights, out=out))

"""Matrix products, cut into small ones where BLAS is faster on those.

OpenBLAS has kernels for AVX-512 that multiply ``(a, b)`` by ``(b, c)`` as they lie where
``a b c <= 10^6``, and packs larger matrices first; without such kernels small products are slower.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_numpy import tuning
from linattn_numpy.blas import blas
from linattn_numpy.buffers import buffer

__all__ = [
    "broadcast_lead",
    "multiply",
    "product",
    "rows_per_product",
    "transposed",
    "weighted",
    "weighted_sum",
]

Floats = NDArray[Any]


@cache
def has_small_matmul() -> bool:
    """Whether NumPy's matrix products are those of OpenBLAS with its kernels for AVX-512.

    threadpoolctl tells which set is in use; without it, it is what the processor allows.
    """
    try:
        dependencies: Any = np.show_config(mode="dicts")["Build Dependencies"]
        if "openblas" not in dependencies["blas"]["name"].lower():
            return False
        controller = blas.controller()
        if controller is not None:
            names = [library.get("architecture") or "" for library in controller.info()]
            return any(name.lower() in tuning.AVX512_KERNELS for name in names)
        exp = np.lib.introspect.opt_func_info("^exp$", "float32")["exp"]
    except (AttributeError, KeyError, TypeError):
        return False
    targets = [found["current"] for found in exp.values()]
    return any(name == "X86_V4" or "AVX512" in name for name in targets)


def transposed(x: Floats) -> Floats:
    """Swap the last two axes."""
    return np.swapaxes(x, -1, -2)


def broadcast_lead(first: tuple[int, ...], *rest: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast leading axes, at no cost where they are alike, as they mostly are."""
    for shape in rest:
        if shape and shape != first:
            first = np.broadcast_shapes(first, shape)
    return first


def multiply(x: Floats, y: Floats, out: Floats) -> Floats:
    """``x y`` into ``out``, in batches of rows where that is faster."""
    n, (k, j) = x.shape[-2], y.shape[-2:]
    size = rows_per_product(n, y)
    if size == n:
        return np.matmul(x, y, out=out)
    whole = n - n % size
    lead = x.shape[:-2]
    batches = out[..., :whole, :].reshape(*out.shape[:-2], -1, size, j)
    x_batches = x[..., :whole, :].reshape(*lead, -1, size, k)
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


def rows_per_product(n: int, y: Floats) -> int:
    """Rows at a time in which n rows are best multiplied by ``y``: all, or as many as a batch."""
    k, j = y.shape[-2:]
    # Kernels for small matrices are slow on a transposed second factor.
    if (
        n * k * j <= tuning.MAX_SMALL_MATMUL
        or y.strides[-1] != y.itemsize
        or not has_small_matmul()
    ):
        return n
    return _rows_per_small_product(k * j) or n


def product(x: Floats, y: Floats, name: str) -> Floats:
    """Multiply in a buffer: pages of a fresh array cost more than what is done to them."""
    lead = broadcast_lead(x.shape[:-2], y.shape[:-2])
    return multiply(x, y, buffer(name, (*lead, x.shape[-2], y.shape[-1]), x.dtype))


def weighted_sum(weights: Floats, v: Floats) -> Floats:
    """``weights^T v``, a new array: by batches of tokens and of features where that is faster."""
    lead = broadcast_lead(weights.shape[:-2], v.shape[:-2])
    (n, m), j = weights.shape[-2:], v.shape[-1]
    size, r = _tokens_and_features(n, m, j) if has_small_matmul() else (n, m)
    if r == m or n < tuning.MIN_SUM_ROWS:
        return np.asarray(np.matmul(transposed(weights), v))
    whole = n - n % size
    batches = weights[..., :whole, :].reshape(*weights.shape[:-2], -1, size, m // r, r)
    values = v[..., :whole, :].reshape(*v.shape[:-2], -1, 1, size, j)
    sums = buffer("sums", (*lead, whole // size, m // r, r, j), v.dtype)
    np.matmul(transposed(np.swapaxes(batches, -3, -2)), values, out=sums)
    total = np.add.reduce(sums, axis=-4).reshape(*lead, m, j)
    if whole < n:
        total += np.matmul(transposed(weights[..., whole:, :]), v[..., whole:, :])
    return np.asarray(total)


@cache
def _tokens_and_features(n: int, m: int, j: int) -> tuple[int, int]:
    """Tokens and features of a small product, powers of two; all features where there is none."""
    features, size = tuning.MAX_PRODUCT_ROWS, 1
    while m % features:
        features //= 2
    while 2 * size * features * j <= tuning.MAX_SMALL_MATMUL:
        size *= 2
    fits = features >= tuning.MIN_PRODUCT_ROWS and size >= tuning.MIN_SUM_ROWS
    return (min(size, n), features) if fits else (n, m)


def weighted(values_and_one: Floats, weights: Floats) -> Floats:
    """Multiply in a buffer."""
    lead = broadcast_lead(values_and_one.shape[:-2], weights.shape[:-2])
    out = buffer("values_and_one", (*lead, *values_and_one.shape[-2:]), values_and_one.dtype)
    return np.asarray(np.multiply(values_and_one, weights, out=out))

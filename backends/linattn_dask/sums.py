"""Sums over axes along which an argument was broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from linattn.typing import Array
from linattn_dask.layout import merge_along
from linattn_dask.states import ones

Chunks = tuple[int, ...]


def with_ones(lead: list[Chunks], shape: Sequence[int]) -> list[Chunks]:
    """Chunks of sums within blocks for an array of a shape: ones where it was broadcast."""
    missing = len(lead) - len(shape)
    sizes = [*(1,) * missing, *shape]
    return [c if n == sum(c) else ones(c) for n, c in zip(sizes, lead, strict=True)]


def sum_to(array: Array, shape: Sequence[int], add: Callable[..., Array] = np.sum) -> Array:
    """Sum over axes along which an array of a shape was broadcast."""
    extra = array.ndim - len(shape)
    for axis, n in enumerate([*(1,) * extra, *shape]):
        if array.shape[axis] != n:
            array = merge_along(array, axis, add)
    return array[(0,) * extra]

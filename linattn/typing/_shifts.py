"""Maxima that only keep numbers in range: constants to autograd."""

from __future__ import annotations

import sys
from typing import Any

import array_api_compat


def constant(array: Any) -> Any:
    """Return an array that no gradient passes through."""
    if array_api_compat.is_torch_array(array):
        return array.detach()
    if array_api_compat.is_jax_array(array):
        return sys.modules["jax"].lax.stop_gradient(array)
    return array


def largest(array: Any, *, axis: Any = -1, keepdims: bool = False) -> Any:
    """Return the maximum along an axis, to be taken out of exponents and put back.

    It cancels, and so would its gradient. Were it differentiated, JAX would look for the entries
    that equal the maximum; a compiler that rounds them in another way finds none, and divides by
    their number.
    """
    xp = array_api_compat.array_namespace(array)
    array = constant(array)
    found = xp.max(array, axis=axis, keepdims=keepdims)
    if array_api_compat.is_jax_array(array):
        # XLA's maximum of long rows with NaN is -inf on a CPU.
        nan = xp.where(xp.isnan(array), array, xp.zeros_like(array))
        return found + xp.sum(nan, axis=axis, keepdims=keepdims)
    return found


def largest_of_rows(array: Any) -> Any:
    """Return :func:`largest` of each row, which keeps its NaN where it was."""
    return array_api_compat.array_namespace(array).max(constant(array), axis=-1, keepdims=True)

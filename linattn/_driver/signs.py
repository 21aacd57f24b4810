"""Denominators that have come out negative: counted where arrays have values, and told once."""

from __future__ import annotations

import sys
import warnings
from math import prod

import array_api_compat

from linattn import _arrays
from linattn.typing import Array, FeatureMap, Problem

__all__ = ["inspects_signs", "may_be_signed", "warn_of_signs"]

MAX_NEGATIVE_SHARE = 0.01
"""Share of negative denominators that is passed over in silence."""


def may_be_signed(feature_map: FeatureMap) -> bool:
    """Whether features may take both signs: a map that says nothing of it is not positive."""
    return not getattr(feature_map, "positive", False)


def inspects_signs(problem: Problem) -> bool:
    """Whether a problem divides by denominators whose signs are worth reading.

    On a CuPy array that would be a host synchronization; Dask's blocks are problems of their own.
    """
    if not (problem.signed and problem.normalize):
        return False
    array = problem.query
    return not (array_api_compat.is_cupy_array(array) or array_api_compat.is_dask_array(array))


def warn_of_signs(is_negative: Array | None) -> None:
    """Warn where many denominators have cancelled: the rows are no averages of the values."""
    if is_negative is None:
        return
    negative = _count(is_negative)
    rows = prod(is_negative.shape)
    if negative > MAX_NEGATIVE_SHARE * rows:
        message = (
            f"{negative} of {rows} denominators are negative: the features take both signs, "
            f"and these rows are no averages of the values; use a positive map, such as "
            f"PositiveFeatures for the softmax or a Gaussian kernel, or more features"
        )
        warnings.warn(message, UserWarning, stacklevel=_arrays.caller_level())


def _count(flags: Array) -> int:
    """Count what is true; 0 of a traced array, which has no values."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return 0
    xp = _arrays.namespace(flags)
    try:
        return int(xp.sum(xp.astype(flags, xp.int32)))
    except (RuntimeError, TypeError):  # of torch and of JAX
        return 0

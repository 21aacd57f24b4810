"""Products that take long by their numbers, told on any processor: two ways to see them.

A product of two matrices takes a hundred times as long on some processors where numbers are below
the smallest normal one: its operands, or what it adds up. What rounds to 0 takes no longer.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

__all__ = ["slow_products"]


def why_slow(x: Any, y: Any) -> str | None:
    """Say which numbers of a product ``x y`` are subnormal: an operand's, or those added up."""
    info = np.finfo(x.dtype)
    tiny = float(np.log2(info.smallest_normal))
    nothing = tiny + float(np.log2(info.eps)) - 1
    (x_least, x_most), (y_least, y_most) = _reach(x, -2), _reach(y, -1)
    if (x_least < tiny).any() or (y_least < tiny).any():
        return "operand"
    # Where one side is 0 there is NaN, and nothing is slow.
    slow = (x_least + y_least < tiny) & (x_most + y_most >= nothing)
    return "product" if slow.any() else None


def _reach(x: Any, axis: int) -> tuple[Any, Any]:
    """log2 of the smallest number that is not 0, and of the largest, along an axis."""
    # Subnormal numbers have no logarithm where they are flushed.
    fraction, exponent = np.frexp(np.abs(x))
    log = np.where((fraction > 0) & (fraction < 1), exponent - 1.0, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.nanmin(log, axis=axis), np.nanmax(log, axis=axis)


@contextmanager
def slow_products() -> Iterator[set[str]]:
    """Check each product of matrices: the set of slow ones, what is wrong and where.

    Its operands are looked at, and NumPy is asked whether it underflows, which depends on the
    kernel where small terms stand beside large ones.
    """
    found: set[str] = set()
    real_matmul = np.matmul

    def checked(real: Any, x: Any, y: Any, **options: Any) -> Any:
        why = None
        if x.dtype == y.dtype and x.dtype.kind == "f" and x.size and y.size:
            why = why_slow(x, y)
        try:
            with np.errstate(all="ignore", under="raise"):
                return real(x, y, **options)
        except FloatingPointError:
            why = why or "underflow"
            with np.errstate(all="ignore"):
                return real(x, y, **options)
        finally:
            if why is not None:
                found.add(f"{why}: {_caller()}")

    try:
        # array_api_compat asks for NumPy's at each call.
        setattr(np, "matmul", partial(checked, real_matmul))  # noqa: B010
        yield found
    finally:
        np.matmul = real_matmul


def _caller() -> str:
    names: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(names) < 4:
        if "array_api_compat" not in frame.f_code.co_filename:
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)

"""Claims and draws as numbers: real, finite in kind, and of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.testing._means import Floats


class Draws:
    """Draws of one function, checked: real numbers of one shape."""

    def __init__(
        self,
        draw: Callable[..., Any],
        shape: tuple[int, ...],
        rng: np.random.Generator,
        like: str = "expected",
    ) -> None:
        self.draw, self.shape, self.rng, self.like = draw, shape, rng, like
        self.is_narrow = False

    def once(self, rng: np.random.Generator) -> Floats:
        """Return one draw in float64."""
        drawn = self.draw(rng)
        array = numbers("draw(rng)", drawn)
        if array.shape != self.shape:
            raise ValueError(
                f"draw must return arrays of the shape of {self.like}, {self.shape}, got shape "
                f"{array.shape}"
            )
        self.is_narrow = getattr(getattr(drawn, "dtype", None), "itemsize", 8) < 8
        return array

    def take(self, count: int) -> NDArray[Any]:
        """Return ``count`` draws, ``(count, ...)``, in the precision of the last one."""
        draws = np.empty((count, *self.shape))
        for i in range(count):
            draws[i] = self.once(self.rng)
        return draws.astype(np.float32) if self.is_narrow else draws


def numbers(name: str, given: Any) -> Floats:
    """Float64 copy of real numbers."""
    if isinstance(given, np.ndarray | np.generic) or not hasattr(given, "shape"):
        host = np.asarray(given)
    else:
        host = np.asarray(_arrays.to_numpy(given))
    if host.dtype.kind not in "biuf" and "float" not in str(host.dtype):
        raise TypeError(
            f"{name} must be real numbers, got {host.dtype}; give the real and the imaginary part "
            f"of complex numbers as two entries"
        )
    return host.astype(np.float64)


def for_each(name: str, claim: Any, want: Floats) -> Floats:
    """Spread a claim over the entries of another."""
    found = numbers(name, claim)
    try:
        return np.broadcast_to(found, want.shape)
    except ValueError:
        raise ValueError(
            f"{name} must be a number, or one for each entry of expected {want.shape}, got shape "
            f"{found.shape}"
        ) from None

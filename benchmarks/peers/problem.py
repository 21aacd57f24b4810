"""What every peer is given: sizes, inputs, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Inputs", "Prepared", "Sizes"]

Floats = NDArray[Any]


class Sizes(NamedTuple):
    """Everything but the length; values are as wide as queries, numbers are float32."""

    batch: int = 1
    heads: int = 8
    dim: int = 64
    features: int = 256


class Inputs:
    """Standard normal query, key and value, ``(batch, heads, length, dim)``, float32.

    ``token`` has one more of each, ``(batch, heads, dim)``; ``rows`` are the projection rows of a
    random map, ``(features, dim)``, float64, which peers without rows of their own share.
    """

    def __init__(self, sizes: Sizes, length: int) -> None:
        self.sizes = sizes
        self.length = length
        shape = (sizes.batch, sizes.heads, length, sizes.dim)
        rng = np.random.default_rng(0)
        self.query, self.key, self.value = (
            rng.standard_normal(shape, dtype=np.float32) for _ in range(3)
        )
        query, key, value = rng.standard_normal((3, *shape[:2], sizes.dim), dtype=np.float32)
        self.token: tuple[Floats, Floats, Floats] = (query, key, value)

    @cached_property
    def rows(self) -> Floats:
        """Orthogonal rows, those that ``PositiveFeatures(dim, features, rng=0)`` draws."""
        # Not at the top: a child that does not need it does not import it.
        from linattn.sampling import orthogonal

        return np.asarray(orthogonal(self.sizes.features, self.sizes.dim, 0))

    @cached_property
    def text(self) -> tuple[Floats, Floats, Floats]:
        """Query, key and value of six heads at an English text, ``(6, length, 32)``, float32."""
        from benchmarks.real_inputs import text

        return text(self.length)

    @cached_property
    def cotangent(self) -> Floats:
        """Derivative of a loss by the output, standard normal like the inputs."""
        rng = np.random.default_rng(1)
        return rng.standard_normal(self.query.shape, dtype=np.float32)


@dataclass(frozen=True)
class Prepared:
    """One call, ready to be timed, and what it must return.

    ``wanted`` computes the call's result in float64 in the obvious way; ``fetch`` turns what
    ``call`` returns into NumPy.
    """

    call: Callable[[], Any]
    wanted: Callable[[], Floats]
    fetch: Callable[[Any], Floats] = np.asarray

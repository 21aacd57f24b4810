"""The attention under test, on inputs of every length, number of heads and dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._draws import check_map_or, has_negative_features, lead_axes
from linattn.testing._evidence import Evidence, assert_close, check_not_empty
from linattn.typing import Array, FeatureMap

Floats = NDArray[np.float64]
Attention = Callable[..., Array]
"""``attention(query, key, value, **options) -> output``, arrays ``(..., L, d)``."""


LENGTHS, HEADS, DTYPES = (33, 70, 333), (0, 3), ("float64", "float32")
"""What every assertion tries: more than a block of 64, of 128 and of 256, and no whole blocks."""

RTOL = {"float64": 1e-9, "float32": 1e-4, "float16": 3e-2}

LARGEST = 8.0
"""Size of tokens in fewer than 64 bits, at most: products of exponentials are finite."""


class Inputs(TypedDict, total=False):
    """Keyword arguments of all assertions, for type checkers; see :func:`assert_causal`."""

    length: int | Sequence[int]
    heads: Sequence[int]
    dtype: str | Sequence[str]
    rtol: float | None
    rng: Seed


@dataclass
class Case:
    """The attention under test, and inputs that suit it."""

    check: str
    feature_map: FeatureMap | None
    attention: Attention | None
    rng: np.random.Generator
    rtol: float | None
    length: int
    lead: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        least = RTOL[self.dtype]
        self.allowed = max(
            least if self.rtol is None else self.rtol, least if self.dtype != "float64" else 0.0
        )
        self.dim = getattr(self.feature_map, "dim", None) or 4
        self.query, self.key = self.normal(self.length, 0.5), self.normal(self.length, 0.5)
        # Odd lengths have more columns than a tile of 16.
        self.width = 20 if self.length % 2 else 3
        self.value = self.normal(self.length, 1.0, self.width)
        self.arrays = self.query, self.key, self.value

    @property
    def what(self) -> str:
        """Length, heads and dtype, in words."""
        return f"{self.length} tokens, heads {self.lead}, {self.dtype}"

    def normal(self, length: int, size: float, width: int | None = None) -> Any:
        shape = (2, *self.lead, length, self.dim if width is None else width)
        size = size if self.dtype == "float64" else min(size, LARGEST)
        return (size * self.rng.standard_normal(shape)).astype(self.dtype)

    def attend(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        if self.attention is not None:
            try:
                return self.attention(query, key, value, **options)
            except Exception as error:
                error.add_note(f"attention was given {self.what}; heads=[0] leaves heads out")
                raise
        with warnings.catch_warnings():
            # Inputs are drawn for what must hold of every output, whatever its denominator.
            warnings.filterwarnings("ignore", ".* denominators are negative", UserWarning)
            return linattn.linear_attention(query, key, value, self.feature_map, **options)  # type: ignore[arg-type]

    def close(self, what: str, actual: Any, expected: Any) -> None:
        assert_close(self.check, f"{what} ({self.what})", actual, expected, self.allowed)


def cases_of(
    check: str,
    feature_map: FeatureMap | None,
    attention: Attention | None,
    length: int | Sequence[int] = LENGTHS,
    heads: Sequence[int] = HEADS,
    dtype: str | Sequence[str] = DTYPES,
    rtol: float | None = None,
    rng: Seed = 0,
) -> list[Case]:
    """Return inputs of which every two of length, heads and dtype come together."""
    if feature_map is None and attention is None:
        raise TypeError("want a feature_map, or attention= (query, key, value, **options)")
    check_map_or(feature_map, "attention", attention, "(query, key, value, **options)")
    lengths = list(length) if isinstance(length, Sequence) else [length]
    dtypes = [dtype] if isinstance(dtype, str) else list(dtype)
    for name, values in (("length", lengths), ("heads", heads), ("dtype", dtypes)):
        check_not_empty(name, values)
    for number in lengths:
        if isinstance(number, int) and number < 2:
            raise ValueError(f"length must be at least 2 tokens, got {number}")
        _checks.check_positive_int("length", number)
    if not set(dtypes) <= set(RTOL):
        raise ValueError(f"dtype must be of {', '.join(RTOL)}, got {dtype!r}")
    leads: Sequence[tuple[int, ...]] = [(number,) if number else () for number in heads]
    if feature_map is not None:
        dim = getattr(feature_map, "dim", None) or 4
        axes = lead_axes(feature_map, dim)
        leads = [axes] if axes else leads
        if length == LENGTHS:
            most = getattr(feature_map, "max_length", None) or LENGTHS[-1]
            lengths = sorted({min(number, most) for number in lengths})
        # Where features cancel, rounding errors of float32 have no bound of use.
        if dtype == DTYPES and has_negative_features(feature_map, dim):
            dtypes = ["float64"]
    shared = (check, feature_map, attention, as_generator(rng), rtol)
    shapes = product(enumerate(lengths), enumerate(leads), enumerate(dtypes))
    return [
        Case(*shared, number, lead, name)
        for (i, number), (j, lead), (k, name) in shapes
        if 1 in (len(leads), len(dtypes)) or (i + j + k) % 2 == 0
    ]


def evidence_of(what: str, cases: list[Case]) -> Evidence:
    """Say what was shown, and at which lengths, heads and dtypes."""
    shapes = ((c.length, "x".join(map(str, c.lead)) or 0, c.dtype) for c in cases)
    lengths, heads, dtypes = (
        ", ".join(dict.fromkeys(map(str, values))) for values in zip(*shapes, strict=True)
    )
    tried = f"{lengths} tokens; heads {heads}; {dtypes}"
    return Evidence(cases[0].check, f"{what}: {tried}", 0.0, max(case.allowed for case in cases))

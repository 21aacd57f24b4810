"""From a mask that is a function of two positions to bounds of their difference, by symbols."""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn.interop._visibility import Visibility

WIDE = 1 << 60


class Bounds(NamedTuple):
    """A query sees the keys from ``low`` to ``high`` positions after its own."""

    low: int = -WIDE
    high: int = WIDE
    device: Any = None

    def __and__(self, other: Bounds) -> Bounds:
        return Bounds(max(self.low, other.low), min(self.high, other.high))

    def __bool__(self) -> bool:
        raise TypeError

    def to(self, _: Any) -> Bounds:
        """Stay."""
        return self


class _Position:
    """A sum of unknown positions: ``terms`` are the numbers of keys and of queries, and a constant.

    A function of masks that is called with positions returns bounds, or raises. A compiled graph
    can do so, where values of the function would be tensors that it cannot read.
    """

    def __init__(self, *terms: int) -> None:
        self.terms = terms

    def new_ones(self, *_: Any, **__: Any) -> Bounds:
        """Return bounds that hide nothing."""
        return Bounds()

    def __sub__(self, other: Any) -> _Position:
        terms = (0, 0, other) if isinstance(other, int) else other.terms
        return _Position(*(a - b for a, b in zip(self.terms, terms, strict=True)))

    def __ge__(self, other: Any) -> Bounds:
        *signs, ahead = (self - other).terms
        if signs == [1, -1]:
            return Bounds(low=-ahead)
        if signs == [-1, 1]:
            return Bounds(high=ahead)
        if min(*signs, ahead) < 0:
            raise TypeError
        return Bounds()  # Positions are not negative.

    def __gt__(self, other: Any) -> Any:
        return self - 1 >= other

    def __le__(self, other: Any) -> Any:
        return _Position(0, 0, 0) - (self - other) >= 0

    def __abs__(self) -> _Size:
        return _Size(self)

    def __eq__(self, other: object) -> bool:
        raise TypeError


class _Size(NamedTuple):
    """The absolute value of a difference of positions."""

    of: _Position

    def __le__(self, width: Any) -> Any:
        return (self.of <= width) & (self.of >= -width)


def bounds_of(function: Any) -> Bounds | None:
    """Return the bounds that a function of masks stands for, None for any other function."""
    try:
        found = function(None, None, _Position(0, 1, 0), _Position(1, 0, 0))
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None
    return found if isinstance(found, Bounds) else None


def band_of(bounds: Bounds, shape: Any, offset: int) -> Visibility | None:
    """Return the options of bounds, with the first query at position ``offset`` of the keys."""
    (low, high, _), (length, num_keys) = bounds, shape[-2:]
    left = None if offset + length + low <= 1 else -low
    if left is None and offset + 1 + high >= num_keys:
        return Visibility({}, num_keys)
    stop = offset + length
    if high == 0 and stop <= num_keys and low <= 0 and (length > 1 or left is None):
        options: dict[str, Any] = {"is_causal": True if length == stop else "lower_right"}
        if left is not None:
            options["local_window_size"] = (left, 0)
        return Visibility(options if length > 1 else {}, stop)
    if low <= 0 <= high and (offset, length) == (0, num_keys):
        return Visibility({"local_window_size": (left, None if high >= length else high)}, length)
    return None

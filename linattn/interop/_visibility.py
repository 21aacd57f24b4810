"""From a mask of pairs to the options of attention that say the same.

Called by :mod:`linattn.interop.transformers` and by the module in the place of torch's. A mask is
read row by row, or, if it is a function of two positions, by symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_PAIRS = 1 << 18
"""How many pairs of a mask are read together."""

Rows = Callable[[slice], NDArray[np.bool_]]
"""From a slice of the queries to the keys that they see, (batch or 1, queries, S)."""


class Visibility(NamedTuple):
    """Which keys each query sees, as options of :func:`linattn.softmax_attention`."""

    options: dict[str, Any]
    """``is_causal``, ``key_stop`` (L,) or (batch, L), ``local_window_size``, ``cu_seqlens``."""
    num_keys: int
    """No query sees a key from here on."""
    is_flat: bool = False
    """Whether ``cu_seqlens`` go through all sequences of the batch, one after the other."""
    before: int = 0
    """How many more queries these options need first; their rows of the output are dropped."""
    key_mask: Any = None
    """Keys of the framework's that count, (batch, S) boolean; None for all."""
    is_window: bool = False
    """Whether keys far before a query are hidden, even if all keys are near so far."""


# Row by row -------------------------------------------------------------------------------------


def read_rows(rows: Rows, num_queries: int, num_keys: int) -> Visibility | None:
    """Return the options that show each query the keys that a mask shows it, or None."""
    starts, stops = [], []
    step = max(1, _PAIRS // max(1, num_keys))
    for begin in range(0, num_queries, step):
        seen = rows(slice(begin, min(begin + step, num_queries)))
        start, stop = np.argmax(seen, -1), num_keys - np.argmax(seen[..., ::-1], -1)
        if (np.count_nonzero(seen, axis=-1) != stop - start).any():
            return None
        starts.append(start)
        stops.append(stop)
    start, stop = (np.concatenate(part, -1, dtype=np.int64) for part in (starts, stops))
    if (start == start[:1]).all() and (stop == stop[:1]).all():
        start, stop = start[:1], stop[:1]
    last = int(stop.max())
    found, before = _described(start, stop, last), 0
    if found is None and last > num_queries:
        before = last - num_queries
        # Chunks after a cache: put queries at the positions of the cached keys.
        first = start[:, :1]
        place = np.broadcast_to(np.arange(before), (len(start), before))
        start = np.concatenate([np.where(place < first, 0, first), start], -1)
        stop = np.concatenate([place + 1, stop], -1)
        found = _described(start, stop, last)
    if found is None and len(start) > 1 and start.shape[-1] == last:
        # Packed sequences that differ in the batch are one line of sequences.
        first = last * np.arange(len(start))[:, None]
        start, stop = ((part + first).reshape(1, -1) for part in (start, stop))
        found = _described(start, stop, start.size)
        found = None if found is None else found._replace(is_flat=True)
    return None if found is None else found._replace(before=before)


def _described(starts: Any, stops: Any, num_keys: int) -> Visibility | None:
    """Say in options that query i sees the keys from ``starts[:, i]`` to ``stops[:, i] - 1``."""
    length = starts.shape[-1]
    none = np.zeros_like(starts)
    ways = [(np.arange(num_keys - length, num_keys), none), (np.arange(length), none)]
    if length == num_keys:
        position = np.arange(length)
        selves = np.where(starts == position, position, 0)
        ways.append((position, np.maximum.accumulate(selves, -1)))
    for position, begins in ways:
        left = _width(position - starts, starts - begins, position - begins)
        options = None if left == -1 else _options(stops, position, begins, left, num_keys)
        if options is not None:
            return Visibility(options, num_keys)
    return None


def _width(distance: Any, cut: Any, space: Any) -> int | None:
    """Return the width of a window, None if none cuts a row, -1 if no window cuts so."""
    if (cut < 0).any():
        return -1
    if not cut.any():
        return None
    width = int(distance[cut > 0][0])
    fits = (distance[cut > 0] == width).all() and (space[cut == 0] <= width).all()
    return width if fits and width >= 0 else -1


def _options(
    stops: Any, position: Any, begins: Any, left: int | None, num_keys: int
) -> dict[str, Any] | None:
    """Return the options of stops, windows and packed sequences, which begin at ``begins``."""
    borders = np.unique(begins)
    if len(borders) > 1 and len(begins) > 1:
        return None
    options: dict[str, Any] = {}
    if len(borders) > 1:
        options["cu_seqlens"] = np.append(borders, num_keys)
    ends = np.append(borders[1:], num_keys)[np.searchsorted(borders, begins)]
    right: int | None = 0
    if (stops == position + 1).all():
        options["is_causal"] = True if len(position) == num_keys else "lower_right"
    else:
        right = _width(stops - 1 - position, ends - stops, ends - 1 - position)
        if right == -1 or (len(position) != num_keys and (left, right) != (None, None)):
            if len(borders) > 1 or (np.diff(stops, axis=-1) < 0).any():
                return None
            options["key_stop"], right = stops[0] if len(stops) == 1 else stops, None
        if position[0] and (left, right) != (None, None):
            return None  # Only causal windows stand at the end of the keys.
    if left is not None or right:
        options["local_window_size"] = (left, right)
    return options


# By symbols -------------------------------------------------------------------------------------

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

"""From a mask of pairs, read some rows at a time, to the options that say the same."""

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

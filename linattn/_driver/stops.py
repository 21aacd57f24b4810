"""What each query reads by the map: how many first keys, and from which key on.

A line reads the first keys, a line from the end the last ones, and what lies between is exact
(`pairs`) or seen by neither. An exact window of w tokens leaves out the query's own block of w and
the blocks beside it: their borders are the two numbers. Modes of one line have no more than stops.
`window` makes lines of them, and `linear_vjps` and `pair_vjps` pull these back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from linattn._generic.loops import Integers, Run
from linattn.typing import Problem


class OfRows(NamedTuple):
    """Numbers of keys on the host, ``(n,)`` each, that never decrease along the queries."""

    left: Integers
    """A query reads the first keys, before this one."""
    right: Integers
    """It reads the keys from this one on, up to `end`: none where that comes first."""
    end: Integers
    """It sees no key from this one on."""


class Stops(NamedTuple):
    """What the queries of a problem read by the map."""

    length: int
    num_keys: int
    start: int
    """Position of the first query."""
    window: int | None
    ahead: bool
    """Whether a query sees keys after its own place, without stops all of them."""
    key_stop: Any

    def of(self, rows: slice) -> OfRows:
        """Return the numbers of some queries, so that no array has the length of all."""
        place = np.arange(rows.start, rows.stop) + self.start
        if self.key_stop is not None:
            end = self.key_stop[rows]
        else:
            end = np.clip(place + 1, 0, self.num_keys)
            end = np.full_like(end, self.num_keys) if self.ahead else end
        if self.window is None:
            return OfRows(np.minimum(place + 1, end), place + 1, end)
        w = self.window
        block = place // w
        right = np.clip((block + 2) * w, 0, self.num_keys)
        return OfRows(np.clip((block - 1) * w, 0, end), right, end)

    def runs_ahead(self) -> Iterator[tuple[slice, int]]:
        """Yield runs of queries that read keys from `right` on, and a key between for each run.

        Every query of a run reads the keys from `right` to that key, its pivot, and on to `end`.
        Two lines do so, from the pivot back and on; in each direction no key is in two runs.
        """
        if self.key_stop is None:
            if self.ahead and self.length and self.of(slice(0, 1)).right[0] < self.num_keys:
                yield slice(0, self.length), self.num_keys
            return
        _, right, end = self.of(slice(0, self.length))
        beyond = np.flatnonzero(right < end)
        row = 0
        while len(beyond) and row <= beyond[-1]:
            row = int(beyond[np.searchsorted(beyond, row)])
            pivot = int(end[row])
            stop = int(np.searchsorted(right, pivot, side="right"))
            yield slice(row, stop), pivot
            row = stop


def stops_of(problem: Problem) -> Stops:
    """Return what the queries of a problem read by the map, beside a window or to both sides."""
    lengths, sees = (problem.query.shape[-2], problem.key.shape[-2]), problem.sees
    return Stops(*lengths, sees.query_start, problem.exact.window, sees.ahead, sees.key_stop)


class SideRuns(NamedTuple):
    """Keys that queries read by the map, to one side of their own place, in runs."""

    end: int
    """Which weight of far keys they have: the first, or the last (-1)."""
    runs: list[Run]
    gaps: list[Integers]
    """Tokens from a query to the nearest of these keys, for the queries of each sequence."""


def side_runs(problem: Problem) -> list[SideRuns]:
    """List the keys to the left, those to the right up to a pivot, and those from it on."""
    left, near, beyond = SideRuns(0, [], []), SideRuns(-1, [], []), SideRuns(-1, [], [])
    for first, stops in sequences_of(problem):
        keys, queries = first + np.arange(stops.num_keys), first + np.arange(stops.length)
        of_rows = stops.of(slice(0, stops.length))
        last = of_rows.end if problem.mode == "stops" else of_rows.left
        place = np.arange(stops.length) + stops.start
        left.runs.append(Run(keys, queries, last))
        left.gaps.append(place + 1 - last)
        near.gaps.append(of_rows.right - place)
        ahead = stops.runs_ahead() if problem.mode in ("window", "two-sided") else ()
        for rows, pivot in ahead:
            right, end, of_run = of_rows.right[rows], of_rows.end[rows], queries[rows]
            back = Run(keys[right[0] : pivot][::-1], of_run[::-1], (pivot - right)[::-1])
            near.runs.append(back)
            if end[-1] > pivot:
                beyond.runs.append(Run(keys[pivot : end[-1]], of_run, end - pivot))
    # Even without runs, so that a short program has as many operations as a long one.
    sees, reads_ahead = problem.sees, problem.mode in ("window", "two-sided")
    count = 1 + (reads_ahead and sees.ahead) + (reads_ahead and sees.key_stop is not None)
    return [left, near, beyond][:count]


def sequences_of(problem: Problem) -> list[tuple[int, Stops]]:
    """List the first token of each sequence, and what its queries read by the map."""
    whole, borders = stops_of(problem), problem.sees.cu_seqlens
    if borders is None:
        return [(0, whole)]
    return [(a, whole._replace(length=b - a, num_keys=b - a)) for a, b in pairwise(borders)]

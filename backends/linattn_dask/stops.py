"""Visible prefixes: keys and queries in chunks that go along each other, as in causal attention.

A block of queries goes along with the keys between its first stop and its last, back to a border of
chunks; keys before these are in states of their own chunks, which go along with no query.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Any, NamedTuple

import dask.array as da
import numpy as np

from linattn.typing import Problem
from linattn_dask.layout import Layout, Part

Chunks = tuple[int, ...]


class Aligned(NamedTuple):
    """A problem of stops as one in which chunks of queries and keys meet."""

    layout: Layout
    queries: Chunks
    """Chunks of queries, with empty ones for keys that go along with none."""
    key_stop: Part
    """Stops, counted from the first key of the chunk."""


def aligned(problem: Problem) -> Aligned:
    """Put queries and keys into chunks that go along each other."""
    queries, keys, starts = _chunks_of_stops(problem)
    names = ("key", "value")
    arrays = {n: getattr(problem, n).rechunk({-2: keys}, method="tasks") for n in names}
    arrays["query"] = problem.query.rechunk({-2: queries}, method="tasks")
    stops: Any = problem.sees.key_stop - np.repeat(np.asarray(starts, dtype=np.int64), queries)
    key_stop = Part(da.from_array(stops, chunks=(queries,)), ("keys",))
    sees = problem.sees._replace(key_stop=None)
    return Aligned(Layout(problem.replace(sees=sees, **arrays)), queries, key_stop)


def _chunks_of_stops(problem: Problem) -> tuple[Chunks, Chunks, list[int]]:
    """Chunks of queries and of keys, and the first key of each."""
    stops, length = problem.sees.key_stop, problem.key.shape[-2]
    borders = np.unique(np.cumsum([0, *problem.key.chunks[-2]])).tolist()
    queries, edges = [], [0]

    def go_to(stop: int) -> None:
        """Let keys go along with no query."""
        inside = borders[bisect_right(borders, edges[-1]) : bisect_left(borders, stop)]
        for edge in [*inside, *([stop] if stop > edges[-1] else [])]:
            edges.append(edge)
            queries.append(0)

    for first, last in pairwise(np.cumsum([0, *problem.query.chunks[-2]]).tolist()):
        if first < last:
            stop = int(stops[last - 1])
            place = bisect_right(borders, int(stops[first])) - 1
            # Where all stops are one border, the chunk before it goes along.
            start = borders[max(place - 1, 0) if borders[place] == stop else place]
            go_to(max(start, edges[-1]))
            edges.append(stop)
            queries.append(last - first)
    go_to(length)
    if not queries:
        return (0,), (length,), [0]
    return tuple(queries), tuple(b - a for a, b in pairwise(edges)), edges[:-1]

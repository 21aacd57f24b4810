"""Visible prefixes: keys and queries in the order in which queries come to see keys.

Query i sees the keys before ``key_stop[i]``. A walk takes steps: some keys are added to the state,
some queries read it, or both go along each other as in causal attention. Where keys and queries
change places every few tokens they are put on common *positions*, each key at one no later than the
first query that sees it, each query before the first key that it does not see. What is missing at a
position is masked or left out: such a block is a causal block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn._driver.blocks import block_slices
from linattn._driver.tasks import ROWS_OF_KEYS, rows_at
from linattn._driver.wrappers import innermost
from linattn.typing import Array, Index, Opaque, Partial, Problem

__all__ = [
    "Positions",
    "Step",
    "head_tasks",
    "join_tasks",
    "planned",
    "steps_of",
]

MIN_RUN = 64
"""Keys or queries in a row that are a step of their own, and are not put on positions."""

Places = NDArray[np.int64]


class Positions(NamedTuple):
    """Positions of a step where keys and queries do not go along each other one by one."""

    size: int
    keys: Places
    queries: Places

    def place(self, rows: Array, at: Places) -> tuple[Array, Array]:
        """Put rows at their positions; and which positions have one, ``(size, 1)``."""
        xp, device = array_api_compat.array_namespace(rows), array_api_compat.device(rows)
        nearest = np.maximum(np.searchsorted(at, np.arange(self.size), side="right") - 1, 0)
        filled = at[nearest] == np.arange(self.size)
        return rows_at(rows, nearest), xp.asarray(filled[:, None], device=device)


class Step(NamedTuple):
    """Keys, queries, or both along each other: at common positions, or one by one."""

    keys: slice
    queries: slice
    positions: Positions | None = None

    @property
    def num_keys(self) -> int:
        return int(self.keys.stop - self.keys.start)

    @property
    def num_queries(self) -> int:
        return int(self.queries.stop - self.queries.start)

    def problem(self, problem: Problem) -> Problem:
        """Return the problem of this step's queries and keys alone, without stops."""
        rows = {name: getattr(problem, name) for name in ROWS_OF_KEYS}
        rows = {
            name: array if array is None else array[..., self.keys, :]
            for name, array in rows.items()
        }
        query, positions = problem.query[..., self.queries, :], self.positions
        if positions is not None:
            query, _ = positions.place(query, positions.queries)
            for name, array in rows.items():
                if array is not None:
                    rows[name], filled = positions.place(array, positions.keys)
            mask = rows["key_mask"]
            rows["key_mask"] = filled if mask is None else mask & filled
        return problem.replace(query=query, key_stop=None, **rows)

    def place_queries(self, rows: Array) -> Array:
        """Rows of queries at their positions, 0 where there is none."""
        if self.positions is None:
            return rows
        placed, filled = self.positions.place(rows, self.positions.queries)
        xp = array_api_compat.array_namespace(rows)
        return xp.where(filled, placed, xp.zeros_like(placed))

    def queries_of(self, rows: Array) -> Array:
        """Rows of queries out of those at positions."""
        return rows if self.positions is None else rows_at(rows, self.positions.queries)

    def keys_of(self, rows: Array) -> Array:
        """Rows of keys out of those at positions."""
        return rows if self.positions is None else rows_at(rows, self.positions.keys)

    def queries_of_part(self, part: Partial) -> Partial:
        """Rows of queries out of a partial of all positions."""
        if self.positions is None:
            return part
        num_den = self.queries_of(part.num_den)
        log = part.log if part.log.shape[-2] == 1 else self.queries_of(part.log)
        return Partial(num_den, log)


def steps_of(problem: Problem, block_size: int) -> Iterator[Step]:
    """Go through all keys and queries of a problem, at most so many tokens a step."""
    # A function may ask where a token stands.
    in_place = any(isinstance(innermost(s), Opaque) for s in (problem.query_spec, problem.key_spec))
    stops, num_keys = problem.key_stop, problem.key.shape[-2]
    assert stops is not None
    # Queries that see the same keys: the first of each such run, and keys and queries of it.
    firsts = np.flatnonzero(np.diff(stops, prepend=-1))
    added = np.diff(stops[firsts], prepend=0)
    readers = np.diff(firsts, append=len(stops))
    longest = 2 if in_place else MIN_RUN
    key = query = run = 0

    def alone(keys: int, queries: int) -> Iterator[Step]:
        nonlocal key, query
        for rows in block_slices(keys, block_size):
            yield _moved(Step(rows, slice(0, 0)), key, query)
        key += keys
        for rows in block_slices(queries, block_size):
            yield _moved(Step(slice(0, 0), rows), key, query)
        query += queries

    def together(stop: int) -> Iterator[Step]:
        nonlocal key, query, run
        for step in _together(added[run:stop], readers[run:stop], block_size):
            yield _moved(step, key, query)
        key += int(added[run:stop].sum())
        query += int(readers[run:stop].sum())
        run = stop

    for i in np.flatnonzero((added >= longest) | (readers >= longest) | (added == 0)).tolist():
        keys, queries = int(added[i]), int(readers[i])
        if keys >= longest > queries:
            yield from together(i)
            # The last of the keys goes along with the queries.
            yield from alone(keys - 1, 0)
            added[i] = 1
        elif queries >= longest > keys > 0:
            readers[i] = 1
            yield from together(i + 1)
            yield from alone(0, queries - 1)
        else:
            yield from together(i)
            yield from alone(keys, queries)
            run = i + 1
    yield from together(len(firsts))
    yield from alone(num_keys - key, 0)


def _together(added: Places, readers: Places, block_size: int) -> Iterator[Step]:
    """Go through keys and queries that alternate in short runs."""
    if (added == 1).all() and (readers == 1).all():
        yield from (Step(rows, rows) for rows in block_slices(len(added), block_size))
        return
    sizes = added + readers - 1
    starts = np.cumsum(sizes) - sizes
    key_at = np.repeat(starts - (np.cumsum(added) - added), added) + np.arange(added.sum())
    query_at = np.repeat(starts + added - 1 - (np.cumsum(readers) - readers), readers)
    query_at += np.arange(readers.sum())
    edges = np.append(np.arange(0, sizes.sum(), block_size), sizes.sum())
    key_edges, query_edges = np.searchsorted(key_at, edges), np.searchsorted(query_at, edges)
    for i, first in enumerate(edges[:-1].tolist()):
        keys = slice(int(key_edges[i]), int(key_edges[i + 1]))
        queries = slice(int(query_edges[i]), int(query_edges[i + 1]))
        count = int(edges[i + 1]) - first
        step = Step(keys, queries)
        if step.num_keys and step.num_queries and step.num_keys + step.num_queries < 2 * count:
            step = Step(
                keys, queries, Positions(count, key_at[keys] - first, query_at[queries] - first)
            )
        yield step


def _moved(step: Step, key: int, query: int) -> Step:
    keys, queries, positions = step
    return Step(
        slice(keys.start + key, keys.stop + key),
        slice(queries.start + query, queries.stop + query),
        positions,
    )


# Heads of their own stops -----------------------------------------------------------------------


def planned(problem: Problem) -> Problem:
    """Return the problem that a plan is made for: some others are worked on as a causal one."""
    if problem.key_stop is None and problem.mode != "two-sided":
        return problem
    return problem.replace(is_causal=True)


def head_tasks(problem: Problem) -> list[Index]:
    """List the tasks in which queries have one stop each, whatever the head."""
    lead = problem.key_stop.shape[:-1]
    axes = [[slice(i, i + 1) for i in range(n)] if n > 1 else [slice(None)] for n in lead]
    return list(product(*axes))


def join_tasks(tasks: list[Index], arrays: list[Array], lead: tuple[int, ...]) -> Array:
    """Put arrays of :func:`head_tasks` side by side along leading axes, those of the whole.

    Where the whole has one entry for several tasks, theirs are added.
    """
    xp, trailing = array_api_compat.array_namespace(arrays[0]), arrays[0].ndim - len(lead)
    for back in range(1, len(tasks[0]) + 1):
        size = len({task[-back].start for task in tasks})
        groups = [arrays[i : i + size] for i in range(0, len(arrays), size)]
        shared = back > len(lead) or lead[-back] == 1
        arrays = [
            sum(group[1:], group[0]) if shared else xp.concat(group, axis=-trailing - back)
            for group in groups
        ]
    return arrays[0]

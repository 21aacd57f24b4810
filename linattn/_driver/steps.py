"""Steps: keys and queries in a common order, and what each step of a line takes up or reads.

Query i sees the keys before its stop, and stops never decrease. So keys and queries have a common
order: each query comes after the keys that it sees and before all others. A step adds keys to the
state, reads the state with queries, or is a causal block of both. In a causal block, row i of the
queries sees the keys up to row i. If keys and queries alternate in short runs of unequal lengths,
each gets a row number of the block, its *position*: a query has a position at or after the keys
that it sees, and before all others. Positions without a key are masked; the output of positions
without a query is dropped.

`lines` makes steps and takes them, and `linear_vjps` pulls them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn._driver.blocks import block_slices, rows_at
from linattn.typing import Array, Partial, Tokens

MIN_RUN = 64
"""Shortest run of keys or of queries that gets steps of its own, without positions."""

Places = NDArray[np.int64]


class Positions(NamedTuple):
    """Row numbers of a causal block at which the keys and queries of a step are placed.

    ``size``: rows of the block; ``keys``, ``queries``: row number of each key and of each query.
    """

    size: int
    keys: Places
    queries: Places

    def place(self, rows: Array, at: Places, fill: float = 0.0) -> Array:
        """Return ``size`` rows with ``rows`` at the positions ``at``, all others ``fill``.

        None stays None.
        """
        if rows is None:
            return None
        nearest = np.maximum(np.searchsorted(at, np.arange(self.size), side="right") - 1, 0)
        xp, device = array_api_compat.array_namespace(rows), array_api_compat.device(rows)
        filled = xp.asarray((at[nearest] == np.arange(self.size))[:, None], device=device)
        placed = rows_at(rows, nearest)
        return xp.where(filled, placed, xp.full_like(placed, fill))


class Step(NamedTuple):
    """Keys to add, queries that read, or a causal block of both.

    In a causal block without ``positions``, key i of the step and query i have row i. A step
    without keys has an empty slice at the first key that is not yet added.
    """

    keys: slice
    queries: slice
    positions: Positions | None = None

    @property
    def num_keys(self) -> int:
        return int(self.keys.stop - self.keys.start)

    @property
    def num_queries(self) -> int:
        return int(self.queries.stop - self.queries.start)

    @property
    def num_seen(self) -> Places:
        """Count the keys of the step that each of its queries sees."""
        if not self.num_keys:
            return np.zeros(self.num_queries, np.int64)
        if self.positions is None:
            return np.arange(1, self.num_queries + 1)
        return np.searchsorted(self.positions.keys, self.positions.queries, side="right")

    def place_queries(self, rows: Array, fill: float = 0.0) -> Array:
        """Place rows of the step's queries at their positions, as :meth:`Positions.place`."""
        positions = self.positions
        return rows if positions is None else positions.place(rows, positions.queries, fill)

    def place_keys(self, key: Tokens, values_and_one: Array) -> tuple[Tokens, Array]:
        """Place keys and their ``[v, 1]`` at their positions; all others weigh nothing."""
        if self.positions is None:
            return key, values_and_one
        place, at, weight = self.positions.place, self.positions.keys, key.log_weight
        if weight is None:
            weight = array_api_compat.array_namespace(key.x).zeros_like(key.x[..., :1])
        weight, decay = place(weight, at, -float("inf")), place(key.log_decay, at)
        placed = Tokens(place(key.x, at), weight, key.start, decay)
        return placed, place(values_and_one, at)

    def queries_of(self, rows: Array) -> Array:
        """Return the rows at the positions of queries: the inverse of `place_queries`."""
        return rows if self.positions is None else rows_at(rows, self.positions.queries)

    def keys_of(self, rows: Array) -> Array:
        """Return the rows at the positions of keys."""
        return rows if self.positions is None else rows_at(rows, self.positions.keys)

    def queries_of_part(self, part: Partial) -> Partial:
        """Return a partial with only the rows at the positions of queries."""
        if self.positions is None:
            return part
        log = part.log if part.log.shape[-2] == 1 else self.queries_of(part.log)
        return Partial(self.queries_of(part.num_den), log)

    def halves(self) -> tuple[Step, Step]:
        """Cut a step of keys and queries, without positions, along each other."""
        n = self.num_queries // 2
        keys, queries = self.keys.start + n, self.queries.start + n
        first = Step(slice(self.keys.start, keys), slice(self.queries.start, queries))
        return first, Step(slice(keys, self.keys.stop), slice(queries, self.queries.stop))


def steps_of(
    stops: Places,
    num_keys: int,
    block_size: int,
    min_run: int = MIN_RUN,
) -> Iterator[Step]:
    """Yield steps through keys and queries, each of at most ``block_size``.

    ``stops``: how many first keys each query sees. The last steps add the keys that none sees.
    """
    # Queries that see the same keys: the first of each such run, and keys and queries of it.
    firsts = np.flatnonzero(np.diff(stops, prepend=-1))
    added = np.diff(stops[firsts], prepend=0)
    readers = np.diff(firsts, append=len(stops))
    key = query = 0
    for keys, queries in _parts(added, readers, min_run):
        steps = _together if isinstance(keys, np.ndarray) else _alone
        for step in steps(keys, queries, block_size):
            yield _moved(step, key, query)
        key, query = key + int(np.sum(keys)), query + int(np.sum(queries))
    for rows in block_slices(num_keys - key, block_size):
        yield _moved(Step(rows, slice(0, 0)), key, query)


def _parts(added: Places, readers: Places, min_run: int) -> list[tuple[Any, Any]]:
    """Cut runs of keys and queries into numbers, for steps alone, and arrays of short runs.

    ``added``, ``readers``: lengths of the runs; run i of keys comes before run i of queries.
    """
    parts: list[tuple[Any, Any]] = []
    run = 0
    for i in np.flatnonzero((added >= min_run) | (readers >= min_run) | (added == 0)).tolist():
        keys, queries = int(added[i]), int(readers[i])
        if keys >= min_run > queries:
            # The last of the keys goes along with the queries.
            parts += [(added[run:i], readers[run:i]), (keys - 1, 0)]
            added[i], run = 1, i
        elif queries >= min_run > keys > 0:
            readers[i] = 1
            parts += [(added[run : i + 1], readers[run : i + 1]), (0, queries - 1)]
            run = i + 1
        else:
            parts += [(added[run:i], readers[run:i]), (keys, queries)]
            run = i + 1
    return [*parts, (added[run:], readers[run:])]


def _alone(keys: int, queries: int, block_size: int) -> Iterator[Step]:
    yield from (Step(rows, slice(0, 0)) for rows in block_slices(keys, block_size))
    yield from (Step(slice(keys, keys), rows) for rows in block_slices(queries, block_size))


def _together(added: Places, readers: Places, block_size: int) -> Iterator[Step]:
    """Yield the steps of keys and queries that alternate in short runs, counted from 0."""
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
    """Return the step with ``key`` added to its key numbers and ``query`` to its query numbers."""
    keys, queries, positions = step
    return Step(
        slice(keys.start + key, keys.stop + key),
        slice(queries.start + query, queries.stop + query),
        positions,
    )


# From the last step to the first ------------------------------------------------------------------

MAX_STATES = 32
"""Most states that `states_before` holds at each level."""

Item = TypeVar("Item")
Sums = TypeVar("Sums")


def states_before(
    items: Sequence[Item], state: Sums, after: Callable[[Item, Sums], Sums]
) -> Iterator[tuple[Item, Sums]]:
    """Yield items from the last to the first, each with the state before it.

    ``state``: state before the first item; ``after(item, state)``: the state after an item.

    The items are divided into at most ``MAX_STATES`` runs, and the state before each run is held.
    Each run is divided in the same way when its turn comes. So L items take about
    log L / log MAX_STATES calls of ``after`` each.
    """
    size = max(1, -(-len(items) // MAX_STATES))
    runs = [items[i : i + size] for i in range(0, len(items), size)]
    states = [state]
    for run in runs[:-1]:
        for item in run:
            state = after(item, state)
        states.append(state)
    for run in reversed(runs):
        state = states.pop()
        if len(run) == 1:
            yield run[0], state
        else:
            yield from states_before(run, state, after)

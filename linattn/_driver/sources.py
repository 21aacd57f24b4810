"""Sources of a block of queries: their partials are added on a common scale.

A walk gives each block of queries its sources, :func:`join` reads one after the other, and the
walk writes the rows once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from linattn import _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import in_map_coordinates
from linattn.typing import Array, Partial, Problem, State, Tokens

__all__ = ["Read", "Source", "join"]


class Source(Protocol):
    """Keys, or states of them, that a block of queries reads."""

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Any, so_far: Partial | None
    ) -> Partial:
        """Add what the queries read here to what they have read so far, None for nothing."""
        ...


class Read(NamedTuple):
    """A source: states, and the log weight ``(..., n, 1)`` of each for every row, None for 0."""

    states: State
    log: Array | None = None

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Tokens, so_far: Partial | None
    ) -> Partial:
        """Read the states by the map."""
        tokens = in_map_coordinates(problem, "query", query)
        part = functions.read_block(problem.query_spec, tokens, self.states, problem.want_log)
        if self.log is not None:
            part = Partial(part.num_den, part.log + self.log)
        return part if so_far is None else _generic.combine(so_far, part)


def join(
    problem: Problem, functions: BlockFunctions, query: Any, sources: Iterable[Source]
) -> Partial | None:
    """Read all sources of a block of queries; None if there are none."""
    part = None
    for source in sources:
        part = source.read(problem, functions, query, part)
    return part

"""Sources of a block of queries: their partials are added on a common scale.

A walk gives each block of queries its sources, :func:`join` reads one after the other, and the
walk writes the rows once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from linattn._dispatch import BlockFunctions
from linattn.typing import Partial, Problem

__all__ = ["Source", "join"]


class Source(Protocol):
    """Keys, or states of them, that a block of queries reads."""

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Any, so_far: Partial | None
    ) -> Partial:
        """Add what the queries read here to what they have read so far, None for nothing."""
        ...


def join(
    problem: Problem, functions: BlockFunctions, query: Any, sources: Iterable[Source]
) -> Partial | None:
    """Read all sources of a block of queries; None if there are none."""
    part = None
    for source in sources:
        part = source.read(problem, functions, query, part)
    return part

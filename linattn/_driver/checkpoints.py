"""Checkpoints: states that a forward pass stores for its pullback: a bounded number of them.

A full one stores its last state alone. With the state before it at hand a causal pullback does a
block for queries and keys at once, from the last block to the first, and makes its features once.
Between two checkpoints those of the other blocks are made again from the keys, so that no number of
states is stored that grows with the length.
"""

from __future__ import annotations

from collections.abc import Sequence

from linattn._driver.tasks import Name, task_name
from linattn.typing import Index, Problem, State

__all__ = ["MAX_STATES", "Checkpoints"]

MAX_STATES = 32
"""Checkpoints, and states made again between two of them, or two of those: a head's, each."""

MAX_SHARE = 0.25
"""What states may take, relative to the arguments they are made of."""


class Checkpoints:
    """States of one problem by task and by the row before which they stand."""

    last: State | None = None
    """That of all keys, which all queries of full attention read."""

    def __init__(self) -> None:
        self._states: dict[Name, dict[int, State]] = {}
        self._parts: dict[int, Checkpoints] = {}

    def part(self, number: int) -> Checkpoints:
        """Return those of one of the problems that a packed one consists of."""
        return self._parts.setdefault(number, Checkpoints())

    def store(self, problem: Problem, block_size: int, task: Index, row: int, state: State) -> None:
        """Keep the state before a row of a task, or not."""
        if row and row % (_stride(problem, block_size) * block_size) == 0:
            self._states.setdefault(task_name(task), {})[row] = state

    def segments(
        self, task: Index, all_rows: Sequence[slice], first: State
    ) -> list[tuple[State, list[slice]]]:
        """Blocks in segments, each with the state before it: the first alone where none is kept."""
        states = {**self._states.get(task_name(task), {}), 0: first}
        segments: list[tuple[State, list[slice]]] = []
        for rows in all_rows:
            if rows.start in states:
                segments.append((states[rows.start], []))
            segments[-1][1].append(rows)
        return segments


def _stride(problem: Problem, block_size: int) -> int:
    """Blocks from one checkpoint to the next."""
    length, e = int(problem.query.shape[-2]), int(problem.value.shape[-1])
    arguments = int(problem.query.shape[-1] + problem.key.shape[-1]) + e
    tokens = problem.num_features * (e + 1) / (MAX_SHARE * arguments)
    return max(-(-length // (MAX_STATES * block_size)), -int(-tokens // block_size), 1)

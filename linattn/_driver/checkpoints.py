"""Checkpoints: states that a forward pass stores for its pullback: a bounded number of them.

A full one stores its last state alone. With the state before it at hand a causal pullback does a
block for queries and keys at once, from the last block to the first, and makes its features once.
Between two checkpoints those of the other blocks are made again from the keys, so that no number of
states is stored that grows with the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from linattn._driver.stops import Step
from linattn._driver.tasks import Name, take_state, task_name
from linattn.typing import Index, Problem, State

__all__ = ["MAX_STATES", "Checkpoints", "states_before"]

MAX_STATES = 32
"""Checkpoints, and states made again between two of them, or two of these: a head's, each."""

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
        self, task: Index, steps: Sequence[Step], first: State
    ) -> list[tuple[State, list[Step]]]:
        """Cut steps into segments, each with the state before it: one where none is kept."""
        if self.last is not None:
            readers = [step for step in steps if not step.num_keys]
            last = take_state(self.last, task)
            return [(first, [step for step in steps if step.num_keys]), (last, readers)]
        states = self._states.get(task_name(task), {})
        segments: list[tuple[State, list[Step]]] = [(first, [])]
        for step in steps:
            if step.num_keys and step.keys.start in states:
                segments.append((states[step.keys.start], []))
            segments[-1][1].append(step)
        return segments


def states_before(
    steps: Sequence[Step], state: State, add_keys: Callable[[Step, State], State]
) -> Iterator[tuple[Step, State]]:
    """Go through steps from the last to the first, each with the state before it.

    They are divided into runs, before each of which a state is held, and each run in the same way:
    keys are added to states once for each level. Steps without queries ask for no state, and
    are given any.
    """
    size = -(-len(steps) // MAX_STATES)
    if not any(step.num_queries for step in steps):
        yield from ((step, state) for step in reversed(steps))
        return
    runs = [steps[i : i + size] for i in range(0, len(steps), size)]
    states = [state]
    for run in runs[:-1]:
        for step in run:
            state = add_keys(step, state)
        states.append(state)
    for run in reversed(runs):
        state = states.pop()
        if len(run) == 1:
            yield run[0], state
        else:
            yield from states_before(run, state, add_keys)


def _stride(problem: Problem, block_size: int) -> int:
    """Blocks from one checkpoint to the next."""
    length, e = int(problem.query.shape[-2]), int(problem.value.shape[-1])
    arguments = int(problem.query.shape[-1] + problem.key.shape[-1]) + e
    tokens = problem.num_features * (e + 1) / (MAX_SHARE * arguments)
    return max(-(-length // (MAX_STATES * block_size)), -int(-tokens // block_size), 1)

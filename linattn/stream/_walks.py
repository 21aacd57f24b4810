"""Walks over blocks of rows that are on disk: a step a block, each resumable from its place.

All are folds of public functions: a block here is one call in memory, which divides it into blocks
of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn.state import merge_states
from linattn.stream._inputs import Inputs
from linattn.typing import State

MAX_STORED = 64
"""States of later keys that are stored, each at the end of a group of blocks."""

NONE = slice(0, 0)


class Place(NamedTuple):
    """How far a walk has come."""

    step: int
    """Steps done."""
    state: State
    later: tuple[State, ...] = ()
    """States of all keys far behind a group of blocks, from the last group to the first."""
    num_records: int = 0
    """Checksums of what was read and written in these steps."""


class Walk:
    """Causal attention: each block goes on from the state that the one before left."""

    def __init__(self, inputs: Inputs, out: Any, begin: State, block_size: int) -> None:
        self.inputs, self.out, self.begin = inputs, out, begin
        self.nothing = begin
        """What states of later keys begin with."""
        self.queries = _borders(inputs.query.shape[-2], block_size)
        self.keys = _borders(inputs.key.shape[-2], block_size)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Rows that each step is about."""
        return self.queries

    def step(self, place: Place) -> Place:
        """Do the step that a place is at."""
        rows = slice(*self.queries[place.step])
        return Place(place.step + 1, self.attend(rows, rows, place.state))

    def num_written(self, place: Place) -> int:
        """Rows of the output that are finished, all of them before the others."""
        blocks = place.step - (len(self.rows) - len(self.queries))
        return self.queries[blocks - 1][1] if blocks > 0 else 0

    def num_later(self, step: int) -> int:
        """How many states of later keys a place has after some steps."""
        return 0

    def first(self, step: int) -> State:
        """Return what the state of a place has grown from, after some steps."""
        return self.begin

    def last(self, place: Place) -> State:
        """State after all keys, at the end."""
        return place.state

    def attend(self, rows: slice, read: slice, state: State) -> State:
        """Attend to and write some rows, of a problem of those read; return the state after it."""
        return self.inputs.attend(self.out, rows, read, read, state)

    def add(self, state: State, rows: slice) -> State:
        """Add keys and values to a state, if there are some."""
        return state if rows.start == rows.stop else self.inputs.add(state, rows)


class _FullWalk(Walk):
    """Full attention: the keys of all blocks, then their queries."""

    @property
    def rows(self) -> list[tuple[int, int]]:
        return self.keys + self.queries

    def step(self, place: Place) -> Place:
        rows = slice(*self.rows[place.step])
        if place.step < len(self.keys):
            return Place(place.step + 1, self.add(place.state, rows))
        # Queries have the positions of the keys that are theirs, not those after all keys.
        state = place.state._replace(length=self.begin.length + rows.start)
        self.inputs.attend(self.out, rows, rows, NONE, state)
        return place._replace(step=place.step + 1)


class _WindowWalk(Walk):
    """With an exact window: a block is read with the windows beside it, far keys are in states."""

    def __init__(self, inputs: Inputs, out: Any, begin: State, block_size: int) -> None:
        super().__init__(inputs, out, begin, block_size)
        self.length: int = inputs.key.shape[-2]
        self.window: int = inputs.exact_window

    def step(self, place: Place) -> Place:
        return Place(place.step + 1, self.window_step(place.step, place.state, place.state))

    def window_step(self, block: int, before: State, far_state: State) -> State:
        """Attend to a block, whose far keys are in one state; return that before the next one."""
        start, stop = self.queries[block]
        end = stop if self.inputs.is_causal else self.far_stop(block)
        self.attend(slice(start, stop), slice(self.far_start(block), end), far_state)
        return self.add(before, slice(self.far_start(block), self.far_start(block + 1)))

    def far_start(self, block: int) -> int:
        """Where the keys begin that are not far before a block."""
        if block == len(self.queries):
            return self.length
        return max(0, self.queries[block][0] // self.window - 1) * self.window

    def far_stop(self, block: int) -> int:
        """Where the keys begin that are far behind a block."""
        return min(self.length, (-(-self.queries[block][1] // self.window) + 1) * self.window)


class _FullWindowWalk(_WindowWalk):
    """The same to both sides: states of later keys are made first, from the last block on.

    One state a group of blocks is stored; the states inside a group are made again when it begins.
    """

    def __init__(self, inputs: Inputs, out: Any, begin: State, block_size: int) -> None:
        super().__init__(inputs, out, begin, block_size)
        # The state before the first key without what came before it.
        _, self.nothing = inputs.attention(NONE, NONE, None)
        count = len(self.queries)
        self.group = max(1, -(-count // MAX_STORED))
        # Blocks whose later keys are added, down to the end of the first group.
        self.backward = list(range(count - 1, min(self.group, count) - 2, -1)) if count else []
        self.in_group: dict[int, State] = {}

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [self.queries[block] for block in self.backward] + self.queries

    def step(self, place: Place) -> Place:
        if place.step < len(self.backward):
            block = self.backward[place.step]
            state = self.state_behind(block, place.state)
            later = (*place.later, state) if self.is_last_of_group(block) else place.later
            done = place.step + 1 == len(self.backward)
            return Place(place.step + 1, self.begin if done else state, later)
        block = place.step - len(self.backward)
        behind = self.behind(block, place.later)
        start = self.begin.length + self.far_start(block)
        far_state = merge_states(place.state, behind)._replace(length=start)
        return place._replace(
            step=place.step + 1, state=self.window_step(block, place.state, far_state)
        )

    def is_last_of_group(self, block: int) -> bool:
        """Whether the state of later keys of a block is stored."""
        return block % self.group == self.group - 1 or block == len(self.queries) - 1

    def num_later(self, step: int) -> int:
        """How many states of later keys a place has after some steps."""
        return sum(map(self.is_last_of_group, self.backward[:step]))

    def first(self, step: int) -> State:
        return self.nothing if 0 < step < len(self.backward) else self.begin

    def state_behind(self, block: int, next_behind: State) -> State:
        """State of all keys far after a block, from the state of the next block."""
        if block == len(self.queries) - 1:
            return self.nothing
        rows = slice(self.far_stop(block), self.far_stop(block + 1))
        nothing = self.nothing._replace(length=self.begin.length + rows.start)
        behind = merge_states(self.add(nothing, rows), next_behind)
        return behind._replace(length=self.length - rows.start)

    def behind(self, block: int, later: tuple[State, ...]) -> State:
        """State of all keys far behind a block of the forward pass."""
        if block not in self.in_group:
            index = block // self.group
            end = min((index + 1) * self.group, len(self.queries)) - 1
            state = later[len(later) - 1 - index]
            self.in_group = {end: state}
            for other in range(end - 1, block - 1, -1):
                self.in_group[other] = state = self.state_behind(other, state)
        return self.in_group[block]


def walk_of(inputs: Inputs, out: Any, begin: State, block_size: int) -> Walk:
    """Return the walk that a call takes."""
    kind = {
        (True, False): Walk,
        (False, False): _FullWalk,
        (True, True): _WindowWalk,
        (False, True): _FullWindowWalk,
    }[inputs.is_causal, inputs.exact_window is not None]
    return kind(inputs, out, begin, block_size)


def _borders(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]

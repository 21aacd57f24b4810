"""Rows of gradients, and the walk that writes them: one task's share of a pullback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple

import array_api_compat

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import Name, block_slices, take_state, task_index, task_name
from linattn._driver.walks import Step
from linattn._generic.feature_vjps import change_coordinates_vjp, sum_to
from linattn.typing import Array, Cotangent, Index, Problem, State

__all__ = [
    "MAX_STATES",
    "Checkpoints",
    "GradientRows",
    "GradientWalk",
    "empty_adjoint",
    "states_before",
]


class _OrderedSum:
    """Rows to which tasks add in their order."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Array] = {}

    def shares(self, order: int, share: Array, xp: Any) -> Iterator[Array]:
        """Yield the shares that are next, one more given."""
        if order > self._next:
            # A backend may make its next block in the same place.
            self._early[order] = xp.asarray(share, copy=True)
            return
        while share is not None:
            yield share
            self._next += 1
            share = self._early.pop(self._next, None)


class GradientRows:
    """Where rows of one gradient go: summed over the axes along which its argument was broadcast.

    Each task of a row writes it ``shares`` times. If a row is written more than once, the shares
    are added in the accumulation dtype, in the order of the tasks and of their shares. So the bits
    of a sum do not depend on which task is done first.
    A share that comes early is held until it is next, so that no task waits: of tasks that run
    side by side, a part of a head's gradient each.
    """

    def __init__(
        self, problem: Problem, like: Array, tasks: Sequence[Index], shares: int = 1
    ) -> None:
        self._xp, self._dtype, self._shares = problem.xp, like.dtype, shares
        self._shape = tuple(like.shape)
        self._blocks: dict[int, Array] = {}
        self._array = None
        self._lock = Lock()
        lead = self._shape[:-2]
        several = len(tasks) > 1 and any(
            n > 1 and (back > len(lead) or lead[-back] == 1)
            for back, n in enumerate(reversed(problem.state_lead), start=1)
        )
        self._adds = several or shares > 1
        self._order: dict[Name, int] = {}
        self._sums: dict[tuple[Name, int], _OrderedSum] = {}
        if self._adds:
            count: Counter[Name] = Counter()
            for task in tasks:
                place = task_name(task_index(lead, 0, task))
                self._order[task_name(task)] = count[place]
                count[place] += 1
        if not problem.policy.lazy or 0 in self._shape:
            device = array_api_compat.device(like)
            dtype = problem.dtype if self._adds else like.dtype
            self._array = problem.xp.zeros(self._shape, dtype=dtype, device=device)

    def write(self, task: Index, rows: slice, block: Array, share: int = 0) -> None:
        """Write rows of a task, or add them to its earlier shares."""
        xp = self._xp
        if self._array is None:
            block, before = sum_to(block, self._shape[:-2], 2), self._blocks.get(rows.start)
            self._blocks[rows.start] = block if before is None else before + block
            return
        if 0 in self._shape:
            return
        index = (*task_index(self._shape, 2, task)[:-2], rows, slice(None))
        block = sum_to(block, tuple(self._array[index].shape[:-2]), 2)
        if self._adds:
            place = task_name(index[: len(self._shape) - 2]), rows.start
            order = self._order[task_name(task)] * self._shares + share
            with self._lock:
                sums = self._sums.setdefault(place, _OrderedSum())
                for each in sums.shares(order, block, xp):
                    self._array[index] += each
        else:
            self._array[index] = xp.astype(block, self._dtype, copy=False)

    def result(self) -> Array:
        """Return the whole gradient."""
        whole = self._array
        if whole is None:
            ordered = [self._blocks[start] for start in sorted(self._blocks)]
            whole = self._xp.concat(ordered, axis=-2)
        return self._xp.astype(whole, self._dtype, copy=False)


class GradientWalk(NamedTuple):
    """Arguments of a pullback: a task's share of the problem, and where its gradients go."""

    problem: Problem
    cotangent: Cotangent
    functions: BlockFunctions
    block_size: int
    task: Index
    rows: dict[str, GradientRows]
    """One for each argument, by its name in the problem."""
    share: int = 0
    """Which of several gradients of the same rows is written; they are added."""

    def query_slices(self) -> list[slice]:
        """Blocks of queries."""
        return list(block_slices(self.problem.query.shape[-2], self.block_size))

    def key_slices(self, keys: slice) -> list[slice]:
        """Blocks of some keys."""
        blocks = block_slices(keys.stop - keys.start, self.block_size)
        return [slice(keys.start + rows.start, keys.start + rows.stop) for rows in blocks]

    def grad_output(self, rows: slice) -> Array:
        """Cotangents of some rows of the output."""
        grad = self.cotangent.output[..., rows, :]
        return self.problem.xp.astype(grad, self.problem.dtype, copy=False)

    def write_query(self, rows: slice, gradient: Array, term: Array = None) -> None:
        """Write gradients of queries in the caller's coordinates.

        ``term``: gradient by the log of a factor on all features of a row, None for zero.
        """
        affine = self.problem.query_change
        if affine is not None:
            gradient = change_coordinates_vjp(affine, gradient, term)
        self.write("query", rows, gradient)

    def write_key(
        self, rows: slice, values_and_one: Array, grad_key: Array, grad_values_and_one: Array
    ) -> None:
        """Write gradients of keys in the caller's coordinates; exactly 0 for masked keys."""
        problem, xp = self.problem, self.problem.xp
        gradients = {"key": grad_key, "value": grad_values_and_one[..., :-1]}
        if problem.key_change is not None or problem.weights.key_bias is not None:
            weight = xp.sum(values_and_one * grad_values_and_one, axis=-1, keepdims=True)
            if problem.weights.key_bias is not None:
                gradients["key_bias"] = weight
            if problem.key_change is not None:
                moved = change_coordinates_vjp(problem.key_change, grad_key, weight)
                gradients["key"] = moved
        for name, gradient in gradients.items():
            if problem.weights.key_mask is not None:
                mask = problem.weights.key_mask[..., rows, :]
                gradient = xp.where(mask, gradient, xp.zeros_like(gradient))
            self.write(name, rows, gradient)

    def write(self, name: str, rows: slice, gradient: Array) -> None:
        """Write rows of the gradient of an argument."""
        self.rows[name].write(self.task, rows, gradient, self.share)

    def last_adjoint(self, like: State) -> State:
        """Adjoint after the last token: the cotangent of the returned state, or zero."""
        grad_state, nothing = self.cotangent.state, empty_adjoint(self.problem, like)
        if grad_state is None:
            return nothing
        return _generic.merge(nothing, _broadcast(grad_state, nothing))


def empty_adjoint(problem: Problem, like: State) -> State:
    """Return the adjoint before any query has read: zero."""
    m, e = problem.num_features, problem.value.shape[-1]
    return _generic.empty_state(problem.state_lead, m, e, like.kvz)


def _broadcast(state: State, like: State) -> State:
    xp = _arrays.namespace(like.kvz)
    kvz = xp.broadcast_to(state.kvz, tuple(like.kvz.shape))
    return State(kvz, xp.broadcast_to(state.log_scale, tuple(like.log_scale.shape)), 0)


# Checkpoints --------------------------------------------------------------------------------------

# A forward pass stores a bounded number of states for its pullback: only the last if attention is
# full. A causal pullback takes blocks from the last to the first. With the state before a block, it
# pulls back to queries and keys together, and makes the features once. States between two
# checkpoints are made again from the keys, so that the number of stored states does not grow with
# the length.

MAX_STATES = 32
"""Most checkpoints of a head, and most states made again at each level between two of them."""

MAX_SHARE = 0.25
"""Most memory that checkpoints may take, relative to query, key and value."""


class Checkpoints:
    """States of one problem, by task and by the row that follows the state."""

    last: State | None = None
    """State of all keys, which all queries of full attention read."""

    def __init__(self) -> None:
        self._states: dict[Name, dict[int, State]] = {}
        self._parts: dict[int, Checkpoints] = {}

    def part(self, number: int) -> Checkpoints:
        """Return the checkpoints of the i-th batch of a packed problem, i = ``number``."""
        return self._parts.setdefault(number, Checkpoints())

    def store(self, problem: Problem, block_size: int, task: Index, row: int, state: State) -> None:
        """Store the state before a row of a task, if the row is due for a checkpoint."""
        if row and row % (_stride(problem, block_size) * block_size) == 0:
            self._states.setdefault(task_name(task), {})[row] = state

    def segments(
        self, task: Index, steps: Sequence[Step], first: State
    ) -> list[tuple[State, list[Step]]]:
        """Cut steps into segments at the checkpoints, each with the state before it."""
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

    The steps are divided into at most ``MAX_STATES`` runs, and the state before each run is held.
    Each run is divided in the same way, so keys are added to states once a level. If no step has
    queries, no step needs its state, and each gets ``state`` itself.
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

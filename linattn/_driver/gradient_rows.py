"""Gradients that several tasks write, the arguments of a pullback, and checkpoints.

`GradientRows` collects one argument's gradient, and `Total` a task's gradient in several parts.
`Pullback` has all that one task needs. `Checkpoints` has the states that a forward pass stored;
`states_before` of `steps` makes the others again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import (
    Name,
    block_slices,
    decay_of_rows,
    take_state,
    task_index,
    task_name,
)
from linattn._driver.steps import MAX_STATES, Step
from linattn._generic.feature_vjps import change_coordinates_vjp, sum_to
from linattn.typing import Array, Cotangent, Index, Problem, State


class _OrderedSum:
    """The shares of one block of rows, in a fixed order; shares may arrive in any order."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Array] = {}

    @property
    def holds(self) -> bool:
        """Whether a share waits for an earlier one."""
        return bool(self._early)

    def shares(self, order: int, share: Array, xp: Any) -> Iterator[Array]:
        """Accept share number ``order``; yield all shares that can be added now, in order.

        A share with an earlier one still missing is copied and held.
        """
        if order > self._next:
            # A backend may make its next block in the same place.
            self._early[order] = xp.asarray(share, copy=True)
            return
        while share is not None:
            yield share
            self._next += 1
            share = self._early.pop(self._next, None)


class GradientRows:
    """The gradient of one argument, summed over the axes along which the argument was broadcast.

    Each task writes a row once. Shares of one row are added in the accumulation dtype, in the order
    of the tasks. So the bits of a sum do not depend on which task ends first. A share that comes
    early is held, so that no task waits for another.

    ``like``: the argument; ``tasks``: all tasks that will write.
    """

    def __init__(self, problem: Problem, like: Array, tasks: Sequence[Index]) -> None:
        self._xp, self._dtype = problem.xp, like.dtype
        self._shape = tuple(like.shape)
        self._blocks: dict[int, Array] = {}
        self._array = None
        self._lock = Lock()
        lead = self._shape[:-2]
        self._adds = len(tasks) > 1 and any(
            n > 1 and (back > len(lead) or lead[-back] == 1)
            for back, n in enumerate(reversed(problem.state_lead), start=1)
        )
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

    def write(self, task: Index, rows: slice, block: Array) -> None:
        """Write ``block``, a task's gradient of some rows."""
        xp = self._xp
        if self._array is None:
            self._blocks[rows.start] = sum_to(block, self._shape[:-2], 2)
            return
        if 0 in self._shape:
            return
        index = (*task_index(self._shape, 2, task)[:-2], rows, slice(None))
        block = sum_to(block, tuple(self._array[index].shape[:-2]), 2)
        if self._adds:
            place = task_name(index[: len(self._shape) - 2]), rows.start
            with self._lock:
                sums = self._sums.setdefault(place, _OrderedSum())
                for each in sums.shares(self._order[task_name(task)], block, xp):
                    self._array[index] += each
        else:
            self._array[index] = xp.astype(block, self._dtype, copy=False)

    def place_of(self, task: Index, dtype: Any) -> Array | None:
        """View the rows of a task that no other task writes; None if there are others."""
        array = self._array
        if self._adds or not isinstance(array, np.ndarray) or array.dtype != dtype:
            return None
        return array[task_index(self._shape, 2, task)]

    def result(self) -> Array:
        """Return the gradient, in the shape and dtype of the argument."""
        whole = self._array
        assert not any(sums.holds for sums in self._sums.values())
        if whole is None:
            ordered = [self._blocks[start] for start in sorted(self._blocks)]
            whole = self._xp.concat(ordered, axis=-2)
        return self._xp.astype(whole, self._dtype, copy=False)


class Held:
    """Parts of the rows of one step, in any order; all are written together at its end.

    Tasks that share rows write the same blocks, also where one of them cuts a step in two.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._parts: list[tuple[int, Array]] = []

    def write(self, _: Index, rows: slice, block: Array) -> None:
        """Hold a copy: a backend may make its next block in the same place."""
        self._parts.append((rows.start, self._xp.asarray(block, copy=True)))

    def result(self) -> Array:
        """Return all rows."""
        parts = sorted(self._parts, key=lambda part: part[0])
        return self._xp.concat([block for _, block in parts], axis=-2)


class Total:
    """The gradient of one argument of a task, to which any rows are added, in the order of calls.

    ``like``: the task's argument.
    """

    def __init__(self, problem: Problem, like: Array, place: Array | None = None) -> None:
        self._xp, self._shape = problem.xp, tuple(like.shape)
        self.place = place
        """Where the gradient is needed in the end, zeros that no other task writes; or None."""
        self._like = dict(dtype=problem.dtype, device=array_api_compat.device(like))
        if like.dtype == problem.xp.float64:
            self._like["dtype"] = like.dtype
        self._array = None
        self._layers: list[list[tuple[slice, Array]]] = []
        if not problem.policy.lazy:
            self._array = problem.xp.zeros(self._shape, **self._like) if place is None else place

    def write(self, _: Index, rows: slice, block: Array) -> None:
        """Add to some rows; sums over axes along which the argument was broadcast."""
        block = sum_to(block, self._shape[:-2], 2)
        if self._array is not None:
            self._array[..., rows, :] += block
            return
        for layer in self._layers:
            if all(rows.start >= of.stop or rows.stop <= of.start for of, _ in layer):
                layer.append((rows, block))
                return
        self._layers.append([(rows, block)])

    def result(self) -> Array:
        """Return the gradient of all rows."""
        if self._array is not None:
            return self._array
        whole = self._zeros(self._shape[-2])
        for layer in self._layers:
            parts, row = [], 0
            for rows, block in sorted(layer, key=lambda part: part[0].start):
                parts += [self._zeros(rows.start - row), block]
                row = rows.stop
            parts.append(self._zeros(self._shape[-2] - row))
            whole = whole + self._xp.concat(parts, axis=-2)
        return whole

    def _zeros(self, rows: int) -> Array:
        return self._xp.zeros((*self._shape[:-2], rows, self._shape[-1]), **self._like)


class Pullback(NamedTuple):
    """Arguments of a task's pullback: its part of the problem, and receivers of its gradients."""

    problem: Problem
    cotangent: Cotangent
    functions: BlockFunctions
    block_size: int
    task: Index
    rows: dict[str, Any]
    """Receiver of each argument's gradient, by the argument's name in the problem."""

    def query_slices(self) -> list[slice]:
        """Return the blocks of all queries, first to last."""
        return list(block_slices(self.problem.query.shape[-2], self.block_size))

    def key_slices(self, keys: slice) -> list[slice]:
        """Return the blocks of some keys, first to last."""
        blocks = block_slices(keys.stop - keys.start, self.block_size)
        return [slice(keys.start + rows.start, keys.start + rows.stop) for rows in blocks]

    def grad_output(self, rows: slice) -> Array:
        """Return the cotangent of some rows of the output, in the accumulation dtype."""
        grad = self.cotangent.output[..., rows, :]
        return self.problem.xp.astype(grad, self.problem.dtype, copy=False)

    def write_query(self, rows: slice, gradient: Array, term: Array = None) -> None:
        """Write the gradient of the caller's queries, before the map's change of coordinates.

        ``gradient``: gradient of the changed queries. ``term``: gradient of each row's log weight,
        ``(..., n, 1)``, which the change of coordinates adds; None for 0.
        """
        affine = self.problem.query_change
        if affine is not None:
            gradient = change_coordinates_vjp(affine, gradient, term)
        self.write("query", rows, gradient)

    def write_key(
        self, rows: slice, values_and_one: Array, grad_key: Array, grad_values_and_one: Array
    ) -> None:
        """Write the gradients of the caller's keys, values and key bias; exactly 0 for masked keys.

        ``grad_key``: gradient of keys after the map's change of coordinates. The gradient of a
        key's log weight is the product of ``[v, 1]`` with its gradient.
        """
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
        """Write rows of an argument's gradient."""
        self.rows[name].write(self.task, rows, gradient)

    def in_parts(self) -> Pullback:
        """Return the same with totals as receivers; `finish` gives them to this one's."""
        arguments, rows = arguments_of(self.problem), self.rows
        totals = {
            name: Total(self.problem, x, rows[name].place_of(self.task, self.problem.dtype))
            for name, x in arguments.items()
        }
        return self._replace(rows=totals)

    def finish(self, parts: Pullback) -> None:
        """Write the gradients of all parts."""
        for name, total in parts.rows.items():
            gradient = total.result()
            if name == "log_decay":
                # Each log decay acts from its token on.
                xp = self.problem.xp
                gradient = xp.flip(xp.cumulative_sum(xp.flip(gradient, axis=-2), axis=-2), axis=-2)
            if total.place is None or name == "log_decay":
                self.write(name, slice(0, gradient.shape[-2]), gradient)

    def last_adjoint(self, like: State) -> State:
        """Return the adjoint after the last token: the cotangent of the returned state, or zero."""
        grad_state, nothing = self.cotangent.state, empty_adjoint(self.problem, like)
        if grad_state is None:
            return nothing
        return _generic.merge(nothing, _broadcast(grad_state, nothing))


def arguments_of(problem: Problem) -> dict[str, Array]:
    """Return the arrays of a problem that have gradients, but for its state."""
    arrays = {name: getattr(problem, name) for name in ("query", "key", "value")}
    arrays["key_bias"] = problem.weights.key_bias
    if problem.weights.log_decay is not None:
        arrays["log_decay"] = decay_of_rows(problem, slice(0, problem.key.shape[-2]))
    return {name: array for name, array in arrays.items() if array is not None}


def empty_adjoint(problem: Problem, like: State) -> State:
    """Return the adjoint state 0 of a problem, in the dtype and on the device of ``like``."""
    m, e = problem.num_features, problem.value.shape[-1]
    return _generic.empty_state(problem.state_lead, m, e, like.kvz)


def _broadcast(state: State, like: State) -> State:
    """Return a state broadcast to the shape of another, of length 0."""
    xp = _arrays.namespace(like.kvz)
    kvz = xp.broadcast_to(state.kvz, tuple(like.kvz.shape))
    return State(kvz, xp.broadcast_to(state.log_scale, tuple(like.log_scale.shape)), 0)


# Checkpoints --------------------------------------------------------------------------------------

# A forward pass stores a bounded number of states for its pullback; full attention stores the last
# only. A causal pullback takes blocks from the last to the first. From the state before a block it
# computes the gradients of the block's queries and keys together, so features are made once. States
# between two checkpoints are made again from the keys.

MAX_SHARE = 0.25
"""Largest memory of all checkpoints, as a share of the memory of query, key and value."""


class Checkpoints:
    """Stored states of one problem; a state's row is the first row that it does not contain."""

    last: State | None = None
    """State of all keys in full attention; None for causal attention."""
    pullback: Callable[[Cotangent], Any] | None = None
    """A backend's, which reuses its own forward pass, in place of states."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._states: dict[Name, dict[int, State]] = {}
        self._parts: dict[int, Checkpoints] = {}

    def of(self, problem: Problem) -> Checkpoints | None:
        """Return these checkpoints if their states are arrays of the problem's library."""
        return self if problem.xp is self._xp else None

    def part(self, number: int) -> Checkpoints:
        """Return the checkpoints of batch ``number`` of a packed problem."""
        return self._parts.setdefault(number, Checkpoints(self._xp))

    def store(self, problem: Problem, block_size: int, task: Index, row: int, state: State) -> None:
        """Store the state before ``row`` of a task if a checkpoint is due there; else ignore it."""
        if row and row % (_stride(problem, block_size) * block_size) == 0:
            self._states.setdefault(task_name(task), {})[row] = state

    def segments(
        self, task: Index, steps: Sequence[Step], first: State
    ) -> list[tuple[State, list[Step]]]:
        """Divide steps at the checkpoints; return each segment's first state and its steps.

        ``first``: state before the first step.
        """
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


def _stride(problem: Problem, block_size: int) -> int:
    """Return the number of blocks between checkpoints: the least that meets both limits above."""
    length, e = int(problem.query.shape[-2]), int(problem.value.shape[-1])
    arguments = int(problem.query.shape[-1] + problem.key.shape[-1]) + e
    tokens = problem.num_features * (e + 1) / (MAX_SHARE * arguments)
    return max(-(-length // (MAX_STATES * block_size)), -int(-tokens // block_size), 1)

"""A task's share of a problem: slices along the leading axes, with axes of 1 left whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn._arrays import namespace
from linattn._generic.specs import spec_axes
from linattn.typing import (
    Array,
    ColumnNormalized,
    Corrected,
    Exact,
    Index,
    Problem,
    RelativeBias,
    SeparateDenominator,
    State,
)

__all__ = [
    "ROWS_OF_KEYS",
    "Name",
    "rows_at",
    "take",
    "take_problem",
    "take_rows",
    "take_state",
    "task_index",
    "task_name",
]

Name = tuple[tuple[int | None, int | None], ...]

ROWS_OF_KEYS = ("key", "value", "key_mask", "key_bias", "log_decay")
"""Attributes of a problem with a row for each key, or None."""


def task_name(task: Index) -> Name:
    """Name a task by something that can be hashed, as slices before Python 3.12 cannot."""
    return tuple((axis.start, axis.stop) for axis in task)


def task_index(shape: tuple[int, ...], trailing: int, task: Index) -> tuple[slice, ...]:
    """Index of a task in an array of this shape: axes of 1 stay whole, trailing axes too."""
    index = [slice(None)] * len(shape)
    lead = len(shape) - trailing
    for back in range(1, min(lead, len(task)) + 1):
        if shape[lead - back] != 1:
            index[lead - back] = task[-back]
    return tuple(index)


def _take_lead(lead: tuple[int, ...], task: Index) -> tuple[int, ...]:
    index = task_index(lead, 0, task)
    return tuple(len(range(*s.indices(size))) for s, size in zip(index, lead, strict=True))


def take(array: Any, trailing: int, task: Index) -> Any:
    if not task or array is None or isinstance(array, float) or array.ndim <= trailing:
        return array
    return array[task_index(tuple(array.shape), trailing, task)]


def _take_spec(spec: Any, task: Index) -> Any:
    if spec is None or isinstance(spec, Exact):
        return spec
    changes: dict[str, Any] = {}
    for name, axes in spec_axes(spec).items():
        whole = getattr(spec, name)
        part = take(whole, axes, task)
        if part is not whole:
            changes[name] = part
    if isinstance(spec, ColumnNormalized | Corrected | SeparateDenominator):
        changes["spec"] = _take_spec(spec.spec, task)
    return replace(spec, **changes) if changes else spec


def take_problem(problem: Problem, task: Index) -> Problem:
    if not task:
        return problem
    state, bias = problem.state, problem.relative_bias
    return problem.replace(
        **{name: take(getattr(problem, name), 2, task) for name in ("query", *ROWS_OF_KEYS)},
        query_spec=_take_spec(problem.query_spec, task),
        key_spec=_take_spec(problem.key_spec, task),
        state_lead=_take_lead(problem.state_lead, task),
        lead=_take_lead(problem.lead, task),
        query_change=_take_spec(problem.query_change, task),
        key_change=_take_spec(problem.key_change, task),
        state=None if state is None else take_state(state, task),
        relative_bias=None if bias is None else RelativeBias(take(bias.table, 1, task)),
        key_stop=_take_stops(problem.key_stop, task),
        assigned_keys=None
        if problem.assigned_keys is None
        else problem.assigned_keys.of_task(task),
    )


def _take_stops(stops: Any, task: Index) -> Any:
    """Take the stops of a task, without leading axes where they are those of one head."""
    part = take(stops, 1, task)
    return part if part is None or part.size != part.shape[-1] else part.reshape(-1)


def take_rows(problem: Problem, rows: slice) -> Problem:
    """Take some queries and the keys beside them; one decay for all tokens stays whole."""
    length = problem.key.shape[-2]

    def part(array: Any) -> Any:
        return array if array is None or array.shape[-2] < length else array[..., rows, :]

    keys = {name: part(getattr(problem, name)) for name in ROWS_OF_KEYS}
    return problem.replace(query=problem.query[..., rows, :], **keys)


def rows_at(rows: Array, index: NDArray[np.int64]) -> Array:
    """Rows ``(..., n, w)`` at places that the host has chosen."""
    xp = namespace(rows)
    return xp.take(rows, xp.asarray(index, device=array_api_compat.device(rows)), axis=-2)


def take_state(state: State, task: Index) -> State:
    return State(take(state.kvz, 2, task), take(state.log_scale, 1, task), state.length)

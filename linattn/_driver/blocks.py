"""Parts of a problem: the share of a task, blocks of tokens on the way in, rows on the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _generic
from linattn._arrays import namespace
from linattn._dispatch import BlockFunctions
from linattn._generic import divide
from linattn._generic.hierarchical import pad
from linattn._generic.specs import spec_axes
from linattn._generic.states import values_block
from linattn.typing import (
    Array,
    ColumnNormalized,
    Corrected,
    Exact,
    Index,
    Partial,
    Problem,
    RelativeBias,
    SeparateDenominator,
    State,
    Tokens,
)


def block_slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def raw_tokens(problem: Problem, side: str, rows: slice, start: int) -> Tokens:
    """Tokens of a block, before any change of coordinates; a masked key is 0 with weight -inf."""
    xp = problem.xp
    source = problem.query if side == "query" else problem.key
    x = source[..., rows, :]
    if x.dtype != problem.dtype:
        x = xp.astype(x, problem.dtype)
    if side == "query":
        return Tokens(x, None, start + rows.start + problem.sees.query_start)
    bias = None if problem.weights.key_bias is None else problem.weights.key_bias[..., rows, :]
    if problem.weights.key_mask is None:
        return Tokens(x, bias, start + rows.start)
    mask = problem.weights.key_mask[..., rows, :]
    zero = xp.zeros_like(mask, dtype=problem.dtype)
    log_weight = xp.where(mask, zero if bias is None else bias, zero - xp.inf)
    return Tokens(xp.where(mask, x, zero), log_weight, start + rows.start)


def in_map_coordinates(problem: Problem, side: str, tokens: Tokens) -> Tokens:
    """Tokens in the coordinates of their side of the map."""
    if side == "query":
        affine, weighted = problem.query_change, problem.want_log
    else:
        affine, weighted = problem.key_change, True
    return (
        tokens if affine is None else _generic.change_coordinates(affine, tokens, weighted=weighted)
    )


def token_block(problem: Problem, side: str, rows: slice, start: int) -> Tokens:
    """Tokens of one block of queries or keys, ready for the spec of their side."""
    return in_map_coordinates(problem, side, raw_tokens(problem, side, rows, start))


def values_and_one_block(problem: Problem, rows: slice) -> Array:
    """``[v, 1]``, so that numerator and denominator come out of one product."""
    return values_block(*_values(problem, rows), problem.dtype)


def numerators(problem: Problem, part: Partial) -> Array:
    """Numerators on the true scale; a numerator of 0 stays 0 where the scale overflows."""
    # In two steps: neither overflows or underflows unless the result does.
    numerator, factor = part.num_den[..., :-1], problem.xp.exp(part.log / 2)
    scaled = numerator * factor * factor
    return problem.xp.where(numerator == 0, problem.xp.zeros_like(scaled), scaled)


def add_block(
    problem: Problem, rows: slice, tokens: Tokens, state: State, functions: BlockFunctions
) -> State:
    """Add a block of keys, and their values, to a state."""
    value, mask = _values(problem, rows)
    return functions.reduce_values(problem.key_spec, tokens, value, mask, state)  # type: ignore[no-any-return]


def _values(problem: Problem, rows: slice) -> tuple[Array, Array]:
    mask = None if problem.weights.key_mask is None else problem.weights.key_mask[..., rows, :]
    return problem.value[..., rows, :], mask


class OutputRows:
    """Where finished rows go: a preallocated array, or a list for arrays that cannot be set."""

    def __init__(
        self,
        problem: Problem,
        width: int,
        dtype: Any,
        functions: BlockFunctions,
        array: Array | None = None,
    ) -> None:
        self._xp = problem.xp
        self._shape = (*problem.lead, problem.query.shape[-2], width)
        self._blocks: dict[int, Array] = {}
        self._array = array
        if array is None and (not problem.policy.lazy or 0 in self._shape):
            device = array_api_compat.device(problem.query)
            self._array = problem.xp.empty(self._shape, dtype=dtype, device=device)
        self._dtype = dtype
        self._divide = functions.divide

    def write(self, task: Index, rows: slice, block: Array) -> None:
        block = self._xp.astype(block, self._dtype, copy=False)
        if self._array is None:
            self._blocks[rows.start] = block
        elif 0 not in self._shape:
            self._array[self._where(task, rows)] = block

    def write_divided(self, task: Index, rows: slice, part: Partial) -> None:
        """Put numerator over denominator."""
        if self._array is None or 0 in self._shape:
            self.write(task, rows, divide(part))
            return
        where = self._where(task, rows)
        self._store(where, self._divide(part, self._array[where]))

    def write_read(self, task: Index, rows: slice, read: Callable[[Array], Array | None]) -> None:
        """Let ``read(out)`` write finished rows into the output; store its result if not None."""
        where = self._where(task, rows)
        assert self._array is not None
        self._store(where, read(self._array[where]))

    def _store(self, where: tuple[slice, ...], out: Array | None) -> None:
        if out is not None:
            assert self._array is not None
            self._array[where] = self._xp.astype(out, self._dtype, copy=False)

    @property
    def divides_reads(self) -> bool:
        """Whether one function may read rows and divide them, straight into the output array."""
        return not (self._array is None or 0 in self._shape)

    def _where(self, task: Index, rows: slice) -> tuple[slice, ...]:
        return (*task_index(self._shape, 2, task)[:-2], rows, slice(None))

    def result(self) -> Array:
        if self._array is not None:
            return self._array
        return self._xp.concat([self._blocks[i] for i in sorted(self._blocks)], axis=-2)


# Blocks on an axis of their own -------------------------------------------------------------------


def key_blocks(
    problem: Problem, first: int, stop: int, size: int, start: int, limit: int
) -> tuple[Tokens, Array]:
    """Return the keys and the ``[v, 1]`` of some blocks, on an axis of blocks.

    Positions outside the sequence are masked, and so are the keys from position ``limit`` on.
    """
    rows = _inside(first * size, stop * size, limit)
    tokens = raw_tokens(problem, "key", rows, start)
    values_and_one = values_and_one_block(problem, rows)
    total = (stop - first) * size
    front = min(max(rows.start - first * size, 0), total)
    log_weight = tokens.log_weight
    if log_weight is None and tokens.x.shape[-2] < total:
        log_weight = problem.xp.zeros_like(tokens.x[..., :1])
    x = _padded(tokens.x, front, total)
    log_weight = split(_padded(log_weight, front, total, -float("inf")), size)
    tokens = Tokens(split(x, size), log_weight, first * size + start)
    return tokens, split(_padded(values_and_one, front, total), size)


def decay_blocks(problem: Problem, first: int, stop: int, size: int) -> Array:
    """Log decay of the keys of some blocks, ``(..., blocks, size, 1)``; 0 outside the sequence."""
    rows = _inside(first * size, stop * size, problem.key.shape[-2])
    total = (stop - first) * size
    front = min(max(rows.start - first * size, 0), total)
    return split(_padded(decay_of_rows(problem, rows), front, total), size)


def _inside(first: int, stop: int, limit: int) -> slice:
    """Cut a slice at 0 and at a limit."""
    stop = min(max(stop, 0), limit)
    return slice(min(max(first, 0), stop), stop)


def _padded(x: Array, front: int, size: int, fill: float = 0.0) -> Array:
    """Put rows of one number before and after; None stays None."""
    if x is None or (not front and x.shape[-2]):
        return pad(x, size, fill)
    xp, device = _arrays.namespace(x), array_api_compat.device(x)

    def rows(count: int) -> Array:
        shape = (*x.shape[:-2], count, x.shape[-1])
        return xp.full(shape, fill, dtype=x.dtype, device=device)

    return xp.concat([rows(front), x, rows(size - front - x.shape[-2])], axis=-2)


def in_blocks(tokens: Tokens, total: int, size: int, front: int = 0) -> Tokens:
    """Cut tokens into blocks of one size, padded to ``total`` rows, ``front`` of them first."""
    x = split(_padded(tokens.x, front, total), size)
    return Tokens(x, split(tokens.log_weight, size), tokens.start - front)


def split(x: Array, size: int) -> Array:
    """Cut rows into blocks of one size; None stays None."""
    if x is None:
        return None
    # The number of blocks in full: -1 for it would be a guess where there are no heads.
    *lead, total, width = x.shape
    return _arrays.namespace(x).reshape(x, (*lead, total // size, size, width))


def flat_rows(part: Partial, rows: int, front: int = 0) -> Partial:
    """Join blocks of rows into one axis again, without padding."""
    xp, taken = _arrays.namespace(part.num_den), slice(front, front + rows)
    *lead, g, n, width = part.num_den.shape
    num_den = xp.reshape(part.num_den, (*lead, g * n, width))[..., taken, :]
    return Partial(num_den, xp.reshape(part.log, (*part.log.shape[:-3], g * n, 1))[..., taken, :])


# Keys whose state decays --------------------------------------------------------------------------


def key_block(problem: Problem, rows: slice, start: int) -> Tokens:
    """Keys of one block, with their decay if they have some."""
    key = token_block(problem, "key", rows, start)
    if problem.weights.log_decay is None:
        return key
    return key._replace(log_decay=decay_of_rows(problem, rows))


def decay_of_rows(problem: Problem, rows: slice) -> Array:
    """Log decay of some tokens, ``(..., n, 1)``."""
    decay: Any = problem.weights.log_decay
    if decay.shape[-2] < problem.key.shape[-2]:
        return problem.xp.broadcast_to(decay, (*decay.shape[:-2], rows.stop - rows.start, 1))
    return decay[..., rows, :]


def total_decay(problem: Problem, rows: slice) -> Array:
    """Log decay of some tokens in all, ``(...)``."""
    return problem.xp.sum(decay_of_rows(problem, rows), axis=(-2, -1))


# Tasks: slices along the leading axes, with axes of 1 left whole ----------------------------------

Name = tuple[tuple[int | None, int | None], ...]


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
    state, exact, weights = problem.state, problem.exact, problem.weights
    bias, assigned = weights.relative_bias, exact.assigned
    if bias is not None:
        weights = weights._replace(relative_bias=RelativeBias(take(bias.table, 1, task)))
    if assigned is not None:
        exact = exact._replace(assigned=assigned.of_task(task))
    part = problem.replace(
        query=take(problem.query, 2, task),
        query_spec=_take_spec(problem.query_spec, task),
        key_spec=_take_spec(problem.key_spec, task),
        state_lead=_take_lead(problem.state_lead, task),
        lead=_take_lead(problem.lead, task),
        query_change=_take_spec(problem.query_change, task),
        key_change=_take_spec(problem.key_change, task),
        state=None if state is None else take_state(state, task),
        sees=problem.sees._replace(key_stop=_take_stops(problem.sees.key_stop, task)),
        weights=weights,
        exact=exact,
    )
    return change_keys(part, lambda rows: take(rows, 2, task))


def change_keys(problem: Problem, change: Callable[[Array], Array]) -> Problem:
    """Apply ``change`` to every array that has a row for each key."""
    key, value = change(problem.key), change(problem.value)
    return problem.replace(key=key, value=value, weights=problem.weights.of_keys(change))


def _take_stops(stops: Any, task: Index) -> Any:
    """Take the ``key_stop`` of a task, as ``(L,)`` if all its heads share one."""
    part = take(stops, 1, task)
    return part if part is None or part.size != part.shape[-1] else part.reshape(-1)


def take_rows(problem: Problem, rows: slice) -> Problem:
    """Take some queries and the keys beside them; one decay for all tokens stays whole."""
    length = problem.key.shape[-2]

    def part(array: Array) -> Array:
        return array if array.shape[-2] < length else array[..., rows, :]

    return change_keys(problem.replace(query=problem.query[..., rows, :]), part)


def rows_at(rows: Array, index: NDArray[np.int64]) -> Array:
    """Rows ``(..., n, w)`` at places that the host has chosen."""
    xp = namespace(rows)
    return xp.take(rows, xp.asarray(index, device=array_api_compat.device(rows)), axis=-2)


def take_state(state: State, task: Index) -> State:
    return State(take(state.kvz, 2, task), take(state.log_scale, 1, task), state.length)

"""Blocks of a problem: tokens on the way in, rows on the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import array_api_compat

from linattn import _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.tasks import task_index
from linattn._driver.wrappers import innermost
from linattn._generic import divide, values_block
from linattn.typing import (
    ELU_PLUS_ONE,
    RELU,
    Array,
    Index,
    Opaque,
    Partial,
    Pointwise,
    Problem,
    State,
    Tokens,
)

__all__ = [
    "OutputRows",
    "add_block",
    "block_slices",
    "in_map_coordinates",
    "numerators",
    "raw_tokens",
    "token_block",
    "transient_values_block",
    "values_and_one_block",
]

OWN_ACTIVATIONS = (ELU_PLUS_ONE, RELU)
"""Activations of linattn; any other, whatever its name, may be a caller's function."""


def block_slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def raw_tokens(problem: Problem, side: str, rows: slice, start: int) -> Tokens:
    """Tokens of one block as they came, with their biases; masked keys are zeros of -inf."""
    xp = problem.xp
    source = problem.query if side == "query" else problem.key
    x = source[..., rows, :]
    if x.dtype != problem.dtype:
        x = xp.astype(x, problem.dtype)
    if side == "query":
        return Tokens(x, None, start + rows.start + problem.query_start)
    bias = None if problem.key_bias is None else problem.key_bias[..., rows, :]
    if problem.key_mask is None:
        return Tokens(x, bias, start + rows.start)
    mask = problem.key_mask[..., rows, :]
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
    return values_block(*_values(problem, rows))


def numerators(problem: Problem, part: Partial) -> Array:
    """Numerators on the true scale; 0 is 0 on any, one that overflows included."""
    # In two steps, of which neither overflows or underflows where the result does not.
    numerator, factor = part.num_den[..., :-1], problem.xp.exp(part.log / 2)
    scaled = numerator * factor * factor
    return problem.xp.where(numerator == 0, problem.xp.zeros_like(scaled), scaled)


def transient_values_block(problem: Problem, rows: slice, functions: BlockFunctions) -> Array:
    """Make the same for one use: the next call may write over it.

    The next call must not be one that a feature map makes before this use is over.
    """
    if _calls_out(problem):
        return values_and_one_block(problem, rows)
    return functions.values_block(*_values(problem, rows))


def add_block(
    problem: Problem, rows: slice, tokens: Tokens, state: State, functions: BlockFunctions
) -> State:
    """Add a block of keys, and their values, to a state."""
    if _calls_out(problem):
        values_and_one = values_and_one_block(problem, rows)
        return functions.reduce_block(problem.key_spec, tokens, values_and_one, state)  # type: ignore[no-any-return]
    value, mask, _ = _values(problem, rows)
    return functions.reduce_values(problem.key_spec, tokens, value, mask, state)  # type: ignore[no-any-return]


def _calls_out(problem: Problem) -> bool:
    """Whether a map holds a function, which may be a caller's and use attention itself."""
    return _holds_function(problem.key_spec) or _holds_function(problem.query_spec)


def _holds_function(spec: Any) -> bool:
    spec = innermost(spec)
    return isinstance(spec, Opaque) or (
        isinstance(spec, Pointwise) and spec.f not in OWN_ACTIVATIONS
    )


def _values(problem: Problem, rows: slice) -> tuple[Array, Array, Any]:
    mask = None if problem.key_mask is None else problem.key_mask[..., rows, :]
    return problem.value[..., rows, :], mask, problem.dtype


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
        if array is None and (not problem.lazy or 0 in self._shape):
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
        """Put what is read and divided, by a function that is given its place."""
        where = self._where(task, rows)
        assert self._array is not None
        self._store(where, read(self._array[where]))

    def _store(self, where: tuple[slice, ...], out: Array | None) -> None:
        if out is not None:
            assert self._array is not None
            self._array[where] = self._xp.astype(out, self._dtype, copy=False)

    @property
    def divides_reads(self) -> bool:
        """Whether rows may be read and divided at once, into their place."""
        return not (self._array is None or 0 in self._shape)

    def _where(self, task: Index, rows: slice) -> tuple[slice, ...]:
        return (*task_index(self._shape, 2, task)[:-2], rows, slice(None))

    def result(self) -> Array:
        if self._array is not None:
            return self._array
        return self._xp.concat([self._blocks[i] for i in sorted(self._blocks)], axis=-2)

"""Packed sequences: a problem with ``cu_seqlens`` is solved as problems of its sequences.

A long sequence is a problem of its own. Short sequences of about one length are batched along a new
axis after the axes of heads, so that a call of a block function serves many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions, find, is_declined
from linattn._driver.blocks import (
    change_keys,
    rows_at,
    take_problem,
    token_block,
    values_and_one_block,
)
from linattn._driver.runner import run_tasks
from linattn._driver.specs import for_sequences
from linattn.typing import Array, Cotangent, Index, Partial, Problem, RelativeBias, State

MAX_BATCH_ELEMENTS = 1 << 21
"""Numbers of the queries, keys and values that are copied for one batch."""

MAX_PADDED_SHARE, MIN_PADDED_TOKENS = 0.125, 256
"""Largest share of padding in a batch; tokens of padding that any batch may have."""


class Batch:
    """Some sequences of a packed problem, by their numbers, all padded to the longest."""

    def __init__(self, sequences: NDArray[np.int64], borders: NDArray[np.int64]) -> None:
        self.sequences = sequences
        self.starts = borders[sequences]
        self.lengths = borders[sequences + 1] - self.starts
        self.longest = int(self.lengths.max())

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def is_even(self) -> bool:
        """Whether all sequences have one length, so that none is padded."""
        return bool((self.lengths == self.longest).all())

    @cached_property
    def is_slice(self) -> bool:
        """Whether the sequences are one slice of the packed axis."""
        return self.is_even and bool((np.diff(self.starts) == self.longest).all())

    def gather(self, rows: Array) -> Array:
        """Rows of the sequences, ``(..., T, w)`` to ``(..., g, n, w)``, without g for a single one.

        A shorter sequence is padded with copies of its last row.
        """
        if rows is None:
            return None
        xp, first = array_api_compat.array_namespace(rows), int(self.starts[0])
        if self.is_slice:
            taken = rows[..., first : first + len(self) * self.longest, :]
        else:
            last = (self.starts + self.lengths - 1)[:, None]
            index = np.minimum(self.starts[:, None] + np.arange(self.longest), last)
            taken = rows_at(rows, index.ravel())
        if len(self) == 1:
            return taken
        shape = (*rows.shape[:-2], len(self), self.longest, rows.shape[-1])
        if not self.longest:
            # Dask cannot reshape an empty array.
            return xp.broadcast_to(taken[..., None, :, :], shape)
        return xp.reshape(taken, shape)

    def rows(self, like: Array) -> Array:
        """Return which rows are tokens and no padding, ``(g, n, 1)``."""
        xp = array_api_compat.array_namespace(like)
        host = np.arange(self.longest) < self.lengths[:, None]
        return xp.asarray(host[..., None], device=array_api_compat.device(like))

    def take(self, state: Any) -> Any:
        """Return the states of this batch, with their axis after the heads, as in a problem."""
        if state is None:
            return None
        return State(self._of_batch(state.kvz, 2), self._of_batch(state.log_scale, 1), state.length)

    def _of_batch(self, each: Array, trailing: int) -> Array:
        if len(self) == 1:
            return each[int(self.sequences[0]), ...]
        xp = array_api_compat.array_namespace(each)
        index = xp.asarray(self.sequences, device=array_api_compat.device(each))
        return _arrays.moveaxis(xp.take(each, index, axis=0), 0, -trailing - 1)

    def problem(self, problem: Problem, *, keeps_state: bool) -> Problem:
        """Return the problem of these sequences; padding is masked where it could be seen."""
        window, bias = problem.exact.window, problem.weights.relative_bias
        part = change_keys(problem, lambda rows: self._rows_of(problem, rows))
        weights = part.weights
        if (keeps_state or problem.sees.ahead) and not self.is_even:
            xp, valid = problem.xp, self.rows(problem.key)
            mask, decay = weights.key_mask, weights.log_decay
            if decay is not None:
                decay = xp.where(valid, decay, xp.zeros_like(decay))
            mask = valid if mask is None else mask & valid
            weights = weights._replace(key_mask=mask, log_decay=decay)
        more: dict[str, Any] = {}
        if len(self) > 1:
            axes = {"query": len(problem.lead), "key": len(problem.state_lead)}
            more = {
                f"{side}_{part}": for_sequences(getattr(problem, f"{side}_{part}"), ndim)
                for side, ndim in axes.items()
                for part in ("spec", "change")
            }
            more["state_lead"] = (*problem.state_lead, len(self))
            more["lead"] = (*problem.lead, len(self))
            if bias is not None:
                weights = weights._replace(relative_bias=RelativeBias(bias.table[..., None, :]))
        if window is not None:
            more["exact"] = problem.exact._replace(window=min(window, max(1, self.longest)))
        return part.replace(
            query=self.gather(problem.query),
            state=self.take(problem.state),
            sees=problem.sees._replace(cu_seqlens=None),
            weights=weights,
            **more,
        )

    def _rows_of(self, problem: Problem, array: Array) -> Array:
        if array.shape[-2] == problem.key.shape[-2]:
            return self.gather(array)
        # One decay for all tokens.
        if len(self) == 1:
            return array
        shape = (*array.shape[:-2], len(self), *array.shape[-2:])
        return problem.xp.broadcast_to(array[..., None, :, :], shape)

    def cotangent(self, cotangent: Cotangent) -> Cotangent:
        """Return the cotangent of these sequences, 0 for padding."""
        output = self.gather(cotangent.output)
        if not self.is_even:
            xp = array_api_compat.array_namespace(output)
            output = xp.where(self.rows(output), output, xp.zeros_like(output))
        return Cotangent(output, self.take(cotangent.state))


def batches(problem: Problem, sequences: NDArray[np.int64] | None = None) -> Iterator[Batch]:
    """Yield batches of the given sequences, or of all; each batch is of about one length."""
    borders = problem.sees.cu_seqlens
    assert borders is not None
    lengths = np.diff(borders)
    order = np.argsort(lengths, kind="stable")
    if sequences is not None:
        order = order[np.isin(order, sequences)]
    width = 2 * problem.query.shape[-1] + problem.value.shape[-1]
    most = MAX_BATCH_ELEMENTS // max(1, width * prod(problem.lead))
    # Dask's tasks call the map, whose heads must be the last axis before the tokens.
    one_by_one = array_api_compat.is_dask_array(problem.query) and _has_heads(problem)
    first = tokens = 0
    is_slice = True
    ordered = lengths[order].tolist()
    for i, n in enumerate(ordered):
        padded = n * (i + 1 - first) - tokens - n
        allowed = max(MAX_PADDED_SHARE * tokens, MIN_PADDED_TOKENS)
        # A batch that is one slice is not copied.
        goes_on = i == first or (is_slice and order[i] == order[i - 1] + 1 and padded == 0)
        is_full = n * (i + 1 - first) > most and not goes_on
        ends = is_full or padded > allowed or (n > 0) != (ordered[first] > 0)
        if i > first and (one_by_one or ends):
            yield Batch(order[first:i], borders)
            first, tokens, goes_on = i, 0, True
        is_slice = goes_on
        tokens += n
    if len(order) > first:
        yield Batch(order[first:], borders)


def _has_heads(problem: Problem) -> bool:
    """Whether parameters of the map have leading axes."""
    names = ("query_spec", "key_spec", "query_change", "key_change")
    specs = [getattr(problem, name) for name in names]
    return problem.feature_map is not None and any(
        _generic.spec_lead(spec) for spec in specs if spec is not None
    )


class PackedRows:
    """Where rows of batches go: a preallocated array, or a list for arrays that cannot be set."""

    def __init__(self, problem: Problem, shape: tuple[int, ...], dtype: Any) -> None:
        self._xp, self._shape = problem.xp, shape
        self._blocks: list[Array] = []
        self._index, self._filled = np.zeros(shape[-2], dtype=np.int64), 0
        self._array = None
        if not problem.policy.lazy or 0 in shape:
            device = array_api_compat.device(problem.query)
            self._array = problem.xp.empty(shape, dtype=dtype, device=device)

    @property
    def array(self) -> Array | None:
        """Where all rows go, None for a list."""
        return self._array

    def place_of(self, batch: Batch) -> Array | None:
        """View ``(..., g, n, w)`` of where rows of a batch go; None where they must be copied."""
        if not isinstance(self._array, np.ndarray) or not batch.is_slice or 0 in self._shape:
            return None
        first, count = int(batch.starts[0]), len(batch) * batch.longest
        view = self._array[..., first : first + count, :]
        if len(batch) == 1:
            return view
        return view.reshape(*self._shape[:-2], len(batch), batch.longest, self._shape[-1])

    def write(self, batch: Batch, rows: Array) -> None:
        """Put rows ``(..., g, n, w)`` of a batch where its sequences are."""
        if 0 in self._shape or not batch.longest:
            return
        ends = (batch.starts + batch.lengths).tolist()
        places = list(map(slice, batch.starts.tolist(), ends))
        if self._array is None:
            flat = (*self._shape[:-2], len(batch) * batch.longest, self._shape[-1])
            self._blocks.append(self._xp.reshape(rows, flat))
            for i, place in enumerate(places):
                first = self._filled + i * batch.longest
                self._index[place] = np.arange(first, first + place.stop - place.start)
            self._filled += flat[-2]
        elif batch.is_slice:
            place = slice(places[0].start, places[-1].stop)
            self._array[..., place, :] = self._xp.reshape(rows, self._array[..., place, :].shape)
        else:
            for i, place in enumerate(places):
                self._array[..., place, :] = rows[..., i, : place.stop - place.start, :]

    def result(self) -> Array:
        if self._array is not None:
            return self._array
        return rows_at(self._xp.concat(self._blocks, axis=-2), self._index)


def join_states(problem: Problem, parts: list[tuple[Batch, State]]) -> State:
    """Put the states of batches into one, the sequences along its first axis."""
    kvz = join_sequences(problem, [(batch, state.kvz) for batch, state in parts], 2)
    scales = [(batch, state.log_scale) for batch, state in parts]
    length = max(state.length for _, state in parts)
    return State(kvz, join_sequences(problem, scales, 1), length)


def join_sequences(problem: Problem, parts: list[tuple[Batch, Array]], trailing: int) -> Array:
    """Join arrays of batches along a first axis of sequences; ``trailing``: axes after the lead."""
    xp = problem.xp
    stacked = [
        array[None, ...] if len(batch) == 1 else _arrays.moveaxis(array, -trailing - 1, 0)
        for batch, array in parts
    ]
    order = np.argsort(np.concatenate([batch.sequences for batch, _ in parts]))
    index = xp.asarray(order, device=array_api_compat.device(stacked[0]))
    return xp.take(xp.concat(stacked, axis=0), index, axis=0)


# Short sequences without a copy -------------------------------------------------------------------


def solve_short(
    problem: Problem,
    functions: BlockFunctions,
    write: Callable[[Index, slice, Partial], None],
) -> NDArray[np.int64]:
    """Solve sequences no longer than a block side by side; return the numbers of all others.

    The others are long sequences and runs that the backend declines; all, if no backend has the
    function.
    """
    lengths = np.diff(problem.sees.cu_seqlens)
    left, block = np.ones(len(lengths), bool), _block_function(problem, functions)
    if block is None:
        return np.flatnonzero(left)
    plan = functions.plan(problem)

    def solve_block(item: tuple[Index, slice]) -> Iterator[None]:
        task, run = item
        part, borders = take_problem(problem, task), problem.sees.cu_seqlens
        rows = slice(int(borders[run.start]), int(borders[run.stop]))
        query, key = (token_block(part, side, rows, 0) for side in ("query", "key"))
        values = values_and_one_block(part, rows)
        specs = part.query_spec, part.key_spec
        causal = not part.sees.ahead
        answer = block(*specs, query, key, values, lengths[run], causal, part.want_log)
        if is_declined(answer):
            declined.append(run)
        else:
            write(task, rows, answer)
        yield

    declined: list[slice] = []
    blocks = _side_by_side(lengths, plan.block_size)
    tasks: Any = list(product(plan.tasks, blocks))
    run_tasks(plan._replace(tasks=tasks), solve_block)  # type: ignore[arg-type]
    for run in blocks:
        left[run] = False
    for run in declined:
        left[run] = True
    return np.flatnonzero(left)


def _block_function(problem: Problem, functions: BlockFunctions) -> Any:
    """Return the backend's function for such blocks; None where it has none for this problem."""
    is_served = not {*problem.modifiers} - {"key_bias", "normalize"}
    if not is_served or problem.policy.lazy or problem.mode not in ("full", "causal"):
        return None
    reasons = problem.state, problem.policy.chunk_size, find("attention", problem.xp)
    if any(reason is not None for reason in reasons):
        return None
    return functions.backend_alone("sequences_block")


def _side_by_side(lengths: NDArray[np.int64], most: int) -> list[slice]:
    """Find runs of short sequences, as few as may be: of about one length, at most twice it."""
    is_short = (lengths > 0) & (lengths <= most)
    tokens = np.where(is_short, lengths, 0)
    total = int(tokens.sum())
    # By the middle of each sequence.
    number = (2 * tokens.cumsum() - tokens) * -(-total // most) // max(1, 2 * total)
    found: list[slice] = []
    for i in np.flatnonzero(is_short).tolist():
        if found and found[-1].stop == i and number[i] == number[i - 1]:
            found[-1] = slice(found[-1].start, i + 1)
        else:
            found.append(slice(i, i + 1))
    return found

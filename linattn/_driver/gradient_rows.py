"""Rows of gradients: summed over the axes along which an argument was broadcast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import array_api_compat

from linattn._driver.tasks import Name, task_index, task_name
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Array, Index, Problem

__all__ = ["GradientRows"]


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

    Where several tasks add to one row, they do it one at a time in the accumulation dtype and in
    the order of the tasks, whichever is done first: sums are the same in every bit from run to run.
    A share that comes early is held until it is next, so that no task waits: of tasks that run
    side by side, a part of a head's gradient each.
    """

    def __init__(self, problem: Problem, like: Array, tasks: Sequence[Index]) -> None:
        self._xp, self._dtype = problem.xp, like.dtype
        self._shape = tuple(like.shape)
        self._blocks: dict[int, Array] = {}
        self._array = None
        self._lock = Lock()
        lead = self._shape[:-2]
        self._shared = len(tasks) > 1 and any(
            n > 1 and (back > len(lead) or lead[-back] == 1)
            for back, n in enumerate(reversed(problem.state_lead), start=1)
        )
        self._order: dict[Name, int] = {}
        self._sums: dict[tuple[Name, int], _OrderedSum] = {}
        if self._shared:
            count: Counter[Name] = Counter()
            for task in tasks:
                place = task_name(task_index(lead, 0, task))
                self._order[task_name(task)] = count[place]
                count[place] += 1
        if not problem.lazy or 0 in self._shape:
            device = array_api_compat.device(like)
            dtype = problem.dtype if self._shared else like.dtype
            self._array = problem.xp.zeros(self._shape, dtype=dtype, device=device)

    def write(self, task: Index, rows: slice, block: Array) -> None:
        xp = self._xp
        if self._array is None:
            block = sum_to(block, self._shape[:-2], 2)
            self._blocks[rows.start] = xp.astype(block, self._dtype, copy=False)
            return
        if 0 in self._shape:
            return
        index = (*task_index(self._shape, 2, task)[:-2], rows, slice(None))
        block = sum_to(block, tuple(self._array[index].shape[:-2]), 2)
        if self._shared:
            place = task_name(index[: len(self._shape) - 2]), rows.start
            with self._lock:
                sums = self._sums.setdefault(place, _OrderedSum())
                for share in sums.shares(self._order[task_name(task)], block, xp):
                    self._array[index] += share
        else:
            self._array[index] = xp.astype(block, self._dtype, copy=False)

    def result(self) -> Array:
        if self._array is None:
            ordered = [self._blocks[start] for start in sorted(self._blocks)]
            return self._xp.concat(ordered, axis=-2)
        return self._xp.astype(self._array, self._dtype, copy=False)

"""Threads that live from call to call, with their buffers.

A thread that is made for one call pays for its start and for fresh pages.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache
from typing import Any, TypeAlias

from linattn_numpy import tuning
from linattn_numpy.blas import blas

Work: TypeAlias = Callable[[Any], Iterable[Any] | None]

_here = threading.local()


@cache
def _pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, "linattn")


if hasattr(os, "register_at_fork"):
    # A child of fork() has none of the parent's threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)


limited_threads = blas.one_thread
"""Hold BLAS at one thread between blocks too, as :func:`run` does within them."""


class _TaskQueue:
    """A queue of tasks for several threads; the last tasks run in round robin over their steps."""

    def __init__(self, threads: int, work: Work, tasks: Sequence[Any]) -> None:
        self._max_round_robin = tuning.ROUND_ROBIN_TASKS * threads
        self._pending = deque(_steps(work, task) for task in tasks)
        self._lock = threading.Lock()

    def drain(self) -> None:
        """Work on this thread until no task is left; an error empties the queue."""
        _here.busy = True
        try:
            while (steps := self._next()) is not None:
                for _ in steps:
                    if self._put_back(steps):
                        break
        except BaseException:
            with self._lock:
                self._pending.clear()
            raise
        finally:
            _here.busy = False

    def _next(self) -> Iterator[Any] | None:
        with self._lock:
            return self._pending.popleft() if self._pending else None

    def _put_back(self, steps: Iterator[Any]) -> bool:
        """Queue a task behind the others if few are left."""
        with self._lock:
            few = 0 < len(self._pending) < self._max_round_robin
            if few:
                self._pending.append(steps)
            return few


def _steps(work: Work, task: Any) -> Iterator[Any]:
    yield from work(task) or ()


def run(threads: int, work: Work, tasks: Sequence[Any]) -> None:
    """Call ``work(task)`` for each task on ``threads`` threads, one of them the caller's.

    ``work`` may return an iterator, which is then exhausted. The last few tasks run in round robin,
    one step at a time, so that a thread on a slow core ends with the others.

    A call within a task runs on the thread of that task, so that no two threads wait for each
    other. The first error is raised when all threads have stopped.
    """
    # One BLAS thread even for one of ours: a block is too small to be divided, and two threads of
    # BLAS on busy cores wait for each other.
    threads = min(threads, len(tasks))
    with blas.one_thread():
        if threads <= 1 or getattr(_here, "busy", False):
            for task in tasks:
                for _ in _steps(work, task):
                    pass
        else:
            _share(threads - 1, _TaskQueue(threads, work, tasks))


def _share(helpers: int, queue: _TaskQueue) -> None:
    """Drain a queue on this thread and on ``helpers`` others."""
    pool = _pool(helpers)
    futures = []
    try:
        for _ in range(helpers):
            # A context each: settings of the caller hold in all of them.
            futures.append(pool.submit(copy_context().run, queue.drain))
        queue.drain()
    finally:
        # An interrupt may have fallen where ``drain`` says so.
        _here.busy = False
        # Helpers that have not begun have nothing left to do.
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()

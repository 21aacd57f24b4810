"""Threads that are kept from call to call, with the buffers that they have filled.

A thread that is made for one call pays for its start and for fresh pages: together as much as
attention over a thousand tokens.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from linattn_numpy.blas import blas
from linattn_numpy.tuning import ROUND_ROBIN_TASKS

__all__ = ["limited_threads", "run"]

_here = threading.local()
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def _forget() -> None:
    # A child of fork() has none of the parent's threads.
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _pool(helpers: int) -> ThreadPoolExecutor:
    with _lock:
        if helpers not in _pools:
            _pools[helpers] = ThreadPoolExecutor(helpers, "linattn")
        return _pools[helpers]


@contextmanager
def limited_threads() -> Iterator[None]:
    """Keep what is computed between blocks to the one BLAS thread that blocks are computed with."""
    limit = blas.one_thread()
    try:
        with limit:
            yield
    finally:
        limit.give_back()


def _steps(work: Callable[[Any], Iterable[Any] | None], task: Any) -> Iterator[Any]:
    yield from work(task) or ()


def run(threads: int, work: Callable[[Any], Iterable[Any] | None], tasks: Sequence[Any]) -> None:
    """Call ``work(task)`` for each task on so many threads, the caller's among them.

    What it returns may be an iterator: the task is done when that is. The last few tasks are taken
    in turns, a step at a time, so that a thread on a slow core ends with the others: of eight heads
    of 16,384 tokens, a task each, one thread ended after 140 ms and the other after 171.

    A call from within a task is done by the thread that it is on: no thread waits for another that
    waits for it. The first error is raised when all threads have stopped.
    """
    # One BLAS thread even for one of ours: a block is too small to share out. Two waited for each
    # other: 275 ms for a head of 16,384 tokens on two busy cores, where one took 37 ms.
    threads = min(threads, len(tasks))
    limit = blas.one_thread()
    try:
        with limit:
            _share(threads, work, tasks)
    finally:
        limit.give_back()


def _share(threads: int, work: Callable[[Any], Iterable[Any] | None], tasks: Sequence[Any]) -> None:
    if threads <= 1 or getattr(_here, "busy", False):
        for task in tasks:
            for _ in _steps(work, task):
                pass
        return
    left, lock = deque(_steps(work, task) for task in tasks), threading.Lock()

    def drain() -> None:
        _here.busy = True
        try:
            while True:
                with lock:
                    if not left:
                        return
                    steps = left.popleft()
                for _ in steps:
                    with lock:
                        if 0 < len(left) < ROUND_ROBIN_TASKS * threads:
                            left.append(steps)
                            break
        except BaseException:
            with lock:
                left.clear()
            raise
        finally:
            _here.busy = False

    helpers = threads - 1
    pool = _pool(helpers)
    # A context each: settings of the caller hold in all of them.
    futures = []
    try:
        for _ in range(helpers):
            futures.append(pool.submit(copy_context().run, drain))
        drain()
    finally:
        # An interrupt may have fallen where ``drain`` says so.
        _here.busy = False
        # Helpers that have not begun have nothing left to do.
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()

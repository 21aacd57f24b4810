"""One BLAS thread while Python threads do the work, and the user's own setting afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Blas", "blas"]


class Blas:
    """The process-wide limit on BLAS threads, taken by the first user and given back by the last.

    Without threadpoolctl (extra ``threads``) BLAS is left alone.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._mine = threading.local()
        self._limit: Any = None
        self._controller: Any = None
        self._looked = False
        if hasattr(os, "register_at_fork"):
            # Nobody is half way through taking or giving back while a process is copied.
            os.register_at_fork(
                before=lambda: self._lock.acquire(),
                after_in_parent=lambda: self._lock.release(),
                after_in_child=self._after_fork,
            )

    def _after_fork(self) -> None:
        """Keep what the thread that forked holds: a child of fork() has no other."""
        self._lock = threading.RLock()
        self._users = getattr(self._mine, "users", 0)
        self._give_back()

    def _give_back(self) -> None:
        if self._users == 0 and self._limit is not None:
            self._limit.restore_original_limits()
            self._limit = None

    def controller(self) -> Any:
        """Return a threadpoolctl controller, or None where it is not installed."""
        with self._lock:
            if not self._looked:
                self._looked = True
                try:
                    from threadpoolctl import ThreadpoolController
                except ImportError:
                    return None
                self._controller = ThreadpoolController().select(user_api="blas")
            return self._controller

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Hold BLAS at one thread."""
        controller = self.controller()
        with self._lock:
            self._count(1)
            if self._users == 1 and controller is not None:
                self._limit = controller.limit(limits=1)
        try:
            yield
        finally:
            with self._lock:
                self._count(-1)
                self._give_back()

    def _count(self, more: int) -> None:
        self._users += more
        self._mine.users = getattr(self._mine, "users", 0) + more


blas = Blas()

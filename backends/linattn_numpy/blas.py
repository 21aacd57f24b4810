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
        self._reset()
        self._controller: Any = None
        self._looked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # A child of fork() has none of the parent's threads: nobody else holds the limit there.
        self._lock = threading.Lock()
        self._users = 0
        self._limit: Any = None

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
            self._users += 1
            if self._users == 1 and controller is not None:
                self._limit = controller.limit(limits=1)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._limit is not None:
                    self._limit.restore_original_limits()
                    self._limit = None


blas = Blas()

"""One BLAS thread while Python threads do the work, and the user's own setting afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@cache
def controller() -> Any:
    """Return a threadpoolctl controller, or None where it is not installed."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController().select(user_api="blas")


class Blas:
    """The process-wide limit on BLAS threads, taken by the first user and given back by the last.

    Without threadpoolctl (extra ``threads``) BLAS is left alone. An interrupt may come anywhere, so
    a user is recorded before BLAS is changed, and removed after BLAS is restored.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: dict[object, int] = {}
        self._before: list[tuple[Any, int]] = []
        if hasattr(os, "register_at_fork"):
            # No thread takes BLAS or gives it back while the process is copied.
            os.register_at_fork(
                before=lambda: self._lock.acquire(),
                after_in_parent=lambda: self._lock.release(),
                after_in_child=self._after_fork,
            )

    def _after_fork(self) -> None:
        """Keep the users of the thread that forked: a child of fork() has no other thread."""
        self._lock = threading.RLock()
        here = threading.get_ident()
        self._users = {user: thread for user, thread in self._users.items() if thread == here}
        if not self._users:
            self._restore()

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Hold BLAS at one thread."""
        user = object()
        try:
            try:
                self.take(user)
                yield
            finally:
                self.give_back(user)
        finally:
            # An interrupt may have fallen where the other one begins.
            self.give_back(user)

    def take(self, user: object) -> None:
        """Add a user; the first sets BLAS to one thread."""
        found = controller()
        with self._lock:
            self._users[user] = threading.get_ident()
            if len(self._users) == 1 and found is not None:
                all_threads = [(lib, lib.num_threads) for lib in found.lib_controllers]
                self._before = [each for each in all_threads if each[1] != 1]
                for library, _ in self._before:
                    library.set_num_threads(1)

    def give_back(self, user: object) -> None:
        """Remove a user, if it was added; the last restores the threads of BLAS."""
        if user in self._users:
            with self._lock:
                if len(self._users) == 1:
                    self._restore()
                self._users.pop(user, None)

    def _restore(self) -> None:
        for library, number in self._before:
            library.set_num_threads(number)
        self._before = []


blas = Blas()

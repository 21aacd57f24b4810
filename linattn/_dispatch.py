"""Which code runs: backends found by entry point, with the generic code as fallback."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from linattn import _arrays, _generic
from linattn.typing import Declined

__all__ = [
    "BlockFunctions",
    "is_declined",
    "limited_threads",
    "registered_backends",
    "whole_function",
    "without_backends",
]

GROUP = "linattn.backends"


_backends_on: ContextVar[bool] = ContextVar("linattn_backends_on", default=True)


@contextmanager
def without_backends() -> Iterator[None]:
    """Run the generic array-API code for every library inside a ``with`` block.

    Results agree with a backend's to rounding; use it to check a backend, or to rule one out.

    Examples
    --------
    >>> import linattn
    >>> with linattn.without_backends():
    ...     pass
    """
    token = _backends_on.set(False)
    try:
        yield
    finally:
        _backends_on.reset(token)


@functools.cache
def _entry_points() -> dict[str, str]:
    # Here and not at the top: it costs a third of what importing numpy does.
    from importlib.metadata import entry_points

    found: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry.value)
        if other != entry.value:
            message = (
                f"two packages register a linattn backend for {entry.name!r}: {other} and "
                f"{entry.value}; uninstall one of them"
            )
            raise RuntimeError(message)
    return found


def registered_backends() -> dict[str, str]:
    """Return the registered backends: root module of an array library -> backend module.

    Nothing is imported. A package registers one by an entry point of group
    ``linattn.backends``.

    Raises
    ------
    RuntimeError
        Two packages claim the same array library.

    Examples
    --------
    >>> import linattn
    >>> linattn.registered_backends()["numpy"]
    'linattn_numpy'
    """
    return dict(_entry_points())


@functools.cache
def _load(module_name: str) -> ModuleType:
    return importlib.import_module(module_name)


def _backend(xp: ModuleType) -> ModuleType | None:
    if not _backends_on.get():
        return None
    module_name = _entry_points().get(_arrays.library_name(xp))
    return None if module_name is None else _load(module_name)


def is_declined(answer: Any) -> bool:
    """Whether a backend's function leaves its problem to the generic code."""
    return answer is NotImplemented or isinstance(answer, Declined)


class BlockFunctions:
    """Functions of the block tier for one array library, each looked up at its first use.

    An attribute is the backend's function, with the generic one as fallback. A generic function
    that calls others of the tier (:data:`linattn._generic.CALLS`) is given those found here.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._module = _backend(xp)

    def backend_alone(self, name: str) -> Callable[..., Any] | None:
        """Return the backend's own function, or None: for what is done otherwise without it."""
        function: Callable[..., Any] | None = getattr(self._module, name, None)
        return function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        fallback: Callable[..., Any] = getattr(_generic, name)
        called = _generic.CALLS.get(name, ())
        if called:
            fallback = partial(fallback, **{other: getattr(self, other) for other in called})
        own = self.backend_alone(name)

        def own_or_generic(*args: Any) -> Any:
            result = own(*args)  # type: ignore[misc]
            return fallback(*args) if is_declined(result) else result

        function = fallback if own is None else own_or_generic
        # An attribute of its own: the next use does not come here.
        setattr(self, name, function)
        return function


def whole_function(name: str, xp: ModuleType) -> Callable[..., Any] | None:
    """Return a function of the backend's whole tier, or None where it has none."""
    function: Callable[..., Any] | None = getattr(_backend(xp), name, None)
    return function


def limited_threads() -> AbstractContextManager[Any]:
    """Context for what the core computes with NumPy itself, whatever library its caller's is.

    The NumPy backend's, so that samples and fits are kept to the threads that its blocks are.
    """
    limited = getattr(_backend(np), "limited_threads", None)
    return nullcontext() if limited is None else limited()

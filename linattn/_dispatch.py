"""Which code runs: backends found by entry point, and the settings that a user may change."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from linattn import _checks, _generic

__all__ = [
    "Settings",
    "block_function",
    "config",
    "current_settings",
    "limited_threads",
    "registered_backends",
    "under",
    "whole_function",
    "without_backends",
]

GROUP = "linattn.backends"


class Settings(NamedTuple):
    """The numeric policy in force (:func:`config`)."""

    num_threads: int | None = None
    precision: str | None = None


DEFAULTS = Settings()
_settings: ContextVar[Settings] = ContextVar("linattn_settings", default=DEFAULTS)
_backends_on: ContextVar[bool] = ContextVar("linattn_backends_on", default=True)


def current_settings() -> Settings:
    """Return the settings in force."""
    return _settings.get()


@contextmanager
def config(num_threads: int | None = None, precision: str | None = None) -> Iterator[Settings]:
    """Change settings for the calls inside a ``with`` block.

    Parameters
    ----------
    num_threads : int, optional
        Threads that a backend may use. None leaves the setting as it is; where it was never set,
        the environment variable ``OMP_NUM_THREADS`` counts, then the number of cores.
    precision : {"float64", "tf32"}, optional
        ``"float64"`` accumulates in float64 whatever the input dtype; outputs keep the dtype of
        the inputs, states are float64. ``"tf32"`` lets the tensor cores of a GPU round the factors
        of float32 products to 10 bits after the point: CuPy arrays, nothing elsewhere. None leaves
        the setting as it is; where it was never set, float64 inputs are accumulated in float64 and
        all others in float32.

    Yields
    ------
    Settings
        The settings in force inside the block.

    Raises
    ------
    TypeError, ValueError
        ``num_threads`` is not a positive integer, or ``precision`` is unknown.

    Notes
    -----
    The settings live in a context variable: they hold for this thread (or task) only.

    Examples
    --------
    >>> import linattn
    >>> with linattn.config(num_threads=1) as settings:
    ...     settings.num_threads
    1
    """
    changed = current_settings()
    if num_threads is not None:
        count = _checks.check_positive_int("num_threads", num_threads)
        changed = changed._replace(num_threads=count)
    if precision is not None:
        if precision not in ("float64", "tf32"):
            message = f"precision must be 'float64', 'tf32' or None, got {precision!r}"
            raise ValueError(message)
        changed = changed._replace(precision=precision)
    with under(changed):
        yield changed


@contextmanager
def under(settings: Settings) -> Iterator[None]:
    """Put settings in force as a whole: those of an earlier call, for what is done about it."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


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
    module_name = _entry_points().get(_checks.library_name(xp))
    return None if module_name is None else _load(module_name)


def block_function(
    name: str, xp: ModuleType, generic: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function of the block tier: the backend's, with the generic one as fallback.

    The generic one is that of :mod:`linattn._generic`, or the one that is handed in.
    """
    behind: Callable[..., Any] = getattr(_generic, name) if generic is None else generic
    special = getattr(_backend(xp), name, None)
    if special is None:
        return behind

    def first_special(*args: Any) -> Any:
        result = special(*args)
        return behind(*args) if result is NotImplemented else result

    return first_special


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

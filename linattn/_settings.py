"""The numeric policy that a caller may change for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from linattn import _checks

__all__ = ["Settings", "config", "current_settings", "use_settings"]


class Settings(NamedTuple):
    """The numeric policy in force (:func:`config`)."""

    num_threads: int | None = None
    precision: str | None = None


DEFAULTS = Settings()


_settings: ContextVar[Settings] = ContextVar("linattn_settings", default=DEFAULTS)


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
    with use_settings(changed):
        yield changed


@contextmanager
def use_settings(settings: Settings) -> Iterator[None]:
    """Put settings in force as a whole: those of an earlier call, for what is done about it."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)

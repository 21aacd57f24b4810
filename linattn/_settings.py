"""Settings of the numerics, which a ``with`` block changes: threads and precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from linattn import _checks

__all__ = ["Settings", "config", "current_settings", "use_settings"]


class Settings(NamedTuple):
    """The settings in force (:func:`config`)."""

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
        Threads that a backend may use. None leaves the setting unchanged. Without a setting the
        environment variable ``OMP_NUM_THREADS`` counts, then the number of cores.
    precision : {"float64", "tf32"}, optional
        ``"float64"`` accumulates in float64 whatever the input dtype; outputs keep the dtype of
        the inputs, states are float64. ``"tf32"`` acts on CuPy arrays only: the tensor cores round
        the factors of float32 products to 10 bits after the point. None leaves the setting
        unchanged. Without a setting float64 inputs accumulate in float64, all others in float32.

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
    """Replace all settings inside a ``with`` block, for example by those of an earlier call."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)

"""Settings of the numerics, which a ``with`` block changes: threads and precision."""

from __future__ import annotations

import sys
from _thread import _local
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from linattn import _checks


class Settings(NamedTuple):
    """The settings in force (:func:`config`)."""

    num_threads: int | None = None
    precision: str | None = None


DEFAULTS = Settings()


_settings: ContextVar[Settings] = ContextVar("linattn_settings", default=DEFAULTS)


def current_settings() -> Settings:
    """Return the settings in force."""
    return _settings.get()


def config(
    num_threads: int | None = None, precision: str | None = None
) -> AbstractContextManager[Settings]:
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

    Returns
    -------
    context manager
        It yields the settings in force inside the block.

    Raises
    ------
    TypeError, ValueError
        ``num_threads`` is not a positive integer, or ``precision`` is unknown.

    Notes
    -----
    The settings live in a context variable: they hold for this thread (or task) only.

    Compiled code is compiled again under another precision: by ``torch.compile``, and by
    ``jax.jit`` and ``jax.checkpoint`` from JAX 0.7.2 on, if JAX was imported before the block. A
    program of ``torch.export`` keeps the precision of its export, and raises an error in a block
    that asks for another. ``torch.utils.checkpoint`` computes again in the backward pass: call
    ``backward()`` in the same block, or torch raises an error (not with ``use_reentrant=True``).

    Examples
    --------
    >>> import linattn
    >>> with linattn.config(num_threads=1) as settings:
    ...     settings.num_threads
    1
    """
    given: dict[str, Any] = {}
    if num_threads is not None:
        given["num_threads"] = _checks.check_positive_int("num_threads", num_threads)
    if precision is not None:
        if precision not in ("float64", "tf32"):
            raise ValueError(f"precision must be 'float64', 'tf32' or None, got {precision!r}")
        given["precision"] = precision
    return use_settings(current_settings()._replace(**given))


class _Shown(_local):
    """The precision in force, where torch compares it before it runs what it compiled."""

    precision: str | None = None


shown = _Shown()


@contextmanager
def changed(variable: ContextVar[Any], **changes: Any) -> Iterator[Any]:
    """Replace fields of the named tuple in a context variable inside a ``with`` block.

    An interrupt may come anywhere: the old value is known before the new one is set.
    """
    before = variable.get()
    now = before._replace(**changes)
    try:
        try:
            variable.set(now)
            yield now
        finally:
            variable.set(before)
    finally:
        # The interrupt may have come before the same line above.
        variable.set(before)


@contextmanager
def use_settings(settings: Settings) -> Iterator[Settings]:
    """Replace all settings inside a ``with`` block, for example by those of an earlier call."""
    before = shown.precision
    is_same = before == settings.precision
    with changed(_settings, **settings._asdict()):
        try:
            try:
                shown.precision = settings.precision
                with nullcontext() if is_same else _jax_keyed_by(settings.precision):
                    yield settings
            finally:
                shown.precision = before
        finally:
            shown.precision = before


def _jax_keyed_by(precision: str | None) -> AbstractContextManager[Any]:
    """Return a context in which JAX takes nothing that it traced under another precision."""
    make = getattr(sys.modules.get("jax"), "make_user_context", None)
    return nullcontext() if make is None else _jax_context(make)(precision)


@cache
def _jax_context(make: Any) -> Any:
    return make(None)

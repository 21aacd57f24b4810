"""Which code runs: backends found by entry point, with the generic code as fallback."""

from __future__ import annotations

import functools
import importlib
import textwrap
from _thread import allocate_lock  # `threading` would slow `import linattn` down
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from linattn import _arrays, _generic, _settings
from linattn.typing import Declined, Problem, Recurrence, WholeTier

GROUP = "linattn.backends"

# Not in each Explanation, which could not be copied.
_COUNTING = allocate_lock()


class Choice(NamedTuple):
    """Calls of one function that one code answered: a row of an :class:`Explanation`."""

    tier: str
    function: str
    code: str
    reason: str
    calls: int


class Explanation:
    """Which code ran inside ``with linattn.explain()``; printed, a table of 80 columns.

    Attributes
    ----------
    choices : tuple of Choice
        Rows in the order of the first call. ``tier`` is "whole" (one call for a problem), "block",
        or "call" for the row ``home`` of torch's and JAX's arrays, whose ``code`` is the library
        that computes in their memory; ``function`` is a name; ``calls`` counts. Else ``code``
        answered: a backend's module, ``"generic"``, or ``"driver"`` if a whole problem was cut into
        blocks. ``reason`` says why no backend answered, ``""`` if one did.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> x = np.ones((50, 8))
    >>> with linattn.explain() as report:
    ...     _ = linattn.linear_attention(x, x, x, linattn.feature_maps.EluFeatures())
    >>> report.ran("read_output")
    {'linattn_numpy'}
    """

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()

    def add(self, function: str, code: str, reason: str = "") -> None:
        """Count a call, from any thread of a plan."""
        with _COUNTING:
            self._calls[function, code, reason] += 1

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Rows, in the order of the first call."""
        with _COUNTING:
            calls = list(self._calls.items())
        return tuple(
            Choice(_tier(name), name, code, reason, count) for (name, code, reason), count in calls
        )

    def ran(self, function: str) -> set[str]:
        """Return which code answered calls of a function: modules, "generic", "driver"."""
        return {choice.code for choice in self.choices if choice.function == function}

    def __str__(self) -> str:
        """Table of 80 columns at most."""
        head = ("tier", "function", "ran", "calls", "why not the backend")
        rows = [head] + [(c.tier, c.function, c.code, str(c.calls), c.reason) for c in self.choices]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = []
        for row in rows:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
            first = "  ".join(cells) + "  "
            lines += textwrap.wrap(
                row[4], 80, initial_indent=first, subsequent_indent=" " * len(first)
            ) or [first.rstrip()]
        return "\n".join(lines)


HOME = "home"
"""Name of the row that says in which library a call runs."""


def _tier(name: str) -> str:
    if name == HOME:
        return "call"
    return "whole" if hasattr(WholeTier, name) else "block"


class _Mode(NamedTuple):
    """The switches that choose which code runs, and the report that records it."""

    backends: bool = True
    report: Explanation | None = None
    of_onnx: ModuleType | None = None
    """Backend of ndonnx, while a model is exported."""


DEFAULT = _Mode()
EMPTY = Declined("an axis has length 0")
_mode: ContextVar[_Mode] = ContextVar("linattn_mode", default=DEFAULT)


def without_backends() -> AbstractContextManager[Any]:
    """Run the generic array-API code for every library inside a ``with`` block.

    Results agree with a backend's to rounding; use it to check a backend, or to rule one out.

    Examples
    --------
    >>> import linattn
    >>> with linattn.without_backends():
    ...     pass
    """
    return _settings.changed(_mode, backends=False)


def with_operators(module: ModuleType | None) -> AbstractContextManager[Any]:
    """Let a module answer as the backend of ndonnx's arrays inside a ``with`` block."""
    return _settings.changed(_mode, of_onnx=module)


@contextmanager
def explain() -> Iterator[Explanation]:
    """Record which code answers the calls inside a ``with`` block, and why no faster one did.

    Yields
    ------
    Explanation
        The code that answered each function: a backend or the generic code. ``print(report)``
        shows a table.

    Notes
    -----
    Like all settings, the block acts on this thread (or task) and on the threads of its own plans.
    Inside two nested blocks only the inner one records. Without a block nothing is recorded, and no
    time is spent.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 100, 16))
    >>> phi = linattn.feature_maps.PositiveFeatures(16, num_features=32, rng=0)
    >>> with linattn.explain() as report:
    ...     output = linattn.linear_attention(query, key, value, phi)
    >>> report.ran("read_output")
    {'linattn_numpy'}
    """
    report = Explanation()
    with _settings.changed(_mode, report=report):
        yield report


@functools.cache
def _entry_points() -> dict[str, str]:
    # Here and not at the top: it costs a third of what importing numpy does.
    from importlib.metadata import entry_points

    found: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry.value)
        if other != entry.value:
            raise RuntimeError(
                f"two packages register a linattn backend for {entry.name!r}: {other} and "
                f"{entry.value}; uninstall one of them"
            )
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


def _backend(xp: ModuleType, mode: _Mode) -> ModuleType | None:
    if not mode.backends:
        return None
    if mode.of_onnx is not None and _arrays.library_name(xp) == "ndonnx":
        return mode.of_onnx
    module_name = _entry_points().get(_arrays.library_name(xp))
    return None if module_name is None else _load(module_name)


def uses_home(xp: ModuleType) -> bool:
    """Whether arrays of a library that has no backend may be computed at their home."""
    return _mode.get().backends and _arrays.library_name(xp) not in _entry_points()


def note_home(home: ModuleType, xp: ModuleType) -> None:
    """Record in the open explanation that a call runs in another library, on the same memory."""
    report = _mode.get().report
    if report is not None:
        report.add(HOME, _arrays.library_name(home), f"memory of {_arrays.library_name(xp)}")


def find(name: str, xp: ModuleType) -> Callable[..., Any] | None:
    """Return a backend's function unwrapped, or None if the backend lacks it."""
    function: Callable[..., Any] | None = getattr(_backend(xp, _mode.get()), name, None)
    return function


def is_declined(answer: Any) -> bool:
    """Whether a backend's function leaves its problem to the generic code."""
    return answer is NotImplemented or isinstance(answer, Declined)


def _is_empty(arguments: Sequence[Any]) -> bool:
    """Whether an array, or one in a tuple, has an axis of length 0."""
    for argument in arguments:
        if isinstance(argument, tuple):
            if _is_empty(argument):
                return True
        elif isinstance(shape := getattr(argument, "shape", None), tuple) and 0 in shape:
            return True
    return False


class BlockFunctions:
    """Functions of the block tier for one array library, each looked up at its first use.

    An attribute is the backend's function, with the generic one as fallback. A generic function
    that calls others of the tier (:data:`linattn._generic.CALLS`) receives the ones found here.
    Arrays without elements never reach a backend.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp, self._mode = xp, _mode.get()
        self._module = _backend(xp, self._mode)

    def backend_alone(self, name: str) -> Callable[..., Any] | None:
        """Return the backend's function without a fallback, or None if it has none."""
        return _alone(name, self._xp, self._mode, self._specific(name))

    def _specific(self, name: str) -> Callable[..., Any] | None:
        module = self._module
        if not hasattr(module, name):
            return None
        return lambda *args: EMPTY if _is_empty(args) else getattr(module, name)(*args)

    def note(self, name: str, answer: Any) -> None:
        """Record in the open explanation, if there is one, which code answered a call."""
        _tell(name, self._xp, self._mode, answer)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        fallback: Callable[..., Any] = getattr(_generic, name)
        called = _generic.CALLS.get(name, ())
        if called:
            fallback = partial(fallback, **{other: getattr(self, other) for other in called})
        specific = self._specific(name)
        if self._mode.report is not None:
            specific = _telling(name, self._xp, self._mode, specific)

        def specific_or_generic(*args: Any) -> Any:
            result = specific(*args)  # type: ignore[misc]
            return fallback(*args) if is_declined(result) else result

        function = fallback if specific is None else specific_or_generic
        # An attribute of its own: the next use does not come here.
        setattr(self, name, function)
        return function


def block_functions(xp: ModuleType) -> BlockFunctions:
    """Return the cached functions of the block tier for this namespace and mode."""
    mode = _mode.get()
    if mode.report is not None:
        return BlockFunctions(xp)
    return _functions_found(xp, _backend(xp, mode), mode)


@functools.lru_cache(16)
def _functions_found(xp: ModuleType, module: ModuleType | None, mode: _Mode) -> BlockFunctions:
    return BlockFunctions(xp)


def whole_function(name: str, problem: Problem | Recurrence) -> Callable[..., Any] | None:
    """Return a function of the backend's whole tier, or None where it has none for this problem.

    A backend older than a modifier of weights would ignore it, so such a backend is skipped.
    """
    mode, xp = _mode.get(), problem.xp
    backend = _backend(xp, mode)
    if mode.report is None and not hasattr(backend, name):
        return None
    served: Sequence[str] = getattr(backend, "modifiers", tuple)()
    modifiers = [name for name in problem.modifiers if name not in served]
    if not modifiers or backend is None:
        return _alone(name, xp, mode, getattr(backend, name, None))
    _tell(name, xp, mode, Declined(f"{', '.join(modifiers)} is for the driver"))
    return None


def _alone(
    name: str, xp: ModuleType, mode: _Mode, function: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    """Return a function without a fallback, whose calls the open explanation records."""
    if mode.report is None:
        return function
    telling = _telling(name, xp, mode, function)
    if function is None:
        telling()
        return None
    return telling


def _telling(
    name: str, xp: ModuleType, mode: _Mode, function: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return a function that records which code answers each call, and why no backend did."""
    backend = _backend(xp, mode)
    if not mode.backends:
        missing = Declined("inside without_backends()")
    elif backend is None:
        missing = Declined(f"no backend for {_arrays.library_name(xp)}")
    else:
        missing = Declined(f"{backend.__name__} has none")

    def told(*args: Any) -> Any:
        answer = missing if function is None else function(*args)
        _tell(name, xp, mode, answer)
        return answer

    return told


def note(name: str, xp: ModuleType, answer: Any) -> None:
    """Record in the open explanation whether the backend answered, or why it did not."""
    _tell(name, xp, _mode.get(), answer)


def _tell(name: str, xp: ModuleType, mode: _Mode, answer: Any) -> None:
    if mode.report is None:
        return
    backend = _backend(xp, mode)
    if backend is not None and not is_declined(answer):
        mode.report.add(name, backend.__name__)
        return
    declined = answer if isinstance(answer, Declined) else Declined("not said")
    by_driver = declined.by_head or hasattr(WholeTier, name)
    mode.report.add(name, "driver" if by_driver else "generic", declined.reason)


def limited_threads() -> AbstractContextManager[Any]:
    """Return a context that limits the threads of the core's own NumPy products.

    It is the NumPy backend's context: samples and fits use as many threads as blocks do.
    """
    limited = getattr(_backend(np, _mode.get()), "limited_threads", None)
    return nullcontext() if limited is None else limited()

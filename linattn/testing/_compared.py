"""Results of two implementations of a block function, on a common scale.

A state, a partial and a row's scale may have any log scale: the numbers that they represent are
compared, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Partial, State

Floats = NDArray[Any]


class WrongResultError(AssertionError):
    """What a function returned, raised or changed that its contract does not allow."""


def to_host(array: Any) -> NDArray[Any]:
    """Copy an array to NumPy; floating dtypes become float64."""
    host = np.array(_arrays.to_numpy(array))
    return host.astype(np.float64) if host.dtype.kind == "f" else host


def need(condition: object, message: str) -> None:
    """Raise unless a condition holds."""
    if not condition:
        raise WrongResultError(message)


def _close(what: str, got: Floats, want: Floats, allowed: Floats | float) -> None:
    need(got.shape == want.shape, f"{what} has shape {got.shape}, want {want.shape}")
    if not got.size:
        return
    error = np.abs(got - want)
    excess = np.where(np.isnan(error), np.inf, error / allowed)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    limit = float(np.broadcast_to(allowed, excess.shape)[worst])
    need(
        excess[worst] <= 1,
        f"{what}[{', '.join(map(str, worst))}] is {got[worst]:.6g}, want {want[worst]:.6g} "
        f"+- {limit:.1g}",
    )


def _record(what: str, got: Any, kind: type) -> None:
    need(isinstance(got, kind), f"{what} is a {type(got).__name__}, want a {kind.__name__}")


def _rows(array: Floats, rtol: float) -> Floats:
    """Allow each row a share of its largest entry, and what underflow may have taken."""
    return np.asarray(rtol * np.max(np.abs(array), axis=-1, keepdims=True, initial=0) + 1e-30)


def compare_state(what: str, got: Any, want: State, rtol: float) -> None:
    """Compare ``kvz exp(log_scale)`` by columns, and the length."""
    compare_states(what, got, want, rtol)
    need(got.length == want.length, f"{what}.length is {got.length}, want {want.length}")


def compare_states(what: str, got: Any, want: State, rtol: float) -> None:
    """Compare ``kvz exp(log_scale)`` by columns."""
    _record(what, got, State)
    for name in ("kvz", "log_scale"):
        ours, theirs = getattr(got, name).shape, getattr(want, name).shape
        need(ours == theirs, f"{what}.{name} has shape {ours}, want {theirs}")
    scale = np.maximum(got.log_scale, want.log_scale)
    scale = np.where(np.isfinite(scale), scale, 0.0)
    ours, theirs = (s.kvz * np.exp(s.log_scale - scale)[..., None] for s in (got, want))
    _close(f"{what}.kvz exp(log_scale)", ours, theirs, _rows(theirs, rtol))


def compare_partial(what: str, got: Any, want: Partial, rtol: float, want_log: bool = True) -> None:
    """Compare numerators and denominators by rows; without ``want_log`` but for a row's factor."""
    _record(what, got, Partial)
    ours, theirs = got.num_den.shape, want.num_den.shape
    need(ours == theirs, f"{what}.num_den has shape {ours}, want {theirs}")
    log, dead = np.broadcast_to(got.log, want.log.shape), want.num_den[..., -1:] == 0
    sees = np.abs(got.num_den[..., -1:][dead]).max(initial=0)
    need(sees == 0, f"{what}.num_den has the denominator {sees:.3g} in a row that sees no key")
    if want_log:
        factor = np.exp(np.where(dead, 0.0, log - np.where(dead, 0.0, want.log)))
        what = f"{what}.num_den exp(log)"
    else:
        factor = want.num_den[..., -1:] / np.where(dead, 1.0, got.num_den[..., -1:])
        what = f"{what}.num_den / denominator"
    _close(
        what,
        np.where(dead, 0, got.num_den * factor),
        np.where(dead, 0, want.num_den),
        _rows(want.num_den, rtol),
    )


def compare_array(what: str, got: Any, want: Floats, rtol: float) -> None:
    """Compare by rows."""
    _close(what, got, want, _rows(want, rtol))


def compare_choice(what: str, got: Any, want: Any, rtol: float) -> None:
    """Compare integers or flags one by one."""
    got, want = (np.asarray(a).astype(float) for a in (got, want))
    _close(what, got, want, 0.5)


def compare_gradient(what: str, got: Any, want: Floats, rtol: float, lead: tuple[int, ...]) -> None:
    """Compare sums over the axes along which tokens with the axes ``lead`` were broadcast."""
    got, want = sum_to(got, lead, 2), sum_to(want, lead, 2)
    largest = np.max(np.abs(want), axis=(-2, -1), keepdims=True, initial=1.0)
    _close(what, got, want, rtol * largest)


KINDS: dict[str, Callable[..., None]] = {
    "state": compare_state,
    "states": compare_states,
    "adjoint": compare_states,
    "partial": compare_partial,
    "array": compare_array,
    "choice": compare_choice,
    "query gradient": compare_gradient,
    "key gradient": compare_gradient,
    "gradient of [v, 1]": compare_gradient,
}
"""How each kind of result is compared."""

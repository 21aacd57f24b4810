"""Calls of `linattn.interop.jax` as functions with a gradient, compiled once for like calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linattn import _settings
from linattn._arrays import jax_broadcasts
from linattn.typing import State

__all__: list[str] = []

LONGEST = 512
"""Tokens up to which an eager call is compiled whole: its blocks are unrolled, and at 1,024 causal
tokens that takes as long as to compile all operations one by one."""

ONLY_REVERSE = (
    "derivatives of linattn.interop.jax must be taken once and in reverse, as by jax.grad, got "
    "one in forward mode, as of jax.jvp or jax.hessian; call the function of this name in linattn"
)

ATOMS = (NoneType, bool, int, float, str, np.generic)


def attention_of(
    make: Callable[..., Any],
    given: tuple[Any, ...],
    arrays: Sequence[Any],
    in_chunks: Callable[..., Any] | None = None,
) -> Any:
    """Return the function of a call, of the pytree of its arrays, with its gradient.

    Parameters
    ----------
    make : callable
        ``make(*given) -> (attend, pull)``, with ``attend(arrays)`` and ``pull(arrays, log_scale,
        cotangents)``; ``log_scale`` of a returned :class:`~linattn.State`, else None.
    given : tuple
        What the call was given beside arrays.
    arrays : sequence of array, (..., n, d)
        Whose lengths decide whether it is compiled.
    in_chunks : callable, optional
        As ``make``, for long sequences: a loop over chunks, which is compiled at every length.

    Notes
    -----
    Calls that were given the same share one function, and JAX compiles it for each shape.
    """
    settings = _settings.current_settings()
    is_long = max((array.shape[-2] for array in arrays if array.ndim > 1), default=0) > LONGEST
    if not is_long or in_chunks is not None:
        make = in_chunks if is_long and in_chunks is not None else make
        try:
            key, copied = _constant(given)
            call = _Call(make, copied, settings, key)
            hash(call)
        except TypeError:
            pass  # traced, of a class that may change, or wrong: the function says so
        else:
            return _compiled(call)
    return _differentiable(make, given, settings, lambda function: function)


class _Call:
    """What a compiled function is made of, compared by its values."""

    def __init__(self, make: Any, given: Any, settings: Any, key: Any) -> None:
        self.parts = make, given, settings
        self.key = make, settings, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(64)
def _compiled(call: _Call) -> Any:
    return _differentiable(*call.parts, jax.jit)


def _differentiable(make: Any, given: Any, settings: Any, compiled: Any) -> Any:
    """Join a function and its pullback; the pullback is computed under the call's settings."""

    def under_settings(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with _settings.use_settings(settings), jax_broadcasts():
                return function(*arguments)

        return compiled(run)

    run, pull = map(under_settings, make(*given))

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def attend(arrays: Any) -> Any:
        return run(arrays)

    def forward(arrays: Any) -> Any:
        result = attend(arrays)
        state = result[1] if isinstance(result, tuple) else None
        return result, (arrays, state.log_scale if isinstance(state, State) else None)

    def backward(residuals: Any, cotangents: Any) -> Any:
        return (pull(*residuals, jax.tree.map(_cotangent, cotangents)),)

    attend.defvjp(forward, backward)

    def in_reverse(arrays: Any) -> Any:
        try:
            return attend(arrays)
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            raise TypeError(ONLY_REVERSE) from error

    return in_reverse


def _cotangent(array: Any) -> Any:
    return None if array.dtype == jax.dtypes.float0 else as_jax(array)


def as_jax(array: Any) -> Any:
    """Bring NumPy's arrays, which JAX hands to what it differentiates as they came, to JAX."""
    return jnp.asarray(array) if isinstance(array, np.ndarray) else array


def _constant(value: Any) -> tuple[Any, Any]:
    """Return a key of a value, and the value without what its owner may change.

    Raises
    ------
    TypeError
        The value is traced, or may change and cannot be copied.
    """
    if isinstance(value, dict):
        key, values = _constant(tuple(value.values()))
        return (dict, tuple(value), key), dict(zip(value, values, strict=True))
    if type(value) in (tuple, list):
        pairs = [_constant(item) for item in value]
        return (type(value), tuple(key for key, _ in pairs)), type(value)(v for _, v in pairs)
    if isinstance(value, ATOMS) or _is_fixed(value):
        return (type(value), value), value
    if type(value) is np.ndarray or (isinstance(value, jax.Array) and value.ndim):
        host = np.array(value)  # of a traced array: a TypeError
        if host.dtype.kind in "biuf":
            return (host.dtype.str, host.shape, host.tobytes()), host
    message = f"value must be a constant, got {type(value).__name__}"
    raise TypeError(message)


def _is_fixed(value: Any) -> bool:
    """Whether this is one of linattn's maps, which never change and compare by their features."""
    if not (type(value).__module__.startswith("linattn.") and hasattr(value, "_parameters")):
        return False
    parts = (getattr(value, name) for name in value._parameters)
    return all(isinstance(part, (np.ndarray, *ATOMS)) or _is_fixed(part) for part in parts)

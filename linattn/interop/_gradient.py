"""Calls of `linattn.interop.jax` as functions with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linattn import _settings
from linattn._arrays import jax_broadcasts
from linattn.interop import _chunks
from linattn.typing import State

ONLY_REVERSE = (
    "derivatives of linattn.interop.jax must be taken once and in reverse, as by jax.grad, got "
    "one in forward mode, as of jax.jvp or jax.hessian; call the function of this name in linattn"
)


def attention_of(
    make: Callable[..., Any], given: tuple[Any, ...], in_chunks: Callable[..., Any] | None = None
) -> Any:
    """Return the function of a call, of the pytree of its arrays, with its gradient.

    Parameters
    ----------
    make : callable
        ``make(*given) -> (attend, pull)``, with ``attend(arrays)`` and ``pull(arrays, log_scale,
        cotangents)``; ``log_scale`` of a returned :class:`~linattn.State`, else None.
    given : tuple
        What the call was given beside arrays.
    in_chunks : callable, optional
        As ``make``, for traced arrays of more than one chunk: a loop, which is compiled alike at
        every length.

    Notes
    -----
    Arrays that are not traced are computed at home, forward and backward. JAX differentiates what
    it traces itself where there is no ``in_chunks``; nothing but the arguments is stored.
    """
    settings = _settings.current_settings()

    def under_settings(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with _settings.use_settings(settings), jax_broadcasts():
                return function(*arguments)

        return run

    def is_looped(arrays: Any) -> bool:
        query = arrays["query"] if isinstance(arrays, dict) else arrays[0]
        is_long = query.shape[-2] > _chunks.CHUNK
        return in_chunks is not None and is_long and is_traced(arrays)

    @under_settings
    def run(arrays: Any) -> Any:
        return (in_chunks if is_looped(arrays) else make)(*given)[0](arrays)  # type: ignore[misc]

    @under_settings
    def pull(arrays: Any, log_scale: Any, cotangents: Any) -> Any:
        if is_looped(arrays) or not is_traced((arrays, cotangents)):
            cotangents = jax.tree.map(_cotangent, cotangents)
            way: Any = in_chunks if is_looped(arrays) else make
            return way(*given)[1](arrays, log_scale, cotangents)
        return jax.vjp(run, arrays)[1](cotangents)[0]

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def attend(arrays: Any) -> Any:
        return run(arrays)

    def forward(arrays: Any) -> Any:
        result = attend(arrays)
        state = result[1] if isinstance(result, tuple) else None
        return result, (arrays, state.log_scale if isinstance(state, State) else None)

    def backward(residuals: Any, cotangents: Any) -> Any:
        return (pull(*residuals, cotangents),)

    attend.defvjp(forward, backward)

    def in_reverse(arrays: Any) -> Any:
        try:
            return attend(arrays)
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            raise TypeError(ONLY_REVERSE) from error

    return in_reverse


def is_traced(arrays: Any) -> bool:
    """Whether JAX traces any array of a pytree."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays))


def _cotangent(array: Any) -> Any:
    return None if array.dtype == jax.dtypes.float0 else as_jax(array)


def as_jax(array: Any) -> Any:
    """Bring NumPy's arrays, which JAX hands to what it differentiates as they came, to JAX."""
    return jnp.asarray(array) if isinstance(array, np.ndarray) else array

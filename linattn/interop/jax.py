"""The functions of linattn for JAX: NumPy arrays among their arguments become JAX's.

Eager calls and their gradients in reverse mode are computed by NumPy in the memory of the arrays.
Under a trace they are loops over chunks, compiled alike at every length, which JAX differentiates.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack

try:
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError(
        "linattn.interop.jax needs jax, which is not installed: pip install jax"
    ) from error

import numpy as np

from linattn import _checks, functional, recurrences
from linattn._driver.options import WindowOptions
from linattn.typing import Array, FeatureMap, State

__all__ = ["linear_attention", "linear_recurrence", "softmax_attention"]


def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: bool = False,
    **options: Unpack[WindowOptions],
) -> Any:
    """:func:`linattn.linear_attention` on JAX arrays, or on NumPy arrays that become JAX's.

    Parameters
    ----------
    query : jax.Array or ndarray, (..., L, d)
        As for :func:`linattn.linear_attention`.
    key : jax.Array or ndarray, (..., S, d)
        Same dtype and device.
    value : jax.Array or ndarray, (..., S, e)
        Same dtype and device.
    feature_map : FeatureMap
        Its parameters are constants.
    return_state : bool, default False
        Also return the state after the last key.
    **options
        As for :func:`linattn.linear_attention`. The values of stops and borders are needed, outside
        of any trace.

    Returns
    -------
    jax.Array, (..., L, e), or the tuple ``(output, state)``
        As of :func:`linattn.linear_attention`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`linattn.linear_attention`.

    Notes
    -----
    In eager mode ``jax.grad`` stores the arguments and some states; the ``log_scale`` of a state
    that is returned is held constant. Under ``jax.jit`` a state for each 128 tokens is stored.

    Examples
    --------
    >>> import jax
    >>> import linattn
    >>> from linattn.interop.jax import linear_attention
    >>> arrays = jax.random.normal(jax.random.key(0), (3, 2, 300, 16))
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> jax.grad(lambda x: linear_attention(*x, phi, is_causal=True).sum())(arrays).shape
    (3, 2, 300, 16)
    """
    more = {"feature_map": feature_map, "return_state": return_state, **options}
    return _call(functional.linear_attention, query, key, value, more)


def softmax_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool | Literal["lower_right"] = False,
    **options: Any,
) -> Array:
    """:func:`linattn.softmax_attention` on JAX arrays, or on NumPy arrays that become JAX's.

    Parameters
    ----------
    query : jax.Array or ndarray, (..., L, d)
        As for :func:`linattn.softmax_attention`.
    key : jax.Array or ndarray, (..., S, d)
        Same dtype and device.
    value : jax.Array or ndarray, (..., S, e)
        Same dtype and device.
    is_causal, **options
        As for :func:`linattn.softmax_attention`. The values of stops and borders are needed,
        outside of any trace.

    Returns
    -------
    jax.Array, (..., L, e)
        As of :func:`linattn.softmax_attention`.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.softmax_attention`.

    Examples
    --------
    >>> import jax
    >>> from linattn.interop.jax import softmax_attention
    >>> arrays = jax.random.normal(jax.random.key(0), (3, 2, 300, 16))
    >>> jax.jit(lambda x: softmax_attention(*x, is_causal=True))(arrays).shape
    (2, 300, 16)
    """
    more = {"is_causal": is_causal, **options}
    return _call(functional.softmax_attention, query, key, value, more)


def linear_recurrence(
    query: Array,
    key: Array,
    value: Array,
    *,
    update_rule: str,
    return_state: bool = False,
    **options: Any,
) -> Any:
    """:func:`linattn.linear_recurrence` on JAX arrays, or on NumPy arrays that become JAX's.

    Parameters
    ----------
    query : jax.Array or ndarray, (..., L, d)
        As for :func:`linattn.linear_recurrence`.
    key : jax.Array or ndarray, (..., L, d)
        Same dtype and device.
    value : jax.Array or ndarray, (..., L, e)
        Same dtype and device.
    update_rule, return_state, **options
        As for :func:`linattn.linear_recurrence`.

    Returns
    -------
    jax.Array, (..., L, e), or the tuple ``(output, state)``
        As of :func:`linattn.linear_recurrence`.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_recurrence`.

    Examples
    --------
    >>> import jax
    >>> from linattn.interop.jax import linear_recurrence
    >>> arrays = jax.random.normal(jax.random.key(0), (3, 2, 300, 16))
    >>> linear_recurrence(*arrays, update_rule="linear").shape
    (2, 300, 16)
    """
    more = {"update_rule": update_rule, "return_state": return_state, **options}
    return _call(recurrences.linear_recurrence, query, key, value, more)


_HOST = ("key_stop", "prefix_length", "cu_seqlens")
"""Options whose values are read."""


def _call(function: Any, query: Array, key: Array, value: Array, options: Any) -> Any:
    """Call a function of linattn on arrays of JAX."""
    named = {"query": query, "key": key, "value": value}
    qkv = [_as_jax(_checks.check_array(name, x)) for name, x in named.items()]
    return function(*qkv, **{n: x if n in _HOST else _as_jax(x) for n, x in options.items()})


def _as_jax(x: Any) -> Any:
    """Bring NumPy's arrays in an option to JAX."""
    if isinstance(x, State):
        return x._replace(kvz=_as_jax(x.kvz), log_scale=_as_jax(x.log_scale))
    if isinstance(x, tuple):
        return tuple(map(_as_jax, x))
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x

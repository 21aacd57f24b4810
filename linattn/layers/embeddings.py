"""Embeddings: rows of a table, and positions that are added to them."""

from __future__ import annotations

import math
from typing import Any, Literal

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.layers._params import (
    Params,
    Part,
    Result,
    all_tokens,
    as_part,
    check_pair,
    normal_numbers,
    takes,
    with_pullback,
)
from linattn.positions import sinusoidal
from linattn.typing import Array

__all__ = ["embedding", "embedding_vjp", "init_embedding"]

_BLOCK = 1024
"""How many one-hot rows are made together for the gradient of an embedding."""


@takes()
def embedding(
    params: Params,
    tokens: Array,
    *,
    positions: Literal["sinusoidal"] | None = None,
    start: int = 0,
    scale: float = 1.0,
) -> Array:
    r"""Return the row of a table for each token, plus a vector for its position.

    .. math::
        y_t = c \, E_{\mathrm{token}_t} + p_{s + t}

    Letters: ``V`` different tokens, ``L`` tokens, ``d`` dim, ``s`` start, ``c`` scale.

    Parameters
    ----------
    params : dict
        ``weight`` (V, d) and, optional, learned positions ``position.weight`` (P, d).
    tokens : integer array, (..., L)
        At least 0 and below V, of the library of the parameters.
    positions : {"sinusoidal"}, optional
        Also add :func:`linattn.positions.sinusoidal`. Default: only learned positions, if the
        parameters have them.
    start : int, optional
        s, the position of the first token. Default 0.
    scale : float, optional
        c. Default 1; the first transformer and Gemma have ``d ** 0.5``.

    Returns
    -------
    array, (..., L, d)
        In the library, dtype and device of the parameters.

    Raises
    ------
    TypeError, ValueError
        Tokens are no integers or are outside of the table; there are more tokens than learned
        positions.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_embedding(np.random.default_rng(0), 256, 8)
    >>> tokens = np.frombuffer(b"attention", np.uint8).astype(np.int64)
    >>> layers.embedding(params, tokens, positions="sinusoidal").shape
    (9, 8)
    """
    return embedding_vjp(params, tokens, positions=positions, start=start, scale=scale)[0]


@takes()
@with_pullback
def embedding_vjp(
    params: Params,
    tokens: Array,
    *,
    positions: Literal["sinusoidal"] | None = None,
    start: int = 0,
    scale: float = 1.0,
) -> Result:
    """Return the output of :func:`embedding` and a function that computes its gradients.

    Parameters
    ----------
    params, tokens, positions, start, scale
        As for :func:`embedding`.

    Returns
    -------
    output : array, (..., L, d)
        Output of :func:`embedding`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params,)``: tokens have no gradient.

    Notes
    -----
    The gradient by the table is a product with one-hot rows: time O(n V d) for n tokens, as for
    logits, and memory for a thousand rows.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_embedding(np.random.default_rng(0), 256, 8)
    >>> tokens = np.frombuffer(b"attention", np.uint8).astype(np.int64)
    >>> output, pullback = layers.embedding_vjp(params, tokens)
    >>> (grad_params,) = pullback(output)
    >>> grad_params["weight"].shape
    (256, 8)
    """
    part = as_part(params, "weight", "position.weight")
    table = part["weight"]
    xp = _check_tokens(part, tokens)
    start = _checks.check_positive_int("start", start, least=0)
    scale = _checks.check_finite_number("scale", scale)
    length, dim = tokens.shape[-1], table.shape[-1]
    flat = xp.reshape(tokens, (math.prod(tokens.shape),))
    wide = _arrays.accumulation_dtype(xp, table.dtype, None)
    rows = xp.astype(xp.take(table, flat, axis=0), wide, copy=False)
    out = xp.reshape(rows if scale == 1 else scale * rows, (*tokens.shape, dim))
    stop = start + length
    if "position.weight" in part:
        learned = check_pair(part, "position.weight", table)[1]
        if learned.shape[0] < stop:
            raise ValueError(
                f"params[{part.path + 'position.weight'!r}] must have a row for each position, "
                f"{stop} of them, got {learned.shape[0]}; give shorter inputs"
            )
        out = out + xp.astype(learned[start:stop, :], wide, copy=False)
    if positions == "sinusoidal":
        device = array_api_compat.device(table)
        out = out + _arrays.device_array(_sinusoids(start, length, dim), xp, wide, device)
    elif positions is not None:
        raise ValueError(
            f"positions must be 'sinusoidal' or None, got {positions!r}; learned positions are "
            f"added where params have 'position.weight'"
        )

    def pullback(grad_output: Array) -> tuple[dict[str, Array]]:
        _checks.check_cotangent("grad_output", grad_output, "output", tuple(out.shape), table)
        grad = xp.astype(grad_output, wide, copy=False)
        of_rows = all_tokens(grad if scale == 1 else scale * grad)
        grads = {"weight": _scattered(flat, of_rows, table)}
        if "position.weight" in part:
            rows = xp.reshape(grad, (math.prod(tokens.shape[:-1]), length, dim))
            summed = xp.astype(xp.sum(rows, axis=0), table.dtype, copy=False)
            before, after = (xp.zeros_like(learned[rows, :]) for rows in _outside(start, stop))
            grads["position.weight"] = xp.concat([before, summed, after], axis=0)
        return (grads,)

    return xp.astype(out, table.dtype, copy=False), pullback


def _outside(start: int, stop: int) -> tuple[slice, slice]:
    return slice(0, start), slice(stop, None)


def _sinusoids(start: int, length: int, dim: int) -> NDArray[np.float64]:
    """Return some rows of :func:`linattn.positions.sinusoidal`, without the rows before them."""
    first = sinusoidal(1, dim)  # checks dim
    frequencies = 10_000.0 ** (-np.arange(0, dim, 2) / dim)
    angles = np.arange(start, start + length)[:, None] * frequencies
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return waves.reshape(length, first.shape[-1])


def _check_tokens(part: Part, tokens: Any) -> Any:
    table, tokens = part["weight"], _checks.check_array("tokens", tokens)
    _checks.check_together(f"params[{part.path + 'weight'!r}]", table, "tokens", tokens)
    xp = _arrays.namespace(tokens)
    if not xp.isdtype(tokens.dtype, "integral"):
        raise TypeError(f"tokens must be integers, got dtype {tokens.dtype}")
    if not _arrays.is_lazy(tokens) and math.prod(tokens.shape):
        least, most = int(xp.min(tokens)), int(xp.max(tokens))
        if least < 0 or most >= table.shape[0]:
            raise ValueError(
                f"tokens must be at least 0 and below {table.shape[0]}, the rows of "
                f"params[{part.path + 'weight'!r}], got {least} to {most}"
            )
    return xp


def _scattered(tokens: Array, rows: Array, table: Array) -> Array:
    """Sum rows by their token, in the dtype of the table."""
    xp = _arrays.namespace(rows)
    # Small integers, which the tokens may be, would not hold all names.
    tokens = xp.astype(tokens, xp.int64, copy=False)
    names = xp.arange(table.shape[0], dtype=xp.int64, device=array_api_compat.device(tokens))
    total = xp.zeros_like(table, dtype=rows.dtype)
    for begin in range(0, tokens.shape[0], _BLOCK):
        block = slice(begin, min(begin + _BLOCK, tokens.shape[0]))
        one_hot = xp.astype(names[:, None] == tokens[None, block], rows.dtype)
        total = total + one_hot @ rows[block, :]
    return xp.astype(total, table.dtype, copy=False)


@takes()
def init_embedding(
    rng: np.random.Generator,
    num_tokens: int,
    dim: int,
    *,
    num_positions: int | None = None,
    scale: float = 1.0,
    dtype: Any = np.float32,
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`embedding`: independent normal numbers.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of the numbers.
    num_tokens, dim : int
        V and d.
    num_positions : int, optional
        P, of learned positions. Default: none.
    scale : float, optional
        Standard deviation. Default 1, as in torch.
    dtype : dtype, optional
        float16, float32 (the default) or float64.

    Returns
    -------
    dict
        NumPy arrays ``weight`` and, with `num_positions`, ``position.weight``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_embedding(np.random.default_rng(0), 256, 8, num_positions=64)
    >>> sorted(params)
    ['position.weight', 'weight']
    """
    num_tokens = _checks.check_positive_int("num_tokens", num_tokens)
    dim = _checks.check_positive_int("dim", dim)
    params = {"weight": normal_numbers(rng, (num_tokens, dim), scale, dtype)}
    if num_positions is None:
        return params
    num = _checks.check_positive_int("num_positions", num_positions)
    return params | {"position.weight": normal_numbers(rng, (num, dim), scale, dtype)}

"""Weights that no product of queries and keys makes: from the query alone, or learned."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple, cast

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.typing import Array, ArrayT

__all__ = [
    "dense_synthesizer",
    "factorized_dense_synthesizer",
    "factorized_random_synthesizer",
    "random_synthesizer",
]


@_arrays.as_autocast("query", "value")
def dense_synthesizer(
    query: ArrayT,
    value: Array,
    *,
    hidden_weight: Array,
    hidden_bias: Array,
    weight: Array,
    bias: Array,
    is_causal: bool = False,
) -> ArrayT:
    r"""Weights from each query by a network of two layers, without keys.

    .. math::
        o_i = \mathrm{softmax}(W_2 \max(W_1 x_i + b_1, 0) + b_2) \, v

    Parameters
    ----------
    query : array, (..., L, d)
        x: the inputs of the layer, or their projections.
    value : array, (..., S, e)
        As in :func:`local_window`, of any length S.
    hidden_weight, hidden_bias : array, (..., h, d) and (..., h)
        Transpose of the paper's W_1, and b_1.
    weight, bias : array, (..., S, h) and (..., S)
        W_2 and b_2: a logit for each position, so that they serve this length only.
    is_causal : bool, optional
        Whether query i sees no value after i. Default False.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; parameters for another length.

    Notes
    -----
    Multiplications for a head: ``L (d h + h S + S e)``: still quadratic, without products of
    queries and keys.

    Fails untrained, and at another length than it was trained for: logits belong to positions.

    References
    ----------
    Tay et al., "Synthesizer: Rethinking Self-Attention for Transformer Models" (2021), equations
    (1) to (3).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import dense_synthesizer
    >>> rng = np.random.default_rng(0)
    >>> query, value = rng.standard_normal((2, 64, 16))
    >>> hidden = {"hidden_weight": rng.standard_normal((32, 16)), "hidden_bias": np.zeros(32)}
    >>> last = {"weight": rng.standard_normal((64, 32)), "bias": np.zeros(64)}
    >>> dense_synthesizer(query, value, **hidden, **last).shape
    (64, 16)
    """
    inputs = _prepare(value, query)
    xp, x, v = inputs
    dim, S = x.shape[-1], v.shape[-2]
    (hidden,) = getattr(hidden_bias, "shape", ())[-1:] or (1,)
    W1 = _shared.check_matrix("hidden_weight", hidden_weight, query, (hidden, dim))
    b1 = _shared.check_matrix("hidden_bias", hidden_bias, query, (hidden,))
    W2 = _shared.check_matrix("weight", weight, query, (S, hidden))
    b2 = _shared.check_matrix("bias", bias, query, (S,))
    units = xp.matmul(x, xp.matrix_transpose(W1)) + b1[..., None, :]
    units = xp.maximum(units, xp.zeros_like(units))
    logits = xp.matmul(units, xp.matrix_transpose(W2)) + b2[..., None, :]
    return _mixed(query, inputs, logits, is_causal)


@_arrays.as_autocast("query", "value")
def factorized_dense_synthesizer(
    query: ArrayT,
    value: Array,
    *,
    first_weight: Array,
    second_weight: Array,
    is_causal: bool = False,
) -> ArrayT:
    r"""Weights from each query by two short lists of logits, multiplied.

    .. math::
        o_i = \mathrm{softmax}_j(A_{i, j \bmod a} \, B_{i, \lfloor j / a \rfloor}) \, v, \qquad
        A = x W_A^T, \quad B = x W_B^T, \quad a \, b = S

    Parameters
    ----------
    query, value, is_causal
        As in :func:`dense_synthesizer`.
    first_weight, second_weight : array, (..., a, d) and (..., b, d)
        W_A and W_B; a b must be the length S.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`dense_synthesizer`; a b that is not S.

    Notes
    -----
    Multiplications for a head: ``L ((a + b) d + S + S e)``. Fails as :func:`dense_synthesizer`.

    References
    ----------
    Tay et al., "Synthesizer" (2021), section *Factorized Dense Synthesizer*: one list is tiled,
    the other one repeated.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import factorized_dense_synthesizer
    >>> rng = np.random.default_rng(0)
    >>> query, value = rng.standard_normal((2, 64, 16))
    >>> first, second = rng.standard_normal((2, 8, 16))
    >>> factorized_dense_synthesizer(query, value, first_weight=first, second_weight=second).shape
    (64, 16)
    """
    inputs = _prepare(value, query)
    xp, x, v = inputs
    dim, S = x.shape[-1], v.shape[-2]
    a, b = ((getattr(W, "shape", ())[-2:-1] or (1,))[0] for W in (first_weight, second_weight))
    if a * b != S:
        raise ValueError(
            f"first_weight and second_weight must have numbers of rows whose product is the length "
            f"of value, {S}, got {a} and {b}"
        )
    first = _shared.check_matrix("first_weight", first_weight, query, (a, dim))
    second = _shared.check_matrix("second_weight", second_weight, query, (b, dim))
    A, B = (xp.matmul(x, xp.matrix_transpose(W)) for W in (first, second))
    logits = B[..., :, None] * A[..., None, :]
    return _mixed(query, inputs, xp.reshape(logits, (*logits.shape[:-2], S)), is_causal)


@_arrays.as_autocast("value")
def random_synthesizer(value: ArrayT, *, logits: Array, is_causal: bool = False) -> ArrayT:
    r"""Weights that do not depend on the inputs at all.

    .. math::
        o = \mathrm{softmax}(R) \, v

    Parameters
    ----------
    value : array, (..., S, e)
        As in :func:`local_window`, of any length S.
    logits : array, (..., L, S)
        R, drawn at random and learned, or not.
    is_causal : bool, optional
        Whether row i sees no value after i. Default False.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the value.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; logits for another length.

    Notes
    -----
    Multiplications for a head: ``L S e``. Fails on everything but weights by position.

    References
    ----------
    Tay et al., "Synthesizer" (2021), equation (4).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import random_synthesizer
    >>> rng = np.random.default_rng(0)
    >>> value, logits = rng.standard_normal((64, 16)), rng.standard_normal((64, 64))
    >>> random_synthesizer(value, logits=logits).shape
    (64, 16)
    """
    rows = getattr(logits, "shape", ())[-2:-1] or (1,)
    inputs = _prepare(value)
    R = _shared.check_matrix("logits", logits, value, (*rows, inputs.value.shape[-2]))
    return _mixed(value, inputs, R, is_causal)


@_arrays.as_autocast("value")
def factorized_random_synthesizer(
    value: ArrayT, *, left: Array, right: Array, is_causal: bool = False
) -> ArrayT:
    r"""Weights that do not depend on the inputs, with logits of rank k.

    .. math::
        o = \mathrm{softmax}(R_1 R_2^T) \, v

    Parameters
    ----------
    value, is_causal
        As in :func:`random_synthesizer`.
    left, right : array, (..., L, k) and (..., S, k)
        R_1 and R_2.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the value.

    Raises
    ------
    TypeError, ValueError
        As :func:`random_synthesizer`.

    Notes
    -----
    Multiplications for a head: ``L S (k + e)``. Fails as :func:`random_synthesizer`.

    References
    ----------
    Tay et al., "Synthesizer" (2021), section *Factorized Random Synthesizer*.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import factorized_random_synthesizer
    >>> rng = np.random.default_rng(0)
    >>> value = rng.standard_normal((64, 16))
    >>> left, right = rng.standard_normal((2, 64, 4))
    >>> factorized_random_synthesizer(value, left=left, right=right).shape
    (64, 16)
    """
    inputs = _prepare(value)
    xp, shape = inputs.xp, getattr(left, "shape", ())[-2:]
    R1 = _shared.check_matrix("left", left, value, shape if len(shape) == 2 else (1, 1))
    R2 = _shared.check_matrix("right", right, value, (inputs.value.shape[-2], R1.shape[-1]))
    return _mixed(value, inputs, xp.matmul(R1, xp.matrix_transpose(R2)), is_causal)


class _Inputs(NamedTuple):
    """Inputs and values in the accumulation dtype."""

    xp: ModuleType
    x: Array
    value: Array


def _prepare(value: Any, query: Any = None) -> _Inputs:
    named = {"value": value} if query is None else {"query": query, "value": value}
    xp, arrays = _checks.check_arrays(**named)
    _checks.check_leading_axes(
        **{n: tuple(a.shape[:-2]) for n, a in zip(named, arrays, strict=True)}
    )
    if not arrays[-1].shape[-2]:
        raise ValueError(f"value must have at least one token, got shape {tuple(value.shape)}")
    dtype = _arrays.accumulation_dtype(xp, value.dtype, None)
    arrays = [xp.astype(a, dtype, copy=False) for a in arrays]
    return _Inputs(xp, arrays[0], arrays[-1])


def _mixed(like: ArrayT, inputs: _Inputs, logits: Array, is_causal: Any) -> ArrayT:
    """Average values by the softmax of logits ``(..., L, S)``."""
    xp = inputs.xp
    if _checks.check_flag("is_causal", is_causal):
        if logits.shape[-2] != logits.shape[-1]:
            raise ValueError(
                f"is_causal needs as many rows as values, got logits of shape {tuple(logits.shape)}"
            )
        logits = _shared.hide_later(logits, xp)
    output = xp.matmul(_shared.softmax(logits, xp), inputs.value)
    return cast("ArrayT", xp.astype(output, cast("Any", like).dtype, copy=False))

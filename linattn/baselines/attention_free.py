"""Attention-free transformers: weights by channel, from keys and positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linattn import _arrays, _checks
from linattn._numerics import ignore_fp_warnings
from linattn.baselines import _shared
from linattn.typing import Array, ArrayT

__all__ = ["aft_full", "aft_local", "aft_simple"]


@_arrays.as_autocast("query", "key", "value")
def aft_full(
    query: ArrayT, key: Array, value: Array, *, position_bias: Array, is_causal: bool = False
) -> ArrayT:
    r"""Average values with weights by key channel and by pair of positions; gate with the query.

    .. math::
        o_i = \sigma(q_i) \odot \frac{\sum_j \exp(k_j + w_{ij}) \odot v_j}
        {\sum_j \exp(k_j + w_{ij})}

    Parameters
    ----------
    query : array, (..., L, e)
        Gates: as many channels as a value has.
    key, value : array, (..., S, e)
        As in :func:`local_window`, of any length S.
    position_bias : array, (..., L, S)
        w, learned: it serves these lengths only.
    is_causal : bool, optional
        Whether query i sees no key after i. Default False.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query; 0 for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; dims that differ; a bias for other lengths.

    Notes
    -----
    Multiplications for a head: ``2 L S e``; memory O(L S) for w. Here with ``L S e`` exponentials,
    so that weights of any scale stay in range.

    Fails as an approximation of softmax attention, which it is not meant to be: the query only
    gates, it chooses no key. At another length w has to be learned anew.

    References
    ----------
    Zhai et al., "An Attention Free Transformer" (2021), equation (2).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import aft_full
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> aft_full(query, key, value, position_bias=np.zeros((64, 64))).shape
    (8, 64, 16)
    """
    inputs = _channels(query, key, value)
    bias = _shared.check_matrix("position_bias", position_bias, query, inputs.lengths)
    return _gated(query, inputs, bias, is_causal)


@_arrays.as_autocast("query", "key", "value")
def aft_local(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    position_bias: Array,
    window_size: int,
    is_causal: bool = False,
) -> ArrayT:
    r""":func:`aft_full` with position biases of near pairs only.

    .. math::
        w_{ij} \to w_{ij} \text{ if } |i - j| < s, \text{ else } 0

    All pairs count; those from s on are weighted by the key alone.

    Parameters
    ----------
    query, key, value, position_bias, is_causal
        As in :func:`aft_full`.
    window_size : int
        s.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`aft_full`.

    Notes
    -----
    Multiplications for a head: ``2 L (2 s - 1) e`` beside the sums over all keys; here ``2 L S e``,
    as in :func:`aft_full`. Fails as :func:`aft_full`.

    References
    ----------
    Zhai et al., "An Attention Free Transformer" (2021), equation (3).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import aft_local
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> aft_local(query, key, value, position_bias=np.zeros((64, 64)), window_size=8).shape
    (8, 64, 16)
    """
    inputs = _channels(query, key, value)
    bias = _shared.check_matrix("position_bias", position_bias, query, inputs.lengths)
    s = _checks.check_positive_int("window_size", window_size)
    L, S = inputs.lengths
    near = inputs.array(np.abs(np.arange(L)[:, None] - np.arange(S)) < s)
    return _gated(query, inputs, inputs.xp.where(near, bias, inputs.xp.zeros_like(bias)), is_causal)


@_arrays.as_autocast("query", "key", "value")
def aft_simple(query: ArrayT, key: Array, value: Array, *, is_causal: bool = False) -> ArrayT:
    r""":func:`aft_full` without position biases: one average for all queries.

    .. math::
        o_i = \sigma(q_i) \odot \sum_j \mathrm{softmax}_j(k_j) \odot v_j

    Parameters
    ----------
    query, key, value, is_causal
        As in :func:`aft_full`.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`aft_full`.

    Notes
    -----
    Multiplications for a head: ``S e + L e``; a causal call here takes ``2 L S e``. Fails as
    :func:`aft_full`.

    References
    ----------
    Zhai et al., "An Attention Free Transformer" (2021), equation (4).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import aft_simple
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> aft_simple(query, key, value, is_causal=True).shape
    (8, 64, 16)
    """
    inputs = _channels(query, key, value)
    L, S = inputs.lengths
    # Without a mask all rows are the first one.
    rows = L if _checks.check_flag("is_causal", is_causal) else 1
    return _gated(query, inputs, inputs.array(np.zeros((rows, S))), is_causal)


def _channels(query: Any, key: Any, value: Any) -> _shared.Inputs:
    inputs = _shared.prepare(query, key, value, 1.0)
    if query.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"query, key and value must have one dim, got query {tuple(query.shape)} and value "
            f"{tuple(value.shape)}: weights and gates belong to the channels of values"
        )
    return inputs


def _gated(like: ArrayT, inputs: _shared.Inputs, bias: Array, is_causal: Any) -> ArrayT:
    xp, query, key, value, *_ = inputs
    if _checks.check_flag("is_causal", is_causal):
        if inputs.lengths[0] != inputs.lengths[1]:
            raise ValueError(f"is_causal needs query and key of one length, got {inputs.lengths}")
        bias = _shared.hide_later(bias, xp)
    key, value = (xp.matrix_transpose(x)[..., None, :, :] for x in (key, value))
    rows = max(1, _shared.MAX_GATHERED // math.prod(key.shape))
    averages = []
    for start in range(0, bias.shape[-2], rows):
        bias_rows = bias[..., start : min(start + rows, bias.shape[-2]), :]
        # One exponential of the sum: of a product of two a factor may underflow.
        weights = _shared.softmax(bias_rows[..., None, :] + key, xp)
        averages.append(xp.sum(weights * value, axis=-1))
    with ignore_fp_warnings():
        gate = 1 / (1 + xp.exp(-query))
    return inputs.output(like, gate * xp.concat(averages, axis=-2))

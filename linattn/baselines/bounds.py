"""Quadratic bounds: the best weights of low rank, and the largest weights."""

from __future__ import annotations

import numpy as np

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.typing import Array, ArrayT

__all__ = ["top_k", "truncated_svd"]


@_arrays.as_autocast("query", "key", "value")
def truncated_svd(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    rank: int,
    is_causal: bool = False,
    scale: float | None = None,
) -> ArrayT:
    r"""Attention with the best approximation of its weights that has rank r: a bound.

    .. math::
        o = P_r v, \qquad P = \mathrm{softmax}(s \, q k^T), \qquad
        P_r = \sum_{c \le r} \sigma_c u_c w_c^T

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`, but for a length S of keys and values of their own.
    rank : int
        r, at most L and S.
    is_causal : bool, optional
        Whether P is that of causal attention. Its approximation is not causal. Default False.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`.

    Notes
    -----
    Multiplications for a head: ``L S d`` and the decomposition, O(L S min(L, S)): quadratic and
    more. No matrix of rank r is nearer to P in the Frobenius norm, whatever makes it, so that no
    feature map with r features, no r landmarks and no projection to r keys has better *weights*.
    Outputs can be nearer by luck, or by knowing the values: o itself has rank e.

    Where it fails at a rank that one can pay for, nothing linear will do; use near or largest keys.

    References
    ----------
    Eckart and Young (1936); for attention: Wang et al., "Linformer" (2020), section 3.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> from linattn.baselines import truncated_svd
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> output = truncated_svd(query, key, value, rank=64)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    causal = _checks.check_flag("is_causal", is_causal)
    inputs = _shared.prepare(query, key, value, scale, aligned=causal)
    r = _checks.check_positive_int("rank", rank, most=min(inputs.lengths))
    weights = _shared.softmax(_shared.logits_of(inputs, causal), inputs.xp)
    u, sizes, w = np.linalg.svd(_arrays.to_numpy(weights), full_matrices=False)
    left = inputs.array(u[..., :r] * sizes[..., None, :r])
    right = inputs.xp.matmul(inputs.array(w[..., :r, :]), inputs.value)
    return inputs.output(query, inputs.xp.matmul(left, right))


@_arrays.as_autocast("query", "key", "value")
def top_k(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    num_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
) -> ArrayT:
    r"""Softmax attention of each query to the k keys with its largest weights: a bound.

    .. math::
        S_i = \text{the } k \text{ keys with the largest } q_i \cdot k_j

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`, but for a length S of keys and values of their own.
    num_keys : int
        k, at most S; of equal logits the first ones are taken.
    is_causal : bool, optional
        Whether query i sees no key after i. Default False.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`.

    Notes
    -----
    Multiplications for a head: ``L S d + L k e``: quadratic, since all logits are computed to find
    the largest. What visits k keys a query (windows, patterns, buckets, clusters) cannot keep
    more of the weight.

    Fails where weights are nearly uniform: then k keys hold k / S of the weight, and a mean of all
    values is nearer.

    References
    ----------
    Zhao et al., "Explicit Sparse Transformer" (2019), equations (4) to (6); Gupta et al.,
    "Memory-efficient Transformers via Top-k Attention" (2021).

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> from linattn.baselines import top_k
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> output = top_k(query, key, value, num_keys=64)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    causal = _checks.check_flag("is_causal", is_causal)
    inputs = _shared.prepare(query, key, value, scale, aligned=causal)
    k = _checks.check_positive_int("num_keys", num_keys, most=inputs.lengths[1])
    logits = _arrays.to_numpy(_shared.logits_of(inputs, causal))
    index = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    if causal:
        index = np.where(index <= np.arange(inputs.lengths[0])[:, None], index, -1)
    return inputs.output(query, _shared.attend_to(inputs, index))

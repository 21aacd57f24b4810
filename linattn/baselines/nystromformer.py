"""A Nyström approximation of the weights, with segment means as landmarks."""

from __future__ import annotations

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.typing import Array, ArrayT

__all__ = ["nystromformer"]


@_arrays.as_autocast("query", "key", "value")
def nystromformer(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    num_landmarks: int,
    num_iterations: int = 6,
    is_causal: bool = False,
    scale: float | None = None,
) -> ArrayT:
    r"""Approximate softmax attention by m landmarks, after Nyström.

    .. math::
        o = \mathrm{softmax}(s \, q \tilde k^T) \, Z \, \mathrm{softmax}(s \, \tilde q k^T) \, v,
        \qquad Z \approx \mathrm{softmax}(s \, \tilde q \tilde k^T)^+

    where landmarks are the means of m runs of queries and of keys, and Z comes from iterations

    .. math::
        Z \leftarrow \tfrac14 Z (13 I - A Z (15 I - A Z (7 I - A Z))), \qquad
        Z_0 = A^T / (\|A\|_1 \|A\|_\infty)

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`, but for a length S of keys and values of their own.
    num_landmarks : int
        m, at most L and S. Runs of tokens differ in length by at most one; the paper pads.
    num_iterations : int, optional
        Default 6, as in the paper.
    is_causal : bool, optional
        Published for full attention: True is rejected, since means hold later tokens.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; causal attention.

    Notes
    -----
    Multiplications for a head: ``(L + S) m (d + e) + m^2 d + 4 t m^3 + L m^2`` with t iterations.

    Rows of the approximate weights sum to 1 nearly but not exactly, and may be negative. Fails
    where weights are sharp: the mean of a run of keys is near none of them. The depthwise
    convolution of values that the paper adds is a weight of the model and left out.

    References
    ----------
    Xiong et al., "Nyströmformer" (2021), equation (13) with landmarks of section 3.2 and the
    iteration of equation (14).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import nystromformer
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> nystromformer(query, key, value, num_landmarks=8).shape
    (8, 64, 16)
    """
    _shared.full_only("nystromformer", is_causal, "landmarks are means over the whole sequence")
    inputs = _shared.prepare(query, key, value, scale)
    xp, (L, S) = inputs.xp, inputs.lengths
    m = _checks.check_positive_int("num_landmarks", num_landmarks, most=min(L, S))
    steps = _checks.check_positive_int("num_iterations", num_iterations)
    queries = xp.matmul(inputs.array(_shared.segment_means(L, m)), inputs.query)
    keys = xp.matmul(inputs.array(_shared.segment_means(S, m)), inputs.key)
    outer = _shared.softmax(xp.matmul(inputs.query, xp.matrix_transpose(keys)), xp)
    A = _shared.softmax(xp.matmul(queries, xp.matrix_transpose(keys)), xp)
    inner = _shared.attend(inputs._replace(query=queries), inputs.key, inputs.value)
    norm_1 = xp.max(xp.sum(A, axis=-2), axis=-1)[..., None, None]
    norm_inf = xp.max(xp.sum(A, axis=-1), axis=-1)[..., None, None]
    Z = xp.matrix_transpose(A) / (norm_1 * norm_inf)
    identity = xp.eye(m, dtype=A.dtype, device=inputs.device)
    for _ in range(steps):
        product = xp.matmul(A, Z)
        third = xp.matmul(product, 7 * identity - product)
        second = xp.matmul(product, 15 * identity - third)
        Z = 0.25 * xp.matmul(Z, 13 * identity - second)
    return inputs.output(query, xp.matmul(outer, xp.matmul(Z, inner)))

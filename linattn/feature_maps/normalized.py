"""Efficient attention: softmax over the features of a query, and over the keys of each feature."""

from __future__ import annotations

from math import sqrt
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _numerics
from linattn.feature_maps._base import BaseFeatureMap, dots
from linattn.typing import Array, ColumnNormalized, Features, Opaque, Tokens

__all__ = ["SoftmaxFeatures"]


class SoftmaxFeatures(BaseFeatureMap):
    r"""Efficient attention: queries and keys are normalized each on their own.

    .. math::
        o_i = \sum_r p_{ir} \sum_j c_{jr} v_j, \qquad
        p_{ir} = \frac{e^{\sqrt{s}\, q_{ir}}}{\sum_t e^{\sqrt{s}\, q_{it}}}, \quad
        c_{jr} = \frac{e^{\sqrt{s}\, k_{jr}}}{\sum_l e^{\sqrt{s}\, k_{lr}}}

    Every feature r is a query of its own to the whole sequence: it takes the mean of the values
    with weights ``c_jr``, and a token mixes those means. Letters: ``d`` dim, ``s`` scale.

    Parameters
    ----------
    dim : int, optional
        d, the last axis of queries and keys; None takes any.
    scale : float, optional
        s > 0. Default 1.

    Attributes
    ----------
    dim, num_features : int or None
        d, and as many features; None where d is not fixed.
    scale : float
        s.
    positive, unbiased, causal : bool
        What may be relied on.

    Raises
    ------
    TypeError, ValueError
        A dim that is not a positive integer, a scale that is not positive.

    Notes
    -----
    ``query_features`` and ``key_features`` are the exponentials, without their normalizers. The
    sum over keys belongs to the sequence seen, so that attention is not the ratio of
    ``phi(q) . sum_j phi(k_j) v_j`` and ``phi(q) . sum_j phi(k_j)``: each column of the state is
    divided by its own sum when it is read. States are ordinary states, and are updated, merged
    and masked like them.

    A causal query sees normalizers of the keys up to its own, as it does in a token step. Attention
    weights are not negative and sum to 1. The log normalizer is the one of the query's softmax.

    Deterministic: variance 0. It does not approximate softmax of ``q.k``. Time O(n d e), causal
    O(n c (d + e)) more with blocks of c tokens; memory O(n d). A causal block whose keys grow by
    more than float range holds is computed by divide and conquer.

    References
    ----------
    Shen et al., "Efficient Attention: Attention with Linear Complexities" (2021), its method
    with softmax normalization; the causal form is the same for every prefix.

    Examples
    --------
    >>> from linattn.feature_maps import SoftmaxFeatures
    >>> SoftmaxFeatures()
    SoftmaxFeatures(dim=None, scale=1.0)
    """

    positive = True
    unbiased = True
    _parameters = ("dim", "scale")

    def __init__(self, dim: int | None = None, *, scale: float = 1.0) -> None:
        dim = None if dim is None else _checks.check_positive_int("dim", dim)
        scale = _checks.check_finite_number("scale", scale, positive=True)
        self._set(dim=dim, num_features=dim, scale=scale)

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> ColumnNormalized:
        """Spec of the query side: the read of means, with ``exp(sqrt(s) x)``."""
        return ColumnNormalized(self.key_spec(xp, dtype, device))

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Opaque:
        """Spec of the key side: ``exp(sqrt(s) x)``."""

        def features(tokens: Tokens) -> Features:
            u = tokens.x * sqrt(self.scale)
            # The limit at -inf would be no feature, and hide it.
            return Features(u + (u - u), None)

        return Opaque(features, lambda _, cotangent: cotangent.log * sqrt(self.scale))

    def kernel(self, x: Array, y: Array) -> Array:
        """Weights of all keys for all queries.

        ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``. Unlike other kernels it depends on
        all of y: the s weights of a query sum to 1.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim.
        """

        def closed_form(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
            queries, keys = (_softmax(sqrt(self.scale) * z, axis) for z, axis in ((a, -1), (b, -2)))
            return dots(queries, keys)

        return self._on_host(closed_form, x, y)

    @_arrays.on_array_device
    def estimate(self, x: Array, y: Array) -> Array:
        """Return the kernel as the features give it, in the accumulation dtype."""
        xp, (x, y) = self._check(x=x, y=y)
        with _numerics.ignore_fp_warnings():
            log_x, log_y = self.query_features(x).log, self.key_features(y).log
            queries = xp.exp(log_x - xp.max(log_x, axis=-1, keepdims=True))
            keys = xp.exp(log_y - xp.max(log_y, axis=-2, keepdims=True))
            queries = queries / xp.sum(queries, axis=-1, keepdims=True)
            keys = keys / xp.sum(keys, axis=-2, keepdims=True)
            return xp.astype(xp.matmul(queries, xp.matrix_transpose(keys)), x.dtype, copy=False)


def _softmax(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    weights = np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-np.inf))
    return np.asarray(weights / np.sum(weights, axis=axis, keepdims=True))

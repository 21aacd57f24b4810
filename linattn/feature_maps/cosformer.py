"""Cosine reweighting: ReLU features that know where they are."""

from __future__ import annotations

from math import inf, pi, sqrt
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _checks
from linattn.feature_maps._base import BaseFeatureMap, dots
from linattn.typing import Array, Features, Opaque, Tokens

__all__ = ["CosformerFeatures"]


class CosformerFeatures(BaseFeatureMap):
    r"""ReLU features reweighted by the cosine of the distance.

    .. math::
        \phi(x_i) = \left[ \max(\sqrt{s}\, x_i, 0) \cos \tfrac{\pi i}{2 M}, \;
        \max(\sqrt{s}\, x_i, 0) \sin \tfrac{\pi i}{2 M} \right]

    for the token at position i, so that

    .. math::
        \phi(q_i) \cdot \phi(k_j) = s \, \max(q_i, 0) \cdot \max(k_j, 0)
        \, \cos \tfrac{\pi (i - j)}{2 M}

    Letters: ``d`` dim, ``s`` scale, ``M`` max_length.

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    max_length : int
        M: positions are 0 to M - 1, where no cosine or sine is negative.
    scale : float, optional
        s > 0. Default 1.

    Attributes
    ----------
    dim, max_length, scale
        As above.
    num_features : int
        2 d.
    positive, unbiased, causal : bool
        What may be relied on.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, a scale that is not positive; on use, a position of
        max_length or more (where the position is traced it cannot be checked, and features past
        the end change sign).

    Notes
    -----
    Positions count from 0, or from ``state.length`` where a state is given: queries of full
    attention with an initial state, and queries of ``read_state``, begin at ``state.length``.
    A sequence that is to follow another therefore has to be added to its state; two states that
    both began at position 0 are merged as if their tokens stood side by side. Masked positions
    count.

    Deterministic: variance 0. It does not approximate softmax. A query without a positive
    coordinate in common with any key has a denominator of exactly 0 and gets output 0. Time and
    memory O(n d).

    References
    ----------
    Qin et al., "cosFormer: Rethinking Softmax in Attention" (2022), eq. 5 for the ReLU, and its
    cosine-based reweighting, decomposed by Ptolemy's theorem.

    Examples
    --------
    >>> from linattn.feature_maps import CosformerFeatures
    >>> CosformerFeatures(64, max_length=1024)
    CosformerFeatures(dim=64, max_length=1024, scale=1.0)
    """

    positive = True
    unbiased = True
    """Whether states of separate sequences merge."""
    _parameters = ("dim", "max_length", "scale")

    dim: int
    num_features: int
    max_length: int

    def __init__(self, dim: int, *, max_length: int, scale: float = 1.0) -> None:
        dim = _checks.check_positive_int("dim", dim)
        self._set(
            dim=dim,
            num_features=2 * dim,
            max_length=_checks.check_positive_int("max_length", max_length),
            scale=_checks.check_finite_number("scale", scale, positive=True),
        )

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Opaque:
        """Spec of both sides, evaluated at the positions of the tokens."""

        def angles(tokens: Tokens) -> Array:
            x, start = tokens.x, tokens.start
            n = x.shape[-2]
            self._check_positions(start, n)
            position = xp.arange(n, dtype=x.dtype, device=array_api_compat.device(x)) + start
            return (position * (pi / (2 * self.max_length)))[:, None]

        def features(tokens: Tokens) -> Features:
            angle = angles(tokens)
            u = tokens.x * sqrt(self.scale)
            u = xp.maximum(u, xp.zeros_like(u))
            values = xp.concat([u * xp.cos(angle), u * xp.sin(angle)], axis=-1)
            # A token without a feature must not set the scale on which a state has it.
            zeros = xp.zeros_like(values)
            return Features(xp.where(values == 0, zeros - inf, zeros), values)

        def vjp(tokens: Tokens, cotangent: Features) -> Array:
            angle, g, d = angles(tokens), cotangent.values, self.dim
            g = g[..., :d] * xp.cos(angle) + g[..., d:] * xp.sin(angle)
            return xp.where(tokens.x > 0, g * sqrt(self.scale), xp.zeros_like(g))

        return Opaque(features, vjp)

    def _check_positions(self, start: Any, n: int) -> None:
        if isinstance(start, int) and start + n > self.max_length:
            raise ValueError(
                f"max_length must be at least the number of positions, got "
                f"max_length={self.max_length} for positions up to {start + n - 1}; make a "
                f"CosformerFeatures with a larger one (its features are others)"
            )

    def kernel(self, x: Array, y: Array) -> Array:
        """Exact kernel, x at positions 0..n-1 and y at 0..s-1.

        ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim; more than max_length rows.
        """

        def closed_form(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
            n, s = a.shape[-2], b.shape[-2]
            self._check_positions(0, max(n, s))
            distance = np.arange(n)[:, None] - np.arange(s)
            weight = self.scale * np.cos(pi / (2 * self.max_length) * distance)
            return np.asarray(dots(np.maximum(a, 0), np.maximum(b, 0)) * weight)

        return self._on_host(closed_form, x, y)

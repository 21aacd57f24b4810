"""Positive random features of the softmax kernel, exp(scale x.y): FAVOR+ and its antithetic twin.

One implementation: ``log phi_r(x) = sqrt(s) w_r.x - s |x|^2 / 2 - log(m) / 2``. All variances are
relative to independent rows plus what the sampler's pair function takes away.
"""

from __future__ import annotations

from abc import abstractmethod
from math import log, sqrt
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _checks
from linattn.feature_maps._base import dots, square_norms
from linattn.feature_maps._projected import SoftmaxKernelFeatures
from linattn.sampling import num_pairs
from linattn.typing import Array, Exponential

__all__ = ["HyperbolicFeatures", "PositiveFeatures"]


class _ExponentialFeatures(SoftmaxKernelFeatures):
    """Everything the exponential family shares."""

    positive = True

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        """Spec of both sides: ``P = sqrt(s) Omega^T``, ``Q = s``, ``col = (log w - log m) / 2``."""
        P = sqrt(self.scale) * np.swapaxes(self.projection, -1, -2)
        col = np.full(self.projection.shape[:-1], -0.5 * log(self.num_features))
        if self.log_weights is not None:
            col = col + 0.5 * self.log_weights
        if self._columns_per_row == 2:
            col = np.concatenate([col, col], axis=-1)
        return Exponential(
            _checks.device_array(P, xp, dtype, device),
            self.scale,
            _checks.device_array(col, xp, dtype, device),
            paired=self._columns_per_row == 2,
        )

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate with this map's sampler.

        Raises
        ------
        NotImplementedError
            The sampler states no pair function, or the map was made from a given projection.
        """
        sampler = self._known_sampler(f"{type(self).__name__}.estimate")

        def closed_form(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
            a, b = sqrt(self.scale) * a, sqrt(self.scale) * b
            xx, yy = square_norms(a, b)
            xy = dots(a, b)
            v = np.maximum(xx + yy + 2 * xy, 0)
            gap = num_pairs(self._rows, self.dim) / self._rows**2 * sampler.pair_gap(v, self.dim)
            return np.asarray(np.exp(2 * xy) * (self._independent(v) / self._rows - gap))

        return self._on_host(closed_form, x, y)

    @staticmethod
    @abstractmethod
    def _independent(v: NDArray[np.float64]) -> NDArray[np.float64]:
        """Relative variance of the estimate of one row, v = |x + y|^2."""


class PositiveFeatures(_ExponentialFeatures):
    r"""FAVOR+: positive random features of the softmax kernel.

    .. math::
        \phi_r(x) = m^{-1/2} \exp(\sqrt{s}\, \omega_r \cdot x - s |x|^2 / 2),
        \qquad \mathrm{E}\, \phi(x) \cdot \phi(y) = \exp(s\, x \cdot y)

    Letters: ``d`` dim, ``m`` features, ``s`` scale, ``N_p`` ordered pairs of rows in one block.

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    num_features : int, optional
        m; default ``d ln d`` rounded up to whole blocks of d.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    sampler : str or callable, optional
        How the m rows are drawn: a name in :data:`linattn.sampling.SAMPLERS`, or
        ``sampler(num, dim, rng) -> (num, dim)``. Default ``"orthogonal"``.
    rng : int, Generator, SeedSequence or None, optional
        Seed; the same seed gives the same projection for every library.

    Attributes
    ----------
    dim, num_features, scale, sampler
        As above.
    projection : ndarray, (m, d)
        The rows omega, unscaled float64, read-only.
    positive, unbiased, causal : bool
        What may be relied on.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, a scale that is not positive, an unknown sampler, a
        bad seed.

    Notes
    -----
    Unbiased. With ``v = s |x + y|^2`` and ``K`` the kernel the variance is
    ``K^2 [(e^v - 1) / m - N_p / m^2 G(v)]``, where G is the sampler's pair gap: 0 for independent
    rows, ``1 - e^-v 1F1(d; d/2; v/2)`` for orthogonal ones. Time O(n m d), memory O(n m).

    References
    ----------
    Choromanski et al., "Rethinking Attention with Performers" (2021), Lemma 1 (eq. 5) and
    Lemma 2; Theorem 2 bounds what orthogonal rows gain, which is exact here.

    Examples
    --------
    >>> from linattn.feature_maps import PositiveFeatures
    >>> PositiveFeatures(64, rng=0)
    PositiveFeatures(dim=64, num_features=320, scale=0.125, sampler='orthogonal')
    """

    @staticmethod
    def _independent(v: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.expm1(v))


class HyperbolicFeatures(_ExponentialFeatures):
    r"""Hyperbolic cosine features: FAVOR+ with every row used with both signs.

    .. math::
        \phi(x) = (2r)^{-1/2} e^{-s |x|^2 / 2}
        [e^{\sqrt{s} \Omega x}, e^{-\sqrt{s} \Omega x}],
        \qquad \mathrm{E}\, \phi(x) \cdot \phi(y) = \exp(s\, x \cdot y)

    Letters: ``d`` dim, ``m`` features (columns), ``r = m / 2`` rows, ``s`` scale, ``N_p`` ordered
    pairs of rows in one block.

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    num_features : int, optional
        m, even; default ``d ln d`` rounded up to whole blocks of 2 d.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    sampler : str or callable, optional
        How the r rows are drawn. Default ``"orthogonal"``.
    rng : int, Generator, SeedSequence or None, optional
        Seed.

    Attributes
    ----------
    dim, num_features, scale, sampler
        As above.
    projection : ndarray, (m / 2, d)
        The rows omega, unscaled float64, read-only.
    positive, unbiased, causal : bool
        What may be relied on.

    Raises
    ------
    TypeError, ValueError
        As :class:`PositiveFeatures`; an odd num_features.

    Notes
    -----
    Unbiased. With ``v = s |x + y|^2`` the variance is
    ``K^2 [e^-v (e^v - 1)^2 / (2 r) - N_p / r^2 G(v)]``: with independent rows and equal columns
    ``1 - e^-v`` times that of :class:`PositiveFeatures`. Time O(n m d), memory O(n m).

    References
    ----------
    Choromanski et al., "Rethinking Attention with Performers" (2021), Lemma 1 (eq. 6), Lemma 2.
    """

    _columns_per_row = 2

    @staticmethod
    def _independent(v: NDArray[np.float64]) -> NDArray[np.float64]:
        # e^-v (e^v - 1)^2 / 2 without overflow of the square.
        return np.asarray(np.expm1(v) * -np.expm1(-v) / 2)

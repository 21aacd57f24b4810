"""Random Fourier features of the softmax kernel: unbiased, bounded, and signed."""

from __future__ import annotations

from math import sqrt
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.feature_maps._base import square_distances, square_norms
from linattn.feature_maps._projected import SoftmaxKernelFeatures
from linattn.typing import Activation, Array, Pointwise

__all__ = ["TrigonometricFeatures"]


def _cos_sin(u: Array, xp: ModuleType) -> tuple[Array, None]:
    return xp.concat([xp.cos(u), xp.sin(u)], axis=-1), None


def _cos_sin_vjp(u: Array, g: Array, xp: ModuleType) -> Array:
    r = u.shape[-1]
    return g[..., r:] * xp.cos(u) - g[..., :r] * xp.sin(u)


COS_SIN = Activation("cos_sin", _cos_sin, _cos_sin_vjp)


class TrigonometricFeatures(SoftmaxKernelFeatures):
    r"""Trigonometric random features of the softmax kernel.

    .. math::
        \phi(x) = r^{-1/2} e^{s |x|^2 / 2}
        [\cos \sqrt{s} \Omega x, \sin \sqrt{s} \Omega x],
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
        What may be relied on; positive is False.

    Raises
    ------
    TypeError, ValueError
        As :class:`PositiveFeatures`; an odd num_features.

    Notes
    -----
    Unbiased. With ``u = s |x - y|^2`` the variance is
    ``e^(s |x|^2 + s |y|^2) [(1 - e^-u)^2 / (2 r) - N_p / r^2 H(u)]``, where H is the sampler's
    trigonometric pair gap. Time O(n m d), memory O(n m).

    The features have both signs: the denominator of attention may be small or negative, and its
    ratio far from the truth. Nothing is clamped; ask for the log normalizer to see it (NaN where
    the denominator is negative).

    References
    ----------
    Rahimi and Recht, "Random Features for Large-Scale Kernel Machines" (2007); Choromanski et
    al., "Rethinking Attention with Performers" (2021), eq. 4 and Lemma 2.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = 0.3 * np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> phi = linattn.feature_maps.TrigonometricFeatures(8, 64, rng=0)
    >>> linattn.linear_attention(query, key, value, phi).shape
    (50, 8)
    """

    positive = False
    _features_per_row = 2
    _kind = "trigonometric"

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Pointwise:
        """Spec of both sides: cosines and sines of ``x P``, rows on the log ``s |x|^2 / 2``."""
        P = sqrt(self.scale) * np.swapaxes(self.projection, -1, -2)
        factor: Array = self._rows**-0.5
        if self.log_weights is not None:
            weights = factor * np.exp(0.5 * self.log_weights)
            weights = np.concatenate([weights, weights], axis=-1)
            factor = _arrays.device_array(weights, xp, dtype, device)
        return Pointwise(
            COS_SIN,
            _arrays.device_array(P, xp, dtype, device),
            quad=self.scale / 2,
            factor=factor,
        )

    def _square_norm(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.scale * square_distances(x, y)

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate with this map's sampler.

        Raises
        ------
        NotImplementedError
            The sampler states no pair function, or the map was made from a given projection.
        """
        sampler = self._known_sampler("TrigonometricFeatures.estimate")

        def closed_form(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
            u = self._square_norm(a, b)
            xx, yy = (self.scale * squares for squares in square_norms(a, b))
            gap = self._sampler_moment(sampler.variance_gap, u)
            rest = np.expm1(-u) ** 2 / (2 * self._rows) - gap
            return np.asarray(np.exp(xx + yy + np.log(np.maximum(rest, 0))))

        return self._on_host(closed_form, x, y)

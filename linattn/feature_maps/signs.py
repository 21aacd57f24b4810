"""One-bit keys: signs of random projections, as features of the linear kernel."""

from __future__ import annotations

from functools import partial
from math import exp, lgamma, pi, sqrt
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.feature_maps._base import dots, square_norms
from linattn.feature_maps._projected import ProjectedFeatureMap
from linattn.sampling import Seed, fixed_norm, gaussian, num_pairs
from linattn.typing import Array, Features, Opaque, Tokens

__all__ = ["SignFeatures"]

Floats = NDArray[np.float64]

SAMPLERS = {"gaussian": gaussian, "orthogonal": fixed_norm}
"""How rows are drawn: independent, or in Haar blocks, whose rows all have norm sqrt(d)."""


class SignFeatures(ProjectedFeatureMap):
    r"""One bit for each key and row: unbiased dot products from signs of random projections.

    .. math::
        \phi(q) = \sqrt{s}\, S q, \qquad \psi(k) = \sqrt{s}\, c\, |k|\, \mathrm{sign}(S k),
        \qquad \mathrm{E}\, \phi(q) \cdot \psi(k) = s\, q \cdot k

    Letters: ``d`` dim, ``m`` rows of S and features, ``s`` scale, ``b`` blocks of d rows, the last
    one of r rows.

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    num_features : int, optional
        m, bits for each key. Default ``d ln d``, in whole blocks.
    scale : float, optional
        s > 0. Default 1.
    sampler : {"orthogonal", "gaussian"}, optional
        Rows of S: blocks of Haar matrices, or independent N(0, I). Default "orthogonal".
    rng : int, Generator, SeedSequence or None, optional
        Seed of S. Default None.

    Attributes
    ----------
    dim, num_features, scale, sampler
        As above.
    projection : ndarray, (m, d)
        S; for "orthogonal" sqrt(d) times Haar rows.
    positive, unbiased, causal : bool
        False: denominators may cancel; True; True.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, a scale that is not positive, another sampler.

    Notes
    -----
    Unbiased, with ``c = sqrt(pi / 2) / m`` for Gaussian rows and, for Haar rows u of length 1,
    ``c = sqrt(pi) Gamma((d + 1) / 2) / (m Gamma(d / 2))``. For m = d that is 3.2 % at d = 8, and
    0.39 % at d = 64, below the ``sqrt(pi / (2 d))`` in use, which is its limit for large d.

    *Mean.* Let w be a row, e = k / |k| and q = a e + q', q' orthogonal to e. ``w.q sign(w.e)`` is
    ``a |w.e| + w.q' sign(w.e)``. Reflecting w in the hyperplane orthogonal to e keeps its
    distribution, keeps w.q' and turns the sign: the second term has mean 0. The mean is
    ``a E|w.e|``, with ``E|w.e| = sqrt(2 / pi)`` for Gaussian rows and
    ``Gamma(d / 2) / (sqrt(pi) Gamma((d + 1) / 2))`` for Haar rows, and ``a |k| = q.k``.

    *Variance, one row.* ``(w.q sign(w.e))^2 = (w.q)^2`` has the mean ``|q|^2``, for Haar rows
    ``|q|^2 / d``. So m independent Gaussian rows have

    .. math:: \mathrm{Var} = \frac{s^2}{m} \Bigl(\frac{\pi}{2} |q|^2 |k|^2 - (q \cdot k)^2\Bigr)

    *Two rows of one Haar block.* Their coordinates along e are two coordinates (u, u') of a
    uniform unit vector, ``E|u u'| = 2 / (pi d)`` (two Gaussians have 2 / pi, and the mean square of
    their norm is d). Given these coordinates, those along q' / |q'| are two coordinates of a
    uniform unit vector orthogonal to all of that vector, so that their product has the mean
    ``-u u' / (d - 1)``. Mixed terms vanish by the reflection. The product of both rows has the mean

    .. math:: P = \frac{2}{\pi d} \Bigl(a^2 - \frac{|q|^2 - a^2}{d - 1}\Bigr)

    With C = m c, and N_p ordered pairs of rows of one block
    (:func:`linattn.sampling.num_pairs`), the others being independent,

    .. math::
        \mathrm{Var} = \frac{s^2 C^2 |k|^2}{m^2} \Bigl(m \frac{|q|^2}{d} + N_p P\Bigr)
        + s^2 (q \cdot k)^2 \Bigl(\frac{m (m - 1) - N_p}{m^2} - 1\Bigr)

    **Unbiased dot products give biased exponentials.** For Gaussian noise
    ``E exp(X) = exp(s q.k + Var / 2)``: softmax weights made from these dot products are too large
    by a factor ``exp(Var / 2)`` that differs from pair to pair.

    The linear kernel takes both signs, and so do denominators: use ``normalize=False``. The map has
    no gradients, since a sign has none.
    Time O(n m d), memory O(n m).

    References
    ----------
    Zandieh, Daliri and Han, "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization" (2024),
    lemmas 3.2 and 3.5, for Gaussian rows. Haar rows are derived in this project.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.feature_maps import SignFeatures
    >>> phi = SignFeatures(8, 16, sampler="gaussian", rng=0)
    >>> x = np.eye(8)[:1]
    >>> round(float(phi.variance(x, x)[0, 0]), 6)  # (pi / 2 - 1) / 16
    0.035675
    """

    positive = False
    _parameters = ("scale", "sampler", "projection")

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        scale: float = 1.0,
        sampler: str = "orthogonal",
        rng: Seed = None,
    ) -> None:
        if sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
        projection = self._draw(dim, num_features, SAMPLERS[sampler], rng)
        self._set(
            dim=int(projection.shape[-1]),
            num_features=int(projection.shape[-2]),
            scale=_checks.check_finite_number("scale", scale, positive=True),
            projection=projection,
            sampler=sampler,
            unbiased=True,
        )

    def redraw(self, rng: Seed = None) -> SignFeatures:
        """Return the same map with a new projection."""
        options: Any = {"scale": self.scale, "sampler": self.sampler}
        return type(self)(self.dim, self.num_features, rng=rng, **options)

    def _constant(self) -> float:
        """``m c``, for the rows of :attr:`projection`."""
        if self.sampler == "gaussian":
            return sqrt(pi / 2)
        d = self.dim
        return sqrt(pi / d) * exp(lgamma((d + 1) / 2) - lgamma(d / 2))

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Opaque:
        """Spec of queries: ``sqrt(s) S q``."""
        P = sqrt(self.scale) * np.swapaxes(self.projection, -1, -2)
        return Opaque(partial(_projected, P=_arrays.device_array(P, xp, dtype, device), xp=xp))

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Opaque:
        """Spec of keys: ``sign(S k)``, and ``sqrt(s) c |k|`` in the log of a row."""
        P = np.swapaxes(self.projection, -1, -2)
        factor = sqrt(self.scale) * self._constant() / self.num_features
        P = _arrays.device_array(P, xp, dtype, device)
        return Opaque(partial(_signed, P=P, factor=factor, xp=xp))

    def kernel(self, x: Array, y: Array) -> Array:
        """Return ``s x.y``, ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim.
        """
        return self._on_host(lambda a, b: self.scale * dots(a, b), x, y)

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of :meth:`estimate`, shapes as :meth:`kernel`."""
        return self._on_host(self._closed_form, x, y)

    def _closed_form(self, x: Floats, y: Floats) -> Floats:
        m, d = self.num_features, self.dim
        (xx, yy), along = square_norms(x, y), dots(x, y) ** 2
        if self.sampler == "gaussian":
            return np.asarray(self.scale**2 * (pi / 2 * xx * yy - along) / m)
        pairs = num_pairs(m, d)
        # Rows here are sqrt(d) times as long as those of the docstring.
        together = 2 / pi * (along - (xx * yy - along) / max(1, d - 1))
        rows = self._constant() ** 2 * (m * xx * yy + pairs * together)
        variance = rows / m**2 - along * (m + pairs) / m**2
        return np.asarray(self.scale**2 * np.maximum(variance, 0))


def _projected(tokens: Tokens, *, P: Array, xp: ModuleType) -> Features:
    return Features(None, xp.matmul(tokens.x, P))


def _signed(tokens: Tokens, *, P: Array, factor: float, xp: ModuleType) -> Features:
    x = tokens.x
    # Norms without overflow, and 0 for a vector of zeros.
    largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
    safe = xp.where(largest == 0, xp.ones_like(largest), largest)
    norm = xp.sqrt(xp.sum((x / safe) ** 2, axis=-1, keepdims=True)) * factor
    signs = xp.sign(xp.matmul(x / safe, P))
    return Features(xp.log(safe), norm * signs)

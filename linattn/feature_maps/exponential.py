"""Positive random features of the softmax kernel: FAVOR+ and everything after it.

All are the exponential family of :mod:`linattn.feature_maps._exponential`: FAVOR+ has no tilt, the
hyperbolic map pairs each row with its opposite, GERF has one tilt for all axes, DERF one an axis.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks
from linattn.feature_maps import _tilts
from linattn.feature_maps._exponential import ExponentialFeatures
from linattn.feature_maps._samples import check_samples, pool_heads
from linattn.feature_maps.reparametrized import Reparametrized
from linattn.sampling import Seed, as_generator
from linattn.typing import Array

__all__ = [
    "DenseExponentialFeatures",
    "GeneralizedExponentialFeatures",
    "HyperbolicFeatures",
    "PositiveFeatures",
]

Floats = NDArray[np.float64]


class PositiveFeatures(ExponentialFeatures):
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
    >>> PositiveFeatures(64, rng=0)  # doctest: +ELLIPSIS
    PositiveFeatures(dim=64, num_features=320, scale=0.125, sampler='orthogonal', fingerprint=...)
    """


class HyperbolicFeatures(ExponentialFeatures):
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
    ``1 - e^-v`` times the variance of :class:`PositiveFeatures`. Time O(n m d), memory O(n m).

    References
    ----------
    Choromanski et al., "Rethinking Attention with Performers" (2021), Lemma 1 (eq. 6), Lemma 2.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = 0.3 * np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> phi = linattn.feature_maps.HyperbolicFeatures(8, 64, rng=0)
    >>> linattn.linear_attention(query, key, value, phi).shape
    (50, 8)
    """

    antithetic = True


class GeneralizedExponentialFeatures(ExponentialFeatures):
    r"""Generalized exponential features (OPRF, FAVOR++): a tilt A that lowers the variance.

    .. math::
        f(\omega, x) = (1 - 4A)^{d/4} \exp(A |\omega|^2 + \sqrt{1 - 4A}\, \sqrt{s}\,
        \omega \cdot x - s |x|^2 / 2), \qquad
        \phi(x) = (2r)^{-1/2} [f(\omega_i, x), f(-\omega_i, x)]_{i \le r}

    and ``E phi(x) . phi(y) = exp(s x.y)``. Letters: ``d`` dim, ``m`` features (columns),
    ``r = m / 2`` rows (m without antithetic pairs), ``s`` scale.

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    num_features : int, optional
        m, even when antithetic; default ``d ln d`` rounded up to whole blocks.
    A : float or array_like (heads), optional
        The tilt, below 1/8; negative values shorten large features. Default 0, which is
        :class:`HyperbolicFeatures`. :meth:`fit` finds the best.
    antithetic : bool, optional
        Use every row with both signs. Default True: the lowest variance known at equal columns
        when A is near its best.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    sampler : str or callable, optional
        How the rows are drawn. Default ``"orthogonal"``.
    rng : int, Generator, SeedSequence or None, optional
        Seed.

    Attributes
    ----------
    dim, num_features, antithetic, scale, sampler
        As above.
    A : float or ndarray
        The tilt, of each head where it has axes.
    projection : ndarray, (r, d)
        The rows omega, unscaled float64, read-only.
    positive, unbiased, causal : bool
        What may be relied on; ``causal`` is False after :meth:`fit`.

    Raises
    ------
    TypeError, ValueError
        As :class:`PositiveFeatures`; an A of 1/8 or more, where the variance is infinite.

    Notes
    -----
    Unbiased. With ``v = s |x + y|^2``, ``rho = 1 / (1 - 8A)`` and
    ``c = ((rho + 1)^2 / (4 rho))^(d/2)`` the relative variance of one pair is
    ``c (e^(rho v) + e^-v) / 2 - 1`` (of one row ``c e^(rho v) - 1``), and r of them have 1/r of
    it less the sampler's gap, which does not depend on A for orthogonal rows. Time O(n m d),
    memory O(n m).

    References
    ----------
    Likhosherstov et al., "Chefs' Random Tables" (2022), Theorem 3.1 to 3.3, for A and its optimum;
    the antithetic orthogonal form and its variance were derived in this project.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = 0.3 * np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> phi = linattn.feature_maps.GeneralizedExponentialFeatures(8, 64, A=-0.1, rng=0)
    >>> linattn.linear_attention(query, key, value, phi).shape
    (50, 8)
    """

    A: Any
    _parameters = ("A", "antithetic", "scale", "projection", "log_weights")

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        A: float | ArrayLike = 0.0,
        antithetic: bool = True,
        scale: float | None = None,
        sampler: str | Any = "orthogonal",
        rng: Seed = None,
    ) -> None:
        self._take(dim, A=A, antithetic=antithetic)
        super().__init__(dim, num_features, scale=scale, sampler=sampler, rng=rng)

    def _take(self, dim: int, *, A: float | ArrayLike = 0.0, antithetic: bool = True) -> None:
        tilt = _tilts.check_tilt(A)
        self._set(
            antithetic=_checks.check_flag("antithetic", antithetic),
            A=tilt if tilt.ndim else float(tilt),
            _A=tilt[..., None],
        )

    def _parameters_taken(self) -> dict[str, Any]:
        return {"A": self.A, "antithetic": self.antithetic}

    @classmethod
    def from_projection(
        cls,
        projection: ArrayLike,
        *,
        A: float | ArrayLike = 0.0,
        antithetic: bool = True,
        scale: float | None = None,
        log_weights: ArrayLike | None = None,
    ) -> Self:
        """Make a map from given rows omega; see :meth:`PositiveFeatures.from_projection`.

        Raises
        ------
        ValueError
            Wrong shapes, NaN or inf, an A of 1/8 or more.
        """
        return cls._from_rows(projection, scale, log_weights, A=A, antithetic=antithetic)

    @classmethod
    @_arrays.on_array_device
    def fit(
        cls,
        query: Array,
        key: Array,
        *,
        num_features: int | None = None,
        antithetic: bool = True,
        scale: float | None = None,
        sampler: str | Any = "orthogonal",
        rng: Seed = None,
    ) -> Self:
        """Make a map with the best A for these queries and keys, one for each head.

        Parameters
        ----------
        query, key : array, (..., L, d) and (..., S, d)
            A sample; leading axes are heads.
        num_features, antithetic, scale, sampler, rng
            As the class.

        Returns
        -------
        GeneralizedExponentialFeatures
            With ``causal`` False: it has seen the whole sequence. To use the tilt of one sample
            on other sequences give it to the class: ``GeneralizedExponentialFeatures(dim,
            A=fitted.A)``.

        Raises
        ------
        TypeError, ValueError
            As :func:`linattn.linear_attention` for query and key; no token at all.

        Notes
        -----
        The closed form minimizes the mean log second moment over all pairs (without antithetic
        pairs; with them the optimum is slightly nearer 0): with
        ``phi = mean |x + y|^2 = mean |x|^2 + mean |y|^2 + 2 mean x . mean y`` and ``t = phi / d``,
        ``A = (1 - 2t - sqrt((2t + 1)^2 + 8t)) / 16``. Time O((L + S) d) a head.
        """
        x, y, scale = _tilts.scaled_sample(query, key, scale)
        A = _tilts.optimal_tilt(_tilts.mean_square(x, y) / x.shape[-1])
        new = cls(
            x.shape[-1],
            num_features,
            A=A if A.ndim else float(A),
            antithetic=antithetic,
            scale=scale,
            sampler=sampler,
            rng=rng,
        )
        new._set(causal=False)
        return new


class DenseExponentialFeatures(ExponentialFeatures):
    r"""Dense exponential features (DERF): one tilt for each axis of a basis fitted to the data.

    .. math::
        f(\omega, x) = \prod_l (1 - 4A_l)^{1/4} \exp(A_l \omega_l^2 +
        \sqrt{1 - 4A_l}\, \omega_l x'_l - x_l'^2 / 2)

    with ``x' = sqrt(s) T x`` for queries and ``sqrt(s) T^-T x`` for keys;
    ``E f(omega, x) f(omega, y) = exp(s x.y)``. Letters: ``d`` dim, ``m`` features (columns), ``r``
    rows, ``s`` scale.

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    num_features : int, optional
        m, even when antithetic; default ``d ln d`` rounded up to whole blocks.
    A : array_like, (..., d)
        The tilts, below 1/8; leading axes are heads.
    transform : array_like, (..., d, d)
        T, invertible.
    antithetic : bool, optional
        Use every row with both signs. Default True.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    sampler : str or callable, optional
        How the rows are drawn. Default ``"orthogonal"``.
    rng : int, Generator, SeedSequence or None, optional
        Seed.

    Attributes
    ----------
    dim, num_features, A, transform, antithetic, scale, sampler
        As above.
    projection : ndarray, (r, d)
        The rows omega, unscaled float64, read-only.
    positive, unbiased, causal : bool
        What may be relied on; ``causal`` is False after :meth:`fit`.

    Raises
    ------
    TypeError, ValueError
        As :class:`PositiveFeatures`; an A of 1/8 or more; a transform that is not invertible.

    Notes
    -----
    Unbiased. The exact variance is known for independent rows, and for coupled ones where all A
    of the map are equal. Time O(n m d + n d^2), memory O(n m).

    References
    ----------
    Likhosherstov et al., "FAVOR#: Sharp Attention Kernel Approximations via New Classes of
    Positive Random Features" (2023), Theorem 4.1 to 4.3.
    """

    A: Floats
    transform: Floats
    _parameters = ("A", "transform", "antithetic", "scale", "projection", "log_weights")

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        A: ArrayLike,
        transform: ArrayLike,
        antithetic: bool = True,
        scale: float | None = None,
        sampler: str | Any = "orthogonal",
        rng: Seed = None,
    ) -> None:
        self._take(dim, A=A, transform=transform, antithetic=antithetic)
        super().__init__(dim, num_features, scale=scale, sampler=sampler, rng=rng)

    def _take(  # type: ignore[override]
        self, dim: int, *, A: ArrayLike, transform: ArrayLike, antithetic: bool = True
    ) -> None:
        dim = _checks.check_positive_int("dim", dim)
        tilt = np.atleast_1d(_tilts.check_tilt(A))
        T = np.array(transform, dtype=np.float64)
        if tilt.shape[-1] != dim or T.shape[-2:] != (dim, dim):
            raise ValueError(
                f"A must have shape (..., {dim}) and transform (..., {dim}, {dim}), got "
                f"{tilt.shape} and {T.shape}"
            )
        self._set(
            antithetic=_checks.check_flag("antithetic", antithetic),
            A=tilt,
            _A=tilt,
            transform=T,
            _transforms=(T, _tilts.inverse_transpose(T)),
        )

    def _parameters_taken(self) -> dict[str, Any]:
        return {"A": self.A, "transform": self.transform, "antithetic": self.antithetic}

    @classmethod
    def from_projection(  # type: ignore[override]
        cls,
        projection: ArrayLike,
        *,
        A: ArrayLike,
        transform: ArrayLike,
        antithetic: bool = True,
        scale: float | None = None,
        log_weights: ArrayLike | None = None,
    ) -> Self:
        """Make a map from given rows omega; see :meth:`PositiveFeatures.from_projection`.

        Raises
        ------
        ValueError
            Wrong shapes, NaN or inf, an A of 1/8 or more, a transform that is not invertible.
        """
        return cls._from_rows(
            projection, scale, log_weights, A=A, transform=transform, antithetic=antithetic
        )

    @classmethod
    @_arrays.on_array_device
    def fit(
        cls,
        query: Array,
        key: Array,
        *,
        num_features: int | None = None,
        symmetric: bool = True,
        antithetic: bool = True,
        scale: float | None = None,
        sampler: str | Any = "orthogonal",
        rng: Seed = None,
    ) -> Self:
        """Make a map with the best axes and tilts for these queries and keys, for each head.

        Parameters
        ----------
        query, key : array, (..., L, d) and (..., S, d)
            A sample; leading axes are heads.
        symmetric : bool, optional
            True transforms queries and keys alike, by a rotation (SDERF). False first balances
            their second moments, ``P M_q P = M_k`` with ``T^T T = P`` (ADERF), and then rotates.
            Default True.
        num_features, antithetic, scale, sampler, rng
            As the class.

        Returns
        -------
        DenseExponentialFeatures
            With ``causal`` False: it has seen the whole sequence.

        Raises
        ------
        TypeError, ValueError
            As :func:`linattn.linear_attention` for query and key; no token at all.

        Notes
        -----
        The axes are the eigenvectors of the second moment of ``x + y``, its eigenvalues give the
        tilts in closed form: the optimum of the mean log second moment among symmetric maps
        (without antithetic pairs). Time O((L + S) d^2 + d^3) a head.
        """
        symmetric = _checks.check_flag("symmetric", symmetric)
        x, y, scale = _tilts.scaled_sample(query, key, scale)
        d = x.shape[-1]
        balance = np.eye(d)
        if not symmetric:
            balance = _tilts.balancing_root(_tilts.second_moment(x), _tilts.second_moment(y))
            x, y = x @ balance, y @ np.linalg.inv(balance)
        eigenvalues, axes = np.linalg.eigh(_tilts.sum_second_moment(x, y))
        new = cls(
            d,
            num_features,
            A=_tilts.optimal_tilt(np.maximum(eigenvalues, 0)),
            transform=np.swapaxes(axes, -1, -2) @ balance,
            antithetic=antithetic,
            scale=scale,
            sampler=sampler,
            rng=rng,
        )
        new._set(causal=False)
        return new

    @classmethod
    @_arrays.on_array_device
    def calibrate(
        cls,
        samples: Any,
        *,
        num_features: int | None = None,
        temperature: float = 0.5,
        antithetic: bool = True,
        scale: float | None = None,
        sampler: str | Any = "orthogonal",
        rng: Seed = None,
    ) -> Reparametrized:
        r"""Make a centred, balanced map with the best axes and tilts for inputs like these.

        Parameters
        ----------
        samples : sequence of tuples, or one tuple
            Each ``(query, key)`` of one sequence, ``(..., L, d)`` and ``(..., S, d)``, valid tokens
            only: there is no mask, leave padding out; a third array, the values, is not read.
            Leading axes are heads, the same in all samples; lengths may differ. A batch is given as
            a list of its sequences. Of Dask arrays a sample of rows is computed, as by
            :meth:`CalibratedFeatures.calibrate`.
        num_features : int, optional
            m, even when antithetic; default ``d ln d`` rounded up to whole blocks.
        temperature : float, optional
            Keys count as ``exp(temperature s c.k)`` in the statistics, c the mean query: 1 is the
            attention of c, 0 counts all alike. Default 0.5.
        antithetic, scale, sampler, rng
            As the class.

        Returns
        -------
        Reparametrized
            Around a map of this class, with the leading axes of the keys: query heads that share a
            key head share its statistics. ``causal`` is True: the statistics are constants. They
            must come from other sequences than the map is used on, or they leak.

        Raises
        ------
        TypeError
            Samples that are not tuples of arrays; as :func:`linattn.linear_attention` for each.
        ValueError
            No sample, no token, NaN or inf, shapes that do not fit; a temperature that is not
            finite; as the class.

        Notes
        -----
        In ``x = sqrt(s) q`` and ``y = sqrt(s) k``: c = mean x, b and ``S_y`` the weighted mean and
        covariance of y (weights sum to 1 in each sequence, which counts by its keys), ``S_x`` the
        covariance of x. Softmax attention does not change under ``x -> M^T (x - c)``, ``y -> M^-1
        (y - b)`` (:class:`Reparametrized`), and with ``M M^T = P``, ``P S_x P = S_y`` both
        covariances become one, whose eigenvectors are the axes; twice its eigenvalues are the
        second moments of x + y along them and give the tilts. Unbiased for ``exp(s q.k)`` whatever
        the samples. 1e-3 of its mean eigenvalue is added to each covariance; fewer than about 2 d
        tokens are a poor guide all the same. Time O((L + S) d^2 + d^3) a head and sequence.

        References
        ----------
        Centring and weighted statistics were derived in this project; balancing and tilts:
        Likhosherstov et al., "FAVOR#" (2023), Theorem 4.3.
        """
        temperature = _checks.check_finite_number("temperature", temperature)
        generator = as_generator(rng)
        sequences, heads, d, scale = check_samples(samples, scale, generator)
        x = np.concatenate([pool_heads(sample.x, heads) for sample in sequences], axis=-2)
        c = x.mean(axis=-2)
        y = np.concatenate([sample.y for sample in sequences], axis=-2)
        p = _tilts.key_weights([sample.y for sample in sequences], c, temperature)
        b = np.sum(p * y, axis=-2)
        x, y = x - c[..., None, :], np.sqrt(p) * (y - b[..., None, :])
        covariance_x = _tilts.shrink(_tilts.second_moment(x))
        covariance_y = _tilts.shrink(np.swapaxes(y, -1, -2) @ y)
        balance = _tilts.balancing_root(covariance_x, covariance_y)
        eigenvalues, axes = np.linalg.eigh(balance @ covariance_x @ balance)
        inside = cls(
            d,
            num_features,
            A=_tilts.optimal_tilt(2 * np.maximum(eigenvalues, 0)),
            transform=np.eye(d),
            antithetic=antithetic,
            scale=scale,
            sampler=sampler,
            rng=generator,
        )
        inside._set(_unseeded=rng is None)
        root = sqrt(scale)
        return Reparametrized(inside, c / root, b / root, balance @ axes)

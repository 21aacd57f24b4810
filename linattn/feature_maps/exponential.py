"""Positive random features of the softmax kernel, exp(scale x.y): FAVOR+ and everything after it.

One implementation. With ``x' = sqrt(s) T x`` (T a transform of the queries, and ``T^-T`` of the
keys, so that inner products stay) and one tilt A_l an axis,

    log phi_r(x) = sum_l [A_l w_rl^2 + sqrt(1 - 4 A_l) w_rl x'_l + log(1 - 4 A_l) / 4]
                   - |x'|^2 / 2 - log(m) / 2

is unbiased for every A < 1/4 and has finite variance for A < 1/8. Antithetic maps use every row
with both signs.
"""

from __future__ import annotations

from math import log, sqrt
from types import ModuleType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks
from linattn.feature_maps._base import dots, square_distances
from linattn.feature_maps._projected import SoftmaxKernelFeatures
from linattn.feature_maps._samples import check_samples, pool_heads
from linattn.feature_maps.reparametrized import Reparametrized
from linattn.sampling import Sampler, Seed
from linattn.typing import Array, Exponential

__all__ = [
    "DenseExponentialFeatures",
    "GeneralizedExponentialFeatures",
    "HyperbolicFeatures",
    "PositiveFeatures",
]

Floats = NDArray[np.float64]

SHRINKAGE = 1e-3


class _ExponentialFeatures(SoftmaxKernelFeatures):
    """Everything the exponential family shares; A = 0 and no transform unless a map has them."""

    positive = True

    antithetic: bool = False
    _A: Floats | float = 0.0
    """Tilt, broadcast against ``(..., d)``."""
    _transforms: tuple[Floats, Floats] | None = None
    """T of the queries and ``T^-T`` of the keys, ``(..., d, d)`` each, or None for neither."""

    @property
    def _columns_per_row(self) -> int:  # type: ignore[override]
        return 2 if self.antithetic else 1

    @property
    def _kind(self) -> str:  # type: ignore[override]
        return "paired" if self.antithetic else "positive"

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        """Spec of the query side."""
        return self._spec(0, xp, dtype, device)

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        """Spec of the key side."""
        return self._spec(1, xp, dtype, device)

    @property
    def _is_symmetric(self) -> bool:
        return self._transforms is None

    def _spec(self, side: int, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        A = np.broadcast_to(self._A, (*np.shape(self._A)[:-1], self.dim))[..., None, :]
        P = sqrt(self.scale) * np.swapaxes(np.sqrt(1 - 4 * A) * self.projection, -1, -2)
        col = np.sum(A * self.projection**2 + np.log1p(-4 * A) / 4, axis=-1)
        col = col - 0.5 * log(self.num_features)
        if self.log_weights is not None:
            col = col + 0.5 * self.log_weights
        if self.antithetic:
            col = np.concatenate([col, col], axis=-1)
        Q: Any = self.scale
        if self._transforms is not None:
            T = self._transforms[side]
            T_t = np.swapaxes(T, -1, -2)
            P = T_t @ P
            Q = _arrays.device_array(self.scale * (T_t @ T), xp, dtype, device)
        return Exponential(
            _arrays.device_array(P, xp, dtype, device),
            Q,
            _arrays.device_array(col, xp, dtype, device),
            paired=self.antithetic,
        )

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate with this map's sampler, shapes as :meth:`kernel`.

        Raises
        ------
        NotImplementedError
            The sampler does not know what its coupling takes from the variance, or the map was
            made from a given projection.
        """
        sampler = self._known_sampler(f"{type(self).__name__}.estimate")
        return self._on_host(lambda a, b: self._variance(sampler, a, b), x, y)

    def _square_norm(self, x: Floats, y: Floats) -> Floats:
        x, y = self._transformed(x, y)
        return square_distances(x, -y)

    def _transformed(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        if self._transforms is not None:
            x, y = (
                x @ np.swapaxes(self._transforms[0], -1, -2),
                y @ np.swapaxes(self._transforms[1], -1, -2),
            )
        return sqrt(self.scale) * x, sqrt(self.scale) * y

    def _variance(self, sampler: Sampler, x: Floats, y: Floats) -> Floats:
        """Kernel squared times the relative variance of independent rows, less the gap.

        With ``rho = 1 / (1 - 8 A)`` and ``z = x' + y'`` one row has the relative second moment
        ``prod_l ((rho_l + 1)^2 / (4 rho_l))^(1/2) exp(sum_l rho_l z_l^2)``; a pair of signs has
        the mean of that and of the same with ``-|z|^2`` for the last sum.
        """
        log_square = 2 * self.scale * dots(x, y)
        v = self._square_norm(x, y)
        x, y = self._transformed(x, y)
        A = np.broadcast_to(self._A, (*np.shape(self._A)[:-1], self.dim))
        rho = 1 / (1 - 8 * A)
        spread = np.sum(np.log((rho + 1) ** 2 / (4 * rho)), axis=-1)[..., None, None] / 2
        root = np.sqrt(rho)[..., None, :]
        tilted = square_distances(root * x, -root * y)
        # Times exp(-top): the moment alone may be out of range where the kernel makes up for it.
        top = np.maximum(spread + tilted, 0)
        row = _scaled_expm1(spread + tilted, top)
        if self.antithetic:
            row = (row + _scaled_expm1(spread - v, top)) / 2
        gap = self._law(sampler.variance_gap, v) * np.exp(-top)
        log_relative = np.log(np.maximum(row / self._rows - gap, 0))
        return np.asarray(np.exp(log_square + top + log_relative))

    def _law(self, closed_form: Any, square_norm: Floats) -> Floats:
        """Evaluate head by head, for every A that there is."""
        A = np.atleast_1d(self._A)
        if np.any(A[..., :1] != A):
            if closed_form.__self__.name == "gaussian":
                return np.asarray(closed_form(self._kind, square_norm, self._rows, self.dim))
            message = (
                f"with sampler={self.sampler!r} the variance of the estimate is known "
                f"where all axes of a head have one tilt A, got {A.shape[-1]} of them; for "
                f"sampler='gaussian' it is always known"
            )
            raise NotImplementedError(message)
        lead = np.broadcast_shapes(A.shape[:-1], square_norm.shape[:-2])
        square_norm = np.broadcast_to(square_norm, (*lead, *square_norm.shape[-2:]))
        found = np.empty(square_norm.shape)
        tilts = np.broadcast_to(A[..., 0], lead)
        for tilt in np.unique(tilts):
            of_tilt = tilts == tilt
            found[of_tilt] = closed_form(
                self._kind, square_norm[of_tilt], self._rows, self.dim, A=float(tilt)
            )
        return found


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
    >>> PositiveFeatures(64, rng=0)  # doctest: +ELLIPSIS
    PositiveFeatures(dim=64, num_features=320, scale=0.125, sampler='orthogonal', fingerprint=...)
    """


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

    antithetic = True


class GeneralizedExponentialFeatures(_ExponentialFeatures):
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
        tilt = _checked_tilt(A)
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
        x, y, scale = _scaled_sample(query, key, scale)
        mean_square = np.mean(np.sum(x * x, axis=-1), axis=-1) + np.mean(
            np.sum(y * y, axis=-1), axis=-1
        )
        phi = mean_square + 2 * np.sum(x.mean(axis=-2) * y.mean(axis=-2), axis=-1)
        A = _optimal_tilt(phi / x.shape[-1])
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


class DenseExponentialFeatures(_ExponentialFeatures):
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
        tilt = np.atleast_1d(_checked_tilt(A))
        T = np.array(transform, dtype=np.float64)
        if tilt.shape[-1] != dim or T.shape[-2:] != (dim, dim):
            message = (
                f"A must have shape (..., {dim}) and transform (..., {dim}, {dim}), got "
                f"{tilt.shape} and {T.shape}"
            )
            raise ValueError(message)
        self._set(
            antithetic=_checks.check_flag("antithetic", antithetic),
            A=tilt,
            _A=tilt,
            transform=T,
            _transforms=(T, _inverse_transpose(T)),
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
        x, y, scale = _scaled_sample(query, key, scale)
        d = x.shape[-1]
        balance = np.eye(d)
        if not symmetric:
            balance = _square_root(_balancing(_second_moment(x), _second_moment(y)))
            x, y = x @ balance, y @ np.linalg.inv(balance)
        means = x.mean(axis=-2)[..., :, None] * y.mean(axis=-2)[..., None, :]
        moment = _second_moment(x) + _second_moment(y) + means + np.swapaxes(means, -1, -2)
        eigenvalues, axes = np.linalg.eigh(moment)
        new = cls(
            d,
            num_features,
            A=_optimal_tilt(np.maximum(eigenvalues, 0)),
            transform=np.swapaxes(axes, -1, -2) @ balance,
            antithetic=antithetic,
            scale=scale,
            sampler=sampler,
            rng=rng,
        )
        new._set(causal=False)
        return new

    @classmethod
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
            a list of its sequences.
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
        sequences, heads, d, scale = check_samples(samples, scale)
        x = np.concatenate([pool_heads(one.x, heads) for one in sequences], axis=-2)
        c = x.mean(axis=-2)
        keys = sum(one.y.shape[-2] for one in sequences)
        weights = []
        for one in sequences:
            logits = temperature * (one.y @ c[..., :, None])
            unscaled = np.exp(logits - np.max(logits, axis=-2, keepdims=True))
            share = one.y.shape[-2] / keys
            weights.append(share * unscaled / np.sum(unscaled, axis=-2, keepdims=True))
        y, p = (np.concatenate(parts, axis=-2) for parts in ([one.y for one in sequences], weights))
        b = np.sum(p * y, axis=-2)
        x, y = x - c[..., None, :], np.sqrt(p) * (y - b[..., None, :])
        covariance_x, covariance_y = _shrunk(_second_moment(x)), _shrunk(np.swapaxes(y, -1, -2) @ y)
        balance = _square_root(_balancing(covariance_x, covariance_y))
        eigenvalues, axes = np.linalg.eigh(balance @ covariance_x @ balance)
        inside = cls(
            d,
            num_features,
            A=_optimal_tilt(2 * np.maximum(eigenvalues, 0)),
            transform=np.eye(d),
            antithetic=antithetic,
            scale=scale,
            sampler=sampler,
            rng=rng,
        )
        root = sqrt(scale)
        return Reparametrized(inside, c / root, b / root, balance @ axes)


def _scaled_expm1(x: Floats, top: Floats) -> Floats:
    """Return ``(exp(x) - 1) exp(-top)`` of an ``x <= top``."""
    small = np.expm1(np.minimum(x, 1)) * np.exp(-top)
    return np.where(x > 1, np.exp(x - top) - np.exp(-top), small)


def _optimal_tilt(t: ArrayLike) -> Floats:
    """Return ``(1 - 2t - sqrt((2t + 1)^2 + 8t)) / 16``, t the mean square of an axis of x + y."""
    t = np.asarray(t, dtype=np.float64)
    # The same without cancellation: A = -t / (1 - 2t + sqrt((2t + 1)^2 + 8t)).
    return np.asarray(-t / (1 - 2 * t + np.sqrt((2 * t + 1) ** 2 + 8 * t)))


def _checked_tilt(A: Any) -> Floats:
    tilt = np.array(A, dtype=np.float64)
    if not np.isfinite(tilt).all() or not (tilt < 0.125).all():
        message = f"A must be finite and below 1/8, where the variance becomes infinite, got {A}"
        raise ValueError(message)
    return tilt


def _scaled_sample(query: Any, key: Any, scale: Any) -> tuple[Floats, Floats, float]:
    """Float64 copies of a sample, times ``sqrt(scale)``."""
    _, (query, key) = _checks.check_arrays(query=query, key=key)
    if query.shape[-1] != key.shape[-1] or 0 in query.shape or 0 in key.shape:
        message = (
            f"query and key must have one dim and at least one token, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
        raise ValueError(message)
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    x, y = (sqrt(scale) * _arrays.to_numpy(a).astype(np.float64) for a in (query, key))
    return x, y, scale


def _second_moment(x: Floats) -> Floats:
    return np.asarray(np.swapaxes(x, -1, -2) @ x / x.shape[-2])


def _shrunk(covariance: Floats) -> Floats:
    """Add 1e-3 of the mean eigenvalue: a direction that no token took is not for free."""
    d = covariance.shape[-1]
    mean = np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / d
    return np.asarray(covariance + (SHRINKAGE * mean + 1e-300) * np.eye(d))


def _power(matrix: Floats, exponent: float) -> Floats:
    """Power of symmetric matrices, eigenvalues kept a little above 0."""
    eigenvalues, axes = np.linalg.eigh(matrix)
    floor = 1e-12 * np.max(eigenvalues, axis=-1, keepdims=True) + 1e-300
    powers = np.maximum(eigenvalues, floor) ** exponent
    return np.asarray((axes * powers[..., None, :]) @ np.swapaxes(axes, -1, -2))


def _square_root(matrix: Floats) -> Floats:
    return _power(matrix, 0.5)


def _balancing(first: Floats, second: Floats) -> Floats:
    """Return the positive P with ``P first P = second``: a matrix geometric mean."""
    root, inverse = _power(first, 0.5), _power(first, -0.5)
    return np.asarray(inverse @ _square_root(root @ second @ root) @ inverse)


def _inverse_transpose(T: Floats) -> Floats:
    try:
        inverse = np.linalg.inv(T)
    except np.linalg.LinAlgError:
        inverse = np.full_like(T, np.nan)
    if not np.isfinite(inverse).all():
        message = "transform must be invertible, and is not"
        raise ValueError(message)
    return np.swapaxes(inverse, -1, -2)

"""Random Fourier features of kernels of the difference: bounded, signed, and for any spectrum.

A kernel k(x - y) with k(0) = 1 is the mean of cos(omega.(x - y)) over its spectrum, a probability
distribution. The spectra named here are all normal rows times something drawn beside them, so that
every sampler of normal rows draws them, whatever couples its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from types import ModuleType
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks, _generic
from linattn._generic.feature_vjps import features_vjp
from linattn.feature_maps._base import PairFunction
from linattn.feature_maps._projected import ProjectedFeatureMap
from linattn.feature_maps.trigonometric import COS_SIN
from linattn.sampling import Sampler, Seed, as_generator, gaussian
from linattn.typing import Array, Features, Opaque, Pointwise, Spec, Tokens

__all__ = ["RandomFourierFeatures"]

Floats: TypeAlias = NDArray[np.float64]


def _differences(x: Floats, y: Floats) -> Iterator[Floats]:
    """``|x_i - y_i|`` for all pairs, ``(..., n, s)``, one coordinate i at a time."""
    for a, b in zip(np.moveaxis(x, -1, 0), np.moveaxis(y, -1, 0), strict=True):
        yield np.abs(a[..., :, None] - b[..., None, :])


def _square_distance(x: Floats, y: Floats) -> Floats:
    # From the differences: inner products would lose k(0) = 1 to cancellation.
    return np.asarray(sum(difference**2 for difference in _differences(x, y)))


def _distance(x: Floats, y: Floats) -> Floats:
    return np.asarray(np.sqrt(_square_distance(x, y)))


def _gaussian(x: Floats, y: Floats) -> Floats:
    return np.asarray(np.exp(-_square_distance(x, y) / 2))


def _laplace(x: Floats, y: Floats) -> Floats:
    return np.asarray(np.exp(-np.asarray(sum(_differences(x, y)))))


def _exponential(x: Floats, y: Floats) -> Floats:
    return np.asarray(np.exp(-_distance(x, y)))


def _cauchy(x: Floats, y: Floats) -> Floats:
    product = np.ones(())
    for difference in _differences(x, y):
        product = product / (1 + difference**2)
    return product


# Beyond this exp(-u) is 0, and a polynomial of it that overflowed would make NaN of 0.
_FARTHEST = 800.0


def _matern32(x: Floats, y: Floats) -> Floats:
    u = np.minimum(sqrt(3) * _distance(x, y), _FARTHEST)
    return np.asarray((1 + u) * np.exp(-u))


def _matern52(x: Floats, y: Floats) -> Floats:
    u = np.minimum(sqrt(5) * _distance(x, y), _FARTHEST)
    return np.asarray((1 + u + u * u / 3) * np.exp(-u))


@dataclass(frozen=True)
class _Spectrum:
    """A kernel of bandwidth 1, and what makes rows of its spectrum of rows of N(0, I).

    Attributes
    ----------
    kernel : callable
        ``kernel(x, y)``, ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.
    degrees : int or None
        Rows are divided by ``sqrt(chi^2 / degrees)`` with these degrees of freedom; None:
        multiplied by ``sqrt(2 E)``, E exponential.
    by_row : bool
        Whether a row has one such number, or each coordinate one of its own.
    """

    kernel: PairFunction
    degrees: int | None
    by_row: bool

    def mix(self, rows: Floats, rng: np.random.Generator) -> Floats:
        size = (rows.shape[0], 1 if self.by_row else rows.shape[1])
        if self.degrees is None:
            return np.asarray(rows * np.sqrt(2 * rng.standard_exponential(size)))
        return np.asarray(rows / np.sqrt(rng.chisquare(self.degrees, size) / self.degrees))


SPECTRA = {
    "laplace": _Spectrum(_laplace, 1, by_row=False),
    "exponential": _Spectrum(_exponential, 1, by_row=True),
    "cauchy": _Spectrum(_cauchy, None, by_row=False),
    "matern32": _Spectrum(_matern32, 3, by_row=True),
    "matern52": _Spectrum(_matern52, 5, by_row=True),
}
KERNELS: dict[str, PairFunction] = {"gaussian": _gaussian} | {
    name: spectrum.kernel for name, spectrum in SPECTRA.items()
}


def _unit(x: Array, xp: ModuleType) -> Array:
    """Scale rows to length 1; a row of zeros stays, one with NaN or inf becomes NaN."""
    largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
    # Largest coordinate 1 first, so that no square overflows or vanishes.
    x = x / xp.where(largest == 0, xp.ones_like(largest), largest)
    square = xp.sum(x * x, axis=-1, keepdims=True)
    return x / xp.sqrt(xp.where(square == 0, xp.ones_like(square), square))


class RandomFourierFeatures(ProjectedFeatureMap):
    r"""Random Fourier features of a kernel of the difference, for any spectrum.

    .. math::
        \phi(x) = r^{-1/2} [\cos \Omega x / \ell, \sin \Omega x / \ell],
        \qquad \mathrm{E}\, \phi(x) \cdot \phi(y) = \mathrm{E} \cos(\omega \cdot (x - y) / \ell)
        = k((x - y) / \ell)

    Letters: ``d`` dim, ``m`` features (columns), ``r = m / 2`` rows omega, ``l`` bandwidth,
    ``t = (x - y) / l``, with the Euclidean norm ``|t|``.

    The kernels, and their rows made of normal ones ``g ~ N(0, I)``:

    * ``"gaussian"``: ``exp(-|t|^2 / 2)``, rows ``g``;
    * ``"laplace"``: ``exp(-sum_i |t_i|)``, each coordinate of g over ``sqrt(chi^2_1)`` of its own
      (Cauchy);
    * ``"exponential"``: ``exp(-|t|)``, which is Matern 1/2, rows ``g / sqrt(chi^2_1)``;
    * ``"matern32"``: ``(1 + u) exp(-u)``, ``u = sqrt(3) |t|``, rows ``g / sqrt(chi^2_3 / 3)``;
    * ``"matern52"``: ``(1 + u + u^2 / 3) exp(-u)``, ``u = sqrt(5) |t|``, rows
      ``g / sqrt(chi^2_5 / 5)``;
    * ``"cauchy"``: ``prod_i 1 / (1 + t_i^2)``, each coordinate of g times the ``sqrt(2 E)`` of an
      exponential variable of its own (Laplace).

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    num_features : int, optional
        m, even; default ``d ln d`` rounded up to whole blocks of 2 d.
    kernel : str, callable or None, optional
        k: a name of the list; for a spectrum of your own ``kernel(x, y)``, from float64 NumPy
        ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``, a function of ``x - y`` that is 1 at
        0; None where it is not known. Default ``"gaussian"``.
    bandwidth : float, optional
        l > 0, the length scale. Default 1.
    normalize : bool, optional
        Whether queries and keys are scaled to length 1 first: Random Feature Attention. Default
        False.
    sampler : str or callable, optional
        For a kernel of the list how the r rows g are drawn: a name in
        :data:`linattn.sampling.SAMPLERS`, or ``sampler(num, dim, rng) -> (num, dim)``. Otherwise a
        callable of that form which draws independent rows of your spectrum from the Generator rng.
        Default ``"orthogonal"``.
    rng : int, Generator, SeedSequence or None, optional
        Seed.

    Attributes
    ----------
    dim, num_features, bandwidth, normalize, sampler
        As above.
    scale : float
        ``1 / l^2``.
    projection : ndarray, (m / 2, d)
        The rows omega, of bandwidth 1, float64, read-only.
    log_weights : ndarray, (m / 2,), or None
        Of :meth:`from_projection`.
    positive, unbiased, causal : bool
        What may be relied on; positive is False. With a spectrum of your own, unbiased repeats
        what you say by giving its kernel.

    Raises
    ------
    TypeError, ValueError
        As :class:`PositiveFeatures`; an odd num_features, an unknown kernel, a kernel of your own
        without the sampler of its spectrum.

    Notes
    -----
    Unbiased, and exact at x = y. For independent rows the variance is
    ``(1 + k(2 t) - 2 k(t)^2) / (2 r)``; for the Gaussian kernel a sampler takes its trigonometric
    pair gap from that (``variance_gap``). Of the other kernels the gap of coupled rows is not
    known: use ``sampler="gaussian"`` where you need their variance. Time O(n m d), memory O(n m);
    ``kernel``, ``mean`` and ``variance`` O(n s d) and O(n s).

    The features have both signs: the denominator of attention may be small or negative, and its
    ratio far from the truth. Nothing is clamped; ask for the log normalizer to see it (NaN where
    the denominator is negative). Phases ``omega.x / l`` are as precise as the dtype: beyond 1e7
    they are arbitrary in float32. That is harmless for the few far rows of a heavy-tailed spectrum,
    but not where x itself is so long; a row x whose squared norm overflows is NaN.

    **Random Feature Attention** is ``normalize=True`` with the Gaussian kernel: between unit
    vectors it is ``exp(-1 / l^2) exp(x.y / l^2)``, so that attention with this kernel is softmax
    attention of the normalized vectors with scale ``1 / l^2``: the constant cancels. A vector of
    zeros has no direction and stays zero, never NaN: as a query it weighs all unit keys alike, as a
    key it has the weight ``exp(-1 / (2 l^2))``.

    References
    ----------
    Rahimi and Recht, "Random Features for Large-Scale Kernel Machines" (2007), eq. 2 and the
    table of Figure 1; Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006),
    eq. 4.14 to 4.17, for Matern kernels and spectra; Sutherland and Schneider, "On the Error of
    Random Fourier Features" (2015), for the variance; Yu et al., "Orthogonal Random Features"
    (2016), Theorem 1; Peng et al., "Random Feature Attention" (2021), Theorem 1 and section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.feature_maps import RandomFourierFeatures
    >>> phi = RandomFourierFeatures(2, 64, kernel="matern32", sampler="gaussian", rng=0)
    >>> x, y = np.zeros((1, 2)), np.ones((1, 2))
    >>> bool(abs(phi.estimate(x, y) - phi.kernel(x, y)) < 5 * np.sqrt(phi.variance(x, y)))
    True
    """

    positive = False
    _features_per_row = 2
    _parameters = ("bandwidth", "normalize", "projection", "log_weights")

    bandwidth: float
    normalize: bool
    log_weights: NDArray[np.float64] | None
    _kernel: str | PairFunction | None

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        kernel: str | PairFunction | None = "gaussian",
        bandwidth: float = 1.0,
        normalize: bool = False,
        sampler: str | Any = "orthogonal",
        rng: Seed = None,
    ) -> None:
        _check_kernel(kernel)
        if not isinstance(kernel, str) and isinstance(sampler, str):
            raise ValueError(
                f"sampler must be a callable that draws rows of the spectrum of a kernel of your "
                f"own, got {sampler!r}, which draws normal rows, with kernel={kernel!r}"
            )
        generator = as_generator(rng)
        rows = self._draw(dim, num_features, sampler, generator)
        if isinstance(kernel, str) and kernel in SPECTRA:
            rows = SPECTRA[kernel].mix(rows, generator)
        self._set(_unseeded=rng is None)
        self._finish(rows, kernel, bandwidth, normalize, sampler, None)

    def _finish(
        self,
        projection: Floats,
        kernel: str | PairFunction | None,
        bandwidth: Any,
        normalize: Any,
        sampler: Any,
        log_weights: Floats | None,
    ) -> None:
        normalize = _checks.check_flag("normalize", normalize)
        bandwidth = _checks.check_finite_number("bandwidth", bandwidth, positive=True)
        if isinstance(kernel, str):
            unbiased = self._sampler_unbiased(sampler)
        else:
            unbiased = kernel is not None and sampler is not None
        self._set(
            dim=int(projection.shape[-1]),
            num_features=2 * int(projection.shape[-2]),
            bandwidth=bandwidth,
            normalize=normalize,
            scale=(1 / bandwidth) * (1 / bandwidth),
            projection=projection,
            sampler=sampler,
            log_weights=log_weights,
            unbiased=unbiased,
            _kernel=kernel,
        )

    @classmethod
    def from_projection(
        cls,
        projection: ArrayLike,
        *,
        kernel: str | PairFunction | None = "gaussian",
        bandwidth: float = 1.0,
        normalize: bool = False,
        log_weights: ArrayLike | None = None,
    ) -> Self:
        """Make a map from given rows omega.

        Parameters
        ----------
        projection : array_like, (..., rows, d)
            Rows of the spectrum of bandwidth 1; leading axes are heads, each with rows of its own.
        kernel : str, callable or None, optional
            What :meth:`kernel` says. Default ``"gaussian"``.
        bandwidth : float, optional
            l. Default 1.
        normalize : bool, optional
            Whether queries and keys are scaled to length 1 first; one projection for all heads
            only. Default False.
        log_weights : array_like, (..., rows), optional
            Log importance weights: the estimate is ``mean_r exp(log_weights_r) f_r``. Default 0.
            Quadrature weights w that sum to 1 are ``log(w * rows)``.

        Returns
        -------
        RandomFourierFeatures
            With ``sampler`` None: nothing is known of how the rows were drawn, so ``unbiased`` is
            False and ``variance`` raises.

        Raises
        ------
        TypeError, ValueError
            As the class; wrong shapes, NaN or inf; heads with normalize.
        """
        _check_kernel(kernel)
        rows = cls._check_projection(projection)
        if _checks.check_flag("normalize", normalize) and rows.ndim > 2:
            raise ValueError(
                f"projection must have shape (rows, dim) with normalize=True, got {rows.shape}; "
                f"for a projection for each head normalize queries and keys yourself"
            )
        weights = cls._check_log_weights(log_weights, rows)
        new = cls.__new__(cls)
        new._finish(rows, kernel, bandwidth, normalize, None, weights)
        return new

    def redraw(self, rng: Seed = None) -> Self:
        """Return the same map with a new projection.

        Raises
        ------
        ValueError
            The map was made by ``from_projection``: there is no sampler to draw with.
        """
        self._check_redraw()
        return type(self)(
            self.dim,
            self.num_features,
            kernel=self._kernel,
            bandwidth=self.bandwidth,
            normalize=self.normalize,
            sampler=self.sampler,
            rng=rng,
        )

    def _repr_parameters(self) -> dict[str, Any]:
        shown = super()._repr_parameters()
        first = {name: shown.pop(name) for name in ("dim", "num_features")}
        return first | {"kernel": self._kernel} | shown

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Spec:
        """Spec of both sides: cosines and sines of ``x P``, ``P = Omega^T / l``."""
        P = np.swapaxes(self.projection, -1, -2) / self.bandwidth
        factor: Array = self._rows**-0.5
        if self.log_weights is not None:
            weights = factor * np.exp(0.5 * self.log_weights)
            weights = np.concatenate([weights, weights], axis=-1)
            factor = _arrays.device_array(weights, xp, dtype, device)
        # The row's log is 0, but for rows whose squared norm overflows: their phases mean nothing.
        spec = Pointwise(
            COS_SIN, _arrays.device_array(P, xp, dtype, device), quad=0.0, factor=factor
        )
        if not self.normalize:
            return spec

        def normalized(tokens: Tokens) -> Features:
            return _generic.evaluate(spec, Tokens(_unit(tokens.x, xp), None, tokens.start))

        def vjp(tokens: Tokens, cotangent: Features) -> Array:
            unit = _unit(tokens.x, xp)
            g = features_vjp(spec, Tokens(unit, None, tokens.start), cotangent)
            length = xp.sum(unit * tokens.x, axis=-1, keepdims=True)
            across = g - unit * xp.sum(unit * g, axis=-1, keepdims=True)
            # A row of zeros has no direction; it stays what it is.
            return xp.where(length == 0, xp.zeros_like(across), across / length)

        return Opaque(normalized, vjp)

    def kernel(self, x: Array, y: Array) -> Array:
        """Return ``k((x - y) / l)``, ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim.
        NotImplementedError
            The kernel of the spectrum was not given.
        """
        function = self._function("kernel")
        return self._on_host(lambda a, b: function(*self._reduced(a, b)), x, y)

    def mean(self, x: Array, y: Array) -> Array:
        """Exact mean of :meth:`estimate` over draws, shapes as :meth:`kernel`.

        The kernel itself, except with a biased sampler.

        Raises
        ------
        NotImplementedError
            The mean with this sampler is not known.
        """
        if self.unbiased or self._kernel != "gaussian":
            return super().mean(x, y)
        sampler = self._known_sampler("RandomFourierFeatures.estimate")

        def closed_form(a: Floats, b: Floats) -> Floats:
            s = _square_distance(*self._reduced(a, b))
            factor = sampler.mean_factor("trigonometric", s, self._rows, self.dim)
            return np.asarray(np.exp(-s / 2) * factor)

        return self._on_host(closed_form, x, y)

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate with this map's sampler.

        Raises
        ------
        NotImplementedError
            Nothing is known of how the rows were drawn, or of what their coupling does; or the
            kernel of the spectrum was not given.
        """
        function = self._function("variance")
        r = self._rows
        if self._kernel == "gaussian":
            sampler = self._known_sampler("RandomFourierFeatures.estimate")

            def closed_form(a: Floats, b: Floats) -> Floats:
                s = _square_distance(*self._reduced(a, b))
                gap = sampler.variance_gap("trigonometric", s, r, self.dim)
                return np.asarray(np.expm1(-s) ** 2 / (2 * r) - gap)

        else:
            self._check_independent()

            def closed_form(a: Floats, b: Floats) -> Floats:
                a, b = self._reduced(a, b)
                square = 1 + function(2 * a, 2 * b) - 2 * function(a, b) ** 2
                return np.asarray(np.maximum(square, 0) / (2 * r))

        return self._on_host(closed_form, x, y)

    def _reduced(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return queries and keys as the kernel of bandwidth 1 sees them."""
        if self.normalize:
            x, y = _unit(x, np), _unit(y, np)
        return x / self.bandwidth, y / self.bandwidth

    def _function(self, what: str) -> PairFunction:
        if self._kernel is None:
            raise NotImplementedError(
                f"the {what} needs the kernel of the spectrum that sampler={self.sampler!r} "
                f"draws: give it as kernel=, a function of x and y"
            )
        return KERNELS[self._kernel] if isinstance(self._kernel, str) else self._kernel

    def _check_independent(self) -> None:
        is_caller_kernel = not isinstance(self._kernel, str) and self.sampler is not None
        if is_caller_kernel and not isinstance(self.sampler, Sampler):
            return
        if self._known_sampler("RandomFourierFeatures.estimate") != gaussian:
            raise NotImplementedError(
                f"the variance of features of kernel={self._kernel!r} needs "
                f"E[cos(w1.t) cos(w2.t)] for two rows of one block, which is not known for "
                f"sampler={self.sampler!r}; it is closed for sampler='gaussian'"
            )


def _check_kernel(kernel: Any) -> None:
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ValueError(
                f"kernel must be one of {sorted(KERNELS)} or a callable, got {kernel!r}"
            )
    elif kernel is not None and not callable(kernel):
        raise TypeError(
            f"kernel must be one of {sorted(KERNELS)}, a callable or None, got {kernel!r}"
        )

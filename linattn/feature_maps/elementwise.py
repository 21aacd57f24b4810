"""Maps that apply one function to every coordinate: elu + 1, ReLU, and generalised attention."""

from __future__ import annotations

from math import pi, sqrt
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _checks
from linattn.feature_maps._base import BaseFeatureMap, dots, square_norms
from linattn.feature_maps._projected import ProjectedFeatureMap
from linattn.sampling import Seed, gaussian
from linattn.typing import Activation, Array, Pointwise

__all__ = ["ActivationFeatures", "EluFeatures", "ReluFeatures"]


def _elu_plus_one(u: Array, xp: ModuleType) -> tuple[Array, Array]:
    # A row of large negative numbers would underflow to no feature at all; its largest
    # coordinate goes to the log, which is 0 for every row that has a positive one.
    row = xp.max(u, axis=-1, keepdims=True)
    zero = xp.zeros_like(u)
    log = xp.minimum(row, xp.zeros_like(row))
    return xp.where(u > 0, u + 1, xp.exp(xp.minimum(u, zero) - log)), log


def _relu(u: Array, xp: ModuleType) -> tuple[Array, None]:
    return xp.maximum(u, xp.zeros_like(u)), None


ELU_PLUS_ONE = Activation("elu_plus_one", _elu_plus_one)
RELU = Activation("relu", _relu)


class _CoordinateFeatures(BaseFeatureMap):
    """A deterministic map of each coordinate: its kernel is what it computes."""

    positive = True
    unbiased = True
    _parameters = ("dim", "scale")
    _activation: ClassVar[Activation]

    def __init__(self, dim: int | None = None, *, scale: float = 1.0) -> None:
        dim = None if dim is None else _checks.check_positive_int("dim", dim)
        scale = _checks.check_finite_number("scale", scale, positive=True)
        self._set(dim=dim, num_features=dim, scale=scale)

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Pointwise:
        """Spec of both sides: ``f(sqrt(s) x)``."""
        return Pointwise(self._activation, sqrt(self.scale))

    def kernel(self, x: Array, y: Array) -> Array:
        """Return ``phi(x) . phi(y)``: the map is exact."""
        return self.estimate(x, y)


class EluFeatures(_CoordinateFeatures):
    r"""The feature map of "Transformers are RNNs": elu(x) + 1 of every coordinate.

    .. math::
        \phi(x) = \mathrm{elu}(\sqrt{s}\, x) + 1 =
        \begin{cases} \sqrt{s}\, x + 1 & x > 0 \\ e^{\sqrt{s}\, x} & x \le 0 \end{cases}

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
    Deterministic: the kernel is ``phi(x) . phi(y)`` itself, its variance 0. It does not
    approximate softmax. Time and memory O(n d). A row whose coordinates are all negative keeps
    its largest in the log, so that it cannot underflow to no feature.

    References
    ----------
    Katharopoulos et al., "Transformers are RNNs" (2020), eq. 7.
    """

    _activation = ELU_PLUS_ONE


class ReluFeatures(_CoordinateFeatures):
    r"""ReLU of every coordinate.

    .. math:: \phi(x) = \max(\sqrt{s}\, x, 0)

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
    Deterministic, and not an approximation of softmax. A query without a positive coordinate, or
    with none in common with any key, has a denominator of exactly 0 and gets output 0. Time and
    memory O(n d).

    References
    ----------
    Qin et al., "cosFormer: Rethinking Softmax in Attention" (2022), eq. 5 (without reweighting).
    """

    _activation = RELU


class ActivationFeatures(ProjectedFeatureMap):
    r"""Performer's generalised attention: f(W x) + epsilon.

    .. math:: \phi_r(x) = m^{-1/2} \left( f(\sqrt{s}\, \omega_r \cdot x) + \epsilon \right)

    and, without a projection, ``phi(x) = f(sqrt(s) x) + epsilon``. Letters: ``d`` dim, ``m``
    features, ``s`` scale.

    Parameters
    ----------
    dim : int, optional
        d, the last axis of queries and keys; needed with a projection.
    num_features : int, optional
        m; default ``d ln d`` rounded up to whole blocks of d, and d without a projection.
    activation : {"relu"} or callable, optional
        f. A callable takes and returns an array of the library in use, pointwise. Default
        ``"relu"``.
    epsilon : float, optional
        Added to every feature, a deliberate part of this kernel. Default 0.001, as in Performer.
    scale : float, optional
        s > 0. Default 1.
    sampler : str, callable or None, optional
        How the m rows are drawn; None for no projection. Default ``"orthogonal"``.
    rng : int, Generator, SeedSequence or None, optional
        Seed.

    Attributes
    ----------
    dim, num_features, activation, epsilon, scale, sampler
        As above.
    projection : ndarray, (m, d), or None
        The rows omega, unscaled float64, read-only.
    positive, unbiased, causal : bool
        What may be relied on; ``positive`` is claimed for ``"relu"`` with epsilon >= 0 only.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, a projection without dim, a num_features other than
        dim without a projection, an unknown activation or sampler.

    Notes
    -----
    For ``"relu"`` the kernel is known: with angle t between x and y and s = 1,
    ``|x| |y| (sin t + (pi - t) cos t) / (2 pi) + epsilon (|x| + |y|) / sqrt(2 pi) + epsilon^2``,
    estimated without bias; the variance is closed for independent rows (``sampler="gaussian"``).
    It does not approximate softmax. Time O(n m d), memory O(n m).

    References
    ----------
    Choromanski et al., "Rethinking Attention with Performers" (2021), section 2.2 and appendix
    on generalised attention; Cho and Saul, "Kernel Methods for Deep Learning" (2009), eq. 3 to 6.
    """

    _parameters = ("activation", "epsilon", "scale", "projection")

    dim: int | None  # type: ignore[assignment]
    num_features: int | None  # type: ignore[assignment]
    projection: NDArray[np.float64] | None  # type: ignore[assignment]
    activation: Any
    epsilon: float
    positive: bool  # type: ignore[misc]

    def __init__(
        self,
        dim: int | None = None,
        num_features: int | None = None,
        *,
        activation: Any = "relu",
        epsilon: float = 1e-3,
        scale: float = 1.0,
        sampler: str | Any | None = "orthogonal",
        rng: Seed = None,
    ) -> None:
        if sampler is None:
            dim = None if dim is None else _checks.check_positive_int("dim", dim)
            if num_features is not None and num_features != dim:
                message = (
                    f"num_features must be dim or None without a projection (sampler=None), got "
                    f"num_features={num_features} and dim={dim}"
                )
                raise ValueError(message)
            projection = None
        else:
            projection = self._draw(dim, num_features, sampler, rng)
        self._finish(projection, dim, activation, epsilon, scale, sampler)

    def _finish(
        self,
        projection: NDArray[np.float64] | None,
        dim: int | None,
        activation: Any,
        epsilon: Any,
        scale: Any,
        sampler: Any,
    ) -> None:
        is_relu = isinstance(activation, str) and activation == "relu"
        if isinstance(activation, str) and not is_relu:
            message = f"activation must be 'relu' or a callable, got {activation!r}"
            raise ValueError(message)
        if not is_relu and not callable(activation):
            message = f"activation must be 'relu' or a callable, got {activation!r}"
            raise TypeError(message)
        epsilon = _checks.check_finite_number("epsilon", epsilon)
        self._set(
            dim=dim if projection is None else int(projection.shape[-1]),
            num_features=dim if projection is None else int(projection.shape[-2]),
            activation=activation,
            epsilon=epsilon,
            scale=_checks.check_finite_number("scale", scale, positive=True),
            projection=projection,
            sampler=sampler,
            positive=is_relu and epsilon >= 0,
            unbiased=projection is None or (is_relu and self._sampler_unbiased(sampler)),
        )

    @classmethod
    def from_projection(
        cls,
        projection: ArrayLike,
        *,
        activation: Any = "relu",
        epsilon: float = 1e-3,
        scale: float = 1.0,
    ) -> Self:
        """Make a map from given rows omega, ``(..., m, d)``; leading axes are heads.

        Raises
        ------
        TypeError, ValueError
            As the class; a projection that is not finite or has fewer than two axes.
        """
        rows = cls._check_projection(projection)
        new = cls.__new__(cls)
        new._finish(rows, None, activation, epsilon, scale, None)
        return new

    def redraw(self, rng: Seed = None) -> Self:
        """Return the same map with a new projection.

        Raises
        ------
        ValueError
            There is no projection, or no sampler to draw it with.
        """
        self._check_redraw()
        return type(self)(
            self.dim,
            self.num_features,
            activation=self.activation,
            epsilon=self.epsilon,
            scale=self.scale,
            sampler=self.sampler,
            rng=rng,
        )

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Pointwise:
        """Spec of both sides: ``(f(x P) + epsilon) / sqrt(m)``, ``P = sqrt(s) Omega^T``."""
        if self.projection is None:
            return Pointwise(self._pointwise(), sqrt(self.scale), offset=self.epsilon)
        P = sqrt(self.scale) * np.swapaxes(self.projection, -1, -2)
        return Pointwise(
            self._pointwise(),
            _checks.device_array(P, xp, dtype, device),
            offset=self.epsilon,
            factor=self._rows**-0.5,
        )

    def _pointwise(self) -> Activation:
        if self.activation == "relu":
            return RELU
        return Activation("custom", lambda u, xp: (self.activation(u), None))

    def kernel(self, x: Array, y: Array) -> Array:
        """Exact kernel, ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        NotImplementedError
            With a projection, for any activation but ``"relu"``.
        """
        if self.projection is None:
            return self.estimate(x, y)
        self._check_relu("kernel")
        return self._on_host(lambda a, b: self._moments(a, b)[0], x, y)

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate; 0 without a projection.

        Raises
        ------
        NotImplementedError
            Any activation but ``"relu"``, or rows that are not independent.
        """
        if self.projection is None:
            return super().variance(x, y)
        self._check_relu("variance")
        if self._known_sampler("ActivationFeatures.estimate") != gaussian:
            message = (
                f"the variance of relu features needs E[relu(w1.x) relu(w1.y) relu(w2.x) "
                f"relu(w2.y)] for two rows of one block, which is not known for "
                f"sampler={self.sampler!r}; it is closed for sampler='gaussian'"
            )
            raise NotImplementedError(message)

        def closed_form(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
            mean, square = self._moments(a, b)
            return np.asarray((square - mean**2) / self._rows)

        return self._on_host(closed_form, x, y)

    def _check_relu(self, what: str) -> None:
        if self.activation != "relu":
            message = f"the {what} is known in closed form for activation='relu' only"
            raise NotImplementedError(message)

    def _moments(
        self, x: NDArray[np.float64], y: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and mean square of ``(relu(w.x) + eps) (relu(w.y) + eps)``, w ~ N(0, I)."""
        x, y, eps = sqrt(self.scale) * x, sqrt(self.scale) * y, self.epsilon
        xx, yy = square_norms(x, y)
        a, b = np.sqrt(xx), np.sqrt(yy)
        ab = a * b
        cos = np.clip(dots(x, y) / np.where(ab > 0, ab, 1), -1, 1)
        angle = np.arccos(cos)
        sin = np.sin(angle)
        both = ab * (sin + (pi - angle) * cos) / (2 * pi)
        squares = ab**2 * (3 * sin * cos + (pi - angle) * (1 + 2 * cos**2)) / (2 * pi)
        # E[relu(u)^2 relu(v)] = (1 + cos)^2 / (2 sqrt(2 pi)), by parts.
        thirds = ab * (a + b) * (1 + cos) ** 2 / (2 * sqrt(2 * pi))
        ones = (a + b) / sqrt(2 * pi)
        mean = both + eps * ones + eps**2
        square = (
            squares
            + 2 * eps * thirds
            + eps**2 * ((xx + yy) / 2 + 4 * both)
            + 2 * eps**3 * ones
            + eps**4
        )
        return mean, square

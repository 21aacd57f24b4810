"""Maps that apply one function to every coordinate: elu + 1, ReLU, and generalized attention."""

from __future__ import annotations

from math import gamma, pi, sqrt
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks
from linattn.feature_maps._base import BaseFeatureMap, square_norms
from linattn.feature_maps._projected import ProjectedFeatureMap
from linattn.sampling import Seed, gaussian
from linattn.typing import (
    ELU_PLUS_ONE,
    HEAVISIDE,
    RELU,
    SQUARED_RELU,
    Activation,
    Array,
    Pointwise,
)

__all__ = ["ActivationFeatures", "EluFeatures", "ReluFeatures"]


# The order n of the arc-cosine kernel is the place in this list: f(u) = u^n where u > 0.
ARC_COSINE = (HEAVISIDE, RELU, SQUARED_RELU)
ORDERS = {activation.name: order for order, activation in enumerate(ARC_COSINE)}


class _CoordinateFeatures(BaseFeatureMap):
    """A deterministic map of each coordinate: its kernel is the dot product of its features."""

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
    approximate softmax. Time and memory O(n d). Where inputs are large, features are kept as
    logs: none underflows beside the others of its row.

    References
    ----------
    Katharopoulos et al., "Transformers are RNNs" (2020), eq. 7.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = 0.3 * np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> linattn.linear_attention(query, key, value, phi).shape
    (50, 8)
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

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = 0.3 * np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> phi = linattn.feature_maps.ReluFeatures()
    >>> linattn.linear_attention(query, key, value, phi).shape
    (50, 8)
    """

    _activation = RELU


class ActivationFeatures(ProjectedFeatureMap):
    r"""Performer's generalized attention: f(W x) + epsilon.

    .. math:: \phi_r(x) = m^{-1/2} \left( f(\sqrt{s}\, \omega_r \cdot x) + \epsilon \right)

    and, without a projection, ``phi(x) = f(sqrt(s) x) + epsilon``. Letters: ``d`` dim, ``m``
    features, ``s`` scale.

    Parameters
    ----------
    dim : int, optional
        d, the last axis of queries and keys; needed with a projection.
    num_features : int, optional
        m; default ``d ln d`` rounded up to whole blocks of d, and d without a projection.
    activation : {"heaviside", "relu", "squared_relu"} or callable, optional
        f: where u > 0 it is 1, u or u^2, and 0 elsewhere. A callable takes and returns an array
        of the library in use, pointwise. Default ``"relu"``.
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
        What may be relied on; ``positive`` is claimed for named activations with epsilon >= 0.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, a projection without dim, a num_features other than
        dim without a projection, an unknown activation or sampler.

    Notes
    -----
    The named activations estimate half the arc-cosine kernel of order n = 0, 1, 2 without bias.
    With the angle t between x and y it is ``s^n |x|^n |y|^n J_n / (2 pi)``, where

    * ``"heaviside"``: ``J_0 = pi - t``;
    * ``"relu"``: ``J_1 = sin t + (pi - t) cos t``;
    * ``"squared_relu"``: ``J_2 = 3 sin t cos t + (pi - t) (1 + 2 cos^2 t)``;

    plus ``epsilon (E f(u) + E f(v)) + epsilon^2``, u and v being normal with variances
    ``s |x|^2`` and ``s |y|^2``: E f(u) is 1/2, ``sqrt(s) |x| / sqrt(2 pi)`` and ``s |x|^2 / 2``.
    The variance is closed, with any epsilon, for independent rows (``sampler="gaussian"``); with
    epsilon = 0 it is ``p (1 - p) / m`` for ``"heaviside"``, p the kernel. A vector of zeros has
    features ``epsilon / sqrt(m)``, and so has kernel 0 with any other where epsilon = 0.

    None of these kernels approximates softmax. Time O(n m d), memory O(n m).

    References
    ----------
    Choromanski et al., "Rethinking Attention with Performers" (2021), section 2.2 and appendix
    on generalized attention; Cho and Saul, "Kernel Methods for Deep Learning" (2009), eq. 1 to 7
    (twice the kernel here); So et al., "Primer" (2021), for the squared ReLU. The variances are
    derived in this project.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.feature_maps import ActivationFeatures
    >>> phi = ActivationFeatures(2, 64, activation="heaviside", epsilon=0.0, rng=0)
    >>> phi.kernel(np.eye(2), np.eye(2))
    array([[0.5 , 0.25],
           [0.25, 0.5 ]])
    """

    _parameters = ("dim", "activation", "epsilon", "scale", "projection")

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
                raise ValueError(
                    f"num_features must be dim or None without a projection (sampler=None), got "
                    f"num_features={num_features} and dim={dim}"
                )
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
        is_named = isinstance(activation, str) and activation in ORDERS
        if not is_named and not callable(activation):
            raise (ValueError if isinstance(activation, str) else TypeError)(
                f"activation must be one of {[*ORDERS]} or a callable, got {activation!r}"
            )
        epsilon = _checks.check_finite_number("epsilon", epsilon)
        self._set(
            dim=dim if projection is None else int(projection.shape[-1]),
            num_features=dim if projection is None else int(projection.shape[-2]),
            activation=activation,
            epsilon=epsilon,
            scale=_checks.check_finite_number("scale", scale, positive=True),
            projection=projection,
            sampler=sampler,
            positive=is_named and epsilon >= 0,
            unbiased=projection is None or (is_named and self._sampler_unbiased(sampler)),
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
            _arrays.device_array(P, xp, dtype, device),
            offset=self.epsilon,
            factor=self._rows**-0.5,
        )

    def _pointwise(self) -> Activation:
        if isinstance(self.activation, str):
            return ARC_COSINE[ORDERS[self.activation]]
        return Activation("custom", lambda u, xp: (self.activation(u), None))

    def kernel(self, x: Array, y: Array) -> Array:
        """Exact kernel, ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        NotImplementedError
            With a projection, for an activation of your own.
        """
        if self.projection is None:
            return self.estimate(x, y)
        order = self._order("kernel")
        return self._on_host(lambda a, b: self._moments(a, b, order)[0], x, y)

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate; 0 without a projection.

        Raises
        ------
        NotImplementedError
            An activation of your own, or rows that are not independent.
        """
        if self.projection is None:
            return super().variance(x, y)
        order = self._order("variance")
        if self._known_sampler("ActivationFeatures.estimate") != gaussian:
            raise NotImplementedError(
                f"the variance of {self.activation} features needs E[f(w1.x) f(w1.y) f(w2.x) "
                f"f(w2.y)] for two rows of one block, which is not known for "
                f"sampler={self.sampler!r}; it is closed for sampler='gaussian'"
            )

        def closed_form(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
            mean, square = self._moments(a, b, order)
            return np.asarray(np.maximum(square - mean**2, 0) / self._rows)

        return self._on_host(closed_form, x, y)

    def _order(self, what: str) -> int:
        if not isinstance(self.activation, str):
            raise NotImplementedError(
                f"the {what} is known in closed form for activation 'heaviside', 'squared_relu' "
                f"and 'relu' only"
            )
        return ORDERS[self.activation]

    def _moments(
        self, x: NDArray[np.float64], y: NDArray[np.float64], n: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and mean square of ``(f(w.x) + eps) (f(w.y) + eps)``, w ~ N(0, I), order n."""
        x, y, eps = sqrt(self.scale) * x, sqrt(self.scale) * y, self.epsilon
        angle = _Angle.between(x, y)
        xx, yy = square_norms(x, y)
        a, b = (_powers(np.sqrt(squares), n) for squares in (xx, yy))
        both = a * b * angle.half_moment(n, n)
        ones = (a + b) * _half_normal_moment(n)
        mean = both + eps * ones + eps**2
        square = (
            (a * b) ** 2 * angle.half_moment(2 * n, 2 * n)
            + 2 * eps * a * b * (a + b) * angle.half_moment(2 * n, n)
            + eps**2 * ((a**2 + b**2) * _half_normal_moment(2 * n) + 4 * both)
            + 2 * eps**3 * ones
            + eps**4
        )
        return mean, square


def _powers(norms: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """``|x|^n``, 0 for a zero vector whatever n: f(0) = 0."""
    return np.where(norms == 0, 0, norms**n)


def _half_normal_moment(p: int) -> float:
    """``E max(u, 0)^p`` of a standard normal u, where u > 0."""
    return float(2 ** (p / 2) * gamma((p + 1) / 2) / (2 * sqrt(pi)))


class _Angle(NamedTuple):
    """The angle t between vectors: accurate sine and pi - t at both ends."""

    cos: NDArray[np.float64]
    sin: NDArray[np.float64]
    rest: NDArray[np.float64]

    @classmethod
    def between(cls, x: NDArray[np.float64], y: NDArray[np.float64]) -> Self:
        """Angles ``(..., n, s)``; an inner product would lose half the digits near 0 and pi."""
        x, y = (v / np.where(norms == 0, 1, norms) for v, norms in ((x, _norms(x)), (y, _norms(y))))
        less, more = np.zeros(()), np.zeros(())
        for a, b in zip(np.moveaxis(x, -1, 0), np.moveaxis(y, -1, 0), strict=True):
            less = less + (a[..., :, None] - b[..., None, :]) ** 2
            more = more + (a[..., :, None] + b[..., None, :]) ** 2
        less, more = np.sqrt(less), np.sqrt(more)
        return cls((more - less) * (more + less) / 4, less * more / 2, 2 * np.arctan2(more, less))

    def half_moment(self, p: int, q: int) -> NDArray[np.float64]:
        """``E u^p v^q`` over u, v > 0, both standard normal with correlation cos t.

        By parts, ``E u g(u, v) = E dg/du + cos t E dg/dv``; where a power is 0 its derivative is
        the point mass at 0, given which the other is normal with standard deviation sin t.
        """
        if p < q:
            return self.half_moment(q, p)
        if p == 0:
            return self.rest / (2 * pi)
        first = (p - 1) * self.half_moment(p - 2, q) if p > 1 else self._at_zero(q)
        second = q * self.half_moment(p - 1, q - 1) if q > 0 else self._at_zero(p - 1)
        return first + self.cos * second

    def _at_zero(self, p: int) -> NDArray[np.float64]:
        return self.sin**p * (_half_normal_moment(p) / sqrt(2 * pi))


def _norms(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.norm(x, axis=-1, keepdims=True))

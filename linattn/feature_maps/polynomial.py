"""Packed monomials: exact maps of polynomials of the inner product, and of truncated exponentials.

Every column is one monomial ``x^a = prod_i x_i^a_i`` of degree ``k = |a|``. Since
``(x.y)^k = sum_{|a|=k} k!/a! x^a y^a``, a kernel ``sum_k w_k (x.y)^k`` with ``w_k >= 0`` has the
features ``sqrt(w_k k!/a!) x^a``, each monomial once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb, factorial, sqrt
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _numerics
from linattn.feature_maps._base import BaseFeatureMap, dots
from linattn.typing import Array, Features, Opaque, Tokens
from linattn.typing._shifts import largest

__all__ = ["PolynomialFeatures", "TaylorFeatures"]


MAX_ORDER, MAX_DEGREE = 170, 1000
"""Of Taylor and polynomial maps: beyond them weights overflow."""

MAX_FEATURES = 2**20
"""Columns beyond which a map is an error: a state of a million of them takes 260 MB a head."""


class _Degree(NamedTuple):
    """Monomials of one degree, each a monomial of the degree below times one coordinate."""

    parent: NDArray[np.int64]
    last: NDArray[np.int64]
    multinomial: NDArray[np.float64]
    """``k!/a!``."""
    child: NDArray[np.int64]
    """Column of each monomial below times each coordinate; one past the end for none."""


@lru_cache(maxsize=16)
def _degrees(dim: int, highest: int) -> tuple[_Degree, ...]:
    """All monomials up to a degree, in lexicographic order within each."""
    parent, last = np.zeros(1, np.int64), np.zeros(1, np.int64)
    run, multinomial = np.zeros(1, np.int64), np.ones(1)
    degrees = [_Degree(parent, last, multinomial, np.zeros((0, dim), np.int64))]
    for k in range(1, highest + 1):
        children, above_count = dim - last, last.size
        parent = np.repeat(np.arange(last.size), children)
        first = np.cumsum(children) - children
        above, last = last[parent], np.arange(parent.size) - first[parent] + last[parent]
        run = np.where((last == above) & (k > 1), run[parent] + 1, 1)
        multinomial = multinomial[parent] * k / run
        child = np.full((above_count, dim), parent.size)
        child[parent, last] = np.arange(parent.size)
        degrees.append(_Degree(parent, last, multinomial, child))
    return tuple(degrees)


class _Monomials(NamedTuple):
    """Features of one degree, on a device."""

    parent: Array
    last: Array
    coefficients: Array
    child: Array


class _Evaluator:
    """Columns ``sqrt(w_k k!/a!) (sqrt(s) x)^a`` on a device, and their derivative."""

    def __init__(
        self,
        weights: Sequence[float],
        dim: int,
        scale: float,
        xp: ModuleType,
        dtype: Any,
        device: Any,
    ) -> None:
        self.xp, self.dim, self.root = xp, dim, sqrt(scale)
        self.top = len(weights) - 1
        self.used = [weight > 0 for weight in weights]
        self.degrees = [
            _Monomials(
                xp.asarray(degree.parent, device=device),
                xp.asarray(degree.last, device=device),
                _arrays.device_array(np.sqrt(weight * degree.multinomial), xp, dtype, device),
                xp.asarray(degree.child.ravel(), device=device),
            )
            for weight, degree in zip(weights, _degrees(dim, self.top), strict=True)
        ]

    def _scaled(self, x: Array) -> tuple[Array, Array]:
        """Rows scaled to a largest coordinate of about 1, and their divisors.

        Powers of the divisor are kept in the row's log: they cannot overflow.
        """
        xp = self.xp
        u = x * self.root
        size = largest(xp.abs(u), keepdims=True)
        if any(self.used[:-1]):
            size = xp.maximum(size, xp.ones_like(size))
        size = _numerics.divisor(xp.where(size == 0, xp.ones_like(size), size), xp)
        return u / size, size

    def _monomials(self, u: Array) -> Iterator[Array]:
        """All monomials of each degree, from 0 up."""
        xp = self.xp
        monomials = xp.ones_like(u[..., :1])
        for k, degree in enumerate(self.degrees):
            if k:
                factors = xp.take(u, degree.last, axis=-1)
                if k > 1:
                    factors = xp.take(monomials, degree.parent, axis=-1) * factors
                monomials = factors
            yield monomials

    def _coefficients(self, k: int, size: Array) -> Array:
        coefficients = self.degrees[k].coefficients
        return coefficients * size ** (k - self.top) if k < self.top else coefficients

    def features(self, tokens: Tokens) -> Features:
        u, size = self._scaled(tokens.x)
        features = [
            monomials * self._coefficients(k, size)
            for k, monomials in enumerate(self._monomials(u))
            if self.used[k]
        ]
        return Features(self.xp.log(size) * self.top, self.xp.concat(features, axis=-1))

    def vjp(self, tokens: Tokens, cotangent: Features) -> Array:
        # The features do not depend on the size that was moved into their log.
        xp = self.xp
        u, size = self._scaled(tokens.x)
        powers = list(self._monomials(u))
        stop = cotangent.values.shape[-1]
        du, dpower = xp.zeros_like(u), xp.zeros_like(u[..., :1])
        for k in range(self.top, 0, -1):
            if self.used[k]:
                start = stop - self.degrees[k].parent.shape[0]
                direct = cotangent.values[..., start:stop] * self._coefficients(k, size)
                dpower, stop = direct + dpower, start
            if k == 1:
                du = du + dpower
            else:
                shape = (*dpower.shape[:-1], powers[k - 1].shape[-1], self.dim)
                padded = xp.concat([dpower, xp.zeros_like(dpower[..., :1])], axis=-1)
                pairs = xp.reshape(xp.take(padded, self.degrees[k].child, axis=-1), shape)
                du = du + xp.matmul(powers[k - 1][..., None, :], pairs)[..., 0, :]
                dpower = xp.matmul(pairs, u[..., None])[..., 0]
        return du * (self.root / size)


class _MonomialFeatures(BaseFeatureMap):
    """A kernel ``sum_k w_k (scale x.y)^k`` of finitely many weights ``w_k >= 0``."""

    unbiased = True
    positive: bool  # type: ignore[misc]
    dim: int
    num_features: int

    @abstractmethod
    def _weights(self) -> Sequence[float]:
        """``w_0, w_1, ...``; the last is not 0."""

    def _finish(self, dim: Any, scale: Any, **attributes: Any) -> None:
        dim = _checks.check_positive_int("dim", dim)
        scale = _checks.check_finite_number("scale", scale, positive=True)
        self._set(dim=dim, scale=scale, **attributes)
        weights = self._weights()
        num_features = sum(comb(dim + k - 1, k) for k, weight in enumerate(weights) if weight > 0)
        if num_features > MAX_FEATURES:
            raise ValueError(
                f"dim and degree must make at most {MAX_FEATURES:,} columns, got dim={dim} and "
                f"degree {len(weights) - 1}, which make {num_features:,}; take a lower degree, or "
                f"project to fewer coordinates"
            )
        self._set(num_features=num_features, positive=len(weights) == 1)

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Opaque:
        """Spec of both sides: ``sqrt(w_k k!/a!) (sqrt(s) x)^a`` for each monomial."""
        evaluator = _Evaluator(self._weights(), self.dim, self.scale, xp, dtype, device)
        return Opaque(evaluator.features, evaluator.vjp)

    def kernel(self, x: Array, y: Array) -> Array:
        """Return the polynomial of ``scale x.y``, in closed form: the map is exact.

        ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim.
        """
        return self._on_host(lambda a, b: self._polynomial(self.scale * dots(a, b)), x, y)

    @abstractmethod
    def _polynomial(self, t: NDArray[np.float64]) -> NDArray[np.float64]:
        """Kernel as a function of ``t = scale x.y``."""


class TaylorFeatures(_MonomialFeatures):
    r"""The Taylor polynomial of the softmax kernel, exactly.

    .. math::
        \phi_a(x) = \sqrt{s^{|a|} / a!} \; x^a, \quad |a| \le p,
        \qquad \phi(x) \cdot \phi(y) = \sum_{k=0}^{p} \frac{(s\, x \cdot y)^k}{k!}

    Letters: ``d`` dim, ``m`` features, ``p`` order, ``s`` scale, ``a`` exponents of a monomial.

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    order : int, optional
        p >= 0. Default 2.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.

    Attributes
    ----------
    dim, order, scale
        As above.
    num_features : int
        ``m = C(d + p, p)``: 1, then d, then d (d + 1) / 2 columns, and so on.
    positive, unbiased, causal : bool
        What may be relied on. ``positive`` speaks of features, and monomials take both signs: it
        is True for order 0 only.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, a scale that is not positive, more than 2^20 columns.

    Notes
    -----
    Deterministic: variance 0. It approximates ``exp(s x.y)`` where ``|s x.y|`` is small, with an
    error of at most ``|t|^(p+1) e^max(t, 0) / (p + 1)!`` for ``t = s x.y``; on sharp attention the
    largest weights are far too small.

    Although features take both signs, for an even order the kernel is positive, and so is the
    denominator of attention: where the polynomial has its minimum its derivative, the polynomial
    of order p - 1, is 0, so that its value there is ``t^p / p! > 0``. For order 2 the kernel is
    ``((1 + t)^2 + 1) / 2``, at least 1/2. For an odd order it is negative for t small enough.

    Time O(n m), memory O(n m) for n tokens: 2145 columns for d = 64 and p = 2. Coordinates of any
    size are safe: the powers of a row's largest one stay in its log.

    References
    ----------
    Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff"
    (2024), for order 2 without packing (d^2 in the place of d (d + 1) / 2 columns); Cotter, Keshet
    and Srebro, "Explicit Approximations of the Gaussian Kernel" (2011), for any order.

    Examples
    --------
    >>> from linattn.feature_maps import TaylorFeatures
    >>> TaylorFeatures(64)
    TaylorFeatures(dim=64, order=2, scale=0.125)
    >>> TaylorFeatures(64).num_features
    2145
    """

    _parameters = ("dim", "order", "scale")

    order: int

    softmax_kernel = True

    def __init__(self, dim: int, order: int = 2, *, scale: float | None = None) -> None:
        dim = _checks.check_positive_int("dim", dim)
        order = _checks.check_positive_int("order", order, least=0, most=MAX_ORDER)
        self._finish(dim, 1 / sqrt(dim) if scale is None else scale, order=order)

    def _weights(self) -> Sequence[float]:
        return [1 / factorial(k) for k in range(self.order + 1)]

    def _polynomial(self, t: NDArray[np.float64]) -> NDArray[np.float64]:
        total = np.ones_like(t)
        for k in range(self.order, 0, -1):
            total = 1 + total * t / k
        return total


class PolynomialFeatures(_MonomialFeatures):
    r"""The polynomial kernel, exactly.

    .. math::
        \phi_a(x) = \sqrt{\binom{p}{k} c^{p - k} s^k \frac{k!}{a!}} \; x^a, \quad k = |a| \le p,
        \qquad \phi(x) \cdot \phi(y) = (s\, x \cdot y + c)^p

    Letters: ``d`` dim, ``m`` features, ``p`` degree, ``s`` scale, ``a`` exponents of a monomial.

    Parameters
    ----------
    dim : int
        d, the last axis of queries and keys.
    degree : int, optional
        p >= 1. Default 2.
    c : float, optional
        c >= 0; with 0 the monomials of degree p alone are left. Default 1.
    scale : float, optional
        s > 0. Default 1.

    Attributes
    ----------
    dim, degree, c, scale
        As above.
    num_features : int
        ``m = C(d + p, p)``, and ``C(d + p - 1, p)`` with c = 0.
    positive, unbiased, causal : bool
        What may be relied on. ``positive`` speaks of features, and monomials take both signs: it
        is False.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, a scale that is not positive, a negative c, more than
        2^20 columns.

    Notes
    -----
    Deterministic: variance 0. Not an approximation of softmax. For an even degree the kernel, and
    with it the denominator of attention, is not negative, but it is 0 where ``s x.y = -c``; for an
    odd degree it takes both signs.

    Time O(n m), memory O(n m) for n tokens. Coordinates of any size are safe: the powers of a
    row's largest one stay in its log.

    References
    ----------
    Schoelkopf and Smola, "Learning with Kernels" (2002), section 2.1, for monomials with
    multinomial weights; Kacham, Mirrokni and Zhong, "PolySketchFormer" (2024), for polynomial
    kernels of even degree in attention.

    Examples
    --------
    >>> from linattn.feature_maps import PolynomialFeatures
    >>> PolynomialFeatures(8, degree=4)
    PolynomialFeatures(dim=8, degree=4, c=1.0, scale=1.0)
    >>> PolynomialFeatures(8, degree=4).num_features
    495
    """

    _parameters = ("dim", "degree", "c", "scale")

    degree: int
    c: float

    def __init__(self, dim: int, degree: int = 2, c: float = 1.0, *, scale: float = 1.0) -> None:
        degree = _checks.check_positive_int("degree", degree, most=MAX_DEGREE)
        c = _checks.check_finite_number("c", c)
        if c < 0:
            raise ValueError(
                f"c must be at least 0, for its powers to be weights of features, got {c}"
            )
        self._finish(dim, scale, degree=degree, c=c)

    def _weights(self) -> Sequence[float]:
        p = self.degree
        return [comb(p, k) * self.c ** (p - k) for k in range(p + 1)]

    def _polynomial(self, t: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray((t + self.c) ** self.degree)

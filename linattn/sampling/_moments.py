"""Exact second moments of projections: the closed forms of `linattn.sampling`.

Letters: m rows, d dimension, b = d/2; v = |x + y|^2 and s = |x - y|^2; q = |omega|^2 / 2, which is
Gamma(b) for a standard normal row; (b)_k = b (b + 1) ... (b + k - 1); P(k; v) = e^-v v^k / k!;
M_d(a) = 1F1(d; d/2; a); N_p ordered pairs of rows in one block.

All is a sum over P(k; v) of coefficients that do not depend on v. Given q, a row w of isotropic
direction has, with z = x + y and Laguerre polynomials L_k scaled to Lambda_k(0) = 1,

    E exp(w.z - v/2) = sum_k P(k; v/2) q^k / (b)_k,
    E cos(w.z)       = sum_k P(k; v/2) Lambda_k(q),     Lambda_k = L_k^(b-1) k! / (b)_k,

and the product of two rows of orthogonal directions the same with v for v/2 and (q1 + q2)/2 for q,
because w1 + w2 is isotropic too. Nothing cancels: the weights are positive and sum to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log, pi, sqrt
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn._extras import remedy

Floats: TypeAlias = NDArray[np.float64]

# exp(-_LARGEST) is still a normal number, so that a series may start from it.
_LARGEST = 700.0
# Coefficients that grow as 2^k, or the weights P(k; 2 v), leave float64 beyond this.
_LARGEST_COUPLED = 300.0


def count_pairs(num: int, dim: int) -> int:
    """N_p: ordered pairs of different rows in one block, when blocks hold ``dim`` rows."""
    blocks, rest = divmod(num, dim)
    return blocks * dim * (dim - 1) + rest * (rest - 1)


def scipy_special(sampler: str) -> Any:
    """Return ``scipy.special``, which only some samplers need, or say how to get it."""
    try:
        from scipy import special
    except ImportError as error:
        raise ImportError(
            f"the sampler {sampler!r} needs SciPy, in the extra qmc: {remedy('qmc')}"
        ) from error
    return special


def chi_quantiles(levels: ArrayLike, dim: int, sampler: str) -> Floats:
    """Return the norms of standard normal rows at the given levels of their distribution."""
    return np.sqrt(2 * _half_square_quantiles(levels, dim, sampler))


def _half_square_quantiles(levels: ArrayLike, dim: int, sampler: str) -> Floats:
    return np.asarray(scipy_special(sampler).gammaincinv(dim / 2, levels), dtype=np.float64)


# --- series --------------------------------------------------------------------------------------


def _num_terms(x: ArrayLike) -> int:
    # Twelve standard deviations of a Poisson count beyond its mean, and 40 for small means.
    x = np.asarray(x, dtype=np.float64)
    largest = float(np.max(np.abs(x), initial=0.0, where=~np.isnan(x)))
    return int(largest + 12.0 * largest**0.5) + 40


def _series(first: ArrayLike, x: Floats, coefficients: Floats) -> Floats:
    """Sum first x^k / k! coefficients_k."""
    term = np.array(first, dtype=np.float64)
    total = term * coefficients[0]
    for k in range(1, len(coefficients)):
        term *= x / k
        total += term * coefficients[k]
    return np.asarray(total)


def _poisson_mean(x: Floats, coefficients: Floats) -> Floats:
    """Sum P(k; x) coefficients_k."""
    return _series(np.exp(-x), x, coefficients)


def _pair_ratios(dim: int, count: int) -> Floats:
    """prod_{j<k} (d + j) / (d + 2 j): M_d(v/2) is the sum of v^k / k! times these."""
    j = np.arange(count - 1)
    return np.cumprod(np.append(1.0, (dim + j) / (dim + 2 * j)))


def _kummer_series(a: Floats, dim: int) -> Floats:
    """Sum M_d(-a) = e^-a 1F1(-d/2; d/2; a), whose coefficients are at most 1 in size."""
    k = np.arange(1, _num_terms(a))
    factors = (2 * k - 2 - dim) / (2 * k - 2 + dim)
    return _poisson_mean(a, np.cumprod(np.append(1.0, factors)))


# --- orthogonal directions, independent norms ----------------------------------------------------


def orthogonal_gap(v: Floats, dim: int) -> Floats:
    """Return 1 - e^-v M_d(v/2), term by term >= 0."""
    v = np.minimum(v, _LARGEST)
    return _poisson_mean(v, _deficits(dim, _num_terms(v)))


def orthogonal_gap_trig(s: Floats, dim: int) -> Floats:
    """Return e^-s - M_d(-s/2) to an absolute error of rounding.

    Up to s = 1 the result is small beside e^-s and comes from its own series.
    """
    s = np.minimum(s, 2 * _LARGEST)
    near = np.minimum(s, 1.0)
    return np.where(
        s <= 1.0,
        _series(np.ones_like(s), -near, _deficits(dim, _num_terms(near))),
        np.exp(-s) - _kummer_series(s / 2, dim),
    )


def _deficits(dim: int, count: int) -> Floats:
    """1 - prod_{j<k} (d + j) / (d + 2 j), without cancellation."""
    deficits = np.zeros(count)
    for k in range(1, count):
        deficits[k] = deficits[k - 1] + (1.0 - deficits[k - 1]) * (k - 1) / (dim + 2 * k - 2)
    return deficits


# --- directions of equal cosine, independent norms -----------------------------------------------


def simplex_gap(kind: str, sq_norm: Floats, num: int, dim: int, A: float) -> Floats:
    """Gap of blocks that are d-vertex simplices, a last block of r rows an r-vertex one.

    For two rows of cosine c, 1 + c sin t = |w1 + w2|^2 / (|w1|^2 + |w2|^2) with
    tan(t/2) = |w1| / |w2|, a ratio independent of the sum, so that

        E exp(w1.z + w2.z) = h(c) = E_t M_d((v/2)(1 + c sin t)),   density of t ~ sin^(d-1) t.

    A tilt of the norms changes nothing: it rescales both rows, whose directions do not know it.
    """
    del A
    sq_norm = np.minimum(sq_norm, _LARGEST_COUPLED)
    gap = np.zeros_like(sq_norm)
    blocks, rest = divmod(num, dim)
    for count, vertices in ((blocks, dim), (1, rest)):
        if count and vertices > 1:
            pair = _cosine_gap(kind, sq_norm, dim, -1 / (vertices - 1))
            gap += count * vertices * (vertices - 1) / num**2 * pair
    return gap


def _cosine_gap(kind: str, sq_norm: Floats, dim: int, c: float) -> Floats:
    count = _num_terms(sq_norm if kind == "trigonometric" else (1 + abs(c)) * sq_norm)
    x, weights = _cosine_nodes(dim, c, count)
    # For pairs and cosines the mean over both signs of c, summed first so that odd powers vanish.
    x = x[None, :] if kind == "positive" else np.stack([x, -x])
    weights = weights / len(x)
    deficits = _deficits_trig if kind == "trigonometric" else _deficits_of_cosines
    return _poisson_mean(sq_norm, deficits(dim, count, x, weights))


def _deficits_of_cosines(dim: int, count: int, x: Floats, weights: Floats) -> Floats:
    """1 - prod_{j<k} (d + j)/(d + 2 j) E (1 + x)^k."""
    ratios = _pair_ratios(dim, count)
    deficits = _deficits(dim, count)
    fall = np.zeros_like(x)
    for k in range(1, count):
        fall = fall * (1 + x) - x  # 1 - (1 + x)^k without cancellation
        deficits[k] += ratios[k] * (weights @ fall.sum(axis=0))
    return deficits


def _deficits_trig(dim: int, count: int, x: Floats, weights: Floats) -> Floats:
    """-E F_k((1 + x)/2) for k > 1, where e^s M_d(-s y) = sum of s^k / k! F_k(y).

    F_k(y) = 2F1(-k, d; d/2; y), at most 1 in size, by its contiguous relation. The deficits are
    0 for k = 0, and for k = 1, where they are the mean of x over both signs.
    """
    b, y = dim / 2, (1 + x) / 2
    deficits = np.zeros(count)
    previous, current = np.zeros_like(y), np.ones_like(y)
    for k in range(count):
        if k > 1:
            deficits[k] = -(weights @ current.sum(axis=0))
        advance = (2 * k + b - (dim + k) * y) * current - k * (1 - y) * previous
        previous, current = current, advance / (b + k)
    return deficits


def _cosine_nodes(dim: int, c: float, degree: int) -> tuple[Floats, Floats]:
    """Nodes c sin t and weights, sum 1, that integrate what varies like its ``degree``-th power."""
    nodes, weights = _gauss_legendre(32 + ceil(4 * sqrt(dim + degree)))
    cosines = np.cos(pi / 4 * (nodes + 1))  # t = pi/2 +- (angle), in which all is even
    weights = weights * cosines ** (dim - 1)
    return c * cosines, weights / np.sum(weights)


# --- orthogonal directions, coupled norms --------------------------------------------------------


def stratified_gap(kind: str, sq_norm: Floats, num: int, dim: int, A: float) -> Floats:
    """Gap of one norm from each of m strata of equal probability."""
    return _norm_gap(_StratifiedNorms(dim, num), kind, sq_norm, num, A)


def quantile_gap(kind: str, sq_norm: Floats, num: int, dim: int, A: float) -> Floats:
    """Gap of the norms that are the quantiles i / (m + 1)."""
    return _norm_gap(_quantile_norms(num, dim), kind, sq_norm, num, A)


def quantile_mean(kind: str, sq_norm: Floats, num: int, dim: int, A: float) -> Floats:
    """Mean of the estimate over its kernel with the norms of `quantile_gap`."""
    return _norm_mean(_quantile_norms(num, dim), kind, sq_norm, A)


def fixed_norm_gap(kind: str, sq_norm: Floats, num: int, dim: int, A: float) -> Floats:
    """Gap of norms that all are sqrt(d)."""
    return _norm_gap(_PointNorms(dim, np.array([dim / 2])), kind, sq_norm, num, A)


def fixed_norm_mean(kind: str, sq_norm: Floats, num: int, dim: int, A: float) -> Floats:
    """Mean of the estimate over its kernel with the norms of `fixed_norm_gap`."""
    del num
    return _norm_mean(_PointNorms(dim, np.array([dim / 2])), kind, sq_norm, A)


class _Norms(Protocol):
    """How m norms are drawn: stratum i has its own distribution, rows get strata at random.

    ``mu[k, i]`` is the mean of coefficient k in stratum i; one column stands for m equal ones.
    """

    @property
    def dim(self) -> int:
        """Dimension d."""
        ...

    @property
    def unbiased(self) -> bool:
        """Whether the mean over strata is the distribution N(0, I)."""
        ...

    def powers(self, count: int, A: float, power: int = 1) -> Floats:
        """Return mu of exp(w.z): W^power ((1 - 4A) q)^k / (b)_k, W = (1 - 4A)^b exp(4 A q).

        As many as P(k; v) has terms will do: where powers grow to matter beyond, above a q of
        about 600, W is below 1e-250.
        """
        ...

    def laguerres(self, count: int) -> Floats:
        """Return mu of cos(w.z): Lambda_k(q)."""
        ...

    def pairs(self, count: int) -> tuple[Floats, Floats]:
        """Nodes and weights, sum 1, of (q1 + q2)/2 for two different rows."""
        ...


@dataclass(frozen=True, eq=False)
class _PointNorms:
    """Norms that are given numbers: ``q`` of shape (m,), or (1,) if all are equal."""

    dim: int
    q: Floats
    unbiased = False

    def powers(self, count: int, A: float, power: int = 1) -> Floats:
        """See `_Norms`."""
        b = self.dim / 2
        k = np.arange(count - 1)[:, None]
        first = np.exp(power * (b * log(1 - 4 * A) + 4 * A * self.q))
        return np.cumprod(np.vstack([first, (1 - 4 * A) * self.q / (b + k)]), axis=0)

    def laguerres(self, count: int) -> Floats:
        """See `_Norms`."""
        return np.stack(list(_laguerres(self.q, self.dim, count)))

    def pairs(self, count: int) -> tuple[Floats, Floats]:
        """See `_Norms`."""
        if self.q.size == 1:
            return self.q, np.ones(1)
        i, j = np.triu_indices(self.q.size, 1)
        return (self.q[i] + self.q[j]) / 2, np.full(i.size, 1 / i.size)


def _quantile_norms(num: int, dim: int) -> _PointNorms:
    levels = np.arange(1, num + 1) / (num + 1)
    return _PointNorms(dim, _half_square_quantiles(levels, dim, "quantile"))


@dataclass(frozen=True, eq=False)
class _StratifiedNorms:
    """Norms chi(d) restricted to one of ``num`` strata of equal probability each."""

    dim: int
    num: int
    unbiased = True

    def _edges(self) -> Floats:
        levels = np.arange(1, self.num) / self.num
        return _half_square_quantiles(levels, self.dim, "stratified")

    def powers(self, count: int, A: float, power: int = 1) -> Floats:
        """See `_Norms`: the first powers, by the incomplete gamma function of order b + k."""
        gammainc = scipy_special("stratified").gammainc
        orders = self.dim / 2 + np.arange(count)[:, None]
        below = gammainc(orders, (1 - 4 * A) * self._edges())
        below = np.concatenate([np.zeros((count, 1)), below, np.ones((count, 1))], axis=-1)
        mu = self.num * np.diff(below, axis=-1)
        if A == 0:
            mu[0] = 1.0
        return np.asarray(mu)

    def laguerres(self, count: int) -> Floats:
        """See `_Norms`."""
        means = [
            [weights @ values for values in _laguerres(q, self.dim, count)]
            for q, weights in self._strata(count)
        ]
        return np.stack(means, axis=-1)

    def pairs(self, count: int) -> tuple[Floats, Floats]:
        """See `_Norms`: all pairs of independent norms, minus the pairs of one stratum."""
        [(q, weights)] = _quadrature(np.empty(0), 2 * self.dim, count)
        nodes, masses = [q / 2], [weights * self.num / (self.num - 1)]
        for q, weights in self._strata(count):
            nodes.append((q[:, None] + q).ravel() / 2)
            masses.append((weights[:, None] * weights).ravel() / (-self.num * (self.num - 1)))
        return np.concatenate(nodes), np.concatenate(masses)

    def _strata(self, count: int) -> list[tuple[Floats, Floats]]:
        return _quadrature(np.sqrt(2 * self._edges()), self.dim, count)


def _quadrature(edges: Floats, dim: int, count: int) -> list[tuple[Floats, Floats]]:
    """Nodes q and weights, sum 1, of chi(d) norms between neighbouring inner edges.

    A norm is more than 9.5 from sqrt(d) with a probability below 1e-19; the functions integrated
    oscillate with the norm like coefficient ``count``, of phase 2 sqrt(count q).
    """
    ends = [max(0.0, sqrt(dim) - 9.5), *edges, sqrt(dim) + 9.5]
    strata = []
    for low, high in pairwise(ends):
        half = (high - low) / 2
        nodes, weights = _gauss_legendre(16 + ceil(2 * half * (4 + sqrt(count))))
        r = low + half * (nodes + 1)
        log_density = (dim - 1) * np.log(r) - r * r / 2
        weights = weights * np.exp(log_density - log_density.max())
        strata.append((r * r / 2, weights / weights.sum()))
    return strata


def _laguerres(q: Floats, dim: int, count: int) -> Iterator[Floats]:
    """Yield Lambda_k(q) for k < count."""
    b = dim / 2
    previous, current = np.zeros_like(q), np.ones_like(q)
    for k in range(count):
        yield current
        previous, current = current, ((2 * k + b - q) * current - k * previous) / (b + k)


@lru_cache(maxsize=64)
def _gauss_legendre(count: int) -> tuple[Floats, Floats]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return nodes, weights


def _norm_gap(norms: _Norms, kind: str, sq_norm: Floats, num: int, A: float) -> Floats:
    """Gap of rows with orthogonal directions and the norms of ``norms``.

    With means g_i and second moments s_i of the strata and H_ij for a pair of one block,

        Var = sum_i (s_i - g_i^2) / m^2 + N_p / (m^3 (m - 1)) sum_{i != j} (H_ij - g_i g_j);

    the gap is the variance of independent standard normal rows less that. It is around the
    sampler's own mean, biased or not.
    """
    v = np.minimum(sq_norm, _LARGEST_COUPLED)
    pairs = count_pairs(num, norms.dim) / num**2
    if kind == "trigonometric":
        return _norm_gap_trig(norms, v, num, pairs)
    mean, covariance = _moments_of_strata(norms.powers(_num_terms(v), A))
    coefficients = (_convolve(mean + covariance) - 1) / num
    if pairs:
        deficits = _direction_deficits(norms.dim, len(mean)) * (mean - covariance / (num - 1))
        coefficients += pairs * _convolve(deficits)
    gap = _poisson_mean(v, coefficients)
    if not norms.unbiased:
        gap += _excess(norms, kind, v, A) / num
    return gap


def _norm_mean(norms: _Norms, kind: str, sq_norm: Floats, A: float) -> Floats:
    """Mean of the estimate over its kernel."""
    v = np.minimum(sq_norm, 2 * _LARGEST)
    if kind == "trigonometric":
        mean = norms.laguerres(_num_terms(v / 2)).mean(axis=-1)
        return _series(np.ones_like(v), v / 2, mean)
    mean = norms.powers(_num_terms(v / 2), A).mean(axis=-1)
    return _poisson_mean(v / 2, mean)


def _norm_gap_trig(norms: _Norms, s: Floats, num: int, pairs: float) -> Floats:
    mu = norms.laguerres(_num_terms(s if norms.unbiased else 2 * s))
    mean, covariance = _moments_of_strata(mu)
    coefficients = _convolve(mean + covariance) / num
    if pairs:
        x, weights = norms.pairs(len(mu))
        products = np.stack([weights @ values for values in _laguerres(x, norms.dim, len(mu))])
        coefficients += pairs * (_convolve(mean - covariance / (num - 1)) - products)
    # Zero but for rounding: 1 - 1, and first Laguerre moments, which N(0, I) does not have.
    coefficients[: 2 if norms.unbiased else 1] = 0.0
    gap = _poisson_mean(s, coefficients)
    if not norms.unbiased:
        biases = mu.mean(axis=-1)
        biases[0] -= 1
        gap -= _poisson_mean(2 * s, biases) / (2 * num)
    return gap


def _excess(norms: _Norms, kind: str, v: Floats, A: float) -> Floats:
    """Second moment of a standard normal row minus the second moment of a row of ``norms``."""
    rho = 1 / (1 - 8 * A)
    log_normal = norms.dim / 2 * log((rho + 1) ** 2 / (4 * rho))
    squares = norms.powers(_num_terms(2 * v), A, power=2).mean(axis=-1)
    with np.errstate(over="ignore"):
        if A == 0:  # both are 1 at v = 0, and all that is left is of order v
            excess = np.exp(v) * _poisson_mean(2 * v, 1 - squares)
        else:
            excess = np.exp(log_normal + rho * v) - np.exp(v) * _poisson_mean(2 * v, squares)
        if kind == "paired":
            excess = (excess + (np.exp(log_normal - v) - np.exp(-v) * squares[0])) / 2
    return excess


def _moments_of_strata(mu: Floats) -> tuple[Floats, Floats]:
    """Products of means, and covariances, of coefficients over the strata."""
    mean = mu.mean(axis=-1)
    centred = mu - mean[:, None]
    return np.outer(mean, mean), centred @ centred.T / mu.shape[1]


def _direction_deficits(dim: int, count: int) -> Floats:
    """1 - (b)_a (b)_c / (b)_{a+c}: what orthogonal directions take from q1^a q2^c."""
    b = dim / 2
    a = np.arange(count)
    deficits = np.zeros((count, count))
    for c in range(1, count):
        deficits[:, c] = deficits[:, c - 1] + (1 - deficits[:, c - 1]) * a / (b + a + c - 1)
    return deficits


def _convolve(matrix: Floats) -> Floats:
    """Mean of ``matrix[a, k - a]`` for a ~ Binomial(k, 1/2).

    It makes one sum over P(k; v) of the product of two over P(.; v/2).
    """
    means = np.empty(len(matrix))
    binomial = np.ones(1)
    for k in range(len(matrix)):
        means[k] = binomial @ np.diagonal(matrix[k::-1, : k + 1])
        binomial = np.append(binomial, 0.0) / 2
        binomial[1:] += binomial[:-1]
    return means

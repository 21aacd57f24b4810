"""Random projections: the rows omega that random feature maps multiply their inputs with.

Every sampler is called as ``sampler(num, dim, rng=None, *, batch_shape=())`` and returns float64
NumPy rows of shape ``(*batch_shape, num, dim)``, drawn on the host from ``rng`` alone: the same
seed gives the same rows whatever library or device the features are computed with, and NumPy's
global random state is neither read nor changed. A batch is what as many draws in a row from one
Generator would give, up to rounding.

Letters: m is ``num``, d is ``dim``; m = b d + r rows fill b blocks of d rows and one of r < d.
For inputs x and y of a feature map, K = exp(x.y), v = |x + y|^2 and s = |x - y|^2. N_p =
``num_pairs(m, d)`` counts the ordered pairs of rows of one block.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _moments, _nets

__all__ = [
    "SAMPLERS",
    "Sampler",
    "Seed",
    "as_generator",
    "fixed_norm",
    "gaussian",
    "halton",
    "num_pairs",
    "orthogonal",
    "quantile",
    "simplex",
    "sobol",
    "stratified",
]

_Floats: TypeAlias = NDArray[np.float64]

# Quoted, because numpy.random is loaded by its first use only.
Seed: TypeAlias = (
    "int | np.random.SeedSequence | np.random.BitGenerator | np.random.Generator | None"
)
"""What ``rng`` may be. None draws a fresh seed from the operating system."""


class _Draw(Protocol):
    # Positional-only, because a sampler may call its parameters what it likes.
    __name__: str

    def __call__(
        self, num: int, dim: int, rng: Seed = None, /, *, batch_shape: tuple[int, ...] = ()
    ) -> _Floats: ...


_Moment: TypeAlias = Callable[[str, _Floats, int, int, float], _Floats]


def as_generator(rng: Seed) -> np.random.Generator:
    """Make a generator of random numbers from a seed, by the rules of ``numpy.random.default_rng``.

    Parameters
    ----------
    rng : int, SeedSequence, BitGenerator, Generator or None
        A Generator is returned as it is, so that drawing moves it on; an int or a SeedSequence
        starts the same stream each time; None takes entropy from the operating system.

    Returns
    -------
    numpy.random.Generator

    Raises
    ------
    TypeError
        If ``rng`` is a bool, which NumPy would read as 0 or 1, or anything that NumPy rejects.
    ValueError
        If ``rng`` is a negative int.
    """
    if isinstance(rng, bool | np.bool_):
        msg = f"rng must be an int, a numpy.random.Generator or None, got the bool {rng!r}"
        raise TypeError(msg)
    return np.random.default_rng(rng)


def _no_pair_function(sq_norm: ArrayLike, dim: int) -> _Floats:
    """Refuse: pairs of rows differ, or their distribution is not known."""
    msg = "this sampler has no function of one pair of rows: see Sampler.variance_gap"
    raise NotImplementedError(msg)


@dataclass(frozen=True)
class Sampler:
    """A way to draw projection rows, with what is known exactly about its rows.

    Made by decorating the function that draws: ``@partial(Sampler, unbiased=..., ...)``. Name,
    docstring and module are then those of the function, and a sampler pickles as a function does,
    by its name in its module.

    Parameters
    ----------
    draw : callable
        ``draw(num, dim, rng, batch_shape=...)``: num, dim and batch_shape come checked, rng as the
        caller gave it, for `as_generator`.
    unbiased : bool
        Whether each single row is exactly N(0, I), so that every map that is unbiased with
        independent rows is unbiased with these.
    pair_gap : callable, optional
        For samplers whose blocks of d rows are independent, and whose pairs of rows in a block are
        all alike, with norms independent of the directions: ``pair_gap(v, dim)`` =
        1 - exp(-v) E[exp(w1.z) exp(w2.z)], v = |z|^2 >= 0. float64, shape of ``v``.
    pair_gap_trig : callable, optional
        For such samplers, ``pair_gap_trig(s, dim)`` = exp(-s) - E[cos(w1.z) cos(w2.z)],
        s = |z|^2 >= 0. It may be negative.
    gap : callable, optional
        For others: ``gap(kind, sq_norm, num, dim, A)``, what `variance_gap` returns, of checked
        arguments.
    mean : callable, optional
        For biased ones: ``mean(kind, sq_norm, num, dim, A)``, what `mean_factor` returns.

    Attributes
    ----------
    name : str
        Name of the drawing function, and the key in `SAMPLERS`.
    """

    draw: _Draw = field(repr=False)
    name: str = field(init=False)
    unbiased: bool
    pair_gap: Callable[[ArrayLike, int], _Floats] = field(default=_no_pair_function, repr=False)
    pair_gap_trig: Callable[[ArrayLike, int], _Floats] = field(
        default=_no_pair_function, repr=False
    )
    gap: _Moment | None = field(default=None, repr=False)
    mean: _Moment | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Take name, module and documentation from the drawing function."""
        object.__setattr__(self, "name", self.draw.__name__)
        object.__setattr__(self, "__doc__", self.draw.__doc__)
        object.__setattr__(self, "__module__", self.draw.__module__)

    def __reduce__(self) -> str:
        """Pickle and copy by name, as functions do: the decorated name holds this object."""
        return self.name

    def variance_gap(
        self, kind: str, sq_norm: ArrayLike, num: int, dim: int, *, A: float = 0.0
    ) -> _Floats:
        """Return what this sampler takes from the variance of independent N(0, I) rows.

        Var = Var_iid / m - gap, in units of K^2 ("trigonometric": of exp(|x|^2 + |y|^2)), around
        the sampler's own mean, also where it is biased. With rho = 1/(1 - 8A) and
        t = ((rho + 1)^2 / (4 rho))^(d/2), both 1 for A = 0, Var_iid of one row is

        * t e^(rho v) - 1 for "positive": one feature exp(w.x - |x|^2/2) a row;
        * t (e^(rho v) + e^-v)/2 - 1 for "paired": one of w and one of -w, each over sqrt(2);
        * (1 - e^-s)^2 / 2 for "trigonometric": cosine and sine.

        Parameters
        ----------
        kind : {"positive", "paired", "trigonometric"}
            The features of a row.
        sq_norm : array_like
            v; for "trigonometric" s.
        num, dim : int
            Rows m (not features) and dimension d.
        A : float
            Parameter of generalized exponential features (1 - 4A)^(d/4) exp(A |w|^2 +
            sqrt(1 - 4A) w.x - |x|^2/2), below 1/8; 0 for "trigonometric".

        Returns
        -------
        numpy.ndarray
            float64, shape of ``sq_norm``. Zero for independent rows; negative where the sampler
            does worse.

        Raises
        ------
        NotImplementedError
            No closed form is known for this sampler.
        ImportError
            The sampler needs SciPy, which is missing.
        TypeError, ValueError
            An unknown kind, a negative ``sq_norm``, sizes that are no positive ints, or an ``A``
            outside its range.

        Notes
        -----
        Where norms are independent of each other and of the directions the gap does not depend on
        A: tilting the norms by A rescales all rows alike. With a pair function it is N_p / m^2
        times that [1]_. Each formula is a series whose coefficients depend on m, d and A only;
        its weights sum to 1, so that the error is one of rounding, relative to Var_iid. Terms:
        about v + 12 sqrt(v) + 40 for the largest entry. v or s above 300 counts as 300, with
        `orthogonal` v above 700 as 700 and s above 1400 as 1400. The gap of a biased sampler is
        inf where Var_iid leaves float64.

        References
        ----------
        .. [1] K. Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Lemma 2,
           and V. Likhosherstov et al., "Chefs' Random Tables", NeurIPS 2022, for independent rows;
           the gaps are derived in this project.
        """
        v = _check_moment(kind, sq_norm, num, dim, A, below=0.125)
        if self.gap is not None:
            return self.gap(kind, v, num, dim, float(A))
        pair_gap = self.pair_gap_trig if kind == "trigonometric" else self.pair_gap
        if pair_gap is _no_pair_function:
            msg = (
                f"no closed form of the variance is known for the sampler {self.name!r}: estimate "
                f"it from independent draws, sampler(num, dim, rng, batch_shape=...)"
            )
            raise NotImplementedError(msg)
        return num_pairs(num, dim) / num**2 * pair_gap(v, dim)

    def mean_factor(
        self, kind: str, sq_norm: ArrayLike, num: int, dim: int, *, A: float = 0.0
    ) -> _Floats:
        """Return E[estimate] / kernel: 1 for unbiased samplers.

        Parameters
        ----------
        kind, sq_norm, num, dim, A
            As for `variance_gap`; A below 1/4.

        Returns
        -------
        numpy.ndarray
            float64, shape of ``sq_norm``, exact to rounding, for "trigonometric" to e^(s/2) times
            that. ``sq_norm`` above 1400 counts as 1400.

        Raises
        ------
        NotImplementedError
            The sampler is biased and its mean is not known.
        ImportError, TypeError, ValueError
            As for `variance_gap`.
        """
        v = _check_moment(kind, sq_norm, num, dim, A, below=0.25)
        if self.unbiased:
            return np.ones_like(v)
        if self.mean is None:
            msg = f"no closed form of the mean is known for the biased sampler {self.name!r}"
            raise NotImplementedError(msg)
        return self.mean(kind, v, num, dim, float(A))

    def __call__(
        self, num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
    ) -> _Floats:
        """Draw ``(*batch_shape, num, dim)`` rows after checking the arguments.

        Parameters
        ----------
        num : int
            Rows m of one draw, at least 1.
        dim : int
            Dimension d of a row, at least 1.
        rng : int, SeedSequence, BitGenerator, Generator or None
            See `as_generator`.
        batch_shape : tuple of int
            Shape of independent draws: verification wants thousands at once.

        Returns
        -------
        numpy.ndarray
            float64, shape ``(*batch_shape, num, dim)``.

        Raises
        ------
        TypeError
            If ``num`` or ``dim`` is no int (bool included), ``batch_shape`` is no tuple of ints,
            or NumPy rejects ``rng``.
        ValueError
            If ``num`` or ``dim`` is below 1, a batch axis is negative, or NumPy rejects ``rng``.
        """
        num = _integer(num, "num", least=1)
        dim = _integer(dim, "dim", least=1)
        return self.draw(num, dim, rng, batch_shape=_shape(batch_shape))


def num_pairs(num: int, dim: int) -> int:
    """Count the ordered pairs of different rows that share a block.

    N_p(m, d) = b d (d - 1) + r (r - 1), with m = b d + r: b full blocks and one of r rows.

    Parameters
    ----------
    num, dim : int
        Rows m and dimension d, both at least 1.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError
        If an argument is no int, or below 1.
    """
    return _moments.count_pairs(_integer(num, "num", least=1), _integer(dim, "dim", least=1))


def _no_gap(sq_norm: ArrayLike, dim: int) -> _Floats:
    return np.zeros_like(_sq_norm(sq_norm, dim))


def _orthogonal_gap(v: ArrayLike, dim: int) -> _Floats:
    return _moments.orthogonal_gap(_sq_norm(v, dim), dim)


def _orthogonal_gap_trig(s: ArrayLike, dim: int) -> _Floats:
    return _moments.orthogonal_gap_trig(_sq_norm(s, dim), dim)


def _sq_norm(value: ArrayLike, dim: int) -> _Floats:
    _integer(dim, "dim", least=1)
    value = np.asarray(value, dtype=np.float64)
    if np.any(value < 0):
        msg = f"a squared norm must be at least 0, got {float(np.min(value))!r}"
        raise ValueError(msg)
    return value


def _check_moment(
    kind: str, sq_norm: ArrayLike, num: int, dim: int, A: float, *, below: float
) -> _Floats:
    if kind not in ("positive", "paired", "trigonometric"):
        msg = f"kind must be 'positive', 'paired' or 'trigonometric', got {kind!r}"
        raise ValueError(msg)
    value = float(A)
    if not -math.inf < value < below:
        msg = f"A must be finite and below {below}, where the moment is finite, got {A!r}"
        raise ValueError(msg)
    if kind == "trigonometric" and value != 0:
        msg = f"A must be 0 for trigonometric features, which have no such parameter, got {A!r}"
        raise ValueError(msg)
    _integer(num, "num", least=1)
    return _sq_norm(sq_norm, dim)


def _shape(batch_shape: object) -> tuple[int, ...]:
    if not isinstance(batch_shape, tuple):
        kind = type(batch_shape).__name__
        msg = f"batch_shape must be a tuple of ints, got {batch_shape!r} of type {kind}"
        raise TypeError(msg)
    return tuple(_integer(axis, "an axis of batch_shape", least=0) for axis in batch_shape)


def _integer(value: int, name: str, *, least: int) -> int:
    if isinstance(value, bool):
        msg = f"{name} must be an int, got the bool {value!r}"
        raise TypeError(msg)
    try:
        number = operator.index(value)
    except TypeError:
        msg = f"{name} must be an int, got {value!r} of type {type(value).__name__}"
        raise TypeError(msg) from None
    if number < least:
        msg = f"{name} must be at least {least}, got {number}"
        raise ValueError(msg)
    return number


@partial(Sampler, unbiased=True, pair_gap=_no_gap, pair_gap_trig=_no_gap)
def gaussian(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> _Floats:
    """Draw independent rows of N(0, I).

    Parameters
    ----------
    num : int
        Rows m, at least 1.
    dim : int
        Dimension d of a row, at least 1.
    rng : int, SeedSequence, BitGenerator, Generator or None
        Where the numbers come from; see `as_generator`.
    batch_shape : tuple of int
        Shape of independent draws, () for one.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(*batch_shape, num, dim)``.

    Raises
    ------
    TypeError, ValueError
        See `Sampler`, which checks the arguments.

    Notes
    -----
    Takes m d standard normals from ``rng``, row by row. Fewer rows from the same seed are
    therefore the first of more rows. Time and memory O(m d) a draw.
    """
    return as_generator(rng).standard_normal((*batch_shape, num, dim))


@partial(Sampler, unbiased=True, pair_gap=_orthogonal_gap, pair_gap_trig=_orthogonal_gap_trig)
def orthogonal(
    num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
) -> _Floats:
    """Draw rows in independent blocks of d orthogonal rows, each row exactly N(0, I).

    A block is diag(chi) Q: Q is a Haar-distributed rotation (or reflection), chi holds the norms
    of d further independent N(0, I) rows. The last block keeps its first rows if d does not
    divide m.

    Parameters
    ----------
    num : int
        Rows m, at least 1.
    dim : int
        Dimension d of a row and size of a block, at least 1.
    rng : int, SeedSequence, BitGenerator, Generator or None
        Where the numbers come from; see `as_generator`.
    batch_shape : tuple of int
        Shape of independent draws, () for one.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(*batch_shape, num, dim)``.

    Raises
    ------
    TypeError, ValueError
        See `Sampler`, which checks the arguments.

    Notes
    -----
    Q is the factor of a QR of normals times the signs of R's diagonal. Without the signs Q is not
    Haar (LAPACK's R_11 always opposes the first entry), a row is not N(0, I), and features that
    are not even in omega, such as exp(omega.x - |x|^2/2), are biased however many rows there are.

    For two rows of one block E[exp(w1.z) exp(w2.z)] = 1F1(d; d/2; |z|^2/2), which gives the
    variance of a map (`Sampler.variance_gap`): e.g. K^2 [(e^v - 1)/m - (N_p/m^2) pair_gap(v, d)]
    for positive features. These never do worse than with independent rows; trigonometric ones
    may, by a little, at large |x - y|.

    Takes 2 d^2 standard normals from ``rng`` for each block, a partial one included: the matrix to
    factor, row by row, then the d rows whose norms are used. Fewer rows from the same seed are
    therefore the first of more rows. Time O(m d^2), memory O((m + d) d) a draw.

    References
    ----------
    .. [1] F. Yu et al., "Orthogonal Random Features", NeurIPS 2016.
    .. [2] F. Mezzadri, "How to generate random matrices from the classical compact groups",
       Notices of the AMS 54, 2007, for the signs.
    .. [3] K. Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Theorem 2.
    """
    normals = _block_normals(num, dim, rng, batch_shape)
    rows = _haar(normals[..., 0, :, :])
    rows *= np.linalg.norm(normals[..., 1, :, :], axis=-1, keepdims=True)
    return _first_rows(rows, num)


@partial(Sampler, unbiased=True, gap=_moments.simplex_gap)
def simplex(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> _Floats:
    """Draw rows in independent blocks that point to the vertices of a simplex, each row N(0, I).

    A block is diag(chi) S Q: as `orthogonal`, but with directions of cosine -1/(d - 1) between any
    two, which sum to 0. A last block of r < d rows is an r-vertex simplex.

    Parameters
    ----------
    num, dim, rng, batch_shape
        As for `gaussian`.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(*batch_shape, num, dim)``.

    Raises
    ------
    TypeError, ValueError
        See `Sampler`, which checks the arguments.

    Notes
    -----
    The lowest variance of *positive* features among all couplings of up to d + 1 directions that
    know nothing of the norms: E[exp(w1.z) exp(w2.z)] is increasing and convex in the cosine, and
    the mean cosine of r rows is at least -1/(r - 1). For antithetic pairs (w, -w) it is even in
    the cosine, and `orthogonal` is better; for trigonometric features either may be.

    Takes the same normals from ``rng`` as `orthogonal`, and the norms are the same. Whole blocks
    of fewer rows from the same seed are the first of more rows; a partial block is not, as its
    rows are spread by their number. Time O(m d^2), memory O((m + d) d) a draw.

    References
    ----------
    .. [1] I. Reid et al., "Simplex Random Features", ICML 2023. The vertices here are those of an
       orthonormal frame less its mean, the same up to a rotation; the proof above is this
       project's.
    """
    normals = _block_normals(num, dim, rng, batch_shape)
    rows = _haar(normals[..., 0, :, :])
    full, rest = divmod(num, dim)
    rows[..., :full, :, :] = _simplex_vertices(rows[..., :full, :, :])
    if rest:
        rows[..., full, :rest, :] = _simplex_vertices(rows[..., full, :rest, :])
    rows *= np.linalg.norm(normals[..., 1, :, :], axis=-1, keepdims=True)
    return _first_rows(rows, num)


@partial(Sampler, unbiased=True, gap=_moments.stratified_gap)
def stratified(
    num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
) -> _Floats:
    """Draw orthogonal directions with one norm from each of m equally likely strata.

    The norms are F^-1((i - 1 + U_i)/m), i = 1..m, where F is the distribution of chi(d) and U_i is
    uniform. Rows get them in a uniformly random order, so that each row is exactly N(0, I).

    Parameters
    ----------
    num, dim, rng, batch_shape
        As for `gaussian`.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(*batch_shape, num, dim)``.

    Raises
    ------
    ImportError
        SciPy is missing; it is in the extra ``qmc``.
    TypeError, ValueError
        See `Sampler`, which checks the arguments.

    Notes
    -----
    The variance of the norms no longer adds to that of the estimate: with g_i the mean of exp(w.z -
    v/2) in stratum i, and E_ii that of the product of two rows of orthogonal directions and
    independent norms both of stratum i,

        gap = sum_i (g_i - 1)^2 / m^2
              + N_p / (m^3 (m - 1)) [m^2 pair_gap(v, d) + sum_i (E_ii - g_i^2)],

    for positive features and A = 0 at least that of `orthogonal`. It depends on A.

    Takes, for each draw, d^2 standard normals from ``rng`` for each block, m whose distribution
    function is U, and m whose order is that of the strata. Time O(m d^2), memory O((m + d) d) a
    draw.
    """
    directions, normals = _orthogonal_directions(num, dim, rng, batch_shape, 2 * num)
    uniform = _moments.scipy_special("stratified").ndtr(normals[..., :num])
    # A normal above 8.2 has a distribution function that rounds to 1, and an infinite quantile.
    levels = np.minimum((np.arange(num) + uniform) / num, 1 - 2.0**-53)
    norms = _moments.chi_quantiles(levels, dim, "stratified")
    order = np.argsort(normals[..., num:], axis=-1)
    return directions * np.take_along_axis(norms, order, axis=-1)[..., None]


@partial(Sampler, unbiased=False, gap=_moments.quantile_gap, mean=_moments.quantile_mean)
def quantile(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> _Floats:
    """Draw orthogonal directions with the norms F^-1(i/(m + 1)), i = 1..m: biased.

    F is the distribution of chi(d). `stratified` is the same idea without the bias.

    Parameters
    ----------
    num, dim, rng, batch_shape
        As for `gaussian`.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(*batch_shape, num, dim)``.

    Raises
    ------
    ImportError
        SciPy is missing; it is in the extra ``qmc``.
    TypeError, ValueError
        See `Sampler`, which checks the arguments.

    Notes
    -----
    Biased: positive features have the mean K e^(-v/2) / m sum_i 0F1(; d/2; r_i^2 v / 4), which
    is too small because the largest norms never occur. `Sampler.mean_factor` is exact.

    Takes, for each draw, d^2 standard normals from ``rng`` for each block, and m whose order is
    that of the norms. Time O(m d^2), memory O((m + d) d) a draw; the closed form for trigonometric
    features O(m^2).

    References
    ----------
    .. [1] Su Jianlin, https://kexue.fm/archives/7921, where the norms are given without the bias.
    """
    directions, normals = _orthogonal_directions(num, dim, rng, batch_shape, num)
    norms = _moments.chi_quantiles(np.arange(1, num + 1) / (num + 1), dim, "quantile")
    return directions * norms[np.argsort(normals, axis=-1)][..., None]


@partial(Sampler, unbiased=False, gap=_moments.fixed_norm_gap, mean=_moments.fixed_norm_mean)
def fixed_norm(
    num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
) -> _Floats:
    """Draw orthogonal directions with norms that all are sqrt(d): biased, regularized softmax.

    Parameters
    ----------
    num, dim, rng, batch_shape
        As for `gaussian`.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(*batch_shape, num, dim)``.

    Raises
    ------
    TypeError, ValueError
        See `Sampler`, which checks the arguments.

    Notes
    -----
    Biased: positive features have the mean K R_d(v), R_d = e^(-v/2) 0F1(; d/2; d v/4), with
    max(1 - v^2/(4(d + 2)), e^(-v^2/(4d))) <= R_d <= 1. In return the variance is smaller:
    e^-v [(f(4) - f(1)^2)/m + (N_p/m^2)(f(2) - f(1)^2)], f(c) = 0F1(; d/2; c d v/4).

    Takes d^2 standard normals from ``rng`` for each block. Fewer rows from the same seed are
    the first of more rows. Time O(m d^2), memory O((m + d) d) a draw.

    References
    ----------
    .. [1] K. Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, eq. 8 and
       Theorem 1 (SMREG); bounds and variance are derived in this project.
    """
    directions, _ = _orthogonal_directions(num, dim, rng, batch_shape, 0)
    return directions * math.sqrt(dim)


@partial(Sampler, unbiased=True)
def sobol(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> _Floats:
    """Draw a scrambled Sobol net, mapped to normals: each row N(0, I), all rows coupled.

    Parameters
    ----------
    num, dim, rng, batch_shape
        As for `gaussian`.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(*batch_shape, num, dim)``.

    Raises
    ------
    ImportError
        SciPy is missing; it is in the extra ``qmc``.
    TypeError, ValueError
        See `Sampler`, which checks the arguments; more than 21201 dimensions or 2^30 rows.

    Notes
    -----
    The net is SciPy's; the scrambling, a random lower triangular matrix of bits and a random
    shift of 52 bits, is done here, so that a batch is scrambled at once and does not depend on
    SciPy's version. Each coordinate of each row is uniform on the 2^52 midpoints (k + 1/2) 2^-52
    before it is mapped, so that a map is unbiased. The rows are dependent: no closed form of the
    variance is known. Powers of two are the best numbers of rows.

    Takes 53 integers below 2^52 from ``rng`` for each dimension. Fewer rows from the same seed are
    the first of more rows. Time O(m d), memory O(m d) a draw.

    References
    ----------
    .. [1] J. Matousek, "On the L2-discrepancy for anchored boxes", J. Complexity 14, 1998.
    """
    special = _moments.scipy_special("sobol")
    return np.asarray(special.ndtri(_nets.sobol(num, dim, as_generator(rng), batch_shape)))


@partial(Sampler, unbiased=True)
def halton(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> _Floats:
    """Draw a scrambled Halton sequence, mapped to normals: each row N(0, I), all rows coupled.

    Parameters
    ----------
    num, dim, rng, batch_shape
        As for `gaussian`.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(*batch_shape, num, dim)``.

    Raises
    ------
    ImportError
        SciPy is missing; it is in the extra ``qmc``.
    TypeError, ValueError
        See `Sampler`, which checks the arguments.

    Notes
    -----
    Coordinate j of row i has the digits of i in the j-th prime base p, each place with a random
    permutation of its own, down to 2^-52: uniform on a grid that fine before it is mapped, so that
    a map is unbiased. The rows are dependent: no closed form of the variance is known. Made for
    few dimensions: a coordinate needs p rows to be spread evenly once, and the permutations cost
    O(p) each; `sobol` has neither defect.

    Takes p uniform numbers from ``rng`` for each place of each coordinate. Fewer rows from the
    same seed are the first of more rows. Time and memory O(m d + d^2 log d) a draw, up to
    logarithms.

    References
    ----------
    .. [1] A. B. Owen, "A randomized Halton algorithm in R", arXiv:1706.02808, 2017.
    """
    special = _moments.scipy_special("halton")
    return np.asarray(special.ndtri(_nets.halton(num, dim, as_generator(rng), batch_shape)))


def _block_normals(num: int, dim: int, rng: Seed, batch_shape: tuple[int, ...]) -> _Floats:
    blocks = -(-num // dim)
    return as_generator(rng).standard_normal((*batch_shape, blocks, 2, dim, dim))


def _haar(normals: _Floats) -> _Floats:
    """Turn square matrices of normals into Haar-distributed orthogonal ones."""
    q, r = np.linalg.qr(normals)
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    q *= np.where(diagonal < 0, -1.0, 1.0)[..., None, :]
    return np.asarray(q)


def _first_rows(blocks: _Floats, num: int) -> _Floats:
    *batch_shape, count, dim, _ = blocks.shape
    rows = blocks.reshape(*batch_shape, count * dim, dim)
    # A copy, so that the rows that are cut off do not stay in memory.
    return rows if count * dim == num else rows[..., :num, :].copy()


def _simplex_vertices(frame: _Floats) -> _Floats:
    count = frame.shape[-2]
    if count == 1:
        return frame
    centred = frame - frame.mean(axis=-2, keepdims=True)
    return np.asarray(math.sqrt(count / (count - 1)) * centred)


def _orthogonal_directions(
    num: int, dim: int, rng: Seed, batch_shape: tuple[int, ...], extra: int
) -> tuple[_Floats, _Floats]:
    """Draw unit rows, orthogonal in blocks, and ``extra`` more normals a draw."""
    blocks = -(-num // dim)
    size = blocks * dim * dim
    normals = as_generator(rng).standard_normal((*batch_shape, size + extra))
    frames = _haar(normals[..., :size].reshape(*batch_shape, blocks, dim, dim))
    return frames.reshape(*batch_shape, blocks * dim, dim)[..., :num, :], normals[..., size:]


SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        gaussian,
        orthogonal,
        simplex,
        stratified,
        quantile,
        sobol,
        halton,
        fixed_norm,
    )
}
"""The samplers by name."""

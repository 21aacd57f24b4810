"""Random projections: the rows omega that random feature maps multiply their inputs with.

Every sampler is called as ``sampler(num, dim, rng=None, *, batch_shape=())`` and returns float64
NumPy rows of shape ``(*batch_shape, num, dim)``, drawn on the host from ``rng`` alone: the same
seed gives the same rows whatever library or device the features are computed with, and NumPy's
global random state is neither read nor changed.

Letters: m is ``num``, d is ``dim``; m = b d + r rows fill b blocks of d rows and one of r < d.
For inputs x and y of a feature map, v = |x + y|^2 and s = |x - y|^2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["SAMPLERS", "Sampler", "Seed", "as_generator", "gaussian", "num_pairs", "orthogonal"]

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
    ) -> NDArray[np.float64]: ...


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
        If ``rng`` is a bool, which NumPy would read as 0 or 1, or anything NumPy refuses.
    ValueError
        If ``rng`` is a negative int.
    """
    if isinstance(rng, bool | np.bool_):
        msg = f"rng must be an int, a numpy.random.Generator or None, got the bool {rng!r}"
        raise TypeError(msg)
    return np.random.default_rng(rng)


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
    pair_gap : callable
        ``pair_gap(v, dim)`` = 1 - exp(-v) E[exp(w1.z) exp(w2.z)] with v = |z|^2 >= 0, for two rows
        w1, w2 of one block: what the rows' dependence takes from the relative second moment of
        positive features. float64, shape of ``v``; zero for independent rows.
    pair_gap_trig : callable
        ``pair_gap_trig(s, dim)`` = exp(-s) - E[cos(w1.z) cos(w2.z)] with s = |z|^2 >= 0: the same
        for trigonometric features. It may be negative.

    Attributes
    ----------
    name : str
        Name of the drawing function, and the key in `SAMPLERS`.

    Notes
    -----
    With N_p = ``num_pairs(m, d)`` and K = exp(x.y), exact for any m [1]_:

    * positive features: Var = K^2 [(e^v - 1)/m - (N_p/m^2) pair_gap(v, d)];
    * m pairs (w, -w): Var = K^2 [e^-v (e^v - 1)^2/(2m) - (N_p/m^2) pair_gap(v, d)];
    * m pairs (cos, sin):
      Var = e^(|x|^2 + |y|^2) [(1 - e^-s)^2/(2m) - (N_p/m^2) pair_gap_trig(s, d)].

    References
    ----------
    .. [1] K. Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Lemma 2, for
       independent rows; the term of the pairs is derived in this project.
    """

    draw: _Draw = field(repr=False)
    name: str = field(init=False)
    unbiased: bool
    pair_gap: Callable[[ArrayLike, int], NDArray[np.float64]] = field(repr=False)
    pair_gap_trig: Callable[[ArrayLike, int], NDArray[np.float64]] = field(repr=False)

    def __post_init__(self) -> None:
        """Take name, module and documentation from the drawing function."""
        object.__setattr__(self, "name", self.draw.__name__)
        object.__setattr__(self, "__doc__", self.draw.__doc__)
        object.__setattr__(self, "__module__", self.draw.__module__)

    def __reduce__(self) -> str:
        """Pickle and copy by name, as functions do: the decorated name holds this object."""
        return self.name

    def __call__(
        self, num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
    ) -> NDArray[np.float64]:
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
            or NumPy refuses ``rng``.
        ValueError
            If ``num`` or ``dim`` is below 1, a batch axis is negative, or NumPy refuses ``rng``.
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
    blocks, rest = divmod(_integer(num, "num", least=1), _integer(dim, "dim", least=1))
    return blocks * dim * (dim - 1) + rest * (rest - 1)


def _no_gap(sq_norm: ArrayLike, dim: int) -> NDArray[np.float64]:
    return np.zeros_like(_sq_norm(sq_norm, dim))


def _orthogonal_gap(v: ArrayLike, dim: int) -> NDArray[np.float64]:
    """Return 1 - e^-v 1F1(d; d/2; v/2), term by term >= 0, so that nothing cancels."""
    v = np.minimum(_sq_norm(v, dim), _LARGEST)
    return _deficit_series(v, np.exp(-v), dim)


def _orthogonal_gap_trig(s: ArrayLike, dim: int) -> NDArray[np.float64]:
    """Return e^-s - 1F1(d; d/2; -s/2) to an absolute error of rounding.

    Up to s = 1 the result is small beside e^-s and comes from its own series. Beyond, Kummer's
    transformation 1F1(d; d/2; -a) = e^-a 1F1(-d/2; d/2; a) bounds every term by a Poisson weight.
    """
    s = np.minimum(_sq_norm(s, dim), 2 * _LARGEST)
    near = _deficit_series(-np.minimum(s, 1.0), np.ones_like(s), dim)
    far = np.exp(-s) - _kummer_series(s / 2, dim)
    return np.where(s <= 1.0, near, far)


# exp(-_LARGEST) is still a normal number, so that a series may start from it.
_LARGEST = 700.0


def _deficit_series(x: NDArray[np.float64], first: ArrayLike, dim: int) -> NDArray[np.float64]:
    """Sum first x^k/k! (1 - prod_{j<k} (d+j)/(d+2j)) over k."""
    term = np.array(first, dtype=np.float64)
    total = np.zeros_like(x)
    deficit = 0.0
    for k in range(1, _num_terms(x)):
        term *= x / k
        total += deficit * term
        deficit += (1.0 - deficit) * k / (dim + 2 * k)
    return total


def _kummer_series(a: NDArray[np.float64], dim: int) -> NDArray[np.float64]:
    """Sum e^-a 1F1(-d/2; d/2; a), whose coefficients (-d/2)_k/(d/2)_k are at most 1 in size."""
    term = np.array(np.exp(-a))
    total = term.copy()
    for k in range(1, _num_terms(a)):
        term *= a * ((2 * k - 2 - dim) / (2 * k - 2 + dim) / k)
        total += term
    return total


def _num_terms(x: NDArray[np.float64]) -> int:
    # Twelve standard deviations of a Poisson count beyond its mean, and 40 for small means.
    largest = float(np.max(np.abs(x), initial=0.0, where=~np.isnan(x)))
    return int(largest + 12.0 * largest**0.5) + 40


def _sq_norm(value: ArrayLike, dim: int) -> NDArray[np.float64]:
    _integer(dim, "dim", least=1)
    value = np.asarray(value, dtype=np.float64)
    if np.any(value < 0):
        msg = f"a squared norm must be at least 0, got {float(np.min(value))!r}"
        raise ValueError(msg)
    return value


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
def gaussian(
    num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
) -> NDArray[np.float64]:
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
    therefore the first of more rows, and a batch is what as many draws in a row would give.
    Time and memory O(m d) a draw.
    """
    return as_generator(rng).standard_normal((*batch_shape, num, dim))


@partial(Sampler, unbiased=True, pair_gap=_orthogonal_gap, pair_gap_trig=_orthogonal_gap_trig)
def orthogonal(
    num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
) -> NDArray[np.float64]:
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

    For two rows of one block E[exp(w1.z) exp(w2.z)] = 1F1(d; d/2; |z|^2/2), which gives
    ``pair_gap`` and ``pair_gap_trig``, and with them the variance of a map (see `Sampler`).
    Positive features never do worse than with independent rows; trigonometric ones may, by a
    little, at large |x - y|. Both are sums of about v + 12 sqrt(v) + 40 terms (s/2 for the
    trigonometric one) for the largest entry; v above 700, where e^v leaves float64, counts as 700,
    and s above 1400 as 1400.

    Takes 2 d^2 standard normals from ``rng`` for each block, a partial one included: the matrix to
    factor, row by row, then the d rows whose norms are used. Fewer rows from the same seed are
    therefore the first of more rows, and a batch is what as many draws in a row would give, up to
    rounding. Time O(m d^2), memory O((m + d) d) a draw.

    References
    ----------
    .. [1] F. Yu et al., "Orthogonal Random Features", NeurIPS 2016.
    .. [2] F. Mezzadri, "How to generate random matrices from the classical compact groups",
       Notices of the AMS 54, 2007, for the signs.
    .. [3] K. Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Theorem 2.
    """
    blocks = -(-num // dim)
    normals = as_generator(rng).standard_normal((*batch_shape, blocks, 2, dim, dim))
    q, r = np.linalg.qr(normals[..., 0, :, :])
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    q *= np.where(diagonal < 0, -1.0, 1.0)[..., None, :]
    q *= np.linalg.norm(normals[..., 1, :, :], axis=-1, keepdims=True)
    rows = q.reshape(*batch_shape, blocks * dim, dim)
    # A copy, so that the rows that are cut off do not stay in memory.
    return rows if blocks * dim == num else rows[..., :num, :].copy()


SAMPLERS: dict[str, Sampler] = {sampler.name: sampler for sampler in (gaussian, orthogonal)}
"""The samplers by name."""

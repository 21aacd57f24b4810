"""The samplers: independent, orthogonal, stratified and low-discrepancy rows."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from linattn.sampling import _low_discrepancy, _moments
from linattn.sampling._records import Floats, Sampler, check_sq_norm, no_gap
from linattn.sampling._seeds import Seed, as_generator

__all__ = [
    "SAMPLERS",
    "fixed_norm",
    "gaussian",
    "halton",
    "orthogonal",
    "quantile",
    "simplex",
    "sobol",
    "stratified",
]


def _orthogonal_gap(v: ArrayLike, dim: int) -> Floats:
    return _moments.orthogonal_gap(check_sq_norm(v, dim), dim)


def _orthogonal_gap_trig(s: ArrayLike, dim: int) -> Floats:
    return _moments.orthogonal_gap_trig(check_sq_norm(s, dim), dim)


@partial(Sampler, unbiased=True, pair_gap=no_gap, pair_gap_trig=no_gap)
def gaussian(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> Floats:
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

    Examples
    --------
    >>> from linattn import sampling
    >>> sampling.gaussian(4, 3, rng=0).shape
    (4, 3)
    """
    return as_generator(rng).standard_normal((*batch_shape, num, dim))


@partial(Sampler, unbiased=True, pair_gap=_orthogonal_gap, pair_gap_trig=_orthogonal_gap_trig)
def orthogonal(
    num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
) -> Floats:
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

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import sampling
    >>> rows = sampling.orthogonal(3, 3, rng=0)
    >>> bool(np.allclose(rows @ rows.T, np.diag(np.sum(rows**2, axis=-1))))
    True
    """
    normals = _block_normals(num, dim, rng, batch_shape)
    rows = _haar(normals[..., 0, :, :])
    rows *= np.linalg.norm(normals[..., 1, :, :], axis=-1, keepdims=True)
    return _first_rows(rows, num)


@partial(Sampler, unbiased=True, gap=_moments.simplex_gap)
def simplex(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> Floats:
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
    rows depend on how many there are. Time O(m d^2), memory O((m + d) d) a draw.

    References
    ----------
    .. [1] I. Reid et al., "Simplex Random Features", ICML 2023. The vertices here are an
       orthonormal frame minus its mean, the same up to a rotation; the proof above is this
       project's.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import sampling
    >>> rows = sampling.simplex(3, 3, rng=0)
    >>> rows /= np.linalg.norm(rows, axis=-1, keepdims=True)
    >>> float(np.round(rows[0] @ rows[1], 12))
    -0.5
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
) -> Floats:
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
    The variance of the norms no longer adds to the variance of the estimate. With g_i the mean of
    exp(w.z - v/2) in stratum i, and E_ii the mean of the product of two rows of orthogonal
    directions and independent norms both of stratum i,

        gap = sum_i (g_i - 1)^2 / m^2
              + N_p / (m^3 (m - 1)) [m^2 pair_gap(v, d) + sum_i (E_ii - g_i^2)],

    for positive features and A = 0 at least the gap of `orthogonal`. It depends on A.

    Takes, for each draw, d^2 standard normals from ``rng`` for each block, m whose distribution
    function is U, and m whose order is the order of the strata. Time O(m d^2), memory
    O((m + d) d) a draw.

    Examples
    --------
    >>> from linattn import sampling
    >>> sampling.stratified(4, 3, rng=0).shape
    (4, 3)
    """
    directions, normals = _orthogonal_directions(num, dim, rng, batch_shape, 2 * num)
    uniform = _moments.scipy_special("stratified").ndtr(normals[..., :num])
    # A normal above 8.2 has a distribution function that rounds to 1, and an infinite quantile.
    levels = np.minimum((np.arange(num) + uniform) / num, 1 - 2.0**-53)
    norms = _moments.chi_quantiles(levels, dim, "stratified")
    order = np.argsort(normals[..., num:], axis=-1)
    return directions * np.take_along_axis(norms, order, axis=-1)[..., None]


@partial(Sampler, unbiased=False, gap=_moments.quantile_gap, mean=_moments.quantile_mean)
def quantile(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> Floats:
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
    the order of the norms. Time O(m d^2), memory O((m + d) d) a draw; the closed form for
    trigonometric features O(m^2).

    References
    ----------
    .. [1] Su Jianlin, https://kexue.fm/archives/7921, where the norms are given without the bias.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import sampling
    >>> norms = [np.linalg.norm(sampling.quantile(4, 3, rng=seed), axis=-1) for seed in (0, 1)]
    >>> bool(np.allclose(np.sort(norms[0]), np.sort(norms[1])))
    True
    """
    directions, normals = _orthogonal_directions(num, dim, rng, batch_shape, num)
    norms = _moments.chi_quantiles(np.arange(1, num + 1) / (num + 1), dim, "quantile")
    return directions * norms[np.argsort(normals, axis=-1)][..., None]


@partial(Sampler, unbiased=False, gap=_moments.fixed_norm_gap, mean=_moments.fixed_norm_mean)
def fixed_norm(
    num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
) -> Floats:
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

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import sampling
    >>> rows = sampling.fixed_norm(4, 3, rng=0)
    >>> bool(np.allclose(np.linalg.norm(rows, axis=-1), np.sqrt(3)))
    True
    """
    directions, _ = _orthogonal_directions(num, dim, rng, batch_shape, 0)
    return directions * math.sqrt(dim)


@partial(Sampler, unbiased=True)
def sobol(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> Floats:
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
    shift of 52 bits, is done here, so that a batch is scrambled in one step and does not depend on
    SciPy's version. Each coordinate of each row is uniform on the 2^52 midpoints (k + 1/2) 2^-52
    before it is mapped, so that a map is unbiased. The rows are dependent: no closed form of the
    variance is known. Powers of two are the best numbers of rows.

    Takes 53 integers below 2^52 from ``rng`` for each dimension. Fewer rows from the same seed are
    the first of more rows. Time O(m d), memory O(m d) a draw.

    References
    ----------
    .. [1] J. Matousek, "On the L2-discrepancy for anchored boxes", J. Complexity 14, 1998.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import sampling
    >>> rows = sampling.sobol(8, 3, rng=0)
    >>> bool(np.allclose(rows[:4], sampling.sobol(4, 3, rng=0)))
    True
    """
    special = _moments.scipy_special("sobol")
    return np.asarray(
        special.ndtri(_low_discrepancy.sobol(num, dim, as_generator(rng), batch_shape))
    )


@partial(Sampler, unbiased=True)
def halton(num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()) -> Floats:
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
    few dimensions: a coordinate needs p rows to be evenly covered once, and the permutations cost
    O(p) each; `sobol` has neither defect.

    Takes p uniform numbers from ``rng`` for each place of each coordinate. Fewer rows from the
    same seed are the first of more rows. Time and memory O(m d + d^2 log d) a draw, up to
    logarithms.

    References
    ----------
    .. [1] A. B. Owen, "A randomized Halton algorithm in R", arXiv:1706.02808, 2017.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import sampling
    >>> rows = sampling.halton(8, 3, rng=0)
    >>> bool(np.allclose(rows[:4], sampling.halton(4, 3, rng=0)))
    True
    """
    special = _moments.scipy_special("halton")
    return np.asarray(
        special.ndtri(_low_discrepancy.halton(num, dim, as_generator(rng), batch_shape))
    )


def _block_normals(num: int, dim: int, rng: Seed, batch_shape: tuple[int, ...]) -> Floats:
    blocks = -(-num // dim)
    return as_generator(rng).standard_normal((*batch_shape, blocks, 2, dim, dim))


def _haar(normals: Floats) -> Floats:
    """Turn square matrices of normals into Haar-distributed orthogonal ones."""
    q, r = np.linalg.qr(normals)
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    q *= np.where(diagonal < 0, -1.0, 1.0)[..., None, :]
    return np.asarray(q)


def _first_rows(blocks: Floats, num: int) -> Floats:
    *batch_shape, count, dim, _ = blocks.shape
    rows = blocks.reshape(*batch_shape, count * dim, dim)
    # A copy, so that the rows that are cut off do not stay in memory.
    return rows if count * dim == num else rows[..., :num, :].copy()


def _simplex_vertices(frame: Floats) -> Floats:
    count = frame.shape[-2]
    if count == 1:
        return frame
    centred = frame - frame.mean(axis=-2, keepdims=True)
    return np.asarray(math.sqrt(count / (count - 1)) * centred)


def _orthogonal_directions(
    num: int, dim: int, rng: Seed, batch_shape: tuple[int, ...], extra: int
) -> tuple[Floats, Floats]:
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

# doctest finds no examples of instances.
__test__ = {name: sampler.__doc__ for name, sampler in SAMPLERS.items()}

"""Scrambled low-discrepancy points of the unit cube, in batches of scrambles.

Both generators return float64 of shape ``(*batch_shape, num, dim)``: the first ``num`` points of
an independent scramble for each index of the batch. Every coordinate of every point is uniform on
a grid of the open unit interval no coarser than 2^-51, so that a quantile function of it is finite
and has the distribution it should have, to the last digits of float64.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def sobol(
    num: int, dim: int, generator: np.random.Generator, batch_shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Draw a Sobol sequence under random linear scrambling and a random digital shift.

    Takes 53 integers below 2^52 a dimension.
    """
    points = _sobol_points(num, dim)
    words = generator.integers(2**52, size=(*batch_shape, dim, 53), dtype=np.uint64)
    return (_scramble(points, words).astype(np.float64) + 0.5) * 2.0**-52


@lru_cache(maxsize=8)
def _sobol_points(num: int, dim: int) -> NDArray[np.uint64]:
    """30 bits of each coordinate before any scrambling."""
    from scipy.stats import qmc

    if dim > qmc.Sobol.MAXDIM or num > 2**30:
        raise ValueError(
            f"the Sobol sequence has at most {qmc.Sobol.MAXDIM} dimensions and 2^30 rows, got "
            f"dim {dim} and num {num}"
        )
    # SciPy warns about lengths that are no powers of two, though cut off it is the same sequence.
    points = qmc.Sobol(dim, scramble=False).random_base2((num - 1).bit_length())[:num]
    bits: NDArray[np.uint64] = (points * 2.0**30).astype(np.uint64)
    bits.flags.writeable = False
    return bits


def _scramble(points: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Multiply 30 bits by a 52 x 30 matrix, random below its diagonal of ones, and shift 52.

    ``points`` (n, d), ``words`` (..., d, 53): the matrix's rows in upper bits, then the shift.
    """
    diagonal = np.uint64(1) << np.arange(29, -1, -1, dtype=np.uint64)
    rows = words[..., None, :, :52] >> np.uint64(22)
    rows[..., :30] &= np.uint64(2**30) - 2 * diagonal
    rows[..., :30] |= diagonal
    bits = np.zeros(np.broadcast_shapes(rows.shape[:-1], points.shape), dtype=np.uint64)
    for place in range(52):
        bits <<= np.uint64(1)
        bits |= np.bitwise_count(points & rows[..., place]) & np.uint8(1)
    return np.asarray(bits ^ words[..., None, :, 52])


def halton(
    num: int, dim: int, generator: np.random.Generator, batch_shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Draw a Halton sequence with a random permutation of the digits at every place.

    Takes, for one dimension after another, p uniform numbers a place: the order of them is the
    permutation of the digits of base p.
    """
    bases = _primes(dim)
    places = [math.floor(52 / math.log2(base)) for base in bases]
    sizes = [base * count for base, count in zip(bases, places, strict=True)]
    keys = np.split(generator.random((*batch_shape, sum(sizes))), np.cumsum(sizes)[:-1], axis=-1)
    points = np.empty((*batch_shape, num, dim))
    for j, (base, count) in enumerate(zip(bases, places, strict=True)):
        permutations = np.argsort(keys[j].reshape(*batch_shape, count, base), axis=-1)
        points[..., j] = _radical_inverse(num, permutations)
    return np.minimum(points, 1 - 2.0**-53)


def _radical_inverse(num: int, permutations: NDArray[np.intp]) -> NDArray[np.float64]:
    """Mirror the permuted digits of 0, ..., num - 1; ``permutations`` (..., places, base)."""
    *batch_shape, places, base = permutations.shape
    # Half a unit beyond the last place, so that 0 does not occur.
    inverse = np.full((*batch_shape, num), 0.5)
    for place in reversed(range(places)):
        digits = np.arange(num) // base**place % base
        inverse = (permutations[..., place, digits] + inverse) / base
    return inverse


def _primes(count: int) -> list[int]:
    primes: list[int] = []
    candidate = 2
    while len(primes) < count:
        if all(candidate % prime for prime in primes):
            primes.append(candidate)
        candidate += 1
    return primes

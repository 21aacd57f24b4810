"""Exact moments of random features: of one row, and of a block of orthogonal rows.

Letters: ``v = |x + y|^2`` (``s = |x - y|^2`` for trigonometric features) of scaled inputs, ``d``
dim, ``m`` rows, ``A`` the tilt of generalized exponential features, ``X`` the estimate of one row
over the kernel.
"""

from __future__ import annotations

import decimal
from decimal import Decimal
from functools import lru_cache
from itertools import product
from math import comb, exp, prod

from linattn._checks import check_flag

__all__ = ["block_kurtosis", "exponential_moments", "orthogonal_block_moment"]

KINDS = ("positive", "paired", "trigonometric")

# Partitions of 1 to 4: how often rows repeat in a product of so many, and in how many orders.
_PATTERNS: dict[int, tuple[tuple[tuple[int, ...], int], ...]] = {
    1: (((1,), 1),),
    2: (((2,), 1), ((1, 1), 1)),
    3: (((3,), 1), ((2, 1), 3), ((1, 1, 1), 1)),
    4: (((4,), 1), ((3, 1), 4), ((2, 2), 3), ((2, 1, 1), 6), ((1, 1, 1, 1), 1)),
}


def exponential_moments(v: float, max_order: int) -> list[float]:
    r"""Central moments of one positive feature product over the kernel.

    .. math:: \mathrm{E} (X - 1)^p, \qquad X = e^{\sqrt{v} g - v / 2}, \quad g \sim N(0, 1)

    Parameters
    ----------
    v : float
        ``|x + y|^2``.
    max_order : int
        Largest p.

    Returns
    -------
    list of float
        For p = 0, 1, ..., max_order; inf where float64 ends.

    Notes
    -----
    ``E X^p = exp(p (p - 1) v / 2)``; the alternating sums are taken with 120 decimal digits.

    Examples
    --------
    >>> from linattn.testing import moments
    >>> [round(moment, 2) for moment in moments.exponential_moments(1.0, 3)]
    [1.0, 0.0, 1.72, 13.93]
    """
    with decimal.localcontext() as context:
        context.prec = 120
        step = Decimal(v)
        raw = [(step * (p * (p - 1)) / 2).exp() for p in range(max_order + 1)]
        moments = []
        for p in range(max_order + 1):
            terms = (comb(p, j) * (-1) ** (p - j) * raw[j] for j in range(p + 1))
            moments.append(float(sum(terms, Decimal(0))))
    return moments


@lru_cache(maxsize=4096)
def orthogonal_block_moment(powers: tuple[float, ...], v: float, dim: int) -> float:
    r"""Joint moment generating function of rows of one orthogonal block.

    .. math::
        \mathrm{E}\, e^{\sum_i p_i \omega_i \cdot z} = \sum_k \frac{(v / 2)^k}{(d / 2)_k}
        [t^k] \prod_i (1 - p_i^2 t)^{-d / 2}

    Parameters
    ----------
    powers : tuple of float
        p_1, p_2, ..., at most d of them.
    v : float
        ``|z|^2``; a negative one is the trigonometric case, -s.
    dim : int
        d.

    Returns
    -------
    float

    Notes
    -----
    Derived in this project. The coefficients of the product come from its logarithmic derivative.
    Time O(terms^2).

    Examples
    --------
    >>> from linattn.testing import moments
    >>> round(moments.orthogonal_block_moment((1.0, 1.0), 1.0, 4), 2)
    2.54
    """
    squares = [p * p for p in powers if p]
    size = abs(v) / 2 * sum(squares)
    terms = int(size + 12 * size**0.5) + 40
    sums = [0.5 * dim * sum(q**k for q in squares) for k in range(terms + 1)]
    coefficients, total, factor = [1.0], 1.0, 1.0
    for k in range(1, terms):
        new = sum(sums[j] * coefficients[k - j] for j in range(1, k + 1)) / k
        coefficients.append(new)
        factor *= (v / 2) / (dim / 2 + k - 1)
        total += factor * new
    return total


def _expansion(kind: str, power: int) -> list[tuple[int, float]]:
    """Powers of exp(omega.z) in the power of a row's feature product, with their weights."""
    if kind == "positive":
        return [(power, 1.0)]
    return [(power - 2 * j, comb(power, j) / 2**power) for j in range(power + 1)]


def _rows_moment(kind: str, powers: tuple[int, ...], v: float, dim: int, A: float) -> float:
    """``E X_1^p_1 X_2^p_2 ...`` over different rows of one orthogonal block."""
    signed = -v if kind == "trigonometric" else v
    total = 0.0
    for choice in product(*(_expansion(kind, p) for p in powers)):
        tilted = tuple(
            abs(power) * ((1 - 4 * A) / (1 - 4 * A * p)) ** 0.5
            for (power, _), p in zip(choice, powers, strict=True)
        )
        weight = prod(weight for _, weight in choice)
        total += weight * orthogonal_block_moment(tuple(sorted(tilted)), signed, dim)
    if kind != "trigonometric":
        total *= exp(-v / 2 * sum(powers))
    tilts = [(1 - 4 * A) ** (p * dim / 2) / (1 - 4 * A * p) ** (dim / 2) for p in powers]
    return float(total * prod(tilts))


def _cumulants(kind: str, rows: int, v: float, dim: int, A: float) -> tuple[float, float]:
    """Second and fourth cumulant of the sum of the rows of one orthogonal block."""
    raw = {}
    for order, patterns in _PATTERNS.items():
        raw[order] = sum(
            ways
            * prod(rows - i for i in range(len(powers)))
            * _rows_moment(kind, powers, v, dim, A)
            for powers, ways in patterns
            if len(powers) <= rows
        )
    mean = raw[1]
    second = raw[2] - mean**2
    fourth = raw[4] - 4 * mean * raw[3] + 6 * mean**2 * raw[2] - 3 * mean**4
    return second, fourth - 3 * second**2


def block_kurtosis(
    kind: str, sq_norm: float, num: int, dim: int, *, orthogonal: bool, A: float = 0.0
) -> float:
    """Return the kurtosis ``E (Y - E Y)^4 / Var(Y)^2`` of an estimate Y from some rows.

    Parameters
    ----------
    kind : {"positive", "paired", "trigonometric"}
        One exponential feature a row; the pair of w and -w; the pair of cosine and sine.
    sq_norm : float
        v, or s for "trigonometric"; at least 1e-3, below which rounding eats the moments.
    num, dim : int
        m rows, d.
    orthogonal : bool
        Whether they come in orthogonal blocks of d, or independent.
    A : float, optional
        Tilt; the fourth moment is finite below 1/16. Default 0.

    Returns
    -------
    float

    Raises
    ------
    TypeError, ValueError
        An unknown kind, a norm below 1e-3, a tilt of 1/16 or more.

    Notes
    -----
    Exact. Raw moments of a block's sum are joint moments of up to four rows, each a sum of
    :func:`orthogonal_block_moment`; a tilt multiplies the power p of a row by
    ``sqrt((1 - 4 A) / (1 - 4 p A))``. Blocks are independent: their cumulants add.
    """
    orthogonal = check_flag("orthogonal", orthogonal)
    if kind not in KINDS or not sq_norm >= 1e-3 or not A < 1 / 16:
        raise ValueError(
            f"want a kind of {KINDS}, sq_norm of at least 1e-3 and A below 1/16, got {kind!r}, "
            f"{sq_norm} and {A}"
        )
    block = dim if orthogonal else 1
    blocks, rest = divmod(num, block)
    second, fourth = _cumulants(kind, block, sq_norm, dim, A)
    second, fourth = blocks * second, blocks * fourth
    if rest:
        more = _cumulants(kind, rest, sq_norm, dim, A)
        second, fourth = second + more[0], fourth + more[1]
    return 3 + fourth / second**2

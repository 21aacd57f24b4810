"""What linear attention cannot do without, and how fast this machine could do it.

Counted for each token and head, with queries and keys d wide, values e wide and m columns; every
product of an a x b by a b x c matrix is 2 a b c flops:

====================  ==========================  =====================
what                  flops                       exponentials
====================  ==========================  =====================
project key, query    2 d r each                  r each
add a key's state     2 m (e + 1)
read the state        2 m (e + 1)
causal: own block     2 c m + 2 c (e + 1)
====================  ==========================  =====================

r is the number of projection rows: m for FAVOR+, m / 2 for hyperbolic features, whose other half
are reciprocals (divisions, not counted), none for elu + 1, which takes m = d exponentials a
vector. e + 1, because numerator and denominator come out of one product. Causal attention also
weighs the c = 32 tokens of its own block, as a whole square, of which a product cannot leave out
half. With d = e = 64 and m = 256 that makes

* FAVOR+ full 132,096 flops and 512 exponentials,
* FAVOR+ causal 152,640 flops and 512 exponentials,
* elu + 1 full 16,640 flops and 128 exponentials.

The limit is flops by the fastest matrix product that this machine did at the shapes in use, plus
exponentials by its rate of ``np.exp`` in cache. Reading and writing memory, maxima, divisions and
row terms are not in it. Products are taken as a whole; where BLAS has kernels for small matrices
the same product is faster in batches of 32 tokens, and by that rate the limit is stricter. Both
are shown: 100 % of the second is out of reach.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.peers.problem import Sizes

__all__ = ["CAUSAL_BLOCK", "ROWS", "Work", "limit_seconds", "product_shapes", "work"]

CAUSAL_BLOCK = 32
"""c: tokens that share one causal square."""

ROWS = 512
"""Tokens in a block of features."""


class Work(NamedTuple):
    """What one token of one head costs."""

    flops: int
    exponentials: int


def work(feature_map: str, sizes: Sizes, *, is_causal: bool) -> Work:
    """Count the work of ``"favor"``, ``"hyperbolic"`` or ``"elu"``."""
    d, e = sizes.dim, sizes.dim
    m = d if feature_map == "elu" else sizes.features
    rows = {"favor": m, "hyperbolic": m // 2, "elu": 0}[feature_map]
    flops = 2 * (2 * d * rows) + 2 * (2 * m * (e + 1))
    if is_causal:
        flops += 2 * CAUSAL_BLOCK * (m + e + 1)
    return Work(flops, 2 * (rows or m))


def limit_seconds(
    feature_map: str, sizes: Sizes, length: int, *, is_causal: bool, sgemm: float, exp: float
) -> float:
    """Return the least time of a whole call on one core.

    ``sgemm`` are flops a second of float32 products, ``exp`` exponentials a second.
    """
    token = work(feature_map, sizes, is_causal=is_causal)
    return sizes.batch * sizes.heads * length * (token.flops / sgemm + token.exponentials / exp)


def product_shapes(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """Return ``(a, b, c)`` of the products whose rate is measured.

    ``"small"`` is ``"read"`` in batches of ``CAUSAL_BLOCK`` rows.
    """
    d, m = sizes.dim, sizes.features
    read = (ROWS, m, d + 1)
    return {"project": (ROWS, d, m), "sum": (m, ROWS, d + 1), "read": read, "small": read}

"""What linear attention cannot do without on a GPU, and how fast this one could do it.

A call must read queries, keys and values once and write the output once, do its products, and take
its exponentials. Counted for each token and head, with queries and keys d wide, values e wide and m
features:

====================  ==========================  =====================
what                  flops                       exponentials
====================  ==========================  =====================
project key, query    2 d m each                  m each
add a key's state     2 m (e + 1)
read the state        2 m (e + 1)
causal: its tile      2 c m + 2 c (e + 1)
====================  ==========================  =====================

elu + 1 projects nothing and takes m = d. A causal token meets the c = 64 tokens of its tile, as a
whole square. The three times are bytes by the rate of a copy on the device (bytes read and
written), flops by the rate of a large matrix product of the dtype, and exponentials by the rate of
the special function units, all measured in the same run. They overlap at best, so that the floor is
the largest of them.

The fused kernels do more than that: causal ones project keys and add them up a second time, but for
those of the last segment, and less of the causal square, whose strips of 16 rows end at the
diagonal. ``executed_flops`` counts their ``mma.sync`` instructions, whose ceiling is below that
of a large matrix product.

A step of decoding reads and writes each state once; all else is small beside it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "SEGMENTS",
    "TILE",
    "Floor",
    "Rates",
    "Sizes",
    "Work",
    "attention_work",
    "decode_work",
    "executed_flops",
    "floor",
]

TILE = 64
"""c: tokens of one causal square."""

STRIP = 16
"""Rows of a tile that a warp works on."""

SEGMENTS = 2
"""Segments of the sequence of each of 64 heads, on a device of 132 multiprocessors."""


class Sizes(NamedTuple):
    """A problem but for its length; elu + 1 has as many features as dims."""

    heads: int = 64
    dim: int = 64
    features: int = 256
    value_dim: int = 64


class Work(NamedTuple):
    """What a whole call costs."""

    bytes: float
    flops: float
    exponentials: float


class Rates(NamedTuple):
    """Bytes, flops and exponentials a second."""

    copy: float
    product: float
    exp: float


class Floor(NamedTuple):
    """Seconds that each kind of work takes at its rate."""

    memory: float
    product: float
    exp: float

    @property
    def seconds(self) -> float:
        """The least time of a call."""
        return max(self)


def attention_work(
    feature_map: str, sizes: Sizes, length: int, *, itemsize: int, is_causal: bool
) -> Work:
    """Count the work of a call with ``"favor"`` or ``"elu"``."""
    heads, d, m, e = sizes
    projected = feature_map == "favor"
    m = m if projected else d
    flops = 4 * d * m * projected + 4 * m * (e + 1)
    if is_causal:
        flops += 2 * TILE * (m + e + 1)
    tokens = heads * length
    return Work(tokens * itemsize * 2 * (d + e), tokens * flops, tokens * 2 * m)


def executed_flops(
    feature_map: str, sizes: Sizes, length: int, *, is_causal: bool, segments: int = SEGMENTS
) -> float:
    """Count the flops of ``mma.sync`` in a fused call; value dims fill whole tiles."""
    heads, d, m, e = sizes
    projected = feature_map == "favor"
    m = m if projected else d
    one_side = 2 * d * m * projected + 2 * m * e
    flops = 2.0 * one_side
    if is_causal:
        strips = TILE // STRIP
        flops += one_side * (segments - 1) / segments
        flops += 2 * TILE * (m + e) * (strips + 1) / (2 * strips)
    return heads * length * flops


def decode_work(sizes: Sizes) -> Work:
    """Count the work of one token of all heads, with FAVOR+ and states in float32."""
    heads, d, m, e = sizes
    flops = 4 * d * m + 4 * m * (e + 1)
    return Work(2 * heads * 4 * m * (e + 2), heads * flops, heads * 2 * m)


def floor(work: Work, rates: Rates) -> Floor:
    """Return the time of each kind of work."""
    return Floor(*(amount / rate for amount, rate in zip(work, rates, strict=True)))

"""Fingerprints of feature maps, as states and checkpoints carry them."""

from __future__ import annotations

import operator
from typing import Any
from zlib import crc32

from linattn.typing import FeatureMap


def known_integer(value: Any) -> int | None:
    """Return an integer that a state carries, None for none or one that cannot be read.

    JAX makes arrays of integers, and within a trace they have no value.
    """
    if value is None or type(value) is int:
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def short_fingerprint(fingerprint: str) -> int:
    """Return 31 bits of a fingerprint: with 32 JAX could not hold it in its default integer."""
    return crc32(fingerprint.encode()) >> 1


def map_fingerprint(feature_map: FeatureMap) -> int | None:
    """Return the short fingerprint of a map, None for a map that has none."""
    fingerprint = getattr(feature_map, "fingerprint", None)
    if not callable(fingerprint):
        return None
    try:
        return short_fingerprint(str(fingerprint()))
    except ValueError:
        # A parameter is a function without a name of its own.
        return None

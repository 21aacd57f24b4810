"""What a way to compute attention is, to ``linattn compare``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from linattn.typing import Array

__all__ = ["FAILURES", "Attend", "Method", "Sizes", "exact_multiplications"]

FAILURES = (ValueError, ArithmeticError, MemoryError)
"""What a method may raise on inputs that it cannot do: the others are measured all the same."""


class Attend(Protocol):
    """One attention call, ready to be timed."""

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        is_causal: bool,
        key_bias: Array | None = None,
    ) -> Array:
        """Return the output, ``(..., L, e)``; ``key_bias`` are log weights of keys, (..., S)."""
        ...


class Sizes(NamedTuple):
    """What the cost of a call depends on.

    Attributes
    ----------
    L, S, d, e : int
        Queries, keys, dim and value dim of a head.
    m : int
        Columns of a map; keys, landmarks or the like that a query meets. 0 where that is no choice.
    is_causal : bool
        Whether query i sees the keys up to i only.
    """

    L: int
    S: int
    d: int
    e: int
    m: int
    is_causal: bool


def exact_multiplications(sizes: Sizes) -> float:
    """Return the multiplications of exact attention, for one head."""
    pairs = sizes.L * (sizes.L + 1) / 2 if sizes.is_causal else sizes.L * sizes.S
    return pairs * (sizes.d + sizes.e)


@dataclass(frozen=True)
class Method:
    """A way to compute attention.

    Attributes
    ----------
    name : str
        What ``--maps`` and the JSON file call it.
    label : str
        What tables and plots call it.
    make : callable
        ``make(query, key, num_features, rng)`` returns the call. query and key are there for
        maps that are fitted; num_features is None exactly when has_num_features is False.
    has_num_features : bool
        Whether the number of features is a choice; if not, the method is measured once.
    is_random : bool
        Whether another draw gives another result; if not, there is one.
    causal : bool or None
        What the method is for: causal attention, full attention, or either.
    aligned : bool
        Whether queries and keys must be of one length.
    held_out : bool
        Whether the map is fitted to the first half of the tokens, to be judged on the second.
    max_features : callable
        ``max_features(S)``: features that make sense for S keys, at most.
    exact_share : callable
        ``exact_share(S, num_features, is_causal)``: the share of all pairs of a query and a key
        that need no approximation at this size: too large, and the error says nothing about
        longer sequences.
    about : str
        A description of one line.
    kind : str
        "map" for the library's own, which may win; "published" for methods of `linattn.baselines`;
        "bound" for a bound that none of them can beat; "reference" for methods always measured.
    takes_key_bias : bool
        Whether log weights of keys have a meaning for it.
    multiplications : callable
        ``multiplications(sizes)``: about how many, for one head, choosing keys included.
    """

    name: str
    label: str
    make: Callable[[Array, Array, int | None, np.random.Generator], Attend]
    has_num_features: bool = True
    is_random: bool = True
    causal: bool | None = None
    aligned: bool = False
    held_out: bool = False
    max_features: Callable[[int], float] = lambda num_keys: math.inf
    exact_share: Callable[[int, int, bool], float] = lambda num_keys, num_features, is_causal: 0.0
    about: str = ""
    kind: str = "map"
    takes_key_bias: bool = True
    multiplications: Callable[[Sizes], float] = exact_multiplications

    def obstacle(self, *, is_causal: bool, aligned: bool, has_key_bias: bool = False) -> str:
        """Return why the method cannot be measured there; "" if it can."""
        if self.causal is not None and self.causal != is_causal:
            return "is for causal attention only" if self.causal else "is for full attention only"
        if self.aligned and not aligned:
            return "needs as many queries as keys"
        if has_key_bias and not self.takes_key_bias:
            return "takes no key_bias"
        return ""

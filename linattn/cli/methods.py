"""The methods that ``linattn compare`` measures.

To add one, append a :class:`Method` to :data:`METHODS`: the command, its tables, plots and JSON
file read nothing else. What has to be done again for every new sequence belongs into the callable,
which is timed; what is done once (drawing a projection) belongs into `make`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

import linattn
from linattn import feature_maps
from linattn.typing import Array, FeatureMap

__all__ = ["BASELINES", "EXACT", "FAILURES", "METHODS", "UNIFORM", "Attend", "Method", "select"]

FAILURES = (ValueError, ArithmeticError, MemoryError)
"""What a method may raise on inputs that it cannot do: the others are measured all the same."""


class Attend(Protocol):
    """One attention call, ready to be timed."""

    def __call__(self, query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
        """Return the output, ``(..., L, e)``."""
        ...


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
        What it is, in a line.
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

    def obstacle(self, *, is_causal: bool, aligned: bool) -> str:
        """Return why the method cannot be measured there; "" if it can."""
        if self.causal is not None and self.causal != is_causal:
            return "is for causal attention only" if self.causal else "is for full attention only"
        if self.aligned and not aligned:
            return "needs as many queries as keys"
        return ""


def _linear(feature_map: FeatureMap) -> Attend:
    def attend(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
        with warnings.catch_warnings():
            # The error that the tables show tells more.
            warnings.filterwarnings("ignore", ".* denominators are negative", UserWarning)
            return linattn.linear_attention(query, key, value, feature_map, is_causal=is_causal)

    return attend


WINDOW = 32
"""Block length of exact windows, and of the coreset's exact blocks."""


def _in_window(num_keys: int, is_causal: bool) -> float:
    """Return the share of pairs that an exact window counts: its own block and those beside."""
    blocks, rest = divmod(num_keys, WINDOW)
    sizes = [WINDOW] * blocks + [rest]
    beside = sum(left * right for left, right in pairwise(sizes))
    if is_causal:
        inside = sum(size * (size + 1) / 2 for size in sizes)
        return (inside + beside) / (num_keys * (num_keys + 1) / 2)
    return (sum(size**2 for size in sizes) + 2 * beside) / num_keys**2


def _in_window_of_half(num_keys: int, num_features: int, is_causal: bool) -> float:
    return _in_window(num_keys - num_keys // 2, is_causal)


def _share_of_landmarks(num_keys: int, num_features: int, is_causal: bool) -> float:
    return min(1.0, num_features / num_keys)


def _share_of_either(num_keys: int, num_features: int, is_causal: bool) -> float:
    return max(
        _share_of_landmarks(num_keys, num_features, is_causal),
        _in_window(num_keys, is_causal),
    )


def _uncompressed(num_keys: int, num_features: int, is_causal: bool) -> float:
    """Return the share of pairs of queries so early that their coreset still holds every key."""
    return float(min(1.0, (num_features + 2 * WINDOW) / num_keys) ** 2)


def _landmarks(num_features: int | None, rng: np.random.Generator, window: int | None) -> Attend:
    """Fit to the sequence in every call: that is part of the work."""
    seed = int(rng.integers(2**63))

    def attend(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
        phi = feature_maps.LandmarkFeatures.fit(
            query, key, num_features=num_features or 1, rng=seed
        )
        return linattn.linear_attention(
            query, key, value, phi, is_causal=is_causal, exact_window=window
        )

    return attend


def _calibrated(query: Array, key: Array, num_features: int | None) -> Attend:
    """Calibrate to the first half of the tokens, once; frozen from then on."""
    half = max(1, key.shape[-2] // 2)
    phi = feature_maps.CalibratedFeatures.calibrate(
        (query[..., :half, :], key[..., :half, :]),
        num_features=num_features or 1,
        exact_window=WINDOW,
    )

    def attend(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
        return linattn.linear_attention(
            query, key, value, phi, is_causal=is_causal, exact_window=WINDOW
        )

    return attend


def _coreset(num_features: int | None, rng: np.random.Generator) -> Attend:
    seed = int(rng.integers(2**63))

    def attend(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
        stream = linattn.CoresetAttention(num_features or 1, block_size=WINDOW, rng=seed)
        return stream.extend(query, key, value)

    return attend


def _softmax(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    return linattn.softmax_attention(query, key, value, is_causal=is_causal)


def _uniform(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    """Every query gives each key that it sees the same weight."""
    length = value.shape[-2]
    if is_causal:
        count = np.arange(1, length + 1, dtype=value.dtype)[:, None]
        return np.cumsum(value, axis=-2) / count
    mean = np.mean(value, axis=-2, keepdims=True)
    return np.repeat(mean, query.shape[-2], axis=-2)


METHODS: tuple[Method, ...] = (
    Method(
        "favor+",
        "FAVOR+",
        lambda query, key, num_features, rng: _linear(
            feature_maps.PositiveFeatures(query.shape[-1], num_features, rng=rng)
        ),
        about="PositiveFeatures: positive random features, orthogonal rows",
    ),
    Method(
        "hyperbolic",
        "hyperbolic",
        lambda query, key, num_features, rng: _linear(
            feature_maps.HyperbolicFeatures(query.shape[-1], num_features, rng=rng)
        ),
        about="HyperbolicFeatures: positive random features in pairs",
    ),
    Method(
        "trigonometric",
        "trigonometric",
        lambda query, key, num_features, rng: _linear(
            feature_maps.TrigonometricFeatures(query.shape[-1], num_features, rng=rng)
        ),
        about="TrigonometricFeatures: random sines and cosines",
    ),
    Method(
        "relu-performer",
        "ReLU Performer",
        lambda query, key, num_features, rng: _linear(
            feature_maps.ActivationFeatures(query.shape[-1], num_features, rng=rng)
        ),
        about="ActivationFeatures: ReLU of random projections",
    ),
    Method(
        "elu+1",
        "elu + 1",
        lambda query, key, num_features, rng: _linear(feature_maps.EluFeatures()),
        about="EluFeatures: elu(x) + 1; no choice of columns",
        has_num_features=False,
    ),
    Method(
        "relu",
        "ReLU",
        lambda query, key, num_features, rng: _linear(feature_maps.ReluFeatures()),
        about="ReluFeatures: ReLU; no choice of columns",
        has_num_features=False,
    ),
    Method(
        "landmarks",
        "landmarks",
        lambda query, key, num_features, rng: _landmarks(num_features, rng, None),
        about="LandmarkFeatures, fitted to the sequence; not with --causal",
        causal=False,
        # With a landmark for every key it would be exact attention.
        max_features=lambda num_keys: num_keys - 1,
        exact_share=_share_of_landmarks,
    ),
    Method(
        "landmarks+window",
        f"landmarks, window {WINDOW}",
        lambda query, key, num_features, rng: _landmarks(num_features, rng, WINDOW),
        about="the same, near keys exactly; not with --causal",
        causal=False,
        aligned=True,
        max_features=lambda num_keys: num_keys - 1,
        exact_share=_share_of_either,
    ),
    Method(
        "calibrated+window",
        f"calibrated, window {WINDOW}",
        lambda query, key, num_features, rng: _calibrated(query, key, num_features),
        about="CalibratedFeatures, frozen, near keys exactly",
        is_random=False,
        aligned=True,
        held_out=True,
        max_features=lambda num_keys: num_keys // 2,
        exact_share=_in_window_of_half,
    ),
    Method(
        "coreset",
        f"coreset, blocks of {WINDOW}",
        lambda query, key, num_features, rng: _coreset(num_features, rng),
        about="CoresetAttention: a bounded stream; only with --causal",
        causal=True,
        aligned=True,
        max_features=lambda num_keys: num_keys - 1,
        exact_share=_uncompressed,
    ),
)

UNIFORM = Method(
    "uniform",
    "uniform attention",
    lambda query, key, num_features, rng: _uniform,
    has_num_features=False,
)
EXACT = Method(
    "exact", "exact softmax", lambda query, key, num_features, rng: _softmax, has_num_features=False
)

BASELINES: tuple[Method, ...] = (UNIFORM, EXACT)
"""What the methods are held against: always measured, never the winner."""


def select(names: tuple[str, ...]) -> tuple[Method, ...]:
    """Return the methods of these names, in the order of the registry; all of them for no name.

    Raises
    ------
    ValueError
        A name is unknown.
    """
    known = [method.name for method in METHODS]
    unknown = [name for name in names if name not in known]
    if unknown:
        message = f"want names out of {', '.join(known)}, got {', '.join(unknown)}"
        raise ValueError(message)
    return tuple(method for method in METHODS if not names or method.name in names)

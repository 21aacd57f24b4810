"""The methods that ``linattn compare`` measures.

To add one, append a :class:`Method` to :data:`METHODS`: the command, its tables, plots and JSON
file read nothing else. Work for every new sequence belongs into the callable,
which is timed; work done once (drawing a projection) belongs into `make`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import linattn
from linattn import feature_maps
from linattn.cli.maps import NAMES
from linattn.cli.method import Attend, Method, Sizes
from linattn.cli.published import PUBLISHED
from linattn.cli.text import find_name
from linattn.typing import Array, FeatureMap

__all__ = ["EXACT", "METHODS", "REFERENCES", "UNIFORM", "select", "without_labels"]


def _linear(feature_map: FeatureMap, window: int | None = None) -> Attend:
    def attend(
        query: Array, key: Array, value: Array, *, is_causal: bool, key_bias: Array | None = None
    ) -> Array:
        with warnings.catch_warnings():
            # The error that the tables show tells more.
            warnings.filterwarnings("ignore", ".* denominators are negative", UserWarning)
            options: Any = {"is_causal": is_causal, "key_bias": key_bias, "exact_window": window}
            return linattn.linear_attention(query, key, value, feature_map, **options)

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

    def attend(
        query: Array, key: Array, value: Array, *, is_causal: bool, key_bias: Array | None = None
    ) -> Array:
        phi = feature_maps.LandmarkFeatures.fit(
            query, key, num_features=num_features or 1, key_bias=key_bias, rng=seed
        )
        call = _linear(phi, window)
        return call(query, key, value, is_causal=is_causal, key_bias=key_bias)

    return attend


def _calibrated(query: Array, key: Array, num_features: int | None) -> Attend:
    """Calibrate to the first half of the tokens, once; frozen from then on."""
    half = max(1, key.shape[-2] // 2)
    phi = feature_maps.CalibratedFeatures.calibrate(
        (query[..., :half, :], key[..., :half, :]),
        num_features=num_features or 1,
        exact_window=WINDOW,
    )
    return _linear(phi, WINDOW)


def _coreset(num_features: int | None, rng: np.random.Generator) -> Attend:
    seed = int(rng.integers(2**63))

    def attend(
        query: Array, key: Array, value: Array, *, is_causal: bool, key_bias: Array | None = None
    ) -> Array:
        stream = linattn.CoresetAttention(num_features or 1, block_size=WINDOW, rng=seed)
        return stream.extend(query, key, value, key_bias=key_bias)

    return attend


def _softmax(
    query: Array, key: Array, value: Array, *, is_causal: bool, key_bias: Array | None = None
) -> Array:
    return linattn.softmax_attention(query, key, value, is_causal=is_causal, key_bias=key_bias)


TOLERANCE = 0.1
"""Of the row of :func:`linattn.attention`: its default."""


class _Automatic:
    """A call of :func:`linattn.attention`, which stores what it cost."""

    cost = 1.0

    def __init__(self, rng: np.random.Generator) -> None:
        self.seed = int(rng.integers(2**63))

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        is_causal: bool,
        key_bias: Array | None = None,
    ) -> Array:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "tolerance=.* exact attention", UserWarning)
            options: Any = {"is_causal": is_causal, "key_bias": key_bias, "tolerance": TOLERANCE}
            output, report = linattn.attention(
                query, key, value, rng=self.seed, return_report=True, **options
            )
        self.cost = report.cost
        return output


def _uniform(
    query: Array, key: Array, value: Array, *, is_causal: bool, key_bias: Array | None = None
) -> Array:
    """Every query gives each visible key the same weight, or the weight of its bias."""
    if key_bias is not None:
        nothing = np.zeros_like(query)
        return _softmax(nothing, key, value, is_causal=is_causal, key_bias=key_bias)
    length = value.shape[-2]
    if is_causal:
        count = np.arange(1, length + 1, dtype=value.dtype)[:, None]
        return np.cumsum(value, axis=-2) / count
    mean = np.mean(value, axis=-2, keepdims=True)
    return np.repeat(mean, query.shape[-2], axis=-2)


PROBES = 128
"""Queries that landmarks are fitted to, by default."""

CHUNK = 128
"""Tokens of a causal block."""


def _linear_cost(sizes: Sizes) -> float:
    """Both products of a map with m columns, and projections to them."""
    L, S, d, e, m, is_causal = sizes
    pairs = L * CHUNK * (m + e + 1) if is_causal else 0
    return (L + S) * m * (d + e + 1) + pairs


def _elementwise_cost(sizes: Sizes) -> float:
    L, S, d, e, _, is_causal = sizes
    return (L + S) * d * (e + 1) + (L * CHUNK * (d + e + 1) if is_causal else 0)


def _window_cost(sizes: Sizes) -> float:
    return sizes.L * (2 if sizes.is_causal else 3) * WINDOW * (sizes.d + sizes.e)


def _landmarks_cost(sizes: Sizes) -> float:
    """Products with landmarks, assignment in four rounds, products with probes."""
    L, S, d, e, m, _ = sizes
    return L * m * (d + e) + 4 * S * m * d + PROBES * S * d


def _coreset_cost(sizes: Sizes) -> float:
    """Products with entries and exact blocks; two steps of clustering for each block."""
    L, _, d, e, m, _ = sizes
    return L * (m + 2 * WINDOW) * (d + e) + L / WINDOW * 2 * (m + WINDOW) * m * d


def _of_class(name: str, label: str, about: str, **more: Any) -> Method:
    """Return the method of a class of maps that are not fitted, without or with columns."""
    cls = getattr(feature_maps, NAMES[name])

    def make(query: Array, key: Array, number: int | None, rng: np.random.Generator) -> Attend:
        return _linear(cls() if number is None else cls(query.shape[-1], number, rng=rng))

    return Method(
        name,
        label,
        make,
        about=f"{NAMES[name]}: {about}",
        **{"multiplications": _linear_cost} | more,
    )


ONE_SIZE: dict[str, Any] = {"has_num_features": False, "multiplications": _elementwise_cost}

METHODS: tuple[Method, ...] = (
    _of_class("favor+", "FAVOR+", "positive random features, orthogonal rows"),
    _of_class("hyperbolic", "hyperbolic", "positive random features in pairs"),
    _of_class("trigonometric", "trigonometric", "random sines and cosines"),
    _of_class("relu-performer", "ReLU Performer", "ReLU of random projections"),
    _of_class("elu+1", "elu + 1", "elu(x) + 1; no choice of columns", **ONE_SIZE),
    _of_class("relu", "ReLU", "ReLU; no choice of columns", **ONE_SIZE),
    Method(
        "landmarks",
        "landmarks",
        lambda query, key, num_features, rng: _landmarks(num_features, rng, None),
        about="LandmarkFeatures, fitted to the sequence; not with --causal",
        causal=False,
        # With a landmark for every key it would be exact attention.
        max_features=lambda num_keys: num_keys - 1,
        exact_share=_share_of_landmarks,
        multiplications=_landmarks_cost,
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
        multiplications=lambda sizes: _landmarks_cost(sizes) + _window_cost(sizes),
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
        multiplications=lambda sizes: _linear_cost(sizes) + _window_cost(sizes),
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
        multiplications=_coreset_cost,
    ),
)


def _reference(name: str, label: str, make: Any, **more: Any) -> Method:
    return Method(name, label, make, has_num_features=False, kind="reference", **more)


UNIFORM = _reference(
    "uniform", "uniform attention", lambda *given: _uniform, multiplications=lambda sizes: 0.0
)
AUTOMATIC = _reference(
    "attention", f"attention(), {TOLERANCE:g}", lambda *given: _Automatic(given[-1])
)
EXACT = _reference("exact", "exact softmax", lambda *given: _softmax)

REFERENCES: tuple[Method, ...] = (UNIFORM, AUTOMATIC, EXACT)
"""What the methods are held against: always measured, never the winner."""


def without_labels(texts: Sequence[str]) -> list[str]:
    """Replace the labels of tables by names: some have a comma, at which lists are split."""
    labels = {method.label: method.name for method in (*METHODS, *PUBLISHED)}
    found = list(texts)
    for label in sorted(labels, key=len, reverse=True):
        found = [re.sub(re.escape(label), labels[label], text, flags=re.I) for text in found]
    return found


def select(names: tuple[str, ...], *, with_published: bool = False) -> tuple[Method, ...]:
    """Return the methods of these names, in the order of the registry.

    For no name all of the library's own are returned, and all published ones, too, if so wanted.

    Raises
    ------
    ValueError
        A name is unknown.
    """
    known = {method.name: method.name for method in (*METHODS, *PUBLISHED)}
    classes = {name: short for short, name in NAMES.items()}
    wanted, unknown = set(), []
    for name in names:
        try:
            wanted.add(find_name(name, known | classes))
        except ValueError as error:
            unknown.append(str(error))
    if unknown:
        raise ValueError(f"want names out of {', '.join(known)}, got {', '.join(unknown)}")
    return (
        *(method for method in METHODS if not names or method.name in wanted),
        *(method for method in PUBLISHED if with_published or method.name in wanted),
    )

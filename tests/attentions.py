"""Attention of every kind with the inputs and the oracle that tests of unusual input share.

Those that take `xp` run on every array library, with three kinds of attention; those on NumPy run
with every feature map. Tolerances are relative to the sums that attention divides: a map whose
features change sign may cancel, and then no bound relative to the result can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import array_api_compat
import numpy as np
import pytest

import linattn
from linattn import reference
from linattn.feature_maps import (
    ActivationFeatures,
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    RandomFourierFeatures,
    ReluFeatures,
    SoftmaxFeatures,
    TaylorFeatures,
    TrigonometricFeatures,
)
from linattn.typing import Features

# One set of shapes for all libraries: some compile anew for each.
DIM, VALUE_DIM, LENGTH, HEADS, CHUNK = 4, 3, 6, 2, 4

Maker = Callable[[int, int, int], Any]
MAKERS: dict[str, Maker] = {
    "positive": lambda dim, num, rng: PositiveFeatures(dim, num, rng=rng),
    "hyperbolic": lambda dim, num, rng: HyperbolicFeatures(dim, num, rng=rng),
    "trigonometric": lambda dim, num, rng: TrigonometricFeatures(dim, num, rng=rng),
    "fourier": lambda dim, num, rng: RandomFourierFeatures(dim, num, rng=rng),
    "activation": lambda dim, num, rng: ActivationFeatures(dim, num, rng=rng),
    "activation-unprojected": lambda dim, num, rng: ActivationFeatures(sampler=None),
    "elu": lambda dim, num, rng: EluFeatures(),
    "relu": lambda dim, num, rng: ReluFeatures(),
    "softmax": lambda dim, num, rng: SoftmaxFeatures(),
    "taylor": lambda dim, num, rng: TaylorFeatures(dim),
}


def maps(dim: int, num_features: int, *names: str, rng: int = 0) -> dict[str, Any]:
    """Feature maps by their names; those without random rows have features of their own number."""
    return {name: MAKERS[name](dim, num_features, rng) for name in names}


class OwnMap:
    """A map as a user writes one; its two sides differ, so that mixing them up shows."""

    def __init__(self, dim):
        self.num_features = 2 * dim

    def query_features(self, x):
        return Features(array_api_compat.array_namespace(x).concat([x, -0.5 * x], axis=-1), None)

    def key_features(self, x):
        return Features(array_api_compat.array_namespace(x).concat([0.3 * x, x], axis=-1), None)


def makers(*names: str) -> dict[str, Callable[[int], Any]]:
    """Feature maps by their names, of any dimension and twice as many features; "own" is one."""

    def make(name: str, dim: int) -> Any:
        return OwnMap(dim) if name == "own" else MAKERS[name](dim, 2 * dim, 1)

    return {name: partial(make, name) for name in names}


MAPS: dict[str, Any] = {
    **maps(DIM, 16, "positive", "hyperbolic", "activation", "activation-unprojected"),
    **maps(DIM, 64, "trigonometric"),
    **maps(DIM, 16, "elu", "relu"),
}
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-13}


@dataclass(frozen=True)
class Attention:
    """Linear attention with a map, or softmax attention, full or causal; and its oracle."""

    name: str
    feature_map: Any
    is_causal: bool

    def __call__(self, query, key, value, **options):
        options.setdefault("is_causal", self.is_causal)
        if self.feature_map is None:
            options.pop("chunk_size", None)
            return linattn.softmax_attention(query, key, value, **options)
        return linattn.linear_attention(query, key, value, self.feature_map, **options)

    @property
    def kernel(self):
        return exponential_kernel if self.feature_map is None else self.feature_map

    def check(self, output, query, key, value, *, tolerance, key_mask=None, rows=slice(None)):
        """Compare rows with the float64 oracle, to rounding of the sums that are divided."""
        output = np.asarray(output, dtype=np.float64)
        query, key, value = (np.asarray(a, dtype=np.float64) for a in (query, key, value))
        options = {"is_causal": self.is_causal, "key_mask": key_mask}
        if self.feature_map is None:
            expected = reference.softmax_attention(query, key, value, **options)
            allowed = np.full(expected.shape, np.max(np.abs(value), initial=0.0))
        else:
            sums = reference.kernel_sums(query, key, value, self.feature_map, **options)
            live = np.where(sums.denominator == 0, 1.0, np.abs(sums.denominator))
            expected = sums.numerator / np.where(sums.denominator == 0, 1.0, sums.denominator)
            allowed = sums.absolute_numerator + np.abs(expected) * sums.absolute_denominator
            allowed = allowed / live
        assert output.shape == expected.shape
        error = np.abs(output - expected)[..., rows, :]
        assert_at_most(error, tolerance * allowed[..., rows, :])


def exponential_kernel(x, y):
    return np.exp(x @ np.swapaxes(y, -1, -2) / np.sqrt(x.shape[-1]))


def attentions(*names: str) -> list[Any]:
    return [
        pytest.param(
            Attention(name, MAPS.get(name), is_causal),
            id=f"{name}-{'causal' if is_causal else 'full'}",
        )
        for name in names
        for is_causal in (False, True)
    ]


every_attention = pytest.mark.parametrize("attend", attentions(*MAPS, "softmax"))
some_attentions = pytest.mark.parametrize("attend", attentions("positive", "relu", "softmax"))
full_and_causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
every_map = pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
some_maps = pytest.mark.parametrize("feature_map", [MAPS[name] for name in ("positive", "relu")])


def inputs(
    length, dim, value_dim=None, *, keys=None, lead=(), seed=0, scale=1.0, dtype="float64"
) -> tuple[Any, Any, Any]:
    """Normal queries, keys and values; as many keys as queries and as wide values, if not given."""
    draw = np.random.default_rng(seed).standard_normal
    keys = length if keys is None else keys
    shapes = [(length, dim), (keys, dim), (keys, value_dim or dim)]
    query, key, value = ((scale * draw((*lead, *shape))).astype(dtype) for shape in shapes)
    return query, key, value


def normals(*shapes, seed=0) -> tuple[Any, ...]:
    """Normal numbers of these shapes, one after the other."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def masked(length, dim, value_dim, *, lead=(HEADS,), seed=0) -> tuple[Any, ...]:
    """Query, key and value that float32 holds exactly; a mask with a masked first key."""
    rng = np.random.default_rng(seed)
    shapes = [(*lead, length, dim), (*lead, length, dim), (*lead, length, value_dim)]
    arrays = [rng.standard_normal(s).astype(np.float32).astype(np.float64) for s in shapes]
    mask = rng.random((*lead, length)) < 0.7
    mask[..., 0] = False
    return *arrays, mask


def tokens(
    seed=0, *, lead=(HEADS,), length=LENGTH, dtype="float32", dim=DIM, value_dim=VALUE_DIM
) -> tuple[Any, Any, Any]:
    """Queries, keys and values of moderate size."""
    return inputs(length, dim, value_dim, lead=lead, seed=seed, scale=0.6, dtype=dtype)


def in_library(xp, arrays) -> tuple[Any, Any, Any]:
    query, key, value = (xp.array(array) for array in arrays)
    return query, key, value


def fetched(xp, array):
    """NumPy copy of a result that may hold NaN: lazy libraries compute, and warn, only now."""
    with np.errstate(all="ignore"):
        return xp.numpy(array)


def state_of(feature_map, *, like, batch_shape=(), value_dim=VALUE_DIM):
    return linattn.init_state(feature_map, value_dim, batch_shape=batch_shape, like=like)


def filled_state(feature_map, seed=1, **options):
    """NumPy state that has seen some tokens."""
    _, key, value = tokens(seed, **options)
    empty = state_of(feature_map, like=key, batch_shape=key.shape[:-2], value_dim=value.shape[-1])
    return linattn.update_state(empty, key, value, feature_map)


PHI = MAPS["positive"]


def assert_at_most(actual, bound):
    """Assert that no entry is NaN or above the bound, and print those that are."""
    actual, above = np.broadcast_arrays(actual, np.nextafter(np.asarray(bound, float), np.inf))
    # Below it is anything where both are NaN, as a bound of the actual sizes may be.
    np.testing.assert_array_equal(np.isnan(actual), False)
    np.testing.assert_array_less(actual, above)


def assert_equal_and_native(result, expected):
    """Compare whatever public functions return: arrays, records and tuples of them."""
    if isinstance(expected, tuple):
        assert isinstance(result, tuple)
        for one, other in zip(result, expected, strict=True):
            assert_equal_and_native(one, other)
    elif isinstance(expected, np.ndarray):
        assert result.dtype == expected.dtype
        assert result.dtype.isnative
        np.testing.assert_array_equal(result, expected)
    else:
        assert result == expected

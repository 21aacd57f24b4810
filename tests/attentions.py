"""Attention of every kind with the inputs and the oracle that tests of unusual input share.

Those that take `xp` run on every array library, with three kinds of attention; those on NumPy run
with every feature map. Tolerances are relative to the sums that attention divides: a map whose
features change sign may cancel, and then no bound relative to the result can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import reference
from linattn.feature_maps import (
    ActivationFeatures,
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    ReluFeatures,
    TrigonometricFeatures,
)

# One set of shapes for all libraries: some compile anew for each.
DIM, VALUE_DIM, LENGTH, HEADS, CHUNK = 4, 3, 6, 2, 4

MAPS: dict[str, Any] = {
    "positive": PositiveFeatures(DIM, 16, rng=0),
    "hyperbolic": HyperbolicFeatures(DIM, 16, rng=1),
    "trigonometric": TrigonometricFeatures(DIM, 64, rng=2),
    "activation": ActivationFeatures(DIM, 16, rng=3),
    "activation-unprojected": ActivationFeatures(sampler=None),
    "elu": EluFeatures(),
    "relu": ReluFeatures(),
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
            expected = reference.kernel_attention(query, key, value, self.feature_map, **options)
            live = np.where(sums.denominator == 0, 1.0, np.abs(sums.denominator))
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
every_map = pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
some_maps = pytest.mark.parametrize("feature_map", [MAPS[name] for name in ("positive", "relu")])


def tokens(
    seed=0, *, lead=(HEADS,), length=LENGTH, dtype="float32", dim=DIM, value_dim=VALUE_DIM
) -> tuple[Any, Any, Any]:
    """Queries, keys and values of moderate size."""
    rng = np.random.default_rng(seed)
    shapes = [(*lead, length, dim), (*lead, length, dim), (*lead, length, value_dim)]
    query, key, value = (0.6 * rng.standard_normal(shape) for shape in shapes)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


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

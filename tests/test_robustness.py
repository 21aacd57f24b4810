"""What the library does with unusual, hostile and broken input: one test or more for each case.

Tests are named by the rows of the robustness table, so that a row is found by its number. Those
that take `xp` run on every array library, with three kinds of attention; those on NumPy run with
every feature map. Tolerances are relative to the sums that attention divides: a map whose
features change sign may cancel, and then no bound relative to the result can hold.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import array_api_compat
import array_api_strict
import numpy as np
import pytest

import linattn
from linattn import reference, sampling
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
        assert np.all(error <= tolerance * allowed[..., rows, :]), np.max(error)

    @property
    def dead_rows_are_zero(self) -> bool:
        """Whether a query without a positive coordinate has no feature at all."""
        return self.name == "relu"


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


def true_sums(xp, state):
    """What a state stands for, float64 NumPy."""
    log_scale = xp.numpy(state.log_scale).astype(np.float64)
    return xp.numpy(state.kvz).astype(np.float64) * np.exp(log_scale)[..., None]


def saying(*patterns: str) -> str:
    """Regular expression of a message that says all of these, in any order."""
    return "".join(rf"(?=[\s\S]*{pattern})" for pattern in patterns)


def word(name: str) -> str:
    return rf"\b{re.escape(name)}\b"


# Public functions that take arrays -------------------------------------------------------------

PHI = MAPS["positive"]


@dataclass(frozen=True)
class Entry:
    """A public function, the shapes of its array arguments, and how to call it."""

    shapes: Mapping[str, tuple[int, ...]]
    call: Callable[..., Any]

    def arrays(self, make: Callable[[Any], Any] = np.asarray) -> dict[str, Any]:
        rng = np.random.default_rng(5)
        return {
            name: make((0.6 * rng.standard_normal(shape)).astype(np.float32))
            for name, shape in self.shapes.items()
        }


def _good_state(make, lead=()):
    return state_of(PHI, like=make(np.ones(DIM, dtype=np.float32)), batch_shape=lead)


def _whole(**named):
    return {"query": (LENGTH, DIM), "key": (LENGTH, DIM), "value": (LENGTH, VALUE_DIM), **named}


_TOKEN = {"query": (DIM,), "key": (DIM,), "value": (VALUE_DIM,)}
_PAIR = {"x": (LENGTH, DIM), "y": (LENGTH, DIM)}


def _entries() -> dict[str, Entry]:
    keys = {name: shape for name, shape in _whole().items() if name != "query"}
    return {
        "linear_attention": Entry(
            _whole(), lambda make, **a: linattn.linear_attention(**a, feature_map=PHI)
        ),
        "linear_attention-causal": Entry(
            _whole(),
            lambda make, **a: linattn.linear_attention(**a, feature_map=PHI, is_causal=True),
        ),
        "softmax_attention": Entry(_whole(), lambda make, **a: linattn.softmax_attention(**a)),
        "decode_step": Entry(
            _TOKEN,
            lambda make, **a: linattn.decode_step(**a, state=_good_state(make), feature_map=PHI),
        ),
        "Decoder.step": Entry(
            _TOKEN, lambda make, **a: linattn.Decoder(PHI, _good_state(make)).step(**a)
        ),
        "update_state": Entry(
            keys, lambda make, **a: linattn.update_state(_good_state(make), **a, feature_map=PHI)
        ),
        "read_state": Entry(
            {"query": (LENGTH, DIM)},
            lambda make, **a: linattn.read_state(**a, state=_good_state(make), feature_map=PHI),
        ),
        "init_state": Entry(
            {"like": (LENGTH, DIM)},
            lambda make, **a: linattn.init_state(PHI, VALUE_DIM, **a),
        ),
        "query_features": Entry({"x": (LENGTH, DIM)}, lambda make, x: PHI.query_features(x)),
        "key_features": Entry({"x": (LENGTH, DIM)}, lambda make, x: PHI.key_features(x)),
        "kernel": Entry(_PAIR, lambda make, x, y: PHI.kernel(x, y)),
        "estimate": Entry(_PAIR, lambda make, x, y: PHI.estimate(x, y)),
        "variance": Entry(_PAIR, lambda make, x, y: PHI.variance(x, y)),
    }


ENTRIES = _entries()
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
every_argument = pytest.mark.parametrize(
    ("entry", "argument"),
    [
        pytest.param(entry, argument, id=f"{name}-{argument}")
        for name, entry in ENTRIES.items()
        for argument in entry.shapes
    ],
)
every_argument_of_several = pytest.mark.parametrize(
    ("entry", "argument"),
    [
        pytest.param(entry, argument, id=f"{name}-{argument}")
        for name, entry in ENTRIES.items()
        for argument in entry.shapes
        if len(entry.shapes) > 1
    ],
)


@every_entry
def test_entries_take_valid_arrays(entry):
    entry.call(np.asarray, **entry.arrays())


# Rows 1 to 9: lengths, masks, shapes and chunks -------------------------------------------------


@some_attentions
def test_row_01_all_keys_masked(xp, attend):
    query, key, value = in_library(xp, tokens())
    mask = xp.array(np.zeros(LENGTH, dtype=bool))
    out = attend(query, key, value, key_mask=mask, chunk_size=CHUNK)
    xp.assert_like(out, value)
    np.testing.assert_array_equal(xp.numpy(out), 0)


@every_attention
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_row_01_all_keys_masked_in_every_dtype(attend, dtype):
    query, key, value = tokens(dtype=dtype)
    out = attend(query, key, value, key_mask=np.zeros(LENGTH, dtype=bool))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, 0)


@every_attention
def test_row_01_first_keys_masked(attend):
    query, key, value = tokens()
    mask = np.arange(LENGTH) >= 2
    out = attend(query, key, value, key_mask=mask)
    attend.check(out, query, key, value, tolerance=1e-5, key_mask=mask)
    if attend.is_causal:
        np.testing.assert_array_equal(out[:, :2], 0)


@every_map
def test_row_01_log_normalizer_of_nothing_is_minus_infinity(feature_map):
    query, key, value = tokens()
    mask = np.zeros(LENGTH, dtype=bool)
    for is_causal in (False, True):
        _, norm = linattn.linear_attention(
            query,
            key,
            value,
            feature_map,
            is_causal=is_causal,
            key_mask=mask,
            return_log_normalizer=True,
        )
        np.testing.assert_array_equal(norm, -np.inf)


@pytest.mark.parametrize("is_causal", [False, True])
def test_row_01_dead_relu_query(xp, is_causal):
    query, key, value = tokens()
    query[0, 3] = -np.abs(query[0, 3])
    attend = Attention("relu", MAPS["relu"], is_causal)
    out = xp.numpy(attend(*in_library(xp, (query, key, value)), chunk_size=CHUNK))
    np.testing.assert_array_equal(out[0, 3], 0)
    attend.check(out, query, key, value, tolerance=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_row_01_nan_never_becomes_zero_in_a_dead_row(xp, is_causal):
    query, key, value = tokens()
    query[0, 3] = -np.abs(query[0, 3])
    value[0, 1, 0] = np.nan
    out = linattn.linear_attention(
        *in_library(xp, (query, key, value)), MAPS["relu"], is_causal=is_causal, chunk_size=CHUNK
    )
    assert np.isnan(xp.numpy(out)[0, 3, 0])


@every_attention
@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_row_01_nan_never_becomes_zero(attend, side):
    arrays = dict(zip(("query", "key", "value"), tokens(), strict=True))
    arrays[side][...] = np.nan
    assert np.isnan(attend(**arrays)).all()


@some_attentions
def test_row_02_one_sequence_of_a_batch_has_length_zero(xp, attend):
    query, key, value = in_library(xp, tokens())
    lengths = np.array([0, LENGTH])
    mask = xp.array(np.arange(LENGTH) < lengths[:, None])
    out = xp.numpy(attend(query, key, value, key_mask=mask, chunk_size=CHUNK))
    np.testing.assert_array_equal(out[0], 0)
    alone = xp.numpy(attend(query, key, value, chunk_size=CHUNK))
    np.testing.assert_allclose(out[1], alone[1], rtol=1e-5, atol=1e-6)


@every_map
def test_row_02_state_of_length_zero_is_the_identity(feature_map):
    query, key, value = tokens()
    mask = np.arange(LENGTH) < np.array([0, LENGTH])[:, None]
    empty = state_of(feature_map, like=query, batch_shape=(HEADS,))
    state = linattn.update_state(empty, key, value, feature_map, key_mask=mask)
    np.testing.assert_array_equal(state.kvz[0], empty.kvz[0])
    np.testing.assert_array_equal(state.log_scale[0], -np.inf)
    assert state.length == LENGTH
    other = filled_state(feature_map)
    merged = linattn.merge_states(state, other)
    np.testing.assert_array_equal(merged.kvz[0], other.kvz[0])
    np.testing.assert_array_equal(merged.log_scale[0], other.log_scale[0])
    np.testing.assert_array_equal(linattn.read_state(query, state, feature_map)[0], 0)


@some_attentions
def test_row_03_no_keys(xp, attend):
    query, key, value = in_library(xp, tokens())
    out = attend(query, key[:, :0, :], value[:, :0, :], is_causal=False)
    xp.assert_like(out, value)
    np.testing.assert_array_equal(xp.numpy(out), 0)
    mask = xp.array(np.zeros(0, dtype=bool))
    out = attend(query, key[:, :0, :], value[:, :0, :], is_causal=False, key_mask=mask)
    np.testing.assert_array_equal(xp.numpy(out), 0)


@some_maps
def test_row_03_update_with_no_keys_keeps_the_state(xp, feature_map):
    query, key, value = in_library(xp, tokens())
    state = state_of(feature_map, like=query, batch_shape=(HEADS,))
    state = linattn.update_state(state, key, value, feature_map)
    after = linattn.update_state(state, key[:, :0, :], value[:, :0, :], feature_map)
    xp.assert_like(after.kvz, state.kvz)
    np.testing.assert_array_equal(xp.numpy(after.kvz), xp.numpy(state.kvz))
    np.testing.assert_array_equal(xp.numpy(after.log_scale), xp.numpy(state.log_scale))
    assert after.length == LENGTH
    out = linattn.linear_attention(
        query, key[:, :0, :], value[:, :0, :], feature_map, initial_state=state
    )
    read = linattn.read_state(query, state, feature_map)
    np.testing.assert_allclose(xp.numpy(out), xp.numpy(read), rtol=1e-6)


@some_maps
def test_row_03_empty_state_reads_zero(xp, feature_map):
    (query, _, value) = in_library(xp, tokens())
    state = state_of(feature_map, like=query, batch_shape=(HEADS,))
    out = linattn.read_state(query, state, feature_map)
    xp.assert_like(out, value)
    np.testing.assert_array_equal(xp.numpy(out), 0)


@some_attentions
@pytest.mark.parametrize("empty", ["queries", "queries and keys", "batch"])
def test_row_04_no_queries_or_no_batch(xp, attend, empty):
    query, key, value = in_library(xp, tokens())
    if empty == "batch":
        query, key, value = query[:0, ...], key[:0, ...], value[:0, ...]
    else:
        query = query[:, :0, :]
    if empty == "queries and keys":
        key, value = key[:, :0, :], value[:, :0, :]
    options = {"is_causal": False} if empty == "queries" else {}
    out = attend(query, key, value, **options)
    xp.assert_like(out, value, shape=(*query.shape[:-1], VALUE_DIM))


@every_map
def test_row_04_state_functions_without_a_batch(feature_map):
    query, key, value = tokens(lead=(0,))
    state = state_of(feature_map, like=query, batch_shape=(0,))
    assert state.kvz.shape[0] == 0
    state = linattn.update_state(state, key, value, feature_map)
    assert linattn.read_state(query, state, feature_map).shape == value.shape
    out, after = linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map)
    assert out.shape == (0, VALUE_DIM)
    assert out.dtype == np.float32
    assert after.length == LENGTH + 1
    assert linattn.merge_states(state, after).kvz.shape == state.kvz.shape


@pytest.mark.parametrize(
    "seed_taking", [PositiveFeatures, HyperbolicFeatures, TrigonometricFeatures, ActivationFeatures]
)
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("4", TypeError), (True, TypeError)],
)
def test_row_05_bad_sizes_of_random_maps(seed_taking, value, error):
    with pytest.raises(error, match=saying(word("dim"), "must be", re.escape(repr(value)))):
        seed_taking(value, rng=0)
    came = re.escape(repr(value))
    with pytest.raises(error, match=saying(word("num_features"), "must be", came)):
        seed_taking(4, value, rng=0)


@pytest.mark.parametrize(
    "make", [EluFeatures, ReluFeatures, partial(ActivationFeatures, sampler=None)]
)
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("4", TypeError), (True, TypeError)],
)
def test_row_05_bad_dims_of_coordinate_maps(make, value, error):
    with pytest.raises(error, match=saying(word("dim"), "must be", re.escape(repr(value)))):
        make(value)


@pytest.mark.parametrize("make", [HyperbolicFeatures, TrigonometricFeatures])
def test_row_05_odd_columns_of_a_paired_map(make):
    with pytest.raises(ValueError, match=saying(word("num_features"), "even", "7")):
        make(4, 7)


@every_argument
def test_row_05_dim_zero(entry, argument):
    arrays = entry.arrays()
    arrays[argument] = arrays[argument][..., :0]
    with pytest.raises(ValueError, match=saying(word(argument), "at least 1", r"\b0[,)]")):
        entry.call(np.asarray, **arrays)


@pytest.mark.parametrize(
    ("value_dim", "error"), [(0, ValueError), (-3, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_row_05_bad_value_dim(value_dim, error):
    with pytest.raises(
        error, match=saying(word("value_dim"), "must be", re.escape(repr(value_dim)))
    ):
        linattn.init_state(PHI, value_dim, like=np.ones(DIM))


@pytest.mark.parametrize(
    ("batch_shape", "error"),
    [
        ((-1,), ValueError),
        (3, TypeError),
        ((1.5,), TypeError),
        ((True,), TypeError),
        ((False,), TypeError),
        ((0.0,), TypeError),
        ("ab", TypeError),
    ],
)
def test_row_05_bad_batch_shape(batch_shape, error):
    with pytest.raises(error, match=saying(word("batch_shape"), "must be")):
        linattn.init_state(PHI, 3, batch_shape=batch_shape, like=np.ones(DIM))


@pytest.mark.parametrize(
    ("chunk_size", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), ("8", TypeError)],
)
def test_row_05_bad_chunk_size(chunk_size, error):
    came = re.escape(repr(chunk_size))
    with pytest.raises(error, match=saying(word("chunk_size"), "must be", came)):
        linattn.linear_attention(*tokens(), PHI, chunk_size=chunk_size)


def single_feature_maps():
    return {
        "positive": PositiveFeatures(1, 1, rng=0),
        "hyperbolic": HyperbolicFeatures(1, 2, rng=0),
        "trigonometric": TrigonometricFeatures(1, 2, rng=0),
        "activation": ActivationFeatures(1, 1, rng=0),
        "elu": EluFeatures(1),
        "relu": ReluFeatures(1),
        "softmax": None,
    }


@pytest.mark.parametrize("name", single_feature_maps())
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
@pytest.mark.parametrize("length", [1, 3])
def test_row_06_sizes_of_one_are_not_squeezed(name, is_causal, lead, length):
    attend = Attention(name, single_feature_maps()[name], is_causal)
    query, key, value = tokens(lead=lead, length=length, dim=1, value_dim=1)
    query, key = np.abs(query), np.abs(key)
    out = attend(query, key, value)
    assert out.shape == (*lead, length, 1)
    attend.check(out, query, key, value, tolerance=1e-5)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_row_06_states_of_size_one_are_not_squeezed(lead):
    phi = PositiveFeatures(1, 1, rng=0)
    query, key, value = tokens(lead=lead, length=1, dim=1, value_dim=1)
    empty = state_of(phi, like=query, batch_shape=lead, value_dim=1)
    state = linattn.update_state(empty, key, value, phi)
    assert state.kvz.shape == (*lead, 1, 2)
    assert state.log_scale.shape == (*lead, 1)
    np.testing.assert_allclose(linattn.read_state(query, state, phi), value, rtol=1e-6)
    out, _ = linattn.decode_step(query[..., 0, :], key[..., 0, :], value[..., 0, :], empty, phi)
    assert out.shape == (*lead, 1)
    np.testing.assert_allclose(out, value[..., 0, :], rtol=1e-6)


@pytest.mark.parametrize("make", [PositiveFeatures, ActivationFeatures])
@pytest.mark.parametrize("num_features", [1, 3, 5, 8, 13])
@pytest.mark.parametrize("is_causal", [False, True])
def test_row_07_truncated_block(make, num_features, is_causal):
    phi = make(5, num_features, rng=0)
    assert phi.num_features == num_features
    assert phi.projection.shape == (num_features, 5)
    norms = np.linalg.norm(phi.projection, axis=-1, keepdims=True)
    rows = phi.projection / norms
    for start in range(0, num_features, 5):
        block = rows[start : start + 5]
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-12)
    query, key, value = tokens(dim=5)
    attend = Attention("truncated", phi, is_causal)
    attend.check(attend(query, key, value), query, key, value, tolerance=1e-5)


@some_attentions
@pytest.mark.parametrize("chunk_size", [2, CHUNK])
def test_row_08_any_chunk_equals_unchunked(xp, attend, chunk_size):
    query, key, value = tokens()
    mask = np.array([[True, False, True, True, False, True], [True] * 6])
    out = attend(
        *in_library(xp, (query, key, value)), key_mask=xp.array(mask), chunk_size=chunk_size
    )
    attend.check(xp.numpy(out), query, key, value, tolerance=1e-5, key_mask=mask)


@every_attention
def test_row_08_many_chunks(attend):
    query, key, value = tokens(lead=(), length=67, dtype="float64")
    for chunk_size in (1, 2, 5, 64, 66, 67, 68):
        out = attend(query, key, value, chunk_size=chunk_size)
        attend.check(out, query, key, value, tolerance=1e-12)


@every_map
@pytest.mark.parametrize("is_causal", [False, True])
def test_row_09_chunks_and_threads_agree_closely(feature_map, is_causal):
    attend = Attention("", feature_map, is_causal)
    query, key, value = tokens(lead=(3,), length=150)
    for num_threads in (1, 2, 5):
        with linattn.config(num_threads=num_threads):
            for chunk_size in (None, 37):
                out = attend(query, key, value, chunk_size=chunk_size)
                attend.check(out, query, key, value, tolerance=2e-5)


# Rows 10 to 18: numbers -------------------------------------------------------------------------


@some_attentions
@pytest.mark.parametrize(("dtype", "size"), [("float32", 30.0), ("float16", 8.0)])
def test_row_10_logits_beyond_the_range_of_exp(xp, attend, dtype, size):
    if attend.name == "trigonometric" and dtype == "float16":
        size = 5.0
    query, key, value = tokens()
    query, key = (size * a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (query, key))
    query, key, value = (a.astype(dtype) for a in (query, key, value))
    logits = query.astype(float) @ np.swapaxes(key.astype(float), -1, -2) / 2
    limit = {"float32": 88.7, "float16": 11.09}[dtype]
    assert np.max(logits) > limit or size == 5.0
    out = attend(*(xp.array(a, dtype) for a in (query, key, value)), chunk_size=CHUNK)
    xp.assert_like(out, xp.array(value, dtype))
    tolerance = 2e-3 if dtype == "float16" else 2e-4
    attend.check(xp.numpy(out), query, key, value, tolerance=tolerance)


@every_map
def test_row_10_states_of_large_logits(feature_map):
    query, key, value = tokens(lead=())
    query, key = 30 * query, 30 * key
    state = linattn.update_state(state_of(feature_map, like=key), key, value, feature_map)
    assert np.isfinite(state.kvz).all()
    attend = Attention("", feature_map, False)
    out = linattn.read_state(query, state, feature_map)
    attend.check(out, query, key, value, tolerance=3e-4)
    attend = Attention("", feature_map, True)
    decoder = linattn.Decoder(feature_map, state_of(feature_map, like=key))
    steps = [decoder.step(*token) for token in zip(query, key, value, strict=True)]
    attend.check(np.stack(steps), query, key, value, tolerance=3e-4)


@dataclass(frozen=True)
class RowShifted:
    """A map without the query's common factor, which cancels, and costs the oracle its digits."""

    feature_map: Any

    @property
    def num_features(self):
        return self.feature_map.num_features

    def query_features(self, x):
        phi = self.feature_map
        log, values = phi.query_features(x)
        if isinstance(phi, PositiveFeatures | HyperbolicFeatures):
            # Beside the square of a large query float64 has no room for its exponents, which are
            # linear: those of a small one times as much.
            size = 1 + 2 * np.max(np.abs(x), axis=-1, keepdims=True)
            plus, minus = (phi.query_features(sign * x / size).log for sign in (1, -1))
            log = size * (plus - minus) / 2 + phi.query_features(0 * x).log
        if log is not None:
            log = log - np.max(log, axis=-1, keepdims=True)
        return log, values

    def key_features(self, y):
        return self.feature_map.key_features(y)


def assert_right_or_refused(attend, query, key, value, function=None):
    """Each row is right, or holds a NaN: never plausible and wrong."""
    try:
        out = (function or attend)(query, key, value)
    except ValueError:
        return
    assert not np.isinf(out).any()
    q, k, v = (np.asarray(array, dtype=np.float64) for array in (query, key, value))
    with np.errstate(all="ignore"):
        if attend.feature_map is None:
            expected = reference.softmax_attention(q, k, v, is_causal=attend.is_causal)
        else:
            expected = reference.kernel_attention(
                q, k, v, RowShifted(attend.feature_map), is_causal=attend.is_causal
            )
    flagged = np.isnan(out).any(axis=-1, keepdims=True)
    wrong = np.any(~flagged & ~(np.abs(out - expected) <= 1e-3 * np.max(np.abs(value))), axis=-1)
    assert not wrong.any(), (
        f"neither NaN nor right: {out[wrong].tolist()}, should be {expected[wrong].tolist()}"
    )


def largest(array):
    return array / np.max(np.abs(array)) * 3e38


HUGE: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "both": lambda q, k: (q * 1e20, k * 1e20),
    "query": lambda q, k: (q * 1e20, k),
    "key": lambda q, k: (q, k * 1e20),
    "alike": lambda q, k: (np.abs(q) * 1e20, np.abs(k) * 1e20),
    "opposed": lambda q, k: (np.abs(q) * 1e20, -np.abs(k) * 1e20),
    "one query": lambda q, k: (np.where(np.arange(LENGTH)[:, None] == 3, q * 1e20, q), k),
    "one key": lambda q, k: (q, np.where(np.arange(LENGTH)[:, None] == 3, k * 1e20, k)),
    "largest": lambda q, k: (largest(q), largest(k)),
    "largest opposed": lambda q, k: (np.abs(largest(q)), -np.abs(largest(k))),
    "largest query": lambda q, k: (largest(q), k),
    "largest key": lambda q, k: (q, largest(k)),
}


@every_attention
@pytest.mark.parametrize("huge", HUGE)
def test_row_11_huge_inputs_are_right_nan_or_refused(attend, huge):
    query, key, value = tokens()
    query, key = (a.astype(np.float32) for a in HUGE[huge](query, key))
    assert_right_or_refused(attend, query, key, value)


@some_attentions
@pytest.mark.parametrize("huge", ["both", "opposed"])
def test_row_11_huge_inputs_in_every_library(xp, attend, huge):
    query, key, value = tokens()
    query, key = (a.astype(np.float32) for a in HUGE[huge](query, key))

    def in_library_and_back(*arrays):
        return fetched(xp, attend(*in_library(xp, arrays), chunk_size=CHUNK))

    assert_right_or_refused(attend, query, key, value, in_library_and_back)


@every_map
@pytest.mark.parametrize("huge", HUGE)
def test_row_11_huge_inputs_in_states(feature_map, huge):
    query, key, value = tokens(lead=())
    query, key = (a.astype(np.float32) for a in HUGE[huge](query, key))

    def through_a_state(query, key, value):
        state = linattn.update_state(state_of(feature_map, like=key), key, value, feature_map)
        return linattn.read_state(query, state, feature_map)

    def through_steps(query, key, value):
        decoder = linattn.Decoder(feature_map, state_of(feature_map, like=key))
        return np.stack([decoder.step(*token) for token in zip(query, key, value, strict=True)])

    full, causal = Attention("", feature_map, False), Attention("", feature_map, True)
    assert_right_or_refused(full, query, key, value, through_a_state)
    assert_right_or_refused(causal, query, key, value, through_steps)


@every_attention
@pytest.mark.parametrize("size", [1e-20, 1e-25, 1e-30])
def test_row_11_minute_inputs_are_right_nan_or_refused(attend, size):
    query, key, value = tokens()
    query, key = (a * np.float32(size) for a in (query, key))
    assert_right_or_refused(attend, query, key, value)


@every_map
def test_row_11_estimates_are_right_or_not_finite(feature_map):
    x, y, _ = tokens(lead=())
    for size in (1e20, 3e38):
        for sign in (1, -1):
            a, b = (np.minimum(np.abs(array), 1) * np.float32(size) for array in (x, y))
            b = sign * b
            estimate = feature_map.estimate(a, b)
            wide = feature_map.estimate(a.astype(np.float64), b.astype(np.float64))
            with np.errstate(over="ignore", invalid="ignore"):
                right = np.isclose(estimate, wide.astype(np.float32), rtol=1e-3, equal_nan=True)
            assert np.all(right | ~np.isfinite(estimate))


@some_attentions
@pytest.mark.parametrize("coordinates", [slice(2, 3), slice(None)], ids=["one", "all"])
def test_row_12_inf_in_one_query(xp, attend, coordinates):
    query, key, value = tokens()
    poisoned = query.copy()
    poisoned[1, 3, coordinates] = np.inf
    out = fetched(xp, attend(*in_library(xp, (poisoned, key, value)), chunk_size=CHUNK))
    assert np.isnan(out[1, 3]).all()
    rows = [0, 1, 2, 4, 5]
    attend.check(out, query, key, value, tolerance=1e-5, rows=rows)
    attend.check(out[:1], query[:1], key[:1], value[:1], tolerance=1e-5)


@every_attention
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("key_sign", [1, -1])
def test_row_12_inf_in_one_query_against_keys_of_one_sign(attend, sign, key_sign):
    query, key, value = tokens()
    key = key_sign * np.abs(key)
    poisoned = query.copy()
    poisoned[1, 3, 2] = sign * np.inf
    out = attend(poisoned, key, value)
    limits = sign < 0 and attend.name in ("elu", "relu", "activation-unprojected")
    if limits:
        # f(-inf) is a number: the row may have its value.
        query[1, 3, 2] = -1e4
        if np.isnan(out[1, 3]).all():
            out[1, 3] = attend(query, key, value)[1, 3]
    else:
        assert np.isnan(out[1, 3]).all(), out[1, 3]
        out[1, 3] = attend(query, key, value)[1, 3]
    attend.check(out, query, key, value, tolerance=1e-5)


@every_map
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_row_12_bad_query_in_a_step(feature_map, bad):
    query, key, value = (array[:, 0] for array in tokens())
    query[1, 2] = bad
    state = filled_state(feature_map)
    out, after = linattn.decode_step(query, key, value, state, feature_map)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()
    assert np.isfinite(after.kvz).all()


MASK = np.array([[True, False, True, True, False, True], [False, True, True, True, True, True]])


def poisoned_where(mask, bad, *arrays):
    """Copies that hold something bad where the mask is False."""
    return [np.where(mask[..., None], array, array.dtype.type(bad)) for array in arrays]


@some_attentions
def test_row_13_masked_keys_and_values_do_not_leak(xp, attend):
    query, key, value = tokens()
    arrays = in_library(xp, (query, *poisoned_where(MASK, np.nan, key, value)))
    out = xp.numpy(attend(*arrays, key_mask=xp.array(MASK), chunk_size=CHUNK))
    attend.check(out, query, key, value, tolerance=1e-5, key_mask=MASK)


@every_attention
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_row_13_masked_keys_and_values_leave_no_bit(attend, bad):
    query, key, value = tokens()
    clean = attend(query, key, value, key_mask=MASK)
    out = attend(query, *poisoned_where(MASK, bad, key, value), key_mask=MASK)
    np.testing.assert_array_equal(out, clean)
    attend.check(out, query, key, value, tolerance=1e-5, key_mask=MASK)


@every_map
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_row_13_masked_keys_and_values_do_not_leak_into_states(feature_map, bad):
    query, key, value = tokens()
    mask = np.arange(LENGTH) % 2 == 0
    key[:, ~mask] = bad
    value[:, ~mask] = bad
    empty = state_of(feature_map, like=key, batch_shape=(HEADS,))
    state = linattn.update_state(empty, key, value, feature_map, key_mask=mask)
    clean = linattn.update_state(empty, key[:, mask], value[:, mask], feature_map)
    np.testing.assert_allclose(state.kvz, clean.kvz, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.log_scale, clean.log_scale)
    read = linattn.read_state(query, state, feature_map)
    clean_read = linattn.read_state(query, clean, feature_map)
    np.testing.assert_allclose(read, clean_read, rtol=1e-4, atol=1e-5)


@some_attentions
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_row_14_bad_live_key(xp, attend, bad):
    query, key, value = tokens()
    poisoned = key.copy()
    poisoned[1, 3] = bad
    out = fetched(xp, attend(*in_library(xp, (query, poisoned, value)), chunk_size=CHUNK))
    first = 3 if attend.is_causal else 0
    assert np.isnan(out[1, first:]).all()
    attend.check(out[:1], query[:1], key[:1], value[:1], tolerance=1e-5)
    attend.check(out, query, key, value, tolerance=1e-5, rows=slice(first))


@every_attention
@pytest.mark.parametrize("position", [0, 100, 130, 255, 256, 299])
def test_row_14_nan_in_a_live_key_of_a_long_sequence(attend, position):
    query, key, value = tokens(lead=(2,), length=300)
    key[0, position, 1] = np.nan
    out = attend(query, key, value)
    first = position if attend.is_causal else 0
    assert np.isnan(out[0, first:]).all()
    assert np.isfinite(out[0, :first]).all()
    assert np.isfinite(out[1]).all()


@every_attention
def test_row_14_nan_in_a_live_value(attend):
    query, key, value = tokens(length=140)
    poisoned = value.copy()
    poisoned[1, 133, 2] = np.nan
    out = attend(query, key, poisoned)
    first = 133 if attend.is_causal else 0
    assert np.isnan(out[1, first:, 2]).all()
    out[1, first:] = attend(query, key, value)[1, first:]
    attend.check(out, query, key, value, tolerance=1e-5)


@every_map
@pytest.mark.parametrize("chunk_size", [64, None])
def test_row_14_nan_in_one_coordinate_of_a_state_leaves_the_others_causal(feature_map, chunk_size):
    """A coordinate that is lost is lost; in another, NaN still reaches no earlier row."""
    query, key, value = tokens(length=300)
    value[:, 0, 0] = np.nan
    options: dict[str, Any] = dict(is_causal=True, chunk_size=chunk_size)
    clean = linattn.linear_attention(query, key, value, feature_map, **options)
    value[:, 290, 1] = np.nan
    out = linattn.linear_attention(query, key, value, feature_map, **options)
    assert np.isnan(out[..., 0]).all()
    assert np.isnan(out[:, 290:, 1]).all()
    np.testing.assert_allclose(out[:, :290, 1:], clean[:, :290, 1:], rtol=1e-3, atol=1e-5)
    assert np.isfinite(out[..., 2]).all()


def test_row_14_nan_in_one_coordinate_costs_the_others_no_digits():
    """Early rows of a block whose late keys have far larger features are still done again."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 200, DIM), dtype=np.float32)
    key[:100] *= 15
    value[0, 0] = np.nan
    phi = MAPS["positive"]
    state = linattn.init_state(phi, DIM, like=key)
    state = linattn.update_state(state, key[:1], value[:1], phi)
    rest = (query[1:], key[1:], value[1:], phi)
    out = linattn.linear_attention(*rest, is_causal=True, initial_state=state, chunk_size=200)
    want = reference.kernel_attention(query, key, value, phi, is_causal=True)[1:]
    assert np.isnan(out[:, 0]).all()
    np.testing.assert_allclose(out[:, 1:], want[:, 1:], rtol=0, atol=2e-4)


@every_map
def test_row_14_nan_in_a_state_stays(feature_map):
    query, key, value = tokens()
    state = filled_state(feature_map)
    state.kvz[1] = np.nan
    out, after = linattn.linear_attention(
        query, key, value, feature_map, is_causal=True, initial_state=state, return_state=True
    )
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()
    assert np.isnan(after.kvz[1]).all()
    assert np.isnan(linattn.merge_states(state, filled_state(feature_map)).kvz[1]).all()


def tiny_then_huge(name, length):
    """Keys whose features are exp(-115) to exp(-40) of those of the second half.

    The early rows pass through every level where a shared scale would cost them digits.
    """
    query, key, value = tokens(3, lead=(), length=length)
    half = length // 2
    gap = np.concatenate([np.linspace(115, 40, half), np.zeros(length - half)])[:, None]
    unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
    if name in ("positive", "hyperbolic"):
        key = 2 * np.sqrt(gap) * unit
    elif name == "trigonometric":
        key = 2 * np.sqrt(115 - gap) * unit
    elif name == "elu":
        key = key - gap
    elif name == "softmax":
        query, key = query + 1, key - gap
    else:
        query, key = np.abs(query), np.abs(key) * np.exp(-0.7 * gap)
    return query, key.astype(np.float32), value


@pytest.mark.parametrize("name", [*MAPS, "softmax"])
@pytest.mark.parametrize("length", [16, 200])
def test_row_15_tiny_keys_early_and_huge_keys_later(name, length):
    attend = Attention(name, MAPS.get(name), True)
    query, key, value = tiny_then_huge(name, length)
    out = attend(query, key, value)
    attend.check(out, query, key, value, tolerance=2e-4, rows=slice(0, length // 2))
    attend.check(out, query, key, value, tolerance=2e-4)


def test_row_15_in_every_library(xp):
    attend = Attention("positive", MAPS["positive"], True)
    arrays = [np.stack([array] * HEADS) for array in tiny_then_huge("positive", LENGTH)]
    out = xp.numpy(attend(*in_library(xp, arrays), chunk_size=CHUNK))
    attend.check(out, *arrays, tolerance=2e-4)


@every_attention
@pytest.mark.parametrize("which", ["zero", "positive", "negative"])
def test_row_16_identical_keys_give_the_uniform_average(attend, which):
    query, _, value = tokens(dtype="float64")
    key = {"zero": 0.0, "positive": 0.7, "negative": -0.7}[which] * np.ones_like(query)
    out = attend(query, key, value)
    counts = np.arange(1, LENGTH + 1)[:, None]
    means = np.cumsum(value, axis=-2) / counts
    expected = means if attend.is_causal else np.broadcast_to(means[..., -1:, :], value.shape)
    if attend.name == "relu":
        alive = np.any(query > 0, axis=-1, keepdims=True) & (which == "positive")
        expected = np.where(alive, expected, 0.0)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_row_16_zero_queries_give_the_uniform_average_of_softmax(is_causal):
    query, key, value = tokens(dtype="float64")
    out = linattn.softmax_attention(query * 0, key, value, is_causal=is_causal)
    means = np.cumsum(value, axis=-2) / np.arange(1, LENGTH + 1)[:, None]
    expected = means if is_causal else np.broadcast_to(means[..., -1:, :], value.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-13)


@every_map
def test_row_16_everything_zero(feature_map):
    query, key, value = (np.zeros_like(array) for array in tokens())
    for is_causal in (False, True):
        out = linattn.linear_attention(query, key, value, feature_map, is_causal=is_causal)
        np.testing.assert_array_equal(out, 0)


@some_attentions
def test_row_17_denormal_queries_and_keys(xp, attend):
    if xp.name == "jax" and attend.name == "relu":
        pytest.skip("jax: XLA flushes denormals to zero, and a query of zeros is dead")
    query, key, value = tokens()
    query, key = (a * np.float32(1e-40) for a in (query, key))
    out = attend(*in_library(xp, (query, key, value)), chunk_size=CHUNK)
    attend.check(xp.numpy(out), query, key, value, tolerance=1e-5)


@every_attention
@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e-40), ("float64", 1e-310)])
def test_row_17_denormal_queries_or_keys(attend, dtype, size):
    query, key, value = tokens(dtype=dtype)
    small_query, small_key = (a * a.dtype.type(size) for a in (query, key))
    for q, k in ((small_query, small_key), (small_query, key), (query, small_key)):
        attend.check(attend(q, k, value), q, k, value, tolerance=1e-5)


@every_attention
def test_row_17_denormal_values(attend):
    query, key, value = tokens()
    value = value * np.float32(1e-39)
    attend.check(attend(query, key, value), query, key, value, tolerance=2e-2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_row_18_negative_denominator_is_not_clamped(xp, is_causal):
    phi = TrigonometricFeatures.from_projection([[1.0]], scale=1.0)
    query = np.zeros((2, 1))
    key, value = np.array([[2.0], [0.5]]), np.array([[1.0], [3.0]])
    weights = np.exp(key[:, 0] ** 2 / 2) * np.cos(key[:, 0])
    out, norm = linattn.linear_attention(
        *in_library(xp, (query, key, value)),
        phi,
        is_causal=is_causal,
        return_log_normalizer=True,
    )
    full = (weights @ value) / weights.sum()
    assert weights.sum() < 0
    expected = np.stack([value[0] if is_causal else full, full])
    np.testing.assert_allclose(xp.numpy(out), expected, rtol=1e-10)
    assert np.isnan(fetched(xp, norm)).all()


def test_row_18_log_normalizer_tells_where_the_denominator_is_negative():
    phi = TrigonometricFeatures(DIM, 2, rng=0)
    query, key, value = tokens(length=60, dtype="float64")
    query, key = 3 * query, 3 * key
    out, norm = linattn.linear_attention(query, key, value, phi, return_log_normalizer=True)
    sums = reference.kernel_sums(query, key, value, phi)
    negative = sums.denominator[..., 0] < 0
    assert negative.any()
    assert not negative.all()
    np.testing.assert_array_equal(np.isnan(norm), negative)
    Attention("", phi, False).check(out, query, key, value, tolerance=1e-11)


# Rows 19 to 30: what is no array of real numbers, layouts, libraries and devices -----------------

FLOATING = r"float16, bfloat16, float32 or float64"


@every_argument
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_row_19_integers(entry, argument, dtype):
    arrays = entry.arrays()
    arrays[argument] = np.ones_like(arrays[argument], dtype=dtype)
    match = saying(word(argument), FLOATING, dtype, "convert")
    with pytest.raises(TypeError, match=match):
        entry.call(np.asarray, **arrays)


@some_attentions
@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_rows_19_20_23_no_floats_in_every_library(xp, attend, dtype):
    arrays = {
        name: xp.array(array, dtype)
        for name, array in zip(("query", "key", "value"), tokens(), strict=True)
    }
    with pytest.raises(TypeError, match=saying(word("query"), FLOATING, dtype)):
        attend(**arrays)


@every_argument
@pytest.mark.parametrize(
    ("dtype", "came"),
    [
        ("bool", "bool"),
        ("object", "object"),
        ("U3", "U3"),
        ("S3", "S3"),
        ("M8[s]", "datetime64"),
        ("complex64", "complex64"),
        ("complex128", "complex128"),
        ("longdouble", "float128|longdouble"),
        ([("a", "f4")], "f4"),
    ],
    ids=str,
)
def test_rows_20_23_other_dtypes(entry, argument, dtype, came):
    if dtype == "longdouble" and np.dtype("longdouble") == np.dtype("float64"):
        pytest.skip("numpy: longdouble is float64 on this platform")
    arrays = entry.arrays()
    arrays[argument] = np.zeros(arrays[argument].shape, dtype=dtype)
    with pytest.raises(TypeError, match=saying(word(argument), FLOATING, f"({came})")):
        entry.call(np.asarray, **arrays)


@every_argument_of_several
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_row_21_mixed_dtypes(entry, argument, dtype):
    arrays = entry.arrays()
    arrays[argument] = arrays[argument].astype(dtype)
    match = saying(word(argument), "one dtype", "float32", dtype)
    with pytest.raises(ValueError, match=match):
        entry.call(np.asarray, **arrays)


def test_row_21_mixed_dtypes_in_every_library(xp):
    query, key, value = in_library(xp, tokens())
    value = xp.xp.astype(value, xp.xp.float64)
    match = saying(word("value"), "one dtype", "float32", "float64")
    for call in (partial(linattn.linear_attention, feature_map=PHI), linattn.softmax_attention):
        with pytest.raises(ValueError, match=match):
            call(query, key, value)


def state_calls(make=np.asarray) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Public functions that take a state: name of the argument, and a call."""
    query, key, value = (make(array) for array in tokens(lead=()))
    return {
        "linear_attention": (
            "initial_state",
            lambda state: linattn.linear_attention(query, key, value, PHI, initial_state=state),
        ),
        "linear_attention-causal": (
            "initial_state",
            lambda state: linattn.linear_attention(
                query, key, value, PHI, is_causal=True, initial_state=state
            ),
        ),
        "decode_step": (
            "state",
            lambda state: linattn.decode_step(
                query[0, ...], key[0, ...], value[0, ...], state, PHI
            ),
        ),
        "Decoder": (
            "state",
            lambda state: linattn.Decoder(PHI, state).step(
                query[0, ...], key[0, ...], value[0, ...]
            ),
        ),
        "update_state": ("state", lambda state: linattn.update_state(state, key, value, PHI)),
        "read_state": ("state", lambda state: linattn.read_state(query, state, PHI)),
        "merge_states-first": (
            "first",
            lambda state: linattn.merge_states(state, _good_state(make)),
        ),
        "merge_states-second": (
            "second",
            lambda state: linattn.merge_states(_good_state(make), state),
        ),
    }


every_state_call = pytest.mark.parametrize("name", state_calls())


@every_state_call
def test_state_calls_take_a_valid_state(name):
    state_calls()[name][1](_good_state(np.asarray))


@every_state_call
def test_row_21_state_of_another_dtype(name):
    argument, call = state_calls()[name]
    state = state_of(PHI, like=np.ones(DIM, dtype=np.float64))
    # Merging has no map to take the dtype from: either argument may be the odd one.
    names = word(argument) if argument != "first" else "(first|second)"
    with pytest.raises(ValueError, match=saying(names, "float32", "float64")):
        call(state)


NOT_STATES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tuple": (TypeError, lambda good: tuple(good)),
    "None fields": (TypeError, lambda good: linattn.State(None, None, 0)),
    "None log_scale": (TypeError, lambda good: good._replace(log_scale=None)),
    "lists": (TypeError, lambda good: linattn.State([[0.0]], [0.0], 0)),
    "integers": (
        (TypeError, ValueError),
        lambda good: good._replace(kvz=np.zeros(good.kvz.shape, dtype=int)),
    ),
    "other columns": (
        ValueError,
        lambda good: linattn.State(good.kvz[1:], good.log_scale[1:], good.length),
    ),
    "other values": (ValueError, lambda good: good._replace(kvz=good.kvz[:, 1:])),
    "other log_scale": (ValueError, lambda good: good._replace(log_scale=good.log_scale[1:])),
    "no axes": (
        (TypeError, ValueError),
        lambda good: good._replace(kvz=np.zeros((), dtype=good.kvz.dtype)),
    ),
}


@every_state_call
@pytest.mark.parametrize("kind", NOT_STATES)
def test_row_32_broken_states(name, kind):
    if (name, kind) == ("read_state", "other values"):
        pytest.skip("read_state takes the value dim from the state")
    argument, call = state_calls()[name]
    error, spoil = NOT_STATES[kind]
    # Two states that do not fit each other: either may be named.
    named = word(argument) if not argument.startswith("first") else "(first|second)"
    with pytest.raises(error, match=saying(named, "must|leading axes")):
        call(spoil(_good_state(np.asarray)))


@every_state_call
@pytest.mark.parametrize("state", [None, 0, "state", np.zeros(3), linattn.State], ids=repr)
def test_row_32_no_state_at_all(name, state):
    argument, call = state_calls()[name]
    if state is None and argument == "initial_state":
        return
    with pytest.raises(TypeError, match=saying(word(argument), "linattn.State", "got")):
        call(state)


def sum_of_narrow_floats(xp, dtype, is_causal):
    """3000 equal keys, the first 2048 of them with value 0: a float16 sum would stop there."""
    length = 3000
    ones = xp.array(np.ones((length, 1)), dtype)
    value = xp.array((np.arange(length) >= 2048)[:, None], dtype)
    out, state = linattn.linear_attention(
        ones, ones, value, MAPS["elu"], is_causal=is_causal, return_state=True, chunk_size=500
    )
    xp.assert_like(out, value)
    assert state.kvz.dtype == xp.xp.float32
    np.testing.assert_allclose(true_sums(xp, state), [[2 * (length - 2048), 2 * length]], rtol=1e-5)
    last = xp.numpy(out)[-1]
    np.testing.assert_allclose(last, (length - 2048) / length, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_row_22_long_sums_of_narrow_floats(xp, dtype):
    sum_of_narrow_floats(xp, dtype, is_causal=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_row_22_long_causal_sums_of_narrow_floats(xp, dtype):
    if xp.name in ("dask", "jax"):
        pytest.skip(f"{xp.name}: lazy arrays take the time of log2(chunk) levels for each chunk")
    sum_of_narrow_floats(xp, dtype, is_causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_row_22_long_streams_of_narrow_floats(dtype):
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch", reason="torch: NumPy has no bfloat16")
        token = torch.ones(1, dtype=torch.bfloat16)
    else:
        token = np.ones(1, dtype=np.float16)
    decoder = linattn.Decoder(MAPS["relu"], state_of(MAPS["relu"], like=token, value_dim=1))
    for _ in range(2100):
        out = decoder.step(token, token, token)
    assert out.dtype == token.dtype
    assert float(decoder.state.z[0]) == 2100
    assert float(out[0]) == 1


@pytest.mark.parametrize("attend", attentions("positive"))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_row_22_dtype_out_is_dtype_in(xp, attend, dtype):
    query, key, value = tokens()
    arrays = [xp.array(array, dtype) for array in (query, key, value)]
    out = attend(*arrays, chunk_size=CHUNK)
    xp.assert_like(out, arrays[2])
    query, key, value = (xp.numpy(array).astype(np.float64) for array in arrays)
    attend.check(xp.numpy(out), query, key, value, tolerance=3 * TOLERANCE[dtype])


def big_endian(array):
    return array.astype(array.dtype.newbyteorder(">"))


@every_attention
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_row_24_big_endian(attend, dtype):
    arrays = tokens(dtype=dtype)
    out = attend(*map(big_endian, arrays))
    assert out.dtype == np.dtype(dtype)
    assert out.dtype.isnative
    np.testing.assert_array_equal(out, attend(*arrays))


@every_attention
def test_row_24_one_big_endian_argument(attend):
    query, key, value = tokens()
    np.testing.assert_array_equal(attend(query, big_endian(key), value), attend(query, key, value))


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


@every_entry
def test_row_24_big_endian_everywhere(entry):
    arrays = entry.arrays()
    swapped = {name: big_endian(array) for name, array in arrays.items()}
    assert_equal_and_native(entry.call(np.asarray, **swapped), entry.call(np.asarray, **arrays))


@every_map
def test_row_24_big_endian_stream(feature_map):
    query, key, value = tokens(lead=())
    empty = state_of(feature_map, like=key)
    native, swapped = linattn.Decoder(feature_map, empty), linattn.Decoder(feature_map, empty)
    for token in zip(query, key, value, strict=True):
        out, want = swapped.step(*map(big_endian, token)), native.step(*token)
        assert out.dtype.isnative
        # Each swapped step begins anew, and tokens that wait are added in another order.
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    for one, other in zip(swapped.state[:2], native.state[:2], strict=True):
        assert one.dtype == other.dtype
        assert one.dtype.isnative
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert swapped.state.length == native.state.length


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "negative strides": lambda a: np.ascontiguousarray(a[::-1, ::-1, ::-1])[::-1, ::-1, ::-1],
    "Fortran": np.asfortranarray,
    "transposed": lambda a: np.ascontiguousarray(a.transpose(1, 2, 0)).transpose(2, 0, 1),
    "every other": lambda a: np.repeat(np.repeat(a, 2, axis=-1), 3, axis=-2)[:, ::3, ::2],
    "unaligned": lambda a: _unaligned(a),
}


def _unaligned(array):
    raw = np.zeros(array.nbytes + 1, dtype=np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.flags.aligned
    return view


@every_attention
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_25_strides(attend, layout):
    query, key, value = tokens(length=150)
    mask = (np.arange(300) % 3 > 0)[::-2]
    for dtype in ("float32", "float64"):
        arrays = [array.astype(dtype) for array in (query, key, value)]
        strange = list(map(LAYOUTS[layout], arrays))
        atol = 1e-5 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(attend(*strange), attend(*arrays), rtol=1e-4, atol=atol)
        np.testing.assert_allclose(
            attend(*strange, key_mask=mask),
            attend(*arrays, key_mask=mask.copy()),
            rtol=1e-4,
            atol=atol,
        )


@every_attention
def test_row_25_zero_strides(attend):
    query, key, value = (array[:1, :1] for array in tokens())
    arrays = [np.broadcast_to(a, (HEADS, LENGTH, a.shape[-1])) for a in (query, key, value)]
    assert arrays[0].strides[:2] == (0, 0)
    out = attend(*arrays)
    attend.check(out, *arrays, tolerance=1e-5)


@every_map
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_25_strides_in_states(feature_map, layout):
    relay = LAYOUTS[layout]
    query, key, value = tokens()
    state = filled_state(feature_map)
    padded = np.broadcast_to(state.log_scale[..., None], (*state.log_scale.shape, 2))
    strange = linattn.State(relay(state.kvz), relay(padded)[..., 0], state.length)
    expected = linattn.update_state(state, key, value, feature_map)
    result = linattn.update_state(strange, relay(key), relay(value), feature_map)
    np.testing.assert_allclose(result.kvz, expected.kvz, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        linattn.read_state(relay(query), strange, feature_map),
        linattn.read_state(query, state, feature_map),
        rtol=1e-4,
        atol=1e-5,
    )
    out, _ = linattn.decode_step(
        relay(query)[:, 0], relay(key)[:, 0], relay(value)[:, 0], strange, feature_map
    )
    again, _ = linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map)
    np.testing.assert_allclose(out, again, rtol=1e-4, atol=1e-5)


@every_attention
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_row_26_memmap(attend, mode, tmp_path):
    arrays = tokens()
    mapped = []
    for index, array in enumerate(arrays):
        path = tmp_path / f"{index}.bin"
        array.tofile(path)
        mapped.append(np.memmap(path, dtype=array.dtype, mode=mode, shape=array.shape))
    out = attend(*mapped)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, attend(*arrays))
    for array, view in zip(arrays, mapped, strict=True):
        np.testing.assert_array_equal(view, array)


@every_map
def test_row_26_memmap_in_states(feature_map, tmp_path):
    _, key, value = tokens()
    path = tmp_path / "key.npy"
    np.save(path, key)
    key_map = np.load(path, mmap_mode="r")
    empty = state_of(feature_map, like=key_map, batch_shape=(HEADS,))
    state = linattn.update_state(empty, key_map, value, feature_map)
    assert type(state.kvz) is np.ndarray
    assert_equal_and_native(state, linattn.update_state(empty, key, value, feature_map))
    for features in (feature_map.query_features(key_map), feature_map.key_features(key_map)):
        assert {type(array) for array in features if array is not None} == {np.ndarray}
    assert type(feature_map.estimate(key_map, key_map)) is np.ndarray


@every_map
def test_row_26_read_only_states(feature_map):
    query, key, value = tokens()
    state = filled_state(feature_map)
    expected = linattn.update_state(state, key, value, feature_map)
    stepped = linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map)
    for array in (query, key, value, state.kvz, state.log_scale):
        array.flags.writeable = False
    assert_equal_and_native(linattn.update_state(state, key, value, feature_map), expected)
    again = linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map)
    assert_equal_and_native(again, stepped)
    linattn.merge_states(state, state)
    linattn.read_state(query, state, feature_map)
    assert again[0].flags.writeable
    assert again[1].kvz.flags.writeable


@every_argument
@pytest.mark.parametrize(
    "subclass",
    [np.matrix, np.ma.array, lambda a: a.view(np.recarray)],
    ids=["matrix", "masked", "recarray"],
)
def test_row_27_subclasses_that_mean_more(entry, argument, subclass):
    arrays = entry.arrays()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        arrays[argument] = subclass(arrays[argument])
    came = re.escape(type(arrays[argument]).__name__)
    with pytest.raises(TypeError, match=saying(word(argument), "plain array", came, "convert")):
        entry.call(np.asarray, **arrays)


@every_argument
@pytest.mark.parametrize(
    "thing",
    [
        [[1.0, 2.0], [3.0, 4.0]],
        (1.0, 2.0),
        3.5,
        2,
        True,
        "array",
        b"array",
        None,
        {},
        np.float32(3.0),
        np.complex64(1),
        np.str_("a"),
        object(),
        range(4),
        memoryview(b"ab"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_row_28_no_arrays(entry, argument, thing):
    arrays = entry.arrays()
    arrays[argument] = thing
    came = word(type(thing).__name__)
    match = saying(word(argument), "array", came, rf"asarray\({argument}\)")
    with pytest.raises(TypeError, match=match):
        entry.call(np.asarray, **arrays)


@every_argument
def test_row_28_no_axes(entry, argument):
    arrays = entry.arrays()
    arrays[argument] = np.asarray(np.float32(2.0))
    with pytest.raises(TypeError, match=saying(word(argument), "axes", "0-d")):
        entry.call(np.asarray, **arrays)


@every_argument
def test_row_28_one_axis_where_a_length_is_needed(entry, argument):
    if len(entry.shapes[argument]) < 2 or argument == "like":
        return
    arrays = entry.arrays()
    arrays[argument] = arrays[argument][0]
    came = re.escape(str(arrays[argument].shape))
    with pytest.raises(ValueError, match=saying(word(argument), "at least 2 axes", came)):
        entry.call(np.asarray, **arrays)


@some_attentions
def test_row_28_no_axes_in_every_library(xp, attend):
    query, _, value = in_library(xp, tokens())
    with pytest.raises(TypeError, match=saying(word("key"), "axes", "0-d")):
        attend(query, xp.array(np.float32(1)), value)
    with pytest.raises(TypeError, match=saying(word("key"), "array", word("list"))):
        attend(query, [[1.0]], value)


BAD_MASKS = {
    "integers": (TypeError, ["boolean", "int64"], np.ones(LENGTH, dtype=np.int64)),
    "floats": (TypeError, ["boolean", "float32"], np.zeros(LENGTH, dtype=np.float32)),
    "list": (TypeError, ["array", word("list")], [True] * LENGTH),
    "bool": (TypeError, ["array", word("bool")], True),
    "no axes": (TypeError, ["axes", "0-d"], np.array(True)),
    "masked": (TypeError, ["plain array", "MaskedArray"], np.ma.array(np.ones(LENGTH, dtype=bool))),
    "short": (ValueError, [r"\(6,\)", r"\(5,\)"], np.ones(LENGTH - 1, dtype=bool)),
    "one for all": (ValueError, [r"\(6,\)", r"\(1,\)"], np.ones(1, dtype=bool)),
    "other heads": (ValueError, [r"\(2, 6\)", r"\(3, 6\)"], np.ones((3, LENGTH), dtype=bool)),
    "too many axes": (
        ValueError,
        [r"\(2, 6\)", r"\(1, 2, 6\)", re.escape("mask[:, None, :]")],
        np.ones((1, HEADS, LENGTH), dtype=bool),
    ),
    "column": (
        ValueError,
        [r"\(2, 6\)", r"\(2, 6, 1\)"],
        np.ones((HEADS, LENGTH, 1), dtype=bool),
    ),
}


@pytest.mark.parametrize("name", ["linear", "softmax", "update"])
@pytest.mark.parametrize("kind", BAD_MASKS)
def test_row_32_bad_masks(name, kind):
    query, key, value = tokens()
    error, said, mask = BAD_MASKS[kind]
    call: Callable[[], Any] = {
        "linear": lambda: linattn.linear_attention(query, key, value, PHI, key_mask=mask),
        "softmax": lambda: linattn.softmax_attention(query, key, value, key_mask=mask),
        "update": lambda: linattn.update_state(
            state_of(PHI, like=key, batch_shape=(HEADS,)), key, value, PHI, key_mask=mask
        ),
    }[name]
    with pytest.raises(error, match=saying(word("key_mask"), *said)):
        call()


@every_attention
@pytest.mark.parametrize("shape", [(4, LENGTH), (1, 4, LENGTH), (HEADS, 4, LENGTH)], ids=str)
def test_row_32_mask_of_pairs(attend, shape):
    query, key, value = tokens()
    match = saying(
        word("key_mask"), re.escape(str(shape)), r"pair|each query", "cannot be honoured"
    )
    with pytest.raises(ValueError, match=match) as caught:
        attend(query[:, :4], key, value, key_mask=np.ones(shape, dtype=bool), is_causal=False)
    if attend.feature_map is None:
        # It must not send the caller to the function that was called.
        assert "softmax attention" not in str(caught.value)
        assert "linear attention never" not in str(caught.value)


CPU, DEVICE1 = array_api_strict.Device("CPU_DEVICE"), array_api_strict.Device("device1")


def on_device(device):
    return partial(array_api_strict.asarray, device=device)


@every_argument_of_several
@pytest.mark.parametrize(("home", "away"), [(CPU, DEVICE1), (DEVICE1, CPU)], ids=str)
def test_row_29_mixed_devices(entry, argument, home, away):
    arrays = entry.arrays(on_device(home))
    arrays[argument] = array_api_compat.to_device(arrays[argument], away)
    match = saying(word(argument), "CPU_DEVICE", "device1")
    with pytest.raises(ValueError, match=match):
        entry.call(on_device(home), **arrays)


@every_state_call
def test_row_29_state_on_another_device(name):
    argument, call = state_calls(on_device(DEVICE1))[name]
    named = word(argument) if argument != "first" else "(first|second)"
    with pytest.raises(ValueError, match=saying(named, "CPU_DEVICE", "device1")):
        call(_good_state(on_device(CPU)))


@pytest.mark.parametrize("name", ["linear", "softmax", "update"])
def test_row_29_mask_on_another_device(name):
    query, key, value = map(on_device(DEVICE1), tokens())
    mask = on_device(CPU)(np.ones(LENGTH, dtype=bool))
    call: Callable[[], Any] = {
        "linear": lambda: linattn.linear_attention(query, key, value, PHI, key_mask=mask),
        "softmax": lambda: linattn.softmax_attention(query, key, value, key_mask=mask),
        "update": lambda: linattn.update_state(
            state_of(PHI, like=key, batch_shape=(HEADS,)), key, value, PHI, key_mask=mask
        ),
    }[name]
    with pytest.raises(ValueError, match=saying(word("key_mask"), "CPU_DEVICE", "device1")):
        call()


def test_row_29_stream_that_changes_device():
    query, key, value = (array[0, 0] for array in tokens())
    home = [on_device(DEVICE1)(array) for array in (query, key, value)]
    decoder = linattn.Decoder(PHI, state_of(PHI, like=home[0]))
    decoder.step(*home)
    away = [on_device(CPU)(array) for array in (query, key, value)]
    before = decoder.state
    with pytest.raises(ValueError, match=saying(word("state"), "CPU_DEVICE", "device1")):
        decoder.step(*away)
    with pytest.raises(ValueError, match=saying(word("key"), "CPU_DEVICE", "device1")):
        decoder.step(home[0], away[1], home[2])
    assert decoder.state.length == before.length
    for one, other in zip(decoder.state[:2], before[:2], strict=True):
        found, want = (np.asarray(array_api_compat.to_device(a, CPU)) for a in (one, other))
        np.testing.assert_array_equal(found, want)
    decoder.step(*home)


@every_argument_of_several
def test_row_30_mixed_namespaces(entry, argument):
    for home, away in (
        (np.asarray, array_api_strict.asarray),
        (array_api_strict.asarray, np.asarray),
    ):
        arrays = entry.arrays(home)
        arrays[argument] = entry.arrays(away)[argument]
        match = saying(word(argument), r"\bnumpy\b", r"\barray_api_strict\b")
        with pytest.raises(TypeError, match=match):
            entry.call(home, **arrays)


@every_state_call
def test_row_30_state_of_another_namespace(name):
    argument, call = state_calls()[name]
    named = word(argument) if argument != "first" else "(first|second)"
    match = saying(named, r"\bnumpy\b", r"\barray_api_strict\b")
    with pytest.raises(TypeError, match=match):
        call(_good_state(array_api_strict.asarray))


@some_attentions
def test_row_30_mask_of_another_namespace(attend):
    mask = array_api_strict.asarray(np.ones(LENGTH, dtype=bool))
    match = saying(word("key_mask"), r"\bnumpy\b", r"\barray_api_strict\b")
    with pytest.raises(TypeError, match=match):
        attend(*tokens(), key_mask=mask)


def test_row_30_stream_that_changes_namespace():
    query, key, value = (array[0, 0] for array in tokens())
    decoder = linattn.Decoder(PHI, state_of(PHI, like=query))
    decoder.step(query, key, value)
    match = saying(r"\bnumpy\b", r"\barray_api_strict\b")
    with pytest.raises(TypeError, match=match):
        decoder.step(query, array_api_strict.asarray(key), value)
    with pytest.raises(TypeError, match=saying(word("state"), match)):
        decoder.step(*map(array_api_strict.asarray, (query, key, value)))


# Rows 31 to 33: shapes --------------------------------------------------------------------------


@some_attentions
@pytest.mark.parametrize(("queries", "keys"), [(1, LENGTH), (LENGTH, 2), (0, LENGTH), (LENGTH, 0)])
def test_row_31_causal_needs_equal_lengths(xp, attend, queries, keys):
    query, key, value = in_library(xp, tokens())
    match = saying("causal", "query", "key", word(str(queries)), word(str(keys)))
    remedy = "equal lengths?"
    if attend.feature_map is not None:
        remedy = saying("initial_state", "read_state", "equal length")
    with pytest.raises(ValueError, match=match + saying(remedy)):
        attend(query[:, :queries, :], key[:, :keys, :], value[:, :keys, :], is_causal=True)


@every_attention
def test_row_32_shapes_that_do_not_fit(attend):
    query, key, value = tokens()
    longer, wider = tokens(length=7), tokens(dim=5)
    heads = tokens(lead=(3,))
    cases = [
        ((wider[0], key, value), ["query", "key", r"\(2, 6, 5\)|\b5\b", r"\(2, 6, 4\)|\b4\b"]),
        ((query, wider[1], value), ["query", "key", r"\(2, 6, 4\)", r"\(2, 6, 5\)"]),
        ((query, key, longer[2]), ["key", "value", r"\(2, 6, 4\)", r"\(2, 7, 3\)"]),
        ((heads[0], key, value), ["leading axes", r"query \(3,\)", r"key \(2,\)"]),
        ((query, heads[1], value), ["leading axes", r"key \(3,\)", r"value \(2,\)"]),
        ((query, key, heads[2]), ["leading axes", r"value \(3,\)", r"key \(2,\)"]),
    ]
    for arrays, said in cases:
        with pytest.raises(ValueError, match=saying(*said)):
            attend(*arrays)


@pytest.mark.parametrize("name", ["positive", "hyperbolic", "trigonometric", "activation"])
def test_row_32_inputs_of_another_dim_than_the_map(name):
    phi = MAPS[name]
    query, key, value = tokens(dim=5)
    state = filled_state(phi)
    calls = [
        lambda: linattn.linear_attention(query, key, value, phi),
        lambda: linattn.update_state(state, key, value, phi),
        lambda: linattn.read_state(query, state, phi),
        lambda: linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, phi),
        lambda: phi.query_features(query),
        lambda: phi.kernel(query, key),
        lambda: phi.estimate(query, key),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=saying("query|key|x", word("4"), word("5"), "dim")):
            call()


def test_row_32_pairs_of_different_dim():
    x, y = np.ones((2, 3)), np.ones((2, 4))
    for phi in (MAPS["elu"], MAPS["relu"]):
        for method in (phi.kernel, phi.estimate, phi.variance):
            with pytest.raises(
                ValueError, match=saying(word("x"), word("y"), r"\(2, 3\)", r"\(2, 4\)")
            ):
                method(x, y)


def test_row_32_heads_of_a_map_that_do_not_fit():
    phi = PositiveFeatures.from_projection(np.ones((3, 8, DIM)))
    query, key, value = tokens()
    with pytest.raises(
        ValueError, match=saying("leading axes", "feature_map", r"\(3,\)", r"\(2,\)")
    ):
        linattn.linear_attention(query, key, value, phi)
    with pytest.raises(
        ValueError, match=saying("leading axes", "feature_map", r"\(3,\)", r"\(2,\)")
    ):
        linattn.init_state(phi, 3, batch_shape=(2,), like=query)


def test_row_32_heads_of_a_state_that_do_not_fit():
    query, key, value = tokens()
    state = filled_state(PHI, lead=(3,))
    calls = [
        lambda: linattn.linear_attention(query, key, value, PHI, initial_state=state),
        lambda: linattn.update_state(state, key, value, PHI),
        lambda: linattn.read_state(query, state, PHI),
        lambda: linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, PHI),
        lambda: linattn.merge_states(state, filled_state(PHI)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=saying("leading axes", r"\(3,\)", r"\(2,\)")):
            call()


@pytest.mark.parametrize(
    "feature_map", [None, "elu", 3, PositiveFeatures, EluFeatures, np.exp, ()], ids=repr
)
def test_row_32_no_feature_map(feature_map):
    query, key, value = tokens(lead=())
    state = filled_state(PHI, lead=())
    calls = [
        lambda: linattn.linear_attention(query, key, value, feature_map),
        lambda: linattn.init_state(feature_map, 3, like=query),
        lambda: linattn.update_state(state, key, value, feature_map),
        lambda: linattn.read_state(query, state, feature_map),
        lambda: linattn.decode_step(query[0], key[0], value[0], state, feature_map),
        lambda: linattn.Decoder(feature_map, state),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=saying(word("feature_map"), "must have", "got")):
            call()


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (True, TypeError),
        ("1", TypeError),
        (1j, TypeError),
        (np.ones(1), TypeError),
        (np.nan, ValueError),
        (np.inf, ValueError),
    ],
    ids=repr,
)
def test_row_32_bad_scale(scale, error):
    with pytest.raises(error, match=saying(word("scale"), "must be", "got")):
        linattn.softmax_attention(*tokens(), scale=scale)
    for make in (partial(PositiveFeatures, 4), EluFeatures, ReluFeatures):
        with pytest.raises(error, match=saying(word("scale"), "must be", "got")):
            make(scale=scale)


@every_attention
def test_row_33_more_heads_than_65535(attend):
    heads = 70_000 if attend.name in ("positive", "relu", "softmax") else 66_000
    rng = np.random.default_rng(0)
    few = [0.6 * rng.standard_normal((7, 2, DIM)).astype(np.float32) for _ in range(3)]
    arrays = [np.resize(array, (heads, 2, DIM)) for array in few]
    out = attend(*arrays)
    assert out.shape == (heads, 2, DIM)
    np.testing.assert_allclose(out, np.resize(attend(*few), out.shape), rtol=1e-4, atol=1e-5)


@every_attention
def test_row_33_strides_beyond_32_bits(attend, tmp_path):
    few = tokens(lead=(), length=2)
    far = 2**31 + 64
    arrays = []
    for index, array in enumerate(few):
        path = tmp_path / f"{index}.bin"
        size = far + array.shape[-1]
        # The file is sparse: only its two ends take room.
        mapped = np.memmap(path, dtype=np.float32, mode="w+", shape=(size,))
        mapped[: array.shape[-1]], mapped[far:] = array
        rows = np.lib.stride_tricks.as_strided(mapped, array.shape, (4 * far, 4))
        np.testing.assert_array_equal(rows, array)
        arrays.append(np.asarray(rows))
    attend.check(attend(*arrays), *few, tolerance=1e-5)


# Rows 34 to 42: seeds, copies and files ---------------------------------------------------------

RANDOM_MAPS = [PositiveFeatures, HyperbolicFeatures, TrigonometricFeatures, ActivationFeatures]
every_random_map = pytest.mark.parametrize("make", RANDOM_MAPS)


@every_random_map
@pytest.mark.parametrize(
    ("seed", "error"),
    [
        (-1, ValueError),
        (1.5, TypeError),
        (True, TypeError),
        (False, TypeError),
        (np.True_, TypeError),
        ("a", TypeError),
        (np.float64(2), TypeError),
    ],
    ids=repr,
)
def test_row_34_bad_seeds(make, seed, error):
    match = saying(word("rng"), "bool") if isinstance(seed, bool | np.bool_) else None
    with pytest.raises(error, match=match):
        make(4, rng=seed)
    with pytest.raises(error, match=match):
        make(4, rng=0).redraw(seed)


@every_random_map
def test_row_34_good_seeds(make):
    seeds = [0, 1, 5, 2**32 + 5, 2**64, 2**64 + 1, 2**100]
    drawn = [make(4, rng=seed).projection for seed in seeds]
    for index, projection in enumerate(drawn):
        np.testing.assert_array_equal(projection, make(4, rng=seeds[index]).projection)
        assert not any(np.array_equal(projection, other) for other in drawn[:index])
    for seed in (np.int64(5), np.random.default_rng(5), np.random.SeedSequence(5)):
        np.testing.assert_array_equal(make(4, rng=seed).projection, drawn[2])
    assert not np.array_equal(make(4).projection, make(4, rng=None).projection)
    np.testing.assert_array_equal(make(4, rng=0).redraw(5).projection, drawn[2])


@every_random_map
def test_row_35_spawned_seeds_are_distinct(make):
    children = np.random.SeedSequence(7).spawn(4)
    drawn = [make(4, rng=child).projection for child in children]
    drawn.append(make(4, rng=7).projection)
    for index, projection in enumerate(drawn):
        assert not any(np.array_equal(projection, other) for other in drawn[:index])


@every_random_map
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_row_36_one_seed_one_projection_in_every_library(xp, make, dtype):
    phi = make(5, 10, rng=11)
    device = array_api_compat.device(xp.array(np.ones(1)))
    spec = phi.query_spec(xp.xp, xp.dtype(dtype), device)
    host = phi.query_spec(np, np.dtype(dtype), "cpu")
    np.testing.assert_array_equal(xp.numpy(spec.P), host.P)
    assert xp.numpy(spec.P).dtype == dtype
    np.testing.assert_array_equal(make(5, 10, rng=11).projection, phi.projection)


@pytest.mark.parametrize("coordinate", range(3))
def test_row_37_signs_of_the_orthogonal_rows_are_fair(coordinate):
    # 600 fair coins leave 300 +- 80 once in 1.6e10 runs; unfixed QR has one sign only.
    signs = [sampling.orthogonal(3, 3, seed)[coordinate, coordinate] > 0 for seed in range(600)]
    assert 220 < sum(signs) < 380


def test_row_38_global_random_state_is_untouched():
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    before = np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index] # noqa: NPY002
    for make in RANDOM_MAPS:
        phi = make(DIM, rng=0).redraw(1).redraw()
        linattn.linear_attention(*tokens(), phi)
    after = np.random.get_state()[1], random.getstate()  # type: ignore[index] # noqa: NPY002
    np.testing.assert_array_equal(after[0], before[0])
    assert after[1] == before[1]


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "pickle-0": lambda thing: pickle.loads(pickle.dumps(thing, protocol=0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
every_copy = pytest.mark.parametrize("clone", COPIES.values(), ids=COPIES)


@every_map
@every_copy
def test_row_39_copies_of_maps_are_bit_equal(feature_map, clone):
    twin = clone(feature_map)
    assert twin == feature_map
    assert repr(twin) == repr(feature_map)
    assert hash(twin) == hash(feature_map)
    assert twin.fingerprint() == feature_map.fingerprint()
    arrays = tokens()
    out, twin_out = (linattn.linear_attention(*arrays, phi) for phi in (feature_map, twin))
    np.testing.assert_array_equal(out, twin_out)
    with pytest.raises(AttributeError, match=saying("immutable", "scale")):
        twin.scale = 3.0
    if getattr(twin, "projection", None) is not None:
        np.testing.assert_array_equal(twin.projection, feature_map.projection)
        with pytest.raises(ValueError, match="read-only"):
            twin.projection[0, 0] = 1


@every_copy
def test_row_39_copies_of_states_are_bit_equal(clone):
    state = filled_state(PHI)
    twin = clone(state)
    assert type(twin) is linattn.State
    assert_equal_and_native(twin, state)


def test_row_39_states_of_every_library_copy(xp):
    query, key, value = in_library(xp, tokens())
    state = state_of(PHI, like=query, batch_shape=(HEADS,))
    state = linattn.update_state(state, key, value, PHI)
    twin = copy.deepcopy(state)
    assert type(twin) is linattn.State
    np.testing.assert_array_equal(xp.numpy(twin.kvz), xp.numpy(state.kvz))
    np.testing.assert_array_equal(xp.numpy(twin.log_scale), xp.numpy(state.log_scale))


@some_maps
def test_row_39_maps_keep_no_device_handles(xp, feature_map):
    before = pickle.dumps(feature_map)
    linattn.linear_attention(*in_library(xp, tokens()), feature_map)
    feature_map.query_features(in_library(xp, tokens())[0])
    assert pickle.dumps(feature_map) == before


@every_map
def test_row_40_saved_and_restored_at_every_token(feature_map, tmp_path):
    path = tmp_path / "state.npz"
    query, key, value = tokens(length=12)
    whole, last = linattn.linear_attention(
        query, key, value, feature_map, is_causal=True, return_state=True
    )
    linattn.save_state(path, state_of(feature_map, like=query, batch_shape=(HEADS,)), feature_map)
    unbroken = linattn.load_state(path, feature_map)
    steps = []
    for t in range(12):
        token = query[:, t], key[:, t], value[:, t]
        expected, unbroken = linattn.decode_step(*token, unbroken, feature_map)
        restored = linattn.load_state(path, feature_map, like=query)
        out, restored = linattn.decode_step(*token, restored, feature_map)
        np.testing.assert_array_equal(out, expected)
        linattn.save_state(path, restored, feature_map)
        steps.append(out)
    assert_equal_and_native(linattn.load_state(path, feature_map), unbroken)
    attend = Attention("", feature_map, True)
    attend.check(np.stack(steps, axis=-2), query, key, value, tolerance=1e-5)
    attend.check(whole, query, key, value, tolerance=1e-5)
    assert last.length == unbroken.length == 12


@every_map
@pytest.mark.parametrize("cut", [0, 1, 5, 11, 12])
def test_row_40_a_stream_may_be_cut_anywhere(feature_map, cut, tmp_path):
    path = tmp_path / "state.npz"
    arrays = tokens(length=12)
    head, tail = ([array[:, part] for array in arrays] for part in (slice(cut), slice(cut, None)))
    call = partial(
        linattn.linear_attention, feature_map=feature_map, is_causal=True, return_state=True
    )
    first, state = call(*head)
    linattn.save_state(path, state, feature_map)
    second, state = call(*tail, initial_state=linattn.load_state(path, feature_map))
    attend = Attention("", feature_map, True)
    attend.check(np.concatenate([first, second], axis=-2), *arrays, tolerance=1e-5)
    assert state.length == 12


def test_row_40_another_map_is_refused(tmp_path):
    path = tmp_path / "state.npz"
    names = list(MAPS)
    for index, name in enumerate(names):
        linattn.save_state(path, filled_state(MAPS[name]), MAPS[name])
        linattn.load_state(path, copy.deepcopy(MAPS[name]))
        linattn.load_state(path)
        other = MAPS[names[index - 1]]
        with pytest.raises(
            linattn.StateFileError, match=saying("state.npz", "another feature map")
        ):
            linattn.load_state(path, other)
    phi = PositiveFeatures(DIM, 16, rng=0)
    linattn.save_state(path, filled_state(phi), phi)
    for other in (
        phi.redraw(1),
        PositiveFeatures(DIM, 16, rng=0, scale=1.0),
        HyperbolicFeatures(DIM, 16, rng=0),
    ):
        with pytest.raises(linattn.StateFileError, match="another feature map"):
            linattn.load_state(path, other)
    linattn.save_state(path, filled_state(phi))  # it knows its map, though not by its full name
    with pytest.raises(linattn.StateFileError, match="another feature map"):
        linattn.load_state(path, phi.redraw(1))
    linattn.save_state(path, filled_state(phi)._replace(fingerprint=None))
    with pytest.raises(linattn.StateFileError, match=saying("without its feature map")):
        linattn.load_state(path, phi)


@pytest.mark.parametrize("state", [None, (1, 2, 3), {}], ids=repr)
def test_row_40_only_states_are_saved(state, tmp_path):
    with pytest.raises(TypeError, match=saying(word("state"), "linattn.State", "got")):
        linattn.save_state(tmp_path / "state.npz", state)
    assert list(tmp_path.iterdir()) == []


def test_row_40_states_of_every_library_are_saved(xp, tmp_path):
    path = tmp_path / "state.npz"
    query, key, value = in_library(xp, tokens())
    state = state_of(PHI, like=query, batch_shape=(HEADS,))
    state = linattn.update_state(state, key, value, PHI)
    linattn.save_state(path, state, PHI)
    restored = linattn.load_state(path, PHI, like=query)
    xp.assert_like(restored.kvz, state.kvz)
    xp.assert_like(restored.log_scale, state.log_scale)
    np.testing.assert_array_equal(xp.numpy(restored.kvz), xp.numpy(state.kvz))
    np.testing.assert_array_equal(xp.numpy(restored.log_scale), xp.numpy(state.log_scale))
    assert restored.length == state.length


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["os.replace", "os.fsync", "numpy.savez"])
def test_row_41_interrupted_saving_leaves_the_old_file_alone(place, tmp_path, monkeypatch):
    path = tmp_path / "state.npz"
    old = filled_state(PHI, 1)
    linattn.save_state(path, old, PHI)
    monkeypatch.setattr(place, _interrupt)
    with pytest.raises(KeyboardInterrupt):
        linattn.save_state(path, filled_state(PHI, 2), PHI)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.npz"]
    assert_equal_and_native(linattn.load_state(path, PHI), old)


# An interruption between two instructions may leave the temporary file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_row_41_interrupted_at_any_line_the_file_is_the_old_or_the_new_one(tmp_path):
    path = tmp_path / "state.npz"
    old, new = filled_state(PHI, 1), filled_state(PHI, 2)
    tracer = sys.gettrace()
    finished = False
    lines = 0
    while not finished:
        linattn.save_state(path, old, PHI)
        countdown = iter(range(lines, -1, -1))

        def interrupt(frame, event, arg, countdown=countdown):
            if frame.f_code.co_filename != linattn.save_state.__code__.co_filename:
                return None
            if event == "line" and next(countdown, None) == 0:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            linattn.save_state(path, new, PHI)
            finished = True
        except KeyboardInterrupt:
            lines += 1
        finally:
            sys.settrace(tracer)
        found = linattn.load_state(path, PHI)
        expected = new if np.array_equal(found.kvz, new.kvz) else old
        assert_equal_and_native(found, expected)
    assert lines > 10


def state_bytes(tmp_path):
    path = tmp_path / "good.npz"
    phi = EluFeatures(1)
    linattn.save_state(path, filled_state(phi, lead=(), dim=1, value_dim=1), phi)
    return path.read_bytes()


def load_or_refuse(path, data):
    """Load; whatever is wrong must be one type of error."""
    path.write_bytes(data)
    try:
        state = linattn.load_state(path)
    except linattn.StateFileError:
        return None
    assert state.kvz.shape[:-1] == state.log_scale.shape
    assert state.kvz.dtype == state.log_scale.dtype
    return state


def test_row_42_truncated_files(tmp_path):
    good = state_bytes(tmp_path)
    for length in range(0, len(good), 3):
        assert load_or_refuse(tmp_path / "bad.npz", good[:length]) is None


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_row_42_flipped_bytes(tmp_path, flip):
    good = state_bytes(tmp_path)
    refused = 0
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= flip
        refused += load_or_refuse(tmp_path / "bad.npz", bytes(bad)) is None
    assert refused > len(good) // 2


def npy(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + body


def npz(path, **members: bytes):
    good = {
        "format_version": npy(
            "{'descr': '<i8', 'fortran_order': False, 'shape': ()}", b"\1" + bytes(7)
        ),
        "fingerprint": npy("{'descr': '<U1', 'fortran_order': False, 'shape': ()}", bytes(4)),
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", bytes(24)),
        "log_scale": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(8)),
        "length": npy("{'descr': '<i8', 'fortran_order': False, 'shape': ()}", bytes(8)),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (good | members).items():
            archive.writestr(f"{name}.npy", data)


def test_row_42_a_file_made_by_hand_loads(tmp_path):
    npz(tmp_path / "state.npz")
    assert linattn.load_state(tmp_path / "state.npz").kvz.shape == (2, 3)


BAD_MEMBERS = {
    "8 TiB": {"kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2199023255552,)}")},
    "overflowing": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}")
    },
    "negative": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3)}", bytes(24))
    },
    "pickle": {
        "kvz": npy("{'descr': '|O', 'fortran_order': False, 'shape': ()}", pickle.dumps([1]))
    },
    "bare pickle": {"kvz": pickle.dumps(np.zeros(3))},
    "code": {"kvz": npy("{'descr': __import__('os').getpid(), 'fortran_order': False}")},
    "not a header": {"kvz": npy("(((((((((")},
    "nested": {"kvz": npy("(" * 5000)},
    "boolean shape": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (True, True)}", bytes(4))
    },
    "empty": {"kvz": b""},
    "npy 2.0": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", bytes(24), b"\2\0")
    },
    "integers": {
        "kvz": npy("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3)}", bytes(24))
    },
    "float16": {"kvz": npy("{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3)}", bytes(12))},
    "structured": {
        "kvz": npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 3)}", bytes(24))
    },
    "no width": {"kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 0)}")},
    "no columns": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 3)}"),
        "log_scale": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}"),
    },
    "one axis": {"kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (6,)}", bytes(24))},
    "misfit": {
        "log_scale": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", bytes(12))
    },
    "other dtype": {
        "log_scale": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}", bytes(16))
    },
    "newer": {
        "format_version": npy(
            "{'descr': '<i8', 'fortran_order': False, 'shape': ()}", b"\2" + bytes(7)
        )
    },
    "negative length": {
        "length": npy("{'descr': '<i8', 'fortran_order': False, 'shape': ()}", b"\xff" * 8)
    },
    "unpaired surrogate": {
        "fingerprint": npy("{'descr': '<U1', 'fortran_order': False, 'shape': ()}", b"\xff" * 4)
    },
    "another member": {
        "more": npy("{'descr': '<i8', 'fortran_order': False, 'shape': ()}", bytes(8))
    },
}


@pytest.mark.parametrize("kind", BAD_MEMBERS)
def test_row_42_hostile_members(tmp_path, kind):
    path = tmp_path / "bad.npz"
    npz(path, **BAD_MEMBERS[kind])
    with pytest.raises(linattn.StateFileError, match=saying("bad.npz")):
        linattn.load_state(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"text", b"PK\x05\x06" + bytes(18), bytes(1000), None],
    ids=["empty", "text", "empty zip", "zeros", "npy"],
)
def test_row_42_no_state_file(tmp_path, data):
    path = tmp_path / "bad.npz"
    if data is None:
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes(data)
    with pytest.raises(linattn.StateFileError, match=saying("bad.npz", "not a linattn state file")):
        linattn.load_state(path)


def test_row_42_compressed_bomb(tmp_path):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(
        path,
        format_version=np.int64(1),
        fingerprint=np.str_(""),
        kvz=np.zeros((4, 2_000_000)),
        log_scale=np.zeros(4),
        length=np.int64(0),
    )
    tracemalloc.start()
    try:
        with pytest.raises(linattn.StateFileError, match="more than"):
            linattn.load_state(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_row_42_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        linattn.load_state(tmp_path / "none.npz")
    with pytest.raises(OSError, match="none"):
        linattn.save_state(tmp_path / "none" / "state.npz", filled_state(PHI))


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_row_42_foreign_layouts_are_read_right(tmp_path, fortran, order):
    path = tmp_path / "state.npz"
    numbers = np.arange(6).reshape(2, 3)
    body = numbers.astype(f"{order}f4").tobytes(order="F" if fortran else "C")
    header = f"{{'descr': '{order}f4', 'fortran_order': {fortran}, 'shape': (2, 3)}}"
    npz(path, kvz=npy(header, body))
    state = linattn.load_state(path)
    assert state.kvz.dtype.isnative
    np.testing.assert_array_equal(state.kvz, numbers)


# Rows 43 to 50: threads, memory, aliases, invariances, warnings ----------------------------------


@every_attention
def test_row_43_eight_threads_share_one_object(attend):
    arrays = tokens(length=40)
    shared = Attention(attend.name, copy.deepcopy(attend.feature_map), attend.is_causal)
    start = threading.Barrier(8)

    def work(index):
        start.wait()
        return [shared(*arrays, chunk_size=16 if index % 2 else None) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for parity in (0, 1):
        expected = attend(*arrays, chunk_size=16 if parity else None)
        for outputs in results[parity::2]:
            for out in outputs:
                np.testing.assert_array_equal(out, expected)


@every_map
def test_row_43_eight_threads_share_one_state(feature_map):
    query, key, value = tokens()
    state = filled_state(feature_map)
    kept = copy.deepcopy(state)
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        return (
            linattn.update_state(state, key, value, feature_map),
            linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map),
            linattn.read_state(query, state, feature_map),
            linattn.merge_states(state, state),
        )

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for result in results[1:]:
        assert_equal_and_native(result, results[0])
    assert_equal_and_native(state, kept)


def test_row_43_settings_hold_for_one_thread_only():
    seen = {}

    def work():
        with linattn.config() as settings:
            seen["inside"] = settings.num_threads

    with linattn.config(num_threads=3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with linattn.config() as settings:
            assert settings.num_threads == 3
    assert seen["inside"] is None


FORK = """
import os, signal, threading
import numpy as np
import linattn

phi = linattn.feature_maps.PositiveFeatures(16, 64, rng=0)
query, key, value = np.random.default_rng(0).standard_normal((3, 8, 700, 16), dtype=np.float32)

def call():
    with linattn.config(num_threads=4):
        return [
            linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
            for is_causal in (False, True)
        ] + [linattn.softmax_attention(query[:, :100], key, value)]

expected = call()
threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
child = os.fork()
if child == 0:
    signal.alarm(60)
    same = all(np.array_equal(a, b) for a, b in zip(call(), expected, strict=True))
    os._exit(0 if same else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
assert all(np.array_equal(a, b) for a, b in zip(call(), expected, strict=True))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="numpy: this platform has no fork")
def test_row_44_fork_after_threads():
    finished = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def _repeated() -> dict[str, Callable[[], Any]]:
    query, key, value = tokens()
    state = filled_state(PHI)
    decoder = linattn.Decoder(PHI, state)
    token = query[:, 0], key[:, 0], value[:, 0]
    mask = np.arange(LENGTH) > 0
    return {
        "full": lambda: linattn.linear_attention(query, key, value, PHI, key_mask=mask),
        "causal": lambda: linattn.linear_attention(query, key, value, PHI, is_causal=True),
        "threads": lambda: linattn.linear_attention(query, key, value, MAPS["elu"], chunk_size=2),
        "softmax": lambda: linattn.softmax_attention(query, key, value, is_causal=True),
        "decode_step": lambda: linattn.decode_step(*token, state, PHI),
        "Decoder": lambda: decoder.step(*token),
        "update_state": lambda: linattn.update_state(state, key, value, PHI),
        "redraw": lambda: PHI.redraw(0),
        "refused": lambda: _ignore(lambda: linattn.linear_attention(query, key, value[:, 1:], PHI)),
    }


def _ignore(call):
    try:
        call()
    except ValueError:
        return
    raise AssertionError


@pytest.mark.parametrize("name", _repeated())
def test_row_46_memory_is_flat_over_a_thousand_calls(name):
    call = _repeated()[name]
    for _ in range(30):
        call()
    threads = threading.active_count()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        call()
    gc.collect()
    # One forgotten object a call would be a thousand.
    assert sys.getallocatedblocks() - before < 300
    assert threading.active_count() <= threads


@every_attention
def test_row_46_extra_memory_does_not_grow_with_length(attend):
    def extra(length):
        arrays = tokens(lead=(), length=length)
        with linattn.config(num_threads=1):
            attend(*arrays, chunk_size=64)
            tracemalloc.start()
            try:
                out = attend(*arrays, chunk_size=64)
                return tracemalloc.get_traced_memory()[1] - out.nbytes
            finally:
                tracemalloc.stop()

    short, long = (2100, 4200) if attend.feature_map is None else (2000, 8000)
    assert extra(long) < 1.2 * extra(short) + 20_000


@some_attentions
def test_row_48_inputs_are_unchanged(xp, attend):
    arrays = in_library(xp, tokens())
    mask = xp.array(np.arange(LENGTH) % 3 > 0)
    before = [xp.numpy(array) for array in (*arrays, mask)]
    attend(*arrays, key_mask=mask, chunk_size=CHUNK)
    for array, kept in zip((*arrays, mask), before, strict=True):
        np.testing.assert_array_equal(xp.numpy(array), kept)


@every_attention
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_row_48_query_is_key_is_value(attend, dtype):
    x = tokens(dtype=dtype)[0]
    out = attend(x, x, x)
    np.testing.assert_array_equal(out, attend(x.copy(), x.copy(), x.copy()))
    assert not np.shares_memory(out, x)


def leaves(result):
    """Arrays in whatever a public function returns."""
    if isinstance(result, np.ndarray):
        return [result]
    return [a for part in result for a in leaves(part)] if isinstance(result, tuple) else []


def calls_with_states(feature_map, dtype) -> dict[str, Callable[..., Any]]:
    def attention(query, key, value, kvz, log_scale, **options):
        return linattn.linear_attention(
            query,
            key,
            value,
            feature_map,
            initial_state=linattn.State(kvz, log_scale, 3),
            return_state=True,
            return_log_normalizer=True,
            **options,
        )

    def masked(query, key, value, kvz, log_scale):
        mask = np.zeros(key.shape[-2], dtype=bool)
        return attention(query, key, value, kvz, log_scale, key_mask=mask)

    def update(query, key, value, kvz, log_scale):
        return linattn.update_state(linattn.State(kvz, log_scale, 3), key, value, feature_map)

    def update_nothing(query, key, value, kvz, log_scale):
        state = linattn.State(kvz, log_scale, 3)
        return linattn.update_state(state, key[:, :0], value[:, :0], feature_map)

    def full_nothing(query, key, value, kvz, log_scale):
        return attention(query, key[:, :0], value[:, :0], kvz, log_scale)

    def causal_nothing(query, key, value, kvz, log_scale):
        return attention(query[:, :0], key[:, :0], value[:, :0], kvz, log_scale, is_causal=True)

    def step(query, key, value, kvz, log_scale):
        state = linattn.State(kvz, log_scale, 3)
        return linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map)

    def decoder(query, key, value, kvz, log_scale):
        stream = linattn.Decoder(feature_map, linattn.State(kvz, log_scale, 3))
        outs = tuple(stream.step(query[:, t], key[:, t], value[:, t]) for t in range(3))
        return outs, stream.state

    def read(query, key, value, kvz, log_scale):
        return linattn.read_state(query, linattn.State(kvz, log_scale, 3), feature_map)

    def merge(query, key, value, kvz, log_scale):
        state = linattn.State(kvz, log_scale, 3)
        empty = state_of(feature_map, like=key, batch_shape=kvz.shape[:-2])
        return linattn.merge_states(state, empty), linattn.merge_states(empty, state)

    def features(query, key, value, kvz, log_scale):
        return feature_map.query_features(query), feature_map.key_features(key)

    def pairs(query, key, value, kvz, log_scale):
        return feature_map.estimate(query, key), feature_map.estimate(query, query)

    return {
        "full": attention,
        "causal": partial(attention, is_causal=True),
        "masked": masked,
        "update": update,
        "update with nothing": update_nothing,
        "full with nothing": full_nothing,
        "causal with nothing": causal_nothing,
        "step": step,
        "decoder": decoder,
        "read": read,
        "merge": merge,
        "features": features,
        "pairs": pairs,
    }


@pytest.mark.parametrize("name", [*MAPS, "identity"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_row_48_outputs_alias_no_input_and_inputs_stay(name, dtype, length):
    identity = ActivationFeatures(sampler=None, activation=_identity, epsilon=0.0)
    feature_map = MAPS.get(name, identity)
    query, key, value = tokens(length=max(length, 3), dtype=dtype)
    query, key, value = (array[:, :length] for array in (query, key, value))
    state = filled_state(feature_map, dtype=dtype)
    inputs = [query, key, value, state.kvz, state.log_scale]
    before = [array.copy() for array in inputs]
    for call_name, call in calls_with_states(feature_map, dtype).items():
        if call_name == "decoder" and length < 3:
            continue
        outputs = leaves(call(*inputs))
        assert outputs
        for out in outputs:
            assert not any(np.shares_memory(out, array) for array in inputs), call_name
            assert out.flags.writeable, call_name
            out[...] = 7
        for array, kept in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(array, kept, err_msg=call_name)


def _identity(u):
    return u


@every_map
def test_row_48_earlier_states_of_a_decoder_stay(feature_map):
    query, key, value = tokens(lead=())
    decoder = linattn.Decoder(feature_map, state_of(feature_map, like=query))
    seen = [(decoder.state, copy.deepcopy(decoder.state))]
    outs = []
    for token in zip(query, key, value, strict=True):
        out = decoder.step(*token)
        outs.append((out, out.copy()))
        seen.append((decoder.state, copy.deepcopy(decoder.state)))
    for now, then in (*seen, *outs):
        assert_equal_and_native(now, then)
    assert [state.length for state, _ in seen] == list(range(LENGTH + 1))


@every_map
def test_row_48_a_refused_step_leaves_the_decoder_as_it_was(feature_map):
    query, key, value = (array[0, 0] for array in tokens())
    decoder = linattn.Decoder(feature_map, state_of(feature_map, like=query))
    for _ in range(3):
        decoder.step(query, key, value)
        before = decoder.state
        for bad in (
            (query, key, value[:2]),
            (query.astype(float), key, value),
            (query, key, None),
            (query, key, np.ones(VALUE_DIM, dtype=int)),
            (query[0], key, value),
        ):
            with pytest.raises((TypeError, ValueError), match="must"):
                decoder.step(*bad)
        for one, other in zip(decoder.state, before, strict=True):
            np.testing.assert_array_equal(one, other)


@every_attention
def test_row_49_permuted_keys(attend):
    if attend.is_causal:
        attend = Attention(attend.name, attend.feature_map, False)
    query, key, value = tokens(length=40)
    order = np.random.default_rng(0).permutation(40)
    mask = np.arange(40) % 5 > 0
    out = attend(query, key[:, order], value[:, order], key_mask=mask[order])
    attend.check(out, query, key, value, tolerance=1e-5, key_mask=mask)


@every_attention
def test_row_49_permuted_batch(attend):
    arrays = tokens(lead=(5, 2), length=30)
    order = np.array([3, 1, 4, 0, 2])
    out = attend(*arrays)
    np.testing.assert_array_equal(attend(*(array[order] for array in arrays)), out[order])


@every_attention
@pytest.mark.parametrize(("short", "long"), [(1, 2), (6, 9), (127, 128), (128, 129), (100, 300)])
def test_row_49_future_tokens_change_nothing(attend, short, long):
    attend = Attention(attend.name, attend.feature_map, True)
    arrays = tokens(length=long, dtype="float64")
    prefix = [array[:, :short] for array in arrays]
    whole = attend(*arrays)
    attend.check(whole[:, :short], *prefix, tolerance=1e-12)
    arrays[1][:, short:] *= 30
    arrays[2][:, short:] = 1e6
    attend.check(attend(*arrays)[:, :short], *prefix, tolerance=1e-12)


@every_attention
def test_row_49_other_batch_entries_do_not_matter(attend):
    query, key, value = tokens(length=140)
    out = attend(query, key, value)
    key[1], value[1], query[1] = np.nan, np.inf, 1e20
    changed = attend(query, key, value)
    attend.check(changed[:1], query[:1], key[:1], value[:1], tolerance=1e-5)
    np.testing.assert_allclose(changed[0], out[0], rtol=1e-4, atol=1e-5)


@every_attention
def test_row_50_strict_floating_point_handling_is_not_disturbed(attend):
    query, key, value = tokens(length=140)
    mask = np.arange(140) > 3
    big = [30 * query, 30 * key, value]
    dead = [-np.abs(query), -np.abs(key), value]
    with np.errstate(all="raise"):
        for arrays in ((query, key, value), big, dead, [a * np.float32(1e-30) for a in big]):
            attend(*arrays)
            attend(*arrays, key_mask=mask)
            attend(*arrays, key_mask=np.zeros_like(mask))
        assert np.geterr()["over"] == "raise"


@every_map
def test_row_50_strict_floating_point_handling_in_states_and_maps(feature_map):
    query, key, value = tokens()
    query, key = 30 * query, 30 * key
    with np.errstate(all="raise"):
        empty = state_of(feature_map, like=key, batch_shape=(HEADS,))
        state = linattn.update_state(empty, key, value, feature_map)
        linattn.read_state(query, state, feature_map)
        linattn.read_state(query, empty, feature_map)
        linattn.merge_states(state, empty)
        linattn.merge_states(empty, empty)
        linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], empty, feature_map)
        decoder = linattn.Decoder(feature_map, state)
        decoder.step(query[:, 0], key[:, 0], value[:, 0])
        feature_map.query_features(query)
        feature_map.key_features(key)
        feature_map.estimate(query, key)
        feature_map.kernel(query, key)
        if feature_map is not MAPS["activation"]:
            feature_map.variance(query, key)

"""Layouts of NumPy arrays: byte order, strides, memory maps, and arrays that are read-only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import linattn
from tests.attentions import (
    HEADS,
    LENGTH,
    assert_equal_and_native,
    every_attention,
    every_map,
    filled_state,
    state_of,
    tokens,
)
from tests.entries import every_entry


def big_endian(array):
    return array.astype(array.dtype.newbyteorder(">"))


@every_attention
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_big_endian(attend, dtype):
    arrays = tokens(dtype=dtype)
    out = attend(*map(big_endian, arrays))
    assert out.dtype == np.dtype(dtype)
    assert out.dtype.isnative
    np.testing.assert_array_equal(out, attend(*arrays))


@every_entry
def test_big_endian_everywhere(entry):
    arrays = entry.arrays()
    swapped = {name: big_endian(array) for name, array in arrays.items()}
    assert_equal_and_native(entry.call(np.asarray, **swapped), entry.call(np.asarray, **arrays))


@every_map
def test_big_endian_stream(feature_map):
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
def test_strides(attend, layout):
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
def test_zero_strides(attend):
    query, key, value = (array[:1, :1] for array in tokens())
    arrays = [np.broadcast_to(a, (HEADS, LENGTH, a.shape[-1])) for a in (query, key, value)]
    assert arrays[0].strides[:2] == (0, 0)
    out = attend(*arrays)
    attend.check(out, *arrays, tolerance=1e-5)


@every_map
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_in_states(feature_map, layout):
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
def test_memmap(attend, mode, tmp_path):
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
def test_memmap_in_states(feature_map, tmp_path):
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
def test_read_only_states(feature_map):
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

"""Sizes: of one, of no multiple of a block, in any chunks, and beyond 16 and 32 bits."""

from __future__ import annotations

import numpy as np
import pytest

import linattn
from linattn.feature_maps import (
    ActivationFeatures,
    PositiveFeatures,
)
from tests.attentions import (
    DIM,
    Attention,
    every_map,
    some_attentions,
    state_of,
    tokens,
)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_states_of_size_one_are_not_squeezed(lead):
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


@every_map
@pytest.mark.parametrize("is_causal", [False, True])
def test_chunks_and_threads_agree_closely(feature_map, is_causal):
    attend = Attention("", feature_map, is_causal)
    query, key, value = tokens(lead=(3,), length=150)
    for num_threads in (1, 2, 5):
        with linattn.config(num_threads=num_threads):
            for chunk_size in (None, 37):
                out = attend(query, key, value, chunk_size=chunk_size)
                attend.check(out, query, key, value, tolerance=2e-5)


@some_attentions
def test_more_heads_than_65535(attend):
    heads = 66_000
    rng = np.random.default_rng(0)
    few = [0.6 * rng.standard_normal((7, 2, DIM)).astype(np.float32) for _ in range(3)]
    arrays = [np.resize(array, (heads, 2, DIM)) for array in few]
    out = attend(*arrays)
    assert out.shape == (heads, 2, DIM)
    np.testing.assert_allclose(out, np.resize(attend(*few), out.shape), rtol=1e-4, atol=1e-5)


@some_attentions
def test_strides_beyond_32_bits(attend, tmp_path):
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


@pytest.mark.parametrize("make", [PositiveFeatures, ActivationFeatures])
@pytest.mark.parametrize("num_features", [1, 3, 5, 8, 13])
@pytest.mark.parametrize("is_causal", [False, True])
def test_truncated_block(make, num_features, is_causal):
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

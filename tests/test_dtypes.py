"""Dtypes: floats of one width come out as they go in, and anything else is refused by name."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import linattn
from tests.attentions import (
    DIM,
    MAPS,
    PHI,
    TOLERANCE,
    in_library,
    some_attentions,
    state_of,
    tokens,
)
from tests.entries import (
    every_argument,
    every_argument_of_several,
    every_state_call,
    saying,
    state_calls,
    word,
)


def true_sums(xp, state):
    """What a state stands for, float64 NumPy."""
    log_scale = xp.numpy(state.log_scale).astype(np.float64)
    return xp.numpy(state.kvz).astype(np.float64) * np.exp(log_scale)[..., None]


FLOATING = r"float16, bfloat16, float32 or float64"


@every_argument
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_integers(entry, argument, dtype):
    arrays = entry.arrays()
    arrays[argument] = np.ones_like(arrays[argument], dtype=dtype)
    match = saying(word(argument), FLOATING, dtype, "convert")
    with pytest.raises(TypeError, match=match):
        entry.call(np.asarray, **arrays)


@some_attentions
@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_no_floats_in_every_library(xp, attend, dtype):
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
def test_other_dtypes(entry, argument, dtype, came):
    if dtype == "longdouble" and np.dtype("longdouble") == np.dtype("float64"):
        pytest.skip("numpy: longdouble is float64 on this platform")
    arrays = entry.arrays()
    arrays[argument] = np.zeros(arrays[argument].shape, dtype=dtype)
    with pytest.raises(TypeError, match=saying(word(argument), FLOATING, f"({came})")):
        entry.call(np.asarray, **arrays)


@every_argument_of_several
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_mixed_dtypes(entry, argument, dtype):
    arrays = entry.arrays()
    arrays[argument] = arrays[argument].astype(dtype)
    match = saying(word(argument), "one dtype", "float32", dtype)
    with pytest.raises(ValueError, match=match):
        entry.call(np.asarray, **arrays)


def test_mixed_dtypes_in_every_library(xp):
    query, key, value = in_library(xp, tokens())
    value = xp.xp.astype(value, xp.xp.float64)
    match = saying(word("value"), "one dtype", "float32", "float64")
    for call in (partial(linattn.linear_attention, feature_map=PHI), linattn.softmax_attention):
        with pytest.raises(ValueError, match=match):
            call(query, key, value)


@every_state_call
def test_state_of_another_dtype(name):
    argument, call = state_calls()[name]
    state = state_of(PHI, like=np.ones(DIM, dtype=np.float64))
    # Merging has no map to take the dtype from: either argument may be the odd one.
    names = word(argument) if argument != "first" else "(first|second)"
    with pytest.raises(ValueError, match=saying(names, "float32", "float64")):
        call(state)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sums_of_narrow_floats(xp, dtype, is_causal):
    """3000 equal keys, the first 2048 of them with value 0: a float16 sum would stop there."""
    if is_causal and xp.name in ("dask", "jax"):
        pytest.skip(f"{xp.name}: lazy arrays take the time of log2(chunk) levels for each chunk")
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
def test_long_streams_of_narrow_floats(dtype):
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

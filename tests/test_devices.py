"""Arrays of two devices or of two libraries in one call are refused, and both are named."""

from __future__ import annotations

from typing import Any

import array_api_compat
import array_api_strict
import numpy as np
import pytest

import linattn
from tests.attentions import PHI, state_of, tokens
from tests.entries import (
    CPU,
    DEVICE1,
    every_argument_of_several,
    every_state_call,
    good_state,
    on_device,
    saying,
    state_calls,
    word,
)


@every_argument_of_several
@pytest.mark.parametrize(("home", "away"), [(CPU, DEVICE1), (DEVICE1, CPU)], ids=str)
def test_mixed_devices(entry, argument, home, away):
    arrays = entry.arrays(on_device(home))
    arrays[argument] = array_api_compat.to_device(arrays[argument], away)
    match = saying(word(argument), "CPU_DEVICE", "device1")
    with pytest.raises(ValueError, match=match):
        entry.call(on_device(home), **arrays)


@every_state_call
def test_state_on_another_device(name):
    argument, call = state_calls(on_device(DEVICE1))[name]
    named = word(argument) if argument != "first" else "(first|second)"
    with pytest.raises(ValueError, match=saying(named, "CPU_DEVICE", "device1")):
        call(good_state(on_device(CPU)))


@pytest.mark.parametrize("name", ["log_decay", "its gradient", "a kernel sum", "precision"])
def test_a_device_without_float64(name):
    """As torch's "mps"; the library has float64 elsewhere."""
    device = array_api_strict.Device("no_float64")
    host = [array[0].astype(np.float32) for array in tokens()]
    there = [array_api_strict.asarray(array, device=device) for array in host]
    options: dict[str, Any] = {"is_causal": True, "log_decay": -0.1}
    calls: dict[str, Any] = {
        "log_decay": lambda q, k, v: linattn.linear_attention(q, k, v, PHI, **options),
        "its gradient": lambda q, k, v: linattn.linear_attention_vjp(q, k, v, PHI, **options)[1](v)[
            0
        ],
        "a kernel sum": lambda query, key, _: linattn.kernels.log_sum_exp(query, key, bandwidth=1),
    }
    if name == "precision":
        said = "precision='float64' needs a library with float64 .* has not on .*no_float64"
        with linattn.config(precision="float64"), pytest.raises(ValueError, match=said):
            linattn.linear_attention(there[0], there[1], there[2], PHI)
        return
    got = calls[name](*there)
    assert got.device == device
    got = np.asarray(array_api_compat.to_device(got, CPU))
    np.testing.assert_allclose(got, calls[name](*host), rtol=1e-4, atol=1e-4)


def test_stream_that_changes_device():
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
def test_mixed_namespaces(entry, argument):
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
def test_state_of_another_namespace(name):
    argument, call = state_calls()[name]
    named = word(argument) if argument != "first" else "(first|second)"
    match = saying(named, r"\bnumpy\b", r"\barray_api_strict\b")
    with pytest.raises(TypeError, match=match):
        call(good_state(array_api_strict.asarray))


def test_stream_that_changes_namespace():
    query, key, value = (array[0, 0] for array in tokens())
    decoder = linattn.Decoder(PHI, state_of(PHI, like=query))
    decoder.step(query, key, value)
    match = saying(r"\bnumpy\b", r"\barray_api_strict\b")
    with pytest.raises(TypeError, match=match):
        decoder.step(query, array_api_strict.asarray(key), value)
    with pytest.raises(TypeError, match=saying(word("state"), match)):
        decoder.step(*map(array_api_strict.asarray, (query, key, value)))

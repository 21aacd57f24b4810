"""No product is slow by its numbers: what it adds up is 0 or a normal number, whatever comes.

Queries and keys from .01 to 30, values and cotangents from 1e-40 to 1e30, bandwidths from .01 to 1.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_less

import linattn
from linattn import layers
from linattn.feature_maps import (
    ActivationFeatures,
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    ReluFeatures,
    SoftmaxFeatures,
    TrigonometricFeatures,
)
from tests.slow_products import slow_products, why_slow

DIM, VALUE_DIM, LENGTH = 8, 5, 70
MAPS: dict[str, Any] = {
    "positive": PositiveFeatures(DIM, 16, rng=0),
    "hyperbolic": HyperbolicFeatures(DIM, 16, rng=0),
    "elu": EluFeatures(),
    "relu": ReluFeatures(),
    "softmax": SoftmaxFeatures(),
    "trigonometric": TrigonometricFeatures(DIM, 16, rng=0),
    "activation": ActivationFeatures(DIM, 16, rng=0),
}
SCALES, SIZES = (0.01, 1, 2, 4, 8, 30), (1e-40, 1e-25, 1e-5, 1, 1e30)
DTYPES = ("float32", "float64")


def tokens(scale, size, dtype, seed=0):
    rng = np.random.default_rng(seed)
    query, key = scale * rng.standard_normal((2, 2, LENGTH, DIM))
    value = size * rng.standard_normal((2, LENGTH, VALUE_DIM))
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def linear(mode, phi, query, key, value, grad):
    options: dict[str, Any] = {"chunk_size": 48} if "chunk" in mode else {}
    options["is_causal"] = "causal" in mode
    if "decay" in mode:
        strong = 3 if "strong" in mode else 0
        options["log_decay"] = -np.abs(query[..., 0]) / 4 - query.dtype.type(strong)
    if "bias" in mode:
        options["key_bias"] = np.linspace(0, -40, LENGTH, dtype=query.dtype)
    if "sum" in mode:
        options["normalize"] = False
    if "packed" in mode:
        options["cu_seqlens"] = [0, 20, 50, LENGTH]
    if "window" in mode:
        options["exact_window"] = 8
    if "gradient" in mode:
        del options["is_causal"]
        causal = "causal" in mode
        _, pullback = linattn.linear_attention_vjp(
            query, key, value, phi, is_causal=causal, **options
        )
        pullback(grad)
    else:
        linattn.linear_attention(query, key, value, phi, **options)


def decode(phi, query, key, value):
    state = linattn.init_state(phi, VALUE_DIM, batch_shape=(2,), like=query)
    state = linattn.update_state(state, key[:, :40], value[:, :40], phi)
    decoder = linattn.Decoder(phi, state)
    for i in range(40, 60):
        decoder.step(query[:, i], key[:, i], value[:, i])
        _, state = linattn.decode_step(query[:, i], key[:, i], value[:, i], state, phi)
    linattn.read_state(query, decoder.state, phi)


def stream(phi, query, key, value):
    """Cached tokens of a layer's attention, by its state and by its decoder."""
    attend, scope = layers.LinearAttention(phi), layers.Scope(is_causal=True)
    prompt, *steps = (slice(0, 40), *(slice(i, i + 1) for i in range(40, 50)))
    cache = attend.extend(query[:, prompt], key[:, prompt], value[:, prompt], None, scope)[1]
    caches = [cache, attend.for_steps(cache)]
    for rows in steps:
        token = query[:, rows], key[:, rows], value[:, rows]
        caches = [attend.extend(*token, each, scope)[1] for each in caches]


def softmax(mode, query, key, value, grad, bandwidth):
    options: dict[str, Any] = {"is_causal": "causal" in mode}
    if "local" in mode:
        options["local_window_size"] = 10
    if "narrow" in mode:
        query, key = query / bandwidth, key / bandwidth
        options |= {"scale": 1.0, "key_bias": -(np.square(key).sum(axis=-1)) / 2}
    if "gradient" in mode:
        linattn.softmax_attention_vjp(query, key, value, **options)[1](grad)
    else:
        linattn.softmax_attention(query, key, value, **options)


def recurrence(mode, query, key, value, grad):
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    options: dict[str, Any] = {"update_rule": mode.split()[0]}
    if "gated" in options["update_rule"]:
        decay = -np.abs(query)
        options["log_decay"] = decay if "channel" in mode else decay[..., 0]
    if "delta" in options["update_rule"]:
        options["beta"] = 1 / (1 + np.exp(-query[..., 0].clip(-30, 30)))
    if "steps" in mode:
        state = np.zeros((2, DIM, VALUE_DIM), value.dtype)
        for i in range(40):
            given = (query[:, i], key[:, i], value[:, i], state)
            of_token = {name: x[:, i] for name, x in options.items() if name != "update_rule"}
            rule = options["update_rule"]
            _, state = linattn.recurrence_step(*given, update_rule=rule, **of_token)
    elif "gradient" in mode:
        linattn.linear_recurrence_vjp(query, key, value, **options)[1](grad)
    else:
        linattn.linear_recurrence(query, key, value, **options)


LINEAR = (
    *("full", "full chunk", "causal", "causal chunk", "full bias", "causal bias", "causal decay"),
    *("packed", "packed causal", "window", "window causal", "gradient", "gradient causal"),
    *("gradient causal decay", "gradient window", "causal strong decay"),
    *("causal sum", "full sum chunk", "gradient sum", "gradient causal sum decay"),
)
SOFTMAX = (
    *("full", "causal", "local", "local causal", "narrow", "gradient", "gradient causal"),
    *("gradient narrow", "gradient local"),
)
RECURRENCES = ("linear", "gated", "gated channel", "delta", "gated_delta", "gated_delta channel")


def calls():
    """Every call, as a name and a function of what is drawn."""
    for name, phi in MAPS.items():
        for mode in LINEAR:
            if "decay" in mode and name == "softmax":
                continue
            if "window" in mode and name not in ("positive", "hyperbolic"):
                continue
            if "sum" in mode and name not in ("positive", "elu", "trigonometric"):
                continue
            yield f"{name} {mode}", lambda case, mode=mode, phi=phi: linear(mode, phi, *case[:4])
        yield f"{name} decoding", lambda case, phi=phi: decode(phi, *case[:3])
        yield f"{name} layer decoding", lambda case, phi=phi: stream(phi, *case[:3])
    for mode in SOFTMAX:
        yield f"softmax {mode}", lambda case, mode=mode: softmax(mode, *case)
    for rule, back in itertools.product(RECURRENCES, ("", " gradient", " steps")):
        mode = rule + back
        yield f"recurrence {mode}", lambda case, mode=mode: recurrence(mode, *case[:4])


CALLS = dict(calls())


def check(name, backends, scale, size, grad, bandwidth, dtype):
    case = (*tokens(scale, size, dtype), tokens(1, grad, dtype, seed=1)[-1], bandwidth)
    settings = nullcontext() if backends else linattn.without_backends()
    with settings, linattn.config(num_threads=1), slow_products() as slow:
        CALLS[name](case)
    assert not slow, (name, scale, size, grad, bandwidth, dtype, backends, sorted(slow))


def drawn(rng) -> Any:
    scale, size, grad = rng.choice(SCALES), rng.choice(SIZES), rng.choice(SIZES)
    return scale, size, grad, 10.0 ** rng.uniform(-2, 0), str(rng.choice(DTYPES))


cases = pytest.mark.parametrize(
    ("name", "backends"),
    [
        pytest.param(name, backends, id=f"{name}-{'numpy' if backends else 'generic'}")
        for name in CALLS
        for backends in (False, True)
        if not ("gated_delta" in name and "gradient" in name)  # few, with strong decays
    ],
)


@cases
def test_some(name, backends):
    rng = np.random.default_rng([ord(letter) for letter in name])
    case = drawn(rng)
    if backends:
        check(name, backends, rng.choice([4, 6, 8, 16]), 1, 1, case[3], "float32")
    else:
        check(name, backends, *case)


@pytest.mark.parametrize("name", ["positive", "elu", "trigonometric"])
@pytest.mark.parametrize("ending", ["", " sum"])
@pytest.mark.parametrize("mode", ["full", "causal", "gradient", "gradient causal"])
def test_sizes_run_the_same_functions(name, mode, ending):
    """No block is declined, or done again, for the sizes of values and cotangents."""

    def functions(size, grad):
        query, key, value = tokens(1, size, "float32")
        with linattn.explain() as report:
            grads = tokens(1, grad, "float32", seed=1)[-1]
            linear(mode + ending, MAPS[name], query, key, value, grads)
        return str(report)

    want = functions(1, 1)
    # In units, large sums of small weights would lose their digits; Fourier maps check their sums.
    plain = ending and name == "trigonometric" and "causal" in mode
    large = ((1e20, 1), (1e30, 1e-20)) if not plain else ()
    for size, grad in ((1e-40, 1), (1e-30, 1), (1, 1e30), *large):
        assert functions(size, grad) == want, (size, grad)


@pytest.mark.parametrize("name", ["positive gradient", "hyperbolic gradient"])
def test_keys_whose_shares_are_far_apart(name):
    check(name, True, 20, 1, 1, 1, "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "elu", "relu"])
def test_few_tokens_of_a_stream_are_slow(name, dtype):
    """Before a decoder knows its sums and the size of values: at most the first 16 tokens."""
    phi, allowed = MAPS[name], 16 if name == "elu" else 1
    for scale, size in ((1, 1e-40), (6, 1), (8, 1e-25), (30, 1), (30, 1e-40)):
        query, key, value = tokens(scale, size, dtype)
        state = linattn.init_state(phi, VALUE_DIM, batch_shape=(2,), like=query)
        decoder = linattn.Decoder(phi, state)
        slow = []
        for i in range(40):
            with slow_products() as found:
                decoder.step(query[:, i], key[:, i], value[:, i])
                _, state = linattn.decode_step(query[:, i], key[:, i], value[:, i], state, phi)
            slow.append(bool(found))
        assert not any(slow[allowed:]), (scale, size, slow)


def test_a_stream_that_begins_with_zeros_gets_a_unit():
    phi = MAPS["positive"]
    query, key, value = tokens(1, 1e-40, "float32")
    value[:, :5] = 0
    state = linattn.init_state(phi, VALUE_DIM, batch_shape=(2,), like=query)
    decoder, out = linattn.Decoder(phi, state), []
    for i in range(40):
        with slow_products() as found:
            out.append(decoder.step(query[:, i], key[:, i], value[:, i]))
        assert i < 16 or not found
    value[:, 40:] = 1
    with np.errstate(all="raise"):
        out += [decoder.step(query[:, i], key[:, i], value[:, i]) for i in range(40, LENGTH)]
    q, k, v = (x.astype(float) for x in (query, key, value))
    error = np.abs(np.stack(out, axis=1) - linattn.linear_attention(q, k, v, phi, is_causal=True))
    # Results of 1e-40 are rounded to multiples of 1.4e-45.
    assert_array_less(error[:, :40], 1.5e-45)
    assert_array_less(error[:, 40:], 1e-5)


def test_what_is_slow_is_told():
    x = np.ones((3, 4), np.float32)
    assert why_slow(x, x.T) is None
    assert why_slow(x * np.float32(1e-40), x.T) == "operand"
    assert why_slow(x * np.float32(1e-20), x.T * np.float32(1e-20)) == "product"
    # What rounds to 0 takes no longer.
    assert why_slow(x * np.float32(1e-30), x.T * np.float32(1e-30)) is None


def test_a_state_keeps_its_digits_beside_a_block():
    """Weights are lifted by a power of two that is no term of an exponent."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 12, 4))
    phi = ReluFeatures()
    weights = np.tril(np.maximum(query, 0) @ np.maximum(key, 0).T)
    with linattn.without_backends():
        _, state = linattn.linear_attention(
            query[:5], key[:5], value[:5], phi, is_causal=True, normalize=False, return_state=True
        )
        found = linattn.linear_attention(
            query[5:], key[5:], value[5:], phi,
            is_causal=True, normalize=False, initial_state=state,
        )  # fmt: skip
    allowed = 8 * np.finfo(float).eps * (weights @ np.abs(value))[5:]
    assert_array_less(np.abs(found - (weights @ value)[5:]), allowed + 1e-300)

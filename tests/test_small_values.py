"""Attention is linear in the values: what is right at 1 is right at 1e-25 and at 1e30.

Where early keys lie far below late ones, the weights of early rows are small on any scale that
they share with late ones, and their products with small values leave the range of a float first.
"""

# Tests call with star arguments.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc"

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import linattn
from linattn import reference
from linattn.feature_maps import EluFeatures, RotatedFeatures
from tests.attentions import assert_at_most, maps

DIM, VALUE_DIM = 5, 3
MAPS = maps(DIM, 12, "positive", "hyperbolic", "elu", "relu")
DTYPES = {
    # Largest gap between the logs of keys, smallest power of two of values, bound on errors.
    "float32": (80, -93, 1e-4),
    "float64": (500, -920, 1e-11),
}

STEPS = {"float32": -83, "float64": -580}
"""Steps and reads of a state go by a denominator of 1e-13 or 1e-130, whatever the values."""

every_map = pytest.mark.parametrize("name", MAPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@st.composite
def cases(draw, dtype, least=None):
    """Length, heads, early keys, by how much their logs are below, log2 of the values, a seed."""
    most_gap, least_size, _ = DTYPES[dtype]
    length = draw(st.integers(2, 48))
    heads, early = draw(st.integers(1, 2)), draw(st.integers(1, length))
    gap = draw(st.floats(most_gap / 4, most_gap))
    least_size = least_size if least is None else least
    size = draw(st.integers(least_size, least_size // 2))
    return length, heads, early, gap, size, draw(st.integers(0, 2**32))


def problem(name, dtype, length, heads, early, gap, size, seed):
    """Queries, keys and values of about 1, and the power of two that the values are to be of."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, heads, length, DIM)) / 2
    below = np.where(np.arange(length) < early, np.linspace(gap, gap / 2, length), 0)[:, None]
    if name == "elu":
        key = key - below
    elif name == "relu":
        query, key = np.abs(query), np.abs(key) * np.exp(-below)
    else:
        # The norm of a key is a factor exp(-scale |k|^2 / 2) of all its features.
        unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
        key = key + unit * np.sqrt(2 * below / MAPS[name].scale)
    value = rng.standard_normal((heads, length, VALUE_DIM))
    return *(x.astype(dtype) for x in (query, key, value)), np.dtype(dtype).type(2.0**size)


def agree(out, query, key, value, name, dtype):
    """Compare with the oracle, in units of the largest value that a row sees in a column."""
    assert out.dtype == dtype
    want = reference.kernel_attention(query, key, value, MAPS[name], is_causal=True)
    check_rows(out.astype(np.float64), want, value.astype(np.float64), DTYPES[dtype][-1])


def check_rows(out, want, value, bound):
    seen = np.maximum.accumulate(np.abs(value), axis=-2)
    assert_array_equal(out[seen == 0], 0)
    assert np.max(np.abs(out - want) / np.where(seen == 0, 1, seen)) <= bound


@every_dtype
@every_map
@given(data=st.data())
def test_causal(numpy_path, data, name, dtype):
    query, key, value, size = problem(name, dtype, *data.draw(cases(dtype)))
    chunk_size = data.draw(st.none() | st.integers(1, 48), label="chunk_size")
    value = value * size
    options = dict(is_causal=True, chunk_size=chunk_size)
    out = linattn.linear_attention(query, key, value, MAPS[name], **options)
    agree(out, query, key, value, name, dtype)


@every_dtype
@every_map
@given(data=st.data())
def test_rows_that_see_small_values_only(numpy_path, data, name, dtype):
    """Values of later tokens are of any size, of some columns and tokens 0, or a column is."""
    query, key, value, size = problem(name, dtype, *data.draw(cases(dtype)))
    length = key.shape[-2]
    edge = data.draw(st.integers(0, length), label="small values")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed of zeros"))
    value[:, :edge] *= size
    value[rng.random(value.shape) < data.draw(st.sampled_from([0, 0.3, 0.9]))] = 0
    out = linattn.linear_attention(query, key, value, MAPS[name], is_causal=True)
    agree(out, query, key, value, name, dtype)


@every_dtype
@every_map
@given(data=st.data())
def test_streams(numpy_path, data, name, dtype):
    """A sequence, a state after it, and steps from there."""
    query, key, value, size = problem(name, dtype, *data.draw(cases(dtype, STEPS[dtype])))
    length, value, phi = key.shape[-2], value * size, MAPS[name]
    first = data.draw(st.integers(0, length), label="first part")
    second = data.draw(st.integers(first, length), label="second part ends")
    parts, state = [], linattn.init_state(phi, VALUE_DIM, batch_shape=key.shape[:1], like=key)
    for rows in (slice(0, first), slice(first, second)):
        tokens = (x[:, rows] for x in (query, key, value))
        out, state = linattn.linear_attention(
            *tokens, phi, is_causal=True, initial_state=state, return_state=True
        )
        parts.append(out)
    decoder = linattn.Decoder(phi, state)
    for i in range(second, length):
        token = query[:, i], key[:, i], value[:, i]
        parts.append(decoder.step(*token)[:, None])
        step, state = linattn.decode_step(*token, state, phi)
        np.testing.assert_allclose(
            step[:, None] / size, parts[-1] / size, rtol=0, atol=10 * DTYPES[dtype][-1]
        )
    agree(np.concatenate(parts, axis=1), query, key, value, name, dtype)


@every_dtype
@pytest.mark.parametrize("name", ["positive", "hyperbolic"])
@given(data=st.data())
def test_window(numpy_path, data, name, dtype):
    """With a window it is linear in the values too: what a power of two leaves exact agrees."""
    query, key, value, size = problem(name, dtype, *data.draw(cases(dtype)))
    window = data.draw(st.integers(1, key.shape[-2]), label="window")
    options = dict(is_causal=True, exact_window=window)
    small = linattn.linear_attention(query, key, value * size, MAPS[name], **options)
    want = linattn.linear_attention(query, key, value, MAPS[name], **options)
    check_rows(small / size, want, value, DTYPES[dtype][-1])


@every_dtype
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "elu"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@given(data=st.data())
def test_gradients(numpy_path, data, is_causal, name, dtype):
    """They are linear in values and in cotangents, of which each head has sizes of its own.

    Not with rectified features, whose logs have slopes as large as the inverse of a key.
    """
    query, key, value, _ = problem(name, dtype, *data.draw(cases(dtype)))
    if name == "elu" and not is_causal:
        query -= data.draw(st.floats(0, DTYPES[dtype][0] / 2), label="logs of queries below 0")
    cotangent = np.random.default_rng(key.shape[-2]).standard_normal(value.shape).astype(dtype)
    vjp = partial(linattn.linear_attention_vjp, feature_map=MAPS[name], is_causal=is_causal)
    with linattn.without_backends():
        _, pullback = vjp(*(x.astype(np.float64) for x in (query, key, value)))
        want = pullback(cotangent.astype(np.float64))
    sizes = st.lists(st.integers(DTYPES[dtype][1], 0), min_size=len(key), max_size=len(key))
    both = np.array(data.draw(sizes, label="log2 of values times cotangents"))[:, None, None]
    of_value = np.round(both * data.draw(st.floats(0, 1), label="of these in values")).astype(int)
    chunk_size = data.draw(st.none() | st.integers(1, 48), label="chunk_size")
    _, pullback = vjp(query, key, np.ldexp(value, of_value), chunk_size=chunk_size)
    got = pullback(np.ldexp(cotangent, both - of_value))
    exponents = both, both, both - of_value
    for x, y, log2, other in zip(got, want, exponents, (key, key, query), strict=True):
        assert x.dtype == dtype
        error = np.abs(np.ldexp(x.astype(np.float64), -log2) - y).max(axis=(-2, -1))
        unit = np.maximum(max(1, np.abs(other).max()), np.abs(y).max(axis=(-2, -1)))
        assert_at_most(error, 4 * DTYPES[dtype][-1] * unit)


# Values and cotangents of any size, small or large, one of each head ------------------------------

ELU = EluFeatures()
RANGE = {"float32": (-120, 100), "float64": (-1000, 900)}
"""log2 of the sizes of values and of cotangents, and of their products but for 20 bits."""

LINEAR = ("full", "causal", "decay", "packed", "masked", "chunks")
MODES = [f"{mode}{ending}" for mode in LINEAR for ending in ("", ", not divided")]
SOFTMAX = ("softmax", "softmax local")


def dense(mode, query, key, value, cotangent, mask):
    """Return the output and its pullback, float64, by the weights of all pairs."""
    if mode in SOFTMAX:
        weights = np.exp(query @ key.mT / np.sqrt(DIM))
    else:
        feature, slope = (lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))), {}
        slope = {side: np.where(x > 0, 1, np.exp(np.minimum(x, 0))) for side, x in
                 (("query", query), ("key", key))}  # fmt: skip
        weights = feature(query) @ feature(key).mT
    n = np.arange(query.shape[-2])
    seen = np.ones((len(n), len(n)))
    if mode.startswith(("causal", "decay", "chunks")):
        seen = np.tril(seen)
    if mode.startswith("decay"):
        seen = seen * np.exp(-0.2 * np.maximum(n[:, None] - n, 0))
    if mode.startswith("packed"):
        seen = (n[:, None] < 11) == (n < 11)
    if mode.startswith("softmax local"):
        seen = np.abs(n[:, None] - n) <= 3
    weights = weights * seen * mask[:, None, :]
    is_divided = "not divided" not in mode
    total = weights.sum(axis=-1, keepdims=True) if is_divided else np.ones_like(weights[..., :1])
    output = weights @ value / total
    by_weight = cotangent @ value.mT
    if is_divided:
        by_weight = by_weight - (cotangent * output).sum(axis=-1, keepdims=True)
    by_weight = by_weight / total
    of_value = (weights / total).mT @ cotangent
    if mode in SOFTMAX:
        by_logit = by_weight * weights / np.sqrt(DIM)
        return output, by_logit @ key, by_logit.mT @ query, of_value
    by_weight = by_weight * seen * mask[:, None, :]
    of_query = by_weight @ feature(key) * slope["query"]
    return output, of_query, by_weight.mT @ feature(query) * slope["key"], of_value


def attend(mode, query, key, value, mask, like):
    """Return the output and the pullback of a call."""
    options: dict[str, Any] = {}
    if mode.startswith(("causal", "decay", "chunks")):
        options["is_causal"] = True
    if mode.startswith("decay"):
        # Heads that share an array have one unit.
        options["log_decay"] = like(np.full(query.shape[:-1], -0.2, str(value.dtype)))
    if mode.startswith("chunks"):
        options["chunk_size"] = 5
    if mode.startswith("packed"):
        options["cu_seqlens"] = [0, 11, query.shape[-2]]
    if mode.startswith("masked"):
        options["key_mask"] = like(mask)
    if mode.startswith("softmax"):
        options |= {"local_window_size": 3} if "local" in mode else {}
        return linattn.softmax_attention_vjp(query, key, value, **options)
    options["normalize"] = "not divided" not in mode
    return linattn.linear_attention_vjp(query, key, value, ELU, **options)


def check_sizes(mode, dtype, of_value, of_cotangent, seed, like=lambda x: x, back=lambda x: x):
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, 2, 21, DIM)).astype(dtype)
    value, cotangent = rng.standard_normal((2, 2, 21, VALUE_DIM)).astype(dtype)
    mask = np.ones((2, 21), bool)
    if mode.startswith("masked"):
        mask[:, [0, 10, 12]] = False
    wide = (x.astype(np.float64) for x in (query, key, value, cotangent))
    want = dense(mode, *wide, mask)
    exponents = [np.reshape(x, (2, 1, 1)) for x in (of_value, of_cotangent)]
    value, cotangent = np.ldexp(value, exponents[0]), np.ldexp(cotangent, exponents[1])
    value = np.where(mask[..., None], value, 2.0 ** RANGE[dtype][1]).astype(dtype)
    arrays = map(like, (query, key, value))
    output, pullback = attend(mode, *arrays, mask, like)
    both = sum(exponents)
    sizes = exponents[0], both, both, exponents[1]
    for x, y, size in zip((output, *pullback(like(cotangent))[:3]), want, sizes, strict=True):
        error = np.abs(np.ldexp(back(x).astype(np.float64), -size) - y).max(axis=(-2, -1))
        assert_at_most(error, DTYPES[dtype][-1] * np.abs(y).max(axis=(-2, -1)))


@st.composite
def two_sizes(draw, dtype):
    """log2 of values and of cotangents, of each of two heads: their products are normal numbers."""
    least, most = RANGE[dtype]
    of_value = [draw(st.integers(least, most)) for _ in range(2)]
    both = [draw(st.integers(least + 20, most)) for _ in range(2)]
    return of_value, [min(max(y - x, least), most) for x, y in zip(of_value, both, strict=True)]


def are_normal(dtype, sizes):
    least, most = RANGE[dtype]
    return all(least + 20 <= x + y <= most for x, y in zip(*sizes, strict=True))


@every_dtype
@pytest.mark.parametrize("mode", [*MODES, *SOFTMAX])
@settings(max_examples=6)
@given(data=st.data())
def test_values_and_cotangents_of_any_size(numpy_path, data, mode, dtype):
    sizes = data.draw(two_sizes(dtype).filter(partial(are_normal, dtype)))
    check_sizes(mode, dtype, *sizes, data.draw(st.integers(0, 2**32)))


@pytest.mark.parametrize("mode", ["full", "causal, not divided"])
@pytest.mark.parametrize("sizes", [(-60, -10), (90, -60), (-60, 90)])
def test_sizes_in_every_library(xp, mode, sizes):
    of_value, of_cotangent = ([x, x - 5] for x in sizes)
    like, back = (lambda x: xp.array(x, str(x.dtype))), xp.numpy
    check_sizes(mode, "float32", of_value, of_cotangent, 0, like, back)


@pytest.mark.parametrize(("size", "of_states"), [(1e-30, 1e22), (1.0, 1e30)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_cotangents_of_a_state_are_large(xp, is_causal, packed, size, of_states):
    # Normalizers have no values in them: in units of both they would overflow. Queries have no
    # gradient by the state: in its units theirs would be 0.
    rng = np.random.default_rng(0)
    query, key, value, output = rng.standard_normal((4, 2, 9, 4)).astype(np.float32)
    value *= np.float32(size)
    phi, options = EluFeatures(), {"is_causal": is_causal, "return_state": True}
    if packed:
        options["cu_seqlens"] = np.array([0, 4, 9])
    found = []
    for dtype in (np.float32, np.float64):
        arrays = [xp.array(x.astype(dtype)) for x in (query, key, value)]
        (_, state), pullback = linattn.linear_attention_vjp(*arrays, phi, **options)
        of_state = np.full(tuple(state.kvz.shape), of_states, dtype)
        gradients = pullback(xp.array(output.astype(dtype)), xp.array(of_state))
        found.append([xp.numpy(x).astype(np.float64) for x in gradients])
    for got, want in zip(*found, strict=True):
        assert_at_most(abs(got - want).max(), 1e-4 * abs(want).max())


def test_weights_far_above_1_overflow_in_no_unit():
    """Numerators of weights of e^100 and values of 1e-30 are in range, and not in units."""
    query, key, value = (np.ones((30, n), np.float32) for n in (DIM, DIM, VALUE_DIM))
    bias, value = np.full(30, 100, np.float32), value * np.float32(1e-30)
    options = {"key_bias": bias, "normalize": False, "is_causal": True}
    out = linattn.linear_attention(query, key, value, ELU, **options)
    parts, _ = linattn.linear_attention(query, key, value, ELU, return_states_every=10, **options)
    want = np.arange(1, 31)[:, None] * (4 * DIM * np.exp(100) * 1e-30)
    np.testing.assert_allclose(out, np.broadcast_to(want, out.shape), rtol=1e-4)
    np.testing.assert_allclose(parts, out, rtol=1e-4)


@pytest.mark.parametrize("size", [-120, -60, 60, 120])
@pytest.mark.parametrize("inside", ["elu", "positive"])
def test_a_separate_denominator(numpy_path, inside, size):
    """Neither half of the features loses the size of the other, in any read of a state."""
    phi = RotatedFeatures(MAPS[inside] if inside == "positive" else EluFeatures(4))
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 21, phi.dim)).astype("f4")
    small = np.ldexp(value, size)
    for is_causal, normalize in itertools.product((False, True), repeat=2):
        options = {"is_causal": is_causal, "normalize": normalize}
        want = linattn.linear_attention(query, key, value, phi, **options)
        out = linattn.linear_attention(query, key, small, phi, **options)
        assert_at_most(np.abs(np.ldexp(out, -size) - want), 1e-4 * np.abs(want).max())
    states = []
    for values in (value, small):
        state = linattn.init_state(phi, phi.dim, batch_shape=(2,), like=key)
        states.append(linattn.update_state(state, key, values, phi))
    want, out = (linattn.read_state(query, state, phi) for state in states)
    assert_at_most(np.abs(np.ldexp(out, -size) - want), 1e-4 * np.abs(want).max())
    if size > 0:
        # A value of 1 after such a state, read by a step.
        token = query[:, 0], key[:, 0]
        want, _ = linattn.decode_step(*token, np.ldexp(value[:, 0], -size), states[0], phi)
        out, _ = linattn.decode_step(*token, value[:, 0], states[1], phi)
        assert_at_most(np.abs(np.ldexp(out, -size) - want), 1e-4 * np.abs(want).max())

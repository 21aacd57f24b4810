"""Attention is linear in the values: what is right at 1 is right at 1e-25, whatever the keys.

Where early keys lie far below late ones, the weights of early rows are small on any scale that
they share with late ones, and their products with small values leave the range of a float first.
"""

# Tests call with star arguments.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc"

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import linattn
from linattn import reference
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

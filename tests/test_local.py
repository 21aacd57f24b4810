"""Softmax attention of a sliding window, and with biases of offsets, against the dense oracle."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn._driver import softmax
from linattn.reference import softmax_attention
from tests.option_draws import Case
from tests.pairs import offsets
from tests.test_fuzz_options import check_forward, check_gradient


def in_window(length, size):
    """Which key j query i sees, (L, L)."""
    left, right = size if isinstance(size, tuple) else (size, size)
    apart = offsets(length)
    seen = apart >= -(length if left is None else left)
    return seen & (apart <= (length if right is None else right))


def read_in_runs(monkeypatch, max_pairs):
    """Let windows be long ones, whose keys are read run by run."""
    monkeypatch.setattr(softmax, "MAX_PAIRS", max_pairs)
    monkeypatch.setattr(softmax, "LONG_ROWS", 32)


@given(data=st.data())
@settings(max_examples=15)
def test_windows_of_a_backend(draws, data):
    """Logits of any size, masked keys, groups of few tokens: the first and last windows too."""
    length = data.draw(st.integers(1, 150), label="length")
    size = data.draw(st.tuples(st.integers(0, 170), st.integers(0, 170)), label="size")
    scale = data.draw(st.sampled_from([0.3, 3.0, 20.0]), label="scale")
    dtype, bound = data.draw(st.sampled_from([(np.float32, 3e-6), (np.float64, 1e-13)]))
    is_causal, is_masked = data.draw(st.booleans()), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(draws.seeds))
    query, key, value = rng.standard_normal((3, 2, 1, length, 5)).astype(dtype)
    query, value = query * dtype(scale), rng.standard_normal((2, 3, length, 4)).astype(dtype)
    key_mask = rng.random((2, 1, length)) < (0.7 if is_masked else 2.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(softmax, "MAX_TOKENS", 64)
        out = linattn.softmax_attention(
            query, key, value, is_causal=is_causal, key_mask=key_mask, local_window_size=size
        )
    visible = in_window(length, (size[0], 0 if is_causal else size[1]))
    doubles = [x.astype(np.float64) for x in (query, key, value)]
    expected = softmax_attention(*doubles, key_mask=key_mask, visible=visible)
    largest = np.abs(query @ np.swapaxes(key, -1, -2)).max()
    assert_allclose(out, expected, rtol=0, atol=bound * max(1.0, largest))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_large_logits_stay_with_the_backend(is_causal):
    """Neither hidden keys nor places beyond the first one set the scale of what is seen."""
    rng = np.random.default_rng(14)
    query, key, value = rng.standard_normal((3, 300, 6)).astype(np.float32)
    query[:, 0], key[:, 0], key[40::37, 0] = 10, -50, 50
    with linattn.explain() as report:
        out = linattn.softmax_attention(query, key, value, is_causal=is_causal, local_window_size=9)
    assert report.ran("band_block") == {"linattn_numpy"}
    visible = in_window(300, (9, 0 if is_causal else 9))
    doubles = [x.astype(np.float64) for x in (query, key, value)]
    assert_allclose(out, softmax_attention(*doubles, visible=visible), rtol=0, atol=3e-4)


@pytest.mark.parametrize("window", [None, 30])
def test_causal_blocks_stay_with_the_backend(window):
    """Also where queries see no key because those before them are masked, or large logits."""
    rng = np.random.default_rng(15)
    query, key, value = rng.standard_normal((3, 2, 300, 6)).astype(np.float32)
    query[1] *= 40
    mask = np.arange(300) % 50 > 34
    with linattn.explain() as report:
        out = linattn.softmax_attention(
            query, key, value, is_causal=True, local_window_size=window, key_mask=mask
        )
    assert report.ran("band_block") == {"linattn_numpy"}
    assert report.ran("exact_block") == set()
    doubles = [x.astype(np.float64) for x in (query, key, value)]
    visible = in_window(300, (window or 300, 0))
    expected = softmax_attention(*doubles, key_mask=mask, visible=visible)
    assert np.any(out == 0)
    assert_array_equal(out == 0, expected == 0)
    assert_allclose(out, expected, rtol=0, atol=3e-4)


@pytest.mark.frameworks
def test_traced():
    jax = pytest.importorskip("jax")
    query, key, value = np.random.default_rng(2).standard_normal((3, 2, 70, 8))
    bias = np.random.default_rng(3).standard_normal((2, 9))

    def attend(*arrays):
        *qkv, bias = arrays
        return linattn.softmax_attention(
            *qkv, is_causal=True, local_window_size=12, window_bias=bias
        )

    arrays = [jax.numpy.asarray(x, dtype="float32") for x in (query, key, value, bias)]
    out = jax.jit(attend)(*arrays)
    assert_allclose(np.asarray(out), attend(query, key, value, bias), rtol=0, atol=3e-6)


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
@pytest.mark.parametrize("options", [{}, {"window_bias": np.linspace(-1, 1, 21)}])
def test_what_a_query_does_not_see_does_not_reach_it(backend, options):
    """NaN and inf in keys and values: rows that see them only, and -inf in a bias is not seen."""
    rng = np.random.default_rng(4)
    query, key, value = rng.standard_normal((3, 200, 6))
    expected = linattn.softmax_attention(query, key, value, local_window_size=(9, 4), **options)
    key[50, 0], value[100, 1], value[150, 2] = np.nan, np.inf, -np.inf
    with linattn.config() if backend else linattn.without_backends():
        out = linattn.softmax_attention(query, key, value, local_window_size=(9, 4), **options)
        bias = np.where(np.abs(np.arange(-9, 10)) == 3, -np.inf, 0.0)
        holes = linattn.softmax_attention(query, key, value, local_window_size=9, window_bias=bias)
    sees = in_window(200, (9, 4))
    assert_array_equal(out[sees[:, 50]], np.nan)
    assert_array_equal(out[sees[:, 100], 1], np.inf)
    assert_array_equal(out[sees[:, 150], 2], -np.inf)
    touched = np.isnan(expected)
    touched[sees[:, 50]], touched[sees[:, 100], 1], touched[sees[:, 150], 2] = True, True, True
    assert_allclose(out[~touched], expected[~touched], rtol=1e-12, atol=1e-13)
    assert_array_equal(np.isinf(holes[95:106, 1]), np.abs(np.arange(-5, 6)) != 3)


# Biases of the field ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
@pytest.mark.parametrize("size", [1.0, 1e-20], ids=["values", "small values"])
@pytest.mark.parametrize("window", [(9, 4), (150, 20)])
def test_hidden_keys_of_any_size_take_nothing(backend, size, window, monkeypatch):
    """Logits of hundreds beside the window: its weights do not underflow on their scale."""
    if window[0] > 100:
        read_in_runs(monkeypatch, 2**12)
    query, key, value = np.random.default_rng(10).standard_normal((3, 300, 6)).astype(np.float32)
    query[:, 0], key[::37, 0] = 4, np.linspace(5, 100, 9)
    value = np.float32(size) * value
    with linattn.config() if backend else linattn.without_backends():
        out = linattn.softmax_attention(query, key, value, local_window_size=window)
    doubles = [x.astype(np.float64) for x in (query, key, value)]
    expected = softmax_attention(*doubles, visible=in_window(300, window))
    assert_allclose(out / np.float64(size), expected / size, rtol=0, atol=2e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_blocks_of_far_keys_have_the_bias_of_their_side(is_causal, monkeypatch):
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 300, 4))
    bias = np.random.default_rng(1).standard_normal((2, 9))
    read_in_runs(monkeypatch, 1500)
    logits = query @ np.swapaxes(key, -1, -2) / 2 + bias[:, np.clip(offsets(300), -4, 4) + 4]
    weights = np.exp(np.where(is_causal & (offsets(300) > 0), -np.inf, logits))
    out = linattn.softmax_attention(query, key, value, is_causal=is_causal, window_bias=bias)
    assert_allclose(out, weights @ value / weights.sum(axis=-1, keepdims=True), rtol=0, atol=1e-13)


def test_biases_of_queries_at_the_last_positions():
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 300, 4))
    options = {"local_window_size": 5, "is_causal": "lower_right", "window_bias": np.arange(9) / 3}
    assert (
        check_forward(Case(0, "softmax", query[:, :200], key, value, None, options)) == "compared"
    )


@pytest.mark.parametrize("window", [(1, 0), (1, 3)])
def test_gradients_where_one_row_of_a_block_sees_the_keys_before_it(window):
    """The first query of a block is the last that sees some keys."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 130, 4))
    case = Case(0, "softmax", query, key, value, None, {"local_window_size": window})
    assert check_gradient(case) == "compared"


def test_memory_does_not_grow_with_length_or_window():
    peaks = []
    for length, window in ((4096, 64), (16_384, 64), (16_384, 1024)):
        query, key, value = np.zeros((3, length, 16), dtype=np.float32)
        tracemalloc.start()
        linattn.softmax_attention(query, key, value, local_window_size=(window, 0))
        peaks.append(tracemalloc.get_traced_memory()[1] - query.nbytes)
        tracemalloc.stop()
    assert max(peaks) < 2 * min(peaks) + 4e6


QKV = np.zeros((3, 2, 8, 4))
MISTAKES = [
    ({"local_window_size": -1}, ValueError, r"local_window_size.0. must be at least 0, got -1"),
    ({"local_window_size": 2.0}, TypeError, r"local_window_size.0. must be an integer .*got 2.0"),
    ({"local_window_size": (1, 2, 3)}, ValueError, r"a pair \(left, right\), got \(1, 2, 3\)"),
    ({"window_bias": np.zeros(4)}, ValueError, r"last axis of 2 r \+ 1.*got \(4,\)"),
    ({"window_bias": np.zeros((3, 5))}, ValueError, r"window_bias must broadcast .*\(2,\), got"),
    ({"window_bias": np.full(3, np.nan)}, ValueError, "window_bias must hold no NaN"),
    ({"window_bias": np.zeros(3, int)}, TypeError, "window_bias must have dtype float16"),
    ({"window_bias": [0.0]}, TypeError, "window_bias must be an array"),
    ({"far_bias": (0, 0)}, ValueError, "far_bias needs window_bias"),
    ({"window_bias": np.zeros(3), "far_bias": 1.0}, TypeError, "far_bias must be a pair"),
    ({"window_bias": np.zeros(3), "far_bias": (0, np.nan)}, ValueError, "must be a finite number"),
    ({"window_bias": np.zeros(3), "far_bias": (0, np.zeros(3))}, ValueError, r"far_bias.1. must"),
    ({"return_log_normalizer": 1}, TypeError, "return_log_normalizer must be True or False"),
]


@pytest.mark.parametrize(("options", "error", "message"), MISTAKES)
def test_mistakes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        linattn.softmax_attention(*QKV, **options)


@pytest.mark.parametrize("name", ["local_window_size", "window_bias"])
def test_both_are_of_one_sequence(name):
    option = {name: 3 if name == "local_window_size" else np.zeros(3)}
    with pytest.raises(ValueError, match=f"under {name} query and key must have equal length"):
        linattn.softmax_attention(QKV[0][:, :5], QKV[1], QKV[2], **option)

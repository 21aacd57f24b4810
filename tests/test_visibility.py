"""Visible prefixes, packed sequences and lengths: against the oracle with the mask of all pairs."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import reference
from linattn._driver.problem import linear_problem
from linattn._driver.runner import planned
from linattn.feature_maps import (
    CosformerFeatures,
    LandmarkFeatures,
    PositiveFeatures,
)
from linattn_numpy import planning
from tests.entries import saying

DIM, VALUE_DIM = 4, 3
PHI = PositiveFeatures(DIM, 8, rng=1)


def inputs(length, num_keys=None, *, lead=(2,), seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(length, DIM), *((num_keys or length, d) for d in (DIM, VALUE_DIM))]
    # Numbers that float16 holds.
    return [rng.standard_normal((*lead, *s)).astype(np.float16).astype(float) for s in shapes]


# Against the oracle -----------------------------------------------------------------------------


def test_the_first_query_of_a_block_may_miss_its_last_key(numpy_path):
    arrays = inputs(2, 9)
    out, pullback = linattn.softmax_attention_vjp(*arrays, key_stop=[8, 9])
    visible = np.arange(9) < np.array([[8], [9]])
    expected = reference.softmax_attention(*arrays, visible=visible)
    assert_allclose(out, expected, rtol=1e-11, atol=1e-11)
    grad = np.zeros_like(out)
    grad[..., 0, :] = 1
    for gradient in pullback(grad)[1:]:
        assert_array_equal(gradient[..., 8, :], 0)


def _block_stops(length, block, reach):
    """Blocks of queries, of which the second half sees some keys of the next block too."""
    place = np.arange(length)
    stops = block * (place // block + 1) + reach * (place % block >= block // 2)
    return np.minimum(stops, length)


@pytest.mark.parametrize(
    ("length", "block", "reach", "options"),
    [
        (400, 8, 0, {}),
        (400, 24, 5, {}),
        (120, 12, 3, {"exact_window": 2}),
        (120, 12, 0, {"exact_window": 2, "far_bias": -np.inf}),
        (120, 40, 9, {"exact_window": 20, "far_bias": -np.inf}),
    ],
)
def test_nan_in_keys_that_a_row_does_not_see_leaves_no_trace(
    numpy_path, length, block, reach, options
):
    stops, arrays = _block_stops(length, block, reach), inputs(length, lead=())
    place, w = np.arange(length), options.get("exact_window")
    seen = place < stops[:, None]
    if "far_bias" in options:
        far = (options["far_bias"],) * 2
        options = {**options, "window_bias": np.zeros(2 * w + 1), "far_bias": far}
        seen &= (abs(place - place[:, None]) <= w) & (abs(place // w - place[:, None] // w) <= 1)
    options = {"key_stop": stops, **options}
    clean = linattn.linear_attention(*arrays, PHI, **options)
    for key in range(1, length, 23):
        for side in (1, 2):
            poisoned = [x.copy() for x in arrays]
            poisoned[side][key] = np.nan
            out = linattn.linear_attention(*poisoned, PHI, **options)
            assert_array_equal(out[seen[:, key]], np.nan)
            assert_allclose(out[~seen[:, key]], clean[~seen[:, key]], rtol=1e-9, atol=1e-12)


# Gradients --------------------------------------------------------------------------------------


def test_gradients_that_heads_share_are_rounded_once():
    """Each head has its own stops; the queries are one for all."""
    query, key, value = (x.astype(np.float32) for x in inputs(20, lead=(6,)))
    rng = np.random.default_rng(3)
    stops = np.sort(rng.integers(1, 21, (6, 20)), axis=-1)
    grad = rng.standard_normal(value.shape).astype(np.float16)
    found = []
    for dtype in (np.float16, np.float32):
        arrays = (x.astype(dtype) for x in (query[:1], key, value))
        _, pullback = linattn.linear_attention_vjp(*arrays, PHI, key_stop=stops)
        found.append(pullback(grad.astype(dtype))[:3])
    for narrow, wide in zip(*found, strict=True):
        assert_array_equal(narrow, wide.astype(np.float16))


def test_gradients_of_many_steps_are_those_of_few(numpy_path):
    """More steps than states are held: some are made again."""
    arrays = inputs(420, lead=())
    stops = np.minimum(7 * (np.arange(420) // 7 + 1), 420)
    grad = np.random.default_rng(1).standard_normal((420, VALUE_DIM))
    for phi in (PHI, CosformerFeatures(DIM, max_length=2000)):
        pulled = [
            linattn.linear_attention_vjp(*arrays, phi, key_stop=stops, chunk_size=size)[1](grad)
            for size in (2, None)
        ]
        for one, other in zip(*pulled, strict=True):
            assert_allclose(one, other, rtol=1e-9, atol=1e-11)


# Cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"prefix_length": 3000}, {"causal_block": 3}], ids=str)
def test_memory_does_not_grow_with_the_length(options):
    peaks = []
    for length in (1 << 12, 1 << 13):
        arrays = [a.astype(np.float32) for a in inputs(length, lead=(1,))]
        tracemalloc.start()
        linattn.linear_attention(*arrays, PHI, chunk_size=64, **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # What grows: the output, 12 bytes a token, and integers of the host, 8 a stop.
    assert peaks[1] - peaks[0] < 150 * (1 << 12), peaks


def test_short_sequences_are_batched():
    """As many calls of blocks for a thousand sequences as for ten batches."""
    borders = np.arange(0, 5001, 5)
    arrays = inputs(5000)
    with linattn.explain() as report:
        linattn.linear_attention(*arrays, PHI, cu_seqlens=borders, is_causal=True)
    assert sum(choice.calls for choice in report.choices) < 100


# No backend leaves out what it does not support -------------------------------------------------


def test_no_whole_function_is_given_stops_or_borders(monkeypatch):
    """Whatever a backend does with whole problems: these it sees as others, or not at all."""
    seen = []

    def attention(problem):
        seen.append(problem)
        return NotImplemented

    import linattn_numpy

    monkeypatch.setattr(linattn_numpy, "attention", attention, raising=False)
    arrays = inputs(12)
    linattn.linear_attention(*arrays, PHI, cu_seqlens=[0, 4, 12])
    assert [problem.sees.cu_seqlens for problem in seen] == [None]
    seen.clear()
    with linattn.explain() as report:
        linattn.linear_attention(*arrays, PHI, causal_block=4)
    assert seen == []
    assert "key_stop" in str(report)
    linattn.linear_attention(*arrays, PHI, causal_block=1)
    assert [problem.sees.is_causal for problem in seen] == [True]


# Errors -----------------------------------------------------------------------------------------

STOP_OF_THREE = [1, 2, 3]
ERRORS: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"is_causal": "upper_left"}, TypeError, ["is_causal", "lower_right", "upper_left"]),
    ({"is_causal": 1}, TypeError, ["is_causal", "True, False or", "got 1;"]),
    ({"is_causal": np.tri(3, dtype=bool)}, TypeError, ["got ndarray; .* key_stop"]),
    ({"key_stop": [2, 1, 3]}, ValueError, ["key_stop must not decrease", "2 and then 1 at 1"]),
    ({"key_stop": [1, 2, 4]}, ValueError, ["key_stop", "between 0 and", "3", "got 4$"]),
    ({"key_stop": [-1, 2, 3]}, ValueError, ["key_stop", "between 0 and", "got -1$"]),
    ({"key_stop": [1, 2]}, ValueError, ["key_stop", r"shape \(3,\)", r"got shape \(2,\)"]),
    ({"key_stop": 3}, ValueError, ["key_stop", "one for each query"]),
    ({"key_stop": [1.0, 2, 3]}, TypeError, ["key_stop must be integers", "float64"]),
    ({"key_stop": "abc"}, TypeError, ["key_stop must be integers"]),
    (
        {"key_stop": [STOP_OF_THREE, STOP_OF_THREE, [0, 0, 0]]},
        ValueError,
        ["leading axes of key_stop", r"\(2,\)", r"\(3,\)", "share a state"],
    ),
    (
        {"key_stop": STOP_OF_THREE, "is_causal": True},
        ValueError,
        ["at most one of", "is_causal and key_stop"],
    ),
    (
        {"prefix_length": 1, "causal_block": 2},
        ValueError,
        ["at most one of", "prefix_length and causal_block"],
    ),
    ({"prefix_length": 4}, ValueError, ["prefix_length", "between 0 and", "3, got 4$"]),
    ({"prefix_length": 1.5}, TypeError, ["prefix_length must be integers"]),
    ({"causal_block": 0}, ValueError, ["causal_block", "at least 1"]),
    ({"causal_block": True}, TypeError, ["causal_block", "a positive integer"]),
    ({"cu_seqlens": [1, 3]}, ValueError, ["cu_seqlens", "from 0", "3", r"\[1, 3\]"]),
    ({"cu_seqlens": [0, 2]}, ValueError, ["cu_seqlens", "from 0", r"\[0, 2\]"]),
    ({"cu_seqlens": [0, 2, 1, 3]}, ValueError, ["cu_seqlens must rise", "cumulative sum"]),
    ({"cu_seqlens": [[0, 3], [0, 3]]}, ValueError, ["cu_seqlens", r"\(n \+ 1,\)", "alike"]),
    ({"cu_seqlens": [0]}, ValueError, ["cu_seqlens", r"\(n \+ 1,\)"]),
    ({"cu_seqlens": [0.0, 3]}, TypeError, ["cu_seqlens must be integers"]),
    (
        {"cu_seqlens": [0, 3], "key_stop": [1, 1, 1]},
        ValueError,
        ["cu_seqlens must be None with key_stop", "one sequence"],
    ),
    ({"key_lengths": 4}, ValueError, ["key_lengths", "between 0 and", "3", "got 4$"]),
    ({"key_lengths": [1.0, 2.0]}, TypeError, ["key_lengths must be integers"]),
    ({"key_lengths": [1, 2, 3]}, ValueError, ["key_lengths", r"\(2,\)", r"got shape \(3,\)"]),
]


@pytest.mark.parametrize(("options", "kind", "words"), ERRORS, ids=lambda x: str(x)[:40])
def test_errors(options, kind, words):
    for attend in (partial(linattn.linear_attention, feature_map=PHI), linattn.softmax_attention):
        with pytest.raises(kind, match=saying(*words)):
            attend(*inputs(3), **options)


def test_errors_of_what_does_not_go_together():
    arrays = inputs(8)
    landmarks = LandmarkFeatures.fit(*arrays[:2], num_features=4, rng=0)
    with pytest.raises(ValueError, match=saying("exact_clusters must be None with causal_block")):
        linattn.linear_attention(*arrays, landmarks, causal_block=2, exact_clusters=4)
    with pytest.raises(ValueError, match=saying("exact_clusters must be None with cu_seqlens")):
        linattn.linear_attention(*arrays, landmarks, exact_clusters=2, cu_seqlens=[0, 8])
    for options in ({"prefix_length": 3}, {"is_causal": "lower_right"}, {"is_causal": True}):
        with pytest.raises(ValueError, match=saying(next(iter(options)), "leak later keys")):
            linattn.linear_attention(*arrays, landmarks, **options)
    short = [a[..., :5, :] for a in arrays]
    for name in ("prefix_length", "causal_block", "cu_seqlens"):
        option = {name: [0, 8] if name == "cu_seqlens" else 2}
        with pytest.raises(ValueError, match=saying(name, "equal length", "5")):
            linattn.linear_attention(short[0], *arrays[1:], PHI, **option)
    with pytest.raises(ValueError, match=saying("is_causal", "equal length", "lower_right")):
        linattn.linear_attention(short[0], *arrays[1:], PHI, is_causal=True)
    state = linattn.init_state(PHI, VALUE_DIM, batch_shape=(2,), like=arrays[0])
    with pytest.raises(ValueError, match=saying("initial_state", "first axis of 3", "cu_seqlens")):
        linattn.linear_attention(*arrays, PHI, cu_seqlens=[0, 1, 2, 8], initial_state=state)


@pytest.mark.frameworks
def test_traced_stops_are_an_error():
    jax = pytest.importorskip("jax")
    arrays = [jax.numpy.asarray(a) for a in inputs(8)]

    def call(stops):
        return linattn.linear_attention(*arrays, PHI, key_stop=stops)

    with pytest.raises(TypeError, match=saying("key_stop must have values", "traced")):
        jax.jit(call)(jax.numpy.arange(8))


@pytest.mark.parametrize("length", [4096, 4000])
def test_heads_are_batched_by_the_longest_run_of_stops(length):
    x = np.zeros((8, length, 64), np.float32)
    phi = PositiveFeatures(64, 256, rng=0)

    def num_tasks(**options):
        with linattn.config(num_threads=1):
            problem = planned(linear_problem(x, x, x, phi, **options))
            return len(planning.plan(problem).tasks)

    assert num_tasks(causal_block=128) < num_tasks(causal_block=16) == num_tasks(is_causal=True)

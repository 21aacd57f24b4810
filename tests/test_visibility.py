"""Visible prefixes, packed sequences and lengths: against the oracle with the mask of all pairs."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import itertools
import tracemalloc
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import reference
from linattn._driver.problem import linear_problem
from linattn._driver.runner import planned
from linattn._driver.steps import MIN_RUN
from linattn.feature_maps import (
    CosformerFeatures,
    LandmarkFeatures,
    PositiveFeatures,
    RotatedFeatures,
)
from linattn.testing import assert_gradient
from linattn_numpy import planning
from tests.attentions import maps
from tests.entries import saying

DIM, VALUE_DIM = 4, 3
MAPS: dict[str, Any] = {
    **maps(DIM, 8, "positive", "elu", "relu", "softmax", rng=1),
    "cosformer": CosformerFeatures(DIM, max_length=2000),
    "exact": None,
}
PHI = MAPS["positive"]
BOUNDS = {"float64": 1e-11, "float32": 3e-5, "float16": 5e-3}

every_map = pytest.mark.parametrize("name", MAPS)


def inputs(length, num_keys=None, *, lead=(2,), seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(length, DIM), *((num_keys or length, d) for d in (DIM, VALUE_DIM))]
    # Numbers that float16 holds.
    return [rng.standard_normal((*lead, *s)).astype(np.float16).astype(float) for s in shapes]


def attend(name, query, key, value, **options):
    if name == "exact":
        options.pop("chunk_size", None)
        return linattn.softmax_attention(query, key, value, **options)
    return linattn.linear_attention(query, key, value, MAPS[name], **options)


def oracle(name, query, key, value, visible):
    if name == "exact":
        return reference.softmax_attention(query, key, value, visible=visible)
    if name != "softmax":
        return reference.kernel_attention(query, key, value, MAPS[name], visible=visible)
    # Its weights depend on which keys are seen: each query by itself.
    assert visible.ndim == 2
    rows = [
        reference_of_softmax_features(query[..., i, :], key[..., sees, :], value[..., sees, :])
        for i, sees in enumerate(visible)
    ]
    return np.stack(rows, axis=-2) if rows else np.zeros_like(value)


def reference_of_softmax_features(query, key, value):
    """Softmax over features for the query, over the keys for each feature."""
    if key.shape[-2] == 0:
        return np.zeros(value.shape[:-2] + value.shape[-1:])
    query = np.exp(query) / np.exp(query).sum(axis=-1, keepdims=True)
    key = np.exp(key) / np.exp(key).sum(axis=-2, keepdims=True)
    return np.einsum("...d,...sd,...se->...e", query, key, value)


def prefixes(stops, num_keys):
    return np.arange(num_keys) < np.asarray(stops)[..., None]


def sequences(borders, is_causal):
    """Pairs of tokens of one sequence."""
    place = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
    same = place[:, None] == place
    return same & (np.tri(len(place), dtype=bool) if is_causal else True)


# Lengths, on either side of what goes along on common positions, and their stops.
POSITION = np.arange(37)
STOPS = {
    "prefix": ({"prefix_length": 9}, np.maximum(9, POSITION + 1), 37),
    "no prefix": ({"prefix_length": 0}, POSITION + 1, 37),
    "all a prefix": ({"prefix_length": 37}, POSITION * 0 + 37, 37),
    "blocks": ({"causal_block": 8}, np.minimum(8 * (POSITION // 8 + 1), 37), 37),
    "a block": ({"causal_block": 99}, POSITION * 0 + 37, 37),
    "lower right": ({"is_causal": "lower_right"}, POSITION + 1 + 13, 50),
    "upper right": ({"is_causal": "lower_right"}, np.maximum(POSITION + 1 - 17, 0), 20),
    "lower right, square": ({"is_causal": "lower_right"}, POSITION + 1, 37),
    "two keys a query": ({"key_stop": 2 * POSITION}, 2 * POSITION, 80),
    "two queries a key": ({"key_stop": list(POSITION // 2)}, POSITION // 2, 18),
    "a jump": ({"key_stop": POSITION + 90 * (POSITION > 20)}, POSITION + 90 * (POSITION > 20), 130),
    "nothing": ({"key_stop": POSITION * 0}, POSITION * 0, 5),
}
every_stop = pytest.mark.parametrize("case", STOPS)
BORDERS = [[0, 5, 5, 8, 11, 20], [0, 7], [0, 4, 8, 12], [0, 0, 0], [0, 300, 302, 304, 304, 571]]


# Against the oracle -----------------------------------------------------------------------------


@every_stop
@every_map
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_stops(numpy_path, name, case, chunk_size):
    options, stops, num_keys = STOPS[case]
    arrays = inputs(len(stops), num_keys)
    out = attend(name, *arrays, **options, chunk_size=chunk_size)
    # The last query stands where the last key does: zeros before the shorter side.
    ahead = num_keys - len(stops) if "right" in case else 0
    of_query, of_key = max(ahead, 0), max(-ahead, 0)
    padded = [
        np.pad(array, [(0, 0), (before, 0), (0, 0)])
        for array, before in zip(arrays, (of_query, of_key, of_key), strict=True)
    ]
    visible = np.pad(prefixes(stops, num_keys), [(of_query, 0), (of_key, 0)])
    expected = oracle(name, *padded, visible)[..., of_query:, :]
    assert_allclose(out, expected, rtol=1e-11, atol=1e-11)
    assert_array_equal(out[..., stops == 0, :], 0)


def test_the_first_query_of_a_block_may_miss_its_last_key(numpy_path):
    arrays = inputs(2, 9)
    out, pullback = linattn.softmax_attention_vjp(*arrays, key_stop=[8, 9])
    assert_allclose(out, oracle("exact", *arrays, prefixes([8, 9], 9)), rtol=1e-11, atol=1e-11)
    grad = np.zeros_like(out)
    grad[..., 0, :] = 1
    for gradient in pullback(grad)[1:]:
        assert_array_equal(gradient[..., 8, :], 0)


@every_map
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("borders", BORDERS, ids=str)
def test_packed(numpy_path, name, borders, is_causal):
    arrays = inputs(borders[-1])
    out = attend(name, *arrays, cu_seqlens=borders, is_causal=is_causal)
    if name == "cosformer":
        # Each sequence has positions of its own.
        parts = [[a[..., i:j, :] for a in arrays] for i, j in itertools.pairwise(borders)]
        expected = np.concatenate(
            [reference.kernel_attention(*part, MAPS[name], is_causal=is_causal) for part in parts],
            axis=-2,
        )
    else:
        expected = oracle(name, *arrays, sequences(borders, is_causal))
    assert_allclose(out, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["positive", "exact"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_in_every_library(xp, name, dtype):
    """Stops of two heads that differ, packed sequences of lengths that do, and lengths of keys."""
    host = inputs(9, 12)
    stops = np.sort(np.random.default_rng(3).integers(0, 13, (2, 9)), axis=-1)
    lengths = np.array([4, 12])
    borders = [0, 4, 7, 7, 9]
    packed = [host[0], *(a[..., :9, :] for a in host[1:])]
    cases = [
        ({"key_stop": stops}, host, prefixes(stops, 12)),
        ({"key_lengths": xp.array(lengths)}, host, prefixes(np.repeat(lengths[:, None], 9, 1), 12)),
        ({"cu_seqlens": borders}, packed, sequences(borders, False)),
        ({"cu_seqlens": borders, "is_causal": True}, packed, sequences(borders, True)),
    ]
    for options, inputs_of_case, visible in cases:
        arrays = [xp.array(a, dtype) for a in inputs_of_case]
        out, norm = attend(name, *arrays, **options, return_log_normalizer=True)
        xp.assert_like(out, arrays[0], shape=(2, 9, VALUE_DIM))
        assert tuple(norm.shape) == (2, 9)
        expected = oracle(name, *inputs_of_case, visible)
        assert_allclose(xp.numpy(out), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
        empty = ~np.broadcast_to(visible, (2, *visible.shape[-2:])).any(axis=-1)
        assert_array_equal(xp.numpy(norm)[empty], -np.inf)


@given(data=st.data())
def test_any_stops(data):
    """Runs of keys and of queries of every length, beside masks, states and broadcast heads."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    length, num_keys = data.draw(st.integers(0, 150)), data.draw(st.integers(1, 150))
    few = data.draw(st.integers(1, num_keys + 1))
    stops = np.sort(rng.choice(num_keys + 1, few, replace=False)[rng.integers(0, few, length)])
    query, key, value = inputs(length, num_keys, seed=int(rng.integers(1000)))
    key = key[:1]
    mask = rng.random(num_keys) < 0.8
    options = {"key_mask": mask, "chunk_size": data.draw(st.sampled_from([None, 3, 40]))}
    with nullcontext() if data.draw(st.booleans()) else linattn.without_backends():
        out, state = linattn.linear_attention(
            query, key, value, PHI, key_stop=stops, return_state=True, **options
        )
        _, whole = linattn.linear_attention(
            query, key, value, PHI, key_mask=mask, return_state=True
        )
    visible = prefixes(stops, num_keys)
    expected = reference.kernel_attention(query, key, value, PHI, key_mask=mask, visible=visible)
    assert_allclose(out, expected, rtol=1e-11, atol=1e-11)
    assert_same_state(state, whole)


def assert_same_state(first, second, **tolerances):
    kvz = [
        s.kvz * np.exp(np.where(s.log_scale == -np.inf, 0, s.log_scale))[..., None]
        for s in (first, second)
    ]
    assert_allclose(*kvz, **{"rtol": 1e-11, "atol": 1e-12, **tolerances})
    assert first.length == second.length


# What sees what ---------------------------------------------------------------------------------


@every_stop
@pytest.mark.parametrize("scale", [1, 30])
def test_a_changed_key_moves_no_query_that_does_not_see_it(numpy_path, case, scale):
    """Also where keys are of sizes that reject a block, and the change is NaN."""
    options, stops, num_keys = STOPS[case]
    query, key, value = (a.astype(np.float32) for a in inputs(len(stops), num_keys))
    key = key * np.float32(scale)
    before = linattn.linear_attention(query, key, value, PHI, **options)
    for j in sorted({0, num_keys // 2, num_keys - 1}):
        for change in (10.0, np.nan):
            changed = key.copy()
            changed[:, j] += change
            out = linattn.linear_attention(query, changed, value, PHI, **options)
            unseen = stops <= j
            assert_allclose(out[:, unseen], before[:, unseen], rtol=2e-4, atol=2e-5)
            if np.isnan(change):
                assert_array_equal(out[:, ~unseen], np.nan)


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_do_not_meet(numpy_path, is_causal):
    borders = [0, 5, 5, 8, 11, 20]
    arrays = inputs(20)
    before = linattn.linear_attention(*arrays, PHI, cu_seqlens=borders, is_causal=is_causal)
    for start, stop in itertools.pairwise(borders):
        changed = [a.copy() for a in arrays]
        for array in changed:
            array[..., start:stop, :] = np.nan
        out = linattn.linear_attention(*changed, PHI, cu_seqlens=borders, is_causal=is_causal)
        others = np.delete(np.arange(20), slice(start, stop))
        assert_allclose(out[..., others, :], before[..., others, :], rtol=1e-12, atol=1e-13)
        assert_array_equal(out[..., start:stop, :], np.nan)


def test_lengths_are_masks(numpy_path):
    arrays = inputs(6, lead=(3, 2))
    for array in arrays[1:]:
        array[0, :, 2:] = np.nan
    lengths = np.array([2, 6, 0])[:, None]
    mask = np.arange(6) < lengths[..., None]
    for options in ({}, {"is_causal": True}, {"key_mask": np.arange(6) != 1}):
        both = {**options, "key_mask": mask & options.get("key_mask", True)}
        for name in ("positive", "exact"):
            out = attend(name, *arrays, key_lengths=lengths, **options)
            assert_array_equal(out, attend(name, *arrays, **both))
    empty = linattn.init_state(PHI, VALUE_DIM, batch_shape=(3, 2), like=arrays[1])
    some, masked = (
        linattn.update_state(empty, *arrays[1:], PHI, **option)
        for option in ({"key_lengths": lengths}, {"key_mask": mask})
    )
    assert_array_equal(some.kvz, masked.kvz)
    assert_array_equal(
        linattn.linear_attention(*arrays, PHI, key_lengths=2),
        linattn.linear_attention(*arrays, PHI, key_mask=np.arange(6) < 2),
    )


def test_beside_windows_and_biases(numpy_path):
    """Packed sequences have windows of their own, keys of every kind of attention a bias."""
    borders = [0, 5, 5, 9, 13, 40]
    arrays = inputs(40)
    bias = np.random.default_rng(1).standard_normal((2, 40))
    parts = [slice(*pair) for pair in itertools.pairwise(borders)]

    def one_by_one(function, **options):
        return np.concatenate(
            [
                function(*(a[..., rows, :] for a in arrays), **options, key_bias=bias[..., rows])
                for rows in parts
            ],
            axis=-2,
        )

    for is_causal in (False, True):
        for function, window in (
            (lambda *a, **o: linattn.linear_attention(*a, PHI, **o), {"exact_window": 4}),
            (linattn.softmax_attention, {"local_window_size": 3}),
            (linattn.softmax_attention, {"window_bias": bias[:, :7]}),
        ):
            options = {"is_causal": is_causal, **window}
            out = function(*arrays, **options, key_bias=bias, cu_seqlens=borders)
            assert_allclose(out, one_by_one(function, **options), rtol=1e-11, atol=1e-12)
    stops = np.minimum(3 * (np.arange(40) // 3 + 1), 40)
    visible = prefixes(stops, 40)
    for name in ("positive", "exact"):
        out = attend(name, *arrays, key_stop=stops, key_bias=bias)
        weights = {"visible": visible, "bias": bias[:, None, :]}
        if name == "exact":
            expected = reference.softmax_attention(*arrays, **weights)
        else:
            expected = reference.kernel_attention(*arrays, PHI, **weights)
        assert_allclose(out, expected, rtol=1e-11, atol=1e-12)


# States -----------------------------------------------------------------------------------------


@every_stop
@pytest.mark.parametrize("name", ["positive", "softmax"])
def test_an_initial_state_is_seen_by_all(numpy_path, name, case):
    options, stops, num_keys = STOPS[case]
    query, key, value = inputs(len(stops), num_keys + 6)
    phi, rest = MAPS[name], (key[..., 6:, :], value[..., 6:, :])
    state = linattn.init_state(phi, VALUE_DIM, batch_shape=(2,), like=key)
    state = linattn.update_state(state, key[..., :6, :], value[..., :6, :], phi)
    out, after = linattn.linear_attention(
        query, *rest, phi, **options, initial_state=state, return_state=True
    )
    expected = oracle(name, query, key, value, prefixes(stops + 6, num_keys + 6))
    assert_allclose(out, expected, rtol=1e-11, atol=1e-11)
    assert_same_state(after, linattn.update_state(state, *rest, phi))


def test_a_prompt_and_its_answer(numpy_path):
    """Prefix-LM and lower-right causal, then a token at a time, are one sequence."""
    query, key, value = inputs(30)
    _, state = linattn.linear_attention(
        *(a[..., :20, :] for a in (query, key, value)), PHI, prefix_length=12, return_state=True
    )
    expected = oracle("positive", query, key, value, prefixes(POSITION[:30] + 1, 30))
    decoder = linattn.Decoder(PHI, state)
    for i in range(20, 30):
        out = decoder.step(query[:, i], key[:, i], value[:, i])
        assert_allclose(out, expected[:, i], rtol=1e-11, atol=1e-12)
    last = linattn.linear_attention(query[:, 20:], key, value, PHI, is_causal="lower_right")
    assert_allclose(last, expected[:, 20:], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("count", [1, 9])
def test_the_last_queries_stand_where_the_last_keys_do(numpy_path, count):
    """Maps that know positions: outputs are those of causal attention, gradients too."""
    (query, key, value), last = inputs(20), slice(20 - count, None)
    grad = np.random.default_rng(1).standard_normal((2, 20, VALUE_DIM))
    grad[:, : 20 - count] = 0
    options = {"is_causal": "lower_right"}
    for phi in (MAPS["cosformer"], RotatedFeatures(PHI)):
        whole = linattn.linear_attention(query, key, value, phi, is_causal=True)
        out = linattn.linear_attention(query[:, last], key, value, phi, **options)
        assert_allclose(out, whole[:, last], rtol=1e-10, atol=1e-12)
    phi = MAPS["cosformer"]
    wanted = linattn.linear_attention_vjp(query, key, value, phi, is_causal=True)[1](grad)
    _, pullback = linattn.linear_attention_vjp(query[:, last], key, value, phi, **options)
    found = pullback(grad[:, last])
    assert_allclose(found[0], wanted[0][:, last], rtol=1e-9, atol=1e-12)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("borders", BORDERS, ids=str)
def test_states_of_packed_sequences(numpy_path, borders, is_causal):
    """Each goes on from its own, and is what the sequence alone leaves; they merge and are read."""
    arrays = inputs(borders[-1])
    n = len(borders) - 1
    options = {"cu_seqlens": borders, "is_causal": is_causal, "return_state": True}
    _, first = linattn.linear_attention(*arrays, PHI, **options)
    assert first.kvz.shape == (n, 2, 8, VALUE_DIM + 1)
    assert first.log_scale.shape == (n, 2, 8)
    assert first.length == max(np.diff(borders))
    out, second = linattn.linear_attention(*arrays, PHI, **options, initial_state=first)
    for i, (start, stop) in enumerate(itertools.pairwise(borders)):
        part = [a[..., start:stop, :] for a in arrays]
        alone = linattn.State(first.kvz[i], first.log_scale[i], first.length)
        expected, after = linattn.linear_attention(
            *part, PHI, is_causal=is_causal, initial_state=alone, return_state=True
        )
        assert_allclose(out[..., start:stop, :], expected, rtol=1e-11, atol=1e-12)
        last = linattn.State(second.kvz[i], second.log_scale[i], after.length)
        assert_same_state(last, after)
    assert linattn.merge_states(first, second).kvz.shape == first.kvz.shape


@pytest.mark.parametrize("decay", [-0.3, [-0.1, -0.5], None], ids=["number", "heads", "tokens"])
def test_packed_sequences_decay_by_themselves(numpy_path, decay):
    borders = BORDERS[0]
    arrays = inputs(20)
    decay = np.asarray(-np.abs(inputs(20, seed=3)[2][..., 0]) if decay is None else decay)
    options = {"is_causal": True, "return_state": True}
    out, state = linattn.linear_attention(
        *arrays, PHI, **options, cu_seqlens=borders, log_decay=decay if decay.ndim else -0.3
    )
    for i, (start, stop) in enumerate(itertools.pairwise(borders)):
        part = [a[..., start:stop, :] for a in arrays]
        own: Any = decay[:, start:stop] if decay.ndim == 2 else decay
        expected, after = linattn.linear_attention(
            *part, PHI, **options, log_decay=own if decay.ndim else -0.3
        )
        assert_allclose(out[..., start:stop, :], expected, rtol=1e-11, atol=1e-12)
        last = linattn.State(state.kvz[i], state.log_scale[i], after.length)
        assert_same_state(last, after)
        assert_allclose(state.log_decay[i], after.log_decay, rtol=1e-12)


# Gradients --------------------------------------------------------------------------------------

BIAS = np.random.default_rng(7).standard_normal((2, 13))
GRADIENT_CASES: dict[str, dict[str, Any]] = {
    "prefix": {"prefix_length": 4},
    "prefixes of heads": {"prefix_length": [4, 7]},
    "blocks": {"causal_block": 3},
    "lower right": {"is_causal": "lower_right"},
    "stops": {"key_stop": [0, 0, 3, 3, 4, 9, 9, 12, 13]},
    "packed": {"cu_seqlens": [0, 4, 4, 9]},
    "packed, causal": {"cu_seqlens": [0, 3, 5, 9], "is_causal": True},
    "packed evenly": {"cu_seqlens": [0, 3, 6, 9], "is_causal": True},
    "lengths": {"key_lengths": [4, 9]},
    "stops of weighed keys": {"key_stop": [0, 0, 3, 3, 4, 9, 9, 12, 13], "key_bias": BIAS},
    "stops of heads, weighed": {"prefix_length": [4, 7], "key_bias": BIAS[:, :9]},
    "packed, weighed": {"cu_seqlens": [0, 3, 5, 9], "key_bias": BIAS[:, :9]},
}


@pytest.mark.parametrize("case", GRADIENT_CASES)
@pytest.mark.parametrize("name", ["positive", "softmax", "exact"])
def test_gradients(numpy_path, name, case):
    """By query, key, value and the initial state, against finite differences."""
    options = GRADIENT_CASES[case]
    longer = not {"prefix_length", "causal_block", "cu_seqlens", "key_lengths"} & set(options)
    arrays = inputs(9, 13 if longer else 9)
    if name == "exact":
        assert_gradient(
            lambda *a: linattn.softmax_attention(*a, **options),
            lambda *a: linattn.softmax_attention_vjp(*a, **options),
            *arrays,
            num_directions=2,
        )
        return
    phi = MAPS[name]
    state = state_before(phi, arrays[1], len(options.get("cu_seqlens", "12")) - 1, case)
    options = options | {"return_state": True}
    _, after = linattn.linear_attention(*arrays, phi, **options, initial_state=state)

    def joined(output, last):
        # States on the scale that the pullback holds constant.
        kvz = last.kvz * np.exp(last.log_scale - after.log_scale)[..., None]
        return np.concatenate([output.ravel(), kvz.ravel()])

    def function(query, key, value, kvz):
        before = state._replace(kvz=kvz)
        return joined(
            *linattn.linear_attention(query, key, value, phi, **options, initial_state=before)
        )

    def vjp(query, key, value, kvz):
        (output, last), pullback = linattn.linear_attention_vjp(
            query, key, value, phi, **options, initial_state=state._replace(kvz=kvz)
        )

        def pull(grad):
            grad_output, grad_kvz = np.split(grad, [output.size])
            return pullback(grad_output.reshape(output.shape), grad_kvz.reshape(last.kvz.shape))

        return joined(output, last), pull

    assert_gradient(function, vjp, *arrays, state.kvz, num_directions=2)


def state_before(phi, key, count, case):
    """Return a state of some keys, or one for each packed sequence."""
    empty = linattn.init_state(phi, VALUE_DIM, batch_shape=(2,), like=key)
    states = [linattn.update_state(empty, *inputs(3, seed=i + 5)[1:], phi) for i in range(count)]
    if not case.startswith("packed"):
        return states[0]
    kvz, log_scale = (np.stack([state[i] for state in states]) for i in range(2))
    return linattn.State(kvz, log_scale, 3)


def test_gradients_of_many_steps_are_those_of_few(numpy_path):
    """More steps than states are held: some are made again."""
    arrays = inputs(420, lead=())
    stops = np.minimum(7 * (np.arange(420) // 7 + 1), 420)
    grad = np.random.default_rng(1).standard_normal((420, VALUE_DIM))
    for phi in (PHI, MAPS["cosformer"]):
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
    for length in (1 << 13, 1 << 14):
        arrays = [a.astype(np.float32) for a in inputs(length, lead=(1,))]
        tracemalloc.start()
        linattn.linear_attention(*arrays, PHI, chunk_size=64, **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # What grows: the output, 12 bytes a token, and integers of the host, 8 a stop.
    assert peaks[1] - peaks[0] < 150 * (1 << 13), peaks


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
@pytest.mark.parametrize("name", ["positive", "exact"])
def test_errors(name, options, kind, words):
    with pytest.raises(kind, match=saying(*words)):
        attend(name, *inputs(3), **options)


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


def test_short_and_long_runs_are_both_tested():
    """Of the cases above: steps of their own, and common positions."""
    assert any(np.diff(stops, prepend=0).max() >= MIN_RUN for _, stops, _ in STOPS.values())
    assert max(np.diff(BORDERS[-1])) > MIN_RUN


@pytest.mark.parametrize("length", [4096, 4000])
def test_heads_are_batched_by_the_longest_run_of_stops(length):
    x = np.zeros((8, length, 64), np.float32)
    phi = PositiveFeatures(64, 256, rng=0)

    def num_tasks(**options):
        with linattn.config(num_threads=1):
            problem = planned(linear_problem(x, x, x, phi, **options))
            return len(planning.plan(problem).tasks)

    assert num_tasks(causal_block=128) < num_tasks(causal_block=16) == num_tasks(is_causal=True)

"""Problems without a head or a token: nothing to compute, and nothing that falls over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import linattn
from linattn import feature_maps
from tests.attentions import (
    DIM,
    HEADS,
    LENGTH,
    VALUE_DIM,
    every_map,
    in_library,
    maps,
    some_maps,
    state_of,
    tokens,
)

# Landmarks are read with keys that they were not fitted to, where there are any.
pytestmark = pytest.mark.filterwarnings("ignore:feature_map was fitted to other keys")

SAMPLE = np.random.default_rng(0).standard_normal((3, 8, DIM))

MAPS: dict[str, Any] = {
    **maps(DIM, 8, "elu", "relu", "softmax", "taylor", "positive", "hyperbolic"),
    **maps(DIM, 8, "trigonometric", "fourier", "activation"),
    "polynomial": feature_maps.PolynomialFeatures(DIM, 3),
    "cosformer": feature_maps.CosformerFeatures(DIM, max_length=64),
    "hedgehog": feature_maps.HedgehogFeatures(SAMPLE[0]),
    "reparametrized": feature_maps.Reparametrized(
        feature_maps.HyperbolicFeatures(DIM, 8, rng=0), SAMPLE[0, 0]
    ),
    "calibrated": feature_maps.CalibratedFeatures.calibrate([tuple(SAMPLE)], num_features=4),
    "landmarks": feature_maps.LandmarkFeatures.fit(
        *SAMPLE[:2], num_features=2, num_probes=4, rng=0
    ),
    "corrected": feature_maps.LandmarkFeatures.fit(
        *SAMPLE[:2], num_features=2, num_probes=4, corrected=True, rng=0
    ),
}

# Queries and keys: their numbers, and their leading axes.
LENGTHS = [(5, 5), (0, 4), (4, 0)]
WINDOWS = [(1, 0), (2, 0), (2, 1)]
NO_HEADS = [((2, 0), (2, 0)), ((0,), (1,)), ((1, 1), (0, 1))]


def _arrays(xp, leads, lengths) -> Any:
    rng = np.random.default_rng(0)
    shapes = [
        (*leads[0], lengths[0], DIM),
        (*leads[1], lengths[1], DIM),
        (*leads[1], lengths[1], VALUE_DIM),
    ]
    return [xp.array(rng.standard_normal(shape), "float32") for shape in shapes]


def _lead(leads):
    return np.broadcast_shapes(*leads)


@pytest.mark.parametrize("leads", NO_HEADS, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_linear_attention_without_heads(xp_any_shape, name, leads):
    xp, phi = xp_any_shape, MAPS[name]
    for lengths in LENGTHS:
        query, key, value = _arrays(xp, leads, lengths)
        same = lengths[0] == lengths[1]
        for is_causal in (False, True) if same and phi.causal else (False,):
            window = phi.softmax_kernel and same and name != "corrected"
            exact: list[dict[str, Any]] = [
                {},
                *({"exact_window": w, "sinks": s} for w, s in WINDOWS if window),
            ]
            if name == "landmarks" and xp.name not in {"dask", "jax"}:
                exact += [options | {"exact_clusters": 1} for options in exact]
            for options in exact:
                output, state, norm = linattn.linear_attention(
                    query,
                    key,
                    value,
                    phi,
                    is_causal=is_causal,
                    **options,
                    return_state=True,
                    return_log_normalizer=True,
                )
                xp.assert_like(output, query, shape=(*_lead(leads), lengths[0], VALUE_DIM))
                xp.assert_like(norm, query, shape=(*_lead(leads), lengths[0]))
                m = DIM if phi.num_features is None else phi.num_features
                assert tuple(state.kvz.shape) == (*leads[1], m, VALUE_DIM + 1)
                assert state.length == lengths[1]


@pytest.mark.parametrize("leads", NO_HEADS, ids=str)
@pytest.mark.parametrize("name", [name for name in MAPS if name != "corrected"])
def test_gradients_without_heads(xp_any_shape, name, leads):
    xp, phi = xp_any_shape, MAPS[name]
    for lengths in LENGTHS:
        query, key, value = arrays = _arrays(xp, leads, lengths)
        same = lengths[0] == lengths[1]
        for is_causal in (False, True) if same and phi.causal else (False,):
            (output, state), pullback = linattn.linear_attention_vjp(
                query, key, value, phi, is_causal=is_causal, return_state=True
            )
            for gradient, array in zip(pullback(output, state.kvz), arrays, strict=True):
                xp.assert_like(gradient, array)


@pytest.mark.parametrize("leads", [((), (0,)), ((0,), ()), ((2, 1), (0,))], ids=str)
def test_keys_or_values_alone_without_heads(xp, leads):
    rng, phi = np.random.default_rng(0), MAPS["elu"]
    query = key = xp.array(rng.standard_normal((*leads[0], 5, DIM)), "float32")
    value = xp.array(rng.standard_normal((*leads[1], 5, VALUE_DIM)), "float32")
    output, pullback = linattn.linear_attention_vjp(
        query, key, value, phi, key_stop=[1, 1, 3, 5, 5]
    )
    xp.assert_like(output, query, shape=(*_lead(leads), 5, VALUE_DIM))
    for gradient, array in zip(pullback(output), (query, key, value), strict=True):
        xp.assert_like(gradient, array)
    state = linattn.init_state(phi, VALUE_DIM, batch_shape=_lead(leads), like=key)
    q, k, v = (array[..., 0, :] for array in (query, key, value))
    output, state = linattn.decode_step(q, k, v, state, phi)
    xp.assert_like(output, query, shape=(*_lead(leads), VALUE_DIM))
    output = linattn.Decoder(phi, state).step(q, k, v)
    xp.assert_like(output, query, shape=(*_lead(leads), VALUE_DIM))


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"is_causal": True, "log_decay": -0.1}, {"key_stop": [1, 1, 3, 5, 5]}],
    ids=str,
)
def test_keys_have_the_gradient_of_a_state_that_no_query_reads(xp, options):
    rng, phi = np.random.default_rng(0), MAPS["elu"]
    key, value = (xp.array(rng.standard_normal((2, 5, n)), "float64") for n in (DIM, VALUE_DIM))
    found = []
    for heads in ((2,), (0, 2)):
        query = xp.array(rng.standard_normal((*heads, 5, DIM)), "float64")
        (output, state), pullback = linattn.linear_attention_vjp(
            query, key, value, phi, return_state=True, **options
        )
        log_scale, kvz = xp.numpy(state.log_scale), xp.numpy(state.kvz)
        # Of the sums on their true scale.
        cotangent = xp.array(np.broadcast_to(np.exp(log_scale)[..., None], kvz.shape), "float64")
        found.append([xp.numpy(x) for x in pullback(output * 0, cotangent)[1:3]])
    for gradient, expected in zip(*reversed(found), strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leads", NO_HEADS, ids=str)
def test_softmax_attention_without_heads(xp, leads):
    for lengths in LENGTHS:
        arrays = _arrays(xp, leads, lengths)
        for is_causal in (False, True) if lengths[0] == lengths[1] else (False,):
            output, pullback = linattn.softmax_attention_vjp(*arrays, is_causal=is_causal)
            xp.assert_like(output, arrays[0], shape=(*_lead(leads), lengths[0], VALUE_DIM))
            for gradient, array in zip(pullback(output), arrays, strict=True):
                xp.assert_like(gradient, array)
            output = linattn.attention(*arrays, is_causal=is_causal)
            xp.assert_like(output, arrays[0], shape=(*_lead(leads), lengths[0], VALUE_DIM))


@pytest.mark.parametrize("leads", NO_HEADS, ids=str)
@pytest.mark.parametrize("name", ["elu", "positive", "landmarks"])
def test_streams_without_heads(xp, name, leads):
    phi = MAPS[name]
    query, key, value = _arrays(xp, leads, (5, 5))
    state = linattn.init_state(phi, VALUE_DIM, batch_shape=_lead(leads), like=key)
    state = linattn.update_state(state, key, value, phi)
    output = linattn.read_state(query, linattn.merge_states(state, state), phi)
    xp.assert_like(output, query, shape=(*_lead(leads), 5, VALUE_DIM))
    if phi.causal:
        q, k, v = (array[..., 0, :] for array in (query, key, value))
        output, state = linattn.decode_step(q, k, v, state, phi)
        xp.assert_like(output, query, shape=(*_lead(leads), VALUE_DIM))
        decoder = linattn.Decoder(phi, state)
        for _ in range(2):
            output = decoder.step(q, k, v)
            xp.assert_like(output, query, shape=(*_lead(leads), VALUE_DIM))
        assert decoder.state.length == 8


@pytest.mark.parametrize("shape", [(2, 0, DIM), (0, 5, DIM)], ids=str)
def test_a_report_about_nothing(xp_any_shape, shape):
    query = xp_any_shape.array(np.zeros(shape), "float32")
    output, report = linattn.attention(query, query, query, return_report=True)
    xp_any_shape.assert_like(output, query)
    assert (report.method, report.cost) == ("exact", 1.0)
    assert report.error.shape == shape[:1]


# No keys, no queries, no batch -------------------------------------------------------------------


@some_maps
def test_update_with_no_keys_keeps_the_state(xp, feature_map):
    query, key, value = in_library(xp, tokens())
    state = state_of(feature_map, like=query, batch_shape=(HEADS,))
    state = linattn.update_state(state, key, value, feature_map)
    after = linattn.update_state(state, key[:, :0, :], value[:, :0, :], feature_map)
    xp.assert_like(after.kvz, state.kvz)
    np.testing.assert_array_equal(xp.numpy(after.kvz), xp.numpy(state.kvz))
    np.testing.assert_array_equal(xp.numpy(after.log_scale), xp.numpy(state.log_scale))
    assert after.length == LENGTH
    out = linattn.linear_attention(
        query, key[:, :0, :], value[:, :0, :], feature_map, initial_state=state
    )
    read = linattn.read_state(query, state, feature_map)
    np.testing.assert_allclose(xp.numpy(out), xp.numpy(read), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exact_clusters": 1},
        {"key_stop": np.zeros(0, int)},
        {"is_causal": "lower_right"},
        {"is_causal": "lower_right", "exact_window": 1, "sinks": 2},
        {"is_causal": "lower_right", "exact_window": 3},
        {"key_stop": np.zeros(0, int), "exact_window": 3, "sinks": 2},
    ],
    ids=str,
)
def test_no_queries_leave_the_state_of_all_keys(options):
    phi = MAPS["landmarks" if "exact_clusters" in options else "positive"]
    query, key, value = (x.astype(float) for x in tokens())
    wanted = linattn.linear_attention(query, key, value, phi, return_state=True)[1]
    _, state = linattn.linear_attention(query[:, :0], key, value, phi, return_state=True, **options)
    sums, wanted_sums = (s.kvz * np.exp(s.log_scale)[..., None] for s in (state, wanted))
    np.testing.assert_allclose(sums, wanted_sums, rtol=1e-12)
    assert state.length == LENGTH


@every_map
def test_state_functions_without_a_batch(feature_map):
    query, key, value = tokens(lead=(0,))
    state = state_of(feature_map, like=query, batch_shape=(0,))
    assert state.kvz.shape[0] == 0
    state = linattn.update_state(state, key, value, feature_map)
    assert linattn.read_state(query, state, feature_map).shape == value.shape
    out, after = linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map)
    assert out.shape == (0, VALUE_DIM)
    assert out.dtype == np.float32
    assert after.length == LENGTH + 1
    assert linattn.merge_states(state, after).kvz.shape == state.kvz.shape

"""Under `np.errstate(all="raise")` nothing raises."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

import linattn
import linattn_numpy
from linattn import diagnostics, feature_maps, layers, positions, reference, stream, testing
from linattn.feature_maps import EluFeatures
from linattn.layers.dense import Activation
from tests.attentions import HEADS, MAPS, every_attention, every_map, state_of, tokens


@every_attention
def test_attention_under_errstate_raise(attend):
    query, key, value = tokens(length=140)
    mask = np.arange(140) > 3
    big = [30 * query, 30 * key, value]
    featureless = [-np.abs(query), -np.abs(key), value]
    with np.errstate(all="raise"):
        for arrays in ((query, key, value), big, featureless, [a * np.float32(1e-30) for a in big]):
            attend(*arrays)
            attend(*arrays, key_mask=mask)
            attend(*arrays, key_mask=np.zeros_like(mask))
        assert np.geterr()["over"] == "raise"


@every_map
def test_states_and_maps_under_errstate_raise(feature_map):
    query, key, value = tokens()
    query, key = 30 * query, 30 * key
    with np.errstate(all="raise"):
        empty = state_of(feature_map, like=key, batch_shape=(HEADS,))
        state = linattn.update_state(empty, key, value, feature_map)
        linattn.read_state(query, state, feature_map)
        linattn.read_state(query, empty, feature_map)
        linattn.merge_states(state, empty)
        linattn.merge_states(empty, empty)
        linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], empty, feature_map)
        decoder = linattn.Decoder(feature_map, state)
        decoder.step(query[:, 0], key[:, 0], value[:, 0])
        feature_map.query_features(query)
        feature_map.key_features(key)
        feature_map.estimate(query, key)
        feature_map.kernel(query, key)
        if feature_map is not MAPS["activation"]:
            feature_map.variance(query, key)


SCALES = (1e-30, 1e-3, 1.0, 30.0, 1e15)
MODEL: dict[str, Any] = {"num_heads": 2}


def arrays(scale):
    draw = np.random.default_rng(0).standard_normal
    query, key = (scale * draw((2, 2, 24, 4))).astype(np.float32)
    return query, key, draw((2, 24, 4)).astype(np.float32)


def of_recurrences(query, key, value):
    for rule in ("linear", "gated", "delta", "gated_delta"):
        options: dict[str, Any] = {"update_rule": rule}
        if "gated" in rule:
            options["log_decay"] = -np.abs(query[..., 0])
        if "delta" in rule:
            options["beta"] = np.full((2, 24), 0.5, np.float32)
        linattn.linear_recurrence_vjp(query, key, value, **options)[1](value)
        reference.recurrence(query, key, value, **options)


def of_references(query, key, value):
    for is_causal in (False, True):
        reference.softmax_attention(query, key, value, is_causal=is_causal)
        for phi in (EluFeatures(), MAPS["positive"], MAPS["trigonometric"]):
            reference.kernel_attention(query, key, value, phi, is_causal=is_causal)


def of_diagnostics(query, key, value):
    diagnostics.attended_norms(query, key)
    diagnostics.attention_weights(query, key, rows=[0, 5])
    diagnostics.held_out_error(value, query=query, key=key, value=value, rng=0)
    phi = MAPS["positive"]
    diagnostics.relative_variance(query, key, phi)
    diagnostics.denominators(query, key, phi)
    empty = state_of(phi, like=key, batch_shape=(2,), value_dim=4)
    state = linattn.update_state(empty, key, value, phi)
    diagnostics.effective_features(query, state, phi)
    diagnostics.output_error(query, state, phi, block_size=4)


def of_fits(query, key, value):
    # Larger ones have no finite landmarks, and are rejected.
    query, key = (np.clip(x, -1e3, 1e3) for x in (query, key))
    feature_maps.LandmarkFeatures.sample(query, key, num_features=4, rng=0)
    landmarks = feature_maps.LandmarkFeatures.fit(query, key, num_features=4, rng=0)
    linattn.linear_attention(query, key, value, landmarks, exact_window=3)
    feature_maps.GeneralizedExponentialFeatures.fit(query[0], key[0], num_features=4, rng=0)
    feature_maps.DenseExponentialFeatures.fit(query[0], key[0], num_features=4, rng=0)
    learned: dict[str, Any] = {"learn": True, "num_steps": 3, "rng": 0}
    feature_maps.CalibratedFeatures.calibrate([(query, key, value)], num_features=4, **learned)


def of_automatic_and_coresets(query, key, value):
    linattn.attention(query, key, value, rng=0)
    linattn.attention(query, key, value, rng=0, is_causal=True)
    linattn.CoresetAttention(8, block_size=4, rng=0).extend(query, key, value)
    positions.rotary(query, 1e7 * np.arange(24))
    stream.attend(query, key, value, np.empty_like(value), EluFeatures(), block_size=8)


def of_layers_of_tokens(query, key, value):
    rng, x = np.random.default_rng(0), query[0]
    for activation in get_args(Activation):
        params = layers.init_feed_forward(rng, 4, activation=activation)
        layers.feed_forward(params, x, activation=activation)
        out, pull = layers.feed_forward_vjp(params, x, activation=activation)
        pull(out)
    for norm, vjp in (
        (layers.layer_norm, layers.layer_norm_vjp),
        (layers.rms_norm, layers.rms_norm_vjp),
    ):
        params = layers.init_norm(4, bias=norm is layers.layer_norm)
        norm(params, x)
        out, pull = vjp(params, x)
        pull(out)


def of_decoders(query, key, value):
    rng, x = np.random.default_rng(0), query[0]
    params = layers.init_decoder(rng, 1, 4, 2, has_memory=True)
    for placed in (None, layers.Rotary(), layers.Alibi()):
        for attention in (layers.SoftmaxAttention(window=2), layers.LinearAttention(EluFeatures())):
            options = {**MODEL, "attention": attention, "positions": placed}
            options["cross_attention"] = layers.SoftmaxAttention()
            out, pull = layers.decoder_vjp(params, x, key[0], **options)
            pull(out)
            _, state = layers.decoder(params, x, key[0], return_state=True, **options)
            layers.decoder(params, x[:1], initial_state=state, **options)


def of_texts(query, key, value):
    drawn = layers.init_language_model(np.random.default_rng(0), 7, 1, 4, 2)
    size = np.abs(query).max()
    params = drawn | {"head.weight": drawn["head.weight"] * size}
    for temperature in (1e-300, 1e-5, 1.0, 1e300):
        layers.generate(params, np.zeros(2, int), 3, temperature=temperature, rng=0, **MODEL)


def of_estimators(query, key, value):
    pytest.importorskip("sklearn", reason="the estimators are scikit-learn's")
    from linattn.sklearn import KernelClassifier, KernelRegressor, RandomFeatures

    X, y = query[0], value[0, :, 0]
    for weight in (None, np.exp(np.linspace(-300, 300, 24))):
        for bandwidth in ("loo", 1e-3, 1e3):
            KernelRegressor(bandwidth).fit(X, y, sample_weight=weight).predict(X)
            classes = KernelClassifier(bandwidth).fit(X, y > 0, sample_weight=weight)
            classes.predict(X)
    RandomFeatures(random_state=0).fit(X).transform(X)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "of_module",
    [
        of_recurrences,
        of_references,
        of_diagnostics,
        of_fits,
        of_automatic_and_coresets,
        of_layers_of_tokens,
        of_decoders,
        of_texts,
        of_estimators,
    ],
)
def test_other_modules_under_errstate_raise(of_module, scale):
    given = arrays(scale)
    with np.errstate(all="raise"):
        of_module(*given)


def test_the_kit_under_errstate_raise():
    with np.errstate(all="raise"):
        testing.check_feature_map(lambda rng: feature_maps.PositiveFeatures(2, 4, rng=rng))
        testing.check_backend(linattn_numpy, num_problems=20)

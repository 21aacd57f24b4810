"""Gradients: against finite differences, against the quadratic formula, and by their identities."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn import feature_maps
from linattn.testing import assert_gradient
from linattn.typing import Features
from tests.attentions import maps
from tests.option_draws import Case
from tests.test_fuzz_options import check_gradient

# Arrays are unpacked into their places, which no type checker can follow.
linear: Any = linattn.linear_attention
linear_vjp: Any = linattn.linear_attention_vjp

DIM = 4
_RNG = np.random.default_rng(7)
_W = _RNG.standard_normal((4, DIM, DIM))

MAPS = {
    **maps(DIM, 16, "positive", "hyperbolic", "activation", "relu", "taylor", "softmax"),
    **maps(DIM, 512, "trigonometric"),
    "generalized": feature_maps.GeneralizedExponentialFeatures(DIM, 16, A=-0.05, rng=0),
    "dense": feature_maps.DenseExponentialFeatures(
        DIM, 16, A=[-0.1, 0.0, 0.02, -0.03], transform=np.linalg.qr(_W[0])[0], rng=0
    ),
    "fourier": feature_maps.RandomFourierFeatures(DIM, 512, bandwidth=3.0, rng=0),
    "fourier-normalized": feature_maps.RandomFourierFeatures(DIM, 512, normalize=True, rng=0),
    "squared-relu": feature_maps.ActivationFeatures(DIM, 16, activation="squared_relu", rng=0),
    "relu-unprojected": feature_maps.ActivationFeatures(sampler=None, epsilon=0.1),
    "elu": feature_maps.EluFeatures(scale=2.0),
    "taylor-4": feature_maps.TaylorFeatures(DIM, 4),
    "polynomial": feature_maps.PolynomialFeatures(DIM, 4, c=0.5),
    "monomials": feature_maps.PolynomialFeatures(DIM, 2, c=0.0),
    "cosformer": feature_maps.CosformerFeatures(DIM, max_length=256),
    "hedgehog": feature_maps.HedgehogFeatures(0.4 * _W[1], key_weights=0.4 * _W[2]),
    "reparametrized": feature_maps.Reparametrized(
        feature_maps.PositiveFeatures(DIM, 16, rng=0),
        np.full(DIM, 0.3),
        np.full(DIM, -0.2),
        np.eye(DIM) + 0.1 * _W[3],
    ),
    "calibrated": feature_maps.CalibratedFeatures(
        _W[0], _W[1, :, 0], 0.5 * _W[2], _W[3, :, 0], tilt=0.1 * _W[1, 0], power=0.8
    ),
}
_LANDMARKS = partial(
    feature_maps.LandmarkFeatures.fit,
    *_RNG.standard_normal((2, 40, DIM)),
    num_features=6,
    num_probes=16,
    rng=0,
)


def relative(actual, expected):
    """Largest Frobenius error of the arrays, each relative to its own norm."""
    return max(
        float(np.linalg.norm(np.asarray(a, np.float64) - e)) / max(float(np.linalg.norm(e)), 1e-30)
        for a, e in zip(actual, expected, strict=True)
    )


# Finite differences -----------------------------------------------------------------------------


def inputs(name, length=21, others=21, heads=2, seed=1):
    """Query, key and value at which the map's denominators are far from 0."""
    rng = np.random.default_rng(seed)
    size = 0.3 if name in ("trigonometric", "polynomial", "squared-relu") else 1.0
    shapes = ((heads, length, DIM), (heads, others, DIM), (heads, others, 3))
    return [size * rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", MAPS)
def test_pullback_is_the_derivative(name, is_causal):
    settings = {"is_causal": is_causal, "chunk_size": 8}
    feature_map = MAPS[name]
    assert_gradient(
        partial(linear, feature_map=feature_map, **settings),
        partial(linear_vjp, feature_map=feature_map, **settings),
        *inputs(name),
        step=1e-4,
        rtol=1e-7,
    )


class DenseLandmarks:
    """Keys in one column each and in columns of probes as well, read by positive features."""

    def __init__(self):
        self.keys = _LANDMARKS(corrected=True)
        self.queries = feature_maps.PositiveFeatures(DIM, self.keys.num_features, rng=0)
        self.num_features = self.keys.num_features
        self.query_spec, self.query_features = self.queries.query_spec, self.queries.query_features
        self.key_spec, self.key_features = self.keys.key_spec, self.keys.key_features


@pytest.mark.filterwarnings("ignore:feature_map was fitted to other keys")
@pytest.mark.parametrize("make", [_LANDMARKS, DenseLandmarks])
def test_landmarks_hold_their_fit_and_their_assignment(make):
    feature_map = make()
    assert_gradient(
        partial(linear, feature_map=feature_map),
        partial(linear_vjp, feature_map=feature_map),
        *inputs("landmarks"),
        step=1e-6,
        rtol=1e-7,
    )


# Masks, broadcasting, edges ---------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_masked_rows_have_gradient_zero_beside_nan(xp_any_shape, is_causal):
    xp = xp_any_shape
    query, key, value = inputs("positive", length=9, others=9)
    mask = np.arange(9) % 2 == 0
    query[:, 4] = np.nan
    arrays = [xp.array(a) for a in (query, key, value)]
    (output, state), pullback = linear_vjp(
        *arrays, MAPS["positive"], is_causal=is_causal, key_mask=xp.array(mask), return_state=True
    )
    grad_state = xp.array(np.ones(state.kvz.shape))
    _, grad_key, grad_value = (xp.numpy(g) for g in pullback(output, grad_state))
    np.testing.assert_array_equal(grad_key[:, ~mask], 0)
    np.testing.assert_array_equal(grad_value[:, ~mask], 0)
    assert np.isnan(grad_key[:, mask]).any()


@pytest.mark.parametrize(
    ("feature_map", "first"),
    [
        (feature_maps.TrigonometricFeatures(4, num_features=16, rng=0), 0),
        (feature_maps.PositiveFeatures(4, num_features=16, rng=0), 34),
    ],
    ids=["padding", "masked"],
)
def test_sub_blocks_without_keys_or_rows_ask_for_nothing(xp, feature_map, first):
    # Log features of keys of some thousands, either sign, beside halves of padding or masked keys.
    query, key, value = 6 * np.random.default_rng(0).standard_normal((3, 37, 4))
    key[32:] *= 8
    mask = np.arange(37) >= first
    query, key, value = (xp.array(x) for x in (query, key, value))
    output, pullback = linattn.linear_attention_vjp(
        query, key, value, feature_map, is_causal=True, key_mask=xp.array(mask)
    )
    for array in xp.numpy_each([output, *pullback(xp.array(np.ones((37, 4))))]):
        assert_array_equal(np.isfinite(array), True)


@pytest.mark.usefixtures("numpy_path")
def test_heads_that_share_keys_need_not_share_a_scale():
    """The weights of one head are far above the largest of another."""
    tokens = np.random.default_rng(0).standard_normal((3, 2, 12, DIM))
    tokens[0, 0] *= 1000
    query, key, value = tokens.astype(np.float32).astype(float)
    shared = key[:1], value[:1]
    case = Case(0, "linear", query, *shared, MAPS["positive"], {}, "float32")
    assert check_gradient(case) == "compared"


def test_relu_queries_with_zero_denominator_have_gradient_zero(xp_any_shape):
    xp = xp_any_shape
    query, key, value = inputs("relu")
    query[0, 3] = -1.0
    arrays = [xp.array(a) for a in (query, key, value)]
    output, pullback = linear_vjp(*arrays, MAPS["relu"])
    gradients = [xp.numpy(g) for g in pullback(xp.array(np.ones(output.shape)))]
    assert all(np.isfinite(g).all() for g in gradients)
    np.testing.assert_array_equal(gradients[0][0, 3], 0)


def test_dtype_and_repeated_pullbacks(xp):
    arrays = [xp.array(a, "float16") for a in inputs("positive")]
    output, pullback = linear_vjp(*arrays, MAPS["positive"], is_causal=True)
    first, second = pullback(output), pullback(output)
    for gradient, again, array in zip(first, second, arrays, strict=True):
        xp.assert_like(gradient, array)
        np.testing.assert_array_equal(xp.numpy(gradient), xp.numpy(again))


# float32 ----------------------------------------------------------------------------------------


def float32_error(arrays, feature_map, is_causal):
    """Frobenius errors of float32 gradients of each head, relative to their norms in float64."""
    narrow = [np.asarray(a, np.float32) for a in arrays]
    wide = [a.astype(np.float64) for a in narrow]
    results = []
    for some in (narrow, wide):
        output, pullback = linear_vjp(*some, feature_map, is_causal=is_causal)
        grad = np.random.default_rng(0).standard_normal(output.shape).astype(np.float32)
        results.append(pullback(grad.astype(output.dtype)))
    return [
        np.max(np.linalg.norm(a - b, axis=(-2, -1)) / np.linalg.norm(b, axis=(-2, -1)))
        for a, b in zip(*results, strict=True)
    ]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "elu"])
def test_float32_on_the_real_sample(name, is_causal):
    arrays = linattn.datasets.pretrained_qkv()
    feature_map = {
        "positive": feature_maps.PositiveFeatures(32, 128, rng=0),
        "hyperbolic": feature_maps.HyperbolicFeatures(32, 128, rng=0),
        "elu": feature_maps.EluFeatures(),
    }[name]
    assert max(float32_error(arrays, feature_map, is_causal)) <= 1e-5
    with linattn.without_backends():
        assert max(float32_error(arrays, feature_map, is_causal)) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["elu", "hedgehog"])
def test_float32_with_a_few_heavy_keys(name, is_causal):
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 600, 16))
    heavy = rng.choice(600, 16, replace=False)
    feature_map: Any
    if name == "elu":
        feature_map = feature_maps.EluFeatures()
        key[:, heavy] = 2e4 * np.abs(key[:, heavy])
    else:
        feature_map = feature_maps.HedgehogFeatures(np.eye(16))
        # Were all heavy in one coordinate, no query could choose: its gradient would cancel.
        key[:, heavy[:8], 0] += 13.0
        key[:, heavy[8:], 1] += 13.0
    weights = feature_map.estimate(query, key)
    ratio = np.mean(weights[..., heavy]) / np.mean(np.delete(weights, heavy, axis=-1))
    assert ratio > 1e4
    assert max(float32_error((query, key, value), feature_map, is_causal)) <= 1e-5
    with linattn.without_backends():
        assert max(float32_error((query, key, value), feature_map, is_causal)) <= 1e-5


@pytest.mark.parametrize("jump", [1 / 12, 1 / 4, 3.0, 12.0])
def test_float32_with_jumping_key_norms(jump):
    """Long keys have tiny features: those before a jump keep their gradients beside those after."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 300, 16))
    key[:, 150:] *= jump
    key /= min(jump, 1.0)
    feature_map = feature_maps.PositiveFeatures(16, 64, rng=0)
    early = np.zeros((2, 300, 1))
    early[:, :150] = 1
    narrow = [a.astype(np.float32) for a in (query, key, value)]
    wide = [a.astype(np.float64) for a in narrow]
    grad = rng.standard_normal((2, 300, 16))
    for rows in (grad, early * grad):  # the second: only rows before the jump have a cotangent
        results = []
        for arrays in (narrow, wide):
            output, pullback = linear_vjp(*arrays, feature_map, is_causal=True)
            results.append(pullback(rows.astype(np.float32).astype(output.dtype)))
        assert relative(*results) <= 1e-5


# Memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_extra_memory_is_small_at_length_32768(is_causal):
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, 32768, 64), dtype=np.float32)
    feature_map = feature_maps.PositiveFeatures(64, 256, rng=0)

    def both_ways(arrays):
        with linattn.config(num_threads=1):
            output, pullback = linear_vjp(*arrays, feature_map, is_causal=is_causal)
            return output, *pullback(output)

    # Modules that the first call loads are not what is measured; a new thread has no buffers yet.
    both_ways(arrays[:, :512])
    with ThreadPoolExecutor(1) as new_thread:
        new_thread.submit(int).result()
        tracemalloc.start()
        try:
            results = new_thread.submit(both_ways, arrays).result()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak - sum(array.nbytes for array in results) <= 16 * 2**20


# Errors -----------------------------------------------------------------------------------------


class TwoMethods:
    """A user's map without specs."""

    num_features = None

    def query_features(self, x):
        return Features(x, None)

    key_features = query_features


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (TwoMethods, r"Opaque\(fn, vjp\)"),
        (partial(feature_maps.ActivationFeatures, DIM, activation=np.tanh, rng=0), "no vjp"),
        (partial(feature_maps.ActivationFeatures, DIM, activation="heaviside", rng=0), "steps"),
        (partial(_LANDMARKS, corrected=True), "corrected=False"),
    ],
)
def test_a_map_without_gradient_says_what_is_missing(make, missing):
    with pytest.raises(NotImplementedError, match=missing):
        linear_vjp(*inputs("positive"), make())


def test_wrong_arguments_are_named():
    arrays = inputs("positive")
    feature_map = MAPS["positive"]
    output, pullback = linear_vjp(*arrays, feature_map)
    with pytest.raises(ValueError, match=r"grad_output must have the shape of output, \(2, 21, 3"):
        pullback(output[:, :20])
    with pytest.raises(ValueError, match="one dtype"):
        pullback(output.astype(np.float32))
    with pytest.raises(ValueError, match="grad_state needs return_state=True"):
        pullback(output, np.ones((2, 16, 4)))
    (output, _), pullback = linear_vjp(*arrays, feature_map, return_state=True)
    with pytest.raises(ValueError, match=r"grad_state must have the shape of state.kvz"):
        pullback(output, np.ones((2, 16, 5)))


def test_the_number_of_checkpoints_is_the_documented_one():
    from pathlib import Path

    from linattn._driver.steps import MAX_STATES

    page = (Path(__file__).parents[1] / "docs" / "gradients.md").read_text(encoding="utf-8")
    assert f"at most {2 * MAX_STATES} states a head" in page
    assert f"Up to {MAX_STATES} checkpoints are stored" in page
    said = f"at most {2 * MAX_STATES} states a head: {MAX_STATES} checkpoints"
    assert said in (linattn.linear_attention_vjp.__doc__ or "")

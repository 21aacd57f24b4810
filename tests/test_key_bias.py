"""Log weights of keys: far below others, in steps, their gradients, and errors."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import reference
from linattn.feature_maps import (
    CosformerFeatures,
    EluFeatures,
    LandmarkFeatures,
    ReluFeatures,
    SoftmaxFeatures,
)
from tests import pairs
from tests.attentions import full_and_causal
from tests.option_draws import Case
from tests.pairs import BOUNDS, DIM, LENGTH, tokens
from tests.test_fuzz_options import check_gradient

_RNG = np.random.default_rng(3)
MAPS = {
    **pairs.MAPS,
    "landmarks": LandmarkFeatures.fit(
        *_RNG.standard_normal((2, 40, DIM)), num_features=6, num_probes=16, rng=0
    ),
}


def biases(shape, seed=1, size=5.0):
    """Biases of which some leave their key out."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < 0.8, size * rng.standard_normal(shape), -np.inf)


def dense(query, key, value, phi, bias, **options):
    return reference.kernel_attention(query, key, value, phi, bias=bias[..., None, :], **options)


RECTIFIED = {"relu": ReluFeatures(), "cosformer": CosformerFeatures(DIM, max_length=64)}


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("float16", 5e-3)])
@pytest.mark.parametrize("name", RECTIFIED)
def test_keys_far_below_others_count_where_these_have_no_feature(xp, name, dtype, atol):
    rng, phi = np.random.default_rng(0), RECTIFIED[name]
    arrays = [rng.standard_normal((2, 12, DIM)).astype(dtype) for _ in range(3)]
    arrays = [np.abs(arrays[0]) - 1, np.abs(arrays[1]) - 1, arrays[2] + 4]
    bias = rng.choice([0.0, -80.0, -200.0], size=(2, 12)).astype("float32")
    bias[..., :3] = -200.0
    expected = dense(*(a.astype("float64") for a in arrays), phi, bias, is_causal=True)
    query, key, value = (xp.array(a, dtype) for a in arrays)
    steps = []
    for chunk_size in (None, 4):
        out = linattn.linear_attention(
            query, key, value, phi, key_bias=xp.array(bias), chunk_size=chunk_size, is_causal=True
        )
        assert_allclose(xp.numpy(out), expected, atol=atol)
    full = dense(*(a.astype("float64") for a in arrays), phi, bias)
    out = linattn.linear_attention(query, key, value, phi, key_bias=xp.array(bias))
    assert_allclose(xp.numpy(out), full, atol=atol)
    state = linattn.init_state(phi, DIM, batch_shape=(2,), like=key)
    for t in range(6):
        q, k, v = (array[:, t, :] for array in (query, key, value))
        weight = xp.array(bias[:, t])
        out, state = linattn.decode_step(q, k, v, state, phi, key_bias=weight)
        steps.append(xp.numpy(out))
    assert_allclose(np.stack(steps, axis=1), expected[:, :6], atol=atol)


@pytest.mark.parametrize("chunk_size", [None, 64])
def test_a_block_keeps_keys_that_only_later_queries_meet(xp, chunk_size):
    phi, first = ReluFeatures(), np.arange(300) % 2
    key = np.stack([first, 1 - first], axis=-1).astype("float32")
    query = np.where(np.arange(300)[:, None] < 150, [0.0, 1.0], [1.0, 0.0]).astype("float32")
    query[0] = 1
    value = 3 + np.random.default_rng(0).standard_normal((300, 3)).astype("float32")
    bias = (-200.0 * first).astype("float32")
    expected = dense(query, key, value, phi, bias, is_causal=True)
    state, parts = None, []
    for rows in (slice(0, 150), slice(150, 300)):
        q, k, v = (xp.array(x[rows], "float32") for x in (query, key, value))
        options = {"key_bias": xp.array(bias[rows]), "chunk_size": chunk_size}
        out, state = linattn.linear_attention(
            q, k, v, phi, is_causal=True, initial_state=state, return_state=True, **options
        )
        parts.append(xp.numpy(out))
    assert_allclose(np.concatenate(parts), expected, atol=BOUNDS["float32"])


def test_a_step_takes_a_number():
    (query, key, value), phi = tokens((), 3), MAPS["positive"]
    state = linattn.update_state(
        linattn.init_state(phi, DIM, like=key), key[:2], value[:2], phi, key_bias=np.array([0.0, 1])
    )
    out, _ = linattn.decode_step(query[2], key[2], value[2], state, phi, key_bias=-2)
    expected = dense(query, key, value, phi, np.array([0.0, 1, -2]))
    assert_allclose(out, expected[2], atol=1e-12)


# Gradients --------------------------------------------------------------------------------------


@full_and_causal
def test_gradients_keep_their_digits_in_float32(is_causal):
    arrays, bias = tokens((2,), 300), biases((2, 300), size=2.0)
    for phi in (MAPS["positive"], MAPS["elu"]):
        pairs.check_float32_gradients(arrays, phi, "key_bias", bias, is_causal=is_causal)


# Beside attention -------------------------------------------------------------------------------


def test_drawn_features_follow_the_bias(xp):
    """Keys of -inf are masked; a key of a large bias is the one that all queries draw."""
    (query, key, _), mask = tokens(), np.arange(LENGTH) % 3 > 0
    arrays = [xp.array(a) for a in (query, key)]

    def sample(key, **options):
        query, key = arrays[0], xp.array(key)
        return LandmarkFeatures.sample(query, key, num_features=8, rng=0, **options)

    if xp.name == "dask":
        pytest.skip("dask: sampled as NumPy, which is tested")
    drawn = sample(key, key_bias=xp.array(np.where(mask, 0.0, -np.inf)))
    assert_array_equal(drawn.projection, sample(key, key_mask=xp.array(mask)).projection)
    drawn = sample(key, key_bias=xp.array(np.where(np.arange(LENGTH) == 7, 1e3, 0.0)))
    one = np.broadcast_to(key[:, 7:8], key.shape)
    assert_allclose(drawn.projection, sample(one).projection, atol=1e-12)


@full_and_causal
def test_held_out_rows_are_of_weighed_keys(xp, is_causal):
    arrays, bias = tokens(length=20), biases((2, 20))
    exact = reference.softmax_attention(*arrays, is_causal=is_causal, bias=bias[:, None, :])
    plain = reference.softmax_attention(*arrays, is_causal=is_causal)
    query, key, value = (xp.array(a) for a in arrays)
    given = {"query": query, "key": key, "value": value, "is_causal": is_causal}
    for output, wanted in ((exact, 0.0), (plain, 1.0)):
        error = linattn.diagnostics.held_out_error(
            xp.array(output), **given, key_bias=xp.array(bias), num_rows=20
        )
        size = np.linalg.norm(exact, axis=(-2, -1))
        expected = wanted * np.linalg.norm(plain - exact, axis=(-2, -1)) / size
        assert_allclose(error.relative, expected, rtol=1e-9, atol=1e-12)


def test_a_token_of_a_coreset_has_its_bias():
    (query, key, value), bias = tokens(length=9), biases((2, 9))
    streams = [linattn.CoresetAttention(4, rng=0) for _ in range(2)]
    whole = streams[0].extend(query, key, value, key_bias=bias)
    for i in range(9):
        out = streams[1].step(query[:, i], key[:, i], value[:, i], key_bias=bias[:, i])
        assert_allclose(out, whole[:, i], rtol=0, atol=1e-12)
    token = query[:, 0], key[:, 0], value[:, 0]
    one = streams[0].step(*token, key_bias=-1)
    assert_array_equal(one, streams[1].step(*token, key_bias=np.asarray(-1.0)))


# Errors and dispatch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bias", "error", "match"),
    [
        (np.full(5, np.nan), ValueError, "key_bias must hold no NaN and no .inf"),
        (np.full(5, np.inf), ValueError, "key_bias must hold no NaN and no .inf"),
        (np.zeros(4), ValueError, r"key_bias must have shape \(5,\), or .*; got \(4,\)"),
        (np.zeros((5, 5)), ValueError, "bias for each pair of query and key cannot be honoured"),
        (np.zeros(5, dtype=int), TypeError, "key_bias must have dtype float16"),
        ([0.0] * 5, TypeError, "key_bias must be an array of NumPy"),
    ],
)
def test_wrong_biases_are_refused(bias, error, match):
    query, key, value = tokens((2,), 5)
    for attend in (linattn.linear_attention, linattn.linear_attention_vjp):
        with pytest.raises(error, match=match):
            attend(query, key, value, EluFeatures(), key_bias=bias)


def test_whole_functions_are_not_given_what_they_may_not_know(monkeypatch):
    """A backend that does whole problems without a bias would be silently wrong."""

    def wrong(*args):
        pytest.fail("a whole function was given a modifier that it does not know")

    import linattn_numpy

    for name in ("attention", "attention_vjp", "decode", "stepper"):
        monkeypatch.setattr(linattn_numpy, name, wrong, raising=False)
    (query, key, value), phi = tokens(), MAPS["positive"]
    bias = np.zeros(LENGTH)
    with linattn.explain() as report:
        out, pullback = linattn.linear_attention_vjp(query, key, value, phi, key_bias=bias)
        pullback(out)
    assert report.ran("attention") == report.ran("attention_vjp") == {"driver"}
    assert "key_bias" in str(report)
    state = linattn.init_state(phi, DIM, batch_shape=(2,), like=key)
    token = query[:, 0], key[:, 0], value[:, 0]
    linattn.decode_step(*token, state, phi, key_bias=1.0)
    linattn.Decoder(phi, state).step(*token, key_bias=1.0)


def test_gradients_of_causal_means():
    """A bias is in the normalizer of every feature."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 20, 4))
    options = {"is_causal": True, "key_bias": rng.standard_normal((2, 20))}
    case = Case(0, "linear", query, key, value, SoftmaxFeatures(), options)
    assert check_gradient(case) == "compared"

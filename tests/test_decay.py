"""Decay: against the oracle at every strength, states in their order, and what it may not be."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="operator, arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import reference
from linattn.feature_maps import (
    ActivationFeatures,
    CosformerFeatures,
    EluFeatures,
    LandmarkFeatures,
    ReluFeatures,
    Reparametrized,
    SoftmaxFeatures,
)
from linattn.testing import assert_gradient
from linattn.typing import Features, Opaque, Tokens
from tests import pairs
from tests.attentions import fetched
from tests.pairs import DIM, LENGTH, PHI, decays, dense_decay, every_dtype, tokens

MAPS = {**pairs.MAPS, "activation": ActivationFeatures(DIM, 16, rng=1)}


def check(out, phi, arrays, bias, dtype):
    pairs.check_sums(out, phi, arrays, dtype, bias=bias)


KINDS = ["-0.0", "-1e-3", "-0.5", "-5.0", "-200.0", "each token", "a few are strong"]


@pytest.mark.filterwarnings("ignore:.* denominators are negative")
@pytest.mark.parametrize("jump", [0.0, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_causal_equals_the_oracle(kind, jump):
    length = 150
    arrays, decay = tokens((2, 3), length), decays(kind, (2, 1), length)
    query, key, value = arrays[0], arrays[1][:, :1], arrays[2][:, :1]
    bias = np.where(np.random.default_rng(5).random(length) < 0.1, jump, 0.0)
    dense = dense_decay(decay, length) + bias
    for name, phi in MAPS.items():
        sums = reference.kernel_sums(query, key, value, phi, bias=dense)
        ways: list[Any] = [linattn.config]
        ways += [linattn.without_backends] if name == "positive" else []
        for dtype, way in product(pairs.BOUNDS, ways):
            with way():
                out = linattn.linear_attention(
                    *(a.astype(dtype) for a in (query, key, value)),
                    phi,
                    is_causal=True,
                    key_bias=bias.astype(dtype),
                    log_decay=decay if decay.shape[-1] > 1 else decay[..., 0],
                )
            pairs.check_ratio(out, sums, dtype)


@pytest.mark.parametrize("backends", [True, False], ids=["backends", "generic"])
def test_weak_decays_keep_their_digits_after_strong_ones(backends):
    """Sums of float32 would have steps of .0005 here, and weights that much off."""
    arrays, decay = tokens((2,), 32), np.where(np.arange(32) < 24, -200.0, -0.0123)
    with nullcontext() if backends else linattn.without_backends():
        out = linattn.linear_attention(
            *(a.astype(np.float32) for a in arrays), PHI, is_causal=True, log_decay=decay[None]
        )
    check(out, PHI, arrays, dense_decay(decay, 32), "float32")


def test_weak_and_strong_heads_have_the_bits_that_they_have_alone():
    arrays = np.random.default_rng(0).standard_normal((3, 2, 300, 64)).astype(np.float32)
    decay = np.array([[-0.1], [-3.0]], np.float32)
    options: dict[str, Any] = {"is_causal": True, "return_log_normalizer": True}
    out, norm = linattn.linear_attention(*arrays, EluFeatures(), log_decay=decay, **options)
    for head in range(2):
        one = arrays[:, head : head + 1]
        alone, alone_norm = linattn.linear_attention(
            *one, EluFeatures(), log_decay=decay[head : head + 1], **options
        )
        assert_array_equal(out[head], alone[0])
        assert_array_equal(norm[head], alone_norm[0])


@every_dtype
@pytest.mark.parametrize("chunk_size", [None, 1, 8, 64])
@pytest.mark.parametrize("strength", [-800.0, -7.0])
def test_a_state_keeps_the_feature_that_only_decayed_keys_have(strength, chunk_size, dtype):
    """Keys but the first have the other feature; the last query has only that of the first."""
    length = 130
    query = np.tile([0.0, 1.0], (length, 1)).astype(dtype)
    key, value = query.copy(), np.arange(1.0, length + 1, dtype=dtype)[:, None]
    query[-1] = key[0] = query[0] = 1.0, 0.0
    mask = np.arange(length) < length - 1
    decay = np.where(np.arange(length) % 2, strength, 0).astype(dtype)
    out, log = linattn.linear_attention(
        query,
        key,
        value,
        ReluFeatures(),
        is_causal=True,
        key_mask=mask,
        log_decay=decay,
        chunk_size=chunk_size,
        return_log_normalizer=True,
    )
    assert_allclose(out[[0, -1], 0], 1, rtol=1e-6)
    assert_allclose(log[-1], decay.sum(), rtol=1e-6)


def _gradients_of_relu(query, key, value, grad, log_weight):
    """Of causal attention of one head, each row on the largest of its pairs' log weights."""
    q, k = np.maximum(query, 0), np.maximum(key, 0)
    kernel = q @ k.T
    log_weight = np.where((kernel > 0) & np.tri(len(q), dtype=bool), log_weight, -np.inf)
    top = log_weight.max(axis=1, keepdims=True)
    factors = np.exp(log_weight - np.where(top == -np.inf, 0, top))
    total = (kernel * factors).sum(axis=1, keepdims=True)
    factors /= np.where(total == 0, 1, total)
    weights = kernel * factors
    spread = factors * (grad @ value.T - np.sum(grad * (weights @ value), axis=1, keepdims=True))
    return (spread @ k) * (query > 0), (spread.T @ q) * (key > 0), weights.T @ grad


@pytest.mark.parametrize("backends", [True, False], ids=["backends", "generic"])
@pytest.mark.parametrize("strength", [-200.0, -40.0])
@pytest.mark.parametrize("kind", ["decay", "bias", "both"])
def test_gradients_of_features_that_only_weak_keys_have(kind, strength, backends):
    """Rows lack features of keys far above those that they see: these must not overflow."""
    rng, length = np.random.default_rng(5), 70
    query, key = rng.uniform(0.5, 1.5, (2, length, 3)) * rng.choice([-1, 1], (2, length, 3))
    value, grad = rng.standard_normal((2, length, 2))
    bias, decay = (np.where(rng.random(length) < share, strength, 0.0) for share in (0.8, 0.3))
    since, options = np.zeros(length), {}
    if kind != "bias":
        options["log_decay"], since = decay.astype(np.float32), np.cumsum(decay)
    if kind != "decay":
        options["key_bias"] = bias.astype(np.float32)
    log_weight = since[:, None] - since + (0 if kind == "decay" else bias)
    wanted = _gradients_of_relu(query, key, value, grad, log_weight)
    arrays = (a.astype(np.float32) for a in (query, key, value))
    with nullcontext() if backends else linattn.without_backends():
        _, pullback = linattn.linear_attention_vjp(
            *arrays, ReluFeatures(), is_causal=True, **options
        )
        found = pullback(grad.astype(np.float32))
    for gradient, expected in zip(found, wanted, strict=False):
        assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@every_dtype
@pytest.mark.parametrize("kind", ["-0.5", "-50.0", "a few are strong"])
@pytest.mark.parametrize("name", ["positive", "elu"])
def test_masked_stretches_see_what_has_decayed_far(name, kind, dtype):
    length, phi = 600, MAPS[name]
    arrays, decay = tokens((2,), length), decays(kind, (2,), length)
    mask = np.ones(length, bool)
    mask[:3] = mask[70:560] = False
    dense = dense_decay(decay, length) + np.where(mask, 0, -np.inf)
    with linattn.explain() as report:
        out, state = linattn.linear_attention(
            *(a.astype(dtype) for a in arrays),
            phi,
            is_causal=True,
            key_mask=mask,
            log_decay=decay if decay.shape[-1] > 1 else decay[..., 0],
            return_state=True,
        )
    assert name != "positive" or "linattn_numpy" in report.ran("scan_decayed_block")
    assert_array_equal(out[:, :3], 0)
    query, key, value = arrays
    check(out[:, 3:], phi, (query[:, 3:], key, value), dense[:, 3:], dtype)
    after = linattn.read_state(query[:, -1:].astype(dtype), state, phi)
    check(after, phi, (query[:, -1:], key, value), dense[:, -1:], dtype)


@pytest.mark.parametrize("kind", ["-0.5", "each token"])
def test_causal_equals_the_oracle_in_every_library(xp, kind):
    arrays, decay = tokens(length=12), decays(kind, (2,), 12)
    query, key, value = (xp.array(a, "float32") for a in arrays)
    mask = np.arange(12) != 5
    out = linattn.linear_attention(
        query,
        key,
        value,
        PHI,
        is_causal=True,
        key_mask=xp.array(mask),
        log_decay=xp.array(decay, "float32"),
        chunk_size=8,
    )
    xp.assert_like(out, query)
    dense = dense_decay(decay, 12) + np.where(mask, 0, -np.inf)
    check(xp.numpy(out), PHI, arrays, dense, "float32")


def test_numbers_and_heads_are_tokens_that_decay_alike():
    query, key, value = tokens((2, 3))
    wanted = np.broadcast_to([[-0.1], [-0.2]], (2, 3))
    expected = linattn.linear_attention(
        query, key, value, PHI, is_causal=True, log_decay=np.repeat(wanted[..., None], LENGTH, -1)
    )
    for given in (wanted, wanted[:, :1], wanted[..., None]):
        out = linattn.linear_attention(query, key, value, PHI, is_causal=True, log_decay=given)
        assert_allclose(out, expected, atol=1e-13)
    for number in (-0.1, np.asarray(-0.1)):
        one = linattn.linear_attention(
            query[0], key[0], value[0], PHI, is_causal=True, log_decay=number
        )
        assert_allclose(one, expected[0], atol=1e-13)
        token = query[0][:, 0], key[0][:, 0], value[0][:, 0]
        state = linattn.init_state(PHI, DIM, batch_shape=(3,), like=key)
        _, after = linattn.decode_step(*token, state, PHI, log_decay=number)
        assert_allclose(after.log_decay, np.full(3, -0.1))


@pytest.mark.parametrize("kind", ["-0.5", "each token", "a few are strong"])
@pytest.mark.parametrize("name", ["positive", "elu"])
def test_chunks_steps_and_merged_states_are_the_whole(name, kind):
    (query, key, value), phi = tokens(), MAPS[name]
    decay = decays(kind, (2,), LENGTH)
    each = np.broadcast_to(decay, (2, LENGTH))
    whole, after, log_norm = linattn.linear_attention(
        query,
        key,
        value,
        phi,
        is_causal=True,
        log_decay=each,
        return_state=True,
        return_log_normalizer=True,
    )
    dense = dense_decay(decay, LENGTH)
    check(whole, phi, (query, key, value), dense, "float64")
    sums = reference.kernel_sums(query, key, value, phi, bias=dense)
    expected = (np.log(sums.denominator) + sums.log_scale)[..., 0]
    assert_allclose(log_norm, expected, atol=1e-11)
    for chunk_size in (1, 7, 64):
        out = linattn.linear_attention(
            query, key, value, phi, is_causal=True, log_decay=each, chunk_size=chunk_size
        )
        assert_allclose(out, whole, atol=1e-11)

    empty = linattn.init_state(phi, DIM, batch_shape=(2,), like=key)
    parts = [
        linattn.update_state(empty, key[:, rows], value[:, rows], phi, log_decay=each[:, rows])
        for rows in (slice(0, 11), slice(11, 30), slice(30, LENGTH))
    ]
    assert_allclose(np.asarray(parts[0].log_decay), each[:, :11].sum(axis=-1))
    first = linattn.merge_states(linattn.merge_states(*parts[:2]), parts[2])
    second = linattn.merge_states(parts[0], linattn.merge_states(*parts[1:]))
    stream = linattn.update_state(parts[0], key[:, 11:], value[:, 11:], phi, log_decay=each[:, 11:])
    for state in (first, second, stream):
        assert state.length == LENGTH
        assert_allclose(state.log_decay, after.log_decay, rtol=1e-12)
        out = linattn.read_state(query[:, -1:], state, phi)
        assert_allclose(out, whole[:, -1:], atol=1e-11)

    rest = [a[:, 11:] for a in (query, key, value)]
    out = linattn.linear_attention(
        *rest, phi, is_causal=True, log_decay=each[:, 11:], initial_state=parts[0]
    )
    assert_allclose(out, whole[:, 11:], atol=1e-11)
    decoder, state = linattn.Decoder(phi, parts[0]), parts[0]
    for i in range(11, LENGTH):
        token = query[:, i], key[:, i], value[:, i]
        out, state = linattn.decode_step(*token, state, phi, log_decay=each[:, i])
        assert_allclose(out, whole[:, i], atol=1e-11)
        assert_allclose(decoder.step(*token, log_decay=each[:, i]), out, atol=1e-12)
    assert_allclose(state.log_decay, after.log_decay, rtol=1e-12)
    assert_allclose(decoder.state.log_decay, after.log_decay, rtol=1e-12)


def test_states_merge_in_their_order():
    _, key, value = tokens()
    empty = linattn.init_state(PHI, DIM, batch_shape=(2,), like=key)
    first, second = (
        linattn.update_state(empty, key[:, rows], value[:, rows], PHI, log_decay=-0.3)
        for rows in (slice(0, 20), slice(20, None))
    )
    one, other = linattn.merge_states(first, second), linattn.merge_states(second, first)
    read = [linattn.read_state(key, state, PHI) for state in (one, other)]
    assert np.abs(read[0] - read[1]).max() > 0.01
    # Without decay a state is neutral on both sides, as the empty one is.
    for state in (linattn.merge_states(empty, first), linattn.merge_states(first, empty)):
        assert_allclose(state.kvz, first.kvz)
        assert_allclose(state.log_decay, first.log_decay)


def test_a_saved_state_has_its_decay(tmp_path):
    _, key, value = tokens()
    for lead in ((), (2,)):
        empty = linattn.init_state(PHI, DIM, batch_shape=lead, like=key)
        part = (key, value) if lead else (key[0], value[0])
        for state in (empty, linattn.update_state(empty, *part, PHI, log_decay=-0.25)):
            linattn.save_state(tmp_path / "state.npz", state, PHI)
            loaded = linattn.load_state(tmp_path / "state.npz", PHI)
            assert (loaded.log_decay is None) == (state is empty)
            assert_array_equal(loaded.kvz, state.kvz)
            if state is not empty:
                assert_allclose(loaded.log_decay, -0.25 * LENGTH)
                assert np.shape(loaded.log_decay) == lead


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_packed_sequences_decay_each_by_itself(is_causal):
    query, key, value = tokens()
    borders = [0, 3, 17, 17, LENGTH]
    decay: Any = -0.2 if not is_causal else decays("each token", (2,), LENGTH)
    out, state = linattn.linear_attention(
        query,
        key,
        value,
        PHI,
        is_causal=is_causal,
        log_decay=decay,
        cu_seqlens=borders,
        return_state=True,
    )
    for i, (first, stop) in enumerate(pairwise(borders)):
        rows = slice(first, stop)
        one, after = linattn.linear_attention(
            *(a[:, rows] for a in (query, key, value)),
            PHI,
            is_causal=is_causal,
            log_decay=decay[:, rows] if is_causal else decay,
            return_state=True,
        )
        assert_allclose(out[:, rows], one, atol=1e-12)
        assert_allclose(np.asarray(state.log_decay)[i], after.log_decay)
        assert_allclose(
            state.kvz[i] * np.exp(state.log_scale[i])[..., None],
            after.kvz * np.exp(after.log_scale)[..., None],
            rtol=1e-11,
        )


def test_a_changed_token_moves_no_output_before_it():
    query, key, value = tokens(length=300)
    decay = decays("each token", (2,), 300)
    out = linattn.linear_attention(query, key, value, PHI, is_causal=True, log_decay=decay)
    key[:, 200], value[:, 200], decay[:, 200] = 40.0, 1e6, -150.0
    other = linattn.linear_attention(query, key, value, PHI, is_causal=True, log_decay=decay)
    assert_allclose(out[:, :200], other[:, :200], atol=1e-13)


def test_float16_decays_in_float32():
    arrays = [a.astype(np.float16) for a in tokens()]
    out = linattn.linear_attention(*arrays, PHI, is_causal=True, log_decay=-0.125)
    assert out.dtype == np.float16
    dense = dense_decay(np.array([[-0.125]]), LENGTH)
    expected = reference.kernel_attention(*arrays, PHI, bias=dense)
    assert_allclose(out, expected, atol=3e-3)


@every_dtype
@pytest.mark.parametrize("decay", [-0.5, -50.0, -1e4])
@pytest.mark.parametrize("name", ["positive", "elu"])
def test_full_attention_sees_over_masked_stretches(name, decay, dtype):
    """One of the two scans has read nothing there, and what the other has is far below 1."""
    length, phi = 300, MAPS[name]
    query, key, value = tokens((), length)
    mask = np.ones(length, bool)
    mask[:90] = mask[100:250] = mask[280:] = False
    out = linattn.linear_attention(
        *(a.astype(dtype) for a in (query, key, value)), phi, key_mask=mask, log_decay=decay
    )
    bias = decay * abs(np.arange(length)[:, None] - np.arange(length))
    bias = np.where(mask, bias, -np.inf)
    bias -= bias.max(axis=-1, keepdims=True)
    check(out, phi, (query, key, value), bias, dtype)


@pytest.mark.filterwarnings("ignore:.* denominators are negative")
@pytest.mark.parametrize("kind", KINDS[:5])
@pytest.mark.parametrize("jump", [0.0, 30.0])
def test_full_decays_with_distance(kind, jump):
    length = 150
    (query, key, value), decay = tokens((2, 3), length), decays(kind, (2, 1), length)
    key, value = key[:, :1], value[:, :1]
    bias = np.where(np.random.default_rng(5).random(length) < 0.1, jump, 0.0)
    dense = dense_decay(decay, length, is_causal=False) + bias
    for name in ("positive", "trigonometric", "reparametrized"):
        phi = MAPS[name]
        sums = reference.kernel_sums(query, key, value, phi, bias=dense)
        for dtype in pairs.BOUNDS:
            out, state = linattn.linear_attention(
                *(a.astype(dtype) for a in (query, key, value)),
                phi,
                key_bias=bias.astype(dtype),
                log_decay=decay[..., 0],
                return_state=True,
            )
            pairs.check_ratio(out, sums, dtype)
            assert_allclose(state.log_decay, decay[..., 0] * length, rtol=1e-6)


def test_full_decays_with_distance_in_every_library(xp):
    arrays = tokens(length=12)
    query, key, value = (xp.array(a, "float32") for a in arrays)
    mask = np.arange(12) != 5
    out = linattn.linear_attention(
        query, key, value, PHI, key_mask=xp.array(mask), log_decay=-0.5, chunk_size=8
    )
    xp.assert_like(out, query)
    dense = dense_decay(np.array([[-0.5]]), 12, is_causal=False) + np.where(mask, 0, -np.inf)
    check(xp.numpy(out), PHI, arrays, dense, "float32")


def test_full_attention_after_a_state_decays_from_it():
    (query, key, value), phi = tokens(), CosformerFeatures(DIM, max_length=LENGTH)
    empty = linattn.init_state(phi, DIM, batch_shape=(2,), like=key)
    before = linattn.update_state(empty, key[:, :15], value[:, :15], phi, log_decay=-0.1)
    rest = [a[:, 15:] for a in (query, key, value)]
    out, state = linattn.linear_attention(
        *rest, phi, log_decay=-0.1, initial_state=before, return_state=True
    )
    dense = dense_decay(np.array([[-0.1]]), LENGTH, is_causal=False)
    expected = reference.kernel_attention(query, key, value, phi, bias=dense)
    assert_allclose(out, expected[:, 15:], atol=1e-11)
    assert_allclose(state.log_decay, -0.1 * LENGTH)


@pytest.mark.parametrize(("is_causal", "decay"), [(False, None), (True, None), (True, -0.3)])
def test_numerators_alone_are_on_the_true_scale(xp, is_causal, decay):
    arrays = tokens(length=12)
    query, key, value = (xp.array(a) for a in arrays)
    options = {} if decay is None else {"log_decay": decay}
    out = linattn.linear_attention(
        query, key, value, PHI, is_causal=is_causal, normalize=False, chunk_size=8, **options
    )
    xp.assert_like(out, query)
    dense = dense_decay(np.array([[decay or 0.0]]), 12, is_causal=is_causal)
    sums = reference.kernel_sums(*arrays, PHI, bias=dense)
    expected = sums.numerator * np.exp(sums.log_scale)
    assert_allclose(xp.numpy(out), expected, rtol=1e-11, atol=1e-12)


def test_numerators_of_nothing_are_zero_and_overflow_as_the_dense_formula_does():
    query, key, value = tokens()
    out = linattn.linear_attention(
        query, key, value, PHI, normalize=False, key_mask=np.zeros(LENGTH, bool)
    )
    assert_array_equal(out, 0)
    large = linattn.linear_attention(
        query, key, value, PHI, normalize=False, key_bias=np.full(LENGTH, 800.0)
    )
    assert_array_equal(np.abs(large), np.inf)


LATE = np.arange(LENGTH) >= 7
"""Keys that count: causal queries before them see none."""

UNSEEN = {
    "causal": {"is_causal": True},
    "blocks": {"is_causal": True, "chunk_size": 5},
    "decayed": {"is_causal": True, "log_decay": -0.3},
    "decayed strongly": {"is_causal": True, "log_decay": -1e4},
    "packed": {"is_causal": True, "cu_seqlens": [0, 10, 10, LENGTH]},
    "packed and decayed": {
        "is_causal": True,
        "cu_seqlens": [0, 10, 10, LENGTH],
        "log_decay": -0.3,
    },
    "prefix": {"prefix_length": 5},
    "token blocks": {"causal_block": 7},
    "stops": {"key_stop": np.minimum(np.arange(LENGTH), 12)},
    "window": {"is_causal": True, "exact_window": 2},
    "decayed window": {"is_causal": True, "exact_window": 2, "log_decay": -0.3},
    "biased window": {"is_causal": True, "exact_window": 2, "window_bias": np.zeros(3)},
}


@pytest.mark.parametrize("kind", UNSEEN)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numerators_of_nothing_are_zero_where_those_of_other_rows_overflow(xp, dtype, kind):
    query, key, value = (xp.array(a.astype(dtype)) for a in tokens())
    bias = xp.array(np.where(LATE, 800.0, -np.inf).astype(dtype))
    options = dict(UNSEEN[kind], normalize=False, key_bias=bias)
    if "window_bias" in options:
        options["window_bias"] = xp.array(options["window_bias"].astype(dtype))
    out = fetched(xp, linattn.linear_attention(query, key, value, PHI, **options))
    assert_array_equal(out[:, :7], 0)
    assert_array_equal(np.abs(out[:, 12:14]), np.inf)


@pytest.mark.parametrize("kind", [kind for kind in UNSEEN if "window" not in kind])
def test_what_rows_without_keys_add_to_gradients_is_zero_where_others_overflow(xp, kind):
    arrays = [xp.array(a) for a in tokens()]
    bias = xp.array(np.where(LATE, 800.0, -np.inf))
    options = dict(UNSEEN[kind], normalize=False, key_bias=bias)
    _, pullback = linattn.linear_attention_vjp(*arrays, PHI, **options)
    grad = np.where(np.arange(LENGTH) < 7, 1.0, 0.0)[:, None] * np.ones((2, LENGTH, DIM))
    for gradient in pullback(xp.array(grad))[:3]:
        assert_array_equal(fetched(xp, gradient), 0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("bias", "size"), [(120.0, 1e-30), (-120.0, 1e30)])
def test_numerators_overflow_only_where_the_result_does(xp, is_causal, bias, size):
    arrays = [a.astype("float32") for a in tokens()]
    arrays[2] = np.abs(arrays[2]) * np.float32(size)
    out = linattn.linear_attention(
        *map(xp.array, arrays),
        PHI,
        is_causal=is_causal,
        normalize=False,
        key_bias=xp.array(np.full(LENGTH, bias, "float32")),
    )
    sums = reference.kernel_sums(*arrays, PHI, is_causal=is_causal)
    expected = sums.numerator * np.exp(sums.log_scale + bias)
    assert_allclose(xp.numpy(out), expected, rtol=1e-4)


def test_a_long_sequence_does_not_drift():
    """Sums of all decays, as a key bias would hold them, have steps of .06 in float32."""
    length, last, decay = 1_000_000, 64, float(np.log(0.5))
    rng = np.random.default_rng(0)
    phi = EluFeatures()
    query, key, value = rng.standard_normal((3, length, 2), dtype=np.float32)
    out, state = linattn.linear_attention(
        query, key, value, phi, is_causal=True, log_decay=decay, return_state=True
    )
    # What is 300 tokens away has decayed to e^-200.
    few = [a[-last - 300 :].astype(np.float64) for a in (query, key, value)]
    expected = linattn.linear_attention(*few, phi, is_causal=True, log_decay=decay)[-last:]
    assert_allclose(out[-last:], expected, atol=2e-6)
    assert_allclose(state.log_decay, decay * length)


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "error", "match"),
    [
        (0.1, ValueError, "log_decay must hold finite numbers of at most 0"),
        (np.full((2, 5), np.nan), ValueError, "log_decay must hold finite numbers"),
        (np.full(2, -np.inf), ValueError, "log_decay must hold finite numbers"),
        (np.zeros(5), ValueError, r"log_decay must be a number, or .* got shape \(5,\)"),
        (np.zeros((2, 4)), ValueError, r"log_decay must be a number, or .* got shape \(2, 4\)"),
        (np.asarray(0.1), ValueError, "log_decay must hold finite numbers of at most 0"),
        (np.asarray(-1), TypeError, "log_decay must have dtype float16"),
        (np.zeros(2, dtype=int), TypeError, "log_decay must have dtype float16"),
        (True, TypeError, "log_decay must be an array of NumPy"),
    ],
)
def test_wrong_decays_are_refused(decay, error, match):
    query, key, value = tokens(length=5)
    with pytest.raises(error, match=match):
        linattn.linear_attention(query, key, value, PHI, is_causal=True, log_decay=decay)
    state = linattn.init_state(PHI, DIM, batch_shape=(2,), like=key)
    with pytest.raises(error, match=match):
        linattn.update_state(state, key, value, PHI, log_decay=decay)


def test_what_has_no_meaning_is_refused():
    query, key, value = tokens()
    attend = linattn.linear_attention
    with pytest.raises(ValueError, match=r"one a head in full attention, .* use is_causal"):
        attend(query, key, value, PHI, log_decay=np.zeros((2, LENGTH)))
    with pytest.raises(ValueError, match="under log_decay query and key must have equal length"):
        attend(query[:, :5], key, value, PHI, log_decay=-0.1)
    with pytest.raises(ValueError, match="log_decay needs a feature map that reads the state"):
        attend(query, key, value, SoftmaxFeatures(), is_causal=True, log_decay=-0.1)
    # Causal stops too: what is refused does not depend on the numbers of an option.
    stops: Any = (np.arange(LENGTH) + 1, np.full(LENGTH, LENGTH))
    options = [("prefix_length", 0), ("prefix_length", 5), ("causal_block", 1), ("causal_block", 8)]
    for name, option in options + [("key_stop", stop) for stop in stops]:
        with pytest.raises(ValueError, match=f"log_decay must be None with {name}"):
            attend(query, key, value, PHI, log_decay=-0.1, **{name: option})
    landmarks = LandmarkFeatures.fit(query, key, num_features=4, rng=0)
    with pytest.raises(ValueError, match="is_causal needs a feature map that has not seen"):
        attend(query, key, value, landmarks, is_causal=True, log_decay=-0.1)
    corrected = LandmarkFeatures.fit(query, key, num_features=4, rng=0, corrected=True)
    moved = Reparametrized(corrected, [0.3] * DIM)
    with pytest.raises(ValueError, match="log_decay needs a feature map that reads the state"):
        attend(query, key, value, moved, log_decay=-0.1)
    for name in ("exact_window", "exact_clusters"):
        with pytest.raises(ValueError, match=f"{name} needs .* that are not corrected as a whole"):
            attend(query, key, value, moved, **{name: 3})
    with pytest.raises(NotImplementedError, match="normalize must be True for gradients of Soft"):
        linattn.linear_attention_vjp(query, key, value, SoftmaxFeatures(), normalize=False)


# Gradients --------------------------------------------------------------------------------------


def vjp_of(phi, names, options):
    """Attention, and its gradients, as functions of query, key, value and options by name."""

    def attend(*arrays):
        given = dict(zip(names, arrays[3:], strict=True))
        return linattn.linear_attention(*arrays[:3], phi, **given, **options)

    def attend_vjp(*arrays):
        given = dict(zip(names, arrays[3:], strict=True))
        return linattn.linear_attention_vjp(*arrays[:3], phi, **given, **options)

    return attend, attend_vjp


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", ["causal, each token", "causal, each head", "full", "no decay"])
@pytest.mark.parametrize("name", ["positive", "elu", "reparametrized"])
def test_gradients_are_those_of_finite_differences(name, kind, normalize):
    if normalize and kind == "no decay":
        pytest.skip("test_gradients.py has it")
    rng, length = np.random.default_rng(1), 11
    options = {"is_causal": kind.startswith("causal"), "normalize": normalize, "chunk_size": 4}
    options["key_mask"] = np.arange(length) != 4
    arrays = [*tokens((2,), length), rng.standard_normal(length)]
    if kind != "no decay":
        shape = (1, length) if "token" in kind else (2,)
        arrays.append(-0.01 - rng.exponential(1.0, shape))
    names = ("key_bias", "log_decay")[: len(arrays) - 3]
    functions = vjp_of(MAPS[name], names, options)
    assert_gradient(*functions, *arrays, rtol=3e-6, num_directions=1)


@pytest.mark.parametrize("stops", [{"key_stop": [0, 0, 2, 2, 5, 9, 9]}, {"prefix_length": [3, 6]}])
@pytest.mark.parametrize("name", ["positive", "reparametrized", "cosformer"])
def test_numerators_that_see_prefixes_have_gradients(name, stops):
    phi = MAPS.get(name, CosformerFeatures(DIM, max_length=20))
    query, key, value = tokens((2,), 7 if "prefix_length" in stops else 9)
    options = {**stops, "normalize": False, "key_mask": np.arange(key.shape[1]) != 4}
    bias = np.random.default_rng(1).standard_normal(key.shape[1])
    functions = vjp_of(phi, ["key_bias"], options)
    assert_gradient(*functions, query[:, :7], key, value, bias, rtol=3e-6, num_directions=1)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_number_and_states_have_gradients(is_causal):
    (query, key, value), step = tokens((2,), 9), 1e-4
    empty = linattn.init_state(PHI, DIM, batch_shape=(2,), like=key)
    before = linattn.update_state(empty, key, value, PHI, log_decay=-0.1)
    grad_state = np.random.default_rng(2).standard_normal(before.kvz.shape)
    attend: Any = linattn.linear_attention

    def loss(decay, kvz):
        state = before._replace(kvz=kvz)
        out, after = attend(
            query,
            key,
            value,
            PHI,
            is_causal=is_causal,
            log_decay=decay,
            initial_state=state,
            return_state=True,
        )
        return np.sum(out**2) / 2, np.sum(grad_state * after.kvz), after.log_scale

    (out, after), pullback = linattn.linear_attention_vjp(
        query,
        key,
        value,
        PHI,
        is_causal=is_causal,
        log_decay=-0.2,
        initial_state=before,
        return_state=True,
    )
    *_, of_state, of_decay = pullback(out, grad_state)
    assert np.shape(of_decay) == ()
    values = []
    for h in (step, -step):
        first, _, log_scale = loss(-0.2 + h, before.kvz)
        # Of the returned state its log scale is held constant.
        moved = np.exp(log_scale - after.log_scale)[..., None]
        _, state = attend(
            query,
            key,
            value,
            PHI,
            is_causal=is_causal,
            log_decay=-0.2 + h,
            initial_state=before,
            return_state=True,
        )
        values.append(first + np.sum(grad_state * state.kvz * moved))
    assert_allclose(of_decay, (values[0] - values[1]) / (2 * step), rtol=1e-5)
    u = np.random.default_rng(3).standard_normal(before.kvz.shape)
    ends = [sum(loss(-0.2, before.kvz + h * u)[:2]) for h in (step, -step)]
    assert_allclose(np.sum(of_state * u), (ends[0] - ends[1]) / (2 * step), rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["-0.5", "-200.0", "each token"])
def test_gradients_keep_their_digits_in_float32(kind, is_causal):
    if kind == "each token" and not is_causal:
        pytest.skip("one a head in full attention")
    arrays, decay = tokens((2,), 400), decays(kind, (2,), 400)
    pairs.check_float32_gradients(arrays, PHI, "log_decay", decay, is_causal=is_causal)


def test_packed_gradients_are_those_of_each_sequence():
    arrays, borders = tokens((2,), 20), [0, 6, 12, 20]
    decay = decays("each token", (2,), 20)
    for given in (decay, decay[:, 0]):
        _, pullback = linattn.linear_attention_vjp(
            *arrays, PHI, is_causal=True, log_decay=given, cu_seqlens=borders
        )
        whole = pullback(arrays[2])
        total = np.zeros_like(given)
        for first, stop in pairwise(borders):
            rows = slice(first, stop)
            part = given[:, rows] if given.ndim > 1 else given
            _, pullback = linattn.linear_attention_vjp(
                *(a[:, rows] for a in arrays), PHI, is_causal=True, log_decay=part
            )
            one = pullback(arrays[2][:, rows])
            for gradient, wanted in zip(whole[:3], one[:3], strict=True):
                assert_allclose(gradient[:, rows], wanted, atol=1e-12)
            if given.ndim > 1:
                assert_allclose(whole[3][:, rows], one[3], atol=1e-12)
            total[:] = total + one[3] if given.ndim == 1 else total
        if given.ndim == 1:
            assert_allclose(whole[3], total, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [3, 5, 64])
def test_packed_gradients_of_full_attention_are_those_of_each_sequence(chunk_size):
    """Sequences that are filled up to one length decay no further there."""
    arrays, borders = tokens((2,), 19), [0, 2, 11, 19]
    options = {"log_decay": -0.24, "chunk_size": chunk_size}
    _, pullback = linattn.linear_attention_vjp(*arrays, PHI, cu_seqlens=borders, **options)
    whole = pullback(arrays[2])
    for first, stop in pairwise(borders):
        part = [a[:, first:stop] for a in arrays]
        _, pullback = linattn.linear_attention_vjp(*part, PHI, **options)
        for gradient, wanted in zip(whole[:3], pullback(part[2])[:3], strict=True):
            assert_allclose(gradient[:, first:stop], wanted, atol=1e-12)


def test_packed_states_have_the_gradients_of_each():
    """Batched sequences, one of them empty: what fills the shorter one up does not decay."""
    arrays, borders, states = tokens((2,), 8), [0, 3, 3, 8], []
    for seed in range(3):
        empty = linattn.init_state(PHI, DIM, batch_shape=(2,), like=arrays[1])
        states.append(linattn.update_state(empty, *tokens((2,), 2, seed)[1:], PHI))
    kvz, log_scale = (np.stack([state[i] for state in states]) for i in range(2))
    options: dict[str, Any] = {"is_causal": True, "log_decay": -0.7, "return_state": True}
    grad_states = np.random.default_rng(3).standard_normal(kvz.shape)
    _, pullback = linattn.linear_attention_vjp(
        *arrays, PHI, **options, cu_seqlens=borders, initial_state=linattn.State(kvz, log_scale, 2)
    )
    whole = pullback(arrays[2], grad_states)
    total = 0.0
    for i, (first, stop) in enumerate(pairwise(borders)):
        part = [a[:, first:stop] for a in arrays]
        _, pullback = linattn.linear_attention_vjp(*part, PHI, **options, initial_state=states[i])
        one = pullback(part[2], grad_states[i])
        for gradient, wanted in zip(whole[:3], one[:3], strict=True):
            assert_allclose(gradient[:, first:stop], wanted, atol=1e-12)
        assert_allclose(whole[3][i], one[3], atol=1e-12)
        total += one[4]
    assert_allclose(whole[4], total, atol=1e-12)


@pytest.mark.parametrize("borders", [[0, 0, 7], [0, 7, 7], [0, 3, 3, 7]])
def test_empty_sequences_have_gradients_in_every_library(xp, borders):
    if xp.name == "dask":
        pytest.skip("dask: gradients of packed sequences have a test of their own")
    arrays, decay = tokens((2,), 7), decays("each token", (2,), 7)
    options = {"is_causal": True, "cu_seqlens": borders, "return_state": True}
    grads = [arrays[2], np.ones((len(borders) - 1, 2, PHI.num_features, arrays[2].shape[-1] + 1))]

    def pulled(make):
        _, pullback = linattn.linear_attention_vjp(
            *map(make, arrays), PHI, log_decay=make(decay), **options
        )
        return pullback(*map(make, grads))

    # What a state's gradient is depends on its log_scale, which a backend may choose otherwise.
    with linattn.without_backends():
        gradients, wanted = pulled(xp.array), pulled(np.asarray)
    for got, want in zip(gradients, wanted, strict=True):
        assert_allclose(xp.numpy(got), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("number", [np.float64, np.float32, float])
def test_scalars_of_numpy_are_numbers_in_every_library(xp, number):
    query, key, value = (xp.array(x) for x in tokens((2,), 6))

    def pulled(decay):
        output, pullback = linattn.linear_attention_vjp(
            query, key, value, PHI, is_causal=True, log_decay=decay
        )
        return [xp.numpy(x) for x in (output, *pullback(output))]

    for got, want in zip(pulled(number(-0.25)), pulled(-0.25), strict=True):
        assert_array_equal(got, want)


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["each token", "one for all", "full"])
def test_frameworks_give_the_same_gradients(kind):
    decay = {
        "each token": decays("each token", (2,), 11),
        "one for all": np.asarray(-0.3),
    }.get(kind, np.array([-0.5, -0.1]))
    options = {"is_causal": kind != "full", "chunk_size": 4}
    pairs.check_frameworks(tokens((2,), 11), PHI, "log_decay", decay, **options)


def test_torch_returns_the_decay_of_a_state():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from linattn.interop.torch import linear_attention

    arrays, decay = tokens((2,), 11), decays("each token", (2,), 11)
    *tensors, step = (torch.tensor(a, requires_grad=True) for a in (*arrays, decay))
    for attend in (linear_attention, linattn.linear_attention):
        _, state = attend(*tensors, PHI, is_causal=True, log_decay=step, return_state=True)
        assert_allclose(state.log_decay.detach().numpy(), decay.sum(axis=-1))


class Placed:
    """Features that depend on where a token stands, and not on differences of positions alone."""

    num_features = 5
    positive = True

    def query_spec(self, xp: Any, dtype: Any, device: Any) -> Opaque:
        return Opaque(self.features)

    key_spec = query_spec

    def features(self, given: Tokens) -> Features:
        at = given.start + np.arange(given.x.shape[-2])
        return Features(None, np.exp(given.x + np.sin(np.outer(at, np.arange(1, 6)))))

    def query_features(self, x: Any) -> Features:
        return self.features(Tokens(x, None, 0))

    key_features = query_features


@pytest.mark.parametrize("before", [0, 6])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 32])
def test_full_decay_has_the_positions_of_both_sides(chunk_size, before):
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 27, 5))
    phi, given = Placed(), {}
    if before:
        state = linattn.init_state(phi, 5, batch_shape=(2,), like=key)
        given["initial_state"] = state._replace(length=before)
    out = linattn.linear_attention(
        query, key, value, phi, log_decay=-0.3, chunk_size=chunk_size, **given
    )
    features = (phi.features(Tokens(x, None, before)).values for x in (query, key))
    i, j = np.ogrid[:27, :27]
    weights = np.exp(-0.3 * abs(i - j)) * np.einsum("hic,hjc->hij", *features)
    assert_allclose(out, weights @ value / weights.sum(-1, keepdims=True), rtol=1e-12)

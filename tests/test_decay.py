"""Decay: against the oracle at every strength, states in their order, and what it may not be."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="operator, arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import reference
from linattn.feature_maps import (
    ActivationFeatures,
    EluFeatures,
    LandmarkFeatures,
    ReluFeatures,
    Reparametrized,
    SoftmaxFeatures,
)
from linattn.typing import Features, Opaque, Tokens
from tests import pairs
from tests.attentions import fetched
from tests.pairs import DIM, LENGTH, PHI, decays, dense_decay, every_dtype, tokens

MAPS = {**pairs.MAPS, "activation": ActivationFeatures(DIM, 16, rng=1)}


def check(out, phi, arrays, bias, dtype):
    pairs.check_sums(out, phi, arrays, dtype, bias=bias)


KINDS = ["-0.5", "-200.0", "each token", "a few are strong"]


@pytest.mark.filterwarnings("ignore:.* denominators are negative")
@pytest.mark.parametrize("jump", [0.0, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_causal_equals_the_oracle(kind, jump):
    length = 150
    arrays, decay = tokens((2, 1), length), decays(kind, (2, 1), length)
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
    if xp.name == "dask" and kind != "causal":
        pytest.skip("dask: a graph for each, of the same blocks")
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


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["-0.5", "-200.0", "each token"])
def test_gradients_keep_their_digits_in_float32(kind, is_causal):
    if kind == "each token" and not is_causal:
        pytest.skip("one a head in full attention")
    arrays, decay = tokens((2,), 400), decays(kind, (2,), 400)
    pairs.check_float32_gradients(arrays, PHI, "log_decay", decay, is_causal=is_causal)


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

"""Exact windows under decay, and exact clusters under biases of offsets."""

# mypy: disable-error-code="arg-type, call-arg, call-overload, misc"

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from benchmarks import offsets
from linattn.feature_maps import LandmarkFeatures
from linattn.reference import clustered_attention
from tests import pairs
from tests.attentions import full_and_causal
from tests.pairs import DIM, MAPS, PHI, every_dtype


def log_decay_of(bias_of, is_causal, lead, length, rng):
    """Decays of tokens, or in full attention of heads."""
    if is_causal:
        return bias_of * rng.exponential(1.0, (*lead, length))
    return bias_of * rng.random((*lead, 1))


@settings(max_examples=15)
@given(data=st.data())
def test_equals_the_dense_form(xp_any_shape, draws, data):
    xp, is_causal = xp_any_shape, data.draw(st.booleans())
    length, window = data.draw(draws.lengths(90)), data.draw(st.integers(1, 20))
    rng = np.random.default_rng(data.draw(draws.seeds))
    query, key = rng.standard_normal((2, 3, length, DIM)), rng.standard_normal((2, 1, length, DIM))
    value = rng.standard_normal((length, 5))
    size = data.draw(st.sampled_from([0.0, -0.01, -0.5, -20.0]), label="decay")
    decay = log_decay_of(size, is_causal, (2, 1), length, rng)
    mask = rng.random((2, 1, length)) < data.draw(st.sampled_from([0.1, 0.8]), label="seen")
    out = linattn.linear_attention(
        *(xp.array(x) for x in (query, key, value)),
        PHI,
        is_causal=is_causal,
        key_mask=xp.array(mask),
        log_decay=xp.array(decay if is_causal else decay[..., 0]),
        exact_window=window,
        chunk_size=data.draw(draws.chunks(length), label="chunk_size"),
    )
    bias = pairs.dense_decay(decay, length, is_causal=is_causal)
    bias = bias + np.where(mask, 0, -np.inf)[..., None, :]
    bias = bias - np.maximum(bias.max(axis=-1, keepdims=True, initial=-np.inf), -1e300)
    weights = pairs.window_weights(query, key, PHI, window, is_causal) * np.exp(bias)
    pairs.check_weights(xp.numpy(out), weights, np.broadcast_to(value, (2, 3, length, 5)), 1e-11)


@every_dtype
@full_and_causal
@pytest.mark.parametrize("jump", [0.0, 30.0])
@pytest.mark.parametrize("kind", ["-0.0", "-0.5", "-200.0", "each token", "a few are strong"])
def test_any_strength_and_any_size(kind, jump, is_causal, dtype):
    if not is_causal and kind not in {"-0.0", "-0.5", "-200.0"}:
        pytest.skip("one a head in full attention")
    arrays, decay = pairs.tokens((2,), 150), pairs.decays(kind, (2,), 150)
    jumps = np.where(np.random.default_rng(5).random(150) < 0.1, jump, 0.0)
    mask = np.ones(150, bool)
    mask[20:70] = mask[100:140] = False  # all near keys of some
    for name, window in (("positive", 7), ("reparametrized", 1)):
        out = linattn.linear_attention(
            *(a.astype(dtype) for a in arrays),
            MAPS[name],
            is_causal=is_causal,
            key_bias=jumps.astype(dtype),
            key_mask=mask,
            log_decay=decay if decay.shape[-1] > 1 else decay[..., 0],
            exact_window=window,
            chunk_size=32,
        )
        bias = pairs.dense_decay(decay, 150, is_causal=is_causal) + jumps
        bias = np.where(mask, bias, -np.inf)
        query, key, value = arrays
        weights = pairs.window_weights(query, key, MAPS[name], window, is_causal)
        weights = weights * np.exp(bias - bias.max(axis=-1, keepdims=True))
        pairs.check_weights(out, weights, value, pairs.BOUNDS[dtype])


@full_and_causal
def test_every_library(xp, is_causal):
    arrays = pairs.tokens(length=12)
    decay = np.array([[-0.2], [-0.01]])
    out, state, norm = linattn.linear_attention(
        *(xp.array(a, "float32") for a in arrays),
        PHI,
        is_causal=is_causal,
        log_decay=xp.array(decay[:, 0], "float32"),
        exact_window=3,
        chunk_size=6,
        return_state=True,
        return_log_normalizer=True,
    )
    xp.assert_like(out, xp.array(arrays[0], "float32"))
    query, key, value = arrays
    bias = pairs.dense_decay(decay, 12, is_causal=is_causal)
    weights = pairs.window_weights(query, key, PHI, 3, is_causal) * np.exp(bias)
    pairs.check_weights(xp.numpy(out), weights, value, 3e-5)
    assert_allclose(xp.numpy(norm), np.log(weights.sum(axis=-1)), rtol=0, atol=3e-5)
    empty = linattn.init_state(PHI, DIM, batch_shape=(2,), like=key)
    expected = linattn.update_state(empty, key, value, PHI, log_decay=decay[:, 0])
    after = linattn.read_state(xp.array(query, "float32"), state, PHI)
    assert_allclose(xp.numpy(after), linattn.read_state(query, expected, PHI), rtol=0, atol=3e-5)
    assert_allclose(xp.numpy(state.log_decay), expected.log_decay, rtol=1e-6)
    assert state.length == 12


@full_and_causal
def test_keys_of_a_state_are_far_and_packed_sequences_apart(is_causal):
    query, key, value = pairs.tokens(length=50)
    decay = np.array([-0.1, -0.3])
    options = {"is_causal": is_causal, "log_decay": decay, "exact_window": 4}
    empty = linattn.init_state(PHI, DIM, batch_shape=(2,), like=key)
    state = linattn.update_state(empty, key[:, :20], value[:, :20], PHI, log_decay=decay)
    rest = [a[:, 20:] for a in (query, key, value)]
    out = linattn.linear_attention(*rest, PHI, **options, initial_state=state)
    near = pairs.window_weights(*rest[:2], PHI, 4, is_causal)
    weights = np.concatenate([PHI.estimate(rest[0], key[:, :20]), near], axis=-1)
    bias = pairs.dense_decay(decay[:, None], 50, is_causal=is_causal)[:, 20:]
    pairs.check_weights(out, weights * np.exp(bias), value, 1e-12)
    borders = [0, 3, 17, 17, 50]
    packed = linattn.linear_attention(query, key, value, PHI, **options, cu_seqlens=borders)
    for i, j in pairwise(borders):
        one = linattn.linear_attention(*(a[:, i:j] for a in (query, key, value)), PHI, **options)
        assert_allclose(packed[:, i:j], one, rtol=0, atol=1e-12)


def test_a_later_token_moves_no_earlier_row():
    query, key, value = pairs.tokens(length=100)
    decay = pairs.decays("each token", (2,), 100)
    options = {"is_causal": True, "exact_window": 8, "chunk_size": 16}
    before = linattn.linear_attention(query, key, value, PHI, log_decay=decay, **options)
    key[:, 60], value[:, 60], decay[:, 60] = np.nan, np.inf, -150.0
    out = linattn.linear_attention(query, key, value, PHI, log_decay=decay, **options)
    assert_allclose(out[:, :60], before[:, :60], rtol=0, atol=1e-13)
    assert_array_equal(out[:, 60:], np.nan)


@pytest.mark.frameworks
@full_and_causal
def test_frameworks_differentiate_through_it(is_causal):
    """JAX, jitted, and torch's own tape, against a difference in each argument."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = np.random.default_rng(3)
    arrays = [*pairs.tokens((2,), 8), np.array([-0.1, -0.5])]
    directions = [rng.standard_normal(a.shape) for a in arrays]
    grad = rng.standard_normal(arrays[2].shape)

    def loss(query, key, value, decay):
        out = linattn.linear_attention(
            query, key, value, PHI, is_causal=is_causal, exact_window=2, log_decay=decay
        )
        return (out * (grad if isinstance(out, np.ndarray) else type_of(grad))).sum()

    def ends(i, h):
        return loss(*(a + h * directions[i] if i == k else a for k, a in enumerate(arrays)))

    wanted = [(ends(i, 1e-5) - ends(i, -1e-5)) / 2e-5 for i in range(4)]
    type_of = torch.tensor
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    gradients = torch.autograd.grad(loss(*tensors), tensors)
    with jax.enable_x64(True):
        type_of = jax.numpy.asarray
        others = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays)
    for one, other, direction, number in zip(gradients, others, directions, wanted, strict=True):
        assert_allclose(np.sum(one.numpy() * direction), number, rtol=1e-6, atol=1e-8)
        assert_allclose(one.numpy(), other, rtol=1e-9, atol=1e-11)


# Clusters ---------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(data=st.data())
def test_clusters_with_biases_are_the_dense_form(draws, data):
    """One bias a side, or decay with the distance; keys of clusters stand anywhere."""
    length, window = data.draw(draws.lengths(60)), data.draw(st.none() | st.integers(1, 20))
    rng = np.random.default_rng(data.draw(draws.seeds))
    query, key, value = rng.standard_normal((3, 2, length, DIM))
    mask = rng.random((2, length)) < 0.8
    phi = LandmarkFeatures.fit(*rng.standard_normal((2, 2, 40, DIM)), num_features=9, rng=0)
    count = data.draw(st.integers(1, 9), label="clusters")
    if window is not None and data.draw(st.booleans(), label="window_bias"):
        near = rng.standard_normal((2, 2 * rng.integers(window + 1) + 1))
        far = data.draw(st.sampled_from([0.5, -np.inf])), rng.standard_normal(2)
        options = {"window_bias": near, "far_bias": far}
        bias = pairs.dense_window_bias(length, near, far)
    else:
        window = window or 1
        decay = -rng.exponential(0.2, 2)
        options = {"log_decay": decay}
        bias = pairs.dense_decay(decay[:, None], length, is_causal=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "feature_map was fitted to other keys")
        out = linattn.linear_attention(
            *(query, key, value),
            phi,
            key_mask=mask,
            exact_window=window,
            exact_clusters=count,
            chunk_size=data.draw(draws.chunks(length), label="chunk_size"),
            **options,
        )
    exact = {"exact_clusters": count, "exact_window": window}
    want = clustered_attention(query, key, value, phi, key_mask=mask, bias=bias, **exact)
    assert_allclose(out, want, rtol=0, atol=1e-11)


# The real sample --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["T5", "ALiBi"])
def test_the_bias_of_far_keys_is_exact(kind):
    """With a landmark for every key nothing else could be off."""
    arrays = [x[:12] for x in offsets.real_sample(dtype=np.float64)]
    phi = LandmarkFeatures.fit(*arrays[:2], num_features=256, rng=0)
    assert offsets.head_errors(kind, arrays, phi, 32, None).max() < 1e-11
    assert offsets.head_errors(kind, arrays, phi, 32, 8).max() < 1e-11


@pytest.mark.parametrize(
    ("kind", "clusters", "median", "worst"),
    [
        ("ALiBi", None, 5e-4, 0.04),
        ("ALiBi", 16, 3e-4, 0.021),
        ("ALiBi", 32, 5e-5, 0.007),
        ("T5", None, 0.032, 0.3),
        ("T5", 16, 0.01, 0.037),
        ("T5", 32, 0.003, 0.01),
    ],
)
def test_the_real_sample_is_near(kind, clusters, median, worst):
    """64 landmarks for 24 heads of 256 tokens, and a window of 32."""
    arrays = offsets.real_sample()
    phi = LandmarkFeatures.fit(*arrays[:2], num_features=64, rng=0)
    errors = offsets.head_errors(kind, arrays, phi, 32, clusters)
    assert np.median(errors) < median
    assert errors.max() < worst


@pytest.mark.parametrize(("kind", "worst"), [("ALiBi", 0.03), ("T5", 0.05)])
def test_long_real_sequences_are_near(kind, worst):
    """64 landmarks, a window and 16 clusters for 2,560 tokens: a quarter of all pairs."""
    arrays = offsets.real_sample(long=True)
    phi = LandmarkFeatures.fit(*arrays[:2], num_features=64, rng=0)
    assert offsets.head_errors(kind, arrays, phi, 32, 16).max() < worst


# Mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact_clusters": 3}, "exact_clusters needs exact_window under log_decay, got .*=3"),
        (
            {"exact_window": 4, "window_bias": np.zeros(3)},
            "window_bias must be None with log_decay",
        ),
    ],
)
def test_what_does_not_go_together_is_named(options, message):
    query, key, value = pairs.tokens(length=8)
    phi = LandmarkFeatures.fit(query, key, num_features=4, rng=0)
    with pytest.raises(ValueError, match=message):
        linattn.linear_attention(query, key, value, phi, log_decay=-0.1, **options)
    with pytest.raises(ValueError, match="one a head in full attention"):
        linattn.linear_attention(
            *(query, key, value), PHI, log_decay=np.zeros((2, 8)), exact_window=4
        )

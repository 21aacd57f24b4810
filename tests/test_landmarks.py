"""Landmarks against dense float64 forms written out: weighted clusters, their correction, sampling.

The oracle is given a fitted map's landmarks and probes (what was drawn) and computes all else from
the definitions, head by head, with loops where the code has products.
"""

from __future__ import annotations

import pickle
import warnings
from itertools import product
from typing import Any

import array_api_compat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

import linattn
from linattn._generic.corrected import guard
from linattn.feature_maps import LandmarkFeatures, Reparametrized
from linattn.typing import Partial
from tests.attentions import assert_at_most

D, E = 5, 3


def inputs(seed=0, lead=(2,), queries=40, keys=50, dim=D, spread=1.5):
    rng = np.random.default_rng(seed)
    shapes = [(*lead, queries, dim), (*lead, keys, dim), (*lead, keys, E)]
    q, k, v = (rng.standard_normal(s).astype(np.float32).astype(np.float64) for s in shapes)
    return spread * q, spread * k, v


def exact(q, k, v, mask=None, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * q @ np.swapaxes(k, -1, -2)
    if mask is not None:
        logits = np.where(mask[..., None, :], logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def log_sum(x, axis):
    top = x.max(axis=axis, keepdims=True)
    return (np.log(np.exp(x - top).sum(axis=axis, keepdims=True)) + top).squeeze(axis)


def dense_weights(q, k, b, probes, all_queries, scale, all_keys=None):
    """Attention weights ``exp(s q.b_a) g`` of one head, with every step of the definition."""
    all_keys = k if all_keys is None else all_keys
    centred = all_queries - all_queries.mean(axis=0)
    covariance = scale * centred.T @ centred / len(all_queries)
    metric = covariance + 1e-6 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    lse = log_sum(scale * probes @ all_keys.T, 1)
    columns, log_g = [], []
    for key in k:
        distances = [(key - c) @ metric @ (key - c) for c in b]
        a = int(np.argmin(distances))
        log_A = scale * probes @ key - lse
        log_Phi = scale * probes @ b[a] - lse
        columns.append(a)
        log_g.append(log_sum(log_A + log_Phi, 0) - log_sum(2 * log_Phi, 0))
    return scale * q @ b[columns].T + np.array(log_g), np.array(columns)


def dense(q, k, v, phi, all_queries=None):
    """Weighted clusters of all heads, dense."""
    all_queries = q if all_queries is None else all_queries
    out = np.empty((*q.shape[:-1], v.shape[-1]))
    for head in np.ndindex(q.shape[:-2]):
        logits, _ = dense_weights(
            q[head],
            k[head],
            phi.landmarks[head][phi.used[head]],
            phi.probes[head],
            all_queries[head],
            phi.scale,
        )
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[head] = weights @ v[head] / weights.sum(axis=-1, keepdims=True)
    return out


def dense_corrected(q, k, v, phi, reading=None):
    """The same with the least-squares correction and its guard; also which queries it served."""
    reading = q if reading is None else reading
    out, served = np.empty((*reading.shape[:-1], v.shape[-1])), np.empty(reading.shape[:-1], bool)
    for head in np.ndindex(q.shape[:-2]):
        b, probes = phi.landmarks[head], phi.probes[head]
        _, columns = dense_weights(q[head], k[head], b, probes, q[head], phi.scale)
        lse = log_sum(phi.scale * probes @ k[head].T, 1)
        A = np.exp(phi.scale * probes @ k[head].T - lse[:, None])
        Phi = np.exp(phi.scale * probes @ b.T - lse[:, None])
        values_and_one = np.concatenate([v[head], np.ones((len(k[head]), 1))], axis=1)
        S = np.zeros((len(b), values_and_one.shape[1]))
        for j, a in enumerate(columns):
            S[a] += A[:, j] @ Phi[:, a] / (Phi[:, a] @ Phi[:, a]) * values_and_one[j]
        norms = np.sqrt((Phi * Phi).sum(axis=0))
        unit = Phi / norms
        normal = unit.T @ unit + 0.1 * np.eye(len(b))
        S1 = S + np.linalg.solve(normal, unit.T @ (A @ values_and_one - Phi @ S)) / norms[:, None]
        for i, query in enumerate(reading[head]):
            features = np.exp(phi.scale * b @ query)
            plain, better = features @ S, features @ S1
            ratio = better[-1] / plain[-1]
            size = features @ np.abs(S1[:, -1])
            good = 0.5 < ratio < 2 and size < 4 * abs(better[-1])
            chosen = better if good else plain
            served[(*head, i)] = good
            out[(*head, i)] = chosen[:-1] / chosen[-1]
    return out, served


def drawn(seed, size, p):
    """What a fit draws, in its order: key strata, query strata and order, Gumbel noise."""
    rng = np.random.default_rng(seed)
    return *rng.random((3, max(size, p))), rng.gumbel(size=size)


def fitted_by_hand(q, k, m, p, scale, seed, bias=0.0):
    """Probes and landmarks of one short head, token by token."""
    *_, order, gumbel = drawn(seed, 1024, p)
    probes = q[[int((i + order[i]) * len(q) / p) for i in range(p)]]
    centred = q - q.mean(axis=0)
    covariance = centred.T @ centred / len(q)
    metric = covariance + 1e-6 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))

    def distances(centres):
        return np.array([[(x - c) @ metric @ (x - c) for c in centres] for x in k])

    logits = scale * probes @ k.T + bias
    A = np.exp(logits - log_sum(logits, 1)[:, None])
    w = (A * A).mean(axis=0)
    chosen, odds = [], w
    for done in range(4):
        fresh = [j for j in np.argsort(-(np.log(odds) + gumbel[: len(k)])) if j not in chosen]
        chosen += fresh[: m * (done + 1) // 4 - m * done // 4]
        # What is not 0 by rounding is 0 for those chosen, and they are not drawn again.
        odds = w * np.maximum(distances(k[chosen]).min(axis=1), 1e-300)
    b = k[chosen]
    for _ in range(3):
        nearest = distances(b).argmin(axis=1)
        for c in range(m):
            members = nearest == c
            if members.any():
                b[c] = w[members] @ k[members] / w[members].sum()
    return probes, by_size(b)


def by_size(b):
    """Rows in an order of their own: landmarks come in any."""
    return b[np.lexsort(b.T)]


def attend(q, k, v, phi, **options):
    return linattn.linear_attention(q, k, v, phi, **options)


# Linear forms equal dense forms -----------------------------------------------------------------


def test_landmarks_are_those_of_the_definition():
    q, k, _ = inputs()
    phi = LandmarkFeatures.fit(q, k, num_features=9, num_probes=20, rng=7)
    for head in range(2):
        probes, landmarks = fitted_by_hand(q[head], k[head], 9, 20, phi.scale, 7)
        assert_allclose(phi.probes[head], probes, atol=1e-13)
        assert_allclose(by_size(phi.landmarks[head]), landmarks, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("backends", [True, False])
def test_corrected_equals_dense(dtype, backends):
    q, k, v = inputs(seed=1, spread=2.0)
    phi = LandmarkFeatures.fit(q, k, num_features=9, num_probes=18, rng=1)
    # Landmarks too far out, and queries unlike the probes, are what the guard is for.
    given = (phi.probes, phi.log_normalizers, phi.metric)
    phi = LandmarkFeatures(2 * phi.landmarks, *given, corrected=True)
    want, served = dense_corrected(q, k, v, phi, -q)
    assert 0.2 < served.mean() < 0.95
    q, k, v = (x.astype(dtype) for x in (-q, k, v))
    if backends:
        out = attend(q, k, v, phi, chunk_size=16)
    else:
        with linattn.without_backends():
            out = attend(q, k, v, phi, chunk_size=16)
    # float32 feels the cancellation of signed weights.
    assert_allclose(out, want, atol={"float64": 1e-11, "float32": 3e-5}[dtype])


def test_arrays_of_every_library(xp):
    q, k, v = inputs()
    phi = LandmarkFeatures.fit(q, k, num_features=9, num_probes=20, rng=1)
    query, key, value = (xp.array(x, "float64") for x in (q, k, v))
    fitted = LandmarkFeatures.fit(query, key, num_features=9, num_probes=20, rng=1)
    assert_allclose(fitted.landmarks, phi.landmarks, atol=1e-12)
    assert_allclose(fitted.log_normalizers, phi.log_normalizers, atol=1e-12)
    out = attend(query, key, value, fitted)
    xp.assert_like(out, query, shape=(2, 40, E))
    assert_allclose(xp.numpy(out), dense(q, k, v, phi), atol=1e-11)


def test_masks_and_the_correction_in_every_library(xp_any_shape):
    xp = xp_any_shape
    q, k, v = inputs()
    query, key, value = (xp.array(x, "float64") for x in (q, k, v))
    mask = np.arange(50) < 45
    options: Any = dict(num_features=9, num_probes=20, corrected=True, rng=1)
    phi = LandmarkFeatures.fit(query, key, key_mask=xp.array(mask), **options)
    sliced = LandmarkFeatures.fit(q, k[:, :45], **options)
    assert_allclose(phi.landmarks, sliced.landmarks, atol=1e-12)
    out = attend(query, key, value, phi, key_mask=xp.array(mask))
    want = dense_corrected(q, k[:, :45], v[:, :45], sliced)[0]
    assert_allclose(xp.numpy(out), want, atol=1e-10)


def test_narrow_dtypes_fit_in_float32(xp_any_shape):
    xp = xp_any_shape
    q, k, v = inputs()
    query, key, value = (xp.array(x, "float16") for x in (q, k, v))
    phi = LandmarkFeatures.fit(query, key, num_features=9, rng=1)
    out = attend(query, key, value, phi)
    assert out.dtype == query.dtype
    q, k, v = (xp.numpy(x).astype(np.float64) for x in (query, key, value))
    assert_allclose(xp.numpy(out), dense(q, k, v, phi), atol=5e-3)


@pytest.mark.frameworks
def test_traced_arrays_are_refused_and_maps_work_inside():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    host_q, host_k, host_v = inputs()
    q, k, v = (jax.numpy.asarray(x) for x in (host_q, host_k, host_v))
    phi = LandmarkFeatures.fit(q, k, num_features=9, rng=1)
    with pytest.raises(TypeError, match="query must have values to fit to, got a traced"):
        jax.jit(lambda q: attend(q, k, v, LandmarkFeatures.fit(q, k, rng=1)))(q)
    out = jax.jit(lambda q, k, v: attend(q, k, v, phi))(q, k, v)
    want = dense(host_q, host_k, host_v, phi)
    assert_allclose(np.asarray(out), want, atol=1e-11)


@pytest.mark.frameworks
def test_fitting_keeps_no_gradient_tape():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(x, requires_grad=True) for x in inputs())
    phi = LandmarkFeatures.fit(q, k, num_features=9, rng=1)
    attend(q, k, v, phi).sum().backward()
    assert q.grad is not None
    assert bool(torch.isfinite(k.grad).all())


def test_a_landmark_without_keys_is_corrected_too():
    q, k, v = inputs()
    phi = LandmarkFeatures.fit(q, k, num_features=9, num_probes=20, rng=2)
    far = phi.landmarks[:, :1] + 4.0
    landmarks = np.concatenate([phi.landmarks, far], axis=1)
    given = (phi.probes, phi.log_normalizers, phi.metric)
    phi = LandmarkFeatures(landmarks, *given, corrected=True)
    _, state = attend(q, k, v, phi, return_state=True)
    assert_array_equal(state.log_scale[:, 9], -np.inf)
    want, served = dense_corrected(q, k, v, phi)
    assert served.mean() > 0.9
    assert_allclose(attend(q, k, v, phi), want, atol=1e-11)


def test_the_guard_condition_by_condition():
    # Columns: corrected numerator and denominator, the latter without signs, then uncorrected.
    rows = {
        (2.0, 1.9, 1.9): True,
        (2.0, 4.1, 4.1): False,
        (2.0, 0.9, 0.9): False,
        (1.0, 1.0, 3.9): True,
        (1.0, 1.0, 4.1): False,
        (1.0, -1.0, 1.0): False,
        (0.0, 0.0, 0.0): False,
        (1.0, np.inf, np.inf): False,
        (1.0, np.nan, np.nan): False,
    }
    num_den = np.array([[7.0, d1, size, 5.0, d0] for d0, d1, size in rows])
    part = guard(Partial(num_den, np.zeros((len(rows), 1))))
    assert_array_equal(part.num_den[:, 0], np.where(list(rows.values()), 7.0, 5.0))


# Invariants -------------------------------------------------------------------------------------


shapes = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9), st.integers(1, 20))


@given(shape=shapes, seed=st.integers(0, 2**32 - 1), corrected=st.booleans())
def test_constant_values_come_back_and_outputs_stay_in_the_hull(shape, seed, corrected):
    queries, keys, m, p = shape
    p = max(p, 2 * m) if corrected else p
    q, k, v = inputs(seed, (2,), queries, keys)
    phi = LandmarkFeatures.fit(q, k, num_features=m, num_probes=p, corrected=corrected, rng=seed)
    assert_allclose(attend(q, k, np.full_like(v, 2.5), phi), 2.5, rtol=1e-9)
    if corrected:
        return
    out = attend(q, k, v, phi)
    assert_allclose(out, dense(q, k, v, phi), atol=1e-11)
    low, high = v.min(axis=-2, keepdims=True), v.max(axis=-2, keepdims=True)
    assert_at_most(low - 1e-12, out)
    assert_at_most(out, high + 1e-12)


@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_landmarks_for_every_key_are_exact(shape, seed):
    queries, keys, extra, p = shape
    q, k, v = inputs(seed, (2,), queries, keys)
    phi = LandmarkFeatures.fit(q, k, num_features=keys - 1 + extra, num_probes=p, rng=seed)
    assert_array_equal(phi.used.sum(axis=-1), min(keys, keys - 1 + extra))
    assert_allclose(attend(q, k, v, phi), exact(q, k, v), atol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_what_leaves_softmax_unchanged_leaves_the_map_unchanged(seed):
    q, k, v = inputs(seed)
    rng = np.random.default_rng(seed)
    options: Any = dict(num_features=9, num_probes=20, rng=3)
    want = attend(q, k, v, LandmarkFeatures.fit(q, k, **options))
    shifted = k + 3 * rng.standard_normal(D)
    out = attend(q, shifted, v, LandmarkFeatures.fit(q, shifted, **options))
    assert_allclose(out, want, atol=1e-9)
    M = np.linalg.qr(rng.standard_normal((D, D)))[0] * np.linspace(0.5, 2, D)
    x, y = q @ M, k @ np.linalg.inv(M).T
    out = attend(x, y, v, LandmarkFeatures.fit(x, y, **options))
    # The 1e-6 of the identity in the metric is not transformed: no key here is as near to two.
    assert_allclose(out, want, atol=1e-9)
    for scale in (1e-12, 1e12):
        x, y = q * scale, k / scale
        out = attend(x, y, v, LandmarkFeatures.fit(x, y, **options))
        assert_allclose(out, want, atol=1e-9)


def test_scales():
    q, k, v = inputs()
    options: Any = dict(num_features=9, num_probes=20, rng=3)
    want = attend(q, k, v, LandmarkFeatures.fit(q, k, scale=0.2, **options))
    root = np.sqrt(0.2)
    out = attend(
        root * q, root * k, v, LandmarkFeatures.fit(root * q, root * k, scale=1, **options)
    )
    assert_allclose(out, want, atol=1e-11)


# Masks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("length", [50, 1500])
def test_padding_is_no_padding(length, corrected):
    q, k, v = inputs(keys=length, queries=length)
    pad = np.full((2, 300, D), np.nan)
    mask = np.arange(length + 300) < length
    options: Any = dict(num_features=9, num_probes=20, corrected=corrected, rng=4)
    plain = LandmarkFeatures.fit(q, k, **options)
    padded_q, padded_k = np.concatenate([q, pad], axis=1), np.concatenate([k, pad], axis=1)
    padded = LandmarkFeatures.fit(padded_q, padded_k, key_mask=mask, query_mask=mask, **options)
    for name in ("landmarks", "probes", "log_normalizers", "metric"):
        assert_allclose(getattr(padded, name), getattr(plain, name), rtol=1e-12, atol=1e-12)
    want = attend(q, k, v, plain)
    v = np.concatenate([v, pad[..., :E]], axis=1)
    assert_allclose(attend(q, padded_k, v, padded, key_mask=mask), want, atol=1e-10)


@pytest.mark.parametrize("length", [60, 1200])
def test_masks_of_each_batch_element_are_slices(length):
    rng = np.random.default_rng(5)
    q, k, v = inputs(lead=(3, 2), keys=length, queries=length)
    key_mask, query_mask = rng.random((2, 3, 1, length)) < 0.9
    if length == 60:
        # Fewer keys than landmarks, and fewer queries than probes.
        key_mask[1, 0, 7:] = False
        query_mask[2, 0, 8:] = False
    options: Any = dict(num_features=9, num_probes=20, rng=4)
    dirty_q = np.where(query_mask[..., None], q, np.nan)
    dirty_k = np.where(key_mask[..., None], k, np.nan)
    phi = LandmarkFeatures.fit(
        dirty_q, dirty_k, key_mask=key_mask, query_mask=query_mask, **options
    )
    out = attend(q, dirty_k, v, phi, key_mask=key_mask)
    for i in range(3):
        rows, seen = query_mask[i, 0], key_mask[i, 0]
        alone = LandmarkFeatures.fit(q[i][:, rows], k[i][:, seen], **options)
        want = attend(q[i], k[i][:, seen], v[i][:, seen], alone)
        assert_allclose(out[i], want, atol=1e-10)
        assert_allclose(phi.landmarks[i], alone.landmarks, atol=1e-12)
        assert_allclose(phi.metric[i], alone.metric, atol=1e-12)


def test_keys_without_attention_are_landmarks_before_no_keys():
    q, k, _ = inputs(spread=100.0)
    mask = np.arange(50) < np.array([[12], [50]])
    phi = LandmarkFeatures.fit(q, k, num_features=9, key_mask=mask, rng=0)
    assert_array_equal(phi.used, True)


def test_later_keys_go_to_landmarks_that_are_used():
    q, k, _ = inputs(keys=3)
    phi = LandmarkFeatures.fit(q, k, num_features=9, rng=0)
    later = k.mean(axis=-2, keepdims=True) + 0.1 * inputs(seed=1)[1]
    state = linattn.init_state(phi, E, batch_shape=(2,), like=k)
    state = linattn.update_state(state, later, inputs()[2], phi)
    assert_array_equal(state.z[:, 3:], 0)
    assert_array_equal((state.z[:, :3] > 0).any(axis=-1), True)


@pytest.mark.parametrize("corrected", [False, True])
def test_heads_that_see_no_key_or_no_query(corrected):
    q, k, v = inputs(lead=(3,))
    key_mask = np.ones((3, 50), dtype=bool)
    key_mask[1] = False
    query_mask = np.ones((3, 40), dtype=bool)
    query_mask[2] = False
    options: Any = dict(num_features=9, num_probes=20, corrected=corrected, rng=1)
    phi = LandmarkFeatures.fit(q, k, key_mask=key_mask, query_mask=query_mask, **options)
    out = attend(q, k, v, phi, key_mask=key_mask)
    assert_array_equal(out[1], 0)
    assert_array_equal(phi.used[1], 0)
    assert_allclose(out[0], attend(q[0], k[0], v[0], LandmarkFeatures.fit(q[0], k[0], **options)))
    assert_array_equal(np.isfinite(out), True)


def test_grouped_queries_have_landmarks_for_each_pair_of_heads():
    q, _, _ = inputs(lead=(2, 3))
    _, k, v = inputs(lead=(2, 1), seed=1)
    options: Any = dict(num_features=9, num_probes=20, rng=1)
    phi = LandmarkFeatures.fit(q, k, **options)
    assert phi.landmarks.shape == (2, 3, 9, D)
    out = attend(q, k, v, phi)
    for i, j in np.ndindex(2, 3):
        alone = LandmarkFeatures.fit(q[i, j], k[i, 0], **options)
        assert_allclose(out[i, j], attend(q[i, j], k[i, 0], v[i, 0], alone), atol=1e-11)


# Weights of keys --------------------------------------------------------------------------------


def with_bias(keys=50, queries=40):
    q, k, v = inputs(keys=keys, queries=queries)
    return (q, k, v), 3 * np.random.default_rng(9).standard_normal((2, keys))


def test_biased_landmarks_are_those_of_the_definition():
    (q, k, _), bias = with_bias()
    phi = LandmarkFeatures.fit(q, k, num_features=9, num_probes=20, key_bias=bias, rng=7)
    for head in range(2):
        rows = q[head], k[head]
        probes, landmarks = fitted_by_hand(*rows, 9, 20, phi.scale, 7, bias[head])
        assert_allclose(by_size(phi.landmarks[head]), landmarks, atol=1e-12)
        want = log_sum(phi.scale * probes @ k[head].T + bias[head], 1)
        assert_allclose(phi.log_normalizers[head], want, atol=1e-12)


@pytest.mark.parametrize("corrected", [False, True])
def test_biases_of_keys_in_every_library(xp, corrected):
    (q, k, v), bias = with_bias()
    bias[:, :5] = -np.inf
    options: Any = dict(num_features=9, num_probes=20, corrected=corrected, rng=1)
    phi = LandmarkFeatures.fit(q, k, key_bias=bias, **options)
    q_, k_, v_, bias_ = (xp.array(x) for x in (q, k, v, bias))
    found = LandmarkFeatures.fit(q_, k_, key_bias=bias_, **options)
    assert_allclose(found.landmarks, phi.landmarks, atol=1e-10)
    out = xp.numpy(attend(q_, k_, v_, found, key_bias=bias_))
    if not corrected:
        want = linattn.reference.kernel_attention(q, k, v, phi, bias=bias[:, None, :])
        assert_allclose(out, want, atol=1e-10)
    # The fit's error is a part of that of a map which was told nothing.
    exact = linattn.reference.softmax_attention(q, k, v, bias=bias[:, None, :])
    untold = LandmarkFeatures.fit(q, k, key_mask=bias > -np.inf, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", OTHER_KEYS)
        other = attend(q, k, v, untold, key_bias=bias)
    assert np.linalg.norm(out - exact) < np.linalg.norm(other - exact)


@pytest.mark.parametrize("length", [50, 1500])
def test_a_bias_of_zero_is_none_and_minus_infinity_a_mask(length):
    q, k, v = inputs(keys=length, queries=length)
    options: Any = dict(num_features=9, num_probes=20, rng=4)
    mask = np.random.default_rng(0).random(length) < 0.8
    phi = LandmarkFeatures.fit(q, k, key_mask=mask, **options)
    bias = np.where(mask, 0.0, -np.inf)
    found = LandmarkFeatures.fit(q, np.where(mask[:, None], k, np.nan), key_bias=bias, **options)
    for name in ("landmarks", "used", "log_normalizers", "metric"):
        assert_allclose(getattr(found, name), getattr(phi, name), rtol=1e-12, atol=1e-12)
    # A common weight changes no fit, however large.
    common = LandmarkFeatures.fit(q, k, key_bias=bias + 700, **options)
    assert_allclose(common.landmarks, phi.landmarks, atol=1e-9)
    assert_allclose(common.log_normalizers, phi.log_normalizers + 700, rtol=1e-12)
    with pytest.warns(UserWarning, match="fit it to this sequence, with its key_bias"):
        attend(q, k, v, common, key_mask=mask)


# Keys of another sequence -----------------------------------------------------------------------

OTHER_KEYS = "feature_map was fitted to other keys"


def test_logits_that_are_rounded_by_much_are_of_the_same_keys():
    """Logits of 1e9 in float32: log normalizers are rounded by hundreds, and nobody is warned."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 128, 32), np.float32)
    query, key = 2e5 * query, 1e4 * key
    phi = LandmarkFeatures.fit(query, key, num_features=16, rng=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linattn.linear_attention(query, key, value, phi)


def test_keys_of_another_sequence_warn(xp):
    """The sample's other layer: an error of 1.3 in place of .06."""
    q, k, v = linattn.datasets.pretrained_qkv()
    phi = LandmarkFeatures.fit(q[0], k[0], rng=0)
    own: Any = [xp.array(x[0]) for x in (q, k, v)]
    other: Any = [xp.array(x[1]) for x in (q, k, v)]
    attend(own[0], own[1], own[2], phi, exact_window=32)
    if array_api_compat.is_dask_array(own[0]):
        # What would have to be computed to be inspected is not inspected.
        attend(other[0], other[1], other[2], phi)
        return
    with pytest.warns(UserWarning, match=OTHER_KEYS) as caught:
        attend(other[0], other[1], other[2], phi, exact_window=32)
    # The caller's line: attend, above.
    assert [warning.filename for warning in caught] == [__file__]
    pickled = pickle.loads(pickle.dumps(phi))
    with pytest.warns(UserWarning, match=OTHER_KEYS):
        attend(other[0], other[1], other[2], pickled)


def test_the_same_keys_in_other_order_padded_rounded_or_shifted_by_state_do_not_warn():
    q, k, v = inputs()
    phi = LandmarkFeatures.fit(q, k, num_features=9, rng=1)
    order = np.random.default_rng(0).permutation(50)
    attend(q[:, ::-1], k[:, order], v[:, order], phi)
    for dtype in (np.float32, np.float16):
        attend(q.astype(dtype), k.astype(dtype), v.astype(dtype), phi)
    padded: Any = [np.concatenate([x, np.full_like(x, np.nan)], axis=1) for x in (k, v)]
    attend(q, padded[0], padded[1], phi, key_mask=np.arange(100) < 50)
    _, state = attend(q, k, v, phi, return_state=True)
    more = inputs(seed=1)[1]
    attend(q, more, v, phi, initial_state=state)
    linattn.read_state(q, linattn.update_state(state, more, v, phi), phi)


@pytest.mark.parametrize(("apart", "warns"), [(0.045, False), (0.055, True)])
def test_how_far_normalizers_may_be_apart(apart, warns):
    q, k, v = inputs()
    phi = LandmarkFeatures.fit(q, k, num_features=9, rng=1)
    given = (phi.landmarks, phi.probes, phi.log_normalizers - apart, phi.metric)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend(q, k, v, LandmarkFeatures(*given))
    assert len(caught) == warns


def test_other_keys_can_be_meant():
    q, k, v = inputs()
    phi = LandmarkFeatures.fit(q, k, num_features=9, rng=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", OTHER_KEYS)
        attend(q, inputs(seed=1)[1], v, phi)


# Long sequences ---------------------------------------------------------------------------------


def test_normalizers_are_of_all_keys_and_landmarks_of_a_sample():
    q, k, v = inputs(keys=3000, queries=2000, lead=(2,), dim=2)
    # Several blocks, each with larger logits than those before.
    k = np.take_along_axis(k, np.argsort((k**2).sum(axis=-1))[..., None], axis=-2)
    phi = LandmarkFeatures.fit(q, k, num_features=9, num_probes=600, rng=0)
    want = log_sum(phi.scale * phi.probes @ np.swapaxes(k, -1, -2), -1)
    assert_allclose(phi.log_normalizers, want, atol=1e-11)
    for probe in phi.probes[0, ::20]:
        assert (q[0] == probe).all(axis=-1).any()
    error = np.linalg.norm(attend(q, k, v, phi) - exact(q, k, v)) / np.linalg.norm(exact(q, k, v))
    uniform = np.linalg.norm(v.mean(axis=-2, keepdims=True) - exact(q, k, v))
    assert error < 0.9 * uniform / np.linalg.norm(exact(q, k, v))


# Landmark importance sampling -------------------------------------------------------------------


def test_sampled_rows_and_weights_follow_the_definition():
    q, k, _ = inputs(queries=6, keys=7)
    phi = LandmarkFeatures.sample(q, k, num_features=2, rng=0)
    assert phi.projection.shape == (2, 2, D)
    assert phi.log_weights is not None
    assert not phi.causal
    # With as many landmarks as rows every landmark is one q + k; find them by the weights.
    sums = np.sqrt(phi.scale) * (q[:, :, None] + k[:, None]).reshape(2, -1, D)
    for head in range(2):
        found = 0
        for chosen in subsets(sums[head], phi.projection[head]):
            exponents = phi.projection[head] @ chosen.T - (chosen**2).sum(axis=-1) / 2
            found += np.allclose(-log_sum(exponents, -1) + np.log(2), phi.log_weights[head])
        assert found


def subsets(sums, rows):
    """Every choice of one landmark near each row."""
    near = [np.argsort(((sums - row) ** 2).sum(axis=-1))[:20] for row in rows]
    return (sums[list(index)] for index in product(*near))


def test_sampling_is_unbiased_given_its_landmarks():
    # One query and one key: there is one landmark, whatever the seed, and the estimate is exact.
    q, k, _ = inputs(queries=1, keys=1)
    phi = LandmarkFeatures.sample(q, k, num_features=3, rng=0)
    assert phi.unbiased
    assert_allclose(phi.estimate(q, k), phi.kernel(q, k), rtol=1e-11)
    # Other pairs: the mean over omega, within 6 standard errors (false alarms below 1e-6).
    x, y, _ = inputs(seed=1, queries=3, keys=4, spread=0.4)
    q, k, _ = inputs(queries=1, keys=1, spread=0.4)
    estimates = np.stack(
        [LandmarkFeatures.sample(q, k, num_features=3, rng=s).estimate(x, y) for s in range(300)]
    )
    deviation = estimates.mean(axis=0) - phi.kernel(x, y)
    assert_array_less(np.abs(deviation), 6 * estimates.std(axis=0) / np.sqrt(300))
    # Several landmarks, drawn anew: unbiased whatever they are.
    q, k, _ = inputs(queries=5, keys=5, spread=0.4)
    estimates = np.stack(
        [LandmarkFeatures.sample(q, k, num_features=3, rng=s).estimate(x, y) for s in range(300)]
    )
    deviation = estimates.mean(axis=0) - phi.kernel(x, y)
    assert_array_less(np.abs(deviation), 6 * estimates.std(axis=0) / np.sqrt(300))


def test_sampling_beats_random_features_and_masks_are_slices():
    q, k, v = linattn.datasets.pretrained_qkv()
    q, k, v = q[1], k[1], v[1]
    want = exact(q, k, v)

    def error(phi):
        return np.linalg.norm(attend(q, k, v, phi) - want) / np.linalg.norm(want)

    phi = LandmarkFeatures.sample(q, k, num_features=256, rng=0)
    assert error(phi) < 0.8 * error(linattn.feature_maps.PositiveFeatures(32, 256, rng=0))
    lengths = np.array([200, 3, *[256] * 10])
    mask = np.arange(256) < lengths[:, None]
    dirty = np.where(mask[..., None], k, np.float32(np.nan))
    padded = LandmarkFeatures.sample(q, dirty, num_features=8, key_mask=mask, rng=0)
    for head, length in enumerate(lengths[:3]):
        sliced = LandmarkFeatures.sample(q[head], k[head, :length], num_features=8, rng=0)
        assert_allclose(padded.projection[head], sliced.projection, atol=1e-5)


# As an object -----------------------------------------------------------------------------------


@pytest.mark.parametrize("corrected", [False, True])
def test_states_merge_and_are_saved(tmp_path, corrected):
    q, k, v = inputs()
    phi = LandmarkFeatures.fit(q, k, num_features=9, num_probes=20, corrected=corrected, rng=1)
    want = attend(q, k, v, phi)
    assert phi.num_features == (29 if corrected else 9)
    start = linattn.init_state(phi, E, batch_shape=(2,), like=k)
    states = [
        linattn.update_state(start, k[:, rows], v[:, rows], phi)
        for rows in (slice(0, 11), slice(11, 12), slice(12, None))
    ]
    merged = linattn.merge_states(linattn.merge_states(states[2], states[0]), states[1])
    assert_allclose(linattn.read_state(q, merged, phi), want, atol=1e-10)
    linattn.save_state(tmp_path / "state.npz", merged, phi)
    loaded = linattn.load_state(tmp_path / "state.npz", pickle.loads(pickle.dumps(phi)))
    assert_allclose(linattn.read_state(q, loaded, phi), want, atol=1e-10)
    other = LandmarkFeatures.fit(q, k, num_features=9, num_probes=20, corrected=corrected, rng=2)
    with pytest.raises(ValueError, match="another feature map"):
        linattn.load_state(tmp_path / "state.npz", other)


def test_representation_equality_and_immutability():
    q, k, _ = inputs()
    phi = LandmarkFeatures.fit(q, k, num_features=9, rng=1)
    assert repr(phi) == (
        f"LandmarkFeatures(dim=5, num_features=9, heads=(2,), num_probes=40, scale={5**-0.5}, "
        f"fingerprint={linattn.init_state(phi, 1, like=q).fingerprint})"
    )
    assert phi == LandmarkFeatures.fit(q, k, num_features=9, rng=1)
    assert phi != LandmarkFeatures.fit(q, k, num_features=9, rng=2)
    assert phi == pickle.loads(pickle.dumps(phi))
    corrected = LandmarkFeatures.fit(q, k, num_features=9, corrected=True, rng=1)
    assert phi != corrected
    assert phi.fingerprint() != corrected.fingerprint()
    assert "corrected=True" in repr(corrected)
    with pytest.raises(AttributeError, match="immutable"):
        phi.landmarks = phi.probes
    with pytest.raises(ValueError, match="read-only"):
        phi.landmarks[0] = 0


def test_causal_use_is_refused():
    q, k, v = inputs(keys=40)
    for corrected in (False, True):
        phi = LandmarkFeatures.fit(q, k, num_features=9, corrected=corrected, rng=1)
        with pytest.raises(ValueError, match="would leak later keys"):
            attend(q, k, v, phi, is_causal=True)
    with pytest.raises(ValueError, match="would leak later keys"):
        attend(q, k, v, LandmarkFeatures.sample(q, k, rng=1), is_causal=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_features=0), "num_features must be at least 1, got 0"),
        (dict(num_probes=2.0), "num_probes must be a positive integer, got 2.0"),
        (dict(corrected=True, num_probes=100), "num_probes must be at least 2 num_features, 128"),
        (dict(scale=-1.0), "scale must be a positive finite number, got -1.0"),
        (dict(rng=True), "rng must be a non-negative int"),
        (dict(key_mask=np.ones(49, bool)), r"key_mask must have shape \(50,\), or one axis"),
        (dict(key_bias=np.full(50, np.nan)), "key_bias must hold no NaN"),
        (dict(key_bias=np.zeros(49)), r"key_bias must have shape \(50,\), or one axis"),
        (dict(query_mask=np.ones(50, bool)), r"query_mask must have shape \(40,\), or one axis"),
        (dict(query_mask=np.ones(40)), "query_mask must be boolean"),
        (dict(query=np.ones((3, 40, D))), "leading axes must broadcast"),
        (dict(query=np.ones((2, 0, D))), "at least one token"),
        (dict(query=np.ones((2, 40, 4))), "query and key must have one dim"),
        (dict(query=np.full((2, 40, D), np.nan)), "must be finite where they are not masked"),
        (dict(key=np.full((2, 50, D), np.inf)), "must be finite where they are not masked"),
    ],
)
def test_fit_says_what_is_wrong(change, message):
    q, k, _ = inputs()
    arguments = dict(query=q, key=k) | change
    with pytest.raises((TypeError, ValueError), match=message):
        LandmarkFeatures.fit(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(probes=np.ones((4, 2))), "landmarks must have shape"),
        (dict(log_normalizers=np.zeros(3)), "landmarks must have shape"),
        (dict(log_normalizers=np.full(4, np.inf)), "with a finite one for each head"),
        (dict(log_normalizers=np.full(4, np.nan)), "must be finite"),
        (dict(used=np.ones(3)), r"used must be boolean and of shape \(3,\)"),
        (dict(metric=np.full((5, 5), np.nan)), "must be finite"),
        (dict(landmarks=np.ones((2, 3, D)), metric=np.ones((3, D, D))), "leading axes"),
    ],
)
def test_constructor_says_what_is_wrong(change, message):
    arguments = dict(
        landmarks=np.ones((3, D)),
        probes=np.ones((4, D)),
        log_normalizers=np.zeros(4),
        metric=np.eye(D),
    )
    with pytest.raises(ValueError, match=message):
        LandmarkFeatures(**(arguments | change))


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e19, 1e22])
def test_keys_of_any_size_that_queries_make_up_for(size):
    """Squares of these keys leave the range of float32; their logits do not."""
    query, key, value = (x.astype(np.float32) for x in inputs(keys=300, queries=300))
    want = fitted(query, key, value)
    found = fitted((query / size).astype(np.float32), (key * size).astype(np.float32), value)
    assert_allclose(found, want, rtol=0, atol=1e-3)


def fitted(query, key, value):
    phi = LandmarkFeatures.fit(query, key, num_features=32, rng=0)
    return linattn.linear_attention(query, key, value, phi)


@pytest.mark.filterwarnings("ignore:feature_map was fitted to other keys")
@pytest.mark.parametrize("change", [False, True])
def test_only_probes_or_weights_have_heads(change):
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 50, D))
    probes = rng.standard_normal((10, D) if change else (3, 10, D))
    phi: Any = LandmarkFeatures(rng.standard_normal((6, D)), probes, np.zeros(10), np.eye(D))
    if change:
        phi = Reparametrized(phi, rng.standard_normal((3, D)))
    out = linattn.linear_attention(query, key, value, phi)
    assert out.shape == (3, 50, D)
    assert_allclose(out, linattn.reference.kernel_attention(query, key, value, phi), atol=1e-12)


def test_lloyd_steps():
    """Without any, landmarks are keys."""
    query, key = np.random.default_rng(0).standard_normal((2, 2, 300, 8))
    found = [
        LandmarkFeatures.fit(query, key, num_features=20, lloyd_steps=steps, rng=0).landmarks
        for steps in range(4)
    ]
    off = [
        np.linalg.norm(key[:, :, None] - b[:, None], axis=-1).min(axis=1).max(axis=-1)
        for b in found
    ]
    assert_allclose(off[0], 0, atol=1e-12)
    assert_array_less(0.1, off[1])
    assert abs(found[3] - found[2]).max() > 0
    default = LandmarkFeatures.fit(query, key, num_features=20, rng=0)
    assert_array_equal(default.landmarks, found[3])
    with pytest.raises(ValueError, match="lloyd_steps must be at least 0, got -1"):
        LandmarkFeatures.fit(query, key, lloyd_steps=-1)

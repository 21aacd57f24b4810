"""CoresetAttention: equal to its definition however it is cut, causal, bounded, kept on disk."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, call-arg, misc"

from __future__ import annotations

import copy
import pickle
import sys
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import StateFileError
from linattn.coreset import CoresetAttention
from tests.attentions import inputs
from tests.interrupted import is_interrupted_at

# The definition, token by token -------------------------------------------------------------------


def log_sum(x):
    top = max(x, default=-np.inf)
    return top if top == -np.inf else top + np.log(sum(np.exp(a - top) for a in x))


def softmax_row(logits, values):
    """0 where nothing has a weight."""
    total = log_sum(logits)
    out = np.zeros(values[0].shape)
    for logit, value in zip(logits, values, strict=True):
        if logit > -np.inf:
            out += np.exp(logit - total) * value
    return out


def reduce_entries(entries, queries, noise, m):
    """Replace entries (b, s, u) by m of them."""
    b, s, u = (np.array(x) for x in zip(*entries, strict=True))
    d = b.shape[1]
    c, sigma = np.zeros(d), np.zeros((d, d))
    if len(queries):
        c = np.mean(queries, axis=0)
        sigma = np.cov(np.transpose(queries), bias=True).reshape(d, d)
    spread = np.trace(sigma) / d
    sigma = sigma + 1e-6 * (spread if spread > 0 else 1.0) * np.eye(d)
    L = np.linalg.cholesky(sigma)
    live = s > -np.inf
    mean = b[live].mean(axis=0) if live.any() else np.zeros(d)
    x = b - mean
    log_w = np.array([(s[j] + c @ x[j] + np.sum((L.T @ x[j]) ** 2) / 2) / 2 for j in range(len(b))])
    chosen = np.argsort(-(log_w + noise))[:m]
    centroid = x[chosen]
    for _ in range(2):
        assigned = []
        for key in x:
            far = [
                np.sum((L.T @ (key - centroid[r])) ** 2) if live[chosen[r]] else np.inf
                for r in range(m)
            ]
            assigned.append(int(np.argmin(far)))
        members = [[j for j in range(len(b)) if live[j] and assigned[j] == r] for r in range(m)]
        centroid = centroid.copy()
        for r, group in enumerate(members):
            if group:
                weight = np.exp(log_w[group] - log_w[group].max())
                centroid[r] = weight @ x[group] / weight.sum()
    reduced = []
    for r, group in enumerate(members):
        mu = c + sigma @ centroid[r] / 2
        at_mu = [s[j] + mu @ (x[j] - centroid[r]) for j in group]
        value = softmax_row(at_mu, [u[j] for j in group]) if group else np.zeros(u.shape[1])
        reduced.append((mean + centroid[r], log_sum(at_mu), value))
    return reduced


def dense_head(query, key, value, bias, noise_of, m, B):
    """One head; queries are scaled, and a bias of -inf is a mask."""
    mask = bias > -np.inf
    output = np.zeros((len(query), value.shape[1]))
    key = np.where(mask[:, None], key, 0.0)
    value = np.where(mask[:, None], value, 0.0)
    log = bias
    entries: list[tuple[Any, Any, Any]] = []
    for i in range(len(query)):
        block = i // B
        raw = range(max(0, (block - 1) * B), i + 1)
        logits = [query[i] @ key[j] + log[j] for j in raw]
        logits += [query[i] @ b + s for b, s, _ in entries]
        output[i] = softmax_row(logits, [value[j] for j in raw] + [u for _, _, u in entries])
        if (i + 1) % B == 0:
            if block > 0:
                before = range((block - 1) * B, block * B)
                entries = entries + [(key[j], log[j], value[j]) for j in before]
            past = [query[j] for j in range(i + 1) if mask[j] and np.isfinite(query[j]).all()]
            if len(entries) > m:
                entries = reduce_entries(entries, past, noise_of(block, len(entries)), m)
    return output


def dense(query, key, value, mask=None, *, m, B, scale=None, rng=0, bias=0.0):
    """All heads, with the noise that CoresetAttention documents."""
    lead = np.broadcast_shapes(*(a.shape[:-2] for a in (query, key, value)))
    heads = int(np.prod(lead))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (
        np.broadcast_to(a, (*lead, *a.shape[-2:])).reshape(heads, *a.shape[-2:]).astype(np.float64)
        for a in (query, key, value)
    )
    mask = np.ones((), dtype=bool) if mask is None else mask
    bias = np.where(mask, bias, -np.inf)
    bias = np.broadcast_to(bias, (*lead, key.shape[-2])).reshape(heads, key.shape[-2])
    seed = int(np.random.default_rng(rng).integers(2**63))

    def noise_of(block, n):
        sequence = np.random.SeedSequence(seed, spawn_key=(block,))
        return -np.log(np.random.default_rng(sequence).standard_exponential((heads, n)))

    rows = [
        dense_head(
            scale * query[h], key[h], value[h], bias[h], lambda t, n, h=h: noise_of(t, n)[h], m, B
        )
        for h in range(heads)
    ]
    shape = (*lead, *query.shape[-2:-1], value.shape[-1])
    return np.array(rows).reshape(shape)


def tokens(length, *lead, d=4, e=3, seed=0, dtype="float64"):
    return inputs(length, d, e, lead=lead, seed=seed, dtype=dtype)


def exact(query, key, value):
    return linattn.reference.softmax_attention(query, key, value, is_causal=True)


def cut(stream, arrays, cuts, mask=None):
    """Outputs of a stream that is given its tokens in pieces."""
    ends = [*sorted(cuts), arrays[0].shape[-2]]
    outputs, start = [], 0
    for end in ends:
        part = (a[..., start:end, :] for a in arrays)
        some = None if mask is None else mask[..., start:end]
        outputs.append(stream.extend(*part, key_mask=some))
        start = end
    return np.concatenate(outputs, axis=-2)


def steps(stream, arrays):
    rows = [stream.step(*(a[..., i, :] for a in arrays)) for i in range(arrays[0].shape[-2])]
    return np.stack(rows, axis=-2)


# Equal to the definition --------------------------------------------------------------------------


@given(data=st.data())
def test_equals_its_definition_however_it_is_cut(draws, data):
    case = data.draw(draws.cases(is_causal=True, max_length=40))
    m, B = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    length = case.key.shape[-2]
    cuts = data.draw(st.lists(st.integers(0, length), max_size=5))
    arrays = (case.query, case.key, case.value)
    stream = CoresetAttention(m, block_size=B, scale=0.3, rng=case.seed)
    mask = case.key_mask
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:-1], length))
    out = cut(stream, arrays, cuts, mask)
    assert out.shape == case.output_shape
    assert stream.length == length
    wide = mask
    if mask is not None and mask.ndim > 1:
        wide = np.broadcast_to(mask, case.key.shape[:-1])
    expected = dense(*arrays, wide, m=m, B=B, scale=0.3, rng=case.seed)
    assert_allclose(out, expected, rtol=0, atol=1e-8)


def test_every_library(xp):
    # Few shapes: frameworks compile anew for each.
    arrays, more = tokens(13, 2, dtype="float32"), tokens(1, 2, seed=1, dtype="float32")
    mask = np.arange(13) % 5 != 3
    stream = CoresetAttention(4, block_size=4, rng=1)
    out = stream.extend(*(xp.array(a) for a in arrays), key_mask=xp.array(mask))
    xp.assert_like(out, xp.array(arrays[2]))
    branch = copy.deepcopy(stream)
    token = tuple(xp.array(a[..., 0, :]) for a in more)
    last = stream.step(*token)
    xp.assert_like(last, token[2])
    whole = (np.concatenate(pair, axis=-2) for pair in zip(arrays, more, strict=True))
    expected = dense(*whole, np.append(mask, True), m=4, B=4, rng=1)
    assert_allclose(xp.numpy(out), expected[..., :13, :], rtol=0, atol=3e-6)
    assert_allclose(xp.numpy(last), expected[..., 13, :], rtol=0, atol=3e-6)
    assert_allclose(xp.numpy(branch.step(*token)), xp.numpy(last), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_every_dtype(xp, dtype):
    arrays = tuple(xp.array(a, dtype) for a in tokens(13))
    out = CoresetAttention(4, block_size=4, rng=1).extend(*arrays)
    xp.assert_like(out, arrays[2])
    expected = dense(*(xp.numpy(a) for a in arrays), m=4, B=4, rng=1)
    tolerance = {"float64": 1e-12, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert_allclose(xp.numpy(out), expected, rtol=0, atol=tolerance)


@given(data=st.data())
def test_steps_equal_blocks(data):
    B, length = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 45))
    arrays = tokens(length, 2, seed=data.draw(st.integers(0, 99)))
    whole = CoresetAttention(7, block_size=B, rng=0).extend(*arrays)
    single = steps(CoresetAttention(7, block_size=B, rng=0), arrays)
    assert_allclose(single, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("m", "B"), [(8, 4), (4, 4), (3, 1), (16, 2), (6, 4)])
def test_exact_at_first(m, B):
    arrays = tokens(m + 2 * B + 20, 2)
    out = CoresetAttention(m, block_size=B, rng=0).extend(*arrays)
    free = m // B * B + 2 * B
    wanted = exact(*arrays)
    assert_allclose(out[:, :free], wanted[:, :free], atol=1e-13)
    assert np.max(np.abs(out - wanted)[:, free]) > 1e-6


# What the approximation keeps ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [30.0, 300.0])
def test_logits_of_any_size(dtype, size):
    query, key, value = tokens(80, 2)
    query, value = (query * size).astype(dtype), value.astype(dtype)
    key = key.astype(dtype)
    out = CoresetAttention(8, block_size=8, rng=0).extend(query, key, value)
    assert_array_equal(np.isfinite(out), True)
    assert np.max(np.abs(out)) <= np.max(np.abs(value)) * (1 + 1e-5)
    if dtype == "float64":
        assert_allclose(out, dense(query, key, value, m=8, B=8), atol=1e-7)


def test_masses_that_differ_by_more_than_float32_holds():
    query, key, value = tokens(40, 2, seed=1)
    query *= 15
    query[:, 32:] *= 20  # reach what the past queries made small
    arrays = [a.astype(np.float32) for a in (query, key, value)]
    out = CoresetAttention(8, block_size=8, rng=0).extend(*arrays)
    assert_allclose(out, dense(*arrays, m=8, B=8), rtol=0, atol=1e-4)


def test_logits_that_overflow_are_not_zeros():
    query, key, value = tokens(9, dtype="float32")
    query = np.abs(query) * np.float32(1e30)
    key = -np.abs(key) * np.float32(1e30)
    assert_array_equal(CoresetAttention(2, block_size=2, rng=0).extend(query, key, value), np.nan)


@pytest.mark.parametrize(("m", "most"), [(32, 0.1), (64, 0.06), (128, 0.02)])
def test_error_on_real_queries_and_keys(m, most):
    arrays = linattn.datasets.pretrained_qkv()
    wanted = exact(*(a.astype(np.float64) for a in arrays))
    medians = []
    for seed in range(3):
        out = CoresetAttention(m, block_size=32, rng=seed).extend(*arrays)
        square = np.sum((out - wanted) ** 2, axis=(-2, -1)) / np.sum(wanted**2, axis=(-2, -1))
        medians.append(np.median(np.sqrt(square)))
    assert np.mean(medians) <= most


# Causal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("number", [1e3, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("t", [5, 22])
def test_the_past_does_not_depend_on_the_future(which, number, t):
    arrays = tokens(40, 1)
    changed = [a.copy() for a in arrays]
    changed[which][0, t, 0] = number
    out, other = (
        CoresetAttention(6, block_size=4, rng=0).extend(*inputs) for inputs in (arrays, changed)
    )
    assert_allclose(other[:, :t], out[:, :t], rtol=0, atol=1e-13)
    assert_array_equal(np.isfinite(out), True)
    if which == 0 and not np.isfinite(number):
        assert_array_equal(other[:, t], np.nan)
        assert_array_equal(np.isfinite(other[:, t + 1 :]), True)
    elif which == 2 and not np.isfinite(number):
        assert_array_equal(np.isfinite(other[:, t:, 0]), False)
    elif np.isnan(number):
        assert_array_equal(other[:, t:], np.nan)
    elif np.isfinite(number) and t > 0:
        assert np.max(np.abs(other - out)[:, t]) > 1e-6


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_queries_that_are_not_finite_leave_the_statistics_alone(number):
    query, key, value = tokens(50)
    query[7, 1] = number
    out = CoresetAttention(6, block_size=4, rng=0).extend(query, key, value)
    expected = dense(np.where(np.arange(50)[:, None] == 7, np.nan, query), key, value, m=6, B=4)
    rows = np.arange(50) != 7
    assert_allclose(out[rows], expected[rows], atol=1e-11)


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e200])
def test_masked_tokens_hold_nothing_that_matters(garbage):
    arrays = tokens(41, 2)
    mask = np.random.default_rng(3).random((2, 41)) < 0.6
    mask[0, :9] = False
    clean = CoresetAttention(6, block_size=4, rng=0)
    out = clean.extend(*arrays, key_mask=mask)
    dirty = [np.where(mask[..., None], a, garbage) for a in arrays]
    stream = CoresetAttention(6, block_size=4, rng=0)
    other = stream.extend(*dirty, key_mask=mask)
    # The row of a masked query is its own.
    assert_allclose(np.where(mask[..., None], other, out), out, rtol=0, atol=1e-12)
    assert_array_equal(out[0, :9], 0.0)
    assert_allclose(out, dense(*arrays, mask, m=6, B=4), atol=1e-11)


def biases(*shape, seed=5):
    """Log weights of keys, some of which mask theirs."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < 0.8, 3 * rng.standard_normal(shape), -np.inf)


def test_log_weights_of_keys_in_every_library(xp):
    arrays, bias = tokens(13, 2), biases(2, 13)
    stream = CoresetAttention(3, block_size=4, rng=0)
    out = stream.extend(*map(xp.array, arrays), key_bias=xp.array(bias))
    assert_allclose(xp.numpy(out), dense(*arrays, m=3, B=4, bias=bias), atol=1e-8)


def test_a_common_log_weight_changes_nothing_and_narrow_ones_keep_their_digits():
    arrays, bias = tokens(40, 2), biases(40)
    plain = CoresetAttention(4, block_size=4, rng=0).extend(*arrays)
    common = np.full(40, 700.0)
    out = CoresetAttention(4, block_size=4, rng=0).extend(*arrays, key_bias=common)
    assert_allclose(out, plain, atol=1e-9)
    narrow = [a.astype("float32") for a in (*arrays, bias)]
    stream, parts = CoresetAttention(4, block_size=4, rng=0), (slice(0, 15), slice(15, 40))
    rows = [
        stream.extend(*(a[:, part] for a in narrow[:3]), key_bias=narrow[3][part]) for part in parts
    ]
    out = np.concatenate(rows, axis=1)
    expected = dense(*(a.astype("float64") for a in narrow[:3]), m=4, B=4, bias=narrow[3])
    assert_allclose(out, expected, atol=3e-5)


def test_a_stream_of_masked_tokens_only():
    stream = CoresetAttention(3, block_size=2, rng=0)
    arrays = tokens(20)
    assert_array_equal(stream.extend(*arrays, key_mask=np.zeros(20, dtype=bool)), 0.0)
    assert stream.length == 20
    out = stream.extend(*tokens(4, seed=2))
    assert_allclose(out, exact(*tokens(4, seed=2)), atol=1e-13)


# Streams ------------------------------------------------------------------------------------------


def test_seeds():
    arrays = tokens(60)

    def run(rng):
        return CoresetAttention(4, block_size=4, rng=rng).extend(*arrays)

    assert_array_equal(run(3), run(3))
    assert not np.array_equal(run(3), run(4))
    assert not np.array_equal(run(None), run(None))
    rng = np.random.default_rng(3)
    assert_array_equal(run(rng), run(3))
    after = np.random.default_rng(3)
    after.integers(2**63)
    assert rng.bit_generator.state == after.bit_generator.state
    assert not np.array_equal(run(rng), run(3))


@pytest.mark.parametrize(
    "fork", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
@pytest.mark.parametrize("length", [0, 3, 24, 37])
def test_forks_go_their_own_ways(fork, length):
    arrays, more, others = tokens(length, 2), tokens(30, 2, seed=1), tokens(30, 2, seed=2)
    stream = CoresetAttention(5, block_size=4, rng=0)
    stream.extend(*arrays)
    branch = fork(stream)
    branch.extend(*others)
    assert (stream.length, branch.length) == (length, length + 30)
    whole = CoresetAttention(5, block_size=4, rng=0).extend(
        *(np.concatenate(pair, axis=-2) for pair in zip(arrays, more, strict=True))
    )
    assert_allclose(stream.extend(*more), whole[:, length:], atol=1e-12)


def test_an_interrupted_call_leaves_the_stream_as_it_was():
    """Wherever it is interrupted, no block of a call is in the stream without the others."""
    arrays = tokens(15, 2)
    whole = CoresetAttention(3, block_size=2, rng=0).extend(*arrays)
    stream = CoresetAttention(3, block_size=2, rng=0)
    stream.extend(*(a[:, :5] for a in arrays))
    rest = [a[:, 5:] for a in arrays]
    source = sys.modules[CoresetAttention.__module__].__file__

    def extend():
        fork.extend(*rest)

    step, fork = 1, copy.copy(stream)
    while is_interrupted_at(step, extend, (source,)):
        # At the very end the stream has all of the call.
        assert fork.length in (5, 15)
        step, fork = step + 11, copy.copy(stream)
    assert step > 100
    assert_allclose(stream.extend(*rest), whole[:, 5:], atol=1e-12)


@pytest.mark.parametrize("length", [3, 4, 7])
def test_inputs_are_neither_kept_nor_changed(length):
    arrays = tokens(length)
    before = [a.copy() for a in arrays]
    stream, other = (CoresetAttention(2, block_size=4, rng=0) for _ in range(2))
    stream.extend(*arrays)
    other.extend(*arrays)
    for a, b in zip(arrays, before, strict=True):
        assert_array_equal(a, b)
        a[...] = 1e6
    more = tokens(9, seed=1)
    fresh = CoresetAttention(2, block_size=4, rng=0)
    fresh.extend(*before)
    assert_array_equal(stream.extend(*more), fresh.extend(*more))


@pytest.mark.parametrize("lead", [(), (0,)])
def test_no_tokens_and_no_batch(xp, lead):
    stream = CoresetAttention(2, block_size=4, rng=0)
    for length in (0, 7, 0):
        arrays = tuple(xp.array(a, "float32") for a in tokens(length, *lead))
        xp.assert_like(stream.extend(*arrays), arrays[2])
    assert stream.length == 7


def test_precision_of_the_accumulation():
    arrays = tokens(60, dtype="float32")
    expected = dense(*arrays, m=4, B=4)
    with linattn.config(precision="float64"):
        stream = CoresetAttention(4, block_size=4, rng=0)
        out = stream.extend(*arrays)
    assert out.dtype == np.float32
    assert_allclose(out, expected, rtol=0, atol=3e-7)
    with pytest.raises(ValueError, match="accumulation dtype of the stream"):
        stream.extend(*arrays)


def test_memory_does_not_grow_with_the_stream():
    def peak(length):
        arrays = tokens(length, d=16, e=16)
        stream = CoresetAttention(4, block_size=32, rng=0)
        stream.extend(*tokens(160, d=16, e=16))
        tracemalloc.start()
        out = stream.extend(*arrays)
        used = tracemalloc.get_traced_memory()[1] - out.nbytes
        tracemalloc.stop()
        return used

    peak(200)
    # A copy of the keys alone would be 256,000 bytes.
    assert peak(2000) < peak(200) + 80_000


# Files --------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stream.npz"


def test_save_and_load_in_every_library(xp, path):
    arrays = tuple(xp.array(a) for a in tokens(13, dtype="float32"))
    stream = CoresetAttention(4, block_size=4, scale=0.4, rng=3)
    stream.extend(*arrays)
    stream.save(path)
    loaded = CoresetAttention.load(path, like=arrays[0])
    assert (loaded.num_entries, loaded.block_size, loaded.length) == (4, 4, 13)
    token = tokens(1, seed=1, dtype="float32")
    out = stream.extend(*(xp.array(a) for a in token))
    again = loaded.extend(*(xp.array(a) for a in token))
    xp.assert_like(again, out)
    assert_allclose(xp.numpy(again), xp.numpy(out), rtol=0, atol=1e-6)
    host = CoresetAttention.load(path).extend(*token)
    assert type(host) is np.ndarray
    assert_allclose(host, xp.numpy(out), rtol=0, atol=1e-6)


def test_saved_and_restored_at_every_token(path):
    arrays = tokens(26, 2)
    whole = CoresetAttention(4, block_size=3, rng=9)
    expected = whole.extend(*arrays)
    stream = CoresetAttention(4, block_size=3, rng=9)
    for i in range(26):
        stream.save(path)
        stream = CoresetAttention.load(path)
        assert stream.length == i
        out = stream.step(*(a[:, i] for a in arrays))
        assert_allclose(out, expected[:, i], atol=1e-13)


@pytest.fixture
def arrays_of_a_file(path):
    stream = CoresetAttention(4, block_size=3, rng=9)
    stream.extend(*tokens(20, 2, dtype="float32"))
    stream.save(path)
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


CHANGES = {
    "version": ({"format_version": np.int64(2)}, "format version 2"),
    "no entries": ({"num_entries": np.int64(0)}, "num_entries must be at least 1"),
    "no block": ({"block_size": np.int64(-1)}, "block_size must be at least 1"),
    "another size": ({"num_entries": np.int64(5)}, "old_key must be float32 of shape"),
    "another length": ({"length": np.int64(21)}, "must be float32 of shape"),
    "negative length": ({"length": np.int64(-3)}, "must not be negative"),
    "huge length": ({"length": np.int64(2**62)}, "must be float32 of shape"),
    "negative seed": ({"seed": np.int64(-3)}, "must not be negative"),
    "infinite scale": ({"scale": np.float64(np.inf)}, "scale must be a finite number"),
    "dtype": ({"mean": np.zeros((2, 1, 4))}, "mean must be float32"),
    "shape": ({"scatter": np.zeros((2, 4, 5), np.float32)}, "scatter must be"),
    "scalar": ({"old_key": np.zeros(3, np.float32)}, "old_key"),
    "kind": ({"old_log": np.zeros((2, 7), int)}, "old_log has dtype"),
    "objects": ({"old_log": np.array([None])}, "old_log"),
    "missing": ({"mean": None}, "it must hold the arrays"),
    "more": ({"other": np.zeros(3)}, "it must hold the arrays"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_do_not_fit(path, arrays_of_a_file, change):
    changes, message = CHANGES[change]
    arrays = {k: v for k, v in (arrays_of_a_file | changes).items() if v is not None}
    np.savez(path, **arrays)
    with pytest.raises(StateFileError, match=message):
        CoresetAttention.load(path)


def test_damaged_and_foreign_files(path, arrays_of_a_file):
    whole = path.read_bytes()
    for end in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(StateFileError, match="not a linattn coreset file"):
            CoresetAttention.load(path)
    np.savez_compressed(path, **arrays_of_a_file)
    with pytest.raises(StateFileError, match="claim more"):
        CoresetAttention.load(path)
    path.write_bytes(pickle.dumps(arrays_of_a_file))
    with pytest.raises(StateFileError):
        CoresetAttention.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mean.npy", b"")
    with pytest.raises(StateFileError):
        CoresetAttention.load(path)


def test_a_state_and_a_stream_are_not_confused(path):
    phi = linattn.feature_maps.EluFeatures(4)
    linattn.save_state(path, linattn.init_state(phi, 3, like=np.ones(4)))
    with pytest.raises(StateFileError, match="not a linattn coreset file"):
        CoresetAttention.load(path)
    CoresetAttention().save(path)
    with pytest.raises(StateFileError, match="not a linattn state file"):
        linattn.load_state(path)


# Bad arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_entries": 0}, ValueError, "num_entries must be at least 1"),
        ({"num_entries": 2.5}, TypeError, "num_entries must be a positive integer"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1"),
        ({"block_size": True}, TypeError, "block_size must be a positive integer"),
        ({"scale": np.nan}, ValueError, "scale must be a finite number"),
        ({"scale": "1"}, TypeError, "scale must be a real number"),
        ({"rng": True}, TypeError, "rng must be"),
        ({"rng": -1}, ValueError, "non-negative"),
    ],
)
def test_bad_settings(arguments, error, message):
    with pytest.raises(error, match=message):
        CoresetAttention(**arguments)


def other(length=3, *lead, **changes):
    return tokens(length, *lead, **changes)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (other(3), ValueError, r"leading axes of the stream, \(2,\), got \(\)"),
        (other(3, 2, d=5), ValueError, "dim of the stream, 4, got 5"),
        (other(3, 2, e=5), ValueError, "value dim of the stream, 3, got 5"),
        (other(3, 2, dtype="float32"), ValueError, "accumulation dtype of the stream"),
        ((*other(3, 2)[:2], other(4, 2)[2]), ValueError, "key and value must have one length"),
        ((other(4, 2)[0], *other(3, 2)[1:]), ValueError, "equal length"),
        ((other(3, 3)[0], *other(3, 2)[1:]), ValueError, "must broadcast"),
        ((np.ones((2, 3, 4), int), *other(3, 2)[1:]), TypeError, "query must have dtype"),
        (([[1.0]], *other(3, 2)[1:]), TypeError, "query must be an array"),
    ],
)
def test_tokens_that_do_not_continue_the_stream(bad, error, message):
    arrays, more = tokens(9, 2), tokens(30, 2, seed=1)
    stream, same = (CoresetAttention(3, block_size=2, rng=0) for _ in range(2))
    stream.extend(*arrays)
    same.extend(*arrays)
    with pytest.raises(error, match=message):
        stream.extend(*bad)
    assert stream.length == 9
    assert_array_equal(stream.extend(*more), same.extend(*more))


def test_another_library_does_not_continue_the_stream():
    strict = pytest.importorskip("array_api_strict")
    stream = CoresetAttention(3, block_size=2, rng=0)
    stream.extend(*tokens(5))
    with pytest.raises(TypeError, match="array library of the stream, numpy, got array_api_strict"):
        stream.extend(*(strict.asarray(a) for a in tokens(5)))
    with pytest.raises(TypeError, match="key_mask must be boolean"):
        stream.extend(*tokens(5), key_mask=np.ones(5))
    with pytest.raises(TypeError, match="got a 0-d array"):
        stream.step(*(np.zeros(()) for _ in range(3)))


def test_gradients_flow_through_a_torch_stream():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    leaves = [torch.tensor(x, requires_grad=True) for x in rng.standard_normal((3, 40, 4))]
    directions = [torch.tensor(x) for x in rng.standard_normal((3, 40, 4))]
    weights = torch.tensor(rng.standard_normal((40, 4)))

    def loss(step):
        moved = [x + step * d for x, d in zip(leaves, directions, strict=True)]
        return (CoresetAttention(8, block_size=8, rng=0).extend(*moved) * weights).sum()

    loss(0.0).backward()
    slope = sum((x.grad * d).sum() for x, d in zip(leaves, directions, strict=True))
    with torch.no_grad():
        difference = (loss(1e-6) - loss(-1e-6)) / 2e-6
    assert_allclose(float(slope), float(difference), rtol=1e-6)

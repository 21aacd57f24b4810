"""Linear and exact attention against the oracles: values, order of time, NaN, memory, libraries."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import functools
import tracemalloc
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import reference
from linattn._driver import causal_blocks
from linattn.feature_maps import (
    EluFeatures,
)
from tests.attentions import OwnMap, assert_at_most, full_and_causal, makers

MAPS = makers(
    *("positive", "hyperbolic", "trigonometric", "activation"),
    *("activation-unprojected", "elu", "relu", "own"),
)
EXPONENTIAL = ["positive", "hyperbolic"]
BOUNDS = {"float64": 1e-12, "float32": 3e-6}

every_map = pytest.mark.parametrize("name", MAPS)


def inputs(*shapes, seed=0):
    """Random numbers that float32 holds exactly, so that one oracle serves both dtypes."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(s).astype(np.float32).astype(np.float64) for s in shapes)


def is_signed(phi):
    return not getattr(phi, "positive", True)


def errors(out, sums, signed):
    """Errors of an output in units of the absolute terms behind it.

    For maps without negative features the error of numerator / denominator; for signed ones how
    far the output is from being a ratio of the two, each within the unit.
    """
    unit = sums.absolute_numerator
    if signed:
        unit = unit + np.abs(out) * sums.absolute_denominator
    empty = sums.absolute_denominator == 0
    assert_array_equal(np.where(empty, out, 0), 0)
    return np.abs(out * sums.denominator - sums.numerator) / np.where(unit > 0, unit, 1)


def conditioning(phi, *arrays):
    """Size of what goes into exp, cos and sin: they turn its rounding into a relative error."""
    largest = 30.0
    for x in arrays:
        if x.size and getattr(phi, "projection", None) is not None:
            quad = phi.scale * (x * x).sum(axis=-1).max() / 2
            linear = np.abs(x @ np.swapaxes(phi.projection, -1, -2)).max() * phi.scale**0.5
            largest = max(largest, quad + linear)
        elif x.size:
            largest = max(largest, np.abs(x).max())
    return largest / 30


def check(out, phi, case, dtype="float64", **options):
    """Check an output of query, key and value against the oracle."""
    query, key, value = (a.astype(np.float64) for a in case)
    sums = reference.kernel_sums(query, key, value, phi, **options)
    check_sums(out, phi, sums, BOUNDS[dtype] * conditioning(phi, query, key))


def check_sums(out, phi, sums, bound):
    assert out.shape == sums.numerator.shape
    out = out.astype(np.float64)
    assert_array_equal(np.isfinite(out), True)
    assert errors(out, sums, is_signed(phi)).max(initial=0) <= bound


def check_log_normalizer(norm, phi, sums, bound):
    """Check logs of denominators; signed ones may be negative (NaN), within rounding of zero."""
    den = sums.denominator[..., 0]
    assert norm.shape == den.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.log(den) + sums.log_scale[..., 0]
        relative = bound * sums.absolute_denominator[..., 0] / np.abs(den)
    negative = np.isnan(norm)
    if is_signed(phi):
        assert_at_most(den[negative], bound * sums.absolute_denominator[..., 0][negative])
    else:
        assert_array_equal(negative, 0)
    empty = sums.absolute_denominator[..., 0] == 0
    assert_array_equal(norm[empty], -np.inf)
    seen = ~negative & ~empty
    size = np.maximum(np.abs(exact[seen]), 1)
    assert_at_most(np.abs(norm[seen] - exact[seen]), 2 * relative[seen] + bound * size)


# Every library, fixed shapes --------------------------------------------------------------------
# Few shapes, used again and again: JAX compiles every operation anew for each.

DIM, VALUE_DIM, LENGTH, CHUNK = 6, 3, 16, 8


def library_inputs(xp, dtype, *shapes, seed=0):
    host = inputs(*shapes, seed=seed)
    return host, [xp.array(a, dtype) for a in host]


@pytest.mark.parametrize("dtype", BOUNDS)
@every_map
def test_full_in_every_library(xp, name, dtype):
    phi = MAPS[name](DIM)
    shapes = [(2, 2, 9, DIM), (2, 1, LENGTH, DIM), (2, 1, LENGTH, VALUE_DIM)]
    host, arrays = library_inputs(xp, dtype, *shapes)
    mask = np.arange(LENGTH) % 5 != 1
    out, norm = linattn.linear_attention(
        *arrays, phi, key_mask=xp.array(mask), return_log_normalizer=True
    )
    xp.assert_like(out, arrays[0], shape=(2, 2, 9, VALUE_DIM))
    xp.assert_like(norm, arrays[0], shape=(2, 2, 9))
    sums = reference.kernel_sums(*host, phi, key_mask=mask)
    bound = BOUNDS[dtype] * conditioning(phi, *host[:2])
    check_sums(xp.numpy(out), phi, sums, bound)
    check_log_normalizer(xp.numpy(norm), phi, sums, bound)


@every_map
def test_causal_in_every_library(xp, name):
    phi = MAPS[name](DIM)
    shapes = [(2, LENGTH, DIM), (1, LENGTH, DIM), (LENGTH, VALUE_DIM)]
    host, arrays = library_inputs(xp, "float32", *shapes)
    # The first key is masked, so that one row sees no key at all.
    mask = np.arange(LENGTH) % 5 != 0
    out, state, norm = linattn.linear_attention(
        *arrays,
        phi,
        is_causal=True,
        key_mask=xp.array(mask),
        return_state=True,
        return_log_normalizer=True,
        chunk_size=CHUNK,
    )
    xp.assert_like(out, arrays[0], shape=(2, LENGTH, VALUE_DIM))
    xp.assert_like(norm, arrays[0], shape=(2, LENGTH))
    m = phi.num_features or DIM
    xp.assert_like(state.kvz, arrays[0], shape=(1, m, VALUE_DIM + 1))
    xp.assert_like(state.log_scale, arrays[0], shape=(1, m))
    assert state.length == LENGTH
    sums = reference.kernel_sums(*host, phi, is_causal=True, key_mask=mask)
    bound = BOUNDS["float32"] * conditioning(phi, *host[:2])
    out = xp.numpy(out)
    assert_array_equal(out[:, 0], 0)
    check_sums(out, phi, sums, bound)
    check_log_normalizer(xp.numpy(norm), phi, sums, bound)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_accumulated_in_float32(xp, dtype):
    # A float16 sum of ones stalls at 2048, a bfloat16 one at 256.
    host = inputs((4, DIM), (5000, DIM), (5000, 2))
    arrays = [xp.array(a, dtype) for a in (host[0], host[1], 1 + host[2] / 4)]
    rounded = [xp.numpy(a).astype(np.float64) for a in arrays]
    phi = EluFeatures()
    out, state, norm = linattn.linear_attention(
        *arrays, phi, return_state=True, return_log_normalizer=True
    )
    xp.assert_like(out, arrays[0], shape=(4, 2))
    for array in (state.kvz, state.log_scale, norm):
        assert array.dtype == xp.dtype("float32")
    expected = reference.kernel_attention(*rounded, phi)
    half_ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert_allclose(xp.numpy(out), expected, rtol=1.01 * half_ulp + BOUNDS["float32"])
    short = [a[:CHUNK, :] for a in (arrays[1], arrays[1], arrays[2])]

    def attend(*qkv):
        return linattn.linear_attention(*qkv, phi, is_causal=True, chunk_size=CHUNK)

    causal = xp.compiled(attend)(*short)
    xp.assert_like(causal, arrays[0], shape=(CHUNK, 2))
    short = [xp.numpy(a).astype(np.float64) for a in short]
    expected = reference.kernel_attention(*short, phi, is_causal=True)
    assert_allclose(xp.numpy(causal), expected, rtol=1.01 * half_ulp + BOUNDS["float32"])


@full_and_causal
@pytest.mark.parametrize("generic", [False, True])
def test_bfloat16_of_ml_dtypes(is_causal, generic):
    # The one that CuPy has; isdtype knows nothing of it.
    host = inputs((2, LENGTH, DIM), (2, LENGTH, DIM), (2, LENGTH, VALUE_DIM))
    arrays = [array.astype(ml_dtypes.bfloat16) for array in host]
    phi = EluFeatures()
    with linattn.without_backends() if generic else nullcontext():
        out = linattn.linear_attention(*arrays, phi, is_causal=is_causal)
    assert out.dtype == ml_dtypes.bfloat16
    rounded = [array.astype(np.float64) for array in arrays]
    expected = reference.kernel_attention(*rounded, phi, is_causal=is_causal)
    assert_allclose(out.astype(np.float64), expected, rtol=2.0**-8, atol=1e-5)
    eighth = np.zeros((2, 3), ml_dtypes.float8_e4m3fn)
    with pytest.raises(TypeError, match="must have dtype float16, bfloat16, float32 or float64"):
        linattn.linear_attention(eighth, eighth, eighth, phi)


@pytest.mark.frameworks
@pytest.mark.parametrize(("name", "is_causal"), [("relu", False), ("positive", True)])
def test_jit_gives_what_eager_gives(name, is_causal):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jax.config.update("jax_enable_x64", True)
    phi = MAPS[name](DIM)
    host = inputs((2, LENGTH, DIM), (2, LENGTH, DIM), (2, LENGTH, VALUE_DIM))
    arrays = [jax.numpy.asarray(a) for a in host]
    mask = jax.numpy.asarray(np.arange(LENGTH) % 5 != 0)

    def attend(query, key, value, key_mask):
        return linattn.linear_attention(
            query,
            key,
            value,
            phi,
            is_causal=is_causal,
            key_mask=key_mask,
            return_state=True,
            return_log_normalizer=True,
            chunk_size=CHUNK,
        )

    out, state, norm = jax.jit(attend)(*arrays, mask)
    eager_out, eager_state, eager_norm = attend(*arrays, mask)
    assert_allclose(out, eager_out, rtol=1e-13, atol=1e-13)
    assert_allclose(norm, eager_norm, rtol=1e-13, atol=1e-13)
    sums, wanted = (s.kvz * np.exp(s.log_scale)[..., None] for s in (state, eager_state))
    assert_allclose(sums, wanted, rtol=1e-13, atol=1e-13)
    assert int(state.length) == LENGTH
    check(np.asarray(out), phi, host, is_causal=is_causal, key_mask=np.asarray(mask))


# Range ------------------------------------------------------------------------------------------


def jumps():
    """Keys whose features grow or shrink a lot, within a sequence and as a whole."""
    length = 500
    query, key, value = inputs((1, length, 16), (1, length, 16), (1, length, 8))
    half = length // 2
    cases = {f"times {factor}": key * factor for factor in (1, 4, 8)}
    for what, change in {
        "jump to times 30": (slice(half, None), 30, 0),
        "jump by +30": (slice(half, None), 1, 30),
        "fall from times 8": (slice(0, half), 8, 0),
    }.items():
        rows, factor, offset = change
        cases[what] = key.copy()
        cases[what][:, rows] = key[:, rows] * factor + offset
    return query, cases, value


JUMPS = ["times 1", "times 4", "times 8"]
JUMPS += ["jump to times 30", "jump by +30", "fall from times 8"]


@functools.cache
def sums_of_jump(name, jump, is_causal):
    """Inputs and oracle; quadratic, so made once."""
    query, keys, value = jumps()
    assert list(keys) == JUMPS
    # The features of "own" have no quadratic term that keeps them from overflowing by themselves.
    key = keys[jump] / 8 if name == "own" else keys[jump]
    arrays = [a.astype(np.float32) for a in (query, key, value)]
    wide = (a.astype(np.float64) for a in arrays)
    return arrays, reference.kernel_sums(*wide, MAPS[name](16), is_causal=is_causal)


# Where every query sees all keys, sizes that raise no scale say what those that do say.
@pytest.mark.parametrize(
    ("jump", "is_causal"),
    [*((jump, True) for jump in JUMPS), *((jump, False) for jump in JUMPS[2:])],
)
@pytest.mark.parametrize("name", [n for n in MAPS if n != "trigonometric"])
def test_large_and_jumping_keys(numpy_path, name, jump, is_causal):
    phi = MAPS[name](16)
    arrays, sums = sums_of_jump(name, jump, is_causal)
    narrow = linattn.linear_attention(*arrays, phi, is_causal=is_causal)
    wide = linattn.linear_attention(
        *(a.astype(np.float64) for a in arrays), phi, is_causal=is_causal
    )
    assert_allclose(narrow, wide, rtol=0, atol=3e-5)
    check_sums(wide, phi, sums, BOUNDS["float64"] * conditioning(phi, *arrays[:2]))


def test_a_fall_of_thirty_loses_only_the_rounding_of_the_logs(numpy_path):
    # |k|^2 s / 2 is about 1800 early: its float32 rounding is a relative error of the weights.
    query, keys, value = jumps()
    key = keys["times 1"].copy()
    key[:, :250] *= 30
    phi = MAPS["positive"](16)
    arrays = [a.astype(np.float32) for a in (query, key, value)]
    narrow = linattn.linear_attention(*arrays, phi, is_causal=True)
    wide = linattn.linear_attention(*(a.astype(np.float64) for a in arrays), phi, is_causal=True)
    largest = np.abs(phi.key_features(key).log).max()
    assert largest > 1000
    assert_allclose(narrow, wide, rtol=0, atol=2 * np.finfo(np.float32).eps * largest)


@pytest.mark.parametrize("has_backend", [True, False])
@pytest.mark.parametrize("name", EXPONENTIAL)
def test_blocks_are_accepted_and_redone_where_they_should_be(monkeypatch, name, has_backend):
    redone, verdicts = [], []
    scan_hierarchical, refused = causal_blocks.scan_hierarchical, causal_blocks.rejected_rows

    def counting_scan(*args):
        redone.append(args[4].shape[-2])
        return scan_hierarchical(*args)

    def recording(*args):
        verdict = refused(*args)
        verdicts.append(verdict is not None)
        return verdict

    monkeypatch.setattr(causal_blocks, "scan_hierarchical", counting_scan)
    monkeypatch.setattr(causal_blocks, "rejected_rows", recording)
    query, keys, value = jumps()

    def count(key, dtype):
        redone.clear()
        verdicts.clear()
        arrays = [a.astype(dtype) for a in (query, key, value)]
        phi = MAPS[name](16)
        with nullcontext() if has_backend else linattn.without_backends():
            linattn.linear_attention(*arrays, phi, is_causal=True, chunk_size=100)
        assert len(redone) == sum(verdicts)
        # Of a block no more than the rows before the fall, which do not see what is behind it.
        assert all(rows <= 50 for rows in redone)
        return len(redone)

    # The third block of 100 holds the fall; the first two are uniform.
    assert count(keys["times 1"], np.float32) == 0
    assert count(keys["jump to times 30"], np.float32) == 0
    # The backend puts every sub-block on a scale of its own, and has none to refuse.
    assert count(keys["fall from times 8"], np.float32) == (0 if has_backend else 1)
    # float64 has the range: nothing is redone.
    assert count(keys["fall from times 8"], np.float64) == 0


def test_a_refused_head_does_not_touch_the_others(numpy_path, monkeypatch):
    query, keys, value = jumps()
    phi = MAPS["positive"](16)
    both = np.concatenate([keys["times 1"], keys["fall from times 8"]]).astype(np.float32)
    query, value = (np.repeat(a, 2, axis=0).astype(np.float32) for a in (query, value))
    together = linattn.linear_attention(query, both, value, phi, is_causal=True)
    for head in range(2):
        one = slice(head, head + 1)
        alone = linattn.linear_attention(query[one], both[one], value[one], phi, is_causal=True)
        assert_allclose(together[one], alone, rtol=0, atol=3e-6)


# Memory -----------------------------------------------------------------------------------------


def extra_memory(call):
    """Peak of what a call allocates beyond what it returns."""
    call()
    tracemalloc.start()
    try:
        out = call()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept >= out.nbytes
    return peak - out.nbytes


@full_and_causal
@pytest.mark.parametrize(
    ("name", "masked"), [("positive", False), ("elu", True)], ids=["positive", "elu-masked"]
)
def test_extra_memory_does_not_grow_with_the_length(numpy_path, name, masked, is_causal):
    phi = MAPS[name](16)

    def extra(length, dtype):
        arrays = [a.astype(dtype) for a in inputs(*[(2, length, 16)] * 3)]
        mask = np.arange(length) % 7 > 0 if masked else None
        with linattn.config(num_threads=1):
            return extra_memory(
                lambda: linattn.linear_attention(*arrays, phi, is_causal=is_causal, key_mask=mask)
            )

    for dtype in (np.float16,) if masked else (np.float32,):
        # From 8,192 tokens on, where NumPy 2.0 takes another 51 KB once.
        assert extra(16384, dtype) <= 1.1 * extra(8192, dtype) + 2 * 8192


@full_and_causal
def test_extra_memory_of_softmax_attention_is_linear_at_most(numpy_path, is_causal):
    def extra(length):
        arrays = [a.astype(np.float32) for a in inputs(*[(1, length, 16)] * 3)]
        return extra_memory(lambda: linattn.softmax_attention(*arrays, is_causal=is_causal))

    assert extra(2048) <= 4.4 * extra(512)
    assert extra(2048) < 4 * 2048 * 2048


# Exact attention --------------------------------------------------------------------------------


def check_softmax(out, case, dtype, **options):
    expected = reference.softmax_attention(*case, **options)
    assert out.shape == expected.shape
    # Logits are rounded before the exponential, so their size counts.
    query, key, value = case
    scale = options.get("scale") or query.shape[-1] ** -0.5
    sizes = [np.sqrt((a * a).sum(axis=-1)).max(initial=0) for a in (query, key)]
    logit = max(abs(scale) * sizes[0] * sizes[1], 10.0)
    bound = BOUNDS[dtype] * logit / 10 * np.abs(value).max(initial=0)
    assert_allclose(out, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("mode", ["full", "causal", "masked", "cross"])
def test_softmax_in_every_library(xp, mode, dtype):
    num_queries = 9 if mode == "cross" else LENGTH
    shapes = [(2, num_queries, DIM), (1, LENGTH, DIM), (LENGTH, VALUE_DIM)]
    host, arrays = library_inputs(xp, dtype, *shapes)
    options = {"is_causal": mode == "causal"}
    mask = np.arange(LENGTH) % 5 != 0
    out = linattn.softmax_attention(
        *arrays, key_mask=xp.array(mask) if mode == "masked" else None, **options
    )
    xp.assert_like(out, arrays[0], shape=(2, num_queries, VALUE_DIM))
    if mode == "masked":
        options["key_mask"] = mask
    check_softmax(xp.numpy(out), host, dtype, **options)


@full_and_causal
def test_softmax_of_logits_of_ten_thousand(numpy_path, is_causal):
    # Integers: the logits are exact in float32, so nothing but the shift can go wrong.
    rng = np.random.default_rng(0)
    query, key = (rng.integers(-100, 101, (2, 300, 1)).astype(np.float32) for _ in range(2))
    value = rng.standard_normal((2, 300, VALUE_DIM)).astype(np.float32)
    logits = query @ key.mT
    assert logits.max() > 9000
    assert logits.min() < -9000
    out = linattn.softmax_attention(query, key, value, scale=1.0, is_causal=is_causal)
    expected = reference.softmax_attention(query, key, value, scale=1.0, is_causal=is_causal)
    assert_allclose(out, expected, rtol=0, atol=3e-6 * np.abs(value).max())


# What is refused --------------------------------------------------------------------------------


def test_a_map_that_has_seen_the_sequence_is_not_used_causally():
    class Fitted(OwnMap):
        causal = False

    arrays = inputs((5, DIM), (5, DIM), (5, VALUE_DIM))
    linattn.linear_attention(*arrays, Fitted(DIM))
    with pytest.raises(ValueError, match="would leak later keys"):
        linattn.linear_attention(*arrays, Fitted(DIM), is_causal=True)

"""The CuPy backend on the fake GPU: what NVRTC makes of its kernels, interpreted, against float64.

The interpreter runs warps and blocks in random orders and reports races, reads of what nobody wrote
and accesses beside an array; a test fails if it finds any. See tests/ptx.
"""

# mypy: disable-error-code="assignment, call-arg, call-overload, misc"

from __future__ import annotations

import re
from functools import partial
from typing import Any

import array_api_compat
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
import linattn_cupy
from linattn import _generic
from linattn._driver.problem import linear_problem
from linattn.feature_maps import (
    ActivationFeatures,
    CosformerFeatures,
    DenseExponentialFeatures,
    EluFeatures,
    PositiveFeatures,
    Reparametrized,
)
from linattn.testing import check_backend
from linattn.typing import ELU_PLUS_ONE, Activation, Cotangent, Declined, Partial, Pointwise
from linattn_cupy import device, fused, gradients, products
from tests.fake_gpu.device import BF16, F16, F32, MAPS, D, Device, content, cupy, error, moved
from tests.fake_gpu.device import exact as in_float64
from tests.fake_gpu.device import inputs as device_inputs
from tests.fake_gpu.log import counts

pytestmark = pytest.mark.fake_gpu

DENSE = DenseExponentialFeatures(
    D, 40, A=-0.1 * np.ones(D), transform=np.diag(np.linspace(0.5, 1.5, D)), rng=0
)
TOLERANCE = {BF16: 1e-2, F16: 5e-3, F32: 1e-5}
exact = partial(in_float64, linattn.linear_attention)


def inputs(*given, **sizes):
    """Queries, keys and values."""
    return device_inputs(*given, **sizes)[:3]


def solve(dtype, *given, **settings):
    """The whole tier on arrays of a dtype."""
    *arrays, phi = given

    def work(query, key, value, **settings):
        return fused.attention(linear_problem(query, key, value, phi, **settings))

    return Device.run(work, *(x.astype(dtype) for x in arrays), **settings)


def attend(query, key, value, phi, **settings):
    return Device.run(linattn.linear_attention, query, key, value, phi, **settings)


# Fused ------------------------------------------------------------------------------------------


CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.mark.parametrize(
    "most",
    [{"segment_states": 12_400, "read_states": 12_400}, {"causal_rows": 28_300}],
    ids=["full", "causal"],
)
def test_instructions_of_a_tile(gpu, most):
    """PTX instructions of warps for 64 tokens, d = e = 64 and m = 256."""
    gpu.processors = 1
    phi, found = PositiveFeatures(64, 256, rng=0), []
    for length in (256, 512):
        before = counts()
        solve(BF16, *inputs((1,), length, 64, 64), phi, is_causal="causal_rows" in most)
        found.append({name: counts()[name][0] - before.get(name, (0, 0))[0] for name in most})
    for name, tile in most.items():
        assert 0 < (found[1][name] - found[0][name]) / 4 <= tile


def test_views_are_read_where_they_lie(gpu):
    """Heads behind tokens, and rows that cannot be copied 16 bytes at a time."""
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 100)
    expected = exact(query, key, value, phi, is_causal=True)
    behind = [np.ascontiguousarray(x.astype(BF16).swapaxes(0, 1)) for x in (query, key, value)]
    views = [cupy.asarray(x).swapaxes(0, 1) for x in behind]
    assert all(fused.aligned_rows(x) is x for x in views)
    wide = np.zeros((3, 100, D + 3), BF16)
    wide[..., 3:] = query
    wide = cupy.asarray(wide)
    assert fused.aligned_rows(wide[..., 3:]).flags.c_contiguous
    for first in (views[0], wide[..., 3:]):
        problem = linear_problem(first, views[1], views[2], phi, is_causal=True)
        assert error(fused.attention(problem)[0].get(), expected) < TOLERANCE[BF16]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("size", [6, 9])
def test_rows_that_a_later_key_would_drown_are_done_again(gpu, size, dtype):
    """Keys of a chunk that weigh about exp(-70), or exp(-160), beside those behind them."""
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 64 if dtype is F32 else 100)
    key[1, :40] = (size * key[1, :40]).astype(BF16)
    expected = exact(query, key, value, phi, is_causal=True)
    key[2, 55] = np.nan
    arrays = (x.astype(dtype) for x in (query, key, value))
    output = attend(*arrays, phi, is_causal=True, chunk_size=64)
    # In float32 the less small of the weights are known well enough.
    assert gpu.redone == (1 if dtype is F32 and size == 6 else 2)
    assert error(output[:2], expected[:2]) < TOLERANCE[dtype]
    assert error(output[1, :40], expected[1, :40]) < TOLERANCE[dtype]
    assert error(output[2, :55], expected[2, :55]) < TOLERANCE[dtype]
    assert_array_equal(output[2, 55:].astype(F32), np.nan)


def by(scale, offset=0.0):
    """Queries and keys at another scale, and away from 0."""
    return lambda query, key: (query * scale + offset, key * scale + offset)


def without_partner(query, key):
    """The largest f(x) of the queries meets nothing; what meets keys is 1e-35 of it."""
    query, key = np.abs(query) * 1e-35, key.copy()
    query[..., 3], key[..., 3] = 5, -1
    return query, key


ORDINARY = {"small": by(1e-3), "large": by(1e4), "without partner": without_partner}
HARD = {
    **ORDINARY,
    # On the scale of their strip all weights would be below bfloat16's least.
    "queries below zero": lambda query, key: (query - 80, key),
    "far below zero": by(30.0, -1000.0),
    "an offset a coordinate": by(1.0, np.linspace(-100, 100, D)),
    "a scale a token": by(np.logspace(-4, 4, 150)[:, None]),
    # The last 8 of 16 columns are no features: not of tokens whose f(x) are far below f(0).
    "no whole tile": by(1.0),
    "no whole tile, below zero": by(1.0, np.array([0.0, -50.0])[:, None, None]),
}


@CAUSAL
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("elu", kind) for kind in HARD),
        *(("relu", kind) for kind in HARD if "below" not in kind),
    ],
)
def test_pointwise_maps_at_any_scale(gpu, name, kind, is_causal):
    gpu.processors = 20
    whole = "no whole tile" not in kind
    query, key, value = inputs((2,), dim=D if whole else 24)
    query, key = (x.astype(BF16).astype(F32) for x in HARD[kind](query, key))
    phi = MAPS[name]
    settings: dict[str, Any] = {"is_causal": is_causal}
    if not whole:
        settings["key_mask"] = np.arange(150) % 3 > 0
    output, state, norm = solve(BF16, query, key, value, phi, want_log=True, **settings)
    expected, after, log = exact(
        query, key, value, phi, return_state=True, return_log_normalizer=True, **settings
    )
    assert error(output[-1], expected[-1]) < TOLERANCE[BF16]
    assert error(output, expected) < TOLERANCE[BF16]
    assert error(scaled(state), scaled(after)) < 2 * TOLERANCE[BF16]
    seen = np.isfinite(log)  # no feature of relu may be common to a query and its keys
    assert_array_equal(norm[~seen], log[~seen])
    assert np.abs(norm[seen] - log[seen]).max(initial=0) < 0.05
    assert gpu.redone == 0 or kind not in ORDINARY or name == "relu"


def scaled(state):
    """What a state says of each feature, its largest normalizer 1: its content may overflow."""
    z = state.kvz[..., -1:].astype(np.float64)
    return state.kvz / np.where(z == 0, 1, z)


def test_states_do_not_drift_over_many_tiles(gpu):
    """A factor that rescales a state must be 1 where no maximum rises: it is taken each tile."""
    gpu.processors = 1
    rng = np.random.default_rng(0)
    phi = PositiveFeatures.from_projection(rng.standard_normal((16, D)).astype(BF16).astype(float))
    key = rng.standard_normal((1, 200 * 64, D))
    key *= 48 / np.linalg.norm(key, axis=-1, keepdims=True)
    key[:, :64] /= 1.5  # all others weigh nothing beside the first tile
    key = key.astype(BF16).astype(F32)
    arrays = key[:, :64], key, rng.standard_normal(key.shape).astype(BF16).astype(F32)
    _, state, _ = solve(BF16, *arrays, phi)
    found, expected = content(state), content(exact(*arrays, phi, return_state=True)[1])
    assert np.abs(found[..., -1] / expected[..., -1] - 1).max() < 1e-4
    assert error(found, expected) < 5e-4


@pytest.mark.parametrize("place", ["key", "value", "query"])
def test_nan_reaches_its_own_rows_only(gpu, place):
    phi = MAPS["positive"]
    query, key, value = inputs((2,), 150)
    clean = exact(query, key, value, phi, is_causal=True)
    {"key": key, "value": value, "query": query}[place][1, 75, 3] = np.nan
    output, *_ = solve(BF16, query, key, value, phi, is_causal=True)
    assert error(output[0], clean[0]) < TOLERANCE[BF16]
    assert error(output[1, :75], clean[1, :75]) < TOLERANCE[BF16]
    lost = np.isnan(output[1].astype(F32))
    if place == "key":
        assert_array_equal(lost[75:], True)
    elif place == "value":
        assert_array_equal(lost[75:, 3], True)
        others = [i for i in range(24) if i != 3]
        assert error(output[1][:, others], clean[1][:, others]) < TOLERANCE[BF16]
    else:
        assert_array_equal(lost[75], True)
        assert lost.sum() == 24


def test_a_square_that_overflows_is_nan_and_not_nothing(gpu):
    query, key, value = inputs((1,), 20)
    key[0, 5] = 1e30
    output, *_ = solve(BF16, query, key, value, MAPS["positive"])
    assert_array_equal(output.astype(F32), np.nan)


@pytest.mark.parametrize(
    ("phi", "change", "reason"),
    [
        (CosformerFeatures(D, max_length=200), {}, "no kernel evaluates this map"),
        (DENSE, {}, "the map has more than one curvature"),
        (ActivationFeatures(D, 40, rng=0), {}, "no kernel evaluates this map"),
        (EluFeatures(scale=2.0), {}, "no kernel evaluates this map"),
        (PositiveFeatures(D, 300, rng=0), {}, "m = 300 is above 256"),
        (MAPS["positive"], {"value_dim": 20}, "e = 20 is no multiple of 8"),
        (MAPS["positive"], {"value_dim": 520}, "e = 520 is above 511"),
        (MAPS["positive"], {"lead": (2, 3, 2, 2)}, "4 axes of heads are more than 3"),
        (MAPS["positive"], {"length": 0, "keys": 3}, "an axis has length 0"),
        (PositiveFeatures(12, 40, rng=0), {"dim": 12}, "d = 12 is no multiple of 8"),
        (PositiveFeatures(136, 40, rng=0), {"dim": 136}, "d = 136 is above 128"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, dict | str) else str(x),
)
def test_other_problems_are_left_to_the_generic_code(gpu, phi, change, reason):
    assert solve(BF16, *inputs(**change), phi) == Declined(reason)
    problem = linear_problem(*(cupy.asarray(x.astype(BF16)) for x in inputs(**change)), phi)
    assert gradients.attention_vjp(problem, Cotangent(problem.value, None)) == Declined(reason)
    assert gpu.launches == []


def test_windows_and_float64_are_not_for_these_kernels(gpu):
    half = [x.astype(F16) for x in inputs((2,), 40)]
    attend(*half, MAPS["positive"], exact_window=8)
    with linattn.config(precision="float64"):
        attend(*half, MAPS["positive"])
    assert "causal_rows" not in gpu.launches
    assert "read_states" not in gpu.launches


# Blocks -----------------------------------------------------------------------------------------


def test_float32_blocks_of_a_map_in_other_coordinates(gpu, tile):
    """The driver changes coordinates, block by block, and kernels do the rest."""
    phi = Reparametrized(MAPS["positive"], np.linspace(0.5, 2, D))
    query, key, value = inputs((2, 3))
    mask = np.random.default_rng(1).random((2, 1, 150)) < 0.7
    settings: Any = {"key_mask": mask, "return_log_normalizer": True}
    with linattn.explain() as report:
        output, norm = attend(query, key, value, phi, **settings, chunk_size=80)
    assert report.ran("attention") == {"driver"}
    assert report.ran("read_block") == report.ran("reduce_block") == {"linattn_cupy"}
    expected, log = exact(query, key, value, phi, **settings)
    assert error(output, expected) < TOLERANCE[F32]
    assert np.abs(norm - log).max() < 1e-4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_divided_in_one_kernel(gpu, dtype):
    num_den = np.random.default_rng(0).standard_normal((2, 3, 6, 9)).astype(dtype)
    num_den[0, 0, :4, -1] = 0, 0, np.inf, np.nan
    num_den[0, 0, 1, :3] = 0, np.inf, np.nan
    part = Partial(num_den, None)
    with np.errstate(all="ignore"):
        expected = _generic.divide(part)
    part = Partial(cupy.asarray(num_den), None)
    np.testing.assert_array_equal(linattn_cupy.divide(part).get(), expected)
    out = cupy.full((2, 6, 3, 8), 7, dtype).swapaxes(1, 2)
    assert linattn_cupy.divide(part, out) is None
    np.testing.assert_array_equal(out.get(), expected)
    assert gpu.launches == [f"divide_rows_{np.dtype(dtype)}"] * 2
    half = cupy.empty((2, 3, 6, 8), np.float16)
    assert linattn_cupy.divide(part, half) == Declined("rows are converted or copied")


def test_the_host_reads_no_values(gpu, monkeypatch):
    """The driver's own acceptance, which would wait for the device, is never asked."""
    from linattn._driver import causal_blocks

    def refused(*args):
        pytest.fail("the host read values")

    monkeypatch.setattr(causal_blocks, "rejected_rows", refused)
    query, key, value = inputs((2,), 100)
    for phi in MAPS["positive"], MAPS["elu"]:
        attend(query, key, value, phi, is_causal=True, chunk_size=32)


def test_other_float32_blocks_are_generic(gpu):
    query, key, value = inputs((2,), 60)
    for phi in (CosformerFeatures(D, max_length=200), DENSE):
        output = attend(query, key, value, phi, is_causal=True)
        assert error(output, exact(query, key, value, phi, is_causal=True)) < 1e-4
    assert gpu.launches == ["divide_rows_float32"] * 2


# Steps ------------------------------------------------------------------------------------------


def steps(tokens, phi, value_dim):
    """Outputs and last states by a decoder, and by states that are passed on."""

    def work(query, key, value):
        empty = linattn.init_state(phi, value_dim, batch_shape=(3,), like=query)
        decoder, state = linattn.Decoder(phi, empty), empty
        rows, functional = [], []
        for i in range(query.shape[1]):
            rows.append(decoder.step(query[:, i], key[:, i], value[:, i]))
            output, state = linattn.decode_step(query[:, i], key[:, i], value[:, i], state, phi)
            functional.append(output)
        return cupy.stack(rows, 1), cupy.stack(functional, 1), decoder.state, state

    return Device.run(work, *tokens)


@pytest.mark.parametrize(
    ("name", "dtype", "value_dim"),
    [
        *((name, F32, 24) for name in MAPS),
        *(("positive", F16, 24), ("elu", BF16, 24)),
        # Rows of the state of two and more registers a lane, several of them at once and some left.
        *(("per-head", F32, 100), ("per-head", F32, 511)),
    ],
)
def test_steps_agree_with_causal_attention(gpu, name, dtype, value_dim):
    """Scales jump on the way."""
    phi = MAPS[name]
    query, key, value = inputs((3,), 7, value_dim)
    key[:, ::3] *= 8
    expected, after = exact(query, key, value, phi, is_causal=True, return_state=True)
    tokens = [x.astype(dtype) for x in (query, key, value)]
    rows, functional, *states = steps(tokens, phi, value_dim)
    assert set(gpu.launches) == {"decode"}
    assert rows.dtype == dtype
    assert error(rows, expected) < (TOLERANCE[F32] if dtype is F32 else TOLERANCE[BF16])
    np.testing.assert_array_equal(rows, functional)
    for state in states:
        assert state.length == 7
        assert error(content(state), content(after)) < 1e-5


def test_a_step_leaves_its_state_alone(gpu):
    phi = MAPS["positive"]
    query, key, value = moved(cupy.asarray, inputs((3,), 2))
    empty = linattn.init_state(phi, 24, batch_shape=(3,), like=query)
    _, state = linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], empty, phi)
    kept = [state.kvz.copy(), state.log_scale.copy()]
    linattn.decode_step(query[:, 1], key[:, 1], value[:, 1], state, phi)
    decoder = linattn.Decoder(phi, state)
    decoder.step(query[:, 1], key[:, 1], value[:, 1])
    before = decoder.state
    decoder.step(query[:, 1], key[:, 1], value[:, 1])
    assert before.length == 2
    assert not np.array_equal(before.kvz.get(), decoder.state.kvz.get())
    np.testing.assert_array_equal(state.kvz.get(), kept[0].get())
    np.testing.assert_array_equal(state.log_scale.get(), kept[1].get())


# Rows of zeros, as padding has them: right, and not computed again -------------------------------


def with_zeros():
    """Query, key, value and cotangent; every third query is without features."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 150, x)) for x in (16, 16, 24, 24)]
    query, *rest = (x.astype(BF16).astype(F16).astype(float) for x in arrays)
    query[:, ::6] = 0
    query[:, 3::6] = -np.abs(query[:, 3::6])
    return [query, *rest]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_queries_without_features_are_not_computed_again(gpu, dtype):
    query, key, value, _ = with_zeros()
    settings: Any = {"is_causal": True, "return_log_normalizer": True}
    expected, norm = linattn.linear_attention(query, key, value, MAPS["relu"], **settings)
    arrays = [x.astype(dtype) for x in (query, key, value)]
    out, log = Device.run(linattn.linear_attention, *arrays, MAPS["relu"], **settings)
    assert gpu.redone == 0
    np.testing.assert_array_equal(out[:, ::3].astype(float), 0)
    np.testing.assert_array_equal(log[:, ::3].astype(float), -np.inf)
    rest = np.arange(150) % 3 != 0
    np.testing.assert_allclose(log[:, rest].astype(float), norm[:, rest], atol=0.05)
    np.testing.assert_allclose(out.astype(float), expected, atol=0.05)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients_of_queries_without_features_stay_in_the_kernels(gpu, dtype):
    query, key, value, grad = with_zeros()
    _, pullback = linattn.linear_attention_vjp(query, key, value, MAPS["relu"], is_causal=True)

    def work(query, key, value, grad):
        problem = linear_problem(query, key, value, MAPS["relu"], is_causal=True)
        return gradients.attention_vjp(problem, Cotangent(grad, None))

    found = Device.run(work, *(x.astype(dtype) for x in (query, key, value, grad)))
    assert isinstance(found, tuple), found
    for got, wanted in zip(found[:3], pullback(grad), strict=True):
        assert error(got, wanted) < 2e-2
    np.testing.assert_array_equal(found[0][:, ::3].astype(float), 0)


def test_a_row_that_is_not_finite_is_no_row_of_zeros(gpu):
    query, key, value, _ = (x.astype(np.float32) for x in with_zeros())
    value[:, 0] = np.inf
    Device.run(linattn.linear_attention, query, key, value, MAPS["relu"], is_causal=True)
    assert gpu.redone > 0


# Where kernels cannot run -----------------------------------------------------------------------


def test_one_warning_and_the_generic_code_where_kernels_cannot_be_built(gpu):
    device._warn_once.cache_clear()
    gpu.unavailable = "compute capability 7.5 is below 8.0"
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 60)
    expected = exact(query, key, value, phi, is_causal=True)

    def everything():
        whole = attend(query, key, value, phi, is_causal=True)
        half = attend(*(x.astype(F16) for x in (query, key, value)), phi, is_causal=True)
        return whole, half, steps([x[:, :5] for x in (query, key, value)], phi, 24)[0]

    with pytest.warns(RuntimeWarning, match="CUDA kernels are not used here: compute cap") as seen:
        output, half, rows = everything()
    assert len(seen) == 1
    assert error(output, expected) < TOLERANCE[F32]
    assert error(half, expected) < 1e-3
    assert error(rows, expected[:, :5]) < TOLERANCE[F32]


def test_a_device_with_little_shared_memory(gpu):
    device._warn_once.cache_clear()
    gpu.shared_bytes = 4096
    words = r"full attention with d = 16, m = 40 needs [\d,]+ bytes of shared memory a block, this"
    with pytest.warns(RuntimeWarning, match=words):
        answer = solve(BF16, *inputs(), MAPS["positive"])
    assert re.match(words, answer.reason)
    assert gpu.launches == []


def test_reads_of_shorter_chunks_where_memory_is_short(gpu):
    query, key, value = inputs()
    phi = PositiveFeatures(D, 128, rng=0)
    q, k, v = (x.astype(F16) for x in (query, key, value))
    variant = fused._variant(linear_problem(q, k, v, phi))
    short, long = (variant.shared(c, keys=False, queries=True) for c in (64, 128))
    gpu.shared_bytes = long - 1
    assert short < long
    assert variant.shared(64, keys=True, queries=False) < long
    output, *_ = solve(BF16, query, key, value, phi)
    assert gpu.launches == ["segment_states", "scan_states", "read_states"]
    assert error(output, exact(query, key, value, phi)) < TOLERANCE[BF16]


# Products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("shared", [None, "a", "b"])
def test_products_ask_cublas_for_the_right_thing(
    recorded, monkeypatch, transpose_a, transpose_b, add, shared
):
    monkeypatch.setattr(products, "MAX_BATCH", 2)
    rng = np.random.default_rng(0)
    heads, n, k, m = 5, 3, 4, 6
    a = rng.standard_normal((1 if shared == "a" else heads, *((k, n) if transpose_a else (n, k))))
    b = rng.standard_normal((1 if shared == "b" else heads, *((m, k) if transpose_b else (k, m))))
    a, b = (x.astype(F32) for x in (a, b))
    expected = np.matmul(
        a.swapaxes(-1, -2) if transpose_a else a, b.swapaxes(-1, -2) if transpose_b else b
    )
    a, b, out = (cupy.asarray(x) for x in (a, b, np.full((heads, n, m), 3.0 * add, F32)))
    with recorded() as log:
        products.multiply(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b, add=add)
        np.testing.assert_allclose(out.get(), expected + 3 * add, rtol=1e-5, atol=1e-6)
        with products.tf32():
            products.multiply(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b)
        np.testing.assert_allclose(out.get(), expected, rtol=1e-2, atol=1e-2)
    assert [" tf32" in line for line in log.of("GEMM")] == [False] * 3 + [True] * 3


def test_tf32_is_asked_for_by_the_user(gpu, recorded):
    arrays = moved(cupy.asarray, inputs((2,), 40))
    with recorded() as log:
        linattn.linear_attention(*arrays, MAPS["positive"])
    assert log.of("GEMM")
    assert not any(" tf32" in line for line in log.of("GEMM"))
    with recorded() as log, linattn.config(precision="tf32"):
        linattn.linear_attention(*arrays, MAPS["positive"], is_causal=True)
    assert all(" tf32" in line for line in log.of("GEMM"))


# Contract -----------------------------------------------------------------------------------------


def test_it_keeps_the_contract(gpu):
    xp = array_api_compat.array_namespace(cupy.ones(1))
    report = check_backend(linattn_cupy, num_problems=6, extras=["capture"], xp=xp)
    assert report.passed, str(report)


class Own(EluFeatures):
    """A map with a function of its own behind the name that a kernel knows."""

    def query_spec(self, xp, dtype, device):
        def softplus(u, xp):
            return xp.log1p(xp.exp(u)), None

        def pullback(u, g, xp):
            return g / (1 + xp.exp(-u))

        return Pointwise(Activation(ELU_PLUS_ONE.name, softplus, pullback), 1.0)

    key_spec = query_spec


@CAUSAL
def test_an_activation_of_ones_own_is_known_to_no_kernel(gpu, is_causal):
    query, key, value = inputs((2,), 40)
    output = attend(query, key, value, Own(), is_causal=is_causal)
    expected = exact(query, key, value, Own(), is_causal=is_causal)
    assert error(output, expected) < TOLERANCE[F32]
    assert error(output, exact(query, key, value, EluFeatures(), is_causal=is_causal)) > 1e-2

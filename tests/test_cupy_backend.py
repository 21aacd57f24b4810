"""The CuPy backend without a GPU: its own kernels, run on the CPU, against float64.

Every launch runs in several orders of threads and blocks, which must agree in every bit; reads of
what nobody wrote are NaN; see tests/emulator.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import linattn
import linattn_cupy
from linattn import _generic
from linattn._driver.problem import linear_problem
from linattn.feature_maps import (
    ActivationFeatures,
    CosformerFeatures,
    DenseExponentialFeatures,
    EluFeatures,
    GeneralizedExponentialFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    ReluFeatures,
    Reparametrized,
)
from linattn.typing import Declined, Partial
from linattn_cupy import device, fused, gradients, layout, planning, products

D = 16
BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
MAPS: dict[str, Any] = {
    "positive": PositiveFeatures(D, 40, rng=0),
    "hyperbolic": HyperbolicFeatures(D, 40, rng=1),
    "elu": EluFeatures(),
    "relu": ReluFeatures(),
    "per-head": PositiveFeatures.from_projection(
        np.random.default_rng(7).standard_normal((3, 40, D))
    ),
}
DENSE = DenseExponentialFeatures(
    D, 40, A=-0.1 * np.ones(D), transform=np.diag(np.linspace(0.5, 1.5, D)), rng=0
)
TOLERANCE = {BF16: 1e-2, F16: 5e-3, F32: 1e-5}


def inputs(
    lead: tuple[int, ...] = (3,),
    length: int = 150,
    value_dim: int = 24,
    dim: int = D,
    keys: int | None = None,
    seed: int = 0,
) -> Any:
    """Queries, keys and values that bfloat16 and float16 hold exactly enough: float32 of those."""
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = ((length, dim), (keys, dim), (keys, value_dim))
    arrays = [rng.standard_normal((*lead, *shape)) for shape in shapes]
    return [x.astype(BF16).astype(F16).astype(F32) for x in arrays]


def exact(*given, **settings):
    """The generic code in float64, which other tests hold to the quadratic oracles."""
    state = settings.pop("initial_state", None)
    if state is not None:
        state = state._replace(kvz=state.kvz.astype(float), log_scale=state.log_scale.astype(float))
    query, key, value, phi = given
    with linattn.without_backends():
        return linattn.linear_attention(
            query.astype(np.float64),
            key.astype(np.float64),
            value.astype(np.float64),
            phi,
            initial_state=state,
            **settings,
        )


def solve(dtype, *given, **settings):
    """The whole tier on arrays of a dtype that NumPy's own door may not let in."""
    query, key, value, phi = given
    problem = linear_problem(query, key, value, phi, **settings)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    return fused.attention(replace(problem, query=query, key=key, value=value))


def error(first, second):
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return np.linalg.norm(first - second) / np.linalg.norm(second)


def content(state):
    """What a state says, whatever its scale."""
    return state.kvz.astype(np.float64) * np.exp(state.log_scale.astype(np.float64))[..., None]


# Fused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", MAPS)
def test_fused_agrees_with_float64(cupy_backend, name, dtype, is_causal):
    cupy_backend.processors = 50
    phi = MAPS[name]
    query, key, value = inputs()
    settings = {"is_causal": is_causal, "want_log": True}
    output, state, norm = solve(dtype, query, key, value, phi, **settings)
    expected, after, log = exact(
        query, key, value, phi, is_causal=is_causal, return_state=True, return_log_normalizer=True
    )
    assert output.dtype == dtype
    assert (state.kvz.dtype, state.log_scale.dtype, norm.dtype) == (F32, F32, F32)
    assert state.length == 150
    assert error(output, expected) < TOLERANCE[dtype]
    assert error(content(state), content(after)) < 2 * TOLERANCE[dtype]
    assert np.abs(norm - log).max() < 0.05
    kernels = ["causal_rows", "redo_rows"] if is_causal else ["read_states"]
    assert cupy_backend.launches == ["segment_states", "scan_states", *kernels]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_shapes_of_real_models(cupy_backend, emulation, dim, is_causal):
    if dim == 128:  # the smaller one shows a barrier that is missing
        cupy_backend.emulator.orders = [emulation.ASCENDING]
    phi = PositiveFeatures(dim, 256, rng=0)
    query, key, value = inputs((2,), 130, dim, dim)
    output, *_ = solve(BF16, query, key, value, phi, is_causal=is_causal)
    assert error(output, exact(query, key, value, phi, is_causal=is_causal)) < TOLERANCE[BF16]


@pytest.mark.parametrize("processors", [1, 4, 50])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_segments_agree(cupy_backend, is_causal, processors):
    cupy_backend.processors = processors
    phi = MAPS["positive"]
    query, key, value = inputs((1,), 350)
    output, state, _ = solve(BF16, query, key, value, phi, is_causal=is_causal)
    expected, after = exact(query, key, value, phi, is_causal=is_causal, return_state=True)
    assert error(output, expected) < TOLERANCE[BF16]
    assert error(content(state), content(after)) < 2 * TOLERANCE[BF16]
    # One segment has no states to merge.
    assert ("segment_states" in cupy_backend.launches) is (processors > 1 or not is_causal)
    parts = fused.cut_of(350, 1, 1, 100).parts_per_segment
    assert parts == (2 if processors == 4 else 1)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_values_of_masked_keys_are_not_inspected(cupy_backend, is_causal):
    phi = MAPS["positive"]
    query, key, value = inputs((2, 3))
    mask = np.random.default_rng(1).random((2, 1, 150)) < 0.7
    mask[0, :, :100] = False  # rows that see no key, and a whole chunk of them
    hidden = np.broadcast_to(mask[..., None], key.shape)
    settings = {"is_causal": is_causal, "key_mask": mask}
    expected = exact(query, key, value, phi, **settings)
    key[~hidden] = np.nan
    value[~hidden[..., :1].repeat(24, -1)] = np.inf
    output, *_ = solve(BF16, query, key, value, phi, **settings)
    assert error(output, expected) < TOLERANCE[BF16]
    if is_causal:
        assert (output[0, :, :100] == 0).all()
        assert cupy_backend.redone == 0


def test_a_row_that_sees_no_key_is_accepted(cupy_backend):
    phi = MAPS["positive"]
    query, key, value = inputs((1,), 70)
    mask = np.arange(70) >= 20
    settings = {"is_causal": True, "key_mask": mask, "want_log": True}
    output, _, norm = solve(BF16, query, key, value, phi, **settings)
    assert cupy_backend.redone == 0
    assert (output[:, :20] == 0).all()
    assert (norm[:, :20] == -np.inf).all()
    assert np.isfinite(norm[:, 20:]).all()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_heads_that_share_keys(cupy_backend, is_causal):
    phi = MAPS["positive"]
    query, _, _ = inputs((2, 2, 3), 100)
    _, key, value = inputs((2, 1, 3), 100, seed=1)
    output, state, _ = solve(BF16, query, key, value, phi, is_causal=is_causal)
    expected, after = exact(query, key, value, phi, is_causal=is_causal, return_state=True)
    assert error(output, expected) < TOLERANCE[BF16]
    assert state.kvz.shape == after.kvz.shape
    assert error(content(state), content(after)) < 2 * TOLERANCE[BF16]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["positive", "elu"])
def test_a_stream_goes_on(cupy_backend, name, is_causal):
    phi = MAPS[name]
    query, key, value = inputs((3,), 200)
    first, second = (
        [x[:, :90] for x in (query, key, value)],
        [x[:, 90:] for x in (query, key, value)],
    )
    _, state = exact(*first, phi, return_state=True)
    state = state._replace(
        kvz=state.kvz.astype(F32) * F32(0.5), log_scale=state.log_scale.astype(F32) + F32(np.log(2))
    )
    output, after, _ = solve(BF16, *second, phi, is_causal=is_causal, state=state)
    whole, all_keys = exact(query, key, value, phi, is_causal=True, return_state=True)
    if is_causal:
        assert error(output, whole[:, 90:]) < TOLERANCE[BF16]
    else:
        expected = exact(query[:, 90:], key, value, phi)
        assert error(output, expected) < TOLERANCE[BF16]
    assert after.length == 200
    assert error(content(after), content(all_keys)) < 2 * TOLERANCE[BF16]


def test_queries_and_keys_of_different_lengths(cupy_backend):
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 70, keys=300)
    output, *_ = solve(BF16, query, key, value, phi)
    assert error(output, exact(query, key, value, phi)) < TOLERANCE[BF16]


def test_views_are_read_where_they_lie(cupy_backend):
    """Heads behind tokens, and rows that cannot be copied 16 bytes at a time."""
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 100)
    expected = exact(query, key, value, phi, is_causal=True)
    problem = linear_problem(query, key, value, phi, is_causal=True)
    behind = [np.ascontiguousarray(x.astype(BF16).swapaxes(0, 1)) for x in (query, key, value)]
    views = [x.swapaxes(0, 1) for x in behind]
    assert all(fused.aligned_rows(x) is x for x in views)
    wide = np.zeros((3, 100, D + 3), BF16)
    wide[..., 3:] = query
    assert fused.aligned_rows(wide[..., 3:]).flags.c_contiguous
    for first in (views[0], wide[..., 3:]):
        problem = replace(problem, query=first, key=views[1], value=views[2])
        assert error(fused.attention(problem)[0], expected) < TOLERANCE[BF16]


@pytest.mark.parametrize("name", ["positive", "elu"])
def test_causal_rows_never_see_what_comes(cupy_backend, name):
    phi = MAPS[name]
    query, key, value = inputs((1,), 140)
    before, *_ = solve(BF16, query, key, value, phi, is_causal=True)
    key[:, 70:], value[:, 70:] = 3 * key[:, 70:], -value[:, 70:]
    after, *_ = solve(BF16, query, key, value, phi, is_causal=True)
    assert error(after[:, :70], before[:, :70]) < 1e-2
    assert error(after[:, 70:], before[:, 70:]) > 0.1


@pytest.mark.parametrize("size", [6, 9])
def test_rows_that_a_later_key_would_drown_are_done_again(cupy_backend, size):
    """Keys of a chunk that weigh about exp(-70), or exp(-160), beside those behind them."""
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 100)
    key[1, :40] = (size * key[1, :40]).astype(BF16)
    output, *_ = solve(BF16, query, key, value, phi, is_causal=True)
    expected = exact(query, key, value, phi, is_causal=True)
    assert cupy_backend.redone == 1
    assert error(output[1, :40], expected[1, :40]) < TOLERANCE[BF16]
    assert error(output, expected) < TOLERANCE[BF16]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_elu_of_tokens_far_below_zero(cupy_backend, is_causal):
    """Features of exp(-95), beyond the range of float32 beside each other, are still weights."""
    phi = MAPS["elu"]
    query, key, value = inputs((2,), 100)
    query[1], key[1] = (x[1] - 95 for x in (query, key))
    query, key = (x.astype(BF16).astype(F32) for x in (query, key))
    output, *_ = solve(BF16, query, key, value, phi, is_causal=is_causal)
    expected = exact(query, key, value, phi, is_causal=is_causal)
    assert error(output[1], expected[1]) < TOLERANCE[BF16]
    assert error(output[0], expected[0]) < TOLERANCE[BF16]


ORDINARY = {f"scale {scale:g}": (scale, 0.0) for scale in (1, 30, 1e3, 1e4)}
SCALES = {
    **ORDINARY,
    "tiny": (1e-3, 0.0),
    "below zero": (10.0, -60.0),
    "far below zero": (30.0, -1000.0),
    "a scale a coordinate": (np.logspace(-4, 4, D), 0.0),
    "an offset a coordinate": (1.0, np.linspace(-100, 100, D)),
    "a scale a token": (np.logspace(-4, 4, 150)[:, None], 0.0),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("elu", kind) for kind in SCALES),
        *(("relu", kind) for kind in SCALES if "below" not in kind),
    ],
)
def test_pointwise_maps_at_any_scale(cupy_backend, emulation, name, kind, dtype, is_causal):
    cupy_backend.emulator.orders = [emulation.ASCENDING]
    cupy_backend.processors = 20
    query, key, value = inputs((2,))
    scale, offset = SCALES[kind]
    query, key = ((x * scale + offset).astype(dtype).astype(F32) for x in (query, key))
    phi = MAPS[name]
    settings = {"is_causal": is_causal, "want_log": True}
    output, state, norm = solve(dtype, query, key, value, phi, **settings)
    expected, after, log = exact(
        query, key, value, phi, is_causal=is_causal, return_state=True, return_log_normalizer=True
    )
    assert error(output, expected) < TOLERANCE[dtype]
    assert error(scaled(state), scaled(after)) < 2 * TOLERANCE[dtype]
    seen = np.isfinite(log)  # no feature of relu may be common to a query and its keys
    assert (norm[~seen] == log[~seen]).all()
    assert np.abs(norm - log)[seen].max(initial=0) < 0.05
    assert cupy_backend.redone == 0 or kind not in ORDINARY or name == "relu"


def scaled(state):
    """What a state says of each feature, its largest normalizer 1: its content may overflow."""
    z = state.kvz[..., -1:].astype(np.float64)
    return state.kvz / np.where(z == 0, 1, z)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["elu", "relu"])
def test_pointwise_maps_of_coordinates_that_fill_no_tile(cupy_backend, name, is_causal):
    """The last 8 of 16 columns are no features: not of tokens whose f(x) are far below f(0)."""
    phi = MAPS[name]
    query, key, value = inputs((2,), 100, dim=24)
    if name == "elu":
        query[1], key[1] = (x[1] - 50 for x in (query, key))
    query, key = (x.astype(BF16).astype(F32) for x in (query, key))
    mask = np.arange(100) % 3 > 0
    settings = {"is_causal": is_causal, "key_mask": mask}
    output, *_ = solve(BF16, query, key, value, phi, **settings)
    assert error(output[1], exact(query, key, value, phi, **settings)[1]) < TOLERANCE[BF16]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_feature_that_no_key_has_is_no_scale(cupy_backend, is_causal):
    """The largest f(x) of the queries meets nothing; what meets keys is 1e-35 of it."""
    query, key, value = inputs((2,), 100)
    query, key[..., 3] = (np.abs(query) * F32(1e-35)).astype(BF16).astype(F32), -1
    query[..., 3] = 5
    problem = linear_problem(query, key, value, MAPS["relu"], is_causal=is_causal)
    arrays = {n: getattr(problem, n).astype(BF16) for n in ("query", "key", "value")}
    output, *_ = fused.attention(replace(problem, **arrays))
    expected = exact(query, key, value, MAPS["relu"], is_causal=is_causal)
    assert error(output, expected) < TOLERANCE[BF16]
    assert cupy_backend.redone == 0


@pytest.mark.parametrize("place", ["key", "value", "query"])
def test_nan_reaches_its_own_rows_only(cupy_backend, place):
    phi = MAPS["positive"]
    query, key, value = inputs((2,), 150)
    clean = exact(query, key, value, phi, is_causal=True)
    {"key": key, "value": value, "query": query}[place][1, 75, 3] = np.nan
    output, *_ = solve(BF16, query, key, value, phi, is_causal=True)
    assert error(output[0], clean[0]) < TOLERANCE[BF16]
    assert error(output[1, :75], clean[1, :75]) < TOLERANCE[BF16]
    lost = np.isnan(output[1].astype(F32))
    if place == "key":
        assert lost[75:].all()
    elif place == "value":
        assert lost[75:, 3].all()
        others = [i for i in range(24) if i != 3]
        assert error(output[1][:, others], clean[1][:, others]) < TOLERANCE[BF16]
    else:
        assert lost[75].all()
        assert lost.sum() == 24


def test_a_square_that_overflows_is_nan_and_not_nothing(cupy_backend):
    phi = MAPS["positive"]
    query, key, value = inputs((1,), 20)
    key[0, 5] = 1e30
    problem = linear_problem(query, key, value, phi)
    arrays = {
        name: x.astype(BF16)
        for name, x in zip(("query", "key", "value"), (query, key, value), strict=True)
    }
    output, *_ = fused.attention(replace(problem, **arrays))
    assert np.isnan(output.astype(F32)).all()


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
def test_other_problems_are_left_to_the_generic_code(cupy_backend, phi, change, reason):
    assert solve(BF16, *inputs(**change), phi) == Declined(reason)
    assert cupy_backend.launches == []


def test_float16_through_the_door(cupy_backend):
    phi = MAPS["positive"]
    query, key, value = inputs((2,), 100)
    half = (query.astype(F16), key.astype(F16), value.astype(F16))
    output, state = linattn.linear_attention(*half, phi, is_causal=True, return_state=True)
    assert output.dtype == F16
    assert "causal_rows" in cupy_backend.launches
    expected, after = exact(query, key, value, phi, is_causal=True, return_state=True)
    assert error(output, expected) < TOLERANCE[F16]
    assert error(content(state), content(after)) < 2 * TOLERANCE[F16]
    # A window and float64 accumulation are not for these kernels.
    cupy_backend.launches.clear()
    linattn.linear_attention(*half, phi, exact_window=8)
    with linattn.config(precision="float64"):
        linattn.linear_attention(*half, phi)
    assert "causal_rows" not in cupy_backend.launches
    assert "read_states" not in cupy_backend.launches


# Blocks -----------------------------------------------------------------------------------------


@pytest.fixture(params=[16, 1024], ids=["tiles", "one tile"])
def tile(request, monkeypatch):
    """Tokens of a tile: several to a block, or one."""
    monkeypatch.setattr(planning, "TILE", request.param)
    monkeypatch.setattr(planning, "CAUSAL_TILE", request.param)
    return request.param


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", [*MAPS, "tilted"])
def test_float32_agrees_with_float64(cupy_backend, name, is_causal, tile):
    tilted = GeneralizedExponentialFeatures(D, 40, A=-0.1, rng=0)
    phi = tilted if name == "tilted" else MAPS[name]
    query, key, value = inputs((2, 3))
    settings: dict[str, Any] = {"is_causal": is_causal, "chunk_size": 40}
    mask = np.random.default_rng(1).random((2, 1, 150)) < 0.7
    mask[1, :, :60] = False
    output, state, norm = linattn.linear_attention(
        *(query, key, value),
        phi,
        key_mask=mask,
        return_state=True,
        return_log_normalizer=True,
        **settings,
    )
    expected, after, log = exact(
        *(query, key, value),
        phi,
        key_mask=mask,
        return_state=True,
        return_log_normalizer=True,
        **settings,
    )
    assert error(output, expected) < TOLERANCE[F32]
    assert error(content(state), content(after)) < TOLERANCE[F32]
    seen = np.isfinite(log)
    assert (np.isfinite(norm) == seen).all()
    assert np.abs(norm[seen] - log[seen]).max() < 1e-4
    wanted = {"pack_rows", "key_tops", "key_weights", "scan_tiles", "query_weights"}
    wanted |= {"causal_scores", "finish_rows", "redo_rows"} if is_causal else set()
    wanted |= {"log_activations"} if name in ("elu", "relu") else set()
    assert set(cupy_backend.launches) == wanted
    assert cupy_backend.redone == 0


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_float32_streams_and_views(cupy_backend, is_causal, tile):
    """A state goes on; heads behind tokens are packed: the bits are the same."""
    phi = MAPS["positive"]
    query, key, value = inputs((2, 3), 130)
    first = [x[..., :60, :] for x in (query, key, value)]
    _, state = exact(*first, phi, return_state=True)
    state = state._replace(kvz=state.kvz.astype(F32), log_scale=state.log_scale.astype(F32))
    rest = [x[..., 60:, :] for x in (query, key, value)]
    q, k, v = (np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3) for x in rest)
    given: Any = {"initial_state": state, "is_causal": is_causal, "return_state": True}
    output, after = linattn.linear_attention(rest[0], rest[1], rest[2], phi, **given)
    same, again = linattn.linear_attention(q, k, v, phi, **given)
    whole, all_keys = exact(query, key, value, phi, is_causal=True, return_state=True)
    wanted = whole[..., 60:, :] if is_causal else exact(rest[0], key, value, phi)
    assert error(output, wanted) < TOLERANCE[F32]
    assert error(content(after), content(all_keys)) < TOLERANCE[F32]
    assert after.length == 130
    np.testing.assert_array_equal(same, output)
    np.testing.assert_array_equal(again.kvz, after.kvz)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_float32_keys_that_are_masked_hold_anything(cupy_backend, is_causal, tile):
    phi = MAPS["positive"]
    query, key, value = inputs((2, 3))
    mask = np.random.default_rng(1).random((2, 1, 150)) < 0.7
    mask[0, :, :50] = False
    settings = {"is_causal": is_causal, "key_mask": mask}
    expected = exact(query, key, value, phi, **settings)
    hidden = ~np.broadcast_to(mask, key.shape[:-1])
    key[hidden], value[hidden] = np.nan, np.inf
    output = linattn.linear_attention(query, key, value, phi, **settings)
    assert error(output, expected) < TOLERANCE[F32]
    if is_causal:
        assert (output[0, :, :50] == 0).all()
        assert cupy_backend.redone == 0


def test_float32_blocks_of_a_map_in_other_coordinates(cupy_backend, tile):
    """The driver changes coordinates, block by block, and kernels do the rest."""
    phi = Reparametrized(MAPS["positive"], np.linspace(0.5, 2, D))
    query, key, value = inputs((2, 3))
    mask = np.random.default_rng(1).random((2, 1, 150)) < 0.7
    settings: Any = {"key_mask": mask, "return_log_normalizer": True}
    with linattn.explain() as report:
        output, norm = linattn.linear_attention(query, key, value, phi, **settings, chunk_size=80)
    assert report.ran("attention") == {"driver"}
    assert report.ran("read_block") == report.ran("reduce_block") == {"linattn_cupy"}
    expected, log = exact(query, key, value, phi, **settings)
    assert error(output, expected) < TOLERANCE[F32]
    assert np.abs(norm - log).max() < 1e-4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_divided_in_one_kernel(cupy_backend, dtype):
    num_den = np.random.default_rng(0).standard_normal((2, 3, 6, 9)).astype(dtype)
    num_den[0, 0, :4, -1] = 0, 0, np.inf, np.nan
    num_den[0, 0, 1, :3] = 0, np.inf, np.nan
    part = Partial(num_den, None)
    with np.errstate(all="ignore"):
        expected = _generic.divide(part)
    np.testing.assert_array_equal(linattn_cupy.divide(part), expected)
    out = np.full((2, 6, 3, 8), 7, dtype).swapaxes(1, 2)
    assert linattn_cupy.divide(part, out) is None
    np.testing.assert_array_equal(out, expected)
    assert cupy_backend.launches == [f"divide_rows_{np.dtype(dtype)}"] * 2
    half = np.empty((2, 3, 6, 8), np.float16)
    assert linattn_cupy.divide(part, half) == Declined("rows are converted or copied")


def test_float32_blocks_fill_the_workspace(cupy_backend):
    """A tenth of the launches of blocks of 128 tokens; fewer tokens where there is less memory."""
    query, key, value = inputs((4, 16), 8192, 64, 64)
    problem = linear_problem(query, key, value, PositiveFeatures(64, 256, rng=0))
    for is_causal, most in ((False, 4), (True, 10)):
        causal = replace(problem, is_causal=is_causal)
        tokens = planning.tokens_of(causal)
        blocks = planning.blocks_of(8192, tokens, is_causal=is_causal)
        assert len(blocks) <= most
        assert [row for b in blocks for row in range(8192)[b.rows]] == list(range(8192))
        assert all((b.rows.stop - b.rows.start) % b.tile == 0 for b in blocks)
        cupy_backend.memory_bytes = 8 * 2**30
        assert tokens // 5 < planning.tokens_of(causal) < tokens // 3
        cupy_backend.memory_bytes = 80 * 2**30
        assert planning.plan(causal).block_size == (256 if is_causal else tokens)
    assert planning.blocks_of(1000, 128, is_causal=True)[-1] == (slice(896, 1000), 104)


@pytest.mark.parametrize("size", [6, 9])
def test_float32_rows_that_a_later_key_would_drown(cupy_backend, size):
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 64)
    key[1, :40] *= size
    expected = exact(query, key, value, phi, is_causal=True)
    key[2, 55] = np.nan
    output = linattn.linear_attention(query, key, value, phi, is_causal=True, chunk_size=64)
    assert cupy_backend.redone == (2 if size == 9 else 1)
    assert error(output[:2], expected[:2]) < TOLERANCE[F32]
    assert error(output[1, :40], expected[1, :40]) < TOLERANCE[F32]
    assert error(output[2, :55], expected[2, :55]) < TOLERANCE[F32]
    assert np.isnan(output[2, 55:]).all()


def test_the_host_reads_no_values(cupy_backend, monkeypatch):
    """The driver's own acceptance, which would wait for the device, is never asked."""
    from linattn._driver import causal_blocks

    def refused(*args):
        pytest.fail("the host read values")

    monkeypatch.setattr(causal_blocks, "rejected_rows", refused)
    query, key, value = inputs((2,), 100)
    for phi in MAPS["positive"], MAPS["elu"]:
        linattn.linear_attention(query, key, value, phi, is_causal=True, chunk_size=32)


def test_float32_heads_that_share_keys(cupy_backend):
    phi = MAPS["positive"]
    query, _, _ = inputs((2, 2, 3), 60)
    _, key, value = inputs((2, 1, 3), 60, seed=1)
    for is_causal in (False, True):
        output = linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
        assert error(output, exact(query, key, value, phi, is_causal=is_causal)) < TOLERANCE[F32]


def test_other_float32_blocks_are_generic(cupy_backend):
    query, key, value = inputs((2,), 60)
    for phi in (CosformerFeatures(D, max_length=200), DENSE):
        output = linattn.linear_attention(query, key, value, phi, is_causal=True)
        assert error(output, exact(query, key, value, phi, is_causal=True)) < 1e-4
    assert cupy_backend.launches == ["divide_rows_float32"] * 2


# Steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", MAPS)
def test_steps_agree_with_causal_attention(cupy_backend, name, dtype):
    phi = MAPS[name]
    query, key, value = inputs((3,), 20)
    expected, after = exact(query, key, value, phi, is_causal=True, return_state=True)
    tokens = [x.astype(dtype) for x in (query, key, value)]
    empty = linattn.init_state(phi, 24, batch_shape=(3,), like=tokens[0])
    decoder, state = linattn.Decoder(phi, empty), empty
    cupy_backend.launches.clear()
    rows, functional = [], []
    for i in range(20):
        q, k, v = (x[:, i] for x in tokens)
        rows.append(decoder.step(q, k, v))
        output, state = linattn.decode_step(q, k, v, state, phi)
        functional.append(output)
    assert set(cupy_backend.launches) == {"decode"}
    assert rows[0].dtype == dtype
    assert error(np.stack(rows, 1), expected) < (TOLERANCE[F32] if dtype is F32 else 1e-3)
    np.testing.assert_array_equal(np.stack(rows, 1), np.stack(functional, 1))
    assert decoder.state.length == state.length == 20
    for kept in (decoder.state, state):
        assert error(content(kept), content(after)) < 1e-5


@pytest.mark.parametrize("value_dim", [64, 100, 130, 511])
def test_steps_of_wide_values(cupy_backend, value_dim):
    """Rows of the state of two and more registers a lane, several of them at once and some left."""
    phi = MAPS["per-head"]
    query, key, value = inputs((3,), 3, value_dim)
    expected = exact(query, key, value, phi, is_causal=True)
    decoder = linattn.Decoder(phi, linattn.init_state(phi, value_dim, batch_shape=(3,), like=query))
    rows = [decoder.step(*(x[:, i] for x in (query, key, value))) for i in range(3)]
    assert set(cupy_backend.launches) == {"decode"}
    assert error(np.stack(rows, 1), expected) < TOLERANCE[F32]


def test_steps_through_scales_that_jump(cupy_backend):
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 12)
    key[:, ::3] *= 10
    expected = exact(query, key, value, phi, is_causal=True)
    decoder = linattn.Decoder(phi, linattn.init_state(phi, 24, batch_shape=(3,), like=query))
    rows = [decoder.step(*(x[:, i] for x in (query, key, value))) for i in range(12)]
    assert error(np.stack(rows, 1), expected) < TOLERANCE[F32]


def test_a_step_leaves_its_state_alone(cupy_backend):
    phi = MAPS["positive"]
    query, key, value = inputs((3,), 2)
    empty = linattn.init_state(phi, 24, batch_shape=(3,), like=query)
    _, state = linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], empty, phi)
    kept = [state.kvz.copy(), state.log_scale.copy()]
    linattn.decode_step(query[:, 1], key[:, 1], value[:, 1], state, phi)
    decoder = linattn.Decoder(phi, state)
    decoder.step(query[:, 1], key[:, 1], value[:, 1])
    before = decoder.state
    decoder.step(query[:, 1], key[:, 1], value[:, 1])
    assert before.length == 2
    assert not np.array_equal(before.kvz, decoder.state.kvz)
    np.testing.assert_array_equal(state.kvz, kept[0])
    np.testing.assert_array_equal(state.log_scale, kept[1])


# Where kernels cannot run -----------------------------------------------------------------------


def test_one_warning_and_the_generic_code_where_kernels_cannot_be_built(cupy_backend):
    device._warn_once.cache_clear()
    cupy_backend.unavailable = "compute capability 7.5 is below 8.0"
    phi = MAPS["positive"]
    query, key, value = inputs((2,), 60)
    expected = exact(query, key, value, phi, is_causal=True)

    def everything():
        whole = linattn.linear_attention(query, key, value, phi, is_causal=True)
        q, k, v = (x.astype(F16) for x in (query, key, value))
        half = linattn.linear_attention(q, k, v, phi, is_causal=True)
        empty = linattn.init_state(phi, 24, batch_shape=(2,), like=query)
        decoder = linattn.Decoder(phi, empty)
        rows = [decoder.step(*(x[:, i] for x in (query, key, value))) for i in range(5)]
        return whole, half, np.stack(rows, 1)

    with pytest.warns(RuntimeWarning, match="CUDA kernels are not used here: compute cap") as seen:
        output, half, rows = everything()
    assert len(seen) == 1
    assert error(output, expected) < TOLERANCE[F32]
    assert error(half, expected) < 1e-3
    assert error(rows, expected[:, :5]) < TOLERANCE[F32]


def test_a_device_with_little_shared_memory(cupy_backend):
    device._warn_once.cache_clear()
    cupy_backend.shared_bytes = 4096
    words = r"full attention with d = 16, m = 40 needs [\d,]+ bytes of shared memory a block, this"
    with pytest.warns(RuntimeWarning, match=words):
        answer = solve(BF16, *inputs(), MAPS["positive"])
    assert re.match(words, answer.reason)
    assert cupy_backend.launches == []


def test_reads_of_shorter_chunks_where_memory_is_short(cupy_backend):
    query, key, value = inputs()
    phi = PositiveFeatures(D, 128, rng=0)
    q, k, v = (x.astype(F16) for x in (query, key, value))
    variant = fused._variant(linear_problem(q, k, v, phi))
    short, long = (variant.shared(c, keys=False, queries=True) for c in (64, 128))
    cupy_backend.shared_bytes = long - 1
    assert short < long
    assert variant.shared(64, keys=True, queries=False) < long
    output, *_ = solve(BF16, query, key, value, phi)
    assert cupy_backend.launches == ["segment_states", "scan_states", "read_states"]
    assert error(output, exact(query, key, value, phi)) < TOLERANCE[BF16]


CARDS = {"163 KB": 166_912, "99 KB": 101_376, "227 KB": 232_448}
GPU_PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"


def test_the_page_says_what_fits_which_card(cupy_backend):
    """The largest m of full and causal attention by d, and that gradients take as many."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in GPU_PAGE.read_text(encoding="utf-8").splitlines()
        if " KB | " in line
    ]
    assert [row[1] for row in rows] == list(CARDS)
    for row in rows:
        cupy_backend.shared_bytes = CARDS[row[1]]
        found = [", ".join(str(largest(dim, causal)) for causal in (False, True)) for dim in DIMS]
        assert row[2:] == found
        widest = [dim for dim in range(16, 129, 8) if fits(EluFeatures(), dim, is_causal=True)]
        assert max(widest) == (112 if row[1] == "99 KB" else 128)


DIMS = (32, 64, 96, 128)


def largest(dim, is_causal):
    return max(
        m
        for m in range(16, 257, 16)
        if fits(PositiveFeatures(dim, m, rng=0), dim, is_causal=is_causal)
    )


def fits(phi, dim, *, is_causal):
    query, key, value = (x.astype(F16) for x in inputs((1,), 1, 64, dim))
    problem = linear_problem(query, key, value, phi, is_causal=is_causal)
    try:
        work = fused.work_of(problem)
    except device.KernelUnavailableError:
        return False
    assert gradients._least_memory(work) <= device.shared_bytes()
    return True


def test_shared_memory_is_what_the_kernels_lay_out(cupy_backend):
    """One byte less than the host asks for would be seen: the emulator guards the end."""
    query, key, value = (x.astype(F16) for x in inputs())
    variant = fused._variant(linear_problem(query, key, value, MAPS["positive"]))
    assert variant.shared(64, keys=True, queries=True) == 2 * (
        48 * 24 + 2 * 64 * (24 + 40) + 64 * 24 + 48 * 40 + 48 * 72
    ) + 4 * (5 * 48 + 64)


# Layout -----------------------------------------------------------------------------------------


def test_heads_are_three_axes_at_most():
    heads = layout.heads_of((2, 1, 5, 7))
    assert heads.sizes == (2, 5, 7)
    assert heads.total == 70
    array = np.zeros((5, 1, 3, 4), F32)
    assert layout.strides(heads, array) == [0, 12, 0, 4]
    assert layout.unit_strides(heads, (1, 5, 7)) == [0, 7, 1]
    assert layout.unit_strides(heads, ()) == [0, 0, 0]
    with pytest.raises(device.UnsupportedError, match="4 axes of heads are more than 3"):
        layout.heads_of((2, 3, 4, 5))
    scalar = layout.heads_of(())
    assert scalar.sizes == (1, 1, 1)


def test_segments_fill_the_device(cupy_backend):
    cupy_backend.processors = 132
    for heads, length in [(64, 8192), (1, 65536), (1, 100), (300, 512), (132, 64)]:
        segments = fused.segments_of(length, heads, 64, 10**6)
        assert segments.number * segments.length >= length
        assert length > (segments.number - 1) * segments.length
        assert segments.length % 64 == 0
        waves = -(-heads * segments.number // 132)
        work = heads * -(-length // 64) / 132
        assert waves * segments.length / 64 <= max(1.3 * work, 1)
    assert fused.segments_of(8192, 64, 64, 3).number <= 3


def test_both_passes_of_a_causal_call_fill_the_device(cupy_backend):
    cupy_backend.processors = 132
    for heads, length in [(64, 8192), (64, 1000), (1, 65536), (1, 100), (8, 8192), (32, 8192)]:
        segments, parts = cut = fused.cut_of(length, heads, heads, 1000)
        assert segments.number * segments.length >= length
        assert length > (segments.number - 1) * segments.length
        assert parts.length % 64 == 0
        assert segments.length == cut.parts_per_segment * parts.length
        assert parts.number == cut.parts_per_segment * segments.number
        needed = heads * (segments.number - 1) * cut.parts_per_segment
        waves = -(-needed // 132)
        work = needed * parts.length / 64 / 132
        assert waves * parts.length / 64 <= max(1.4 * work, 1)
    assert fused.cut_of(8192, 64, 64, 9).parts_per_segment == 2
    # Two segments and the state of one of them are three states.
    assert fused.cut_of(8192, 64, 64, 3).parts_per_segment == 1
    assert fused.cut_of(8192, 64, 64, 2).segments.number == 1
    # Heads that share keys share the states of segments.
    assert fused.cut_of(8192, 64, 8, 100).parts_per_segment == 16


# Products ---------------------------------------------------------------------------------------


class Cublas:
    """cuBLAS as its documentation describes it: column-major, through pointers."""

    CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
    CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 77
    CUBLAS_GEMM_DEFAULT = -1

    def __init__(self):
        self.computes = []

    def gemmStridedBatchedEx(
        self, handle, op_a, op_b, m, n, k, alpha, a, a_kind, lda, step_a, b, b_kind, ldb, step_b,
        beta, c, c_kind, ldc, step_c, count, compute, algo,
    ):  # fmt: skip
        import ctypes

        def matrix(pointer, ld, columns, step, i):
            address = pointer + 4 * step * i
            flat = np.ctypeslib.as_array((ctypes.c_float * (ld * columns)).from_address(address))
            return flat.reshape(columns, ld).T  # column-major

        self.computes.append(compute)
        scale_ab, scale_c = (ctypes.c_float.from_address(p).value for p in (alpha, beta))
        for i in range(count):
            left = matrix(a, lda, m if op_a else k, step_a, i)
            right = matrix(b, ldb, k if op_b else n, step_b, i)
            out = matrix(c, ldc, n, step_c, i)[:m]
            left = left[:k].T if op_a else left[:m]
            right = right[:n].T if op_b else right[:k]
            out[...] = scale_ab * left @ right + (scale_c * out if scale_c else 0)


@pytest.fixture
def cublas(monkeypatch):
    import sys
    import types

    fake = Cublas()
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            runtime=types.SimpleNamespace(CUDA_R_32F=0),
            device=types.SimpleNamespace(get_cublas_handle=lambda: 1),
        )
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(products, "_cublas", lambda: fake)
    return fake


class Pointed(np.ndarray):
    """An array with the address where CuPy has it."""

    @property
    def data(self):
        import types

        return types.SimpleNamespace(ptr=self.ctypes.data)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("shared", [None, "a", "b"])
def test_products_ask_cublas_for_the_right_thing(
    cublas, monkeypatch, transpose_a, transpose_b, add, shared
):
    monkeypatch.setattr(products, "MAX_BATCH", 2)
    rng = np.random.default_rng(0)
    heads, n, k, m = 5, 3, 4, 6
    a = rng.standard_normal((1 if shared == "a" else heads, *((k, n) if transpose_a else (n, k))))
    b = rng.standard_normal((1 if shared == "b" else heads, *((m, k) if transpose_b else (k, m))))
    out = np.full((heads, n, m), 3.0 if add else np.nan)
    a, b, out = (x.astype(F32).view(Pointed) for x in (a, b, out))
    products.multiply(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b, add=add)
    left = np.asarray(a.swapaxes(-1, -2) if transpose_a else a)
    right = np.asarray(b.swapaxes(-1, -2) if transpose_b else b)
    expected = np.matmul(left, right) + (3 if add else 0)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5)
    with products.tf32():
        products.multiply(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b)
    assert cublas.computes == [68] * 3 + [77] * 3


@pytest.mark.parametrize("add", [False, True])
def test_products_without_a_strided_batched_product(monkeypatch, add):
    monkeypatch.setattr(products, "_cublas", lambda: None)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5, 4, 4)).astype(F32)
    out = np.ones((5, 4, 4), F32)
    products.multiply(a, b, out, transpose_a=True, add=add)
    np.testing.assert_allclose(out, np.matmul(a.swapaxes(-1, -2), b) + add, rtol=1e-5)


def test_tf32_is_asked_for_by_the_user(cupy_backend, monkeypatch):
    from linattn_cupy import states

    seen = []
    inner = vars(states)["multiply"]

    def watched(*args, **settings):
        seen.append(products._tf32.get())
        inner(*args, **settings)

    monkeypatch.setattr(states, "multiply", watched)
    query, key, value = inputs((2,), 40)
    linattn.linear_attention(query, key, value, MAPS["positive"])
    assert not any(seen)
    seen.clear()
    with linattn.config(precision="tf32"):
        linattn.linear_attention(query, key, value, MAPS["positive"], is_causal=True)
    assert seen
    assert all(seen)


# Gradients ----------------------------------------------------------------------------------------


def test_a_pullback_beside_a_whole_answer(cupy_backend):
    # The kernels give a state whether or not it was asked for.
    query, key, value = (x.astype(F16) for x in inputs((2,), 60))
    output, pullback = linattn.linear_attention_vjp(query, key, value, MAPS["elu"], is_causal=True)
    assert "causal_rows" in cupy_backend.launches
    gradients = pullback(output)
    with linattn.without_backends():
        query, key, value = (x.astype(np.float64) for x in (query, key, value))
        expected, exactly = linattn.linear_attention_vjp(
            query, key, value, MAPS["elu"], is_causal=True
        )
        wanted = exactly(output.astype(np.float64))
    assert error(output, expected) < TOLERANCE[F16]
    for gradient, other in zip(gradients, wanted, strict=True):
        assert gradient.dtype == F16
        assert error(gradient, other) < 2 * TOLERANCE[F16]

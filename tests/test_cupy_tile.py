"""The kernels in cuTile on a stand-in of NumPy, against formulas in float64; and their choice."""

# mypy: disable-error-code="arg-type, call-arg, misc"

from __future__ import annotations

import hashlib
import json
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from benchmarks.gpu import formulas
from linattn_cupy import device, hardware, tile
from tests.tile_stand_in import stand_in

BF16, F32 = ml_dtypes.bfloat16, np.float32


@pytest.fixture(autouse=True)
def _cuda_tile(monkeypatch):
    stand_in(monkeypatch)


def inputs(dtype, length, keys, dim=16, features=32, value_dim=32):
    """Queries, keys, values, cotangents, a projection: heads of 2."""
    rng = np.random.default_rng(0)
    shapes = (length, dim), (keys, dim), (keys, value_dim), (length, value_dim)
    arrays = [rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes]
    projection = (rng.standard_normal((features, dim)) * dim**-0.25).astype(dtype)
    col = np.full(features, -math.log(features) / 2, F32)
    return arrays, tile.Map(projection, col, -0.5 * dim**-0.5)


def wanted(arrays, phi, causal):
    """Output and gradients by the definition."""
    q, k, v, grad = (x.astype(float) for x in arrays)
    formula = formulas.Formula("favor", phi.projection.astype(float))
    given = formula, q, k, v, np.tri(q.shape[1], k.shape[1], dtype=bool) | (not causal)
    return formulas.attend(*given).output, *formulas.gradients(*given, grad)


def error(found, expected):
    return np.linalg.norm(found.astype(float) - expected) / np.linalg.norm(expected)


CASES = pytest.mark.parametrize(
    ("length", "keys", "causal"),
    [
        (64, 64, False),
        (1, 77, False),
        (130, 200, False),
        (1, 1, True),
        (128, 128, True),
        (200,) * 2 + (True,),
    ],
)
DTYPES = pytest.mark.parametrize(("dtype", "bound"), [(BF16, 1e-2), (F32, 3e-6)])


@DTYPES
@CASES
def test_rows_and_gradients_agree_with_float64(dtype, bound, length, keys, causal):
    arrays, phi = inputs(dtype, length, keys)
    *given, grad = arrays
    out, *gradients = wanted(arrays, phi, causal)
    rows = tile.solve(np, *given, phi, causal=causal, keep=False)
    assert error(rows.out, out) < bound
    kept = tile.solve(np, *given, phi, causal=causal, keep=True)
    assert error(kept.out, out) < bound
    found = tile.pull(np, *given, phi, kept, grad, causal=causal)
    for x, y in zip(found, gradients, strict=True):
        assert x.dtype == dtype
        if keys > 1:  # the gradients of a single key's weights are 0
            assert error(x, y) < 2 * bound
        else:
            assert np.abs(x.astype(float) - y).max() < 2 * bound


def test_the_last_state_is_the_sum_over_all_keys():
    arrays, phi = inputs(F32, 90, 90)
    _, k, v, _ = (x.astype(float) for x in arrays)
    log = k @ phi.projection.T.astype(float) + phi.curvature * (k * k).sum(-1, keepdims=True)
    for causal in (False, True):
        kv, z, shifts = tile.solve(np, *arrays[:3], phi, causal=causal, keep=False).last
        scale = np.exp(shifts.astype(float))
        phi_k = np.exp(log + phi.col)
        assert error(z * scale, phi_k.sum(1)) < 1e-5
        assert error(kv * scale[..., None], phi_k.swapaxes(-1, -2) @ v) < 1e-5


def test_padding_is_not_read():
    """Arrays that end within a tile lie before NaN in a larger one."""
    arrays, phi = inputs(F32, 77, 77)
    larger = [np.full((2, 128, x.shape[-1]), np.nan, F32) for x in arrays]
    views = [big[:, :77] for big in larger]
    for view, array in zip(views, arrays, strict=True):
        view[...] = array
    for causal in (False, True):
        found = tile.solve(np, *views[:3], phi, causal=causal, keep=True)
        np.testing.assert_array_equal(np.isfinite(found.out), True)
        assert all(
            np.isfinite(x).all()
            for x in tile.pull(np, *views[:3], phi, found, views[3], causal=causal)
        )


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Write a record, of these kernels unless told, and forget the last one."""

    def write(**changes):
        calls = {"float32 causal": {"right": True, "ms": 1.0, "other_ms": 2.0}}
        calls["float32 full"] = {"right": True, "ms": 2.0, "other_ms": 1.0}
        calls["float32 full gradients"] = {"right": False, "ms": 1.0, "other_ms": 2.0}
        kernels = hashlib.sha256(hardware.SOURCE.read_bytes()).hexdigest()
        text = {"device": "Card", "kernels": kernels, "calls": calls} | changes
        path = tmp_path / "tile.json"
        path.write_text(json.dumps(text))
        monkeypatch.setattr(hardware, "RECORD", path)
        hardware.record.cache_clear()

    monkeypatch.setattr(device, "name", lambda: "Card")
    monkeypatch.setattr(hardware, "_installed", lambda: True)
    yield write
    hardware.record.cache_clear()


def problem(causal):
    sees, query = SimpleNamespace(is_causal=causal), np.empty(0, F32)
    mode = "causal" if causal else "full"
    return SimpleNamespace(query=query, sees=sees, mode=mode)


def test_a_record_chooses_by_call(recorded):
    """Right and faster on this card, with these kernels; else never."""
    recorded()
    assert hardware.chosen(problem(True))
    assert not hardware.chosen(problem(False))
    assert not hardware.chosen(problem(False), is_gradient=True)
    assert not hardware.chosen(problem(True), is_gradient=True)
    assert hardware.tile_status() == "cuTile kernels run on Card, used there for float32 causal"
    for changes in ({"device": "Other"}, {"kernels": "others"}):
        recorded(**changes)
        assert not hardware.chosen(problem(True))


def test_without_a_record_it_is_never_chosen():
    """No GPU has run these kernels: no record is in the package."""
    assert not hardware.RECORD.exists()
    assert not hardware.chosen(problem(True))
    assert hardware.tile_status() == "cuTile kernels never run on hardware, not used"

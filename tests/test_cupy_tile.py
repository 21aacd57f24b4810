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


def inputs(dtype, length, keys, causal, dim=16, features=32, value_dim=32):
    """A call with heads of 2, and cotangents."""
    rng = np.random.default_rng(0)
    shapes = (length, dim), (keys, dim), (keys, value_dim), (length, value_dim)
    *arrays, grad = (rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes)
    projection = (rng.standard_normal((features, dim)) * dim**-0.25).astype(dtype)
    col = np.full((1, features), -math.log(features) / 2, F32)
    return tile.Call(np, *arrays, projection, col, -0.5 * dim**-0.5, causal), grad


def wanted(call, grad):
    """Output and gradients by the definition."""
    q, k, v = (x.astype(float) for x in call[1:4])
    formula = formulas.Formula("favor", call.projection.astype(float))
    given = formula, q, k, v, np.tri(q.shape[1], k.shape[1], dtype=bool) | (not call.causal)
    return formulas.attend(*given).output, *formulas.gradients(*given, grad.astype(float))


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
    call, grad = inputs(dtype, length, keys, causal)
    out, *gradients = wanted(call, grad)
    assert error(tile.solve(call, keep=False).out, out) < bound
    kept = tile.solve(call, keep=True)
    assert error(kept.out, out) < bound
    found = tile.pull(call, kept, grad)
    for x, y in zip(found, gradients, strict=True):
        assert x.dtype == dtype
        if keys > 1:  # the gradients of a single key's weights are 0
            assert error(x, y) < 2 * bound
        else:
            assert np.abs(x.astype(float) - y).max() < 2 * bound


def test_the_last_state_is_the_sum_over_all_keys():
    for causal in (False, True):
        call, _ = inputs(F32, 90, 90, causal)
        k, v, projection = (x.astype(float) for x in call[2:5])
        kv, z, shifts = tile.solve(call, keep=False).last
        scale = np.exp(shifts.astype(float))
        log = k @ projection.T + call.curvature * (k * k).sum(-1, keepdims=True)
        phi_k = np.exp(log + call.col)
        assert error(z * scale, phi_k.sum(1)) < 1e-5
        assert error(kv * scale[..., None], phi_k.swapaxes(-1, -2) @ v) < 1e-5


def test_padding_is_not_read():
    """Arrays that end within a tile lie before NaN in a larger one."""
    for causal in (False, True):
        call, grad = inputs(F32, 77, 77, causal)
        views = [np.full((2, 128, x.shape[-1]), np.nan, F32)[:, :77] for x in (*call[1:4], grad)]
        for view, array in zip(views, (*call[1:4], grad), strict=True):
            view[...] = array
        call = tile.Call(np, *views[:3], *call[4:])
        found = tile.solve(call, keep=True)
        for x in (found.out, *tile.pull(call, found, views[3])):
            np.testing.assert_array_equal(np.isfinite(x), True)


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

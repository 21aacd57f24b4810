"""Tiles of full attention on NumPy: of whole heads or of parts of one, values as they lie."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
from linattn.typing import Exponential
from linattn_numpy import tuning
from linattn_numpy.features import are_moderate
from tests.test_numpy_backend import SEGMENTED, agree, inputs

MAPS: dict[str, Any] = {name: SEGMENTED[name] for name in ("elu", "positive", "hyperbolic")}


@pytest.mark.parametrize("shape", [(300,), (1, 1, 300), (2, 1, 300), (1, 6, 300)])
@pytest.mark.parametrize("name", ["elu", "positive"])
def test_parts_of_heads_share_weights_of_fewer_heads(name, shape, monkeypatch):
    monkeypatch.setattr(tuning, "TILE_ELEMENTS", 4096)
    phi = SEGMENTED[name]
    query, key, value = inputs(300, heads=(2, 6))
    mask = np.random.default_rng(2).random(shape) > 0.3
    got = linattn.linear_attention(query, key, value, phi, key_mask=mask)
    with linattn.without_backends():
        want = linattn.linear_attention(query, key, value, phi, key_mask=mask)
    agree(got, want, 1e-9)


@pytest.mark.parametrize("elements", [256, 4096, 1 << 18], ids="{} numbers".format)
@pytest.mark.parametrize("name", MAPS)
def test_tiles_of_any_size(name, elements, monkeypatch):
    monkeypatch.setattr(tuning, "TILE_ELEMENTS", elements)
    query, key, value = inputs(300, heads=(2, 3))
    got = linattn.linear_attention(query, key, value, MAPS[name])
    with linattn.without_backends():
        want = linattn.linear_attention(query, key, value, MAPS[name])
    agree(got, want, 1e-9)


LAYOUTS = {
    "rows of stride 0": lambda v: np.broadcast_to(v[..., :1, :], v.shape),
    "columns first": lambda v: np.asfortranarray(v),
    "backwards": lambda v: v[..., ::-1, ::-1],
    "every other column": lambda v: np.repeat(v, 2, axis=-1)[..., ::2],
    "heads last": lambda v: np.moveaxis(np.ascontiguousarray(np.moveaxis(v, 0, -2)), -2, 0),
    "one value": lambda v: v[..., :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda x: x.__name__)
def test_values_as_they_lie(layout, dtype):
    query, key, value = (x.astype(dtype) for x in inputs(70, heads=(3,)))
    value = LAYOUTS[layout](value)
    for phi in MAPS.values():
        got = linattn.linear_attention(query, key, value, phi)
        want = linattn.linear_attention(query, key, value.copy(), phi)
        assert got.dtype == dtype
        agree(
            got.astype(np.float64), want.astype(np.float64), 1e-3 if dtype == np.float16 else 1e-6
        )


def test_no_rounding_is_read_from_denominators_that_overflow():
    """Finite numerators over infinite denominators are 0, and no average of values."""
    phi = linattn.feature_maps.EluFeatures()
    query = np.full((4, 8), 3e38, np.float32)
    key = np.ones((4, 8), np.float32)
    value = np.array([[1.0], [-1], [1], [-1]], np.float32) + np.float32(1e-3)
    out = linattn.linear_attention(query, key, value, phi)
    assert_allclose(out, np.nan if np.isnan(out[0, 0]) else 1e-3, rtol=1e-3)


@pytest.mark.parametrize("row", [140, 150, 165])
def test_heads_are_moderate_or_not_by_themselves(row):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, 280, 4)).astype(np.float32)
    x[5, row] = 1e3
    spec = Exponential(rng.standard_normal((4, 64)).astype(np.float32), 1.0, np.zeros(64))
    alone = [bool(are_moderate(spec, head)) for head in x]
    assert alone == [head != 5 for head in range(8)]
    assert are_moderate(spec, x).tolist() == alone

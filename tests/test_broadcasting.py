"""Leading axes that only some arrays have: results are those of arrays that all have them.

Every way to attend, at sizes of logits for which blocks are accepted, max-stabilized and redone.
"""

# mypy: disable-error-code="arg-type, call-arg, call-overload, misc"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
from linattn.feature_maps import (
    LandmarkFeatures,
    PositiveFeatures,
)
from tests.attentions import maps

LEAD, LENGTH, DIM, VALUE_DIM = (2, 3), 7, 4, 3
rng = np.random.default_rng(0)
MAPS: dict[str, Any] = {
    **maps(DIM, 8, "positive", "elu"),
    "per head": PositiveFeatures.from_projection(rng.standard_normal((3, 8, DIM))),
    "landmarks": LandmarkFeatures.fit(
        *rng.standard_normal((2, 3, 20, DIM)), num_features=5, num_probes=8, rng=0
    ),
    "softmax": None,
}
WINDOW: dict[str, Any] = {"exact_window": 3}
BIAS: dict[str, Any] = {"window_bias": np.array([[0.3], [-0.2], [0.5]]) * [1.0, 2.0, -1.0]}
PACKED: dict[str, Any] = {"cu_seqlens": [0, 4, 4, 7]}
CAUSAL: dict[str, Any] = {"is_causal": True}
SOFTMAX_ONLY: dict[str, dict[str, Any]] = {
    "local": {"local_window_size": 2},
    "causal local": {**CAUSAL, "local_window_size": 2},
    "biased local": {"local_window_size": (2, 1), **BIAS},
}
ALL: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "prefix": {"prefix_length": 3},
    "blocks": {"causal_block": 2},
    "stops": {"key_stop": [0, 1, 1, 4, 5, 5, 7]},
    "packed": PACKED,
    "packed causal": {**PACKED, **CAUSAL},
}
DECAYED: dict[str, dict[str, Any]] = {
    "decayed": {"log_decay": -0.3},
    "causal decayed": {**CAUSAL, "log_decay": -0.3},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "window": WINDOW,
    "causal window": {**WINDOW, **CAUSAL},
    "biased window": {**WINDOW, **BIAS},
    "causal biased window": {**WINDOW, **BIAS, **CAUSAL},
    "decayed window": {**WINDOW, "log_decay": -0.3},
    "causal decayed window": {**WINDOW, **CAUSAL, "log_decay": -0.3},
    "packed window": {**WINDOW, **PACKED},
    "packed causal window": {**WINDOW, **PACKED, **CAUSAL},
}
CLUSTERS: dict[str, dict[str, Any]] = {
    "clusters": {"exact_clusters": 2},
    "window and clusters": {**WINDOW, "exact_clusters": 2},
    "biased clusters": {**WINDOW, **BIAS, "exact_clusters": 2},
}


def ways_of(name: str) -> dict[str, dict[str, Any]]:
    if name == "softmax":
        return {**ALL, **SOFTMAX_ONLY}
    if name == "landmarks":
        return (
            {way: ALL[way] for way in ("full", "packed")}
            | {way: options for way, options in WINDOWS.items() if not options.get("is_causal")}
            | CLUSTERS
        )
    return {**ALL, **DECAYED} | ({} if name == "elu" else WINDOWS)


CASES = [(name, way) for name in MAPS for way in ways_of(name)]
AXES = {
    "value": ((), (), (2, 3)),
    "key": ((), (2, 3), ()),
    "crossed": ((2, 1), (3,), (1, 1)),
}


def arrays_of(axes: str, size: float) -> list[Any]:
    rng = np.random.default_rng(1)
    widths = DIM, DIM, VALUE_DIM
    query, key, value = (
        rng.standard_normal((*lead, LENGTH, width))
        for lead, width in zip(AXES[axes], widths, strict=True)
    )
    return [query * size, key * size, value]


def everywhere(array: Any) -> Any:
    return np.broadcast_to(array, (*LEAD, *array.shape[-2:])).copy()


def attend(name: str, arrays: list[Any], options: dict[str, Any]) -> Any:
    if name == "softmax":
        return linattn.softmax_attention(*arrays, return_log_normalizer=True, **options)
    return linattn.linear_attention(*arrays, MAPS[name], return_log_normalizer=True, **options)


def gradients(name: str, arrays: list[Any], grad: Any, options: dict[str, Any]) -> Any:
    if name == "softmax":
        output, pullback = linattn.softmax_attention_vjp(*arrays, **options)
    else:
        output, pullback = linattn.linear_attention_vjp(*arrays, MAPS[name], **options)
    return pullback(np.broadcast_to(grad, output.shape))


pytestmark = pytest.mark.filterwarnings("ignore:feature_map was fitted to other keys")


@pytest.fixture(params=["backends", "without backends"], autouse=True)
def _backends(request):
    with linattn.config() if request.param == "backends" else linattn.without_backends():
        yield


sizes = pytest.mark.parametrize("size", [20.0, 200.0])


@sizes
@pytest.mark.parametrize(("name", "way"), CASES)
def test_outputs_are_those_of_arrays_with_all_axes(name, way, size):
    options = ways_of(name)[way]
    for axes in AXES:
        arrays = arrays_of(axes, size)
        wanted = attend(name, [everywhere(array) for array in arrays], options)
        for found, expected in zip(attend(name, arrays, options), wanted, strict=True):
            found = np.broadcast_to(found, expected.shape)
            assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=axes)


@sizes
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, way in CASES if way not in WINDOWS | CLUSTERS]
)
def test_gradients_are_sums_of_those_of_arrays_with_all_axes(name, way, axes, size):
    arrays, options = arrays_of(axes, size), ways_of(name)[way]
    grad = np.random.default_rng(2).standard_normal((LENGTH, VALUE_DIM))
    expected = gradients(name, [everywhere(array) for array in arrays], grad, options)
    found = gradients(name, arrays, grad, options)
    # A log decay has a gradient too.
    assert len(found) == len(expected)
    for one, whole, array in zip(found, expected, arrays, strict=False):
        lead = (1,) * (4 - array.ndim) + array.shape[:-2]
        shared = tuple(i for i in range(2) if lead[i] == 1)
        wanted = whole.sum(axis=shared).reshape(array.shape)
        assert_allclose(one, wanted, rtol=1e-7, atol=1e-12 * size)

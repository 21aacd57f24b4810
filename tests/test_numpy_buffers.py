"""Workspaces of the NumPy backend: nobody reads one after another has asked for it."""

from typing import Any

import numpy as np
import pytest

import linattn
from linattn.feature_maps import (
    LandmarkFeatures,
)
from linattn_numpy import buffers
from tests.attentions import maps

HEADS, LENGTH, DIM = 2, 300, 16
rng = np.random.default_rng(0)
QUERY, KEY, VALUE = rng.standard_normal((3, HEADS, LENGTH, DIM)).astype(np.float32)
MAPS: dict[str, Any] = {
    **maps(DIM, 64, "positive", "hyperbolic", "elu", "relu"),
    "landmarks": LandmarkFeatures.fit(QUERY, KEY, num_features=16, rng=0),
}
CAUSAL: dict[str, Any] = {"is_causal": True}
MASK = np.arange(LENGTH) % 7 > 0
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "masked": {"key_mask": MASK},
    "masked causal": {**CAUSAL, "key_mask": MASK},
    "decay": {**CAUSAL, "log_decay": -0.1},
    "packed": {"cu_seqlens": [0, 40, 41, 170, 300]},
    "packed causal": {**CAUSAL, "cu_seqlens": [0, 40, 41, 170, 300]},
    "prefix": {"prefix_length": 130},
    "blocks": {"causal_block": 30},
    "window": {"exact_window": 20},
    "causal window": {**CAUSAL, "exact_window": 20},
}
NO_WINDOW = {name: options for name, options in OPTIONS.items() if "window" not in name}
ATTEND: Any = linattn.linear_attention


def calls() -> dict[str, Any]:
    """Results of every way to go, as tuples of arrays."""
    found: dict[str, Any] = {}
    for name, phi in MAPS.items():
        for way, options in OPTIONS.items():
            if "window" in way and name in ("elu", "relu"):
                continue
            if name == "landmarks" and options.get("is_causal", "window" not in way):
                continue
            for size in (1, 8):
                arrays = (size * QUERY, size * KEY, VALUE)
                found[f"{name}, {way}, {size}"] = (ATTEND(*arrays, phi, **options),)
                if way in NO_WINDOW:
                    pull = linattn.linear_attention_vjp(*arrays, phi, **options)[1]
                    found[f"{name}, {way}, {size}, gradients"] = pull(VALUE)
    clusters: Any = {"exact_clusters": 3}
    found["clusters"] = (ATTEND(QUERY, KEY, VALUE, MAPS["landmarks"], **clusters),)
    for window in (None, 10):
        local: Any = {"is_causal": True, "local_window_size": window}
        found[f"softmax, {window}"] = (linattn.softmax_attention(QUERY, KEY, VALUE, **local),)
    numbers: Any = {"log_decay": -np.abs(VALUE[..., 0]), "beta": 1 / (1 + QUERY[..., 0] ** 2)}
    found["recurrence"] = (
        linattn.linear_recurrence(QUERY / 4, KEY / 4, VALUE, update_rule="gated_delta", **numbers),
    )
    state = linattn.init_state(MAPS["elu"], DIM, batch_shape=(HEADS,), like=KEY)
    decoder = linattn.Decoder(MAPS["elu"], state)
    steps = [decoder.step(QUERY[:, i], KEY[:, i], VALUE[:, i]) for i in range(40)]
    found["steps"] = tuple(steps)
    return found


@pytest.mark.filterwarnings("ignore:feature_map was fitted to other keys")
def test_nothing_is_read_from_a_buffer_that_was_asked_for_again(monkeypatch):
    with linattn.config(num_threads=1):
        wanted = calls()
        monkeypatch.setattr(buffers, "IS_POISONED", True)
        got = calls()
    assert got.keys() == wanted.keys()
    for name in wanted:
        for one, other in zip(got[name], wanted[name], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def test_a_buffer_that_was_asked_for_again_is_poisoned(monkeypatch):
    monkeypatch.setattr(buffers, "IS_POISONED", True)
    first = buffers.buffer("a test", (3,), np.float32)
    first[...] = 1
    buffers.buffer("a test", (3,), np.float32)
    np.testing.assert_array_equal(first, np.nan)

"""Gradients through exact windows: near pairs, far keys and biases of offsets."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import linattn
from tests.attentions import full_and_causal, maps
from tests.option_draws import Case
from tests.pairs import DIM
from tests.test_fuzz_options import check_gradient

MAPS = {**maps(DIM, 8, "positive", "hyperbolic"), **maps(DIM, 64, "trigonometric")}


@full_and_causal
def test_extra_memory_does_not_grow_with_the_length(is_causal):
    def peak(length):
        arrays = np.random.default_rng(0).standard_normal((3, length, DIM))
        _, pullback = linattn.linear_attention_vjp(
            *arrays, MAPS["positive"], exact_window=64, is_causal=is_causal
        )
        tracemalloc.start()
        pullback(arrays[0])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # Gradients, and three numbers a row.
        return most - 3 * arrays[0].nbytes - 3 * 8 * length

    peak(4096)  # with the buffers that a thread holds on to
    assert peak(16384) < peak(4096) + 300_000


BESIDE: dict[str, dict[str, Any]] = {
    "decay": {"is_causal": True, "log_decay": -0.1 * np.random.default_rng(1).random((2, 40))},
    "decay to both sides": {"log_decay": -0.05},
    "ahead": {"key_stop": np.minimum(np.arange(40) + 9, 37)},
    "behind": {"key_stop": np.maximum(np.arange(40) - 9, 0)},
    "prefix": {"prefix_length": 25},
    "blocks": {"causal_block": 7},
    "packed": {"cu_seqlens": [0, 3, 25, 40]},
    "packed and decay": {"cu_seqlens": [0, 3, 25, 40], "log_decay": -0.1, "is_causal": True},
    "lengths": {"key_lengths": 31, "log_decay": -0.2},
}


@pytest.mark.usefixtures("numpy_path")
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [1, 3, 12])
@pytest.mark.parametrize("rule", BESIDE)
def test_gradients_beside_every_rule_are_those_of_the_dense_formula(rule, window, sinks):
    """By a complex step along one direction; the rules were refused once."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 40, DIM))
    options = {"exact_window": window, "sinks": sinks, "chunk_size": 16, **BESIDE[rule]}
    case = Case(0, "linear", query, key, value, MAPS["positive"], options)
    assert check_gradient(case) == "compared"

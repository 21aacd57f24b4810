"""The first keys of a sequence stay exact, or visible, outside of a window."""

from typing import Any

import numpy as np
import pytest

import linattn
from linattn.feature_maps import PositiveFeatures
from tests.option_draws import Case
from tests.test_fuzz_options import check_gradient

PHI = PositiveFeatures(4, 16, rng=0)
LOCAL: dict[str, Any] = {"local_window_size": (5, 0), "sinks": 3}
WINDOW: dict[str, Any] = {"exact_window": 4, "sinks": 6}


def tokens(length=70, seed=0):
    return np.random.default_rng(seed).standard_normal((3, 2, length, 4))


@pytest.mark.parametrize(("length", "num_keys"), [(1, 9), (5, 70), (9, 4)])
@pytest.mark.parametrize(
    ("phi", "options"),
    [(None, {"local_window_size": 1, "sinks": 2}), (PHI, {"exact_window": 2, "sinks": 3})],
)
def test_gradients_of_sinks_far_before_the_queries(length, num_keys, phi, options):
    kind = "softmax" if phi is None else "linear"
    options = options | {"is_causal": "lower_right"}
    query, (_, key, value) = tokens(length)[0], tokens(num_keys)
    assert check_gradient(Case(8, kind, query, key, value, phi, options)) == "compared"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sinks": 2}, ValueError, "sinks must be 0 without exact_window, got 2"),
        ({"sinks": -1, "exact_window": 4}, ValueError, "sinks must be at least 0, got -1"),
        ({"sinks": 1.5, "exact_window": 4}, TypeError, "sinks must be an integer"),
        ({"sinks": np.zeros(2), "exact_window": 4}, TypeError, "return_log_normalizer"),
    ],
)
def test_sinks_that_are_none(options, error, match):
    q, k, v = tokens(8)
    with pytest.raises(error, match=match):
        linattn.linear_attention(q, k, v, PHI, **options)


def test_a_stream_that_goes_on_has_lost_its_sinks():
    q, k, v = tokens(8)
    state = linattn.linear_attention(q, k, v, PHI, is_causal=True, return_state=True)[1]
    with pytest.raises(ValueError, match="sinks must be 0 with initial_state, got 6"):
        linattn.linear_attention(q, k, v, PHI, is_causal=True, initial_state=state, **WINDOW)
    with pytest.raises(ValueError, match="sinks must be 0 without local_window_size, got 3"):
        linattn.softmax_attention(q, k, v, sinks=3)


def test_long_dask_arrays_with_sinks_are_refused():
    da = pytest.importorskip("dask.array")
    q, k, v = (da.from_array(x, chunks=(2, 20, 4)) for x in tokens())
    with pytest.raises(ValueError, match="one chunk of at most 1024 rows for sinks"):
        linattn.linear_attention(q, k, v, PHI, is_causal=True, **WINDOW)
    with pytest.raises(ValueError, match="one chunk of at most 1024 rows for sinks"):
        linattn.softmax_attention(q, k, v, **LOCAL)

"""Windows and biases of offsets where queries and keys stand at positions: stops, L != S."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
from linattn.feature_maps import PositiveFeatures

DIM, LENGTH = 4, 300
PHI = PositiveFeatures(DIM, 6, rng=0)

WINDOWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "local": (None, {"local_window_size": (20, 7)}),
    "long local": (None, {"local_window_size": (250, 0)}),
    "local, no bound": (None, {"local_window_size": (None, 2)}),
    "bias": (None, {"window_bias": np.linspace(-1, 2, 41)}),
    "both": (None, {"local_window_size": 30, "window_bias": np.ones(3), "far_bias": (2.0, -1.0)}),
    "exact window": (PHI, {"exact_window": 16}),
    "window of one": (PHI, {"exact_window": 1}),
    "long window": (PHI, {"exact_window": 200}),
    "window and bias": (PHI, {"exact_window": 16, "window_bias": np.linspace(-1, 2, 9)}),
}


def tokens(rule, length=LENGTH):
    """Return queries, keys and values; fewer queries where a rule has them at the end."""
    arrays = np.random.default_rng(0).standard_normal((3, 2, length, DIM))
    return arrays[0][:, 130:] if rule == "end of the keys" else arrays[0], *arrays[1:]


def attend(phi, arrays, options, **more):
    if phi is None:
        return linattn.softmax_attention(*arrays, **options, **more)
    return linattn.linear_attention(*arrays, phi, **options, **more)


@pytest.mark.parametrize("window", ["local", "bias", "exact window"])
def test_what_hides_beyond_stops_does_not_matter(window):
    phi, options = WINDOWS[window]
    query, key, value = tokens("whole", 80)
    key, value = key.copy(), value.copy()
    options = options | {"key_stop": np.minimum(np.arange(80), 50)}
    want = attend(phi, (query, key, value), options)
    key[:, 50:], value[:, 50:] = np.nan, np.inf
    assert_allclose(attend(phi, (query, key, value), options), want, rtol=1e-13)


@pytest.mark.usefixtures("numpy_path")
@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.parametrize("most", [1, 14])
def test_near_stops_of_every_query_take_as_few_blocks_as_one_rule(window, most):
    """Not a run of blocks for each query."""
    jitter = np.random.default_rng(0).integers(-most, most + 1, LENGTH)
    stops = np.maximum.accumulate(np.clip(np.arange(LENGTH) + jitter, 0, LENGTH))

    def calls(**options):
        with linattn.explain() as report:
            linattn.linear_attention(*tokens(""), PHI, exact_window=window, **options)
        return sum(row.calls for row in report.choices)

    assert calls(key_stop=stops) < 3 * calls(is_causal=True)

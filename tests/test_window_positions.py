"""Windows where queries and keys stand at positions: what they cost."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
from linattn.feature_maps import PositiveFeatures
from tests import dense_oracle

DIM, LENGTH = 4, 300
PHI = PositiveFeatures(DIM, 6, rng=0)


@pytest.mark.usefixtures("numpy_path")
@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.parametrize("most", [1, 14])
def test_near_stops_of_every_query_take_as_few_blocks_as_one_rule(window, most):
    """Not a run of blocks for each query."""
    jitter = np.random.default_rng(0).integers(-most, most + 1, LENGTH)
    arrays = np.random.default_rng(1).standard_normal((3, 2, LENGTH, DIM))
    stops = np.maximum.accumulate(np.clip(np.arange(LENGTH) + jitter, 0, LENGTH))

    def calls(**options):
        with linattn.explain() as report:
            linattn.linear_attention(*arrays, PHI, exact_window=window, **options)
        return sum(row.calls for row in report.choices)

    assert calls(key_stop=stops) < 3 * calls(is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_short_windows_take_as_few_blocks_as_longer_ones(is_causal):
    """No block, and no state, for each window."""
    arrays = np.random.default_rng(1).standard_normal((3, 2, LENGTH, DIM))

    def calls(window):
        with linattn.explain() as report:
            linattn.linear_attention(*arrays, PHI, exact_window=window, is_causal=is_causal)
        return sum(row.calls for row in report.choices)

    assert max(map(calls, (1, 2, 8))) <= 1.4 * calls(32)


@pytest.mark.usefixtures("numpy_path")
@pytest.mark.parametrize("chunk_size", [None, 32, 128])
@pytest.mark.parametrize("window", [1, 4, 64])
def test_stops_that_stand_still_and_then_go_on(window, chunk_size):
    """A later group of one run reads the same keys beyond its pivot, and no more."""
    place = np.arange(256)
    stops = np.where(place < 10, 140, np.maximum(200, place + 1))
    arrays = np.random.default_rng(0).standard_normal((3, 2, 256, DIM))
    options = {"exact_window": window, "key_stop": stops}
    found = linattn.linear_attention(*arrays, PHI, chunk_size=chunk_size, **options)
    want = dense_oracle.evaluate(*arrays, PHI, **options).output
    assert_allclose(found, want, rtol=1e-11, atol=1e-11)

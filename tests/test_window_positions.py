"""Windows where queries and keys stand at positions: what they cost."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import numpy as np
import pytest

import linattn
from linattn.feature_maps import PositiveFeatures

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

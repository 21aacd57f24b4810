"""Whether features depend on the vector alone: not on rows, heads or the dtype beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from linattn.testing._attention_cases import LENGTHS
from linattn.testing._draws import SIDES, feature_rows, has_positions, lead_axes
from linattn.testing._evidence import assert_close, fail

SINGLE = 5e-5
"""Mean error of features in float32, relative to their mean size."""


def rows_of_their_own(subject: Any) -> str:
    """Assert that rows, heads and float32 have the features of one vector in float64."""
    feature_map, axes = subject.feature_map, lead_axes(subject.feature_map, subject.dim)
    most = getattr(feature_map, "max_length", None) or max(LENGTHS)
    length = int(min(most, np.max(subject.length)))
    heads = subject.tokens(3, length)
    x = heads[0] if axes else np.stack(heads, axis=1)
    for side in SIDES:
        whole = feature_rows(feature_map, side, x)
        if not axes:
            alone = np.stack([feature_rows(feature_map, side, head) for head in heads], axis=1)
            assert_close(
                "features",
                f"{side} of 3 heads, {length} rows, float64, against one head",
                whole,
                alone,
                1e-9,
            )
        if not has_positions(feature_map, subject.dim):
            cut = length // 2
            rows = feature_rows(feature_map, side, x[..., cut:, :])
            what = f"{side} of {length} rows, float64, against the last {length - cut}"
            assert_close("features", what, whole[..., cut:, :], rows, 1e-9)
        single = x.astype(np.float32)
        exact = feature_rows(feature_map, side, single.astype(np.float64))
        error = np.mean(np.abs(feature_rows(feature_map, side, single) - exact))
        # A mean: where features jump, one rounding error makes another feature.
        if not error <= SINGLE * max(np.mean(np.abs(exact)), np.finfo(np.float32).tiny):
            fail("features", f"{side} of {length} rows in float32 differ by {error:.3g} on average")
    return f"{length} rows, heads {axes or (0, 3)}, float64 and float32 agree"

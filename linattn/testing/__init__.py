"""Assertions for feature maps, samplers and attention functions, yours or linattn's.

Is my feature map unbiased? Is the variance as claimed? Does nothing leak from later tokens? Each
``assert_*`` raises AssertionError with its name and the numbers that it found, or returns
:class:`Evidence`. Each ``check_*`` and battery makes a table: it raises :class:`CheckFailedError`,
an AssertionError, if a row failed; ``on_fail="return"`` returns the report instead. Use them with
or without pytest.

Random tests take ``false_alarm_rate``, by default 1e-9, and ``rng``, by default 0: the same draws
each time. Thresholds follow from exact variances, with proofs. If no valid test exists,
:class:`UntestableError` says why.

Needs hypothesis, which the extra ``testing`` brings.
"""

from __future__ import annotations

from importlib.util import find_spec

from linattn._extras import remedy

if find_spec("hypothesis") is None:
    raise ImportError(f"linattn.testing needs hypothesis: {remedy('testing')}")

from linattn.testing import batteries, moments, statistics, strategies
from linattn.testing._draws import standard_pairs
from linattn.testing._evidence import CheckFailedError, Evidence, UntestableError
from linattn.testing.arrays import (
    assert_inputs_unchanged,
    assert_namespace_preserved,
    assert_picklable,
)
from linattn.testing.attention import (
    assert_batch_independent,
    assert_causal,
    assert_mask_is_slice,
    assert_merge_associative,
    assert_normalized,
    assert_permutation_invariant,
    assert_streaming,
)
from linattn.testing.backend import BackendReport, check_backend
from linattn.testing.check import Report, check_feature_map
from linattn.testing.covariances import assert_estimator_covariance, assert_estimator_variance
from linattn.testing.estimates import assert_mean, assert_unbiased, assert_variance
from linattn.testing.estimators import assert_estimator, draws_for
from linattn.testing.gradients import assert_gradient
from linattn.testing.projections import assert_gaussian_rows
from linattn.testing.recurrences import (
    RecurrenceLayout,
    RecurrenceReport,
    check_recurrence,
)
from linattn.testing.rollback import assert_rollback
from linattn.testing.strategies import feature_maps, norm_bounded_vectors, query_key_value
from linattn.testing.tails import assert_at_most

__all__ = [
    "BackendReport",
    "CheckFailedError",
    "Evidence",
    "RecurrenceLayout",
    "RecurrenceReport",
    "Report",
    "UntestableError",
    "assert_at_most",
    "assert_batch_independent",
    "assert_causal",
    "assert_estimator",
    "assert_estimator_covariance",
    "assert_estimator_variance",
    "assert_gaussian_rows",
    "assert_gradient",
    "assert_inputs_unchanged",
    "assert_mask_is_slice",
    "assert_mean",
    "assert_merge_associative",
    "assert_namespace_preserved",
    "assert_normalized",
    "assert_permutation_invariant",
    "assert_picklable",
    "assert_rollback",
    "assert_streaming",
    "assert_unbiased",
    "assert_variance",
    "batteries",
    "check_backend",
    "check_feature_map",
    "check_recurrence",
    "draws_for",
    "feature_maps",
    "moments",
    "norm_bounded_vectors",
    "query_key_value",
    "standard_pairs",
    "statistics",
    "strategies",
]

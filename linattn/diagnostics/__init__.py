"""How good an approximation of attention is on these inputs, before it runs and after.

Before: how large attended queries and keys are, the exact variance of a map's kernel, weighted by
attention, and from it the columns needed and the length from which they pay. After: the error of an
output on rows computed exactly, and its error and bias estimated from the terms of the very sum
that made it. Where exact attention is the better choice the ``verdict`` of a result says so.

Arrays may come from any library. Everything but exact rows is computed on the host by NumPy in
float64, on a sample of tokens where the cost would be quadratic; results are NumPy arrays.

Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``m`` features (columns), ``e`` value dim, ``...``
leading axes (batch, heads), which broadcast; each of their elements is called a head.
"""

from __future__ import annotations

from linattn.diagnostics.costs import crossover_length
from linattn.diagnostics.held_out import HeldOutError, held_out_error, held_out_rows
from linattn.diagnostics.norms import AttendedNorms, attended_norms
from linattn.diagnostics.outputs import (
    Denominators,
    OutputError,
    denominators,
    effective_features,
    output_error,
)
from linattn.diagnostics.variance import (
    PERCENTILES,
    Recommendation,
    RelativeVariance,
    recommend_num_features,
    relative_variance,
)
from linattn.diagnostics.weights import attention_weights

__all__ = [
    "PERCENTILES",
    "AttendedNorms",
    "Denominators",
    "HeldOutError",
    "OutputError",
    "Recommendation",
    "RelativeVariance",
    "attended_norms",
    "attention_weights",
    "crossover_length",
    "denominators",
    "effective_features",
    "held_out_error",
    "held_out_rows",
    "output_error",
    "recommend_num_features",
    "relative_variance",
]

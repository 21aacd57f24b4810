"""One block of tokens in array-API code, right for every library; backends replace its functions.

Every file has the name of its twin in ``backends/linattn_numpy``, where that has one.
"""

from __future__ import annotations

from linattn._generic.block_vjps import (
    exact_vjp,
    read_block_vjp,
    reduce_block_vjp,
)
from linattn._generic.causal import scan_block, scan_decayed_block
from linattn._generic.causal_vjps import scan_vjp
from linattn._generic.clusters import assign_block, choose_block, clusters_block
from linattn._generic.column_means import normalize_state
from linattn._generic.exact import band_block, exact_block, exact_more
from linattn._generic.features import change_coordinates, evaluate
from linattn._generic.numerics import divisor, finite_shift, ignore_fp_warnings
from linattn._generic.planning import plan, run_in_order
from linattn._generic.sequences import sequences_block
from linattn._generic.specs import spec_lead
from linattn._generic.states import (
    combine,
    divide,
    empty_state,
    log_normalizer,
    merge,
    read_block,
    read_output,
    reduce_block,
    reduce_values,
)

__all__ = [
    "CALLS",
    "assign_block",
    "band_block",
    "change_coordinates",
    "choose_block",
    "clusters_block",
    "combine",
    "divide",
    "divisor",
    "empty_state",
    "evaluate",
    "exact_block",
    "exact_more",
    "exact_vjp",
    "finite_shift",
    "ignore_fp_warnings",
    "log_normalizer",
    "merge",
    "normalize_state",
    "plan",
    "read_block",
    "read_block_vjp",
    "read_output",
    "reduce_block",
    "reduce_block_vjp",
    "reduce_values",
    "run_in_order",
    "scan_block",
    "scan_decayed_block",
    "scan_vjp",
    "sequences_block",
    "spec_lead",
]

CALLS = {
    "clusters_block": ("exact_block",),
    "read_output": ("read_block", "divide"),
    "reduce_values": ("reduce_block",),
}
"""Functions of the block tier that a generic function calls, by its parameter names."""

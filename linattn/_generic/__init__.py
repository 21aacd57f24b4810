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

CALLS = {
    "clusters_block": ("exact_block",),
    "read_output": ("read_block", "divide"),
    "reduce_values": ("reduce_block",),
}
"""Functions of the block tier that a generic function calls, by its parameter names."""

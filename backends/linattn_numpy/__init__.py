"""NumPy backend of linattn: the block tier in place, on cache-sized blocks, threads over heads.

Registered under the entry-point group ``linattn.backends``. Its public functions implement the
protocol :class:`linattn.typing.Backend`. A function declines a block that it cannot speed up,
and the generic code takes over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linattn.typing import Backend, implements
from linattn_numpy.block_vjps import (
    exact_vjp,
    read_block_vjp,
    reduce_block_vjp,
)
from linattn_numpy.causal import scan_block, scan_decayed_block
from linattn_numpy.causal_vjps import scan_vjp
from linattn_numpy.clusters import assign_block, choose_block, clusters_block
from linattn_numpy.decoding import decode, stepper
from linattn_numpy.exact import band_block, exact_block, exact_more
from linattn_numpy.planning import plan
from linattn_numpy.recurrences import recurrence
from linattn_numpy.sequences import sequences_block
from linattn_numpy.states import (
    divide,
    read_block,
    read_output,
    reduce_block,
    reduce_values,
)
from linattn_numpy.threads import limited_threads

__all__ = [
    "assign_block",
    "band_block",
    "choose_block",
    "clusters_block",
    "decode",
    "divide",
    "exact_block",
    "exact_more",
    "exact_vjp",
    "limited_threads",
    "plan",
    "read_block",
    "read_block_vjp",
    "read_output",
    "recurrence",
    "reduce_block",
    "reduce_block_vjp",
    "reduce_values",
    "scan_block",
    "scan_decayed_block",
    "scan_vjp",
    "sequences_block",
    "stepper",
]

if TYPE_CHECKING:
    # A type checker compares each with the contract.
    implements(Backend.assign_block)(assign_block)
    implements(Backend.band_block)(band_block)
    implements(Backend.choose_block)(choose_block)
    implements(Backend.clusters_block)(clusters_block)
    implements(Backend.decode)(decode)
    implements(Backend.divide)(divide)
    implements(Backend.exact_block)(exact_block)
    implements(Backend.exact_more)(exact_more)
    implements(Backend.exact_vjp)(exact_vjp)
    implements(Backend.limited_threads)(limited_threads)
    implements(Backend.plan)(plan)
    implements(Backend.read_block)(read_block)
    implements(Backend.read_block_vjp)(read_block_vjp)
    implements(Backend.read_output)(read_output)
    implements(Backend.recurrence)(recurrence)
    implements(Backend.reduce_block)(reduce_block)
    implements(Backend.reduce_block_vjp)(reduce_block_vjp)
    implements(Backend.reduce_values)(reduce_values)
    implements(Backend.scan_block)(scan_block)
    implements(Backend.scan_decayed_block)(scan_decayed_block)
    implements(Backend.scan_vjp)(scan_vjp)
    implements(Backend.sequences_block)(sequences_block)
    implements(Backend.stepper)(stepper)

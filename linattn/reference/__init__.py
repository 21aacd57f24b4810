"""The oracles: quadratic attention and recurrences in float64, written to be obviously right.

Attention visits one query row at a time, selects the keys which that row may see, and adds up
their terms; a recurrence visits one token at a time. No code is shared with the linear-time folds:
agreement of the two is evidence.

Shape letters: ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value dim, ``m`` features; ``...`` are
leading axes (batch, heads), which broadcast.
"""

from linattn.reference.clustered import clustered_attention
from linattn.reference.quadratic import KernelSums, kernel_attention, kernel_sums, softmax_attention
from linattn.reference.recurrences import recurrence

__all__ = [
    "KernelSums",
    "clustered_attention",
    "kernel_attention",
    "kernel_sums",
    "recurrence",
    "softmax_attention",
]

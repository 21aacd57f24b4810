"""Published attentions below quadratic cost, to be compared with: one family a file.

Each function is one formula, in array-API code, with its source, its cost and where it fails. They
are made to be compared with, not to be fast: keys are chosen on the host, where a function chooses
any, and nothing is differentiated. ``linattn compare --baselines`` measures them.

Where a paper learns parameters, the function takes them. Every function takes ``is_causal`` and
rejects what its paper does not define.
"""

from __future__ import annotations

from linattn.baselines.attention_free import aft_full, aft_local, aft_simple
from linattn.baselines.bounds import top_k, truncated_svd
from linattn.baselines.clustered import clustered, improved_clustered
from linattn.baselines.linformer import linformer
from linattn.baselines.memory import compressive, external
from linattn.baselines.nystromformer import nystromformer
from linattn.baselines.patterns import bigbird, fixed, local_window, longformer, strided
from linattn.baselines.reformer import reformer
from linattn.baselines.routing import routing
from linattn.baselines.synthesizer import (
    dense_synthesizer,
    factorized_dense_synthesizer,
    factorized_random_synthesizer,
    random_synthesizer,
)
from linattn.baselines.thinning import thinformer, wildcat

__all__ = [
    "aft_full",
    "aft_local",
    "aft_simple",
    "bigbird",
    "clustered",
    "compressive",
    "dense_synthesizer",
    "external",
    "factorized_dense_synthesizer",
    "factorized_random_synthesizer",
    "fixed",
    "improved_clustered",
    "linformer",
    "local_window",
    "longformer",
    "nystromformer",
    "random_synthesizer",
    "reformer",
    "routing",
    "strided",
    "thinformer",
    "top_k",
    "truncated_svd",
    "wildcat",
]

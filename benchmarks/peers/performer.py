"""performer-pytorch's FastAttention, with its own projection.

Where the package fast-transformers is not installed, its causal attention is its own fallback in
plain torch operations, as for everyone who installs performer-pytorch alone. It adds 1e-4 to each
feature and, when causal, 1e-6 to each running sum of features; so does the oracle here.
"""

from __future__ import annotations

import numpy as np
import torch
from performer_pytorch import FastAttention

from benchmarks.peers import oracle
from benchmarks.peers.problem import Floats, Inputs, Prepared

__all__ = ["prepare", "set_threads"]

FEATURE_EPSILON = 1e-4
SUM_EPSILON = 1e-6


def set_threads(threads: int) -> None:
    """Use so many threads."""
    torch.set_num_threads(threads)


def prepare(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Prepare the one peer of this module."""
    is_causal = kind == "causal"
    torch.manual_seed(0)
    layer = FastAttention(inputs.sizes.dim, inputs.sizes.features, causal=is_causal)
    tensors = [torch.from_numpy(x) for x in (inputs.query, inputs.key, inputs.value)]

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return layer(*tensors)

    def wanted() -> Floats:
        rows = layer.projection_matrix.numpy()
        q = oracle.stabilized(inputs.query, rows, FEATURE_EPSILON, is_query=True)
        k = oracle.stabilized(inputs.key, rows, FEATURE_EPSILON, is_query=False)
        epsilon = SUM_EPSILON * q.sum(axis=-1, keepdims=True) if is_causal else 0.0
        weights = np.asarray(q @ k.swapaxes(-1, -2))
        return oracle.attention(weights, inputs.value, is_causal=is_causal, epsilon=epsilon)

    return Prepared(call, wanted, lambda tensor: np.asarray(tensor.numpy()))

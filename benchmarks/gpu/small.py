"""A small call of each path, in a separate process: for tools that watch, and after a fork.

python -m benchmarks.gpu.small [--fork]
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

import linattn
from benchmarks.gpu.library import host_dtype, register
from benchmarks.gpu.parity import feature_map_of

__all__ = ["main"]


def _inputs() -> list[list[Any]]:
    import cupy

    rng = np.random.default_rng(0)
    return [
        [cupy.asarray(rng.standard_normal((2, 200, 32)).astype(host_dtype(dtype))) for _ in "qkv"]
        for dtype in ("bfloat16", "float32")
    ]


def _attend(inputs: list[list[Any]], phi: Any) -> None:
    for query, key, value in inputs:
        for is_causal in (False, True):
            linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
        state = linattn.init_state(phi, 32, batch_shape=(2,), like=query)
        decoder = linattn.Decoder(phi, state)
        for step in range(3):
            decoder.step(query[:, step], key[:, step], value[:, step])


def main() -> None:
    """Run; with ``--fork`` again in a fork, with arrays and a map from before."""
    import cupy

    register()
    forks = "--fork" in sys.argv
    if not forks:
        # Without a pool each array is an allocation, whose ends a memory checker knows.
        cupy.cuda.set_allocator(None)
    inputs, phi = _inputs(), feature_map_of("favor", 32, 48)
    _attend(inputs, phi)
    cupy.cuda.Device().synchronize()
    if not forks:
        return
    child = os.fork()
    if child == 0:
        try:
            _attend(inputs, phi)
        except Exception as error:  # whose it is and what it says is what is asked
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()

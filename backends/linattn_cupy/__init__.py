"""CuPy backend of linattn: fused kernels for 16-bit arrays, batched products for float32.

float16 and bfloat16 attention with the maps that the kernels know runs whole (:mod:`.fused`),
blocks of float32 go by matrix products of all heads at once (:mod:`.blocks`), tokens one by one in
a kernel of their own (:mod:`.steps`). Everything else is left to the generic code. Nothing here
looks at values from the host.

Never yet run on a GPU: the kernels are compiled for real ones and executed on the CPU by the tests.
"""

from __future__ import annotations

from linattn_cupy.blocks import read_block, reduce_block, scan_block
from linattn_cupy.fused import attention
from linattn_cupy.planning import plan
from linattn_cupy.steps import decode, stepper

__all__ = ["attention", "decode", "plan", "read_block", "reduce_block", "scan_block", "stepper"]

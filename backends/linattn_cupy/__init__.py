"""CuPy backend of linattn: fused kernels for 16-bit arrays, batched products for float32.

float16 and bfloat16 attention with the maps that the kernels support runs whole (:mod:`.fused`),
and so do its gradients (:mod:`.gradients`); float32 runs as batched matrix products over heads,
whole or block by block (:mod:`.states`), single tokens in a kernel of their own
(:mod:`.steps`). Everything else is left to the generic code. There is no host synchronization, but
for one flag at the end of gradients. :func:`capture` makes a CUDA graph of a call.

The core calls these functions with the device of the arrays as the current one.

The tests compile the kernels for GPUs and execute them on the CPU. :func:`.hardware.kernel_status`
says on which GPU they were last checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linattn.typing import Backend, implements
from linattn_cupy.graphs import CapturedCall, capture
from linattn_cupy.hardware import kernel_status
from linattn_cupy.planning import plan
from linattn_cupy.states import divide, read_block, reduce_block
from linattn_cupy.steps import decode, stepper
from linattn_cupy.whole import attention, attention_pullback, attention_vjp, modifiers

__all__ = [
    "CapturedCall",
    "attention",
    "attention_pullback",
    "attention_vjp",
    "capture",
    "decode",
    "divide",
    "kernel_status",
    "modifiers",
    "plan",
    "read_block",
    "reduce_block",
    "stepper",
]

if TYPE_CHECKING:
    # A type checker compares each with the contract.
    implements(Backend.attention)(attention)
    implements(Backend.attention_pullback)(attention_pullback)
    implements(Backend.attention_vjp)(attention_vjp)
    implements(Backend.decode)(decode)
    implements(Backend.divide)(divide)
    implements(Backend.kernel_status)(kernel_status)
    implements(Backend.modifiers)(modifiers)
    implements(Backend.plan)(plan)
    implements(Backend.read_block)(read_block)
    implements(Backend.reduce_block)(reduce_block)
    implements(Backend.stepper)(stepper)

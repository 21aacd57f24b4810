"""Attention of tensors, as one operator where torch compiles, exports or transforms a call."""

from __future__ import annotations

try:
    import torch as _torch
except ImportError as error:
    raise ImportError(
        "linattn.interop.torch needs torch, which is not installed: pip install torch"
    ) from error

from linattn.interop.torch import _vmap as _vmap
from linattn.interop.torch._module import Attention
from linattn.interop.torch.functions import (
    linear_attention,
    linear_recurrence,
    softmax_attention,
)

__all__ = ["Attention", "linear_attention", "linear_recurrence", "softmax_attention"]

del _torch

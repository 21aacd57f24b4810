"""Whole problems: the way that their dtype takes."""

from __future__ import annotations

from typing import Any

from linattn.typing import Problem
from linattn_cupy import fused
from linattn_cupy.states import float32_attention


def attention(problem: Problem) -> Any:
    """Linear attention, or Declined: float32 by products, 16-bit arrays by fused kernels."""
    if str(problem.query.dtype) == "float32":
        return float32_attention(problem)
    return fused.attention(problem)

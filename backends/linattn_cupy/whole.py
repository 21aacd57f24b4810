"""Whole problems: the way that their dtype takes."""

from __future__ import annotations

from typing import Any

from linattn.typing import Cotangent, Declined, Problem
from linattn_cupy import fused, gradients, tile
from linattn_cupy.exact import softmax_attention, window_attention
from linattn_cupy.hardware import chosen
from linattn_cupy.state_vjps import float32_pullback, float32_vjp
from linattn_cupy.states import float32_attention


def modifiers() -> tuple[str, ...]:
    """Name what changes the weights of problems that the functions of this backend take."""
    return ("log_decay",)


def attention(problem: Problem) -> Any:
    """Attention, or Declined: float32 by products, 16-bit arrays by fused kernels."""
    if problem.mode == "exact":
        return softmax_attention(problem)
    if problem.mode == "window" and str(problem.query.dtype) == "float32":
        return window_attention(problem)
    if chosen(problem):
        answer = tile.attention(problem)
        if not isinstance(answer, Declined):
            return answer
    if str(problem.query.dtype) == "float32":
        return float32_attention(problem)
    return fused.attention(problem)


def attention_pullback(problem: Problem) -> Any:
    """Linear attention and its pullback, or Declined."""
    if chosen(problem, is_gradient=True):
        return Declined("gradients are computed in cuTile")
    if str(problem.query.dtype) == "float32":
        return float32_pullback(problem)
    return gradients.attention_pullback(problem)


def attention_vjp(problem: Problem, cotangent: Cotangent) -> Any:
    """Gradients of linear attention, or Declined."""
    if chosen(problem, is_gradient=True):
        answer = tile.attention_vjp(problem, cotangent)
        if not isinstance(answer, Declined):
            return answer
    if str(problem.query.dtype) == "float32":
        return float32_vjp(problem, cotangent)
    return gradients.attention_vjp(problem, cotangent)

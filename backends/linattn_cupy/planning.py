"""How long a block is: enough tokens to fill the device, few enough for the memory promised."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from linattn.typing import Exact, Plan, Problem
from linattn_cupy import products

__all__ = ["plan"]

WORKSPACE = 32 * 2**20
"""Bytes that the features of a block may take."""

MIN_BLOCK, MAX_BLOCK = 32, 8192
MAX_CAUSAL_BLOCK = 256
EXACT_BLOCK = 1024
WINDOW_BLOCK = 2048
"""Tokens of a block."""


def plan(problem: Problem) -> Plan:
    """All heads in one task: every kernel has work for the whole device."""
    run = _run_in_tf32 if problem.tf32 else _run
    return Plan(problem.chunk_size or _block(problem), [()], run)


def _block(problem: Problem) -> int:
    if isinstance(problem.query_spec, Exact):
        return EXACT_BLOCK
    if problem.exact_window is not None:
        return WINDOW_BLOCK
    width = max(1, problem.num_features) + problem.value.shape[-1] + problem.query.shape[-1]
    token_bytes = 8 * max(1, math.prod(problem.lead)) * width  # both sides, float32
    max_block = MAX_CAUSAL_BLOCK if problem.is_causal else MAX_BLOCK
    block: int = min(max_block, max(MIN_BLOCK, WORKSPACE // token_bytes))
    return 1 << (block.bit_length() - 1)


def _run(work: Callable[[Any], None], tasks: Sequence[Any]) -> None:
    for task in tasks:
        work(task)


def _run_in_tf32(work: Callable[[Any], None], tasks: Sequence[Any]) -> None:
    with products.tf32():
        _run(work, tasks)

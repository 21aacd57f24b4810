"""CuPy backend of linattn: for now a plan; the generic block bodies do the work.

This project has never run it on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linattn.typing import Exact, Index, Plan, Problem

__all__ = ["plan"]

FULL_BLOCK = 8192
CAUSAL_BLOCK = 256
EXACT_BLOCK = 1024


def plan(problem: Problem) -> Plan:
    """All heads in one task, in blocks long enough to hide the start of a kernel."""
    if isinstance(problem.query_spec, Exact):
        block = EXACT_BLOCK
    else:
        block = CAUSAL_BLOCK if problem.is_causal else FULL_BLOCK
    return Plan(problem.chunk_size or block, [()], _run_in_order)


def _run_in_order(work: Callable[[Index], None], tasks: Sequence[Index]) -> None:
    for task in tasks:
        work(task)

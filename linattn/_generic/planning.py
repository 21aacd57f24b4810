"""How a problem is cut where no backend chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linattn.typing import Index, Plan, Problem

# Blocks of 256 tokens keep a block of features near the cache; a causal block also pays for its
# n x n triangle, and a block that cannot be checked pays log2(n) levels.
FULL_BLOCK = 256


CAUSAL_BLOCK = 128


LAZY_CAUSAL_BLOCK = 64


# Tokens of the window blocks of one step: fewer would make small products.
WINDOW_SPAN = 2048


# Queries of a step with clusters: enough for a product of each cluster.
CLUSTERS_SPAN = 8192


def run_in_order(work: Callable[[Index], None], tasks: Sequence[Index]) -> None:
    """Run the tasks of a plan one after the other."""
    for task in tasks:
        work(task)


def plan(problem: Problem) -> Plan:
    """Everything in one task: a library's own batching and threads do the rest."""
    if problem.policy.chunk_size is not None:
        block = problem.policy.chunk_size
    elif problem.exact.clusters is not None:
        block = CLUSTERS_SPAN
    elif problem.exact.window is not None:
        block = WINDOW_SPAN
    elif not problem.sees.is_causal:
        block = FULL_BLOCK
    else:
        block = LAZY_CAUSAL_BLOCK if problem.policy.lazy else CAUSAL_BLOCK
    return Plan(block, [()], run_in_order)

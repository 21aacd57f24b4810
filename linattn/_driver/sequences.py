"""Packed sequences as they lie: short ones side by side share a block, and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn._dispatch import BlockFunctions, find, is_declined
from linattn._driver.blocks import token_block, transient_values_block
from linattn._driver.tasks import take_problem
from linattn._driver.walks import run_tasks
from linattn.typing import Index, Partial, Problem

__all__ = ["solve_short"]


def solve_short(
    problem: Problem,
    functions: BlockFunctions,
    write: Callable[[Index, slice, Partial], None],
) -> NDArray[np.int64]:
    """Solve sequences no longer than a block side by side; return the numbers of all others.

    These are what is declined, and all of them where no backend does such blocks.
    """
    lengths = np.diff(problem.cu_seqlens)
    left, block = np.ones(len(lengths), bool), _block_function(problem, functions)
    if block is None:
        return np.flatnonzero(left)
    plan = functions.plan(problem)

    def solve_block(item: tuple[Index, slice]) -> Iterator[None]:
        task, run = item
        part, borders = take_problem(problem, task), problem.cu_seqlens
        rows = slice(int(borders[run.start]), int(borders[run.stop]))
        query, key = (token_block(part, side, rows, 0) for side in ("query", "key"))
        values = transient_values_block(part, rows, functions)
        specs = part.query_spec, part.key_spec
        answer = block(*specs, query, key, values, lengths[run], part.is_causal, part.want_log)
        if is_declined(answer):
            declined.append(run)
        else:
            write(task, rows, answer)
        yield

    declined: list[slice] = []
    blocks = _side_by_side(lengths, plan.block_size)
    tasks: Any = list(product(plan.tasks, blocks))
    run_tasks(plan._replace(tasks=tasks), solve_block)  # type: ignore[arg-type]
    for run in blocks:
        left[run] = False
    for run in declined:
        left[run] = True
    return np.flatnonzero(left)


def _block_function(problem: Problem, functions: BlockFunctions) -> Any:
    """Return the backend's function for such blocks; None where it has none for this problem."""
    is_served = not {*problem.modifiers} - {"key_bias", "normalize"}
    if not is_served or problem.lazy or problem.mode not in ("full", "causal"):
        return None
    reasons = problem.state, problem.chunk_size, find("attention", problem.xp)
    if any(reason is not None for reason in reasons):
        return None
    return functions.backend_alone("sequences_block")


def _side_by_side(lengths: NDArray[np.int64], most: int) -> list[slice]:
    """Find runs of short sequences, as few as may be: of about one length, at most twice it."""
    is_short = (lengths > 0) & (lengths <= most)
    tokens = np.where(is_short, lengths, 0)
    total = int(tokens.sum())
    # By the middle of each sequence.
    number = (2 * tokens.cumsum() - tokens) * -(-total // most) // max(1, 2 * total)
    found: list[slice] = []
    for i in np.flatnonzero(is_short).tolist():
        if found and found[-1].stop == i and number[i] == number[i - 1]:
            found[-1] = slice(found[-1].start, i + 1)
        else:
            found.append(slice(i, i + 1))
    return found

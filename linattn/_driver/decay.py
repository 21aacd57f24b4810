"""Keys of blocks with their decay, for scans, and as they have decayed by the end of a block."""

from __future__ import annotations

from linattn._driver.blocks import token_block
from linattn._driver.modifiers import decay_of_rows
from linattn._generic.decay import decay_until, weighed
from linattn.typing import Problem, Tokens

__all__ = ["key_block", "key_block_at_end"]


def key_block(problem: Problem, rows: slice, start: int) -> Tokens:
    """Keys of one block, with their decay if they have some."""
    key = token_block(problem, "key", rows, start)
    if problem.log_decay is None:
        return key
    return key._replace(log_decay=decay_of_rows(problem, rows))


def key_block_at_end(problem: Problem, rows: slice, start: int) -> Tokens:
    """Keys of one block as they have decayed by its end."""
    key = token_block(problem, "key", rows, start)
    if problem.log_decay is None:
        return key
    return weighed(key, decay_until(decay_of_rows(problem, rows)))

"""Keys of blocks with their decay, for scans, and as they have decayed by the end of a block."""

from __future__ import annotations

from collections.abc import Iterator

from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import add_block, block_slices, token_block
from linattn._driver.modifiers import decay_of_rows, total_decay
from linattn._generic.decay import decay_until, fade, weighed
from linattn.typing import Problem, State, Tokens

__all__ = ["add_key_blocks", "key_block"]


def key_block(problem: Problem, rows: slice, start: int) -> Tokens:
    """Keys of one block, with their decay if they have some."""
    key = token_block(problem, "key", rows, start)
    if problem.log_decay is None:
        return key
    return key._replace(log_decay=decay_of_rows(problem, rows))


def add_key_blocks(
    problem: Problem,
    state: State,
    keys: slice,
    start: int,
    block_size: int,
    functions: BlockFunctions,
) -> Iterator[State]:
    """Add some keys and their values to a state: the state after each block.

    ``start``: position of the first key for the map.
    """
    for part in block_slices(keys.stop - keys.start, block_size):
        rows = slice(keys.start + part.start, keys.start + part.stop)
        # No name holds a block while the next is made.
        if problem.log_decay is not None:
            state = fade(state, total_decay(problem, rows)[..., None])
        tokens = _key_block_at_end(problem, rows, start)
        state = add_block(problem, rows, tokens, state, functions)
        del tokens
        yield state


def _key_block_at_end(problem: Problem, rows: slice, start: int) -> Tokens:
    """Keys of one block as they have decayed by its end."""
    key = token_block(problem, "key", rows, start)
    if problem.log_decay is None:
        return key
    return weighed(key, decay_until(decay_of_rows(problem, rows)))

"""Decay inside of walks: as log weights of a block's keys, or token by token where it is strong.

Relative to its first token a block decays by a_i up to token i. A key that is weighed by e^-a_j
and a row that is multiplied by e^a_i, which cancels in its output, are a causal block without
decay. That costs nothing, as long as -a_j is at most MAX_DECAY; past it the block is done by divide
and conquer, in which everything that is multiplied is at most 1.
"""

from __future__ import annotations

from linattn import _arrays
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import token_block
from linattn._driver.causal_blocks import causal_block
from linattn._driver.modifiers import decay_of_rows
from linattn._generic.decay import decay_since, decay_until, fade, weighed
from linattn._generic.hierarchical import scan_hierarchical
from linattn.typing import Array, Partial, Problem, State, Tokens

__all__ = [
    "decayed_block",
    "decayed_size",
    "key_block",
    "key_block_at_end",
]

MAX_DECAY = 32.0
"""Largest decay from the first token of a block to its last that log weights of keys stand for.

Float32 rounds such a log to 2e-6, which is the relative error of its weight.
"""

MIN_TOKENS = 32
"""Tokens of a block below which it is not cut for its decay."""


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


def decayed_size(problem: Problem, block_size: int) -> int:
    """Tokens of blocks that mostly decay by less than MAX_DECAY, and divide ``block_size``."""
    if problem.log_decay is None or problem.lazy or 0 in problem.log_decay.shape:
        return block_size
    strongest = -float(_arrays.to_numpy(problem.log_decay).mean(axis=-2).min())
    size = block_size
    while size % 2 == 0 and size > MIN_TOKENS and size * strongest > MAX_DECAY:
        size //= 2
    return size


def decayed_block(
    problem: Problem,
    functions: BlockFunctions,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
) -> tuple[Partial, State]:
    """Causal attention of a block whose keys may have a log decay, and the state after it."""
    xp, decay = problem.xp, key.log_decay
    if decay is None:
        return causal_block(problem, functions, query, key, values_and_one, state)
    since = decay_since(decay)
    since_first = since - since[..., :1, :]
    if problem.lazy or bool(xp.any(since_first[..., -1, :] < -MAX_DECAY)):
        specs = (problem.query_spec, problem.key_spec)
        return scan_hierarchical(*specs, query, key, values_and_one, state)
    key = weighed(key, -since_first)._replace(log_decay=None)
    state = fade(state, since[..., 0, :])
    part, state = causal_block(problem, functions, query, key, values_and_one, state)
    log = part.log + xp.astype(since_first, problem.dtype)
    return part._replace(log=log), fade(state, since_first[..., -1, :])

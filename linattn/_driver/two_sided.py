"""Full attention that decays with distance: a causal scan, and one from the end without itself.

Both give rows on scales of their own, combined by their logs: nothing is subtracted. What the first
scan has read is held for all rows, ``(..., L, e + 2)`` in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from linattn import _arrays, _generic
from linattn._driver.blocks import OutputRows, block_slices, token_block, values_and_one_block
from linattn._driver.decay import key_block
from linattn._generic.features import query_features, row_features
from linattn._generic.hierarchical import scan_features_hierarchical
from linattn.typing import Array, Features, Partial, Problem, State

__all__ = ["RowsSoFar", "flipped", "rows_from_the_end"]

BLOCK = 128
"""Tokens of a block of the second scan, which is always done by divide and conquer."""


class RowsSoFar:
    """What all rows have read so far."""

    def __init__(self, problem: Problem, functions: Any) -> None:
        self._xp = problem.xp
        width = problem.value.shape[-1] + 1
        self._num_den = OutputRows(problem, width, problem.dtype, functions)
        self._log = OutputRows(problem, 1, problem.dtype, functions)

    def write(self, rows: slice, part: Partial) -> None:
        self._num_den.write((), rows, part.num_den)
        log = self._xp.broadcast_to(part.log, (*part.num_den.shape[:-1], 1))
        self._log.write((), rows, log)

    def result(self) -> Partial:
        return Partial(self._num_den.result(), self._log.result())


def rows_from_the_end(
    problem: Problem, nothing: State, before: Partial
) -> Iterator[tuple[slice, Partial]]:
    """Add to what rows have read what they read of the tokens after them, last block first."""
    state, start = nothing, 0 if problem.state is None else problem.state.length
    for rows in reversed(list(block_slices(problem.query.shape[-2], BLOCK))):
        key = key_block(problem, rows, start)
        queries, log_row = query_features(
            problem.query_spec, token_block(problem, "query", rows, start)
        )
        after, state = scan_features_hierarchical(
            flipped(queries),
            flipped(row_features(problem.key_spec, key)),
            flip(values_and_one_block(problem, rows)),
            state,
            flip(key.log_decay),
            sees_itself=False,
        )
        after = Partial(flip(after.num_den), flip(after.log) + log_row)
        seen = Partial(before.num_den[..., rows, :], before.log[..., rows, :])
        yield rows, _generic.combine(seen, after)


def flip(x: Array) -> Array:
    """Reverse the order of tokens; None stays None."""
    return None if x is None else _arrays.namespace(x).flip(x, axis=-2)


def flipped(features: Features) -> Features:
    return Features(flip(features.log), flip(features.values))

"""Sinks: the first keys of a sequence, exact for every query that may see them.

A run masks them; `runner` adds their exact weights to each row, and then to the last state.
"""

from __future__ import annotations

from typing import NamedTuple

import array_api_compat
import numpy as np

from linattn import _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import decay_of_rows, raw_tokens, values_and_one_block
from linattn._driver.lines import Line
from linattn._driver.pairs import biased_keys, biased_queries, offset_bias
from linattn._generic.decay import decay_since
from linattn._generic.exact import exact_pairs
from linattn.typing import Array, Partial, Problem, State


def without_sinks(problem: Problem) -> Problem:
    """Return the problem with its sinks masked, and no sinks."""
    xp, device = problem.xp, array_api_compat.device(problem.key)
    place = np.arange(problem.key.shape[-2])
    if problem.sees.cu_seqlens is not None:
        place -= np.repeat(problem.sees.cu_seqlens[:-1], np.diff(problem.sees.cu_seqlens))
    counts = xp.asarray(place >= problem.exact.sinks, device=device)[:, None]
    mask = counts if problem.weights.key_mask is None else problem.weights.key_mask & counts
    weights, exact = problem.weights._replace(key_mask=mask), problem.exact._replace(sinks=0)
    return problem.replace(weights=weights, exact=exact)


class Sinks(NamedTuple):
    """The first keys of a sequence, exact for every query that may see them."""

    problem: Problem
    log_decay: Array | None
    """Sum of the log decays up to each key, ``(..., S, 1)``; None without decay."""

    @classmethod
    def of(cls, problem: Problem) -> Sinks:
        """Return the sinks of a problem, with cumulative sums of its log decays."""
        if problem.weights.log_decay is None:
            return cls(problem, None)
        rows = slice(0, problem.key.shape[-2])
        return cls(problem, decay_since(decay_of_rows(problem, rows)))

    @property
    def keys(self) -> slice:
        """Rows of the sinks, at most all keys."""
        return slice(0, min(self.problem.exact.sinks, self.problem.key.shape[-2]))

    def add(self, rows: slice, part: Partial) -> Partial:
        """Return ``part``, the sums of some queries over other keys, with the sinks added."""
        problem = self.problem
        if not self.keys.stop:
            return part
        spec = problem.query_spec if problem.exact.spec is None else problem.exact.spec
        spec, query = biased_queries(problem, spec, raw_tokens(problem, "query", rows, 0))
        key = biased_keys(problem, raw_tokens(problem, "key", self.keys, 0))
        pairs = values_and_one_block(problem, self.keys), self.visible(rows), self.bias(rows)
        more = exact_pairs(spec, query, key, *pairs, problem.policy.lazy)
        return _generic.combine(part, more)

    def visible(self, rows: slice) -> Array:
        """Return the mask of the sinks that some queries see, ``(n, s)``; None if they see all."""
        problem, sees, key = self.problem, self.problem.sees, np.arange(self.keys.stop)
        seen = np.ones((rows.stop - rows.start, len(key)), bool)
        if sees.key_stop is not None:
            seen &= key < sees.key_stop[rows][:, None]
        if not sees.ahead:
            seen &= key <= np.arange(rows.start, rows.stop)[:, None] + sees.query_start
        device = array_api_compat.device(problem.key)
        return None if seen.all() else problem.xp.asarray(seen, device=device)

    def bias(self, rows: slice) -> Array:
        """Return log weights of queries and sinks: decay or relative bias; None if all are 0."""
        if self.log_decay is None:
            return offset_bias(self.problem, rows, self.keys)
        xp = self.problem.xp
        keys = xp.matrix_transpose(self.log_decay[..., self.keys, :])
        return xp.astype(-xp.abs(self.log_decay[..., rows, :] - keys), self.problem.dtype)

    def added(
        self, state: State, sinks: State, block_size: int, functions: BlockFunctions
    ) -> State:
        """Return ``state``, the state of all other keys, with the sinks added.

        ``sinks``: an empty state, to which the sinks are added first.
        """
        line = Line(self.problem, functions, 0)
        sinks = line.add_all(self.keys, sinks, block_size)
        rest = slice(self.keys.stop, self.problem.key.shape[-2])
        merged = _generic.merge(state, line.faded(rest, sinks))
        return merged._replace(length=state.length)

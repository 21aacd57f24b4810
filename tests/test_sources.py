"""A source that the library does not have: a class of a few lines, and no change anywhere else."""

from typing import Any, NamedTuple

import numpy as np

from linattn._dispatch import block_functions
from linattn._driver.blocks import raw_tokens, values_and_one_block
from linattn._driver.pairs import Pairs, join
from linattn._driver.problem import exact_problem
from linattn._generic import divide
from linattn.typing import Partial, Tokens


class Dilated(NamedTuple):
    """A source: of some keys every n-th, counted from the query."""

    rows: slice
    keys: slice
    every: int

    def read(self, problem: Any, functions: Any, query: Tokens, so_far: Partial | None) -> Partial:
        """Read the keys whose offset from the query is a multiple."""
        i, j = (np.arange(each.start, each.stop) for each in (self.rows, self.keys))
        key = raw_tokens(problem, "key", self.keys, 0)
        visible = (j - i[:, None]) % self.every == 0
        pairs = Pairs(problem.query_spec, key, values_and_one_block(problem, self.keys), visible)
        return pairs.read(problem, functions, query, so_far)


def test_a_dilated_window_is_a_source():
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 50, 4))
    problem, rows = exact_problem(query, key, value, scale=0.5), slice(10, 40)
    # Two of them, one after the other, as a walk would read them.
    sources = [Dilated(rows, slice(0, 20), 3), Dilated(rows, slice(20, 50), 3)]
    tokens = raw_tokens(problem, "query", rows, 0)
    part = join(problem, block_functions(problem.xp), tokens, sources)
    assert part is not None
    weights = np.exp(0.5 * query[:, rows] @ np.swapaxes(key, -1, -2))
    weights[:, (np.arange(50) - np.arange(10, 40)[:, None]) % 3 != 0] = 0
    want = weights @ value / weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(divide(part), want, rtol=1e-12)

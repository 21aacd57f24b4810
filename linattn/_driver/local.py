"""Softmax attention of a band: each query sees keys up to so far away, or weighs them by that.

Tokens stand in short blocks, and those of a group are worked on at once: the keys of a block are
those of the blocks up to the window's ends, as views of one array. What a block sees as a whole
needs no mask; what only some of its rows see, at either end of the window, does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import array_api_compat
import numpy as np

from linattn import _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import raw_tokens
from linattn._driver.relative_bias import bias_block
from linattn._driver.token_blocks import (
    beside,
    biased_keys,
    biased_queries,
    flat_rows,
    in_blocks,
    key_blocks,
)
from linattn._generic.exact import exact_pairs
from linattn.typing import Array, Exact, Partial, Problem, Tokens

__all__ = ["is_banded", "keys_of_rows", "local_rows", "rows_of_keys", "short_rows", "visible_pairs"]

MAX_PAIRS = 2**18
"""Pairs of one step, on which the memory of it depends."""

MIN_ROWS, MAX_ROWS = 32, 256
"""Tokens of a short block: fewer make small products, more see more that only some rows need."""

ROWS_PER_WINDOW = 8
"""Short blocks in a window of middling length."""


def is_banded(problem: Problem) -> bool:
    """Whether softmax attention depends on how far apart query and key stand."""
    return problem.local_window is not None or problem.relative_bias is not None


def band(problem: Problem) -> tuple[int, int]:
    """How far the keys stand that a query sees, to its left and to its right."""
    most = max(problem.query.shape[-2], problem.key.shape[-2])
    left, right = (most, most) if problem.local_window is None else problem.local_window
    return left, 0 if problem.is_causal else right


def short_rows(problem: Problem, block_size: int) -> int:
    """Rows of a block that sees few more keys than each of its rows does."""
    if problem.local_window is None:
        return block_size
    return min(block_size, max(sum(problem.local_window) + 1, MIN_ROWS))


def keys_of_rows(problem: Problem, rows: slice) -> slice:
    """Keys that any of some queries in a row sees."""
    if problem.key_stop is not None:
        return slice(0, int(problem.key_stop[rows.stop - 1]))
    left, right = band(problem)
    return slice(max(rows.start - left, 0), min(rows.stop + right, problem.key.shape[-2]))


def rows_of_keys(problem: Problem, keys: slice) -> slice:
    """Rows of queries that see any of some keys in a row."""
    if problem.key_stop is not None:
        first = np.searchsorted(problem.key_stop, keys.start, side="right")
        return slice(int(first), problem.query.shape[-2])
    left, right = band(problem)
    return slice(max(keys.start - right, 0), min(keys.stop + left, problem.query.shape[-2]))


def visible_pairs(problem: Problem, first: int, n: int, s: int) -> Array:
    """Which of s keys in a row n queries in a row see; None for all, as :func:`bias_block`."""
    left, right = band(problem)
    if first - (n - 1) >= -left and first + s - 1 <= right:
        return None
    xp, device = problem.xp, array_api_compat.device(problem.key)
    offset = xp.arange(first, first + s, device=device) - xp.arange(n, device=device)[:, None]
    return (offset >= -left) & (offset <= right)


def local_rows(problem: Problem, functions: BlockFunctions) -> Iterator[tuple[slice, Partial]]:
    """Softmax attention of a band, group by group. O(L w (d + e)) time for w keys a query."""
    left, right = band(problem)
    length, n = problem.query.shape[-2], _block_rows(left + right + 1)
    before, behind, count = -(-left // n), -(-right // n), -(-length // n)
    group = max(1, MAX_PAIRS // (n * n * (before + 1 + behind)))
    for first in range(0, count, group):
        g = min(group, count - first)
        rows = slice(first * n, min((first + g) * n, length))
        spec, query = biased_queries(problem, raw_tokens(problem, "query", rows, 0))
        query = in_blocks(query, g * n, n)
        part: Any = None
        # Blocks of keys, counted from the block of the queries; none lies outside of all keys.
        ends = max(-before, -(first + g - 1)), min(behind, count - 1 - first)
        for low, high in _runs(problem, n, *ends, most=max(1, MAX_PAIRS // (g * n * n))):
            start, stop = first + low, first + g - 1 + high
            keys, values_and_one = key_blocks(problem, start, stop, n, 0)
            keys = biased_keys(problem, keys, padded=start < 0 or stop * n > length)
            key = Tokens(beside(keys.x, g), beside(keys.log_weight, g), keys.start)
            values_and_one = beside(values_and_one, g)
            part = _add(problem, functions, spec, query, key, values_and_one, low * n, part)
        yield rows, flat_rows(part, rows.stop - rows.start)


def _block_rows(window: int) -> int:
    rows = 1 << max(window // ROWS_PER_WINDOW - 1, 0).bit_length()
    return min(max(rows, MIN_ROWS), MAX_ROWS)


def _runs(problem: Problem, n: int, low: int, high: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut blocks low to high into runs ``(first, stop)``: those seen as a whole by themselves."""
    if high + 1 - low <= most:
        yield low, high + 1
        return
    left, right = band(problem)
    edges = [low, -((left - n + 1) // n), (right - n + 1) // n + 1, high + 1]
    edges = sorted(min(max(edge, low), high + 1) for edge in edges)
    for start, stop in pairwise(edges):
        for first in range(start, stop, most):
            yield first, min(first + most, stop)


def _add(
    problem: Problem,
    functions: BlockFunctions,
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    first: int,
    part: Partial | None,
) -> Partial:
    """Add keys to what queries have seen so far."""
    n, s = query.x.shape[-2], key.x.shape[-2]
    bias = None
    if problem.relative_bias is not None:
        # An axis for blocks.
        bias = bias_block(problem.relative_bias, first, n, s)[..., None, :, :]
    visible = visible_pairs(problem, first, n, s)
    if part is not None and visible is None and bias is None:
        return functions.exact_more(spec, query, key, values_and_one, part)  # type: ignore[no-any-return]
    block = (spec, query, key, values_and_one, visible, bias)
    more = exact_pairs(*block, problem.lazy, functions.exact_block)
    return more if part is None else _generic.combine(part, more)

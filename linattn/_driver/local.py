"""Softmax attention of a band: each query sees keys up to so far away, or weighs them by that.

A backend reads windows as they lie. Without one tokens stand in short blocks, and those of a group
are worked on at once: the keys of a block are those of the blocks up to the window's ends. What a
block sees as a whole needs no mask; what only some of its rows see, at either end of the window,
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from linattn import _generic
from linattn._dispatch import BlockFunctions, is_declined
from linattn._driver.blocks import (
    block_slices,
    raw_tokens,
    transient_values_block,
    values_and_one_block,
)
from linattn._driver.relative_bias import bias_block
from linattn._driver.token_blocks import (
    biased_keys,
    biased_queries,
    flat_rows,
    in_blocks,
    key_blocks,
)
from linattn._generic.exact import beside, exact_pairs, in_band
from linattn.typing import Array, Exact, Partial, Problem, Tokens

__all__ = ["is_banded", "keys_of_rows", "local_rows", "rows_of_keys", "short_rows", "visible_pairs"]

MAX_PAIRS = 2**19
"""Pairs of one step, on which the memory of it depends."""

MAX_TOKENS = 2**12
"""Tokens that are made ready at once for short windows, which overlap."""

MIN_ROWS, MAX_ROWS, LONG_ROWS = 32, 128, 256
"""Tokens of a short block, the last that of a long window or of one near an end.

Fewer make small products, more see more that only some rows need.
"""

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
    seen = _band_of(problem, first, n, s)
    return None if seen is None else in_band(problem.key, n, s, seen)


def _band_of(problem: Problem, first: int, n: int, s: int) -> tuple[int, int] | None:
    """Which of s keys in a row n queries in a row see, as :func:`in_band`; None for all.

    ``first``: how far behind the first of the queries the first of the keys stands.
    """
    left, right = band(problem)
    if first - (n - 1) >= -left and first + s - 1 <= right:
        return None
    return -left - first, right - first


def local_rows(problem: Problem, functions: BlockFunctions) -> Iterator[tuple[slice, Partial]]:
    """Softmax attention of a band, group by group. O(L w (d + e)) time for w keys a query."""
    if problem.query.shape[-2] == 0:
        return
    blocks = _blocks(problem, _block_rows(sum(band(problem)) + 1))
    while blocks.num_pairs > MAX_PAIRS and blocks.size > MIN_ROWS:
        blocks = _blocks(problem, blocks.size // 2)
    if blocks.num_pairs > MAX_PAIRS:
        yield from _long_windows(problem, functions, _blocks(problem, LONG_ROWS))
        return
    band_block = functions.backend_alone("band_block")
    if band_block is not None and problem.relative_bias is None:
        yield from _rows_of_backend(problem, functions, band_block)
        return
    middle = blocks.middle(problem.key.shape[-2])
    yield from _masked_rows(problem, functions, slice(0, middle.start))
    yield from _short_windows(problem, functions, blocks, middle)
    yield from _masked_rows(problem, functions, slice(middle.stop, problem.query.shape[-2]))


def _rows_of_backend(
    problem: Problem, functions: BlockFunctions, band_block: Callable[..., Any]
) -> Iterator[tuple[slice, Partial]]:
    """Windows that a backend reads as they lie, in groups of one size as far as can be."""
    (left, right), length = band(problem), problem.query.shape[-2]
    # Where most windows reach beyond an end, few rows at a time share the keys that there are.
    max_rows = MAX_TOKENS if 2 * max(left, right) <= length else LONG_ROWS
    max_rows = min(max(MAX_PAIRS // min(left + right + 1, length), MIN_ROWS), max_rows)
    size = -(-length // -(-length // max_rows) // MIN_ROWS) * MIN_ROWS
    for rows in block_slices(length, size):
        keys = keys_of_rows(problem, rows)
        spec, query = biased_queries(problem, raw_tokens(problem, "query", rows, 0))
        key = biased_keys(problem, raw_tokens(problem, "key", keys, 0))
        values_and_one = transient_values_block(problem, keys, functions)
        first = keys.start - rows.start
        part = band_block(spec, query, key, values_and_one, (-left - first, right - first))
        if is_declined(part):
            yield from _masked_rows(problem, functions, rows)
        else:
            yield rows, part


class _Blocks(NamedTuple):
    """How a sequence is cut into short blocks."""

    size: int
    before: int
    """Blocks that the window of a block reaches into before it."""
    behind: int
    total: int

    @property
    def width(self) -> int:
        return self.before + 1 + self.behind

    @property
    def num_pairs(self) -> int:
        """Pairs of one block."""
        return self.size**2 * self.width

    def middle(self, length: int) -> slice:
        """Rows of the blocks whose windows lie within the sequence, all of them whole."""
        start, stop = self.before * self.size, (length // self.size - self.behind) * self.size
        return slice(start, stop) if start < stop else slice(length, length)


def _blocks(problem: Problem, n: int) -> _Blocks:
    left, right = band(problem)
    return _Blocks(n, -(-left // n), -(-right // n), -(-problem.query.shape[-2] // n))


def _masked_rows(
    problem: Problem, functions: BlockFunctions, all_rows: slice
) -> Iterator[tuple[slice, Partial]]:
    """Windows as long blocks of rows, such as those near an end, which hold fewer keys."""
    for start in range(all_rows.start, all_rows.stop, LONG_ROWS):
        rows = slice(start, min(start + LONG_ROWS, all_rows.stop))
        keys = keys_of_rows(problem, rows)
        n, s = rows.stop - rows.start, keys.stop - keys.start
        spec, query = _query_blocks(problem, rows, n)
        key = in_blocks(biased_keys(problem, raw_tokens(problem, "key", keys, 0)), s, s)
        values_and_one = values_and_one_block(problem, keys)[..., None, :, :]
        pairs = _pairs(problem, keys.start - rows.start, n, s)
        part = _add(problem, functions, spec, query, key, values_and_one, pairs, None)
        yield rows, flat_rows(part, n)


def _short_windows(
    problem: Problem, functions: BlockFunctions, blocks: _Blocks, middle: slice
) -> Iterator[tuple[slice, Partial]]:
    """Windows that are read at once, those of a group together."""
    n, before, behind, _ = blocks
    group = min(MAX_PAIRS // blocks.num_pairs, MAX_TOKENS // n)
    step = group * (MAX_TOKENS // (group * n))
    pairs = _pairs(problem, -before * n, n, blocks.width * n)
    for start in range(middle.start // n, middle.stop // n, step):
        stop = min(start + step, middle.stop // n)
        keys, values_and_one = key_blocks(problem, start - before, stop + behind, n, 0)
        keys = biased_keys(problem, keys)
        for first in range(start, stop, group):
            g = min(group, stop - first)
            each = slice(first - start, first - start + g + blocks.width - 1)
            weight = None if keys.log_weight is None else keys.log_weight[..., each, :, :]
            key = Tokens(keys.x[..., each, :, :], weight, 0)
            rows = slice(first * n, (first + g) * n)
            spec, query = _query_blocks(problem, rows, n)
            values = values_and_one[..., each, :, :]
            part = _add(problem, functions, spec, query, key, values, pairs, None)
            yield rows, flat_rows(part, g * n)


def _long_windows(
    problem: Problem, functions: BlockFunctions, blocks: _Blocks
) -> Iterator[tuple[slice, Partial]]:
    """Windows of one block of queries at a time, a few blocks of keys after the other."""
    n, before, behind, total = blocks
    length = problem.key.shape[-2]
    for first in range(total):
        rows = slice(first * n, min((first + 1) * n, problem.query.shape[-2]))
        spec, query = _query_blocks(problem, rows, n)
        part: Any = None
        # Blocks of keys, counted from the block of the queries; none lies outside of all keys.
        ends = max(-before, -first), min(behind, total - 1 - first)
        for low, high in _runs(problem, n, *ends, most=max(1, MAX_PAIRS // (n * n))):
            keys, values_and_one = key_blocks(problem, first + low, first + high, n, 0)
            keys = biased_keys(problem, keys, padded=(first + high) * n > length)
            pairs = _pairs(problem, low * n, n, (high - low) * n)
            part = _add(problem, functions, spec, query, keys, values_and_one, pairs, part)
        yield rows, flat_rows(part, rows.stop - rows.start)


def _query_blocks(problem: Problem, rows: slice, n: int) -> tuple[Exact, Tokens]:
    spec, query = biased_queries(problem, raw_tokens(problem, "query", rows, 0))
    return spec, in_blocks(query, -(-(rows.stop - rows.start) // n) * n, n)


class _Pairs(NamedTuple):
    """Which pairs of a block count, ``(n, s)``, and what is added to their logits."""

    shape: tuple[int, int]
    band: tuple[int, int] | None
    bias: Array | None
    """With an axis for blocks."""


def _pairs(problem: Problem, first: int, n: int, s: int) -> _Pairs:
    bias = None
    if problem.relative_bias is not None:
        bias = bias_block(problem.relative_bias, first, n, s)[..., None, :, :]
    return _Pairs((n, s), _band_of(problem, first, n, s), bias)


def _block_rows(window: int) -> int:
    rows = 1 << max(window // ROWS_PER_WINDOW - 1, 0).bit_length()
    return min(max(rows, MIN_ROWS), MAX_ROWS)


def _runs(problem: Problem, n: int, low: int, high: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut blocks low to high into runs ``(first, stop)``, first those seen as a whole.

    They set the scale, on which further ones are added for less.
    """
    left, right = band(problem)
    edges = [low, -((left - n + 1) // n), (right - n + 1) // n + 1, high + 1]
    edges = sorted(min(max(edge, low), high + 1) for edge in edges)
    before, whole, after = pairwise(edges)
    for start, stop in (whole, before, after):
        for first in range(start, stop, most):
            yield first, min(first + most, stop)


def _add(
    problem: Problem,
    functions: BlockFunctions,
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    pairs: _Pairs,
    part: Partial | None,
) -> Partial:
    """Add blocks of keys to what queries have seen so far."""
    g = query.x.shape[-3]
    shape, band, bias = pairs
    keys = Tokens(beside(key.x, g), beside(key.log_weight, g), key.start)
    block = (spec, query, keys, beside(values_and_one, g))
    if part is not None and band is None and bias is None:
        return functions.exact_more(*block, part)  # type: ignore[no-any-return]
    visible = None if band is None else in_band(problem.key, *shape, band)
    more = exact_pairs(*block, visible, bias, problem.lazy, functions.exact_block)
    return more if part is None else _generic.combine(part, more)

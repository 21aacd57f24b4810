"""Softmax attention: a block of queries reads runs of keys, one after the other.

Keys that all rows of a block see need no mask, and set its scale. Keys that only some rows see, at
either end of a window or before a stop, are masked. Short windows are cut into shorter blocks. The
blocks of a group are read together, or a backend reads them without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from linattn._dispatch import BlockFunctions, is_declined
from linattn._driver.blocks import (
    block_slices,
    flat_rows,
    in_blocks,
    raw_tokens,
    split,
    values_and_one_block,
)
from linattn._driver.pairs import (
    Pairs,
    Source,
    band,
    biased_keys,
    biased_queries,
    is_banded,
    join,
    keys_and_values,
    keys_of_rows,
    no_keys_seen,
    offset,
    offset_bias,
    pairs_of,
    seen_by_all,
    visible_pairs,
)
from linattn._generic.exact import beside
from linattn._generic.hierarchical import exact_causal_block
from linattn.typing import Array, Exact, Partial, Problem, Tokens

MAX_PAIRS = 2**19
"""Pairs of one step, on which the memory of it depends."""

MAX_TOKENS = 2**12
"""Tokens that are prepared together for short windows, which overlap."""

MIN_ROWS, MAX_ROWS, LONG_ROWS = 32, 128, 256
"""Least and most tokens of a block in a short window; tokens of a block in any other.

Shorter blocks make small products; longer ones include more pairs that do not count.
"""

ROWS_PER_WINDOW = 8
"""Short blocks in a window of middling length."""


def softmax_rows(
    problem: Problem, block_size: int, functions: BlockFunctions
) -> Iterator[tuple[slice, Partial]]:
    """Softmax attention of all queries, in order: some rows, and their sums over the keys.

    O(L w (d + e)) time for queries that see w keys each.
    """
    rows = slice(0, problem.query.shape[-2])
    if not is_banded(problem):
        return _rows(problem, functions, rows, block_size, block_size)
    if problem.sees.key_stop is not None or not rows.stop:
        return _windows(problem, functions, rows)
    n = _block_rows(sum(band(problem)) + 1)
    while _Short.cut(problem, n).num_pairs > MAX_PAIRS and n > MIN_ROWS:
        n //= 2
    short = _Short.cut(problem, n)
    if short.num_pairs > MAX_PAIRS:
        return _windows(problem, functions, rows)
    band_block = functions.backend_alone("band_block")
    if band_block is not None and problem.weights.relative_bias is None:
        return _rows_of_backend(problem, functions, band_block)
    return _short_windows(problem, functions, short)


def short_rows(problem: Problem, block_size: int) -> int:
    """Rows of a block that sees few more keys than each of its rows does."""
    if problem.sees.local_window is None:
        return block_size
    return min(block_size, max(sum(problem.sees.local_window) + 1, MIN_ROWS))


# One block of queries at a time -----------------------------------------------------------------


def _rows(
    problem: Problem, functions: BlockFunctions, all_rows: slice, num_rows: int, num_keys: int
) -> Iterator[tuple[slice, Partial]]:
    """Read blocks of queries, each as many keys at a time."""
    for start in range(all_rows.start, all_rows.stop, num_rows):
        rows = slice(start, min(start + num_rows, all_rows.stop))
        spec, query = _queries(problem, rows)
        sources = _sources(problem, spec, rows, num_keys)
        part = join(problem, functions, query, sources)
        yield rows, no_keys_seen(problem, query) if part is None else part


def _windows(
    problem: Problem, functions: BlockFunctions, rows: slice
) -> Iterator[tuple[slice, Partial]]:
    return _rows(problem, functions, rows, LONG_ROWS, MAX_PAIRS // LONG_ROWS)


def _sources(problem: Problem, spec: Exact, rows: slice, num_keys: int) -> Iterator[Source]:
    """Keys of a block of queries, a source for each run of them."""
    whole, keys = seen_by_all(problem, rows), keys_of_rows(problem, rows)
    runs = [whole, slice(keys.start, whole.start), slice(whole.stop, keys.stop)]
    if not problem.sees.ahead and not is_banded(problem):
        yield _Triangle(spec, *keys_and_values(problem, rows))
        runs = [slice(0, rows.start)]
    elif is_banded(problem) and keys.stop - keys.start <= num_keys:
        runs = [keys]
    for run in runs:
        for part in block_slices(run.stop - run.start, num_keys):
            keys = slice(run.start + part.start, run.start + part.stop)
            yield pairs_of(problem, spec, rows, keys)


class _Triangle(NamedTuple):
    """A source: the keys of a causal block itself."""

    spec: Exact
    key: Tokens
    values_and_one: Array

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Tokens, so_far: Partial | None
    ) -> Partial:
        """Read by a backend as a band, else hierarchically."""
        assert so_far is None
        block = self.spec, query, self.key, self.values_and_one
        band_block, n = functions.backend_alone("band_block"), query.x.shape[-2]
        part = None if band_block is None else band_block(*block, (1 - n, 0))
        if part is None or is_declined(part):
            return exact_causal_block(*block, functions.exact_block)
        return part  # type: ignore[no-any-return]


def _queries(problem: Problem, rows: slice) -> tuple[Exact, Tokens]:
    return biased_queries(problem, problem.query_spec, raw_tokens(problem, "query", rows, 0))


# Short windows ----------------------------------------------------------------------------------


def _rows_of_backend(
    problem: Problem, functions: BlockFunctions, band_block: Callable[..., Any]
) -> Iterator[tuple[slice, Partial]]:
    """Windows that the backend's ``band_block`` reads without copying, in equal groups."""
    (left, right), length = band(problem), problem.query.shape[-2]
    # Where most windows reach beyond an end, few rows at a time share the keys that there are.
    max_rows = MAX_TOKENS if 2 * max(left, right) <= length else LONG_ROWS
    max_rows = min(max(MAX_PAIRS // min(left + right + 1, length), MIN_ROWS), max_rows)
    size = -(-length // -(-length // max_rows) // MIN_ROWS) * MIN_ROWS
    for rows in block_slices(length, size):
        keys = keys_of_rows(problem, rows)
        spec, query = _queries(problem, rows)
        first = offset(problem, rows, keys)
        part = band_block(
            spec, query, *keys_and_values(problem, keys), (-left - first, right - first)
        )
        if is_declined(part):
            yield from _windows(problem, functions, rows)
        else:
            yield rows, part


class _Short(NamedTuple):
    """Short blocks of queries whose windows lie within the keys, and the blocks of keys beside."""

    size: int
    before: int
    """Blocks that the window of a block reaches into before it."""
    width: int
    """Blocks of keys that a block of queries sees, all in all."""
    rows: slice
    """All queries of such blocks."""

    @classmethod
    def cut(cls, problem: Problem, n: int) -> _Short:
        """Cut the queries into blocks of n."""
        before, behind = (-(-side // n) for side in band(problem))
        start = max(before * n - problem.sees.query_start, 0)
        stop = problem.key.shape[-2] - problem.sees.query_start - behind * n
        count = (min(stop, problem.query.shape[-2]) - start) // n
        if count <= 0:
            start, count = problem.query.shape[-2], 0
        return cls(n, before, before + 1 + behind, slice(start, start + count * n))

    @property
    def num_pairs(self) -> int:
        """Pairs of one block."""
        return self.size**2 * self.width


def _short_windows(
    problem: Problem, functions: BlockFunctions, short: _Short
) -> Iterator[tuple[slice, Partial]]:
    """Attend in short blocks, a group of them together; rows near an end in long blocks."""
    n, before, width, all_rows = short
    yield from _windows(problem, functions, slice(0, all_rows.start))
    group = min(MAX_PAIRS // short.num_pairs, MAX_TOKENS // n)
    step = group * (MAX_TOKENS // (group * n)) * n
    for start in range(all_rows.start, all_rows.stop, step):
        first = start + problem.sees.query_start - before * n
        stop = min(start + step, all_rows.stop)
        keys = slice(first, first + stop - start + (width - 1) * n)
        key = biased_keys(problem, raw_tokens(problem, "key", keys, 0))
        values_and_one = values_and_one_block(problem, keys)
        for rows in (slice(r, min(r + group * n, stop)) for r in range(start, stop, group * n)):
            spec, query = _queries(problem, rows)
            query = in_blocks(query, rows.stop - rows.start, n)
            of_rows = rows.start - start, key, values_and_one
            pairs = _of_group(problem, spec, short, rows, of_rows)
            yield (
                rows,
                flat_rows(pairs.read(problem, functions, query, None), rows.stop - rows.start),
            )
    yield from _windows(problem, functions, slice(all_rows.stop, problem.query.shape[-2]))


def _of_group(
    problem: Problem, spec: Exact, short: _Short, rows: slice, keys: tuple[int, Tokens, Array]
) -> Pairs:
    """Pairs of some blocks of queries: the keys of each block side by side on one more axis."""
    start, key, values_and_one = keys
    n, g = short.size, (rows.stop - rows.start) // short.size
    within = slice(start, start + (g + short.width - 1) * n)

    def each(x: Array) -> Array:
        return beside(split(x[..., within, :], n), g)

    # All blocks see the same offsets as the first.
    first = rows.start + problem.sees.query_start - short.before * n
    block = slice(rows.start, rows.start + n), slice(first, first + short.width * n)
    bias = offset_bias(problem, *block)
    return Pairs(
        spec,
        key.each(each),
        each(values_and_one),
        visible_pairs(problem, *block),
        None if bias is None else bias[..., None, :, :],
    )


def _block_rows(window: int) -> int:
    rows = 1 << max(window // ROWS_PER_WINDOW - 1, 0).bit_length()
    return min(max(rows, MIN_ROWS), MAX_ROWS)

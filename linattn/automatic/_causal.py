"""Causal attention: each head by a coreset, by clusters in squares, or exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from linattn import _arrays
from linattn.automatic._costs import (
    MIN_FEATURES,
    Work,
    coreset_block,
    coreset_work,
    cost_of,
    exact_pairs,
    num_rows_of,
    rows_limit,
)
from linattn.automatic._heads import Given, join_heads
from linattn.automatic._report import Answer, HeadRecord
from linattn.automatic._search import PROBABILITY
from linattn.automatic._squares import CausalRows, Squares, squares_of
from linattn.coreset import CoresetAttention
from linattn.typing import Array

__all__ = ["attend", "is_worth_a_search"]

MAX_TRIALS = 2
"""Trials of a head; each gets an equal share of the probability to fail."""

FRESH_ROWS = 2
"""Number of rows that judge a choice, over the number of rows that made it."""

ROW_LEVEL = 14.8
"""Number of fresh rows times the squared tolerance, if that is more. If outputs have mean 0, the
rule of three bounds the squared error by ``2 log(40) / h`` with h rows, half of the squared
tolerance then: two trials share .05, and a row may have half of the mean odds."""

ENTRIES = (64, 128, 256, 512, 1024)

CORESET_ERROR, EXPONENT = 3.0, 0.35
"""Error of a coreset over the error of equally many clusters in the largest square, and the power
of the number of entries with which it falls at least. Measured: 2.2 to 4.2 for heads of a text
encoder at 16,384 and 65,536 tokens."""

MARGIN = 1.4
"""Tolerance over the expected error of a coreset, from which a coreset is tried."""


def is_worth_a_search(given: Given) -> bool:
    """Whether a coreset or clusters may be tried: never without a tolerance.

    Without a check, 64 entries cost a language model .128 nats a token at 2,752 tokens.
    """
    return given.tolerance is not None and bool(squares_of(given, num_rows_of(given.problem)))


def _rows_work(given: Given, num_rows: int) -> Work:
    return Work(exact=num_rows * given.problem.key.shape[-2] / 2)


def attend(given: Given) -> Answer:
    """Attend with coresets and clusters if they are cheap and accurate enough, else exactly."""
    assert given.tolerance is not None
    wide, num_rows = given.with_bias_in_keys(), num_rows_of(given.problem)
    squares = squares_of(wide, num_rows)
    found = Squares(CausalRows(wide, num_rows, squares), squares, given.tolerance)
    # Other rows: errors of what was chosen are too small on the rows that it was chosen by.
    num_fresh = min(int(ROW_LEVEL / given.tolerance**2), rows_limit(given.problem))
    num_fresh = min(max(FRESH_ROWS * num_rows, num_fresh), int(given.problem.key.shape[-2]))
    ways = _Ways(given, CausalRows(wide, num_fresh, []))
    rows_work = _rows_work(given, num_rows + num_fresh)
    records = [r._replace(work=r.work.plus(rows_work)) for r in found.records()]
    entries, cost = defaultdict(list), partial(cost_of, problem=given.problem)
    for head, record in enumerate(records):
        m = _expected_entries(found.first_error[head], given.tolerance)
        if m is not None and cost(coreset_work(given.problem, m)) < cost(record.work):
            entries[m].append(head)
    for m, heads in sorted(entries.items()):
        ways.take_coreset(m, heads, found.first_work.plus(rows_work))
    ways.take_squares(found, records)
    ways.take_exact(records)
    return ways.answer()


def _expected_entries(first_error: float, tolerance: float) -> int | None:
    """Return the fewest entries that are expected to meet the tolerance."""
    for m in ENTRIES:
        expected = CORESET_ERROR * first_error * (MIN_FEATURES / m) ** EXPONENT
        if MARGIN * expected <= tolerance:
            return m
    return None


class _Ways:
    """Outputs of the heads so far; each method of a head is judged by the same exact rows."""

    def __init__(self, given: Given, rows: CausalRows) -> None:
        self.rows, self._given = rows, given
        self._taken: dict[int, HeadRecord] = {}
        self._tried: dict[int, HeadRecord] = {}
        self._parts: list[tuple[Sequence[int], Array]] = []

    def take_coreset(self, m: int, heads: Sequence[int], search: Work) -> None:
        """Attend to some heads with m entries; store the outputs within the tolerance."""
        given, arrays = self._given, self._given.heads(heads)
        block, work = coreset_block(m), search.plus(coreset_work(given.problem, m))
        stream = CoresetAttention(m, block_size=block, scale=given.scale, rng=given.generator)
        output = stream.extend(
            arrays.query,
            arrays.key,
            arrays.value,
            key_mask=arrays.key_mask,
            key_bias=arrays.key_bias,
        )
        record = HeadRecord(m, 0, block, 0.0, 0.0, work, "coreset")
        self._take(heads, output, [record] * len(heads))

    def take_squares(self, squares: Squares, records: Sequence[HeadRecord]) -> None:
        """Attend to remaining heads in squares, if chosen; store the outputs within tolerance."""
        heads = [head for head in self._left() if records[head].num_features]
        if heads:
            self._take(heads, squares.attend(heads), [records[head] for head in heads])

    def take_exact(self, records: Sequence[HeadRecord]) -> None:
        """Attend to the remaining heads exactly; ``records`` are for heads without a trial."""
        heads = self._left()
        if not heads:
            return
        self._parts.append((heads, self._given.exact(heads)))
        exact = Work(exact=exact_pairs(self._given.problem))
        for head in heads:
            record = records[head]
            if head in self._tried:
                record = self._tried[head]
                record = record._replace(work=record.work.plus(exact))
            self._taken[head] = record._replace(num_features=0, clusters=0, window=0)

    def answer(self) -> Answer:
        """Return outputs and records in the order of the heads."""
        given = self._given
        records = [self._taken[head] for head in range(given.num_heads)]
        return Answer(join_heads(given, self._parts), records)

    def _left(self) -> list[int]:
        return [head for head in range(self._given.num_heads) if head not in self._taken]

    def _take(self, heads: Sequence[int], output: Array, records: Sequence[HeadRecord]) -> None:
        given, good = self._given, []
        host = _arrays.to_numpy(output).reshape(len(heads), *output.shape[-2:])
        for i, (head, record) in enumerate(zip(heads, records, strict=True)):
            probability = 1 - (1 - PROBABILITY) / MAX_TRIALS
            error, bound = self.rows.judge(given.unravel(head), host[i], probability)
            record = record._replace(error=float(error), bound=float(bound))
            if head in self._tried:
                record = record._replace(work=record.work.plus(self._tried[head].work))
            assert given.tolerance is not None
            if bound <= given.tolerance:
                self._taken[head] = record
                good.append(i)
            else:
                self._tried[head] = record
        if good:
            part = output if len(good) == given.num_heads else given.flat(output, good)
            self._parts.append(([heads[i] for i in good], part))

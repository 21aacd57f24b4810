"""Causal attention: each head by clusters in squares, or exactly."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from linattn import _arrays
from linattn.automatic._costs import Work, exact_pairs, num_rows_of, rows_limit
from linattn.automatic._heads import Given, join_heads
from linattn.automatic._report import Answer
from linattn.automatic._search import PROBABILITY
from linattn.automatic._squares import CausalRows, Squares, squares_of
from linattn.automatic._tokens import WEIGHTED
from linattn.typing import Array

__all__ = ["attend", "is_worth_a_search"]


def is_worth_a_search(given: Given) -> bool:
    """Whether clusters may be tried: never without a tolerance.

    Without a check, 64 entries of a coreset cost a language model .128 nats a token.
    """
    return given.tolerance is not None and bool(squares_of(given, num_rows_of(given.problem)))


def attend(given: Given) -> Answer:
    """Attend in squares if that is cheap and accurate enough, else exactly."""
    assert given.tolerance is not None
    wide, num_rows = given.with_bias_in_keys(), num_rows_of(given.problem)
    squares = squares_of(wide, num_rows)
    found = Squares(CausalRows(wide, num_rows, squares), squares, given.tolerance)
    # Other rows: errors of what was chosen are too small on the rows that it was chosen by. If
    # outputs have mean 0, the rule of three takes half of the squared tolerance with so many.
    num_fresh = int(-2 * log(1 - PROBABILITY) / (1 - WEIGHTED) / given.tolerance**2)
    num_fresh = min(num_fresh, rows_limit(given.problem))
    num_fresh = min(max(2 * num_rows, num_fresh), int(given.problem.key.shape[-2]))
    fresh = Work(exact=(num_rows + num_fresh) * given.problem.key.shape[-2] / 2)
    records = [record._replace(work=record.work.plus(fresh)) for record in found.records()]
    near = [head for head, record in enumerate(records) if record.num_features]
    good: list[int] = []
    parts: list[tuple[Sequence[int], Array]] = []
    if near:
        rows, output = CausalRows(wide, num_fresh, []), found.attend(near)
        host = _arrays.to_numpy(output).reshape(len(near), *output.shape[-2:])
        for head, of_head in zip(near, host, strict=True):
            error, bound = rows.judge(given.unravel(head), of_head, PROBABILITY)
            records[head] = records[head]._replace(error=float(error), bound=float(bound))
            if bound <= given.tolerance:
                good.append(head)
        if good:
            places = [near.index(head) for head in good]
            whole = len(good) == given.num_heads
            parts.append((good, output if whole else given.flat(output, places)))
    exact = [head for head in range(given.num_heads) if head not in good]
    if exact:
        parts.append((exact, given.exact(exact)))
    for head in exact:
        record = records[head]
        if head in near:
            record = record._replace(
                work=record.work.plus(Work(exact=exact_pairs(given.problem))), num_features=0
            )
        records[head] = record._replace(clusters=0)
    return Answer(join_heads(given, parts), records)

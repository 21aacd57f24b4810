"""Causal attention by a coreset, for each head as many entries as it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.automatic._costs import (
    Work,
    coreset_block,
    coreset_work,
    exact_pairs,
    may_search,
    num_rows_of,
)
from linattn.automatic._heads import Given, join_heads
from linattn.automatic._report import Answer, HeadRecord
from linattn.automatic._search import MIN_FEATURES, PROBABILITY
from linattn.automatic._tokens import Head, HostTokens, query_mask_of
from linattn.coreset import CoresetAttention
from linattn.typing import Array

__all__ = ["attend", "is_worth_a_search"]

MAX_TRIALS = 3
"""Of a head: each gets a share of the probability to fail."""

EXPONENT = 0.55
"""Errors fall with this power of the number of entries."""

ROWS = 64
"""Exact rows that are worked out at a time."""


def is_worth_a_search(given: Given) -> bool:
    """Whether a coreset may be tried."""
    first = coreset_work(given.problem, MIN_FEATURES).plus(_rows_work(given))
    return may_search(given.problem, first, given.tolerance)


def _rows_work(given: Given) -> Work:
    return Work(exact=num_rows_of(given.problem) * given.problem.key.shape[-2] / 2)


def attend(given: Given) -> Answer:
    """Attention by a coreset where that is cheap and near, exact elsewhere."""
    exact, tolerance = exact_pairs(given.problem), given.tolerance
    streams = _Streams(given)
    records = [HeadRecord(0, 0, 0, 0.0, 0.0, _rows_work(given))] * given.num_heads
    parts: list[tuple[Sequence[int], Array]] = []
    pending = {MIN_FEATURES: list(range(given.num_heads))}
    left: list[int] = []
    for trial in range(MAX_TRIALS):
        later: dict[int, list[int]] = defaultdict(list)
        for m, heads in pending.items():
            output, errors, bounds = streams.attend(m, heads)
            good = []
            for i, head in enumerate(heads):
                error, bound = float(errors[i]), float(bounds[i])
                work = records[head].work.plus(coreset_work(given.problem, m))
                passed = tolerance is None or bound <= tolerance
                entries, block = (m, coreset_block(m)) if passed else (0, 0)
                records[head] = HeadRecord(entries, 0, block, error, bound, work)
                if tolerance is None or passed:
                    good.append(i)
                    continue
                more = _expected_entries(m, bound / tolerance)
                worth = coreset_work(given.problem, more).cost < exact
                (later[more] if worth and trial + 1 < MAX_TRIALS else left).append(head)
            if good:
                part = output if len(good) == given.num_heads else given.flat(output, good)
                parts.append(([heads[i] for i in good], part))
        pending = later
    if left:
        parts.append((left, given.exact(left)))
        for head in left:
            work = records[head].work.plus(Work(exact=exact))
            records[head] = records[head]._replace(work=work)
    return Answer(join_heads(given, parts), records)


def _expected_entries(m: int, ratio: float) -> int:
    """Power of 2 of entries with which an error is expected to be smaller by such a ratio."""
    if not np.isfinite(ratio):
        return 1 << 60
    return m << max(1, ceil(log2(ratio) / EXPONENT - 0.2))


class _Streams:
    """Coresets of one call, and the rows by which they are judged."""

    def __init__(self, given: Given) -> None:
        self._given = given
        mask, num_rows = query_mask_of(given.problem, given.key_mask), num_rows_of(given.problem)
        self._tokens = HostTokens(given.problem, mask, num_rows, given.generator)
        self._exact = [_causal_rows(self._tokens.head(i), given.scale) for i in self._tokens]

    def attend(
        self, m: int, chosen: Sequence[int]
    ) -> tuple[Array, NDArray[np.float64], NDArray[np.float64]]:
        """Attend to some heads with m entries; the error of each, and its bound."""
        given = self._given
        heads = given.heads(chosen)
        stream = CoresetAttention(
            m, block_size=coreset_block(m), scale=given.scale, rng=given.generator
        )
        output = stream.extend(
            heads.query,
            heads.key,
            heads.value,
            key_mask=heads.key_mask,
            key_bias=heads.key_bias,
        )
        host = _arrays.to_numpy(output).reshape(len(chosen), *output.shape[-2:])
        found = []
        for part, head in zip(host, chosen, strict=True):
            tokens, exact = self._tokens.head(given.unravel(head)), self._exact[head]
            squares = np.sum((part[tokens.rows].astype(np.float64) - exact) ** 2, axis=-1)
            probability = 1 - (1 - PROBABILITY) / MAX_TRIALS
            units = np.sum(exact**2, axis=-1)
            found.append(tokens.error_and_bound(squares, units, probability))
        errors, bounds = np.array(found, np.float64).reshape(-1, 2).T
        return output, errors, bounds


def _causal_rows(head: Head, scale: float) -> NDArray[Any]:
    """Exact causal attention of a head's held-out rows; 0 for one that sees no key."""
    output = np.zeros((len(head.rows), head.values_and_one.shape[-1] - 1))
    for start in range(0, len(head.rows), ROWS):
        rows = slice(start, start + ROWS)
        # Rows ascend: no key after the last of them is seen.
        count = int(np.searchsorted(head.positions, head.rows[rows][-1], side="right"))
        if not count:
            continue
        logits = (scale * head.query[rows]) @ head.key[:count].T
        if head.key_bias is not None:
            logits += head.key_bias[:count]
        logits[head.positions[:count] > head.rows[rows][:, None]] = -np.inf
        top = logits.max(axis=-1, keepdims=True)
        logits -= np.where(top == -np.inf, 0, top)
        sums = np.exp(logits, out=logits) @ head.values_and_one[:count]
        seen = sums[:, -1:] > 0
        output[rows] = np.where(seen, sums[:, :-1] / np.where(seen, sums[:, -1:], 1), 0)
    return output

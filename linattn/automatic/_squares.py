"""Causal attention in squares: later half of the queries by earlier half of the keys, recursively.

Each query of a square sees all of its keys, so that a square is full attention, with clusters.
They are found from keys and queries before the queries of the square: no output depends on a later
token. The rest near the diagonal is exact. Letters: ``h`` rows, ``n`` segments, ``e`` value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.automatic._costs import MIN_FEATURES, Work, exact_pairs, may_be_in_vain
from linattn.automatic._full import groups_of, record_of
from linattn.automatic._heads import Given, join_heads
from linattn.automatic._report import HeadRecord
from linattn.automatic._search import PROBABILITY, Choice, Searcher
from linattn.automatic._tokens import Head, HostTokens, query_mask_of
from linattn.merging import merge_outputs
from linattn.typing import Array

__all__ = ["CausalRows", "Square", "Squares", "squares_of"]

Floats = NDArray[Any]

AIM = 0.65
"""Share of the tolerance for the errors of all squares, on the rows that choose. Errors are larger
on other rows, and add up if they are not independent. Unseen rows get half of the squared
tolerance."""

MAX_UNIT = 4.0
"""Largest squared exact row in a bound, over the median of all."""

ROWS = 64
"""How many exact rows are computed together."""


class Square(NamedTuple):
    """Queries from ``middle`` to ``stop``, and keys from ``start`` to ``middle``."""

    start: int
    middle: int
    stop: int


def squares_of(given: Given, num_rows: int) -> list[Square]:
    """Return the squares in which clusters may be tried, largest first."""
    found: list[Square] = []
    length = int(given.problem.key.shape[-2])
    ends = [(0, length)] if length else []
    for start, stop in ends:
        square = Square(start, (start + stop) // 2, stop)
        problem = _rectangle(given, square).problem
        if may_be_in_vain(problem, num_rows * (stop - square.middle) // length):
            found.append(square)
            ends += [(start, square.middle), (square.middle, stop)]
    return found


def _rectangle(given: Given, square: Square) -> Given:
    return given.rectangle(slice(square.middle, square.stop), slice(square.start, square.middle))


class CausalRows:
    """Exact held-out rows of causal attention, by segments of keys."""

    def __init__(self, given: Given, num_rows: int, squares: Sequence[Square]) -> None:
        mask = query_mask_of(given.problem, given.key_mask)
        self.given, self._num_rows = given, num_rows
        self.tokens = HostTokens(given.problem, mask, given.generator)
        length = int(given.problem.key.shape[-2])
        self._borders = sorted({0, length, *(x for square in squares for x in square)})
        self._sums = {
            index: _sums_by_segment(self._head(index), self._borders, given.scale)
            for index in self.tokens
        }

    def _head(self, index: tuple[int, ...]) -> Head:
        return self.tokens.head(index, self._num_rows)

    def judge(
        self, index: tuple[int, ...], output: Floats, probability: float
    ) -> tuple[float, float]:
        """Return error and bound of the output of a head, ``(L, e)``."""
        head, exact = self._head(index), self._exact(index)
        squares = np.sum((output[head.rows].astype(np.float64) - exact) ** 2, axis=-1)
        units = np.sum(exact**2, axis=-1)
        error, _ = head.error_and_bound(squares, units, probability)
        units = self._units(index)
        unseen = np.minimum(head.unseen(exact), MAX_UNIT * np.median(units))
        _, bound = head.error_and_bound(squares, units, probability, unseen)
        return error, bound

    def _exact(self, index: tuple[int, ...]) -> Floats:
        """Exact output of the rows of a head; 0 for one that sees no key."""
        return _divided(self._sums[index][0].sum(axis=0))

    def _units(self, index: tuple[int, ...]) -> NDArray[np.float64]:
        """Return squared exact outputs, clipped at a multiple of the median if rows are sampled.

        The first rows see few keys and may be by far the largest. How many of them are drawn is
        chance, and must not make a head seem accurate.
        """
        units: NDArray[np.float64] = np.sum(self._exact(index) ** 2, axis=-1)
        if self._head(index).all_rows:
            return units
        units = np.minimum(units, MAX_UNIT * np.median(units))
        return units

    def count(self, square: Square) -> int:
        """Return the largest number of rows of any head in a square."""
        rows = (self._head(index).rows for index in self.tokens)
        return max(int(np.sum((r >= square.middle) & (r < square.stop))) for r in rows)

    def of_square(self, index: tuple[int, ...], square: Square) -> Head:
        """Return the rows of a head in a square, with the sums of all exact keys."""
        whole = self._head(index)
        sums, log = self._sums[index]
        inside = (whole.rows >= square.middle) & (whole.rows < square.stop)
        keys = slice(*np.searchsorted(whole.positions, (square.start, square.middle)))
        starts = np.array(self._borders[:-1])
        outside = (starts < square.start) | (starts >= square.middle)
        weights = whole.row_weights
        if weights is not None:
            weights = np.concatenate([weights[inside], weights[~inside]])
        return whole._replace(
            rows=whole.rows[inside] - square.middle,
            query=whole.query[inside],
            positions=whole.positions[keys] - square.start,
            key=whole.key[keys],
            values_and_one=whole.values_and_one[keys],
            row_weights=weights,
            beside=(sums[outside].sum(axis=0)[inside], log[inside]),
            elsewhere=self._units(index)[~inside],
        )


def _divided(sums: Floats) -> Floats:
    seen = sums[..., -1:] > 0
    return np.where(seen, sums[..., :-1] / np.where(seen, sums[..., -1:], 1), 0)


def _sums_by_segment(head: Head, borders: Sequence[int], scale: float) -> tuple[Floats, Floats]:
    """Sum values and ones over the keys of each segment that a row sees, ``(n, h, e + 1)``.

    The second result, ``(h,)``, is the shift: sums are in units of its exponential.
    """
    h, width = len(head.rows), head.values_and_one.shape[-1]
    sums = np.zeros((len(borders) - 1, h, width))
    logs = np.full((len(borders) - 1, h), -np.inf)
    cuts = np.searchsorted(head.positions, borders)
    for part, log, first, last in zip(sums, logs, cuts[:-1], cuts[1:], strict=True):
        for start in range(0, h, ROWS):
            rows = slice(start, start + ROWS)
            # Rows ascend: no key after the last of them is seen.
            end = np.searchsorted(head.positions, head.rows[rows][-1], side="right")
            keys = slice(first, min(int(end), last))
            if keys.stop <= first:
                continue
            logits = (scale * head.query[rows]) @ head.key[keys].T
            near = int(np.searchsorted(head.positions[keys], head.rows[rows][0], side="right"))
            hidden = head.positions[keys][near:] > head.rows[rows][:, None]
            logits[:, near:][hidden] = -np.inf
            log[rows] = logits.max(axis=-1)
            logits -= np.where(log[rows] == -np.inf, 0, log[rows])[:, None]
            part[rows] = np.exp(logits, out=logits) @ head.values_and_one[keys]
    log = logs.max(axis=0)
    shift = np.where(log == -np.inf, 0, log)
    return sums * np.exp(logs - shift)[..., None], shift


class _SquareTokens:
    """Tokens of all heads in one square, for a search."""

    def __init__(self, rows: CausalRows, square: Square) -> None:
        self._rows, self._square = rows, square

    def head(self, index: tuple[int, ...], num_rows: int) -> Head:
        """Return the tokens of a head, with all rows of the square."""
        return self._rows.of_square(index, self._square)

    def queries(self, index: tuple[int, ...]) -> Floats:
        """Return the queries before those of the square: an output must not depend on others."""
        return self._rows.tokens.queries(index, slice(self._square.start, self._square.middle))


class _SquareSearch(Searcher):
    """Search for the clusters of one square."""

    def __init__(self, rows: CausalRows, square: Square, parts: int) -> None:
        self.given, self.square = _rectangle(rows.given, square), square
        self.num_rows = rows.count(square)
        super().__init__(
            self.given.problem,
            rows.given.scale,
            _SquareTokens(rows, square),
            rows.given.generator,
            1 - (1 - PROBABILITY) / parts,
            fixed_rows=self.num_rows,
        )
        self.first = [self.trial(index, MIN_FEATURES, self.num_rows) for index in rows.tokens]

    def choose_all(self, tolerances: Sequence[float]) -> list[Choice]:
        """Choose a method for each head."""
        heads = zip(np.ndindex(self.problem.lead), tolerances, self.first, strict=True)
        return [self.choose(*head) for head in heads]


def _allowed_errors(first: Floats, sizes: Floats, tolerance: float) -> NDArray[np.float64]:
    """Return the allowed errors of the squares of a head, none above its first error.

    The squared errors sum to the squared tolerance. The time of a square grows with its pairs, and
    about with its error to the power of -2. So the total is smallest if squared errors are
    proportional to size times first error.
    """
    weights = np.minimum(first, 1e6) * sizes
    allowed, more, left = np.zeros(len(first)), np.ones(len(first), bool), tolerance**2
    while more.any():
        squares = left * weights / weights[more].sum()
        met = more & (first**2 <= squares)
        if not met.any():
            return np.where(more, np.sqrt(squares), allowed)
        allowed[met] = first[met]
        left, more = left - float(np.sum(first[met] ** 2)), more & ~met
    return allowed


class Squares:
    """Clusters of all squares, as many as each head needs."""

    def __init__(self, rows: CausalRows, squares: Sequence[Square], tolerance: float) -> None:
        self._given = rows.given
        searches = [_SquareSearch(rows, square, len(squares)) for square in squares]
        bounds = np.array([[x.curve.bound[0] for x in search.first] for search in searches])
        sizes = np.array([float(square.middle - square.start) for square in squares])
        tolerance *= AIM
        allowed = [_allowed_errors(b, sizes, tolerance) for b in bounds.T]
        self._found = {
            search.square: (search.given, search.choose_all(tolerances))
            for search, tolerances in zip(searches, np.array(allowed).T.tolist(), strict=True)
        }

    def records(self) -> list[HeadRecord]:
        """Return a record for each head, before attending."""
        rest = exact_pairs(self._given.problem)
        for given, _ in self._found.values():
            rest -= exact_pairs(given.problem)
        of_squares = [[record_of(x) for x in choices] for _, choices in self._found.values()]
        records = []
        for parts in zip(*of_squares, strict=True):
            work = Work(exact=rest)
            for part in parts:
                work = work.plus(part.work)
            near = [part for part in parts if part.num_features]
            errors, bounds = np.array([part[2:4] for part in near or parts]).T
            record = HeadRecord(
                max((part.num_features for part in near), default=0),
                max((part.clusters for part in near), default=0),
                float(np.sqrt(np.sum(errors**2))),
                float(np.sqrt(np.sum(bounds**2))),
                work,
            )
            records.append(record)
        return records

    def attend(self, heads: Sequence[int]) -> Array:
        """Attend to some heads with the chosen clusters."""
        given = self._given.only(heads)
        return self._triangle(given, heads, 0, int(given.problem.key.shape[-2]))[0]

    def _triangle(
        self, given: Given, heads: Sequence[int], start: int, stop: int
    ) -> tuple[Array, Array]:
        """Return causal attention of some tokens to themselves, and its log normalizer."""
        options: Any = {"return_log_normalizer": True}
        square = Square(start, (start + stop) // 2, stop)
        if square not in self._found:
            rows = slice(start, stop)
            whole: tuple[Array, Array] = given.rectangle(rows, rows).exact(
                range(len(heads)), is_causal=True, **options
            )
            return whole
        rectangle, choices = self._found[square]
        groups = groups_of(rectangle, choices, heads, **options)
        exact = [head for head in heads if choices[head].level < 0]
        if exact:
            groups.append((exact, rectangle.exact(exact, **options)))
        output = join_heads(given, [(part, pair[0]) for part, pair in groups])
        log = join_heads(given, [(part, pair[1][..., None]) for part, pair in groups])
        earlier = self._triangle(given, heads, start, square.middle)
        later = self._triangle(given, heads, square.middle, stop)
        later = merge_outputs([(output, log[..., 0]), later])
        xp = given.problem.xp
        return (
            xp.concat([earlier[0], later[0]], axis=-2),
            xp.concat([earlier[1], later[1]], axis=-1),
        )

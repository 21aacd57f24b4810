"""Tokens of each head on the host, and the held-out rows that judge a head."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.automatic._costs import LEAST_LOG, ROWS
from linattn.diagnostics._shared import error_and_bound, mean_distance
from linattn.typing import Array, Problem

Floats = NDArray[Any]


MAX_OUTLIERS = 32
"""There is at most one outlier in so many queries."""


class Rectangle(NamedTuple):
    """Full attention of queries ``first`` to ``last`` to keys ``start`` to ``stop``."""

    first: int
    last: int
    start: int
    stop: int


class Rows(NamedTuple):
    """Queries that judge a head.

    Attributes
    ----------
    places : ndarray of int, (h,)
        Ascending positions, perhaps with repetitions.
    weights : ndarray, (h,), or None
        Mean odds over the odds of each row; None if these are all unmasked queries.
    """

    places: NDArray[np.intp]
    weights: NDArray[np.float64] | None

    def unseen(self, exact: Floats) -> Any:
        """Bound the weighed square of a row that was not drawn, from the drawn exact outputs."""
        if self.weights is None:
            return 0.0
        # No odds are below half of the mean.
        return 2 * mean_distance(exact, self.weights)

    def error_and_bound(
        self, squares: Floats, units: Floats, probability: float, unseen: Any = 0.0
    ) -> Any:
        """Return the relative error and its bound, from squared errors of the rows."""
        if self.weights is None:
            return error_and_bound(squares, units, None)
        return error_and_bound(squares * self.weights, units * self.weights, probability, unseen)


class Total(NamedTuple):
    """Exact outputs of rows over all keys that they see, and their log normalizers."""

    output: NDArray[np.float64]
    """``(h, e)``."""
    log: Floats
    """``(h,)``."""
    units: NDArray[np.float64]
    """``(h,)``: squared outputs, with a limit."""


class Head(NamedTuple):
    """Unmasked keys of one head in a rectangle, and the rows that judge it.

    Attributes
    ----------
    rows : Rows
        All rows of the head, inside the rectangle and outside.
    inside : ndarray of bool, (h,)
        Which of them are in the rectangle: n.
    query : ndarray, (n, d)
        These queries.
    positions : ndarray of int, (S,)
        Positions of the unmasked keys, from the first key of the rectangle.
    key : ndarray, (S, d)
        The unmasked keys.
    values_and_one : ndarray, (S, e + 1)
        Their values, with a column of ones.
    same_place : ndarray, (n, d), or None
        The key at the position of each row, masked or not; None if it counts in no choice.
    total : Total or None
        Of all rows, over more keys than these; None if these are all.
    """

    rows: Rows
    inside: NDArray[np.bool_]
    query: Floats
    positions: NDArray[np.intp]
    key: Floats
    values_and_one: Floats
    same_place: Floats | None = None
    total: Total | None = None


class HostTokens:
    """Tokens of a problem on the host, and held-out rows.

    Parameters
    ----------
    problem : Problem
        Problem of exact attention, without biases of keys.
    key_mask : boolean array or None
        As the caller gave it. If L = S, it masks queries too.
    generator : Generator
        Draws the rows.
    """

    has_outliers = False
    """Whether outliers are no rows, as they are exact in every case."""

    def __init__(
        self, problem: Problem, key_mask: Array | None, generator: np.random.Generator
    ) -> None:
        self.lead, self._generator = problem.lead, generator
        self._query, self._key, self._value = (
            _host(x, problem) for x in (problem.query, problem.key, problem.value)
        )
        mask = problem.weights.key_mask
        self._key_mask = None if mask is None else _arrays.to_numpy(mask)[..., 0]
        L, S = problem.query.shape[-2], problem.key.shape[-2]
        valid = np.ones(1, bool) if key_mask is None or L != S else _arrays.to_numpy(key_mask)
        self._valid = np.broadcast_to(valid, (*valid.shape[:-1], L))
        # Odds of the last head.
        self._line: tuple[Any, ...] = (None,)
        self.outliers = np.zeros(0, np.intp)

    def head(
        self, index: tuple[int, ...], rows: Rows, where: Rectangle, total: Total | None = None
    ) -> Head:
        """Return the keys of a head in a rectangle, and the rows in it."""
        query, whole, value = (
            _of_head(x, self.lead, index, 2) for x in (self._query, self._key, self._value)
        )
        keys, places = slice(where.start, where.stop), rows.places
        inside = (places >= where.first) & (places < where.last)
        key, value = whole[keys], value[keys]
        positions = np.arange(len(key))
        if self._key_mask is not None:
            mask = _of_head(self._key_mask, self.lead, index, 1)
            positions = np.flatnonzero(np.broadcast_to(mask, len(whole))[keys])
            key, value = key[positions], value[positions]
        values_and_one = np.concatenate([value, np.ones_like(value[:, :1])], axis=-1)
        same_place = whole[places] if total is None and len(whole) == len(query) else None
        tokens = query[places[inside]], positions, key, values_and_one
        return Head(rows, inside, *tokens, same_place, total)

    def queries(self, index: tuple[int, ...], among: slice = slice(None)) -> Floats:
        """Return the unmasked queries of a head; a row of zeros if there is none."""
        query = _of_head(self._query, self.lead, index, 2)[among]
        query = query[_of_head(self._valid, self.lead, index, 1)[among]]
        return query if len(query) else np.zeros_like(query, shape=(1, query.shape[-1]))

    def rows(self, index: tuple[int, ...], num_rows: int) -> Rows:
        """Draw rows of a head, ascending, and their weights; all rows if they are no more.

        Queries are drawn in the order of their odds, so that rare ones are even if they are few.
        Sets ``outliers``, the positions of the queries that are rarer than any drawn ones.
        """
        valid = np.flatnonzero(_of_head(self._valid, self.lead, index, 1))
        if len(valid) <= num_rows:
            self.outliers = valid[:0]
            return Rows(valid, None)
        if self._line[0] != index:
            query = _of_head(self._query, self.lead, index, 2).take(valid, axis=0)
            odds = (1 + _leverage(query)) / 2
            order = np.argsort(odds, kind="stable")
            # The leverage of the most distant of as many normal queries, over the mean. A query
            # that reads a single key is beyond it, unless all attend sharply.
            last, most = len(order), (1 + (2 * np.log(len(order)) / query.shape[-1]) ** 0.5) ** 2
            if self.has_outliers:
                last -= min(int(np.sum(odds > (1 + most) / 2)), last // MAX_OUTLIERS)
            self.outliers = np.sort(valid[order[last:]])
            self._line = index, odds / odds[order[:last]].mean(), order[:last]
        _, odds, order = self._line
        drawn = np.sort(order[draw(odds[order], self._generator.random(num_rows))])
        return Rows(valid[drawn], 1 / odds[drawn])


def draw(odds: NDArray[np.float64], noise: NDArray[np.float64]) -> NDArray[np.intp]:
    """Draw one number from each of equal strata of a line, on which each has its odds in turn."""
    ends = np.cumsum(odds)
    strata = (np.arange(len(noise)) + noise) * (ends[-1] / len(noise))
    return np.asarray(np.minimum(np.searchsorted(ends, strata, side="right"), len(odds) - 1))


def _leverage(query: Floats) -> NDArray[np.float64]:
    """Return leverages over their mean.

    The leverages ``x.((X^T X)^-1 x)`` sum to d. Queries that alone span a direction share a
    leverage of 1.
    """
    x, _, _, square = about_mean(query)
    d, trace = len(square), np.trace(square)
    if not 0 < trace < np.inf:
        return np.ones(len(x))
    inverse = np.linalg.inv(square + 1e-6 * trace / d * np.eye(d)).astype(x.dtype)
    leverage = np.vecdot(x @ inverse, x).astype(np.float64)
    return np.asarray(leverage / leverage.mean())


def about_mean(query: Floats) -> tuple[Floats, Floats, float, Floats]:
    """Return queries less their mean in a unit, the mean, the unit, and the sum of squares."""
    mean = query.mean(axis=0, dtype=np.float64)
    x = query - mean.astype(query.dtype)
    unit = np.abs(x).max() or 1
    x /= unit
    return x, mean, float(unit), (x.T @ x).astype(np.float64)


def _host(x: Array, problem: Problem) -> Floats:
    wide = problem.dtype == problem.xp.float64
    return _arrays.to_numpy(x).astype(np.float64 if wide else np.float32, copy=False)


def _of_head(x: Floats, lead: tuple[int, ...], index: tuple[int, ...], trailing: int) -> Floats:
    return np.asarray(x[own_index(lead, index, x.shape[: x.ndim - trailing])])


def causal_rows(head: Head, scale: float) -> Floats:
    """Return the exact outputs of causal rows and their log normalizers, ``(h, e + 1)``."""
    query, found = scale * head.query, np.empty((len(head.query), head.values_and_one.shape[-1]))
    for start in range(0, len(query), ROWS):
        part = slice(start, start + ROWS)
        rows = head.rows.places[part]
        first, stop = np.searchsorted(head.positions, [rows[0], rows[-1] + 1])
        logits = query[part] @ head.key[:stop].T
        hidden = head.positions[first:stop] > rows[:, None]
        np.copyto(logits[:, first:], -np.inf, where=hidden)
        top = np.maximum(logits.max(axis=-1, keepdims=True, initial=-np.inf), -1e30)
        logits -= top
        np.copyto(logits, -np.inf, where=logits < LEAST_LOG)
        total = np.exp(logits, out=logits).sum(axis=-1, keepdims=True)
        logits /= np.maximum(total, 1)
        found[part] = logits @ head.values_and_one[:stop]
        with np.errstate(divide="ignore"):
            found[part, -1:] = np.log(total) + top
    return found


def own_index(
    lead: tuple[int, ...], index: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the index of a head in leading axes that are broadcast."""
    where = index[len(lead) - len(axes) :]
    return tuple(0 if n == 1 else i for i, n in zip(where, axes, strict=True))

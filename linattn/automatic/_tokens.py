"""Tokens of each head on the host, and the rows by which a head is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.automatic._order import CHOICE_ROWS, order_of_queries
from linattn.diagnostics._shared import error_and_bound, mean_distance
from linattn.typing import Array, Problem

__all__ = ["Head", "HostTokens", "TokensOfHeads", "query_mask_of"]

Floats = NDArray[Any]

WEIGHTED, MISSING = 1 / 2, 1 / 3
"""Share of the odds of a row to be held out that it has for being special, and what of all goes by
what it may be missing, where that is known; the rest by its leverage among the queries. Photographs
of scikit-image: estimates over true errors (5, 50, 95 %) .60, .99, 1.39, without .06, .71, 2.00."""

FITTED = 1 / 4
"""Share of the queries that may be fitted to; the others may be held out."""


class Head(NamedTuple):
    """Tokens of one head: those that count.

    Attributes
    ----------
    rows : ndarray of int, (h,)
        Held-out queries; one may be there twice.
    query : ndarray, (h, d)
        They themselves.
    positions : ndarray of int, (S,)
        Keys that are not masked.
    key : ndarray, (S, d)
        They themselves.
    values_and_one : ndarray, (S, e + 1)
        Their values, with a column of ones.
    all_rows : bool
        Whether the rows are all queries that count.
    key_bias : ndarray, (S,), or None
        Log weights of the keys.
    row_weights : ndarray, (h + n,), or None
        How much less likely each row was drawn than all are in the mean; None for alike.
    beside : tuple of ndarray (h, e + 1), (h,), or None
        Sums of values and ones over keys that are exact whatever is chosen, in units of the
        exponential of the second; None for no such keys.
    elsewhere : ndarray, (n,), or None
        Squares of exact outputs of rows which do not see these keys, but are of the same head.
    choosers : ndarray, (h, r, d), or None
        The queries that choose clusters together with each row; None for each row alone.
    """

    rows: NDArray[np.intp]
    query: Floats
    positions: NDArray[np.intp]
    key: Floats
    values_and_one: Floats
    all_rows: bool
    key_bias: Floats | None = None
    row_weights: NDArray[np.float64] | None = None
    beside: tuple[Floats, Floats] | None = None
    elsewhere: NDArray[np.float64] | None = None
    choosers: Floats | None = None

    def in_order(self, order: NDArray[np.intp]) -> Head:
        """Return the same with the rows in an order, of a head as for :meth:`some_rows`."""
        return self.some_rows(order)._replace(all_rows=self.all_rows)

    def some_rows(self, chosen: slice | NDArray[np.intp]) -> Head:
        """Return the same for some of the rows, of a head whose rows all see the same keys."""
        weights = None if self.row_weights is None else self.row_weights[chosen]
        return self._replace(
            rows=self.rows[chosen],
            query=self.query[chosen],
            all_rows=False,
            row_weights=weights,
            choosers=None if self.choosers is None else self.choosers[chosen],
        )

    def unseen(self, exact: Floats) -> Any:
        """Largest weighed square of a row that was not drawn, from exact outputs of those drawn."""
        if self.row_weights is None:
            return mean_distance(exact)
        return mean_distance(exact, self.row_weights[: len(exact)]) / (1 - WEIGHTED)

    def error_and_bound(
        self, squares: Floats, units: Floats, probability: float, unseen: Any = 0.0
    ) -> Any:
        """Relative error and its bound, from squares of rows: those that are rare weigh less."""
        if self.elsewhere is not None:
            there = np.broadcast_to(self.elsewhere, (*squares.shape[:-1], len(self.elsewhere)))
            squares = np.concatenate([squares, np.zeros_like(there)], axis=-1)
            units = np.concatenate([units, self.elsewhere])
        if self.row_weights is not None:
            squares, units = squares * self.row_weights, units * self.row_weights
        return error_and_bound(squares, units, None if self.all_rows else probability, unseen)


class Drawn(NamedTuple):
    """Held-out rows of a head, ascending, and their weights; None where these are all rows."""

    rows: NDArray[np.intp]
    weights: NDArray[np.float64] | None


class TokensOfHeads(Protocol):
    """Tokens of heads as a search takes them.

    Attributes
    ----------
    fitted : ndarray of bool, (..., L)
        Queries to fit to.
    """

    fitted: NDArray[np.bool_]

    def head(self, index: tuple[int, ...]) -> Head:
        """Return the tokens of a head."""
        ...


class HostTokens:
    """Tokens of a problem on the host, and held-out rows: those under one mask have the same.

    Parameters
    ----------
    problem : Problem
        Of exact attention.
    query_mask : boolean array or None
        Queries that count, of shape (L,) or with leading axes.
    num_rows : int
        Rows held out of each head; all that count where they are less than twice as many.
    generator : Generator
        Draws them.
    held_out : bool, optional
        Whether no query that may be fitted to is drawn. Default True.
    """

    def __init__(
        self,
        problem: Problem,
        query_mask: Array | None,
        num_rows: int,
        generator: np.random.Generator,
        *,
        held_out: bool = True,
    ) -> None:
        self.lead, self._held_out = problem.lead, held_out
        self._orders: dict[tuple[int, ...], NDArray[np.intp]] = {}
        self._query, self._key, self._value = (
            _host(x, problem) for x in (problem.query, problem.key, problem.value)
        )
        mask, bias = problem.weights.key_mask, problem.weights.key_bias
        self._key_mask = None if mask is None else _arrays.to_numpy(mask)[..., 0]
        self._key_bias = None if bias is None else _host(bias, problem)[..., 0]
        length = problem.query.shape[-2]
        valid = np.ones(1, bool) if query_mask is None else _arrays.to_numpy(query_mask)
        valid = np.broadcast_to(valid, (*self._query.shape[:-2], length))
        self._noise = generator.random(num_rows)
        self._valid = valid
        self._drawn: dict[tuple[int, ...], Drawn] = {}
        self.fitted = valid.copy()
        """Queries to fit to: none that a head is judged by, where others are left."""
        self._few = np.count_nonzero(valid, axis=-1) <= 2 * num_rows
        if held_out:
            self.fitted &= (generator.random(length) < FITTED) | self._few[..., None]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Go through the heads."""
        return iter(np.ndindex(self.lead))

    def head(self, index: tuple[int, ...]) -> Head:
        """Return the tokens of a head."""
        if index not in self._drawn:
            self.draw(index)
        return self.keys(index, self._drawn[index])

    def keys(self, index: tuple[int, ...], drawn: Drawn | None = None) -> Head:
        """Return the tokens of a head with some rows, or with none."""
        rows, weights = drawn or Drawn(np.arange(0), None)
        query, key, value = (
            _of_head(x, self.lead, index, 2) for x in (self._query, self._key, self._value)
        )
        positions, bias = np.arange(len(key)), None
        if self._key_bias is not None:
            bias = _of_head(self._key_bias, self.lead, index, 1)
        if self._key_mask is not None:
            positions = np.flatnonzero(_of_head(self._key_mask, self.lead, index, 1))
            key, value = key[positions], value[positions]
            bias = None if bias is None else bias[positions]
        ones = np.ones_like(value[:, :1])
        values_and_one = np.concatenate([value, ones], axis=-1)
        return Head(
            rows,
            query[rows],
            positions,
            key,
            values_and_one,
            weights is None,
            bias,
            weights,
        )

    def draw(self, index: tuple[int, ...], missing: Floats | None = None) -> None:
        """Draw the rows of a head, by what each query may be missing, ``(L,)``, where known."""
        place = _own_index(self.lead, index, self._query.shape[:-2])
        if self._few[place]:
            self._drawn[index] = Drawn(np.flatnonzero(self._valid[place]), None)
            return
        free = np.flatnonzero(self._valid[place] & ~(self.fitted[place] & self._held_out))
        missing = None if missing is None else missing[free]
        self._drawn[index] = _draw_rows(self._query[place], free, self._noise, missing)

    def is_drawn(self, index: tuple[int, ...]) -> bool:
        """Whether the rows of a head are known, or all are taken."""
        return index in self._drawn or bool(
            self._few[_own_index(self.lead, index, self._query.shape[:-2])]
        )

    def own_logits(self, index: tuple[int, ...], scale: float) -> Floats | None:
        """Logits of the queries of a head with the keys beside them, -inf where these are masked.

        None where they are not as many.
        """
        query, key = (_of_head(x, self.lead, index, 2) for x in (self._query, self._key))
        if query.shape != key.shape:
            return None
        logits = scale * np.vecdot(query, key)
        if self._key_bias is not None:
            logits = logits + _of_head(self._key_bias, self.lead, index, 1)
        if self._key_mask is not None:
            seen = _of_head(self._key_mask, self.lead, index, 1)
            logits = np.where(seen, logits, -np.inf)
        return np.asarray(logits)

    def query(self, index: tuple[int, ...]) -> Floats:
        """Return the queries of a head."""
        return _of_head(self._query, self.lead, index, 2)

    def choosers(self, index: tuple[int, ...], rows: NDArray[np.intp]) -> Floats:
        """Take the queries that choose clusters together with each of some rows, (h, r, d)."""
        query = _of_head(self._query, self.lead, index, 2)
        runs = self.order(index).reshape(-1, CHOICE_ROWS)
        run = np.empty(len(query), np.intp)
        run[runs] = np.arange(len(runs))[:, None]
        return np.asarray(query[runs[run[rows]]])

    def order(self, index: tuple[int, ...]) -> NDArray[np.intp]:
        """Order of a head's queries in which those that choose together follow each other.

        Those that do not count, which may hold anything, choose apart. The last of either come
        again until runs are full, and heads have as many.
        """
        if index not in self._orders:
            query, key = (_of_head(x, self.lead, index, 2) for x in (self._query, self._key))
            counts = self._valid[_own_index(self.lead, index, self._query.shape[:-2])]
            if self._key_mask is not None:
                key = key[_of_head(self._key_mask, self.lead, index, 1)]
            order = order_of_queries(query, key, counts)
            apart = np.split(order, [np.count_nonzero(counts)])
            runs = np.concatenate([np.pad(x, (0, -len(x) % CHOICE_ROWS), "edge") for x in apart])
            most = len(query) + (0 if self._valid.all() else CHOICE_ROWS)
            most += -most % CHOICE_ROWS
            self._orders[index] = np.pad(runs, (0, most - len(runs)), "edge")
        return self._orders[index]


def _draw_rows(
    query: Floats,
    valid: NDArray[np.intp],
    noise: NDArray[np.float64],
    missing: Floats | None = None,
) -> Drawn:
    """Draw rows, ascending, and their weights.

    In the order of their odds queries have parts of a line as long as these, and one is drawn from
    each of as many strata of it as there are numbers of noise: so those that are most unlike the
    others are there even if they are few.
    """
    odds = _odds(query.take(valid, axis=0), missing)
    order = np.argsort(odds, kind="stable")
    ends = np.cumsum(odds[order])
    strata = (np.arange(len(noise)) + noise) * (ends[-1] / len(noise))
    places = np.minimum(np.searchsorted(ends, strata, side="right"), len(valid) - 1)
    drawn = np.sort(order[places])
    return Drawn(valid[drawn], 1 / odds[drawn])


def _odds(query: Floats, missing: Floats | None) -> NDArray[np.float64]:
    """Odds of queries to be held out, 1 in the mean: few that are unlike all others have more.

    And those that may be missing much, a share of their weight each.
    """
    by_leverage = _leverage(query)
    if missing is None or not missing.any():
        return np.asarray(1 - WEIGHTED + WEIGHTED * by_leverage)
    by_missing = missing.astype(np.float64) / missing.mean(dtype=np.float64)
    odds = 1 - WEIGHTED + (WEIGHTED - MISSING) * by_leverage + MISSING * by_missing
    return np.asarray(odds)


def _leverage(query: Floats) -> NDArray[np.float64]:
    """Leverages over their mean.

    Of the leverages ``x.((X^T X)^-1 x)``, which sum up to d, the queries of any direction have 1
    in all if no others have a part in it.
    """
    x = query - query.mean(axis=0)
    x /= np.abs(x).max() or 1
    square = (x.T @ x).astype(np.float64)
    d, trace = len(square), np.trace(square)
    if not 0 < trace < np.inf:
        return np.ones(len(x))
    inverse = np.linalg.inv(square + 1e-6 * trace / d * np.eye(d)).astype(x.dtype)
    leverage = np.vecdot(x @ inverse, x).astype(np.float64)
    return np.asarray(leverage / leverage.mean())


def _host(x: Array, problem: Problem) -> Floats:
    wide = problem.dtype == problem.xp.float64
    return _arrays.to_numpy(x).astype(np.float64 if wide else np.float32, copy=False)


def _of_head(x: Floats, lead: tuple[int, ...], index: tuple[int, ...], trailing: int) -> Floats:
    return np.asarray(x[_own_index(lead, index, x.shape[: x.ndim - trailing])])


def _own_index(
    lead: tuple[int, ...], index: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, ...]:
    """Index of a head in leading axes that are broadcast."""
    where = index[len(lead) - len(axes) :]
    return tuple(0 if n == 1 else i for i, n in zip(where, axes, strict=True))


def query_mask_of(problem: Problem, key_mask: Array | None) -> Array | None:
    """Tokens that count as queries to fit to: those that count as keys, where the axes agree."""
    if problem.query.shape[-2] != problem.key.shape[-2]:
        return None
    if key_mask is None or key_mask.ndim == 1:
        return key_mask
    axes = tuple(problem.query.shape[:-1])
    fits = key_mask.ndim == len(axes) and all(
        n in (1, length) for n, length in zip(key_mask.shape, axes, strict=True)
    )
    return key_mask if fits else None

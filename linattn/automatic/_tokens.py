"""Tokens of each head on the host, and the rows by which a head is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.automatic._order import CHOICE_ROWS, order_of_queries
from linattn.diagnostics._shared import error_and_bound
from linattn.typing import Array, Problem

__all__ = ["Head", "HostTokens", "TokensOfHeads", "query_mask_of"]

Floats = NDArray[Any]

LEVERAGE = 0.5
"""Share of the odds of a row to be held out that goes by its leverage among the queries."""


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

    def error_and_bound(self, squares: Floats, units: Floats, probability: float) -> Any:
        """Relative error and its bound, from squares of rows: those that are rare weigh less."""
        if self.elsewhere is not None:
            there = np.broadcast_to(self.elsewhere, (*squares.shape[:-1], len(self.elsewhere)))
            squares = np.concatenate([squares, np.zeros_like(there)], axis=-1)
            units = np.concatenate([units, self.elsewhere])
        if self.row_weights is not None:
            squares, units = squares * self.row_weights, units * self.row_weights
        return error_and_bound(squares, units, None if self.all_rows else probability)


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
    """

    def __init__(
        self,
        problem: Problem,
        query_mask: Array | None,
        num_rows: int,
        generator: np.random.Generator,
    ) -> None:
        self.lead = problem.lead
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
        noise = generator.random(num_rows)
        self._drawn = {
            index: _draw_rows(self._query[index], np.flatnonzero(valid[index]), noise)
            for index in np.ndindex(valid.shape[:-1])
        }
        self._valid = valid
        self.fitted = valid.copy()
        """Queries to fit to: none that a head is judged by, where others are left."""
        for index, (rows, weights) in self._drawn.items():
            if weights is not None:
                self.fitted[(*index, rows)] = False

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Go through the heads."""
        return iter(np.ndindex(self.lead))

    def head(self, index: tuple[int, ...]) -> Head:
        """Return the tokens of a head."""
        query, key, value = (
            _of_head(x, self.lead, index, 2) for x in (self._query, self._key, self._value)
        )
        rows, weights = self._drawn[_own_index(self.lead, index, self._query.shape[:-2])]
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
    query: Floats, valid: NDArray[np.intp], noise: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64] | None]:
    """Draw rows, ascending, and their weights: all with None where few are valid.

    In the order of their odds queries have parts of a line as long as these, and one is drawn from
    each of as many strata of it as there are numbers of noise: so those that are most unlike the
    others are there even if they are few.
    """
    if len(valid) <= 2 * len(noise):
        return valid, None
    odds = _odds(query.take(valid, axis=0))
    order = np.argsort(odds, kind="stable")
    ends = np.cumsum(odds[order])
    strata = (np.arange(len(noise)) + noise) * (ends[-1] / len(noise))
    places = np.minimum(np.searchsorted(ends, strata, side="right"), len(valid) - 1)
    drawn = np.sort(order[places])
    return valid[drawn], 1 / odds[drawn]


def _odds(query: Floats) -> NDArray[np.float64]:
    """Odds of queries to be held out, 1 in the mean: few that are unlike all others have more.

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
    return np.asarray(1 - LEVERAGE + LEVERAGE * leverage / leverage.mean())


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

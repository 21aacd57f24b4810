"""Tokens of each head on the host, and the held-out rows that judge a head."""

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
"""Share of a row's odds that are not uniform, and the share of all odds that follow the weight that
the row may miss, if known; the remainder follows its leverage. Estimates over true errors (5, 50,
95 %) on photographs of scikit-image: .60, .99, 1.39; without the missed weight .06, .71,
2.00."""

FITTED = 1 / 4
"""Share of the queries that landmarks may be fitted to; the others may be held out."""


class Head(NamedTuple):
    """Unmasked tokens of one head.

    Attributes
    ----------
    rows : ndarray of int, (h,)
        Positions of the held-out queries, perhaps with repetitions.
    query : ndarray, (h, d)
        The held-out queries.
    positions : ndarray of int, (S,)
        Positions of the unmasked keys.
    key : ndarray, (S, d)
        The unmasked keys.
    values_and_one : ndarray, (S, e + 1)
        Their values, with a column of ones.
    all_rows : bool
        Whether the rows are all unmasked queries.
    key_bias : ndarray, (S,), or None
        Log weights of the keys.
    row_weights : ndarray, (h + n,), or None
        Mean odds over the odds of each row; None for equal odds.
    beside : tuple of ndarray (h, e + 1), (h,), or None
        Sums of values and ones over keys that are exact in any case, in units of exp(the second
        array); None if there are no such keys.
    elsewhere : ndarray, (n,), or None
        Squared exact outputs of rows of the same head that do not see these keys.
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
        """Return the head with its rows reordered; conditions as for :meth:`some_rows`."""
        return self.some_rows(order)._replace(all_rows=self.all_rows)

    def some_rows(self, chosen: slice | NDArray[np.intp]) -> Head:
        """Return the head with some of its rows; all rows must see the same keys."""
        weights = None if self.row_weights is None else self.row_weights[chosen]
        return self._replace(
            rows=self.rows[chosen],
            query=self.query[chosen],
            all_rows=False,
            row_weights=weights,
            choosers=None if self.choosers is None else self.choosers[chosen],
        )

    def unseen(self, exact: Floats) -> Any:
        """Bound the weighed square of a row that was not drawn, from the drawn exact outputs."""
        if self.row_weights is None:
            return mean_distance(exact)
        return mean_distance(exact, self.row_weights[: len(exact)]) / (1 - WEIGHTED)

    def error_and_bound(
        self, squares: Floats, units: Floats, probability: float, unseen: Any = 0.0
    ) -> Any:
        """Return the relative error and its bound, from squared errors of the rows."""
        if self.elsewhere is not None:
            there = np.broadcast_to(self.elsewhere, (*squares.shape[:-1], len(self.elsewhere)))
            squares = np.concatenate([squares, np.zeros_like(there)], axis=-1)
            units = np.concatenate([units, self.elsewhere])
        if self.row_weights is not None:
            squares, units = squares * self.row_weights, units * self.row_weights
        return error_and_bound(squares, units, None if self.all_rows else probability, unseen)


class Drawn(NamedTuple):
    """Held-out rows of a head, ascending, and their weights; None for all rows."""

    rows: NDArray[np.intp]
    weights: NDArray[np.float64] | None


class TokensOfHeads(Protocol):
    """Interface of the tokens that a search reads.

    Attributes
    ----------
    fitted : ndarray of bool, (..., L)
        Queries that landmarks are fitted to.
    """

    fitted: NDArray[np.bool_]

    def head(self, index: tuple[int, ...]) -> Head:
        """Return the tokens of a head."""
        ...


class HostTokens:
    """Tokens of a problem on the host, and held-out rows, the same for heads with one mask.

    Parameters
    ----------
    problem : Problem
        Problem of exact attention.
    query_mask : boolean array or None
        Unmasked queries, of shape (L,) or with leading axes.
    num_rows : int
        Number of held-out rows of a head; all unmasked rows if there are less than twice as many.
    generator : Generator
        Draws the rows.
    held_out : bool, optional
        Whether queries that may be fitted to are excluded. Default True.
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
        """Queries to fit to, without the rows that judge a head if enough others are left."""
        self._few = np.count_nonzero(valid, axis=-1) <= 2 * num_rows
        if held_out:
            self.fitted &= (generator.random(length) < FITTED) | self._few[..., None]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Iterate over the heads."""
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
        """Draw the rows of a head, by the weight that each query may miss, ``(L,)``, if known."""
        place = _own_index(self.lead, index, self._query.shape[:-2])
        if self._few[place]:
            self._drawn[index] = Drawn(np.flatnonzero(self._valid[place]), None)
            return
        free = np.flatnonzero(self._valid[place] & ~(self.fitted[place] & self._held_out))
        missing = None if missing is None else missing[free]
        self._drawn[index] = _draw_rows(self._query[place], free, self._noise, missing)

    def is_drawn(self, index: tuple[int, ...]) -> bool:
        """Whether the rows of a head are drawn already, or all rows are used."""
        return index in self._drawn or bool(
            self._few[_own_index(self.lead, index, self._query.shape[:-2])]
        )

    def own_logits(self, index: tuple[int, ...], scale: float) -> Floats | None:
        """Return the logit of each query of a head with the key at its position, -inf if masked.

        None if L differs from S.
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
        """Return the queries that choose clusters together with each of some rows, (h, r, d)."""
        query = _of_head(self._query, self.lead, index, 2)
        runs = self.order(index).reshape(-1, CHOICE_ROWS)
        run = np.empty(len(query), np.intp)
        run[runs] = np.arange(len(runs))[:, None]
        return np.asarray(query[runs[run[rows]]])

    def order(self, index: tuple[int, ...]) -> NDArray[np.intp]:
        """Return an order of a head's queries in which runs choose clusters together.

        Masked queries, which may hold any values, form runs of their own. The last query of either
        group is repeated until runs are full and heads have equal lengths.
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

    Queries are sorted by their odds, and laid out on a line as intervals of that length. The line
    has one stratum for each number of noise, and one query is drawn from each stratum. So
    outliers are drawn even if they are few.
    """
    odds = _odds(query.take(valid, axis=0), missing)
    order = np.argsort(odds, kind="stable")
    ends = np.cumsum(odds[order])
    strata = (np.arange(len(noise)) + noise) * (ends[-1] / len(noise))
    places = np.minimum(np.searchsorted(ends, strata, side="right"), len(valid) - 1)
    drawn = np.sort(order[places])
    return Drawn(valid[drawn], 1 / odds[drawn])


def _odds(query: Floats, missing: Floats | None) -> NDArray[np.float64]:
    """Return the odds of queries to be held out, with mean 1.

    Outliers have larger odds, and so have queries that may miss a large share of their weight.
    """
    by_leverage = _leverage(query)
    if missing is None or not missing.any():
        return np.asarray(1 - WEIGHTED + WEIGHTED * by_leverage)
    by_missing = missing.astype(np.float64) / missing.mean(dtype=np.float64)
    odds = 1 - WEIGHTED + (WEIGHTED - MISSING) * by_leverage + MISSING * by_missing
    return np.asarray(odds)


def _leverage(query: Floats) -> NDArray[np.float64]:
    """Return leverages over their mean.

    The leverages ``x.((X^T X)^-1 x)`` sum to d. Queries that alone span a direction share a
    leverage of 1.
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
    """Return the index of a head in leading axes that are broadcast."""
    where = index[len(lead) - len(axes) :]
    return tuple(0 if n == 1 else i for i, n in zip(where, axes, strict=True))


def query_mask_of(problem: Problem, key_mask: Array | None) -> Array | None:
    """Return the mask of queries to fit to: the mask of the keys, if L = S."""
    if problem.query.shape[-2] != problem.key.shape[-2]:
        return None
    if key_mask is None or key_mask.ndim == 1:
        return key_mask
    axes = tuple(problem.query.shape[:-1])
    fits = key_mask.ndim == len(axes) and all(
        n in (1, length) for n, length in zip(key_mask.shape, axes, strict=True)
    )
    return key_mask if fits else None

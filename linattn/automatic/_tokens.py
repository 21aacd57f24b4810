"""Tokens of each head on the host, and the held-out rows that judge a head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.diagnostics._shared import error_and_bound, mean_distance
from linattn.typing import Array, Problem

__all__ = ["WEIGHTED", "Head", "HostTokens", "TokensOfHeads", "query_mask_of"]

Floats = NDArray[Any]

MAX_MOMENTS = 1024
"""About how many queries tell the mean and covariance of a head."""

WEIGHTED = 1 / 2
"""Share of a row's odds that follow its leverage; the remainder is uniform."""


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
    row_weights : ndarray, (h + n,), or None
        Mean odds over the odds of each row; None for equal odds.
    diagonal : ndarray, (h, d), or None
        The key at the position of each row, masked or not; None if L differs from S.
    beside : tuple of ndarray (h, e + 1), (h,), or None
        Sums of values and ones over keys that are exact in any case, in units of exp(the second
        array); None if there are no such keys.
    elsewhere : ndarray, (n,), or None
        Squared exact outputs of rows of the same head that do not see these keys.
    """

    rows: NDArray[np.intp]
    query: Floats
    positions: NDArray[np.intp]
    key: Floats
    values_and_one: Floats
    all_rows: bool
    row_weights: NDArray[np.float64] | None = None
    diagonal: Floats | None = None
    beside: tuple[Floats, Floats] | None = None
    elsewhere: NDArray[np.float64] | None = None

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


class TokensOfHeads(Protocol):
    """Interface of the tokens that a search reads."""

    def head(self, index: tuple[int, ...], num_rows: int) -> Head:
        """Return the tokens of a head, with about so many held-out rows."""
        ...

    def queries(self, index: tuple[int, ...]) -> Floats:
        """Return the queries that clusters of a head are for, or some of them."""
        ...


class HostTokens:
    """Tokens of a problem on the host, and held-out rows, with the same noise for all heads.

    Parameters
    ----------
    problem : Problem
        Problem of exact attention, without biases of keys.
    query_mask : boolean array or None
        Unmasked queries, of shape (L,) or with leading axes.
    generator : Generator
        Draws the rows.
    """

    def __init__(
        self, problem: Problem, query_mask: Array | None, generator: np.random.Generator
    ) -> None:
        self.lead, self._generator = problem.lead, generator
        self._query, self._key, self._value = (
            _host(x, problem) for x in (problem.query, problem.key, problem.value)
        )
        mask = problem.weights.key_mask
        self._key_mask = None if mask is None else _arrays.to_numpy(mask)[..., 0]
        length = problem.query.shape[-2]
        valid = np.ones(1, bool) if query_mask is None else _arrays.to_numpy(query_mask)
        self._valid = np.broadcast_to(valid, (*self._query.shape[:-2], length))
        self._noise: dict[int, NDArray[np.float64]] = {}

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Iterate over the heads."""
        return iter(np.ndindex(self.lead))

    def head(self, index: tuple[int, ...], num_rows: int) -> Head:
        """Return the tokens of a head; all its rows if these are less than twice as many."""
        query, key, value = (
            _of_head(x, self.lead, index, 2) for x in (self._query, self._key, self._value)
        )
        rows, weights = self._drawn(index, query, num_rows)
        diagonal = key[rows] if len(key) == len(query) else None
        positions = np.arange(len(key))
        if self._key_mask is not None:
            positions = np.flatnonzero(_of_head(self._key_mask, self.lead, index, 1))
            key, value = key[positions], value[positions]
        values_and_one = np.concatenate([value, np.ones_like(value[:, :1])], axis=-1)
        tokens = positions, key, values_and_one
        return Head(rows, query[rows], *tokens, weights is None, weights, diagonal)

    def queries(self, index: tuple[int, ...], among: slice = slice(None)) -> Floats:
        """Return some of the unmasked queries of a head; of all, if these are masked."""
        query = _of_head(self._query, self.lead, index, 2)[among]
        rows = np.flatnonzero(self._valid_of(index)[among])
        step = max(1, len(rows) // MAX_MOMENTS)
        return np.asarray(query[rows[::step]]) if len(rows) else np.zeros_like(query[:1])

    def _valid_of(self, index: tuple[int, ...]) -> NDArray[np.bool_]:
        return np.asarray(self._valid[_own_index(self.lead, index, self._query.shape[:-2])])

    def _drawn(
        self, index: tuple[int, ...], query: Floats, num_rows: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64] | None]:
        """Draw rows of a head, ascending, and their weights; all rows, and None, if they are few.

        Queries are sorted by their odds, and laid out on a line as intervals of that length. The
        line has one stratum for each row, and one query is drawn from each. So outliers are drawn
        even if they are few.
        """
        valid = np.flatnonzero(self._valid_of(index))
        if len(valid) <= 2 * num_rows:
            return valid, None
        if num_rows not in self._noise:
            self._noise[num_rows] = self._generator.random(num_rows)
        odds = 1 - WEIGHTED + WEIGHTED * _leverage(query.take(valid, axis=0))
        order = np.argsort(odds, kind="stable")
        ends = np.cumsum(odds[order])
        strata = (np.arange(num_rows) + self._noise[num_rows]) * (ends[-1] / num_rows)
        places = np.minimum(np.searchsorted(ends, strata, side="right"), len(valid) - 1)
        drawn = np.sort(order[places])
        return valid[drawn], 1 / odds[drawn]


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

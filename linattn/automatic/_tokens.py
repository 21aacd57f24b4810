"""Tokens of each head on the host, and the rows by which a head is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.diagnostics import held_out_rows
from linattn.typing import Array, Problem

__all__ = ["Head", "HostTokens", "query_mask_of"]

Floats = NDArray[Any]


class Head(NamedTuple):
    """Tokens of one head: those that count.

    Attributes
    ----------
    rows : ndarray of int, (h,)
        Held-out queries.
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
    """

    rows: NDArray[np.intp]
    query: Floats
    positions: NDArray[np.intp]
    key: Floats
    values_and_one: Floats
    all_rows: bool
    key_bias: Floats | None = None


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
        self._query, self._key, self._value = (
            _host(x, problem) for x in (problem.query, problem.key, problem.value)
        )
        mask, bias = problem.key_mask, problem.key_bias
        self._key_mask = None if mask is None else _arrays.to_numpy(mask)[..., 0]
        self._key_bias = None if bias is None else _host(bias, problem)[..., 0]
        length = problem.query.shape[-2]
        valid = np.ones(1, bool) if query_mask is None else _arrays.to_numpy(query_mask)
        valid = np.broadcast_to(valid, (*valid.shape[:-1], length))
        self._held = np.zeros(valid.shape, bool)
        for index in np.ndindex(valid.shape[:-1]):
            queries = np.flatnonzero(valid[index])
            if len(queries) > 2 * num_rows:
                queries = queries[held_out_rows(len(queries), num_rows, generator)]
            self._held[(*index, queries)] = True
        self.fitted = np.where(self._all_held(valid), valid, valid & ~self._held)
        """Queries to fit to: none that a head is judged by, where others are left."""
        self._all = np.broadcast_to(self._all_held(valid)[..., 0], self.lead)

    def _all_held(self, valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.asarray((valid == self._held).all(axis=-1, keepdims=True))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Go through the heads."""
        return iter(np.ndindex(self.lead))

    def head(self, index: tuple[int, ...]) -> Head:
        """Return the tokens of a head."""
        query, key, value = (
            _of_head(x, self.lead, index, 2) for x in (self._query, self._key, self._value)
        )
        rows = np.flatnonzero(_of_head(self._held, self.lead, index, 1))
        positions, bias = np.arange(len(key)), None
        if self._key_bias is not None:
            bias = _of_head(self._key_bias, self.lead, index, 1)
        if self._key_mask is not None:
            positions = np.flatnonzero(_of_head(self._key_mask, self.lead, index, 1))
            key, value = key[positions], value[positions]
            bias = None if bias is None else bias[positions]
        ones = np.ones_like(value[:, :1])
        values_and_one = np.concatenate([value, ones], axis=-1)
        all_rows = bool(self._all[index])
        return Head(rows, query[rows], positions, key, values_and_one, all_rows, bias)


def _host(x: Array, problem: Problem) -> Floats:
    wide = problem.dtype == problem.xp.float64
    return _arrays.to_numpy(x).astype(np.float64 if wide else np.float32, copy=False)


def _of_head(x: Floats, lead: tuple[int, ...], index: tuple[int, ...], trailing: int) -> Floats:
    axes = x.shape[: x.ndim - trailing]
    where = index[len(lead) - len(axes) :]
    return np.asarray(x[tuple(0 if n == 1 else i for i, n in zip(where, axes, strict=True))])


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

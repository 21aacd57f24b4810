"""The bandwidth whose leave-one-out error is least, by exact weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from linattn.kernels._regression import local_fit, moments

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

BLOCK_ROWS, BLOCK_KEYS = 256, 1024
"""Pairs of a block, which fits the cache."""

MIN_EXPONENT = -700.0
"""Below this an exponential is as good as 0, and takes ten times as long."""

COARSE = 2.0 ** np.arange(2, -11, -1)
"""Bandwidths tried first, in standard deviations of all coordinates together."""

FINE = 2.0 ** (np.array([3, 2, 1, -1, -2, -3]) / 4)
"""Bandwidths tried next, in the best of the first."""


class LeaveOneOut(NamedTuple):
    """Bandwidths that were tried, widest first, and the error of each.

    Attributes
    ----------
    bandwidths : ndarray, (b,)
        In the unit of the rows.
    errors : ndarray, (b,)
        Mean over rows and outputs of the squared error of a row from all others.
    """

    bandwidths: Floats
    errors: Floats

    @property
    def best(self) -> float:
        """The bandwidth of least error, the widest where several have it."""
        return float(self.bandwidths[np.argmin(self.errors)])


class _Rows(NamedTuple):
    """Rows of size 1, so that no square overflows or vanishes.

    ``X`` times ``unit`` are the rows minus their mean; ``deviation`` is the deviation of ``X``.
    """

    X: Floats
    weight: Floats
    left_out: Indices
    unit: float
    deviation: float

    @classmethod
    def of(cls, X: NDArray[np.floating], weight: Floats, left_out: Indices) -> _Rows:
        if len(X) < 2:
            wanted = "bandwidth='loo' must have at least 2 rows of positive weight to leave one out"
            raise ValueError(f"{wanted}, got n_samples = {len(X)}; give a number")
        centred = np.asarray(X - np.average(X, axis=0, weights=weight), dtype=float)
        largest = np.max(np.abs(centred))
        unit = largest if largest > 0 else 1.0
        centred /= unit
        deviation = np.sqrt(np.sum(np.average(centred**2, axis=0, weights=weight)))
        return cls(centred, weight, left_out, unit, deviation if deviation > 0 else 1.0)


class _Error(Protocol):
    """What rows cost, (b, rows), by sums over all others, (b, rows, e), on a scale.

    The sums are of ``exp((nearest - |x_i - x_j|^2 / 2) / h^2)`` times the values.
    """

    def __call__(self, sums: Floats, nearest: Floats, at: Indices, tried: Floats) -> Floats: ...


def leave_one_out(
    X: NDArray[np.floating],
    target: NDArray[np.floating],
    weight: Floats,
    left_out: Indices,
    ridge: float | None = None,
) -> LeaveOneOut:
    """Try bandwidths on the rows ``left_out``, each predicted from all rows but itself.

    By lines where there is a ``ridge``, else by constants. A weight counts repeats: leaving one out
    takes 1 off it, and all of a weight below 1. The row's own term is left out of the sums, never
    subtracted from them.

    Raises
    ------
    ValueError
        Fewer than two rows.
    """
    rows = _Rows.of(X, weight, left_out)
    values = np.asarray(target - np.average(target, axis=0, weights=weight), dtype=float)

    def error(sums: Floats, nearest: Floats, at: Indices, tried: Floats) -> Floats:
        means = sums[..., :-1] / sums[..., -1:]
        if ridge is not None:
            penalties = ridge * tried**2
            fits = zip(means, penalties, strict=True)
            means = np.stack([local_fit(rows.X[at], m, penalty) for m, penalty in fits])
        return np.asarray(np.mean((means - values[at]) ** 2, axis=-1))

    return _search(rows, values if ridge is None else moments(rows.X, values), error)


def leave_one_out_density(
    X: NDArray[np.floating], weight: Floats, left_out: Indices
) -> LeaveOneOut:
    """Try bandwidths of a density by the negative log likelihood of rows, each by all others."""
    rows, d = _Rows.of(X, weight, left_out), X.shape[1]

    def error(sums: Floats, nearest: Floats, at: Indices, tried: Floats) -> Floats:
        h = tried[:, None]
        remaining = np.sum(weight) - np.minimum(weight[at], 1)
        volume = d * np.log(h * rows.unit) + d * np.log(2 * np.pi) / 2
        return np.asarray(nearest[:, 0] / h**2 + volume + np.log(remaining) - np.log(sums[..., 0]))

    if not np.any(rows.X):
        raise ValueError(
            "bandwidth='loo' must have rows that differ, got equal ones; give a number"
        )
    return _search(rows, np.zeros((len(X), 0)), error)


def _search(rows: _Rows, values: Floats, error: _Error) -> LeaveOneOut:
    coarse: Floats = np.asarray(COARSE * rows.deviation)
    errors = _errors(rows, values, error, coarse)
    fine: Floats = np.asarray(FINE * coarse[np.argmin(errors)])
    errors = np.concatenate([errors, _errors(rows, values, error, fine)])
    bandwidths = np.concatenate([coarse, fine])
    order = np.argsort(-bandwidths)
    return LeaveOneOut(bandwidths[order] * rows.unit, errors[order])


def _errors(rows: _Rows, values: Floats, error: _Error, tried: Floats) -> Floats:
    """Weighted mean error of the rows left out, for each bandwidth tried."""
    X, weight, left_out = rows.X, rows.weight, rows.left_out
    weighted = weight[:, None] * np.concatenate([values, np.ones((len(X), 1))], axis=1)
    remains = np.maximum(1 - 1 / weight, 0)
    total = np.zeros(len(tried))
    for start in range(0, len(left_out), BLOCK_ROWS):
        at = left_out[start : start + BLOCK_ROWS]
        sums = np.zeros((len(tried), len(at), weighted.shape[1]))
        nearest = np.full((len(at), 1), np.inf)
        for _, distance, _ in _distances(X, at, remains):
            np.minimum(nearest, np.min(distance, axis=1, keepdims=True), out=nearest)
        for block, distance, diagonal in _distances(X, at, remains):
            # The nearest row of all has weight 1 on this scale: no sum vanishes.
            distance -= nearest
            for i, bandwidth in enumerate(tried):
                kernel = np.maximum(distance * (-1 / bandwidth**2), MIN_EXPONENT)
                np.exp(kernel, out=kernel)
                kernel[diagonal] *= remains[at[diagonal[0]]]
                sums[i] += kernel @ weighted[block]
        total += error(sums, nearest, at, tried) @ weight[at]
    return np.asarray(total / np.sum(weight[left_out]))


def _distances(
    X: Floats, rows: Indices, remains: Floats
) -> Iterator[tuple[slice, Floats, tuple[Indices, Indices]]]:
    """``|x_i - x_j|^2 / 2`` of these rows i and blocks of all rows j, and where i = j.

    There it is 0, or inf where nothing remains of the row.
    """
    half_norm = np.sum(X[rows] ** 2, axis=1, keepdims=True) / 2
    for start in range(0, len(X), BLOCK_KEYS):
        block = slice(start, min(start + BLOCK_KEYS, len(X)))
        distance = np.sum(X[block] ** 2, axis=1) / 2 - X[rows] @ X[block].T + half_norm
        at = np.flatnonzero((block.start <= rows) & (rows < block.stop))
        diagonal = (at, rows[at] - block.start)
        distance[diagonal] = np.where(remains[rows[at]] > 0, 0.0, np.inf)
        yield block, distance, diagonal

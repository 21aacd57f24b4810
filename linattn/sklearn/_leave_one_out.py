"""The bandwidth whose leave-one-out error is least, by exact weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LeaveOneOut", "leave_one_out"]

Floats = NDArray[np.float64]

MAX_BLOCK_ELEMENTS = 1 << 20
"""Distances held at once: 8 MiB."""

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


def leave_one_out(
    X: NDArray[np.floating],
    target: NDArray[np.floating],
    weight: Floats,
    left_out: NDArray[np.intp],
) -> LeaveOneOut:
    """Try bandwidths on the rows ``left_out``, each predicted from all rows but itself.

    A weight counts repeats: leaving one out takes 1 off it, and all of a weight below 1. The row's
    own term is left out of the sums, never subtracted from them.

    Raises
    ------
    ValueError
        Fewer than two rows.
    """
    if len(X) < 2:
        message = (
            f"bandwidth='loo' must have at least 2 rows of positive weight to leave one out, got "
            f"n_samples = {len(X)}; give a number"
        )
        raise ValueError(message)
    centred = np.asarray(X - np.average(X, axis=0, weights=weight), dtype=float)
    largest = np.max(np.abs(centred))
    unit = largest if largest > 0 else 1.0
    # Rows of size 1, so that no square overflows or vanishes.
    centred /= unit
    deviation = np.sqrt(np.sum(np.average(centred**2, axis=0, weights=weight)))
    deviation = deviation if deviation > 0 else 1.0
    values = np.asarray(target - np.average(target, axis=0, weights=weight), dtype=float)

    coarse = COARSE * deviation
    errors = _errors(centred, values, weight, left_out, coarse)
    fine = FINE * coarse[np.argmin(errors)]
    errors = np.concatenate([errors, _errors(centred, values, weight, left_out, fine)])
    bandwidths = np.concatenate([coarse, fine])
    order = np.argsort(-bandwidths)
    return LeaveOneOut(bandwidths[order] * unit, errors[order])


def _errors(
    X: Floats, values: Floats, weight: Floats, left_out: NDArray[np.intp], bandwidths: Floats
) -> Floats:
    """Weighted mean square error of the rows left out, for each bandwidth."""
    weighted = weight[:, None] * np.concatenate([values, np.ones((len(X), 1))], axis=1)
    remains = np.maximum(1 - 1 / weight, 0)
    half_norm = np.sum(X * X, axis=1) / 2
    total = np.zeros(len(bandwidths))
    size = max(1, MAX_BLOCK_ELEMENTS // len(X))
    for start in range(0, len(left_out), size):
        rows = left_out[start : start + size]
        diagonal = (np.arange(len(rows)), rows)
        half_square = half_norm[rows, None] + half_norm - X[rows] @ X.T
        half_square[diagonal] = np.where(remains[rows] > 0, 0.0, np.inf)
        # The nearest of the others has weight 1 on this scale: no sum vanishes.
        half_square -= np.min(half_square, axis=1, keepdims=True)
        for i, bandwidth in enumerate(bandwidths):
            kernel = np.exp(half_square * (-1 / bandwidth**2))
            kernel[diagonal] *= remains[rows]
            sums = kernel @ weighted
            residual = sums[:, :-1] / sums[:, -1:] - values[rows]
            total[i] += weight[rows] @ np.mean(residual**2, axis=1)
    return np.asarray(total / np.sum(weight[left_out]))

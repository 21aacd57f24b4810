"""The Nadaraya-Watson estimator as attention: exactly, or by landmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import functional, state
from linattn.feature_maps import LandmarkFeatures
from linattn.kernels._regression import local_fit, moments

MIN_PROBES = 128

ROWS_A_LANDMARK = 16
"""Training rows for each landmark below which exact attention is taken."""

MAX_TRIALS = 2
"""Numbers of landmarks tried, each twice the one before."""

MAX_GAIN = 2.0
"""By what the error may be hoped to fall when landmarks are doubled; else the search ends."""

HELD_OUT = 256
"""Training rows at which landmarks are compared with exact attention."""


class Rows(NamedTuple):
    """Training rows of positive weight.

    Attributes
    ----------
    X : ndarray, (n, d)
        float32 or float64.
    target : ndarray, (n, k)
        Values that are averaged, in the dtype of X.
    weight : ndarray, (n,)
        float64.
    """

    X: NDArray[Any]
    target: NDArray[Any]
    weight: NDArray[np.float64]


class Coordinates(NamedTuple):
    """Rows as queries and keys whose inner product is the logarithm of the kernel, to a constant.

    ``q.k = x.y - |y|^2 / 2 + log w`` of rows x and y less the centre, over the bandwidth, and the
    weight w of y. The missing term ``-|x|^2 / 2`` is the same for all keys of a query.
    """

    centre: NDArray[np.float64]
    bandwidth: float | NDArray[np.float64]
    dtype: Any

    def query(self, X: NDArray[Any]) -> NDArray[Any]:
        """Return ``[x, 1]``, (n, d + 1)."""
        scaled = self._scaled(X)
        return np.concatenate([scaled, np.ones_like(scaled[:, :1])], axis=1, dtype=self.dtype)

    def key(self, rows: Rows) -> NDArray[Any]:
        """Return ``[y, log w - |y|^2 / 2]``, (n, d + 1)."""
        scaled = self._scaled(rows.X)
        bias = np.log(rows.weight) - np.sum(scaled * scaled, axis=1) / 2
        return np.concatenate([scaled, bias[:, None]], axis=1, dtype=self.dtype)

    def _scaled(self, X: NDArray[Any]) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):
            scaled = (X - self.centre) / self.bandwidth
        largest = np.finfo(np.float64).max
        np.clip(scaled, -largest, largest, out=scaled)
        # Where a square would overflow, the direction of a row is all that counts.
        bound = np.sqrt(np.finfo(self.dtype).max) / (4 * X.shape[1])
        length = np.max(np.abs(scaled), axis=1, keepdims=True)
        return np.asarray(np.multiply(scaled, bound / np.maximum(length, bound), out=scaled))


class Method(NamedTuple):
    """How means are computed: ``name`` is "exact", "landmarks" or "auto".

    With a ``ridge`` they are the constants of lines that are fitted around each query.
    """

    name: str
    num_landmarks: int
    tolerance: float
    ridge: float | None = None

    def trials(self, num_rows: int) -> list[int]:
        """Return the numbers of landmarks to try before every row is counted."""
        if self.name == "landmarks":
            return [self.num_landmarks] if self.num_landmarks < num_rows else []
        trials = [self.num_landmarks << i for i in range(MAX_TRIALS)]
        return [m for m in trials if self.name == "auto" and ROWS_A_LANDMARK * m <= num_rows]


@dataclass(frozen=True)
class Smoother:
    """Weighted means of targets, for any rows.

    Attributes
    ----------
    coordinates : Coordinates
        Of queries.
    offset : ndarray, (k,)
        What was subtracted from the targets.
    memory : tuple
        ``(key, value)`` of all training rows, or ``(feature_map, state)`` of landmarks.
    num_landmarks : int or None
        None where every row counts.
    error : float
        Root mean square difference from exact, over the deviation of exact from the offset.
    ridge : float or None
        Penalty of the slopes of lines; None for weighted means.
    """

    coordinates: Coordinates
    offset: NDArray[Any]
    memory: tuple[Any, Any]
    num_landmarks: int | None = None
    error: float = 0.0
    ridge: float | None = None

    def __call__(self, X: NDArray[Any]) -> NDArray[Any]:
        """Return means, (n, k)."""
        query = self.coordinates.query(X)
        if self.num_landmarks is None:
            key, value = self.memory
            means = functional.softmax_attention(query, key, value, scale=1.0)
        else:
            feature_map, after = self.memory
            means = state.read_state(query, after, feature_map)
        if self.ridge is not None:
            means = local_fit(query[:, :-1], means, self.ridge)
        return np.asarray(means + self.offset, dtype=self.offset.dtype)


def make_smoother(
    rows: Rows,
    coordinates: Coordinates,
    offset: NDArray[Any],
    method: Method,
    generator: np.random.Generator,
) -> Smoother:
    """Sum up training rows at as few landmarks as the method allows, or count every row.

    Landmarks are compared with exact attention at training rows that they are not fitted to.
    """
    key, value = coordinates.key(rows), rows.target - offset
    if method.ridge is not None:
        value = moments(key[:, :-1], value.astype(key.dtype))
    exact = Smoother(coordinates, offset, (key, value), ridge=method.ridge)
    trials = method.trials(len(key))
    if not trials:
        return exact
    order = generator.permutation(len(key))
    num_held_out = max(1, min(HELD_OUT, len(key) // 4))
    held_out, fitted_to = rows.X[order[:num_held_out]], order[num_held_out:]
    wanted = exact(held_out)
    deviation = _root_mean_square(wanted - offset)
    for m in trials:
        size = min(len(fitted_to), ROWS_A_LANDMARK * m)
        query = coordinates.query(rows.X[np.sort(fitted_to[:size])])
        sizes: dict[str, Any] = {"num_features": m, "num_probes": max(MIN_PROBES, 2 * m)}
        feature_map = LandmarkFeatures.fit(query, key, **sizes, scale=1.0, rng=generator)
        after = state.init_state(feature_map, value.shape[1], like=key)
        after = state.update_state(after, key, value, feature_map)
        found = replace(exact, memory=(feature_map, after), num_landmarks=m)
        distance = _root_mean_square(found(held_out) - wanted)
        error = distance / deviation if deviation > 0 else 0.0
        if method.name == "landmarks" or error <= method.tolerance:
            return replace(found, error=error)
        if error > MAX_GAIN * method.tolerance:
            break
    return exact


def _root_mean_square(x: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(x * x, dtype=np.float64)))

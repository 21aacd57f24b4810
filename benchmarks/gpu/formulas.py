"""Linear attention by its definition: all pairs of tokens, in float64, by NumPy alone.

Written here once more so that what is wanted depends on no code of the library, and on no GPU. Only
the random rows of a map's projection are taken from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Attended", "Formula", "attend", "gradients", "state"]

Floats = NDArray[Any]


class Formula(NamedTuple):
    """A feature map f by its formula.

    Attributes
    ----------
    name : str
        ``favor``: f(x) = exp(x . w - |x|^2 / (2 sqrt(d))) / sqrt(m) for each row w; ``hyperbolic``:
        the same for w and for -w; ``elu``: x + 1, or exp(x) where x < 0; ``relu``: max(x, 0).
    rows : ndarray or None
        (..., rows, d) in float64: the rows w of the first two maps. f(q) . f(k) estimates
        exp(q . k / sqrt(d)) if they are Gaussian of variance 1 / sqrt(d).
    """

    name: str
    rows: Floats | None = None

    def logs(self, x: Floats) -> Floats:
        """Log f(x)."""
        with np.errstate(divide="ignore"):
            if self.name == "elu":
                return np.where(x > 0, np.log1p(np.maximum(x, 0)), x)
            if self.name == "relu":
                return np.log(np.maximum(x, 0))
        rows = self._all_rows()
        logs: Floats = x @ np.swapaxes(rows, -1, -2) - _sum(x * x) / (2 * np.sqrt(x.shape[-1]))
        logs -= np.log(rows.shape[-2]) / 2
        return logs

    def pull(self, x: Floats, grad: Floats) -> Floats:
        """Gradient of x, from the gradient of log f(x)."""
        if self.name == "elu":
            return grad / np.where(x > 0, 1 + x, 1)
        if self.name == "relu":
            return np.where(x > 0, grad, 0) / np.where(x > 0, x, 1)
        pulled: Floats = grad @ self._all_rows() - x * _sum(grad) / np.sqrt(x.shape[-1])
        return pulled

    def _all_rows(self) -> Floats:
        assert self.rows is not None
        both = [self.rows, -self.rows] if self.name == "hyperbolic" else [self.rows]
        return np.concatenate(both, -2)


class Attended(NamedTuple):
    """Attention of one call; ``shares``, (..., N, S): the weight of a pair over its row's sum."""

    output: Floats
    log_normalizer: Floats
    shares: Floats


def attend(
    formula: Formula,
    query: Floats,
    key: Floats,
    value: Floats,
    seen: Floats,
    bias: Any = 0.0,
    exact: Any = False,
) -> Attended:
    """Attend to the keys that each query sees, (..., N, S); the output is 0 where it sees none.

    ``bias``: added to the log weight of a pair, which is q . k / sqrt(d) where it is ``exact``.
    """
    (of_query, query_top), (of_key, key_top) = (_features(formula, x) for x in (query, key))
    shares = of_query @ np.swapaxes(of_key, -1, -2)
    with np.errstate(divide="ignore"):
        np.log(shares, out=shares)  # in place: large inputs have many pairs
        shares += query_top + np.swapaxes(key_top, -1, -2) + bias
        if np.any(exact):
            scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
            np.copyto(shares, scores, where=exact)
        np.copyto(shares, -np.inf, where=~seen)
        top = _finite(np.max(shares, axis=-1, keepdims=True))
        shares -= top
        np.exp(shares, out=shares)
        total = _sum(shares)
        shares /= np.where(total == 0, 1, total)
        return Attended(shares @ value, (np.log(total) + top)[..., 0], shares)


def gradients(
    formula: Formula, query: Floats, key: Floats, value: Floats, seen: Floats, grad: Floats
) -> tuple[Floats, Floats, Floats]:
    """Gradients of query, key and value, from the gradient of the output."""
    output, _, shares = attend(formula, query, key, value, seen)
    (of_query, _), (of_key, _) = (_features(formula, x) for x in (query, key))
    pairs = of_query @ np.swapaxes(of_key, -1, -2)
    of_logs = shares * (grad @ np.swapaxes(value, -1, -2) - _sum(grad * output))
    of_pairs = of_logs / np.where(pairs == 0, 1, pairs)
    of_query_logs = of_query * (of_pairs @ of_key)
    of_key_logs = of_key * (np.swapaxes(of_pairs, -1, -2) @ of_query)
    return (
        formula.pull(query, of_query_logs),
        _shared(formula.pull(key, of_key_logs), key),
        _shared(np.swapaxes(shares, -1, -2) @ grad, value),
    )


def state(formula: Formula, key: Floats, value: Floats, weights: Floats) -> Floats:
    """Return the sum of f(k) [v, 1] over the keys, times their weights, (..., m, e + 1)."""
    features = weights[..., None] * np.exp(formula.logs(key))
    ones = np.ones((*value.shape[:-1], 1))
    sums: Floats = np.swapaxes(features, -1, -2) @ np.concatenate([value, ones], -1)
    return sums


def _features(formula: Formula, x: Floats) -> tuple[Floats, Floats]:
    """Features of tokens over the largest of each, and the log of that."""
    logs = formula.logs(x)
    top = _finite(logs.max(-1, keepdims=True))
    return np.exp(logs - top), top


def _finite(top: Floats) -> Floats:
    """Replace the largest log of nothing, or of zeros."""
    return np.where(np.isneginf(top), 0, top)


def _sum(x: Floats) -> Floats:
    return np.asarray(np.sum(x, axis=-1, keepdims=True))


def _shared(grad: Floats, array: Floats) -> Floats:
    """Sum the gradient over the axes that the array shares."""
    axes = [i for i, size in enumerate(array.shape) if size == 1 < grad.shape[i]]
    return np.asarray(np.sum(grad, axis=tuple(axes), keepdims=True))

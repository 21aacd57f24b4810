"""Features of one token at a time, relative to a log scale that stays where it is.

A token is loaded if its key is no more than MAX_LOG_LEAD above that scale; else the state must be
put on a higher one first.
"""

from __future__ import annotations

from math import isfinite

import numpy as np

from linattn.typing import ELU_PLUS_ONE, Declined, Exponential, Pointwise
from linattn_numpy import limits
from linattn_numpy.buffers import Floats
from linattn_numpy.features import activate, preactivations

TOO_HIGH = Declined("a key is not finite, or its features are too large for any log scale")


def _product(tokens: Floats, spec: Exponential, logs: Floats) -> tuple[Floats, Floats, Floats]:
    """Factors of a product and its output; the last row of ``P`` multiplies the squares."""
    P = np.concatenate([spec.P, -spec.P], axis=-1) if spec.paired else spec.P
    factor = -0.5 * spec.Q if isinstance(spec.Q, float) else -0.5
    P = np.concatenate([P, np.full_like(P[..., :1, :], factor)], axis=-2)
    if P.ndim == 2:
        return tokens.reshape(-1, tokens.shape[-1]), P, logs.reshape(-1, logs.shape[-1])
    return tokens[..., None, :], P, logs[..., None, :]


def _least_logs(of_both: Floats) -> Floats:
    """As many numbers as logs of query and key: comparing with one number would take longer."""
    least = np.empty_like(of_both)
    least[0], least[1] = limits.MIN_TOKEN_LOGS[least.itemsize]
    return least


class ExponentialToken:
    """Features of a token by an exponential map.

    One product makes the features of query and key. The square of a key is one more coordinate, so
    that the product subtracts it, which costs less than a subtraction from each row.
    """

    may_clip = True
    clips = False
    """Whether features are clipped at MIN_TOKEN_LOGS, so that their products are normal numbers."""

    def __init__(self, query_spec: Exponential, key_spec: Exponential, log_scale: Floats) -> None:
        self._specs = query_spec, key_spec
        dim = query_spec.P.shape[-2]
        tokens = np.zeros((2, *log_scale.shape[:-1], dim + 1), log_scale.dtype)
        self._query, self._key = tokens[..., :-1]
        self._square = tokens[1, ..., -1]
        self._flat_square = self._square.reshape(-1)
        self._logs = np.empty((2, *log_scale.shape), log_scale.dtype)
        features, least = np.empty_like(self._logs), _least_logs(self._logs)
        self.query_features: Floats = features[0][..., None]
        """``(..., m, 1)``, unshifted: inf or 0 beyond the range."""
        self._weights: Floats = features[1]
        self._of_query, self._of_key = zip(self._logs, least, features, strict=True)
        self._of_both = self._logs, least, features
        self._flat_key_log = self._logs[1].reshape(-1)
        sides = [(tokens, key_spec, self._logs)]
        if query_spec is not key_spec:
            sides = list(zip(tokens, self._specs, self._logs, strict=True))
        self._products = [_product(*side) for side in sides]
        self._offsets = np.empty_like(self._logs)
        self.rebase(log_scale)

    def rebase(self, log_scale: Floats) -> None:
        """Set the log scale that features are relative to."""
        self.log_scale = log_scale
        np.add(self._specs[0].col, log_scale, out=self._offsets[0])
        np.subtract(self._specs[1].col, log_scale, out=self._offsets[1])

    def load(self, query: Floats, key: Floats, *, unshifted: bool = True) -> Floats | Declined:
        """Load a token and return its key's features, ``(..., m)``, if none is too high or NaN.

        ``unshifted``: make those of the query too.
        """
        self._query[...] = query
        self._key[...] = key
        Q = self._specs[1].Q
        curved = key if isinstance(Q, float) else np.matmul(key[..., None, :], Q)[..., 0, :]
        np.vecdot(key, curved, out=self._square)
        self._project()
        self._logs += self._offsets
        logs, least, features = self._of_both if unshifted else self._of_key
        np.exp(np.maximum(logs, least, out=features) if self.clips else logs, out=features)
        # By argmax, which takes a third of the time of max; NaN is the largest.
        if not self._flat_key_log.item(self._flat_key_log.argmax()) <= limits.MAX_LOG_LEAD:
            return TOO_HIGH
        # Where a square is past range all features would be 0.
        return self._weights if isfinite(self._flat_square.dot(self._flat_square)) else TOO_HIGH

    def _project(self) -> None:
        for token, P, log in self._products:
            np.matmul(token, P, out=log)

    def raised_scale(self) -> Floats:
        """Return a log scale on which the token that was loaded is not too high."""
        self._project()
        return np.asarray(np.maximum(self.log_scale, self._logs[1] + self._specs[1].col))

    def stabilized_query(self) -> Floats:
        """Features of the query, ``(..., m, 1)``, the largest at 1.

        They are NaN where the query's own term may be past range.
        """
        log, least, features = self._of_query
        top = np.maximum.reduce(log, axis=-1, keepdims=True)
        flat = top.reshape(-1)
        if not flat.item(flat.argmax()) < limits.MAX_QUERY_LOG[top.itemsize]:
            top *= np.nan
        log = np.subtract(log, top, out=features)
        np.exp(np.maximum(log, least, out=features) if self.clips else log, out=features)
        return self.query_features


class PointwiseToken:
    """Features of a token by a pointwise map, which are on the log scale 0."""

    clips: bool
    """As of `ExponentialToken`."""

    def __init__(self, query_spec: Pointwise, key_spec: Pointwise, log_scale: Floats) -> None:
        self.may_clip = query_spec.f == key_spec.f == ELU_PLUS_ONE
        dim = log_scale.shape[-1] if isinstance(key_spec.P, float) else key_spec.P.shape[-2]
        tokens = np.empty((2, *log_scale.shape[:-1], 1, dim), log_scale.dtype)
        features = np.empty((2, *log_scale.shape[:-1], 1, log_scale.shape[-1]), log_scale.dtype)
        self._query, self._key = tokens[..., 0, :]
        self.query_features: Floats = np.swapaxes(features[0], -1, -2)
        self._weights: Floats = features[1][..., 0, :]
        sides = tokens, features, _least_logs(features)
        self._sides = [(key_spec, *sides)]
        if query_spec is not key_spec:
            self._sides = list(zip((query_spec, key_spec), *sides, strict=True))
        self.rebase(log_scale)

    def rebase(self, log_scale: Floats) -> None:
        """Say on which log scale a state is."""
        # Sums may be smaller on another scale.
        self.log_scale, self.clips = log_scale, False
        self._is_unscaled = not log_scale.any()

    def load(self, query: Floats, key: Floats, *, unshifted: bool = True) -> Floats | Declined:
        """Load a token and return its key's features, ``(..., m)``, unless on another scale."""
        self._query[...] = query
        self._key[...] = key
        for spec, tokens, features, least in self._sides:
            u = preactivations(spec, tokens, "token")
            activate(spec, np.maximum(u, least) if self.clips else u, features)
        return self._weights if self._is_unscaled else TOO_HIGH

    def raised_scale(self) -> Floats:
        """Return the log scale 0."""
        return np.zeros_like(self.log_scale)

    def stabilized_query(self) -> Floats:
        """Features of the query, ``(..., m, 1)``."""
        return self.query_features


def rebase_for(
    token: ExponentialToken | PointwiseToken, query: Floats, key: Floats, z: Floats
) -> tuple[Floats | Declined, Floats]:
    """Raise the log scale for a token that was too high and load it again.

    Returns its key's features and factors ``(..., m)`` that put a state, with the sums ``z`` of
    its features, on the new scale. They are 0 for what is negligible beside the key's, 1.
    """
    before = token.log_scale
    token.rebase(token.raised_scale())
    log = before - token.log_scale
    factor = np.exp(log)
    factor[(log < -limits.MAX_LOG_LEAD) & (z * factor < limits.DECAYED[z.itemsize])] = 0
    return token.load(query, key), factor

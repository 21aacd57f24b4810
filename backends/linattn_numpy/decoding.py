"""One token at a time: few NumPy calls, and a state that is written to once in many tokens.

The log scale of a state stays where it is while a token is no more than AHEAD above it. A
:class:`Stepper` keeps the last PENDING tokens beside its state, as features on that scale and
values, and adds them all in one product when there is no more room. Whatever is not finite, or may
have lost more than rounding, is left to the generic code, from the state before the token.
"""

from __future__ import annotations

from functools import partial
from math import exp, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Exponential, Pointwise, Problem, Spec, State
from linattn_numpy.features import activated, inputs, is_simple
from linattn_numpy.limits import AHEAD, LEAST_READ, floor_of

__all__ = ["decode", "stepper"]

Floats = NDArray[Any]

PENDING = 32
"""Tokens that wait: each makes a read longer, and adding them up is a pass over the state."""

LEAST_DENOMINATOR = {4: 1e-20, 8: 1e-200}
"""Denominators below this are left to the generic code, by bytes a number."""

LARGEST_LOG = {4: 1e15, 8: 1e150}
"""Logs of a query's features beyond this are left to the generic code, by bytes a number."""

quiet = partial(np.errstate, over="ignore", under="ignore", invalid="ignore", divide="ignore")


def _knows(problem: Problem, state: State) -> bool:
    """Whether all heads are alike: leading axes, dtypes and specs that are worked on here."""
    lead = problem.state_lead
    shapes = {x.shape[:-2] for x in (problem.query, problem.key, problem.value, state.kvz)}
    specs = (problem.query_spec, problem.key_spec)
    return (
        shapes == {lead}
        and 0 not in lead
        and problem.query.dtype == problem.dtype
        and problem.query_change is None
        and problem.key_change is None
        and not problem.want_log
        and (
            all(isinstance(spec, Exponential) for spec in specs)
            or (all(is_simple(spec) for spec in specs) and _is_natural(state.log_scale))
        )
    )


def _is_natural(log_scale: Floats) -> bool:
    """Whether a state may be put on the log scale 0 with nothing lost."""
    return bool(np.all((np.abs(log_scale) <= AHEAD) | (log_scale == -np.inf)))


def _exponents(spec: Exponential, x: Floats) -> Floats:
    """``x P`` of a token of each head, ``(..., m)``."""
    u = x @ spec.P if spec.P.ndim == 2 else np.matmul(x[..., None, :], spec.P)[..., 0, :]
    return np.concatenate([u, -u], axis=-1) if spec.paired else u


def _square(spec: Exponential, x: Floats) -> Floats:
    """Half of ``x.(Q x)``, ``(..., 1)``; NaN past range, where all features would be 0."""
    if isinstance(spec.Q, float):
        square = np.vecdot(x, x)[..., None] * (0.5 * spec.Q)
    else:
        square = np.vecdot(x, np.matmul(x[..., None, :], spec.Q)[..., 0, :])[..., None] * 0.5
    square += square - square
    return np.asarray(square)


def _activated(spec: Pointwise, x: Floats) -> Floats:
    """Features of a token of each head, ``(..., m)``, in a buffer."""
    u = inputs(spec, x[..., None, :], "token")
    return np.asarray(activated(spec, u, "token"))[..., 0, :]


class _Scale:
    """The log scale of a state, and tokens on it."""

    def __init__(self, query_spec: Spec, key_spec: Spec, log_scale: Floats) -> None:
        self._query_spec, self._key_spec = query_spec, key_spec
        self.log_scale = log_scale
        if isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
            self._query_offset = query_spec.col + log_scale
            self._key_offset = key_spec.col - log_scale

    def key(self, x: Floats) -> Floats | _Scale:
        """Features of a key, ``(..., m)``, or the higher scale that it needs."""
        spec = self._key_spec
        if isinstance(spec, Exponential):
            log = _exponents(spec, x)
            log += self._key_offset
            log -= _square(spec, x)
            if np.maximum.reduce(log, axis=None) <= AHEAD:
                return np.exp(log, out=log)
            return self._raised(np.maximum(self.log_scale, self._logs(spec, x)))
        assert isinstance(spec, Pointwise)
        if self.log_scale.any():
            return self._raised(np.zeros_like(self.log_scale))
        return _activated(spec, x)

    def _logs(self, spec: Exponential, x: Floats) -> Floats:
        return np.asarray(_exponents(spec, x) + spec.col - _square(spec, x))

    def _raised(self, log_scale: Floats) -> _Scale:
        return _Scale(self._query_spec, self._key_spec, log_scale)

    def query(self, x: Floats) -> Floats:
        """Features of a query, ``(..., 1, m)``, the largest of an exponential map at 1.

        They are NaN where the query's own term may be past range.
        """
        spec = self._query_spec
        if isinstance(spec, Exponential):
            log = self._query_logs(spec, x)
            top = log.max(axis=-1, keepdims=True)
            if not top.max() < LARGEST_LOG[log.itemsize]:
                top *= np.nan
            log -= top
            return np.asarray(np.exp(log, out=log))[..., None, :]
        assert isinstance(spec, Pointwise)
        return _activated(spec, x)[..., None, :]

    def natural_query(self, x: Floats) -> Floats:
        """Features of a query as they are: inf or 0 where they are beyond the range."""
        spec = self._query_spec
        assert isinstance(spec, Exponential)
        log = self._query_logs(spec, x)
        return np.asarray(np.exp(log, out=log))[..., None, :]

    def _query_logs(self, spec: Exponential, x: Floats) -> Floats:
        log = _exponents(spec, x)
        log += self._query_offset
        return log


def _divided(nd: Floats, least: float) -> Floats | None:
    """Numerator over denominator; None for what must be looked at."""
    denominator = nd[..., -1:]
    # A sum is finite only if all its terms are, and takes less than to ask each; the functions
    # themselves take half a microsecond less than the methods of an array.
    sound = np.minimum.reduce(denominator, axis=None) >= least
    if sound and isfinite(np.add.reduce(nd, axis=None)):
        return np.asarray(nd[..., :-1] / denominator)
    return None


def _rescaled(kvz: Floats, before: Floats, after: Floats) -> Floats:
    return np.asarray(kvz * np.exp(before - after)[..., None])


def _grown(kvz: Floats, weights: Floats, value: Floats) -> Floats:
    """Return ``kvz + weights [value, 1]^T``, stored by rows whatever came.

    A state that was saved and restored is stored by rows, and must go on to the same bits.
    """
    lead, (m, width) = kvz.shape[:-2], kvz.shape[-2:]
    # A second term, 0 times 0: a product over one term alone does not go to BLAS and takes 163 us,
    # a broadcast multiplication 37, this one 11.
    v1, phi = np.zeros((*lead, 2, width), kvz.dtype), np.zeros((*lead, 2, m), kvz.dtype)
    v1[..., 0, :-1], v1[..., 0, -1], phi[..., 0, :] = value, 1, weights
    after = np.matmul(np.swapaxes(phi, -1, -2), v1)
    after += kvz
    return np.asarray(after)


def decode(problem: Problem) -> Any:
    """Take one token: its output, and the state after it."""
    state = problem.state
    if state is None or not _knows(problem, state):
        return NotImplemented
    query, key, value = (x[..., 0, :] for x in (problem.query, problem.key, problem.value))
    with quiet():
        kvz, scale = state.kvz, _Scale(problem.query_spec, problem.key_spec, state.log_scale)
        weights = scale.key(key)
        if isinstance(weights, _Scale):
            scale = weights
            kvz = _rescaled(kvz, state.log_scale, scale.log_scale)
            weights = scale.key(key)
            if isinstance(weights, _Scale):
                return NotImplemented
        after = _grown(kvz, weights, value)
        nd = np.matmul(scale.query(query), after)[..., 0, :]
        out = _divided(nd, LEAST_DENOMINATOR[nd.itemsize])
    if out is None:
        return NotImplemented
    return out, State(after, scale.log_scale.copy(), state.length + 1)


class Stepper:
    """A stream of tokens and what is remembered of it; one for each :class:`linattn.Decoder`."""

    def __init__(self, problem: Problem, state: State) -> None:
        self._scale = _Scale(problem.query_spec, problem.key_spec, np.array(state.log_scale))
        self._kvz = np.array(state.kvz, order="C")
        self._length = state.length
        lead, (m, width) = state.kvz.shape[:-2], state.kvz.shape[-2:]
        self._weights = np.zeros((*lead, PENDING, m), self._kvz.dtype)
        self._values = np.ones((*lead, PENDING, width), self._kvz.dtype)
        self._count = 0
        self._is_exponential = isinstance(problem.query_spec, Exponential)
        self._look()

    def _look(self) -> None:
        """Say what a denominator must be for a read of the state without a shift.

        Underflow of the query's features can have taken ``tiny`` for each column and unit of its
        sum, waiting tokens included.
        """
        m, size = self._kvz.shape[-2], self._kvz.itemsize
        most = float(self._kvz[..., -1].max()) + PENDING * exp(AHEAD)
        self._least = max(LEAST_READ[size], floor_of(self._kvz.dtype) * m * most)
        self._tries_natural = self._is_exponential

    @property
    def state(self) -> State:
        """The state after the last step; later steps do not change it."""
        self._settle()
        return State(self._kvz.copy(), self._scale.log_scale.copy(), self._length)

    def _settle(self) -> None:
        """Add the tokens that wait."""
        if self._count:
            weights = self._weights[..., : self._count, :]
            self._kvz += np.matmul(
                np.swapaxes(weights, -1, -2), self._values[..., : self._count, :]
            )
            self._count = 0
            self._look()

    def step(self, query: Floats, key: Floats, value: Floats) -> Floats | None:
        """Return the output of a token; None leaves it, and the state before it, to others."""
        with quiet():
            scale, kvz = self._scale, self._kvz
            weights = scale.key(key)
            if isinstance(weights, _Scale):
                # What waits is on the old scale.
                self._settle()
                scale = weights
                kvz = _rescaled(self._kvz, self._scale.log_scale, scale.log_scale)
                weights = scale.key(key)
                if isinstance(weights, _Scale):
                    return None
            elif self._count == PENDING:
                self._settle()
            count = self._count + 1
            self._weights[..., count - 1, :] = weights
            self._values[..., count - 1, :-1] = value
            out = None
            # Largest logs and shifts take 7 us of a step.
            if self._tries_natural:
                out = self._read(kvz, scale.natural_query(query), count, self._least)
                self._tries_natural = out is not None
            if out is None:
                least = LEAST_DENOMINATOR[kvz.itemsize]
                out = self._read(kvz, scale.query(query), count, least)
        if out is not None:
            self._scale, self._kvz = scale, kvz
            self._count = count
            self._length += 1
        return out

    def _read(self, kvz: Floats, phi: Floats, count: int, least: float) -> Floats | None:
        """Read a state and the tokens that wait beside it."""
        nd = np.matmul(phi, kvz)
        near = np.matmul(phi, np.swapaxes(self._weights[..., :count, :], -1, -2))
        nd += np.matmul(near, self._values[..., :count, :])
        return _divided(nd[..., 0, :], least)


def stepper(problem: Problem, state: State) -> Any:
    """Return a :class:`Stepper` that goes on from a state."""
    return Stepper(problem, state) if _knows(problem, state) else NotImplemented

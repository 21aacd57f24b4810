"""One token at a time: few NumPy calls, and a state that is written to once in many tokens.

The log scale of a state stays where it is while a token is no more than MAX_LOG_LEAD above it. A
:class:`Stepper` keeps the last PENDING tokens beside its state, as features on that scale and
values, and adds them all in one product when there is no more room. Whatever is not finite, or may
have lost more than rounding, is left to the generic code, from the state before the token.
"""

from __future__ import annotations

import threading
from functools import partial
from math import exp, isfinite
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Exponential, Pointwise, Problem, State
from linattn_numpy.buffers import buffer
from linattn_numpy.features import activate, preactivations, supports_pointwise
from linattn_numpy.limits import MAX_LOG_LEAD, MIN_READ_DENOMINATOR, floor_of

__all__ = ["decode", "stepper"]

Floats = NDArray[Any]

PENDING = 16
"""Tokens that wait: each makes a read longer, and adding them up is a pass over the state."""

LARGEST_LOG = {4: 1e15, 8: 1e150}
"""Logs of a query's features beyond this are left to the generic code, by bytes a number."""

KEPT_NUMBERS = 1 << 16
"""What larger tokens need is not kept from one call of :func:`decode` to the next."""

HIGHEST_SQUARE = exp(2 * MAX_LOG_LEAD)
"""Features of which the sum of squares is below this are all below exp(MAX_LOG_LEAD)."""

quiet = partial(np.errstate, over="ignore", under="ignore", invalid="ignore", divide="ignore")


def _knows(problem: Problem, state: State) -> bool:
    """Whether all heads are alike: leading axes, dtypes and specs that are worked on here."""
    lead, specs = problem.lead, (problem.query_spec, problem.key_spec)
    return (
        problem.query.shape[:-2] == problem.key.shape[:-2] == problem.value.shape[:-2] == lead
        and state.kvz.shape[:-2] == lead
        and 0 not in lead
        and problem.query.dtype == problem.dtype
        and problem.query_change is None
        and problem.key_change is None
        and not problem.want_log
        and (
            (isinstance(specs[0], Exponential) and isinstance(specs[1], Exponential))
            or (all(supports_pointwise(spec) for spec in specs) and _is_natural(state.log_scale))
        )
    )


def _is_natural(log_scale: Floats) -> bool:
    """Whether a state may be put on the log scale 0 with nothing lost."""
    if not log_scale.any():
        return True
    return bool(np.all((np.abs(log_scale) <= MAX_LOG_LEAD) | (log_scale == -np.inf)))


_last = threading.local()
"""What the last token of :func:`decode` on this thread needed."""

_below: WeakKeyDictionary[Exponential, Floats] = WeakKeyDictionary()
"""What :func:`_with_square` has made, for as long as a map keeps its spec."""


def _with_square(spec: Exponential) -> Floats:
    """``P`` of all columns, and below it what the square of a token is multiplied by."""
    found = _below.get(spec)
    if found is None:
        P = np.concatenate([spec.P, -spec.P], axis=-1) if spec.paired else spec.P
        factor = -0.5 * spec.Q if isinstance(spec.Q, float) else -0.5
        row = np.full_like(P[..., :1, :], factor)
        found = _below[spec] = np.concatenate([P, row], axis=-2)
    return found


def _product(tokens: Floats, spec: Exponential, logs: Floats) -> tuple[Floats, Floats, Floats]:
    """Say what is multiplied by what into what."""
    P = _with_square(spec)
    if P.ndim == 2:
        return tokens.reshape(-1, tokens.shape[-1]), P, logs.reshape(-1, logs.shape[-1])
    return tokens[..., None, :], P, logs[..., None, :]


class _Exponentials:
    """Features of one token at a time by an exponential map, relative to a log scale.

    Both sides are made at once. The square of a key stands beside its coordinates and is taken off
    by their product: a number for each row of an array costs 2 us more.
    """

    def __init__(self, query_spec: Exponential, key_spec: Exponential, log_scale: Floats) -> None:
        self._specs = query_spec, key_spec
        dim = query_spec.P.shape[-2]
        tokens = np.zeros((2, *log_scale.shape[:-1], dim + 1), log_scale.dtype)
        self._query, self._key = tokens[..., :-1]
        self._square = tokens[1, ..., -1]
        self._squares = self._square.reshape(-1)
        self._logs = np.empty((2, *log_scale.shape), log_scale.dtype)
        self._query_log, self._key_log = self._logs
        self._weights = np.empty_like(log_scale)
        self._flat_weights = self._weights.reshape(-1)
        sides = zip(tokens, self._specs, self._logs, strict=True)
        self._products = (
            [_product(tokens, key_spec, self._logs)]
            if query_spec is key_spec
            else [_product(*side) for side in sides]
        )
        self._offsets = np.empty_like(self._logs)
        self.rest_on(log_scale)

    def rest_on(self, log_scale: Floats) -> None:
        """Make features relative to this log scale from now on."""
        self.log_scale = log_scale
        np.add(self._specs[0].col, log_scale, out=self._offsets[0])
        np.subtract(self._specs[1].col, log_scale, out=self._offsets[1])

    def take(self, query: Floats, key: Floats) -> Floats | None:
        """Take a token and return its key's features, ``(..., m)``; None if too high or NaN."""
        self._query[...] = query
        self._key[...] = key
        Q = self._specs[1].Q
        curved = key if isinstance(Q, float) else np.matmul(key[..., None, :], Q)[..., 0, :]
        np.vecdot(key, curved, out=self._square)
        self._project()
        self._logs += self._offsets
        weights = np.exp(self._key_log, out=self._weights)
        # A sum of squares takes a microsecond less than to look for the largest.
        if not (
            self._flat_weights.dot(self._flat_weights) <= HIGHEST_SQUARE
            or np.maximum.reduce(self._key_log, axis=None) <= MAX_LOG_LEAD
        ):
            return None
        # Where a square is past range all features would be 0.
        return weights if isfinite(self._squares.dot(self._squares)) else None

    def _project(self) -> None:
        for token, P, log in self._products:
            np.matmul(token, P, out=log)

    def higher(self) -> Floats:
        """Return a log scale that has room for the token that was taken."""
        self._project()
        return np.asarray(np.maximum(self.log_scale, self._key_log + self._specs[1].col))

    def natural_query(self) -> Floats:
        """Features of the query as they are, ``(..., m, 1)``: inf or 0 beyond the range."""
        return np.asarray(np.exp(self._query_log))[..., None]

    def query(self) -> Floats:
        """Features of the query, ``(..., m, 1)``, the largest at 1.

        They are NaN where the query's own term may be past range.
        """
        top = self._query_log.max(axis=-1, keepdims=True)
        if not top.max() < LARGEST_LOG[top.itemsize]:
            top *= np.nan
        return np.asarray(np.exp(self._query_log - top))[..., None]


class _Pointwise:
    """Features of one token at a time by a pointwise map, which are on the log scale 0."""

    def __init__(self, query_spec: Pointwise, key_spec: Pointwise, log_scale: Floats) -> None:
        self._specs = query_spec, key_spec
        self._query: Floats | None = None
        self.rest_on(log_scale)

    def rest_on(self, log_scale: Floats) -> None:
        """Say on which log scale a state is."""
        self.log_scale = log_scale
        self._is_natural = not log_scale.any()

    def take(self, query: Floats, key: Floats) -> Floats | None:
        """Take a token and return its key's features, ``(..., m)``; None on another scale."""
        self._query = query
        return _activated(self._specs[1], key) if self._is_natural else None

    def higher(self) -> Floats:
        """Return the log scale 0."""
        return np.zeros_like(self.log_scale)

    def natural_query(self) -> Floats:
        """Features of the query, ``(..., m, 1)``, on the scale that they have."""
        return self.query()

    def query(self) -> Floats:
        """Features of the query, ``(..., m, 1)``."""
        assert self._query is not None
        return _activated(self._specs[0], self._query)[..., None]


def _activated(spec: Pointwise, x: Floats) -> Floats:
    """Features of a token of each head, ``(..., m)``, in a buffer."""
    u = preactivations(spec, x[..., None, :], "token")
    return activate(spec, u, buffer("token_features", u.shape, u.dtype))[..., 0, :]


def _features(problem: Problem, log_scale: Floats) -> _Exponentials | _Pointwise:
    specs = problem.query_spec, problem.key_spec
    kind = _Exponentials if isinstance(specs[0], Exponential) else _Pointwise
    return kind(*specs, log_scale)


class _Outer:
    """Outer products of a token's features and ``[value, 1]``, as products of matrices.

    A second term is 0 times 0: a product over one term alone does not go to BLAS and takes 155 us,
    a broadcast multiplication 59, this one 14.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        values_and_one, phi = (
            np.zeros((*shape[:-2], 2, shape[-1]), dtype),
            np.zeros((*shape[:-1], 2), dtype),
        )
        self._v1, self._phi = values_and_one, phi
        self._value, self._weights = values_and_one[..., 0, :-1], phi[..., 0]
        values_and_one[..., 0, -1] = 1

    def added(self, kvz: Floats, weights: Floats, value: Floats) -> Floats:
        """Return ``kvz + weights [value, 1]^T``, stored by rows whatever came.

        A state that was saved and restored is stored by rows, and must go on to the same bits.
        """
        self._value[...] = value
        self._weights[...] = weights
        after = np.matmul(self._phi, self._v1)
        after += kvz
        return np.asarray(after)


class _Result:
    """Numerators and denominators of a token, ``num_den`` ``(..., 1, e + 1)``, with views."""

    def __init__(self, num_den: Floats) -> None:
        self.num_den, self.rows = num_den, num_den[..., 0, :]
        self._numerators, self._denominators = self.rows[..., :-1], self.rows[..., -1:]
        self._flat = num_den.reshape(-1)
        self._flat_denominators = self._flat[num_den.shape[-1] - 1 :: num_den.shape[-1]]
        self._zeros = np.zeros_like(self._flat)

    def divided(self, least: float) -> Floats | None:
        """Numerator over denominator, a new array; None for what must be looked at."""
        # Zeros make 0 of what is finite and NaN of all else, in half the time of a sum.
        is_finite = self._flat.dot(self._zeros) == 0
        if is_finite and np.minimum.reduce(self._flat_denominators) >= least:
            return np.divide(self._numerators, self._denominators)
        return None


class _Kept(NamedTuple):
    """What a token of :func:`decode` needs beside a state."""

    kind: tuple[Any, ...]
    features: _Exponentials | _Pointwise
    outer: _Outer
    result: _Result


def _kept(problem: Problem, state: State) -> _Kept:
    """Return what a step from a state needs: this thread's last, if that was of the same kind.

    To make it takes 16 us, to put it on another scale 5.
    """
    shape, log_scale = state.kvz.shape, state.log_scale
    kind = (problem.query_spec, problem.key_spec, shape, state.kvz.dtype)
    kept: _Kept | None = getattr(_last, "kept", None)
    if kept is not None and kept.kind == kind:
        kept.features.rest_on(log_scale)
    else:
        result = _Result(np.empty((*shape[:-2], 1, shape[-1]), state.kvz.dtype))
        features, outer = _features(problem, log_scale), _Outer(shape, state.kvz.dtype)
        kept = _Kept(kind, features, outer, result)
        if log_scale.size <= KEPT_NUMBERS:
            _last.kept = kept
    return kept


def decode(problem: Problem) -> Any:
    """Take one token: its output, and the state after it."""
    state = problem.state
    if state is None or not _knows(problem, state):
        return NotImplemented
    query, key, value = (x[..., 0, :] for x in (problem.query, problem.key, problem.value))
    with quiet():
        kvz, (_, features, outer, result) = state.kvz, _kept(problem, state)
        weights = features.take(query, key)
        if weights is None:
            features.rest_on(features.higher())
            weights = features.take(query, key)
            if weights is None:
                return NotImplemented
            kvz = kvz * np.exp(state.log_scale - features.log_scale)[..., None]
        after = outer.added(kvz, weights, value)
        np.matmul(np.swapaxes(features.query(), -1, -2), after, out=result.num_den)
        out = result.divided(MIN_READ_DENOMINATOR[after.itemsize])
    if out is None:
        return NotImplemented
    return out, State(after, features.log_scale.copy(), state.length + 1)


class _Slot(NamedTuple):
    """Where the next token waits, and views of all that a read with it takes."""

    weights: Floats
    value: Floats
    rows: Floats
    """The state and the features of the tokens that wait, ``(..., e + 1 + count, m)``."""
    values: Floats
    sums: Floats
    """Room for their products with a query's features."""
    shares: Floats
    """Of these, those of the tokens that wait."""


class Stepper:
    """A stream of tokens and what is remembered of it; one for each :class:`linattn.Decoder`.

    The state stands by columns, ``[v, 1]`` first, with the features of the tokens that wait as
    more rows below it: one product of matrix and vector reads both (3 us of a step less).
    """

    def __init__(self, problem: Problem, state: State) -> None:
        lead, (m, width) = state.kvz.shape[:-2], state.kvz.shape[-2:]
        self._features = _features(problem, np.array(state.log_scale))
        rows = np.zeros((*lead, width + PENDING, m), state.kvz.dtype)
        values = np.ones((*lead, PENDING, width), state.kvz.dtype)
        self._state, self._waiting = rows[..., :width, :], rows[..., width:, :]
        self._values = values
        self._state[...] = np.swapaxes(state.kvz, -1, -2)
        sums = np.empty((*lead, width + PENDING, 1), rows.dtype)
        self._read_of_state = sums[..., :width, 0]
        self._result = _Result(np.empty((*lead, 1, width), rows.dtype))
        # Views for each count of tokens: a step that made them would take 8 to 10 % longer.
        self._slots = [
            _Slot(
                self._waiting[..., i, :],
                values[..., i, :-1],
                rows[..., : width + i + 1, :],
                values[..., : i + 1, :],
                sums[..., : width + i + 1, :],
                np.swapaxes(sums[..., width : width + i + 1, :], -1, -2),
            )
            for i in range(PENDING)
        ]
        self._floor = floor_of(rows.dtype) * m
        self._length = state.length
        self._count = 0
        self._look()

    def _look(self) -> None:
        """Say what a denominator must be for a read of the state without a shift.

        Underflow of the query's features can have taken ``tiny`` for each column and unit of its
        sum, waiting tokens included.
        """
        most = float(self._state[..., -1, :].max()) + PENDING * exp(MAX_LOG_LEAD)
        self._least = max(MIN_READ_DENOMINATOR[self._state.itemsize], self._floor * most)
        self._tries_natural = True

    @property
    def state(self) -> State:
        """The state after the last step; later steps do not change it."""
        self._settle()
        kvz = np.swapaxes(self._state, -1, -2).copy(order="C")
        return State(kvz, self._features.log_scale.copy(), self._length)

    def _settle(self) -> None:
        """Add the tokens that wait."""
        if self._count:
            values = self._values[..., : self._count, :]
            self._state += np.swapaxes(values, -1, -2) @ self._waiting[..., : self._count, :]
            self._count = 0
            self._look()

    def step(self, query: Floats, key: Floats, value: Floats) -> Floats | None:
        """Return the output of a token; None leaves it, and the state before it, to others."""
        features, before, out = self._features, None, None
        try:
            with quiet():
                weights = features.take(query, key)
                if weights is None:
                    # What waits is on the old scale.
                    self._settle()
                    before = features.log_scale, self._state.copy()
                    features.rest_on(features.higher())
                    weights = features.take(query, key)
                    if weights is None:
                        return None
                    self._state *= np.exp(before[0] - features.log_scale)[..., None, :]
                elif self._count == PENDING:
                    self._settle()
                out = self._added_and_read(weights, value)
        finally:
            # Left to others or interrupted, a step leaves no trace.
            if out is None and before is not None:
                features.rest_on(before[0])
                self._state[...] = before[1]
        if out is not None:
            self._count += 1
            self._length += 1
        return out

    def _added_and_read(self, weights: Floats, value: Floats) -> Floats | None:
        """Let a token wait as the next one, and read with its query."""
        slot = self._slots[self._count]
        slot.weights[...] = weights
        slot.value[...] = value
        # Largest logs and shifts take 4 us of a step.
        if self._tries_natural:
            out = self._read(slot, self._features.natural_query(), self._least)
            self._tries_natural = out is not None
            if out is not None:
                return out
        return self._read(slot, self._features.query(), MIN_READ_DENOMINATOR[weights.itemsize])

    def _read(self, slot: _Slot, phi: Floats, least: float) -> Floats | None:
        """Read a state and the tokens that wait beside it."""
        np.matmul(slot.rows, phi, out=slot.sums)
        np.matmul(slot.shares, slot.values, out=self._result.num_den)
        np.add(self._result.rows, self._read_of_state, out=self._result.rows)
        return self._result.divided(least)


def stepper(problem: Problem, state: State) -> Any:
    """Return a :class:`Stepper` that goes on from a state."""
    return Stepper(problem, state) if _knows(problem, state) else NotImplemented

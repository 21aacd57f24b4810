"""One token at a time: few NumPy calls, and a state that is written to once in many tokens.

A :class:`Stepper` buffers the last tokens beside its state, as values and features on its log
scale. When the buffer is full, one product adds them to the state. A token whose output is not
finite, or may have lost more than rounding, is declined: the generic code takes it, from the state
before the token.
"""

from __future__ import annotations

import threading
from math import exp
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from linattn.typing import Declined, Exponential, Problem, State
from linattn_numpy import limits
from linattn_numpy.buffers import Floats
from linattn_numpy.features import supports_pointwise
from linattn_numpy.token_features import ExponentialToken, PointwiseToken, rebase_for
from linattn_numpy.tuning import MAX_BUFFERED_TOKENS, MAX_CACHED_TOKEN_ELEMENTS

Token: TypeAlias = ExponentialToken | PointwiseToken

MOST_OF_BUFFER = MAX_BUFFERED_TOKENS * exp(limits.MAX_LOG_LEAD)
"""Most that buffered tokens add to a sum."""


FLOORS = {
    size: [2 * exp(log) / float(np.finfo(f"f{size}").eps) for log in logs]
    for size, logs in limits.MIN_TOKEN_LOGS.items()
}
"""Least sums beside which a clipped feature is nothing, of a query and of a key."""


def _unsupported(problem: Problem, state: State) -> Declined | None:
    """Return why a problem is declined, or None; all leading axes must be equal."""
    lead, specs = problem.lead, (problem.query_spec, problem.key_spec)
    if 0 in lead:
        return limits.EMPTY
    leads = [x.shape[:-2] for x in (problem.query, problem.key, problem.value, state.kvz)]
    if leads != [lead] * 4:
        return Declined("arguments share leading axes")
    if problem.query.dtype != problem.dtype:
        return Declined(f"{problem.query.dtype} is accumulated in another dtype")
    if (problem.query_change, problem.key_change, problem.want_log) != (None, None, False):
        return Declined("the map changes coordinates first, or the log normalizer is asked for")
    if isinstance(specs[0], Exponential) and isinstance(specs[1], Exponential):
        return None
    if not all(supports_pointwise(spec) for spec in specs):
        return Declined("NumPy decodes exponential maps, elu + 1 and ReLU only")
    log = state.log_scale
    if log.any() and not np.all((np.abs(log) <= limits.MAX_LOG_LEAD) | (log == -np.inf)):
        return Declined("the state's log scale is far from 0, the log scale of the features")
    return None


def _token(problem: Problem, log_scale: Floats) -> Token:
    specs = problem.query_spec, problem.key_spec
    kind = ExponentialToken if isinstance(specs[0], Exponential) else PointwiseToken
    return kind(*specs, log_scale)


class _Readout:
    """Numerators and denominators of a token, ``num_den`` ``(..., 1, e + 1)``, with views."""

    def __init__(self, lead: tuple[int, ...], width: int, dtype: Any) -> None:
        self.num_den = np.empty((*lead, 1, width), dtype)
        self.rows = self.num_den[..., 0, :]
        self._numerators, self._denominators = self.rows[..., :-1], self.rows[..., -1:]
        self._flat = self.num_den.reshape(-1)
        self._flat_denominators = self._flat[width - 1 :: width]
        self._zeros = np.zeros_like(self._flat)

    def divided(self, min_denominator: float) -> Floats | Declined:
        """Numerator over denominator, a new array."""
        # 0 times a finite number is 0, times any other NaN: a product is faster than a sum.
        is_finite, den = self._flat.dot(self._zeros) == 0, self._flat_denominators
        if is_finite and den.item(den.argmin()) >= min_denominator:
            return np.divide(self._numerators, self._denominators)
        return limits.UNDERFLOWED


def _clip(token: Token, z: Floats, length: int) -> float:
    """Clip features of the next tokens if the sums ``z`` allow it; return the least denominator.

    The clipped weights of ``length`` keys and a full buffer must be negligible beside each sum. A
    query's features may be wrong by a clipped one, or by ``tiny``, for each unit of all sums.
    """
    flat, (of_query, of_key) = z.reshape(-1), FLOORS[z.itemsize]
    least, most = flat.item(flat.argmin()), flat.item(flat.argmax()) + MOST_OF_BUFFER
    most *= z.shape[-1]
    # Beside such sums the denominator of a max-stabilized read is large enough.
    is_large = least >= of_query * most and least >= of_key * (length + MAX_BUFFERED_TOKENS)
    token.clips = token.may_clip and is_large
    floor: float = of_query if token.clips else limits.floor_of(z.dtype)
    return max(limits.MIN_READ_DENOMINATOR[z.itemsize], floor * float(most))


# One step ---------------------------------------------------------------------------------------


class _OuterProduct:
    """Outer products of a token's features and ``[value, 1]``, as products of matrices.

    A second term is 0 times 0: a product over one term alone does not go to BLAS, and is slower
    even than a broadcast multiplication.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._values_and_one = np.zeros((*shape[:-2], 2, shape[-1]), dtype)
        self._phi = np.zeros((*shape[:-1], 2), dtype)
        self._value, self._weights = self._values_and_one[..., 0, :-1], self._phi[..., 0]
        self._values_and_one[..., 0, -1] = 1

    def added(self, kvz: Floats, weights: Floats, value: Floats) -> Floats:
        """Return ``kvz + weights [value, 1]^T``, stored by rows even if ``kvz`` is not.

        A state that was saved and restored is stored by rows, and must lead to the same bits.
        """
        self._value[...] = value
        self._weights[...] = weights
        after = np.matmul(self._phi, self._values_and_one)
        after += kvz
        return np.asarray(after)


_Workspace: TypeAlias = tuple[tuple[Any, ...], Token, _OuterProduct, _Readout]
"""Kind of a step, and the arrays that :func:`decode` needs for it beside the state."""

_cache = threading.local()
"""The workspace of the last token of :func:`decode` on this thread."""


def _workspace(problem: Problem, state: State) -> _Workspace:
    """Return this thread's last workspace, put on the state's scale, if it was of the same kind."""
    shape, dtype = state.kvz.shape, state.kvz.dtype
    kind = (problem.query_spec, problem.key_spec, shape, dtype)
    cached: _Workspace | None = getattr(_cache, "workspace", None)
    if cached is not None and cached[0] == kind:
        cached[1].rebase(state.log_scale)
        return cached
    token, readout = _token(problem, state.log_scale), _Readout(shape[:-2], shape[-1], dtype)
    made = kind, token, _OuterProduct(shape, dtype), readout
    if state.log_scale.size <= MAX_CACHED_TOKEN_ELEMENTS:
        _cache.workspace = made
    return made


def decode(problem: Problem) -> tuple[Floats, State] | Declined:
    """Add one token to a state: its output, and the state after it."""
    state = problem.state
    if state is None:
        return Declined("there is no state to continue from")
    if declined := _unsupported(problem, state):
        return declined
    query, key, value = (x[..., 0, :] for x in (problem.query, problem.key, problem.value))
    with np.errstate(all="ignore"):
        kvz, (_, token, outer, readout) = state.kvz, _workspace(problem, state)
        least = _clip(token, kvz[..., -1], state.length)
        weights = token.load(query, key, unshifted=False)
        if isinstance(weights, Declined):
            weights, factor = rebase_for(token, query, key, kvz[..., -1])
            if isinstance(weights, Declined):
                return weights
            kvz = kvz * factor[..., None]
        after = outer.added(kvz, weights, value)
        np.matmul(np.swapaxes(token.stabilized_query(), -1, -2), after, out=readout.num_den)
        out = readout.divided(least)
    if isinstance(out, Declined):
        return out
    return out, State(after, token.log_scale.copy(), state.length + 1)


# A stream ---------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """The place of the next token in the buffer, and views of the arrays that its read needs."""

    weights: Floats
    value: Floats
    rows: Floats
    """The state and the features of the buffered tokens, ``(..., e + 1 + count, m)``."""
    values: Floats
    products: Floats
    """Workspace for their products with a query's features."""
    scores: Floats
    """The products with the buffered tokens."""


class Stepper:
    """A stream of tokens and its state; one for each :class:`linattn.Decoder`.

    The state is transposed, ``[v, 1]`` first, with the features of the buffered tokens as more rows
    below it: one product of matrix and vector reads both.
    """

    def __init__(self, problem: Problem, state: State) -> None:
        (*lead, m, width), dtype = state.kvz.shape, state.kvz.dtype
        self._problem = problem
        self._token = _token(problem, np.array(state.log_scale))
        rows = np.zeros((*lead, width + MAX_BUFFERED_TOKENS, m), dtype)
        values = np.ones((*lead, MAX_BUFFERED_TOKENS, width), dtype)
        self._state, self._buffered = rows[..., :width, :], rows[..., width:, :]
        self._by_feature = np.swapaxes(rows, -1, -2)
        self._values = values
        self._state[...] = np.swapaxes(state.kvz, -1, -2)
        products = np.empty((*lead, width + MAX_BUFFERED_TOKENS, 1), dtype)
        self._read_of_state = products[..., :width, 0]
        self._readout = _Readout(tuple(lead), width, dtype)
        # Views for each count of tokens: a step that made them would take longer.
        self._slots = [
            _Slot(
                self._buffered[..., i, :],
                values[..., i, :-1],
                rows[..., : width + i + 1, :],
                values[..., : i + 1, :],
                products[..., : width + i + 1, :],
                np.swapaxes(products[..., width : width + i + 1, :], -1, -2),
            )
            for i in range(MAX_BUFFERED_TOKENS)
        ]
        self._length, self._count, self._next_look = state.length, 0, 0
        self._look()

    def _look(self) -> None:
        """Decide by the sums so far how the next tokens are read: unshifted first, and clipped.

        This is done after 1, 2, 4, 8 and 16 tokens of a stream, and then every 16.
        """
        self._min_denominator = _clip(self._token, self._sums(), self._length)
        self._reads_unshifted = True
        self._next_look = min(2 * self._next_look or 1, MAX_BUFFERED_TOKENS)

    def _sums(self) -> Floats:
        return np.asarray(
            self._state[..., -1, :] + self._buffered[..., : self._count, :].sum(axis=-2)
        )

    @property
    def state(self) -> State:
        """The state after the last step; later steps do not change it."""
        self._flush()
        kvz = np.swapaxes(self._state, -1, -2).copy(order="C")
        return State(kvz, self._token.log_scale.copy(), self._length)

    def copy(self) -> Stepper:
        """Return a stepper at the same token, with the same buffered tokens and the same bits."""
        kvz, log_scale = np.swapaxes(self._state, -1, -2), self._token.log_scale
        twin = Stepper(self._problem, State(kvz, log_scale, self._length))
        twin._buffered[...], twin._values[...] = self._buffered, self._values
        twin._token.clips = self._token.clips
        for name in ("_count", "_next_look", "_min_denominator", "_reads_unshifted"):
            setattr(twin, name, getattr(self, name))
        return twin

    def _flush(self) -> None:
        """Add the buffered tokens to the state."""
        if self._count:
            values = self._values[..., : self._count, :]
            self._state += np.swapaxes(values, -1, -2) @ self._buffered[..., : self._count, :]
            self._count = 0
            self._look()

    def step(self, query: Floats, key: Floats, value: Floats) -> Floats | Declined:
        """Return the output of a token, or decline and leave the state unchanged."""
        token = self._token
        before: tuple[Floats, Any, Any] | None = None
        out: Floats | Declined = limits.UNDERFLOWED
        try:
            with np.errstate(all="ignore"):
                if self._count == self._next_look:
                    self._flush() if self._count == MAX_BUFFERED_TOKENS else self._look()
                weights = token.load(query, key)
                if isinstance(weights, Declined):
                    before = token.log_scale, slice(0), 0
                    weights, factor = rebase_for(token, query, key, self._sums())
                    before = before[0], *self._rescale(factor)
                    if isinstance(weights, Declined):
                        return weights
                out = self._buffer_and_read(weights, value)
        finally:
            # A step that is declined or interrupted leaves the state unchanged.
            if before is not None and isinstance(out, Declined):
                token.rebase(before[0])
                self._by_feature[before[1]] = before[2]
        if not isinstance(out, Declined):
            self._count += 1
            self._length += 1
        return out

    def _rescale(self, factor: Floats) -> tuple[Any, Floats]:
        """Multiply the few features whose scale has changed; return their place and numbers."""
        place = np.nonzero(factor != 1)
        before = self._by_feature[place]
        after = before * factor[place][:, None]
        buffered = after[:, self._state.shape[-2] :]
        # Nothing beside the new key's 1.
        buffered[buffered < exp(limits.MIN_TOKEN_LOGS[factor.itemsize][1])] = 0
        self._by_feature[place] = after
        return place, before

    def _buffer_and_read(self, weights: Floats, value: Floats) -> Floats | Declined:
        """Write a token into the next slot, and read with its query."""
        slot = self._slots[self._count]
        slot.weights[...] = weights
        slot.value[...] = value
        # The largest log of each query, and its features less that, take longer.
        if self._reads_unshifted:
            out = self._read(slot, self._token.query_features)
            if not isinstance(out, Declined):
                return out
            self._reads_unshifted = False
        return self._read(slot, self._token.stabilized_query())

    def _read(self, slot: _Slot, phi: Floats) -> Floats | Declined:
        """Read the state and the buffered tokens."""
        np.matmul(slot.rows, phi, out=slot.products)
        np.matmul(slot.scores, slot.values, out=self._readout.num_den)
        np.add(self._readout.rows, self._read_of_state, out=self._readout.rows)
        return self._readout.divided(self._min_denominator)


def stepper(problem: Problem, state: State) -> Stepper | Declined:
    """Return a :class:`Stepper` that starts from a state."""
    return _unsupported(problem, state) or Stepper(problem, state)

"""Causal reads that divide each column of the state by its own normalizer."""

from __future__ import annotations

from linattn import _generic
from linattn._halves import halves, levels, on_right_halves, own_tokens, pad
from linattn._running import running
from linattn.typing import Array, Features, Partial, Problem, State, Tokens

__all__ = ["scan_means"]


def scan_means(
    problem: Problem, query: Tokens, key: Tokens, values_and_one: Array, state: State
) -> tuple[Partial, State]:
    """Causal attention of a block whose queries read means.

    With ``phi_ir / z_ir`` for ``phi_ir``, ``z_ir`` the normalizer of column r up to token i, it is
    an ordinary causal read.
    """
    log_q = _generic.evaluate(problem.query_spec, query).log
    log_k = _generic.evaluate(problem.key_spec, key).log
    answer = None if problem.lazy else _means_on_one_scale(log_q, log_k, values_and_one, state)
    return _means_by_halves(log_q, log_k, values_and_one, state) if answer is None else answer


def _means_on_one_scale(
    log_q: Array, log_k: Array, values_and_one: Array, state: State
) -> tuple[Partial, State] | None:
    """One scale for each column and all rows; None where an early row would lose digits to it.

    Weights lost to underflow are below rounding of a normalizer of at least ``eps^2``, and that
    bounds the exponents, whose rounding a weight multiplies. O(n m (d + e) + n^2 (m + e)) time.
    """
    xp = _generic.namespace(values_and_one)
    c = xp.maximum(state.log_scale, xp.max(log_k, axis=-2))
    shift = _generic.finite_shift(c, xp)
    weights_k = xp.exp(log_k - shift[..., None, :])
    before = state.kvz * xp.exp(state.log_scale - shift)[..., None]
    z = xp.cumulative_sum(weights_k, axis=-2) + before[..., None, :, -1]
    if not bool(xp.all(z >= float(xp.finfo(z.dtype).eps) ** 2)):
        return None
    row = xp.max(log_q, axis=-1, keepdims=True)
    weights_q = xp.exp(log_q - row) / z
    scores = xp.tril(xp.matmul(weights_q, xp.matrix_transpose(weights_k)))
    num_den = xp.matmul(scores, values_and_one) + xp.matmul(weights_q, before)
    if not bool(xp.all(xp.isfinite(num_den))):
        return None
    after = before + xp.matmul(xp.matrix_transpose(weights_k), values_and_one)
    return Partial(num_den, row), State(after, c, state.length + values_and_one.shape[-2])


def _means_by_halves(
    log_q: Array, log_k: Array, values_and_one: Array, state: State
) -> tuple[Partial, State]:
    """As :func:`scan_exact`: no row's scale depends on a later key, no branch on data.

    O(n m (d + e log n)) time, O(n m) memory.
    """
    n = values_and_one.shape[-2]
    size = 1 << (n - 1).bit_length()
    log_q, log_k, values_and_one = (
        pad(log_q, size),
        pad(log_k, size, -float("inf")),
        pad(values_and_one, size),
    )
    xp = _generic.namespace(values_and_one)
    before = State(state.kvz[..., None, :, -1:], state.log_scale[..., None, :], 0)
    each = State(xp.ones_like(log_k)[..., None], log_k, 0)
    z = _generic.merge(before, running(each, lazy=True))
    top = _generic.finite_shift(z.log_scale, xp)
    empty = z.z == 0
    log_q = log_q - xp.log(xp.where(empty, xp.ones_like(z.z), z.z))
    part = own_tokens(Features(log_q, None), Features(log_k - top, None), values_and_one)
    part = _generic.combine(part, _read_at(log_q, top, state))
    for half in levels(size):
        left = Features(halves(log_k, half, 0), None)
        seen = _generic.absorb(left, halves(values_and_one, half, 0), None)
        right = _read_at(halves(log_q, half, 1), halves(top, half, 1), seen)
        part = _generic.combine(part, on_right_halves(right, size))
    after = _generic.absorb(Features(log_k, None), values_and_one, state)
    after = State(after.kvz, after.log_scale, state.length + n)
    return Partial(part.num_den[..., :n, :], part.log[..., :n, :]), after


def _read_at(log_q: Array, top: Array, state: State) -> Partial:
    """Read a state with features ``exp(log_q - top)``."""
    # The two scales of keys first: they may be large, and their difference hardly is.
    log = log_q + (state.log_scale[..., None, :] - top)
    zero = _generic.namespace(top).zeros_like(state.log_scale)
    return _generic.read(Features(log, None), State(state.kvz, zero, 0))

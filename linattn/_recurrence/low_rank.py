"""A group of chunks by the rule that reads and erases along keys of its own: ``"dplr"``.

Token i reads ``x_i = b_i^T S_{i-1}``, then ``S_i = D_i S_{i-1} + k_i v_i^T - a_i x_i^T``. In a
chunk with the state S before it, P and R hold the products of ``q_i`` and ``b_i`` with the written
keys ``k_j`` and ``-a_j``. In P they are multiplied by the decay from j to i, in R by the decay from
j to i - 1; R is 0 from its diagonal on::

    X = B_before S + R [V; X]
    O = Q_before S + P [V; X]
    S' = G S + W_after^T [V; X]

R is made as P is, with queries ``b_{i+1}``, and moved down by one row. Letters: ``g`` chunks of
``c`` tokens, ``d`` dim, ``e`` value dim; an axis of 2 holds the arrays of ``k`` and of ``-a``.
"""

from __future__ import annotations

from typing import NamedTuple

from linattn._arrays import namespace
from linattn._generic.feature_vjps import sum_to
from linattn._generic.numerics import DECAYED, flushed
from linattn._recurrence.chunks import decay_gradient, unit_lower_inverse, width
from linattn._recurrence.decay import Decay, products, products_vjp
from linattn.typing import Array


class ErasingChunks(NamedTuple):
    """Tokens of a group, ``(..., g, c, d)``, the query multiplied by the scale."""

    query: Array
    key: Array
    value: Array
    """``(..., g, c, e)``."""
    erase_key: Array
    read_key: Array
    decay: Decay
    """Of log decays ``(..., g, 1, c, w)``."""


class _Inside(NamedTuple):
    """Products within the chunks of a group, which do not depend on the state before them."""

    written: Array
    """k and -a, ``(..., g, 2, c, d)``."""
    next_read: Array
    """Read key of the next token of the chunk, ``(..., g, 1, c, d)``, 0 for the last."""
    scores: Array
    """P, ``(..., g, 2, c, c)``."""
    next_scores: Array
    """R, one row further up."""
    inverse: Array
    """Of ``1`` minus the second half of R, ``(..., g, c, c)``."""
    query_before: Array
    next_before: Array
    """Read keys of the next tokens, times the decay up to this one."""
    after: Array
    total: Array
    """G, ``(..., g, w, 1)``."""


def _up(x: Array) -> Array:
    """Give each row the values of the next one; 0 for the last."""
    xp = namespace(x)
    return xp.concat([x[..., 1:, :], xp.zeros_like(x[..., :1, :])], axis=-2)


def _down(x: Array) -> Array:
    xp = namespace(x)
    return xp.concat([xp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def _inside(chunks: ErasingChunks) -> _Inside:
    xp, decay = namespace(chunks.key), chunks.decay
    written = xp.stack(xp.broadcast_arrays(chunks.key, -chunks.erase_key), axis=-3)
    next_read = _up(chunks.read_key)[..., None, :, :]
    next_scores = flushed(products(next_read, written, decay), DECAYED)
    before = decay.before[..., 0, :, :]
    return _Inside(
        written,
        next_read,
        products(chunks.query[..., None, :, :], written, decay),
        next_scores,
        unit_lower_inverse(-_down(next_scores[..., 1, :, :])),
        chunks.query * before,
        next_read[..., 0, :, :] * before,
        written * decay.after,
        xp.matrix_transpose(before[..., -1:, :]),
    )


def _stored(chunks: ErasingChunks, inside: _Inside, i: int, state: Array) -> Array:
    """V and X of a chunk, ``(..., 2, c, e)``."""
    xp, value = namespace(state), chunks.value[..., i, :, :]
    first = xp.matmul(chunks.read_key[..., i, :1, :], state)
    later = xp.matmul(inside.next_before[..., i, :-1, :], state)
    known = xp.matmul(_down(inside.next_scores[..., i, 0, :, :]), value)
    read = xp.matmul(inside.inverse[..., i, :, :], xp.concat([first, later], axis=-2) + known)
    return xp.stack(xp.broadcast_arrays(value, read), axis=-3)


def _next(inside: _Inside, i: int, state: Array, stored: Array) -> Array:
    return inside.total[..., i, :, :] * state + _both(
        _transpose(inside.after[..., i, :, :, :]), stored
    )


def _both(left: Array, right: Array) -> Array:
    """Sum of the products by k and by -a."""
    xp = namespace(left)
    return xp.sum(xp.matmul(left, right), axis=-3)


def _transpose(x: Array) -> Array:
    return namespace(x).matrix_transpose(x)


def scan_erasing(chunks: ErasingChunks, state: Array) -> tuple[Array, Array]:
    """Output ``(..., g, c, e)`` of a group after a state ``(..., d, e)``; the state after it."""
    xp, inside, outputs = namespace(state), _inside(chunks), []
    for i in range(chunks.key.shape[-3]):
        stored = _stored(chunks, inside, i, state)
        read = xp.matmul(inside.query_before[..., i, :, :], state)
        outputs.append(read + _both(inside.scores[..., i, :, :, :], stored))
        state = _next(inside, i, state, stored)
    return xp.stack(outputs, axis=-3), state


def pull_back_erasing(
    chunks: ErasingChunks, state: Array, grad_output: Array, grad_state: Array
) -> tuple[tuple[Array, ...], Array]:
    """Pull a group back: gradients in the order of `Recurrence.TOKENS`, and of the state before it.

    ``grad_state``, the gradient of the state after the group, has all leading axes of states.
    """
    xp, lead, count = namespace(state), tuple(grad_state.shape[:-2]), chunks.key.shape[-3]
    inside, states, stored = _inside(chunks), [], []
    for i in range(count):
        states.append(xp.broadcast_to(state, tuple(grad_state.shape)))
        both = _stored(chunks, inside, i, state)
        stored.append(xp.broadcast_to(both, (*lead, *both.shape[-3:])))
        state = _next(inside, i, state, both)

    from_scores = xp.matmul(_transpose(inside.scores), grad_output[..., None, :, :])
    from_scores = sum_to(from_scores, lead, 4)
    from_reads = sum_to(xp.matmul(_transpose(inside.query_before), grad_output), lead, 3)
    grad_states, grad_values, grad_reads = [], [], []
    for i in reversed(range(count)):
        grad_states.append(grad_state)
        grad_value, grad_read = _halves(
            from_scores[..., i, :, :, :]
            + xp.matmul(inside.after[..., i, :, :, :], grad_state[..., None, :, :])
        )
        grad_read = xp.matmul(_transpose(inside.inverse[..., i, :, :]), grad_read)
        known = _transpose(_down(inside.next_scores[..., i, 0, :, :]))
        grad_values.append(grad_value + xp.matmul(known, grad_read))
        grad_reads.append(grad_read)
        grad_state = inside.total[..., i, :, :] * grad_state + from_reads[..., i, :, :]
        next_before = _transpose(inside.next_before[..., i, :, :])
        first = _transpose(chunks.read_key[..., i, :1, :])
        grad_state = grad_state + xp.matmul(next_before, _up(grad_read))
        grad_state = grad_state + xp.matmul(first, grad_read[..., :1, :])

    together = [xp.stack(x[::-1], axis=-3) for x in (grad_states, grad_values, grad_reads)]
    of_stored = xp.stack(states, axis=-3), xp.stack(stored, axis=-4), grad_output, *together
    return _gradients(chunks, inside, *of_stored), grad_state


def _halves(x: Array) -> tuple[Array, Array]:
    return x[..., 0, :, :], x[..., 1, :, :]


def _gradients(
    chunks: ErasingChunks,
    inside: _Inside,
    states: Array,
    stored: Array,
    grad_output: Array,
    grad_states: Array,
    grad_values: Array,
    grad_reads: Array,
) -> tuple[Array, ...]:
    """Gradients of all tokens of a group."""
    xp, decay = namespace(states), chunks.decay
    lead, before = tuple(grad_states.shape[:-3]), decay.before[..., 0, :, :]
    sides = [
        (chunks.query[..., None, :, :], grad_output, inside.scores, inside.query_before),
        (inside.next_read, _up(grad_reads), inside.next_scores, inside.next_before),
    ]
    grads, grad_written, grad_log, log_before = [], 0, 0, 0
    for tokens, grad, scores, tokens_before in sides:
        grad_scores = xp.matmul(grad[..., None, :, :], _transpose(stored))
        of_tokens, of_written, log = products_vjp(
            grad_scores, tokens, inside.written, decay, scores
        )
        read = xp.matmul(grad, _transpose(states))
        grads.append(xp.sum(of_tokens, axis=-3) + read * before)
        grad_written = grad_written + sum_to(of_written, lead, 4)
        log_before = log_before + sum_to(tokens_before * read, lead, 3)
        if decay.forgets:
            grad_log = grad_log + sum_to(xp.sum(log, axis=-3), lead, 3)
    first = xp.matmul(grad_reads[..., :1, :], _transpose(states))
    grad_read = xp.concat([first, sum_to(grads[1], lead, 3)[..., :-1, :]], axis=-2)
    wrote = xp.matmul(stored, _transpose(grad_states)[..., None, :, :])
    grad_key, grad_erased = _halves(grad_written + wrote * decay.after)
    if decay.forgets:
        log_after = xp.sum(inside.after * wrote, axis=-3)
        remaining = xp.sum(inside.total * states * grad_states, axis=-1)[..., None, :]
        shares = (width(x, decay.ratios is not None) for x in (log_before, log_after, remaining))
        grad_log = decay_gradient(grad_log, *shares)
    log = grad_log if decay.forgets else None
    return grads[0], grad_key, grad_values, log, None, -grad_erased, grad_read

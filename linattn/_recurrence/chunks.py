"""A group of chunks: first the work that all share, then the state from one to the next.

In a chunk with the state S before it, ``A_ij = q_i.k_j`` and ``N_ij = beta_i k_i.k_j`` times the
decay from j to i, j <= i, N without its diagonal, and G the decay of the whole chunk::

    U = (I + N)^-1 diag(beta) (V - K_before S)      or V itself, without the delta rule
    O = Q_before S + A U
    S' = G S + K_after^T U

The rule "dplr" writes along two keys, k with the values and -a with what it reads, X. So it has
``[V; X]`` for U, and two triangles side by side for A. Token i reads before its own decay: its row
of ``B_before``, R and M is made with the decay up to i - 1. R holds the products of the read keys
with the keys, M with the ``-a``, both below the diagonal::

    X = (I - M)^-1 (B_before S + R V)

Letters: ``g`` chunks of ``c`` tokens, ``d`` dim, ``e`` value dim; ``_before`` and ``_after`` are
multiplied by :class:`Decay.before` and :class:`Decay.after`.
"""

from __future__ import annotations

from typing import NamedTuple

from linattn._arrays import namespace
from linattn._generic.feature_vjps import sum_to
from linattn._numerics import DECAYED, flushed
from linattn._recurrence.decay import (
    Decay,
    cross_blocks,
    join_blocks,
    products,
    products_vjp,
    triangle,
)
from linattn.typing import Array


class Chunks(NamedTuple):
    """Tokens of a group, ``(..., g, c, d)``, the query multiplied by the scale."""

    query: Array
    key: Array
    value: Array
    """``(..., g, c, e)``."""
    beta: Array
    """``(..., g, c, 1)``, None without the delta rule."""
    decay: Decay
    erase_key: Array = None
    """a, of the rule "dplr" only, as the read key."""
    read_key: Array = None


class Gradients(NamedTuple):
    """Cotangents of a group's tokens, shaped like them up to leading axes that they lack."""

    query: Array
    key: Array
    value: Array
    log_decay: Array
    """None without decay."""
    beta: Array
    """None without the delta rule."""
    erase_key: Array = None
    read_key: Array = None


class _Inside(NamedTuple):
    """Products within the chunks of a group, which do not depend on the state before them."""

    scores: Array
    """A."""
    lower: Array
    """N, and more on its diagonal, None without the delta rule."""
    inverse: Array
    """``(I + N)^-1``, None without the delta rule."""
    query_before: Array
    key_before: Array
    key_after: Array
    total: Array
    """G, ``(..., g, w, 1)``."""
    known: Array = None
    """R, None but for the rule "dplr", where ``lower`` is M and ``key_before`` ``B_before``."""


def _inside(chunks: Chunks) -> _Inside:
    xp = namespace(chunks.key)
    query, key, _, beta, decay, _, read_key = chunks
    if read_key is not None:
        return _inside_erasing(chunks)
    lower = inverse = None
    if beta is not None:
        lower = flushed(products(beta * key, key, decay), DECAYED)
        inverse = unit_lower_inverse(lower)
    return _Inside(
        products(query, key, decay),
        lower,
        inverse,
        query * decay.before,
        key * decay.before,
        key * decay.after,
        xp.matrix_transpose(decay.before[..., -1:, :]),
    )


def _inside_erasing(chunks: Chunks) -> _Inside:
    xp = namespace(chunks.key)
    query, key, _, _, decay, erase_key, read_key = chunks
    written = xp.broadcast_arrays(key, -erase_key)
    known, lower = (flushed(_down(products(_up(read_key), x, decay)), DECAYED) for x in written)
    return _Inside(
        xp.concat([products(query, x, decay) for x in written], axis=-1),
        lower,
        unit_lower_inverse(-lower),
        query * decay.before,
        read_key * _before_own(decay),
        xp.concat([x * decay.after for x in written], axis=-2),
        xp.matrix_transpose(decay.before[..., -1:, :]),
        known,
    )


def _before_own(decay: Decay) -> Array:
    """Share of the state before the chunk that is left at a token before its own decay."""
    before, xp = decay.before, namespace(decay.before)
    return xp.concat([xp.ones_like(before[..., :1, :]), before[..., :-1, :]], axis=-2)


def _up(x: Array) -> Array:
    """Give each row the numbers of the next one, and the last row zeros."""
    return namespace(x).concat([x[..., 1:, :], namespace(x).zeros_like(x[..., :1, :])], axis=-2)


def _down(x: Array) -> Array:
    return namespace(x).concat([namespace(x).zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def unit_lower_inverse(lower: Array) -> Array:
    """Invert ``I + lower``; only entries of ``lower`` below the diagonal are read.

    The inverse of a triangle of 2h tokens has the inverses L and R of its halves, and
    ``-R lower L`` across.
    Powers of ``lower`` would cancel: they grow where the inverse does not.
    """
    xp = namespace(lower)
    blocks, h = xp.ones_like(lower[..., :1])[..., None], 1
    while h < lower.shape[-1]:
        right, left = blocks[..., 1::2, :, :], blocks[..., 0::2, :, :]
        cross = flushed(xp.matmul(cross_blocks(lower, h), left), DECAYED)
        cross = flushed(-xp.matmul(right, cross), DECAYED)
        blocks, h = join_blocks(blocks, cross), 2 * h
    return blocks[..., 0, :, :]


def _stored(chunks: Chunks, inside: _Inside, i: int, state: Array) -> tuple[Array, Array]:
    """U of a chunk, and the error ``V - K_before S`` that a delta rule corrects."""
    value = chunks.value[..., i, :, :]
    if inside.inverse is None:
        return value, None
    xp = namespace(value)
    if inside.known is not None:
        read = xp.matmul(inside.key_before[..., i, :, :], state)
        read = read + xp.matmul(inside.known[..., i, :, :], value)
        read = xp.matmul(inside.inverse[..., i, :, :], read)
        return xp.concat(xp.broadcast_arrays(value, read), axis=-2), None
    missing = value - xp.matmul(inside.key_before[..., i, :, :], state)
    target = chunks.beta[..., i, :, :] * missing
    return xp.matmul(inside.inverse[..., i, :, :], target), missing


def _next(inside: _Inside, i: int, state: Array, stored: Array) -> Array:
    xp = namespace(state)
    added = xp.matmul(xp.matrix_transpose(inside.key_after[..., i, :, :]), stored)
    return inside.total[..., i, :, :] * state + added


def scan_chunks(chunks: Chunks, state: Array) -> tuple[Array, Array]:
    """Output ``(..., g, c, e)`` of a group after a state ``(..., d, e)``; the state after it."""
    xp = namespace(state)
    inside = _inside(chunks)
    outputs = []
    for i in range(chunks.key.shape[-3]):
        stored, _ = _stored(chunks, inside, i, state)
        read = xp.matmul(inside.query_before[..., i, :, :], state)
        outputs.append(read + xp.matmul(inside.scores[..., i, :, :], stored))
        state = _next(inside, i, state, stored)
    return xp.stack(outputs, axis=-3), state


def pull_back_chunks(
    chunks: Chunks, state: Array, grad_output: Array, grad_state: Array
) -> tuple[Gradients, Array]:
    """Pull a group back: gradients of its tokens, and of the state ``(..., d, e)`` before it.

    ``grad_state``, the gradient of the state after the group, has all leading axes of states.
    """
    xp, transpose = namespace(state), namespace(state).matrix_transpose
    lead, count = tuple(grad_state.shape[:-2]), chunks.key.shape[-3]
    inside = _inside(chunks)
    states, stored, missing = [], [], []
    for i in range(count):
        states.append(state)
        u, x = _stored(chunks, inside, i, state)
        stored.append(xp.broadcast_to(u, (*lead, *u.shape[-2:])))
        missing.append(x)
        state = _next(inside, i, state, u)

    from_queries = sum_to(xp.matmul(transpose(inside.scores), grad_output), lead, 3)
    from_reads = sum_to(xp.matmul(transpose(inside.query_before), grad_output), lead, 3)
    grad_states, grad_targets, grad_values = [], [], []
    for i in reversed(range(count)):
        grad_states.append(grad_state)
        grad_value = from_queries[..., i, :, :] + xp.matmul(
            inside.key_after[..., i, :, :], grad_state
        )
        grad_state = inside.total[..., i, :, :] * grad_state + from_reads[..., i, :, :]
        if inside.known is not None:
            c = inside.known.shape[-1]
            grad_value, grad_read = grad_value[..., :c, :], grad_value[..., c:, :]
            grad_target = xp.matmul(transpose(inside.inverse[..., i, :, :]), grad_read)
            grad_value = grad_value + xp.matmul(transpose(inside.known[..., i, :, :]), grad_target)
            key_before = inside.key_before[..., i, :, :]
            grad_state = grad_state + xp.matmul(transpose(key_before), grad_target)
            grad_targets.append(grad_target)
        elif inside.inverse is not None:
            grad_target = xp.matmul(transpose(inside.inverse[..., i, :, :]), grad_value)
            grad_value = chunks.beta[..., i, :, :] * grad_target
            key_before = inside.key_before[..., i, :, :]
            grad_state = grad_state - xp.matmul(transpose(key_before), grad_value)
            grad_targets.append(grad_target)
        grad_values.append(grad_value)

    def together(parts: list[Array]) -> Array:
        return xp.stack(parts[::-1], axis=-3)

    solution = _Solution(
        xp.stack([xp.broadcast_to(s, tuple(grad_state.shape)) for s in states], axis=-3),
        xp.stack(stored, axis=-3),
        None if chunks.beta is None else xp.stack(missing, axis=-3),
        grad_output,
        together(grad_states),
        None if inside.inverse is None else together(grad_targets),
        together(grad_values),
    )
    gradients = _gradients if inside.known is None else _gradients_erasing
    return gradients(chunks, inside, solution), grad_state


class _Solution(NamedTuple):
    """Results of a pass over a group in both directions, chunk by chunk."""

    states: Array
    """Before each chunk."""
    stored: Array
    missing: Array
    grad_output: Array
    grad_states: Array
    """Of the state after each chunk."""
    grad_targets: Array
    """By the arguments of the inverse, None without the delta rule."""
    grad_values: Array


def _gradients(chunks: Chunks, inside: _Inside, solution: _Solution) -> Gradients:
    """Gradients of all tokens of a group."""
    xp, transpose = namespace(chunks.key), namespace(chunks.key).matrix_transpose
    query, key, _, beta, decay, *_ = chunks
    states, stored, missing, grad_output, grad_states, grad_targets, grad_values = solution
    lead = tuple(grad_states.shape[:-3])
    c = key.shape[-2]

    grad_scores = xp.matmul(grad_output, transpose(stored))
    grad_query, grad_key, grad_log = products_vjp(grad_scores, query, key, decay, inside.scores)
    grad_key = sum_to(grad_key, lead, 3)
    read = xp.matmul(grad_output, transpose(states))
    written = xp.matmul(stored, transpose(grad_states))
    grad_query = grad_query + read * decay.before
    grad_key = grad_key + written * decay.after
    grad_beta = None
    found = xp.zeros_like(written)
    if beta is not None:
        found = -xp.matmul(grad_values, transpose(states))
        # Only entries of N below its diagonal were read.
        grad_lower = -xp.matmul(grad_targets, transpose(stored)) * triangle(c, key, strict=True)
        grad_rows, grad_earlier, log_inside = products_vjp(
            grad_lower, beta * key, key, decay, inside.lower
        )
        grad_beta = xp.sum(grad_targets * missing, axis=-1, keepdims=True)
        grad_beta = grad_beta + xp.sum(grad_rows * key, axis=-1, keepdims=True)
        grad_key = grad_key + beta * grad_rows + grad_earlier + found * decay.before
    if not decay.forgets:
        return Gradients(grad_query, grad_key, grad_values, None, grad_beta)

    before = sum_to(_width(inside.query_before * read, decay), lead, 3)
    before = before + _width(inside.key_before * found, decay)
    grad_log = sum_to(grad_log, lead, 3)
    if beta is not None:
        grad_log = grad_log + log_inside
    grad_log = _of_decays(decay, inside, solution, (grad_log, before, inside.key_after * written))
    return Gradients(grad_query, grad_key, grad_values, grad_log, grad_beta)


def _width(x: Array, decay: Decay) -> Array:
    return x if decay.ratios is None else namespace(x).sum(x, axis=-1, keepdims=True)


def _of_decays(
    decay: Decay, inside: _Inside, solution: _Solution, parts: tuple[Array, Array, Array]
) -> Array:
    """Gradient of log decays.

    ``parts`` are by products inside the chunk, by the shares of the state before it, added up from
    each token on, and by the shares that are left after it, added up to each token.
    """
    within, before, after = parts
    xp, c = namespace(within), before.shape[-2]
    remaining = xp.sum(inside.total * solution.states * solution.grad_states, axis=-1)
    return (
        within
        + xp.matmul(xp.matrix_transpose(triangle(c, before)), before)
        + xp.matmul(triangle(c, before, strict=True), _width(after, decay))
        + _width(remaining[..., None, :], decay)
    )


def _gradients_erasing(chunks: Chunks, inside: _Inside, solution: _Solution) -> Gradients:
    """Gradients of all tokens of a group by the rule "dplr"."""
    xp, transpose = namespace(chunks.key), namespace(chunks.key).matrix_transpose
    query, key, _, _, decay, erase_key, read_key = chunks
    states, stored, _, grad_output, grad_states, grad_reads, grad_values = solution
    lead, c = tuple(grad_states.shape[:-3]), key.shape[-2]

    read = xp.matmul(grad_output, transpose(states))
    found = xp.matmul(grad_reads, transpose(states))
    wrote = xp.matmul(stored, transpose(grad_states))
    grad_query, grad_read = read * decay.before, found * _before_own(decay)
    grads, grad_log = [], xp.zeros_like(found[..., :1])
    # Rows of R and M are one further down than their products.
    grad_next = _up(grad_reads)
    for i, (x, rows) in enumerate(((key, inside.known), (-erase_key, inside.lower))):
        half = slice(i * c, (i + 1) * c)
        written = transpose(stored[..., half, :])
        by_query, by_x, log = products_vjp(
            xp.matmul(grad_output, written), query, x, decay, inside.scores[..., half]
        )
        by_next, by_x_too, log_too = products_vjp(
            xp.matmul(grad_next, written), _up(read_key), x, decay, _up(rows)
        )
        grad_query, grad_read = grad_query + by_query, grad_read + _down(by_next)
        after = wrote[..., half, :] * decay.after
        grads.append(sum_to(by_x, lead, 3) + by_x_too + after)
        if decay.forgets:
            grad_log = grad_log + sum_to(log, lead, 3) + log_too
    if decay.forgets:
        before = sum_to(_width(inside.query_before * read, decay), lead, 3)
        before = before + _width(_up(inside.key_before * found), decay)
        left = inside.key_after * wrote
        after = left[..., :c, :] + left[..., c:, :]
        grad_log = _of_decays(decay, inside, solution, (grad_log, before, after))
    given = grad_log if decay.forgets else None
    return Gradients(grad_query, grads[0], grad_values, given, None, -grads[1], grad_read)

"""Causal attention of a block by divide and conquer: every scale holds visible keys only.

Each token reads itself; then, in runs of 2, 4, 8, ... tokens, right halves read left halves,
and a row's parts are combined by their own logs. No branch depends on data.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from linattn._arrays import namespace
from linattn._generic.decay import fade, faded_keys, faded_rows, near_one
from linattn._generic.features import query_features, row_features
from linattn._generic.states import absorb, combine, read
from linattn._numerics import exp_or_zero, finite_shift
from linattn.typing import Array, Exact, Features, Partial, Spec, State, Tokens
from linattn.typing._shifts import largest


def left_or_right(x: Array, half: int, side: int) -> Array:
    """Left (0) or right (1) halves of all runs of ``2 half`` tokens: a new axis before -2."""
    if x is None:
        return None
    xp = namespace(x)
    *lead, n, width = x.shape
    return xp.reshape(x, (*lead, n // (2 * half), 2, half, width))[..., side, :, :]


def scatter_right(part: Partial, n: int) -> Partial:
    """Scatter rows of right halves over all ``n`` rows; left halves see nothing."""
    xp = namespace(part.num_den)

    def scatter(right: Array, left: Array) -> Array:
        both = xp.concat([left, right], axis=-2)
        return xp.reshape(both, (*both.shape[:-3], n, both.shape[-1]))

    nothing = xp.full_like(part.log, -float("inf"))
    return Partial(scatter(part.num_den, xp.zeros_like(part.num_den)), scatter(part.log, nothing))


def level_sizes(n: int) -> Iterator[int]:
    half = 1
    while half < n:
        yield half
        half *= 2


def pad(x: Array, size: int, fill: float = 0.0) -> Array:
    """Append rows of one number; None stays None."""
    if x is None or x.shape[-2] == size:
        return x
    xp = namespace(x)
    shape = (*x.shape[:-2], size - x.shape[-2], x.shape[-1])
    return xp.concat([x, xp.full_like(xp.broadcast_to(x[..., :1, :], shape), fill)], axis=-2)


def scan_hierarchical(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
) -> tuple[Partial, State]:
    """Causal attention of a block in which no row's scale depends on a later key.

    Each token reads itself and the incoming state; then in ``log2(n)`` levels right halves read
    left halves, and a row's parts are combined by their own logs. No branch depends on data.
    O(n m (d + e log n)) time, O(n m) memory.
    """
    queries, log_row = query_features(query_spec, query)
    part, after = scan_features_hierarchical(
        queries, row_features(key_spec, key), values_and_one, state, key.log_decay
    )
    return Partial(part.num_den, part.log + log_row), after


def pad_features(features: Features, size: int, fill: float) -> Features:
    """Append rows with one log and no values: tokens cannot be, maps may reject their positions."""
    return Features(pad(features.log, size, fill), pad(features.values, size))


def scan_features_hierarchical(
    queries: Features,
    keys: Features,
    values_and_one: Array,
    state: State,
    log_decay: Array | None = None,
) -> tuple[Partial, State]:
    """:func:`scan_hierarchical` of a block that has been evaluated."""
    part = read_features_hierarchical(queries, keys, values_and_one, state, log_decay)
    if log_decay is not None:
        total = namespace(log_decay).sum(log_decay, axis=-2)
        keys, state = faded_keys(keys, log_decay), fade(state, total)
    return part, absorb(keys, values_and_one, state)


def read_features_hierarchical(
    queries: Features,
    keys: Features,
    values_and_one: Array,
    state: State,
    log_decay: Array | None = None,
) -> Partial:
    """Read the rows of a block that has been evaluated.

    A half decays to the border between the two, so that no exponent is a difference of long sums.
    """
    n = values_and_one.shape[-2]
    size = 1 << (n - 1).bit_length()
    queries, keys = pad_features(queries, size, 0.0), pad_features(keys, size, -float("inf"))
    values_and_one, log_decay = pad(values_and_one, size), pad(log_decay, size)
    if log_decay is None:
        part = read(queries, state)
    else:
        before, log = near_one(state)
        part = read(queries, before)
        part = part._replace(log=faded_rows(part.log + log, log_decay))
    part = combine(read_diagonal(queries, keys, values_and_one), part)
    for half in level_sizes(size):
        left = Features(*(left_or_right(x, half, 0) for x in keys))
        left = faded_keys(left, left_or_right(log_decay, half, 0))
        right = Features(*(left_or_right(x, half, 1) for x in queries))
        values = left_or_right(values_and_one, half, 0)
        # A product over one token alone does not go to BLAS.
        found = (
            read_diagonal(right, left, values)
            if half == 1
            else read(right, absorb(left, values, None))
        )
        log = faded_rows(found.log, left_or_right(log_decay, half, 1))
        part = combine(part, scatter_right(found._replace(log=log), size))
    return Partial(part.num_den[..., :n, :], part.log[..., :n, :])


def read_diagonal(queries: Features, keys: Features, values_and_one: Array) -> Partial:
    xp = namespace(values_and_one)
    e = queries.log + keys.log
    row = largest(e, keepdims=True)
    weights = exp_or_zero(e - finite_shift(row, xp))
    for values in (queries.values, keys.values):
        weights = weights if values is None else weights * values
    return Partial(xp.sum(weights, axis=-1, keepdims=True) * values_and_one, row)


def exact_causal_block(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, exact_block: Any
) -> Partial:
    """Causal softmax attention within a block: each token itself, then right halves read left."""
    xp, n = namespace(values_and_one), values_and_one.shape[-2]
    size = 1 << (n - 1).bit_length()
    log_weight = key.log_weight
    if log_weight is None and n < size:
        log_weight = xp.zeros_like(key.x[..., :1])
    query = Tokens(pad(query.x, size), None, 0)
    key = Tokens(pad(key.x, size), pad(log_weight, size, -float("inf")), 0)
    values_and_one = pad(values_and_one, size)
    logit = xp.sum(query.x * key.x, axis=-1, keepdims=True) * spec.scale
    logit = logit + (logit - logit)
    logit = logit if key.log_weight is None else logit + key.log_weight
    part = Partial(values_and_one + xp.zeros_like(logit), logit)
    for half in level_sizes(size):
        right = Tokens(left_or_right(query.x, half, 1), None, 0)
        left = key.each(partial(left_or_right, half=half, side=0))
        seen = exact_block(spec, right, left, left_or_right(values_and_one, half, 0))
        part = combine(part, scatter_right(seen, size))
    return Partial(part.num_den[..., :n, :], part.log[..., :n, :])

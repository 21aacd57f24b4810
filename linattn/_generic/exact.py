"""Softmax attention of one block of queries to one block of keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import array_api_compat

from linattn._arrays import namespace
from linattn._generic.states import combine
from linattn._numerics import exp_or_zero, finite_shift
from linattn.typing import Array, Exact, Partial, Tokens
from linattn.typing._shifts import largest


def exact_block(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    visible: Array | None = None,
    bias: Array | None = None,
) -> Partial:
    """Softmax attention of queries to keys. O(n s (d + e)) time, O(n s) memory.

    ``visible``, (n, s), says which pairs count; None means all. A value that is not finite
    reaches every row, even one that does not see it: the caller checks. ``bias``, (..., n, s), is
    added to the logits.

    A row whose logits all overflow to -inf becomes NaN: its weights have no known ratio.
    """
    xp = namespace(values_and_one)
    logits = xp.matmul(query.x * spec.scale, xp.matrix_transpose(key.x))
    row = largest(logits, keepdims=True)
    overflowed = row == -xp.inf
    if key.log_weight is not None:
        logits = logits + xp.matrix_transpose(key.log_weight)
        row = largest(logits, keepdims=True)
    if bias is not None:
        logits = logits + bias
        row = largest(logits, keepdims=True)
    if visible is not None:
        logits = xp.where(visible, logits, xp.full_like(logits, -float("inf")))
        row = largest(logits, keepdims=True)
    weights = exp_or_zero(logits - finite_shift(row, xp))
    # inf - inf: a constant NaN would alarm JAX's debug_nans in every call.
    infinite = xp.where(overflowed, row, xp.zeros_like(row))
    nan = infinite - infinite
    num_den = xp.where(overflowed, nan, xp.matmul(weights, values_and_one))
    return Partial(num_den, xp.where(overflowed, nan, row))


def exact_more(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, part: Partial
) -> Partial:
    """Add a block of keys to a partial of the same queries. Cost as :func:`exact_block`."""
    return combine(part, exact_block(spec, query, key, values_and_one))


def band_block(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, band: tuple[int, int]
) -> Partial:
    """Softmax attention of queries to the keys within a band. O(n s (d + e)) time, O(n s) memory.

    The driver's own way, without a backend, is by short blocks.
    """
    visible = in_band(values_and_one, query.x.shape[-2], key.x.shape[-2], band)
    return exact_block(spec, query, key, values_and_one, visible)


def in_band(like: Array, n: int, s: int, band: tuple[int, int]) -> Array:
    """Return which of s keys n queries see, ``(n, s)``: query i sees i + low to i + high."""
    xp, device = namespace(like), array_api_compat.device(like)
    offset = xp.arange(s, device=device) - xp.arange(n, device=device)[:, None]
    return (offset >= band[0]) & (offset <= band[1])


def beside(x: Array, g: int) -> Array:
    """Return tokens of each of g blocks and of the blocks that follow it; None stays None."""
    if x is None:
        return None
    width = x.shape[-3] - g + 1
    if width == 1:
        return x
    xp = namespace(x)
    if g == 1:
        *lead, count, n, d = x.shape
        return xp.reshape(x, (*lead, 1, count * n, d))
    return xp.concat([x[..., i : i + g, :, :] for i in range(width)], axis=-2)


def exact_pairs(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    visible: Array | None,
    bias: Array | None,
    lazy: bool,
    exact_block: Any = exact_block,
) -> Partial:
    """Softmax attention to the keys that each query sees; no hidden NaN or inf reaches a query.

    ``visible`` and ``bias`` as in :func:`exact_block`. ``exact_block``, which may be a backend's,
    is not called if there is a bias.
    """
    xp = namespace(values_and_one)
    if visible is None and bias is None:
        return exact_block(spec, query, key, values_and_one)  # type: ignore[no-any-return]
    if bias is not None:
        exact_block = partial(_biased, bias)
    if not lazy:
        part: Partial = exact_block(spec, query, key, values_and_one, visible)
        if bool(xp.all(xp.isfinite(part.num_den))):
            return part
    if bias is not None:
        # Not all logits may be numbers.
        counts = bias > -xp.inf
        visible = counts if visible is None else visible & counts
    finite = xp.where(xp.isfinite(values_and_one), values_and_one, xp.zeros_like(values_and_one))
    num_den, log, _ = exact_block(spec, query, key, finite, visible)
    sees = _sees(key, visible, num_den)
    for infinity in (xp.inf, -xp.inf):
        holds = xp.isnan(values_and_one) | (values_and_one == infinity)
        reached = xp.matmul(sees, xp.astype(holds, num_den.dtype)) > 0
        zeros = xp.zeros_like(num_den)
        num_den = num_den + xp.where(reached, zeros + infinity, zeros)
    return Partial(num_den, log)


def _biased(
    bias: Array, spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, visible: Any
) -> Partial:
    return exact_block(spec, query, key, values_and_one, visible, bias)


def _sees(key: Tokens, visible: Array | None, like: Array) -> Array:
    """Which queries see which keys, as numbers 0 and 1 of a dtype, ``(..., n, s)``."""
    xp, device = namespace(like), array_api_compat.device(like)
    seen = xp.ones((like.shape[-2], key.x.shape[-2]), dtype=xp.bool, device=device)
    if visible is not None:
        seen = seen & visible
    if key.log_weight is not None:
        seen = seen & (xp.matrix_transpose(key.log_weight) > -xp.inf)
    return xp.astype(seen, like.dtype)

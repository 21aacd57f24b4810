"""Gradients of one causal block in array-API code.

Blocks are divided, so that every scale holds visible tokens only: no weight exceeds 1 for positive
maps, and no branch depends on data. ``n`` tokens, ``m`` features, ``e`` value dim.
"""

from __future__ import annotations

from typing import Any

from linattn._arrays import namespace
from linattn._generic.block_vjps import (
    absorb_rows,
    adjoint_cotangent,
    key_gradient,
    query_cotangent,
    read_by,
    row_cotangent,
    row_scale,
    times_values,
)
from linattn._generic.decay import faded_keys, faded_rows
from linattn._generic.feature_vjps import features_vjp, sum_to
from linattn._generic.features import scaled_features
from linattn._generic.hierarchical import (
    left_or_right,
    level_sizes,
    pad,
    pad_features,
    scan_features_hierarchical,
)
from linattn._generic.numerics import finite_shift
from linattn.typing import Array, Features, RowScale, Spec, State, Tokens

__all__ = ["key_triangle", "query_triangle", "scan_key_vjp", "scan_query_vjp", "scan_vjp"]


def scan_query_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    grad_output: Array,
) -> tuple[Array, RowScale, State]:
    """Gradient of a causal block of queries, their scales, and the state after the block.

    O(n m (d + e log n) + n^2 (m + e)) time, O(n m) memory.
    """
    queries, largest = scaled_features(query_spec, query)
    keys, _ = scaled_features(key_spec, key)
    part, after = scan_features_hierarchical(queries, keys, values_and_one, state)
    scale = row_scale(part, grad_output)
    g1 = row_cotangent(scale, grad_output)
    cotangent = read_by(queries, state, g1, scale.log)
    cotangent = cotangent + query_triangle(queries, keys, values_and_one, g1, scale.log)
    gradient = features_vjp(query_spec, query, query_cotangent(queries, cotangent, largest))
    return gradient, scale, after


def scan_key_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    adjoint: State,
    grad_num_den: Array,
    log: Array,
) -> tuple[Array, Array, State]:
    """Gradients of a causal block of keys and of ``[v, 1]``, and the adjoint before the block.

    O(n m (d + e) + n^2 (m + e)) time, O(n m) memory.
    """
    queries, _ = scaled_features(query_spec, query)
    keys, largest = scaled_features(key_spec, key)
    cotangent, grad_values_and_one = adjoint_cotangent(keys, values_and_one, adjoint)
    lead = tuple(adjoint.log_scale.shape[:-1])
    inner_key, inner_values_and_one = key_triangle(queries, keys, values_and_one, grad_num_den, log)
    cotangent, grad_values_and_one = (
        cotangent + sum_to(inner_key, lead, 2),
        grad_values_and_one + sum_to(inner_values_and_one, lead, 2),
    )
    gradient = key_gradient(
        key_spec, key, keys, largest, values_and_one, cotangent, grad_values_and_one
    )
    return gradient, grad_values_and_one, absorb_rows(queries, grad_num_den, log, adjoint)


def scan_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    adjoint: State,
    grad_output: Array,
    scan_query_vjp: Any = scan_query_vjp,
    scan_key_vjp: Any = scan_key_vjp,
) -> tuple[Array, Array, Array, State]:
    """Gradients of a causal block by both sides, one after the other. Cost as these two."""
    block = (query_spec, key_spec, query, key, values_and_one)
    gradient, scale, _ = scan_query_vjp(*block, state, grad_output)
    grad_num_den = row_cotangent(scale, grad_output)
    return gradient, *scan_key_vjp(*block, adjoint, grad_num_den, scale.log)


class _Padded:
    """A causal block with a power of two of rows, in the end rows that neither see nor are seen."""

    def __init__(
        self,
        queries: Features,
        keys: Features,
        values_and_one: Array,
        g1: Array,
        log: Array,
        log_decay: Array,
    ) -> None:
        self.n = values_and_one.shape[-2]
        self.size = 1 << (self.n - 1).bit_length()
        self.queries = pad_features(queries, self.size, 0.0)
        self.keys = pad_features(keys, self.size, -float("inf"))
        self.values_and_one, self.g1 = pad(values_and_one, self.size), pad(g1, self.size)
        self.log = pad(log, self.size, float("inf"))
        self.log_decay = pad(log_decay, self.size)

    def diagonal(self) -> tuple[Array, Array]:
        """Each token with itself: its weights without values, and ``g1.[v, 1]``."""
        xp = namespace(self.values_and_one)
        weights = xp.exp(self.queries.log + self.keys.log - self.log)
        return weights, xp.sum(self.g1 * self.values_and_one, axis=-1, keepdims=True)

    def left(self, half: int) -> tuple[Features, Array]:
        keys = Features(*(left_or_right(x, half, 0) for x in self.keys))
        keys = faded_keys(keys, left_or_right(self.log_decay, half, 0))
        return keys, left_or_right(self.values_and_one, half, 0)

    def right(self, half: int) -> tuple[Features, Array, Array]:
        queries = Features(*(left_or_right(x, half, 1) for x in self.queries))
        log = faded_rows(queries.log, left_or_right(self.log_decay, half, 1))
        queries = queries._replace(log=log)
        return queries, left_or_right(self.g1, half, 1), left_or_right(self.log, half, 1)


def query_triangle(
    queries: Features,
    keys: Features,
    values_and_one: Array,
    g1: Array,
    log: Array,
    log_decay: Array = None,
    *,
    sees_itself: bool = True,
) -> Array:
    """Cotangent of queries by the keys of their own block, themselves included or not."""
    xp = namespace(values_and_one)
    block = _Padded(queries, keys, values_and_one, g1, log, log_decay)
    weights, products = block.diagonal()
    total = times_values(weights * products, block.keys.values)
    if not sees_itself:
        total = xp.zeros_like(total)
    for half in level_sizes(block.size):
        left, v = block.left(half)
        right, g, row = block.right(half)
        # Where nothing is to the left the factor is 0, and not infinite times 0.
        top = xp.max(left.log, axis=-2, keepdims=True)
        k = times_values(xp.exp(left.log - finite_shift(top, xp)), left.values)
        products = xp.matmul(g, xp.matrix_transpose(v))
        part = xp.exp(right.log + top - row) * xp.matmul(products, k)
        total = total + _scatter(part, block.size, 1)
    return total[..., : block.n, :]


def key_triangle(
    queries: Features,
    keys: Features,
    values_and_one: Array,
    g1: Array,
    log: Array,
    inner: Array = None,
    *,
    log_decay: Array = None,
    sees_itself: bool = True,
) -> tuple[Array, Array]:
    """Cotangents of keys and of ``[v, 1]`` by the queries of their own block.

    ``inner`` as in :func:`absorb_rows`.
    """
    xp = namespace(values_and_one)
    block = _Padded(queries, keys, values_and_one, g1, log, log_decay)
    inner = pad(inner, block.size)
    weights, products = block.diagonal()
    weights = times_values(weights, block.queries.values)
    total = weights * (products if inner is None else products - inner)
    whole = xp.sum(times_values(weights, block.keys.values), axis=-1, keepdims=True)
    total_values_and_one = whole * block.g1
    if not sees_itself:
        total, total_values_and_one = xp.zeros_like(total), xp.zeros_like(total_values_and_one)
    for half in level_sizes(block.size):
        left, v = block.left(half)
        right, g, row = block.right(half)
        e = right.log - row
        top = xp.max(e, axis=-2, keepdims=True)
        q = times_values(xp.exp(e - finite_shift(top, xp)), right.values)
        k = xp.exp(left.log + top)
        read = xp.matmul(xp.matmul(v, xp.matrix_transpose(g)), q)
        if inner is not None:
            read = read - xp.sum(q * left_or_right(inner, half, 1), axis=-2, keepdims=True)
        scores = xp.matmul(times_values(k, left.values), xp.matrix_transpose(q))
        total = total + _scatter(k * read, block.size, 0)
        total_values_and_one = total_values_and_one + _scatter(xp.matmul(scores, g), block.size, 0)
    return total[..., : block.n, :], total_values_and_one[..., : block.n, :]


def _scatter(x: Array, n: int, side: int) -> Array:
    """Scatter rows of left (0) or right (1) halves over all ``n`` rows; the others get 0."""
    xp = namespace(x)
    both = [x, xp.zeros_like(x)] if side == 0 else [xp.zeros_like(x), x]
    joined = xp.concat(both, axis=-2)
    return xp.reshape(joined, (*joined.shape[:-3], n, joined.shape[-1]))

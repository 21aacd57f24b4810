"""Gradients of one causal block in array-API code, for rows whose cotangents are given.

Blocks are divided, so that every scale holds visible tokens only: no weight exceeds 1 for positive
maps, and no branch depends on data. ``n`` tokens, ``m`` features, ``e`` value dim.
"""

from __future__ import annotations

from typing import NamedTuple

from linattn._arrays import namespace
from linattn._generic.block_vjps import (
    Rows,
    Side,
    absorb_rows,
    adjoint_cotangent,
    divided_rows,
    inner_products,
    read_by,
    row_sum,
    times_values,
)
from linattn._generic.decay import fade, faded_keys, faded_rows
from linattn._generic.feature_vjps import sum_to
from linattn._generic.hierarchical import (
    left_or_right,
    level_sizes,
    pad,
    pad_features,
    read_features_hierarchical,
)
from linattn._generic.states import by_feature
from linattn._numerics import exp_or_zero, finite_shift, flushed
from linattn.typing import Array, Features, Spec, State, Tokens
from linattn.typing._shifts import largest


def scan_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    adjoint: State,
    grad_output: Array,
) -> tuple[Array, Array, Array, State]:
    """Gradients of a causal block by queries, keys and ``[v, 1]``, and the adjoint before it.

    O(n m (d + e log n) + n^2 (m + e)) time, O(n m) memory.
    """
    block = BlockPullback((query_spec, key_spec), query, key, values_and_one)
    found = block.pull(block.divided_rows(state, grad_output), state, adjoint)
    return found.query, found.key, found.values_and_one, found.adjoint


class BlockGradients(NamedTuple):
    """Gradients of a causal block, and the adjoint before it."""

    query: Array
    term: Array
    """Gradient by the log of a factor on a row, ``(..., n, 1)``; None, for 0, if divided."""
    key: Array
    values_and_one: Array
    decayed: tuple[Array, Array]
    """Gradients by logs of factors on each row, and on each key, in pairs of two tokens."""
    adjoint: State


class BlockPullback:
    """A causal block, evaluated, to pull its rows back."""

    def __init__(
        self,
        specs: tuple[Spec, Spec],
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
    ) -> None:
        self._sides = Side(specs[0], query), Side(specs[1], key)
        self._queries, self._keys = (side.features for side in self._sides)
        self._values, self._log_decay = values_and_one, key.log_decay

    def divided_rows(self, state: State, grad_output: Array) -> Rows:
        """Read the rows of the block, and return the cotangents that division gives them."""
        part = read_features_hierarchical(
            self._queries, self._keys, self._values, state, self._log_decay
        )
        return divided_rows(part, grad_output)

    def pull(self, rows: Rows, state: State, adjoint: State) -> BlockGradients:
        """Pull back through rows, with the state before the block and the adjoint after it."""
        g1, log, decay = rows.g1, rows.log, self._log_decay
        pairs = Triangle(self._queries, self._keys, self._values, g1, log, decay)
        at_start = self._queries._replace(log=faded_rows(self._queries.log, decay))
        of_query = read_by(at_start, by_feature(state), g1, log) + pairs.of_queries()
        at_end, lead = faded_keys(self._keys, decay), tuple(adjoint.log_scale.shape[:-1])
        read_key, read_values = adjoint_cotangent(at_end, self._values, adjoint)
        in_key, in_values = pairs.of_keys()
        of_key = read_key + sum_to(in_key, lead, 2)
        of_values = read_values + sum_to(in_values, lead, 2)
        decayed = row_sum(of_query, self._queries), inner_products(self._values, of_values)
        in_query, in_key, in_values = pairs.diagonal()
        of_query, of_key = of_query + in_query, of_key + sum_to(in_key, lead, 2)
        of_values = of_values + sum_to(in_values, lead, 2)
        if decay is not None:
            adjoint = fade(adjoint, namespace(decay).sum(decay, axis=-2))
        before = absorb_rows(at_start, g1, log, adjoint)
        query, key = self._sides
        gradient, term = query.query_gradient(of_query, divided=rows.divided)
        of_key = key.key_gradient(self._values, of_key, of_values)
        return BlockGradients(gradient, term, of_key, of_values, decayed, before)


class _Level(NamedTuple):
    """Left halves of all runs of ``2 half`` tokens, and the right halves that read them."""

    half: int
    left: Features
    right: Features
    g1: Array
    row: Array
    products: Array
    """Inner products of the rows of ``g1`` with the ``[v, 1]`` of the left."""


class Triangle:
    """Pairs of two tokens of a causal block, level by level; ``g1``, ``log`` as in :class:`Rows`.

    The block is padded to a power of two, with rows that see no key and keys that no row sees.
    """

    def __init__(
        self,
        queries: Features,
        keys: Features,
        values_and_one: Array,
        g1: Array,
        log: Array,
        log_decay: Array = None,
    ) -> None:
        self._n = values_and_one.shape[-2]
        self._size = 1 << (self._n - 1).bit_length()
        self._queries = pad_features(queries, self._size, 0.0)
        self._keys = pad_features(keys, self._size, -float("inf"))
        self._values_and_one, self._g1 = pad(values_and_one, self._size), pad(g1, self._size)
        self._log = pad(log, self._size, float("inf"))
        self._log_decay = pad(log_decay, self._size)
        e = self._queries.log + self._keys.log - self._log
        self._weights = namespace(e).exp(e)
        """Weight of each token's pair with itself, without values."""

        self._levels = [self._level(half) for half in level_sizes(self._size)]

    def _level(self, half: int) -> _Level:
        keys = Features(*(left_or_right(x, half, 0) for x in self._keys))
        keys = faded_keys(keys, left_or_right(self._log_decay, half, 0))
        queries = Features(*(left_or_right(x, half, 1) for x in self._queries))
        log = faded_rows(queries.log, left_or_right(self._log_decay, half, 1))
        values = left_or_right(self._values_and_one, half, 0)
        g1, xp = left_or_right(self._g1, half, 1), namespace(self._g1)
        products = xp.matmul(g1, xp.matrix_transpose(values))
        row = left_or_right(self._log, half, 1)
        return _Level(half, keys, queries._replace(log=log), g1, row, products)

    def of_queries(self) -> Array:
        """Cotangents of queries by the keys before them."""
        xp = namespace(self._g1)
        total = xp.zeros_like(times_values(self._weights, self._keys.values))
        for _, left, right, _, row, products in self._levels:
            # Where nothing is to the left the factor is 0, and not infinite times 0.
            top = largest(left.log, axis=-2, keepdims=True)
            k = times_values(exp_or_zero(left.log - finite_shift(top, xp)), left.values)
            part = exp_or_zero(right.log + top - row) * xp.matmul(products, k)
            total = total + _scatter(part, self._size, 1)
        return total[..., : self._n, :]

    def of_keys(self, inner: Array = None) -> tuple[Array, Array]:
        """Cotangents of keys and of ``[v, 1]`` by the queries after them.

        ``inner`` as in :func:`absorb_rows`.
        """
        xp, inner = namespace(self._g1), pad(inner, self._size)
        total = xp.zeros_like(times_values(self._weights, self._queries.values))
        of_values = xp.zeros_like(self._weights[..., :1] * self._g1)
        for half, left, right, g1, row, products in self._levels:
            e = right.log - row
            top = largest(e, axis=-2, keepdims=True)
            q = times_values(exp_or_zero(e - finite_shift(top, xp)), right.values)
            k = exp_or_zero(left.log + top)
            read = xp.matmul(xp.matrix_transpose(products), q)
            if inner is not None:
                read = read - xp.sum(q * left_or_right(inner, half, 1), axis=-2, keepdims=True)
            scores = flushed(xp.matmul(times_values(k, left.values), xp.matrix_transpose(q)))
            total = total + _scatter(k * read, self._size, 0)
            of_values = of_values + _scatter(xp.matmul(scores, g1), self._size, 0)
        return total[..., : self._n, :], of_values[..., : self._n, :]

    def diagonal(self, inner: Array = None) -> tuple[Array, Array, Array]:
        """Cotangents of queries, keys and ``[v, 1]`` by each token itself; ``inner`` as above."""
        products = inner_products(self._g1, self._values_and_one)
        of_query = times_values(self._weights * products, self._keys.values)
        if inner is not None:
            products = products - pad(inner, self._size)
        weights = times_values(self._weights, self._queries.values)
        whole = row_sum(weights, self._keys)
        found = of_query, weights * products, whole * self._g1
        return found[0][..., : self._n, :], found[1][..., : self._n, :], found[2][..., : self._n, :]


def _scatter(x: Array, n: int, side: int) -> Array:
    """Scatter rows of left (0) or right (1) halves over all ``n`` rows; the others get 0."""
    xp = namespace(x)
    both = [x, xp.zeros_like(x)] if side == 0 else [xp.zeros_like(x), x]
    joined = xp.concat(both, axis=-2)
    return xp.reshape(joined, (*joined.shape[:-3], n, joined.shape[-1]))

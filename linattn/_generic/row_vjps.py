"""Gradients of one block for rows whose cotangent of ``[numerator, denominator]`` is given.

They need not be averages: what a factor on a query would change is part of the result. ``n``
tokens, ``m`` features, ``e`` value dim.
"""

from __future__ import annotations

from typing import NamedTuple

from linattn._arrays import namespace
from linattn._generic.block_vjps import (
    absorb_rows,
    adjoint_cotangent,
    key_gradient,
    read_by,
    times_values,
)
from linattn._generic.causal_vjps import key_triangle, query_triangle
from linattn._generic.decay import fade, faded_keys, faded_rows
from linattn._generic.feature_vjps import features_vjp, sum_to
from linattn._generic.features import scaled_features
from linattn._generic.states import absorb
from linattn.typing import Array, Features, Spec, State, Tokens

__all__ = ["RowBlock", "Rows", "row_keys_vjp", "row_queries_vjp", "row_read_vjp"]


class Rows(NamedTuple):
    """Cotangents of rows, ``(..., n, e + 1)`` on the scales ``exp(log)``, ``(..., n, 1)``."""

    g1: Array
    log: Array


class RowBlock(NamedTuple):
    """A causal block with the cotangents of its rows."""

    specs: tuple[Spec, Spec]
    query: Tokens
    key: Tokens
    values_and_one: Array
    rows: Rows
    from_the_end: bool = False
    """Whether rows read the tokens after them, and not themselves."""


class _Evaluated(NamedTuple):
    queries: Features
    keys: Features
    values_and_one: Array
    g1: Array
    log: Array
    log_decay: Array
    largest: tuple[Array, Array]
    """What was moved out of the values of queries and of keys."""

    def at_start(self) -> Features:
        """Return queries as they read the state before the block."""
        return self.queries._replace(log=faded_rows(self.queries.log, self.log_decay))

    def at_end(self) -> Features:
        """Return keys as the state after the block has them."""
        return faded_keys(self.keys, self.log_decay)

    def faded(self, state: State) -> State:
        """State, or adjoint, over the whole block."""
        if self.log_decay is None:
            return state
        return fade(state, namespace(state.kvz).sum(self.log_decay, axis=-2))


def _evaluate(block: RowBlock) -> _Evaluated:
    """Features of a block, in the order in which it is scanned."""
    queries, of_query = scaled_features(block.specs[0], block.query)
    keys, of_key = scaled_features(block.specs[1], block.key)
    found = _Evaluated(
        queries,
        keys,
        block.values_and_one,
        *block.rows,
        block.key.log_decay,
        (of_query, of_key),
    )
    if not block.from_the_end:
        return found
    queries, keys = (Features(*map(_flip, features)) for features in (queries, keys))
    return found._replace(queries=queries, keys=keys, **_flipped(found))


def _flipped(found: _Evaluated) -> dict[str, Array]:
    names = ("values_and_one", "g1", "log", "log_decay")
    return {name: _flip(getattr(found, name)) for name in names}


def _flip(x: Array) -> Array:
    return None if x is None else namespace(x).flip(x, axis=-2)


def row_queries_vjp(block: RowBlock, state: State) -> tuple[Array, Array, Array, State]:
    """Gradient of queries after a state, their row terms, and the state after the block.

    Row terms twice: of all that a row reads, and of what has decayed before.
    """
    found = _evaluate(block)
    cotangent = read_by(found.at_start(), state, found.g1, found.log)
    inner = (found.queries, found.keys, found.values_and_one, found.g1, found.log)
    cotangent = cotangent + query_triangle(*inner, found.log_decay, sees_itself=False)
    decayed = _row_sum(cotangent, found.queries)
    if not block.from_the_end:
        weights, products = _self_weights(found)
        cotangent = cotangent + times_values(weights * products, found.keys.values)
    after = absorb(found.at_end(), found.values_and_one, found.faded(state))
    queries = found.queries
    if block.from_the_end:
        queries, cotangent, decayed = (
            Features(*map(_flip, queries)),
            _flip(cotangent),
            _flip(decayed),
        )
    evaluated = queries, found.largest[0]
    return *_pulled(block.specs[0], block.query, evaluated, cotangent), decayed, after


def _self_weights(found: _Evaluated) -> tuple[Array, Array]:
    """Weights of tokens for themselves, without values, and ``g1.[v, 1]``."""
    xp = namespace(found.g1)
    weights = xp.exp(found.queries.log + found.keys.log - found.log)
    return weights, xp.sum(found.g1 * found.values_and_one, axis=-1, keepdims=True)


def _row_sum(cotangent: Array, features: Features) -> Array:
    """Cotangent of a log that would be added to all features of a token."""
    return namespace(cotangent).sum(
        times_values(cotangent, features.values), axis=-1, keepdims=True
    )


def row_keys_vjp(block: RowBlock, adjoint: State) -> tuple[Array, Array, Array, State]:
    """Gradients of keys and of ``[v, 1]``, and the adjoint before the block.

    Between them what a factor on each key would change in rows that it has decayed for.
    """
    found = _evaluate(block)
    xp, lead = namespace(found.g1), tuple(adjoint.log_scale.shape[:-1])
    cotangent, grad_values_and_one = adjoint_cotangent(
        found.at_end(), found.values_and_one, adjoint
    )
    inner = (found.queries, found.keys, found.values_and_one, found.g1, found.log)
    own_key, own_values_and_one = key_triangle(*inner, log_decay=found.log_decay, sees_itself=False)
    cotangent = cotangent + sum_to(own_key, lead, 2)
    grad_values_and_one = grad_values_and_one + sum_to(own_values_and_one, lead, 2)
    decayed = xp.sum(found.values_and_one * grad_values_and_one, axis=-1, keepdims=True)
    if not block.from_the_end:
        weights, products = _self_weights(found)
        weights = times_values(weights, found.queries.values)
        whole = xp.sum(times_values(weights, found.keys.values), axis=-1, keepdims=True)
        cotangent = cotangent + sum_to(weights * products, lead, 2)
        grad_values_and_one = grad_values_and_one + sum_to(whole * found.g1, lead, 2)
    before = absorb_rows(found.at_start(), found.g1, found.log, found.faded(adjoint))
    if block.from_the_end:
        cotangent, grad_values_and_one, decayed = map(
            _flip, (cotangent, grad_values_and_one, decayed)
        )
    keys, largest = scaled_features(block.specs[1], block.key)
    gradient = key_gradient(
        block.specs[1],
        block.key,
        keys,
        largest,
        block.values_and_one,
        cotangent,
        grad_values_and_one,
    )
    return gradient, grad_values_and_one, decayed, before


def row_read_vjp(
    query_spec: Spec, query: Tokens, rows: Rows, state: State, adjoint: State
) -> tuple[Array, Array, State]:
    """Gradient of queries that read a state, their row terms, and the adjoint with them."""
    queries, largest = scaled_features(query_spec, query)
    cotangent = read_by(queries, state, *rows)
    gradient, term = _pulled(query_spec, query, (queries, largest), cotangent)
    return gradient, term, absorb_rows(queries, *rows, adjoint)


def _pulled(
    spec: Spec, query: Tokens, evaluated: tuple[Features, Array], cotangent: Array
) -> tuple[Array, Array]:
    """Gradient of queries, and that of a log that would be added to a whole row."""
    queries, largest = evaluated
    term = _row_sum(cotangent, queries)
    features = Features(cotangent, None)
    if queries.values is not None:
        features = Features(term, cotangent / largest)
    return features_vjp(spec, query, features), term

"""Gradients of one block in array-API code: of reads, of reductions and of softmax attention.

g1 is the cotangent of a row's ``[numerator, denominator]``. A query's gradient is a read of the
state of the keys before it, by g1. A key's gradient is a read of the *adjoint* of the queries after
it, which is a state too: features ``phi(q_i)``, log weight ``-log_i``, values ``g1_i``. There are
``n`` tokens, ``m`` features, and the values have dim ``e``.
"""

from __future__ import annotations

from typing import NamedTuple

from linattn._arrays import namespace
from linattn._generic.feature_vjps import features_vjp, sum_to
from linattn._generic.features import scaled_features
from linattn._generic.states import by_feature, read
from linattn._numerics import exp_or_zero, finite_shift, flushed, rescaled
from linattn.typing import Array, Exact, Features, Partial, RowScale, Spec, State, Tokens
from linattn.typing._shifts import largest

# Rows -------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Cotangents of rows, ``(..., n, e + 1)`` on the scales ``exp(log)``, ``(..., n, 1)``."""

    g1: Array
    log: Array
    divided: bool = True
    """Whether rows are divided: a factor on all weights of a row then changes nothing."""


def divided_rows(part: Partial, grad_output: Array) -> Rows:
    """Cotangents of rows that have read a partial and are divided."""
    scale = row_scale(part, grad_output)
    return Rows(row_cotangent(scale, grad_output), scale.log)


def numerator_rows(grad_output: Array) -> Rows:
    """Cotangents of rows that are not divided: numerators are on the true scale.

    A cotangent of 0 stays 0, also where weights overflow: on the scale inf all weights are 0.
    """
    xp, zero = namespace(grad_output), namespace(grad_output).zeros_like(grad_output[..., :1])
    is_zero = xp.all(grad_output == 0, axis=-1, keepdims=True)
    g1, log = xp.concat([grad_output, zero], axis=-1), xp.where(is_zero, zero + xp.inf, zero)
    return Rows(g1, log, divided=False)


def row_scale(part: Partial, grad_output: Array) -> RowScale:
    """Return the three numbers of a row's forward pass that its cotangent needs.

    On the row's scale its denominator is 1 or -1, so that no weight of a positive map exceeds 1.
    """
    xp = namespace(part.num_den)
    numerator, denominator = part.num_den[..., :-1], part.num_den[..., -1:]
    # A masked token alone in its block has a denominator, on the scale 0.
    dead = (denominator == 0) | (part.log == -xp.inf)
    ones, zeros = xp.ones_like(denominator), xp.zeros_like(denominator)
    divisor = xp.where(dead, ones, denominator)
    sign = xp.where(dead, zeros, xp.where(divisor < 0, -ones, ones))
    inner = sign * xp.sum(grad_output * (numerator / divisor), axis=-1, keepdims=True)
    log = part.log + xp.log(xp.abs(divisor))
    return RowScale(xp.where(dead, zeros + xp.inf, log), sign, inner)


def row_cotangent(scale: RowScale, grad_output: Array) -> Array:
    """Cotangent g1 of ``[numerator, denominator]`` on the row's scale, ``(..., n, e + 1)``."""
    xp = namespace(grad_output)
    return xp.concat([grad_output * scale.inverse, -scale.inner], axis=-1)


def absorb_rows(
    queries: Features, g1: Array, log: Array, adjoint: State, inner: Array = None
) -> State:
    """Add queries to an adjoint; summed over leading axes that the adjoint lacks.

    ``inner``, (..., n, m): subtracted from the last column of ``g1``, feature by feature; or None.
    """
    xp = namespace(g1)
    lead = tuple(adjoint.log_scale.shape[:-1])
    e = queries.log - log
    c = xp.maximum(adjoint.log_scale, _max_to(largest(e, axis=-2), lead))
    shift = finite_shift(c, xp)
    weights = times_values(exp_or_zero(e - shift[..., None, :]), queries.values)
    kvz = xp.matmul(xp.matrix_transpose(weights), g1)
    if inner is not None:
        last = kvz[..., -1:] - xp.sum(weights * inner, axis=-2)[..., None]
        kvz = xp.concat([kvz[..., :-1], last], axis=-1)
    kvz = sum_to(kvz, lead, 2)
    before = rescaled(adjoint.kvz, adjoint.log_scale - shift)
    return State(before + kvz, c, adjoint.length + g1.shape[-2])


def times_values(weights: Array, values: Array) -> Array:
    return weights if values is None else flushed(weights * values)


def _max_to(x: Array, lead: tuple[int, ...]) -> Array:
    """Largest over the leading axes along which an array with axes ``lead`` was broadcast."""
    extra = max(x.ndim - 1 - len(lead), 0)
    if extra:
        x = largest(x, axis=tuple(range(extra)))
    lead = lead[len(lead) - x.ndim + 1 :]
    axes = tuple(i for i, n in enumerate(lead) if n == 1 and x.shape[i] != 1)
    return largest(x, axis=axes, keepdims=True) if axes else x


# One side of a block ----------------------------------------------------------------------------


class Side:
    """Queries or keys of a block, evaluated, and the rule that pulls back to their tokens."""

    def __init__(self, spec: Spec, tokens: Tokens) -> None:
        self._spec, self._tokens = spec, tokens
        self.features, self._largest = scaled_features(spec, tokens)

    def query_gradient(self, cotangent: Array, *, divided: bool) -> tuple[Array, Array]:
        """Gradient of queries, and of a log added to all features of one: None if divided.

        The output of a divided row is the same for a query multiplied by any factor.
        """
        term = None if divided else row_sum(cotangent, self.features)
        return self._pulled(cotangent, term), term

    def key_gradient(
        self, values_and_one: Array, cotangent: Array, grad_values_and_one: Array
    ) -> Array:
        """Gradient of keys."""
        # A factor on all features of a key is a factor on its [v, 1].
        return self._pulled(cotangent, inner_products(values_and_one, grad_values_and_one))

    def _pulled(self, cotangent: Array, term: Array) -> Array:
        found = Features(cotangent, None)
        if self.features.values is not None:
            found = Features(term, cotangent / self._largest)
        return features_vjp(self._spec, self._tokens, found)


def read_by(queries: Features, state: State, g1: Array, log: Array) -> Array:
    """Cotangent that one state gives its queries: of ``log``, or of ``values`` where there are."""
    xp = namespace(g1)
    weights = exp_or_zero(queries.log + state.log_scale[..., None, :] - log)
    return weights * xp.matmul(g1, xp.matrix_transpose(state.kvz))


def adjoint_cotangent(keys: Features, values_and_one: Array, adjoint: State) -> tuple[Array, Array]:
    """Cotangents that an adjoint gives keys, as above, and their ``[v, 1]``."""
    xp, adjoint = namespace(values_and_one), by_feature(adjoint)
    weights = exp_or_zero(keys.log + adjoint.log_scale[..., None, :])
    cotangent = weights * xp.matmul(values_and_one, xp.matrix_transpose(adjoint.kvz))
    return cotangent, xp.matmul(times_values(weights, keys.values), adjoint.kvz)


def row_sum(cotangent: Array, features: Features) -> Array:
    """Cotangent of a log that would be added to all features of a token."""
    return namespace(cotangent).sum(
        times_values(cotangent, features.values), axis=-1, keepdims=True
    )


def inner_products(first: Array, second: Array) -> Array:
    """Inner products of rows, ``(..., n, 1)``."""
    return namespace(first).sum(first * second, axis=-1, keepdims=True)


# States -----------------------------------------------------------------------------------------


def read_block_vjp(
    query_spec: Spec, tokens: Tokens, state: State, grad_output: Array, adjoint: State
) -> tuple[Array, State]:
    """Gradient of queries that read a state, and the adjoint with them. O(n m (d + e)) time."""
    queries = Side(query_spec, tokens)
    rows = divided_rows(read(queries.features, state), grad_output)
    gradient, _, adjoint = _read_vjp(queries, rows, state, adjoint)
    return gradient, adjoint


def read_rows_vjp(
    query_spec: Spec, tokens: Tokens, rows: Rows, state: State, adjoint: State
) -> tuple[Array, Array, State]:
    """Gradient of queries whose rows read a state, their row terms, and the adjoint with them."""
    return _read_vjp(Side(query_spec, tokens), rows, state, adjoint)


def _read_vjp(
    queries: Side, rows: Rows, state: State, adjoint: State
) -> tuple[Array, Array, State]:
    cotangent = read_by(queries.features, by_feature(state), rows.g1, rows.log)
    gradient, term = queries.query_gradient(cotangent, divided=rows.divided)
    return gradient, term, absorb_rows(queries.features, rows.g1, rows.log, adjoint)


def reduce_block_vjp(
    key_spec: Spec, tokens: Tokens, values_and_one: Array, adjoint: State
) -> tuple[Array, Array]:
    """Gradients of keys and of ``[v, 1]`` that an adjoint has read. O(n m (d + e)) time."""
    keys = Side(key_spec, tokens)
    cotangent, grad_values_and_one = adjoint_cotangent(keys.features, values_and_one, adjoint)
    gradient = keys.key_gradient(values_and_one, cotangent, grad_values_and_one)
    return gradient, grad_values_and_one


# Softmax attention ------------------------------------------------------------------------------


def exact_vjp(
    spec: Exact,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    grad_num_den: Array,
    log: Array,
    visible: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and ``[v, 1]`` through their weights. O(n s (d + e)) time."""
    xp = namespace(values_and_one)
    weights = softmax_weights(spec, query, key, log, visible)
    grad_logits = weights * xp.matmul(grad_num_den, xp.matrix_transpose(values_and_one))
    return (
        xp.matmul(grad_logits, key.x) * spec.scale,
        xp.matmul(xp.matrix_transpose(grad_logits), query.x) * spec.scale,
        xp.matmul(xp.matrix_transpose(weights), grad_num_den),
    )


def softmax_weights(spec: Exact, query: Tokens, key: Tokens, log: Array, visible: Array) -> Array:
    """Weights of visible keys on the scale of their rows; 0 for the others."""
    xp = namespace(log)
    logits = xp.matmul(query.x * spec.scale, xp.matrix_transpose(key.x))
    if key.log_weight is not None:
        logits = logits + xp.matrix_transpose(key.log_weight)
    if visible is not None:
        logits = xp.where(visible, logits, xp.full_like(logits, -float("inf")))
    return exp_or_zero(logits - log)

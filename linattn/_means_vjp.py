"""Gradients of causal reads that divide each column of the state by its own normalizer.

With M_ir the mean that query i reads of column r, p_ir its share and ``w_ir = p_ir / z_ir``, the
log features have the cotangents ``p_ir g_i.(M_ir - o_i)`` of queries and, summed over the queries
behind, ``psi_jr w_ir g_i.(v_j - M_ir)`` of keys. The second holds a number for each row and column,
so that a block is computed again from the state before it, which is kept.
"""

from __future__ import annotations

from typing import NamedTuple

from linattn._block_vjp import absorb_rows, adjoint_cotangent, key_triangle, query_triangle, read_by
from linattn._cotangents import features_vjp, sum_to
from linattn._generic import evaluate, finite_shift, merge, namespace
from linattn._running import running
from linattn.typing import Array, ColumnNormalized, Features, Spec, State, Tokens

__all__ = ["means_key_vjp", "means_query_vjp"]


class _Means(NamedTuple):
    """Reads of a block: share p of each column, log of the weight w, ``g_i.M_ir``, and [g, 0]."""

    share: Array
    log_weight: Array
    inner: Array
    g1: Array


def _means(
    log_q: Array, log_k: Array, values_and_one: Array, state: State, grad_output: Array
) -> _Means:
    """O(n m (log n + e) + n^2 (m + e)) time, O(n m) memory; no branch depends on data."""
    xp = namespace(values_and_one)
    before = State(state.kvz[..., None, :, -1:], state.log_scale[..., None, :], 0)
    each = State(xp.ones_like(log_k)[..., None], log_k, 0)
    z = merge(before, running(each, lazy=True))
    empty = z.z == 0
    log_z = finite_shift(z.log_scale, xp) + xp.log(xp.where(empty, xp.ones_like(z.z), z.z))
    log_q = xp.where(empty, xp.full_like(log_z, -xp.inf), log_q)
    row = finite_shift(xp.max(log_q, axis=-1, keepdims=True), xp)
    share = xp.exp(log_q - row)
    total = xp.sum(share, axis=-1, keepdims=True)
    total = xp.where(total == 0, xp.ones_like(total), total)
    g1 = xp.concat([grad_output, xp.zeros_like(grad_output[..., :1])], axis=-1)
    each_mean = Features(-log_z, None)
    zero = xp.zeros_like(total)
    inner = read_by(each_mean, state, g1, zero)
    inner = inner + query_triangle(each_mean, Features(log_k, None), values_and_one, g1, zero)
    return _Means(share / total, log_q - row - xp.log(total) - log_z, inner, g1)


def means_query_vjp(
    query_spec: ColumnNormalized,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    grad_output: Array,
) -> Array:
    """Gradient of a causal block of queries."""
    xp = namespace(values_and_one)
    log_q, log_k = evaluate(query_spec, query).log, evaluate(key_spec, key).log
    share, _, inner, _ = _means(log_q, log_k, values_and_one, state, grad_output)
    mean = xp.sum(share * inner, axis=-1, keepdims=True)
    return features_vjp(query_spec.spec, query, Features(share * (inner - mean), None))


def means_key_vjp(
    query_spec: ColumnNormalized,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    adjoint: State,
    grad_output: Array,
) -> tuple[Array, Array, State]:
    """Gradients of a causal block of keys and of ``[v, 1]``, and the adjoint before the block."""
    log_q, keys = evaluate(query_spec, query).log, evaluate(key_spec, key)
    means = _means(log_q, keys.log, values_and_one, state, grad_output)
    queries, zero = Features(means.log_weight, None), means.share[..., :1] * 0
    cotangent, grad_values_and_one = adjoint_cotangent(keys, values_and_one, adjoint)
    lead = tuple(adjoint.log_scale.shape[:-1])
    own, own_v1 = key_triangle(queries, keys, values_and_one, means.g1, zero, means.inner)
    cotangent, grad_values_and_one = (
        cotangent + sum_to(own, lead, 2),
        grad_values_and_one + sum_to(own_v1, lead, 2),
    )
    gradient = features_vjp(key_spec, key, Features(cotangent, None))
    return gradient, grad_values_and_one, absorb_rows(queries, means.g1, zero, adjoint, means.inner)

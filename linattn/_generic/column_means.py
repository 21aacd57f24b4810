"""Reads that divide each feature of the state by its own normalizer, and their gradients.

M_ir is the mean that query i reads of feature r, p_ir the share of the feature, and
``w_ir = p_ir / z_ir``. The cotangents of log features are ``p_ir g_i.(M_ir - o_i)`` for queries,
and ``psi_jr w_ir g_i.(v_j - M_ir)`` for keys, summed over the queries after the key. The second
needs a number for each row and feature, so a block is computed again from the state before it.
"""

from __future__ import annotations

from typing import NamedTuple

import array_api_compat

from linattn._arrays import namespace
from linattn._generic.block_vjps import (
    absorb_rows,
    adjoint_cotangent,
    inner_products,
    read_by,
)
from linattn._generic.causal_vjps import Triangle
from linattn._generic.feature_vjps import features_vjp, sum_to
from linattn._generic.features import evaluate
from linattn._generic.hierarchical import (
    left_or_right,
    level_sizes,
    pad,
    read_diagonal,
    scatter_right,
)
from linattn._generic.prefix_states import prefix_merge
from linattn._generic.states import absorb, combine, merge, read
from linattn._numerics import LEAST, exp_or_zero, finite_shift, flushed, rescaled
from linattn.typing import Array, ColumnNormalized, Features, Partial, Problem, Spec, State, Tokens
from linattn.typing._shifts import largest


def normalize_state(state: State) -> State:
    """Divide each feature by its own normalizer: kvz becomes ``[mean value, 1]`` on log scale 0.

    A feature without keys keeps a log scale of -inf, and does not change the scale of a row.
    """
    xp = namespace(state.kvz)
    z = state.kvz[..., -1:]
    empty = z == 0
    kvz = state.kvz / xp.where(empty, xp.ones_like(z), z)
    zero = xp.zeros_like(state.log_scale)
    log_scale = xp.where(empty[..., 0], zero - xp.inf, zero)
    return State(kvz, log_scale, state.length)


def read_means(features: Features, state: State) -> Partial:
    """Read a state with each feature divided by its own normalizer."""
    return read(features, normalize_state(state))


def normalize_state_vjp(adjoint: State, state: State) -> State:
    """Pull an adjoint of :func:`normalize_state` back to the state that was divided."""
    xp = namespace(state.kvz)
    z = state.kvz[..., -1:]
    empty = z == 0
    divisor = xp.where(empty, xp.ones_like(z), z)
    kv = adjoint.kvz[..., :-1] / divisor
    mean = state.kvz[..., :-1] / divisor
    kvz = xp.concat([kv, -xp.sum(kv * mean, axis=-1, keepdims=True)], axis=-1)
    log = adjoint.log_scale - finite_shift(state.log_scale, xp)
    nothing = xp.full_like(log, -xp.inf)
    kvz = xp.where(empty, xp.zeros_like(kvz), kvz)
    return State(kvz, xp.where(empty[..., 0], nothing, log), adjoint.length)


def scan_column_normalized(
    problem: Problem, query: Tokens, key: Tokens, values_and_one: Array, state: State
) -> tuple[Partial, State]:
    """Causal attention of a block by column-normalized reads.

    ``phi_ir`` is divided by ``z_ir``, the normalizer of feature r up to token i; the rest is an
    ordinary causal read.
    """
    log_q = evaluate(problem.query_spec, query).log
    log_k = evaluate(problem.key_spec, key).log
    block = log_q, log_k, values_and_one, state
    if problem.policy.lazy:
        return _scan_hierarchical(*block)
    part, after, is_exact = scan_on_one_scale(*block)
    return (part, after) if bool(is_exact) else _scan_hierarchical(*block)


def scan_on_one_scale(
    log_q: Array, log_k: Array, values_and_one: Array, state: State
) -> tuple[Partial, State, Array]:
    """Scan with one scale of each feature for all rows; also whether no row has lost digits.

    Weights lost to underflow are below rounding of a normalizer of at least ``eps^2``, and that
    bounds the exponents, whose rounding a weight multiplies. O(n m (d + e) + n^2 (m + e)) time.
    """
    xp = namespace(values_and_one)
    c = xp.maximum(state.log_scale, largest(log_k, axis=-2))
    shift = finite_shift(c, xp)
    weights_k = exp_or_zero(log_k - shift[..., None, :])
    before = rescaled(state.kvz, state.log_scale - shift, LEAST)
    z = xp.cumulative_sum(weights_k, axis=-2) + before[..., None, :, -1]
    # Rows before the first key read nothing.
    is_key = xp.any(log_k > -xp.inf, axis=-1, keepdims=True)
    first = xp.argmax(xp.astype(is_key, xp.int32), axis=-2, keepdims=True)
    place = xp.arange(is_key.shape[-2], device=array_api_compat.device(z))[:, None]
    before_any = (place < first) & xp.all(state.log_scale == -xp.inf, axis=-1)[..., None, None]
    is_exact = xp.all((z >= float(xp.finfo(z.dtype).eps) ** 2) | before_any)
    row = largest(log_q, keepdims=True)
    weights_q = flushed(exp_or_zero(log_q - row) / xp.where(z == 0, xp.ones_like(z), z))
    scores = flushed(xp.tril(xp.matmul(weights_q, xp.matrix_transpose(weights_k))))
    num_den = xp.matmul(scores, values_and_one) + xp.matmul(weights_q, before)
    is_exact = is_exact & xp.all(xp.isfinite(num_den))
    after = before + xp.matmul(xp.matrix_transpose(weights_k), values_and_one)
    after = State(after, c, state.length + values_and_one.shape[-2])
    return Partial(num_den, row), after, is_exact


def _scan_hierarchical(
    log_q: Array, log_k: Array, values_and_one: Array, state: State
) -> tuple[Partial, State]:
    """As :func:`scan_hierarchical`: no row's scale depends on a later key, no branch on data.

    O(n m (d + e log n)) time, O(n m) memory.
    """
    n = values_and_one.shape[-2]
    size = 1 << (n - 1).bit_length()
    log_q, log_k, values_and_one = (
        pad(log_q, size),
        pad(log_k, size, -float("inf")),
        pad(values_and_one, size),
    )
    xp = namespace(values_and_one)
    before = State(state.kvz[..., None, :, -1:], state.log_scale[..., None, :], 0)
    each = State(xp.ones_like(log_k)[..., None], log_k, 0)
    z = merge(before, prefix_merge(each, lazy=True))
    top = finite_shift(z.log_scale, xp)
    empty = z.z == 0
    log_q = log_q - xp.log(xp.where(empty, xp.ones_like(z.z), z.z))
    part = read_diagonal(Features(log_q, None), Features(log_k - top, None), values_and_one)
    part = combine(part, _read_at(log_q, top, state))
    for half in level_sizes(size):
        left = Features(left_or_right(log_k, half, 0), None)
        seen = absorb(left, left_or_right(values_and_one, half, 0), None)
        right = _read_at(left_or_right(log_q, half, 1), left_or_right(top, half, 1), seen)
        part = combine(part, scatter_right(right, size))
    after = absorb(Features(log_k, None), values_and_one, state)
    after = State(after.kvz, after.log_scale, state.length + n)
    return Partial(part.num_den[..., :n, :], part.log[..., :n, :]), after


def _read_at(log_q: Array, top: Array, state: State) -> Partial:
    """Read a state with features ``exp(log_q - top)``."""
    # The two scales of keys first: they may be large, and their difference hardly is.
    log = log_q + (state.log_scale[..., None, :] - top)
    zero = namespace(top).zeros_like(state.log_scale)
    return read(Features(log, None), State(state.kvz, zero, 0))


class _Reads(NamedTuple):
    """Reads of a block: share p of each feature, log of the weight w, ``g_i.M_ir``, and [g, 0]."""

    share: Array
    log_weight: Array
    inner: Array
    g1: Array


def _reads(
    log_q: Array, log_k: Array, values_and_one: Array, state: State, grad_output: Array
) -> _Reads:
    """Compute the reads in O(n m (log n + e) + n^2 (m + e)) time; no branch depends on data."""
    xp = namespace(values_and_one)
    before = State(state.kvz[..., None, :, -1:], state.log_scale[..., None, :], 0)
    each = State(xp.ones_like(log_k)[..., None], log_k, 0)
    z = merge(before, prefix_merge(each, lazy=True))
    empty = z.z == 0
    log_z = finite_shift(z.log_scale, xp) + xp.log(xp.where(empty, xp.ones_like(z.z), z.z))
    log_q = xp.where(empty, xp.full_like(log_z, -xp.inf), log_q)
    row = finite_shift(largest(log_q, keepdims=True), xp)
    share = exp_or_zero(log_q - row)
    total = xp.sum(share, axis=-1, keepdims=True)
    total = xp.where(total == 0, xp.ones_like(total), total)
    g1 = xp.concat([grad_output, xp.zeros_like(grad_output[..., :1])], axis=-1)
    each_mean = Features(-log_z, None)
    zero = xp.zeros_like(total)
    pairs = Triangle(each_mean, Features(log_k, None), values_and_one, g1, zero)
    inner = read_by(each_mean, state, g1, zero) + pairs.of_queries() + pairs.diagonal()[0]
    return _Reads(share / total, log_q - row - xp.log(total) - log_z, inner, g1)


def column_normalized_vjp(
    query_spec: ColumnNormalized,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    adjoint: State,
    grad_output: Array,
) -> tuple[Array, Array, Array, State]:
    """:func:`linattn._generic.scan_vjp` of column-normalized reads."""
    xp = namespace(values_and_one)
    log_q, keys = evaluate(query_spec, query).log, evaluate(key_spec, key)
    reads = _reads(log_q, keys.log, values_and_one, state, grad_output)
    mean = xp.sum(reads.share * reads.inner, axis=-1, keepdims=True)
    of_query = Features(reads.share * (reads.inner - mean), None)
    queries, zero = Features(reads.log_weight, None), reads.share[..., :1] * 0
    pairs = Triangle(queries, keys, values_and_one, reads.g1, zero)
    lead = tuple(adjoint.log_scale.shape[:-1])
    of_key, of_values = (
        outside + sum_to(before + itself, lead, 2)
        for outside, before, itself in zip(
            adjoint_cotangent(keys, values_and_one, adjoint),
            pairs.of_keys(reads.inner),
            pairs.diagonal(reads.inner)[1:],
            strict=True,
        )
    )
    # A factor on all features of a key is a factor on its [v, 1], in normalizers too.
    weight = xp.sum(of_key, axis=-1, keepdims=True)
    inner = inner_products(of_values[..., :-1], values_and_one[..., :-1])
    return (
        features_vjp(query_spec.spec, query, of_query),
        features_vjp(key_spec, key, Features(of_key, None)),
        xp.concat([of_values[..., :-1], weight - inner], axis=-1),
        absorb_rows(queries, reads.g1, zero, adjoint, reads.inner),
    )

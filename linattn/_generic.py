"""The block tier in plain array API: right for every library and every spec.

Everything here works on one block of tokens and never looks at a value, so that it also traces.
Arrays are in the accumulation dtype. ``n`` tokens, ``m`` features, ``e`` value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import array_api_compat
import numpy as np

from linattn._checks import namespace
from linattn.typing import (
    Affine,
    Array,
    Assigned,
    ColumnNormalized,
    Corrected,
    Exact,
    Exponential,
    Features,
    Index,
    MapSpec,
    Normalized,
    Partial,
    Plan,
    Pointwise,
    Problem,
    Spec,
    State,
    Tokens,
)

__all__ = [
    "absorb",
    "change",
    "column_means",
    "combine",
    "divisor",
    "empty_state",
    "evaluate",
    "exact_block",
    "exact_more",
    "finite_shift",
    "merge",
    "namespace",
    "plan",
    "query_features",
    "quiet",
    "read",
    "read_block",
    "reduce_block",
    "row_features",
    "run_in_order",
    "scaled_features",
    "scan_block",
]

quiet = partial(np.errstate, over="ignore", under="ignore", invalid="ignore", divide="ignore")
"""Overflow and NaN show in the result, by contract; NumPy's warnings would only repeat it."""

# Blocks of 256 tokens keep a block of features near the cache; a causal block also pays for its
# n x n triangle, and a block that cannot be checked pays log2(n) levels.
FULL_BLOCK = 256
CAUSAL_BLOCK = 128
LAZY_CAUSAL_BLOCK = 64
# Blocks of a window are worked on so many tokens at a time: fewer do too little at once.
WINDOW_SPAN = 2048


def finite_shift(log: Array, xp: ModuleType) -> Array:
    """Replace -inf (nothing seen) by 0, so that ``exp(-inf - shift)`` is 0 and not NaN."""
    return xp.where(log == -xp.inf, xp.zeros_like(log), log)


def divisor(size: Array, xp: ModuleType) -> Array:
    """Sizes of rows, those cut whose reciprocal, by which XLA multiplies, it would make 0."""
    most = 1 / float(xp.finfo(size.dtype).smallest_normal)
    return xp.where((size > most) & (size < xp.inf), xp.full_like(size, most), size)


def change(affine: Affine, tokens: Tokens, *, weighted: bool) -> Tokens:
    """Change coordinates; the log weight only where it matters, as it does for all keys."""
    xp = namespace(tokens.x)
    x = tokens.x - affine.shift
    log = tokens.log_weight
    if weighted:
        weight = xp.matmul(x, affine.weight) + affine.offset
        log = weight if log is None else weight + log
    return Tokens(xp.matmul(x, affine.transform), log, tokens.start)


def evaluate(spec: MapSpec, tokens: Tokens) -> Features:
    """Evaluate a spec on a block; the log is always there, and includes the tokens' log weight.

    A row whose squared norm overflows becomes NaN: its features would all be an exact, and
    wrong, zero.
    """
    if isinstance(spec, Affine):
        return evaluate(spec.spec, change(spec, tokens, weighted=True))
    if isinstance(spec, ColumnNormalized):
        return evaluate(spec.spec, tokens)
    if isinstance(spec, Corrected):
        return _corrected(spec, evaluate(spec.spec, tokens))
    x = tokens.x
    xp = namespace(x)
    if isinstance(spec, Exponential):
        features = Features(_exponential_log(spec, x, xp), None)
    elif isinstance(spec, Pointwise):
        features = _pointwise(spec, x, xp)
    elif isinstance(spec, Assigned):
        features = Features(_assigned_log(spec, x, xp), None)
    elif isinstance(spec, Normalized):
        features = Features(_normalized_log(spec, x, xp), None)
    else:
        features = spec.fn(tokens)
    log = features.log
    if log is None:
        log = xp.zeros_like(features.values[..., :1])
    if tokens.log_weight is not None:
        log = log + tokens.log_weight
    return Features(log, features.values)


def row_features(spec: Spec | Affine, tokens: Tokens) -> Features:
    """Evaluate a spec with the largest value of each row moved into its log.

    No product of a query and a key then overflows, or vanishes but for the smallness of both.
    """
    return scaled_features(spec, tokens)[0]


def scaled_features(spec: Spec | Affine, tokens: Tokens) -> tuple[Features, Array]:
    """:func:`row_features`, and the value ``(..., n, 1)`` that was moved; None for 1."""
    features = evaluate(spec, tokens)
    if features.values is None:
        return features, None
    xp = namespace(features.values)
    largest = xp.max(xp.abs(features.values), axis=-1, keepdims=True)
    largest = divisor(xp.where(largest == 0, xp.ones_like(largest), largest), xp)
    return Features(features.log + xp.log(largest), features.values / largest), largest


def query_features(spec: Spec, tokens: Tokens) -> tuple[Features, Array]:
    """Evaluate queries apart from what all features of a token share: features, and its log.

    It cancels in what they read. Beside the square of a large query nothing would be left of the
    exponents that tell its features apart, and beside the largest of these nothing of keys' logs.
    """
    if isinstance(spec, Exponential):
        xp = namespace(tokens.x)
        # An exponent past range may be so by a part of its sum: it is not known to be small.
        u = _nan_if_infinite(_exponents(spec, tokens.x, xp))
        features = Features(u + spec.col[..., None, :], None)
        own = _exponential_row(spec, tokens.x, xp)
        if tokens.log_weight is not None:
            own = own + tokens.log_weight
    else:
        features = row_features(spec, tokens)
        xp = namespace(features.log)
        own = xp.zeros_like(features.log[..., :1])
    top = finite_shift(xp.max(features.log, axis=-1, keepdims=True), xp)
    return Features(features.log - top, features.values), own + top


def _exponential_log(spec: Exponential, x: Array, xp: ModuleType) -> Array:
    return _exponents(spec, x, xp) + _exponential_row(spec, x, xp) + spec.col[..., None, :]


def _exponents(spec: Exponential, x: Array, xp: ModuleType) -> Array:
    u = xp.matmul(x, spec.P)
    return xp.concat([u, -u], axis=-1) if spec.paired else u


def _exponential_row(spec: Exponential, x: Array, xp: ModuleType) -> Array:
    half = spec.Q / 2
    if isinstance(spec.Q, float):
        quad = half * xp.sum(x * x, axis=-1, keepdims=True)
    else:
        quad = xp.sum(x * xp.matmul(x, half), axis=-1, keepdims=True)
    return -_nan_if_infinite(quad)


def _pointwise(spec: Pointwise, x: Array, xp: ModuleType) -> Features:
    u = x * spec.P if isinstance(spec.P, float) else xp.matmul(x, spec.P)
    if spec.bias is not None:
        u = u + spec.bias[..., None, :]
    values, log = spec.f.apply(u, xp)
    if spec.offset != 0.0:
        values = values + spec.offset
    if not isinstance(spec.factor, float):
        values = values * spec.factor[..., None, :]
    elif spec.factor != 1.0:
        values = values * spec.factor
    if spec.quad is not None:
        quad = _nan_if_infinite(spec.quad * xp.sum(x * x, axis=-1, keepdims=True))
        log = quad if log is None else log + quad
    return Features(log, values)


def _assigned_log(spec: Assigned, x: Array, xp: ModuleType) -> Array:
    """One finite log a row, at its column; NaN throughout for a row that holds NaN."""
    scores = xp.matmul(x, spec.P) + spec.bias[..., None, :]
    columns = xp.arange(spec.P.shape[-1], device=array_api_compat.device(scores))
    chosen = xp.argmax(scores, axis=-1, keepdims=True) == columns
    # The table's column of each row: a product with one 1 in each row is exact.
    table = xp.matmul(xp.astype(chosen, x.dtype), xp.matrix_transpose(spec.table))
    terms = xp.matmul(x, spec.probes) + spec.offset[..., None, :]
    log = _log_sum(terms + table, xp)
    log = xp.where(chosen, log, xp.full_like(log, -float("inf")))
    log = xp.where(xp.any(xp.isnan(terms), axis=-1, keepdims=True), terms[..., :1] * 0, log)
    return xp.concat([log, terms], axis=-1) if spec.dense else log


def _normalized_log(spec: Normalized, x: Array, xp: ModuleType) -> Array:
    u = xp.matmul(x, spec.P) + spec.col[..., None, :]
    return u - spec.power * _log_sum(u, xp) + xp.matmul(x, spec.tilt)


def _corrected(spec: Corrected, features: Features) -> Features:
    """Signed features, m + p columns, of the correction without its guard."""
    xp = namespace(features.log)
    m = spec.half_log.shape[-1]
    log = features.log - spec.half_log[..., None, :]
    row = finite_shift(xp.max(log, axis=-1, keepdims=True), xp)
    values = xp.matmul(xp.exp(log - row), spec.matrix)
    own = values[..., :m] * xp.exp(spec.half_log)[..., None, :]
    return Features(row, xp.concat([own, values[..., m:]], axis=-1))


def _log_sum(x: Array, xp: ModuleType) -> Array:
    """Log of the sum of exponentials along the last axis, which stays."""
    top = finite_shift(xp.max(x, axis=-1, keepdims=True), xp)
    return xp.log(xp.sum(xp.exp(x - top), axis=-1, keepdims=True)) + top


def _nan_if_infinite(x: Array) -> Array:
    return x + (x - x)


def empty_state(lead: tuple[int, ...], m: int, e: int, like: Array) -> State:
    """Return the identity of :func:`merge`, in the namespace, dtype and device of an array."""
    xp = namespace(like)
    device = array_api_compat.device(like)
    kvz = xp.zeros((*lead, m, e + 1), dtype=like.dtype, device=device)
    log_scale = xp.full((*lead, m), -float("inf"), dtype=like.dtype, device=device)
    return State(kvz, log_scale, 0)


def merge(first: State, second: State) -> State:
    """Merge two states: rescale both to the larger shift of each feature, and add."""
    xp = namespace(first.kvz)
    c = xp.maximum(first.log_scale, second.log_scale)
    shift = finite_shift(c, xp)
    kvz = (
        first.kvz * xp.exp(first.log_scale - shift)[..., None]
        + second.kvz * xp.exp(second.log_scale - shift)[..., None]
    )
    return State(kvz, c, first.length + second.length)


def combine(first: Partial, second: Partial) -> Partial:
    """Add two numerators and denominators that are on different scales."""
    xp = namespace(first.num_den)
    log = xp.maximum(first.log, second.log)
    shift = finite_shift(log, xp)
    num_den = first.num_den * xp.exp(first.log - shift) + second.num_den * xp.exp(
        second.log - shift
    )
    return Partial(num_den, log)


def _key_weights(features: Features, log_scale: Array | None) -> tuple[Array, Array, Array]:
    """Put keys on the shift ``c`` that their state will have: (weights, c, finite c)."""
    log, values = features
    xp = namespace(log)
    c = xp.max(log, axis=-2)
    if log_scale is not None:
        c = xp.maximum(log_scale, c)
    shift = finite_shift(c, xp)
    weights = xp.exp(log - shift[..., None, :])
    return (weights if values is None else values * weights), c, shift


def _query_weights(features: Features, log_scale: Array) -> tuple[Array, Array]:
    """Put queries on a state's shift, the largest of each row at 1: (weights, row log)."""
    log, values = features
    xp = namespace(log)
    e = log + log_scale[..., None, :]
    row = xp.max(e, axis=-1, keepdims=True)
    weights = xp.exp(e - finite_shift(row, xp))
    return (weights if values is None else values * weights), row


def absorb(features: Features, values_and_one: Array, state: State | None) -> State:
    """Add evaluated keys and their ``[v, 1]`` to a state (None: nothing seen before)."""
    xp = namespace(values_and_one)
    weights, c, shift = _key_weights(features, None if state is None else state.log_scale)
    kvz = xp.matmul(xp.matrix_transpose(weights), values_and_one)
    if state is None:
        return State(kvz, c, values_and_one.shape[-2])
    kvz = state.kvz * xp.exp(state.log_scale - shift)[..., None] + kvz
    return State(kvz, c, state.length + values_and_one.shape[-2])


def column_means(state: State) -> State:
    """Divide each column by its own normalizer: kvz becomes ``[mean value, 1]`` on log scale 0.

    A column that has seen nothing keeps a log scale of -inf, and no say in the scale of a row.
    """
    xp = namespace(state.kvz)
    z = state.kvz[..., -1:]
    empty = z == 0
    kvz = state.kvz / xp.where(empty, xp.ones_like(z), z)
    zero = xp.zeros_like(state.log_scale)
    log_scale = xp.where(empty[..., 0], zero - xp.inf, zero)
    return State(kvz, log_scale, state.length)


def read(features: Features, state: State) -> Partial:
    """Read a state with evaluated queries."""
    xp = namespace(state.kvz)
    weights, row = _query_weights(features, state.log_scale)
    return Partial(xp.matmul(weights, state.kvz), row)


def reduce_block(key_spec: Spec, tokens: Tokens, values_and_one: Array, state: State) -> State:
    """Add a block of keys to the state. O(n m (d + e)) time, O(n m) memory."""
    return absorb(row_features(key_spec, tokens), values_and_one, state)


def read_block(query_spec: Spec, tokens: Tokens, state: State, want_log: bool) -> Partial:
    """Read the state with a block of queries. O(n m (d + e)) time, O(n m) memory."""
    queries, own = query_features(query_spec, tokens)
    part = read(queries, state)
    return Partial(part.num_den, part.log + own)


def scan_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    want_log: bool,
) -> tuple[Partial, State]:
    """Causal attention of a block under one shift. O(n m (d + e) + n^2 (m + e)) time.

    The shift includes later keys, so an early row may come out small or non-finite; the caller
    checks it, on a scale where no product of a query feature and a key feature exceeds 1.
    """
    xp = namespace(values_and_one)
    keys = row_features(key_spec, key)
    queries, own = query_features(query_spec, query)
    weights_k, c, shift = _key_weights(keys, state.log_scale)
    weights_q, row = _query_weights(queries, c)
    before = state.kvz * xp.exp(state.log_scale - shift)[..., None]

    scores = xp.matmul(weights_q, xp.matrix_transpose(weights_k))
    scores = xp.tril(scores)
    num_den = xp.matmul(scores, values_and_one) + xp.matmul(weights_q, before)
    after = before + xp.matmul(xp.matrix_transpose(weights_k), values_and_one)
    return Partial(num_den, row + own), State(after, c, state.length + values_and_one.shape[-2])


def exact_block(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, visible: Array | None = None
) -> Partial:
    """Softmax attention of queries to keys. O(n s (d + e)) time, O(n s) memory.

    ``visible``, (n, s), says which pairs count; None means all. A value that is not finite
    reaches every row, whoever sees it: the caller looks.

    A row whose logits all overflow to -inf becomes NaN: its weights are not known to be zero.
    """
    xp = namespace(values_and_one)
    logits = xp.matmul(query.x * spec.scale, xp.matrix_transpose(key.x))
    row = xp.max(logits, axis=-1, keepdims=True)
    overflowed = row == -xp.inf
    if key.log_weight is not None:
        logits = logits + xp.matrix_transpose(key.log_weight)
        row = xp.max(logits, axis=-1, keepdims=True)
    if visible is not None:
        logits = xp.where(visible, logits, xp.full_like(logits, -float("inf")))
        row = xp.max(logits, axis=-1, keepdims=True)
    weights = xp.exp(logits - finite_shift(row, xp))
    nan = xp.full_like(row, float("nan"))
    num_den = xp.where(overflowed, nan, xp.matmul(weights, values_and_one))
    return Partial(num_den, xp.where(overflowed, nan, row))


def exact_more(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, part: Partial
) -> Partial:
    """Add a block of keys to a partial of the same queries. Cost as :func:`exact_block`."""
    return combine(part, exact_block(spec, query, key, values_and_one))


def run_in_order(work: Callable[[Index], None], tasks: Sequence[Index]) -> None:
    """Run the tasks of a plan one after the other."""
    for task in tasks:
        work(task)


def plan(problem: Problem) -> Plan:
    """Everything in one task: a library's own batching and threads do the rest."""
    if problem.chunk_size is not None:
        block = problem.chunk_size
    elif problem.exact_window is not None:
        block = WINDOW_SPAN
    elif not problem.is_causal:
        block = FULL_BLOCK
    else:
        block = LAZY_CAUSAL_BLOCK if problem.lazy else CAUSAL_BLOCK
    return Plan(block, [()], run_in_order)

"""Features of a block of tokens, evaluated from their spec."""

from __future__ import annotations

from types import ModuleType

import array_api_compat

from linattn._arrays import namespace
from linattn._generic.numerics import divisor, finite_shift
from linattn.typing import (
    Affine,
    Array,
    Assigned,
    ColumnNormalized,
    Corrected,
    Exponential,
    Features,
    MapSpec,
    Normalized,
    Pointwise,
    Spec,
    Tokens,
)

__all__ = ["change_coordinates", "evaluate", "query_features", "row_features", "scaled_features"]


def change_coordinates(affine: Affine, tokens: Tokens, *, weighted: bool) -> Tokens:
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
        return evaluate(spec.spec, change_coordinates(spec, tokens, weighted=True))
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

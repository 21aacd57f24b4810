"""Features of a block of tokens, evaluated from their spec."""

from __future__ import annotations

from math import inf

import numpy as np

from linattn._arrays import namespace
from linattn._generic.specs import exponential_row, exponents, nan_if_infinite, rules_of
from linattn._numerics import divisor, exp_or_zero, finite_shift
from linattn.typing import (
    HEAVISIDE,
    RELU,
    SQUARED_RELU,
    Affine,
    Array,
    ColumnNormalized,
    Corrected,
    Exponential,
    Features,
    MapSpec,
    Pointwise,
    SeparateDenominator,
    Spec,
    Tokens,
)
from linattn.typing._shifts import largest, largest_of_rows

SMALL_VALUE = 2.0**-40
"""Of a feature, beside the largest of its row: below, products with it may not be normal."""

RECTIFIED = (HEAVISIDE, RELU, SQUARED_RELU)
"""Activations that are exactly 0 for many inputs."""


def change_coordinates(affine: Affine, tokens: Tokens, *, weighted: bool) -> Tokens:
    """Change coordinates; if ``weighted``, as for all keys, add the log weight too."""
    xp = namespace(tokens.x)
    x = tokens.x - affine.shift
    log = tokens.log_weight
    if weighted:
        weight = xp.matmul(x, affine.weight) + affine.offset
        log = weight if log is None else weight + log
    return tokens._replace(x=xp.matmul(x, affine.transform), log_weight=log)


def evaluate(spec: MapSpec, tokens: Tokens) -> Features:
    """Evaluate a spec on a block; the log is always there, and includes the tokens' log weight.

    A row whose squared norm overflows becomes NaN: its features would all be an exact, and
    wrong, zero.
    """
    if isinstance(spec, Affine):
        return evaluate(spec.spec, change_coordinates(spec, tokens, weighted=True))
    if isinstance(spec, ColumnNormalized | SeparateDenominator):
        return evaluate(spec.spec, tokens)
    if isinstance(spec, Corrected):
        return _corrected(spec, evaluate(spec.spec, tokens))
    features = rules_of(spec).evaluate(spec, tokens, namespace(tokens.x))
    log = features.log
    if log is None:
        log = namespace(features.values).zeros_like(features.values[..., :1])
    if tokens.log_weight is not None:
        log = log + tokens.log_weight
    return Features(log, features.values)


def row_features(spec: Spec | Affine, tokens: Tokens) -> Features:
    """Evaluate a spec with the largest value of each row moved into its log.

    No product of a query and a key then overflows, or vanishes but for the smallness of both. A
    feature that is 0 has the log -inf: its token must not set the scale of others' in a state.
    """
    return scaled_features(spec, tokens)[0]


def scaled_features(spec: Spec | Affine, tokens: Tokens) -> tuple[Features, Array]:
    """:func:`row_features`, and the values that were moved, ``(..., n, 1)``; None for 1.

    Of a row whose features are far apart each small one is moved whole, ``(..., n, m)``.
    """
    features = evaluate(spec, tokens)
    if features.values is None:
        return features, None
    xp = namespace(features.values)
    sizes = xp.abs(features.values)
    size = largest(sizes, keepdims=True)
    size = divisor(xp.where(size == 0, xp.ones_like(size), size), xp)
    if isinstance(sizes, np.ndarray) and isinstance(spec, Pointwise):
        is_small = (sizes < SMALL_VALUE * size) & (sizes > 0)
        size = np.where(is_small, sizes, size) if is_small.any() else size
    log = features.log + xp.log(size)
    if isinstance(spec, Pointwise) and spec.f in RECTIFIED and spec.offset == 0.0:
        log = xp.where(features.values == 0, xp.full_like(features.values, -inf), log)
    return Features(log, features.values / size), size


def query_features(spec: Spec, tokens: Tokens) -> tuple[Features, Array]:
    """Return the features of queries, largest log 0, and the log that was taken off each query.

    That log cancels when a row is divided. Added to the exponents, it would round them: the square
    of a large query is far larger than the differences of its exponents, or than keys' logs.
    """
    if isinstance(spec, Exponential):
        xp = namespace(tokens.x)
        # An exponent past range may be so by a part of its sum: it is not known to be small.
        u = nan_if_infinite(exponents(spec, tokens.x, xp))
        features = Features(u + spec.col[..., None, :], None)
        log_row = exponential_row(spec, tokens.x, xp)
        if tokens.log_weight is not None:
            log_row = log_row + tokens.log_weight
    else:
        features = row_features(spec, tokens)
        xp = namespace(features.log)
        log_row = xp.zeros_like(features.log[..., :1])
    top = finite_shift(largest_of_rows(features.log), xp)
    return Features(features.log - top, features.values), log_row + top


def _corrected(spec: Corrected, features: Features) -> Features:
    """Signed features, m + p columns, of the correction without its guard."""
    xp = namespace(features.log)
    m = spec.half_log.shape[-1]
    log = features.log - spec.half_log[..., None, :]
    row = finite_shift(largest(log, keepdims=True), xp)
    values = xp.matmul(exp_or_zero(log - row), spec.matrix)
    first = values[..., :m] * xp.exp(spec.half_log)[..., None, :]
    return Features(row, xp.concat([first, values[..., m:]], axis=-1))

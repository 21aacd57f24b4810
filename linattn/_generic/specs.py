"""The rules of each spec: its features, their gradient, the axes of its arrays. One table.

A rule is given a block of tokens and the array namespace. The gradient rules are given the
cotangents of the features, whatever the output made of them, so that they serve queries and keys,
full and causal alike. ``n`` tokens, ``d`` dim, ``m`` features.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import array_api_compat
import numpy as np

from linattn._arrays import namespace
from linattn._numerics import exp_or_zero, finite_shift
from linattn.typing import (
    ELU_PLUS_ONE,
    HEAVISIDE,
    Affine,
    Array,
    Assigned,
    ColumnNormalized,
    Corrected,
    Exponential,
    Features,
    MapSpec,
    Normalized,
    Opaque,
    Pointwise,
    SeparateDenominator,
    Spec,
    Tokens,
)
from linattn.typing._shifts import largest


class SpecRules(NamedTuple):
    """Rules of one class of specs.

    Attributes
    ----------
    axes : dict
        Axes of each of its arrays after the leading ones; None or a number has no axes.
    evaluate : callable
        ``evaluate(spec, tokens, xp) -> Features``, without the log weight of the tokens.
    pull_back : callable
        ``pull_back(spec, tokens, cotangent, xp) -> grad_x``: the cotangents of what ``evaluate``
        returned, pulled back to ``tokens.x``.
    missing : callable
        ``missing(spec)`` says what a spec lacks for a gradient, "" for nothing.
    """

    axes: dict[str, int]
    evaluate: Callable[[Any, Tokens, ModuleType], Features]
    pull_back: Callable[[Any, Tokens, Features, ModuleType], Array]
    missing: Callable[[Any], str] = lambda spec: ""


def exponents(spec: Exponential, x: Array, xp: ModuleType) -> Array:
    """``x P``, and ``-x P`` for a paired spec."""
    u = xp.matmul(x, spec.P)
    return xp.concat([u, -u], axis=-1) if spec.paired else u


def exponential_row(spec: Exponential, x: Array, xp: ModuleType) -> Array:
    """``-x.(Q x) / 2``, which all features of a token share."""
    half = spec.Q / 2
    if isinstance(spec.Q, float):
        quad = half * xp.sum(x * x, axis=-1, keepdims=True)
    else:
        quad = xp.sum(x * xp.matmul(x, half), axis=-1, keepdims=True)
    return -nan_if_infinite(quad)


def _exponential(spec: Exponential, tokens: Tokens, xp: ModuleType) -> Features:
    x = tokens.x
    row = exponential_row(spec, x, xp)
    return Features(exponents(spec, x, xp) + row + spec.col[..., None, :], None)


def _exponential_vjp(
    spec: Exponential, tokens: Tokens, cotangent: Features, xp: ModuleType
) -> Array:
    x, g = tokens.x, cotangent.log
    r = spec.P.shape[-1]
    du = g[..., :r] - g[..., r:] if spec.paired else g
    dx = xp.matmul(du, xp.matrix_transpose(spec.P))
    if isinstance(spec.Q, float):
        return dx if spec.Q == 0.0 else dx - spec.Q * xp.sum(g, axis=-1, keepdims=True) * x
    Q = (spec.Q + xp.matrix_transpose(spec.Q)) / 2
    return dx - xp.sum(g, axis=-1, keepdims=True) * xp.matmul(x, Q)


def _pointwise(spec: Pointwise, tokens: Tokens, xp: ModuleType) -> Features:
    x = tokens.x
    u = x * spec.P if isinstance(spec.P, float) else xp.matmul(x, spec.P)
    if spec.bias is not None:
        u = u + spec.bias[..., None, :]
    if _in_logs(spec):
        # As values, features of a row far below its largest would underflow, and their products.
        # As exact as 1 + u, which the feature is.
        return Features(xp.where(u > 0, xp.log(1 + xp.maximum(u, xp.zeros_like(u))), u), None)
    values, log = spec.f.apply(u, xp)
    if spec.offset != 0.0:
        values = values + spec.offset
    if not isinstance(spec.factor, float):
        values = values * spec.factor[..., None, :]
    elif spec.factor != 1.0:
        values = values * spec.factor
    if spec.quad is not None:
        quad = nan_if_infinite(spec.quad * xp.sum(x * x, axis=-1, keepdims=True))
        log = quad if log is None else log + quad
    return Features(log, values)


def _in_logs(spec: Pointwise) -> bool:
    """Whether features are logs: elu + 1 alone, which is positive."""
    is_unit = isinstance(spec.factor, float) and (spec.factor, spec.offset) == (1.0, 0.0)
    return is_unit and spec.f == ELU_PLUS_ONE and spec.quad is None


def _pointwise_vjp(spec: Pointwise, tokens: Tokens, cotangent: Features, xp: ModuleType) -> Array:
    x = tokens.x
    u = x * spec.P if isinstance(spec.P, float) else xp.matmul(x, spec.P)
    if spec.bias is not None:
        u = u + spec.bias[..., None, :]
    factor = spec.factor if isinstance(spec.factor, float) else spec.factor[..., None, :]
    assert spec.f.vjp is not None
    if cotangent.values is None:
        du = cotangent.log / (1 + xp.maximum(u, xp.zeros_like(u)))
    else:
        du = spec.f.vjp(u, cotangent.values * factor, xp)
    dx = du * spec.P if isinstance(spec.P, float) else xp.matmul(du, xp.matrix_transpose(spec.P))
    if spec.quad and cotangent.log is not None:
        dx = dx + 2 * spec.quad * cotangent.log * x
    return dx


def _pointwise_missing(spec: Pointwise) -> str:
    if spec.f == HEAVISIDE:
        return "its features are steps, whose derivative is 0 wherever there is one"
    if spec.f.vjp is None:
        return (
            f"its activation {spec.f.name!r} has no vjp; give the map a query_spec and key_spec "
            f"with linattn.typing.Activation(name, apply, vjp)"
        )
    return ""


def _assigned(spec: Assigned, tokens: Tokens, xp: ModuleType) -> Features:
    """One finite log a row, at its column; NaN throughout for a row that holds NaN."""
    x = tokens.x
    scores = xp.matmul(x, spec.P) + spec.bias[..., None, :]
    index = xp.arange(spec.P.shape[-1], device=array_api_compat.device(scores))
    chosen = xp.argmax(scores, axis=-1, keepdims=True) == index
    # The table's column of each row: a product with one 1 in each row is exact.
    table = xp.matmul(xp.astype(chosen, x.dtype), xp.matrix_transpose(spec.table))
    terms = xp.matmul(x, spec.probes) + spec.offset[..., None, :]
    log = _log_sum(terms + table, xp)
    log = xp.where(chosen, log, xp.full_like(log, -float("inf")))
    log = xp.where(xp.any(xp.isnan(terms), axis=-1, keepdims=True), terms[..., :1] * 0, log)
    return Features(xp.concat([log, terms], axis=-1) if spec.dense else log, None)


def _assigned_vjp(spec: Assigned, tokens: Tokens, cotangent: Features, xp: ModuleType) -> Array:
    """Feature and table of a key held constant: they do not change but at a boundary."""
    x, g = tokens.x, cotangent.log
    scores = xp.matmul(x, spec.P) + spec.bias[..., None, :]
    m = spec.P.shape[-1]
    index = xp.arange(m, device=array_api_compat.device(scores))
    chosen = xp.astype(xp.argmax(scores, axis=-1, keepdims=True) == index, x.dtype)
    terms = xp.matmul(x, spec.probes) + spec.offset[..., None, :]
    terms = terms + xp.matmul(chosen, xp.matrix_transpose(spec.table))
    dlog = xp.sum(chosen * g[..., :m], axis=-1, keepdims=True)
    dterms = _softmax(terms, xp) * dlog
    if spec.dense:
        dterms = dterms + g[..., m:]
    return xp.matmul(dterms, xp.matrix_transpose(spec.probes))


def _normalized(spec: Normalized, tokens: Tokens, xp: ModuleType) -> Features:
    x = tokens.x
    u = xp.matmul(x, spec.P) + spec.col[..., None, :]
    return Features(u - spec.power * _log_sum(u, xp) + xp.matmul(x, spec.tilt), None)


def _normalized_vjp(spec: Normalized, tokens: Tokens, cotangent: Features, xp: ModuleType) -> Array:
    x, g = tokens.x, cotangent.log
    u = xp.matmul(x, spec.P) + spec.col[..., None, :]
    total = xp.sum(g, axis=-1, keepdims=True)
    du = g - spec.power * total * _softmax(u, xp)
    dx = xp.matmul(du, xp.matrix_transpose(spec.P))
    return dx + total * xp.matrix_transpose(spec.tilt)


def _opaque(spec: Opaque, tokens: Tokens, xp: ModuleType) -> Features:
    # A map of one's own may answer in another dtype, which states and sums do not have.
    log, values = (_as_dtype(x, tokens.x.dtype) for x in spec.fn(tokens))
    return Features(log, values)


def _opaque_vjp(spec: Opaque, tokens: Tokens, cotangent: Features, xp: ModuleType) -> Array:
    assert spec.vjp is not None
    return _as_dtype(spec.vjp(tokens, cotangent), tokens.x.dtype)


def _as_dtype(x: Array, dtype: Any) -> Array:
    return x if x is None or x.dtype == dtype else namespace(x).astype(x, dtype)


def _opaque_missing(spec: Opaque) -> str:
    if spec.vjp is not None:
        return ""
    return (
        "its features are a function without a vjp; give the map query_spec and key_spec that "
        "return linattn.typing.Opaque(fn, vjp), or another spec"
    )


def nan_if_infinite(x: Array) -> Array:
    return x + (x - x)


def _log_sum(x: Array, xp: ModuleType) -> Array:
    """Log of the sum of exponentials along the last axis, which stays."""
    top = largest(x, keepdims=True)
    return xp.log(xp.sum(exp_or_zero(x - finite_shift(top, xp)), axis=-1, keepdims=True)) + top


def _softmax(u: Array, xp: ModuleType) -> Array:
    weights = exp_or_zero(u - finite_shift(largest(u, keepdims=True), xp))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


SPECS: dict[type, SpecRules] = {
    Assigned: SpecRules(
        {
            "P": 2,
            "bias": 1,
            "probes": 2,
            "offset": 1,
            "table": 2,
            "landmarks": 2,
            "metric": 2,
        },
        _assigned,
        _assigned_vjp,
    ),
    Exponential: SpecRules({"P": 2, "Q": 2, "col": 1}, _exponential, _exponential_vjp),
    Normalized: SpecRules({"P": 2, "col": 1, "power": 2, "tilt": 2}, _normalized, _normalized_vjp),
    Opaque: SpecRules({}, _opaque, _opaque_vjp, _opaque_missing),
    Pointwise: SpecRules(
        {"P": 2, "bias": 1, "factor": 1}, _pointwise, _pointwise_vjp, _pointwise_missing
    ),
}
"""Every spec that a block is evaluated by; wrappers of a spec are peeled before."""

WRAPPERS: dict[type, dict[str, int]] = {
    Affine: {"shift": 2, "transform": 2, "weight": 2, "offset": 2},
    ColumnNormalized: {},
    Corrected: {"half_log": 1, "matrix": 2},
    SeparateDenominator: {},
}
"""Specs around a spec, and the axes of their arrays after the leading ones."""


def rules_of(spec: Spec) -> SpecRules:
    """Return the rules of a spec, by its class or the first base class that has rules."""
    for cls in type(spec).__mro__:
        if cls in SPECS:
            return SPECS[cls]
    wanted = ", ".join(cls.__name__ for cls in SPECS)
    raise TypeError(f"a spec must be one of {wanted}, got {type(spec).__name__}")


def spec_axes(spec: MapSpec) -> dict[str, int]:
    """Axes of the arrays of a spec, or of a wrapper's own, after the leading ones."""
    axes = WRAPPERS.get(type(spec))
    return rules_of(spec).axes if axes is None else axes  # type: ignore[arg-type]


_leads: WeakKeyDictionary[MapSpec, tuple[int, ...]] = WeakKeyDictionary()


def spec_lead(spec: MapSpec) -> tuple[int, ...]:
    """Leading axes (heads) of a spec's arrays; cached, since maps return the same specs."""
    lead = _leads.get(spec)
    if lead is None:
        lead = _leads[spec] = _spec_lead(spec)
    return lead


def _spec_lead(spec: MapSpec) -> tuple[int, ...]:
    shapes = []
    if isinstance(spec, Affine | ColumnNormalized | Corrected | SeparateDenominator):
        shapes.append(spec_lead(spec.spec))
    for name, axes in spec_axes(spec).items():
        array = getattr(spec, name)
        if array is not None and not isinstance(array, float):
            shapes.append(tuple(array.shape[:-axes]))
    return np.broadcast_shapes(*shapes)


def peel_affine(spec: MapSpec) -> tuple[MapSpec, Affine | None]:
    """Return the spec inside a change of coordinates, and the change; None without one."""
    return (spec.spec, spec) if isinstance(spec, Affine) else (spec, None)

"""Cotangents of features pulled back to tokens: one rule for each spec.

A rule is given what the features made of the output, never the output itself, so that it serves
queries and keys, full and causal alike. ``n`` tokens, ``d`` dim, ``m`` features.
"""

from __future__ import annotations

from types import ModuleType

from linattn._arrays import namespace
from linattn._generic.numerics import finite_shift
from linattn.typing import (
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
    Spec,
    Tokens,
)

__all__ = ["change_coordinates_vjp", "check_differentiable", "features_vjp", "sum_to"]


def check_differentiable(spec: MapSpec, feature_map: object) -> None:
    """Refuse a map without derivative, or without the rule for it, and say what is missing."""
    if isinstance(spec, Affine | ColumnNormalized):
        check_differentiable(spec.spec, feature_map)
        return
    missing = ""
    if isinstance(spec, Corrected):
        missing = (
            "its least-squares correction is accepted or refused query by query, which has no "
            "derivative; fit it with corrected=False"
        )
    elif isinstance(spec, Opaque) and spec.vjp is None:
        missing = (
            "its features are a function without a vjp; give the map query_spec and key_spec that "
            "return linattn.typing.Opaque(fn, vjp), or another spec"
        )
    elif isinstance(spec, Pointwise) and spec.f == HEAVISIDE:
        missing = "its features are steps, whose derivative is 0 wherever there is one"
    elif isinstance(spec, Pointwise) and spec.f.vjp is None:
        missing = (
            f"its activation {spec.f.name!r} has no vjp; give the map a query_spec and key_spec "
            f"with linattn.typing.Activation(name, apply, vjp)"
        )
    if missing:
        message = f"feature_map has no gradient, got {feature_map!r}: {missing}"
        raise NotImplementedError(message)


def features_vjp(spec: Spec, tokens: Tokens, cotangent: Features) -> Array:
    """Pull the cotangent of evaluated features back to ``tokens.x``, ``(..., n, d)``.

    ``cotangent.log`` is that of ``log``, for features without values ``(..., n, m)``, for others
    ``(..., n, 1)`` or None (zero); ``cotangent.values`` that of ``values``, the log held constant.
    For a whole row multiplied by a factor the output is the same, and the sum of ``log`` over the
    row is 0 for queries.
    """
    x = tokens.x
    xp = namespace(cotangent.log if cotangent.values is None else cotangent.values)
    if isinstance(spec, Exponential):
        return _exponential(spec, x, cotangent.log, xp)
    if isinstance(spec, Pointwise):
        return _pointwise(spec, x, cotangent, xp)
    if isinstance(spec, Assigned):
        return _assigned(spec, x, cotangent.log, xp)
    if isinstance(spec, Normalized):
        return _normalized(spec, x, cotangent.log, xp)
    assert spec.vjp is not None
    return spec.vjp(tokens, cotangent)


def change_coordinates_vjp(affine: Affine, gradient: Array, weight: Array) -> Array:
    """Pull back through a change of coordinates; ``weight``: of the log weight, None for zero."""
    xp = namespace(gradient)
    moved = xp.matmul(gradient, xp.matrix_transpose(affine.transform))
    return moved if weight is None else moved + weight * xp.matrix_transpose(affine.weight)


def sum_to(x: Array, lead: tuple[int, ...], trailing: int) -> Array:
    """Sum over the leading axes along which an array with axes ``lead`` was broadcast."""
    shape = tuple(x.shape)
    extra = len(shape) - trailing - len(lead)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(lead) if n == 1 and shape[extra + i] != 1
    )
    if not axes:
        return x
    xp = namespace(x)
    return xp.reshape(xp.sum(x, axis=axes), (*lead, *shape[len(shape) - trailing :]))


def _exponential(spec: Exponential, x: Array, g: Array, xp: ModuleType) -> Array:
    r = spec.P.shape[-1]
    du = g[..., :r] - g[..., r:] if spec.paired else g
    dx = xp.matmul(du, xp.matrix_transpose(spec.P))
    if isinstance(spec.Q, float):
        return dx if spec.Q == 0.0 else dx - spec.Q * xp.sum(g, axis=-1, keepdims=True) * x
    Q = (spec.Q + xp.matrix_transpose(spec.Q)) / 2
    return dx - xp.sum(g, axis=-1, keepdims=True) * xp.matmul(x, Q)


def _pointwise(spec: Pointwise, x: Array, cotangent: Features, xp: ModuleType) -> Array:
    u = x * spec.P if isinstance(spec.P, float) else xp.matmul(x, spec.P)
    if spec.bias is not None:
        u = u + spec.bias[..., None, :]
    factor = spec.factor if isinstance(spec.factor, float) else spec.factor[..., None, :]
    assert spec.f.vjp is not None
    du = spec.f.vjp(u, cotangent.values * factor, xp)
    dx = du * spec.P if isinstance(spec.P, float) else xp.matmul(du, xp.matrix_transpose(spec.P))
    if spec.quad and cotangent.log is not None:
        dx = dx + 2 * spec.quad * cotangent.log * x
    return dx


def _assigned(spec: Assigned, x: Array, g: Array, xp: ModuleType) -> Array:
    """Column and table of a key held constant: they do not change but at a boundary."""
    scores = xp.matmul(x, spec.P) + spec.bias[..., None, :]
    m = spec.P.shape[-1]
    column = xp.argmax(scores, axis=-1, keepdims=True)
    chosen = xp.astype(column == xp.arange(m), x.dtype)
    terms = xp.matmul(x, spec.probes) + spec.offset[..., None, :]
    terms = terms + xp.matmul(chosen, xp.matrix_transpose(spec.table))
    own = xp.sum(chosen * g[..., :m], axis=-1, keepdims=True)
    dterms = _softmax(terms, xp) * own
    if spec.dense:
        dterms = dterms + g[..., m:]
    return xp.matmul(dterms, xp.matrix_transpose(spec.probes))


def _normalized(spec: Normalized, x: Array, g: Array, xp: ModuleType) -> Array:
    u = xp.matmul(x, spec.P) + spec.col[..., None, :]
    total = xp.sum(g, axis=-1, keepdims=True)
    du = g - spec.power * total * _softmax(u, xp)
    dx = xp.matmul(du, xp.matrix_transpose(spec.P))
    return dx + total * xp.matrix_transpose(spec.tilt)


def _softmax(u: Array, xp: ModuleType) -> Array:
    weights = xp.exp(u - finite_shift(xp.max(u, axis=-1, keepdims=True), xp))
    return weights / xp.sum(weights, axis=-1, keepdims=True)

"""Cotangents of features pulled back to tokens, by the rules of each spec."""

from __future__ import annotations

from linattn._arrays import namespace
from linattn._generic.specs import rules_of
from linattn._numerics import flushed
from linattn.typing import (
    Affine,
    Array,
    ColumnNormalized,
    Corrected,
    Features,
    MapSpec,
    SeparateDenominator,
    Spec,
    Tokens,
)


def check_differentiable(spec: MapSpec, feature_map: object) -> None:
    """Raise NotImplementedError, naming the reason, if a map has no rule for its derivative."""
    if isinstance(spec, Affine | ColumnNormalized):
        check_differentiable(spec.spec, feature_map)
        return
    if isinstance(spec, Corrected):
        missing = (
            "its least-squares correction is accepted or rejected query by query, which has no "
            "derivative; fit it with corrected=False"
        )
    elif isinstance(spec, SeparateDenominator):
        missing = (
            "numerators and denominators are read from different features; rotate queries and keys "
            "before the map instead, by linattn.positions.rotary, or let torch or JAX differentiate"
        )
    else:
        missing = rules_of(spec).missing(spec)
    if missing:
        raise NotImplementedError(f"feature_map has no gradient, got {feature_map!r}: {missing}")


def features_vjp(spec: Spec, tokens: Tokens, cotangent: Features) -> Array:
    """Pull the cotangent of evaluated features back to ``tokens.x``, ``(..., n, d)``.

    ``cotangent.log`` is the cotangent of ``log``: ``(..., n, m)`` for features without values,
    ``(..., n, 1)`` or None (zero) for others. ``cotangent.values`` is the cotangent of ``values``
    at a fixed log. A factor on all features of a query changes no output, so the cotangents of
    ``log`` of a query sum to 0.
    """
    xp = namespace(cotangent.log if cotangent.values is None else cotangent.values)
    cotangent = Features(*(None if x is None else flushed(x) for x in cotangent))
    return rules_of(spec).pull_back(spec, tokens, cotangent, xp)


def change_coordinates_vjp(affine: Affine, gradient: Array, weight: Array) -> Array:
    """Pull back through a change of coordinates; ``weight``: cotangent of the log weight."""
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
    # Dask's expressions have no `reshape`.
    return namespace(x).sum(x, axis=axes, keepdims=True)[(*[0] * extra, ...)]

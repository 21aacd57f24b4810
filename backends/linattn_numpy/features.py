"""Features of a block of tokens in buffers, on the scale that the map gives them or shifted.

The row term (curvature and log weight) is left out: whoever uses them puts it onto ``[v, 1]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Exact, Exponential, Pointwise, Spec, Tokens
from linattn_numpy.buffers import buffer, zeros
from linattn_numpy.limits import LOWEST, in_place
from linattn_numpy.products import leading, multiply

__all__ = [
    "Plain",
    "activated",
    "column_logs",
    "features",
    "inputs",
    "is_known",
    "is_simple",
    "largest_exponent",
    "natural",
    "plain_weights",
    "row_log",
    "row_term",
    "shifted_log",
]

Floats = NDArray[Any]

PIECE_NUMBERS = 1 << 18
"""Features of a side made at once: 1 MB of float32. In halves full attention takes 1 % longer."""

FEW_ROWS = 32
"""Products of fewer rows are worth a copy that makes one of many."""

REACH = {4: 30.0, 8: 300.0}
"""Exponents of a causal block up to this size need no shift; the range is about 3 REACH."""

LARGE = 1e10
"""Blocks of pointwise features beyond this, or all below its inverse, go to the generic code."""


class Plain(NamedTuple):
    """Weights of a block on their natural scale: ``phi = weights * exp(col)`` without row term."""

    weights: Floats
    col: Floats
    highest: float
    """Log of the largest weight, at least 0."""


def features(spec: Exponential | Pointwise, x: Floats, name: str) -> Iterator[tuple[slice, Floats]]:
    """Weights of a block, some rows at a time: they are still in cache when they are multiplied.

    They are ``(..., h, n, m / h)``, where a paired map has its halves, h = 2, apart: what is done
    to whole arrays takes half of what it takes on parts of their rows. (For causal attention the
    two products for one take what this gains.)
    """
    lead, r = x.shape[:-2], x.shape[-1]
    if not isinstance(spec.P, float):
        lead, r = leading(lead, spec.P.shape[:-2]), spec.P.shape[-1]
    halves = 2 if isinstance(spec, Exponential) and spec.paired else 1
    n, size = x.shape[-2], max(1, PIECE_NUMBERS // (halves * r * prod(lead)))
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        some = x[..., rows, :]
        if isinstance(spec, Pointwise) or halves == 1:
            yield rows, natural(spec, some, name)[..., None, :, :]
            continue
        weights = buffer(name, (*lead, 2, rows.stop - start, r), x.dtype)
        u = multiply(some, spec.P, weights[..., 0, :, :])
        np.exp(u, out=u)
        np.divide(1.0, u, out=weights[..., 1, :, :])
        yield rows, weights


def natural(spec: Exponential | Pointwise, x: Floats, name: str) -> Floats:
    """Weights of some rows on their natural scale: what is beyond the range is inf or 0."""
    if isinstance(spec, Exponential):
        return _exponentiated(spec, _project(x, spec.P, name), name)
    return activated(spec, inputs(spec, x, name), name)


def largest_exponent(spec: Spec | Exact, x: Floats) -> float:
    """Bound on the size of a block's exponents by the norms of its tokens; inf if not known."""
    if not isinstance(spec, Exponential):
        return inf
    token = np.vecdot(x, x).max()
    column = np.square(spec.P).sum(axis=-2).max()
    return float(np.sqrt(token * column))


def plain_weights(spec: Spec | Exact, x: Floats, name: str) -> Plain | None:
    """Weights of a block, or None where it needs a shift or generic code."""
    if isinstance(spec, Exponential):
        u = _project(x, spec.P, name)
        reach = max(float(u.max()), -float(u.min()))
        if not reach <= REACH[u.itemsize]:
            return None
        return Plain(_exponentiated(spec, u, name), spec.col, reach)
    if not is_simple(spec):
        return None
    u = inputs(spec, x, name)
    low, high = float(u.min()), float(u.max())
    if not (LOWEST[u.itemsize] <= low if spec.f.name == "elu_plus_one" else low > -np.inf):
        return None
    # Sums and products of features far from 1 would leave the range of float32.
    if not (high < LARGE and (spec.offset != 0.0 or spec.f.name != "relu" or high > 1 / LARGE)):
        return None
    weights = activated(spec, u, name)
    highest = max(1.0, (max(high, 0.0) + 1 + abs(spec.offset)) * spec.factor)
    return Plain(weights, np.zeros(weights.shape[-1], weights.dtype), float(np.log(highest)))


def _project(x: Floats, P: Floats, name: str) -> Floats:
    """Return ``x P`` in a buffer; blocks that share their P are one product, not one each.

    Where they do not lie side by side, one product would take a copy, which long ones do not need.
    """
    lead = leading(x.shape[:-2], P.shape[:-2])
    u = buffer(name, (*lead, x.shape[-2], P.shape[-1]), x.dtype)
    out = u
    if x.shape[-2] >= FEW_ROWS and not x.flags.c_contiguous:
        return multiply(x, P, out)
    while x.ndim > 2 and P.ndim > 2 and P.shape[-3] == 1:
        x, out = (a.reshape(*a.shape[:-3], -1, a.shape[-1]) for a in (x, out))
        P = P[..., 0, :, :]
    if P.ndim == 2:
        x, out = (a.reshape(-1, a.shape[-1]) for a in (x, out))
    multiply(x, P, out)
    return u


def _exponentiated(spec: Exponential, u: Floats, name: str) -> Floats:
    """Exponentials of all columns; those of the second half of a paired map are reciprocals.

    They are made where their exponents are: np.exp on parts of rows takes half as long again.
    """
    np.exp(u, out=u)
    if not spec.paired:
        return u
    r = u.shape[-1]
    both = buffer(name + "_both", (*u.shape[:-1], 2 * r), u.dtype)
    both[..., :r] = u
    np.divide(1.0, u, out=both[..., r:])
    return both


def is_known(spec: Spec | Exact) -> TypeGuard[Exponential | Pointwise]:
    """Whether the features of a spec are made here."""
    return isinstance(spec, Exponential) or is_simple(spec)


def is_simple(spec: Spec | Exact) -> TypeGuard[Pointwise]:
    """Whether a spec is one of the pointwise maps that are made here."""
    return (
        isinstance(spec, Pointwise)
        and spec.f.name in ("elu_plus_one", "relu")
        and spec.quad is None
        and spec.bias is None
        and isinstance(spec.factor, float)
    )


def inputs(spec: Pointwise, x: Floats, name: str) -> Floats:
    """Return what the activation is applied to; it is not ours to change."""
    if not isinstance(spec.P, float):
        return _project(x, spec.P, name)
    return x if spec.P == 1.0 else np.multiply(x, spec.P, out=buffer(name, x.shape, x.dtype))


def activated(spec: Pointwise, u: Floats, name: str) -> Floats:
    """Features of what the activation is applied to, in a buffer."""
    weights = buffer(name + "_both", u.shape, u.dtype)
    if spec.f.name == "relu":
        np.maximum(u, zeros(u.shape, u.dtype), out=weights)
    else:
        # exp(u) lies above u + 1, and below 1 where u is negative: the smaller of exp(u) and
        # max(u, 0) + 1 is the function on both sides, even if exp(u) is inf. It comes first,
        # because it computes while u comes from memory: 4 % less for elu + 1 than the other way.
        np.exp(u, out=weights)
        linear = buffer(name + "_linear", u.shape, u.dtype)
        np.maximum(u, zeros(u.shape, u.dtype), out=linear)
        np.add(linear, 1, out=linear)
        np.minimum(weights, linear, out=weights)
    if spec.offset != 0.0:
        weights += spec.offset
    if spec.factor != 1.0:
        weights *= spec.factor
    return weights


def column_logs(spec: Exponential | Pointwise, dtype: Any) -> Floats:
    """Return what the logs of a map's columns have beside those of their weights."""
    if isinstance(spec, Exponential):
        return np.asarray(spec.col)
    return np.zeros(1, dtype)


def row_term(spec: Spec | Exact, tokens: Tokens) -> Floats | None:
    """Log that all features of a token share, ``(..., n, 1)``; None for 0; NaN past range."""
    row: Floats | None = tokens.log_weight
    if isinstance(spec, Exponential):
        x = tokens.x
        if isinstance(spec.Q, float):
            quad = np.einsum("...i,...i->...", x, x)[..., None] * (-0.5 * spec.Q)
        else:
            quad = np.einsum("...i,...i->...", x, x @ spec.Q)[..., None] * -0.5
        quad += quad - quad
        row = quad if row is None else quad + row
    return row


def shifted_log(spec: Exponential, tokens: Tokens, name: str) -> Floats:
    """Full log features of a block, but for ``col``, in a buffer."""
    u = _project(tokens.x, spec.P, name)
    if spec.paired:
        r = u.shape[-1]
        both = buffer(name + "_both", (*u.shape[:-1], 2 * r), u.dtype)
        both[..., :r] = u
        np.negative(u, out=both[..., r:])
        u = both
    row = row_term(spec, tokens)
    assert row is not None
    return in_place(np.add, u, row)


def row_log(spec: Spec, tokens: Tokens, log: Floats, want_log: bool) -> Floats:
    """Log of the rows of a plain block, as an axis of 1 where nobody asks for it."""
    if not want_log:
        return log
    row = row_term(spec, tokens)
    if row is not None:
        return log + row
    return np.broadcast_to(log, (*log.shape[:-2], tokens.x.shape[-2], 1))

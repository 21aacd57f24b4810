"""Gradients of a causal block for queries and keys at once, of plain blocks only.

With the state before the block at hand, and the adjoint behind it, features are made once, and so
are the weights of the pairs within a sub-block and their cotangents, each of which both sides need.
Blocks that are not plain, and those of arguments that share leading axes, go one side at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.typing import Exponential, Spec, State, Tokens
from linattn_numpy.buffers import buffer
from linattn_numpy.gradients import (
    _known,
    _plain_scale,
    _to_tokens,
    _turned,
    above_diagonal,
)
from linattn_numpy.limits import MAX_LOG_LEAD, all_finite
from linattn_numpy.products import product, transposed
from linattn_numpy.tiles import split_sub_blocks, sub_blocks

__all__ = ["scan_vjp"]

Floats = NDArray[Any]


class _Triangle(NamedTuple):
    """Sub-blocks of some rows: what their queries have computed that their keys need too."""

    rows: slice
    size: int
    scores: Floats
    """Weights of the pairs, ``(..., count, size, size)``, 0 where a key is not seen."""
    cotangents: Floats
    """Their cotangents."""
    g1: Floats


def scan_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    adjoint: State,
    grad_output: Floats,
) -> Any:
    """Gradients of a plain causal block by queries, keys and ``[v, 1]``, and the adjoint before it.

    ``state`` is the one before the block, ``adjoint`` the one behind it. Features and weights
    within sub-blocks are made once for both sides.
    """
    lead = state.kvz.shape[:-2]
    if 0 in query.x.shape or any(
        x.shape[:-2] != lead for x in (query.x, key.x, values_and_one, grad_output)
    ):
        return NotImplemented
    if not (_known(query_spec) and _known(key_spec)):
        return NotImplemented
    common = _plain_scale(query_spec, key_spec, query, key, values_and_one, state)
    if common is None:
        return NotImplemented
    q, k, v, start, _, c, floor, (query_positive, key_positive) = common
    # The adjoint's own scale: that of the rows, whose queries lack the log of their columns.
    ahead = adjoint.log_scale + c
    if k.shape[:-2] != lead or q.shape[:-2] != lead or not ahead.max() <= MAX_LOG_LEAD:
        return NotImplemented
    if not (isinstance(key_spec, Exponential) or np.all(c == c[..., :1])):
        return NotImplemented  # these gradients are taken from the features themselves
    read = buffer("read", q.shape, q.dtype)
    found = _query_triangles(q, k, v, start, grad_output, read, floor)
    if found is None:
        return NotImplemented
    triangles, inverses = found
    grad_query = _to_tokens(query_spec, query.x, q, query_positive, read, None)
    grad_query *= inverses
    behind = adjoint.kvz * np.exp(ahead)[..., None]
    grad_values_and_one, before = _key_triangles(triangles, q, k, v, behind, read)
    grad_values_and_one *= v[..., -1:]
    total = np.vecdot(values_and_one, grad_values_and_one)[..., None]
    grad_key = _to_tokens(key_spec, key.x, k, key_positive, read, total)
    adjoint = State(before, -c, adjoint.length + values_and_one.shape[-2])
    return grad_query, grad_key, grad_values_and_one, adjoint


def _query_triangles(
    q: Floats,
    k: Floats,
    v: Floats,
    start: Floats,
    grad_output: Floats,
    read: Floats,
    floor: float,
) -> tuple[list[_Triangle], Floats] | None:
    """Put the cotangents of ``q`` times their denominators into ``read``; also the inverses.

    None where a denominator has lost digits. Numerators need not be formed: with the state before a
    row in two parts, ``g.num`` is the sum of ``q * (g.S)``.
    """
    triangles: list[_Triangle] = []
    inverses = np.empty((*q.shape[:-1], 1), q.dtype)
    start = transposed(start)
    for part, size in sub_blocks(v.shape[-2]):
        qs, ks, vs, gs, out = (
            split_sub_blocks(x, part, size) for x in (q, k, v, grad_output, read)
        )
        # By rows of values: a product of few rows with a transposed view takes twice as long.
        states = _states(start, qs.shape[-3])
        np.matmul(transposed(vs), ks, out=states[..., 1:, :, :])
        for i in range(qs.shape[-3]):
            states[..., i + 1, :, :] += states[..., i, :, :]
        before, above = states[..., :-1, :, :], above_diagonal(size)
        scores = np.matmul(qs, transposed(ks))
        np.copyto(scores, 0, where=above)
        z = before[..., -1:, :]
        denominator = np.matmul(scores, vs[..., -1:])
        denominator += np.matmul(qs, transposed(z))
        if not floor <= denominator.min() <= denominator.max() < np.inf:
            return None
        inverse = np.divide(1, denominator, out=split_sub_blocks(inverses, part, size))
        np.matmul(gs, before[..., :-1, :], out=out)
        cotangents = np.matmul(gs, transposed(vs[..., :-1]))
        inner = np.vecdot(scores, cotangents) + np.vecdot(qs, out)
        inner = inner[..., None] * inverse
        cotangents -= inner * transposed(vs[..., -1:])
        np.copyto(cotangents, 0, where=above)
        more = buffer("more", out.shape, out.dtype)
        out -= np.multiply(z, inner, out=more)
        out += np.matmul(cotangents, ks, out=more)
        cotangents *= inverse
        g1 = np.empty(vs.shape, vs.dtype)
        np.multiply(gs, inverse, out=g1[..., :-1])
        np.multiply(inner, -inverse, out=g1[..., -1:])
        if not all_finite(g1[..., -1]):
            return None
        triangles.append(_Triangle(part, size, scores, cotangents, g1))
        start = states[..., -1, :, :].copy()
    return triangles, inverses


def _key_triangles(
    triangles: list[_Triangle], q: Floats, k: Floats, v: Floats, start: Floats, read: Floats
) -> tuple[Floats, Floats]:
    """Put the cotangents of ``k`` into ``read``; return those of v and the adjoint before."""
    grad_values_and_one = np.empty(v.shape, v.dtype)
    for part, size, scores, cotangents, g1 in reversed(triangles):
        qs, ks, vs, out, out_v1 = (
            split_sub_blocks(x, part, size) for x in (q, k, v, read, grad_values_and_one)
        )
        states = _states(start, qs.shape[-3], last=True)
        np.matmul(transposed(qs), g1, out=states[..., :-1, :, :])
        for i in range(qs.shape[-3] - 1, -1, -1):
            states[..., i, :, :] += states[..., i + 1, :, :]
        later = states[..., 1:, :, :]
        np.matmul(ks, later, out=out_v1)
        out_v1 += np.matmul(transposed(scores), g1)
        np.matmul(vs, _turned(later), out=out)
        out += product(transposed(cotangents), qs, "more")
        start = states[..., 0, :, :].copy()
    return grad_values_and_one, start


def _states(start: Floats, count: int, *, last: bool = False) -> Floats:
    """Room for the states between sub-blocks, with the first or the last of them in it."""
    states = buffer("states", (*start.shape[:-2], count + 1, *start.shape[-2:]), start.dtype)
    states[..., -1 if last else 0, :, :] = start
    return states

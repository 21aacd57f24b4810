"""Gradients of a causal block in place, of both its queries and its keys.

Given the state before the block and the adjoint after it, both sides share their features, and the
weights and cotangents of the pairs within a sub-block. A forward scan over sub-blocks pulls back to
queries, a backward scan to keys. Block, state and adjoint are put on one scale, unshifted. Else the
block is max-stabilized on a scale that grows from sub-block to sub-block: then states going forward
and adjoints going back are multiplied by at most 1.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from linattn.typing import Declined, Exponential, Spec, State, Tokens
from linattn_numpy import limits
from linattn_numpy.buffers import Bools, Floats, buffer
from linattn_numpy.causal_scales import GivenBlock, common_scale, stabilize
from linattn_numpy.feature_vjps import NO_VJP, features_vjp, has_vjp, sum_to, unshifted_features
from linattn_numpy.features import floor_of
from linattn_numpy.products import product, sum_products, transposed, weighted
from linattn_numpy.states import by_feature
from linattn_numpy.tiles import Run, lower, runs_of, sub_blocks

Gradients: TypeAlias = tuple[Floats, Floats, Floats, State]


class _Rows(NamedTuple):
    """A causal block and the state before it on the scales of its sub-blocks."""

    q: Floats
    k: Floats
    v: Floats
    start: Floats
    log_scale: Floats
    """Log scales of states in each sub-block, ``(..., count, m)``, or ``(..., 1, m)`` for all."""
    rises: list[Floats | None] | None
    """Factors of the states between sub-blocks, ``(..., m, 1)``; None for 1."""
    floor: float | Floats
    """Least denominator that is accepted."""
    least: float = 0.0
    """Smallest weights, and sums of them, that are not 0; 0 for unshifted rows."""


_Pairs: TypeAlias = tuple[Run, Floats, Floats]
"""Weights and cotangents of the pairs of a key and a query within some sub-blocks.

Both are ``(..., count, size, size)``, and 0 where the query does not see the key.
"""


def scan_vjp(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Floats,
    state: State,
    adjoint: State,
    grad_output: Floats,
) -> Gradients | Declined:
    """Gradients of a block by queries, keys and ``[v, 1]``, and the adjoint before it.

    ``state``: before the block; ``adjoint``: after it.
    """
    if not (has_vjp(query_spec) and has_vjp(key_spec)):
        return NO_VJP
    block = GivenBlock(query_spec, key_spec, query, key, values_and_one)
    runs, rows = sub_blocks(values_and_one.shape[-2]), _unshifted_rows(block, state, adjoint)
    states = state, adjoint
    answer = rows if isinstance(rows, Declined) else _pull(block, rows, runs, states, grad_output)
    if isinstance(answer, tuple):
        return answer
    if isinstance(query_spec, Exponential) and isinstance(key_spec, Exponential):
        return _pull_stabilized(block, runs, states, grad_output)
    return limits.UNDERFLOWED if isinstance(answer, list) else answer


def _unshifted_rows(block: GivenBlock, state: State, adjoint: State) -> _Rows | Declined:
    queries = unshifted_features(block.query_spec, block.query, "query")
    if isinstance(queries, Declined):
        return queries
    keys = unshifted_features(block.key_spec, block.key, "key")
    if isinstance(keys, Declined):
        return keys
    common = common_scale(queries.col, keys.col, keys.row, state)
    if isinstance(common, Declined):
        return common
    g, key_factors, weights, state_factors = common
    v, k = weighted(block.values_and_one, weights), keys.weights
    if key_factors is not None:
        k = limits.in_place(np.multiply, k, key_factors[..., None, :])
    start = state.kvz * state_factors[..., None]
    log_scale = np.broadcast_to(g - queries.col, state.log_scale.shape).astype(v.dtype)
    if not (adjoint.log_scale + log_scale).max() <= limits.MAX_LOG_LEAD:
        return Declined(
            f"the adjoint is more than {limits.MAX_LOG_LEAD:g} above the scale of the block"
        )
    if not (isinstance(block.key_spec, Exponential) or np.all(log_scale == log_scale[..., :1])):
        # Its gradients are taken from the features themselves.
        return Declined("features of a pointwise map are on several log scales")
    terms = float(k.shape[-1] * (state.length + v.shape[-2]))
    terms *= math.exp(queries.max_log + keys.max_log)
    floor = terms * floor_of(v.dtype, block.query_spec, block.key_spec)
    return _Rows(queries.weights, k, v, start, log_scale[..., None, :], None, floor)


def _pull_stabilized(
    block: GivenBlock, runs: list[Run], states: tuple[State, State], grad_output: Floats
) -> Gradients | Declined:
    """Pull back on the largest logs so far; again by shorter sub-blocks where rows lose digits."""
    q, k, start, _, log_scale, rises, floor = stabilize(block, by_feature(states[0]), runs)
    weights, least = (limits.weights(q), limits.weights(k)), limits.LEAST[q.itemsize]
    rows = _Rows(*weights, block.values_and_one, start, log_scale, rises, floor, least)
    answer = _pull(block, rows, runs, states, grad_output)
    if not isinstance(answer, list):
        return answer
    if answer == runs:
        return limits.UNDERFLOWED
    return _pull_stabilized(block, answer, states, grad_output)


def _pull(
    block: GivenBlock,
    rows: _Rows,
    runs: list[Run],
    states: tuple[State, State],
    grad_output: Floats,
) -> Gradients | list[Run] | Declined:
    """Pull back through rows, or cut sub-blocks where digits are lost.

    ``states``: the state before the block, and the adjoint after it.
    """
    state, adjoint = states
    q, k, v = rows.q, rows.k, rows.v
    lead, n = np.broadcast_shapes(grad_output.shape[:-2], state.kvz.shape[:-2]), v.shape[-2]
    prefixes = _prefix_states(rows, runs)
    denominators = np.empty((*lead, n, 1), v.dtype)
    weights = []
    for run in runs:
        qs, ks, vs, out = (run.split(x) for x in (q, k, v, denominators))
        each = np.matmul(qs, transposed(ks))
        each *= lower(run.size, each.dtype)
        if rows.least:
            limits.rounded(each, rows.least)
        z = prefixes[..., run.places, -1:, :]
        np.add(np.matmul(each, vs[..., -1:]), np.matmul(qs, transposed(z)), out=out)
        weights.append(each)
    # Cotangents and the values that their rows see must be large enough for underflow to leave
    # their products. They are divided by denominators for queries, and not for keys.
    sizes = np.minimum(limits.row_sizes(grad_output), 1) * np.minimum(denominators, 1)
    rejected = limits.underflowed_rows(sizes, block.values_and_one, state.kvz, rows.floor)
    if rejected is not None:
        return limits.UNDERFLOWED if rows.rises is None else _finer(runs, rejected)
    inverses, g1 = 1 / denominators, np.empty((*lead, n, v.shape[-1]), v.dtype)
    np.multiply(grad_output, inverses, out=g1[..., :-1])
    cotangent, pairs = buffer("read", (*lead, n, k.shape[-1]), k.dtype), []
    arrays = grad_output, inverses, g1, cotangent
    for run, each in zip(runs, weights, strict=True):
        pairs.append(_pairs(run, rows, each, prefixes, arrays))
    if not limits.all_finite(g1[..., -1]):
        return limits.UNDERFLOWED
    grad_query = features_vjp(block.query_spec, block.query.x, q, cotangent, None, rows.least)
    grad_query *= inverses
    return grad_query, *_pull_keys(block, rows, pairs, g1, adjoint)


def _pairs(
    run: Run, rows: _Rows, weights: Floats, prefixes: Floats, arrays: tuple[Floats, ...]
) -> _Pairs:
    """Write the cotangents of ``q`` times their denominators and the last column of ``g1``.

    ``arrays``: cotangents of the outputs, ``1 / den``, ``g1``, and the cotangents of ``q``.

    Numerators need not be formed: with the state before a row in two parts, ``g.num`` is the sum of
    ``q * (g.S)``.
    """
    qs, ks, vs = (run.split(x) for x in (rows.q, rows.k, rows.v))
    gs, inverse, last, out = (run.split(x) for x in arrays)
    before = prefixes[..., run.places, :, :]
    np.matmul(gs, before[..., :-1, :], out=out)
    cotangents = np.matmul(gs, transposed(vs[..., :-1]))
    inner = np.vecdot(weights, cotangents) + np.vecdot(qs, out)
    inner = inner[..., None] * inverse
    cotangents -= inner * transposed(vs[..., -1:])
    cotangents *= lower(run.size, cotangents.dtype)
    more = buffer("more", out.shape, out.dtype)
    out -= np.multiply(before[..., -1:, :], inner, out=more)
    out += np.matmul(cotangents, ks, out=more)
    cotangents *= inverse
    np.multiply(inner, -inverse, out=last[..., -1:])
    return run, transposed(weights), transposed(cotangents)


def _prefix_states(rows: _Rows, runs: list[Run]) -> Floats:
    """States ``(..., count, e + 1, m)`` before each sub-block.

    A row holds one column of ``[v, 1]``: a product of few rows with a transposed view takes twice
    as long.
    """
    start, count = transposed(rows.start), runs[-1].places.stop
    states = buffer("states", (*start.shape[:-2], count + 1, *start.shape[-2:]), start.dtype)
    states[..., 0, :, :] = start
    for run in runs:
        added = states[..., run.places.start + 1 : run.places.stop + 1, :, :]
        sum_products(run.split(rows.v), run.split(rows.k), added)
    states = states[..., :count, :, :]
    _accumulate(rows, states, [None if x is None else transposed(x) for x in rows.rises or ()])
    return states


def _accumulate(rows: _Rows, states: Floats, rises: list[Floats | None]) -> None:
    """Add each state to the next, from the second on multiplied with its factor; None for 1."""
    for i in range(1, states.shape[-3]):
        state = states[..., i, :, :]
        state += states[..., i - 1, :, :]
        if i <= len(rises) and (factor := rises[i - 1]) is not None:
            limits.rescale(state, factor, rows.least)


def _finer(runs: list[Run], rejected: Bools) -> list[Run]:
    """Cut sub-blocks with rejected rows into eight, then into single tokens."""
    sizes: list[int] = []
    for run in runs:
        size = max(1, run.size // 8)
        parts = [stop - start for start, stop in pairwise([*range(0, run.size, size), run.size])]
        for start in range(run.rows.start, run.rows.stop, run.size):
            is_cut = rejected[..., start : start + run.size, :].any()
            sizes += parts if is_cut else [run.size]
    return runs_of(sizes)


def _pull_keys(
    block: GivenBlock, rows: _Rows, pairs: list[_Pairs], g1: Floats, adjoint: State
) -> tuple[Floats, Floats, State]:
    """Gradients of keys and of ``[v, 1]``, and the adjoint before the block."""
    k, v, lead, n = rows.k, rows.v, adjoint.kvz.shape[:-2], rows.v.shape[-2]
    states = _adjoint_states(rows, pairs, g1, adjoint)
    grad_values_and_one = np.empty((*lead, n, v.shape[-1]), v.dtype)
    cotangent = buffer("read", (*lead, n, k.shape[-1]), k.dtype)
    for run, weights, cotangents in pairs:
        qs, ks, vs, gs = (run.split(x) for x in (rows.q, k, v, g1))
        later = states[..., run.places.start + 1 : run.places.stop + 1, :, :]
        out = run.split(grad_values_and_one)
        np.matmul(ks, later, out=out)
        out += sum_to(np.matmul(weights, gs), later.shape[:-2])
        out = run.split(cotangent)
        np.matmul(vs, transposed(later), out=out)
        out += sum_to(product(cotangents, qs, "more"), later.shape[:-2])
    # The factor of v.
    grad_values_and_one *= v[..., -1:]
    total = np.vecdot(block.values_and_one, grad_values_and_one)[..., None]
    grad_key = features_vjp(block.key_spec, block.key.x, k, cotangent, total, rows.least)
    before = State(states[..., 0, :, :].copy(), -rows.log_scale[..., 0, :], adjoint.length + n)
    return grad_key, grad_values_and_one, before


def _adjoint_states(rows: _Rows, pairs: list[_Pairs], g1: Floats, adjoint: State) -> Floats:
    """Adjoints before each sub-block and after the last, ``(..., count + 1, m, e + 1)``."""
    kvz, count = adjoint.kvz, pairs[-1][0].places.stop
    states = buffer("states", (*kvz.shape[:-2], count + 1, *kvz.shape[-2:]), kvz.dtype)
    log, least = rows.log_scale[..., -1, :], limits.LEAST if rows.least else limits.FAINT_SUMMED
    states[..., -1, :, :] = limits.rescaled(kvz, adjoint.log_scale + log, least)
    for run, _, _ in pairs:
        qs, gs, sums = run.split(rows.q), run.split(g1), states[..., run.places, :, :]
        sums[...] = sum_to(product(transposed(qs), gs, "more"), sums.shape[:-2])
        if rows.least:
            limits.rounded(sums, rows.least)
    _accumulate(rows, states[..., ::-1, :, :], (rows.rises or [])[::-1])
    return states

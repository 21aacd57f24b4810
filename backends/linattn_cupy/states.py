"""Blocks in float32: matrix products of all heads at once, and a kernel between each two."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linattn.typing import Array, Exponential, Partial, Spec, State, Tokens
from linattn_cupy import device
from linattn_cupy.layout import Segments, heads_of, unit_strides, view
from linattn_cupy.parameters import (
    FAMILIES,
    Parameters,
    family_of,
    num_features_of,
    parameters_of,
)
from linattn_cupy.products import multiply
from linattn_cupy.steps import EMPTY, MAPS_DIFFER, MAX_VALUE_DIM, Rows, redo

__all__ = ["read_block", "reduce_block", "scan_block"]

WARPS = 8
THREADS = 32 * WARPS


def _lead_of(spec: Spec, *arrays: Array) -> tuple[int, ...]:
    """Leading axes of a block; UnsupportedError for one that is not for these kernels."""
    family_of(spec)
    dtypes = sorted({str(a.dtype) for a in arrays})
    device.require(dtypes == ["float32"], f"blocks are of {' and '.join(dtypes)}, not of float32")
    spec_lead = tuple(spec.P.shape[:-2]) if isinstance(spec, Exponential) else ()
    lead = np.broadcast_shapes(*(tuple(a.shape[:-2]) for a in arrays), spec_lead)
    device.require(0 not in lead, EMPTY)
    return lead


def _flat(array: Array, lead: tuple[int, ...]) -> Array:
    """Return an array as contiguous (heads, n, x), without shared heads."""
    shape = tuple(array.shape[-2:])
    if tuple(array.shape[:-2]) != lead:
        array = device.broadcast(array, (*lead, *shape))
    return device.contiguous(array).reshape(math.prod(lead), *shape)


def _launch(function: str, grid: tuple[int, int], args: list[Any]) -> None:
    device.launch("features.cu", function, {"WARPS": WARPS}, (*grid, 1), (THREADS, 1, 1), 0, args)


def _broadcast(parameters: Parameters, lead: tuple[int, ...]) -> Parameters:
    """Copy parameters to every head."""
    projection, col, curvature, map_lead = parameters
    shape = (*map_lead, *projection.shape[1:])
    offsets = _flat(col.reshape(*map_lead, 1, col.shape[-1]), lead)[:, 0]
    return Parameters(_flat(projection.reshape(shape), lead), offsets, curvature, lead)


class _Side:
    """Tokens of one side of a block: logits u (heads, n, m), and the log of each row."""

    def __init__(self, spec: Spec, tokens: Tokens, lead: tuple[int, ...]) -> None:
        self.family = family_of(spec)
        self.x = _flat(tokens.x, lead)
        heads, n, d = self.x.shape
        m = num_features_of(spec, d)
        self.map = parameters_of(spec, self.x, d, m)
        if self.map.lead not in ((), lead):
            self.map = _broadcast(self.map, lead)
        self.weights = None
        if tokens.log_weight is not None:
            self.weights = _flat(tokens.log_weight, lead)
        self.terms = device.empty((heads, n), "float32")
        rows = heads * n
        args = [self.x, self.weights, np.int64(rows), np.int32(d), np.float32(self.map.curvature)]
        _launch("row_terms", (-(-rows // WARPS), 1), [*args, self.terms])
        self.u = device.empty((heads, n, m), "float32")
        if self.map.projection is None:
            total = rows * d
            args = [self.x, np.int64(total), np.int32(FAMILIES[self.family]), self.u]
            _launch("log_activations", (-(-total // THREADS), 1), args)
        else:
            multiply(self.x, self.map.projection, self.u)

    @property
    def spec_args(self) -> list[Any]:
        return [self.terms, self.map.col, np.int64(self.map.col.shape[0])]


def _weigh_keys(side: _Side, log_scale: Array) -> tuple[Array, Array]:
    """Put keys on the scale of the state after them: that scale, and factors of the old state."""
    heads, n, m = side.u.shape
    shifts, factors = (device.empty((heads, m), "float32") for _ in range(2))
    args = [side.u, *side.spec_args, log_scale, np.int32(n), np.int32(m), shifts, factors]
    _launch("key_weights", (heads, -(-m // 32)), args)
    return shifts, factors


def _weigh_queries(side: _Side, log_scale: Array) -> Array:
    """Put queries on the scale of a state, the largest of each row at 1: the log of the rows."""
    heads, n, m = side.u.shape
    norms = device.empty((heads, n, 1), "float32")
    rows = heads * n
    args = [side.u, *side.spec_args, log_scale, np.int64(rows), np.int32(n), np.int32(m), norms]
    _launch("query_weights", (-(-rows // WARPS), 1), args)
    return norms


def _rescaled(kvz: Array, factors: Array) -> Array:
    after = device.empty(kvz.shape, "float32")
    total = math.prod(kvz.shape)
    args = [kvz, factors, np.int64(total), np.int32(kvz.shape[-1]), after]
    _launch("rescale", (-(-total // THREADS), 1), args)
    return after


def _state_arrays(state: State, lead: tuple[int, ...]) -> tuple[Array, Array]:
    kvz = _flat(state.kvz, lead)
    return kvz, _flat(state.log_scale[..., None], lead)[..., 0]


def _new_state(kvz: Array, shifts: Array, lead: tuple[int, ...], length: int) -> State:
    return State(kvz.reshape(*lead, *kvz.shape[1:]), shifts.reshape(*lead, -1), length)


@device.or_generic
def reduce_block(key_spec: Spec, tokens: Tokens, values_and_one: Array, state: State) -> Any:
    """Add a block of keys to the state, or Declined."""
    lead = _lead_of(key_spec, tokens.x, values_and_one, state.kvz)
    kvz, log_scale = _state_arrays(state, lead)
    side = _Side(key_spec, tokens, lead)
    shifts, factors = _weigh_keys(side, log_scale)
    after = _rescaled(kvz, factors)
    multiply(side.u, _flat(values_and_one, lead), after, transpose_a=True, add=True)
    return _new_state(after, shifts, lead, state.length + values_and_one.shape[-2])


@device.or_generic
def read_block(query_spec: Spec, tokens: Tokens, state: State, want_log: bool) -> Any:
    """Read the state with a block of queries, or Declined."""
    lead = _lead_of(query_spec, tokens.x, state.kvz)
    kvz, log_scale = _state_arrays(state, lead)
    side = _Side(query_spec, tokens, lead)
    norms = _weigh_queries(side, log_scale)
    num_den = device.empty((*side.u.shape[:2], kvz.shape[-1]), "float32")
    multiply(side.u, kvz, num_den)
    return _partial(num_den, norms, lead, accepted=False)


def _partial(num_den: Array, norms: Array, lead: tuple[int, ...], *, accepted: bool) -> Partial:
    return Partial(
        num_den.reshape(*lead, *num_den.shape[1:]), norms.reshape(*lead, -1, 1), accepted
    )


def _redo_rejected(
    queries: _Side,
    keys: _Side,
    values_and_one: Array,
    state: tuple[Array, Array],
    flags: Array,
    num_den: Array,
    norms: Array,
) -> None:
    count, n, columns = values_and_one.shape
    heads = heads_of((count,))
    arrays = (queries.x, keys.x, values_and_one, None, keys.weights)  # no mask
    m = keys.u.shape[-1]
    rows = Rows(
        [arg for array in arrays for arg in view(heads, array)],
        [*state, *unit_strides(heads, (count,))],
        (device.empty((count, m, columns), "float32"), device.empty((count, m), "float32")),
        (None, num_den, norms),
    )
    dims = (int(queries.x.shape[-1]), m, columns)
    flat = keys.map._replace(lead=tuple(keys.map.col.shape[:1]))
    redo(keys.family, flat, heads, flags, Segments(n, n, 1), dims, rows)


@device.or_generic
def scan_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
    want_log: bool,
) -> Any:
    """Causal attention of a block, or Declined; rejected rows are computed again here.

    The device finds them and acts on it, without host synchronization.
    """
    lead = _lead_of(query_spec, query.x, key.x, values_and_one, state.kvz)
    shapes = (key.x.shape[:-2], values_and_one.shape[:-2], state.kvz.shape[:-2])
    columns = values_and_one.shape[-1]
    device.require(key_spec is query_spec, MAPS_DIFFER)
    device.require(columns <= MAX_VALUE_DIM, f"e = {columns - 1} is above {MAX_VALUE_DIM - 1}")
    device.require(np.broadcast_shapes(*shapes) == lead, "heads of queries share a state")
    kvz, log_scale = _state_arrays(state, lead)
    values_and_one = _flat(values_and_one, lead)
    queries, keys = _Side(query_spec, query, lead), _Side(key_spec, key, lead)
    shifts, factors = _weigh_keys(keys, log_scale)
    norms = _weigh_queries(queries, shifts)
    after = _rescaled(kvz, factors)
    heads, n, m = keys.u.shape

    scores = device.empty((heads, n, n), "float32")
    multiply(queries.u, keys.u, scores, transpose_b=True)
    total = heads * n * n
    _launch("triangle", (-(-total // THREADS), 1), [scores, np.int64(total), np.int32(n)])
    num_den = device.empty((heads, n, columns), "float32")
    multiply(scores, values_and_one, num_den)
    multiply(queries.u, after, num_den, add=True)
    multiply(keys.u, values_and_one, after, transpose_a=True, add=True)

    flags = device.empty((heads,), "int32")
    sizes = [np.int32(x) for x in (n, m, columns)]
    args = [num_den, keys.weights, kvz, log_scale, np.int64(state.length + n), *sizes, flags]
    _launch("check_rows", (heads, 1), args)
    _redo_rejected(queries, keys, values_and_one, (kvz, log_scale), flags, num_den, norms)
    part = _partial(num_den, norms, lead, accepted=True)
    return part, _new_state(after, shifts, lead, state.length + n)

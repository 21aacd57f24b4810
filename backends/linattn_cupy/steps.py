"""Token by token: decoding, and causal rows computed again without a shared scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Declined, Problem, State
from linattn_cupy import device
from linattn_cupy.device import cupy
from linattn_cupy.layout import Heads, Segments, heads_of, strides, unit_strides
from linattn_cupy.parameters import FAMILIES, Parameters, family_of, num_features_of, parameters_of

WARPS = 8
WARP = 32
INPUTS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Option INPUT of the kernels."""

MAX_VALUE_DIM = 511
"""Largest value dim of a step: a lane holds its columns of the state in registers."""

MAPS_DIFFER = "the maps of queries and keys differ"
COORDINATES_CHANGE = "the map changes coordinates"
DECAYS = "log_decay is given"
EMPTY = "an axis has length 0"
"""Reasons for which several kernels decline."""


def _shared(d: int, m: int, columns: int) -> int:
    """Bytes of shared memory, as ``share`` in steps.cu lays it out."""
    return 4 * (2 * d + columns + 3 * m + WARPS * columns + WARPS)


def _launch(
    function: str,
    family: str,
    inputs: str,
    blocks: int,
    dims: tuple[int, int, int],
    args: list[Any],
) -> None:
    options = {"INPUT": INPUTS[inputs], "MAP": FAMILIES[family], "WARPS": WARPS}
    options["COLUMNS"] = -(-dims[2] // WARP)
    grid, block = (blocks, 1, 1), (WARP * WARPS, 1, 1)
    device.launch("steps.cu", function, options, grid, block, _shared(*dims), args)


def float32_map(spec: Any, dim: int, num_features: int) -> tuple[str, Parameters]:
    """Family of a spec that is supported, and its parameters in float32."""
    like = cupy.empty((0, dim), "float32")
    return family_of(spec), parameters_of(spec, like, dim, num_features)


def _map_args(heads: Heads, parameters: Parameters) -> list[Any]:
    return [parameters.projection, parameters.col, *unit_strides(heads, parameters.lead)]


class Rows(NamedTuple):
    """Causal rows that may have to be computed again, by arguments of the kernel.

    Query, key, value, mask and log weights with four strides each; states before the segments,
    their shifts and three strides; workspace, a state and its shifts for each segment of each head;
    output and norms.
    """

    tokens: list[Any]
    states: list[Any]
    workspace: tuple[Array, Array]
    out: tuple[Array, Array | None]


def redo(
    family: str,
    parameters: Parameters,
    heads: Heads,
    flags: Array,
    segments: Segments,
    dims: tuple[int, int, int],
    rows: Rows,
) -> None:
    """Compute the rows of flagged segments again, exactly; of other segments only the flag is read.

    ``dims``: d, m, columns of a state; ``parameters`` in float32, not padded.
    """
    args = [
        flags,
        *rows.tokens,
        *_map_args(heads, parameters),
        *rows.states,
        *heads.args,
        *segments.args,
        *(np.int32(x) for x in dims),
        np.float32(parameters.curvature),
        *rows.workspace,
        *rows.out,
    ]
    blocks = heads.total * segments.number
    _launch("redo_rows", family, str(rows.tokens[0].dtype), blocks, dims, args)


def _require_kernel(problem: Problem) -> None:
    """Raise UnsupportedError where there is no kernel for a step of this problem."""
    name, accumulated = str(problem.query.dtype), str(np.dtype(problem.dtype))
    dim, value_dim = problem.query.shape[-1], problem.value.shape[-1]
    device.require(name in INPUTS, f"{name} is none of {', '.join(INPUTS)}")
    device.require(accumulated == "float32", f"sums are in {accumulated}")
    changes = problem.query_change, problem.key_change
    device.require(changes == (None, None), COORDINATES_CHANGE)
    family_of(problem.query_spec)
    device.require(problem.key_spec is problem.query_spec, MAPS_DIFFER)
    is_whole = num_features_of(problem.query_spec, dim) == problem.num_features
    device.require(is_whole, f"the map has {problem.num_features} features of {dim} coordinates")
    device.require(value_dim <= MAX_VALUE_DIM, f"e = {value_dim} is above {MAX_VALUE_DIM}")
    device.require(problem.weights.log_decay is None, DECAYS)
    device.require(not problem.want_log, "the log normalizer is asked for")
    device.require(problem.lead == problem.state_lead, "heads of queries share a state")
    device.require(0 not in problem.lead, EMPTY)


class _Step:
    """All that steps of tokens of one kind share."""

    def __init__(self, problem: Problem) -> None:
        self._heads = heads = heads_of(problem.lead)
        d, m = problem.query.shape[-1], problem.num_features
        self._family, parameters = float32_map(problem.query_spec, d, m)
        self._inputs = str(problem.query.dtype)
        self._lead = problem.lead
        self._dims = (d, m, problem.value.shape[-1] + 1)
        self._map = _map_args(heads, parameters)
        self._tail = [
            *heads.args,
            *(np.int32(x) for x in self._dims),
            np.float32(parameters.curvature),
        ]

    def run(self, tokens: tuple[Array, ...], state: State, after: tuple[Array, Array]) -> Array:
        """Take a token, ``(..., 1, d)`` each; the state after it goes to ``after``."""
        heads = self._heads
        output = cupy.empty((*self._lead, self._dims[2] - 1), tokens[0].dtype)
        args: list[Any] = []
        for array in tokens:
            is_dense = array.strides[-1] == array.dtype.itemsize
            rows = array if is_dense else cupy.ascontiguousarray(array)
            args += [rows, *strides(heads, rows, rows=False)]
        lead = tuple(state.kvz.shape[:-2])
        args += [
            *self._map,
            *(state.kvz, state.log_scale, *unit_strides(heads, lead)),
            *self._tail,
            *after,
            output,
        ]
        _launch("decode", self._family, self._inputs, heads.total, self._dims, args)
        return output

    def new_state(self) -> tuple[Array, Array]:
        """Allocate the sums and shifts of a state."""
        _, m, columns = self._dims
        return (
            cupy.empty((*self._lead, m, columns), "float32"),
            cupy.empty((*self._lead, m), "float32"),
        )


@device.or_generic
def decode(problem: Problem) -> Any:
    """One token: its output and a new state, in one kernel. Reads and writes the state once."""
    _require_kernel(problem)
    assert problem.state is not None
    step = _Step(problem)
    before = problem.state
    kvz, log_scale = (cupy.ascontiguousarray(a) for a in (before.kvz, before.log_scale))
    after = step.new_state()
    tokens = (problem.query, problem.key, problem.value)
    output = step.run(tokens, State(kvz, log_scale, before.length), after)
    return output, State(*after, before.length + 1)


class Stepper:
    """Decoding in place: the state stays in one buffer, and there is no host synchronization."""

    def __init__(self, step: _Step, state: State) -> None:
        self._step = step
        self._kvz, self._log_scale = step.new_state()
        self._kvz[...] = state.kvz
        self._log_scale[...] = state.log_scale
        self._length = state.length

    @property
    def state(self) -> State:
        """The state after the last step, a copy."""
        # No argument tells the core which device this is of.
        with self._kvz.device:
            return State(self._kvz.copy(), self._log_scale.copy(), self._length)

    def step(self, query: Array, key: Array, value: Array) -> Array | Declined:
        """Take a token, ``(..., d)``; return its output ``(..., e)``, if there is a kernel."""
        output = self._take((query[..., None, :], key[..., None, :], value[..., None, :]))
        if not isinstance(output, Declined):
            self._length += 1
        return output

    @device.or_generic
    def _take(self, tokens: tuple[Array, ...]) -> Any:
        state = State(self._kvz, self._log_scale, self._length)
        return self._step.run(tokens, state, (self._kvz, self._log_scale))


@device.or_generic
def stepper(problem: Problem, state: State) -> Any:
    """Return a Stepper that begins with a state, or Declined."""
    _require_kernel(problem)
    return Stepper(_Step(problem), state)

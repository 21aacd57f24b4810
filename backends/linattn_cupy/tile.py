"""A second way for FAVOR+: kernels in cuTile, for calls that a record from a GPU chooses.

A call waits for one flag: causal rows that may have underflowed on the scale of their tile are left
to the other way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Array, Declined, Problem, State
from linattn_cupy import device
from linattn_cupy.device import cupy
from linattn_cupy.parameters import family_of, parameters_of

SEGMENTS, SCAN = 2, 16
"""Segments of a head, and features of a block of a scan."""

LEAST = 2 * 1.17549435e-38 / 1.1920929e-7
"""Least denominator of a causal row that is accepted, for one key and feature."""


class Call(NamedTuple):
    """Arrays (heads, tokens, dim); of a map projection (m, d), log factors, square's factor."""

    xp: Any
    q: Array
    k: Array
    v: Array
    projection: Array
    col: Array
    curvature: float
    causal: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, bool]:
        """m, d, e, tokens of a tile, and whether products are of float32."""
        wide = bool(self.q.dtype == np.float32)
        return *self.projection.shape, self.v.shape[-1], 32 if wide else 64, wide

    def states(self, count: int) -> list[Array]:
        """Allocate states: sums of values, normalizers and scales."""
        m, _, e, *_ = self.sizes
        return [self.xp.empty((count, m, *last), dtype="float32") for last in ((e,), (), ())]

    def scan(self, states: list[Array], count: int, *, back: bool) -> tuple[list[Array], ...]:
        """Sum the states before each of a head, or only all if not causal; and all."""
        (m, _, e, *_), heads = self.sizes, len(self.q)
        before, last = self.states(heads * count if self.causal else 1), self.states(heads)
        args = [*states, *before, *last, count, e, SCAN, self.causal, back]
        launch("scan_states", (heads, m // SCAN), *args)
        return before if self.causal else last, last

    def by_tiles(self, name: str, length: int, *arrays: Array) -> None:
        """Launch a kernel whose blocks take a tile of queries or keys of this length."""
        *sizes, tile, wide = self.sizes
        args = [*self[1:6], *arrays, length, self.curvature, *sizes, tile, min(tile, sizes[0])]
        grid = len(self.q), -(-length // tile)
        launch(name, grid, *args, self.causal, bool(length % tile), wide)


class Forward(NamedTuple):
    """Rows, their log scales and denominators, states that they read, the last; are they fine."""

    out: Array
    tops: Array
    dens: Array
    read: list[Array]
    last: list[Array]
    fine: bool


def launch(name: str, grid: tuple[int, int], *args: Any) -> None:
    """Launch a kernel; of NumPy arrays, in tests, where ``cuda.tile`` is a stand-in."""
    import cuda.tile

    from linattn_cupy import tile_kernels

    stream = None if isinstance(args[0], np.ndarray) else device.stream()
    cuda.tile.launch(stream, (*grid, 1), getattr(tile_kernels, name), args)


def solve(call: Call, *, keep: bool) -> Forward:
    """Attend; ``keep``: for gradients, with states of each tile."""
    xp, (m, d, e, tile, wide) = call.xp, call.sizes
    (heads, length, _), size = call.q.shape, call.k.shape[1]
    walks = call.causal and not wide and not keep
    n = 1 if call.causal and not walks else -(-size // (tile * SEGMENTS))
    segments = -(-size // (n * tile))
    out = xp.empty((heads, length, e), dtype=call.q.dtype)
    tops, dens = (xp.empty((heads, length), dtype="float32") for _ in range(2))

    def walk(states: list[Array], reads: bool) -> list[Array]:
        args = [*call[1:6], *states, out, dens, size, n, call.curvature, m, d, e, tile, reads]
        launch("walk_keys", (heads, segments), *args, bool(size % (n * segments * tile)), wide)
        return states

    read, last = call.scan(walk(call.states(heads * segments), False), segments, back=False)
    if walks:
        walk(read, True)
    else:
        call.by_tiles("read_rows", length, *read, out, tops, dens)
    fine = bool(xp.isfinite(dens).all() and (dens >= LEAST * m * size).all())
    return Forward(out, tops, dens, read, last, fine)


def pull(call: Call, forward: Forward, grad: Array) -> tuple[Array, Array, Array]:
    """Return gradients of queries, keys and values, after `solve` kept its states."""
    heads, length, _ = call.q.shape
    tiles = -(-length // call.sizes[3])
    of_q, of_k, of_v = (call.xp.empty_like(x) for x in call[1:4])
    states, rows = call.states(heads * tiles), (forward.out, forward.tops, forward.dens, grad)
    call.by_tiles("pull_queries", length, *forward.read, *rows, of_q, *states)
    sums, _ = call.scan(states, tiles, back=True)
    call.by_tiles("pull_keys", call.k.shape[1], forward.read[2], *rows, *sums, of_k, of_v)
    return of_q, of_k, of_v


def _call(problem: Problem) -> Call:
    """Flatten the heads of a problem, or raise UnsupportedError."""
    name, spec = str(problem.query.dtype), problem.query_spec
    device.require(name in ("bfloat16", "float32"), f"{name} is neither bfloat16 nor float32")
    device.require(family_of(spec) == "exponential", "the map is not exponential")
    sizes = (problem.query.shape[-1], problem.value.shape[-1], problem.num_features)
    is_power = all(16 <= x <= 256 and x & (x - 1) == 0 for x in sizes)
    device.require(is_power, f"d, e, m = {sizes} are not powers of 2 from 16 to 256")
    given = [problem.weights.key_mask, problem.state, problem.exact.window]
    given += [problem.query_change, problem.key_change]
    supported = all(x is None for x in given) and not (problem.modifiers or problem.want_log)
    supported = supported and problem.key_spec is spec and problem.lead == problem.state_lead
    device.require(supported and not problem.policy.tf32, "more than a map is given")
    made = parameters_of(spec, problem.query, sizes[0], sizes[2])
    device.require(made.lead == (), "each head has a map")
    arrays = (problem.query, problem.key, problem.value)
    q, k, v = (cupy.ascontiguousarray(x).reshape(-1, *x.shape[-2:]) for x in arrays)
    projection = made.projection[0] if name == "bfloat16" else made.projection[0].T
    rest = made.col, -made.curvature / 2, problem.sees.is_causal
    return Call(problem.xp, q, k, v, cupy.ascontiguousarray(projection), *rest)


@device.or_generic
def attention(problem: Problem) -> Any:
    """Return output, last state and no normalizer, or Declined."""
    call = _call(problem)
    forward = solve(call, keep=False)
    if not forward.fine:
        return Declined("rows were rejected")
    kv, z, shifts = (x.reshape(*problem.lead, *x.shape[1:]) for x in forward.last)
    state = State(call.xp.concat([kv, z[..., None]], axis=-1), shifts, problem.key.shape[-2])
    return forward.out.reshape(*problem.lead, *forward.out.shape[1:]), state, None


@device.or_generic
def attention_vjp(problem: Problem, cotangent: Any) -> Any:
    """Return gradients by query, key and value, or Declined."""
    device.require(cotangent.state is None, "the state has a cotangent")
    call = _call(problem)
    forward = solve(call, keep=True)
    grad = cupy.ascontiguousarray(cotangent.output).reshape(forward.out.shape)
    found = pull(call, forward, grad)
    fine = forward.fine and all(bool(call.xp.isfinite(x).all()) for x in found)
    shaped = [x.reshape(*problem.lead, *x.shape[1:]) for x in found]
    return (*shaped, None) if fine else Declined("rows were rejected, or a gradient is not finite")

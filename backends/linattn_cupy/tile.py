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


class Map(NamedTuple):
    """Projection (m, d), log factors (m,), and what multiplies a key's square."""

    projection: Array
    col: Array
    curvature: float


class Forward(NamedTuple):
    """Rows, their log scales and denominators, the states they read, and the last state."""

    out: Array
    tops: Array | None
    dens: Array
    read: tuple[Array, Array, Array]
    last: tuple[Array, Array, Array]


def launch(name: str, grid: tuple[int, int], *args: Any) -> None:
    """Launch a kernel; of NumPy arrays, in tests, where ``cuda.tile`` is a stand-in."""
    import cuda.tile

    from linattn_cupy import tile_kernels

    first = args[0]
    stream = None if isinstance(first, np.ndarray) else device.stream()
    cuda.tile.launch(stream, (*grid, 1), getattr(tile_kernels, name), args)


def solve(xp: Any, q: Array, k: Array, v: Array, phi: Map, *, causal: bool, keep: bool) -> Forward:
    """Attend, on arrays (heads, tokens, dim); ``keep``: for gradients, with states of each tile."""
    heads, length, d = q.shape
    size, e, m = k.shape[1], v.shape[-1], phi.col.shape[0]
    wide = q.dtype == np.float32
    tile, group = (32, min(32, m)) if wide else (64, min(64, m))
    walks = causal and not wide and not keep
    n = 1 if causal and not walks else -(-size // (tile * SEGMENTS))
    segments = -(-size // (n * tile))
    tail, consts = bool(size % (n * segments * tile)), (bool(wide),)

    def states(count: int) -> tuple[Array, Array, Array]:
        made = [xp.empty((count, m, *last), dtype="float32") for last in ((e,), (), ())]
        return made[0], made[1], made[2]

    parts, last = states(heads * segments), states(heads)
    before = states(heads * segments if causal else 1)
    args = [k, v, *phi[:2], *parts, size, n, phi.curvature]
    launch("segment_states", (heads, segments), *args, m, d, e, tile, tail, *consts)
    scanned = [*parts, *before, *last, segments, e, SCAN, causal]
    launch("scan_states", (heads, m // SCAN), *scanned)
    out = xp.empty((heads, length, e), dtype=q.dtype)
    dens = xp.empty((heads, length), dtype="float32")
    read, tops = before if causal else last, None if walks else xp.empty_like(dens)
    args = [q, k, v, *phi[:2], *read, out]
    if walks:
        args += [dens, size, n, phi.curvature]
        launch("causal_rows", (heads, segments), *args, m, d, e, tile, tail, *consts)
    else:
        args += [tops, dens, length, phi.curvature, m, d, e, tile, group, causal]
        launch("read_rows", (heads, -(-length // tile)), *args, bool(length % tile), *consts)
    return Forward(out, tops, dens, read, last)


def pull(
    xp: Any, q: Array, k: Array, v: Array, phi: Map, forward: Forward, grad: Array, *, causal: bool
) -> tuple[Array, Array, Array]:
    """Return gradients of queries, keys and values, after `solve` kept its states."""
    heads, length, d = q.shape
    size, e, m = k.shape[1], v.shape[-1], phi.col.shape[0]
    wide = q.dtype == np.float32
    tile, group = (32, min(32, m)) if wide else (64, min(64, m))
    tiles = -(-length // tile)
    of_q, of_k, of_v = xp.empty_like(q), xp.empty_like(k), xp.empty_like(v)
    made = [xp.empty((heads * tiles, m, *last), dtype="float32") for last in ((e,), ())]
    sums = [xp.empty_like(x) if causal else xp.empty_like(x[:heads]) for x in made]
    rows = forward.out, forward.tops, forward.dens, grad
    sizes = [m, d, e, tile, group, causal]
    args = [q, k, v, *phi[:2], *forward.read, *rows, of_q, *made, length, phi.curvature]
    launch("pull_queries", (heads, tiles), *args, *sizes, bool(length % tile), wide)
    scales = forward.read[2], forward.last[2]
    launch("scan_adjoints", (heads, m // SCAN), *made, *scales, *sums, tiles, e, SCAN, causal)
    args = [q, k, v, *phi[:2], forward.read[2], *rows, *sums]
    args += [of_k, of_v, size, phi.curvature]
    blocks = (heads, -(-size // tile))
    launch("pull_keys", blocks, *args, *sizes, bool(size % tile), wide)
    return of_q, of_k, of_v


def _arrays(problem: Problem) -> tuple[list[Array], Map]:
    """Return arrays (heads, tokens, dim) and the map, or raise UnsupportedError."""
    name, spec = str(problem.query.dtype), problem.query_spec
    device.require(name in ("bfloat16", "float32"), f"{name} is neither bfloat16 nor float32")
    device.require(family_of(spec) == "exponential", "the map is not exponential")
    sizes = (problem.query.shape[-1], problem.value.shape[-1], problem.num_features)
    is_power = all(x >= 16 and x & (x - 1) == 0 for x in sizes)
    device.require(is_power and max(sizes) <= 256, f"d, e, m = {sizes} are not powers of 2")
    supported = not problem.modifiers and problem.weights.key_mask is None and problem.state is None
    supported = supported and problem.exact.window is None and problem.key_spec is spec
    supported = supported and not problem.want_log and problem.lead == problem.state_lead
    supported = supported and (problem.query_change, problem.key_change) == (None, None)
    device.require(supported and not problem.policy.tf32, "more than a map is given")
    m, d = sizes[2], sizes[0]
    made = parameters_of(spec, problem.query, d, m)
    device.require(made.lead == (), "each head has a map")
    arrays = (problem.query, problem.key, problem.value)
    flat = [cupy.ascontiguousarray(x).reshape(-1, *x.shape[-2:]) for x in arrays]
    projection = made.projection[0]
    if name == "float32":
        projection = cupy.ascontiguousarray(projection.T)
    return flat, Map(projection, made.col.reshape(m), -made.curvature / 2)


def _is_fine(xp: Any, problem: Problem, forward: Forward) -> bool:
    least = LEAST * problem.num_features * problem.key.shape[-2]
    return bool(xp.isfinite(forward.dens).all() and (forward.dens >= least).all())


@device.or_generic
def attention(problem: Problem) -> Any:
    """Return output, last state and no normalizer, or Declined."""
    (q, k, v), phi = _arrays(problem)
    causal, xp = problem.sees.is_causal, problem.xp
    forward = solve(xp, q, k, v, phi, causal=causal, keep=False)
    if not _is_fine(xp, problem, forward):
        return Declined("rows were rejected")
    kv, z, shifts = (x.reshape(*problem.lead, *x.shape[1:]) for x in forward.last)
    state = State(xp.concat([kv, z[..., None]], axis=-1), shifts, problem.key.shape[-2])
    return forward.out.reshape(*problem.lead, *forward.out.shape[1:]), state, None


@device.or_generic
def attention_vjp(problem: Problem, cotangent: Any) -> Any:
    """Return gradients by query, key and value, or Declined."""
    device.require(cotangent.state is None, "the state has a cotangent")
    (q, k, v), phi = _arrays(problem)
    causal, xp = problem.sees.is_causal, problem.xp
    forward = solve(xp, q, k, v, phi, causal=causal, keep=True)
    grad = cupy.ascontiguousarray(cotangent.output).reshape(forward.out.shape)
    found = pull(xp, q, k, v, phi, forward, grad, causal=causal)
    fine = _is_fine(xp, problem, forward) and all(bool(xp.isfinite(x).all()) for x in found)
    shaped = [x.reshape(*problem.lead, *x.shape[1:]) for x in found]
    return (*shaped, None) if fine else Declined("rows were rejected, or a gradient is not finite")

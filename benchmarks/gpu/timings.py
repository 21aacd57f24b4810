"""Times of linattn: generic code, blocks of float32, fused kernels, decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import linattn
from benchmarks.gpu.floors import Sizes
from benchmarks.gpu.library import host_dtype
from benchmarks.gpu.parity import feature_map_of
from benchmarks.gpu.record import Item, LeftOut
from benchmarks.gpu.timer import (
    CupyClock,
    Thunk,
    captured,
    input_sets,
    kernel_seconds,
    measure,
)

__all__ = ["BATCH", "DECODED", "LENGTHS", "MAIN", "WAYS", "items"]

BATCH, HEADS = 4, 16
SIZES = Sizes(BATCH * HEADS)
MAIN = 8192
LENGTHS = (1024, 4096, MAIN, 16384, 65536)
DECODED = Sizes(64 * HEADS)
"""States of decoding: 64 sequences."""


class Way(NamedTuple):
    """A way through the code: the arrays' dtype, and what is switched on around calls."""

    dtype: str
    lengths: tuple[int, ...] = LENGTHS
    generic: bool = False
    tf32: bool = False

    def around(self) -> AbstractContextManager[Any]:
        """Enter this before a call."""
        if self.generic:
            return linattn.without_backends()
        return linattn.config(precision="tf32") if self.tf32 else nullcontext()


WAYS = {
    "step 1, generic": Way("float32", generic=True),
    "step 2, float32": Way("float32"),
    "step 2, tf32": Way("float32", tf32=True),
    "fused float16": Way("float16", lengths=(MAIN,)),
    "fused bfloat16": Way("bfloat16"),
}


def items(*, quick: bool = False) -> Iterator[Item]:
    """Yield the main length first: what is cut off is then the rest."""
    lengths = [MAIN] if quick else [MAIN, *(n for n in LENGTHS if n != MAIN)]
    for length in lengths:
        for feature_map in ("favor", "elu"):
            for kind in ("full", "causal"):
                for name, way in WAYS.items():
                    if length in way.lengths:
                        yield _item(name, feature_map, kind, length)
        if length == MAIN:
            for dtype in ("bfloat16", "float32"):
                for how in ("Decoder.step", "decode_step"):
                    yield Item(f"{how} {dtype}", partial(_decode, how, dtype))


def _item(name: str, feature_map: str, kind: str, length: int) -> Item:
    case = (name, feature_map, kind, length)
    return Item(" ".join(map(str, case)), partial(_attend, *case))


def _attend(name: str, feature_map: str, kind: str, length: int) -> dict[str, Any]:
    import cupy

    way = WAYS[name]
    phi, is_causal = feature_map_of(feature_map, SIZES.dim, SIZES.features), kind == "causal"
    shape = (BATCH, HEADS, length, SIZES.dim)
    with cupy.cuda.Stream(non_blocking=True), way.around():
        arrays = [_random(shape, way.dtype) for _ in range(3)]
        sets = [arrays, *([a.copy() for a in arrays] for _ in range(_sets(arrays) - 1))]
        calls = [
            partial(linattn.linear_attention, q, k, v, phi, is_causal=is_causal) for q, k, v in sets
        ]
        found = _timed(calls, graphs=not way.generic)
    described = {
        "way": name,
        "dtype": way.dtype,
        "map": feature_map,
        "kind": kind,
        "length": length,
    }
    return {**described, "sets": len(sets), **found}


def _random(shape: tuple[int, ...], dtype: str) -> Any:
    import cupy

    return cupy.random.standard_normal(shape, dtype="float32").astype(host_dtype(dtype), copy=False)


def _sets(arrays: Sequence[Any]) -> int:
    import cupy

    # Beside the inputs: an output of each, and what calls take meanwhile.
    size = sum(array.nbytes for array in arrays)
    free, _ = cupy.cuda.runtime.memGetInfo()
    cache = cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"]
    count = input_sets(size, cache, size + free // 2)
    if count < 2:
        reason = f"inputs of {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
        raise LeftOut(reason)
    return count


def _timed(calls: Sequence[Thunk], *, graphs: bool) -> dict[str, Any]:
    """Time calls from Python, and replays of them as graphs: the device without its waits."""
    clock = CupyClock()
    eager = measure(clock, calls)
    found = {**eager, "eager_seconds": eager["seconds"], "graph": False}
    if not graphs:
        return found
    found["kernels"] = kernel_seconds(calls[0])
    try:
        replays = [captured(call) for call in calls]
    except Exception as error:  # of CUDA, of CuPy, which captures no call of cuBLAS
        return {**found, "not_captured": f"{type(error).__name__}: {error}"[:200]}
    return {**found, **measure(clock, replays), "graph": True}


def _decode(how: str, dtype: str) -> dict[str, Any]:
    import cupy

    phi = feature_map_of("favor", DECODED.dim, DECODED.features)
    lead = (DECODED.heads // HEADS, HEADS)
    with cupy.cuda.Stream(non_blocking=True):
        calls: list[Thunk] = []
        for _ in range(3):
            q, k, v = (_random((*lead, DECODED.dim), dtype) for _ in range(3))
            state = linattn.init_state(phi, DECODED.value_dim, batch_shape=lead, like=q)
            _, state = linattn.decode_step(q, k, v, state, phi)
            if how == "Decoder.step":
                step = linattn.Decoder(phi, state).step
                calls.append(partial(step, q, k, v))
            else:
                calls.append(partial(linattn.decode_step, q, k, v, state, phi))
        found = _timed(calls, graphs=True)
    return {"way": how, "dtype": dtype, "map": "favor", "kind": "decode", **found}

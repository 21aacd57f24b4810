"""Limits of memory and of indices: bytes beyond inputs and outputs, many heads, large arrays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import linattn
from benchmarks.gpu.cases import BOUNDS
from benchmarks.gpu.library import Library, host_dtype
from benchmarks.gpu.parity import feature_map_of, relative_error
from benchmarks.gpu.record import Item, LeftOut

__all__ = ["MAX_EXTRA_BYTES", "items"]

MAX_EXTRA_BYTES = {"bfloat16": 64 * 2**20, "float32": 320 * 2**20}
"""Bytes that a call may take beyond inputs and outputs."""

HEADS = 70000
LARGE = (260, 2**17, 64)

Found = dict[str, Any]
KINDS = [(dtype, kind) for dtype in ("bfloat16", "float32") for kind in ("full", "causal")]


def items(library: Library, *, quick: bool = False) -> Iterator[Item]:
    """Yield the checks, those that need most memory last."""
    for length in (8192,) if quick else (8192, 65536):
        for dtype, kind in KINDS:
            name = f"memory beyond inputs and outputs, {dtype} {kind} {length}"
            yield Item(name, partial(_memory, library, dtype, kind, length))
    for dtype, kind in KINDS:
        name = f"{HEADS:,} heads, {dtype} {kind}"
        yield Item(name, partial(_many_heads, library, dtype, kind), 20.0)
    for dtype, kind in [] if quick else KINDS:
        name = f"more than 2^31 elements, {dtype} {kind}"
        yield Item(name, partial(_many_elements, library, dtype, kind), 60.0)


def _attend(arrays: list[Any], kind: str, phi: Any) -> Any:
    query, key, value = arrays
    return linattn.linear_attention(query, key, value, phi, is_causal=kind == "causal")


def _memory(library: Library, dtype: str, kind: str, length: int) -> Found:
    """Count the most bytes of CuPy's pool that a warm call holds, and what the device loses."""
    import cupy

    class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "peak"
        now = most = 0

        def malloc_postprocess(self, **told: Any) -> None:
            self.now += told["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **told: Any) -> None:
            self.now -= told["mem_size"]

    rng = cupy.random.default_rng(0)
    shape = (4, 16, length, 64)
    arrays = [
        rng.standard_normal(shape, dtype="float32").astype(host_dtype(dtype)) for _ in range(3)
    ]
    phi = feature_map_of("favor", 64, 256)
    _attend(arrays, kind, phi)
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.runtime.memGetInfo()[0]
    peak = Peak()
    with peak:
        output = _attend(arrays, kind, phi)
    cupy.cuda.Device().synchronize()
    lost = free - cupy.cuda.runtime.memGetInfo()[0] - output.nbytes
    extra = peak.most - output.nbytes
    return {
        "passed": bool(extra <= MAX_EXTRA_BYTES[dtype]),
        "extra_bytes": extra,
        "device_bytes": lost,
    }


def _many_heads(library: Library, dtype: str, kind: str) -> Found:
    """Take more heads than a grid has blocks along its second axis."""
    rng = np.random.default_rng(0)
    arrays = [library.array(rng.standard_normal((HEADS, 40, 16)), dtype) for _ in range(3)]
    phi = feature_map_of("elu", 16, 16)
    got = library.numpy(_attend(arrays, kind, phi))
    wide = [library.numpy(array) for array in arrays]
    with linattn.without_backends():
        wanted = _attend(wide, kind, phi)
    error = relative_error(got, wanted)
    return {"passed": bool(error <= BOUNDS[dtype]), "error": error}


def _many_elements(library: Library, dtype: str, kind: str) -> Found:
    """Compare the first and the last head of arrays whose indices need more than 31 bits."""
    import cupy

    shape = LARGE
    size = int(np.prod(shape, dtype=np.int64))
    itemsize = 2 if dtype == "bfloat16" else 4
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 5 * size * itemsize:
        reason = f"needs {5 * size * itemsize / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
        raise LeftOut(reason)
    rng = cupy.random.default_rng(0)
    arrays = [cupy.empty(shape, dtype=host_dtype(dtype)) for _ in range(3)]
    for array in arrays:
        for head in range(shape[0]):
            array[head] = rng.standard_normal(shape[1:], dtype="float32")
    phi = feature_map_of("elu", 64, 64)
    output = _attend(arrays, kind, phi)
    errors = []
    for head in (0, shape[0] - 1):
        wide = [library.numpy(array[head]) for array in arrays]
        with linattn.without_backends():
            wanted = _attend(wide, kind, phi)
        errors.append(relative_error(library.numpy(output[head]), wanted))
    del arrays, array, output
    cupy.get_default_memory_pool().free_all_blocks()
    return {"passed": bool(max(errors) <= BOUNDS[dtype]), "errors": errors, "elements": size}

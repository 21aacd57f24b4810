"""Times on a GPU: ``python -m benchmarks.gpu.times [--out FILE] [--seconds S] [WORD ...]``.

Times what the device does at best, linattn's calls with each of their kernels, steps of decoding,
and exact attention of torch where that is installed: 4 x 16 heads of 8,192 tokens, d = e = 64,
m = 256.
With words, only items whose names hold one of them. Prints a line an item, in milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import linattn
from benchmarks.gpu.library import describe, host_dtype, register
from benchmarks.gpu.parity import feature_map_of
from benchmarks.gpu.paths import unable

__all__ = ["items", "main", "measure", "seconds"]

LEAD, LENGTH, DIM, FEATURES = (4, 16), 8192, 64, 256
DECODED = (64, 16)
"""Heads of states that a step decodes."""

SETS = 2
"""Inputs that calls take in turns, so that none is in the cache."""

BUDGET, BATCH_SECONDS, MAX_CALLS, MIN_BATCHES, MAX_BATCHES = 0.4, 3e-3, 200, 5, 100
BUSY_SECONDS = 0.1
"""How long the device is busy while the host launches kernels that are timed one by one."""

BUSY = r"""
extern "C" __global__ void busy(long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""
Thunk = Callable[[], Any]
Found = dict[str, Any]

WAYS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "generic": ("float32", linattn.without_backends),
    "float32": ("float32", nullcontext),
    "tf32": ("float32", partial(linattn.config, precision="tf32")),
    "float16": ("float16", nullcontext),
    "bfloat16": ("bfloat16", nullcontext),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the items; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.times")
    parser.add_argument("words", nargs="*", help="what names of items must hold, any of them")
    parser.add_argument("--out", type=Path, help="file for the times as JSON")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no item after that")
    options = parser.parse_args(arguments)
    reason = unable()
    if reason is not None:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return 2
    register()
    stop = time.time() + options.seconds
    found: Found = {"machine": describe(), "times": {}}
    for name, work in items():
        if time.time() > stop or not any(word in name for word in options.words or [name]):
            continue
        try:
            found["times"][name] = work()
        except Exception as error:  # of other people's libraries: none may end the run
            found["times"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(name, json.dumps(found["times"][name]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def items() -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield names and what times them."""
    yield "ceiling copy", _copy
    for dtype in ("float16", "float32"):
        yield f"ceiling product {dtype}", partial(_product, dtype)
    for feature_map, kind in itertools.product(("favor", "elu"), ("full", "causal")):
        for way in WAYS:
            yield f"{way} {feature_map} {kind}", partial(_attend, way, feature_map, kind)
        yield f"bfloat16 {feature_map} {kind} gradient", partial(_pull, feature_map, kind)
    for dtype, how in itertools.product(("bfloat16", "float32"), ("Decoder.step", "decode_step")):
        yield f"{dtype} {how}", partial(_decode, how, dtype)
    for backend, kind in itertools.product(("CUDNN", "FLASH"), ("full", "causal")):
        yield f"torch {backend} {kind}", partial(_exact, backend, kind)


def measure(seconds: Callable[[Thunk], float], calls: Sequence[Thunk]) -> Found:
    """Time calls that do the same on different inputs, in turns, for ``BUDGET`` seconds.

    ``ms`` is the median over batches of the mean of a batch, ``spread`` the distance between
    quartiles over the median. ``seconds`` times work on the device.
    """
    for call in [*calls, *calls]:
        call()
    once = seconds(calls[0])
    count = min(MAX_CALLS, max(1, math.ceil(BATCH_SECONDS / max(once, 1e-7))))
    rotation = itertools.cycle(calls)

    def batch() -> None:
        for _ in range(count):
            next(rotation)()

    times: list[float] = []
    stop = time.perf_counter() + BUDGET
    while len(times) < MIN_BATCHES or (len(times) < MAX_BATCHES and time.perf_counter() < stop):
        times.append(seconds(batch) / count)
    low, middle, high = statistics.quantiles(times, n=4)
    return {"ms": 1e3 * middle, "spread": (high - low) / middle}


def seconds(work: Thunk) -> float:
    """Time work between events on CuPy's current stream."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def _copy() -> Found:
    import cupy

    source = cupy.ones(2**29, dtype="float32")
    target = cupy.empty_like(source)
    found = measure(seconds, [lambda: cupy.copyto(target, source)])
    return {**found, "TB/s": 2 * source.nbytes / found["ms"] / 1e9}


def _product(dtype: str, n: int = 4096) -> Found:
    import cupy

    a, b = (_random((n, n), dtype) for _ in range(2))
    found = measure(seconds, [lambda: cupy.matmul(a, b)])
    return {**found, "TFLOP/s": 2 * n**3 / found["ms"] / 1e9}


def _random(shape: tuple[int, ...], dtype: str) -> Any:
    import cupy

    return cupy.random.standard_normal(shape, dtype="float32").astype(host_dtype(dtype), copy=False)


def _attend(way: str, feature_map: str, kind: str) -> Found:
    dtype, around = WAYS[way]
    phi = feature_map_of(feature_map, DIM, FEATURES)
    sets = [[_random((*LEAD, LENGTH, DIM), dtype) for _ in "qkv"] for _ in range(SETS)]
    attend = partial(linattn.linear_attention, is_causal=kind == "causal")
    with around():
        return _timed([partial(attend, *arrays, phi) for arrays in sets], dtype != "float32")


def _pull(feature_map: str, kind: str) -> Found:
    phi = feature_map_of(feature_map, DIM, FEATURES)
    sets = [[_random((*LEAD, LENGTH, DIM), "bfloat16") for _ in "qkvg"] for _ in range(SETS)]

    def pull(query: Any, key: Any, value: Any, grad: Any) -> Any:
        attend = linattn.linear_attention_vjp
        _, pullback = attend(query, key, value, phi, is_causal=kind == "causal")
        return pullback(grad)

    return _timed([partial(pull, *arrays) for arrays in sets], graphs=False)


def _decode(how: str, dtype: str) -> Found:
    phi = feature_map_of("favor", DIM, FEATURES)
    calls: list[Thunk] = []
    for _ in range(SETS + 1):
        q, k, v = (_random((*DECODED, DIM), dtype) for _ in "qkv")
        state = linattn.init_state(phi, DIM, batch_shape=DECODED, like=q)
        _, state = linattn.decode_step(q, k, v, state, phi)
        step = linattn.Decoder(phi, state).step
        of_function = partial(linattn.decode_step, q, k, v, state, phi)
        calls.append(of_function if how == "decode_step" else partial(step, q, k, v))
    return _timed(calls, graphs=True)


def _timed(calls: Sequence[Thunk], graphs: bool) -> Found:
    """Time calls from Python, their kernels, and replays of them as graphs."""
    import cupy

    import linattn_cupy

    found: Found = {"eager": measure(seconds, calls), "kernels": _kernels(calls[0])}
    if graphs:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            replays = [linattn_cupy.capture(call).launch for call in calls]
            found["graph"] = measure(seconds, replays)
            stream.synchronize()
    return found


def _kernels(call: Thunk) -> dict[str, float]:
    """Time linattn's kernels in a warm call, milliseconds by name; products of cuBLAS are one."""
    import cupy

    import linattn_cupy.device
    import linattn_cupy.states

    device: Any = linattn_cupy.device
    states: Any = linattn_cupy.states
    events: list[tuple[str, Any, Any]] = []
    launch, multiply = device.launch, states.multiply

    def timed(name: str, work: Callable[..., None], *given: Any, **options: Any) -> None:
        events.append((name, cupy.cuda.Event(), cupy.cuda.Event()))
        events[-1][1].record()
        work(*given, **options)
        events[-1][2].record()

    device.launch = lambda source, function, *rest: timed(function, launch, source, function, *rest)
    states.multiply = partial(timed, "products", multiply)
    try:
        # No time of the host is among theirs.
        cupy.RawKernel(BUSY, "busy")((1,), (1,), (np.int64(1e9 * BUSY_SECONDS),))
        call()
    finally:
        device.launch, states.multiply = launch, multiply
    cupy.cuda.get_current_stream().synchronize()
    found: dict[str, float] = {}
    for name, before, after in events:
        found[name] = found.get(name, 0.0) + float(cupy.cuda.get_elapsed_time(before, after))
    return found


def _exact(backend: str, kind: str) -> Found:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call(arrays: list[Any]) -> None:
        with sdpa_kernel(getattr(SDPBackend, f"{backend}_ATTENTION")):
            query, key, value = arrays
            scaled_dot_product_attention(query, key, value, is_causal=kind == "causal")

    shape = (*LEAD, LENGTH, DIM)
    sets = [
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
        for _ in range(SETS)
    ]
    # Both libraries work in the default stream.
    return {"eager": measure(seconds, [partial(call, arrays) for arrays in sets])}


if __name__ == "__main__":
    sys.exit(main())

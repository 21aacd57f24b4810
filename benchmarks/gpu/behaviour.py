"""What the backend promises beside numbers: streams, no synchronization, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import linattn
from benchmarks.gpu import limits, outside
from benchmarks.gpu.library import Library
from benchmarks.gpu.parity import feature_map_of
from benchmarks.gpu.record import Item
from benchmarks.gpu.timer import BUSY, captured

__all__ = ["items"]

SMALL = (2, 4, 1500, 64)
BUSY_SECONDS = 0.5

Found = dict[str, Any]


def items(library: Library, *, quick: bool = False) -> Iterator[Item]:
    """Yield the checks, those that need other processes last."""
    for dtype in ("bfloat16", "float32"):
        for kind in ("full", "causal"):
            for name, check in (
                ("work stays on the stream", _stream),
                ("no hidden synchronization", _no_synchronization),
            ):
                yield _item(f"{name}, {dtype} {kind}", check, library, dtype, kind)
            if dtype == "float32":
                name = f"no graph of a call, {dtype} {kind}"
                yield _item(name, _no_graph_of_a_call, library, dtype, kind)
        yield _item(
            f"steps without synchronization, {dtype}",
            _steps_without_synchronization,
            library,
            dtype,
        )
    yield _item("max and min of infinities", _infinities, library)
    yield from limits.items(library, quick=quick)
    yield from outside.items()


def _item(name: str, check: Callable[..., Found], *arguments: Any) -> Item:
    return Item(name, partial(check, *arguments))


def _inputs(library: Library, dtype: str, shape: tuple[int, ...], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [library.array(rng.standard_normal(shape), dtype) for _ in range(3)]


def _call(arrays: list[Any], kind: str, phi: Any = None) -> Any:
    phi = feature_map_of("favor", 64, 256) if phi is None else phi
    query, key, value = arrays
    return linattn.linear_attention(query, key, value, phi, is_causal=kind == "causal")


def _equal(library: Library, first: Any, second: Any) -> bool:
    a, b = library.numpy(first), library.numpy(second)
    return bool(np.isfinite(a).all()) and a.tobytes() == b.tobytes()


def _stream(library: Library, dtype: str, kind: str) -> Found:
    """Call on another stream: it neither waits for the default stream nor runs on it."""
    import cupy

    busy = cupy.RawKernel(BUSY, "busy")
    phi = feature_map_of("favor", 64, 256)
    arrays = _inputs(library, dtype, SMALL)
    expected = _call(arrays, kind, phi)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        _call(arrays, kind, phi)
    cupy.cuda.Device().synchronize()
    busy((1,), (1,), (np.int64(0),))
    end = cupy.cuda.Event()
    busy((1,), (1,), (np.int64(BUSY_SECONDS * 1e9),))
    end.record(cupy.cuda.Stream.null)
    with stream:
        got = _call(arrays, kind, phi)
        stream.synchronize()
        waited = bool(end.done)
        copy = got.copy()
        stream.synchronize()
    cupy.cuda.Device().synchronize()
    same = _equal(library, expected, copy)
    return {"passed": same and not waited, "same": same, "waited_for_default_stream": waited}


def _no_graph_of_a_call(library: Library, dtype: str, kind: str) -> Found:
    """Capture a call of cuBLAS, which CuPy does not: it says so, and the stream works on."""
    import cupy

    phi = feature_map_of("favor", 64, 256)
    with cupy.cuda.Stream(non_blocking=True):
        arrays = _inputs(library, dtype, SMALL)
        expected = _call(arrays, kind, phi)
        try:
            captured(partial(_call, arrays, kind, phi))
        except RuntimeError as error:
            same = _equal(library, expected, _call(arrays, kind, phi))
            return {"passed": same and "cuBLAS" in str(error), "said": str(error)[:200]}
    return {"passed": False, "said": "it was captured"}


def _decoder(library: Library, dtype: str, lead: tuple[int, ...]) -> Any:
    phi = feature_map_of("favor", 64, 256)
    _, key, value = _inputs(library, dtype, (*lead, 100, 64), 2)
    state = linattn.init_state(phi, 64, batch_shape=lead, like=key)
    return linattn.Decoder(phi, linattn.update_state(state, key, value, phi))


def _no_synchronization(library: Library, dtype: str, kind: str) -> Found:
    """Call warm, with a mask and a state too: nothing waits for the device."""
    import cupyx

    phi = feature_map_of("favor", 64, 256)
    query, key, value = _inputs(library, dtype, SMALL)
    mask = library.array(np.arange(SMALL[-2]) < 1000, "float32")
    options: dict[str, Any] = {"is_causal": kind == "causal", "key_mask": mask}
    options |= {"return_state": True, "return_log_normalizer": True}
    _, state, _ = linattn.linear_attention(query, key, value, phi, **options)
    for allowed in (True, False):
        with cupyx.allow_synchronize(allowed):
            _call([query, key, value], kind, phi)
            linattn.linear_attention(query, key, value, phi, initial_state=state, **options)
    return {"passed": True}


def _steps_without_synchronization(library: Library, dtype: str) -> Found:
    import cupyx

    phi = feature_map_of("favor", 64, 256)
    lead = SMALL[:2]
    decoder = _decoder(library, dtype, lead)
    query, key, value = _inputs(library, dtype, (*lead, 64))
    state = decoder.state
    for allowed in (True, False):
        with cupyx.allow_synchronize(allowed):
            decoder.step(query, key, value)
            linattn.decode_step(query, key, value, state, phi)
    return {"passed": True}


def _infinities(library: Library) -> Found:
    import cupy

    low = cupy.full((3, 300), -np.inf, dtype="float32")
    rows = library.numpy(low.max(axis=-1)).tolist()
    found = [float(low.max()), float((-low).min()), *rows]
    return {"passed": found == [-np.inf, np.inf, *[-np.inf] * 3], "found": [str(x) for x in found]}

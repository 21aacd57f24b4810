"""What to run first on a GPU: ``python -m benchmarks.gpu.first_contact``, less than a minute.

One line for each thing that can go wrong, and no item ends the rest: every group runs in a separate
process, the most telling first. The host waits for the device after each launch, so that a kernel
that faults is named. Nothing is written but to stdout; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import linattn
from benchmarks.gpu.cases import Case, cases
from benchmarks.gpu.compilation import build, variants
from benchmarks.gpu.library import host_dtype, register
from benchmarks.gpu.parity import feature_map_of
from benchmarks.gpu.paths import ROOT, child_environment
from benchmarks.gpu.timer import captured, kernel_seconds

__all__ = ["GROUPS", "main"]

GROUP_SECONDS = 150
CALLS = 5
KINDS = {"full": False, "causal": True}
Arrays = list[Any]

_failed: list[str] = []


def main() -> int:
    """Run all groups, each in a separate process, or the one that is named."""
    if len(sys.argv) > 1:
        register()
        GROUPS[sys.argv[1]]()
        return bool(_failed)
    codes = []
    begun = time.time()
    for group in GROUPS:
        start = time.time()
        command = [sys.executable, "-m", "benchmarks.gpu.first_contact", group]
        try:
            finished = subprocess.run(
                command, cwd=ROOT, env=child_environment(), timeout=GROUP_SECONDS
            )
            code: int | str = finished.returncode
        except subprocess.TimeoutExpired:
            code = f"none, stopped after {GROUP_SECONDS} s"
        codes.append(code)
        now = time.time()
        print(f"----- {group}: exit code {code}, {now - start:.1f} s, {now - begun:.0f} s in all")
    return int(any(codes))


def _item(name: str, work: Callable[[], Any]) -> None:
    """Print what ``work`` returns, or how it fails."""
    begun = time.time()
    try:
        print(f"ok    {name}: {work()}  [{time.time() - begun:.1f} s]", flush=True)
    except Exception as error:  # of CUDA, of compilers: none may end the group
        _failed.append(name)
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error)[:600]}"
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        print(f"FAIL  {name}: {said}  ({place})", flush=True)


def _environment() -> None:
    """Versions, a kernel of CuPy, bfloat16, cuBLAS."""
    import cupy

    runtime = cupy.cuda.runtime

    def versions() -> str:
        cuda = f"driver {runtime.driverGetVersion()} runtime {runtime.runtimeGetVersion()}"
        python = f"Python {sys.version.split()[0]} NumPy {np.__version__} CuPy {cupy.__version__}"
        return f"{python} {cuda} NVRTC {cupy.cuda.nvrtc.getVersion()} linattn {linattn.__version__}"

    def device() -> dict[str, Any]:
        names = ("name", "major", "minor", "multiProcessorCount", "sharedMemPerBlockOptin")
        found = runtime.getDeviceProperties(0)
        return {name: found[name] for name in names}

    def bfloat16() -> list[float]:
        return list(cupy.ones(3, "float32").astype(host_dtype("bfloat16")).astype("f4").tolist())

    def product() -> float:
        ones = cupy.ones((64, 64), "float32")
        return float((ones @ ones)[0, 0])

    _item("versions", versions)
    _item("device", device)
    _item("a kernel of CuPy", lambda: float((cupy.ones(1000) * 2).sum()))
    _item("bfloat16 in CuPy", bfloat16)
    _item("cuBLAS", product)


def _wanted(case: Case) -> bool:
    usual = case.feature_map in ("favor", "elu") and case.dim == 64
    return usual and (" basic " in case.name or case.operation != "attention")


def _kernels() -> None:
    """Compile in threads what the groups below launch, and more."""
    import cupy

    from linattn_cupy import device

    def work() -> str:
        wanted = variants(case for case in cases() if _wanted(case))
        compiled, errors = build(wanted)
        if errors:
            raise RuntimeError(errors[0])
        here = cupy.cuda.runtime.getDevice()
        resources = set()
        for source, function, options in wanted:
            kernel = device._kernel(source, function, options, here)
            if not isinstance(kernel, str):
                resources.add(
                    (function, kernel.function.num_regs, kernel.function.local_size_bytes)
                )
        return f"{compiled} of {len(wanted)}; name, registers, local bytes: {sorted(resources)}"

    _item("all kernels", work)


def _waiting() -> None:
    """Have a kernel that faults named."""
    import cupy

    from linattn_cupy import device

    launch: Any = device.launch

    def launch_and_wait(source: str, function: str, *rest: Any) -> None:
        try:
            launch(source, function, *rest)
            cupy.cuda.Device().synchronize()
        except Exception as error:
            message = f"in {function}, grid {rest[1]}, shared {rest[3]}: {error}"
            raise RuntimeError(message) from error

    device.launch = launch_and_wait  # type: ignore[assignment]


def _maps() -> dict[str, Any]:
    return {name: feature_map_of(name, 64, 256) for name in ("favor", "elu")}


def _attend(arrays: Arrays, phi: Any, is_causal: bool) -> Arrays:
    query, key, value = arrays
    return [linattn.linear_attention(query, key, value, phi, is_causal=is_causal)]


def _pull(arrays: Arrays, phi: Any, is_causal: bool) -> Arrays:
    query, key, value = arrays
    _, pullback = linattn.linear_attention_vjp(query, key, value, phi, is_causal=is_causal)
    return list(pullback(value)[:3])


def _decode(arrays: Arrays, phi: Any) -> Arrays:
    state = linattn.init_state(phi, 64, batch_shape=(2, 3), like=arrays[0])
    state = linattn.update_state(state, arrays[1], arrays[2], phi)
    query, key, value = (array[..., 7, :] for array in arrays)
    return [linattn.Decoder(phi, state).step(query, key, value)]


def _numbers(dtype: str) -> None:
    """Compare with float64 of the generic code on the same device."""
    import cupy

    _waiting()
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 3, 300, 64)).astype(host_dtype(dtype)) for _ in range(3)]
    narrow = [cupy.asarray(a) for a in host]
    wide = [cupy.asarray(a.astype("float64")) for a in host]

    def errors(work: Callable[..., Arrays], *more: Any) -> str:
        got = [a.get().astype("float64") for a in work(narrow, *more)]
        with linattn.without_backends():
            wanted = [a.get() for a in work(wide, *more)]
        with np.errstate(all="ignore"):
            found = [
                float(np.linalg.norm(g - w) / np.linalg.norm(w))
                for g, w in zip(got, wanted, strict=True)
            ]
        return "relative errors " + " ".join(f"{error:.1e}" for error in found)

    for name, phi in _maps().items():
        for kind, is_causal in KINDS.items():
            _item(f"{dtype} {name} {kind}", partial(errors, _attend, phi, is_causal))
            _item(f"{dtype} {name} gradient {kind}", partial(errors, _pull, phi, is_causal))
        _item(f"{dtype} {name} decode", partial(errors, _decode, phi))
    if dtype == "float32":
        with linattn.config(precision="tf32"):
            _item("tf32 causal", partial(errors, _attend, _maps()["favor"], True))


def _arrays(dtype: str, length: int) -> Arrays:
    import cupy

    return [
        cupy.random.standard_normal((4, 16, length, 64), dtype="float32").astype(host_dtype(dtype))
        for _ in range(3)
    ]


def _graph() -> None:
    """Capture a call and replay it."""
    import cupy

    def work() -> str:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            arrays, phi = _arrays("bfloat16", 1024), _maps()["favor"]
            outputs: Arrays = []

            def call() -> None:
                outputs.extend(_attend(arrays, phi, True))

            replay = captured(call)
            replay()
            stream.synchronize()
            (again,) = _attend(arrays, phi, True)
            return f"same bits {bool((again == outputs[-1]).all())}"

    _item("graph of a call, bfloat16", work)


def _times() -> None:
    """Time calls: on the host, until the device is done, and each kernel."""
    import cupy

    def work(arrays: Arrays, phi: Any, is_causal: bool) -> str:
        for _ in range(3):
            _attend(arrays, phi, is_causal)
        cupy.cuda.Device().synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            _attend(arrays, phi, is_causal)
        host = time.perf_counter() - begun
        cupy.cuda.Device().synchronize()
        wall = time.perf_counter() - begun
        kernels = kernel_seconds(lambda: _attend(arrays, phi, is_causal))
        each = ", ".join(f"{name} {took * 1e6:.0f}" for name, took in kernels.items())
        per = 1e6 / CALLS
        return f"host {host * per:.0f} wall {wall * per:.0f} us; kernels {each}"

    for dtype, length in (("bfloat16", 8192), ("bfloat16", 1024), ("float32", 8192)):
        arrays = _arrays(dtype, length)
        for name, phi in _maps().items():
            for kind, is_causal in KINDS.items():
                what = f"{dtype} N={length} {name} {kind}"
                _item(what, partial(work, arrays, phi, is_causal))


GROUPS: dict[str, Callable[[], None]] = {
    "environment": _environment,
    "kernels": _kernels,
    "bfloat16": partial(_numbers, "bfloat16"),
    "times": _times,
    "float32": partial(_numbers, "float32"),
    "graph": _graph,
    "float16": partial(_numbers, "float16"),
    "float64": partial(_numbers, "float64"),
}


if __name__ == "__main__":
    sys.exit(main())

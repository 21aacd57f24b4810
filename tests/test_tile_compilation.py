"""The kernels in cuTile as NVIDIA's compiler makes them for GPUs: extra `tile`, no GPU."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("cuda") is None or find_spec("cuda.tile") is None:
    pytest.skip("needs cuda-tile and its compiler: extra tile", allow_module_level=True)

import cuda.tile as ct
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    KernelSignature,
    ScalarConstraint,
    export_kernel,
)

from linattn_cupy import tile, tile_kernels

LARGEST_STACK = {"sm_80": 1700, "sm_90": 872, "sm_100": 870, "sm_120": 1700}
"""Bytes a thread that kernels keep in memory for lack of registers, most of them in gradients."""

HALF = np.dtype("float16")
"""As many bytes as bfloat16."""


def constraint(argument):
    """What the compiler may take for granted of an argument."""
    if not isinstance(argument, np.ndarray):
        return ScalarConstraint(ct.int32 if isinstance(argument, int) else ct.float32)
    n = argument.ndim
    return ArrayConstraint(
        ct.float32 if argument.dtype == np.float32 else ct.bfloat16,
        n,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=[None] * (n - 1) + [1],
        stride_divisible_by=[16] * (n - 1) + [1],
        shape_divisible_by=[16 if i == n - 1 else 1 for i in range(n)],
        base_addr_divisible_by=16,
    )


def launches(monkeypatch, dtype, causal, gradient):
    """Kernels and arguments of a call of 256 features, and how many of these are constants."""
    found = []
    monkeypatch.setattr(tile, "launch", lambda name, grid, *args: found.append((name, args)))
    x = np.empty((2, 200, 64), dtype)
    phi = np.empty((256, 64), dtype), np.empty((1, 256), np.float32), -0.06
    call = tile.Call(np, x, x, x, *phi, causal)
    forward = tile.solve(call, keep=gradient)
    if gradient:
        tile.pull(call, forward, x)
    return found


CALLS = [
    (d, c, g) for d in (HALF, np.dtype("float32")) for c in (False, True) for g in (False, True)
]


def stack_bytes(cubin, folder):
    """Read the stack of a thread by `cuobjdump`, 0 without it."""
    tool, path = shutil.which("cuobjdump"), folder / "kernel.cubin"
    if tool is None:
        return 0
    path.write_bytes(cubin)
    command = [tool, "--dump-resource-usage", path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", said))


@pytest.mark.parametrize("arch", LARGEST_STACK)
@pytest.mark.parametrize(("dtype", "causal", "gradient"), CALLS)
def test_kernels_compile(monkeypatch, tmp_path, dtype, causal, gradient, arch):
    for name, args in launches(monkeypatch, dtype, causal, gradient):
        kernel = getattr(tile_kernels, name)
        constants = sum(
            "Constant" in str(x) or "C[" in str(x) for x in kernel._pyfunc.__annotations__.values()
        )
        count = len(args) - constants
        given = [constraint(x) for x in args[:count]] + list(args[count:])
        signature = KernelSignature(given, CallingConvention.cutile_python_v2(), symbol=name)
        made = io.BytesIO()
        export_kernel(kernel, [signature], made, gpu_code=arch, output_format="cubin")
        assert len(made.getvalue()) > 1000
        assert stack_bytes(made.getvalue(), tmp_path) <= LARGEST_STACK[arch], name

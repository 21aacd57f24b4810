"""What this device does at best: copies, matrix products by dtype, exponentials."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.library import host_dtype
from benchmarks.gpu.record import Item
from benchmarks.gpu.timer import CupyClock, measure

__all__ = ["PRODUCTS", "items"]

PRODUCTS = {"bfloat16": 8192, "float16": 8192, "tf32": 8192, "float32": 4096}
"""Rows of square matrices by dtype."""

COPIED = 2**31
"""Bytes of a copy: many times the cache."""

CHAINS, ROUNDS, BLOCKS, THREADS = 8, 4096, 2048, 256
EXPONENTIALS = r"""
extern "C" __global__ void exponentials(float* out, int rounds) {
    float x[CHAINS];
    for (int i = 0; i < CHAINS; i++) x[i] = threadIdx.x * 1e-3f + i * 1e-2f;
    for (int round = 0; round < rounds; round++) {
        #pragma unroll
        for (int i = 0; i < CHAINS; i++) {
            float y = -x[i];
            asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(x[i]) : "f"(y));
        }
    }
    float sum = 0;
    for (int i = 0; i < CHAINS; i++) sum += x[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
"""2^-x again and again, near 0.64, in chains that do not wait for each other."""


PRODUCTS_OF_WARPS = r"""
extern "C" __global__ void products(float* out, int rounds) {
    unsigned a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = 0x3c003c00u + threadIdx.x + i;
    for (int i = 0; i < 2; i++) b[i] = 0x3c003c00u + threadIdx.x - i;
    float d[CHAINS][4] = {};
    for (int round = 0; round < rounds; round++) {
        #pragma unroll
        for (int i = 0; i < CHAINS; i++) {
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    }
    float sum = 0;
    for (int i = 0; i < CHAINS; i++) for (int j = 0; j < 4; j++) sum += d[i][j];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
"""The instruction of the fused kernels, in chains that do not wait for each other."""

PRODUCT_FLOPS = 2 * 16 * 8 * 16
"""Of one instruction of a warp."""


def items(*, quick: bool = False) -> Iterator[Item]:
    """Yield the measurement of each ceiling: ``rate`` is a second."""
    yield Item("copy", _copy)
    for dtype, rows in PRODUCTS.items():
        rows = rows // 2 if quick else rows
        yield Item(dtype, partial(_product, dtype, rows))
    yield Item("exp", _exponentials)
    yield Item("mma.sync", _products_of_warps)


def _copy() -> dict[str, Any]:
    import cupy

    source = cupy.random.random(COPIED // 4, dtype="float32")
    target = cupy.empty_like(source)
    found = measure(CupyClock(), [lambda: cupy.copyto(target, source)])
    return {**found, "rate": 2 * COPIED / found["seconds"], "unit": "byte"}


def _product(dtype: str, n: int) -> dict[str, Any]:
    import cupy
    from cupy_backends.cuda.libs import cublas

    runtime = cupy.cuda.runtime
    kinds = {"bfloat16": runtime.CUDA_R_16BF, "float16": runtime.CUDA_R_16F}
    kind = kinds.get(dtype, runtime.CUDA_R_32F)
    compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if dtype == "tf32" else cublas.CUBLAS_COMPUTE_32F
    a, b, c = (
        cupy.random.standard_normal((n, n), dtype="float32").astype(host_dtype(dtype))
        for _ in range(3)
    )
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    handle = cupy.cuda.device.get_cublas_handle()

    def call() -> None:
        cublas.gemmEx(
            handle,
            cublas.CUBLAS_OP_N,
            cublas.CUBLAS_OP_N,
            *(n, n, n),
            one.ctypes.data,
            *(a.data.ptr, kind, n),
            *(b.data.ptr, kind, n),
            zero.ctypes.data,
            *(c.data.ptr, kind, n),
            compute,
            cublas.CUBLAS_GEMM_DEFAULT,
        )

    found = measure(CupyClock(), [call])
    return {**found, "rate": 2 * n**3 / found["seconds"], "unit": "flop", "rows": n}


def _exponentials() -> dict[str, Any]:
    found = _in_chains(EXPONENTIALS, "exponentials")
    count = BLOCKS * THREADS * CHAINS * ROUNDS
    return {**found, "rate": count / found["seconds"], "unit": "exp"}


def _products_of_warps() -> dict[str, Any]:
    found = _in_chains(PRODUCTS_OF_WARPS, "products")
    count = BLOCKS * THREADS // 32 * CHAINS * ROUNDS
    return {**found, "rate": count * PRODUCT_FLOPS / found["seconds"], "unit": "flop"}


def _in_chains(text: str, name: str) -> dict[str, Any]:
    """Time a kernel whose threads each repeat ``CHAINS`` instructions ``ROUNDS`` times."""
    import cupy

    kernel = cupy.RawKernel(text, name, options=(f"-DCHAINS={CHAINS}",))
    out = cupy.empty(BLOCKS * THREADS, dtype="float32")

    def call() -> None:
        kernel((BLOCKS,), (THREADS,), (out, np.int32(ROUNDS)))

    return measure(CupyClock(), [call])

"""Batched matrix products in float32: the one place that calls cuBLAS.

``cupy.matmul`` copies a transposed operand of three axes and cannot use TF32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from linattn.typing import Array
from linattn_cupy.device import cupy

MAX_BATCH = 65535
"""Most products a call: grids of some cuBLAS kernels end there."""

_tf32: ContextVar[bool] = ContextVar("linattn_cupy_tf32", default=False)
_float_1, _float_0 = np.ones(1, np.float32), np.zeros(1, np.float32)


@contextmanager
def tf32() -> Iterator[None]:
    """Let products round their operands to TF32, 10 bits after the point, inside."""
    before = _tf32.get()
    try:
        _tf32.set(True)
        yield
    finally:
        _tf32.set(before)


def multiply(
    a: Array,
    b: Array,
    out: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> None:
    """``out = a b``, or ``out += a b``: float32, (heads, n, k), (heads, k, m).

    Either operand may be given transposed, and may have one head that all share. Rows are
    contiguous; there may be gaps between them, and between heads.
    """
    from cupy_backends.cuda.libs import cublas

    heads, n, m = out.shape
    k = a.shape[-2] if transpose_a else a.shape[-1]
    kind = cupy.cuda.runtime.CUDA_R_32F
    compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if _tf32.get() else cublas.CUBLAS_COMPUTE_32F
    handle = cupy.cuda.device.get_cublas_handle()
    # cuBLAS counts columns first, so that it sees all arrays transposed: out^T = b^T a^T.
    for first in range(0, heads, MAX_BATCH):
        count = min(MAX_BATCH, heads - first)
        sides: list[int] = []
        for array in (b, a, out):
            step, row, size = array.strides
            step = 0 if array.shape[0] == 1 else step
            # The row of an array of one row may have any stride.
            columns = array.shape[-1] if array.shape[-2] == 1 else row // size
            sides += [array.data.ptr + first * step, kind, columns, step // size]
        cublas.gemmStridedBatchedEx(
            handle,
            cublas.CUBLAS_OP_T if transpose_b else cublas.CUBLAS_OP_N,
            cublas.CUBLAS_OP_T if transpose_a else cublas.CUBLAS_OP_N,
            *(m, n, k),
            _float_1.ctypes.data,
            *sides[:8],
            (_float_1 if add else _float_0).ctypes.data,
            *sides[8:],
            count,
            compute,
            cublas.CUBLAS_GEMM_DEFAULT,
        )

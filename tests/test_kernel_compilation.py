"""Kernels as NVRTC compiles them for GPUs: no spilled register, and a budget of them."""

from __future__ import annotations

import pytest

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]

PLAIN = """
#include "device.cuh"
KERNEL plain(const float* x, float* y) { y[threadIdx.x] = NUMBER * x[threadIdx.x]; }
KERNEL reversed(const float* x, float* y) {
    __shared__ float tile[100];
    tile[threadIdx.x] = x[threadIdx.x];
    block_sync();
    y[threadIdx.x] = tile[99 - threadIdx.x];
}
"""

# 100 numbers that all live at once, of threads that may have 32 registers.
SPILLING = """
#include "device.cuh"
KERNEL __launch_bounds__(1024, 2) spills(const float* x, float* y) {
    float numbers[100];
    #pragma unroll
    for (int i = 0; i < 100; i++) numbers[i] = x[1024 * i + threadIdx.x];
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < 100; i++) sum = sum * numbers[i] + numbers[99 - i];
    y[threadIdx.x] = sum;
}
"""

# No register is spilled, but an array that is indexed at run time lies in memory.
INDEXED = """
#include "device.cuh"
KERNEL indexed(const int* x, float* y) {
    float numbers[50];
    for (int i = 0; i < 50; i++) numbers[x[i]] = i;
    y[threadIdx.x] = numbers[x[threadIdx.x]];
}
"""


@pytest.fixture
def compiled(compile_kernel, tmp_path):
    """Compile a text."""

    def compile_text(text, arch, **options):
        path = tmp_path / "f.cu"
        path.write_text(text)
        return compile_kernel(path, options, arch)

    return compile_text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_resources_of_kernels_that_fit(compiled, arch):
    kernels = compiled(PLAIN, arch, NUMBER="2.0f")
    assert set(kernels) == {"plain", "reversed"}
    for kernel in kernels.values():
        assert 4 <= kernel.registers <= 24
        assert kernel.stack_bytes == kernel.spill_bytes == 0
    assert kernels["plain"].shared_bytes == 0
    assert kernels["reversed"].shared_bytes == 400


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_that_spills_is_seen(compiled, arch):
    kernel = compiled(SPILLING, arch)["spills"]
    assert kernel.registers <= 32
    assert kernel.spill_bytes >= 200
    assert kernel.stack_bytes >= 200


def test_an_array_indexed_at_run_time_is_seen(compiled):
    kernel = compiled(INDEXED, "sm_90")["indexed"]
    assert kernel.stack_bytes == 200
    assert kernel.spill_bytes == 0


def test_an_error_is_the_compilers(compiled, nvrtc):
    with pytest.raises(nvrtc.CompilationError, match=r'f\.cu\(3\): error: .*"NUMBER" is undefined'):
        compiled(PLAIN, "sm_90")

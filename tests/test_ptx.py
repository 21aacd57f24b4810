"""The interpreter of PTX: what device.cuh offers is computed right, and what is wrong is seen."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from linattn_cupy.device import compile_options
from tests.fake_gpu.device import cupy
from tests.fake_gpu.log import findings

pytestmark = pytest.mark.fake_gpu

HALVES = [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)]


def launch(parameters, body, *arrays, grid=(1,), block=(32,), shared=0):
    """Run the kernel `f` with this body; return the arrays after it."""
    code = f'#include "device.cuh"\nKERNEL f({parameters}) {{{body}}}\n'
    kernel = cupy.RawModule(code=code, options=compile_options({})).get_function("f")
    given = [cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays]
    kernel(grid, block, given, shared_mem=shared)
    return [x.get() for x in given if isinstance(x, cupy.ndarray)]


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_indices_cover_grid_and_block():
    body = """
        int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        out[b * blockDim.x * blockDim.y * blockDim.z + t] = b * 1000 + t;
    """
    (out,) = launch(
        "int* out", body, np.zeros((24, 210), np.int32), grid=(4, 3, 2), block=(7, 6, 5)
    )
    np.testing.assert_array_equal(out, np.arange(24)[:, None] * 1000 + np.arange(210))


def test_shuffles_and_votes():
    body = """
        float value = x[threadIdx.x];
        for (int lanes = 16; lanes > 0; lanes /= 2) value += shuffle_xor(value, lanes);
        sum[threadIdx.x] = value;
        bool here = threadIdx.x == 40;
        votes[threadIdx.x] = warp_any(here) + 2 * block_any(here) + 4 * block_any(false);
    """
    x = np.arange(96, dtype=np.float32)
    given = (x, np.zeros_like(x), np.zeros(96, np.int32))
    _, sums, votes = launch("const float* x, float* sum, int* votes", body, *given, block=(96,))
    np.testing.assert_array_equal(sums, np.repeat(x.reshape(3, 32).sum(axis=1), 32))
    np.testing.assert_array_equal(votes, np.where(np.arange(96) // 32 == 1, 3, 2))


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_all_halves_as_floats_and_back(name, dtype):
    body = f"""
        int i = blockIdx.x * 256 + threadIdx.x;
        wide[i] = {name}_to_float(x[i]);
        back[i] = float_to_{name}(wide[i]);
    """
    halves = np.arange(2**16).astype(np.uint16)
    given = (halves, np.zeros(2**16, np.float32), np.zeros(2**16, np.uint16))
    parameters = "const u16* x, float* wide, u16* back"
    _, wide, back = launch(parameters, body, *given, grid=(256,), block=(256,))
    expected = halves.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(wide, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(wide)[number], np.signbit(expected)[number])
    np.testing.assert_array_equal(back[number], halves[number])
    assert set(back[~number]) == {0x7FFF}  # the hardware has one NaN


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_floats_are_rounded_to_nearest_even(name, dtype):
    halves = np.arange(2**16).astype(np.uint16).view(dtype).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])[::17]
    middle = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32)
    random = np.random.default_rng(1).integers(0, 2**32, 9000, np.uint32).view(np.float32)
    x = np.concatenate([middle, halves, random[np.isfinite(random)]])[: 11 * 1024]
    body = f"int i = blockIdx.x * 256 + threadIdx.x; out[i] = float_to_{name}(x[i]);"
    given = (x, np.zeros(x.size, np.uint16))
    _, out = launch("const float* x, u16* out", body, *given, grid=(44,), block=(256,))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, x.astype(dtype).view(np.uint16))


PRODUCT = """
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    u32 words[4];
    for (int i = 0; i < 4; i++) {
        int row = g + (i % 2) * 8, column = 2 * t + (i / 2) * 8;
        words[i] = a[row * 16 + column] | static_cast<u32>(a[row * 16 + column + 1]) << 16;
    }
    u32 right[2];
    for (int i = 0; i < 2; i++) {
        int row = 2 * t + i * 8;
        right[i] = b[row * 8 + g] | static_cast<u32>(b[(row + 1) * 8 + g]) << 16;
    }
    float sum[4];
    for (int i = 0; i < 4; i++) sum[i] = d[(g + (i / 2) * 8) * 8 + 2 * t + i % 2];
    MMA(sum, words, right[0], right[1]);
    for (int i = 0; i < 4; i++) d[(g + (i / 2) * 8) * 8 + 2 * t + i % 2] = sum[i];
"""
"""A product of matrices as device.cuh documents it, element by element."""


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_products_of_matrices(name, dtype):
    a, b, d = (floats(2, 16, 16)[i] for i in (0, 1, 0))
    a, b, d = a.astype(dtype), b[:, :8].astype(dtype), np.ascontiguousarray(3 * d[:, 8:])
    given = (a.view(np.uint16), np.ascontiguousarray(b).view(np.uint16), d)
    body = PRODUCT.replace("MMA", f"mma_{name}")
    *_, out = launch("const u16* a, const u16* b, float* d", body, *given)
    np.testing.assert_allclose(out, a.astype(float) @ b.astype(float) + d, rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_load_matrices(transposed):
    function = "load_matrices_transposed" if transposed else "load_matrices"
    matrices = np.random.default_rng(2).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    body = f"""
        u16* tile = reinterpret_cast<u16*>(shared_memory());
        for (int i = 0; i < 8; i++) tile[threadIdx.x * 24 + i] = x[threadIdx.x * 8 + i];
        u32 words[4];
        warp_sync();
        {function}(words, tile + threadIdx.x * 24);
        for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = words[i];
    """
    given = (matrices, np.zeros((32, 4, 2), np.uint16))
    _, out = launch("const u16* x, u32* out", body, *given, shared=32 * 48)
    source = matrices.swapaxes(1, 2) if transposed else matrices
    # (lane (g, t), matrix, half): element 2 t + half of row g.
    expected = source.reshape(4, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4, 2)
    np.testing.assert_array_equal(out, expected)


def test_approximate_powers_of_2():
    x = np.array([0, 1.5, -126, -126.5, -149, -np.inf, np.inf, 128] + [0] * 24, np.float32)
    body = "out[threadIdx.x] = fast_exp2(x[threadIdx.x]);"
    _, out = launch("const float* x, float* out", body, x, np.zeros(32, np.float32))
    expected = [1, 2**1.5, 2.0**-126, 0, 0, 0, np.inf, np.inf] + [1] * 24
    np.testing.assert_allclose(out, expected, rtol=5e-7)


# What is wrong, and what is right beside it -------------------------------------------------------

REDUCE = """
    float* sums = reinterpret_cast<float*>(shared_memory());
    sums[threadIdx.x] = x[threadIdx.x];
    for (int half = 64; half > 0; half /= 2) {
        BARRIER
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) x[0] = sums[0];
"""
AGAIN = """
    __shared__ float s[128];
    float sum = 0;
    for (int round = 0; round < 2; round++) {
        s[threadIdx.x] = round + x[threadIdx.x];
        block_sync();
        sum += s[127 - threadIdx.x];
        BARRIER
    }
    x[threadIdx.x] = sum;
"""
LANES = """
    __shared__ float s[128];
    s[threadIdx.x] = x[threadIdx.x];
    BARRIER
    x[threadIdx.x] = s[threadIdx.x ^ 5];
"""
COPY = """
    float* tile = reinterpret_cast<float*>(shared_memory());
    copy_async(tile + 4 * (threadIdx.x % 32), x + 4 * (threadIdx.x % 32), true);
    BARRIER
    x[threadIdx.x] = tile[threadIdx.x];
"""


@pytest.mark.parametrize(
    ("body", "right", "wrong", "said"),
    [
        (REDUCE, "block_sync();", "", "of what another"),
        (REDUCE, "block_sync();", "warp_sync();", "of what another warp"),
        (AGAIN, "block_sync();", "", "of what another warp"),
        (LANES, "warp_sync();", "", "of what another lane"),
        (COPY, "copies_done(); block_sync();", "block_sync();", "has not brought yet"),
    ],
    ids=["no barrier", "a barrier of warps", "memory used again", "lanes", "a copy"],
)
def test_a_missing_barrier_is_seen(body, right, wrong, said):
    # Warps interleave at random: either side of a race may come first.
    threads = (32,) if body is COPY else (128,)
    for barrier, is_right in ((right, True), (wrong, False)):
        work = body.replace("BARRIER", barrier)
        launch("float* x", work, floats(128), block=threads, shared=512)
        found = findings()
        assert (not found) is is_right
        assert is_right or any(said in line for line in found)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x[128 + threadIdx.x] = 1;", "out of bounds"),
        ("x[threadIdx.x] = x[-4];", "out of bounds"),
        ("x[threadIdx.x] = shared_memory()[512];", "out of the block's shared memory"),
        ("reinterpret_cast<float4*>(x + 1)[0] = float4();", "misaligned access of 16 bytes"),
        ("u32 r[4]; load_matrices(r, shared_memory() + 8); x[0] = r[0];", "misaligned"),
        ("if (threadIdx.x < 9) warp_sync(); else shuffle_xor(x[0], 1);", "wait for each other"),
    ],
    ids=["after", "before", "shared", "misaligned", "matrices", "diverged"],
)
def test_a_kernel_that_is_stopped(body, said):
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        launch("float* x", body, floats(128), shared=512)
    assert any(said in line for line in findings())
    launch("float* x", "x[threadIdx.x] = 1;", floats(128))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x[threadIdx.x] = shared_memory()[threadIdx.x];", "an undefined value is written"),
        ("if (shared_memory()[threadIdx.x]) x[0] = 1;", "an undefined value decides a branch"),
        ("x[0] = blockIdx.x;", "race: written by two blocks"),
        ("x[1 + blockIdx.x] = x[2 - blockIdx.x];", "race: "),
    ],
    ids=["a result", "a branch", "two blocks", "of another block"],
)
def test_what_nobody_wrote_or_two_did(body, said):
    launch("float* x", body, floats(128), grid=(2,), shared=512)
    assert any(said in line for line in findings())


def test_values_that_nobody_computed():
    cupy.empty(3).get()
    cupy.empty((3, 3)) @ cupy.ones((3, 3))
    found = "\n".join(findings())
    assert "undefined values reach the host" in found
    assert "undefined values in" in found

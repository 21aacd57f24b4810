"""The emulator of CUDA kernels: what runs right, and that what is wrong is seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

TESTS = Path(__file__).resolve().parent
SHIPPED = TESTS.parent / "backends" / "linattn_cupy" / "kernels" / "device.cuh"
ONE_WARP = ((1, 1, 1), (32, 1, 1))


@pytest.fixture
def launch(emulator, tmp_path):
    """Run the kernel `f` with these parameters and this body."""

    def run(
        parameters: str,
        body: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: list[Any],
        *,
        shared: int = 0,
        options: dict[str, str | int] | None = None,
        before: str = "",
    ) -> None:
        path = tmp_path / "f.cu"
        path.write_text(f'#include "device.cuh"\n{before}\nKERNEL f({parameters}) {{{body}}}\n')
        emulator.launch(str(path), "f", options or {}, grid, block, shared, args)

    return run


@pytest.fixture
def fails(emulation):
    """Expect an error of the emulator whose message matches."""
    return lambda match: pytest.raises(emulation.EmulationError, match=match)


def floats(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_headers_beside_the_kernels(emulation, emulator_cache, tmp_path):
    """They are found, after the emulator's own device.cuh, and compiled again when they change."""
    (tmp_path / "device.cuh").write_text("#error the device.cuh of the kernels is for GPUs")
    (tmp_path / "f.cu").write_text(
        '#include "device.cuh"\n#include "n.cuh"\nKERNEL f(int* x) { *x = N; }\n'
    )
    for n in (3, 4):
        (tmp_path / "n.cuh").write_text(f"#define N {n}\n")
        x = np.zeros(1, np.int32)
        fresh = emulation.Emulator(emulator_cache, tmp_path)
        fresh.launch("f.cu", "f", {}, (1, 1, 1), (1, 1, 1), 0, [x])
        assert x == n


# Threads, blocks and arguments --------------------------------------------------------------------

ADD = """
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = x[i] + factor * y[i];
"""
ADD_PARAMETERS = (
    "const float* __restrict__ x, const double* y, float* __restrict__ sum, i64 n, float factor"
)


def test_vector_add_with_a_tail(launch):
    x, y = floats(100), np.arange(100.0)
    x.flags.writeable = False
    out = np.full(100, np.nan, np.float32)
    launch(ADD_PARAMETERS, ADD, (4, 1, 1), (32, 1, 1), [x, y, out, np.int64(100), np.float32(2)])
    np.testing.assert_array_equal(out, (x + 2 * y).astype(np.float32))


def test_indices_cover_grid_and_block(launch):
    out = np.zeros((2, 3, 4, 5, 6, 7), np.int32)
    body = """
        int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        out[b * blockDim.x * blockDim.y * blockDim.z + t] += 1 + b * 1000 + t;
    """
    launch("int* out", body, (4, 3, 2), (7, 6, 5), [out])
    expected = 1 + np.arange(24)[:, None] * 1000 + np.arange(210)
    np.testing.assert_array_equal(out.reshape(24, 210), expected)


def test_options_are_macros_and_none_is_a_null_pointer(launch):
    out = np.zeros(1, np.int32)
    body = "*out = (missing == nullptr) * NUMBER + EXPRESSION;"
    options = {"NUMBER": 40, "EXPRESSION": "(1 + 1)"}
    launch("int* out, const float* missing", body, *ONE_WARP, [out, None], options=options)
    assert out[0] == 42


def test_views_of_one_array_stay_aliased(launch):
    whole = floats(8, 6)
    expected = whole.copy()
    expected[::2, 1] = whole[1::2, 1]
    body = "if (threadIdx.x < 4) to[threadIdx.x * 12] = to[threadIdx.x * 12 + (from - to)];"
    args = [whole[::2, 1], whole[1::2, 1]]
    launch("float* to, const float* from", body, *ONE_WARP, args)
    np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_array_has_an_address_and_no_element(launch, fails, shape):
    empty = np.zeros(shape, np.float32)
    launch("float* x, int n", "if (threadIdx.x < n) x[0] = 1;", *ONE_WARP, [empty, np.int32(0)])
    with fails(r"0 bytes after the memory of args\[0\]"):
        launch("float* x, int n", "if (threadIdx.x < n) x[0] = 1;", *ONE_WARP, [empty, np.int32(1)])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([np.int32(3)], "takes 2 arguments, got 1"),
        ([np.int64(3), np.float32(0)], r"args\[0\] must be of type i4, got i8"),
        ([np.int32(3), np.float64(0)], r"args\[1\] must be of type f4, got f8"),
        ([np.zeros(3), np.float32(0)], r"args\[0\] must be of type i4, got P8"),
        ([3, np.float32(0)], r"args\[0\] must be an array, a NumPy scalar or None, got 3"),
    ],
)
def test_arguments_have_the_types_of_the_parameters(launch, fails, args, message):
    with fails(message):
        launch("int n, float x", "", *ONE_WARP, args)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        ((0, 1, 1), (32, 1, 1), 0, "grid"),
        ((1, 70000, 1), (32, 1, 1), 0, "grid"),
        ((1, 1, 1), (32, 1, 65), 0, "block"),
        ((1, 1, 1), (512, 4, 1), 0, "at most 1024 threads"),
        ((1, 1, 1), (32, 1, 1), 300_000, "shared must be"),
    ],
)
def test_a_launch_no_gpu_accepts(launch, fails, grid, block, shared, message):
    with fails(message):
        launch("", "", grid, block, [], shared=shared)


def test_a_source_that_does_not_compile_names_file_and_line(launch, fails):
    with fails(r"f\.cu:3:.*undeclared_name"):
        launch("int* out", "*out = undeclared_name;", *ONE_WARP, [np.zeros(1, np.int32)])


# Barriers -----------------------------------------------------------------------------------------

REDUCE = """
    float* sums = reinterpret_cast<float*>(shared_memory());
    sums[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        BARRIER
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
"""


@pytest.mark.parametrize("threads", [32, 256])
def test_block_reduction(launch, threads):
    x, out = floats(3, threads), np.zeros(3, np.float32)
    args = [x, out]
    options = {"BARRIER": "block_sync();"}
    parameters = "const float* x, float* out"
    grid, block = (3, 1, 1), (threads, 1, 1)
    launch(parameters, REDUCE, grid, block, args, shared=4 * threads, options=options)
    np.testing.assert_allclose(out, x.sum(axis=1, dtype=np.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("barrier", ["", "warp_sync();"])
def test_a_missing_barrier_makes_orders_differ(launch, fails, barrier):
    x, out = floats(3, 256), np.zeros(3, np.float32)
    options = {"BARRIER": barrier}
    with fails(r"f: args\[1\] differs between orders .* a barrier is missing"):
        launch(
            "const float* x, float* out",
            REDUCE,
            (3, 1, 1),
            (256, 1, 1),
            [x, out],
            shared=1024,
            options=options,
        )
    assert not out.any()


def test_a_missing_barrier_before_memory_is_used_again(launch, fails):
    body = """
        __shared__ float s[64];
        float sum = 0;
        for (int round = 0; round < 2; round++) {
            s[threadIdx.x] = round + threadIdx.x;
            block_sync();
            sum += s[63 - threadIdx.x];
            AGAIN
        }
        out[threadIdx.x] = sum;
    """
    out = np.zeros(64, np.float32)
    launch("float* out", body, (1, 1, 1), (64, 1, 1), [out], options={"AGAIN": "block_sync();"})
    np.testing.assert_array_equal(out, 1 + 2 * np.arange(64)[::-1])
    with fails("differs between orders"):
        launch("float* out", body, (1, 1, 1), (64, 1, 1), [out], options={"AGAIN": ""})


def test_lanes_that_exchange_through_memory_need_warp_sync(launch, fails):
    body = """
        __shared__ float s[32];
        s[threadIdx.x] = threadIdx.x;
        SYNC
        out[threadIdx.x] = s[threadIdx.x ^ 5];
    """
    out = np.zeros(32, np.float32)
    launch("float* out", body, *ONE_WARP, [out], options={"SYNC": "warp_sync();"})
    np.testing.assert_array_equal(out, np.arange(32) ^ 5)
    with fails("differs between orders"):
        launch("float* out", body, *ONE_WARP, [out], options={"SYNC": ""})


def test_blocks_that_depend_on_each_other(launch, fails):
    with fails(r"args\[0\] differs between orders"):
        launch("int* x", "*x = *x * 2 + blockIdx.x;", (3, 1, 1), (1, 1, 1), [np.zeros(1, np.int32)])


def test_shared_memory_starts_as_nan_in_each_block(launch):
    body = """
        __shared__ float s[32];
        float* dynamic = reinterpret_cast<float*>(shared_memory());
        out[blockIdx.x * 32 + threadIdx.x] = isnan(s[threadIdx.x]) && isnan(dynamic[threadIdx.x]);
        s[threadIdx.x] = dynamic[threadIdx.x] = 0;
    """
    out = np.zeros((3, 32), np.float32)
    launch("float* out", body, (3, 1, 1), (32, 1, 1), [out], shared=128)
    assert out.all()


@pytest.mark.parametrize("wanted", [-1, 0, 77, 95])
def test_block_any(launch, wanted):
    out = np.zeros(96, np.int32)
    body = "if (threadIdx.x < 90) out[threadIdx.x] = 1 + block_any(threadIdx.x == wanted);"
    launch("int* out, int wanted", body, (1, 1, 1), (96, 1, 1), [out, np.int32(wanted)])
    assert set(out[:90]) == {2 if 0 <= wanted < 90 else 1}


def test_a_barrier_waits_for_threads_that_have_not_left(launch):
    body = "if (threadIdx.x >= 40) return; block_sync(); out[threadIdx.x] = 1;"
    out = np.zeros(64, np.int32)
    launch("int* out", body, (1, 1, 1), (64, 1, 1), [out])
    assert out.sum() == 40


def test_threads_at_different_barriers(launch, fails):
    with fails("some threads are at block_sync, some at block_any"):
        body = "if (threadIdx.x < 32) block_sync(); else block_any(true);"
        launch("", body, (1, 1, 1), (64, 1, 1), [])


@pytest.mark.parametrize(
    ("body", "threads", "message"),
    [
        (
            "if (threadIdx.x < 48) warp_sync();",
            64,
            "warp 1: .* lanes 0 to 15 are at warp_sync, lanes 16",
        ),
        ("if (threadIdx.x != 7) warp_sync();", 32, "lane 7 has left"),
        ("warp_sync();", 48, "warp 1: .* lanes 16 to 31 do not exist"),
        (
            "if (threadIdx.x < 9) block_sync(); else shuffle_xor(1.0f, 1);",
            32,
            r"block \(0, 0, 0\), warp 0: .* lanes 0 to 8 are at block_sync, lanes 9 to 31 are at",
        ),
        (
            "if (threadIdx.x % 2) warp_sync(); else shuffle_xor(1.0f, 1);",
            32,
            "lane 0 is at shuffle_xor, lane 1 is at warp_sync",
        ),
        ("shuffle_xor(1.0f, threadIdx.x < 16 ? 1 : 2);", 32, "one number from 0 to 31 in all"),
        ("shuffle_xor(1.0f, 32);", 32, "one number from 0 to 31 in all 32 lanes, got 32 and 32"),
    ],
)
def test_lanes_that_diverge(launch, fails, body, threads, message):
    with fails("^f: .*(" + message + ")"):
        launch("", body, (1, 1, 1), (threads, 1, 1), [])


def test_shuffle_xor(launch):
    body = """
        float value = x[threadIdx.x];
        for (int lanes = 16; lanes > 0; lanes /= 2) value += shuffle_xor(value, lanes);
        out[threadIdx.x] = value;
    """
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    launch("const float* x, float* out", body, (1, 1, 1), (64, 1, 1), [x, out])
    np.testing.assert_array_equal(out, np.repeat(x.reshape(2, 32).sum(axis=1), 32))


@pytest.mark.parametrize("wanted", [-1, 0, 31, 40])
def test_warp_any(launch, wanted):
    out = np.zeros(64, np.int32)
    body = "out[threadIdx.x] = warp_any(threadIdx.x == wanted);"
    launch("int* out, int wanted", body, (1, 1, 1), (64, 1, 1), [out, np.int32(wanted)])
    expected = np.arange(64) // 32 == wanted // 32
    np.testing.assert_array_equal(out, expected)


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("-1", r"bytes before the memory of args\[1\]"),
        ("64", r"bytes after the memory of args\[1\]"),
        ("1", r"between the elements of args\[1\]"),
    ],
)
def test_a_write_beside_the_elements_of_an_array(launch, fails, index, message):
    body = "if (threadIdx.x == 3) x[INDEX] += x[INDEX] + *other;"
    args = [np.ones(1, np.float32), floats(64)[::2]]
    with fails(message):
        launch("const float* other, float* x", body, *ONE_WARP, args, options={"INDEX": index})


def test_what_lies_around_an_array_is_nan(launch):
    for dtype, name in [(np.float32, "float"), (np.float64, "double")]:
        x, out = np.ones(2, dtype), np.zeros(2, np.int32)
        body = "out[0] = isnan(x[-1]); out[1] = isnan(x[2]);"
        launch(f"const {name}* x, int* out", body, (1, 1, 1), (1, 1, 1), [x, out])
        assert out.all()
    x, out = np.ones(3, np.float16), np.zeros(2, np.float32)
    body = "out[0] = f16_to_float(x[3]); out[1] = bf16_to_float(x[3]);"
    launch("const u16* x, float* out", body, (1, 1, 1), (1, 1, 1), [x, out])
    assert np.isnan(out).all()


def test_a_write_to_a_read_only_array(launch, fails):
    x = np.zeros(4)
    x.flags.writeable = False
    with fails(r"args\[0\] is read-only and was written"):
        launch("double* x", "x[2] = 1;", *ONE_WARP, [x])
    assert not x.any()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("shared_memory()[64] = 1;", "a write after dynamic shared memory of 64 bytes"),
        ("shared_memory()[-1] = 1;", "a write before dynamic shared memory of 64 bytes"),
        ("*out = 1 / (*out - *out);", "f.cu:3: integer division by zero"),
        ("int a[4]; a[0] = 1; *out = a[*out + 4];", "f.cu:3: an index beyond its array"),
        ("*out = 1 << (*out + 32);", "f.cu:3: a shift by more bits than there are"),
        ("*out = reinterpret_cast<uint4*>(out + 1)->x;", "f.cu:3: an access that is not aligned"),
        ("*out = *reinterpret_cast<int*>(8);", "invalid access to memory"),
        ("*out = deep(out, 1);", "stack overflow"),
    ],
)
def test_errors_in_a_thread(launch, fails, body, message):
    deep = "__device__ __noinline__ int deep(volatile int* x, int n)"
    deep += "{ volatile int a[64]; a[n % 64] = *x; return n ? deep(x, n + 1) + a[n % 64] : 0; }"
    with fails(message):
        args = [np.zeros(8, np.int32)]
        launch("int* out", body, (1, 1, 1), (1, 1, 1), args, shared=64, before=deep)


def test_a_launch_after_an_error(launch, fails):
    x = np.zeros(2, np.int32)
    for _ in range(2):
        with fails("invalid access"):
            launch("int* x, i64 far", "x[far] = 1;", *ONE_WARP, [x, np.int64(2**40)])
        launch("int* x, i64 far", "x[far] = 1;", *ONE_WARP, [x, np.int64(1)])
        assert x[1] == 1


# Copies that go on by themselves ------------------------------------------------------------------

COPY = """
    float* tile = reinterpret_cast<float*>(shared_memory());
    copy_async(tile + 4 * threadIdx.x + TO, x + 4 * threadIdx.x + FROM, threadIdx.x != 5);
    WAIT
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = tile[4 * threadIdx.x + i];
"""


def copy(launch, *, wait: str = "copies_done();", to: int = 0, source: int = 0):
    x, out = floats(132), np.zeros(128, np.float32)
    options: dict[str, str | int] = {"WAIT": wait, "TO": to, "FROM": source}
    launch(
        "const float* x, float* out", COPY, *ONE_WARP, [x[:128], out], shared=512, options=options
    )
    return x[:128], out


def test_copy_async(launch):
    x, out = copy(launch)
    x[20:24] = 0
    np.testing.assert_array_equal(out, x)


def test_a_copy_that_is_read_too_early_is_nan(launch):
    _, out = copy(launch, wait="")
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"to": 1}, "copy_async: to must be 16-byte aligned, got an address 4 bytes beyond"),
        ({"source": 2}, "copy_async: from must be 16-byte aligned, got an address 8 bytes beyond"),
        ({"to": 4}, "copy_async: to must be 16 bytes of shared memory, got bytes 512 to 527 of"),
        ({"source": 8}, "copy_async: from must be 16 bytes of an argument's array"),
    ],
)
def test_a_copy_from_or_to_a_wrong_address(launch, fails, where, message):
    with fails(message):
        copy(launch, **where)


# Numbers ------------------------------------------------------------------------------------------

HALVES = [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)]


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_all_halves_as_floats_and_back(launch, name, dtype):
    halves = np.arange(2**16).astype(np.uint16)
    wide, back = np.zeros(2**16, np.float32), np.zeros(2**16, np.uint16)
    body = f"""
        int i = blockIdx.x * 256 + threadIdx.x;
        wide[i] = {name}_to_float(x[i]);
        back[i] = float_to_{name}(wide[i]);
    """
    args = [halves, wide, back]
    launch("const u16* x, float* wide, u16* back", body, (256, 1, 1), (256, 1, 1), args)
    expected = halves.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(wide, expected)
    np.testing.assert_array_equal(np.signbit(wide), np.signbit(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(back[number], halves[number])
    # The hardware has one NaN.
    assert set(back[~number]) == {0x7FFF}


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_floats_are_rounded_to_nearest_even(launch, name, dtype):
    halves = np.arange(2**16).astype(np.uint16).view(dtype).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    middle = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32)
    random = np.random.default_rng(1).integers(0, 2**32, 50_000, np.uint32).view(np.float32)
    largest = np.finfo(np.float32).max
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 65519.0, 65520.0, largest, 1e-45])
    above, below = (np.nextafter(middle, np.float32(end)) for end in (np.inf, -np.inf))
    x = np.concatenate([middle, above, below, random, special.astype(np.float32)])
    out = np.zeros(x.size, np.uint16)
    body = f"""
        int i = blockIdx.x * 256 + threadIdx.x;
        if (i < n) out[i] = float_to_{name}(x[i]);
    """
    args = [x, out, np.int32(x.size)]
    blocks = -(-x.size // 256)
    launch("const float* x, u16* out, int n", body, (blocks, 1, 1), (256, 1, 1), args)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype)
    expected_bits = np.where(np.isnan(x), np.uint16(0x7FFF), expected.view(np.uint16))
    np.testing.assert_array_equal(out, expected_bits)


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_the_larger_of_two_halves(launch, name, dtype):
    numbers = np.array([0.5, -0.5, 0.0, 3.0, -7.0, np.inf, -np.inf, np.nan]).astype(dtype)
    first, second = (x.ravel() for x in np.meshgrid(numbers, numbers))
    out = np.zeros(first.size, np.uint16)
    args = [first.view(np.uint32), second.view(np.uint32), out.view(np.uint32)]
    body = f"out[threadIdx.x] = max_{name}(a[threadIdx.x], b[threadIdx.x]);"
    launch("const u32* a, const u32* b, u32* out", body, (1, 1, 1), (32, 1, 1), args)
    expected = np.fmax(first.astype(float), second.astype(float))
    np.testing.assert_array_equal(out.view(dtype).astype(float), expected)


def test_pack_bf16_puts_the_first_number_low(launch):
    out = np.zeros(1, np.uint32)
    launch("u32* out", "*out = pack_bf16(1.0f, -2.0f);", (1, 1, 1), (1, 1, 1), [out])
    assert out.view(ml_dtypes.bfloat16).tolist() == [1.0, -2.0]


def test_fast_exp2_has_no_subnormal_results(launch):
    x = np.array([0, 1.5, -126, -126.5, -149, -np.inf, np.inf, 128, np.nan] + [0] * 23, np.float32)
    out = np.zeros(32, np.float32)
    body = "out[threadIdx.x] = fast_exp2(x[threadIdx.x]);"
    launch("const float* x, float* out", body, *ONE_WARP, [x, out])
    expected = [1, 2**1.5, 2.0**-126, 0, 0, 0, np.inf, np.inf, np.nan] + [1] * 23
    np.testing.assert_allclose(out, expected, rtol=2e-7)


# Tensor cores -------------------------------------------------------------------------------------

# As device.cuh documents it, element by element.
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


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_mma(launch, name, dtype):
    a, b, d = (floats(2, 16, 16)[i] for i in (0, 1, 0))
    a, b, d = a.astype(dtype), b[:, :8].astype(dtype), 3 * d[:, 8:]
    expected = a.astype(np.float64) @ b.astype(np.float64) + d
    out = d.copy()
    args = [a.view(np.uint16), np.ascontiguousarray(b).view(np.uint16), out]
    options = {"MMA": f"mma_{name}"}
    launch("const u16* a, const u16* b, float* d", PRODUCT, *ONE_WARP, args, options=options)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_load_matrices(launch, transposed):
    function = "load_matrices_transposed" if transposed else "load_matrices"
    matrices = np.random.default_rng(2).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    out = np.zeros((32, 4, 2), np.uint16)
    # Rows of 24 elements, so that a row's address is not that of the one before plus its length.
    body = f"""
        u16* tile = reinterpret_cast<u16*>(shared_memory());
        for (int i = 0; i < 8; i++) tile[threadIdx.x * 24 + i] = x[threadIdx.x * 8 + i];
        u32 words[4];
        SYNC
        {function}(words, tile + threadIdx.x * 24);
        for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = words[i];
    """
    options = {"SYNC": "warp_sync();"}
    args = [matrices, out]
    parameters = "const u16* x, u32* out"
    launch(parameters, body, *ONE_WARP, args, shared=32 * 48, options=options)
    source = matrices.swapaxes(1, 2) if transposed else matrices
    # (lane (g, t), matrix, half): element 2 t + half of row g.
    expected = source.reshape(4, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4, 2)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("64 * 16", "row must be 16 bytes of shared memory, got bytes 1024 to 1039 of the dynamic"),
        ("threadIdx.x * 8", "row must be 16-byte aligned, got an address 8 bytes beyond"),
    ],
)
def test_load_matrices_from_a_wrong_address(launch, fails, row, message):
    body = f"u32 r[4]; load_matrices(r, shared_memory() + {row});"
    with fails("load_matrices: " + message):
        launch("", body, *ONE_WARP, [], shared=1024)


def test_load_matrices_reads_no_row_that_another_lane_has_yet_to_write(launch, fails):
    body = """
        u16* tile = reinterpret_cast<u16*>(shared_memory());
        for (int i = 0; i < 8; i++) tile[(31 - threadIdx.x) * 8 + i] = threadIdx.x;
        u32 r[4];
        load_matrices(r, tile + threadIdx.x * 8);
        out[threadIdx.x] = r[0];
    """
    with fails("differs between orders"):
        launch("u32* out", body, *ONE_WARP, [np.zeros(32, np.uint32)], shared=512)


# The two headers ----------------------------------------------------------------------------------


def test_both_headers_have_the_same_functions():
    def functions(path: Path) -> set[str]:
        text = re.sub(r"//.*", "", path.read_text())
        found = re.findall(r"__device__ __forceinline__ ([^{;]*?\))\s*\{", text)
        return {" ".join(signature.split()) for signature in found}

    shipped = functions(SHIPPED)
    assert len(shipped) > 10
    assert functions(TESTS / "emulator" / "device.cuh") == shipped


def test_both_headers_have_the_same_macros_and_types():
    def lines(path: Path) -> set[str]:
        return set(re.findall(r"^(?:typedef|#define [A-Z]).*", path.read_text(), re.MULTILINE))

    assert lines(TESTS / "emulator" / "device.cuh") == lines(SHIPPED)

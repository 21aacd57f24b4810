// What the kernels use of the hardware, one function an instruction.
//
// Kernels use no other intrinsic: whoever gives these functions another body can run the kernels
// elsewhere.
//
// A thread's lane is (g, t) = (lane / 4, lane % 4). Fragments of 16-bit products, as PTX lays
// them out ("Matrix Fragments for mma.m16n8k16"), two elements a word, the lower index low:
//   a[0] rows g      columns 2t, 2t + 1        b[0] rows 2t, 2t + 1   column g
//   a[1] rows g + 8  columns 2t, 2t + 1        b[1] rows 2t + 8, + 9  column g
//   a[2] rows g      columns 2t + 8, + 9       d[0], d[1] row g       columns 2t, 2t + 1
//   a[3] rows g + 8  columns 2t + 8, + 9       d[2], d[3] row g + 8   columns 2t, 2t + 1
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WARP 32
#define KERNEL extern "C" __global__ void
#define INFINITE __int_as_float(0x7f800000)
// A loop over i = 0 ... n - 1 that is unrolled: what it indexes stays in registers.
#define UNROLLED(i, n) _Pragma("unroll") for (int i = 0; i < (n); ++i)

// Dynamic shared memory of the block, 16-byte aligned.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
    return dynamic_shared_memory;
}

__device__ __forceinline__ void block_sync() { __syncthreads(); }

__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// Whether the predicate holds in any thread of the block; also a barrier.
__device__ __forceinline__ bool block_any(bool predicate) { return __syncthreads_or(predicate); }

// Whether the predicate holds in any lane of the warp.
__device__ __forceinline__ bool warp_any(bool predicate) { return __any_sync(0xffffffffu, predicate); }

__device__ __forceinline__ float shuffle_xor(float value, int lanes) {
    return __shfl_xor_sync(0xffffffffu, value, lanes);
}

// Numbers ----------------------------------------------------------------------------------------

__device__ __forceinline__ float bf16_to_float(u16 bits) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
}

// Two floats, rounded to nearest even, in one word.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ u16 float_to_bf16(float value) {
    return static_cast<u16>(pack_bf16(value, 0.0f));
}

__device__ __forceinline__ float f16_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 float_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// The larger of two bf16, twice; NaN only where both are.
__device__ __forceinline__ u32 max_bf16(u32 a, u32 b) {
    u32 word;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}

__device__ __forceinline__ u32 max_f16(u32 a, u32 b) {
    u32 word;
    asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}

// 2^x within 2 units in the last place; subnormal results are 0.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Tensor cores ------------------------------------------------------------------------------------

// d += a b, 16 x 8 x 16, accumulated in float32.
#define MMA(name, type)                                                                                  \
    __device__ __forceinline__ void name(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {             \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                      \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                   \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                    \
    }
MMA(mma_bf16, "bf16")
MMA(mma_f16, "f16")

// Four 8 x 8 matrices of 16-bit elements: lane i gives the address (16-byte aligned, shared memory)
// of row i % 8 of matrix i / 8, and gets elements 2t, 2t + 1 of row g of each; transposed of column g.
#define LOAD_MATRICES(name, kind)                                                                        \
    __device__ __forceinline__ void name(u32 (&r)[4], const void* row) {                                 \
        u32 address = static_cast<u32>(__cvta_generic_to_shared(row));                                   \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];"          \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                    \
                     : "r"(address)                                                                      \
                     : "memory");                                                                        \
    }
LOAD_MATRICES(load_matrices, "")
LOAD_MATRICES(load_matrices_transposed, ".trans")

// Copies that go on by themselves ------------------------------------------------------------------

// 16 aligned bytes from global to shared memory; zeros where not valid (nothing is then read).
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(from), "r"(bytes)
                 : "memory");
}

// Wait for this thread's copies; a barrier must follow before other threads read them.
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

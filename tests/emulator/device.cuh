// The kernels' device.cuh on a CPU: the same functions, and what CUDA itself provides to kernels.
//
// What a GPU does within limits is one of the allowed answers here: mma adds its products one after
// the other in float32, column by column of a; fast_exp2 is exp2f, subnormal results 0.
#pragma once

#include <cmath>
#include <cstring>

#include "runtime.h"

// The language ------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(bytes) alignas(bytes)
// All of them together, so that each block finds them poisoned.
#define __shared__ static __attribute__((section("emulated_shared")))

struct float2 { alignas(8) float x; float y; };
struct float4 { alignas(16) float x; float y, z, w; };
struct int2 { alignas(8) int x; int y; };
struct int4 { alignas(16) int x; int y, z, w; };
struct uint2 { alignas(8) unsigned x; unsigned y; };
struct uint4 { alignas(16) unsigned x; unsigned y, z, w; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
inline To emulated_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "bits of another width");
    To bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __int_as_float(int bits) { return emulated_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return emulated_bits<float>(bits); }
inline int __float_as_int(float value) { return emulated_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return emulated_bits<unsigned>(value); }

inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }

template <class A, class B>
inline auto min(A a, B b) -> decltype(a + b) { return b < a ? b : a; }
template <class A, class B>
inline auto max(A a, B b) -> decltype(a + b) { return a < b ? b : a; }

using std::isfinite;
using std::isinf;
using std::isnan;

template <class T>
inline T atomicAdd(T* address, T value) {
    T old = *address;
    *address = old + value;
    return old;
}

template <class T>
inline T atomicOr(T* address, T value) {
    T old = *address;
    *address = old | value;
    return old;
}

// device.cuh ---------------------------------------------------------------------------------------

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WARP 32
#define KERNEL extern "C" __global__ void
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ unsigned char* shared_memory() { return emulator::shared_memory(); }

__device__ __forceinline__ void block_sync() { emulator::block_sync(); }

__device__ __forceinline__ void warp_sync() { emulator::warp_sync(); }

__device__ __forceinline__ bool block_any(bool predicate) { return emulator::block_any(predicate); }

__device__ __forceinline__ bool warp_any(bool predicate) {
    float any = predicate ? 1.0f : 0.0f;
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) any += emulator::shuffle_xor(any, lanes);
    return any > 0.0f;
}

__device__ __forceinline__ float shuffle_xor(float value, int lanes) {
    return emulator::shuffle_xor(value, lanes);
}

__device__ __forceinline__ float bf16_to_float(u16 bits) {
    return emulator::bf16_to_float(bits);
}

__device__ __forceinline__ u16 float_to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    // Half of the last place that stays, less one where that place is even: ties go to even.
    return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    return float_to_bf16(low) | static_cast<u32>(float_to_bf16(high)) << 16;
}

__device__ __forceinline__ float f16_to_float(u16 bits) { return emulator::f16_to_float(bits); }

__device__ __forceinline__ u16 float_to_f16(float value) {
    u32 bits = __float_as_uint(value);
    u32 sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fff;
    if (size >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);
    if (size < 0x38800000u) {
        // Below 2^-14: beside 0.5 the last place of a float32 is that of a subnormal float16.
        float shifted = __uint_as_float(size) + 0.5f;
        return static_cast<u16>(sign | (__float_as_uint(shifted) - 0x3f000000u));
    }
    return static_cast<u16>(sign | ((size + 0xfffu + ((size >> 13) & 1)) >> 13) - 0x1c000u);
}

template <class Convert>
inline u32 emulated_max(u32 a, u32 b, Convert to_float) {
    u32 word = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const u16 x = static_cast<u16>(a >> shift), y = static_cast<u16>(b >> shift);
        const bool first = isnan(to_float(y)) || to_float(x) > to_float(y);
        word |= static_cast<u32>(first ? x : y) << shift;
    }
    return word;
}

__device__ __forceinline__ u32 max_bf16(u32 a, u32 b) { return emulated_max(a, b, bf16_to_float); }

__device__ __forceinline__ u32 max_f16(u32 a, u32 b) { return emulated_max(a, b, f16_to_float); }

__device__ __forceinline__ float fast_exp2(float x) {
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::mma_bf16(d, a, b0, b1);
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::mma_f16(d, a, b0, b1);
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) {
    emulator::load_matrices(r, row);
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const void* row) {
    emulator::load_matrices_transposed(r, row);
}

__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    emulator::copy_async(to, from, valid);
}

__device__ __forceinline__ void copies_done() { emulator::copies_done(); }

// What all kernels of attention share, whatever their arrays: logs, sums, strides, and how to divide.
//
// The file that includes this one includes device.cuh before it. Option: WARPS.
#pragma once

namespace {

// The least denominator that is accepted, for one term: underflow cannot have taken more than rounding.
constexpr float TINY_OVER_EPS = 1.17549435e-38f / 1.1920929e-7f;

__device__ __forceinline__ float finite_shift(float log) { return log == -INFINITE ? 0.0f : log; }

// log f(x) of elu + 1 (map 1) and relu (map 2): a feature is handled by its log, so that a token
// whose features are all tiny keeps them.
__device__ __forceinline__ float log_activation(int map, float x) {
    if (map == 1) {
        return x < 0.0f ? x : log1pf(x);
    }
    return isnan(x) ? x : logf(fmaxf(x, 0.0f));
}

// Numerator over denominator, as linattn divides: 0 where the denominator is, NaN where it overflowed.
template <typename Real>
__device__ __forceinline__ Real divide(Real numerator, Real denominator) {
    if (denominator == 0) {
        return isfinite(numerator) ? 0 : numerator / denominator;
    }
    return isinf(denominator) ? denominator - denominator : numerator / denominator;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        x = fmaxf(x, shuffle_xor(x, lanes));
    }
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        x += shuffle_xor(x, lanes);
    }
    return x;
}

// -curvature |x|^2 / 2 from the sums of squares of the lanes of a warp. A square that overflows becomes NaN: its
// features are not known to be zero.
__device__ __forceinline__ float square_term(float sum, float curvature) {
    if (curvature == 0.0f) {
        return 0.0f;
    }
    sum = warp_sum(sum) * -0.5f * curvature;
    return sum + (sum - sum);
}

// Largest, or sum, over the threads of the block, in all of them; a barrier stands between two calls.
template <bool LARGEST>
__device__ __forceinline__ float over_block(float x, float* numbers) {
    x = LARGEST ? warp_max(x) : warp_sum(x);
    if (threadIdx.x % WARP == 0) {
        numbers[threadIdx.x / WARP] = x;
    }
    block_sync();
    x = numbers[0];
    for (int warp = 1; warp < WARPS; ++warp) {
        x = LARGEST ? fmaxf(x, numbers[warp]) : x + numbers[warp];
    }
    return x;
}

// The offset of a head of an array whose three leading axes, of sizes (.., n1, n2), have these strides.
__device__ __forceinline__ i64 head_offset(i64 head, i64 n1, i64 n2, i64 s0, i64 s1, i64 s2) {
    i64 rest = head / n2;
    return rest / n1 * s0 + rest % n1 * s1 + head % n2 * s2;
}

}  // namespace

#define OFFSET(name) head_offset(head, n1, n2, name##_0, name##_1, name##_2)

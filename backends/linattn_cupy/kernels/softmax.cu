// Scores of exact pairs become weights, in place, in float32: a row divided by its sum.
//
//   weight_ij = exp(scale s_ij + w_j - M_i) / total_i,  M_i the row's largest, over the keys j that query i sees:
//   those up to first + i, or all; none of log weight w_j = -inf.
// A row may have read other keys by a map: numerators, denominators and the logs of their scales. They count in M and
// in the total; `output` gets the numerators on the row's scale, so that the product of weights and values is added.
// A row without keys has weights 0. NaN and infinite logits make NaN: the caller asks another function.
// Option: WARPS.
#include "device.cuh"
#include "common.cuh"
#include "rows.cuh"

// Scores (heads, n, s), a block of threads a row; log weights (heads, s) and the norms, (heads, n), may be null, and
// so may what was read before: numerators (heads, n, e), denominators and logs (heads, n).
KERNEL __launch_bounds__(THREADS)
    softmax_rows(float* __restrict__ scores, int n, int s, float scale, int is_causal, int first,
                 const float* __restrict__ weights, i64 weights_head, float* __restrict__ norms, i64 norms_head,
                 const float* __restrict__ nums, const float* __restrict__ dens, i64 dens_head,
                 const float* __restrict__ logs, i64 logs_head, i64 nums_head, int e, float* __restrict__ output,
                 ROWS(output)) {
    __shared__ float numbers[WARPS];
    const i64 head = blockIdx.x / n;
    const int row = blockIdx.x % n, end = is_causal ? min(first + row + 1, s) : s;
    scores += static_cast<i64>(blockIdx.x) * s;
    weights = weights == nullptr ? weights : weights + head * weights_head;
    float top = -INFINITE, sees = 0.0f;
    for (int j = threadIdx.x; j < end; j += THREADS) {
        const float weight = weights == nullptr ? 0.0f : weights[j];
        if (weight > -INFINITE) {
            top = fmaxf(top, fmaf(scores[j], scale, weight));
            sees = 1.0f;
        }
    }
    top = over_block<true>(top, numbers);
    block_sync();  // all have read the numbers
    sees = over_block<true>(sees, numbers);
    const bool overflowed = sees > 0.0f && top == -INFINITE;
    const float den = dens == nullptr ? 0.0f : dens[head * dens_head + row];
    const float log = den == 0.0f ? -INFINITE : logs[head * logs_head + row];
    top = fmaxf(top, log);
    const float shift = finite_shift(top), rest = den == 0.0f ? 0.0f : expf(log - shift);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < s; j += THREADS) {
        const float weight = weights == nullptr ? 0.0f : weights[j];
        const bool seen = j < end && weight > -INFINITE;
        const float entry = seen ? expf(fmaf(scores[j], scale, weight) - shift) : 0.0f;
        scores[j] = entry;
        sum += entry;
    }
    block_sync();
    sum = over_block<false>(sum, numbers) + rest * den;
    sum = overflowed ? top - top : sum;  // NaN
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int j = threadIdx.x; j < s; j += THREADS) {
        scores[j] *= inverse;
    }
    if (threadIdx.x == 0 && norms != nullptr) {
        norms[head * norms_head + row] = top + logf(sum);
    }
    for (int x = threadIdx.x; nums != nullptr && x < e; x += THREADS) {
        const float num = nums[head * nums_head + static_cast<i64>(row) * e + x];
        output[head * output_head + row * output_row + x] = den == 0.0f ? 0.0f : num * (rest * inverse);
    }
}

// Whether all elements are finite: else `fine` becomes 0.
KERNEL __launch_bounds__(THREADS) check_finite(const float* __restrict__ x, i64 size, int* __restrict__ fine) {
    constexpr int AT_ONCE = 8;
    const i64 first = static_cast<i64>(blockIdx.x) * AT_ONCE * THREADS + threadIdx.x;
    bool bad = false;
    UNROLLED(k, AT_ONCE) {
        bad = bad || (first + k * THREADS < size && !isfinite(x[first + k * THREADS]));
    }
    if (bad) {
        *fine = 0;
    }
}

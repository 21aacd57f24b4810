// Between products: logits become weights on a shared scale, in float32 and in place.
//
// A block of n tokens of every head; u = x omega^T comes from a matrix product, (heads, n, m), and
// leaves as weights:
//   keys     exp(u + row + col - c'), c' = max(c, the block's largest)
//   queries  exp(u + col + c - M),    M the row's largest; its log is M + row
// with row = -curvature |x|^2 / 2 + log weight.
//
// Option: WARPS.
#include "device.cuh"
#include "common.cuh"

namespace {

constexpr int THREADS = WARPS * WARP;

}  // namespace

// Row terms of tokens (rows, d), a warp each; `weights`, (rows) or null, are added. A square that
// overflows becomes NaN: its features are not known to be zero.
KERNEL __launch_bounds__(THREADS)
    row_terms(const float* __restrict__ x, const float* __restrict__ weights, i64 rows, int d, float curvature,
              float* __restrict__ terms) {
    const i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= rows) {
        return;
    }
    float sum = 0.0f;
    if (curvature != 0.0f) {
        for (int i = threadIdx.x % WARP; i < d; i += WARP) {
            sum = fmaf(x[row * d + i], x[row * d + i], sum);
        }
        sum = warp_sum(sum) * -0.5f * curvature;
        sum += sum - sum;
    }
    if (threadIdx.x % WARP == 0) {
        terms[row] = weights == nullptr ? sum : sum + weights[row];
    }
}

// Logits of maps of coordinates: u = log f(x), f = elu + 1 (map 1) or relu (map 2).
KERNEL __launch_bounds__(THREADS)
    log_activations(const float* __restrict__ x, i64 total, int map, float* __restrict__ u) {
    const i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < total) {
        u[i] = log_activation(map, x[i]);
    }
}

// Weights of keys. Blocks: x = head, y = 32 features, a lane each. `factors`, (heads, m), is what the
// state before is to be multiplied by; `spec_heads` is 1 or the number of heads.
KERNEL __launch_bounds__(THREADS)
    key_weights(float* __restrict__ u, const float* __restrict__ terms, const float* __restrict__ col,
                i64 spec_heads, const float* __restrict__ shifts, int n, int m, float* __restrict__ next_shifts,
                float* __restrict__ factors) {
    __shared__ float warp_tops[WARPS][WARP];
    const i64 head = blockIdx.x;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, r = blockIdx.y * WARP + lane;
    const bool valid = r < m;
    u += head * n * m;
    terms += head * n;
    const float offset = valid ? col[(spec_heads == 1 ? 0 : head) * m + r] : 0.0f;
    const float before = valid ? shifts[head * m + r] : -INFINITE;
    float top = before;
    for (int j = warp; valid && j < n; j += WARPS) {
        top = fmaxf(top, u[static_cast<i64>(j) * m + r] + offset + terms[j]);
    }
    warp_tops[warp][lane] = top;
    block_sync();
    for (int w = 0; w < WARPS; ++w) {
        top = fmaxf(top, warp_tops[w][lane]);
    }
    if (!valid) {
        return;
    }
    const float shift = finite_shift(top);
    if (warp == 0) {
        next_shifts[head * m + r] = top;
        factors[head * m + r] = expf(before - shift);
    }
    for (int j = warp; j < n; j += WARPS) {
        float* entry = u + static_cast<i64>(j) * m + r;
        *entry = expf(*entry + offset + terms[j] - shift);
    }
}

// Weights of queries on the shifts of their state, a warp a row; `norms` gets the log of the row.
KERNEL __launch_bounds__(THREADS)
    query_weights(float* __restrict__ u, const float* __restrict__ terms, const float* __restrict__ col,
                  i64 spec_heads, const float* __restrict__ shifts, i64 rows, int n, int m,
                  float* __restrict__ norms) {
    const i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= rows) {
        return;
    }
    const int lane = threadIdx.x % WARP;
    const i64 head = row / n;
    u += row * m;
    shifts += head * m;
    col += (spec_heads == 1 ? 0 : head) * m;
    float top = -INFINITE;
    for (int r = lane; r < m; r += WARP) {
        top = fmaxf(top, u[r] + col[r] + shifts[r]);
    }
    top = warp_max(top);
    const float shift = finite_shift(top);
    for (int r = lane; r < m; r += WARP) {
        u[r] = expf(u[r] + col[r] + shifts[r] - shift);
    }
    if (lane == 0) {
        norms[row] = top + terms[row];
    }
}

// A state on the scale of its next one: next = kvz factors, (heads m, columns).
KERNEL __launch_bounds__(THREADS)
    rescale(const float* __restrict__ kvz, const float* __restrict__ factors, i64 total, int columns,
            float* __restrict__ next) {
    const i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < total) {
        next[i] = kvz[i] * factors[i / columns];
    }
}

// Scores (heads, n, n): 0 above the diagonal.
KERNEL __launch_bounds__(THREADS) triangle(float* __restrict__ scores, i64 total, int n) {
    const i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < total && i % n > i / n % n) {
        scores[i] = 0.0f;
    }
}

// Whether a row of a causal block is rejected, (heads): one that is not finite, or whose denominator is
// below (tiny / eps) (m N + z) although it sees a key; it may have underflowed on the scale that the
// block shares. `length`: tokens up to the block's end; kvz, shifts: the state before the block.
KERNEL __launch_bounds__(THREADS)
    check_rows(const float* __restrict__ num_den, const float* __restrict__ weights, const float* __restrict__ kvz,
               const float* __restrict__ shifts, i64 length, int n, int m, int columns, int* __restrict__ flags) {
    __shared__ float warp_terms[WARPS];
    __shared__ int first_seen;
    const i64 head = blockIdx.x;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    num_den += head * n * columns;
    kvz += head * m * columns;
    shifts += head * m;
    float terms = 0.0f;
    bool seen = false;
    for (int r = threadIdx.x; r < m; r += THREADS) {
        terms += fabsf(kvz[static_cast<i64>(r) * columns + columns - 1]);
        seen = seen || shifts[r] > -INFINITE;
    }
    terms = warp_sum(terms);
    if (lane == 0) {
        warp_terms[warp] = terms;
    }
    seen = block_any(seen);
    if (threadIdx.x == 0) {
        first_seen = 0;
        while (!seen && weights != nullptr && first_seen < n && weights[head * n + first_seen] == -INFINITE) {
            ++first_seen;
        }
    }
    block_sync();
    terms = static_cast<float>(m) * static_cast<float>(length);
    for (int w = 0; w < WARPS; ++w) {
        terms += warp_terms[w];
    }
    bool rejected = false;
    for (int i = warp; i < n; i += WARPS) {
        const float* row = num_den + static_cast<i64>(i) * columns;
        bool accepted = fabsf(row[columns - 1]) >= TINY_OVER_EPS * terms;
        for (int x = lane; x < columns; x += WARP) {
            accepted = accepted && isfinite(row[x]);
        }
        rejected = rejected || (!accepted && i >= first_seen);
    }
    rejected = block_any(rejected);
    if (threadIdx.x == 0) {
        flags[head] = rejected;
    }
}

// Between products: logits become weights on a shared scale, in float32 and in place.
//
// A block of n tokens of every head is cut into tiles. u = x omega^T comes from a matrix product,
// (heads, n, m), and leaves as weights of tile k:
//   keys     exp(u + row + col - c_k),  c_k the largest of the state and of tiles up to k, or of all
//   queries  exp(u + col + c_k - M),    M the row's largest; its log is M + row
// with row = -curvature |x|^2 / 2 + log weight. A key of log weight -inf has weight 0, whatever it holds.
//
// The log weights, and arrays of a name with strides, lie where they are: their strides are in
// elements, of heads and of rows. `spec_heads` is 1 or the number of heads. Option: WARPS.
#include "device.cuh"
#include "common.cuh"

#define ROWS(name) i64 name##_head, i64 name##_row

namespace {

constexpr int THREADS = WARPS * WARP;

// The warp of a row of all heads, a warp each.
__device__ __forceinline__ i64 row_of_warp() {
    return static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
}

__device__ __forceinline__ i64 thread_of_grid() { return static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; }

// -curvature |x|^2 / 2, by all lanes of a warp. A square that overflows becomes NaN: its features are not
// known to be zero.
__device__ __forceinline__ float square_term(const float* x, int d, float curvature) {
    if (curvature == 0.0f) {
        return 0.0f;
    }
    float sum = 0.0f;
    for (int i = threadIdx.x % WARP; i < d; i += WARP) {
        sum = fmaf(x[i], x[i], sum);
    }
    sum = warp_sum(sum) * -0.5f * curvature;
    return sum + (sum - sum);
}

// The largest, or the sum, of a lane's numbers in all warps of the block; in all of them.
template <bool LARGEST>
__device__ __forceinline__ float over_warps(float x, float (&numbers)[WARPS][WARP]) {
    const int lane = threadIdx.x % WARP;
    block_sync();  // the last call's numbers are read
    numbers[threadIdx.x / WARP][lane] = x;
    block_sync();
    x = numbers[0][lane];
    for (int warp = 1; warp < WARPS; ++warp) {
        x = LARGEST ? fmaxf(x, numbers[warp][lane]) : x + numbers[warp][lane];
    }
    return x;
}

}  // namespace

// Rows (heads, n, width) put one behind the other, those of log weight -inf (`weights`, (heads, n), or null) as zeros.
KERNEL __launch_bounds__(THREADS)
    pack_rows(const float* __restrict__ x, i64 x_0, i64 x_1, i64 x_2, i64 x_row, i64 n1, i64 n2,
              const float* __restrict__ weights, i64 weights_head, i64 count, int n, int width,
              float* __restrict__ packed) {
    const i64 i = thread_of_grid();
    if (i >= count) {
        return;
    }
    const i64 row = i / width, head = row / n, token = row % n;
    const bool seen = weights == nullptr || weights[head * weights_head + token] != -INFINITE;
    packed[i] = seen ? x[OFFSET(x) + token * x_row + i % width] : 0.0f;
}

#define DIVIDE_ROWS(name, Real)                                                                                 \
    KERNEL __launch_bounds__(THREADS)                                                                           \
        name(const Real* __restrict__ num_den, i64 num_den_0, i64 num_den_1, i64 num_den_2, i64 num_den_row,   \
             Real* __restrict__ output, i64 output_0, i64 output_1, i64 output_2, i64 output_row, i64 n1,      \
             i64 n2, i64 count, int n, int e) {                                                                 \
        const i64 i = thread_of_grid();                                                                         \
        if (i < count) {                                                                                        \
            const i64 row = i / e, head = row / n, token = row % n;                                             \
            const Real* from = num_den + OFFSET(num_den) + token * num_den_row;                                 \
            output[OFFSET(output) + token * output_row + i % e] = divide(from[i % e], from[e]);                 \
        }                                                                                                       \
    }

// Numerators over denominators, (heads, n, e + 1) to (heads, n, e), for blocks of the generic code.
DIVIDE_ROWS(divide_rows_float32, float)
DIVIDE_ROWS(divide_rows_float64, double)

// Logits of maps of coordinates, (heads, n, d): u = log f(x), f = elu + 1 (map 1) or relu (map 2).
KERNEL __launch_bounds__(THREADS)
    log_activations(const float* __restrict__ x, ROWS(x), i64 count, int n, int d, int map, float* __restrict__ u) {
    const i64 i = thread_of_grid();
    if (i < count) {
        const i64 row = i / d;
        u[i] = log_activation(map, x[row / n * x_head + row % n * x_row + i % d]);
    }
}

// Largest logs of the keys of each tile, (heads, tiles, m), and row terms (heads, n). A block takes a tile.
KERNEL __launch_bounds__(THREADS)
    key_tops(const float* __restrict__ u, const float* __restrict__ x, ROWS(x), const float* __restrict__ weights,
             i64 weights_head, const float* __restrict__ col, i64 spec_heads, int n, int tile, int d, int m,
             float curvature, float* terms, float* __restrict__ tops) {
    __shared__ float numbers[WARPS][WARP];
    const int tiles = n / tile, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 head = blockIdx.x / tiles, first = static_cast<i64>(blockIdx.x % tiles) * tile;
    u += (head * n + first) * m;
    x += head * x_head + first * x_row;
    weights = weights == nullptr ? weights : weights + head * weights_head + first;
    col += (spec_heads == 1 ? 0 : head) * m;
    terms += head * n + first;
    for (int j = warp; j < tile; j += WARPS) {
        float term = weights == nullptr ? 0.0f : weights[j];
        if (term != -INFINITE) {
            term += square_term(x + j * x_row, d, curvature);
        }
        if (lane == 0) {
            terms[j] = term;
        }
    }
    block_sync();
    for (int r = lane; r - lane < m; r += WARP) {
        float top = -INFINITE;
        for (int j = warp; r < m && j < tile; j += WARPS) {
            if (terms[j] != -INFINITE) {
                top = fmaxf(top, u[static_cast<i64>(j) * m + r] + col[r] + terms[j]);
            }
        }
        top = over_warps<true>(top, numbers);
        if (warp == 0 && r < m) {
            tops[static_cast<i64>(blockIdx.x) * m + r] = top;
        }
    }
}

// Weights of keys, and of each tile the scale c_k and the sum of its weights, both (heads, tiles, m).
// `shifts`, (heads, m): those of the state before the block. A block takes a tile.
KERNEL __launch_bounds__(THREADS)
    key_weights(float* __restrict__ u, const float* __restrict__ terms, const float* __restrict__ col, i64 spec_heads,
                const float* __restrict__ tops, const float* __restrict__ shifts, int n, int tile, int m,
                int is_causal, float* __restrict__ scales, float* __restrict__ sums) {
    __shared__ float numbers[WARPS][WARP];
    const int tiles = n / tile, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 head = blockIdx.x / tiles;
    const int number = blockIdx.x % tiles, last = is_causal ? number : tiles - 1;
    u += (head * n + static_cast<i64>(number) * tile) * m;
    terms += head * n + static_cast<i64>(number) * tile;
    col += (spec_heads == 1 ? 0 : head) * m;
    tops += head * tiles * m;
    for (int r = lane; r - lane < m; r += WARP) {
        float top = r < m ? shifts[head * m + r] : -INFINITE;
        for (int k = warp; r < m && k <= last; k += WARPS) {
            top = fmaxf(top, tops[static_cast<i64>(k) * m + r]);
        }
        top = over_warps<true>(top, numbers);
        const float shift = finite_shift(top);
        float sum = 0.0f;
        for (int j = warp; r < m && j < tile; j += WARPS) {
            float* entry = u + static_cast<i64>(j) * m + r;
            *entry = terms[j] == -INFINITE ? 0.0f : expf(*entry + col[r] + terms[j] - shift);
            sum += *entry;
        }
        sum = over_warps<false>(sum, numbers);
        if (warp == 0 && r < m) {
            scales[static_cast<i64>(blockIdx.x) * m + r] = top;
            sums[static_cast<i64>(blockIdx.x) * m + r] = sum;
        }
    }
}

// From the state before a block, (heads, m, columns), to the one after it. `kv`, (heads, tiles, m, columns - 1),
// and `z`, (heads, tiles, m), are sums over the tiles. With `before` they become what the queries of each tile
// read, the state before it on the tile's scale, and `before` and `before_shifts` get that state on its own.
// A thread takes an entry.
KERNEL __launch_bounds__(THREADS)
    scan_tiles(const float* __restrict__ state, const float* __restrict__ shifts, const float* __restrict__ scales,
               i64 count, int tiles, int m, int columns, float* __restrict__ kv, float* __restrict__ z,
               float* __restrict__ before, float* __restrict__ before_shifts, float* __restrict__ after,
               float* __restrict__ after_shifts) {
    const i64 i = thread_of_grid();
    if (i >= count) {
        return;
    }
    const int x = i % columns;
    const i64 row = i / columns, head = row / m, r = row % m;
    float entry = state[i], shift = shifts[row];
#pragma unroll 2  // more take registers
    for (int k = 0; k < tiles; ++k) {
        const i64 in_tile = (head * tiles + k) * m + r;
        float* sum = x + 1 == columns ? z + in_tile : kv + in_tile * (columns - 1) + x;
        if (before != nullptr) {
            before[in_tile * columns + x] = entry;
            if (x == 0) {
                before_shifts[in_tile] = shift;
            }
        }
        const float scale = scales[in_tile], added = *sum;
        entry *= expf(shift - finite_shift(scale));
        if (before != nullptr) {
            *sum = entry;
        }
        entry += added;
        shift = scale;
    }
    after[i] = entry;
    if (x == 0) {
        after_shifts[row] = shift;
    }
}

// Weights of queries on the scale of their tile, (heads, tiles, m), a warp a row. `dens` gets what they read from
// the normalizers `z` (an element of a row of `z_step`), `norms` (heads, n) the log of each row. With `divides`
// the weights are divided by it, so that their product with the state is the output, and `norms` get its log too;
// `dens` and `norms` may be null.
KERNEL __launch_bounds__(THREADS)
    query_weights(float* __restrict__ u, const float* __restrict__ x, ROWS(x), const float* __restrict__ col,
                  i64 spec_heads, const float* __restrict__ scales, const float* __restrict__ z, i64 z_step, i64 rows,
                  int n, int tile, int d, int m, float curvature, int divides, float* __restrict__ dens, ROWS(dens),
                  float* __restrict__ norms, i64 norms_head) {
    const i64 row = row_of_warp();
    if (row >= rows) {
        return;
    }
    const int lane = threadIdx.x % WARP;
    const i64 head = row / n, token = row % n, first = (head * (n / tile) + token / tile) * m;
    u += row * m;
    scales += first;
    z += first * z_step;
    col += (spec_heads == 1 ? 0 : head) * m;
    float top = -INFINITE;
    for (int r = lane; r < m; r += WARP) {
        top = fmaxf(top, u[r] + col[r] + scales[r]);
    }
    top = warp_max(top);
    const float shift = finite_shift(top);
    float den = 0.0f;
    for (int r = lane; r < m; r += WARP) {
        u[r] = expf(u[r] + col[r] + scales[r] - shift);
        den = fmaf(u[r], z[r * z_step], den);
    }
    den = warp_sum(den);
    for (int r = lane; divides && r < m; r += WARP) {
        u[r] = divide(u[r], den);
    }
    const float term = norms == nullptr ? 0.0f : square_term(x + head * x_head + token * x_row, d, curvature);
    if (lane == 0 && dens != nullptr) {
        dens[head * dens_head + token * dens_row] = den;
    }
    if (lane == 0 && norms != nullptr) {
        norms[head * norms_head + token] = top + term + (divides ? logf(den) : 0.0f);
    }
}

// Scores (rows, tile): 0 above the diagonal of each tile; the rest of a row is added to its denominator. A warp a row.
KERNEL __launch_bounds__(THREADS)
    causal_scores(float* __restrict__ scores, i64 rows, int tile, float* __restrict__ dens) {
    const i64 row = row_of_warp();
    if (row >= rows) {
        return;
    }
    const int own = row % tile;
    scores += row * tile;
    float sum = 0.0f;
    for (int j = threadIdx.x % WARP; j < tile; j += WARP) {
        if (j > own) {
            scores[j] = 0.0f;
        } else {
            sum += scores[j];
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) {
        dens[row] += sum;
    }
}

// Output of a causal block: numerators (heads, n, e) over denominators (heads, n); its log normalizers, from the
// logs of the rows' scales; and whether a tile is rejected, (heads, tiles). It is if a row of it is not finite,
// or has a denominator below (tiny / eps) (m N + z) although it sees a key: that may have underflowed on the scale
// that the tile shares. `length`: tokens before the block; `before`, `before_shifts`: the state before each tile,
// (heads, tiles, m, columns). A block takes a tile.
KERNEL __launch_bounds__(THREADS)
    finish_rows(const float* __restrict__ nums, const float* __restrict__ dens, const float* __restrict__ logs,
                const float* __restrict__ weights, i64 weights_head, const float* __restrict__ before,
                const float* __restrict__ before_shifts, i64 length, int n, int tile, int m, int columns,
                float* __restrict__ output, ROWS(output), float* __restrict__ norms, i64 norms_head,
                int* __restrict__ flags) {
    __shared__ float warp_terms[WARPS];
    __shared__ int first_seen;
    const int tiles = n / tile, number = blockIdx.x % tiles, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 head = blockIdx.x / tiles, first = static_cast<i64>(number) * tile;
    before += static_cast<i64>(blockIdx.x) * m * columns;
    before_shifts += static_cast<i64>(blockIdx.x) * m;
    float terms = 0.0f;
    bool seen = false;
    for (int r = threadIdx.x; r < m; r += THREADS) {
        terms += fabsf(before[static_cast<i64>(r) * columns + columns - 1]);
        seen = seen || before_shifts[r] > -INFINITE;
    }
    terms = warp_sum(terms);
    if (lane == 0) {
        warp_terms[warp] = terms;
    }
    seen = block_any(seen);
    if (threadIdx.x == 0) {
        const float* weight = weights == nullptr ? weights : weights + head * weights_head + first;
        first_seen = 0;
        while (!seen && weights != nullptr && first_seen < tile && weight[first_seen] == -INFINITE) {
            ++first_seen;
        }
    }
    block_sync();
    terms = static_cast<float>(m) * static_cast<float>(length + first + tile);
    for (int w = 0; w < WARPS; ++w) {
        terms += warp_terms[w];
    }
    bool rejected = false;
    for (int i = warp; i < tile; i += WARPS) {
        const i64 row = head * n + first + i;
        const float den = dens[row], *num = nums + row * (columns - 1);
        float* to = output + head * output_head + (first + i) * output_row;
        bool accepted = isfinite(den) && fabsf(den) >= TINY_OVER_EPS * terms;
        for (int x = lane; x + 1 < columns; x += WARP) {
            accepted = accepted && isfinite(num[x]);
            to[x] = divide(num[x], den);
        }
        if (lane == 0 && norms != nullptr) {
            norms[head * norms_head + first + i] = logs[row] + logf(den);
        }
        rejected = rejected || (!accepted && i >= first_seen);
    }
    rejected = block_any(rejected);
    if (threadIdx.x == 0) {
        flags[blockIdx.x] = rejected;
    }
}

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
#include "rows.cuh"

namespace {

// Loads that a lane has in flight: logits that are read, or replaced, rows whose squares are summed, elements
// that are copied. A multiprocessor must have about 20 KB under way, and may have two blocks only.
constexpr int ROWS_AT_ONCE = 16, WEIGHTS_AT_ONCE = 8, SQUARES_AT_ONCE = 8, COPIES_AT_ONCE = 8;

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

// Rows (heads, n, width) put one behind the other, those of log weight -inf (`weights`, (heads, n), or null) as zeros;
// of maps of coordinates log f(x), f = elu + 1 (map 1) or relu (map 2).
KERNEL __launch_bounds__(THREADS)
    pack_rows(const float* __restrict__ x, i64 x_0, i64 x_1, i64 x_2, i64 x_row, i64 n1, i64 n2,
              const float* __restrict__ weights, i64 weights_head, int n, int width, int map,
              float* __restrict__ packed) {
    const Elements part(n, width, COPIES_AT_ONCE * THREADS);
    const i64 head = part.head;
    x += OFFSET(x) + part.token * x_row;
    weights = weights == nullptr ? weights : weights + head * weights_head + part.token;
    packed += head * n * width + part.first;
    float entries[COPIES_AT_ONCE];
    UNROLLED(k, COPIES_AT_ONCE) {
        const int i = k * THREADS + threadIdx.x;
        const u32 place = part.column + i, token = place / width;
        const bool seen = i < part.count && (weights == nullptr || weights[token] != -INFINITE);
        entries[k] = seen ? x[token * x_row + place % width] : 0.0f;
    }
    UNROLLED(k, COPIES_AT_ONCE) {
        const int i = k * THREADS + threadIdx.x;
        if (i < part.count) {
            packed[i] = map == 0 ? entries[k] : log_activation(map, entries[k]);
        }
    }
}

#define DIVIDE_ROWS(name, Real)                                                                               \
    KERNEL __launch_bounds__(THREADS)                                                                         \
        name(const Real* __restrict__ num_den, i64 num_den_0, i64 num_den_1, i64 num_den_2, i64 num_den_row, \
             Real* __restrict__ output, i64 output_0, i64 output_1, i64 output_2, i64 output_row, i64 n1,    \
             i64 n2, int n, int e) {                                                                          \
        const Elements part(n, e, THREADS);                                                                   \
        const i64 head = part.head;                                                                           \
        if (static_cast<int>(threadIdx.x) < part.count) {                                                     \
            const u32 place = part.column + threadIdx.x, x = place % e;                                       \
            const i64 token = part.token + place / e;                                                         \
            const Real* from = num_den + OFFSET(num_den) + token * num_den_row;                               \
            output[OFFSET(output) + token * output_row + x] = divide(from[x], from[e]);                       \
        }                                                                                                     \
    }

// Numerators over denominators, (heads, n, e + 1) to (heads, n, e), for blocks of the generic code.
DIVIDE_ROWS(divide_rows_float32, float)
DIVIDE_ROWS(divide_rows_float64, double)

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
    for (int row = warp; row < tile; row += WARPS * SQUARES_AT_ONCE) {
        float squares[SQUARES_AT_ONCE] = {};
        for (int i = lane; curvature != 0.0f && i < d; i += WARP) {
            UNROLLED(k, SQUARES_AT_ONCE) {
                const int j = row + k * WARPS;
                const float entry = j < tile ? x[j * x_row + i] : 0.0f;
                squares[k] = fmaf(entry, entry, squares[k]);
            }
        }
        UNROLLED(k, SQUARES_AT_ONCE) {
            const int j = row + k * WARPS;
            const float term = square_term(squares[k], curvature);
            if (lane == 0 && j < tile) {
                const float weight = weights == nullptr ? 0.0f : weights[j];
                terms[j] = weight == -INFINITE ? weight : weight + term;
            }
        }
    }
    block_sync();
    for (int r = lane; r - lane < m; r += WARP) {
        const float offset = r < m ? col[r] : 0.0f;
        float top = -INFINITE;
        for (int row = warp; r < m && row < tile; row += WARPS * ROWS_AT_ONCE) {
            const float* from = u + static_cast<i64>(row) * m + r;
            float entries[ROWS_AT_ONCE];
            UNROLLED(k, ROWS_AT_ONCE) {
                entries[k] = row + k * WARPS < tile ? from[k * WARPS * m] : 0.0f;
            }
            UNROLLED(k, ROWS_AT_ONCE) {
                const float term = row + k * WARPS < tile ? terms[row + k * WARPS] : -INFINITE;
                top = term == -INFINITE ? top : fmaxf(top, entries[k] + offset + term);
            }
        }
        top = over_warps<true>(top, numbers);
        if (warp == 0 && r < m) {
            tops[static_cast<i64>(blockIdx.x) * m + r] = top;
        }
    }
}

// Weights of keys, and of each tile the scale c_k and the sum of its weights, both (heads, tiles, m).
// `shifts`, (heads, m): those of the state before the block. `fades`, (heads, n), or null: the last of each tile is
// the log of a factor on the state after it. A block takes a tile.
KERNEL __launch_bounds__(THREADS, 4)
    key_weights(float* __restrict__ u, const float* __restrict__ terms, const float* __restrict__ col, i64 spec_heads,
                const float* __restrict__ tops, const float* __restrict__ shifts, int n, int tile, int m,
                int is_causal, const float* __restrict__ fades, i64 fades_head, float* scales,
                float* __restrict__ sums) {
    __shared__ float numbers[WARPS][WARP];
    const int tiles = n / tile, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 head = blockIdx.x / tiles;
    const int number = blockIdx.x % tiles, last = is_causal ? number : tiles - 1;
    u += (head * n + static_cast<i64>(number) * tile) * m;
    terms += head * n + static_cast<i64>(number) * tile;
    col += (spec_heads == 1 ? 0 : head) * m;
    tops += head * tiles * m;
    scales += static_cast<i64>(blockIdx.x) * m;
    for (int r = threadIdx.x; r < m; r += THREADS) {
        float top = shifts[head * m + r];
#pragma unroll 4
        for (int k = 0; k <= last; ++k) {
            top += k == 0 || fades == nullptr ? 0.0f : fades[head * fades_head + static_cast<i64>(k) * tile - 1];
            top = fmaxf(top, tops[static_cast<i64>(k) * m + r]);
        }
        scales[r] = top;
    }
    block_sync();
    for (int r = lane; r - lane < m; r += WARP) {
        const float offset = r < m ? col[r] : 0.0f, shift = r < m ? finite_shift(scales[r]) : 0.0f;
        float sum = 0.0f;
        for (int row = warp; r < m && row < tile; row += WARPS * WEIGHTS_AT_ONCE) {
            float* place = u + static_cast<i64>(row) * m + r;
            float entries[WEIGHTS_AT_ONCE];
            UNROLLED(k, WEIGHTS_AT_ONCE) {
                entries[k] = row + k * WARPS < tile ? place[k * WARPS * m] : 0.0f;
            }
            UNROLLED(k, WEIGHTS_AT_ONCE) {
                if (row + k * WARPS >= tile) {
                    break;
                }
                const float term = terms[row + k * WARPS];
                const float weight = term == -INFINITE ? 0.0f : expf(entries[k] + offset + term - shift);
                place[k * WARPS * m] = weight;
                sum += weight;
            }
        }
        sum = over_warps<false>(sum, numbers);
        if (warp == 0 && r < m) {
            sums[static_cast<i64>(blockIdx.x) * m + r] = sum;
        }
    }
}

// From the state before a block, (heads, m, columns), to the one after it. `kv`, (heads, tiles, m, columns - 1),
// and `z`, (heads, tiles, m), are sums over the tiles. With `before` they become what the queries of each tile
// read, the state before it on the tile's scale, and `before` and `before_shifts` get that state on its own.
// `fades` as above. A thread takes an entry.
KERNEL __launch_bounds__(THREADS)
    scan_tiles(const float* __restrict__ state, const float* __restrict__ shifts, const float* __restrict__ scales,
               int tiles, int m, int columns, const float* __restrict__ fades, i64 fades_head, int tile,
               float* __restrict__ kv, float* __restrict__ z, float* __restrict__ before,
               float* __restrict__ before_shifts, float* __restrict__ after, float* __restrict__ after_shifts) {
    constexpr int AT_ONCE = 4;
    const Elements part(m, columns, THREADS);
    if (static_cast<int>(threadIdx.x) >= part.count) {
        return;
    }
    const u32 place = part.column + threadIdx.x, x = place % columns;
    const i64 head = part.head, r = part.token + place / columns, row = head * m + r, i = row * columns + x;
    // Entry and step of the sums of this column.
    const bool is_last = x + 1 == columns;
    float* sums = is_last ? z : kv + x;
    const int step = is_last ? 1 : columns - 1;
    float entry = state[i], shift = shifts[row];
    for (int first = 0; first < tiles; first += AT_ONCE) {
        float scale[AT_ONCE], added[AT_ONCE];
        UNROLLED(k, AT_ONCE) {
            const i64 in_tile = (head * tiles + min(first + k, tiles - 1)) * m + r;
            scale[k] = scales[in_tile];
            added[k] = sums[in_tile * step];
        }
        UNROLLED(k, AT_ONCE) {
            if (first + k == tiles) {
                break;
            }
            const i64 in_tile = (head * tiles + first + k) * m + r;
            if (before != nullptr) {
                before[in_tile * columns + x] = entry;
                if (x == 0) {
                    before_shifts[in_tile] = shift;
                }
            }
            entry *= expf(shift - finite_shift(scale[k]));
            if (before != nullptr) {
                sums[in_tile * step] = entry;
            }
            entry += added[k];
            shift = scale[k];
            if (fades != nullptr) {
                shift += fades[head * fades_head + static_cast<i64>(first + k + 1) * tile - 1];
            }
        }
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
KERNEL __launch_bounds__(THREADS, 6)
    query_weights(float* __restrict__ u, const float* __restrict__ x, ROWS(x), const float* __restrict__ col,
                  i64 spec_heads, const float* __restrict__ scales, const float* __restrict__ z, i64 z_step, int n,
                  int tile, int d, int m, float curvature, int divides, float* __restrict__ dens, ROWS(dens),
                  float* __restrict__ norms, i64 norms_head) {
    const WarpRow place(n);
    const int lane = threadIdx.x % WARP, token = place.row;
    if (token >= n) {
        return;
    }
    const i64 head = place.head, first = (head * (n / tile) + token / tile) * m;
    u += (head * n + token) * m;
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
    float square = 0.0f;
    x += head * x_head + token * x_row;
    for (int i = lane; norms != nullptr && curvature != 0.0f && i < d; i += WARP) {
        square = fmaf(x[i], x[i], square);
    }
    const float term = norms == nullptr ? 0.0f : square_term(square, curvature);
    if (lane == 0 && dens != nullptr) {
        dens[head * dens_head + token * dens_row] = den;
    }
    if (lane == 0 && norms != nullptr) {
        norms[head * norms_head + token] = top + term + (divides ? logf(den) : 0.0f);
    }
}

// Scores (tiles, tile, tile): 0 above each diagonal; the rest of a row is added to its denominator. A warp a row.
KERNEL __launch_bounds__(THREADS) causal_scores(float* __restrict__ scores, int tile, float* __restrict__ dens) {
    constexpr int AT_ONCE = 4;
    const WarpRow place(tile);
    const int lane = threadIdx.x % WARP;
    if (place.row >= tile) {
        return;
    }
    const i64 row = place.head * tile + place.row;
    scores += row * tile;
    const float den = lane == 0 ? dens[row] : 0.0f;  // which writes it again
    float sum = 0.0f;
    for (int first = lane; first < tile; first += AT_ONCE * WARP) {
        float entries[AT_ONCE];
        UNROLLED(k, AT_ONCE) {
            const int j = first + k * WARP;
            entries[k] = j <= place.row ? scores[j] : 0.0f;
        }
        UNROLLED(k, AT_ONCE) {
            const int j = first + k * WARP;
            sum += entries[k];
            if (j > place.row && j < tile) {
                scores[j] = 0.0f;
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        dens[row] = den + sum;
    }
}

// Output of a causal block: numerators (heads, n, e) over denominators (heads, n); its log normalizers, from the
// logs of the rows' scales; and whether a tile is rejected, (heads, tiles). It is if a row of it is not finite,
// or has a denominator below (tiny / eps) (m N + z) although it sees a key: that may have underflowed on the scale
// that the tile shares. `length`: tokens before the block; `before`, `before_shifts`: the state before each tile,
// (heads, tiles, m, columns). A block takes a tile.
KERNEL __launch_bounds__(THREADS, 3)
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
    terms = over_block<false>(terms, warp_terms) + static_cast<float>(m) * static_cast<float>(length + first + tile);
    seen = block_any(seen);
    if (threadIdx.x == 0) {
        const float* weight = weights == nullptr ? weights : weights + head * weights_head + first;
        first_seen = 0;
        while (!seen && weights != nullptr && first_seen < tile && weight[first_seen] == -INFINITE) {
            ++first_seen;
        }
    }
    block_sync();
    constexpr int AT_ONCE = 4;
    bool rejected = false;
    nums += (head * n + first) * (columns - 1);
    dens += head * n + first;
    logs += head * n + first;
    output += head * output_head + first * output_row;
    for (int row = warp; row < tile; row += WARPS * AT_ONCE) {
        float den[AT_ONCE];
        bool accepted[AT_ONCE];
        UNROLLED(k, AT_ONCE) {
            const int i = min(row + k * WARPS, tile - 1);
            den[k] = dens[i];
            accepted[k] = isfinite(den[k]) && fabsf(den[k]) >= TINY_OVER_EPS * terms;
            // All weights of the row are exactly 0, as those of zeros under relu are.
            accepted[k] = accepted[k] || (den[k] == 0.0f && logs[i] == -INFINITE);
        }
        for (int x = lane; x + 1 < columns; x += WARP) {
            float num[AT_ONCE];
            UNROLLED(k, AT_ONCE) {
                num[k] = nums[static_cast<i64>(min(row + k * WARPS, tile - 1)) * (columns - 1) + x];
            }
            UNROLLED(k, AT_ONCE) {
                if (row + k * WARPS < tile) {
                    accepted[k] = accepted[k] && isfinite(num[k]);
                    output[(row + k * WARPS) * output_row + x] = divide(num[k], den[k]);
                }
            }
        }
        UNROLLED(k, AT_ONCE) {
            const int i = row + k * WARPS;
            if (i >= tile) {
                break;
            }
            if (lane == 0 && norms != nullptr) {
                norms[head * norms_head + first + i] = logs[i] + logf(den[k]);
            }
            rejected = rejected || (!accepted[k] && i >= first_seen);
        }
    }
    rejected = block_any(rejected);
    if (threadIdx.x == 0) {
        flags[blockIdx.x] = rejected;
    }
}

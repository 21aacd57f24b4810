// Token by token, in float32: decoding, and causal rows that were rejected on a scale they shared.
//
// A step adds a token to the state and reads with its query, so that every scale holds what the
// query sees and nothing later; all features are handled by their logs, which for elu + 1 and relu
// are log f(x):
//   c'_r = max(c_r, l_r),  kvz'_r = kvz_r exp(c_r - c'_r) + exp(l_r - c'_r) [v, 1]
//   out  = sum_r w_r kv'_r / sum_r w_r z'_r,  w_r = exp(e_r - max e),  e_r = log phi_r(q) + c'_r
//
// A block takes a head. A thread takes a feature in the logs; in the state, which is read and written once
// a token, a warp takes ROWS features at a time, its lanes their columns.
//
// Options: INPUT (0 float32, 1 bfloat16, 2 float16), MAP (0 exponential, 1 elu + 1, 2 relu), WARPS,
// COLUMNS: columns of the state a lane.
#include "device.cuh"
#include "common.cuh"

namespace {

constexpr int THREADS = WARPS * WARP;
// Rows of the state that a warp has in flight, and blocks a multiprocessor: together 30 to 50 KB, memory
// being busy at 17, in registers of so many threads.
constexpr int ROWS = COLUMNS <= 3 ? 4 : COLUMNS <= 8 ? 2 : 1;
constexpr int BLOCKS = COLUMNS <= 4 ? 5 : COLUMNS <= 8 ? 4 : 3;

#if INPUT == 0
typedef float Input;
__device__ __forceinline__ float load(const Input* p) { return *p; }
__device__ __forceinline__ void store(Input* p, float x) { *p = x; }
#else
typedef u16 Input;
__device__ __forceinline__ float load(const Input* p) { return INPUT == 1 ? bf16_to_float(*p) : f16_to_float(*p); }
__device__ __forceinline__ void store(Input* p, float x) { *p = INPUT == 1 ? float_to_bf16(x) : float_to_f16(x); }
#endif

// Shared memory of a step.
struct Shared {
    float* query;      // (d)
    float* key;        // (d)
    float* value;      // (columns): the value, and 1
    float* factors;    // (m): what the old state is multiplied by
    float* add;        // (m): weights of the key
    float* read;       // (m): weights of the query
    float* sums;       // (WARPS, columns): of the read
    float* warp_tops;  // (WARPS)
};

__device__ __forceinline__ Shared share(int d, int m, int columns) {
    Shared s;
    s.query = reinterpret_cast<float*>(shared_memory());
    s.key = s.query + d;
    s.value = s.key + d;
    s.factors = s.value + columns;
    s.add = s.factors + m;
    s.read = s.add + m;
    s.sums = s.read + m;
    s.warp_tops = s.sums + WARPS * columns;
    return s;
}

// The projection (d, m), so that lanes read neighbouring words, offsets of features, and the curvature.
struct Map {
    const float* projection;
    const float* col;
    float curvature;
    int d;
    int m;
};

// -curvature |x|^2 / 2 by all threads of a warp.
__device__ __forceinline__ float row_term(const float* x, int d, float curvature) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x % WARP; curvature != 0.0f && i < d; i += WARP) {
        sum = fmaf(x[i], x[i], sum);
    }
    return square_term(sum, curvature);
}

// Take rows r, r + WARPS ... of the state from kvz to `next`, pointers at this lane's column of row r.
template <int COUNT>
__device__ __forceinline__ void step_rows(float (&sums)[COLUMNS], const Shared& s, int r, const float* kvz, float* next,
                                          int columns) {
    const int lane = threadIdx.x % WARP, step = WARPS * columns;
    const bool has_last = (COLUMNS - 1) * WARP + lane < columns;  // all columns before it are there
    // All are loaded before one is stored: a load may not pass a store that may be to its address.
    float entries[COUNT][COLUMNS], value[COLUMNS];
    UNROLLED(j, COUNT) {
        UNROLLED(i, COLUMNS) {
            entries[j][i] = i + 1 < COLUMNS || has_last ? kvz[j * step + i * WARP] : 0.0f;
        }
    }
    UNROLLED(i, COLUMNS) {
        value[i] = i + 1 < COLUMNS || has_last ? s.value[i * WARP + lane] : 0.0f;
    }
    UNROLLED(j, COUNT) {
        const float factor = s.factors[r + j * WARPS], add = s.add[r + j * WARPS], read = s.read[r + j * WARPS];
        UNROLLED(i, COLUMNS) {
            const float entry = fmaf(add, value[i], entries[j][i] * factor);
            sums[i] = fmaf(read, entry, sums[i]);
            if (i + 1 < COLUMNS || has_last) {
                next[j * step + i * WARP] = entry;
            }
        }
    }
}

// Take the state from kvz to `next`, which may be the same, and sum what each warp reads.
__device__ __forceinline__ void step_state(const Shared& s, const float* kvz, float* next, int m, int columns) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    kvz += warp * columns + lane;
    next += warp * columns + lane;
    float sums[COLUMNS] = {};
    int r = warp;
#pragma unroll 1
    for (; r + (ROWS - 1) * WARPS < m; r += ROWS * WARPS) {
        step_rows<ROWS>(sums, s, r, kvz, next, columns);
        kvz += ROWS * WARPS * columns;
        next += ROWS * WARPS * columns;
    }
#pragma unroll 1
    for (; ROWS > 1 && r < m; r += WARPS) {
        step_rows<1>(sums, s, r, kvz, next, columns);
        kvz += WARPS * columns;
        next += WARPS * columns;
    }
    UNROLLED(i, COLUMNS) {
        const int x = i * WARP + lane;
        if (x < columns) {
            s.sums[warp * columns + x] = sums[i];
        }
    }
}

// One step of a head, all pointers at that head's arrays: the state goes from (kvz, shift) to (next,
// next_shift), which may be the same. A key of log weight -inf is not read. `norm`, the log normalizer, may be null.
__device__ __forceinline__ void step(const Shared& s, const Map& map, const Input* query, const Input* key,
                                     const Input* value, float weight, const float* kvz, const float* shift,
                                     float* next, float* next_shift, int columns, Input* output, float* norm) {
    const bool seen = weight != -INFINITE;
#pragma unroll 1
    for (int i = threadIdx.x; i < map.d; i += THREADS) {
        s.query[i] = load(query + i);
        s.key[i] = seen ? load(key + i) : 0.0f;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < columns; i += THREADS) {
        s.value[i] = i + 1 == columns ? 1.0f : seen ? load(value + i) : 0.0f;
    }
    block_sync();
    const float query_row = row_term(s.query, map.d, map.curvature);
    const float key_row = row_term(s.key, map.d, map.curvature) + weight;
    float top = -INFINITE;
#pragma unroll 1
    for (int r = threadIdx.x; r < map.m; r += THREADS) {
        float log_q = 0.0f, log_k = 0.0f;
        if (MAP == 0) {
#pragma unroll 8
            for (int i = 0; i < map.d; ++i) {
                const float omega = map.projection[static_cast<i64>(i) * map.m + r];
                log_q = fmaf(omega, s.query[i], log_q);
                log_k = fmaf(omega, s.key[i], log_k);
            }
        } else {
            log_q = log_activation(MAP, s.query[r]);
            log_k = log_activation(MAP, s.key[r]);
        }
        log_q += map.col[r];
        log_k = seen ? log_k + map.col[r] + key_row : -INFINITE;
        const float before = shift[r], after = fmaxf(before, log_k), finite = finite_shift(after);
        s.factors[r] = expf(before - finite);
        s.add[r] = expf(log_k - finite);
        s.read[r] = log_q + after;
        top = fmaxf(top, s.read[r]);
        next_shift[r] = after;
    }
    top = over_block<true>(top, s.warp_tops);
#pragma unroll 1
    for (int r = threadIdx.x; r < map.m; r += THREADS) {
        s.read[r] = expf(s.read[r] - finite_shift(top));
    }
    block_sync();
    step_state(s, kvz, next, map.m, columns);
    block_sync();
    float den = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
        den += s.sums[w * columns + columns - 1];
    }
#pragma unroll 1
    for (int x = threadIdx.x; x < columns; x += THREADS) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            sum += s.sums[w * columns + x];
        }
        if (x + 1 < columns) {
            store(output + x, divide(sum, den));
        }
    }
    if (norm != nullptr && threadIdx.x == 0) {
        *norm = top + query_row + logf(den);
    }
}

}  // namespace

#define VIEW(name) i64 name##_0, i64 name##_1, i64 name##_2

// Strides are in elements, of three leading axes of sizes (.., n1, n2) and of the tokens; those of
// `spec` count whole projections, those of `state` whole states (of a head, or of its segments).

// One token of every head: from a state to a new one, which is contiguous. Where the two are the
// same the state changes in place.
KERNEL __launch_bounds__(THREADS, BLOCKS)
    decode(const Input* __restrict__ queries, VIEW(query), const Input* __restrict__ keys, VIEW(key),
           const Input* __restrict__ values, VIEW(value), const float* __restrict__ projection,
           const float* __restrict__ col, VIEW(spec), const float* kvz, const float* shifts, VIEW(state), i64 n1,
           i64 n2, int d, int m, int columns, float curvature, float* next, float* next_shifts,
           Input* __restrict__ output) {
    const i64 head = blockIdx.x, spec = OFFSET(spec) * m, state = OFFSET(state) * m, first_row = head * m;
    const Shared s = share(d, m, columns);
    const Map map = {projection + spec * d, col + spec, curvature, d, m};
    step(s, map, queries + OFFSET(query), keys + OFFSET(key), values + OFFSET(value), 0.0f,
         kvz + state * columns, shifts + state, next + first_row * columns, next_shifts + first_row, columns,
         output + head * (columns - 1), nullptr);
}

// Causal rows of the segments that are flagged, again and exactly, from the states before them.
// `workspace`: a state for each block; the states themselves may serve where no two heads share one.
// `norms` may be null.
KERNEL __launch_bounds__(THREADS, 2)
    redo_rows(const int* __restrict__ flags, const Input* __restrict__ queries, VIEW(query), i64 query_row,
              const Input* __restrict__ keys, VIEW(key), i64 key_row, const Input* __restrict__ values, VIEW(value),
              i64 value_row, const unsigned char* __restrict__ mask, VIEW(mask), i64 mask_row,
              const float* __restrict__ weights, VIEW(weight), i64 weight_row, const float* __restrict__ projection,
              const float* __restrict__ col, VIEW(spec), const float* kvz, const float* shifts, VIEW(state), i64 n1,
              i64 n2, i64 length, i64 segment_length, int segments, int d, int m, int columns, float curvature,
              float* workspace, float* workspace_shifts, Input* __restrict__ output, float* __restrict__ norms) {
    if (!flags[blockIdx.x]) {
        return;
    }
    const i64 head = blockIdx.x / segments, segment = blockIdx.x % segments;
    const i64 spec = OFFSET(spec) * m, state = (OFFSET(state) * segments + segment) * m;
    const i64 first_row = static_cast<i64>(blockIdx.x) * m;
    const Shared s = share(d, m, columns);
    const Map map = {projection + spec * d, col + spec, curvature, d, m};
    queries += OFFSET(query);
    keys += OFFSET(key);
    values += OFFSET(value);
    mask = mask == nullptr ? mask : mask + OFFSET(mask);
    weights = weights == nullptr ? weights : weights + OFFSET(weight);
    kvz += state * columns;
    shifts += state;
    workspace += first_row * columns;
    workspace_shifts += first_row;
    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    for (i64 token = begin; token < end; ++token) {
        float weight = weights == nullptr ? 0.0f : weights[token * weight_row];
        weight = mask == nullptr || mask[token * mask_row] ? weight : -INFINITE;
        const i64 row = head * length + token;
        step(s, map, queries + token * query_row, keys + token * key_row, values + token * value_row, weight, kvz,
             shifts, workspace, workspace_shifts, columns, output + row * (columns - 1),
             norms == nullptr ? norms : norms + row);
        kvz = workspace;
        shifts = workspace_shifts;
    }
}

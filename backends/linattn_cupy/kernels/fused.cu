// Linear attention of 16-bit arrays, fused: features never leave the chip.
//
// Adding keys to a state is attention of the features to the keys, and reading a state is attention
// of the queries to the features, so that both are the loop of FlashAttention:
//   state_r = sum_j exp(l_rj - c_r) [v_j, 1],  l_rj = omega_r.k_j + col_r + row_j,  c_r = max_j l_rj
//   out_i   = sum_r exp(l_ir - M_i) kv_r / sum_r exp(l_ir - M_i) z_r,  l_ir = omega_r.q_i + col_r + c_r
// with row_j = -curvature |k_j|^2 / 2, or -inf for a masked key. A causal tile has its own keys
// besides: A_ij = sum_r exp(l_ir - M_i) exp(l_rj - c_r), j <= i. For elu + 1 and relu log f(x_r)
// stands in the place of omega_r.x, and no log is taken but of the largest f(x_r), and of strips of
// queries beyond the ordinary range (see scale_of_strip).
//
// Products are of bf16 (omega, q and k in the type of the inputs), everything else is float32.
// A warp holds STRIPS x 16 features of the state in registers, and reads 16 queries of a tile at a time.
//
// Options: PART (which kernels are compiled: 0 states, 1 reads, 2 causal rows), FP16 (inputs are
// float16, else bfloat16), MAP (0 exponential, 1 elu + 1, 2 relu), HEAD_DIM d and VALUE_TILE,
// multiples of 16, FEATURES m, a multiple of 16 WARPS, TOKEN_TILE, a multiple of 16, WARPS. Arrays are
// padded with zeros to HEAD_DIM, with col = -inf to FEATURES.
#include "device.cuh"
#include "common.cuh"
#include "tiles.cuh"

namespace {

constexpr int GROUP = M % 32 == 0 ? 32 : 16;  // features that a query reads at a time
// Whether a strip of queries stays in registers, which wider ones do not fit.
constexpr bool KEEP_QUERIES = MAP == 0 && D <= 64;
// How many warps read a causal strip of queries, each by its share of the features.
constexpr int FEATURE_SPLIT = PART == 2 && WARPS * 16 > T ? WARPS * 16 / T : 1;

// Blocks of reads a multiprocessor: two, but where the second would not fit anyway, and registers would be spilled.
constexpr int READ_BLOCKS = D == 128 && M == 224 && T == 128 ? 1 : 2;

static_assert(FEATURE_SPLIT == 1 || (E / 2 + 4) * 4 * THREADS / 2 <= M * TS * 2, "parts are merged where phi lies");
static_assert(M % (GROUP * FEATURE_SPLIT) == 0 && FEATURE_SPLIT <= 2, "a warp reads whole groups");

// Where things lie in shared memory. Keys and values are there twice: a tile is worked on while the
// next one comes; causal queries come while the keys of their tile are added.
struct Shared : Tiles {
    u16* keys;     // 2 (T, DS)
    u16* values;   // 2 (T, ES)
    u16* queries;  // (T, DS), twice without keys
};

// What a kernel does not use takes no bytes.
__device__ __forceinline__ Shared share(bool has_keys, bool has_queries) {
    unsigned char* p = shared_memory();
    Shared s;
    s.projection = take(p, PROJECTION_BYTES);
    s.keys = take(p, has_keys ? 2 * KEY_BYTES : 0);
    s.values = take(p, has_keys ? 2 * VALUE_BYTES : 0);
    s.queries = take(p, has_queries ? (has_keys ? 1 : 2) * KEY_BYTES : 0);
    s.phi = take(p, has_keys && has_queries ? M * TS * 2 : 0);
    s.state = take(p, has_queries ? M * ES * 2 : 0);
    place_numbers(s, p);
    return s;
}

// Log weights of a tile's keys, from the tile in shared memory; values of float16 become bf16. Coordinates of
// masked keys become -inf for pointwise maps: their features are 0.
__device__ __forceinline__ void prepare_keys(const Shared& s, u16* keys, u16* values, float curvature,
                                             i64 first, i64 end, const unsigned char* mask, i64 mask_row) {
    // Four threads a key: those of a warp read words in 32 different banks.
    const int part = threadIdx.x % 4;
    for (int j = threadIdx.x / 4; j < T; j += THREADS / 4) {
        const i64 token = first + j;
        const bool seen = token < end && (mask == nullptr || mask[token * mask_row]);
        u32* words = reinterpret_cast<u32*>(keys + j * DS);
        float row = 0.0f;
        if (curvature != 0.0f) {
#pragma unroll
            for (int x = part; x < D / 2; x += 4) {
                const float low = input_to_float(static_cast<u16>(words[x]));
                const float high = input_to_float(static_cast<u16>(words[x] >> 16));
                row = fmaf(high, high, fmaf(low, low, row));
            }
            row = -0.5f * curvature * row_sum(row);
            row += row - row;  // NaN if infinite: its features are not known to be zero
        }
        if (part == 0) {
            s.rows[j] = seen ? row : -INFINITE;
        }
        if (MAP != 0 && !seen) {
            for (int x = part; x < D / 2; x += 4) {
                words[x] = LOWEST_INPUTS;
            }
        }
    }
    make_bf16(values);
}

// Queries ------------------------------------------------------------------------------------------

// Rows of a strip of 16 queries, on the scale exp(top): lanes hold rows g and g + 8.
struct Read {
    float out[E / 8][4];
    float den[2];
    float top[2];
};

// Weights of a strip of queries in a group of features, by their logs: as left operands, on the largest
// scale so far, to which what was read before is brought.
template <bool CAUSAL>
__device__ __forceinline__ void weigh_by_logs(u32 (&a)[GROUP / 16][4], Read& read, float (&scores)[CAUSAL ? T / 8 : 1][4],
                                              u32 (&q)[KEEP_QUERIES ? D / 16 : 1][4], const Shared& s,
                                              const u16* queries, int strip, int feature) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    float log[GROUP / 8][4];
    UNROLLED(n, GROUP / 8) {
        const float2 bias = *reinterpret_cast<const float2*>(s.bias + feature + n * 8 + t * 2);
        log[n][0] = log[n][2] = bias.x;
        log[n][1] = log[n][3] = bias.y;
    }
    if (MAP == 0) {
        UNROLLED(k, D / 16) {
            u32(&fragment)[4] = q[KEEP_QUERIES ? k : 0];
            if (!KEEP_QUERIES) {
                load_left(fragment, queries, DS, strip * 16, k * 16);
            }
            UNROLLED(n, GROUP / 16) {
                u32 b[4];
                load_right_of_transpose(b, s.projection, DS, feature + n * 16, k * 16);
                mma_input(log[2 * n], fragment, b[0], b[1]);
                mma_input(log[2 * n + 1], fragment, b[2], b[3]);
            }
        }
    }
    float top[2] = {read.top[0], read.top[1]};
    UNROLLED(n, GROUP / 8) {
        UNROLLED(i, 4) {
            const int r = feature + n * 8 + t * 2 + i % 2, row = strip * 16 + i / 2 * 8 + g;
            if (MAP != 0) {
                log[n][i] += log_activation(MAP, input_to_float(queries[row * DS + r]));
            }
            top[i / 2] = fmaxf(top[i / 2], log[n][i]);
        }
    }
    float shift[2];
    UNROLLED(half, 2) {
        top[half] = row_max(top[half]);
        shift[half] = finite_shift(top[half]);
        if (top[half] != read.top[half]) {
            float factor = exp_less(read.top[half], shift[half]);
            read.top[half] = top[half];
            read.den[half] *= factor;
            scale_rows(read.out, half, factor);
            if (CAUSAL) {
                scale_rows(scores, half, factor);
            }
        }
    }
    UNROLLED(n, GROUP / 8) {
        UNROLLED(half, 2) {
            const float* row = log[n] + half * 2;
            a[n / 2][n % 2 * 2 + half] = pack_bf16(weight_less(row[0], shift[half]), weight_less(row[1], shift[half]));
        }
    }
}

// Pointwise maps: a scale on which the weights of all rows of a strip are at most 1, and the largest of each at
// least exp(-2 RANGE - 12), so that no logs are needed; -inf where there is none, as a row's largest
// f(x) or the scales of the features are beyond what is ordinary.
__device__ __forceinline__ float scale_of_strip(const Shared& s, const u16* queries, int strip, int first_feature,
                                                int end_feature, int head_dim) {
    constexpr float RANGE = 20.0f, LEAST = 2e-9f, MOST = 65536.0f, LOG_MOST = 11.090355f;
    float top = -INFINITE, bottom = INFINITE;
    end_feature = min(end_feature, head_dim);  // beyond, f(0) = 1 is no weight
    for (int r = first_feature + threadIdx.x % WARP; r < end_feature; r += WARP) {
        // A feature that no key has may be that of a row's largest f(x); all of relu are 0 or ordinary in float16.
        const bool counts = s.bias[r] > -INFINITE || MAP == 1 || !FP16;
        top = fmaxf(top, s.bias[r]);
        bottom = counts ? fminf(bottom, s.bias[r]) : bottom;
    }
    top = warp_max(top);
    bottom = -warp_max(-bottom);
    u32 largest[2] = {LOWEST_INPUTS, LOWEST_INPUTS};
    for (int feature = first_feature; feature < end_feature; feature += 16) {
        u32 x[4];
        load_left(x, queries, DS, strip * 16, feature);
        UNROLLED(i, 4) {
            if (feature + i / 2 * 8 < end_feature) {
                largest[i % 2] = max_inputs(largest[i % 2], x[i]);
            }
        }
    }
    bool ordinary = top - bottom <= RANGE;
    UNROLLED(half, 2) {
        const float f = activation(row_max(fmaxf(low_input(largest[half]), high_input(largest[half]))));
        ordinary = ordinary && f <= MOST && (f >= LEAST || (MAP == 2 && f == 0.0f));
    }
    return warp_any(!ordinary) ? -INFINITE : top + LOG_MOST;
}

// Weights of a strip of queries in 16 features of a pointwise map, as a left operand, on the scale exp(top).
__device__ __forceinline__ void weigh_coordinates(u32 (&a)[4], const Shared& s, const u16* queries, int strip,
                                                  int feature, float top) {
    load_left(a, queries, DS, strip * 16, feature);
    UNROLLED(n, 2) {
        float shift[2], factor[2];
        UNROLLED(j, 2) {
            shift[j] = top - s.bias[feature + n * 8 + threadIdx.x % 4 * 2 + j];
            factor[j] = exp_less(0.0f, shift[j]);
        }
        UNROLLED(half, 2) {
            u32& word = a[n * 2 + half];
            word = pack_bf16(scaled_activation(low_input(word), shift[0], factor[0]),
                             scaled_activation(high_input(word), shift[1], factor[1]));
        }
    }
}

// Read a state, and with CAUSAL the keys of the tile up to each query's position; by a range of the features.
template <bool CAUSAL>
__device__ __forceinline__ void read_strip(Read& read, const Shared& s, const u16* queries, const u16* values,
                                           int strip, int first_feature, int end_feature, int head_dim) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    float scores[CAUSAL ? T / 8 : 1][4] = {};
    // -inf: weights are made by their logs.
    const float scale =
        MAP == 0 ? -INFINITE : scale_of_strip(s, queries, strip, first_feature, end_feature, head_dim);
    u32 q[KEEP_QUERIES ? D / 16 : 1][4];
    if (KEEP_QUERIES) {
        UNROLLED(k, D / 16) {
            load_left(q[k], queries, DS, strip * 16, k * 16);
        }
    }
    read = {};
    read.top[0] = read.top[1] = scale;
#pragma unroll 1
    for (int feature = first_feature; feature < end_feature; feature += GROUP) {
        u32 a[GROUP / 16][4];
        if (scale == -INFINITE) {
            weigh_by_logs<CAUSAL>(a, read, scores, q, s, queries, strip, feature);
        } else {
            UNROLLED(k, GROUP / 16) {
                weigh_coordinates(a[k], s, queries, strip, feature + k * 16, scale);
            }
        }
        UNROLLED(k, GROUP / 16) {
            UNROLLED(i, 4) {  // features 8 (2 k + i / 2) + 2 t, query g + 8 (i % 2)
                const int r = feature + (2 * k + i / 2) * 8 + t * 2;
                read.den[i % 2] += low_bf16(a[k][i]) * s.z[r] + high_bf16(a[k][i]) * s.z[r + 1];
            }
            if (CAUSAL) {
                add_product(scores, a[k], s.phi, TS, feature + k * 16, 0, strip + 1);
            }
            add_product(read.out, a[k], s.state, ES, feature + k * 16);
        }
    }
    if (CAUSAL) {
        UNROLLED(k, T / 16) {
            if (k > strip) {
                continue;
            }
            u32 a[4];
            UNROLLED(i, 4) {
                const int n = 2 * k + i / 2, half = i % 2;
                const int row = strip * 16 + half * 8 + g, key = n * 8 + t * 2;
                a[i] = pack_bf16(key <= row ? scores[n][half * 2] : 0.0f,
                                 key + 1 <= row ? scores[n][half * 2 + 1] : 0.0f);
                read.den[half] += low_bf16(a[i]) + high_bf16(a[i]);
            }
            add_product(read.out, a, values, ES, k * 16);
        }
    }
    UNROLLED(half, 2) {
        read.den[half] = row_sum(read.den[half]);
    }
}

// Add what a second warp read of a strip, by the other features, to what the first one did, by way of
// `buffer`.
__device__ __forceinline__ void merge_parts(Read& read, float* buffer, int strip) {
    const int place = strip * WARP + threadIdx.x % WARP;
    constexpr int STEP = THREADS / 2;
    block_sync();  // other warps may still read what lies in `buffer`
    if (threadIdx.x >= STEP) {
        UNROLLED(half, 2) {
            buffer[half * STEP + place] = read.den[half];
            buffer[(2 + half) * STEP + place] = read.top[half];
        }
        UNROLLED(i, E / 2) {
            buffer[(4 + i) * STEP + place] = read.out[i / 4][i % 4];
        }
    }
    block_sync();
    if (threadIdx.x < STEP) {
        UNROLLED(half, 2) {
            const float other_top = buffer[(2 + half) * STEP + place];
            const float top = fmaxf(read.top[half], other_top), shift = finite_shift(top);
            const float factor = exp_less(read.top[half], shift), other_factor = exp_less(other_top, shift);
            read.top[half] = top;
            read.den[half] = read.den[half] * factor + buffer[half * STEP + place] * other_factor;
            UNROLLED(n, E / 8) {
#pragma unroll
                for (int i = half * 2; i < half * 2 + 2; ++i) {
                    read.out[n][i] =
                        read.out[n][i] * factor + buffer[(4 + n * 4 + i) * STEP + place] * other_factor;
                }
            }
        }
    }
}

// Whether relu is exactly 0 at all coordinates, as at those of padding: the row is then exactly 0 too.
__device__ __forceinline__ bool has_no_feature(const u16* query) {
    bool none = true;
    for (int x = 0; x < D; ++x) {
        none = none && input_to_float(query[x]) <= 0.0f;
    }
    return none;
}

// Write the rows of a strip. Returns whether this thread rejects one: it is not finite, or its
// denominator is below `floor` although it sees a key.
__device__ __forceinline__ bool write_strip(const Read& read, const u16* queries, int strip, u16* output,
                                            float* norms, i64 first, i64 end, int value_dim, int first_value,
                                            float curvature, float floor, int first_seen) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    bool rejected = false;
    UNROLLED(half, 2) {
        const int row = strip * 16 + half * 8 + g;
        const i64 token = first + row;
        if (token >= end) {
            continue;
        }
        const float den = read.den[half];
        bool accepted = fabsf(den) >= floor || (MAP == 2 && den == 0.0f && has_no_feature(queries + row * DS));
        // As `divide` does, with one division a row: one an element takes as long as the products. A large
        // denominator is scaled down, as its inverse would be subnormal, which is 0 here.
        const float scale = fabsf(den) > 1e30f ? 0x1p-64f : 1.0f;
        const float inverse = divide(1.0f, den * scale);
        UNROLLED(n, E / 8) {
            const int x = first_value + n * 8 + t * 2;
            const float low = read.out[n][half * 2], high = read.out[n][half * 2 + 1];
            if (x >= value_dim) {
                continue;
            }
            accepted = accepted && isfinite(low) && isfinite(high);
            *reinterpret_cast<u32*>(output + token * value_dim + x) =
                pack_input(low * scale * inverse, high * scale * inverse);
        }
        rejected = rejected || (!accepted && row >= first_seen);
        if (norms != nullptr && first_value == 0 && t == 0) {
            float square = 0.0f;
            for (int x = 0; x < D; ++x) {
                float value = input_to_float(queries[row * DS + x]);
                square = fmaf(value, value, square);
            }
            float quad = curvature == 0.0f ? 0.0f : -0.5f * curvature * square;
            norms[token] = read.top[half] + quad + (quad - quad) + logf(den);
        }
    }
    return rejected;
}

}  // namespace

// Kernels ------------------------------------------------------------------------------------------

#if PART == 0

// States of the first segments of keys, each by itself: kvz (heads, segments, m, e + 1), shifts
// (heads, segments, m).
KERNEL __launch_bounds__(THREADS, 1)
    segment_states(const u16* __restrict__ keys, VIEW(key), const u16* __restrict__ values, VIEW(value),
                   const unsigned char* __restrict__ mask, VIEW(mask), SPEC, SIZES, float* __restrict__ kvz,
                   float* __restrict__ shifts) {
    const Shared s = share(true, false);
    const i64 head = blockIdx.x / segments, segment = blockIdx.x % segments;
    const int first_value = blockIdx.y * E, width = min(E, value_dim - first_value);
    const i64 spec = OFFSET(spec);
    keys += OFFSET(key);
    values += OFFSET(value) + first_value;
    mask = mask == nullptr ? mask : mask + OFFSET(mask);
    start_projection(s, projection + spec * M * D, col + spec * M);

    State state;
    load_state(state, s, nullptr, nullptr, features, value_dim, first_value);
    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    start_tile<T, D>(s.keys, keys, key_row, begin, end, head_dim, mask, mask_row);
    start_tile<T, E>(s.values, values, value_row, begin, end, width, mask, mask_row);
    int buffer = 0;
    for (i64 first = begin; first < end; first += T) {
        u16 *current_keys = s.keys + buffer * T * DS, *current_values = s.values + buffer * T * ES;
        buffer ^= 1;
        copies_done();
        block_sync();
        if (first + T < end) {
            start_tile<T, D>(s.keys + buffer * T * DS, keys, key_row, first + T, end, head_dim, mask, mask_row);
            start_tile<T, E>(s.values + buffer * T * ES, values, value_row, first + T, end, width, mask, mask_row);
        }
        prepare_keys(s, current_keys, current_values, curvature, first, end, mask, mask_row);
        block_sync();
        add_tokens<false, false, STRIPS>(state, s, current_keys, current_values, nullptr);
    }
    const i64 first_row = static_cast<i64>(blockIdx.x) * features;
    store_state(state, s, kvz + first_row * (value_dim + 1), shifts + first_row, features, value_dim, first_value);
}

// Merge the states of parts of the tokens, (heads, needed, m, e + 1), in order, after an initial one
// (strides in states; null: none). `before`, (heads, segments, m, e + 1): the state before each segment,
// which is so many parts, or null; `after`: the last state, or null. Blocks: x = head, y = 256 sums.
KERNEL scan_states(const float* __restrict__ kvz, const float* __restrict__ shifts, int needed,
                   const float* __restrict__ initial, const float* __restrict__ initial_shift, i64 initial_0,
                   i64 initial_1, i64 initial_2, i64 n1, i64 n2, int segments, int parts, int features, int columns,
                   float* __restrict__ before, float* __restrict__ before_shifts, float* __restrict__ after,
                   float* __restrict__ after_shift) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x, size = features * columns;
    if (i >= size) {
        return;
    }
    const int feature = i / columns;
    const bool is_first = i % columns == 0;
    const i64 head = blockIdx.x;
    float sum = 0.0f, c = -INFINITE;
    if (initial != nullptr) {
        const i64 state = OFFSET(initial);
        sum = initial[state * size + i];
        c = initial_shift[state * features + feature];
    }
    for (int segment = 0; segment < segments; ++segment) {
        if (before != nullptr) {
            const i64 state = head * segments + segment;
            before[state * size + i] = sum;
            if (is_first) {
                before_shifts[state * features + feature] = c;
            }
        }
#pragma unroll 4
        for (int part = segment * parts; part < min((segment + 1) * parts, needed); ++part) {
            const i64 state = head * needed + part;
            const float part_shift = shifts[state * features + feature];
            const float top = fmaxf(c, part_shift), shift = finite_shift(top);
            sum = sum * expf(c - shift) + kvz[state * size + i] * expf(part_shift - shift);
            c = top;
        }
    }
    if (after == nullptr) {
        return;
    }
    after[head * size + i] = sum;
    if (is_first) {
        after_shift[head * features + feature] = c;
    }
}

#elif PART == 1

// Queries that read one state each head: output (heads, length, e), norms (heads, length) or null.
KERNEL __launch_bounds__(THREADS, READ_BLOCKS)
    read_states(const u16* __restrict__ queries, VIEW(query), SPEC, const float* __restrict__ kvz,
                const float* __restrict__ shifts, i64 state_0, i64 state_1, i64 state_2, SIZES,
                u16* __restrict__ output, float* __restrict__ norms) {
    const Shared s = share(false, true);
    const i64 head = blockIdx.x / segments, segment = blockIdx.x % segments;
    const int first_value = blockIdx.y * E;
    const i64 spec = OFFSET(spec), state = OFFSET(state) * features;
    queries += OFFSET(query);
    output += head * length * value_dim;
    norms = norms == nullptr ? norms : norms + head * length;
    start_projection(s, projection + spec * M * D, col + spec * M);
    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    start_tile<T, D>(s.queries, queries, query_row, begin, end, head_dim, nullptr, 0);
    load_read_state(s, col + spec * M, kvz + state * (value_dim + 1), shifts + state, features, value_dim, first_value);
    int buffer = 0;
    for (i64 first = begin; first < end; first += T) {
        const u16* current = s.queries + buffer * T * DS;
        buffer ^= 1;
        copies_done();
        block_sync();
        if (first + T < end) {
            start_tile<T, D>(s.queries + buffer * T * DS, queries, query_row, first + T, end, head_dim, nullptr, 0);
        }
        for (int strip = threadIdx.x / WARP; strip < T / 16; strip += WARPS) {
            Read read;
            read_strip<false>(read, s, current, nullptr, strip, 0, M, head_dim);
            write_strip(read, current, strip, output, norms, first, end, value_dim, first_value, curvature, 0.0f,
                        T);
        }
    }
}

#elif PART == 2

// Causal rows of segments, from the states before them. `flags`, (heads, segments), becomes 1 where a
// row is rejected, as it may have underflowed on the scale of its tile; such segments are computed again.
// `after`: the state of each state head after the last key.
KERNEL __launch_bounds__(THREADS, 1)
    causal_rows(const u16* __restrict__ queries, VIEW(query), const u16* __restrict__ keys, VIEW(key),
                const u16* __restrict__ values, VIEW(value), const unsigned char* __restrict__ mask, VIEW(mask), SPEC,
                const float* __restrict__ kvz, const float* __restrict__ shifts, i64 state_0, i64 state_1,
                i64 state_2, SIZES, u16* __restrict__ output, float* __restrict__ norms, float* __restrict__ after,
                float* __restrict__ after_shift, int* __restrict__ flags) {
    const Shared s = share(true, true);
    __shared__ int first_seen;  // of a tile: rows before it see no key
    const i64 head = blockIdx.x / segments, segment = blockIdx.x % segments;
    const int first_value = blockIdx.y * E, width = min(E, value_dim - first_value);
    const i64 spec = OFFSET(spec);
    queries += OFFSET(query);
    keys += OFFSET(key);
    values += OFFSET(value) + first_value;
    mask = mask == nullptr ? mask : mask + OFFSET(mask);
    output += head * length * value_dim;
    norms = norms == nullptr ? norms : norms + head * length;
    const i64 before = (OFFSET(state) * segments + segment) * features;
    kvz += before * (value_dim + 1);
    shifts += before;
    start_projection(s, projection + spec * M * D, col + spec * M);

    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    start_tile<T, D>(s.keys, keys, key_row, begin, end, head_dim, mask, mask_row);
    start_tile<T, E>(s.values, values, value_row, begin, end, width, mask, mask_row);

    State state;
    load_state(state, s, kvz, shifts, features, value_dim, first_value);
    block_sync();
    bool seen = false;
    float terms = 0.0f;  // bounds the sum of all normalizers
    for (int r = threadIdx.x % WARP; r < M; r += WARP) {
        seen = seen || s.shifts[r] > -INFINITE;
        terms += fabsf(s.sums[r]);
    }
    seen = warp_any(seen);
    terms = warp_sum(terms);
    bool rejected = false;
    int buffer = 0;
    for (i64 first = begin; first < end; first += T) {
        u16 *current_keys = s.keys + buffer * T * DS, *current_values = s.values + buffer * T * ES;
        buffer ^= 1;
        copies_done();
        block_sync();
        start_tile<T, D>(s.queries, queries, query_row, first, end, head_dim, nullptr, 0);
        start_tile<T, D>(s.keys + buffer * T * DS, keys, key_row, first + T, end, head_dim, mask, mask_row);
        start_tile<T, E>(s.values + buffer * T * ES, values, value_row, first + T, end, width, mask, mask_row);
        prepare_keys(s, current_keys, current_values, curvature, first, end, mask, mask_row);
        block_sync();
        add_tokens<true, false, STRIPS>(state, s, current_keys, current_values, nullptr);
        if (threadIdx.x == 0) {
            first_seen = 0;
            while (!seen && first_seen < T && s.rows[first_seen] == -INFINITE) {
                ++first_seen;
            }
        }
        copies_done();
        block_sync();
        terms += static_cast<float>(features) * T;
        for (int i = threadIdx.x / WARP; i < T / 16 * FEATURE_SPLIT; i += WARPS) {
            // Warps w and w + 4 have one scheduler: what a strip takes grows with it, so that one of them
            // gets the strips in reverse.
            const int share = i / (T / 16), strip = share == 0 ? i : T / 16 * 2 - 1 - i;
            Read read;
            read_strip<true>(read, s, s.queries, current_values, strip, M / FEATURE_SPLIT * share,
                             M / FEATURE_SPLIT * (share + 1), head_dim);
            if (FEATURE_SPLIT == 2) {
                merge_parts(read, reinterpret_cast<float*>(s.phi), strip);
            }
            if (share == 0) {
                bool bad = write_strip(read, s.queries, strip, output, norms, first, end, value_dim,
                                       first_value, curvature, TINY_OVER_EPS * terms, first_seen);
                rejected = rejected || bad;
            }
        }
        seen = seen || first_seen < T;
    }
    if (rejected) {
        flags[blockIdx.x] = 1;
    }
    // Of heads that share a state the first one writes it.
    const i64 rest = head / n2;
    const bool writes = (state_0 != 0 || rest / n1 == 0) && (state_1 != 0 || rest % n1 == 0) &&
                        (state_2 != 0 || head % n2 == 0);
    if (segment + 1 == segments && writes) {
        const i64 last = OFFSET(state) * features;
        store_state(state, s, after + last * (value_dim + 1), after_shift + last, features, value_dim, first_value);
    }
}

#endif

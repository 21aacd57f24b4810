// Gradients of linear attention of 16-bit arrays, fused: features never leave the chip.
//
// Query i and key j meet in feature r with the weight exp(l_ir + l_jr), where
//   l_ir = omega_r.q_i + col_r - curvature |q_i|^2 / 2 - n_i    a_i = [g_i, -g_i.o_i]
//   l_jr = omega_r.k_j + col_r - curvature |k_j|^2 / 2          b_j = [v_j, 1]
// n_i is the row's log normalizer, o_i its output, g_i the cotangent of that. By the log of a weight
// the derivative is the weight times a_i.b_j, so that both sides go by one rule, which for queries is
//   dl_ir = exp(l_ir) sum_j exp(l_jr) a_i.b_j,    grad q_i = sum_r dl_ir omega_r
// and for keys the same with i and j changed, less curvature k_j sum_r dl_jr; that sum is 0 for
// queries. grad v_j = sum_r exp(l_jr) sum_i exp(l_ir) g_i. For elu + 1 and relu, whose features are
// f(x_r) exp(row + col_r), the factor f(x_r) of dl becomes f'(x_r), and that is the gradient.
// What is summed over the other side is a state, see fused.cu; that of queries is the suffix. A
// causal chunk has the visible tokens of its own besides, and keys are walked backwards.
//
// A weight beside a state, exp(l_ir + c_r), is at most 1 where all of the state is visible. c_r may
// come from tokens of the chunk that are not; the weight is then at most the inverse of the row's
// denominator in fused.cu, whose bound holds for both sides: what it accepts loses nothing here, and
// what it flags is not for these kernels. `flag` becomes 1 where a gradient is not finite.
//
// Blocks of one of several value tiles make a part of the gradient of tokens, in float32, to be added
// up: it is linear in the products a_i.b_j, whose last term is the first tile's.
//
// Options: those of fused.cu; PART (0 terms of tokens and
// suffixes, 1 reads, 2 causal gradients); KEYS: whose gradients, 1 keys and values, 0 queries.
#include "device.cuh"
#include "common.cuh"
#include "tiles.cuh"

namespace {

// Where things lie in shared memory. `own` are the tokens whose gradients are made, `others` those
// that they see.
struct Shared : Tiles {
    u16* others;         // (C, DS)
    u16* other_vectors;  // (C, ES)
    u16* own;            // (C, DS)
    u16* own_vectors;    // (C, ES)
    float* scalars;      // (C): of the others
    float* own_rows;     // (C)
    float* own_scalars;  // (C)
};

// What a kernel does not use takes no room.
__device__ __forceinline__ Shared share(bool has_others, bool has_own) {
    unsigned char* p = shared_memory();
    Shared s;
    s.projection = reinterpret_cast<u16*>(p);
    p += PROJECTION_BYTES;
    s.others = reinterpret_cast<u16*>(p);
    p += has_others ? KEY_BYTES : 0;
    s.other_vectors = reinterpret_cast<u16*>(p);
    p += has_others ? VALUE_BYTES : 0;
    s.own = reinterpret_cast<u16*>(p);
    p += has_own ? KEY_BYTES : 0;
    s.own_vectors = reinterpret_cast<u16*>(p);
    p += has_own ? VALUE_BYTES : 0;
    s.phi = reinterpret_cast<u16*>(p);
    p += has_others && has_own ? M * CS * 2 : 0;
    s.state = reinterpret_cast<u16*>(p);
    p += has_own ? M * ES * 2 : 0;
    s.scalars = place_numbers(s, p);
    s.own_rows = s.scalars + C;
    s.own_scalars = s.own_rows + C;
    return s;
}

// Log weights and scalars of a chunk, the latter times `one`; those that are null are 1.
__device__ __forceinline__ void load_terms(float* rows, float* scalars, const float* from_rows,
                                           const float* from_scalars, float one, i64 first, i64 end) {
    for (int j = threadIdx.x; j < C; j += THREADS) {
        const i64 token = first + j;
        rows[j] = token < end ? from_rows[token] : -INFINITE;
        scalars[j] = from_scalars == nullptr ? one : token < end ? one * from_scalars[token] : 0.0f;
    }
}

__device__ __forceinline__ float derivative(float x) {
    return x > 0.0f ? 1.0f : MAP == 1 ? fast_exp2(x * LOG2E) : 0.0f;
}

// As load_right, of an array of the inputs' type; bf16 comes out.
__device__ __forceinline__ void load_right_as_bf16(u32 (&b)[4], const u16* tile, int stride, int row,
                                                   int column) {
    load_right(b, tile, stride, row, column);
    if (FP16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            b[i] = pack_bf16(f16_to_float(static_cast<u16>(b[i])), f16_to_float(static_cast<u16>(b[i] >> 16)));
        }
    }
}

// -curvature |x|^2 / 2 by the threads of a warp; NaN if infinite.
__device__ __forceinline__ float row_term(const u16* x, int head_dim, float curvature) {
    if (curvature == 0.0f) {
        return 0.0f;
    }
    float sum = 0.0f;
    for (int i = threadIdx.x % WARP; i < head_dim; i += WARP) {
        const float value = input_to_float(x[i]);
        sum = fmaf(value, value, sum);
    }
    sum = -0.5f * curvature * warp_sum(sum);
    return sum + (sum - sum);
}

// Where gradients of tokens go: to `whole`, or to `part` where that is not null.
struct Gradient {
    u16* whole;
    float* part;
};

__device__ __forceinline__ void put(const Gradient& gradient, i64 place, float low, float high) {
    if (gradient.part == nullptr) {
        *reinterpret_cast<u32*>(gradient.whole + place) = pack_input(low, high);
    } else {
        gradient.part[place] = low;
        gradient.part[place + 1] = high;
    }
}

// Whether a token of the chunk sees another one.
__device__ __forceinline__ bool visible(int own, int other) { return KEYS ? other >= own : other <= own; }

// Weights exp(l + c) of a strip of 16 own tokens in 16 features; elu + 1 and relu without f(x_r).
// Lanes hold tokens g and g + 8, features 2 t, 2 t + 1 and 8 behind them.
__device__ __forceinline__ void weigh(float (&weight)[2][4], const Shared& s, int strip, int feature) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            weight[n][i] = 0.0f;
        }
    }
    if (MAP == 0) {
#pragma unroll 2
        for (int k = 0; k < D; k += 16) {
            u32 a[4], b[4];
            load_left(a, s.own, DS, strip * 16, k);
            load_right_of_transpose(b, s.projection, DS, feature, k);
            mma_input(weight[0], a, b[0], b[1]);
            mma_input(weight[1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float row = s.own_rows[strip * 16 + i / 2 * 8 + g];
            weight[n][i] = exp_less(weight[n][i] + s.bias[feature + n * 8 + t * 2 + i % 2], -row);
        }
    }
}

// Gradients of a strip of 16 own tokens, by the state and with CAUSAL by the others of their chunk.
// Returns whether this thread saw one that is not finite.
template <bool CAUSAL>
__device__ __forceinline__ bool token_gradient(const Shared& s, int strip, const Gradient& gradient, i64 first, i64 end,
                                               int head_dim, float curvature) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    u32 products[CAUSAL ? C / 16 : 1][4];  // a_i.b_j, as left operands
    if (CAUSAL) {
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            if (!visible(strip, n)) {
                continue;
            }
            float dots[2][4] = {};
#pragma unroll 2
            for (int k = 0; k < E; k += 16) {
                u32 a[4], b[4];
                load_left(a, s.own_vectors, ES, strip * 16, k);
                load_right_of_transpose(b, s.other_vectors, ES, n * 16, k);
                mma_bf16(dots[0], a, b[0], b[1]);
                mma_bf16(dots[1], a, b[2], b[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i % 2, row = strip * 16 + half * 8 + g, other = n * 16 + i / 2 * 8 + t * 2;
                const float scalar = s.own_scalars[row];
                const float low = dots[i / 2][half * 2] + scalar * s.scalars[other];
                const float high = dots[i / 2][half * 2 + 1] + scalar * s.scalars[other + 1];
                products[n][i] =
                    pack_bf16(visible(row, other) ? low : 0.0f, visible(row, other + 1) ? high : 0.0f);
            }
        }
    }
    float sums[MAP == 0 ? D / 8 : 1][4] = {};
    float total[2] = {};
    bool spoilt = false;
#pragma unroll 1
    for (int feature = 0; feature < M; feature += 16) {
        float weight[2][4], seen[2][4];
        weigh(weight, s, strip, feature);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                seen[n][i] = s.own_scalars[strip * 16 + i / 2 * 8 + g] * s.z[feature + n * 8 + t * 2 + i % 2];
            }
        }
#pragma unroll 1
        for (int k = 0; k < E; k += 16) {
            u32 a[4], b[4];
            load_left(a, s.own_vectors, ES, strip * 16, k);
            load_right_of_transpose(b, s.state, ES, feature, k);
            mma_bf16(seen[0], a, b[0], b[1]);
            mma_bf16(seen[1], a, b[2], b[3]);
        }
        if (CAUSAL) {
#pragma unroll
            for (int n = 0; n < C / 16; ++n) {
                if (visible(strip, n)) {
                    u32 b[4];
                    load_right_of_transpose(b, s.phi, CS, feature, n * 16);
                    mma_bf16(seen[0], products[n], b[0], b[1]);
                    mma_bf16(seen[1], products[n], b[2], b[3]);
                }
            }
        }
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = i / 2, half = i % 2, row = strip * 16 + half * 8 + g, r = feature + n * 8 + t * 2;
            float d[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                d[j] = weight[n][half * 2 + j] * seen[n][half * 2 + j];
                if (MAP != 0) {
                    d[j] *= r + j < D ? derivative(input_to_float(s.own[row * DS + r + j])) : 0.0f;
                }
                total[half] += d[j];
            }
            a[i] = pack_bf16(d[0], d[1]);
            if (MAP != 0 && r < head_dim && first + row < end) {
                spoilt = spoilt || !isfinite(d[0]) || !isfinite(d[1]);
                put(gradient, (first + row) * head_dim + r, d[0], d[1]);
            }
        }
        if (MAP == 0) {
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                u32 b[4];
                load_right_as_bf16(b, s.projection, DS, feature, n * 16);
                mma_bf16(sums[2 * n], a, b[0], b[1]);
                mma_bf16(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }
    if (MAP != 0) {
        return spoilt;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = strip * 16 + half * 8 + g;
        const float bend = KEYS ? curvature * row_sum(total[half]) : 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            const int x = n * 8 + t * 2;
            const float low = sums[n][half * 2] - bend * input_to_float(s.own[row * DS + x]);
            const float high = sums[n][half * 2 + 1] - bend * input_to_float(s.own[row * DS + x + 1]);
            if (x < head_dim && first + row < end) {
                spoilt = spoilt || !isfinite(low) || !isfinite(high);
                put(gradient, (first + row) * head_dim + x, low, high);
            }
        }
    }
    return spoilt;
}

// Gradients of `width` values of a strip of 16 keys; returns the same.
template <bool CAUSAL>
__device__ __forceinline__ bool value_gradient(const Shared& s, int strip, u16* gradient, i64 first, i64 end,
                                               int value_dim, int width) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    float sums[E / 8][4] = {};
    float scores[CAUSAL ? C / 8 : 1][4] = {};
#pragma unroll 1
    for (int feature = 0; feature < M; feature += 16) {
        float weight[2][4];
        weigh(weight, s, strip, feature);
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = i / 2, half = i % 2, row = strip * 16 + half * 8 + g, r = feature + n * 8 + t * 2;
            float w[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                w[j] = weight[n][half * 2 + j];
                if (MAP != 0) {
                    w[j] *= r + j < D ? activation(input_to_float(s.own[row * DS + r + j])) : 0.0f;
                }
            }
            a[i] = pack_bf16(w[0], w[1]);
        }
        if (CAUSAL) {
#pragma unroll
            for (int n = 0; n < C / 16; ++n) {
                if (visible(strip, n)) {
                    u32 b[4];
                    load_right(b, s.phi, CS, feature, n * 16);
                    mma_bf16(scores[2 * n], a, b[0], b[1]);
                    mma_bf16(scores[2 * n + 1], a, b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < E / 16; ++n) {
            u32 b[4];
            load_right(b, s.state, ES, feature, n * 16);
            mma_bf16(sums[2 * n], a, b[0], b[1]);
            mma_bf16(sums[2 * n + 1], a, b[2], b[3]);
        }
    }
    if (CAUSAL) {
#pragma unroll
        for (int k = 0; k < C / 16; ++k) {
            if (!visible(strip, k)) {
                continue;
            }
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = 2 * k + i / 2, half = i % 2;
                const int row = strip * 16 + half * 8 + g, other = n * 8 + t * 2;
                a[i] = pack_bf16(visible(row, other) ? scores[n][half * 2] : 0.0f,
                                 visible(row, other + 1) ? scores[n][half * 2 + 1] : 0.0f);
            }
#pragma unroll
            for (int n = 0; n < E / 16; ++n) {
                u32 b[4];
                load_right(b, s.other_vectors, ES, k * 16, n * 16);
                mma_bf16(sums[2 * n], a, b[0], b[1]);
                mma_bf16(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }
    bool spoilt = false;
#pragma unroll
    for (int i = 0; i < E / 4; ++i) {
        const int n = i / 2, half = i % 2, x = n * 8 + t * 2;
        const i64 token = first + strip * 16 + half * 8 + g;
        if (x < width && token < end) {
            const float low = sums[n][half * 2], high = sums[n][half * 2 + 1];
            spoilt = spoilt || !isfinite(low) || !isfinite(high);
            *reinterpret_cast<u32*>(gradient + token * value_dim + x) = pack_input(low, high);
        }
    }
    return spoilt;
}

// All gradients of a chunk. Each warp takes a strip, of tokens or of values, after the other.
template <bool CAUSAL>
__device__ __forceinline__ bool chunk_gradients(const Shared& s, const Gradient& gradient, u16* of_values, i64 first,
                                                i64 end, int head_dim, int value_dim, int width, float curvature) {
    bool spoilt = false;
    for (int i = threadIdx.x / WARP; i < C / 16 * (KEYS ? 2 : 1); i += WARPS) {
        const int strip = i % (C / 16);
        const bool bad = KEYS && i >= C / 16
                             ? value_gradient<CAUSAL>(s, strip, of_values, first, end, value_dim, width)
                             : token_gradient<CAUSAL>(s, strip, gradient, first, end, head_dim, curvature);
        spoilt = spoilt || bad;
    }
    return spoilt;
}

}  // namespace

// Kernels ------------------------------------------------------------------------------------------
//
// Strides (see VIEW) of `spec` count whole projections. Blocks: x = head * segments + segment, y = a
// tile of the values.

#if PART == 0

// Of queries, a warp each: rows = -curvature |q_i|^2 / 2 - n_i, or -inf where no key is seen, and
// scalars = -g_i.o_i.
KERNEL __launch_bounds__(THREADS)
    query_terms(const u16* __restrict__ queries, VIEW(query), const u16* __restrict__ grads, VIEW(grad),
                const u16* __restrict__ outputs, const float* __restrict__ norms, i64 n1, i64 n2, i64 length,
                i64 total, int head_dim, int value_dim, float curvature, float* __restrict__ rows,
                float* __restrict__ scalars) {
    const i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= total) {
        return;
    }
    const i64 head = row / length, token = row % length;
    const float quad = row_term(queries + OFFSET(query) + token * query_row, head_dim, curvature);
    grads += OFFSET(grad) + token * grad_row;
    outputs += row * value_dim;
    float sum = 0.0f;
    for (int x = threadIdx.x % WARP; x < value_dim; x += WARP) {
        sum = fmaf(input_to_float(grads[x]), input_to_float(outputs[x]), sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) {
        const float norm = norms[row];
        const bool empty = norm == -INFINITE;
        rows[row] = empty ? norm : quad - norm + (norm - norm);  // NaN if infinite
        scalars[row] = empty ? 0.0f : -sum;
    }
}

// Of keys, a warp each: rows = -curvature |k_j|^2 / 2, or -inf where masked.
KERNEL __launch_bounds__(THREADS)
    key_terms(const u16* __restrict__ keys, VIEW(key), const unsigned char* __restrict__ mask, VIEW(mask), i64 n1,
              i64 n2, i64 length, i64 total, int head_dim, float curvature, float* __restrict__ rows) {
    const i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= total) {
        return;
    }
    const i64 head = row / length, token = row % length;
    const float quad = row_term(keys + OFFSET(key) + token * key_row, head_dim, curvature);
    if (threadIdx.x % WARP == 0) {
        const bool seen = mask == nullptr || mask[OFFSET(mask) + token * mask_row];
        rows[row] = seen ? quad : -INFINITE;
    }
}

// Suffixes of segments of queries, each by itself, in places counted from the last segment: kvz
// (heads, segments, m, e + 1), shifts (heads, segments, m). Blocks: x = head * needed + place.
KERNEL __launch_bounds__(THREADS, 1)
    segment_suffixes(const u16* __restrict__ queries, VIEW(query), const u16* __restrict__ grads, VIEW(grad),
                     const float* __restrict__ rows, const float* __restrict__ scalars,
                     const u16* __restrict__ projection, const float* __restrict__ col, i64 spec_0, i64 spec_1,
                     i64 spec_2, i64 n1, i64 n2, i64 length, i64 segment_length, int segments, int needed,
                     int head_dim, int value_dim, int features, float* __restrict__ kvz,
                     float* __restrict__ shifts) {
    const Shared s = share(true, false);
    const i64 head = blockIdx.x / needed, place = blockIdx.x % needed, segment = segments - 1 - place;
    const i64 spec = OFFSET(spec);
    const int first_value = blockIdx.y * E, width = min(E, value_dim - first_value);
    queries += OFFSET(query);
    grads += OFFSET(grad) + first_value;
    start_projection(s, projection + spec * M * D, col + spec * M);

    State state;
    load_state(state, s, nullptr, nullptr, features, value_dim, first_value);
    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    for (i64 first = begin; first < end; first += C) {
        start_tile<C, D>(s.others, queries, query_row, first, end, head_dim, nullptr, 0);
        start_tile<C, E>(s.other_vectors, grads, grad_row, first, end, width, nullptr, 0);
        load_terms(s.rows, s.scalars, rows + head * length, scalars + head * length, 1.0f, first, end);
        copies_done();
        block_sync();
        if (FP16) {
            make_bf16(s.other_vectors);
            block_sync();
        }
        add_tokens<false, true>(state, s, s.others, s.other_vectors, s.scalars);
        block_sync();
    }
    const i64 mine = (head * segments + place) * features;
    store_state(state, s, kvz + mine * (value_dim + 1), shifts + mine, features, value_dim, first_value);
}

#elif PART == 1

// Full attention: gradients of tokens that read one state each head, (heads, length, d), and with KEYS
// of their values, (heads, length, e). `scalars`: null for 1.
KERNEL __launch_bounds__(THREADS, 1)
    read_gradients(const u16* __restrict__ tokens, VIEW(token), const u16* __restrict__ vectors, VIEW(vector),
                   const unsigned char* __restrict__ mask, VIEW(mask), const float* __restrict__ rows,
                   const float* __restrict__ scalars, const u16* __restrict__ projection,
                   const float* __restrict__ col, i64 spec_0, i64 spec_1, i64 spec_2,
                   const float* __restrict__ kvz, const float* __restrict__ shifts, i64 n1, i64 n2, i64 length,
                   i64 segment_length, int segments, int head_dim, int value_dim, int features, float curvature,
                   u16* __restrict__ whole, float* __restrict__ parts, i64 part_size,
                   u16* __restrict__ of_values, int* __restrict__ flag) {
    const Shared s = share(false, true);
    const i64 head = blockIdx.x / segments, segment = blockIdx.x % segments;
    const i64 spec = OFFSET(spec), state = head * features;
    const int first_value = blockIdx.y * E, width = min(E, value_dim - first_value);
    tokens += OFFSET(token);
    vectors += OFFSET(vector) + first_value;
    mask = mask == nullptr ? mask : mask + OFFSET(mask);
    scalars = scalars == nullptr ? scalars : scalars + head * length;
    const i64 mine = head * length * head_dim;
    const Gradient gradient = {whole == nullptr ? whole : whole + mine,
                               parts == nullptr ? parts : parts + blockIdx.y * part_size + mine};
    of_values = KEYS ? of_values + head * length * value_dim + first_value : of_values;
    start_projection(s, projection + spec * M * D, col + spec * M);
    for (int r = threadIdx.x; r < M; r += THREADS) {
        s.bias[r] = r < features ? col[spec * M + r] + shifts[state + r] : -INFINITE;
        s.z[r] = r < features ? kvz[(state + r) * (value_dim + 1) + value_dim] : 0.0f;
    }
    for (int i = threadIdx.x; i < M * E; i += THREADS) {
        const int r = i / E, x = first_value + i % E;
        const bool real = r < features && x < value_dim;
        s.state[r * ES + i % E] =
            real ? float_to_bf16(kvz[(state + r) * (value_dim + 1) + x]) : static_cast<u16>(0);
    }
    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    const float one = first_value == 0 ? 1.0f : 0.0f;
    bool spoilt = false;
    for (i64 first = begin; first < end; first += C) {
        start_tile<C, D>(s.own, tokens, token_row, first, end, head_dim, mask, mask_row);
        start_tile<C, E>(s.own_vectors, vectors, vector_row, first, end, width, mask, mask_row);
        load_terms(s.own_rows, s.own_scalars, rows + head * length, scalars, one, first, end);
        copies_done();
        block_sync();
        if (FP16) {
            make_bf16(s.own_vectors);
            block_sync();
        }
        const bool bad =
            chunk_gradients<false>(s, gradient, of_values, first, end, head_dim, value_dim, width, curvature);
        spoilt = spoilt || bad;
        block_sync();
    }
    if (spoilt) {
        *flag = 1;
    }
}

#elif PART == 2

// Causal gradients of segments, from the states before them or, with KEYS, the suffixes behind them,
// which lie in places counted from the last segment: gradient (heads, length, d), of_values
// (heads, length, e) with KEYS.
KERNEL __launch_bounds__(THREADS, 1)
    causal_gradients(const u16* __restrict__ queries, VIEW(query), const u16* __restrict__ keys, VIEW(key),
                     const u16* __restrict__ values, VIEW(value), const u16* __restrict__ grads, VIEW(grad),
                     const unsigned char* __restrict__ mask, VIEW(mask), const float* __restrict__ query_rows,
                     const float* __restrict__ query_scalars, const float* __restrict__ key_rows,
                     const u16* __restrict__ projection, const float* __restrict__ col, i64 spec_0, i64 spec_1,
                     i64 spec_2, const float* __restrict__ kvz, const float* __restrict__ shifts, i64 n1, i64 n2,
                     i64 length, i64 segment_length, int segments, int head_dim, int value_dim, int features,
                     float curvature, u16* __restrict__ whole, float* __restrict__ parts, i64 part_size,
                     u16* __restrict__ of_values, int* __restrict__ flag) {
    const Shared s = share(true, true);
    const i64 head = blockIdx.x / segments, segment = blockIdx.x % segments;
    const i64 spec = OFFSET(spec);
    queries += OFFSET(query);
    keys += OFFSET(key);
    const int first_value = blockIdx.y * E, width = min(E, value_dim - first_value);
    values += OFFSET(value) + first_value;
    grads += OFFSET(grad) + first_value;
    mask = mask == nullptr ? mask : mask + OFFSET(mask);
    query_rows += head * length;
    query_scalars += head * length;
    key_rows += head * length;
    const i64 mine = head * length * head_dim;
    const Gradient gradient = {whole == nullptr ? whole : whole + mine,
                               parts == nullptr ? parts : parts + blockIdx.y * part_size + mine};
    of_values = KEYS ? of_values + head * length * value_dim + first_value : of_values;
    const i64 before = (head * segments + (KEYS ? segments - 1 - segment : segment)) * features;
    start_projection(s, projection + spec * M * D, col + spec * M);

    State state;
    load_state(state, s, kvz + before * (value_dim + 1), shifts + before, features, value_dim, first_value);
    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    const i64 chunks = (end - begin + C - 1) / C;
    const float one = first_value == 0 ? 1.0f : 0.0f;  // times the scalars of the own tokens
    bool spoilt = false;
    for (i64 i = 0; i < chunks; ++i) {
        const i64 first = begin + (KEYS ? chunks - 1 - i : i) * C;
        start_tile<C, D>(KEYS ? s.others : s.own, queries, query_row, first, end, head_dim, nullptr, 0);
        start_tile<C, E>(KEYS ? s.other_vectors : s.own_vectors, grads, grad_row, first, end, width, nullptr,
                         0);
        start_tile<C, D>(KEYS ? s.own : s.others, keys, key_row, first, end, head_dim, mask, mask_row);
        start_tile<C, E>(KEYS ? s.own_vectors : s.other_vectors, values, value_row, first, end, width, mask,
                         mask_row);
        load_terms(KEYS ? s.rows : s.own_rows, KEYS ? s.scalars : s.own_scalars, query_rows, query_scalars,
                   KEYS ? 1.0f : one, first, end);
        load_terms(KEYS ? s.own_rows : s.rows, KEYS ? s.own_scalars : s.scalars, key_rows, nullptr,
                   KEYS ? one : 1.0f, first, end);
        copies_done();
        block_sync();
        if (FP16) {
            make_bf16(s.own_vectors);
            make_bf16(s.other_vectors);
            block_sync();
        }
        add_tokens<true, true>(state, s, s.others, s.other_vectors, s.scalars);
        block_sync();
        const bool bad =
            chunk_gradients<true>(s, gradient, of_values, first, end, head_dim, value_dim, width, curvature);
        spoilt = spoilt || bad;
        block_sync();
    }
    if (spoilt) {
        *flag = 1;
    }
}

#endif

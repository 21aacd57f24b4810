// Gradients of linear attention of 16-bit arrays, fused: features never leave the chip.
//
// Query i and key j meet in feature r with the weight exp(l_ir + l_jr), where
//   l_ir = omega_r.q_i + col_r - curvature |q_i|^2 / 2 - n_i    a_i = [g_i, -g_i.o_i]
//   l_jr = omega_r.k_j + col_r - curvature |k_j|^2 / 2          b_j = [v_j, 1]
// n_i is the row's log normalizer, o_i its output, g_i the cotangent of that. By the log of a weight
// the derivative is the weight times a_i.b_j, so that both sides follow one rule, which for queries is
//   dl_ir = exp(l_ir) sum_j exp(l_jr) a_i.b_j,    grad q_i = sum_r dl_ir omega_r
// and for keys the same with i and j changed, less curvature k_j sum_r dl_jr; that sum is 0 for
// queries. grad v_j = sum_r exp(l_jr) sum_i exp(l_ir) g_i. For elu + 1 and relu, whose features are
// f(x_r) exp(row + col_r), the factor f(x_r) of dl becomes f'(x_r), and that is the gradient.
// What is summed over the other side is a state, see fused.cu; that of queries is the adjoint state. A
// causal tile has its visible tokens besides, and keys are walked backwards.
//
// A weight beside a state, exp(l_ir + c_r), is at most 1 where all of the state is visible. c_r may
// come from tokens of the tile that are not; the weight is then at most the inverse of the row's
// denominator in fused.cu, whose bound holds for both sides: what it accepts does not underflow
// here, and what it rejects is not for these kernels. `flag` becomes 1 where a gradient is not finite.
//
// Where there are several value tiles, the blocks of each write partial gradients of tokens, in float32,
// to be summed: they are linear in the products a_i.b_j, whose last term is the first tile's.
//
// Options: those of fused.cu; PART (0 terms of tokens and adjoint states, 1 reads, 2 causal gradients);
// KEYS: whose gradients, 1 keys and values, 0 queries.
#include "device.cuh"
#include "common.cuh"
#include "tiles.cuh"

namespace {

// Where things lie in shared memory. Targets are the tokens whose gradients are made, sources those that
// they see; `rows` of Tiles are the sources'.
struct Shared : Tiles {
    u16* sources;           // (T, DS)
    u16* source_vectors;    // (T, ES)
    u16* targets;           // (T, DS)
    u16* target_vectors;    // (T, ES)
    float* source_scalars;  // (T)
    float* target_rows;     // (T)
    float* target_scalars;  // (T)
};

// What a kernel does not use takes no bytes.
__device__ __forceinline__ Shared share(bool has_sources, bool has_targets) {
    unsigned char* p = shared_memory();
    Shared s;
    s.projection = take(p, PROJECTION_BYTES);
    s.sources = take(p, has_sources ? KEY_BYTES : 0);
    s.source_vectors = take(p, has_sources ? VALUE_BYTES : 0);
    s.targets = take(p, has_targets ? KEY_BYTES : 0);
    s.target_vectors = take(p, has_targets ? VALUE_BYTES : 0);
    s.phi = take(p, has_sources && has_targets ? M * TS * 2 : 0);
    s.state = take(p, has_targets ? M * ES * 2 : 0);
    s.source_scalars = place_numbers(s, p);
    s.target_rows = s.source_scalars + T;
    s.target_scalars = s.target_rows + T;
    return s;
}

// Log weights and scalars of a tile, the latter times `factor`; scalars that are null are 1.
__device__ __forceinline__ void load_terms(float* rows, float* scalars, const float* from_rows,
                                           const float* from_scalars, float factor, i64 first, i64 end) {
    for (int j = threadIdx.x; j < T; j += THREADS) {
        const i64 token = first + j;
        rows[j] = token < end ? from_rows[token] : -INFINITE;
        scalars[j] = from_scalars == nullptr ? factor : token < end ? factor * from_scalars[token] : 0.0f;
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
        UNROLLED(i, 4) {
            b[i] = pack_bf16(f16_to_float(static_cast<u16>(b[i])), f16_to_float(static_cast<u16>(b[i] >> 16)));
        }
    }
}

// -curvature |x|^2 / 2 by the threads of a warp.
__device__ __forceinline__ float row_term(const u16* x, int head_dim, float curvature) {
    float sum = 0.0f;
    for (int i = threadIdx.x % WARP; curvature != 0.0f && i < head_dim; i += WARP) {
        const float value = input_to_float(x[i]);
        sum = fmaf(value, value, sum);
    }
    return square_term(sum, curvature);
}

// Where gradients of tokens go: to `whole`, or to `partial` where that is not null.
struct Gradient {
    u16* whole;
    float* partial;

    __device__ __forceinline__ Gradient(u16* whole, float* partials, i64 partial_size, i64 head_start)
        : whole(whole == nullptr ? whole : whole + head_start),
          partial(partials == nullptr ? partials : partials + blockIdx.y * partial_size + head_start) {}
};

__device__ __forceinline__ void write_gradient(const Gradient& gradient, i64 place, float low, float high) {
    if (gradient.partial == nullptr) {
        *reinterpret_cast<u32*>(gradient.whole + place) = pack_input(low, high);
    } else {
        gradient.partial[place] = low;
        gradient.partial[place + 1] = high;
    }
}

// Whether a target sees a source of its tile.
__device__ __forceinline__ bool visible(int target, int source) { return KEYS ? source >= target : source <= target; }

// Weights exp(l + c) of a strip of 16 targets in 16 features; elu + 1 and relu without f(x_r).
// Lanes hold tokens g and g + 8, features 2 t, 2 t + 1 and 8 after them.
__device__ __forceinline__ void weigh(float (&weight)[2][4], const Shared& s, int strip, int feature) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    UNROLLED(i, 8) {
        weight[i / 4][i % 4] = 0.0f;
    }
    if (MAP == 0) {
#pragma unroll 2
        for (int k = 0; k < D; k += 16) {
            u32 a[4], b[4];
            load_left(a, s.targets, DS, strip * 16, k);
            load_right_of_transpose(b, s.projection, DS, feature, k);
            mma_input(weight[0], a, b[0], b[1]);
            mma_input(weight[1], a, b[2], b[3]);
        }
    }
    UNROLLED(n, 2) {
        UNROLLED(i, 4) {
            const float row = s.target_rows[strip * 16 + i / 2 * 8 + g];
            weight[n][i] = exp_less(weight[n][i] + s.bias[feature + n * 8 + t * 2 + i % 2], -row);
        }
    }
}

// Gradients of a strip of 16 targets, by the state and with CAUSAL by the sources of their tile. Returns
// whether this thread saw one that is not finite.
template <bool CAUSAL>
__device__ __forceinline__ bool token_gradient(const Shared& s, int strip, const Gradient& gradient, i64 first, i64 end,
                                               int head_dim, float curvature) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    u32 products[CAUSAL ? T / 16 : 1][4];  // a_i.b_j, as left operands
    if (CAUSAL) {
        UNROLLED(n, T / 16) {
            if (!visible(strip, n)) {
                continue;
            }
            float dots[2][4] = {};
#pragma unroll 2
            for (int k = 0; k < E; k += 16) {
                u32 a[4];
                load_left(a, s.target_vectors, ES, strip * 16, k);
                add_product_of_transpose(dots, a, s.source_vectors, ES, n * 16, k);
            }
            UNROLLED(i, 4) {
                const int half = i % 2, row = strip * 16 + half * 8 + g, source = n * 16 + i / 2 * 8 + t * 2;
                const float scalar = s.target_scalars[row];
                const float low = dots[i / 2][half * 2] + scalar * s.source_scalars[source];
                const float high = dots[i / 2][half * 2 + 1] + scalar * s.source_scalars[source + 1];
                products[n][i] =
                    pack_bf16(visible(row, source) ? low : 0.0f, visible(row, source + 1) ? high : 0.0f);
            }
        }
    }
    float sums[MAP == 0 ? D / 8 : 1][4] = {};
    float total[2] = {};
    bool rejected = false;
#pragma unroll 1
    for (int feature = 0; feature < M; feature += 16) {
        float weight[2][4], seen[2][4];
        weigh(weight, s, strip, feature);
        UNROLLED(n, 2) {
            UNROLLED(i, 4) {
                seen[n][i] = s.target_scalars[strip * 16 + i / 2 * 8 + g] * s.z[feature + n * 8 + t * 2 + i % 2];
            }
        }
#pragma unroll 1
        for (int k = 0; k < E; k += 16) {
            u32 a[4];
            load_left(a, s.target_vectors, ES, strip * 16, k);
            add_product_of_transpose(seen, a, s.state, ES, feature, k);
        }
        if (CAUSAL) {
            UNROLLED(n, T / 16) {
                if (visible(strip, n)) {
                    add_product_of_transpose(seen, products[n], s.phi, TS, feature, n * 16);
                }
            }
        }
        u32 a[4];
        UNROLLED(i, 4) {
            const int n = i / 2, half = i % 2, row = strip * 16 + half * 8 + g, r = feature + n * 8 + t * 2;
            float d[2];
            UNROLLED(j, 2) {
                d[j] = weight[n][half * 2 + j] * seen[n][half * 2 + j];
                if (MAP != 0) {
                    d[j] *= r + j < D ? derivative(input_to_float(s.targets[row * DS + r + j])) : 0.0f;
                }
                total[half] += d[j];
            }
            a[i] = pack_bf16(d[0], d[1]);
            if (MAP != 0 && r < head_dim && first + row < end) {
                rejected = rejected || !isfinite(d[0]) || !isfinite(d[1]);
                write_gradient(gradient, (first + row) * head_dim + r, d[0], d[1]);
            }
        }
        if (MAP == 0) {
            UNROLLED(n, D / 16) {
                u32 b[4];
                load_right_as_bf16(b, s.projection, DS, feature, n * 16);
                mma_bf16(sums[2 * n], a, b[0], b[1]);
                mma_bf16(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }
    if (MAP != 0) {
        return rejected;
    }
    UNROLLED(half, 2) {
        const int row = strip * 16 + half * 8 + g;
        const float curvature_term = KEYS ? curvature * row_sum(total[half]) : 0.0f;
        UNROLLED(n, D / 8) {
            const int x = n * 8 + t * 2;
            const float low = sums[n][half * 2] - curvature_term * input_to_float(s.targets[row * DS + x]);
            const float high = sums[n][half * 2 + 1] - curvature_term * input_to_float(s.targets[row * DS + x + 1]);
            if (x < head_dim && first + row < end) {
                rejected = rejected || !isfinite(low) || !isfinite(high);
                write_gradient(gradient, (first + row) * head_dim + x, low, high);
            }
        }
    }
    return rejected;
}

// Gradients of `width` values of a strip of 16 keys, which later queries see; returns the same.
template <bool CAUSAL>
__device__ __forceinline__ bool value_gradient(const Shared& s, int strip, u16* gradient, i64 first, i64 end,
                                               int value_dim, int width) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    float sums[E / 8][4] = {};
    float scores[CAUSAL ? T / 8 : 1][4] = {};
#pragma unroll 1
    for (int feature = 0; feature < M; feature += 16) {
        float weight[2][4];
        weigh(weight, s, strip, feature);
        u32 a[4];
        UNROLLED(i, 4) {
            const int n = i / 2, half = i % 2, row = strip * 16 + half * 8 + g, r = feature + n * 8 + t * 2;
            float w[2];
            UNROLLED(j, 2) {
                w[j] = weight[n][half * 2 + j];
                if (MAP != 0) {
                    w[j] *= r + j < D ? activation(input_to_float(s.targets[row * DS + r + j])) : 0.0f;
                }
            }
            a[i] = pack_bf16(w[0], w[1]);
        }
        if (CAUSAL) {
            add_product(scores, a, s.phi, TS, feature, strip);
        }
        add_product(sums, a, s.state, ES, feature);
    }
    if (CAUSAL) {
        UNROLLED(k, T / 16) {
            if (!visible(strip, k)) {
                continue;
            }
            u32 a[4];
            UNROLLED(i, 4) {
                const int n = 2 * k + i / 2, half = i % 2;
                const int row = strip * 16 + half * 8 + g, source = n * 8 + t * 2;
                a[i] = pack_bf16(visible(row, source) ? scores[n][half * 2] : 0.0f,
                                 visible(row, source + 1) ? scores[n][half * 2 + 1] : 0.0f);
            }
            add_product(sums, a, s.source_vectors, ES, k * 16);
        }
    }
    bool rejected = false;
    UNROLLED(i, E / 4) {
        const int n = i / 2, half = i % 2, x = n * 8 + t * 2;
        const i64 token = first + strip * 16 + half * 8 + g;
        if (x < width && token < end) {
            const float low = sums[n][half * 2], high = sums[n][half * 2 + 1];
            rejected = rejected || !isfinite(low) || !isfinite(high);
            *reinterpret_cast<u32*>(gradient + token * value_dim + x) = pack_input(low, high);
        }
    }
    return rejected;
}

// All gradients of a tile. Each warp takes a strip, of tokens or of values, after the other.
template <bool CAUSAL>
__device__ __forceinline__ bool tile_gradients(const Shared& s, const Gradient& gradient, u16* of_values, i64 first,
                                                i64 end, int head_dim, int value_dim, int width, float curvature) {
    bool rejected = false;
    for (int i = threadIdx.x / WARP; i < T / 16 * (KEYS ? 2 : 1); i += WARPS) {
        const int strip = i % (T / 16);
        const bool bad = KEYS && i >= T / 16
                             ? value_gradient<CAUSAL>(s, strip, of_values, first, end, value_dim, width)
                             : token_gradient<CAUSAL>(s, strip, gradient, first, end, head_dim, curvature);
        rejected = rejected || bad;
    }
    return rejected;
}

}  // namespace

// Kernels ------------------------------------------------------------------------------------------

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

// Adjoint states of the last `needed` segments of queries, each by itself, the last one first: kvz
// (heads, needed, m, e + 1), shifts (heads, needed, m). Blocks: x = head * needed + place.
KERNEL __launch_bounds__(THREADS, 1)
    segment_adjoints(const u16* __restrict__ queries, VIEW(query), const u16* __restrict__ grads, VIEW(grad),
                     const float* __restrict__ rows, const float* __restrict__ scalars, SPEC, i64 n1, i64 n2,
                     i64 length, i64 segment_length, int segments, int needed, int head_dim, int value_dim,
                     int features, float* __restrict__ kvz, float* __restrict__ shifts) {
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
    for (i64 first = begin; first < end; first += T) {
        start_tile<T, D>(s.sources, queries, query_row, first, end, head_dim, nullptr, 0);
        start_tile<T, E>(s.source_vectors, grads, grad_row, first, end, width, nullptr, 0);
        load_terms(s.rows, s.source_scalars, rows + head * length, scalars + head * length, 1.0f, first, end);
        copies_done();
        block_sync();
        if (FP16) {
            make_bf16(s.source_vectors);
            block_sync();
        }
        add_tokens<false, true, 1>(state, s, s.sources, s.source_vectors, s.source_scalars);
        block_sync();
    }
    const i64 first_row = static_cast<i64>(blockIdx.x) * features;
    store_state(state, s, kvz + first_row * (value_dim + 1), shifts + first_row, features, value_dim, first_value);
}

#elif PART == 1

// Full attention: gradients of tokens that read one state each head, (heads, length, d), and with KEYS
// of their values, (heads, length, e). `scalars`: null for 1.
KERNEL __launch_bounds__(THREADS, 1)
    read_gradients(const u16* __restrict__ tokens, VIEW(token), const u16* __restrict__ vectors, VIEW(vector),
                   const unsigned char* __restrict__ mask, VIEW(mask), const float* __restrict__ rows,
                   const float* __restrict__ scalars, SPEC, const float* __restrict__ kvz,
                   const float* __restrict__ shifts, SIZES, u16* __restrict__ whole, float* __restrict__ partials,
                   i64 partial_size, u16* __restrict__ of_values, int* __restrict__ flag) {
    const Shared s = share(false, true);
    const i64 head = blockIdx.x / segments, segment = blockIdx.x % segments;
    const i64 spec = OFFSET(spec), state = head * features;
    const int first_value = blockIdx.y * E, width = min(E, value_dim - first_value);
    tokens += OFFSET(token);
    vectors += OFFSET(vector) + first_value;
    mask = mask == nullptr ? mask : mask + OFFSET(mask);
    scalars = scalars == nullptr ? scalars : scalars + head * length;
    const Gradient gradient(whole, partials, partial_size, head * length * head_dim);
    of_values = KEYS ? of_values + head * length * value_dim + first_value : of_values;
    start_projection(s, projection + spec * M * D, col + spec * M);
    load_read_state(s, col + spec * M, kvz + state * (value_dim + 1), shifts + state, features, value_dim, first_value);
    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    const float factor = first_value == 0 ? 1.0f : 0.0f;
    bool rejected = false;
    for (i64 first = begin; first < end; first += T) {
        start_tile<T, D>(s.targets, tokens, token_row, first, end, head_dim, mask, mask_row);
        start_tile<T, E>(s.target_vectors, vectors, vector_row, first, end, width, mask, mask_row);
        load_terms(s.target_rows, s.target_scalars, rows + head * length, scalars, factor, first, end);
        copies_done();
        block_sync();
        if (FP16) {
            make_bf16(s.target_vectors);
            block_sync();
        }
        const bool bad =
            tile_gradients<false>(s, gradient, of_values, first, end, head_dim, value_dim, width, curvature);
        rejected = rejected || bad;
        block_sync();
    }
    if (rejected) {
        *flag = 1;
    }
}

#elif PART == 2

// Causal gradients of segments, from the states before them or, with KEYS, the adjoint states after
// them, which lie in places counted from the last segment: gradient (heads, length, d), of_values
// (heads, length, e) with KEYS.
KERNEL __launch_bounds__(THREADS, 1)
    causal_gradients(const u16* __restrict__ queries, VIEW(query), const u16* __restrict__ keys, VIEW(key),
                     const u16* __restrict__ values, VIEW(value), const u16* __restrict__ grads, VIEW(grad),
                     const unsigned char* __restrict__ mask, VIEW(mask), const float* __restrict__ query_rows,
                     const float* __restrict__ query_scalars, const float* __restrict__ key_rows, SPEC,
                     const float* __restrict__ kvz, const float* __restrict__ shifts, SIZES, u16* __restrict__ whole,
                     float* __restrict__ partials, i64 partial_size, u16* __restrict__ of_values,
                     int* __restrict__ flag) {
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
    const Gradient gradient(whole, partials, partial_size, head * length * head_dim);
    of_values = KEYS ? of_values + head * length * value_dim + first_value : of_values;
    const i64 before = (head * segments + (KEYS ? segments - 1 - segment : segment)) * features;
    start_projection(s, projection + spec * M * D, col + spec * M);

    State state;
    load_state(state, s, kvz + before * (value_dim + 1), shifts + before, features, value_dim, first_value);
    const i64 begin = segment * segment_length, end = min(begin + segment_length, length);
    const i64 tiles = (end - begin + T - 1) / T;
    const float factor = first_value == 0 ? 1.0f : 0.0f;  // of the scalars of the targets
    bool rejected = false;
    for (i64 i = 0; i < tiles; ++i) {
        const i64 first = begin + (KEYS ? tiles - 1 - i : i) * T;
        start_tile<T, D>(KEYS ? s.sources : s.targets, queries, query_row, first, end, head_dim, nullptr, 0);
        start_tile<T, E>(KEYS ? s.source_vectors : s.target_vectors, grads, grad_row, first, end, width, nullptr,
                         0);
        start_tile<T, D>(KEYS ? s.targets : s.sources, keys, key_row, first, end, head_dim, mask, mask_row);
        start_tile<T, E>(KEYS ? s.target_vectors : s.source_vectors, values, value_row, first, end, width, mask,
                         mask_row);
        load_terms(KEYS ? s.rows : s.target_rows, KEYS ? s.source_scalars : s.target_scalars, query_rows, query_scalars,
                   KEYS ? 1.0f : factor, first, end);
        load_terms(KEYS ? s.target_rows : s.rows, KEYS ? s.target_scalars : s.source_scalars, key_rows, nullptr,
                   KEYS ? factor : 1.0f, first, end);
        copies_done();
        block_sync();
        if (FP16) {
            make_bf16(s.target_vectors);
            make_bf16(s.source_vectors);
            block_sync();
        }
        add_tokens<true, true, 1>(state, s, s.sources, s.source_vectors, s.source_scalars);
        block_sync();
        const bool bad =
            tile_gradients<true>(s, gradient, of_values, first, end, head_dim, value_dim, width, curvature);
        rejected = rejected || bad;
        block_sync();
    }
    if (rejected) {
        *flag = 1;
    }
}

#endif

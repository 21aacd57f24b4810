// What kernels on 16-bit arrays share: tiles in shared memory, fragments, and the state in registers.
//
// Options: see fused.cu. The file that includes this one includes device.cuh and common.cuh before it.
#pragma once

namespace {

constexpr int D = HEAD_DIM, M = FEATURES, E = VALUE_TILE, T = TOKEN_TILE;
constexpr int STRIPS = M / (16 * WARPS);
constexpr int THREADS = WARPS * WARP;
// Rows in shared memory, 16 bytes longer than they need be: eight of them fill all banks once.
constexpr int DS = D + 8, ES = E + 8, TS = T + 8;
constexpr float LOG2E = 1.4426950408889634f;

static_assert(M % (16 * WARPS) == 0 && D % 16 == 0 && E % 16 == 0 && T % 16 == 0, "whole tiles");
static_assert(MAP == 0 || (M == D && STRIPS == 1), "a coordinate a feature, and a strip a warp");

constexpr int PROJECTION_BYTES = MAP == 0 ? M * DS * 2 : 0;
constexpr int KEY_BYTES = T * DS * 2;
constexpr int VALUE_BYTES = T * ES * 2;

// What a tile of tokens and the state take of a block's shared memory.
struct Tiles {
    u16* projection;  // (M, DS)
    u16* phi;         // (M, TS): features of the tile's tokens
    u16* state;       // (M, ES): the state before the tile, on the tile's scale
    float* col;       // (M)
    float* bias;      // (M): col + c
    float* z;         // (M)
    float* shifts;    // (M): c and z of the state whose kv is in registers
    float* sums;      // (M)
    float* rows;      // (T): log weight of the tile's tokens
};

// Lay out an array of so many bytes.
__device__ __forceinline__ u16* take(unsigned char*& p, int bytes) {
    p += bytes;
    return reinterpret_cast<u16*>(p - bytes);
}

// Lay out the float32 arrays from here on; returns the address after them.
__device__ __forceinline__ float* place_numbers(Tiles& s, unsigned char* p) {
    s.col = reinterpret_cast<float*>(p);
    s.bias = s.col + M;
    s.z = s.bias + M;
    s.shifts = s.z + M;
    s.sums = s.shifts + M;
    s.rows = s.sums + M;
    return s.rows + T;
}

__device__ __forceinline__ float input_to_float(u16 bits) {
    return FP16 ? f16_to_float(bits) : bf16_to_float(bits);
}

__device__ __forceinline__ void mma_input(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (FP16) {
        mma_f16(d, a, b0, b1);
    } else {
        mma_bf16(d, a, b0, b1);
    }
}

// The lower and the upper bf16 of a word.
__device__ __forceinline__ float low_bf16(u32 word) { return bf16_to_float(static_cast<u16>(word)); }
__device__ __forceinline__ float high_bf16(u32 word) { return bf16_to_float(static_cast<u16>(word >> 16)); }

__device__ __forceinline__ float exp_less(float log, float shift) {
    return fast_exp2((log - shift) * LOG2E);
}

// The same of a weight. Not of factors, which must be 1 where nothing changes: they are taken tile after tile.
__device__ __forceinline__ float weight_less(float log, float shift) {
    return fast_exp2(fmaf(log, LOG2E, -shift * LOG2E));
}

__device__ __forceinline__ float activation(float x) {
    if (MAP == 1) {
        return x > 0.0f ? x + 1.0f : fast_exp2(x * LOG2E);
    }
    return isnan(x) ? x : fmaxf(x, 0.0f);
}

// f(x) exp(-shift), where `factor` is exp(-shift): no log, whatever the scale.
__device__ __forceinline__ float scaled_activation(float x, float shift, float factor) {
    if (MAP == 1) {
        return x > 0.0f ? fmaf(x, factor, factor) : exp_less(x, shift);
    }
    return x < 0.0f ? 0.0f : x * factor;  // NaN stays
}

// Inputs, two a word: the lower, the upper, the larger of each.
__device__ __forceinline__ float low_input(u32 word) { return input_to_float(static_cast<u16>(word)); }
__device__ __forceinline__ float high_input(u32 word) { return input_to_float(static_cast<u16>(word >> 16)); }
__device__ __forceinline__ u32 max_inputs(u32 a, u32 b) { return FP16 ? max_f16(a, b) : max_bf16(a, b); }

constexpr u32 LOWEST_INPUTS = FP16 ? 0xfc00fc00u : 0xff80ff80u;  // -inf

// Two numbers of the type of the inputs in one word.
__device__ __forceinline__ u32 pack_input(float low, float high) {
    return FP16 ? float_to_f16(low) | static_cast<u32>(float_to_f16(high)) << 16 : pack_bf16(low, high);
}

// Largest of what the four lanes that share rows g and g + 8 hold.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// Fragments: lanes give addresses of rows of 8 elements (see load_matrices).

// 16 x 16 of a row-major array, as the left operand.
__device__ __forceinline__ void load_left(u32 (&a)[4], const u16* tile, int stride, int row, int column) {
    int lane = threadIdx.x % WARP;
    load_matrices(a, tile + (row + lane % 16) * stride + column + lane / 16 * 8);
}

// The same of the transpose: rows of a left operand are columns of the array.
__device__ __forceinline__ void load_left_of_transpose(u32 (&a)[4], const u16* tile, int stride, int row, int column) {
    int lane = threadIdx.x % WARP;
    load_matrices_transposed(a, tile + (column + lane / 16 * 8 + lane % 8) * stride + row + lane / 8 % 2 * 8);
}

// Two right operands, 16 x 8 each, side by side: rows `row`... of a row-major array.
__device__ __forceinline__ void load_right(u32 (&b)[4], const u16* tile, int stride, int row, int column) {
    int lane = threadIdx.x % WARP;
    load_matrices_transposed(b, tile + (row + lane % 16) * stride + column + lane / 16 * 8);
}

// The same of the transpose: columns `row`... of a right operand are rows of the array.
__device__ __forceinline__ void load_right_of_transpose(u32 (&b)[4], const u16* tile, int stride, int row,
                                                        int column) {
    int lane = threadIdx.x % WARP;
    load_matrices(b, tile + (row + lane / 16 * 8 + lane % 8) * stride + column + lane / 8 % 2 * 8);
}

// d += a b, of bf16: b are rows `row`... of a row-major array, columns 16 `first` up to 16 `end`.
template <int N>
__device__ __forceinline__ void add_product(float (&d)[N][4], const u32 (&a)[4], const u16* tile, int stride, int row,
                                            int first = 0, int end = N / 2) {
    UNROLLED(n, N / 2) {
        if (n >= first && n < end) {
            u32 b[4];
            load_right(b, tile, stride, row, n * 16);
            mma_bf16(d[2 * n], a, b[0], b[1]);
            mma_bf16(d[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// d += a b, of bf16: b are the columns `column`... of the transpose of 16 rows of an array.
__device__ __forceinline__ void add_product_of_transpose(float (&d)[2][4], const u32 (&a)[4], const u16* tile,
                                                         int stride, int row, int column) {
    u32 b[4];
    load_right_of_transpose(b, tile, stride, row, column);
    mma_bf16(d[0], a, b[0], b[1]);
    mma_bf16(d[1], a, b[2], b[3]);
}

// Multiply row g or g + 8 of all fragments by a factor.
template <int N>
__device__ __forceinline__ void scale_rows(float (&d)[N][4], int half, float factor) {
    UNROLLED(n, N) {
        d[n][half * 2] *= factor;
        d[n][half * 2 + 1] *= factor;
    }
}

// Loading ------------------------------------------------------------------------------------------

// Before loops over a tile that causal gradients of some sizes would spill registers to unroll.
#if defined(KEYS) && HEAD_DIM > 96 && FEATURES > 128 && FEATURES < 256
#define ROLLED _Pragma("unroll 1")
#else
#define ROLLED
#endif

// Start the copy of ROWS tokens; those after the end, masked or beyond `width` become zeros.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void start_tile(u16* tile, const u16* source, i64 row_stride, i64 first, i64 end,
                                           int width, const unsigned char* mask, i64 mask_row) {
    constexpr int COPIES = WIDTH / 8;
    ROLLED for (int i = threadIdx.x; i < ROWS * COPIES; i += THREADS) {
        int row = i / COPIES, column = i % COPIES * 8;
        i64 token = first + row;
        bool valid = token < end && column < width;
        valid = valid && (mask == nullptr || mask[token * mask_row]);
        copy_async(tile + row * (WIDTH + 8) + column, source + (valid ? token * row_stride + column : 0),
                   valid);
    }
}

__device__ __forceinline__ void start_projection(const Tiles& s, const u16* projection, const float* col) {
    if (MAP == 0) {
        start_tile<M, D>(s.projection, projection, D, 0, M, D, nullptr, 0);
    }
    for (int r = threadIdx.x; r < M; r += THREADS) {
        s.col[r] = col[r];
    }
}

// Values of float16 become bf16.
__device__ __forceinline__ void make_bf16(u16* values) {
    if (FP16) {
        ROLLED for (int i = threadIdx.x; i < T * E; i += THREADS) {
            u16* value = values + i / E * ES + i % E;
            *value = float_to_bf16(f16_to_float(*value));
        }
    }
}

// The sums kv of a state in the registers of a warp: features g and g + 8 of each strip.
struct State {
    float kv[STRIPS][E / 8][4];
};

__device__ __forceinline__ void load_state(State& state, const Tiles& s, const float* kvz, const float* c,
                                           int features, int value_dim, int first_value) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    UNROLLED(strip, STRIPS) {
        UNROLLED(half, 2) {
            int r = (warp * STRIPS + strip) * 16 + half * 8 + g;
            bool valid = kvz != nullptr && r < features;
            const float* row = kvz + static_cast<i64>(r) * (value_dim + 1);
            if (t == 0) {
                s.shifts[r] = valid ? c[r] : -INFINITE;
                s.sums[r] = valid ? row[value_dim] : 0.0f;
            }
            UNROLLED(n, E / 8) {
                UNROLLED(i, 2) {
                    int x = first_value + n * 8 + t * 2 + i;
                    state.kv[strip][n][half * 2 + i] = valid && x < value_dim ? row[x] : 0.0f;
                }
            }
        }
    }
}

__device__ __forceinline__ void store_state(const State& state, const Tiles& s, float* kvz, float* c,
                                            int features, int value_dim, int first_value) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    UNROLLED(strip, STRIPS) {
        UNROLLED(half, 2) {
            int r = (warp * STRIPS + strip) * 16 + half * 8 + g;
            if (r >= features) {
                continue;
            }
            float* row = kvz + static_cast<i64>(r) * (value_dim + 1);
            if (first_value == 0 && t == 0) {
                c[r] = s.shifts[r];
                row[value_dim] = s.sums[r];
            }
            UNROLLED(n, E / 8) {
                UNROLLED(i, 2) {
                    int x = first_value + n * 8 + t * 2 + i;
                    if (x < value_dim) {
                        row[x] = state.kv[strip][n][half * 2 + i];
                    }
                }
            }
        }
    }
}

// A state that all tokens of a head read, in shared memory.
__device__ __forceinline__ void load_read_state(const Tiles& s, const float* col, const float* kvz, const float* c,
                                                int features, int value_dim, int first_value) {
    for (int r = threadIdx.x; r < M; r += THREADS) {
        s.bias[r] = r < features ? col[r] + c[r] : -INFINITE;
        s.z[r] = r < features ? kvz[static_cast<i64>(r) * (value_dim + 1) + value_dim] : 0.0f;
    }
    for (int i = threadIdx.x; i < M * E; i += THREADS) {
        const int r = i / E, x = first_value + i % E;
        const bool valid = r < features && x < value_dim;
        s.state[r * ES + i % E] =
            valid ? float_to_bf16(kvz[static_cast<i64>(r) * (value_dim + 1) + x]) : static_cast<u16>(0);
    }
}

// Tokens -------------------------------------------------------------------------------------------

// Load the coordinates of all tokens that are 16 features of a pointwise map, as left operands; `top`, of
// features g and g + 8, becomes the largest log that this lane holds: the largest coordinate's.
__device__ __forceinline__ void load_coordinates(u32 (&x)[T / 16][4], float (&top)[2], const Tiles& s,
                                                 const u16* tokens, int feature) {
    const int g = threadIdx.x % WARP / 4;
    UNROLLED(k, T / 16) {
        load_left_of_transpose(x[k], tokens, DS, feature, k * 16);
    }
    UNROLLED(half, 2) {
        u32 largest = max_inputs(x[0][half], x[0][half + 2]);
#pragma unroll
        for (int k = 1; k < T / 16; ++k) {
            largest = max_inputs(largest, max_inputs(x[k][half], x[k][half + 2]));
        }
        const float log = log_activation(MAP, fmaxf(low_input(largest), high_input(largest)));
        top[half] = fmaxf(top[half], log + s.col[feature + half * 8 + g]);
    }
}

// Add a tile of tokens to the state: the keys, or in the gradients the queries. With READ, leave in
// shared memory what the tokens that read it need: features of the tile, and the state before it on
// the scale after it. With WEIGHED, `scalars`, (T), are summed beside the values, else 1. The products
// of TOGETHER strips are made with the same fragments of the tile, which takes registers. Features of
// pointwise maps are made from coordinates, but WEIGHED by their logs: their tokens have log weights.
template <bool READ, bool WEIGHED, int TOGETHER>
__device__ __forceinline__ void add_tokens(State& state, const Tiles& s, const u16* tokens, const u16* values,
                                           const float* scalars) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    constexpr bool BY_LOGS = MAP == 0 || WEIGHED;
    static_assert(STRIPS % TOGETHER == 0, "whole groups of strips");
#pragma unroll
    for (int first = 0; first < STRIPS; first += TOGETHER) {
        const int first_feature = (threadIdx.x / WARP * STRIPS + first) * 16;
        float(*kv)[E / 8][4] = state.kv + first;
        float log[TOGETHER][T / 8][4];
        UNROLLED(strip, TOGETHER) {
            const float col[2] = {s.col[first_feature + strip * 16 + g], s.col[first_feature + strip * 16 + 8 + g]};
            UNROLLED(n, T / 8) {
                UNROLLED(i, 4) {
                    log[strip][n][i] = BY_LOGS ? col[i / 2] + s.rows[n * 8 + t * 2 + i % 2] : 0.0f;
                }
            }
        }
        u32 x[T / 16][4];
        if (MAP == 0) {
            // Gradients of d = 32 spill registers where both steps are unrolled.
#pragma unroll(WEIGHED && D == 32 ? 1 : 2)
            for (int k = 0; k < D; k += 16) {
                u32 a[TOGETHER][4];
                UNROLLED(strip, TOGETHER) {
                    load_left(a[strip], s.projection, DS, first_feature + strip * 16, k);
                }
                UNROLLED(n, T / 16) {
                    u32 b[4];
                    load_right_of_transpose(b, tokens, DS, n * 16, k);
                    UNROLLED(strip, TOGETHER) {
                        mma_input(log[strip][2 * n], a[strip], b[0], b[1]);
                        mma_input(log[strip][2 * n + 1], a[strip], b[2], b[3]);
                    }
                }
            }
        }
        float top[TOGETHER][2], shift[TOGETHER][2], rescaled[TOGETHER][2];
        UNROLLED(strip, TOGETHER) {
            const int feature = first_feature + strip * 16;
            const float before[2] = {s.shifts[feature + g], s.shifts[feature + 8 + g]};
            top[strip][0] = before[0];
            top[strip][1] = before[1];
            if (BY_LOGS) {
                UNROLLED(n, T / 8) {
                    UNROLLED(i, 4) {
                        const int r = feature + g + i / 2 * 8, token = n * 8 + t * 2 + i % 2;
                        float& l = log[strip][n][i];
                        if (MAP != 0) {
                            l += log_activation(MAP, input_to_float(tokens[token * DS + r]));
                        }
                        top[strip][i / 2] = fmaxf(top[strip][i / 2], l);
                    }
                }
            } else {
                load_coordinates(x, top[strip], s, tokens, feature);
            }
            UNROLLED(half, 2) {
                const int r = feature + half * 8 + g;
                top[strip][half] = row_max(top[strip][half]);
                shift[strip][half] = finite_shift(top[strip][half]);
                const float factor = exp_less(before[half], shift[strip][half]);
                rescaled[strip][half] = s.sums[r] * factor;
                if (warp_any(factor != 1.0f)) {
                    scale_rows(kv[strip], half, factor);
                }
                if (READ) {
                    u32* row = reinterpret_cast<u32*>(s.state + r * ES);
                    UNROLLED(n, E / 8) {
                        row[n * 4 + t] =
                            pack_bf16(kv[strip][n][half * 2], kv[strip][n][half * 2 + 1]);
                    }
                    if (t == 0) {
                        s.z[r] = rescaled[strip][half];
                        s.bias[r] = s.col[r] + top[strip][half];
                    }
                }
            }
        }
        float less_col[2], factors[2];  // of pointwise maps: shifts without col, and their inverse factors
        UNROLLED(half, 2) {
            less_col[half] = shift[0][half] - s.col[first_feature + half * 8 + g];
            factors[half] = exp_less(0.0f, less_col[half]);
        }
        float z[TOGETHER][2] = {};
        UNROLLED(k, T / 16) {
            u32 a[TOGETHER][4];
            UNROLLED(strip, TOGETHER) {
                UNROLLED(i, 4) {
                    const int n = 2 * k + i / 2, half = i % 2;  // tokens 8 n + 2 t, feature g + 8 half
                    float phi[2];
                    UNROLLED(j, 2) {
                        phi[j] = BY_LOGS ? weight_less(log[strip][n][half * 2 + j], shift[strip][half])
                                         : scaled_activation(j == 0 ? low_input(x[k][i]) : high_input(x[k][i]),
                                                             less_col[half], factors[half]);
                    }
                    const u32 word = a[strip][i] = pack_bf16(phi[0], phi[1]);
                    if (WEIGHED) {
                        z[strip][half] +=
                            low_bf16(word) * scalars[n * 8 + t * 2] + high_bf16(word) * scalars[n * 8 + t * 2 + 1];
                    } else {
                        z[strip][half] += phi[0] + phi[1];
                    }
                    if (READ) {
                        const int r = first_feature + strip * 16 + half * 8 + g;
                        reinterpret_cast<u32*>(s.phi + r * TS)[n * 4 + t] = word;
                    }
                }
            }
            UNROLLED(n, E / 16) {
                u32 b[4];
                load_right(b, values, ES, k * 16, n * 16);
                UNROLLED(strip, TOGETHER) {
                    mma_bf16(kv[strip][2 * n], a[strip], b[0], b[1]);
                    mma_bf16(kv[strip][2 * n + 1], a[strip], b[2], b[3]);
                }
            }
        }
        UNROLLED(strip, TOGETHER) {
            UNROLLED(half, 2) {
                const int r = first_feature + strip * 16 + half * 8 + g;
                const float sum = rescaled[strip][half] + row_sum(z[strip][half]);
                warp_sync();  // all lanes have read what the first of four writes
                if (t == 0) {
                    s.shifts[r] = top[strip][half];
                    s.sums[r] = sum;
                }
            }
        }
    }
}

}  // namespace

// Strides in elements, of three leading axes of sizes (.., n1, n2) and of the tokens.
#define VIEW(name) i64 name##_0, i64 name##_1, i64 name##_2, i64 name##_row
// The map; strides count whole projections. Blocks: x = head * segments + segment, y = a tile of the values.
#define SPEC \
    const u16 *__restrict__ projection, const float *__restrict__ col, i64 spec_0, i64 spec_1, i64 spec_2
// Axes of heads, how tokens are cut into segments, dims, and the curvature of the map.
#define SIZES                                                                                                     \
    i64 n1, i64 n2, i64 length, i64 segment_length, int segments, int head_dim, int value_dim, int features, \
        float curvature

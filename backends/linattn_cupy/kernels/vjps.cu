// Gradients of attention in float32, between products: cotangents of rows, scores and weights, and adjoints.
//
// With weights w_ir of a query on the scale of its tile, phi_rj of a key (see features.cu), g the cotangent of
// output = num / den, and G_ij = (g_i.v_j + h_i) / den_i for j <= i, h = -g.output:
//   log w_ir   w_ir (sum_j G_ij phi_rj + (g_i.kv_r + h_i z_r) / den_i)     kv, z: the state before the tile
//   log phi_rj phi_rj (sum_i G_ij w_ir + v_j.a_r + b_r)                    a, b: the adjoint after it,
// sum_i w_ir [g_i, h_i] / den_i over the queries of later tiles. Arrays of a name with strides lie where they are.
// `fine` becomes 0 where something is not finite. Option: WARPS.
#include "device.cuh"
#include "common.cuh"
#include "rows.cuh"

// [g, -g.output] / den, (heads, n, columns), with zeros after it; null for dens of 1. A row without keys has none.
// `rejected`, (heads, tiles), or null: tiles that are not fine. A warp a row.
KERNEL __launch_bounds__(THREADS)
    row_cotangents(const float* __restrict__ grads, ROWS(grads), const float* __restrict__ output,
                   const float* __restrict__ dens, const int* __restrict__ rejected, int n, int tile, int e,
                   int columns, float* __restrict__ cotangents, int* __restrict__ fine) {
    const WarpRow place(n);
    const int lane = threadIdx.x % WARP;
    if (place.row >= n) {
        return;
    }
    const i64 row = place.head * n + place.row;
    grads += place.head * grads_head + place.row * grads_row;
    output += row * e;
    cotangents += row * columns;
    const float den = dens == nullptr ? 1.0f : dens[row], inverse = den == 0.0f ? 0.0f : 1.0f / den;
    float inner = 0.0f;
    for (int x = lane; x < columns; x += WARP) {
        const float g = x < e ? grads[x] : 0.0f;
        inner = x < e ? fmaf(g, output[x], inner) : inner;
        if (x != e) {
            cotangents[x] = g * inverse;
        }
    }
    inner = -warp_sum(inner) * inverse;
    if (lane == 0) {
        cotangents[e] = inner;
        const bool bad = rejected != nullptr && rejected[place.head * (n / tile) + place.row / tile];
        if (bad || !isfinite(inner) || !isfinite(inverse)) {
            *fine = 0;
        }
    }
}

// G from its products, (tiles, tile, tile): h_i / den_i, the last of `columns`, is added up to the diagonal, and
// what lies above it is 0. A warp a row.
KERNEL __launch_bounds__(THREADS)
    score_cotangents(float* __restrict__ scores, int tile, const float* __restrict__ cotangents, int e, int columns) {
    const WarpRow place(tile);
    if (place.row >= tile) {
        return;
    }
    const i64 row = place.head * tile + place.row;
    const float inner = cotangents[row * columns + e];
    scores += row * tile;
    for (int j = threadIdx.x % WARP; j < tile; j += WARP) {
        scores[j] = j <= place.row ? scores[j] + inner : 0.0f;
    }
}

// Gradients by log weights, in the place of `sums`, (heads, n, m), to which are added factor_i times the numbers `z`
// of the tile's features (an element of a row of `z_step`; factors of a row of `factors_row`, or null for 1). For
// maps of coordinates (map 1 elu + 1, 2 relu) `to` gets the gradients by the tokens x, else what curvature adds to
// them; null for nothing. A warp a row.
KERNEL __launch_bounds__(THREADS)
    pull_weights(const float* __restrict__ weights, float* __restrict__ sums, const float* __restrict__ factors,
                 i64 factors_row, const float* __restrict__ z, i64 z_step, const float* __restrict__ x, ROWS(x),
                 int n, int tile, int d, int m, int map, float curvature, float* __restrict__ to, ROWS(to),
                 int* __restrict__ fine) {
    const WarpRow place(n);
    const int lane = threadIdx.x % WARP;
    if (place.row >= n) {
        return;
    }
    const i64 row = place.head * n + place.row;
    const float factor = factors == nullptr ? 1.0f : factors[row * factors_row];
    z += (place.head * (n / tile) + place.row / tile) * m * z_step;
    weights += row * m;
    sums += row * m;
    x += place.head * x_head + place.row * x_row;
    to = to == nullptr ? to : to + place.head * to_head + place.row * to_row;
    float total = 0.0f;
    bool bad = false;
    for (int r = lane; r < m; r += WARP) {
        const float gradient = weights[r] * fmaf(factor, z[r * z_step], sums[r]);
        bad = bad || !isfinite(gradient);
        if (map == 0) {
            sums[r] = gradient;
            total += gradient;
        } else if (gradient == 0.0f || (map == 1 && x[r] <= 0.0f)) {
            to[r] = gradient;
        } else {
            to[r] = gradient / (map == 1 ? x[r] + 1.0f : x[r]);
        }
    }
    if (map == 0 && to != nullptr) {
        total = -curvature * warp_sum(total);
        for (int i = lane; i < d; i += WARP) {
            to[i] = total == 0.0f ? 0.0f : total * x[i];
        }
    }
    if (bad) {
        *fine = 0;
    }
}

// From cotangents of states, (heads, tiles, m, columns), to the adjoint after each tile, on the tile's scale, in
// place; and from the adjoint after the block to the one before it, (heads, m, columns), on the scale `shifts`, also
// in place. A thread takes an entry.
KERNEL __launch_bounds__(THREADS)
    scan_adjoints(float* __restrict__ cotangents, float* __restrict__ adjoint, const float* __restrict__ scales,
                  const float* __restrict__ shifts, int tiles, int m, int columns) {
    const Elements part(m, columns, THREADS);
    if (static_cast<int>(threadIdx.x) >= part.count) {
        return;
    }
    const u32 place = part.column + threadIdx.x, x = place % columns;
    const i64 head = part.head, r = part.token + place / columns, row = head * m + r;
    float entry = adjoint[row * columns + x];
    for (int k = tiles - 1; k >= 0; --k) {
        const i64 in_tile = (head * tiles + k) * m + r;
        const float before = k > 0 ? scales[in_tile - m] : shifts[row];
        const float added = cotangents[in_tile * columns + x];
        cotangents[in_tile * columns + x] = entry;
        entry = (entry + added) * expf(before - finite_shift(scales[in_tile]));
    }
    adjoint[row * columns + x] = entry;
}

// Which rows, or elements of rows, a block of threads takes. Option: WARPS.
//
// The file that includes this one includes device.cuh before it.
#pragma once

#define ROWS(name) i64 name##_head, i64 name##_row

namespace {

constexpr int THREADS = WARPS * WARP;

// Elements of the rows of one head, (n, width), that a block takes. Divisions of 64 bits are many
// instructions: a thread makes them once.
struct Elements {
    i64 head;
    i64 first;  // the block's first element in its head
    i64 token;  // its row
    u32 column;
    int count;

    __device__ __forceinline__ Elements(int n, int width, int most) {
        const i64 size = static_cast<i64>(n) * width;
        const u32 blocks = static_cast<u32>((size + most - 1) / most);
        head = blockIdx.x / blocks;
        first = static_cast<i64>(blockIdx.x % blocks) * most;
        token = first / width;
        column = static_cast<u32>(first - token * width);
        count = static_cast<int>(min(size - first, static_cast<i64>(most)));
    }
};

// The row of a head that a warp takes, where a head has n of them.
struct WarpRow {
    i64 head;
    int row;

    __device__ __forceinline__ explicit WarpRow(int n) {
        const u32 blocks = (static_cast<u32>(n) + WARPS - 1) / WARPS;
        head = blockIdx.x / blocks;
        row = static_cast<int>(blockIdx.x % blocks * WARPS + threadIdx.x / WARP);
    }
};

}  // namespace

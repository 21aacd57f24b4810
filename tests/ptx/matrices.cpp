// Matrices of a warp (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions"): the layouts of "Matrix Fragments
// for mma.m16n8k16 with floating point type" and of "Warp-level matrix load instruction: ldmatrix".
#include "block.h"

void Block::mma(Warp& w, const Ins& i) {
    // Operands: a0..a3, b0, b1, c0..c3, each register of a and b two elements, the lower index in the lower half.
    float a[16][16], b[16][8];
    u32 av[16] = {}, bv[8] = {};  // not a defined element in row, in column
    const bool half = i.from == F16;
    auto element = [&](u32 word, int k) { const u16 x = k ? word >> 16 : word; return half ? from_f16(x) : from_bf16(x); };
    const u32 *ra[4], *rb[2], *rc[4];
    u32 va[4], vb[2], vc[4];
    for (int k = 0; k < 4; ++k) ra[k] = in32(w, i.s[k]), va[k] = valid(w, i.s[k]);
    for (int k = 0; k < 2; ++k) rb[k] = in32(w, i.s[4 + k]), vb[k] = valid(w, i.s[4 + k]);
    for (int k = 0; k < 4; ++k) rc[k] = in32(w, i.s[6 + k]), vc[k] = valid(w, i.s[6 + k]);
    LANES {
        const int group = l >> 2, in_group = l % 4;
        for (int e = 0; e < 8; ++e) {  // a_e
            const int row = e < 2 || (e >= 4 && e < 6) ? group : group + 8;
            const int column = in_group * 2 + (e & 1) + (e >= 4 ? 8 : 0);
            a[row][column] = element(ra[e / 2][l], e & 1);
            if (!(va[e / 2] >> l & 1)) av[row] = 1;
        }
        for (int e = 0; e < 4; ++e) {  // b_e
            const int row = in_group * 2 + (e & 1) + (e >= 2 ? 8 : 0), column = group;
            b[row][column] = element(rb[e / 2][l], e & 1);
            if (!(vb[e / 2] >> l & 1)) bv[column] = 1;
        }
    }
    u32 d[4][32], dv[4] = {};
    LANES {
        const int group = l >> 2, in_group = l % 4;
        for (int e = 0; e < 4; ++e) {  // c_e, d_e
            const int row = e < 2 ? group : group + 8, column = in_group * 2 + (e & 1);
            double sum = f32(rc[e][l]);
            for (int k = 0; k < 16; ++k) sum += (double)a[row][k] * b[k][column];
            d[e][l] = canonical(u32of(exact_numbers() ? (float)sum : truncated(sum)));
            dv[e] |= (u32)(!av[row] && !bv[column] && (vc[e] >> l & 1)) << l;
        }
    }
    for (int e = 0; e < 4; ++e) out32(w, i.d[e], d[e], ALL, dv[e]);
}

void Block::ldmatrix(Warp& w, const Ins& i) {
    u64 address[32];
    address_of(w, i.s[0], ALL, address);
    u16 m[4][8][8];
    bool defined[4][8];
    LANES {  // lane l: the row l % 8 of matrix l / 8, 16 bytes
        misaligned(address[l], 16);
        defined[l / 8][l % 8] = true;
        read_shared(w, l, address[l], 16, (u8*)m[l / 8][l % 8], &defined[l / 8][l % 8]);
    }
    for (int k = 0; k < 4; ++k) {
        u32 t[32], v = 0;
        LANES {  // a thread's fragment: row l / 4, elements 2 (l % 4) and the next; transposed: of the transpose
            const int r = l / 4, c = l % 4 * 2;
            const u16 low = i.trans ? m[k][c][r] : m[k][r][c], high = i.trans ? m[k][c + 1][r] : m[k][r][c + 1];
            t[l] = low | (u32)high << 16;
            v |= (u32)(i.trans ? defined[k][c] && defined[k][c + 1] : defined[k][r]) << l;
        }
        out32(w, i.d[k], t, ALL, v);
    }
}

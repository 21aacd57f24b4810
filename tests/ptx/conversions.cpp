// Comparisons (PTX ISA, "Comparison and Selection Instructions"), shuffles and conversions (of "Data Movement and
// Conversion Instructions": shfl.sync and cvt).

#include <algorithm>

#include "block.h"


template <class T> static bool compare(int c, T a, T b) {
    switch (c) {
        case 1: return a == b;
        case 2: return a < b || a > b;  // false where one is NaN
        case 3: return a < b;
        case 4: return a <= b;
        case 5: return a > b;
        case 6: return a >= b;
        case 11: return !(a < b || a > b);
        case 12: return !(a == b);
        case 13: return !(a >= b);
        case 14: return !(a > b);
        case 15: return !(a <= b);
        case 16: return !(a < b);
        case 17: return a == a && b == b;
        case 18: return !(a == a && b == b);
    }
    return false;
}
// The lanes in which a comparison of two numbers of a type holds.
u32 Block::compared(Warp& w, const Ins& i, Type type) {
    u32 r = 0;
    if (bytes_of(type) == 8) {
        const u64 *a = in64(w, i.s[0]), *b = in64(w, i.s[1]);
        LANES r |= (u32)(type == F64 ? compare(i.cmp, bits<double>(a[l]), bits<double>(b[l])) : type == S64 ? compare(i.cmp, (i64)a[l], (i64)b[l]) : compare(i.cmp, a[l], b[l])) << l;
        return r;
    }
    const u32 *a = in32(w, i.s[0]), *b = in32(w, i.s[1]);
    LANES {
        bool x;
        if (type == F32) x = i.ftz ? compare(i.cmp, f32(flush(a[l])), f32(flush(b[l]))) : compare(i.cmp, f32(a[l]), f32(b[l]));
        else if (type == S32) x = compare(i.cmp, (i32)a[l], (i32)b[l]);
        else if (type == S16) x = compare(i.cmp, (int16_t)a[l], (int16_t)b[l]);
        else if (type == F16 || type == BF16) x = compare(i.cmp, widen(a[l], type), widen(b[l], type));
        else if (bytes_of(type) == 2) x = compare(i.cmp, (u16)a[l], (u16)b[l]);
        else x = compare(i.cmp, a[l], b[l]);
        r |= (u32)x << l;
    }
    return r;
}

// 1, or all bits for integers, where a comparison holds: "Comparison and Selection: set".
void Block::set(Warp& w, const Ins& i, u32 mask) {
    const u32 r = compared(w, i, i.from), yes = i.type == BF16 ? 0x3f80 : i.type == F16 ? 0x3c00 : i.type == F32 ? 0x3f800000 : bytes_of(i.type) == 2 ? 0xffff : ~0u;
    u32 t[32];
    LANES t[l] = r >> l & 1 ? yes : 0;
    out32(w, i.d[0], t, mask, all_valid(w, i));
}

void Block::setp(Warp& w, const Ins& i, u32 mask) {
    u32 r = compared(w, i, i.type);
    const u32 v = all_valid(w, i);
    if (i.boolean) {
        const u32 c = inp(w, i.s[2]);
        r = i.boolean == 1 ? r & c : i.boolean == 2 ? r | c : r ^ c;
    }
    outp(w, i.d[0], r, mask, v);
}

void Block::shuffle(Warp& w, const Ins& i, u32 mask) {
    // d|p, a, b, c, members
    const u32 *a = in32(w, i.s[0]), *b = in32(w, i.s[1]), *c = in32(w, i.s[2]);
    const u32 va = valid(w, i.s[0]);
    u32 t[32], v = 0, inside = 0;
    LANES {
        const int clamp = c[l] & 31, segment = c[l] >> 8 & 31, by = b[l] & 31;
        const bool p = (l ^ by) <= ((l & segment) | (clamp & ~segment));
        const int j = p ? l ^ by : l;
        if ((mask >> l & 1) && !(mask >> j & 1)) report("a shuffle reads a thread that takes no part");
        t[l] = a[j];
        v |= (va >> j & 1) << l;
        inside |= (u32)p << l;
    }
    out32(w, i.d[0], t, mask, v);
    if (i.d.size() > 1) outp(w, i.d[1], inside, mask, ALL);
}

void Block::convert(Warp& w, const Ins& i, u32 mask) {
    const Type to = i.type, from = i.from;
    const u32 v = all_valid(w, i);
    if (to == BF16X2 || to == F16X2) {  // d, a, b: a in the upper half
        const u32 *a = in32(w, i.s[0]), *b = in32(w, i.s[1]);
        u32 t[32];
        LANES {
            const float high = f32(i.ftz ? flush(a[l]) : a[l]), low = f32(i.ftz ? flush(b[l]) : b[l]);
            const bool z = i.round == 'z';
            t[l] = to == BF16X2 ? to_bf16(low, z) | (u32)to_bf16(high, z) << 16 : to_f16(low, z) | (u32)to_f16(high, z) << 16;
        }
        out32(w, i.d[0], t, mask, v);
        return;
    }
    const u64* a = in64(w, i.s[0]);
    u64 t[32];
    LANES {
        double x = 0;
        i64 n = 0;
        u64 u = 0;
        bool is_whole = false;
        switch (from) {
            case F32: x = f32(i.ftz ? flush(a[l]) : (u32)a[l]); break;
            case F64: x = bits<double>(a[l]); break;
            case F16: x = from_f16(a[l]); break;
            case BF16: x = from_bf16(a[l]); break;
            case S8: n = (int8_t)a[l], u = n, is_whole = true; break;
            case S16: n = (int16_t)a[l], u = n, is_whole = true; break;
            case S32: n = (i32)a[l], u = n, is_whole = true; break;
            case S64: n = a[l], u = n, is_whole = true; break;
            case U8: case B8: u = (u8)a[l], n = u, is_whole = true; break;
            case U16: case B16: u = (u16)a[l], n = u, is_whole = true; break;
            case U32: case B32: u = (u32)a[l], n = u, is_whole = true; break;
            default: u = a[l], n = u, is_whole = true; break;
        }
        if (!is_float(to)) {
            if (!is_whole) {  // to an integer, saturated; NaN becomes 0
                const double r = i.round == 'z' ? trunc(x) : i.round == 'm' ? floor(x) : i.round == 'p' ? ceil(x) : nearbyint(x);
                const int size = bytes_of(to) * 8;
                const double most = is_signed(to) ? ldexp(1, size - 1) : ldexp(1, size), least = is_signed(to) ? -most : 0;
                if (std::isnan(x)) u = 0;
                else if (r >= most) u = is_signed(to) ? (1ull << (size - 1)) - 1 : size == 64 ? ~0ull : (1ull << size) - 1;
                else if (r <= least) u = is_signed(to) ? (u64)1 << (size - 1) : 0;
                else u = is_signed(to) ? (u64)(i64)r : (u64)r;
            }
            if (i.sat && is_whole) stop("saturated conversion of integers");
            const int size = bytes_of(to);
            if (is_signed(to)) u = size == 1 ? (u64)(i64)(int8_t)u : size == 2 ? (u64)(i64)(int16_t)u : size == 4 ? (u64)(i64)(i32)u : u;
            else u = size == 1 ? (u8)u : size == 2 ? (u16)u : size == 4 ? (u32)u : u;
            t[l] = u;
            continue;
        }
        if (to == F32) {
            float y;
            const bool negative = is_whole && is_signed(from) && n < 0;
            fesetround(i.round == 'z' ? FE_TOWARDZERO : i.round == 'm' ? FE_DOWNWARD : i.round == 'p' ? FE_UPWARD : FE_TONEAREST);
            volatile i64 vn = n; volatile u64 vu = u; volatile double vx = x;
            if (is_whole) y = is_signed(from) ? (float)vn : (float)vu;
            else y = (float)vx;
            (void)negative;
            fesetround(FE_TONEAREST);
            if (i.integer) y = i.round == 'z' ? truncf(y) : i.round == 'm' ? floorf(y) : i.round == 'p' ? ceilf(y) : nearbyintf(y);
            if (i.sat) y = y > 0 ? std::min(y, 1.0f) : 0.0f;
            u32 word = canonical(u32of(y));
            t[l] = i.ftz ? flush(word) : word;
        } else if (to == F64) {
            double y = is_whole ? (is_signed(from) ? (double)n : (double)u) : x;
            if (i.integer) y = i.round == 'z' ? trunc(y) : i.round == 'm' ? floor(y) : i.round == 'p' ? ceil(y) : nearbyint(y);
            t[l] = bits<u64>(y);
        } else {
            const double y = is_whole ? (is_signed(from) ? (double)n : (double)u) : x;
            t[l] = to == F16 ? to_f16(y, i.round == 'z') : to_bf16(y, i.round == 'z');
        }
    }
    out64(w, i.d[0], t, mask, v);
}

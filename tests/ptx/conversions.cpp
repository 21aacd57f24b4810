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
    }
    return false;
}
// The lanes in which a comparison of two numbers of a type holds.
u32 Block::compared(Warp& w, const Ins& i) {
    const Type type = i.type;
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

void Block::setp(Warp& w, const Ins& i, u32 mask) { outp(w, i.d[0], compared(w, i), mask, all_valid(w, i)); }

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

// The integer that a mode rounds to.
static double whole(double x, char mode) { return mode == 'z' ? trunc(x) : mode == 'm' ? floor(x) : mode == 'p' ? ceil(x) : nearbyint(x); }

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
        const bool is_whole = !is_float(from);
        u64 u = is_whole ? extended(a[l], from) : 0;
        long double x = is_signed(from) ? (long double)(i64)u : u;  // which holds all numbers of 64 bits
        if (from == F32) x = f32(i.ftz ? flush(a[l]) : (u32)a[l]);
        else if (from == F64) x = bits<double>(a[l]);
        else if (!is_whole) x = widen(a[l], from);
        if (!is_float(to)) {
            if (!is_whole) {  // to an integer, saturated; NaN becomes 0
                const double r = whole(x, i.round);
                const int size = bytes_of(to) * 8;
                const double most = is_signed(to) ? ldexp(1, size - 1) : ldexp(1, size), least = is_signed(to) ? -most : 0;
                if (std::isnan(x)) u = 0;
                else if (r >= most) u = is_signed(to) ? (1ull << (size - 1)) - 1 : size == 64 ? ~0ull : (1ull << size) - 1;
                else if (r <= least) u = is_signed(to) ? (u64)1 << (size - 1) : 0;
                else u = is_signed(to) ? (u64)(i64)r : (u64)r;
            }
            if (i.sat && is_whole) stop("saturated conversion of integers");
            t[l] = extended(u, to);
            continue;
        }
        if (i.integer) x = whole(x, i.round);
        if (to == F32) {
            volatile long double given = x;
            volatile float narrow;
            rounded(i, [&] { narrow = given; });
            const float y = narrow;
            const u32 word = canonical(u32of(!i.sat ? y : y > 0 ? std::min(y, 1.0f) : 0.0f));
            t[l] = i.ftz ? flush(word) : word;
        } else if (to == F64) {
            t[l] = bits<u64>((double)x);
        } else {
            t[l] = to == F16 ? to_f16(x, i.round == 'z') : to_bf16(x, i.round == 'z');
        }
    }
    out64(w, i.d[0], t, mask, v);
}

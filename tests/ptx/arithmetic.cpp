// Arithmetic (PTX ISA, "Integer Arithmetic Instructions",
// "Floating-Point Instructions", "Half Precision Floating-Point Instructions"). Numbers of 32 bits under .ftz are flushed
// before and after; every NaN is the one that the hardware makes.
#include <algorithm>

#include "block.h"

bool Block::arithmetic(Warp& w, const Ins& i, u32 mask) {
    auto none = [&](auto, auto, auto) {
        stop("type of an instruction");
        return 0;
    };
    switch (i.base) {
        case ADD:
            arithmetic(
                w, i, mask, [](auto a, auto b, auto) { return a + b; }, [](auto a, auto b, auto) { return (u64)a + (u64)b; },
                [](auto a, auto b, auto) { return a + b; });
            break;
        case SUB:
            arithmetic(
                w, i, mask, [](auto a, auto b, auto) { return a - b; }, [](auto a, auto b, auto) { return (u64)a - (u64)b; },
                [](auto a, auto b, auto) { return a - b; });
            break;
        case MUL:
        case MAD: multiply(w, i, mask); break;
        case FMA:
            if (i.type == F32) rounded(i, [&] { eachf(w, i, mask, [](float a, float b, float c) { return __builtin_fmaf(a, b, c); }); });
            else if (i.type == F64) rounded(i, [&] { eachd(w, i, mask, [](double a, double b, double c) { return __builtin_fma(a, b, c); }); });
            else if (i.type == F16 || i.type == BF16) small(w, i, mask, [](float a, float b, float c) { return (float)((double)a * b + c); });
            else pairs(w, i, mask, [](float a, float b, float c) { return (float)((double)a * b + c); });
            break;
        case DIV:
            if (!is_float(i.type)) divided(w, i, mask, false);
            else if (i.type == F32)
                rounded(i, [&] { eachf(w, i, mask, [&](float a, float b, float) { return i.approx ? off(a / b, 2e-7) : a / b; }); });
            else rounded(i, [&] { eachd(w, i, mask, [](double a, double b, double) { return a / b; }); });
            break;
        case REM: divided(w, i, mask, true); break;
        case ABS:
            if (i.type == F32) each32(w, i, mask, [&](u32 a, u32, u32) { return (i.ftz ? flush(a) : a) & 0x7fffffff; });
            else if (i.type == F64) each64(w, i, mask, [](u64 a, u64, u64) { return a & ~(1ull << 63); });
            else
                arithmetic(
                    w, i, mask, [](auto a, auto, auto) { return fabs(a); }, [](auto a, auto, auto) { return a < 0 ? 0 - (u64)a : (u64)a; }, none);
            break;
        case COPYSIGN:
            if (i.type == F32) each32(w, i, mask, [](u32 a, u32 b, u32) { return (a & 0x80000000) | (b & 0x7fffffff); });
            else each64(w, i, mask, [](u64 a, u64 b, u64) { return (a & 1ull << 63) | (b & ~(1ull << 63)); });
            break;
        case NEG:
            if (i.type == F32) each32(w, i, mask, [&](u32 a, u32, u32) { return (i.ftz ? flush(a) : a) ^ 0x80000000; });
            else if (i.type == F64) each64(w, i, mask, [](u64 a, u64, u64) { return a ^ 1ull << 63; });
            else arithmetic(w, i, mask, [](auto a, auto, auto) { return -a; }, [](auto a, auto, auto) { return 0 - (u64)a; }, none);
            break;
        case MAX:
            arithmetic(
                w, i, mask,
                [](auto a, auto b, auto) {
                    return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
                },
                [](auto a, auto b, auto) { return a > b ? a : b; }, [](auto a, auto b, auto) { return a > b ? a : b; });
            break;
        case MIN:
            arithmetic(
                w, i, mask,
                [](auto a, auto b, auto) {
                    return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
                },
                [](auto a, auto b, auto) { return a < b ? a : b; }, [](auto a, auto b, auto) { return a < b ? a : b; });
            break;
        default: return false;
    }
    return true;
}

void Block::multiply(Warp& w, const Ins& i, u32 mask) {
    if (i.wide) return wide(w, i, mask);
    if (i.base == MUL && !i.hi) {
        arithmetic(
            w, i, mask, [](auto a, auto b, auto) { return a * b; }, [](auto a, auto b, auto) { return (u64)a * (u64)b; },
            [](auto a, auto b, auto) { return a * b; });
    } else if (i.base == MAD && !i.hi) {
        arithmetic(
            w, i, mask, [](auto a, auto b, auto c) { return fma((double)a, (double)b, (double)c); },
            [](auto a, auto b, auto c) { return (u64)a * (u64)b + (u64)c; }, [](auto a, auto b, auto c) { return a * b + c; });
    } else {  // the upper half of the product; mad adds to it
        const bool adds = i.base == MAD;
        if (i.type == S32) each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return (u32)((i64)(i32)a * (i32)b >> 32) + (adds ? c : 0); });
        else if (i.type == U32) each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return (u32)((u64)a * b >> 32) + (adds ? c : 0); });
        else if (i.type == S64) each64(w, i, mask, [&](u64 a, u64 b, u64 c) { return (u64)((__int128)(i64)a * (i64)b >> 64) + (adds ? c : 0); });
        else if (i.type == U64) each64(w, i, mask, [&](u64 a, u64 b, u64 c) { return (u64)((unsigned __int128)a * b >> 64) + (adds ? c : 0); });
        else stop("type of an instruction");
    }
}

void Block::wide(Warp& w, const Ins& i, u32 mask) {
    const u32 *a = in32(w, i.s[0]), *b = in32(w, i.s[1]);
    u64 t[32];
    LANES {
        if (i.type == S32) t[l] = (i64)(i32)a[l] * (i32)b[l];
        else if (i.type == U32) t[l] = (u64)a[l] * b[l];
        else if (i.type == S16) t[l] = (i64)(int16_t)a[l] * (int16_t)b[l];
        else t[l] = (u64)(u16)a[l] * (u16)b[l];
    }
    if (i.base == MAD) {
        const u64* c = in64(w, i.s[2]);
        LANES t[l] += c[l];
    }
    out64(w, i.d[0], t, mask, all_valid(w, i));
}

void Block::divided(Warp& w, const Ins& i, u32 mask, bool rest) {
    const bool sign = is_signed(i.type);
    const u64 *a = in64(w, i.s[0], sign), *b = in64(w, i.s[1], sign);
    u64 t[32];
    LANES {
        u64 x = a[l], y = b[l];
        const int size = bytes_of(i.type);
        if (size == 4) x = sign ? (u64)(i64)(i32)x : (u32)x, y = sign ? (u64)(i64)(i32)y : (u32)y;
        if (size == 2) x = sign ? (u64)(i64)(int16_t)x : (u16)x, y = sign ? (u64)(i64)(int16_t)y : (u16)y;
        if (!(mask >> l & 1)) {
            t[l] = 0;
            continue;
        }
        if (y == 0) {
            report("a division of integers by zero");
            t[l] = ~0ull;
            continue;
        }
        if (sign) t[l] = (i64)y == -1 ? (rest ? 0 : 0 - x) : rest ? (u64)((i64)x % (i64)y) : (u64)((i64)x / (i64)y);
        else t[l] = rest ? x % y : x / y;
    }
    out64(w, i.d[0], t, mask, all_valid(w, i));
}

// "Floating-Point Instructions": those with .approx are as wrong as the ISA lets them be.
bool Block::functions(Warp& w, const Ins& i, u32 mask) {
    switch (i.base) {
        case RCP:
            if (i.type == F32) rounded(i, [&] { eachf(w, i, mask, [&](float a, float, float) { return i.approx ? off(1 / a, 1e-7) : 1 / a; }); });
            else eachd(w, i, mask, [](double a, double, double) { return 1 / a; });
            break;
        case SQRT:
            if (i.type == F32)
                rounded(i, [&] { eachf(w, i, mask, [&](float a, float, float) { return i.approx ? off(sqrtf(a), 1e-7) : sqrtf(a); }); });
            else eachd(w, i, mask, [](double a, double, double) { return sqrt(a); });
            break;
        case RSQRT:
            if (i.type == F32) eachf(w, i, mask, [](float a, float, float) { return off(1 / sqrt((double)a), 2e-7); });
            else eachd(w, i, mask, [](double a, double, double) { return 1 / sqrt(a); });
            break;
        case EX2: eachf(w, i, mask, [](float a, float, float) { return off(exp2((double)a), 2.3e-7); }); break;  // 2^-22
        case LG2: eachf(w, i, mask, [](float a, float, float) { return off(log2((double)a), 1e-7); }); break;
        default: return false;
    }
    return true;
}

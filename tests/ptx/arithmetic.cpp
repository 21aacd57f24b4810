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
            else stop("type of an instruction");
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
            if (i.type != F32) stop("type of an instruction");
            each32(w, i, mask, [](u32 a, u32 b, u32) { return (a & 0x80000000) | (b & 0x7fffffff); });
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
    if (i.hi) {
        if (i.base == MAD || bytes_of(i.type) != 4) stop("an instruction that the interpreter lacks");
        each32(w, i, mask, [&](u32 a, u32 b, u32) { return (u32)(extended(a, i.type) * extended(b, i.type) >> 32); });
    } else if (i.base == MUL)
        arithmetic(
            w, i, mask, [](auto a, auto b, auto) { return a * b; }, [](auto a, auto b, auto) { return (u64)a * (u64)b; },
            [](auto a, auto b, auto) { return a * b; });
    else
        arithmetic(
            w, i, mask, [](auto a, auto b, auto c) { return fma((double)a, (double)b, (double)c); },
            [](auto a, auto b, auto c) { return (u64)a * (u64)b + (u64)c; }, [](auto a, auto b, auto c) { return a * b + c; });
}

void Block::wide(Warp& w, const Ins& i, u32 mask) {
    if (i.base == MAD) stop("an instruction that the interpreter lacks");
    each64(w, i, mask, [&](u64 a, u64 b, u64) { return extended(a, i.type) * extended(b, i.type); });
}

void Block::divided(Warp& w, const Ins& i, u32 mask, bool rest) {
    const bool sign = is_signed(i.type);
    const u64 *a = in64(w, i.s[0]), *b = in64(w, i.s[1]);
    u64 t[32];
    LANES {
        const u64 x = extended(a[l], i.type), y = extended(b[l], i.type);
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
        case EX2: eachf(w, i, mask, [](float a, float, float) { return off(exp2((double)a), 2.3e-7); }); break;  // 2^-22
        default: return false;
    }
    return true;
}

#include "numbers.h"

#include <stdlib.h>

#include <algorithm>

float from_f16(u16 h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x;
    if (exponent == 31) x = mantissa ? NAN : INFINITY;
    else if (exponent == 0) x = ldexp(mantissa, -24);
    else x = ldexp(1024 + mantissa, exponent - 25);
    return h >> 15 ? -x : x;
}

// The nearest number of a format with these bits of mantissa and exponent.
static u32 to_small(double x, int mantissa_bits, int exponent_bits, bool toward_zero) {
    const u32 sign = std::signbit(x) ? 1u << (mantissa_bits + exponent_bits) : 0;
    const u32 infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
    if (std::isnan(x)) return (1u << (mantissa_bits + exponent_bits)) - 1;  // 0x7fff
    x = fabs(x);
    if (std::isinf(x)) return sign | infinity;
    if (x == 0) return sign;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent;
    frexp(x, &exponent);
    exponent = std::max(exponent - 1, 1 - bias);
    const double units = ldexp(x, mantissa_bits - exponent);  // exact
    double whole = floor(units);
    const double rest = units - whole;
    if (!toward_zero && (rest > 0.5 || (rest == 0.5 && fmod(whole, 2) == 1))) ++whole;
    u64 m = whole;
    // A mantissa that became 2^(bits + 1) carries into the exponent by itself; so does one of a subnormal number.
    const u64 code = m + ((u64)(exponent + bias - 1) << mantissa_bits);
    if (code >= infinity) return sign | (toward_zero ? infinity - 1 : infinity);
    return sign | code;
}
u16 to_f16(double x, bool toward_zero) { return to_small(x, 10, 5, toward_zero); }
u16 to_bf16(double x, bool toward_zero) { return to_small(x, 7, 8, toward_zero); }

float truncated(double x) {
    float y = x;
    if (fabs((double)y) > fabs(x)) y = nextafterf(y, 0.0f);
    return y;
}

std::mt19937_64 chance;
u64 seed() {
    static const u64 given = getenv("PTX_SEED") ? strtoull(getenv("PTX_SEED"), nullptr, 0) : 1;
    return given;
}
bool exact_numbers() { static const bool is = getenv("PTX_EXACT") && *getenv("PTX_EXACT") == '1'; return is; }
float off(float x, double most) {
    if (exact_numbers() || !std::isfinite(x) || x == 0) return x;
    const u64 mixed = (u32of(x) ^ seed()) * 0x9e3779b97f4a7c15ull;
    return x * (1 + most * ((double)(mixed >> 32) / 2147483648.0 - 1));
}

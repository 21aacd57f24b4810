// Numbers of 16, 32 and 64 bits as instructions see them, and what is left to chance.
#pragma once
#include <math.h>
#include <string.h>

#include <random>

#include "memory.h"

template <class To, class From> inline To bits(From x) { To y; static_assert(sizeof x == sizeof y); memcpy(&y, &x, sizeof y); return y; }
inline float f32(u32 x) { return bits<float>(x); }
inline u32 u32of(float x) { return bits<u32>(x); }
// .ftz: subnormal numbers become zeros of their sign.
inline u32 flush(u32 x) { return (x & 0x7f800000) == 0 ? x & 0x80000000 : x; }
inline u32 canonical(u32 x) { return (x & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : x; }

float from_f16(u16 h);
inline float from_bf16(u16 h) { return f32((u32)h << 16); }
// To nearest, ties to even; or toward zero.
u16 to_f16(double x, bool toward_zero = false);
u16 to_bf16(double x, bool toward_zero = false);
// Toward zero, of a sum that is exact enough.
float truncated(double x);

extern std::mt19937_64 chance;
inline u32 below(u32 n) { return (u64)(u32)chance() * n >> 32; }
// The number of a seed (PTX_SEED) that all chance and all approximations depend on.
u64 seed();
// With PTX_EXACT=1 approximate instructions and mma are rounded to nearest.
bool exact_numbers();
// An approximate result: off by a relative error of at most `most`, which is a function of its value, as on a GPU.
float off(float x, double most);

// A module of PTX after parsing: functions, their instructions and constants.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.h"

constexpr u32 SHARED_START = 1024;  // so that an address of 0 is no variable
// Where generic addresses of shared and of local memory begin ("Generic Addressing").
constexpr u64 SHARED_WINDOW = 0x7e0000000000, LOCAL_WINDOW = 0x7d0000000000, WINDOW = 1ull << 32;
constexpr u32 ALL = 0xffffffffu;
#define LANES for (int l = 0; l < 32; ++l)

struct Function;

struct Error : std::runtime_error { using runtime_error::runtime_error; };
[[noreturn]] inline void fail(const std::string& what) { throw Error(what); }

enum Type : u8 { NO, PRED, B8, U8, S8, B16, U16, S16, F16, BF16, B32, U32, S32, F32, F16X2, BF16X2, B64, U64, S64, F64, B128 };
inline int bytes_of(Type t) { return t == PRED || t == NO ? 0 : t <= S8 ? 1 : t <= BF16 ? 2 : t <= BF16X2 ? 4 : t == B128 ? 16 : 8; }
inline bool is_signed(Type t) { return t == S8 || t == S16 || t == S32 || t == S64; }
inline bool is_float(Type t) { return t == F16 || t == BF16 || t == F32 || t == F64; }
// The number of a type that the lowest bits hold, in 64 bits.
inline u64 extended(u64 x, Type t) {
    const int unused = 64 - 8 * bytes_of(t);
    return is_signed(t) ? (u64)((i64)(x << unused) >> unused) : x << unused >> unused;
}

enum Base : u8 { ABS, ADD, AND, BAR, BARWARP, BFI, BRA, CLZ, COPYSIGN, CPASYNC, CPWAIT, CVT, CVTA, DIV, EX2, EXIT, FMA, LD, LDMATRIX, MAD,
    MAX, MIN, MMA, MOV, MUL, NEG, NOT, OR, POPC, RCP, REM, SELP, SETP, SHFL, SHL, SHR, SQRT, ST, SUB, UNKNOWN, VOTE, XOR };

enum Space : u8 { GENERIC, GLOBAL, SHARED, LOCAL, PARAM, CONST };
constexpr u8 TIME = 9;  // the mode of a mov from %globaltimer

struct Operand {
    enum Kind : u8 { NONE, REG, PREG, IMM, SINK, LABEL } kind = NONE;
    bool wide = false, negated = false;  // of a register: 64 bits; of a predicate
    int index = -1;                      // of a register or of a constant
    i64 offset = 0;                      // of an address
};

struct Ins {
    Base base = UNKNOWN;
    Type type = NO, from = NO;  // the second type of cvt
    Space space = GENERIC;
    bool ftz = false, sat = false, approx = false, wide = false, hi = false, nc = false, trans = false, uni = false;
    char round = 'n';     // n z m p
    bool integer = false; // rounding to an integer (.rni)
    u8 vec = 1, cmp = 0, mode = 0;
    int guard = -1;
    bool guard_negated = false;
    int target = -1, line = 0;
    std::vector<Operand> d, s;  // destinations, sources
    std::string text;
    u64 runs = 0;  // by how many warps
};

struct Module {
    std::string text;
    std::map<std::string, std::unique_ptr<Function>> functions;
    std::map<std::string, std::pair<u64, u64>> globals;  // name: address, bytes
    std::vector<std::vector<u8>> storage;
};

struct Function {
    Module* module;
    std::string name;
    std::vector<std::string> parameter_names;
    std::vector<u32> parameter_sizes, parameter_offsets;
    u32 parameter_total = 0, static_bytes = SHARED_START, dynamic_start = SHARED_START, local_bytes = 0, threads = 1024;
    std::vector<Ins> code;
    int count32 = 0, count64 = 0, count_pred = 0;
    std::vector<std::array<u64, 32>> constants;
    std::map<std::string, int> specials;  // register: index of a 32-bit register
};

// Fill a module from its text; throws Error.
void parse(Module* module);

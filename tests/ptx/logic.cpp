// Bits (PTX ISA, "Logic and Shift Instructions", bit fields of "Integer Arithmetic Instructions") and moves between
// registers ("Data Movement and Conversion Instructions": mov, cvta; selp), and which instruction is whose.
#include <time.h>

#include <algorithm>

#include "block.h"

void Block::execute(Warp& w, const Ins& i, u32 mask) {
    scratch32_.clear(), scratch64_.clear();
    scratch32_.reserve(16), scratch64_.reserve(16);
    if (arithmetic(w, i, mask) || movement(w, i, mask) || logic_and_shift(w, i, mask) || meetings(w, i, mask)) return;
    if (fields_of_bits(w, i, mask) || functions(w, i, mask)) return;
    stop("an instruction that the interpreter lacks");
}

bool Block::logic_and_shift(Warp& w, const Ins& i, u32 mask) {
    switch (i.base) {
        case AND: logic(w, i, mask, [](auto a, auto b) { return a & b; }); break;
        case OR: logic(w, i, mask, [](auto a, auto b) { return a | b; }); break;
        case XOR: logic(w, i, mask, [](auto a, auto b) { return a ^ b; }); break;
        case NOT:
            if (i.type == PRED) outp(w, i.d[0], ~inp(w, i.s[0]), mask, validp(w, i.s[0]));
            else if (bytes_of(i.type) == 8) each64(w, i, mask, [](u64 a, u64, u64) { return ~a; });
            else if (bytes_of(i.type) == 2) each32(w, i, mask, [](u32 a, u32, u32) { return (u32)(u16)~a; });
            else each32(w, i, mask, [](u32 a, u32, u32) { return ~a; });
            break;
        case SHL:
            if (bytes_of(i.type) == 8) each64(w, i, mask, [](u64 a, u64 b, u64) { return (u32)b > 63 ? 0 : a << (u32)b; });
            else if (bytes_of(i.type) == 2) each32(w, i, mask, [](u32 a, u32 b, u32) { return b > 15 ? 0 : (u32)(u16)(a << b); });
            else each32(w, i, mask, [](u32 a, u32 b, u32) { return b > 31 ? 0 : a << b; });
            break;
        case SHR:
            if (i.type == S64) each64(w, i, mask, [](u64 a, u64 b, u64) { return (u64)((i64)a >> std::min((u32)b, 63u)); });
            else if (bytes_of(i.type) == 8) each64(w, i, mask, [](u64 a, u64 b, u64) { return (u32)b > 63 ? 0 : a >> (u32)b; });
            else if (i.type == S32) each32(w, i, mask, [](u32 a, u32 b, u32) { return (u32)((i32)a >> std::min(b, 31u)); });
            else if (i.type == S16) each32(w, i, mask, [](u32 a, u32 b, u32) { return (u32)(u16)((int16_t)a >> std::min(b, 15u)); });
            else if (bytes_of(i.type) == 2) each32(w, i, mask, [](u32 a, u32 b, u32) { return b > 15 ? 0 : (u32)(u16)a >> b; });
            else each32(w, i, mask, [](u32 a, u32 b, u32) { return b > 31 ? 0 : a >> b; });
            break;
        default: return false;
    }
    return true;
}

bool Block::fields_of_bits(Warp& w, const Ins& i, u32 mask) {
    switch (i.base) {
        case BFI: {  // d, a, b, position, length
            const u32 *a = in32(w, i.s[0]), *b = in32(w, i.s[1]), *c = in32(w, i.s[2]), *d = in32(w, i.s[3]);
            if (bytes_of(i.type) != 4) stop("type of an instruction");
            u32 t[32];
            LANES {
                const u32 position = c[l] & 255, length = d[l] & 255;
                u32 x = b[l];
                for (u32 k = 0; k < length && position + k < 32; ++k) x = (x & ~(1u << (position + k))) | (a[l] >> k & 1) << (position + k);
                t[l] = x;
            }
            out32(w, i.d[0], t, mask, all_valid(w, i));
            break;
        }
        case POPC:
            bytes_of(i.type) == 8 ? each64(w, i, mask, [](u64 a, u64, u64) { return (u64)__builtin_popcountll(a); })
                                  : each32(w, i, mask, [](u32 a, u32, u32) { return (u32)__builtin_popcount(a); });
            break;
        case CLZ:
            bytes_of(i.type) == 8 ? each64(w, i, mask, [](u64 a, u64, u64) { return (u64)(a ? __builtin_clzll(a) : 64); })
                                  : each32(w, i, mask, [](u32 a, u32, u32) { return (u32)(a ? __builtin_clz(a) : 32); });
            break;
        default: return false;
    }
    return true;
}

bool Block::movement(Warp& w, const Ins& i, u32 mask) {
    switch (i.base) {
        case SELP: select(w, i, mask); break;
        case SETP: setp(w, i, mask); break;
        case MOV: move(w, i, mask); break;
        case CVT: convert(w, i, mask); break;
        case LD: load(w, i, mask); break;
        case ST: store(w, i, mask); break;
        case CPASYNC: copy_async(w, i, mask); break;
        case CPWAIT: wait(w, mask); break;
        case CVTA: {
            const u64* a = in64(w, i.s[0]);
            const u64 window = i.space == SHARED ? SHARED_WINDOW : i.space == LOCAL ? LOCAL_WINDOW : 0;
            u64 t[32];
            LANES t[l] = i.mode ? a[l] - window : a[l] + window;
            out64(w, i.d[0], t, mask, valid(w, i.s[0]));
            break;
        }
        default: return false;
    }
    return true;
}

void Block::select(Warp& w, const Ins& i, u32 mask) {
    const u32 c = inp(w, i.s[2]), vc = validp(w, i.s[2]);
    const u32 v = vc & ((c & valid(w, i.s[0])) | (~c & valid(w, i.s[1])));
    if (bytes_of(i.type) == 8) {
        const u64 *a = in64(w, i.s[0]), *b = in64(w, i.s[1]);
        u64 t[32];
        LANES t[l] = c >> l & 1 ? a[l] : b[l];
        out64(w, i.d[0], t, mask, v);
    } else {
        const u32 *a = in32(w, i.s[0]), *b = in32(w, i.s[1]);
        u32 t[32];
        LANES t[l] = c >> l & 1 ? a[l] : b[l];
        out32(w, i.d[0], t, mask, v);
    }
}

void Block::move(Warp& w, const Ins& i, u32 mask) {
    if (i.mode == TIME) {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        u64 t[32];
        LANES t[l] = now.tv_sec * 1000000000ull + now.tv_nsec;
        return out64(w, i.d[0], t, mask, ALL);
    }
    if (i.type == PRED) outp(w, i.d[0], inp(w, i.s[0]), mask, validp(w, i.s[0]));
    else if (i.d.size() > 1) {  // unpack
        const u64* a = in64(w, i.s[0]);
        const int each = bytes_of(i.type) / i.d.size() * 8;
        for (size_t k = 0; k < i.d.size(); ++k) {
            u64 t[32];
            LANES t[l] = a[l] >> k * each & ((1ull << each) - 1);
            out64(w, i.d[k], t, mask, valid(w, i.s[0]));
        }
    } else if (i.s.size() > 1) {  // pack
        const int each = bytes_of(i.type) / i.s.size() * 8;
        u64 t[32] = {};
        for (size_t k = 0; k < i.s.size(); ++k) {
            const u64* a = in64(w, i.s[k]);
            LANES t[l] |= (a[l] & ((1ull << each) - 1)) << k * each;
        }
        out64(w, i.d[0], t, mask, all_valid(w, i));
    } else if (i.d[0].wide) out64(w, i.d[0], in64(w, i.s[0]), mask, valid(w, i.s[0]));
    else out32(w, i.d[0], in32(w, i.s[0]), mask, valid(w, i.s[0]));
}

// What lanes of a warp do together: "Warp Level Matrix Multiply-Accumulate Instructions" and, of "Parallel Synchronization
// and Communication Instructions", vote.sync and bar.warp.sync. That those meant are there was seen before (Block::turn).
bool Block::meetings(Warp& w, const Ins& i, u32 mask) {
    switch (i.base) {
        case MMA: mma(w, i); break;
        case LDMATRIX: ldmatrix(w, i); break;
        case SHFL: shuffle(w, i, mask); break;
        case VOTE: {
            const u32 q = inp(w, i.s[0]) & mask;
            if ((validp(w, i.s[0]) & mask) != mask) report("an undefined value is voted on");
            outp(w, i.d[0], q ? ALL : 0, mask, ALL);
            break;
        }
        case BARWARP:
            ++w.sub_counter;
            LANES if (mask >> l & 1) w.sub[l] = w.sub_counter;
            break;
        default: return false;
    }
    return true;
}

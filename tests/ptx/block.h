// A block of threads while it runs: warps, registers, shared memory. The members are defined by topic: block.cpp
// (turns, barriers), accesses.cpp (memory), matrices.cpp, arithmetic.cpp, conversions.cpp.
#pragma once
#include <fenv.h>

#include "interpreter.h"
#include "numbers.h"
#include "program.h"

struct Copy { u64 from; u32 to, bytes, lane; bool done; };

struct Group { int pc; u32 mask; bool waits; };

struct Warp {
    int number;
    u32 alive, epoch = 0, sub_counter = 0;
    u32 sub[32] = {};
    std::vector<Group> groups;
    std::vector<u32> r32, v32, v64, p, vp;  // values; which lanes are defined
    std::vector<u64> r64;
    std::vector<Copy> copies;
    bool at_barrier = false;
    u32 barrier_vote = 0;
    int barrier_pc = -1;
    std::vector<u8> local, local_defined;
    u32 local_bytes = 0;
};

class Block {
  public:
    Block(Function* f, Memory* memory, const u32 g[3], const u32 b[3], u32 dynamic, const u8* parameters, u32 launch)
        : f_(f), memory_(memory), parameters_(parameters), launch_(launch) {
        memcpy(grid_, g, sizeof grid_), memcpy(size_, b, sizeof size_);
        threads_ = b[0] * b[1] * b[2];
        shared_end_ = std::max(f->static_bytes, f->dynamic_start + dynamic);
        shared_.resize(shared_end_), defined_.resize(shared_end_), cells_.resize(shared_end_);
    }

    void run(u32 number);

  private:
    Function* f_;
    Memory* memory_;
    const u8* parameters_;
    u32 launch_, number_ = 0, grid_[3], size_[3], id_[3], threads_, shared_end_;
    std::vector<u8> shared_, defined_;
    std::vector<Cell> cells_;
    std::vector<Warp> warps_;
    const Ins* now_ = nullptr;

    void report(const char* what);
    [[noreturn]] void stop(const std::string& what);

    // -- Turns and barriers --
    void start(u32 number);
    void release();
    void merge(Warp& w);
    bool turn(Warp& w);
    void execute(Warp& w, const Ins& i, u32 mask);

    // -- Registers: 32 numbers of 32 or 64 bits, or a bit a lane of a predicate; `v` says which lanes hold a value --
    const u32* in32(Warp& w, const Operand& o) {
        if (o.kind == Operand::REG) {
            if (!o.wide) return &w.r32[o.index * 32];
            scratch32_.emplace_back();
            auto& t = scratch32_.back();
            LANES t[l] = w.r64[o.index * 32 + l];
            return t.data();
        }
        scratch32_.emplace_back();
        auto& t = scratch32_.back();
        LANES t[l] = f_->constants[o.index][l];
        return t.data();
    }
    const u64* in64(Warp& w, const Operand& o) {
        if (o.kind == Operand::REG) {
            if (o.wide) return &w.r64[o.index * 32];
            scratch64_.emplace_back();
            auto& t = scratch64_.back();
            LANES t[l] = w.r32[o.index * 32 + l];
            return t.data();
        }
        return f_->constants[o.index].data();
    }
    u32 inp(Warp& w, const Operand& o) {
        const u32 x = o.kind == Operand::PREG ? w.p[o.index] : f_->constants[o.index][0] ? ALL : 0;
        return o.negated ? ~x : x;
    }
    u32 validp(Warp& w, const Operand& o) { return o.kind == Operand::PREG ? w.vp[o.index] : ALL; }
    u32 valid(Warp& w, const Operand& o) {
        if (o.kind == Operand::PREG) return w.vp[o.index];
        if (o.kind != Operand::REG) return ALL;
        return o.wide ? w.v64[o.index] : w.v32[o.index];
    }
    u32 all_valid(Warp& w, const Ins& i) {
        u32 v = ALL;
        for (auto& o : i.s) v &= valid(w, o);
        return v;
    }
    void out32(Warp& w, const Operand& o, const u32* x, u32 mask, u32 v) {
        if (o.kind == Operand::SINK) return;
        if (o.wide) { u64 t[32]; LANES t[l] = x[l]; out64(w, o, t, mask, v); return; }
        u32* d = &w.r32[o.index * 32];
        if (mask == ALL) memcpy(d, x, 128);
        else LANES d[l] = mask >> l & 1 ? x[l] : d[l];
        w.v32[o.index] = (w.v32[o.index] & ~mask) | (v & mask);
    }
    void out64(Warp& w, const Operand& o, const u64* x, u32 mask, u32 v) {
        if (o.kind == Operand::SINK) return;
        if (!o.wide) { u32 t[32]; LANES t[l] = x[l]; out32(w, o, t, mask, v); return; }
        u64* d = &w.r64[o.index * 32];
        if (mask == ALL) memcpy(d, x, 256);
        else LANES d[l] = mask >> l & 1 ? x[l] : d[l];
        w.v64[o.index] = (w.v64[o.index] & ~mask) | (v & mask);
    }
    void outp(Warp& w, const Operand& o, u32 x, u32 mask, u32 v) {
        if (o.kind == Operand::SINK) return;
        w.p[o.index] = (w.p[o.index] & ~mask) | (x & mask);
        w.vp[o.index] = (w.vp[o.index] & ~mask) | (v & mask);
    }
    std::vector<std::array<u32, 32>> scratch32_;
    std::vector<std::array<u64, 32>> scratch64_;

    // -- Accesses --
    Who who(const Warp& w, int lane);
    u8* shared_at(u64 address, u32 bytes);
    void misaligned(u64 address, u32 bytes);
    void read_shared(const Warp& w, int lane, u64 address, u32 bytes, u8* to, bool* is_defined);
    void write_shared(const Warp& w, int lane, u64 address, u32 bytes, const u8* from, bool is_defined);
    Allocation* global_at(u64 address, u32 bytes);
    void read_global(const Warp& w, int lane, u64 address, u32 bytes, bool nc, u8* to, bool* is_defined);
    void write_global(const Warp& w, int lane, u64 address, u32 bytes, const u8* from, bool is_defined);
    Space resolve(u64* address, Space space);
    void read(Warp& w, int lane, u64 address, Space space, u32 bytes, bool nc, u8* to, bool* is_defined);
    void write(Warp& w, int lane, u64 address, Space space, u32 bytes, const u8* from, bool is_defined);
    void address_of(Warp& w, const Operand& o, u32 mask, u64* address);
    void load(Warp& w, const Ins& i, u32 mask);
    void store(Warp& w, const Ins& i, u32 mask);
    void copy_async(Warp& w, const Ins& i, u32 mask);
    void bring(Warp& w, Copy& c);
    void wait(Warp& w, u32 mask);

    // -- Instructions, by chapter; those that return bool say whether it is one of theirs --
    bool arithmetic(Warp& w, const Ins& i, u32 mask);
    bool functions(Warp& w, const Ins& i, u32 mask);
    bool logic_and_shift(Warp& w, const Ins& i, u32 mask);
    bool fields_of_bits(Warp& w, const Ins& i, u32 mask);
    bool movement(Warp& w, const Ins& i, u32 mask);
    bool meetings(Warp& w, const Ins& i, u32 mask);
    void mma(Warp& w, const Ins& i);
    void ldmatrix(Warp& w, const Ins& i);
    u32 compared(Warp& w, const Ins& i);
    void setp(Warp& w, const Ins& i, u32 mask);
    void shuffle(Warp& w, const Ins& i, u32 mask);
    void convert(Warp& w, const Ins& i, u32 mask);
    void wide(Warp& w, const Ins& i, u32 mask);
    void divided(Warp& w, const Ins& i, u32 mask, bool rest);
    void multiply(Warp& w, const Ins& i, u32 mask);
    void move(Warp& w, const Ins& i, u32 mask);
    void select(Warp& w, const Ins& i, u32 mask);

    // -- A function of up to three numbers, lane by lane --
    template <class F> void each32(Warp& w, const Ins& i, u32 mask, F f) {
        u32 t[32];
        const size_t n = i.s.size();
        const u32* a = in32(w, i.s[0]);
        const u32* b = n > 1 ? in32(w, i.s[1]) : a;
        const u32* c = n > 2 ? in32(w, i.s[2]) : a;
        LANES t[l] = f(a[l], b[l], c[l]);
        out32(w, i.d[0], t, mask, all_valid(w, i));
    }
    template <class F> void each64(Warp& w, const Ins& i, u32 mask, F f) {
        u64 t[32];
        const size_t n = i.s.size();
        const u64* a = in64(w, i.s[0]);
        const u64* b = n > 1 ? in64(w, i.s[1]) : a;
        const u64* c = n > 2 ? in64(w, i.s[2]) : a;
        LANES t[l] = f(a[l], b[l], c[l]);
        out64(w, i.d[0], t, mask, all_valid(w, i));
    }
    template <class F> void eachf(Warp& w, const Ins& i, u32 mask, F f) {
        if (i.ftz) each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return flush(canonical(u32of(f(f32(flush(a)), f32(flush(b)), f32(flush(c)))))); });
        else each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return canonical(u32of(f(f32(a), f32(b), f32(c)))); });
        if (i.sat) {
            u32 t[32];
            const u32* x = in32(w, i.d[0]);
            LANES { const float y = f32(x[l]); t[l] = u32of(y > 0 ? std::min(y, 1.0f) : 0.0f); }
            out32(w, i.d[0], t, mask, valid(w, i.d[0]));
        }
    }
    template <class F> void eachd(Warp& w, const Ins& i, u32 mask, F f) {
        each64(w, i, mask, [&](u64 a, u64 b, u64 c) { return bits<u64>((double)f(bits<double>(a), bits<double>(b), bits<double>(c))); });
    }
    // An operation on numbers of the instruction's type: floating, signed, unsigned.
    template <class F, class S, class U> void arithmetic(Warp& w, const Ins& i, u32 mask, F f, S s, U u) {
        switch (i.type) {
            case F32: rounded(i, [&] { eachf(w, i, mask, f); }); break;
            case F64: rounded(i, [&] { eachd(w, i, mask, f); }); break;
            case F16: case BF16: small(w, i, mask, f); break;
            case F16X2: case BF16X2: pairs(w, i, mask, f); break;
            case S32: each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return (u32)s((i32)a, (i32)b, (i32)c); }); break;
            case U32: case B32: each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return (u32)u(a, b, c); }); break;
            case S16: each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return (u32)(u16)s((i32)(int16_t)a, (i32)(int16_t)b, (i32)(int16_t)c); }); break;
            case U16: case B16: each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return (u32)(u16)u((u32)(u16)a, (u32)(u16)b, (u32)(u16)c); }); break;
            case S64: each64(w, i, mask, [&](u64 a, u64 b, u64 c) { return (u64)s((i64)a, (i64)b, (i64)c); }); break;
            case U64: case B64: each64(w, i, mask, [&](u64 a, u64 b, u64 c) { return (u64)u(a, b, c); }); break;
            default: stop("type of an instruction");
        }
    }
    template <class F> void rounded(const Ins& i, F f) {
        if (i.round == 'n') { f(); return; }
        fesetround(i.round == 'z' ? FE_TOWARDZERO : i.round == 'm' ? FE_DOWNWARD : FE_UPWARD);
        f();
        fesetround(FE_TONEAREST);
    }
    float widen(u16 x, Type t) { return t == F16 || t == F16X2 ? from_f16(x) : from_bf16(x); }
    u16 narrow(float x, Type t) { return t == F16 || t == F16X2 ? to_f16(x) : to_bf16(x); }
    template <class F> void small(Warp& w, const Ins& i, u32 mask, F f) {
        each32(w, i, mask, [&](u32 a, u32 b, u32 c) { return (u32)narrow(f(widen(a, i.type), widen(b, i.type), widen(c, i.type)), i.type); });
    }
    template <class F> void pairs(Warp& w, const Ins& i, u32 mask, F f) {
        each32(w, i, mask, [&](u32 a, u32 b, u32 c) {
            const u32 low = narrow(f(widen(a, i.type), widen(b, i.type), widen(c, i.type)), i.type);
            return low | (u32)narrow(f(widen(a >> 16, i.type), widen(b >> 16, i.type), widen(c >> 16, i.type)), i.type) << 16;
        });
    }
    template <class F> void logic(Warp& w, const Ins& i, u32 mask, F f) {
        if (i.type == PRED) {
            const u32 a = inp(w, i.s[0]), b = inp(w, i.s[1]), va = validp(w, i.s[0]), vb = validp(w, i.s[1]);
            // One side may decide by itself.
            const u32 decided = i.base == AND ? (va & ~a) | (vb & ~b) : i.base == OR ? (va & a) | (vb & b) : 0;
            outp(w, i.d[0], f(a, b), mask, (va & vb) | decided);
        }
        else if (bytes_of(i.type) == 8) each64(w, i, mask, [&](u64 a, u64 b, u64) { return f(a, b); });
        else each32(w, i, mask, [&](u32 a, u32 b, u32) { return f(a, b); });
    }
};

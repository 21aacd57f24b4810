// How a block goes on: whose turn it is, branches and barriers (PTX ISA, "Control Flow Instructions" and, of "Parallel
// Synchronization and Communication Instructions", bar and barrier), and whole grids.
#include "block.h"

#include <stdio.h>

#include <algorithm>

void Block::run(u32 number) {
    number_ = number;
    id_[0] = number % grid_[0], id_[1] = number / grid_[0] % grid_[1], id_[2] = number / grid_[0] / grid_[1];
    for (auto& x : shared_) x = chance() | 0x7f;  // what is there is undefined: odd bytes, NaN more often than not
    std::fill(defined_.begin(), defined_.end(), 0);
    std::fill(cells_.begin(), cells_.end(), Cell());
    const u32 count = (threads_ + 31) / 32;
    warps_.resize(count);
    for (u32 w = 0; w < count; ++w) start(w);
    u32 left = count;
    std::vector<u32> ready;
    while (left) {
        ready.clear();
        for (u32 w = 0; w < count; ++w) if (!warps_[w].groups.empty() && !warps_[w].at_barrier) ready.push_back(w);
        if (ready.empty()) { release(); continue; }
        Warp& w = warps_[ready[below(ready.size())]];
        const u32 turns = below(4) == 0 ? 1 + below(4) : 1 + below(400);
        bool moved = true;
        for (u32 t = 0; t < turns && moved && !w.groups.empty() && !w.at_barrier; ++t) moved = turn(w);
        if (w.groups.empty()) --left;
    }
}

void Block::report(const char* what) { found(f_->name + " line " + std::to_string(now_->line) + ": " + now_->text, what); }
void Block::stop(const std::string& what) {
    report(what.c_str());
    fail(what + " in " + f_->name + ", " + now_->text);
}

void Block::start(u32 number) {
    Warp& w = warps_[number];
    w = Warp();
    w.number = number;
    const u32 first = number * 32, have = std::min(32u, threads_ - first);
    w.alive = have == 32 ? ALL : (1u << have) - 1;
    w.groups = {{0, w.alive, false}};
    w.r32.resize(f_->count32 * 32), w.v32.assign(f_->count32, 0);
    w.r64.resize(f_->count64 * 32), w.v64.assign(f_->count64, 0);
    w.p.assign(f_->count_pred, 0), w.vp.assign(f_->count_pred, 0);
    for (auto& x : w.r32) x = 0x7fbadbad;
    for (auto& x : w.r64) x = 0x7ffbadbadbadbad1;
    w.local_bytes = f_->local_bytes;
    w.local.assign(w.local_bytes * 32, 0xff), w.local_defined.assign(w.local_bytes * 32, 0);
    for (auto& [name, index] : f_->specials) {
        w.v32[index] = ALL;
        LANES {
            const u32 t = first + l;
            u32& x = w.r32[index * 32 + l];
            if (name == "%tid.x") x = t % size_[0];
            else if (name == "%tid.y") x = t / size_[0] % size_[1];
            else if (name == "%tid.z") x = t / size_[0] / size_[1];
            else if (name.rfind("%ntid.", 0) == 0) x = size_[name.back() - 'x'];
            else if (name.rfind("%ctaid.", 0) == 0) x = id_[name.back() - 'x'];
            else x = grid_[name.back() - 'x'];
        }
    }
}

// All warps that are left wait at a barrier: go on, if they wait at barriers of one kind.
void Block::release() {
    u32 any = 0;
    const Ins* kind = nullptr;
    for (auto& w : warps_) {
        if (!w.at_barrier) continue;
        const Ins& i = f_->code[w.barrier_pc];
        if (kind && kind->mode != i.mode) { now_ = &i; report("barriers of different kinds meet"); }
        kind = &i;
        any |= w.barrier_vote != 0;
    }
    if (!kind) fail("nothing can go on in " + f_->name);
    for (auto& w : warps_) {
        if (!w.at_barrier) continue;
        const Ins& i = f_->code[w.barrier_pc];
        if (i.mode) {
            const u32 p = i.d[0].index;
            w.p[p] = any ? ALL : 0;
            w.vp[p] = ALL;
        }
        w.at_barrier = false;
        ++w.epoch;
        for (auto& g : w.groups) g.waits = false, ++g.pc;
    }
}

// Merge groups at one place.
void Block::merge(Warp& w) {
    for (size_t a = 0; a < w.groups.size(); ++a)
        for (size_t b = a + 1; b < w.groups.size();)
            if (w.groups[a].pc == w.groups[b].pc) {
                w.groups[a].mask |= w.groups[b].mask;
                w.groups[a].waits = false;
                w.groups.erase(w.groups.begin() + b);
            } else {
                ++b;
            }
}

// One instruction of a warp; false where it cannot go on by itself.
bool Block::turn(Warp& w) {
    if (w.groups.size() > 1) merge(w);
    size_t chosen = 0;
    if (w.groups.size() > 1) {
        // The group that is behind, mostly; never one that waits for others.
        std::vector<size_t> free;
        for (size_t i = 0; i < w.groups.size(); ++i) if (!w.groups[i].waits) free.push_back(i);
        if (free.empty()) { now_ = &f_->code[w.groups[0].pc]; stop("threads of a warp wait for each other at different places"); }
        chosen = free[below(free.size())];
        if (below(16)) for (size_t i : free) if (w.groups[i].pc < w.groups[chosen].pc) chosen = i;
    }
    Group& g = w.groups[chosen];
    Ins& i = f_->code[g.pc];
    now_ = &i;
    u32 mask = g.mask;
    if (i.guard >= 0) {
        if ((w.vp[i.guard] & mask) != mask) report("an undefined value decides a branch");
        const u32 holds = i.guard_negated ? ~w.p[i.guard] : w.p[i.guard];
        if (i.base != BRA) {
            mask &= holds;
            const bool meets = i.base == BAR || i.base == MMA || i.base == LDMATRIX || i.base == SHFL || i.base == VOTE || i.base == BARWARP;
            if (meets && mask != g.mask && mask) report("a guard lets a part of a warp meet");
            if (!mask) { ++g.pc; return true; }
        } else {
            const u32 taken = mask & holds, rest = mask & ~holds;
            if (taken && rest) {
                if (i.uni) report("bra.uni that is not uniform");
                g.mask = rest, ++g.pc;
                w.groups.push_back({i.target, taken, false});
            } else {
                g.pc = taken ? i.target : g.pc + 1;
            }
            return true;
        }
    }
    ++i.runs;
    switch (i.base) {
        case BRA: g.pc = i.target; return true;
        case EXIT:
            for (auto& c : w.copies) if (mask >> c.lane & 1 && !c.done) { report("a thread ends before its asynchronous copies"); break; }
            if (i.guard >= 0 && mask != g.mask) { g.mask &= ~mask, ++g.pc; w.alive &= ~mask; return true; }
            w.alive &= ~mask;
            w.groups.erase(w.groups.begin() + chosen);
            for (auto& other : w.groups) other.waits = false;  // those that wait for it need not
            return true;
        case BAR: case MMA: case LDMATRIX: case SHFL: case VOTE: case BARWARP: {
            u32 wanted = w.alive;
            if (i.base == SHFL || i.base == VOTE || i.base == BARWARP) {
                const Operand& o = i.s.back();
                const u32* m = in32(w, o);
                const int lane = __builtin_ctz(mask);
                wanted = m[lane] & w.alive;
                if (!(mask >> lane & 1) || (mask & ~m[lane])) report("a thread is not in its own mask of members");
            }
            if ((g.mask & wanted) != wanted) { g.waits = true; return true; }
            if ((i.base == MMA || i.base == LDMATRIX) && g.mask != ALL) report("a part of a warp at an instruction of whole warps");
            if (i.base == BAR) {
                w.at_barrier = true, w.barrier_pc = g.pc;
                if (i.mode) {
                    const Operand& q = i.s.back();
                    if ((validp(w, q) & mask) != mask) report("an undefined value is voted on");
                    w.barrier_vote = inp(w, q) & mask;
                }
                return false;
            }
            break;
        }
        default: break;
    }
    execute(w, i, mask);
    ++g.pc;
    return true;
}

// Memory: every access is checked for bounds, alignment, races and undefined values (PTX ISA, "Data Movement and
// Conversion Instructions": ld, st, cp.async; "Parallel Synchronization and Communication Instructions": atom, red).
#include <stdio.h>

#include <algorithm>

#include "block.h"

Who Block::who(const Warp& w, int lane) { return {launch_, number_, w.epoch, w.sub[lane], (u16)(w.number * 32 + lane)}; }

u8* Block::shared_at(u64 address, u32 bytes) {
    if (address < SHARED_START || address + bytes > shared_end_) stop("out of the block's shared memory: address " + std::to_string(address) + " of " + std::to_string(shared_end_));
    return &shared_[address];
}

void Block::misaligned(u64 address, u32 bytes) {
    if (address % bytes) stop("misaligned access of " + std::to_string(bytes) + " bytes");
}

void Block::read_shared(const Warp& w, int lane, u64 address, u32 bytes, u8* to, bool* is_defined) {
    misaligned(address, bytes);
    memcpy(to, shared_at(address, bytes), bytes);
    const Who me = who(w, lane);
    const char* bad = nullptr;
    for (u64 c = address; c < address + bytes; ++c)
        if (const char* b = cells_[c].read(me, false)) bad = b;
    if (bad) report(bad);
    for (u32 k = 0; k < bytes; ++k) *is_defined = *is_defined && defined_[address + k];
}

// Two that write the same value.
static bool harmless(const char* race, bool are_defined, const u8* a, const u8* b, u32 bytes) {
    return strstr(race, "written by") && are_defined && !memcmp(a, b, bytes);
}

void Block::write_shared(const Warp& w, int lane, u64 address, u32 bytes, const u8* from, bool is_defined) {
    misaligned(address, bytes);
    u8* to = shared_at(address, bytes);
    const Who me = who(w, lane);
    const char* bad = nullptr;
    for (u64 c = address; c < address + bytes; ++c)
        if (const char* b = cells_[c].write(me)) bad = b;
    if (bad && !harmless(bad, is_defined && defined_[address], to, from, bytes)) report(bad);
    memcpy(to, from, bytes);
    memset(&defined_[address], is_defined, bytes);
}

Allocation* Block::global_at(u64 address, u32 bytes) {
    Allocation* a = memory_->find(address);
    if (!a || address + bytes > a->end()) {
        for (auto& [name, where] : f_->module->globals)
            if (address >= where.first && address + bytes <= where.first + where.second) return nullptr;
        char text[160];
        if (a) snprintf(text, sizeof text, "out of bounds: %u bytes at byte %lu of an array of %lu", bytes, address - a->start, a->bytes);
        else snprintf(text, sizeof text, "out of bounds: no memory at %#lx", address);
        stop(text);
    }
    a->prepare();
    return a;
}

void Block::read_global(const Warp& w, int lane, u64 address, u32 bytes, bool nc, u8* to, bool* is_defined) {
    misaligned(address, bytes);
    Allocation* a = global_at(address, bytes);
    memcpy(to, (void*)address, bytes);
    if (!a) return;
    const Who me = who(w, lane);
    const char* bad = nullptr;
    for (u64 k = address - a->start; k < address - a->start + bytes; ++k) {
        if (const char* b = a->cells[k].read(me, nc)) bad = b;
        *is_defined = *is_defined && a->defined[k];
    }
    if (bad) report(bad);
}

void Block::write_global(const Warp& w, int lane, u64 address, u32 bytes, const u8* from, bool is_defined) {
    misaligned(address, bytes);
    Allocation* a = global_at(address, bytes);
    if (!a) stop("write to a constant of the module");
    const Who me = who(w, lane);
    const char* bad = nullptr;
    for (u64 k = address - a->start; k < address - a->start + bytes; ++k) {
        if (const char* b = a->cells[k].write(me)) bad = b;
    }
    if (bad && !harmless(bad, is_defined && a->defined[address - a->start], (u8*)address, from, bytes)) report(bad);
    if (!is_defined) report("an undefined value is written to global memory");
    memcpy((void*)address, from, bytes);
    memset(&a->defined[address - a->start], is_defined, bytes);
}

Space Block::resolve(u64* address, Space space) {
    if (space != GENERIC) return space;
    if (*address >= SHARED_WINDOW && *address < SHARED_WINDOW + WINDOW) { *address -= SHARED_WINDOW; return SHARED; }
    if (*address >= LOCAL_WINDOW && *address < LOCAL_WINDOW + WINDOW) { *address -= LOCAL_WINDOW; return LOCAL; }
    return GLOBAL;
}

void Block::read(Warp& w, int lane, u64 address, Space space, u32 bytes, bool nc, u8* to, bool* is_defined) {
    space = resolve(&address, space);
    if (space == SHARED) read_shared(w, lane, address, bytes, to, is_defined);
    else if (space == PARAM) {
        if (address + bytes > f_->parameter_total) stop("out of the parameters");
        memcpy(to, parameters_ + address, bytes);
    } else if (space == LOCAL) {
        misaligned(address, bytes);
        if (address + bytes > w.local_bytes) stop("out of local memory");
        memcpy(to, &w.local[lane * w.local_bytes + address], bytes);
        for (u32 k = 0; k < bytes; ++k) *is_defined = *is_defined && w.local_defined[lane * w.local_bytes + address + k];
    } else read_global(w, lane, address, bytes, nc, to, is_defined);
}

void Block::write(Warp& w, int lane, u64 address, Space space, u32 bytes, const u8* from, bool is_defined) {
    space = resolve(&address, space);
    if (space == SHARED) write_shared(w, lane, address, bytes, from, is_defined);
    else if (space == LOCAL) {
        misaligned(address, bytes);
        if (address + bytes > w.local_bytes) stop("out of local memory");
        memcpy(&w.local[lane * w.local_bytes + address], from, bytes);
        memset(&w.local_defined[lane * w.local_bytes + address], is_defined, bytes);
    } else if (space == GLOBAL) write_global(w, lane, address, bytes, from, is_defined);
    else stop("a write to parameters or constants");
}

void Block::address_of(Warp& w, const Operand& o, u32 mask, u64* address) {
    if ((valid(w, o) & mask) != mask) stop("an undefined address");
    if (o.kind == Operand::REG && !o.wide) { const u32* a = in32(w, o); LANES address[l] = (u32)(a[l] + (i32)o.offset); }
    else { const u64* a = in64(w, o); LANES address[l] = a[l] + o.offset; }
}

void Block::load(Warp& w, const Ins& i, u32 mask) {
    u64 address[32];
    address_of(w, i.s[0], mask, address);
    const u32 each = bytes_of(i.type), bytes = each * i.vec;
    u8 data[32][32];
    u32 defined = 0;
    LANES {
        if (!(mask >> l & 1)) continue;
        bool is_defined = true;
        read(w, l, address[l], i.space, bytes, i.nc, data[l], &is_defined);
        defined |= (u32)is_defined << l;
    }
    for (int v = 0; v < i.vec; ++v) {
        u64 t[32];
        LANES {
            if (!(mask >> l & 1)) { t[l] = 0; continue; }
            u64 x = 0;
            memcpy(&x, data[l] + v * each, each);
            t[l] = extended(x, i.type);
        }
        out64(w, i.d[v], t, mask, defined);
    }
}

void Block::store(Warp& w, const Ins& i, u32 mask) {
    u64 address[32];
    address_of(w, i.s[0], mask, address);
    const u32 each = bytes_of(i.type);
    const u64* x[4];
    u32 v[4];
    for (int k = 0; k < i.vec; ++k) x[k] = in64(w, i.s[1 + k]), v[k] = valid(w, i.s[1 + k]);
    // Lanes in a random order.
    const int first = below(32), step = below(16) * 2 + 1;
    for (int n = 0; n < 32; ++n) {
        const int l = (first + n * step) % 32;
        if (!(mask >> l & 1)) continue;
        misaligned(address[l], each * i.vec);
        for (int k = 0; k < i.vec; ++k) write(w, l, address[l] + k * each, i.space, each, (const u8*)&x[k][l], v[k] >> l & 1);
    }
}

// -- Asynchronous copies: cp.async and cp.async.wait_all --

void Block::copy_async(Warp& w, const Ins& i, u32 mask) {
    u64 to[32], from[32];
    address_of(w, i.s[0], mask, to);
    address_of(w, i.s[1], mask, from);
    const u32* size = in32(w, i.s[2]);
    const u32* given = i.s.size() > 3 ? in32(w, i.s[3]) : size;
    if (i.s.size() > 3 && (valid(w, i.s[3]) & mask) != mask) report("an undefined size of a copy");
    LANES {
        if (!(mask >> l & 1)) continue;
        if (size[l] != 16) stop("size of a copy");
        misaligned(to[l], 16);
        misaligned(from[l], 16);
        if (given[l] > 16) stop("bytes of a copy");
        shared_at(to[l], 16);
        const Who me = who(w, l);
        const char* bad = nullptr;
        for (u64 c = to[l]; c < to[l] + 16; ++c) {
            if (const char* b = cells_[c].write(me)) bad = b;
            cells_[c].in_flight = true;
        }
        if (bad) report(bad);
        for (int k = 0; k < 16; ++k) shared_[to[l] + k] = chance() | 0x7f;
        memset(&defined_[to[l]], 0, 16);
        w.copies.push_back({from[l], (u32)to[l], given[l], (u32)l, false});
        if (below(2)) bring(w, w.copies.back());
    }
}

void Block::bring(Warp& w, Copy& c) {
    if (c.done) return;
    u8 data[16] = {};
    bool is_defined = true;
    if (c.bytes) {
        if (c.bytes != 16) stop("a part of a copy");
        read_global(w, c.lane, c.from, 16, false, data, &is_defined);
    }
    memcpy(&shared_[c.to], data, 16);
    memset(&defined_[c.to], is_defined, 16);
    c.done = true;
}

void Block::wait(Warp& w, u32 mask) {
    std::vector<Copy> left;
    for (auto& c : w.copies) {
        if (!(mask >> c.lane & 1)) { left.push_back(c); continue; }
        bring(w, c);
        const Who me = who(w, c.lane);
        for (u64 k = c.to; k < c.to + 16; ++k) {
            Cell& cell = cells_[k];
            cell.in_flight = false;
            cell.w_launch = me.launch, cell.w_block = me.block, cell.w_epoch = me.epoch, cell.w_sub = me.sub, cell.w_thread = me.thread;
        }
    }
    w.copies.swap(left);
}


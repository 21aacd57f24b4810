// Memory as the interpreter sees it: what is allocated, which bytes hold a value, and who touched them when.
#pragma once
#include <stdint.h>
#include <string.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

// A thread at a moment: barriers of its block that it has passed, and barriers of its warp since.
struct Who {
    u32 launch, block, epoch, sub;
    u16 thread;
    u16 warp() const { return thread / 32; }
};

// The last write of some bytes, and the reads since, as far as races need them.
struct Cell {
    static constexpr u16 MANY = 0xffff;
    static constexpr u32 MANY_BLOCKS = 0xffffffff;
    u32 w_launch = 0, w_block = 0, w_epoch = 0, w_sub = 0;
    u32 r_launch = 0, r_block = 0, r_epoch = 0, r_sub = 0;
    u16 w_thread = 0, r_thread = 0, r_warp = 0;
    bool incoherent = false;  // read by way of the cache that sees no writes (ld.global.nc)
    bool in_flight = false;   // an asynchronous copy to here has not been waited for

    const char* read(const Who& w, bool nc) {
        const char* bad = nullptr;
        if (w_launch == w.launch) {
            if (in_flight && w_block == w.block) bad = "read of what an asynchronous copy has not brought yet";
            else if (nc) bad = "non-coherent read of what the same launch writes";
            else if (w_block != w.block) bad = "race: read of what another block writes";
            else if (w_thread != w.thread && w_epoch == w.epoch && !(w_thread / 32 == w.warp() && w_sub < w.sub))
                bad = w_thread / 32 == w.warp() ? "race: read of what another lane of the warp wrote, no barrier between"
                                                : "race: read of what another warp wrote, no barrier between";
        }
        if (r_launch != w.launch) incoherent = false;
        const bool fresh = r_launch != w.launch || (r_block == w.block && (r_epoch != w.epoch || (r_warp == w.warp() && r_sub != w.sub)));
        if (fresh) {
            r_launch = w.launch, r_block = w.block, r_epoch = w.epoch, r_sub = w.sub, r_thread = w.thread, r_warp = w.warp();
        } else if (r_block != w.block) {
            r_block = MANY_BLOCKS;
        } else if (r_warp != w.warp()) {
            r_warp = MANY;
        } else if (r_thread != w.thread) {
            r_thread = MANY;
        }
        incoherent = incoherent || nc;
        return bad;
    }

    const char* write(const Who& w) {
        const char* bad = nullptr;
        if (w_launch == w.launch) {
            if (in_flight && w_block == w.block) bad = "write to where an asynchronous copy is on its way";
            else if (w_block != w.block) bad = "race: written by two blocks";
            else if (w_thread != w.thread && w_epoch == w.epoch && !(w_thread / 32 == w.warp() && w_sub < w.sub))
                bad = w_thread / 32 == w.warp() ? "race: written by two lanes of a warp, no barrier between"
                                                : "race: written by two warps, no barrier between";
        }
        if (!bad && r_launch == w.launch) {
            if (incoherent) bad = "write of what the same launch reads non-coherently";
            else if (r_block != w.block) bad = "race: write of what another block reads";
            else if (r_epoch == w.epoch) {
                if (r_warp != w.warp()) bad = "race: write of what another warp read, no barrier between";
                else if (r_sub == w.sub && r_thread != w.thread) bad = "race: write of what another lane of the warp read, no barrier between";
            }
        }
        w_launch = w.launch, w_block = w.block, w_epoch = w.epoch, w_sub = w.sub, w_thread = w.thread;
        in_flight = false;
        return bad;
    }
};

struct Allocation {
    u64 start = 0, bytes = 0;
    int device = 0;            // -1: pinned memory of the host
    bool was_defined = false;  // what `defined` begins with
    std::vector<u8> defined;   // of each byte, made when somebody asks
    std::vector<Cell> cells;   // of each byte, made when a kernel first comes here
    u64 end() const { return start + bytes; }
    u8* defined_at(u64 p) {
        if (defined.empty()) defined.assign(bytes, was_defined);
        return &defined[p - start];
    }
    void prepare() {
        if (cells.empty()) cells.resize(bytes);
        defined_at(start);
    }
};

// Allocations by address.
class Memory {
  public:
    void add(const void* p, u64 bytes, int device, bool defined) {
        auto made = std::make_unique<Allocation>();
        made->start = (u64)p, made->bytes = bytes, made->device = device, made->was_defined = defined;
        all_[(u64)p] = std::move(made);
    }
    void remove(const void* p) { all_.erase((u64)p); recent_ = nullptr; }
    // The allocation that holds all these bytes, or none.
    Allocation* find(u64 p, u64 bytes = 1) {
        if (!recent_ || p < recent_->start || p >= recent_->end()) {
            auto it = all_.upper_bound(p);
            if (it == all_.begin()) return nullptr;
            recent_ = (--it)->second.get();
        }
        return p < recent_->end() && bytes <= recent_->end() - p ? recent_ : nullptr;
    }
    void define(const void* p, u64 bytes) {
        Allocation* a = find((u64)p, bytes);
        if (!a || (a->was_defined && a->defined.empty())) return;
        if (bytes == a->bytes) a->was_defined = true, a->defined.clear();
        else memset(a->defined_at((u64)p), 1, bytes);
    }
    void copy(const void* to, const void* from, u64 bytes) {
        Allocation *a = find((u64)to, bytes), *b = find((u64)from, bytes);
        if (!b || (b->was_defined && b->defined.empty())) define(to, bytes);
        else if (a && bytes) memmove(a->defined_at((u64)to), b->defined_at((u64)from), bytes);
    }
    bool undefined(const void* p, u64 bytes) {
        Allocation* a = find((u64)p, bytes);
        return a && bytes && !(a->was_defined && a->defined.empty()) && memchr(a->defined_at((u64)p), 0, bytes);
    }

  private:
    std::map<u64, std::unique_ptr<Allocation>> all_;
    Allocation* recent_ = nullptr;
};

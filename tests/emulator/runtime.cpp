// Blocks run one after another; the threads of a block are fibers, each with its stack, that
// give way only where threads wait for each other. Who goes first is a matter of `order`, so a
// kernel that needs a barrier it has not got answers differently under different orders.
#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <string>
#include <vector>

emulated_index threadIdx, blockIdx, blockDim, gridDim;

// The statics that are __shared__; absent where a kernel has none.
extern unsigned char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

namespace {

constexpr size_t STACK = 1 << 16, PAGE = 1 << 12, GUARD = 1 << 12, LANES = 32;
constexpr unsigned char POISON = 0xff;  // NaN in every floating type
// NaN in every floating type, and mostly of the signalling kind: x += y changes it.
constexpr uint64_t GUARD_PATTERN = 0x7ff57fb57fb57fb5;

enum State { READY, IN_WARP, IN_BLOCK, LEFT, ABSENT };

struct Copy {
    void* to;
    const void* from;
    bool valid;
};

struct Fiber {
    State state = ABSENT;
    bool started = false, predicate = false;
    const char* place = "";  // where it waits
    size_t warp = 0, lane = 0;
    emulated_index index{};
    std::vector<Copy> copies;
    ucontext_t context;
    jmp_buf resume;
};

struct Warp {
    size_t arrived = 0;
    Fiber* lanes = nullptr;
    float values[LANES], exchanged[LANES];
    int partners[LANES];
    float* d[LANES];
    uint32_t a[LANES][4], b[LANES][2];
    uint32_t* r[LANES];
    uint16_t rows[LANES][8];
};

struct Range {
    const unsigned char* begin;
    size_t size;
};

struct Order {
    bool shuffled = false;
    size_t flip = 0;
    uint64_t random = 0;

    uint64_t draw() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return random;
    }

    // Positions 0 .. n - 1 in the order of their turns.
    void arrange(std::vector<size_t>& turns) {
        size_t n = turns.size();
        for (size_t i = 0; i < n; i++) turns[i] = flip ? n - 1 - i : i;
        if (!shuffled) return;
        for (size_t i = n; i > 1; i--) std::swap(turns[i - 1], turns[draw() % i]);
    }

    size_t lane(size_t turn) const { return turn ^ flip; }
    void next_lanes() { if (shuffled) flip = draw() % LANES; }
};

const char* kernel_name;
void** kernel_arguments;
std::string message;
sigjmp_buf failed;
jmp_buf scheduler;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<unsigned char> shared_buffer;
std::vector<Range> ranges;
unsigned char* shared_begin;
size_t shared_size;
Fiber* current;
Order order;

// Errors ------------------------------------------------------------------------------------------

std::string format(const char* text, va_list values) {
    char line[512];
    vsnprintf(line, sizeof line, text, values);
    return line;
}

std::string in_block() {
    char line[512];
    snprintf(line, sizeof line, "%s: block (%u, %u, %u)", kernel_name, blockIdx.x, blockIdx.y,
             blockIdx.z);
    return line;
}

[[noreturn]] void fail(std::string text) {
    message = std::move(text);
    siglongjmp(failed, 1);
}

// An error of the thread that runs, if one does.
[[noreturn, gnu::format(printf, 1, 2)]] void thread_fails(const char* text, ...) {
    va_list values;
    va_start(values, text);
    std::string what = format(text, values);
    va_end(values);
    char thread[128] = "";
    if (current)
        snprintf(thread, sizeof thread, ", thread (%u, %u, %u)", threadIdx.x, threadIdx.y,
                 threadIdx.z);
    fail(in_block() + thread + ": " + what);
}

std::string whereabouts(const Fiber& fiber, bool one) {
    switch (fiber.state) {
        case READY: return one ? "runs" : "run";
        case LEFT: return one ? "has left" : "have left";
        case ABSENT: return one ? "does not exist" : "do not exist";
        default: return std::string(one ? "is" : "are") + " at " + fiber.place;
    }
}

std::string describe(const Warp& warp) {
    std::string text;
    for (size_t first = 0; first < LANES;) {
        std::string place = whereabouts(warp.lanes[first], false);
        size_t last = first;
        while (last + 1 < LANES && place == whereabouts(warp.lanes[last + 1], false)) last++;
        text += text.empty() ? "" : ", ";
        text += last > first ? "lanes " + std::to_string(first) + " to " + std::to_string(last)
                             : "lane " + std::to_string(first);
        text += " " + whereabouts(warp.lanes[first], first == last);
        first = last + 1;
    }
    return text;
}

[[noreturn]] void diverged(const Warp& warp) {
    fail(in_block() + ", warp " + std::to_string(&warp - warps.data()) +
         ": all 32 lanes must arrive at one place, but " + describe(warp));
}

struct sigaction previous_actions[4];
constexpr int SIGNALS[4] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

void on_signal(int number, siginfo_t* info, void*) {
    const char* what = number == SIGFPE   ? "integer division by zero"
                       : number == SIGILL ? "illegal instruction"
                                          : "invalid access to memory, or stack overflow";
    thread_fails("%s at address %p", what, info->si_addr);
}

// Scheduling --------------------------------------------------------------------------------------

void give_way() {
    if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

void fiber_main() {
    for (;;) {
        emulated_kernel(kernel_arguments);
        current->state = LEFT;
        give_way();
    }
}

__attribute__((noinline)) void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx = fiber.index;
    if (!_setjmp(scheduler)) {
        if (fiber.started) _longjmp(fiber.resume, 1);
        fiber.started = true;
        setcontext(&fiber.context);
    }
    current = nullptr;
}

// Run a warp until all its lanes wait; shuffled, let each lane run once, so that warps mix.
bool run_warp(Warp& warp) {
    bool ran = false, again = true;
    while (again) {
        again = false;
        order.next_lanes();
        for (size_t turn = 0; turn < LANES; turn++) {
            Fiber& fiber = warp.lanes[order.lane(turn)];
            if (fiber.state != READY) continue;
            resume(fiber);
            ran = again = true;
        }
        if (order.shuffled) break;
    }
    if (warp.arrived == 0) return ran;
    for (size_t lane = 0; lane < LANES; lane++)
        if (warp.lanes[lane].state == READY) return ran;
    diverged(warp);
}

// Let the block's barrier go; false where all threads have left.
bool release_block() {
    const Fiber* first = nullptr;
    bool any = false;
    for (Fiber& fiber : fibers) {
        if (fiber.state != IN_BLOCK) continue;
        if (!first) first = &fiber;
        if (std::string(fiber.place) != first->place)
            fail(in_block() + ": some threads are at " + first->place + ", some at " + fiber.place);
        any |= fiber.predicate;
    }
    for (Fiber& fiber : fibers) {
        if (fiber.state != IN_BLOCK) continue;
        fiber.predicate = any;
        fiber.state = READY;
    }
    return first != nullptr;
}

void fill_guard(unsigned char* begin) {
    for (size_t i = 0; i < GUARD; i += 8) std::memcpy(begin + i, &GUARD_PATTERN, 8);
}

void check_guard(const unsigned char* begin, const char* side) {
    for (size_t i = 0; i < GUARD; i++)
        if (begin[i] != (GUARD_PATTERN >> 8 * (i % 8) & 0xff))
            fail(in_block() + ": a write " + side + " dynamic shared memory of " +
                 std::to_string(shared_size) + " bytes");
}

void run_block() {
    fill_guard(shared_begin - GUARD);
    std::memset(shared_begin, POISON, shared_size);
    fill_guard(shared_begin + shared_size);
    if (__start_emulated_shared)
        std::memset(__start_emulated_shared, POISON,
                    __stop_emulated_shared - __start_emulated_shared);
    for (Fiber& fiber : fibers) {
        if (fiber.state != ABSENT) fiber.state = READY;
        fiber.copies.clear();
    }
    std::vector<size_t> turns(warps.size());
    do {
        for (bool ran = true; ran;) {
            ran = false;
            order.arrange(turns);
            for (size_t turn : turns) ran |= run_warp(warps[turn]);
        }
    } while (release_block());
    check_guard(shared_begin - GUARD, "before");
    check_guard(shared_begin + shared_size, "after");
}

// Returns with a message where something failed: no stack of a fiber is left by unwinding.
void run_grid() {
    std::vector<size_t> blocks(static_cast<size_t>(gridDim.x) * gridDim.y * gridDim.z);
    if (sigsetjmp(failed, 1)) return;
    order.arrange(blocks);
    for (size_t i : blocks) {
        blockIdx = {static_cast<unsigned>(i % gridDim.x),
                    static_cast<unsigned>(i / gridDim.x % gridDim.y),
                    static_cast<unsigned>(i / gridDim.x / gridDim.y)};
        run_block();
    }
}

// Where threads wait ------------------------------------------------------------------------------

// True in the lane that arrives last, which acts for all 32; the others return when it has.
bool arrive(const char* place) {
    Warp& warp = warps[current->warp];
    current->state = IN_WARP;
    current->place = place;
    if (++warp.arrived < LANES) {
        give_way();
        return false;
    }
    for (size_t lane = 0; lane < LANES; lane++)
        if (warp.lanes[lane].place != place) diverged(warp);
    warp.arrived = 0;
    for (size_t lane = 0; lane < LANES; lane++) warp.lanes[lane].state = READY;
    return true;
}

bool wait_for_block(const char* place, bool predicate) {
    current->state = IN_BLOCK;
    current->place = place;
    current->predicate = predicate;
    give_way();
    return current->predicate;
}

bool within(const void* pointer, size_t bytes, const unsigned char* begin, size_t size) {
    auto at = reinterpret_cast<uintptr_t>(pointer), from = reinterpret_cast<uintptr_t>(begin);
    return at >= from && at - from <= size && bytes <= size - (at - from);
}

bool is_shared(const void* pointer, size_t bytes) {
    if (within(pointer, bytes, shared_begin, shared_size)) return true;
    return __start_emulated_shared &&
           within(pointer, bytes, __start_emulated_shared,
                  __stop_emulated_shared - __start_emulated_shared);
}

bool is_global(const void* pointer, size_t bytes) {
    for (const Range& range : ranges)
        if (within(pointer, bytes, range.begin, range.size)) return true;
    return false;
}

void check_aligned(const char* function, const char* what, const void* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16)
        thread_fails("%s: %s must be 16-byte aligned, got an address %d bytes beyond", function,
                     what, static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % 16));
}

void check_shared(const char* function, const char* what, const void* pointer) {
    check_aligned(function, what, pointer);
    if (!is_shared(pointer, 16))
        thread_fails("%s: %s must be 16 bytes of shared memory, got bytes %lld to %lld of the "
                     "dynamic %zu", function, what,
                     static_cast<long long>(static_cast<const unsigned char*>(pointer) - shared_begin),
                     static_cast<long long>(static_cast<const unsigned char*>(pointer) - shared_begin) + 15,
                     shared_size);
}

template <float (*to_float)(uint16_t)>
void mma(const char* place, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Warp& warp = warps[current->warp];
    size_t own_lane = current->lane;
    warp.d[own_lane] = d;
    std::memcpy(warp.a[own_lane], a, sizeof a);
    warp.b[own_lane][0] = b0;
    warp.b[own_lane][1] = b1;
    if (!arrive(place)) return;
    float left[16][16], right[16][8], sum[16][8];
    for (size_t lane = 0; lane < LANES; lane++) {
        size_t g = lane / 4, t = lane % 4;
        for (size_t word = 0; word < 4; word++)
            for (size_t half = 0; half < 2; half++)
                left[g + word % 2 * 8][2 * t + word / 2 * 8 + half] =
                    to_float(static_cast<uint16_t>(warp.a[lane][word] >> 16 * half));
        for (size_t word = 0; word < 2; word++)
            for (size_t half = 0; half < 2; half++)
                right[2 * t + word * 8 + half][g] =
                    to_float(static_cast<uint16_t>(warp.b[lane][word] >> 16 * half));
        for (size_t i = 0; i < 4; i++) sum[g + i / 2 * 8][2 * t + i % 2] = warp.d[lane][i];
    }
    for (size_t row = 0; row < 16; row++)
        for (size_t k = 0; k < 16; k++)
            for (size_t column = 0; column < 8; column++)
                sum[row][column] += left[row][k] * right[k][column];
    for (size_t lane = 0; lane < LANES; lane++)
        for (size_t i = 0; i < 4; i++)
            warp.d[lane][i] = sum[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

template <bool transposed>
void load(const char* place, uint32_t (&r)[4], const void* row) {
    check_shared(place, "row", row);
    Warp& warp = warps[current->warp];
    warp.r[current->lane] = r;
    // Read at once: what another lane writes later is visible only to those that wait for it.
    std::memcpy(warp.rows[current->lane], row, 16);
    if (!arrive(place)) return;
    for (size_t lane = 0; lane < LANES; lane++) {
        size_t g = lane / 4, t = lane % 4;
        for (size_t matrix = 0; matrix < 4; matrix++) {
            const uint16_t(*rows)[8] = warp.rows + 8 * matrix;
            uint32_t low = transposed ? rows[2 * t][g] : rows[g][2 * t];
            uint32_t high = transposed ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
            warp.r[lane][matrix] = low | high << 16;
        }
    }
}

struct SourceLocation {
    const char* file;
    uint32_t line, column;
};

}  // namespace

namespace emulator {

unsigned char* shared_memory() { return shared_begin; }

void block_sync() { wait_for_block("block_sync", false); }

bool block_any(bool predicate) { return wait_for_block("block_any", predicate); }

void warp_sync() { arrive("warp_sync"); }

float shuffle_xor(float value, int lanes) {
    Warp& warp = warps[current->warp];
    size_t own_lane = current->lane;
    warp.values[own_lane] = value;
    warp.partners[own_lane] = lanes;
    if (arrive("shuffle_xor")) {
        for (size_t lane = 0; lane < LANES; lane++) {
            if (warp.partners[lane] != lanes || lanes < 0 || lanes >= static_cast<int>(LANES))
                thread_fails("shuffle_xor: lanes must be one number from 0 to 31 in all 32 lanes, "
                             "got %d and %d", lanes, warp.partners[lane]);
            warp.exchanged[lane] = warp.values[lane ^ lanes];
        }
    }
    return warp.exchanged[own_lane];
}

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma<bf16_to_float>("mma_bf16", d, a, b0, b1);
}

void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma<f16_to_float>("mma_f16", d, a, b0, b1);
}

void load_matrices(uint32_t (&r)[4], const void* row) { load<false>("load_matrices", r, row); }

void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
    load<true>("load_matrices_transposed", r, row);
}

void copy_async(void* to, const void* from, bool valid) {
    check_shared("copy_async", "to", to);
    if (valid) {
        check_aligned("copy_async", "from", from);
        if (!is_global(from, 16))
            thread_fails("copy_async: from must be 16 bytes of an argument's array, got %p", from);
    }
    std::memset(to, POISON, 16);
    current->copies.push_back({to, from, valid});
}

void copies_done() {
    for (const Copy& copy : current->copies) {
        if (copy.valid)
            std::memcpy(copy.to, copy.from, 16);
        else
            std::memset(copy.to, 0, 16);
    }
    current->copies.clear();
}

}  // namespace emulator

// What the compiler calls where a check of -fsanitize fails ----------------------------------------

#define SANITIZER(name, text)                                                          \
    extern "C" void __ubsan_handle_##name##_abort(const SourceLocation* at) {          \
        thread_fails("%s:%u: " text, at->file, at->line);                              \
    }
SANITIZER(type_mismatch_v1, "an access that is not aligned to its type")
SANITIZER(out_of_bounds, "an index beyond its array")
SANITIZER(shift_out_of_bounds, "a shift by more bits than there are")
SANITIZER(divrem_overflow, "integer division by zero")

// One launch. Returns null, or what went wrong; `order` is 0 ascending, 1 descending, and any other
// number the seed of a shuffle.
extern "C" __attribute__((visibility("default"))) const char* launch(
    const char* name, void** arguments, const unsigned* grid, const unsigned* block, size_t shared,
    uint64_t seed, const Range* memory, size_t num_ranges) {
    kernel_name = name;
    kernel_arguments = arguments;
    ranges.assign(memory, memory + num_ranges);
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    blockIdx = threadIdx = {0, 0, 0};
    current = nullptr;
    order.shuffled = seed > 1;
    order.flip = seed == 1 ? LANES - 1 : 0;
    order.random = seed * 0x9e3779b97f4a7c15u + 1;

    // 16-byte aligned and not more, as after static shared memory.
    shared_size = shared;
    shared_buffer.resize(shared + 2 * GUARD + 64);
    auto address = reinterpret_cast<uintptr_t>(shared_buffer.data()) + GUARD;
    shared_begin = shared_buffer.data() + GUARD + (32 - address % 32) + 16;

    size_t threads = static_cast<size_t>(block[0]) * block[1] * block[2];
    size_t num_warps = (threads + LANES - 1) / LANES, stride = STACK + PAGE;
    fibers = std::vector<Fiber>(num_warps * LANES);
    warps = std::vector<Warp>(num_warps);
    for (size_t warp = 0; warp < num_warps; warp++) warps[warp].lanes = &fibers[warp * LANES];
    auto stacks = static_cast<unsigned char*>(mmap(nullptr, threads * stride, PROT_READ | PROT_WRITE,
                                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (stacks == MAP_FAILED) return "no memory for the stacks of a block";
    for (size_t i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.state = READY;
        fiber.warp = i / LANES;
        fiber.lane = i % LANES;
        fiber.index = {static_cast<unsigned>(i % block[0]),
                       static_cast<unsigned>(i / block[0] % block[1]),
                       static_cast<unsigned>(i / block[0] / block[1])};
        // Stacks grow down, into a page that cannot be written.
        mprotect(stacks + i * stride, PAGE, PROT_NONE);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + i * stride + PAGE;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
    }

    std::vector<unsigned char> signal_stack(1 << 16);
    stack_t handler_stack = {}, previous_stack;
    handler_stack.ss_sp = signal_stack.data();
    handler_stack.ss_size = signal_stack.size();
    sigaltstack(&handler_stack, &previous_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &previous_actions[i]);

    message.clear();
    run_grid();

    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &previous_actions[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
    munmap(stacks, threads * stride);
    return message.empty() ? nullptr : message.c_str();
}

// The driver: contexts, modules and launches. Kernels are those of PTX (CuPy makes it with CUPY_COMPILE_WITH_PTX=1).
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "state.h"

namespace {

struct Kernel {
    Function* function;
    int dynamic;  // bytes of dynamic shared memory that it may have
};

// CuPy keeps a launch's arguments in a vector of that length, made just before: its allocation tells how
// many there are, which CUDA itself cannot know.
thread_local struct { void* p; size_t bytes; } recent[64];
thread_local unsigned newest;

long arguments_given(void** arguments) {
    if (!arguments) return 0;
    for (unsigned i = 0; i < 64; ++i) {
        auto& r = recent[(newest - i) % 64];
        if (r.p == arguments) return r.bytes / sizeof(void*);
    }
    return -1;
}

// The devices' arrays among the arguments: pointers, or structures of CuPy that begin with one.
std::string arrays_of(Function* f, void** arguments, std::vector<std::string>* strays) {
    std::string arrays;
    const auto& sizes = parameter_bytes(f);
    for (size_t i = 0; i < sizes.size(); ++i) {
        if (sizes[i] < 8) continue;
        void* p = *(void**)arguments[i];
        const Allocation* found = memory.find((u64)p);
        if (!found || found->device < 0) continue;
        char text[200];
        snprintf(text, sizeof text, " %p", p);
        arrays += text;
        snprintf(text, sizeof text, "NOTE %s on device %d: argument %zu is memory of device %d", name_of(f).c_str(), current, i, found->device);
        if (found->device != current) strays->push_back(text);
    }
    return arrays;
}

int run(Kernel* k, const std::vector<u32>& grid, const std::vector<u32>& block, u32 shared, std::vector<std::vector<u8>> values) {
    std::vector<void*> pointers;
    for (auto& v : values) pointers.push_back(v.data());
    timespec a, b;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    const bool ended = run_grid(k->function, grid.data(), block.data(), shared, pointers.data(), &memory);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    static const bool traces = setting("PTX_TRACE", 0);
    if (traces)
        fprintf(stderr, "launch %s grid %u %u %u block %u shared %u: %.3f s\n", name_of(k->function).c_str(), grid[0], grid[1], grid[2],
                block[0] * block[1] * block[2], shared, (b.tv_sec - a.tv_sec) + 1e-9 * (b.tv_nsec - a.tv_nsec));
    return ended ? 0 : refuse(700, "%s was stopped by the interpreter: see fake_gpu_findings", name_of(k->function).c_str());
}

}  // namespace

void* operator new(size_t bytes) {
    void* p = malloc(bytes ? bytes : 1);
    if (!p) abort();
    recent[++newest % 64] = {p, bytes};
    return p;
}

extern "C" {

int cuGetErrorName(int e, const char** text) {
    static thread_local char name[40];
    const char* known = e == 1 ? "CUDA_ERROR_INVALID_VALUE" : e == 200 ? "CUDA_ERROR_INVALID_IMAGE" : e == 500 ? "CUDA_ERROR_NOT_FOUND"
        : e == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" : e == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : nullptr;
    snprintf(name, sizeof name, "CUDA_ERROR_%d", e);
    *text = known ? known : name;
    return 0;
}
int cuGetErrorString(int, const char** text) { *text = cudaGetErrorString(cudaSuccess); return 0; }

int cuModuleLoadData(void** made, const void* image) {
    Guard guard(mutex);
    std::string error = "a cubin: CUPY_COMPILE_WITH_PTX=1 is not set";
    Module* module = memcmp(image, "\177ELF", 4) ? load_ptx((const char*)image, &error) : nullptr;
    if (!module) return refuse(200, "a module that cannot be read: %s", error.c_str());
    std::string names;
    for (auto& name : names_of(module)) names += " " + name;
    note("MODULE%s", names.c_str());
    *made = module;
    return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** f, void* m, const char* name) {
    Guard guard(mutex);
    Function* function = find_function((Module*)m, name);
    if (!function) return refuse(500, "the module has no kernel %s", name);
    static std::map<Function*, Kernel> kernels;
    *f = &kernels.try_emplace(function, Kernel{function, (int)(49152 - static_shared(function))}).first->second;
    return 0;
}
int cuFuncGetAttribute(int* v, int which, void* f) {
    auto* k = (Kernel*)f;
    const int shared = static_shared(k->function), most = most_threads(k->function);
    const int known[] = {most, shared, 0, 0, 32, capability(), capability(), 0, k->dynamic};
    *v = which >= 0 && which < 9 ? known[which] : 0;
    return 0;
}
int cuFuncSetAttribute(void* f, int which, int v) {
    Guard guard(mutex);
    auto* k = (Kernel*)f;
    const char* name = name_of(k->function).c_str();
    const int shared = static_shared(k->function);
    note("SET %s attribute %d = %d", name, which, v);
    if (which != 8) return 0;
    if (v < 0 || v + shared > most_shared())
        return refuse(1, "%s: %d B of dynamic and %d of static shared memory; the device has %d", name, v, shared, most_shared());
    k->dynamic = v;
    return 0;
}
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** arguments, void** extra) {
    Guard guard(mutex);
    auto* k = (Kernel*)f;
    const char* name = name_of(k->function).c_str();
    const auto& sizes = parameter_bytes(k->function);
    const long given = arguments_given(arguments), wanted = sizes.size();
    std::string arrays;
    std::vector<std::string> strays;
    if (given == wanted) arrays = arrays_of(k->function, arguments, &strays);
    note("LAUNCH %s grid %u %u %u block %u %u %u shared %u stream %p device %d%s arrays%s", name, gx, gy, gz, bx, by, bz, shared, stream,
         current, captures(stream) ? " captured" : "", arrays.c_str());
    for (auto& text : strays) note("%s", text.c_str());
    TRY(alive());
    TRY(check_stream(stream, name));
    const u64 threads = (u64)bx * by * bz;
    const u32 most = most_threads(k->function);
    if (!gx || !gy || !gz || gx > 2147483647u || gy > 65535 || gz > 65535) return refuse(1, "%s: grid %u x %u x %u", name, gx, gy, gz);
    if (!threads || bx > 1024 || by > 1024 || bz > 64 || threads > most)
        return refuse(1, "%s: block %u x %u x %u; %u threads are its bound", name, bx, by, bz, most);
    if ((i64)shared > k->dynamic) return refuse(1, "%s: %u B of dynamic shared memory, set to %d", name, shared, k->dynamic);
    if (extra) return refuse(801, "arguments in one buffer");
    if (given >= 0 && given != wanted) return refuse(1, "%s: %ld arguments, it takes %ld", name, given, wanted);
    if (!computes()) return 0;
    std::vector<std::vector<u8>> values;
    for (size_t i = 0; i < sizes.size(); ++i) values.emplace_back((u8*)arguments[i], (u8*)arguments[i] + sizes[i]);
    return now_or_later(stream, [=] { return run(k, {gx, gy, gz}, {bx, by, bz}, shared, values); });
}
#define UNSUPPORTED(name) int name() { return refuse(801, #name); }
UNSUPPORTED(cuDevicePrimaryCtxRelease_v2) UNSUPPORTED(cuCtxGetCurrent) UNSUPPORTED(cuCtxSetCurrent) UNSUPPORTED(cuCtxCreate_v2)
UNSUPPORTED(cuCtxDestroy_v2) UNSUPPORTED(cuCtxGetDevice) UNSUPPORTED(cuStreamGetCtx) UNSUPPORTED(cuOccupancyMaxPotentialBlockSize)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNSUPPORTED(cuLinkCreate_v2) UNSUPPORTED(cuLinkAddData_v2) UNSUPPORTED(cuLinkAddFile_v2) UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkDestroy) UNSUPPORTED(cuModuleLoad) UNSUPPORTED(cuModuleGetGlobal_v2) UNSUPPORTED(cuLaunchCooperativeKernel)

}

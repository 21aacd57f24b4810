// A fake GPU: CUDA's runtime and driver and cuBLAS, as far as CuPy 14.2 (CUDA 13) asks for them, on a
// machine with neither GPU nor driver. It is loaded before all else (run.sh: LD_PRELOAD).
//
// Simulated: devices (number, compute capability, limits), memory (it is memory of the host: copies and
//   fills are real), streams, events (they measure time of the host), capture and graphs, modules
//   and their functions, cuBLAS handles. NVRTC is the real one, so kernels are compiled for real.
//
// Checked, and refused with CUDA's error and a reason in its text (and "ERROR" in the log):
//   launches: a function that the module lacks, limits of grid and block, launch bounds, registers,
//     dynamic shared memory beyond what the function was set to, static and dynamic beyond the device's,
//     a number of arguments other than the kernel's;
//   memory: frees of what was not allocated, copies and fills that leave their allocation, out of memory,
//     cuBLAS operands that leave their allocation, leading dimensions that are too small;
//   streams and events: handles that are unknown, destroyed or of another device, times between events
//     that were not recorded;
//   capture: waits for a capturing stream or its device, captured events waited for or timed; allocating,
//     freeing and synchronous copies meanwhile (not in relaxed mode, which is CuPy's default); use of the
//     legacy stream while a blocking stream captures; ends of a capture that never began;
//   forked processes: none may use what their parent began to use.
// Noted in the log only: kernels that get memory of another device than theirs ("NOTE").
//
// Not done: NOTHING IS COMPUTED. Kernels, graphs and cuBLAS leave memory as it is, the first MiB of fresh
//   memory is bytes of 1, the rest 0; no number that comes out means anything. Races, alignment, out-of-range accesses in kernels are not
//   seen. CUDA arrays, textures, IPC, managed memory's advice, links of PTX: "not supported" (801).
//
// The log goes to the file FAKE_GPU_LOG, or to a test that asks for it (fake_gpu_record).
// Environment: FAKE_GPU_DEVICES (2), FAKE_GPU_LOG (file to append to), FAKE_GPU_CC (90), FAKE_GPU_SMS (132),
//   FAKE_GPU_SHARED (bytes a block may opt in to; 232448), FAKE_GPU_MEMORY (GiB a device; 139),
//   FAKE_GPU_FAST (1: device-to-device copies and fills are skipped, to time the host).
#include <cuda_runtime.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>
#undef cudaGetDeviceProperties

namespace {

// ---- State ------------------------------------------------------------------------------------------

struct Allocation { size_t bytes; int device; };  // device -1: pinned memory of the host
struct Stream { int device; bool blocking, capturing; cudaStreamCaptureMode mode; pthread_t owner; };
struct Event { bool recorded, captured; double at; };

std::recursive_mutex mutex;
std::map<uintptr_t, Allocation> memory;
std::map<void*, Stream> streams;
std::map<void*, Event> events;
std::set<void*> graphs;
std::map<int, size_t> used;
uintptr_t last_handle = 0x1000;
thread_local int current = 0;
thread_local char reason[400] = "";

long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}
int device_count() { static int n = setting("FAKE_GPU_DEVICES", 2); return n; }
int capability() { static int n = setting("FAKE_GPU_CC", 90); return n; }
int processors() { static int n = setting("FAKE_GPU_SMS", 132); return n; }
int most_shared() { static int n = setting("FAKE_GPU_SHARED", 232448); return n; }
size_t total() { static size_t n = (size_t)setting("FAKE_GPU_MEMORY", 139) << 30; return n; }
bool fast() { static bool is = setting("FAKE_GPU_FAST", 0) != 0; return is; }

std::string recorded;
bool recording = false;

void write_log(const char* kind, const char* format, va_list args) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    static const char* path = getenv("FAKE_GPU_LOG");
    static FILE* file = path && *path ? fopen(path, "a") : nullptr;
    if (!file && !recording) return;
    char line[2000];
    vsnprintf(line, sizeof line, format, args);
    if (file) {
        fprintf(file, "%s%s\n", kind, line);
        fflush(file);
    }
    if (recording) recorded = recorded + kind + line + '\n';
}
__attribute__((format(printf, 1, 2))) void note(const char* format, ...) {
    va_list args;
    va_start(args, format);
    write_log("", format, args);
    va_end(args);
}
__attribute__((format(printf, 2, 3))) cudaError_t refuse(int code, const char* format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    vsnprintf(reason, sizeof reason, format, args);
    write_log("ERROR ", format, again);
    va_end(again);
    va_end(args);
    return (cudaError_t)code;
}

using Guard = std::lock_guard<std::recursive_mutex>;
#define TRY(check) do { if (int bad_ = (check)) return (decltype(here()))bad_; } while (0)
cudaError_t here() { return cudaSuccess; }  // type of what most functions return

void* new_handle() { return (void*)(last_handle += 16); }

cudaError_t alive() {
    static pid_t first = getpid();
    if (getpid() != first) return refuse(cudaErrorInitializationError, "used in a forked process");
    return cudaSuccess;
}

// ---- Capture and handles ----------------------------------------------------------------------------

bool is_legacy(void* s) { return s == nullptr || s == (void*)cudaStreamLegacy; }
bool is_built_in(void* s) { return is_legacy(s) || s == (void*)cudaStreamPerThread; }
bool captures(void* s) { auto it = streams.find(s); return it != streams.end() && it->second.capturing; }

cudaError_t unsafe_in_capture(const char* what) {
    for (auto& [handle, s] : streams) {
        bool mine = s.mode == cudaStreamCaptureModeGlobal ||
                    (s.mode == cudaStreamCaptureModeThreadLocal && pthread_equal(s.owner, pthread_self()));
        if (s.capturing && mine)
            return refuse(cudaErrorStreamCaptureUnsupported, "%s while a stream captures", what);
    }
    return cudaSuccess;
}

cudaError_t check_stream(void* s, const char* what) {
    if (is_legacy(s))
        for (auto& [handle, other] : streams)
            if (other.capturing && other.blocking && other.device == current)
                return refuse(cudaErrorStreamCaptureImplicit, "%s in the legacy stream while a blocking stream captures", what);
    if (is_built_in(s)) return cudaSuccess;
    auto it = streams.find(s);
    if (it == streams.end()) return refuse(cudaErrorInvalidResourceHandle, "%s in an unknown or destroyed stream", what);
    if (it->second.device != current)
        return refuse(cudaErrorInvalidResourceHandle, "%s on device %d in a stream of device %d", what, current, it->second.device);
    return cudaSuccess;
}

cudaError_t find_event(void* e, Event** found, const char* what) {
    auto it = events.find(e);
    if (it == events.end()) return refuse(cudaErrorInvalidResourceHandle, "%s of an unknown or destroyed event", what);
    *found = &it->second;
    return cudaSuccess;
}

// ---- Memory -----------------------------------------------------------------------------------------

// What nobody computes then reads as true, and as small positive numbers: calls go on as with valid data.
const size_t marked = 1 << 20;

const Allocation* allocation_of(const void* p, size_t bytes) {
    auto it = memory.upper_bound((uintptr_t)p);
    if (it == memory.begin()) return nullptr;
    --it;
    return (uintptr_t)p + bytes <= it->first + it->second.bytes ? &it->second : nullptr;
}

cudaError_t allocate(void** p, size_t bytes, int device) {
    TRY(alive());
    *p = nullptr;
    if (device >= 0 && used[device] + bytes > total()) {
        snprintf(reason, sizeof reason, "out of memory");
        note("OUT OF MEMORY %zu on %d", bytes, device);
        return cudaErrorMemoryAllocation;
    }
    if (bytes == 0) return cudaSuccess;
    void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return refuse(cudaErrorMemoryAllocation, "the host has no %zu bytes left", bytes);
    if (device >= 0) memset(made, 1, std::min(bytes, marked));
    memory[(uintptr_t)made] = {bytes, device};
    used[device] += bytes;
    *p = made;
    note("ALLOC %zu on %d", bytes, device);
    return cudaSuccess;
}

cudaError_t release(void* p, bool pinned) {
    if (!p) return cudaSuccess;
    auto it = memory.find((uintptr_t)p);
    if (it == memory.end() || (it->second.device < 0) != pinned)
        return refuse(cudaErrorInvalidValue, "free of %p, which was not allocated or is freed already", p);
    note("FREE %zu", it->second.bytes);
    used[it->second.device] -= it->second.bytes;
    munmap(p, it->second.bytes);
    memory.erase(it);
    return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    TRY(alive());
    bool target = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool source = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (bytes && target && !allocation_of(to, bytes)) return refuse(cudaErrorInvalidValue, "copy of %zu bytes to outside of an allocation", bytes);
    if (bytes && source && !allocation_of(from, bytes)) return refuse(cudaErrorInvalidValue, "copy of %zu bytes from outside of an allocation", bytes);
    if (!(fast() && kind == cudaMemcpyDeviceToDevice)) memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t fill(void* to, int value, size_t bytes) {
    TRY(alive());
    if (bytes && !allocation_of(to, bytes)) return refuse(cudaErrorInvalidValue, "fill of %zu bytes outside of an allocation", bytes);
    if (!fast()) memset(to, value, bytes);
    return cudaSuccess;
}

// ---- Modules: what a cubin says of its kernels --------------------------------------------------------

struct Function {
    std::string name;
    int registers = 0, local = 0, shared = 0, most_threads = 1024, dynamic = 0;
    std::map<int, int> parameters;  // index: bytes
};
struct Module { std::map<std::string, Function> functions; };

template <class T> T at(const char* p, size_t offset) { T value; memcpy(&value, p + offset, sizeof value); return value; }

bool read_cubin(const char* elf, Module* module) {
    if (memcmp(elf, "\177ELF", 4)) return false;
    struct Section { std::string name; const char* data; size_t bytes; uint32_t type; };
    const size_t table = at<uint64_t>(elf, 40), step = at<uint16_t>(elf, 58), count = at<uint16_t>(elf, 60);
    auto header = [&](size_t i) { return elf + table + i * step; };
    const char* names = elf + at<uint64_t>(header(at<uint16_t>(elf, 62)), 24);
    std::vector<Section> sections;
    const char *symbols = nullptr, *strings = nullptr;
    for (size_t i = 0; i < count; ++i) {
        const char* h = header(i);
        sections.push_back({names + at<uint32_t>(h, 0), elf + at<uint64_t>(h, 24), at<uint64_t>(h, 32), at<uint32_t>(h, 4)});
        if (sections.back().type == 2) {
            symbols = sections.back().data;
            strings = elf + at<uint64_t>(header(at<uint32_t>(h, 40)), 24);
        }
    }
    auto after = [](const std::string& text, const char* prefix) {
        return text.rfind(prefix, 0) == 0 ? text.substr(strlen(prefix)) : std::string();
    };
    for (auto& s : sections)
        if (auto name = after(s.name, ".text."); !name.empty()) module->functions[name].name = name;
    // From sm_90 on, a kernel's section of shared memory has the 1 KiB in it that the device keeps for itself.
    size_t reserved = 0;
    for (auto& s : sections) if (s.name == ".nv.shared.reserved.0") reserved = 1024;
    for (auto& s : sections) {
        if (auto name = after(s.name, ".nv.shared."); module->functions.count(name))
            module->functions[name].shared = s.bytes - std::min(s.bytes, reserved);
        auto name = after(s.name, ".nv.info.");
        if (s.name != ".nv.info" && !module->functions.count(name)) continue;
        for (size_t i = 0; i + 4 <= s.bytes;) {  // format, attribute, bytes or value
            const unsigned char format = s.data[i], attribute = s.data[i + 1];
            const size_t bytes = format == 4 ? at<uint16_t>(s.data, i + 2) : 0;
            const char* data = s.data + i + 4;
            i += 4 + bytes;
            if (name.empty()) {
                if (bytes != 8 || (attribute != 0x2f && attribute != 0x11) || !symbols) continue;
                auto of = module->functions.find(strings + at<uint32_t>(symbols, 24 * at<uint32_t>(data, 0)));
                if (of != module->functions.end()) (attribute == 0x2f ? of->second.registers : of->second.local) = at<uint32_t>(data, 4);
            } else if (attribute == 0x17 && bytes == 12) {
                module->functions[name].parameters[at<uint16_t>(data, 4)] = at<uint32_t>(data, 8) >> 18 & 0x3fff;
            } else if (attribute == 0x05 && bytes == 12) {
                module->functions[name].most_threads = at<uint32_t>(data, 0) * at<uint32_t>(data, 4) * at<uint32_t>(data, 8);
            }
        }
    }
    for (auto& [name, f] : module->functions) f.dynamic = 49152 - f.shared;
    return true;
}

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

}  // namespace

void* operator new(size_t bytes) {
    void* p = malloc(bytes ? bytes : 1);
    if (!p) abort();
    recent[++newest % 64] = {p, bytes};
    return p;
}

extern "C" {

// ---- Runtime: devices -------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t e) {
    switch ((int)e) {
        case 0: return "cudaSuccess";
        case 1: return "cudaErrorInvalidValue";
        case 2: return "cudaErrorMemoryAllocation";
        case 3: return "cudaErrorInitializationError";
        case 101: return "cudaErrorInvalidDevice";
        case 400: return "cudaErrorInvalidResourceHandle";
        case 401: return "cudaErrorIllegalState";
        case 801: return "cudaErrorNotSupported";
        case 900: return "cudaErrorStreamCaptureUnsupported";
        case 906: return "cudaErrorStreamCaptureImplicit";
        case 907: return "cudaErrorCapturedEvent";
        default: return "cudaErrorUnknown";
    }
}
const char* cudaGetErrorString(cudaError_t) {
    static thread_local char text[440];
    snprintf(text, sizeof text, "fake GPU: %s", reason);
    return text;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= device_count()) return refuse(cudaErrorInvalidDevice, "device %d of %d", d, device_count());
    if (d != current) note("DEVICE %d", d);
    current = d;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* n) { *n = device_count(); return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
    switch (a) {
        case cudaDevAttrComputeCapabilityMajor: *v = capability() / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *v = capability() % 10; break;
        case cudaDevAttrMultiProcessorCount: *v = processors(); break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = most_shared(); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = most_shared() + 1024; break;
        case cudaDevAttrL2CacheSize: *v = 60 << 20; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
        case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
        case cudaDevAttrWarpSize: *v = 32; break;
        case cudaDevAttrMemoryPoolsSupported: *v = 1; break;
        default: *v = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* d, const char*) { *d = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* p, int n, int) { snprintf(p, n, "0000:00:00.0"); return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "fake GPU");
    p->major = capability() / 10;
    p->minor = capability() % 10;
    p->multiProcessorCount = processors();
    p->l2CacheSize = 60 << 20;
    p->totalGlobalMem = total();
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = most_shared();
    p->sharedMemPerMultiprocessor = most_shared() + 1024;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    Guard guard(mutex);
    note("WAIT device");
    for (auto& [handle, s] : streams)
        if (s.capturing && s.device == current) return refuse(cudaErrorStreamCaptureUnsupported, "a wait for a device of which a stream captures");
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) { *v = 0; return cudaSuccess; }
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- Runtime: memory --------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t n) {
    Guard guard(mutex);
    TRY(unsafe_in_capture("an allocation"));
    return allocate(p, n, current);
}
cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) { Guard guard(mutex); return allocate(p, n, current); }
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t s) {
    Guard guard(mutex);
    TRY(check_stream(s, "an allocation"));
    return allocate(p, n, current);
}
cudaError_t cudaMallocFromPoolAsync(void** p, size_t n, cudaMemPool_t, cudaStream_t s) { return cudaMallocAsync(p, n, s); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
    Guard guard(mutex);
    TRY(unsafe_in_capture("an allocation of pinned memory"));
    return allocate(p, n, -1);
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaFree(void* p) {
    Guard guard(mutex);
    TRY(unsafe_in_capture("a free"));
    return release(p, false);
}
cudaError_t cudaFreeHost(void* p) { Guard guard(mutex); return release(p, true); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t s) {
    Guard guard(mutex);
    TRY(check_stream(s, "a free"));
    return release(p, false);
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all) {
    Guard guard(mutex);
    *all = total();
    *free_bytes = total() - used[current];
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
    Guard guard(mutex);
    note("COPY kind %d bytes %zu, waits", (int)kind, n);
    TRY(unsafe_in_capture("a synchronous copy"));
    TRY(check_stream(nullptr, "a synchronous copy"));
    return copy(to, from, n, kind);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t s) {
    Guard guard(mutex);
    const char* pageable = (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDefault) && !allocation_of(from, n) ? " pageable" : "";
    note("COPY kind %d bytes %zu stream %p%s%s", (int)kind, n, (void*)s, pageable, captures(s) ? " captured" : "");
    TRY(check_stream(s, "a copy"));
    return copy(to, from, n, kind);
}
cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t n) {
    Guard guard(mutex);
    note("COPY peer bytes %zu, waits", n);
    return copy(to, from, n, cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) {
    Guard guard(mutex);
    note("COPY peer bytes %zu stream %p", n, (void*)s);
    TRY(check_stream(s, "a copy between devices"));
    return copy(to, from, n, cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemset(void* to, int value, size_t n) {
    Guard guard(mutex);
    note("FILL %zu, waits", n);
    TRY(check_stream(nullptr, "a fill"));
    return fill(to, value, n);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t s) {
    Guard guard(mutex);
    note("FILL %zu stream %p%s", n, (void*)s, captures(s) ? " captured" : "");
    TRY(check_stream(s, "a fill"));
    return fill(to, value, n);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    Guard guard(mutex);
    memset(a, 0, sizeof *a);
    const Allocation* found = allocation_of(p, 1);
    a->type = !found ? cudaMemoryTypeUnregistered : found->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = found && found->device >= 0 ? found->device : 0;
    a->devicePointer = found ? (void*)p : nullptr;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) { *p = (cudaMemPool_t)16; return cudaSuccess; }
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* p, int) { *p = (cudaMemPool_t)16; return cudaSuccess; }
cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) { memset(v, 0, 8); return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// ---- Runtime: streams, events, graphs ---------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    Guard guard(mutex);
    *s = (cudaStream_t)new_handle();
    streams[*s] = {current, !(flags & cudaStreamNonBlocking), false, cudaStreamCaptureModeGlobal, pthread_self()};
    note("STREAM %p on %d", (void*)*s, current);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int) { return cudaStreamCreateWithFlags(s, flags); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    Guard guard(mutex);
    if (!streams.erase(s)) return refuse(cudaErrorInvalidResourceHandle, "an unknown or destroyed stream destroyed");
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    Guard guard(mutex);
    note("WAIT stream %p", (void*)s);
    if (captures(s)) return refuse(cudaErrorStreamCaptureUnsupported, "a wait for a stream that captures");
    if (!is_built_in(s) && !streams.count(s)) return refuse(cudaErrorInvalidResourceHandle, "a wait for an unknown or destroyed stream");
    return unsafe_in_capture("a wait for a stream");
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    Guard guard(mutex);
    if (captures(s)) return refuse(cudaErrorStreamCaptureUnsupported, "a query of a stream that captures");
    return is_built_in(s) || streams.count(s) ? cudaSuccess : refuse(cudaErrorInvalidResourceHandle, "a query of an unknown stream");
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void* data, unsigned) { call(s, cudaSuccess, data); return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) { call(data); return cudaSuccess; }
cudaError_t cudaStreamGetFlags(cudaStream_t, unsigned* f) { *f = 0; return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) { *p = 0; return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
    Guard guard(mutex);
    note("CAPTURE begins, stream %p mode %d", (void*)s, (int)mode);
    if (is_legacy(s)) return refuse(cudaErrorStreamCaptureUnsupported, "a capture of the legacy stream");
    TRY(check_stream(s, "a capture"));
    if (captures(s)) return refuse(cudaErrorIllegalState, "a capture of a stream that captures already");
    Stream& stream = streams[s];
    stream.capturing = true;
    stream.mode = mode;
    stream.owner = pthread_self();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
    Guard guard(mutex);
    note("CAPTURE ends");
    if (!captures(s)) return refuse(cudaErrorIllegalState, "the end of a capture that was not begun");
    streams[s].capturing = false;
    *g = (cudaGraph_t)new_handle();
    graphs.insert(*g);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
    Guard guard(mutex);
    *status = captures(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t g, unsigned long long) {
    Guard guard(mutex);
    if (!graphs.count(g)) return refuse(cudaErrorInvalidValue, "an unknown graph instantiated");
    *made = (cudaGraphExec_t)new_handle();
    graphs.insert(*made);
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) {
    Guard guard(mutex);
    note("GRAPH launched in stream %p", (void*)s);
    if (!graphs.count(g)) return refuse(cudaErrorInvalidValue, "an unknown graph launched");
    return check_stream(s, "a launch of a graph");
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t s) { Guard guard(mutex); return check_stream(s, "an upload of a graph"); }
cudaError_t cudaGraphDestroy(cudaGraph_t g) { Guard guard(mutex); graphs.erase(g); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { Guard guard(mutex); graphs.erase(g); return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    Guard guard(mutex);
    *e = (cudaEvent_t)new_handle();
    events[*e] = {};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    Guard guard(mutex);
    if (!events.erase(e)) return refuse(cudaErrorInvalidResourceHandle, "an unknown or destroyed event destroyed");
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    Guard guard(mutex);
    Event* event;
    TRY(find_event(e, &event, "a record"));
    TRY(check_stream(s, "a record of an event"));
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *event = {true, captures(s), now.tv_sec * 1e3 + now.tv_nsec * 1e-6};
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    Guard guard(mutex);
    note("WAIT event");
    Event* event;
    TRY(find_event(e, &event, "a wait"));
    return event->captured ? refuse(cudaErrorCapturedEvent, "a wait for an event that was captured") : cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    Guard guard(mutex);
    Event* event;
    TRY(find_event(e, &event, "a query"));
    return event->captured ? refuse(cudaErrorCapturedEvent, "a query of an event that was captured") : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    Guard guard(mutex);
    Event* event;
    TRY(find_event(e, &event, "a wait"));
    return is_built_in(s) || streams.count(s) ? cudaSuccess : refuse(cudaErrorInvalidResourceHandle, "a wait in an unknown stream");
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
    Guard guard(mutex);
    Event *first, *second;
    TRY(find_event(a, &first, "a time"));
    TRY(find_event(b, &second, "a time"));
    if (!first->recorded || !second->recorded) return refuse(cudaErrorInvalidResourceHandle, "a time between events that were not recorded");
    if (first->captured || second->captured) return refuse(cudaErrorCapturedEvent, "a time between events that were captured");
    *ms = std::max(1e-3, second->at - first->at);
    return cudaSuccess;
}

// ---- Driver: contexts, modules, launches -------------------------------------------------------------

int cuGetErrorName(int e, const char** text) {
    static thread_local char name[40];
    const char* known = e == 1 ? "CUDA_ERROR_INVALID_VALUE" : e == 200 ? "CUDA_ERROR_INVALID_IMAGE" : e == 500 ? "CUDA_ERROR_NOT_FOUND"
        : e == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" : e == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : nullptr;
    snprintf(name, sizeof name, "CUDA_ERROR_%d", e);
    *text = known ? known : name;
    return 0;
}
int cuGetErrorString(int, const char** text) { *text = cudaGetErrorString(cudaSuccess); return 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxGetCurrent(void** c) { *c = (void*)(uintptr_t)(1 + current); return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxCreate_v2(void** c, unsigned, int) { *c = (void*)1; return 0; }
int cuCtxDestroy_v2(void*) { return 0; }
int cuCtxGetDevice(int* d) { *d = current; return 0; }
int cuStreamGetCtx(void*, void** c) { return cuCtxGetCurrent(c); }

int cuModuleLoadData(void** made, const void* image) {
    Guard guard(mutex);
    auto* module = new Module;
    if (!read_cubin((const char*)image, module)) return refuse(200, "a module that is no cubin");
    std::string names;
    for (auto& [name, f] : module->functions) names += " " + name;
    note("MODULE%s", names.c_str());
    *made = module;
    return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** f, void* m, const char* name) {
    Guard guard(mutex);
    auto& functions = ((Module*)m)->functions;
    auto it = functions.find(name);
    if (it == functions.end()) return refuse(500, "the module has no kernel %s", name);
    *f = &it->second;
    return 0;
}
int cuFuncGetAttribute(int* v, int which, void* f) {
    auto* q = (Function*)f;
    const int known[] = {q->most_threads, q->shared, 0, q->local, q->registers, capability(), capability(), 0, q->dynamic};
    *v = which >= 0 && which < 9 ? known[which] : 0;
    return 0;
}
int cuFuncSetAttribute(void* f, int which, int v) {
    Guard guard(mutex);
    auto* q = (Function*)f;
    note("SET %s attribute %d = %d", q->name.c_str(), which, v);
    if (which != 8) return 0;
    if (v < 0 || v + q->shared > most_shared())
        return refuse(1, "%s: %d B of dynamic and %d of static shared memory; the device has %d", q->name.c_str(), v, q->shared, most_shared());
    q->dynamic = v;
    return 0;
}
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** arguments, void** extra) {
    Guard guard(mutex);
    auto* q = (Function*)f;
    const char* name = q->name.c_str();
    const long given = arguments_given(arguments), wanted = q->parameters.size();
    std::string arrays;
    std::vector<std::string> strays;
    if (given == wanted)
        for (auto& [i, bytes] : q->parameters) {  // a pointer, or a structure of CuPy that begins with one
            if (bytes < 8) continue;
            void* p = at<void*>((const char*)arguments[i], 0);
            const Allocation* found = allocation_of(p, 1);
            if (!found || found->device < 0) continue;
            char text[200];
            snprintf(text, sizeof text, " %p", p);
            arrays += text;
            snprintf(text, sizeof text, "NOTE %s on device %d: argument %d is memory of device %d", name, current, i, found->device);
            if (found->device != current) strays.push_back(text);
        }
    note("LAUNCH %s grid %u %u %u block %u %u %u shared %u stream %p device %d%s arrays%s", name, gx, gy, gz, bx, by, bz, shared, stream,
         current, captures(stream) ? " captured" : "", arrays.c_str());
    for (auto& text : strays) note("%s", text.c_str());
    TRY(alive());
    TRY(check_stream(stream, name));
    const uint64_t threads = (uint64_t)bx * by * bz;
    if (!gx || !gy || !gz || gx > 2147483647u || gy > 65535 || gz > 65535) return refuse(1, "%s: grid %u x %u x %u", name, gx, gy, gz);
    if (!threads || bx > 1024 || by > 1024 || bz > 64 || threads > (uint64_t)q->most_threads)
        return refuse(1, "%s: block %u x %u x %u; %d threads are its bound", name, bx, by, bz, q->most_threads);
    if ((threads + 31) / 32 * 32 * ((q->registers + 7) / 8 * 8) > 65536) return refuse(701, "%s: %lu threads of %d registers", name, (unsigned long)threads, q->registers);
    if ((int64_t)shared > q->dynamic) return refuse(1, "%s: %u B of dynamic shared memory, set to %d", name, shared, q->dynamic);
    if (!extra && given >= 0 && given != wanted) return refuse(1, "%s: %ld arguments, it takes %ld", name, given, wanted);
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) { *n = 1; return 0; }
int cuOccupancyMaxPotentialBlockSize(int* grid, int* block, void*, void*, size_t, int) { *grid = processors(); *block = 256; return 0; }
#define UNSUPPORTED(name) int name() { return refuse(801, #name); }
UNSUPPORTED(cuLinkCreate_v2) UNSUPPORTED(cuLinkAddData_v2) UNSUPPORTED(cuLinkAddFile_v2) UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkDestroy) UNSUPPORTED(cuModuleLoad) UNSUPPORTED(cuModuleGetGlobal_v2) UNSUPPORTED(cuLaunchCooperativeKernel)

// ---- cuBLAS -----------------------------------------------------------------------------------------

static thread_local int pointer_mode = 0, math_mode = 0;
static thread_local void* blas_stream = nullptr;
int cublasCreate_v2(void** h) {
    Guard guard(mutex);
    note("CUBLAS create");
    if (unsafe_in_capture("cublasCreate")) return 1;
    *h = new_handle();
    return 0;
}
int cublasDestroy_v2(void*) { return 0; }
int cublasGetVersion_v2(void*, int* v) { *v = 130000; return 0; }
int cublasGetPointerMode_v2(void*, int* m) { *m = pointer_mode; return 0; }
int cublasSetPointerMode_v2(void*, int m) { pointer_mode = m; return 0; }
int cublasGetMathMode(void*, int* m) { *m = math_mode; return 0; }
int cublasSetMathMode(void*, int m) { math_mode = m; return 0; }
int cublasGetStream_v2(void*, void** s) { *s = blas_stream; return 0; }
int cublasSetStream_v2(void*, void* s) { Guard guard(mutex); blas_stream = s; return check_stream(s, "cuBLAS") ? 7 : 0; }

static bool operand(const char* name, const void* p, int type, long long rows, long long columns, long long ld, long long stride, long long batch) {
    const int bytes = type == 0 ? 4 : type == 1 || type == 4 ? 8 : type == 5 ? 16 : type == 2 || type == 14 ? 2 : 1;
    if (rows <= 0 || columns <= 0 || batch <= 0) return true;
    if (ld < rows) { refuse(7, "cuBLAS: leading dimension %lld of %s, which has %lld rows", ld, name, rows); return false; }
    const size_t extent = ((columns - 1) * ld + rows + (batch - 1) * stride) * bytes;
    if (!allocation_of(p, extent)) { refuse(7, "cuBLAS: %s leaves its allocation", name); return false; }
    return true;
}
int cublasGemmStridedBatchedEx(void*, int ta, int tb, int m, int n, int k, const void*, const void* a, int at_, int lda, long long sa,
                               const void* b, int bt, int ldb, long long sb, const void*, void* c, int ct, int ldc, long long sc, int batch,
                               int compute, int) {
    Guard guard(mutex);
    note("GEMM %c%c m %d n %d k %d types %d %d %d ld %d %d %d strides %lld %lld %lld batch %d compute %d stream %p", ta ? 'T' : 'N', tb ? 'T' : 'N',
         m, n, k, at_, bt, ct, lda, ldb, ldc, sa, sb, sc, batch, compute, blas_stream);
    const bool good = operand("A", a, at_, ta ? k : m, ta ? m : k, lda, sa, batch) && operand("B", b, bt, tb ? n : k, tb ? k : n, ldb, sb, batch) &&
                      operand("C", c, ct, m, n, ldc, sc, batch);
    return good ? 0 : 7;
}
int cublasGemmEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at_, int lda, const void* b, int bt, int ldb,
                 const void* beta, void* c, int ct, int ldc, int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, at_, lda, 0, b, bt, ldb, 0, beta, c, ct, ldc, 0, 1, compute, algorithm);
}

// ---- For the tests ------------------------------------------------------------------------------------

// Keep the log in memory from here on; what it says ends the record, and holds until the next one ends.
void fake_gpu_record() {
    Guard guard(mutex);
    recorded.clear();
    recording = true;
}
const char* fake_gpu_recorded() {
    static std::string text;
    Guard guard(mutex);
    recording = false;
    text.swap(recorded);
    return text.c_str();
}

// All else that CuPy's modules link to (build.sh writes these functions): cuBLAS does nothing and says so
// in the log, CUDA is not supported.
int fake_gpu_rest(const char* name) {
    if (strncmp(name, "cublas", 6)) return refuse(801, "%s", name);
    note("CUBLAS %s, unchecked", name);
    return 0;
}
}

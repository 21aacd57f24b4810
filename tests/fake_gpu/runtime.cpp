// A fake GPU: CUDA's runtime and driver and cuBLAS, as far as CuPy 14.2 (CUDA 13) asks for them, on a
// machine with neither GPU nor driver. It is loaded before all else (run.sh: LD_PRELOAD). NVRTC is the real one; the PTX
// that it makes is interpreted (tests/ptx), CuPy's own kernels too.
//
// Here: devices (number, compute capability, limits), memory (it is memory of the host), streams, events (they measure
// time of the host), capture and graphs, which are replayed. driver.cpp: modules and launches. cublas.cpp: products.
//
// Checked, and refused with CUDA's error and a reason in its text (and "ERROR" in the log):
//   launches: a function that the module lacks, limits of grid and block, launch bounds,
//     dynamic shared memory beyond what the function was set to, static and dynamic beyond the device's,
//     a number of arguments other than the kernel's;
//   memory: frees of what was not allocated, copies and fills that leave their allocation, out of memory,
//     cuBLAS operands that leave their allocation, leading dimensions that are too small;
//   streams and events: handles that are unknown, destroyed or of another device, times between events
//     that were not recorded;
//   capture: waits for a capturing stream or its device, captured events waited for or timed; allocating
//     and freeing meanwhile (not in relaxed mode, which is CuPy's default); use of the legacy stream while a
//     blocking stream captures; ends of a capture that never began;
//   forked processes: none may use what their parent began to use.
// Found (fake_gpu_findings): what the interpreter finds in kernels, and values that nobody wrote where they are copied to
//   the host or multiplied.
// Noted in the log only: kernels that get memory of another device than theirs ("NOTE").
// Not done: synchronous copies and fills, waits of streams for events, CUDA arrays, textures, IPC, managed memory, memory pools of the driver, copies between devices, links of PTX;
//   registers. A function that is not there is found by name.
//
// The log goes to the file FAKE_GPU_LOG, or to a test that asks for it (fake_gpu_record).
// Environment: FAKE_GPU_DEVICES (2), FAKE_GPU_LOG (file to append to), FAKE_GPU_CC (90), FAKE_GPU_SMS (132),
//   FAKE_GPU_SHARED (bytes a block may opt in to; 232448), FAKE_GPU_MEMORY (GiB a device; 139),
//   FAKE_GPU_COMPUTE (0: nothing is computed, launches are checked and logged, for large sizes and to time the host; memory
//   then holds bytes of 1 in its first MiB, which read as true and as small positive numbers).
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "state.h"

std::recursive_mutex mutex;
Memory memory;
std::map<void*, Stream> streams;
thread_local int current = 0;

namespace {

struct Event { bool recorded, captured; double at; };

std::map<void*, Event> events;
std::map<void*, Work> graphs;
std::map<int, size_t> used;
uintptr_t last_handle = 0x1000;
thread_local char reason[400] = "";

}  // namespace

long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}
int capability() { static int n = setting("FAKE_GPU_CC", 90); return n; }
int processors() { static int n = setting("FAKE_GPU_SMS", 132); return n; }
int most_shared() { static int n = setting("FAKE_GPU_SHARED", 232448); return n; }

namespace {

bool is_computed = setting("FAKE_GPU_COMPUTE", 1) != 0;
int device_count() { static int n = setting("FAKE_GPU_DEVICES", 2); return n; }
size_t total() { static size_t n = (size_t)setting("FAKE_GPU_MEMORY", 139) << 30; return n; }

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
    if (recording) recorded.append(kind).append(line).append(1, '\n');
}

}  // namespace

bool computes() { return is_computed; }
void note(const char* format, ...) {
    va_list args;
    va_start(args, format);
    write_log("", format, args);
    va_end(args);
}
cudaError_t refuse(int code, const char* format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    vsnprintf(reason, sizeof reason, format, args);
    write_log("ERROR ", format, again);
    va_end(again);
    va_end(args);
    return (cudaError_t)code;
}

void* new_handle() { return (void*)(last_handle += 16); }

cudaError_t alive() {
    static pid_t first = getpid();
    if (getpid() != first) return refuse(cudaErrorInitializationError, "used in a forked process");
    return cudaSuccess;
}

// ---- Capture and handles ----------------------------------------------------------------------------

static bool is_legacy(void* s) { return s == nullptr || s == (void*)cudaStreamLegacy; }
static bool is_built_in(void* s) { return is_legacy(s) || s == (void*)cudaStreamPerThread; }
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

int now_or_later(void* s, std::function<int()> work) {
    if (!captures(s)) return work();
    streams[s].captured.push_back(work);
    return 0;
}

namespace {

cudaError_t find_event(void* e, Event** found, const char* what) {
    auto it = events.find(e);
    if (it == events.end()) return refuse(cudaErrorInvalidResourceHandle, "%s of an unknown or destroyed event", what);
    *found = &it->second;
    return cudaSuccess;
}

// ---- Memory -----------------------------------------------------------------------------------------

// What nobody computes then reads as true, and as small positive numbers: calls go on as with valid data.
const size_t marked = 1 << 20;

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
    if (device >= 0) computes() ? memset(made, 0xff, bytes) : memset(made, 1, std::min(bytes, marked));  // 0xff: NaN
    memory.add(made, bytes, device, device < 0 || !computes());
    used[device] += bytes;
    *p = made;
    note("ALLOC %zu on %d", bytes, device);
    return cudaSuccess;
}

cudaError_t release(void* p, bool pinned) {
    if (!p) return cudaSuccess;
    const Allocation* a = memory.find((u64)p);
    if (!a || a->start != (u64)p || (a->device < 0) != pinned)
        return refuse(cudaErrorInvalidValue, "free of %p, which was not allocated or is freed already", p);
    note("FREE %zu", (size_t)a->bytes);
    used[a->device] -= a->bytes;
    munmap(p, a->bytes);
    memory.remove(p);
    return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, void* stream = nullptr) {
    TRY(alive());
    bool target = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool source = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (bytes && target && !memory.find((u64)to, bytes)) return refuse(cudaErrorInvalidValue, "copy of %zu bytes to outside of an allocation", bytes);
    if (bytes && source && !memory.find((u64)from, bytes)) return refuse(cudaErrorInvalidValue, "copy of %zu bytes from outside of an allocation", bytes);
    if (!computes() && kind == cudaMemcpyDeviceToDevice) return cudaSuccess;
    return (cudaError_t)now_or_later(stream, [=] {
        if (kind == cudaMemcpyDeviceToHost && memory.undefined(from, bytes))
            found("copy of " + std::to_string(bytes) + " bytes to the host", "undefined values reach the host");
        memmove(to, from, bytes);
        // A number that the host waits for, wherever in its allocation it lies.
        if (kind == cudaMemcpyDeviceToHost && !computes() && bytes <= 8) memset(to, 1, bytes);
        memory.copy(to, from, bytes);
        return 0;
    });
}

cudaError_t fill(void* to, int value, size_t bytes, void* stream = nullptr) {
    TRY(alive());
    if (bytes && !memory.find((u64)to, bytes)) return refuse(cudaErrorInvalidValue, "fill of %zu bytes outside of an allocation", bytes);
    if (!computes()) return cudaSuccess;
    return (cudaError_t)now_or_later(stream, [=] {
        memset(to, value, bytes);
        memory.define(to, bytes);
        return 0;
    });
}

}  // namespace

extern "C" {

// ---- Runtime: devices -------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t e) {
    static const std::map<int, const char*> names = {{0, "cudaSuccess"}, {1, "cudaErrorInvalidValue"}, {2, "cudaErrorMemoryAllocation"},
        {3, "cudaErrorInitializationError"}, {101, "cudaErrorInvalidDevice"}, {400, "cudaErrorInvalidResourceHandle"},
        {401, "cudaErrorIllegalState"}, {801, "cudaErrorNotSupported"}, {900, "cudaErrorStreamCaptureUnsupported"},
        {906, "cudaErrorStreamCaptureImplicit"}, {907, "cudaErrorCapturedEvent"}};
    return names.count(e) ? names.at(e) : "cudaErrorUnknown";
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
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "fake GPU");
    p->totalGlobalMem = total();
    p->warpSize = 32;
    p->multiProcessorCount = processors();
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    Guard guard(mutex);
    note("WAIT device");
    for (auto& [handle, s] : streams)
        if (s.capturing && s.device == current) return refuse(cudaErrorStreamCaptureUnsupported, "a wait for a device of which a stream captures");
    return cudaSuccess;
}

// ---- Runtime: memory --------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t n) {
    Guard guard(mutex);
    TRY(unsafe_in_capture("an allocation"));
    return allocate(p, n, current);
}
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
    Guard guard(mutex);
    TRY(unsafe_in_capture("an allocation of pinned memory"));
    return allocate(p, n, -1);
}
cudaError_t cudaFree(void* p) {
    Guard guard(mutex);
    TRY(unsafe_in_capture("a free"));
    return release(p, false);
}
cudaError_t cudaFreeHost(void* p) { Guard guard(mutex); return release(p, true); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all) {
    Guard guard(mutex);
    *all = total();
    *free_bytes = total() - used[current];
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t s) {
    Guard guard(mutex);
    const char* pageable = (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDefault) && !memory.find((u64)from, n) ? " pageable" : "";
    note("COPY kind %d bytes %zu stream %p%s%s", (int)kind, n, (void*)s, pageable, captures(s) ? " captured" : "");
    TRY(check_stream(s, "a copy"));
    return copy(to, from, n, kind, s);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t s) {
    Guard guard(mutex);
    note("FILL %zu stream %p%s", n, (void*)s, captures(s) ? " captured" : "");
    TRY(check_stream(s, "a fill"));
    return fill(to, value, n, s);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    Guard guard(mutex);
    memset(a, 0, sizeof *a);
    const Allocation* found = memory.find((u64)p);
    a->type = !found ? cudaMemoryTypeUnregistered : found->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = found && found->device >= 0 ? found->device : 0;
    a->devicePointer = found ? (void*)p : nullptr;
    return cudaSuccess;
}

// ---- Runtime: streams, events, graphs ---------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    Guard guard(mutex);
    *s = (cudaStream_t)new_handle();
    streams[*s] = {current, !(flags & cudaStreamNonBlocking), false, cudaStreamCaptureModeGlobal, pthread_self(), {}};
    note("STREAM %p on %d", (void*)*s, current);
    return cudaSuccess;
}
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
    stream.captured.clear();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
    Guard guard(mutex);
    note("CAPTURE ends");
    if (!captures(s)) return refuse(cudaErrorIllegalState, "the end of a capture that was not begun");
    streams[s].capturing = false;
    *g = (cudaGraph_t)new_handle();
    graphs[*g] = streams[s].captured;
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
    graphs[*made] = graphs[g];
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) {
    Guard guard(mutex);
    note("GRAPH launched in stream %p", (void*)s);
    if (!graphs.count(g)) return refuse(cudaErrorInvalidValue, "an unknown graph launched");
    TRY(check_stream(s, "a launch of a graph"));
    for (auto& work : graphs[g]) TRY(work());
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { Guard guard(mutex); graphs.erase(g); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { Guard guard(mutex); graphs.erase(g); return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    Guard guard(mutex);
    *e = (cudaEvent_t)new_handle();
    events[*e] = {};
    return cudaSuccess;
}
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

// What the interpreter found since the last call, and what kernels did since the beginning.
const char* fake_gpu_findings() {
    static std::string text;
    Guard guard(mutex);
    text = findings();
    return text.c_str();
}
const char* fake_gpu_counts() {
    static std::string text;
    Guard guard(mutex);
    text = counts();
    return text.c_str();
}
// Compute from here on, or do not; returns what it was.
int fake_gpu_compute(int does) {
    Guard guard(mutex);
    const int before = is_computed;
    is_computed = does;
    return before;
}

// All else that CuPy's modules link to (build.sh writes these functions).
int fake_gpu_rest(const char* name) {
    found(name, "a library function that is not there");
    return refuse(strncmp(name, "cublas", 6) ? 801 : 15, "%s", name);
}
}

// What the parts of the fake GPU share: devices and their limits, memory, streams, the log.
#pragma once
#include <cuda_runtime.h>
#include <pthread.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../ptx/interpreter.h"
#undef cudaGetDeviceProperties

// Work that a capturing stream was given, and that a graph repeats; each returns an error or 0.
typedef std::vector<std::function<int()>> Work;

struct Stream {
    int device;
    bool blocking, capturing;
    cudaStreamCaptureMode mode;
    pthread_t owner;
    Work captured;
};

extern std::recursive_mutex mutex;
extern Memory memory;
extern std::map<void*, Stream> streams;
extern thread_local int current;  // device
using Guard = std::lock_guard<std::recursive_mutex>;

long setting(const char* name, long otherwise);
int capability();
int processors();
int most_shared();
// Whether kernels, products, copies and fills of device memory are run; without, they are only checked.
bool computes();

__attribute__((format(printf, 1, 2))) void note(const char* format, ...);
// Write an error to the log, and into the text of CUDA's error.
__attribute__((format(printf, 2, 3))) cudaError_t refuse(int code, const char* format, ...);
#define TRY(check) do { if (int bad_ = (check)) return (decltype(here()))bad_; } while (0)
inline cudaError_t here() { return cudaSuccess; }  // type of what most functions return

void* new_handle();
cudaError_t alive();  // not in a forked process
bool captures(void* stream);
cudaError_t unsafe_in_capture(const char* what);
cudaError_t check_stream(void* stream, const char* what);
// Do it, or keep it where the stream captures.
int now_or_later(void* stream, std::function<int()> work);

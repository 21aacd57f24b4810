// What runs the threads of an emulated kernel: see runtime.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

struct emulated_index {
    unsigned x, y, z;
};

extern emulated_index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

unsigned char* shared_memory();

void block_sync();
bool block_any(bool predicate);
void warp_sync();
float shuffle_xor(float value, int lanes);

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void load_matrices(uint32_t (&r)[4], const void* row);
void load_matrices_transposed(uint32_t (&r)[4], const void* row);

void copy_async(void* to, const void* from, bool valid);
void copies_done();

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float bf16_to_float(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

inline float f16_to_float(uint16_t bits) {
    uint32_t sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
    if (size >= 0x7c00u) return float_of(sign | 0x7f800000u | size << 13);
    // The exponents' biases differ by 112; the product makes subnormals normal, exactly.
    float value = float_of(size << 13) * 0x1p112f;
    return sign ? -value : value;
}

// A parameter's type in NumPy's letters, pointers "P".
template <class T>
struct Letters {
    static_assert(std::is_arithmetic_v<T> || std::is_pointer_v<T>,
                  "the parameters of a kernel are numbers and pointers");
    static constexpr char kind = std::is_pointer_v<T>          ? 'P'
                                 : std::is_same_v<T, bool>     ? 'b'
                                 : std::is_floating_point_v<T> ? 'f'
                                 : std::is_signed_v<T>         ? 'i'
                                                               : 'u';
    static constexpr char size = '0' + sizeof(T);
};

template <class... T>
struct Signature {
    static constexpr char text[] = {Letters<T>::kind..., '\0'};
    static constexpr char sizes[] = {Letters<T>::size..., '\0'};
};

template <class... T>
const char* kinds(void (*)(T...)) { return Signature<T...>::text; }

template <class... T>
const char* sizes(void (*)(T...)) { return Signature<T...>::sizes; }

template <class... T, size_t... I>
void call_each(void (*kernel)(T...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<T>*>(arguments[I])...);
}

template <class... T>
void call(void (*kernel)(T...), void** arguments) {
    call_each(kernel, arguments, std::index_sequence_for<T...>());
}

}  // namespace emulator

// Of the kernel that the library was built for; arguments[i] points at the value of argument i.
void emulated_kernel(void** arguments);

#define EMULATED_KERNEL(name)                                                       \
    void emulated_kernel(void** arguments) { emulator::call(&name, arguments); }    \
    extern "C" __attribute__((visibility("default"))) const char* parameter_kinds() { \
        return emulator::kinds(&name);                                              \
    }                                                                               \
    extern "C" __attribute__((visibility("default"))) const char* parameter_sizes() { \
        return emulator::sizes(&name);                                              \
    }

// cuBLAS as its documentation describes it: column-major products, summed in float64.
#include <math.h>

#include "../ptx/numbers.h"
#include "state.h"

namespace {

thread_local void* blas_stream = nullptr;

struct Product {
    int ta, tb, m, n, k, a_type, b_type, c_type, lda, ldb, ldc, batch;
    double alpha, beta;
    const void *a, *b;
    void* c;
    long long sa, sb, sc;
    bool tf32;
};

// cudaDataType: 0 float32, 1 float64, 2 float16, 14 bfloat16.
int bytes_of(int type) { return type == 0 ? 4 : type == 1 ? 8 : 2; }
double number_at(const void* p, long long i, int type, bool tf32) {
    if (type == 1) return ((const double*)p)[i];
    if (type != 0) return type == 2 ? from_f16(((const u16*)p)[i]) : from_bf16(((const u16*)p)[i]);
    const u32 word = ((const u32*)p)[i];
    return f32(tf32 && std::isfinite(f32(word)) ? (word + 0xfff + (word >> 13 & 1)) & ~0x1fffu : word);
}

// A column-major matrix of the device, or its transpose, row after row.
std::vector<double> matrix(const char* name, const void* p, int type, int rows, int columns, int ld, bool transpose, bool tf32) {
    std::vector<double> numbers((size_t)rows * columns);
    for (int j = 0; j < columns; ++j) {
        if (memory.undefined((const char*)p + (long long)j * ld * bytes_of(type), (u64)rows * bytes_of(type)))
            found("cuBLAS", std::string("undefined values in ") + name);
        for (int i = 0; i < rows; ++i)
            numbers[transpose ? (size_t)j * rows + i : (size_t)i * columns + j] = number_at(p, (long long)j * ld + i, type, tf32);
    }
    return numbers;
}

int multiply(const Product& p) {
    if (p.c_type > 1) return refuse(15, "cuBLAS: a product whose result is of 16 bits");
    for (int i = 0; i < p.batch; ++i) {
        const char *at = (const char*)p.a + i * p.sa * bytes_of(p.a_type), *bt = (const char*)p.b + i * p.sb * bytes_of(p.b_type);
        char* out = (char*)p.c + i * p.sc * bytes_of(p.c_type);
        // Rows of op(A), and columns of op(B) one after the other.
        const auto a = matrix("A", at, p.a_type, p.ta ? p.k : p.m, p.ta ? p.m : p.k, p.lda, p.ta, p.tf32);
        const auto b = matrix("B", bt, p.b_type, p.tb ? p.n : p.k, p.tb ? p.k : p.n, p.ldb, !p.tb, p.tf32);
        const auto c = p.beta ? matrix("C", out, p.c_type, p.m, p.n, p.ldc, false, false) : std::vector<double>();
        for (int column = 0; column < p.n; ++column) {
            for (int row = 0; row < p.m; ++row) {
                double sum = 0;
                for (int k = 0; k < p.k; ++k) sum += a[(size_t)row * p.k + k] * b[(size_t)column * p.k + k];
                sum = p.alpha * sum + (p.beta ? p.beta * c[(size_t)row * p.n + column] : 0);
                const long long to = (long long)column * p.ldc + row;
                if (p.c_type == 0) ((float*)out)[to] = sum; else ((double*)out)[to] = sum;
            }
            memory.define(out + (long long)column * p.ldc * bytes_of(p.c_type), (u64)p.m * bytes_of(p.c_type));
        }
    }
    return 0;
}

bool operand(const char* name, const void* p, int type, long long rows, long long columns, long long ld, long long stride, long long batch) {
    const int bytes = type == 0 ? 4 : type == 1 || type == 4 ? 8 : type == 5 ? 16 : type == 2 || type == 14 ? 2 : 1;
    if (rows <= 0 || columns <= 0 || batch <= 0) return true;
    if (ld < rows) { refuse(7, "cuBLAS: leading dimension %lld of %s, which has %lld rows", ld, name, rows); return false; }
    const size_t extent = ((columns - 1) * ld + rows + (batch - 1) * stride) * bytes;
    if (!memory.find((u64)p, extent)) { refuse(7, "cuBLAS: %s leaves its allocation", name); return false; }
    return true;
}

int product(const Product& p) {
    Guard guard(mutex);
    note("GEMM %c%c m %d n %d k %d types %d %d %d ld %d %d %d strides %lld %lld %lld batch %d%s stream %p", p.ta ? 'T' : 'N', p.tb ? 'T' : 'N', p.m,
         p.n, p.k, p.a_type, p.b_type, p.c_type, p.lda, p.ldb, p.ldc, p.sa, p.sb, p.sc, p.batch, p.tf32 ? " tf32" : "", blas_stream);
    const bool good = operand("A", p.a, p.a_type, p.ta ? p.k : p.m, p.ta ? p.m : p.k, p.lda, p.sa, p.batch) &&
                      operand("B", p.b, p.b_type, p.tb ? p.n : p.k, p.tb ? p.k : p.n, p.ldb, p.sb, p.batch) &&
                      operand("C", p.c, p.c_type, p.m, p.n, p.ldc, p.sc, p.batch);
    if (!good) return 7;
    return computes() ? now_or_later(blas_stream, [p] { return multiply(p); }) : 0;
}

}  // namespace

extern "C" {

int cublasCreate_v2(void** h) {
    Guard guard(mutex);
    note("CUBLAS create");
    if (unsafe_in_capture("cublasCreate")) return 1;
    *h = new_handle();
    return 0;
}
int cublasDestroy_v2(void*) { return 0; }
int cublasGetMathMode(void*, int* m) { *m = 0; return 0; }
int cublasSetStream_v2(void*, void* s) { Guard guard(mutex); blas_stream = s; return check_stream(s, "cuBLAS") ? 7 : 0; }

static double scalar(const void* p, int compute) { return compute == 70 || compute == 71 || compute == 1 ? *(const double*)p : *(const float*)p; }
int cublasGemmStridedBatchedEx(void*, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda, long long sa, const void* b, int bt,
                               int ldb, long long sb, const void* beta, void* c, int ct, int ldc, long long sc, int batch, int compute, int) {
    return product({ta, tb, m, n, k, at, bt, ct, lda, ldb, ldc, batch, scalar(alpha, compute), scalar(beta, compute), a, b, c, sa, sb, sc, compute == 77});
}
int cublasGemmEx(void*, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda, const void* b, int bt, int ldb, const void* beta, void* c,
                 int ct, int ldc, int compute, int) {
    return product({ta, tb, m, n, k, at, bt, ct, lda, ldb, ldc, 1, scalar(alpha, compute), scalar(beta, compute), a, b, c, 0, 0, 0, compute == 77});
}
#define GEMM(letter, Real, type) \
    int cublas##letter##gemmBatched(void*, int ta, int tb, int m, int n, int k, const Real* alpha, const Real* const* a, int lda, const Real* const* b, \
                                    int ldb, const Real* beta, Real* const* c, int ldc, int batch) { \
        /* The pointers are the device's: without computing nobody wrote them. */ \
        for (int i = 0; i < batch && computes(); ++i) \
            if (int bad = product({ta, tb, m, n, k, type, type, type, lda, ldb, ldc, 1, *alpha, *beta, a[i], b[i], c[i], 0, 0, 0, false})) return bad; \
        return 0; \
    }
GEMM(S, float, 0)
GEMM(D, double, 1)

}

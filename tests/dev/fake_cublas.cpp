// A stand-in for libcublas, as far as baselines call it: the same prototypes, naive products of host memory.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

int g_handle = 0, g_mode = 0;

template <typename T>
int multiply(bool transposed, std::size_t m, std::size_t n, std::size_t k, T alpha, const T *a, std::size_t lda,
             const T *b, std::size_t ldb, T beta, T *c, std::size_t ldc) {
    if (transposed) return 7;  // invalid value
    for (std::size_t j = 0; j < n; j++) {
        for (std::size_t i = 0; i < m; i++) {
            T sum = 0;
            for (std::size_t p = 0; p < k; p++)
                sum += a[p * lda + i] * b[j * ldb + p];
            c[j * ldc + i] = alpha * sum + beta * c[j * ldc + i];
        }
    }
    return 0;
}

}  // namespace

extern "C" {

int cublasGetProperty(int type, int *value) {
    *value = 13 - type;
    return 0;
}

int cublasCreate_v2(void **handle) {
    *handle = &g_handle;
    return 0;
}

int cublasSetMathMode(void *handle, int mode) {
    g_mode = mode;
    return handle == &g_handle ? 0 : 7;
}

int cublasGemmEx(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int type_a,
                 int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc,
                 int compute, int algorithm) {
    // 16: parts of k are added up in the type that is computed in.
    if (handle != &g_handle || type_a != type_b || type_b != type_c || algorithm != -1 || g_mode != 16) return 7;
    const auto extent = [](int value) { return static_cast<std::size_t>(value); };
    if (type_a == 1 && compute == 70) {
        return multiply(op_a || op_b, extent(m), extent(n), extent(k), *static_cast<const double *>(alpha),
                        static_cast<const double *>(a), extent(lda), static_cast<const double *>(b), extent(ldb),
                        *static_cast<const double *>(beta), static_cast<double *>(c), extent(ldc));
    }
    if (type_a == 0 && (compute == 68 || compute == 77)) {
        return multiply(op_a || op_b, extent(m), extent(n), extent(k), *static_cast<const float *>(alpha),
                        static_cast<const float *>(a), extent(lda), static_cast<const float *>(b), extent(ldb),
                        *static_cast<const float *>(beta), static_cast<float *>(c), extent(ldc));
    }
    return 15;  // not supported
}
}

// A stand-in for libcublas, as far as baselines call it: the same prototypes, naive products of host memory.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

int g_block = 0, g_devices = 0, g_alive = 0, g_mode = 0;

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
    *handle = &g_alive;
    return 0;
}

int cublasSetMathMode(void *handle, int mode) {
    g_mode = mode;
    return handle == &g_alive ? 0 : 7;
}

int cublasGemmEx(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int type_a,
                 int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc,
                 int compute, int algorithm) {
    // 16: parts of k are added up in the type that is computed in.
    if (handle != &g_alive || type_a != type_b || type_b != type_c || algorithm != -1 || g_mode != 16) return 7;
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

int cublasXtCreate(void **handle) {
    g_alive++;
    *handle = &g_block;
    return 0;
}

int cublasXtDestroy(void *handle) {
    g_alive--;
    return handle == &g_block ? 0 : 7;
}

int cublasXtDeviceSelect(void *handle, int count, int ordinals[]) {
    g_devices = 0;
    for (int i = 0; i < count; i++)
        g_devices |= 1 << ordinals[i];
    return handle == &g_block ? 0 : 7;
}

int cublasXtSetBlockDim(void *handle, int edge) {
    g_block = edge;
    return handle == &g_block ? 0 : 7;
}

int cublasXtDgemm(void *handle, int op_a, int op_b, std::size_t m, std::size_t n, std::size_t k, const double *alpha,
                  const double *a, std::size_t lda, const double *b, std::size_t ldb, const double *beta, double *c,
                  std::size_t ldc) {
    if (handle != &g_block || g_block == 0) return 7;
    return multiply(op_a || op_b, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc);
}

int cublasXtSgemm(void *handle, int op_a, int op_b, std::size_t m, std::size_t n, std::size_t k, const float *alpha,
                  const float *a, std::size_t lda, const float *b, std::size_t ldb, const float *beta, float *c,
                  std::size_t ldc) {
    if (handle != &g_block || g_block == 0) return 7;
    return multiply(op_a || op_b, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc);
}

// What tests look at.
int fake_block() { return g_block; }
int fake_devices() { return g_devices; }
int fake_alive() { return g_alive; }
}

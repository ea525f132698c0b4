// CUDA and cuBLAS as this project sees them: own declarations of the few types it needs, and tables of functions filled
// by dlopen. So no toolkit is needed to build. The declarations are checked against real headers by tests/dev.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace uncut::cuda {

// The version whose prototypes are declared here. The driver hands out, for each name, the newest
// prototype up to this version (cuGetProcAddress); a plain dlsym would give older ones.
inline constexpr int stated_version = 12000;

using Code = int;  // CUresult and cublasStatus_t: C enums, 0 is success
using Device = int;
using Address = std::uint64_t;
using Context = struct ContextTag *;
using Stream = struct StreamTag *;
using Event = struct EventTag *;
using Function = struct FunctionTag *;
using BlasHandle = struct BlasHandleTag *;  // goes for cublasLtHandle_t too, as the library allows
using LtProduct = struct LtProductTag *;    // cublasLtMatmulDesc_t
using LtLayout = struct LtLayoutTag *;      // cublasLtMatrixLayout_t
using LtPreference = struct LtPreferenceTag *;

enum : Code { success = 0, error_not_ready = 600 };
enum StreamFlag : unsigned { stream_non_blocking = 1 };
enum EventFlag : unsigned { event_default = 0, event_disable_timing = 2 };
enum HostAllocFlag : unsigned { host_alloc_portable = 1, host_alloc_device_map = 2 };
enum MemoryType : unsigned { memory_type_host = 1, memory_type_device = 2 };
enum DeviceAttribute : int {
    attribute_max_pitch = 11,
    attribute_multiprocessor_count = 16,
    attribute_can_flush_remote_writes = 98
};
enum PointerAttribute : int { attribute_range_start = 11 };
// By the first, (int32)(*address - value) >= 0 is awaited: cyclic.
enum WaitFlag : unsigned { wait_value_geq = 0, wait_value_flush = 1U << 30 };
enum MemOpKind : std::uint32_t { mem_op_wait_value_32 = 1, mem_op_write_value_32 = 2 };

struct Uuid {  // CUuuid
    char bytes[16];
};

struct Memcpy2D {  // CUDA_MEMCPY2D_v2
    std::size_t src_x_bytes, src_y;
    unsigned src_memory_type;
    const void *src_host;
    Address src_device;
    void *src_array;
    std::size_t src_pitch;
    std::size_t dst_x_bytes, dst_y;
    unsigned dst_memory_type;
    void *dst_host;
    Address dst_device;
    void *dst_array;
    std::size_t dst_pitch;
    std::size_t width_bytes, height;
};

struct Memcpy3D {  // CUDA_MEMCPY3D_v2
    std::size_t src_x_bytes, src_y, src_z, src_level;
    unsigned src_memory_type;
    const void *src_host;
    Address src_device;
    void *src_array, *reserved;
    std::size_t src_pitch, src_height;
    std::size_t dst_x_bytes, dst_y, dst_z, dst_level;
    unsigned dst_memory_type;
    void *dst_host;
    Address dst_device;
    void *dst_array, *reserved_too;
    std::size_t dst_pitch, dst_height;
    std::size_t width_bytes, height, depth;
};

union MemOp {  // CUstreamBatchMemOpParams; wait and write have the same members
    struct Value {
        std::uint32_t operation;
        Address address;
        union {
            std::uint32_t value;
            std::uint64_t value64;
        };
        unsigned flags;
        Address alias;
    } value;
    std::uint64_t pad[6];
};

struct LtAlgorithm {  // cublasLtMatmulAlgo_t
    std::uint64_t data[8];
};

struct LtProposal {  // cublasLtMatmulHeuristicResult_t
    LtAlgorithm algorithm;
    std::size_t workspace_bytes;
    Code state;
    float waves;
    int reserved[4];
};

enum LtProductAttribute : int {
    lt_product_op_a = 3,
    lt_product_op_b = 4,
    lt_product_epilogue = 7,
    lt_product_bias = 8
};
// Bits of an epilogue; the bias has an element for each row, of the type of D.
enum LtEpilogue : int { lt_epilogue_relu = 2, lt_epilogue_bias = 4, lt_epilogue_gelu = 32 };
enum LtWish : int {
    lt_wish_workspace_bytes = 1,
    lt_wish_reductions = 3,
    lt_wish_alignment_a = 5,
    lt_wish_alignment_b = 6,
    lt_wish_alignment_c = 7,
    lt_wish_alignment_d = 8
};
enum LtReduction : std::uint32_t { lt_reduction_in_compute_type = 2, lt_any_reduction = 7 };

enum BlasOp : int { blas_op_n = 0, blas_op_t = 1, blas_op_c = 2 };  // as OpCode
enum BlasPointerMode : int { blas_pointer_mode_host = 0 };
// By default cuBLAS adds up parts of k in the type of C, so that a half type is rounded several times.
enum BlasMathMode : int { blas_exact_reductions = 16 };
enum BlasCompute : int {
    blas_compute_32f = 68,
    blas_compute_64f = 70,
    blas_compute_32i = 72,
    blas_compute_32f_fast_tf32 = 77
};
enum BlasAlgorithm : int { blas_gemm_default = -1 };
enum DataType : int {
    type_r_32f = 0,
    type_r_64f = 1,
    type_r_16f = 2,
    type_r_8i = 3,
    type_c_32f = 4,
    type_c_64f = 5,
    type_r_32i = 10,
    type_r_16bf = 14,
    type_r_8f_e4m3 = 28,
    type_r_8f_e5m2 = 29
};

// Every driver function in use: X(name, version of the prototype, return type and parameters). The
// version is the newest up to `stated_version`.
#define UNCUT_DRIVER_FUNCTIONS(X)                                                                                      \
    X(cuInit, 2000, Code(unsigned))                                                                                    \
    X(cuGetErrorName, 6000, Code(Code, const char **))                                                                 \
    X(cuGetErrorString, 6000, Code(Code, const char **))                                                               \
    X(cuDeviceGet, 2000, Code(Device *, int))                                                                          \
    X(cuDeviceGetAttribute, 2000, Code(int *, int, Device))                                                            \
    X(cuDeviceGetUuid, 11040, Code(Uuid *, Device))                                                                    \
    X(cuDevicePrimaryCtxRetain, 7000, Code(Context *, Device))                                                         \
    X(cuDevicePrimaryCtxRelease, 11000, Code(Device))                                                                  \
    X(cuCtxGetCurrent, 4000, Code(Context *))                                                                          \
    X(cuCtxSetCurrent, 4000, Code(Context))                                                                            \
    X(cuCtxGetStreamPriorityRange, 5050, Code(int *, int *))                                                           \
    X(cuStreamCreate, 2000, Code(Stream *, unsigned))                                                                  \
    X(cuStreamCreateWithPriority, 5050, Code(Stream *, unsigned, int))                                                 \
    X(cuStreamDestroy, 4000, Code(Stream))                                                                             \
    X(cuStreamQuery, 2000, Code(Stream))                                                                               \
    X(cuStreamSynchronize, 2000, Code(Stream))                                                                         \
    X(cuStreamWaitEvent, 3020, Code(Stream, Event, unsigned))                                                          \
    X(cuStreamWriteValue32, 11070, Code(Stream, Address, std::uint32_t, unsigned))                                     \
    X(cuStreamBatchMemOp, 11070, Code(Stream, unsigned, MemOp *, unsigned))                                            \
    X(cuEventCreate, 2000, Code(Event *, unsigned))                                                                    \
    X(cuEventDestroy, 4000, Code(Event))                                                                               \
    X(cuEventRecord, 2000, Code(Event, Stream))                                                                        \
    X(cuEventQuery, 2000, Code(Event))                                                                                 \
    X(cuEventSynchronize, 2000, Code(Event))                                                                           \
    X(cuEventElapsedTime, 2000, Code(float *, Event, Event))                                                           \
    X(cuMemAlloc, 3020, Code(Address *, std::size_t))                                                                  \
    X(cuMemFree, 3020, Code(Address))                                                                                  \
    X(cuMemHostAlloc, 2020, Code(void **, std::size_t, unsigned))                                                      \
    X(cuMemFreeHost, 2000, Code(void *))                                                                               \
    X(cuMemHostGetDevicePointer, 3020, Code(Address *, void *, unsigned))                                              \
    X(cuMemsetD32Async, 3020, Code(Address, std::uint32_t, std::size_t, Stream))                                       \
    X(cuMemcpyAsync, 4000, Code(Address, Address, std::size_t, Stream))                                                \
    X(cuMemcpy2DAsync, 3020, Code(const Memcpy2D *, Stream))                                                           \
    X(cuMemcpy3DAsync, 3020, Code(const Memcpy3D *, Stream))                                                           \
    X(cuPointerGetAttribute, 4000, Code(void *, int, Address))                                                         \
    X(cuLaunchKernel, 4000,                                                                                            \
      Code(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void **, void **))

// Products of one triangle of a matrix: side, triangle (and op, diagonal), m, n, alpha, A, lda, B, ldb, ...
using BlasSymm = Code(BlasHandle, int, int, std::int64_t, std::int64_t, const void *, const void *, std::int64_t,
                      const void *, std::int64_t, const void *, void *, std::int64_t);
using BlasTrmm = Code(BlasHandle, int, int, int, int, std::int64_t, std::int64_t, const void *, const void *,
                      std::int64_t, const void *, std::int64_t, void *, std::int64_t);
#define UNCUT_BLAS_OF_FORMS(X, T) X(cublas##T##symm_v2_64, BlasSymm) X(cublas##T##trmm_v2_64, BlasTrmm)

// Every function of cuBLAS and of the cublasLt beneath it in use, by its 64-bit name where there is one.
#define UNCUT_BLAS_FUNCTIONS(X)                                                                                        \
    X(cublasCreate_v2, Code(BlasHandle *))                                                                             \
    X(cublasDestroy_v2, Code(BlasHandle))                                                                              \
    X(cublasGetStatusName, const char *(Code))                                                                         \
    X(cublasSetStream_v2, Code(BlasHandle, Stream))                                                                    \
    X(cublasSetWorkspace_v2, Code(BlasHandle, void *, std::size_t))                                                    \
    X(cublasSetPointerMode_v2, Code(BlasHandle, int))                                                                  \
    X(cublasSetMathMode, Code(BlasHandle, int))                                                                        \
    X(cublasDgemm_v2_64,                                                                                               \
      Code(BlasHandle, int, int, std::int64_t, std::int64_t, std::int64_t, const double *, const double *,             \
           std::int64_t, const double *, std::int64_t, const double *, double *, std::int64_t))                        \
    X(cublasSgemm_v2_64,                                                                                               \
      Code(BlasHandle, int, int, std::int64_t, std::int64_t, std::int64_t, const float *, const float *, std::int64_t, \
           const float *, std::int64_t, const float *, float *, std::int64_t))                                         \
    X(cublasGemmEx_64,                                                                                                 \
      Code(BlasHandle, int, int, std::int64_t, std::int64_t, std::int64_t, const void *, const void *, int,            \
           std::int64_t, const void *, int, std::int64_t, const void *, void *, int, std::int64_t, int, int))          \
    X(cublasGemmStridedBatchedEx_64,                                                                                   \
      Code(BlasHandle, int, int, std::int64_t, std::int64_t, std::int64_t, const void *, const void *, int,            \
           std::int64_t, long long, const void *, int, std::int64_t, long long, const void *, void *, int,             \
           std::int64_t, long long, std::int64_t, int, int))                                                           \
    X(cublasGemmBatchedEx_64, Code(BlasHandle, int, int, std::int64_t, std::int64_t, std::int64_t, const void *,       \
                                   const void *const *, int, std::int64_t, const void *const *, int, std::int64_t,     \
                                   const void *, void *const *, int, std::int64_t, std::int64_t, int, int))            \
    UNCUT_BLAS_OF_FORMS(X, S)                                                                                          \
    UNCUT_BLAS_OF_FORMS(X, D)                                                                                          \
    UNCUT_BLAS_OF_FORMS(X, C)                                                                                          \
    UNCUT_BLAS_OF_FORMS(X, Z)                                                                                          \
    X(cublasChemm_v2_64, BlasSymm)                                                                                     \
    X(cublasZhemm_v2_64, BlasSymm)                                                                                     \
    X(cublasLtMatmulDescCreate, Code(LtProduct *, int, int))                                                           \
    X(cublasLtMatmulDescDestroy, Code(LtProduct))                                                                      \
    X(cublasLtMatmulDescSetAttribute, Code(LtProduct, int, const void *, std::size_t))                                 \
    X(cublasLtMatrixLayoutCreate, Code(LtLayout *, int, std::uint64_t, std::uint64_t, std::int64_t))                   \
    X(cublasLtMatrixLayoutDestroy, Code(LtLayout))                                                                     \
    X(cublasLtMatmulPreferenceCreate, Code(LtPreference *))                                                            \
    X(cublasLtMatmulPreferenceDestroy, Code(LtPreference))                                                             \
    X(cublasLtMatmulPreferenceSetAttribute, Code(LtPreference, int, const void *, std::size_t))                        \
    X(cublasLtMatmulAlgoGetHeuristic,                                                                                  \
      Code(BlasHandle, LtProduct, LtLayout, LtLayout, LtLayout, LtLayout, LtPreference, int, LtProposal *, int *))     \
    X(cublasLtMatmul,                                                                                                  \
      Code(BlasHandle, LtProduct, const void *, const void *, LtLayout, const void *, LtLayout, const void *,          \
           const void *, LtLayout, void *, LtLayout, const LtAlgorithm *, void *, std::size_t, Stream))

namespace signature {
#define UNCUT_DECLARE(name, version, ...) using name##_t = __VA_ARGS__;
UNCUT_DRIVER_FUNCTIONS(UNCUT_DECLARE)
#undef UNCUT_DECLARE
#define UNCUT_DECLARE(name, ...) using name##_t = __VA_ARGS__;
UNCUT_BLAS_FUNCTIONS(UNCUT_DECLARE)
#undef UNCUT_DECLARE
}  // namespace signature

// A call that failed outside of a run; carries its code, if it has one, so that callers can tell out-of-memory.
class Failure : public std::runtime_error {
  public:
    explicit Failure(const std::string &text, Code code = -1) : std::runtime_error(text), code(code) {}
    Code code;
};

// The driver's functions. Loading never initialises CUDA.
class Driver {
  public:
    // Raises Failure with a sentence when the library or a function is missing, or too old.
    explicit Driver(const std::string &library);

#define UNCUT_MEMBER(name, ...) signature::name##_t *name = nullptr;
    UNCUT_DRIVER_FUNCTIONS(UNCUT_MEMBER)
#undef UNCUT_MEMBER

    std::string describe(const char *call, Code code) const;  // "cuX: CUDA_ERROR_Y (z), text"
    void check(const char *call, Code code) const;            // throws Failure unless success
    std::string uuid(int ordinal) const;                      // 16 bytes, zeros among them; initialises CUDA
};

// cuBLAS's functions.
class Blas {
  public:
    // `library` is a path or name for dlopen; empty takes the libcublas.so.* that the process has
    // loaded already.
    explicit Blas(const std::string &library);

#define UNCUT_MEMBER(name, ...) signature::name##_t *name = nullptr;
    UNCUT_BLAS_FUNCTIONS(UNCUT_MEMBER)
#undef UNCUT_MEMBER

    const std::string &path() const { return path_; }
    std::string describe(const char *call, Code code) const;
    void check(const char *call, Code code) const;

  private:
    std::string path_;
};

// Whether an error leaves the context unusable, so that nothing more can be issued or written.
bool is_sticky(Code code);

}  // namespace uncut::cuda

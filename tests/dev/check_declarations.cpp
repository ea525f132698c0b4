// Compiled, never run: the project's own CUDA declarations against the toolkit's headers.
#include "cuda_driver.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#ifdef CHECK_CUBLAS
#include <cublasLt.h>
#include <cublas_v2.h>
#endif

#include <cstddef>
#include <type_traits>

namespace own = uncut::cuda;

// Two types pass alike in a call: both pointers, or integers or enums of one size.
template <typename A, typename B>
constexpr bool alike() {
    if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>)
        return std::is_pointer_v<A> && std::is_pointer_v<B>;
    else if constexpr (std::is_void_v<A> || std::is_void_v<B>)
        return std::is_void_v<A> && std::is_void_v<B>;
    else
        return std::is_floating_point_v<A> == std::is_floating_point_v<B> && sizeof(A) == sizeof(B);
}

template <typename A, typename B>
struct Compatible : std::false_type {};
template <typename RA, typename... A, typename RB, typename... B>
struct Compatible<RA(A...), RB(B...)> {
    static constexpr bool check() {
        if constexpr (sizeof...(A) != sizeof...(B))
            return false;
        else
            return alike<RA, RB>() && (alike<A, B>() && ...);
    }
    static constexpr bool value = check();
};

// ## keeps the header's renaming macros off our names.
#define CHECK_DRIVER(name, version, ...)                                                                               \
    static_assert(Compatible<own::signature::name##_t, std::remove_pointer_t<PFN_##name##_v##version>>::value, #name);
UNCUT_DRIVER_FUNCTIONS(CHECK_DRIVER)
#ifdef CHECK_CUBLAS
#define CHECK_BLAS(name, ...)                                                                                          \
    static_assert(Compatible<own::signature::name##_t, std::remove_reference_t<decltype(::name)>>::value, #name);
UNCUT_BLAS_FUNCTIONS(CHECK_BLAS)
static_assert(own::blas_op_n == CUBLAS_OP_N && own::blas_op_t == CUBLAS_OP_T && own::blas_op_c == CUBLAS_OP_C);
static_assert(own::blas_pointer_mode_host == CUBLAS_POINTER_MODE_HOST);
static_assert(own::blas_exact_reductions == CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
static_assert(own::blas_compute_32f == CUBLAS_COMPUTE_32F && own::blas_compute_64f == CUBLAS_COMPUTE_64F);
static_assert(own::blas_compute_32i == CUBLAS_COMPUTE_32I);
static_assert(own::type_r_8i == CUDA_R_8I && own::type_r_32i == CUDA_R_32I);
static_assert(own::type_r_8f_e4m3 == CUDA_R_8F_E4M3 && own::type_r_8f_e5m2 == CUDA_R_8F_E5M2);
static_assert(own::blas_compute_32f_fast_tf32 == CUBLAS_COMPUTE_32F_FAST_TF32);
static_assert(own::blas_gemm_default == CUBLAS_GEMM_DEFAULT);
static_assert(own::lt_product_op_a == CUBLASLT_MATMUL_DESC_TRANSA &&
              own::lt_product_op_b == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(own::lt_wish_workspace_bytes == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(own::lt_wish_alignment_a == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(own::lt_wish_alignment_b == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
static_assert(own::lt_wish_alignment_c == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
static_assert(own::lt_wish_alignment_d == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(own::lt_wish_reductions == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
static_assert(own::lt_reduction_in_compute_type == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
static_assert(own::lt_any_reduction == CUBLASLT_REDUCTION_SCHEME_MASK);
static_assert(sizeof(own::LtAlgorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(own::LtProposal) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(own::LtProposal, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(own::LtProposal, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(own::type_r_32f == CUDA_R_32F && own::type_r_16f == CUDA_R_16F && own::type_r_16bf == CUDA_R_16BF);
static_assert(own::type_c_32f == CUDA_C_32F && own::type_c_64f == CUDA_C_64F);
#endif

#define SAME_PLACE(our_type, ours, their_type, theirs)                                                                 \
    static_assert(offsetof(own::our_type, ours) == offsetof(their_type, theirs), #theirs);                             \
    static_assert(sizeof(own::our_type::ours) == sizeof(their_type::theirs), #theirs)
#define SAME_IN_BOTH(ours, theirs)                                                                                     \
    SAME_PLACE(Memcpy2D, ours, CUDA_MEMCPY2D, theirs);                                                                 \
    SAME_PLACE(Memcpy3D, ours, CUDA_MEMCPY3D, theirs)
static_assert(sizeof(own::Uuid) == sizeof(CUuuid) && sizeof(own::Uuid::bytes) == sizeof(CUuuid::bytes));
static_assert(sizeof(own::Memcpy2D) == sizeof(CUDA_MEMCPY2D) && sizeof(own::Memcpy3D) == sizeof(CUDA_MEMCPY3D));
SAME_IN_BOTH(src_x_bytes, srcXInBytes);
SAME_IN_BOTH(src_y, srcY);
SAME_IN_BOTH(src_memory_type, srcMemoryType);
SAME_IN_BOTH(src_host, srcHost);
SAME_IN_BOTH(src_device, srcDevice);
SAME_IN_BOTH(src_array, srcArray);
SAME_IN_BOTH(src_pitch, srcPitch);
SAME_IN_BOTH(dst_x_bytes, dstXInBytes);
SAME_IN_BOTH(dst_y, dstY);
SAME_IN_BOTH(dst_memory_type, dstMemoryType);
SAME_IN_BOTH(dst_host, dstHost);
SAME_IN_BOTH(dst_device, dstDevice);
SAME_IN_BOTH(dst_array, dstArray);
SAME_IN_BOTH(dst_pitch, dstPitch);
SAME_IN_BOTH(width_bytes, WidthInBytes);
SAME_IN_BOTH(height, Height);
SAME_PLACE(Memcpy3D, src_z, CUDA_MEMCPY3D, srcZ);
SAME_PLACE(Memcpy3D, src_level, CUDA_MEMCPY3D, srcLOD);
SAME_PLACE(Memcpy3D, reserved, CUDA_MEMCPY3D, reserved0);
SAME_PLACE(Memcpy3D, src_height, CUDA_MEMCPY3D, srcHeight);
SAME_PLACE(Memcpy3D, dst_z, CUDA_MEMCPY3D, dstZ);
SAME_PLACE(Memcpy3D, dst_level, CUDA_MEMCPY3D, dstLOD);
SAME_PLACE(Memcpy3D, reserved_too, CUDA_MEMCPY3D, reserved1);
SAME_PLACE(Memcpy3D, dst_height, CUDA_MEMCPY3D, dstHeight);
SAME_PLACE(Memcpy3D, depth, CUDA_MEMCPY3D, Depth);

using OurValue = own::MemOp::Value;
using Wait = decltype(CUstreamBatchMemOpParams::waitValue);
using Write = decltype(CUstreamBatchMemOpParams::writeValue);
static_assert(sizeof(own::MemOp) == sizeof(CUstreamBatchMemOpParams));
static_assert(offsetof(OurValue, address) == offsetof(Wait, address));
static_assert(offsetof(OurValue, value) == offsetof(Wait, value) && sizeof(OurValue::value) == sizeof(Wait::value));
static_assert(offsetof(OurValue, flags) == offsetof(Wait, flags));
static_assert(offsetof(OurValue, address) == offsetof(Write, address));
static_assert(offsetof(OurValue, value) == offsetof(Write, value));
static_assert(offsetof(OurValue, flags) == offsetof(Write, flags));

static_assert(sizeof(own::Address) == sizeof(CUdeviceptr) && sizeof(own::Device) == sizeof(CUdevice));
static_assert(own::success == CUDA_SUCCESS && own::error_not_ready == CUDA_ERROR_NOT_READY);
static_assert(own::stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(own::event_disable_timing == CU_EVENT_DISABLE_TIMING);
static_assert(own::host_alloc_portable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(own::host_alloc_device_map == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(own::memory_type_host == CU_MEMORYTYPE_HOST && own::memory_type_device == CU_MEMORYTYPE_DEVICE);
static_assert(own::attribute_max_pitch == CU_DEVICE_ATTRIBUTE_MAX_PITCH);
static_assert(own::attribute_range_start == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
static_assert(own::attribute_multiprocessor_count == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(own::attribute_can_flush_remote_writes == CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES);
static_assert(own::wait_value_geq == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(own::wait_value_flush == CU_STREAM_WAIT_VALUE_FLUSH);
static_assert(own::mem_op_wait_value_32 == CU_STREAM_MEM_OP_WAIT_VALUE_32);
static_assert(own::mem_op_write_value_32 == CU_STREAM_MEM_OP_WRITE_VALUE_32);

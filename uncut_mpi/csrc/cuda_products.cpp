#include "cuda_products.hpp"

#include <algorithm>
#include <utility>

namespace uncut::cuda {
namespace {

constexpr int most_proposals = 16;
constexpr Code not_supported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED

// Rows of the largest square that is no gemm: of the library's own products what is fastest for 4096 rows on an H200.
constexpr std::int64_t block_of(int kind, int dtype) { return kind == inverse ? most_solved(dtype) : 512; }

int type_of(int dtype) {
    switch (dtype) {
        case dtype_f64: return type_r_64f;
        case dtype_f16: return type_r_16f;
        case dtype_bf16: return type_r_16bf;
        case dtype_c64: return type_c_32f;
        case dtype_c128: return type_c_64f;
        case dtype_i8: return type_r_8i;
        case dtype_i32: return type_r_32i;
        case dtype_e4m3: return type_r_8f_e4m3;
        case dtype_e5m2: return type_r_8f_e5m2;
        default: return type_r_32f;
    }
}

int compute_of(int dtype) {
    if (dtype == dtype_tf32) return blas_compute_32f_fast_tf32;
    if (dtype == dtype_i8) return blas_compute_32i;
    return dtype == dtype_f64 || dtype == dtype_c128 ? blas_compute_64f : blas_compute_32f;
}

}  // namespace

bool is_tunable(int dtype) { return dtype != dtype_f64 && !is_complex(dtype) && !is_narrow(dtype); }

bool is_narrow(int dtype) { return bytes_of(dtype) == 1; }

// What the manual says of cublasLtMatmul with float8 on Ada and Hopper. cublasGemmEx was tried on an H200 with every op
// and 13 lengths each of m, n and k. Other products of i8 it has for some shapes alone, at a tenth of the rate.
bool takes(const ProductShape &shape) {
    const std::int64_t step = shape.dtype == dtype_i8 ? 4 : alignment_bytes;  // of addresses, too
    const auto fits = [step](std::int64_t extent) { return extent % step == 0; };
    if (shape.op_a != blas_op_t || shape.op_b != blas_op_n || !fits(shape.alignment_a) || !fits(shape.alignment_b) ||
        !fits(shape.lda) || !fits(shape.ldb) || !fits(shape.k))
        return false;
    return shape.dtype == dtype_i8 ||
           (fits(shape.m) && fits(shape.alignment_c) && fits(shape.ldc * bytes_of(shape.dtype_c)) &&
            !(shape.dtype == dtype_e5m2 && shape.dtype_b == dtype_e5m2));
}

int widened(const ProductShape &shape) { return shape.dtype_c == dtype_f16 ? dtype_f16 : dtype_bf16; }

std::size_t ProductShape::bytes_of_c() const { return static_cast<std::size_t>(ldc * n * bytes_of(dtype_c)); }

std::uint32_t alignment_of(Address address) {
    const Address lowest = address & (~address + 1);
    return static_cast<std::uint32_t>(lowest == 0 ? 256 : std::min<Address>(lowest, 256));
}

Called usual_product(const Blas &blas, BlasHandle handle, const ProductShape &shape, const void *alpha, Address a,
                     Address b, const void *beta, Address c) {
    const auto real = [&]<typename Real>(const auto &product, Real) {
        return product(handle, shape.op_a, shape.op_b, shape.m, shape.n, shape.k, static_cast<const Real *>(alpha),
                       reinterpret_cast<const Real *>(a), shape.lda, reinterpret_cast<const Real *>(b), shape.ldb,
                       static_cast<const Real *>(beta), reinterpret_cast<Real *>(c), shape.ldc);
    };
    if (shape.dtype == dtype_f64) return {"cublasDgemm_v2_64", real(blas.cublasDgemm_v2_64, double{})};
    if (shape.dtype == dtype_f32) return {"cublasSgemm_v2_64", real(blas.cublasSgemm_v2_64, float{})};
    const int type = type_of(shape.dtype);
    return {"cublasGemmEx_64",
            blas.cublasGemmEx_64(handle, shape.op_a, shape.op_b, shape.m, shape.n, shape.k, alpha,
                                 reinterpret_cast<const void *>(a), type, shape.lda, reinterpret_cast<const void *>(b),
                                 type, shape.ldb, beta, reinterpret_cast<void *>(c), type_of(shape.dtype_c), shape.ldc,
                                 compute_of(shape.dtype), blas_gemm_default)};
}

namespace {

// One by the library, which has none by tensor cores: a third of gemm's rate on an H200 in f64.
Called product_of_block(const Blas &blas, BlasHandle handle, const FormHelper &helper, const ProductShape &shape,
                        int form, bool right, const void *alpha, Address a, Address b, const void *beta, Address c) {
    if (right) std::swap(a, b);
    const auto *own = reinterpret_cast<const void *>(a);
    const std::int64_t ld = right ? shape.ldb : shape.lda, ld_other = right ? shape.lda : shape.ldb;
    const int side = right, upper = (form & form_upper) != 0, unit = (form & form_unit) != 0;
    const int op = right ? shape.op_b : shape.op_a, kind = kind_of_form(form);
    const auto of_type = [&](auto f32, auto f64, auto c64, auto c128) {
        return shape.dtype == dtype_f32 ? f32 : shape.dtype == dtype_f64 ? f64 : shape.dtype == dtype_c64 ? c64 : c128;
    };
    if (kind == triangular) {
        const auto call =
            of_type(blas.cublasStrmm_v2_64, blas.cublasDtrmm_v2_64, blas.cublasCtrmm_v2_64, blas.cublasZtrmm_v2_64);
        const auto multiply = [&](std::int64_t m, std::int64_t n, Address from, std::int64_t ld_from, Address to) {
            return Called{"cublas?trmm_v2_64",
                          call(handle, side, upper, op, unit, m, n, alpha, own, ld,
                               reinterpret_cast<const void *>(from), ld_from, reinterpret_cast<void *>(to), shape.ldc)};
        };
        const std::int64_t bytes = bytes_of(shape.dtype), extent = right ? shape.n : shape.m,
                           others = right ? shape.m : shape.n, most = helper.memory_bytes() / (bytes * extent);
        if (most == 0) return multiply(shape.m, shape.n, b, ld_other, c);
        // In place the library takes up to ten times as long as from a copy of B (docs/performance.md, 2026-11-30).
        for (std::int64_t first = 0; first < others; first += most) {
            const std::int64_t count = std::min(most, others - first), m = right ? count : extent,
                               n = right ? extent : count;
            const Address at = c + static_cast<Address>(first * bytes * (right ? 1 : shape.ldc));
            Called made = helper.copy(at, shape.ldc * bytes, m * bytes, n);
            if (made.code == success) made = multiply(m, n, helper.memory(), m, at);
            if (made.code != success) return made;
        }
        return {"", success};
    }
    const auto *other = reinterpret_cast<const void *>(b);
    auto *written = reinterpret_cast<void *>(c);
    const bool conjugates = kind == hermitian && is_complex(shape.dtype);
    const auto call =
        conjugates
            ? of_type(blas.cublasChemm_v2_64, blas.cublasChemm_v2_64, blas.cublasChemm_v2_64, blas.cublasZhemm_v2_64)
            : of_type(blas.cublasSsymm_v2_64, blas.cublasDsymm_v2_64, blas.cublasCsymm_v2_64, blas.cublasZsymm_v2_64);
    return {conjugates ? "cublas?hemm_v2_64" : "cublas?symm_v2_64",
            call(handle, side, upper, shape.m, shape.n, alpha, own, ld, other, ld_other, beta, written, shape.ldc)};
}

// 1 or -1 as the library takes a factor of a type.
const void *whole_factor(int dtype, bool positive) {
    static const double wide[][2] = {{-1, 0}, {1, 0}};
    static const float narrow[][2] = {{-1, 0}, {1, 0}};
    if (dtype == dtype_f64 || dtype == dtype_c128) return wide[positive];
    return narrow[positive];
}

}  // namespace

Called product_of_form(const Blas &blas, BlasHandle handle, const FormHelper &helper, const ProductShape &shape,
                       int form, bool right, const void *alpha, Address a, Address b, const void *beta, Address c) {
    const std::int64_t extent = right ? shape.n : shape.m, block = block_of(kind_of_form(form), shape.dtype),
                       half = (extent / 2 + block - 1) / block * block;
    if (extent <= block && kind_of_form(form) == inverse)
        return helper.solve(shape, form, right, alpha, right ? b : a, c);
    if (extent <= block) return product_of_block(blas, handle, helper, shape, form, right, alpha, a, b, beta, c);
    const Address own = right ? b : a, other = right ? a : b;
    const std::int64_t ld = right ? shape.ldb : shape.lda, ld_other = right ? shape.lda : shape.ldb;
    const int op = right ? shape.op_b : shape.op_a, kind = kind_of_form(form);
    const std::int64_t starts[] = {0, half}, extents[] = {half, extent - half};
    const bool lower = (form & form_upper) == 0;
    const auto moved = [&](Address from, std::int64_t elements) {
        return from + static_cast<Address>(elements * bytes_of(shape.dtype));
    };
    const auto part = [&](Address from, std::int64_t its_ld, int which) {
        return moved(from, starts[which] * (right ? its_ld : 1));
    };
    const Address beside = moved(own, lower ? half : half * ld);  // the stored block that is not on the diagonal
    const void *one = whole_factor(shape.dtype, true);
    Called last{"", success};
    const auto diagonal = [&](int which, const void *factor) {
        if (last.code != success) return;
        ProductShape its = shape;
        (right ? its.n : its.m) = its.k = extents[which];
        const Address square = moved(own, starts[which] * (ld + 1)), from = part(other, ld_other, which);
        last = product_of_form(blas, handle, helper, its, form, right, factor, right ? from : square,
                               right ? square : from, beta, part(c, shape.ldc, which));
    };
    // C of one half := factor op(block) times the other half of B, or of C, + keep times itself.
    const auto across = [&](int to, int op_of_block, const void *factor, const void *keep, bool of_c) {
        if (last.code != success) return;
        ProductShape its = shape;
        (right ? its.n : its.m) = extents[to];
        its.k = extents[1 - to];
        (right ? its.op_b : its.op_a) = op_of_block;
        const Address from = of_c ? part(c, shape.ldc, 1 - to) : part(other, ld_other, 1 - to);
        (right ? its.lda : its.ldb) = of_c ? shape.ldc : ld_other;
        last = usual_product(blas, handle, its, factor, right ? from : beside, right ? beside : from, keep,
                             part(c, shape.ldc, to));
    };
    if (kind == triangular || kind == inverse) {
        const int to = (lower == (op == blas_op_n)) != right, from = 1 - to;  // which half of C has both of B
        diagonal(kind == inverse ? from : to, alpha);
        across(to, op, kind == inverse ? whole_factor(shape.dtype, false) : alpha, kind == inverse ? alpha : one,
               kind == inverse);
        diagonal(kind == inverse ? to : from, kind == inverse ? one : alpha);
        return last;
    }
    for (const int which : {0, 1}) {
        diagonal(which, alpha);
    }
    for (const int to : {0, 1}) {
        const bool stored = (to == 1) == (lower != right);  // or it is beyond the diagonal
        across(to, stored ? blas_op_n : kind == hermitian ? blas_op_c : blas_op_t, alpha, one, false);
    }
    return last;
}

Called bundled_product(const Blas &blas, BlasHandle handle, const ProductShape &shape, const void *alpha,
                       const void *beta, const Bundle &bundle) {
    const int type = type_of(shape.dtype), type_c = type_of(shape.dtype_c), compute = compute_of(shape.dtype);
    if (bundle.strided)
        return {
            "cublasGemmStridedBatchedEx_64",
            blas.cublasGemmStridedBatchedEx_64(handle, shape.op_a, shape.op_b, shape.m, shape.n, shape.k, alpha,
                                               reinterpret_cast<const void *>(bundle.a), type, shape.lda, bundle.step_a,
                                               reinterpret_cast<const void *>(bundle.b), type, shape.ldb, bundle.step_b,
                                               beta, reinterpret_cast<void *>(bundle.c), type_c, shape.ldc,
                                               bundle.step_c, bundle.count, compute, blas_gemm_default)};
    return {"cublasGemmBatchedEx_64",
            blas.cublasGemmBatchedEx_64(handle, shape.op_a, shape.op_b, shape.m, shape.n, shape.k, alpha,
                                        reinterpret_cast<const void *const *>(bundle.a), type, shape.lda,
                                        reinterpret_cast<const void *const *>(bundle.b), type, shape.ldb, beta,
                                        reinterpret_cast<void *const *>(bundle.c), type_c, shape.ldc, bundle.count,
                                        compute, blas_gemm_default)};
}

TunedProduct::TunedProduct(const Blas &blas, BlasHandle handle, const ProductShape &shape, std::size_t workspace_bytes)
    : blas_(blas),
      workspace_bytes_(workspace_bytes),
      product_(nullptr, blas.cublasLtMatmulDescDestroy),
      a_(nullptr, blas.cublasLtMatrixLayoutDestroy),
      b_(nullptr, blas.cublasLtMatrixLayoutDestroy),
      c_(nullptr, blas.cublasLtMatrixLayoutDestroy) {
    const auto layout = [&](Owned<LtLayout> &kept, int dtype, int op, std::int64_t rows, std::int64_t cols,
                            std::int64_t ld) {
        if (op != blas_op_n) std::swap(rows, cols);
        LtLayout made = nullptr;
        blas_.check("cublasLtMatrixLayoutCreate",
                    blas_.cublasLtMatrixLayoutCreate(&made, type_of(dtype), static_cast<std::uint64_t>(rows),
                                                     static_cast<std::uint64_t>(cols), ld));
        kept.reset(made);
    };
    LtProduct product = nullptr;
    blas_.check("cublasLtMatmulDescCreate",
                blas_.cublasLtMatmulDescCreate(&product, compute_of(shape.dtype), type_r_32f));
    product_.reset(product);
    const auto set = [&](int attribute, const auto &value) {
        blas_.check("cublasLtMatmulDescSetAttribute",
                    blas_.cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value));
    };
    set(lt_product_op_a, shape.op_a);
    set(lt_product_op_b, shape.op_b);
    if (shape.epilogue != 0) set(lt_product_epilogue, shape.epilogue);
    has_bias_ = (shape.epilogue & lt_epilogue_bias) != 0;
    layout(a_, shape.dtype, shape.op_a, shape.m, shape.k, shape.lda);
    layout(b_, shape.dtype_b, shape.op_b, shape.k, shape.n, shape.ldb);
    layout(c_, shape.dtype_c, blas_op_n, shape.m, shape.n, shape.ldc);
    LtPreference wishes = nullptr;
    blas_.check("cublasLtMatmulPreferenceCreate", blas_.cublasLtMatmulPreferenceCreate(&wishes));
    const Owned<LtPreference> kept(wishes, blas_.cublasLtMatmulPreferenceDestroy);
    const auto wish = [&](int attribute, const auto &value) {
        blas_.check("cublasLtMatmulPreferenceSetAttribute",
                    blas_.cublasLtMatmulPreferenceSetAttribute(wishes, attribute, &value, sizeof value));
    };
    wish(lt_wish_workspace_bytes, workspace_bytes_);
    // Parts of k may not be added up in a narrower type.
    wish(lt_wish_reductions, sums_wider(shape.dtype_c) ? lt_reduction_in_compute_type : lt_any_reduction);
    wish(lt_wish_alignment_a, shape.alignment_a);
    wish(lt_wish_alignment_b, shape.alignment_b);
    wish(lt_wish_alignment_c, shape.alignment_c);
    wish(lt_wish_alignment_d, shape.alignment_c);
    proposals_.resize(most_proposals);
    int count = 0;
    const Code code = blas_.cublasLtMatmulAlgoGetHeuristic(handle, product, a_.get(), b_.get(), c_.get(), c_.get(),
                                                           wishes, most_proposals, proposals_.data(), &count);
    if (code != not_supported) blas_.check("cublasLtMatmulAlgoGetHeuristic", code);
    proposals_.resize(code == success ? static_cast<std::size_t>(count) : 0);
    std::erase_if(proposals_, [](const LtProposal &one) { return one.state != success; });
}

Code TunedProduct::run(BlasHandle handle, const float *alpha, Address a, Address b, const float *beta, Address c,
                       Address bias, Address workspace, Stream stream) const {
    if (has_bias_)
        if (const Code code = blas_.cublasLtMatmulDescSetAttribute(product_.get(), lt_product_bias, &bias, sizeof bias);
            code != success)
            return code;
    return blas_.cublasLtMatmul(handle, product_.get(), alpha, reinterpret_cast<const void *>(a), a_.get(),
                                reinterpret_cast<const void *>(b), b_.get(), beta, reinterpret_cast<const void *>(c),
                                c_.get(), reinterpret_cast<void *>(c), c_.get(), &taken_,
                                reinterpret_cast<void *>(workspace), workspace_bytes_, stream);
}

}  // namespace uncut::cuda

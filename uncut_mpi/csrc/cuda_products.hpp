// Products of half types summed in float32 by an algorithm that is named beforehand: cuBLAS chooses one by the shapes
// alone, and its choice for products that read and write C takes up to a third longer than others that it has
// (docs/performance.md, 2026-11-22).
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_driver.hpp"

namespace uncut::cuda {

// A family of kernels, of which the library proposes one that suits a shape.
struct Algorithm {
    int number = 0;  // CUBLASLT_ALGO_CONFIG_ID
    int option = 0;  // CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION
    auto operator<=>(const Algorithm &) const = default;
};

// All that the library looks at when it proposes algorithms.
struct ProductShape {
    int type = 0;  // of A and B; C is float32
    int op_a = 0, op_b = 0;
    std::int64_t m = 0, n = 0, k = 0;
    std::int64_t lda = 0, ldb = 0, ldc = 0;
    std::uint32_t alignment_a = 0, alignment_b = 0, alignment_c = 0;  // bytes, at most 256
    auto operator<=>(const ProductShape &) const = default;
};

std::uint32_t alignment_of(Address address);

// One shape's descriptions, and what the library proposes for it.
class TunedProduct {
  public:
    TunedProduct(const Blas &blas, BlasHandle handle, const ProductShape &shape, std::size_t workspace_bytes);
    ~TunedProduct();
    TunedProduct(const TunedProduct &) = delete;
    TunedProduct &operator=(const TunedProduct &) = delete;

    // Without repetitions, in the library's order; none where it has none.
    std::vector<Algorithm> proposals() const;
    // Take the first proposal of a family and forget the others; false if there is none.
    bool take(Algorithm wanted);
    // C := alpha op(A) op(B) + beta C with what was taken, factors in host memory.
    Code run(BlasHandle handle, const float *alpha, Address a, Address b, const float *beta, Address c,
             Address workspace, Stream stream) const;

  private:
    void release();
    Algorithm family(const LtAlgorithm &algorithm) const;

    const Blas &blas_;
    std::size_t workspace_bytes_;
    LtProduct product_ = nullptr;
    LtLayout a_ = nullptr, b_ = nullptr, c_ = nullptr;
    std::vector<LtProposal> proposals_;
    LtAlgorithm taken_{};
};

}  // namespace uncut::cuda

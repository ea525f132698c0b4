// Products whose kernel is chosen by its time. cuBLAS chooses by the shape alone, and what it chooses takes up to a
// third longer than another that it has (docs/performance.md, 2026-11-22 and 23).
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "cuda_driver.hpp"
#include "records.hpp"

namespace uncut::cuda {

// Whether products of a type are worth it: the library's choice for f64 is within 1 % of the best in the mean. Complex
// ones were not looked at.
bool is_tunable(int dtype);

// Types of one byte, of which the library takes products in some places and ops alone (`takes`). Elsewhere it gets
// copies of A and B.
bool is_narrow(int dtype);

// All that the library looks at when it chooses.
struct ProductShape {
    int dtype = 0, dtype_b = 0, dtype_c = 0;
    int op_a = 0, op_b = 0;
    std::int64_t m = 0, n = 0, k = 0;
    std::int64_t lda = 0, ldb = 0, ldc = 0;
    std::uint32_t alignment_a = 0, alignment_b = 0, alignment_c = 0;  // bytes, at most 256; of C and its bias
    int epilogue = 0;                                                 // `LtEpilogue`
    auto operator<=>(const ProductShape &) const = default;

    double operations() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
    std::size_t bytes_of_c() const;
};

std::uint32_t alignment_of(Address address);

// Whether the library may have a product of a narrow type: of i8 `usual_product`, of float8 one that it proposes.
bool takes(const ProductShape &shape);
// A type that holds all numbers of both float8 types, for copies where the library has no product of these.
int widened(const ProductShape &shape);

struct Called {
    const char *name;
    Code code;
    bool blas = true;  // whose the code is: the library's, or the driver's
};

// C := alpha op(A) op(B) + beta C by the library's choice; factors in host memory, of the type that sums.
Called usual_product(const Blas &blas, BlasHandle handle, const ProductShape &shape, const void *alpha, Address a,
                     Address b, const void *beta, Address c);

// What products of forms need besides the library.
class FormHelper {
  public:
    virtual ~FormHelper() = default;
    // B := alpha inverse(op(A)) B, or on the right alpha B inverse(op(A)), for a triangle of `most_solved` rows or
    // fewer.
    virtual Called solve(const ProductShape &shape, int form, bool right, const void *alpha, Address a,
                         Address b) const = 0;
    // Memory for copies, and a copy to it of lines of so many bytes, whose beginnings are `pitch` bytes apart.
    virtual Address memory() const = 0;
    virtual std::int64_t memory_bytes() const = 0;
    virtual Called copy(Address from, std::int64_t pitch, std::int64_t width, std::int64_t lines) const = 0;
};
// Rows that a thread of it has in registers.
constexpr std::int64_t most_solved(int dtype) { return dtype == dtype_c128 ? 32 : 64; }
// Bits that say which triangle it is of and how.
enum Solving : std::int64_t {
    solves_right = 1,       // vectors are rows of B
    solves_last_first = 2,  // from the last element of each on
    solves_transposed = 4,  // with the stored matrix transposed
    solves_conjugated = 8,
    solves_unit = 16
};

// C := alpha op(A) op(B) + beta C where A has a form (`FormKind`, with its bits), or on the right B. Of triangular
// matrices beta is 0; where one stands for its inverse, C holds the other operand.
Called product_of_form(const Blas &blas, BlasHandle handle, const FormHelper &helper, const ProductShape &shape,
                       int form, bool right, const void *alpha, Address a, Address b, const void *beta, Address c);

// Products of one shape. Those of A, B and C follow one another at steps of so many elements, or tables in the device's
// memory say where they are.
struct Bundle {
    std::int64_t count = 0;
    bool strided = false;
    Address a = 0, b = 0, c = 0;  // the first, or where the table begins
    std::int64_t step_a = 0, step_b = 0, step_c = 0;
    std::size_t behind = 0;  // steps of its products that follow its own at once
};

// The same for each product of a bundle.
Called bundled_product(const Blas &blas, BlasHandle handle, const ProductShape &shape, const void *alpha,
                       const void *beta, const Bundle &bundle);

// One shape's descriptions, and what the library proposes for it.
class TunedProduct {
  public:
    TunedProduct(const Blas &blas, BlasHandle handle, const ProductShape &shape, std::size_t workspace_bytes);

    std::size_t num_proposals() const { return proposals_.size(); }
    // Take a proposal from now on.
    void take(std::size_t number) { taken_ = proposals_.at(number).algorithm; }
    // C := alpha op(A) op(B) + beta C with what was taken, factors in host memory; or what its epilogue makes of it.
    Code run(BlasHandle handle, const float *alpha, Address a, Address b, const float *beta, Address c, Address bias,
             Address workspace, Stream stream) const;

  private:
    // What the library has made, and the call that ends it.
    template <typename Made>
    using Owned = std::unique_ptr<std::remove_pointer_t<Made>, Code (*)(Made)>;

    const Blas &blas_;
    std::size_t workspace_bytes_;
    bool has_bias_ = false;
    Owned<LtProduct> product_;
    Owned<LtLayout> a_, b_, c_;
    std::vector<LtProposal> proposals_;
    LtAlgorithm taken_{};
};

}  // namespace uncut::cuda

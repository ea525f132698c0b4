// Makes one call of several products of a lane.
#include <algorithm>
#include <array>
#include <iterator>
#include <span>

#include "cuda_executor_build.hpp"

namespace uncut::cuda {
namespace {

constexpr std::size_t most_bundled_bytes = std::size_t{256} << 20;  // of C

// Kernels of narrow types take no columns that begin elsewhere, of which the library cannot see all.
bool is_aligned(const ProductShape &shape) {
    if (!is_tunable(shape.dtype) || shape.dtype == dtype_f32) return true;
    return std::min({shape.alignment_a, shape.alignment_b, shape.alignment_c}) >= alignment_bytes;
}

bool same_call(ProductShape one, ProductShape other) {
    one.alignment_a = one.alignment_b = one.alignment_c = 0;
    other.alignment_a = other.alignment_b = other.alignment_c = 0;
    return one == other;
}

}  // namespace

// Whether a product may be made with those before it: none writes where another one does.
bool Executor::may_join(const Lane &lane, const Gemm &gemm) const {
    if (lane.bundle.empty()) return false;
    const Gemm &first = gemms_[lane.bundle.front()];
    if (!same_call(first.shape, gemm.shape) || first.factor_product != gemm.factor_product ||
        first.factor_c != gemm.factor_c || !may_be_bundled(gemm.shape.operations(), lane.bundled_operations))
        return false;
    // A bundle is called once beforehand, into memory of its own.
    if (gemm.c > first.c && gemm.c - first.c + gemm.shape.bytes_of_c() > most_bundled_bytes) return false;
    const auto behind = lane.bundled_c.lower_bound(gemm.c);
    return (behind == lane.bundled_c.end() || behind->first >= gemm.c + gemm.shape.bytes_of_c()) &&
           (behind == lane.bundled_c.begin() || std::prev(behind)->second <= gemm.c);
}

// The product that was added last.
void Executor::add_to_bundle(Lane &lane) {
    Gemm &gemm = gemms_.back();
    if (is_narrow(gemm.shape.dtype) || gemm.form != no_form || gemm.shape.epilogue != 0) return end_bundle(lane);
    const double operations = gemm.shape.operations();
    gemm.bundled = is_aligned(gemm.shape) && may_join(lane, gemm);
    if (!gemm.bundled) {
        end_bundle(lane);
        if (!is_aligned(gemm.shape) || !may_be_bundled(operations)) return;
    }
    lane.bundle.push_back(static_cast<std::uint32_t>(gemms_.size() - 1));
    lane.bundled_operations += operations;
    lane.bundled_c.emplace(gemm.c, gemm.c + gemm.shape.bytes_of_c());
}

void Executor::end_bundle(Lane &lane) {
    if (lane.bundle.size() > 1) {
        Gemm &first = gemms_[lane.bundle.front()];
        first.bundle = static_cast<std::int32_t>(bundles_.size());
        Bundle bundle{.count = static_cast<std::int64_t>(lane.bundle.size())};
        const std::array<std::pair<Address Gemm::*, std::int64_t>, 3> places{
            {{&Gemm::a, bytes_of(first.shape.dtype)},
             {&Gemm::b, bytes_of(first.shape.dtype)},
             {&Gemm::c, bytes_of(first.shape.dtype_c)}}};
        std::array<std::int64_t, 3> steps{};
        bundle.strided = true;
        for (std::size_t of = 0; of < places.size(); ++of) {
            const auto [place, item] = places[of];
            const Address step = gemms_[lane.bundle[1]].*place - first.*place;
            steps[of] = static_cast<std::int64_t>(step) / item;
            bundle.strided &=
                static_cast<std::int64_t>(step) >= 0 && steps[of] * item == static_cast<std::int64_t>(step);
            for (std::size_t i = 2; i < lane.bundle.size() && bundle.strided; ++i)
                bundle.strided = gemms_[lane.bundle[i]].*place == first.*place + i * step;
        }
        if (bundle.strided) {
            bundle.a = first.a, bundle.b = first.b, bundle.c = first.c;
            bundle.step_a = steps[0], bundle.step_b = steps[1], bundle.step_c = steps[2];
        } else {
            bundle.a = pointers_.size() * sizeof(Address);  // in the table that is made of all
            bundle.b = bundle.a + lane.bundle.size() * sizeof(Address);
            bundle.c = bundle.b + lane.bundle.size() * sizeof(Address);
            for (const auto &[place, item] : places)
                for (const std::uint32_t one : lane.bundle)
                    pointers_.push_back(gemms_[one].*place);
        }
        bundles_.push_back(bundle);
        for (const std::uint32_t one : lane.bundle)
            gemms_[one].tunable = false;
    }
    lane.bundle.clear();
    lane.bundled_operations = 0;
    lane.bundled_c.clear();
}

void Executor::upload_bundles() {
    if (!pointers_.empty()) pointer_table_ = device_->keep(pointers_.data(), pointers_.size() * sizeof(Address));
    for (Bundle &bundle : bundles_)
        if (!bundle.strided)
            for (Address *place : {&bundle.a, &bundle.b, &bundle.c})
                *place += reinterpret_cast<Address>(pointer_table_.get());
    const auto gemm_of = [this](std::size_t step) {
        return step < steps_.size() && steps_[step].code == code_gemm ? &gemms_[steps_[step].payload] : nullptr;
    };
    for (std::size_t step = 0; step < steps_.size(); ++step) {
        const Gemm *first = gemm_of(step);
        if (first == nullptr || first->bundle < 0) continue;
        std::size_t next = step + 1;
        while (gemm_of(next) != nullptr && gemm_of(next)->bundled && steps_[next].lane == steps_[step].lane)
            ++next;
        bundles_[first->bundle].behind = next - step - 1;
        // A handle may prepare itself at its first use.
        device_->warm_up(lanes_[steps_[step].lane], first->shape, bundles_[first->bundle], first->factor_c != zero);
    }
}

}  // namespace uncut::cuda

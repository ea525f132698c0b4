// Memory of an array as a capsule of DLPack, which other libraries make their own arrays of; and what theirs show.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace uncut {
namespace {

// As version 1 has it; before, a capsule begins with its tensor.
struct Versioned {
    std::uint32_t major, minor;
    void *context, *deleter;
    std::uint64_t flags;
    nb::dlpack::dltensor tensor;
};

using Shown = std::tuple<std::uint32_t, std::uint64_t, std::uintptr_t, std::vector<std::int64_t>,
                         std::vector<std::int64_t>, std::uint8_t, std::uint8_t, std::uint16_t>;

// Its major version (0 where it says none), flags, address, shape, strides in elements, and the type's code, bits and
// lanes. Of a version above 1 there is the version alone.
std::optional<Shown> look(nb::handle capsule) {
    Versioned empty{};
    const Versioned *found = &empty;
    const nb::dlpack::dltensor *tensor = nullptr;
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
        found = static_cast<const Versioned *>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
        tensor = found->major == 1 ? &found->tensor : &empty.tensor;
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
        tensor = static_cast<const nb::dlpack::dltensor *>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    } else {
        return std::nullopt;
    }
    const std::vector<std::int64_t> shape(tensor->shape, tensor->shape + tensor->ndim);
    std::vector<std::int64_t> strides(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 0;)
        strides[i] = tensor->strides != nullptr ? tensor->strides[i]
                     : i + 1 < strides.size()   ? strides[i + 1] * shape[i + 1]
                                                : 1;
    const auto address = reinterpret_cast<std::uintptr_t>(tensor->data);
    return Shown(found->major, found->flags, address == 0 ? 0 : address + tensor->byte_offset, shape, strides,
                 tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
}

}  // namespace

void bind_capsule(nb::module_ &m) {
    m.def(
        "capsule",
        [](std::uintptr_t address, const std::vector<std::size_t> &shape, const std::vector<std::int64_t> &strides,
           std::pair<std::uint8_t, std::uint8_t> type, std::pair<int, int> device, nb::handle keep) {
            const nb::dlpack::dtype element{type.first, type.second, 1};
            return nb::ndarray<>(reinterpret_cast<void *>(address), shape.size(), shape.data(), keep, strides.data(),
                                 element, device.first, device.second);
        },
        nb::arg("address"), nb::arg("shape"), nb::arg("strides"), nb::arg("type"), nb::arg("device"), nb::arg("keep"),
        "Return memory as a capsule of DLPack: strides in elements, the type's code and bits. It keeps `keep` alive.");
    m.def("look", &look, nb::arg("capsule"), "Return what a capsule of DLPack shows; None if it is no new one.");
}

}  // namespace uncut

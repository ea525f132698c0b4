// Memory of an array as a capsule of DLPack, which other libraries make their own arrays of.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace uncut {

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
        "Return memory as a capsule of DLPack, which keeps an object alive.");
}

}  // namespace uncut

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <tuple>
#include <utility>

#include "host_files.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uncut {

void bind_host_files(nb::module_ &m) {
    // Address, bytes and descriptor of a file, with a descriptor below 0 for memory; the address, and the pitch.
    using End = std::tuple<std::uintptr_t, std::size_t, int, std::uintptr_t, std::size_t>;
    m.def(
        "copy_with_files",
        [](const End &to, const End &from, std::size_t width, std::size_t columns, std::size_t transposed_bytes) {
            const auto file = [](const End &end) {
                return HostFile{std::get<0>(end), std::get<1>(end), std::get<2>(end)};
            };
            const HostFile to_file = file(to), from_file = file(from);
            const auto end = [](const End &one, const HostFile &its) {
                return CopyEnd{its.descriptor < 0 ? nullptr : &its, std::get<3>(one), std::get<4>(one)};
            };
            const nb::gil_scoped_release released;
            const CopyResult done =
                copy_with_files(end(to, to_file), end(from, from_file), width, columns, transposed_bytes);
            return std::pair{done.error, done.descriptor};
        },
        "to"_a, "source"_a, "width"_a, "columns"_a, "transposed_bytes"_a);
}

}  // namespace uncut

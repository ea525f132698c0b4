#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "host_files.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uncut {

void bind_host_files(nb::module_ &m) {
    nb::class_<HostFile>(m, "HostFile", "A file whose first byte an address stands for.")
        .def(nb::init<std::uintptr_t, std::size_t, int>(), "begin"_a, "bytes"_a, "descriptor"_a);
    // The address, and the bytes from one column to the next.
    using End = std::pair<std::uintptr_t, std::size_t>;
    // Columns of so many bytes (`width`), one end or both in files. Elements of `transposed_bytes` are transposed, if
    // not 0: then columns are rows of the source. Gives 0, an error number of the system, or −1 if the file ends
    // before, and the descriptor of the file.
    m.def(
        "copy_with_files",
        [](const std::vector<HostFile> &files, const End &to, const End &from, std::size_t width, std::size_t columns,
           std::size_t transposed_bytes) {
            const nb::gil_scoped_release released;
            const auto end = [&](const End &one) { return CopyEnd{file_at(files, one.first), one.first, one.second}; };
            const CopyResult done = copy_between(end(to), end(from), width, columns, transposed_bytes);
            return std::pair{done.error, done.descriptor};
        },
        "files"_a, "to"_a, "source"_a, "width"_a, "columns"_a, "transposed_bytes"_a);
}

}  // namespace uncut

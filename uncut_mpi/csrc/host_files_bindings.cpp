#include <nanobind/nanobind.h>

#include "host_files.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uncut {

void bind_host_files(nb::module_ &m) {
    m.def(
        "copy_of_file",
        [](int descriptor, std::int64_t offset, std::uintptr_t address, std::size_t width, std::size_t columns,
           std::size_t file_pitch, std::size_t memory_pitch, bool writes) {
            const FileRun run{descriptor, offset,      reinterpret_cast<std::byte *>(address), width, columns,
                              file_pitch, memory_pitch};
            return writes ? write_run(run) : read_run(run);
        },
        "descriptor"_a, "offset"_a, "address"_a, "width"_a, "columns"_a, "file_pitch"_a, "memory_pitch"_a, "writes"_a,
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace uncut

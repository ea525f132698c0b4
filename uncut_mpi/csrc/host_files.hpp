// Copies between memory and files. Bytes of a file have addresses, at which no memory lies: such an address says which
// byte of which file is meant. The system ends whoever reads or writes there as in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace uncut {

struct HostFile {
    std::uintptr_t begin;  // address that stands for its first byte
    std::size_t bytes;
    int descriptor;

    bool holds(std::uintptr_t address) const { return address - begin < bytes; }
};

// Where a rectangle lies: in memory, or at an address that stands for a byte of a file.
struct CopyEnd {
    const HostFile *file;  // null: memory
    std::uintptr_t address;
    std::size_t pitch;  // from one column to the next
};

struct CopyResult {
    int error = 0;  // of the system, or `file_ended` if the file ends before
    int descriptor = -1;
};
constexpr int file_ended = -1;

// How many columns of memory are transposed at once, a cache line of each in f64: so many that rows of the source are
// long. Of what was tried (8 to 128 each) this made 6 GB/s in f64, 3 in f32 and 2 in f16 where memcpy makes 17 to 20
// (AMD EPYC).
constexpr std::size_t block_rows = 16, block_columns = 128;

// Copies columns of so many bytes, from or to memory and files. If it transposes, elements have so many bytes, and
// columns are rows of the source; else `transposed_bytes` is 0.
CopyResult copy_between(const CopyEnd &to, const CopyEnd &from, std::size_t width, std::size_t columns,
                        std::size_t transposed_bytes);

// Tells the system that bytes of some columns are read soon: from so many up to so many of all, column by column.
void announce(const CopyEnd &from, std::size_t width, std::size_t begin, std::size_t end);

// The one of some files that an address stands for a byte of, or null.
const HostFile *file_at(const std::vector<HostFile> &files, std::uintptr_t address);

}  // namespace uncut

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

// Columns of so many bytes in a file and in memory.
struct FileRun {
    int descriptor;
    std::int64_t offset;  // of the first column in the file
    std::byte *memory;
    std::size_t width, columns, file_pitch, memory_pitch;
};

constexpr int file_ended = -1;

// Returns 0, an error of the system, or `file_ended` if the file ends before.
int read_run(const FileRun &run);
int write_run(const FileRun &run);

// Where a rectangle lies: in memory, or at an address that stands for a byte of a file.
struct CopyEnd {
    const HostFile *file;  // null: memory
    std::uintptr_t address;
    std::size_t pitch;  // from one column to the next
};

struct CopyResult {
    int error = 0;  // as of `read_run`
    int descriptor = -1;
};

// Copies columns of so many bytes, one end or both in files. If it transposes, elements have so many bytes, and columns
// are rows of the source; else `transposed_bytes` is 0.
CopyResult copy_with_files(const CopyEnd &to, const CopyEnd &from, std::size_t width, std::size_t columns,
                           std::size_t transposed_bytes);

// Makes columns of so many rows of what has them as rows.
void transpose(std::byte *to, std::size_t to_pitch, const std::byte *from, std::size_t from_pitch, std::size_t rows,
               std::size_t columns, std::size_t item);

// Tells the system that bytes of some columns are read soon: from so many up to so many of all, column by column.
void announce(const CopyEnd &from, std::size_t width, std::size_t begin, std::size_t end);

// The one of some files that an address stands for a byte of, or null.
const HostFile *file_at(const std::vector<HostFile> &files, std::uintptr_t address);

}  // namespace uncut

#include "host_files.hpp"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace uncut {
namespace {

// Runs of fewer bytes share pages of the system with others, which would go to the disk several times.
constexpr std::size_t least_flushed = std::size_t{64} << 10;

constexpr std::size_t pages_apart = 8192;  // two pages of the system

constexpr std::size_t most_pieces = 256;  // of one call of the system, which allows 1,024

// Columns of so many bytes in a file and in memory.
struct FileRun {
    int descriptor;
    std::int64_t offset;  // of the first column in the file
    std::byte *memory;
    std::size_t width, columns, file_pitch, memory_pitch;
};

using Call = ssize_t (*)(int, const iovec *, int, off_t);  // preadv or pwritev

// Moves runs of bytes that follow one another in the file, by one call of the system after the other.
int move_all(Call call, int descriptor, std::int64_t offset, std::array<iovec, most_pieces> &pieces,
             std::size_t count) {
    for (std::size_t first = 0; first < count;) {
        const ssize_t moved = call(descriptor, pieces.data() + first, static_cast<int>(count - first), offset);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return errno;
        if (moved == 0) return file_ended;
        offset += moved;
        for (auto left = static_cast<std::size_t>(moved); left > 0;) {
            iovec &piece = pieces[first];
            const std::size_t part = std::min(left, piece.iov_len);
            piece.iov_base = static_cast<std::byte *>(piece.iov_base) + part;
            piece.iov_len -= part;
            left -= part;
            if (piece.iov_len == 0) ++first;
        }
    }
    return 0;
}

int move_run(Call call, const FileRun &run) {
    if (run.width == 0) return 0;
    const std::size_t together = run.file_pitch == run.width ? most_pieces : 1;
    std::array<iovec, most_pieces> pieces;
    for (std::size_t column = 0; column < run.columns; column += together) {
        const std::size_t count = std::min(together, run.columns - column);
        for (std::size_t one = 0; one < count; ++one)
            pieces[one] = {run.memory + (column + one) * run.memory_pitch, run.width};
        const auto offset = run.offset + static_cast<std::int64_t>(column * run.file_pitch);
        const int failed = move_all(call, run.descriptor, offset, pieces, count);
        if (failed != 0) return failed;
    }
    return 0;
}

template <std::size_t item>
void transpose_items(std::byte *to, std::size_t to_pitch, const std::byte *from, std::size_t from_pitch,
                     std::size_t rows, std::size_t columns) {
    for (std::size_t left = 0; left < columns; left += block_columns)
        for (std::size_t top = 0; top < rows; top += block_rows)
            for (std::size_t column = left; column < std::min(columns, left + block_columns); ++column)
                for (std::size_t row = top; row < std::min(rows, top + block_rows); ++row)
                    std::memcpy(to + column * to_pitch + row * item, from + row * from_pitch + column * item, item);
}

FileRun run_at(const CopyEnd &end, std::byte *memory, std::size_t pitch, std::size_t width, std::size_t columns) {
    const auto offset = static_cast<std::int64_t>(end.address - end.file->begin);
    return {end.file->descriptor, offset, memory, width, columns, end.pitch, pitch};
}

// Makes columns of so many rows of what has them as rows.
void transpose(std::byte *to, std::size_t to_pitch, const std::byte *from, std::size_t from_pitch, std::size_t rows,
               std::size_t columns, std::size_t item) {
    const auto make = item == 16  ? transpose_items<16>
                      : item == 8 ? transpose_items<8>
                      : item == 4 ? transpose_items<4>
                      : item == 2 ? transpose_items<2>
                                  : transpose_items<1>;
    make(to, to_pitch, from, from_pitch, rows, columns);
}

int write_run(const FileRun &run) {
    const int failed = move_run(pwritev, run);
    // The disk begins now, beside what is still computed, and not once memory is full of it. A failure is no matter.
    if (failed == 0 && run.columns > 0 && (run.width >= least_flushed || run.file_pitch == run.width))
        sync_file_range(run.descriptor, run.offset, static_cast<off_t>((run.columns - 1) * run.file_pitch + run.width),
                        SYNC_FILE_RANGE_WRITE);
    return failed;
}

}  // namespace

CopyResult copy_between(const CopyEnd &to, const CopyEnd &from, std::size_t width, std::size_t columns,
                        std::size_t transposed_bytes) {
    const std::size_t item = transposed_bytes;
    const std::size_t source_width = item == 0 ? width : columns * item;
    const std::size_t source_columns = item == 0 ? columns : width / item;
    std::vector<std::byte> read, turned;
    auto *have = reinterpret_cast<std::byte *>(from.address);
    std::size_t pitch = from.pitch;
    if (from.file != nullptr) {
        const bool straight = item == 0 && to.file == nullptr;
        if (!straight) read.resize(source_width * source_columns);
        have = straight ? reinterpret_cast<std::byte *>(to.address) : read.data();
        pitch = straight ? to.pitch : source_width;
        const int failed = move_run(preadv, run_at(from, have, pitch, source_width, source_columns));
        if (failed != 0 || straight) return {failed, from.file->descriptor};
    }
    if (item != 0) {
        if (to.file != nullptr) turned.resize(width * columns);
        auto *made = to.file != nullptr ? turned.data() : reinterpret_cast<std::byte *>(to.address);
        const std::size_t made_pitch = to.file != nullptr ? width : to.pitch;
        transpose(made, made_pitch, have, pitch, width / item, columns, item);
        have = made, pitch = made_pitch;
    } else if (to.file == nullptr) {
        for (std::size_t column = 0; column < columns; ++column)
            std::memcpy(reinterpret_cast<std::byte *>(to.address) + column * to.pitch, have + column * pitch, width);
    }
    if (to.file == nullptr) return {};
    return {write_run(run_at(to, have, pitch, width, columns)), to.file->descriptor};
}

void announce(const CopyEnd &from, std::size_t width, std::size_t begin, std::size_t end) {
    const auto offset = static_cast<off_t>(from.address - from.file->begin);
    const auto place = [&](std::size_t at) { return at / width * from.pitch + at % width; };
    const bool near = from.pitch <= std::max(width, pages_apart);  // each page has bytes of some column
    while (begin < end) {
        const std::size_t last = near ? end : std::min(end, begin + width - begin % width);
        posix_fadvise(from.file->descriptor, offset + static_cast<off_t>(place(begin)),
                      static_cast<off_t>(place(last - 1) + 1 - place(begin)), POSIX_FADV_WILLNEED);
        begin = last;
    }
}

const HostFile *file_at(const std::vector<HostFile> &files, std::uintptr_t address) {
    for (const HostFile &file : files)
        if (file.holds(address)) return &file;
    return nullptr;
}

}  // namespace uncut

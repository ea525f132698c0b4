#include "host_files.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace uncut {
namespace {

constexpr std::size_t most_pieces = 256;  // of one call of the system, which allows 1,024

// Moves runs of bytes that follow one another in the file, by one call of the system after the other.
template <typename Call>
int move_all(const Call &call, std::int64_t offset, std::array<iovec, most_pieces> &pieces, std::size_t count) {
    for (std::size_t first = 0; first < count;) {
        const ssize_t moved = call(pieces.data() + first, static_cast<int>(count - first), offset);
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

template <typename Call>
int move_run(const Call &call, const FileRun &run) {
    if (run.width == 0) return 0;
    const std::size_t together = run.file_pitch == run.width ? most_pieces : 1;
    std::array<iovec, most_pieces> pieces;
    for (std::size_t column = 0; column < run.columns; column += together) {
        const std::size_t count = std::min(together, run.columns - column);
        for (std::size_t one = 0; one < count; ++one)
            pieces[one] = {run.memory + (column + one) * run.memory_pitch, run.width};
        const int failed =
            move_all(call, run.offset + static_cast<std::int64_t>(column * run.file_pitch), pieces, count);
        if (failed != 0) return failed;
    }
    return 0;
}

}  // namespace

int read_run(const FileRun &run) {
    return move_run([&](iovec *some, int count, off_t at) { return preadv(run.descriptor, some, count, at); }, run);
}

int write_run(const FileRun &run) {
    return move_run([&](iovec *some, int count, off_t at) { return pwritev(run.descriptor, some, count, at); }, run);
}

const HostFile *file_at(const std::vector<HostFile> &files, std::uintptr_t address) {
    for (const HostFile &file : files)
        if (file.holds(address)) return &file;
    return nullptr;
}

}  // namespace uncut

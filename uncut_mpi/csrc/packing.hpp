// Small copies within a device that one kernel makes. Issued one by one each takes some us, and waits for
// multiprocessors of its own beside a product (docs/performance.md, 2026-11-26).
#pragma once

#include <cstddef>
#include <cstdint>

namespace uncut {

// One of more bytes is issued by itself. So many bytes in one kernel hold up no product for longer than some 0.1 ms.
constexpr std::int64_t most_bytes_of_one = std::int64_t{2} << 20, most_bytes_packed = std::int64_t{128} << 20;
constexpr std::size_t most_packed = 512;  // each is compared with all others

// Copies of one lane that follow one another and of which the later ones wait for nothing that the first does not. All
// are made where the first is issued.
struct Pack {
    std::size_t first = 0;  // its task or step
    std::int64_t bytes = 0;
    std::size_t count = 0;

    bool takes(std::int64_t more) const {
        return count > 0 && count < most_packed && bytes + more <= most_bytes_packed;
    }
    void begin(std::size_t at, std::int64_t its) { *this = {at, its, 1}; }
    void add(std::int64_t more) { bytes += more, ++count; }
    void end() { count = 0; }
};

}  // namespace uncut

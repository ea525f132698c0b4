// What the schedulers know of the caller's matrices: which rectangle of each lies where.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "locations.hpp"
#include "records.hpp"

namespace uncut {

inline void require(bool good, const char *what) {
    if (!good) throw std::invalid_argument(what);
}

struct Extent {
    std::int64_t first = 0, last = 0;
    auto operator<=>(const Extent &) const = default;
    std::int64_t size() const { return last - first; }
    Extent shifted(std::int64_t by) const { return {first + by, last + by}; }
    bool meets(Extent other) const { return first < other.last && other.first < last; }
    bool contains(Extent other) const { return first <= other.first && other.last <= last; }
    Extent common(Extent other) const { return {std::max(first, other.first), std::min(last, other.last)}; }
};

// A memory: its number, whose it is, and where lanes to it end.
struct KOrigin {
    int location = -1, rank = nobody, end = -1;
    bool on_host = false;
    bool operator==(const KOrigin &) const = default;
    bool on_device_of(int other) const { return !on_host && rank == other; }
};

// A rectangle of op(A), op(B) or C in one of the caller's buffers.
struct KPiece {
    Extent rows, cols;
    int buffer = 0;
    std::int64_t row = 0, col = 0;  // where it begins there, as stored
    KOrigin origin;
    std::size_t holders = 1;  // that have the same rectangle: this one and those behind it
};

// Those of A, B and C; of each, those that several have stand together.
using Pieces = std::array<std::vector<KPiece>, 3>;

// From records of A, B and C as they are stored.
Pieces pieces_of(const Locations &locations, bool trans_a, bool trans_b, std::span<const BufferRecord> users,
                 std::span<const PieceRecord> records);

}  // namespace uncut

// What the schedulers know of the caller's matrices: which rectangle of each lies where.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
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

// Cuts an extent into contiguous parts whose sizes differ by at most one, larger ones first.
inline Extent part_of(std::int64_t extent, std::int64_t parts, std::int64_t number) {
    const std::int64_t size = extent / parts, more = extent % parts;
    const std::int64_t first = number * size + std::min(number, more);
    return {first, first + size + (number < more ? 1 : 0)};
}

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

// A product, and where its A, B and C are.
struct PlacedProblem {
    int num_ranks = 0;
    bool serial_copies = false;  // one lane for a rank's fetches and one for its results to other devices
    std::uint8_t op_a = op_n, op_b = op_n;
    bool reads_c = false;
    std::array<std::uint8_t, 3> dtypes{};  // of A, B and C
    Locations locations;
    std::vector<BufferRecord> users;  // the caller's A, B and C,
    Pieces pieces;                    // and what each buffer has of them
    std::uint8_t ending = op_n;       // how C is written at last: all of it, or what OpCode says
    std::int64_t diagonal = 0;        // of a triangle: how far the first element of C is below it

    // Says where A, B and C are, as they are stored.
    void place(std::span<const LocationRecord> memories, std::span<const BufferRecord> buffers,
               std::span<const PieceRecord> records) {
        locations = Locations(memories);
        users.assign(buffers.begin(), buffers.end());
        pieces = {};
        for (const PieceRecord &one : records) {
            require(one.buffer >= 0 && static_cast<std::size_t>(one.buffer) < users.size(), "there is no such buffer");
            require(one.turned == 0, "a piece is stored as its matrix is");
            const BufferRecord &buffer = users[static_cast<std::size_t>(one.buffer)];
            require(buffer.matrix <= matrix_c, "a buffer is of A, B or C");
            const int at = buffer.location;
            require(locations.has(at), "a matrix is on a rank or the host");
            KPiece piece{
                {one.top, one.top + one.rows}, {one.left, one.left + one.cols}, one.buffer, one.row, one.col, {}, 1};
            if (transposed(buffer.matrix)) std::swap(piece.rows, piece.cols);
            piece.origin = {at, locations.rank(at), locations.end(at), locations.in_host(at)};
            std::vector<KPiece> &known = pieces[buffer.matrix];
            const auto same = std::ranges::find_if(
                known, [&](const KPiece &other) { return other.rows == piece.rows && other.cols == piece.cols; });
            if (same == known.end()) {
                known.push_back(piece);
                continue;
            }
            const auto behind = same + static_cast<std::ptrdiff_t>(same->holders++);
            known.insert(behind, piece);
        }
    }

    std::uint8_t accumulator() const { return accumulator_of(dtypes[matrix_a]); }
    bool on_nodes() const { return locations.num_nodes() > 1; }
    int node_of(int rank) const { return locations.node(rank); }
    int node_of(const KOrigin &origin) const { return locations.node(origin.location); }
    // Of those who have a piece, from the first on, the first that is on a node, else the first.
    const KPiece &nearest(const KPiece &first, int node) const {
        const std::span<const KPiece> holders(&first, first.holders);
        const auto near = std::ranges::find_if(holders, [&](const KPiece &one) { return node_of(one.origin) == node; });
        return near == holders.end() ? first : *near;
    }
    std::int64_t itemsize(int matrix) const { return bytes_of(dtypes[static_cast<std::size_t>(matrix)]); }
    bool rounds_c() const { return dtypes[matrix_c] != accumulator(); }  // once, when all is summed
    // Whether sums are formed apart from C, which is written when they are whole.
    bool sums_apart() const { return rounds_c() || ending != op_n; }
    bool transposed(int matrix) const { return matrix == matrix_a ? op_a != op_n : matrix == matrix_b && op_b != op_n; }
};

}  // namespace uncut

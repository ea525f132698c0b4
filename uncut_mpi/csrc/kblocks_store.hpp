// Where ranks have what they need of A, B and C, which tasks bring it, and whom a task awaits that overwrites it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kblocks_layout.hpp"
#include "kblocks_tables.hpp"

namespace uncut::kblocks {

constexpr std::size_t usual_pieces = 16;  // that products of a rank have not awaited

// Compute lanes of products: they take turns where that is asked for, and one begins as the one before it runs out of
// blocks.
constexpr std::array product_lanes{0, 3};

// A task on each product lane, -1 for none.
using ByLane = std::array<std::int32_t, product_lanes.size()>;
constexpr ByLane on_no_lane{-1, -1};

// A rectangle of op(A) or op(B).
struct Piece {
    int matrix;
    Extent across, k;  // rows of A or columns of B
    bool meets(const Piece &other) const { return k.meets(other.k) && across.meets(other.across); }
};

// Every store knows which tasks brought pieces of A and B that products on some lane have not awaited yet.
class Store {
  public:
    explicit Store(const KLayout &layout)
        : problem_(layout.request.problem), lanes_(layout.request.how.lanes), arriving_(layout.workers.size()) {
        for (Arrivals &of : arriving_)
            of.pieces.reserve(usual_pieces);
    }
    virtual ~Store() = default;
    Store(const Store &) = delete;
    Store &operator=(const Store &) = delete;

    // Where a rank has a rectangle of op(A), op(B) or C for its part of a block, by its panel.
    virtual Region at(const KBlock &block, const KPart &part, int panel, Extent rows, Extent cols) const = 0;

    // Where an adder has some of its columns of C, or of what a part of k brings, by the buffer.
    virtual Region beside(const KAdder &adder, int buffer, Extent rows, std::int64_t place,
                          std::int64_t columns) const = 0;

    // Takes note of what a task reads and overwrites, before it is emitted. Returns tasks to await: those that read
    // what it overwrites. They live until this is called again.
    virtual Tasks take_note(std::int32_t task, const Region &overwritten, std::span<const Operand> read) = 0;

    // A rectangle of op(A), op(B) or C where the caller has it.
    Region users(int matrix, const KPiece &piece, Extent rows, Extent cols) const {
        Region found = stored(piece.buffer, rows.shifted(-piece.rows.first), cols.shifted(-piece.cols.first),
                              problem_.transposed(matrix));
        found.row += piece.row, found.col += piece.col;
        return found;
    }

    void arrives(std::size_t worker, const Piece &what, std::int32_t task) {
        arriving_[worker].pieces.push_back({what, task, on_no_lane});
    }

    // Adds what the next product on a lane awaits for what it reads of A and B. A lane is in order: what one product
    // awaits the next ones need not, nor those that await it: `before` are those that this one awaits.
    void await(std::size_t worker, const Piece &a, const Piece &b, std::size_t lane, const ByLane &before,
               std::int32_t next, std::vector<std::int32_t> &awaits) {
        Arrivals &of = arriving_[worker];
        const auto is_done_with = [&](Arrival &piece) {
            if (!piece.what.meets(piece.what.matrix == matrix_a ? a : b) || piece.awaited_by[lane] >= 0) return false;
            bool awaited = false;
            for (std::size_t other = 0; other < before.size(); ++other)
                awaited = awaited || (piece.awaited_by[other] >= 0 && piece.awaited_by[other] <= before[other]);
            if (!awaited) awaits.push_back(piece.task);
            piece.awaited_by[lane] = next;
            return std::count_if(piece.awaited_by.begin(), piece.awaited_by.end(),
                                 [](std::int32_t by) { return by >= 0; }) == lanes_;
        };
        std::vector<Arrival> &pieces = of.pieces;
        std::size_t kept = of.awaited_until[lane];
        auto until = of.awaited_until;
        for (std::size_t at = kept; at < pieces.size(); ++at) {
            if (is_done_with(pieces[at])) {
                for (std::size_t other = 0; other < until.size(); ++other)
                    until[other] -= at < of.awaited_until[other];
            } else {
                if (kept != at) pieces[kept] = pieces[at];
                ++kept;
            }
        }
        pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(kept), pieces.end());
        of.awaited_until = until;
        std::size_t &first = of.awaited_until[lane];
        while (first < pieces.size() && pieces[first].awaited_by[lane] >= 0)
            ++first;
    }

  protected:
    static Region stored(int buffer, Extent rows, Extent cols, bool turned) {
        if (turned) std::swap(rows, cols);
        return {buffer, rows.first, cols.first, rows.size(), cols.size()};
    }

    const KProblem &problem_;

  private:
    struct Arrival {
        Piece what;
        std::int32_t task;
        ByLane awaited_by;
    };
    struct Arrivals {
        std::vector<Arrival> pieces;
        // Before which one all pieces have been awaited on a lane: products look at what has come since.
        std::array<std::size_t, product_lanes.size()> awaited_until{};
    };

    int lanes_;
    std::vector<Arrivals> arriving_;  // of each worker
};

// Panels that live through the call: everything has a place of its own, and nothing is overwritten that others read.
class Panels final : public Store {
  public:
    using Store::Store;

    Region at(const KBlock &block, const KPart &part, int panel, Extent rows, Extent cols) const override {
        const int matrix = std::min(panel, matrix_c);
        if (part.panel[panel] < 0) return users(matrix, *part.home[matrix], rows, cols);
        const std::int64_t top = panel == matrix_b ? part.k.first : block.rows.first;
        const std::int64_t left = panel == matrix_a       ? part.k.first
                                  : panel == panel_direct ? block.cols.first + part.direct_left
                                                          : block.cols.first;
        return stored(part.panel[panel], rows.shifted(-top), cols.shifted(-left), problem_.transposed(panel));
    }
    Region beside(const KAdder &adder, int buffer, Extent rows, std::int64_t place,
                  std::int64_t columns) const override {
        return {buffer, rows.first - adder.rows.first, place, rows.size(), columns};
    }
    Tasks take_note(std::int32_t, const Region &, std::span<const Operand>) override { return {}; }
};

}  // namespace uncut::kblocks

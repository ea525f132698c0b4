// Where ranks have what they need of A, B and C, which tasks bring it, and whom a task awaits that overwrites it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <span>
#include <utility>
#include <vector>

#include "kblocks_layout.hpp"
#include "last_tasks.hpp"
#include "tables.hpp"

namespace uncut::kblocks {

constexpr std::size_t usual_strips = 12, usual_arrivals = 4;  // of a matrix at a rank, and of a strip

// Compute lanes of products: they take turns where that is asked for, and one begins as the one before it runs out of
// blocks.
constexpr std::array product_lanes{0, 3};

// A task on each product lane, -1 for none.
using ByLane = std::array<std::int32_t, product_lanes.size()>;
constexpr ByLane on_no_lane{-1, -1};

// A rectangle of op(A) or op(B).
struct Rectangle {
    int matrix;
    Extent across, k;  // rows of A or columns of B
};

// Which tasks brought rectangles of op(A) or op(B) to a rank, and which of them its products have awaited. A product
// looks at none that lie beside what it reads or that its lane has awaited, however many there are.
class Arrivals {
  public:
    Arrivals(std::pmr::memory_resource *memory = std::pmr::get_default_resource()) : strips_(memory) {
        strips_.reserve(usual_strips);
    }

    void add(const Rectangle &what, std::int32_t task) {
        auto strip = std::ranges::upper_bound(strips_, what.across, {}, &Strip::across);
        if (strip != strips_.begin() && strip[-1].takes(what)) {
            --strip;
        } else {
            strip = strips_.insert(strip, Strip{what.across, std::pmr::vector<Arrival>(strips_.get_allocator())});
            strip->arrived.reserve(usual_arrivals);
        }
        const auto own = static_cast<std::int32_t>(strip->arrived.size());
        strip->arrived.push_back({what.k, task, on_no_lane, {own, own}});
        widest_ = std::max(widest_, what.across.size());
    }
    void clear() { strips_.clear(), widest_ = 0; }

    // Adds what the next product on a lane awaits. A lane is in order: what one product awaits the next ones need not,
    // nor those that await it: `before` are those that this one awaits.
    void await(const Rectangle &read, std::size_t lane, const ByLane &before, std::int32_t next,
               std::vector<std::int32_t> &awaits) {
        const Extent beside{read.across.first - widest_, read.across.first};
        for (auto strip = std::ranges::upper_bound(strips_, beside, {}, &Strip::across);
             strip != strips_.end() && strip->across.first < read.across.last; ++strip) {
            if (strip->is_done(lane) || !strip->across.meets(read.across)) continue;
            for (std::size_t at = strip->new_to(lane, strip->first_beyond(read.k.first));
                 at < strip->arrived.size() && strip->arrived[at].k.first < read.k.last; at = strip->new_to(lane, at)) {
                Arrival &one = strip->arrived[at];
                bool awaited = false;
                for (std::size_t other = 0; other < before.size(); ++other)
                    awaited = awaited || (one.awaited_by[other] >= 0 && one.awaited_by[other] <= before[other]);
                if (!awaited) awaits.push_back(one.task);
                one.awaited_by[lane] = next;
                ++one.new_from[lane];
                ++strip->awaited[lane];
            }
        }
    }

  private:
    struct Arrival {
        Extent k;
        std::int32_t task;
        ByLane awaited_by;
        ByLane new_from;  // all from this one to before that one have been awaited on the lane
    };
    // Those of one width, of which none begins or ends before another one that came earlier.
    struct Strip {
        Extent across;
        std::pmr::vector<Arrival> arrived;
        std::array<std::size_t, product_lanes.size()> awaited{};  // how many on each lane

        bool is_done(std::size_t lane) const { return awaited[lane] == arrived.size(); }
        bool takes(const Rectangle &what) const {
            return across == what.across && arrived.back().k.first <= what.k.first &&
                   arrived.back().k.last <= what.k.last;
        }
        // The first one that ends beyond there: most often one of the last.
        std::size_t first_beyond(std::int64_t k) const {
            std::size_t near = 1;
            while (near < arrived.size() && arrived[arrived.size() - near].k.last > k)
                near *= 2;
            const auto from =
                near < arrived.size() ? arrived.end() - static_cast<std::ptrdiff_t>(near) : arrived.begin();
            const auto is_before = [k](const Arrival &one) { return one.k.last <= k; };
            return static_cast<std::size_t>(std::partition_point(from, arrived.end(), is_before) - arrived.begin());
        }
        // The first one from there on that no product on the lane has awaited. Shortens the way there by half.
        std::size_t new_to(std::size_t lane, std::size_t at) {
            while (at < arrived.size() && arrived[at].awaited_by[lane] >= 0) {
                std::int32_t &next = arrived[at].new_from[lane];
                if (static_cast<std::size_t>(next) < arrived.size())
                    next = arrived[static_cast<std::size_t>(next)].new_from[lane];
                at = static_cast<std::size_t>(next);
            }
            return at;
        }
    };

    std::pmr::vector<Strip> strips_;  // by where they begin
    std::int64_t widest_ = 0;
};

// Panels that live through the call: everything has a place of its own, and nothing is overwritten that others read.
class Store {
  public:
    explicit Store(const KLayout &layout) : problem_(layout.request.problem) {
        arriving_.reserve(layout.workers.size());
        for (std::size_t worker = 0; worker < layout.workers.size(); ++worker)
            arriving_.push_back({&memory_, &memory_});
    }
    virtual ~Store() = default;
    Store(const Store &) = delete;
    Store &operator=(const Store &) = delete;

    // Where a rank has a rectangle of op(A), op(B) or C for its part of a block, by its panel.
    virtual Region at(const KBlock &block, const KPart &part, int panel, Extent rows, Extent cols) const {
        const int matrix = std::min(panel, matrix_c);
        if (part.panel[panel] < 0) return users(matrix, *part.home[matrix], rows, cols);
        const std::int64_t top = panel == matrix_b ? part.k.first : block.rows.first;
        const std::int64_t left = panel == matrix_a       ? part.k.first
                                  : panel == panel_direct ? block.cols.first + part.direct_left
                                                          : block.cols.first;
        return stored(part.panel[panel], rows.shifted(-top), cols.shifted(-left), problem_.transposed(panel));
    }

    // Takes note of what a task on a lane overwrites and reads, before it is emitted. Returns tasks to await: those
    // that read what it overwrites. They live until this is called again.
    virtual Tasks take_note(std::int32_t, std::int32_t, const Region &, std::span<const Operand>) { return {}; }

    // Says that what is asked for from now on is for the blocks of C of a round, or of a step.
    virtual void begin(int /* round */) {}

    // Whether a rectangle of op(A) or op(B) has to be brought to a rank for its part of a block, which then has a place
    // for it. No tasks that read what was there before are asked for later.
    virtual bool brings(const KBlock &, const KPart &, const Rectangle &) { return true; }

    // Where an adder has some of its columns of C, or of what a part of k brings, by the buffer.
    static Region beside(const KAdder &adder, int buffer, Extent rows, std::int64_t place, std::int64_t columns) {
        return {buffer, rows.first - adder.rows.first, place, rows.size(), columns};
    }

    // A rectangle of op(A), op(B) or C where the caller has it.
    Region users(int matrix, const KPiece &piece, Extent rows, Extent cols) const {
        return in_piece(piece, rows, cols, problem_.transposed(matrix));
    }

    virtual void arrives(std::size_t worker, const Rectangle &what, std::int32_t task) {
        arriving_[worker][static_cast<std::size_t>(what.matrix)].add(what, task);
    }

    // Adds what the next product on a lane awaits for what it reads of A and B, as `Arrivals` say.
    virtual void await(std::size_t worker, const Rectangle &a, const Rectangle &b, std::size_t lane,
                       const ByLane &before, std::int32_t next, std::vector<std::int32_t> &awaits) {
        for (const Rectangle &read : {a, b})
            arriving_[worker][static_cast<std::size_t>(read.matrix)].await(read, lane, before, next, awaits);
    }

  protected:
    const KProblem &problem_;

  private:
    // Has memory for the arrivals of a usual schedule, of which a search makes many.
    alignas(std::max_align_t) std::array<std::byte, 1 << 15> arena_;
    std::pmr::monotonic_buffer_resource memory_{arena_.data(), arena_.size()};
    std::vector<std::array<Arrivals, 2>> arriving_;  // of each worker, A's and B's
};

}  // namespace uncut::kblocks

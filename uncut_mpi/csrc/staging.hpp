// Copies of the caller's matrices for those who cannot use them where they are: planning/staging.py.
//
// A schedule goes by task by task. What a task uses of a matrix that has a stand-in is copied there before it, and
// copied back when others need its place, or at the end. The copies are tasks like any others.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "last_tasks.hpp"
#include "locations.hpp"
#include "tables.hpp"

namespace uncut {

// A buffer of the caller's, and the one of ours that others use in its place.
struct StandIn {
    std::int32_t user = 0, ours = 0;
    std::int64_t columns = 0;  // a ring of so many, which have one region after the other; 0: all have their places
    LaneRecord in, out;        // of the copies
};

class Staging {
  public:
    // Of parts that are stored the other way round, by buffer, the schedule has the regions as if they were not.
    Staging(const ScheduleTables &from, std::span<const std::uint8_t> turned, bool reads_c);

    // Of each buffer whether anybody cannot use it where it is. In place are the owner's device, or in host memory the
    // owner's worker within its node; and nobody where it is stored the other way round.
    const std::vector<std::uint8_t> &used_by_others() const { return used_by_others_; }
    // Of each buffer the most rows and columns of a region.
    const std::vector<std::int64_t> &rows() const { return rows_; }
    const std::vector<std::int64_t> &cols() const { return cols_; }

    // Has copies from and to buffers made in pieces, along their columns, of so many elements at most (0: as they are).
    // Returns how many tasks there are then.
    std::int64_t divide(std::span<const std::int64_t> most_elements);

    // Once.
    void run(int num_ranks, std::span<const StandIn> stand_ins, Tables &out);

  private:
    using Corners = std::array<std::int64_t, 4>;  // of a region
    // A place in a stand-in, and what it has.
    struct Slot {
        Region region;
        std::int64_t width = 0;             // columns
        LastTasks users, writers;           // writers of what is not copied back yet
        std::int32_t came = -1, left = -1;  // copies
    };
    struct Held : StandIn {
        explicit Held(const StandIn &one) : StandIn(one) {}
        bool as_one = false;                 // whether all of the matrix has one slot
        bool is_read = false;                // and whether it has to come then
        std::map<std::int64_t, Slot> slots;  // by their first columns; without a ring as they came
        std::map<Corners, std::int64_t> there;
        std::int64_t head = 0;  // of a ring
        bool is_written = false;
        // By where their columns begin, in steps of the ring's columns: no region has more.
        std::unordered_map<std::int64_t, std::vector<std::pair<Region, std::int32_t>>> left;
    };
    using Awaits = std::vector<std::int32_t>;

    // When regions are used by others (true) or in place: from when on they are written, or until when they are read.
    using Uses = std::map<std::pair<Corners, bool>, std::int64_t>;

    // Those further left are less.
    static Corners corners(const Region &region) { return {region.col, region.row, region.cols, region.rows}; }
    const RegionRecord &region_of(const OperandRecord &operand) const {
        return from_.regions[static_cast<std::size_t>(operand.region)];
    }
    std::span<const OperandRecord> operands_of(const TaskRecord &task) const {
        return from_.operands.subspan(static_cast<std::size_t>(task.first_operand), task.num_operands);
    }
    bool in_place(const TaskRecord &task, std::int32_t buffer) const;
    std::int64_t pieces_of(const TaskRecord &task) const;

    void look_through();
    static bool are_apart(const Uses &uses);
    std::int32_t emit(const TaskRecord &task, std::int64_t piece, std::int64_t pieces);
    Region use(Held &held, const Region &region, bool writes);
    Slot &begin(Held &held, const Region &region, bool comes);
    std::int64_t take(Held &held, std::int64_t width, Awaits &before);
    void leave(Held &held, std::int64_t first, Slot &slot);
    void forget_others(Held &held, const Region &region);
    std::int32_t copy(const Held &held, std::int64_t first, const Slot &slot, bool in, const Awaits &awaits);
    static Region placed(const Held &held, std::int64_t first, const Region &region) {
        if (held.columns > 0) return {held.ours, 0, first, region.rows, region.cols};
        return {held.ours, region.row, region.col, region.rows, region.cols};
    }

    ScheduleTables from_;
    std::vector<std::uint8_t> turned_, used_by_others_;
    bool reads_c_;
    std::vector<std::int64_t> rows_, cols_, width_;  // of a piece, the most columns
    std::vector<Held> held_;
    std::vector<std::int32_t> of_buffer_;  // its number there, or -1
    TableWriter *out_ = nullptr;
    std::vector<std::int32_t> number_;  // of each task of the schedule, of its last piece
    Awaits awaits_;
    std::vector<std::pair<Slot *, bool>> used_;  // by the task at hand, and whether it writes there
};

}  // namespace uncut

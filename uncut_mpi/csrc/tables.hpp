// What schedulers emit: the records of tasks, of their lanes, and of regions, each of which is there once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pieces.hpp"

namespace uncut {

// How a scheduler ends that would make more tasks than it may.
struct TooManyTasks : std::runtime_error {
    TooManyTasks() : std::runtime_error("too many tasks") {}
};

struct Tables {
    std::vector<TaskRecord> tasks;
    std::vector<OperandRecord> operands;
    std::vector<RegionRecord> regions;
    std::vector<std::int32_t> awaits;
    std::vector<LaneRecord> lanes;
    void clear() {
        tasks.clear();
        operands.clear();
        regions.clear();
        awaits.clear();
        lanes.clear();
    }
};

struct Region {
    int buffer = 0;
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
    bool operator==(const RegionRecord &other) const {
        return buffer == other.buffer && row == other.row && col == other.col && rows == other.rows &&
               cols == other.cols;
    }
    Region columns(Extent of) const { return {buffer, row, col + of.first, rows, of.size()}; }
    RegionRecord record() const { return {buffer, 0, row, col, rows, cols}; }
    bool empty() const { return rows == 0 || cols == 0; }
    std::int64_t elements() const { return rows * cols; }
};

// Some rows and columns of op(X) in a buffer of what begins there, which has X.
inline Region stored(int buffer, Extent rows, Extent cols, bool transposed) {
    if (transposed) std::swap(rows, cols);
    return {buffer, rows.first, cols.first, rows.size(), cols.size()};
}

// The same where the caller has them.
inline Region in_piece(const KPiece &piece, Extent rows, Extent cols, bool transposed) {
    Region found = stored(piece.buffer, rows.shifted(-piece.rows.first), cols.shifted(-piece.cols.first), transposed);
    found.row += piece.row, found.col += piece.col;
    return found;
}

struct Operand {
    Region region;
    std::uint8_t factor = one;
    std::uint8_t op = op_n;
    std::int64_t diagonal = 0;
};

using Tasks = std::span<const std::int32_t>;

// Where each region is in their table, by open addressing.
class RegionIndex {
  public:
    std::int32_t find_or_add(const Region &r, std::vector<RegionRecord> &table) {
        if (2 * (table.size() + 1) > places_.size()) reserve(2 * table.size(), table);
        std::size_t at = hash(r.buffer, r.row, r.col, r.rows, r.cols) & (places_.size() - 1);
        for (; places_[at] >= 0; at = (at + 1) & (places_.size() - 1))
            if (r == table[static_cast<std::size_t>(places_[at])]) return places_[at];
        places_[at] = static_cast<std::int32_t>(table.size());
        table.push_back(r.record());
        return places_[at];
    }

    // Room for so many without finding places anew.
    void reserve(std::size_t count, const std::vector<RegionRecord> &table) {
        places_.assign(std::bit_ceil(std::max<std::size_t>(1024, 2 * count)), -1);
        for (std::size_t number = 0; number < table.size(); ++number) {
            const RegionRecord &r = table[number];
            std::size_t at = hash(r.buffer, r.row, r.col, r.rows, r.cols) & (places_.size() - 1);
            while (places_[at] >= 0)
                at = (at + 1) & (places_.size() - 1);
            places_[at] = static_cast<std::int32_t>(number);
        }
    }

  private:
    static std::size_t hash(int buffer, std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t cols) {
        // Products that do not wait for each other.
        const std::uint64_t h =
            (static_cast<std::uint64_t>(buffer) + static_cast<std::uint64_t>(row) * 0x9e3779b97f4a7c15) ^
            static_cast<std::uint64_t>(col) * 0xc2b2ae3d27d4eb4f ^
            static_cast<std::uint64_t>(rows) * 0x165667b19e3779f9 ^
            static_cast<std::uint64_t>(cols) * 0xd6e8feb86659fd93;
        return static_cast<std::size_t>((h * 0x9e3779b97f4a7c15) >> 32);
    }
    std::vector<std::int32_t> places_;  // a power of two, at most half of them taken
};

// Fills tables task by task, or without any counts the tasks.
class TableWriter {
  public:
    TableWriter(Tables *out, int num_ranks, std::int64_t most_tasks)
        : out_(out), most_(most_tasks), lanes_(static_cast<std::size_t>(num_ranks)) {}

    std::int32_t count() const { return count_; }

    std::int32_t lane(int rank, LaneKind kind, int source, int destination) {
        if (!out_) return -1;
        std::vector<std::int32_t> &own = lanes_[static_cast<std::size_t>(rank)];
        for (const std::int32_t number : own) {
            const LaneRecord &known = out_->lanes[static_cast<std::size_t>(number)];
            if (known.kind == kind && known.source == source && known.destination == destination) return number;
        }
        if (own.empty()) own.reserve(usual_lanes);
        own.push_back(static_cast<std::int32_t>(out_->lanes.size()));
        out_->lanes.push_back({rank, kind, source, destination});
        return own.back();
    }

    // Room for so many, and for the operands and awaits of tasks.
    void reserve(std::size_t tasks, std::size_t operands, std::size_t regions, std::size_t awaits) {
        out_->tasks.reserve(tasks);
        out_->operands.reserve(operands);
        out_->regions.reserve(regions);
        out_->awaits.reserve(awaits);
        regions_.reserve(regions, out_->regions);
    }
    std::int32_t region(const Region &r) { return regions_.find_or_add(r, out_->regions); }
    // The first of `parts` that cut one along its columns, remainders to the first. The others stand behind it, and
    // nobody asks for one of them alone.
    std::int32_t regions(const Region &all, int parts) {
        const auto next = static_cast<std::int32_t>(out_->regions.size());
        const std::int32_t first = region(all.columns(part_of(all.cols, parts, 0)));
        for (int part = 1; part < parts && first == next; ++part)
            out_->regions.push_back(all.columns(part_of(all.cols, parts, part)).record());
        return first;
    }

    // Of what is awaited -1 stands for nothing, and what is earlier on the lane need not be. Throws TooManyTasks
    // if there are too many tasks.
    std::int32_t task(Kind kind, std::int32_t on, std::span<const Operand> operands, Tasks awaits,
                      Tasks more_awaits = {}) {
        if (!out_) return next();
        const std::size_t first = out_->operands.size();
        for (const Operand &one : operands)
            out_->operands.push_back({region(one.region), one.factor, one.op, 0, one.diagonal});
        return add(kind, on, -1, first, awaits, more_awaits);
    }
    // Of a group, with regions by their numbers.
    std::int32_t task(Kind kind, std::int32_t on, int group, std::span<const OperandRecord> operands, Tasks awaits) {
        const std::size_t first = out_->operands.size();
        out_->operands.insert(out_->operands.end(), operands.begin(), operands.end());
        return add(kind, on, group, first, awaits, {});
    }

  private:
    static constexpr std::size_t usual_lanes = 16;  // of a rank, all kinds together

    std::int32_t next() {
        if (count_ >= most_) throw TooManyTasks();
        return count_++;
    }
    // A task with the operands from there on.
    std::int32_t add(Kind kind, std::int32_t on, int group, std::size_t first_operand, Tasks awaits,
                     Tasks more_awaits) {
        TaskRecord record;
        record.kind = kind;
        record.rank = out_->lanes[on].rank;
        record.lane = on;
        record.group = group;
        record.num_operands = static_cast<std::uint16_t>(out_->operands.size() - first_operand);
        record.first_operand = static_cast<std::int32_t>(first_operand);
        record.first_await = static_cast<std::int32_t>(out_->awaits.size());
        for (const Tasks &some : {awaits, more_awaits})
            for (const std::int32_t awaited : some)
                if (awaited >= 0 && out_->tasks[awaited].lane != on) out_->awaits.push_back(awaited);
        const auto own = out_->awaits.begin() + record.first_await;
        std::sort(own, out_->awaits.end());
        out_->awaits.erase(std::unique(own, out_->awaits.end()), out_->awaits.end());
        record.num_awaits = static_cast<std::int32_t>(out_->awaits.size()) - record.first_await;
        out_->tasks.push_back(record);
        return next();
    }

    Tables *out_;
    std::int64_t most_;
    std::int32_t count_ = 0;
    RegionIndex regions_;
    std::vector<std::vector<std::int32_t>> lanes_;  // of each rank
};

}  // namespace uncut

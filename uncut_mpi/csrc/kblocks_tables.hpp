// What is emitted: the records of tasks, of their lanes, and of regions, each of which is there once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kblocks_request.hpp"
#include "too_many_tasks.hpp"

namespace uncut {

struct KTables {
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

namespace kblocks {

constexpr std::size_t usual_lanes = 16;  // of a rank, all kinds together

struct Region {
    int buffer = 0;
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
    bool operator==(const RegionRecord &other) const {
        return buffer == other.buffer && row == other.row && col == other.col && rows == other.rows &&
               cols == other.cols;
    }
    Region columns(std::int64_t first, std::int64_t last) const {
        return {buffer, row, col + first, rows, last - first};
    }
    bool empty() const { return rows == 0 || cols == 0; }
};

struct Operand {
    Region region;
    std::uint8_t factor = one;
    std::uint8_t op = op_n;
};

using Tasks = std::span<const std::int32_t>;

// Where each region is in their table, by open addressing.
class RegionIndex {
  public:
    std::int32_t find_or_add(const Region &r, std::vector<RegionRecord> &table) {
        if (2 * (table.size() + 1) > slots_.size()) grow(table);
        std::size_t at = hash(r.buffer, r.row, r.col, r.rows, r.cols) & (slots_.size() - 1);
        for (; slots_[at] >= 0; at = (at + 1) & (slots_.size() - 1))
            if (r == table[static_cast<std::size_t>(slots_[at])]) return slots_[at];
        slots_[at] = static_cast<std::int32_t>(table.size());
        table.push_back({r.buffer, 0, r.row, r.col, r.rows, r.cols});
        return slots_[at];
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
    void grow(const std::vector<RegionRecord> &table) {
        slots_.assign(std::max<std::size_t>(1024, 2 * slots_.size()), -1);
        for (std::size_t number = 0; number < table.size(); ++number) {
            const RegionRecord &r = table[number];
            std::size_t at = hash(r.buffer, r.row, r.col, r.rows, r.cols) & (slots_.size() - 1);
            while (slots_[at] >= 0)
                at = (at + 1) & (slots_.size() - 1);
            slots_[at] = static_cast<std::int32_t>(number);
        }
    }

    std::vector<std::int32_t> slots_;  // a power of two, at most half of them taken
};

// Fills tables task by task, or without any counts the tasks: those of a region of the caller's buffers that is copied
// in pieces, too.
class TableWriter {
  public:
    // Of buffers that are copied in pieces: the elements of one (0: as a whole).
    TableWriter(KTables *out, int num_ranks, std::int64_t most_tasks, std::span<const std::int64_t> pieces)
        : out_(out), most_(most_tasks), pieces_(pieces), lanes_(static_cast<std::size_t>(num_ranks)) {}

    std::int32_t count() const { return count_; }

    std::int64_t count_in_pieces() const { return count_ + more_; }

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

    // Of what is awaited -1 stands for nothing, and what is earlier on the lane need not be. Throws TooManyTasks
    // if there are too many tasks.
    std::int32_t task(Kind kind, std::int32_t on, const Region &write, std::span<const Operand> reads, Tasks awaits,
                      Tasks more_awaits) {
        if (count_in_pieces() >= most_) throw TooManyTasks();
        if (!out_) {
            if (kind == copy_task) more_ += std::max(more_of(write), more_of(reads[0].region));
            return count_++;
        }
        TaskRecord record;
        record.kind = kind;
        record.rank = out_->lanes[on].rank;
        record.lane = on;
        record.num_operands = static_cast<std::uint16_t>(1 + reads.size());
        record.first_operand = static_cast<std::int32_t>(out_->operands.size());
        record.first_await = static_cast<std::int32_t>(out_->awaits.size());
        out_->operands.push_back({region(write), one, 0, 0});
        for (const Operand &read : reads)
            out_->operands.push_back({region(read.region), read.factor, read.op, 0});
        for (const Tasks &some : {awaits, more_awaits})
            for (const std::int32_t awaited : some)
                if (awaited >= 0 && out_->tasks[awaited].lane != on) out_->awaits.push_back(awaited);
        const auto own = out_->awaits.begin() + record.first_await;
        std::sort(own, out_->awaits.end());
        out_->awaits.erase(std::unique(own, out_->awaits.end()), out_->awaits.end());
        record.num_awaits = static_cast<std::int32_t>(out_->awaits.size()) - record.first_await;
        out_->tasks.push_back(record);
        return count_++;
    }

  private:
    std::int32_t region(const Region &r) { return regions_.find_or_add(r, out_->regions); }

    // Each piece goes through memory of the owner, by one more copy.
    std::int64_t more_of(const Region &r) const {
        const auto buffer = static_cast<std::size_t>(r.buffer);
        const std::int64_t most = buffer < pieces_.size() ? pieces_[buffer] : 0;
        return most > 0 ? 2 * ((r.rows * r.cols + most - 1) / most) - 1 : 0;
    }

    KTables *out_;
    std::int64_t most_, more_ = 0;
    std::span<const std::int64_t> pieces_;
    std::int32_t count_ = 0;
    RegionIndex regions_;
    std::vector<std::vector<std::int32_t>> lanes_;  // of each rank
};

}  // namespace kblocks
}  // namespace uncut

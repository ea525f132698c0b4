#include "kblocks_run.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace uncut {
namespace {

KRun::Progress progress_of(const KTables &tables, const Simulated &times, int num_ranks) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    KRun::Progress found{std::vector<double>(ranks, 0), std::vector<std::int64_t>(ranks, 0)};
    const auto region = [&tables](const OperandRecord &operand) -> const RegionRecord & {
        return tables.regions[static_cast<std::size_t>(operand.region)];
    };
    for (std::size_t i = 0; i < times.end.size(); ++i) {
        const TaskRecord &task = tables.tasks[i];
        if (task.kind != gemm_task) continue;
        const auto rank = static_cast<std::size_t>(task.rank);
        const OperandRecord *operands = &tables.operands[static_cast<std::size_t>(task.first_operand)];
        const RegionRecord &c = region(operands[0]), &a = region(operands[1]);
        const std::int64_t depth = operands[1].op != 0 ? a.rows : a.cols;
        found.end[rank] = std::max(found.end[rank], times.end[i]);
        found.elements[rank] += c.rows * c.cols * depth;
    }
    return found;
}

std::int64_t moved_by(const KTables &tables, const KInput &input) {
    std::int64_t moved = 0;
    for (const TaskRecord &task : tables.tasks) {
        if (task.kind != copy_task) continue;
        const LaneRecord &lane = tables.lanes[static_cast<std::size_t>(task.lane)];
        if (lane.source == lane.destination) continue;
        const OperandRecord &to = tables.operands[static_cast<std::size_t>(task.first_operand)];
        const RegionRecord &region = tables.regions[static_cast<std::size_t>(to.region)];
        const bool sums = input.buffers[static_cast<std::size_t>(region.buffer)].dtype != input.dtype;
        moved += region.rows * region.cols * (sums ? input.accumulator_itemsize : input.itemsize);
    }
    return moved;
}

}  // namespace

void KRun::make(Workplace &at) {
    lay_out_kblocks(input);
    fits = std::equal(input.rank_bytes.begin(), input.rank_bytes.end(), room.begin(), room.end(), std::less_equal{});
    at.tables.clear();
    at.times.clear();
    if (fits) {
        try {
            schedule_kblocks(input, at.tables);
            num_tasks = static_cast<std::int64_t>(at.tables.tasks.size());
        } catch (const TooManyTasks &) {
            num_tasks = std::max(most_tasks, input.most_tasks) + 1;
            at.tables = {};  // their memory, too
        }
    }
    if (fits && num_tasks <= most_tasks) {
        const KTables &made = at.tables;
        at.simulator.run({made.tasks, made.operands, made.regions, made.awaits, input.buffers, made.lanes}, at.times);
        for (const double end : at.times.end)
            seconds = std::max(seconds, end);
        progress = progress_of(made, at.times, input.num_ranks);
        moved_bytes = moved_by(made, input);
        held_bytes = std::accumulate(input.rank_bytes.begin(), input.rank_bytes.end(), std::int64_t{0});
    }
    if (keeps) {
        tables = std::exchange(at.tables, {});
        times = std::exchange(at.times, {});
    } else {
        clear_layout(input);
    }
}

}  // namespace uncut

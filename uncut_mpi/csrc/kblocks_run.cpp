#include "kblocks_run.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "kblocks_scheduler.hpp"

namespace uncut {
namespace {

KRun::Progress progress_of(const Tables &tables, const Simulated &times, int num_ranks) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    KRun::Progress found{std::vector<double>(ranks, 0), std::vector<std::int64_t>(ranks, 0)};
    const auto region = [&tables](const OperandRecord &operand) -> const RegionRecord & {
        return tables.regions[static_cast<std::size_t>(operand.region)];
    };
    for (std::size_t i = 0; i < times.end.size(); ++i) {
        const TaskRecord &task = tables.tasks[i];
        const auto rank = static_cast<std::size_t>(task.rank);
        const LaneRecord &lane = tables.lanes[static_cast<std::size_t>(task.lane)];
        const bool sends = task.kind == copy_task && lane.source == task.rank && lane.destination != lane.source;
        if (sends) found.end[rank] = std::max(found.end[rank], times.end[i]);
        if (task.kind != gemm_task) continue;
        const OperandRecord *operands = &tables.operands[static_cast<std::size_t>(task.first_operand)];
        const RegionRecord &c = region(operands[0]), &a = region(operands[1]);
        const std::int64_t depth = operands[1].op != 0 ? a.rows : a.cols;
        found.end[rank] = std::max(found.end[rank], times.end[i]);
        found.elements[rank] += c.rows * c.cols * depth;
    }
    for (std::size_t rank = 0; rank < ranks; ++rank)
        if (found.end[rank] > 0) found.end[rank] += times.throttled[rank];
    return found;
}

// Returns the bytes that are copied from one memory to another.
std::int64_t moved_by(const Tables &tables, const KLayout &layout) {
    std::int64_t moved = 0;
    for (const TaskRecord &task : tables.tasks) {
        if (task.kind != copy_task) continue;
        const LaneRecord &lane = tables.lanes[static_cast<std::size_t>(task.lane)];
        if (lane.source == lane.destination) continue;
        const OperandRecord &to = tables.operands[static_cast<std::size_t>(task.first_operand)];
        const RegionRecord &region = tables.regions[static_cast<std::size_t>(to.region)];
        moved += region.rows * region.cols * bytes_of(layout.buffers[static_cast<std::size_t>(region.buffer)].dtype);
    }
    return moved;
}

}  // namespace

void KRun::make(Workplace &at) {
    KLayout layout(request);
    const std::vector<std::int64_t> &taken = layout.rank_bytes;
    fits = std::equal(taken.begin(), taken.end(), room.begin(), room.end(), std::less_equal{});
    at.tables.clear();
    at.times.clear();
    if (fits) {
        try {
            schedule_kblocks(layout, most_tasks, at.tables);
            num_tasks = static_cast<std::int64_t>(at.tables.tasks.size());
        } catch (const TooManyTasks &) {
            num_tasks = most_tasks + 1;
            at.tables = {};  // their memory, too
        }
    }
    if (fits && num_tasks <= most_tasks) {
        const Tables &made = at.tables;
        at.simulator.run({{made.tasks, made.operands, made.regions, made.awaits},
                          layout.buffers,
                          made.lanes,
                          &request.problem.locations},
                         at.times);
        seconds = at.times.seconds();
        progress = progress_of(made, at.times, request.problem.num_ranks);
        moved_bytes = moved_by(made, layout);
        num_products = std::count_if(made.tasks.begin(), made.tasks.end(),
                                     [](const TaskRecord &task) { return task.kind == gemm_task; });
        held_bytes = std::accumulate(taken.begin(), taken.end(), std::int64_t{0});
    }
    if (keeps) {
        tables = std::exchange(at.tables, {});
        buffers = std::move(layout.buffers);
        times = std::exchange(at.times, {});
    }
}

}  // namespace uncut

#include "kblocks_run.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "crossing.hpp"
#include "kblocks_scheduler.hpp"

namespace uncut {
// What the tasks of a schedule are together.
void KRun::sum_up(const Tables &made, const Simulated &run, const KLayout &layout) {
    const auto ranks = static_cast<std::size_t>(request.problem.num_ranks);
    end.assign(ranks, 0);
    elements.assign(ranks, 0);
    for (std::size_t i = 0; i < run.end.size(); ++i) {
        const TaskRecord &task = made.tasks[i];
        const auto rank = static_cast<std::size_t>(task.rank);
        const LaneRecord &lane = made.lanes[static_cast<std::size_t>(task.lane)];
        const OperandRecord *operands = &made.operands[static_cast<std::size_t>(task.first_operand)];
        const RegionRecord &to = made.regions[static_cast<std::size_t>(operands[0].region)];
        const bool goes = task.kind == send_task || (task.kind == copy_task && lane.source != lane.destination);
        if (goes)
            moved_bytes += to.rows * to.cols * bytes_of(layout.buffers[static_cast<std::size_t>(to.buffer)].dtype);
        if (task.kind == gemm_task) {
            const RegionRecord &a = made.regions[static_cast<std::size_t>(operands[1].region)];
            elements[rank] += to.rows * to.cols * (operands[1].op != 0 ? a.rows : a.cols);
            ++num_products;
        }
        if (task.kind == gemm_task || (goes && lane.source == task.rank)) end[rank] = std::max(end[rank], run.end[i]);
    }
    for (std::size_t rank = 0; rank < ranks; ++rank)
        if (end[rank] > 0) end[rank] += run.throttled[rank];
}

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
        const auto all_of = [&](const Tables &made) {
            return ScheduleTables{{made.tasks, made.operands, made.regions, made.awaits},
                                  layout.buffers,
                                  made.lanes,
                                  &request.problem.locations};
        };
        Crossing crossing(all_of(at.tables), request.problem.num_ranks);
        const bool crosses = request.problem.on_nodes() && crossing.any();
        if (crosses) at.halves.clear(), crossing.run(at.halves);
        const Tables &made = crosses ? at.halves : at.tables;
        at.simulator.run(all_of(made), at.times);
        seconds = at.times.seconds();
        sum_up(made, at.times, layout);
        held_bytes = std::accumulate(taken.begin(), taken.end(), std::int64_t{0});
    }
    if (keeps) {
        tables = std::exchange(at.tables, {});
        buffers = std::move(layout.buffers);
        times = std::exchange(at.times, {});
    }
}

}  // namespace uncut

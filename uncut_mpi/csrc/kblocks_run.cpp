#include "kblocks_run.hpp"

#include <algorithm>
#include <functional>

namespace uncut {

void KRun::make(const SimulatedMachine &machine) {
    lay_out_kblocks(input);
    fits = std::equal(input.rank_bytes.begin(), input.rank_bytes.end(), room.begin(), room.end(), std::less_equal{});
    if (!fits) return;
    tables = schedule_kblocks(input);
    if (static_cast<std::int64_t>(tables.tasks.size()) > most_tasks) return;
    times = simulate(view(), machine);
    if (!times.end.empty()) seconds = std::max(0.0, *std::max_element(times.end.begin(), times.end.end()));
}

KRun::Progress KRun::progress() const {
    const auto ranks = static_cast<std::size_t>(input.num_ranks);
    Progress found{std::vector<double>(ranks, 0), std::vector<std::int64_t>(ranks, 0)};
    const auto region = [this](const OperandRecord &operand) -> const RegionRecord & {
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

}  // namespace uncut

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

}  // namespace uncut

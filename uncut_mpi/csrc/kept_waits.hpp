// Which of a schedule's awaits need a wait: what an earlier wait of a lane for the same lane implies needs none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "records.hpp"

namespace uncut {

class KeptWaits {
  public:
    // Nothing is awaited yet; memory is kept.
    void clear(std::size_t num_lanes) {
        num_lanes_ = num_lanes;
        table_.assign(num_lanes <= most_lanes_in_table ? num_lanes * num_lanes : 0, -1);
        map_.clear();
    }

    // Calls for those of the next task, the furthest first, which implies others: schedulers list awaits in order.
    template <typename What>
    void each(const TaskTables &tables, const TaskRecord &task, const What &what) {
        for (std::int32_t a = task.num_awaits; a-- > 0;) {
            const std::int32_t awaited = tables.awaits[task.first_await + a], lane = tables.tasks[awaited].lane;
            if (lane == task.lane) continue;
            const std::size_t of_both = static_cast<std::size_t>(task.lane) * num_lanes_ + lane;
            std::int32_t &furthest = table_.empty() ? map_.try_emplace(of_both, -1).first->second : table_[of_both];
            if (awaited <= furthest) continue;
            furthest = awaited;
            what(awaited);
        }
    }

  private:
    static constexpr std::size_t most_lanes_in_table = 2048;

    std::size_t num_lanes_ = 0;
    std::vector<std::int32_t> table_;  // [waiting lane * lanes + awaited lane]: the last task that is awaited
    std::unordered_map<std::size_t, std::int32_t> map_;  // the same where there are too many
};

}  // namespace uncut

// The last task of each lane among some: a lane is in order, so who awaits these awaits all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace uncut {

class LastTasks {
  public:
    // A task later than all before it.
    void add(std::int32_t lane, std::int32_t task) {
        const auto known = std::ranges::find(lanes_, lane);
        if (known != lanes_.end()) {
            tasks_[static_cast<std::size_t>(known - lanes_.begin())] = task;
        } else {
            lanes_.push_back(lane);
            tasks_.push_back(task);
        }
    }
    // Others, in any order.
    void add(const LastTasks &others) {
        for (std::size_t at = 0; at < others.tasks_.size(); ++at) {
            const auto known = std::ranges::find(lanes_, others.lanes_[at]);
            if (known == lanes_.end()) {
                add(others.lanes_[at], others.tasks_[at]);
            } else {
                std::int32_t &task = tasks_[static_cast<std::size_t>(known - lanes_.begin())];
                task = std::max(task, others.tasks_[at]);
            }
        }
    }
    const std::vector<std::int32_t> &tasks() const { return tasks_; }

  private:
    std::vector<std::int32_t> lanes_, tasks_;
};

}  // namespace uncut

// The proof that operation lists imply every await of their schedule: planning/verify_lists.py says what that means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "locations.hpp"

namespace uncut {

// One rank's list, whose operations are known to stand in the places of their tasks, on their lanes.
struct ListView {
    std::span<const OperationRecord> operations;
    std::span<const LaneRecord> flag_lanes;
    std::int32_t num_events;
};

class ListProof {
  public:
    ListProof(const ScheduleTables &tables, std::vector<ListView> lists, std::int32_t span);

    // Return how many awaits between lanes the lists imply. What is wrong first, in the global order, is a
    // std::invalid_argument.
    std::int64_t run();

  private:
    struct Reach {
        std::int32_t lane, sequence;
    };
    struct Wait {
        std::int32_t at;  // sequence of the waiting task
        Reach over;       // what is over when the wait is
    };
    struct Lane {
        std::int32_t number = 0, length = 0;  // among the lanes of its rank; tasks so far
        std::int32_t told = 0;                // value of its flag in host memory so far
        std::vector<Wait> waits;
        std::unordered_map<std::int32_t, std::int32_t> furthest;  // by lane: sequence waited for
        // Of the search at hand: how far the lane is over, how many of its waits have been followed.
        std::int32_t over = 0;
        std::size_t followed = 0;
    };
    struct Flag {
        std::int32_t lane = -1, value = 0;  // who writes it, how much so far
    };
    struct Rank {
        std::vector<std::int32_t> lanes;  // by number
        std::vector<Reach> events;        // what each holds the record of; lane −1: nothing
        std::vector<Flag> flags;
        std::size_t next = 0;        // operation
        std::int32_t recorded = -1;  // the last task with a record
    };

    Reach awaited_by(const OperationRecord &wait) const;
    void record(const OperationRecord &operation);
    void signal(const OperationRecord &operation);
    void tell_host(const OperationRecord &operation);
    template <typename What>
    std::int32_t told(const OperationRecord &operation, std::int32_t before, const What &what) const;
    void operate(const OperationRecord &operation);
    bool is_over(const Reach &awaited);
    bool search(const Reach &awaited);
    [[noreturn]] void refuse(const OperationRecord &operation, const std::string &what) const;

    ScheduleTables tables_;
    std::vector<ListView> lists_;
    std::int32_t span_;
    std::vector<Lane> lanes_;
    std::vector<Rank> ranks_;
    std::vector<std::int32_t> sequence_;           // of each task so far
    std::int32_t task_ = 0, lane_ = 0, rank_ = 0;  // at hand
    std::vector<std::int32_t> reached_;            // lanes of the search at hand
};

}  // namespace uncut

// Lowering: the tasks of a schedule become the operation lists of its ranks; planning/lower.py says by which rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kept_waits.hpp"
#include "locations.hpp"

namespace uncut {

// What one rank issues, in order.
struct RankOperations {
    std::vector<OperationRecord> operations;
    std::vector<BoundOperandRecord> operands;
    std::int32_t num_events = 0;
};

class Lowerer {
  public:
    // With `rank` below 0 lists of all ranks are made.
    Lowerer(const ScheduleTables &tables, std::size_t num_ranks, std::int32_t rank);

    // Lower all tasks, once.
    void run();

    RankOperations &list(std::size_t rank) { return ranks_.at(rank).list; }
    // By slot, the lane that writes each flag in a rank's memory.
    const std::vector<std::int32_t> &flag_lanes(std::size_t rank) const { return ranks_.at(rank).flag_lanes; }
    // How far a run takes the epoch: at least 1, so that each call has another.
    std::int32_t span() const { return span_; }
    // (waiting task, awaited task) of every wait.
    std::vector<std::pair<std::int32_t, std::int32_t>> waits;

  private:
    struct Wait {
        std::uint8_t code, in_host;
        std::int32_t slot;  // of a flag; of an event its number in events_
        std::int32_t value, peer;
    };
    struct Signal {
        std::int32_t rank, slot, next;  // the next of the same task; -1: none
    };
    struct Event {
        std::int32_t slot, waits;  // waits that are not in a list yet
    };
    struct Task {
        std::int32_t lane, sequence;
        std::uint8_t kind;
        std::uint16_t num_operands;
        std::uint32_t num_waits;
        std::int32_t event, first_signal, last_signal;  // -1: none
        bool tells_host = false;
    };
    struct Lane {
        std::int32_t rank, number;  // among the lanes of its rank
        bool of_host;
        std::int32_t length = 0;  // tasks so far
    };
    struct Rank {
        bool wanted;
        RankOperations list;
        std::vector<std::int32_t> flag_lanes, free_events;
        std::int32_t num_operands = 0;  // of operations in the list
    };

    void take_task(const TaskRecord &task);
    void await_task(const Task &waiting, Task &awaited);
    void signal(Task &task, std::int32_t rank, std::int32_t slot);
    void bind_operands(const TaskRecord &task, std::vector<BoundOperandRecord> &bound) const;
    void emit(std::int32_t number, const Task &task, const Wait *first_wait);
    std::int32_t take_event(Rank &rank);

    std::vector<Lane> lanes_;
    ScheduleTables tables_;
    std::vector<Rank> ranks_;
    KeptWaits kept_;
    std::unordered_map<std::uint64_t, std::int32_t> flags_;  // (producing lane, waiting rank): slot
    std::int32_t span_ = 1;
    std::vector<Task> tasks_;  // all tasks, and their waits
    std::vector<Wait> waits_;
    std::vector<Event> events_;
    std::vector<Signal> signals_;
    std::vector<std::int32_t> awaited_;
};

}  // namespace uncut

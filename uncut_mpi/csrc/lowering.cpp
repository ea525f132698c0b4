// Lowering: the tasks of a schedule become the operation lists of its ranks; planning/lower.py says by which rules.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kept_waits.hpp"
#include "locations.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

std::uint64_t key_of(std::int32_t first, std::int32_t second) {
    return static_cast<std::uint64_t>(first) << 32 | static_cast<std::uint32_t>(second);
}

}  // namespace

// What one rank issues, in order.
struct RankOperations {
    std::vector<OperationRecord> operations;
    std::vector<BoundOperandRecord> operands;
    std::int32_t num_events = 0;
};

class Lowerer {
  public:
    // With `rank` below 0 lists of all ranks are made.
    Lowerer(const ScheduleTables &tables, std::size_t num_ranks, std::int32_t rank)
        : tables_(tables), ranks_(num_ranks) {
        kept_.clear(tables.lanes.size());
        for (std::size_t r = 0; r < num_ranks; ++r)
            ranks_[r].wanted = rank < 0 || static_cast<std::size_t>(rank) == r;
        std::vector<std::int32_t> count(num_ranks, 0);
        for (const LaneRecord &lane : tables.lanes)
            lanes_.push_back({lane.rank, count.at(lane.rank)++, is_of_host(lane.kind)});
    }

    // Lower all tasks, once.
    void run() {
        tasks_.reserve(tables_.tasks.size());
        for (const TaskRecord &task : tables_.tasks)
            take_task(task);
        // What a task tells others is known when all that await it are.
        const Wait *waits_of_task = waits_.data();
        for (std::size_t number = 0; number < tasks_.size(); ++number) {
            emit(static_cast<std::int32_t>(number), tasks_[number], waits_of_task);
            waits_of_task += tasks_[number].num_waits;
        }
    }

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

    void take_task(const TaskRecord &task) {
        Lane &lane = lanes_.at(task.lane);
        const auto number = static_cast<std::int32_t>(tasks_.size());
        Task waiting{task.lane, ++lane.length, task.kind, task.num_operands, 0, -1, -1, -1};
        awaited_.clear();
        kept_.each(tables_, task, [&](std::int32_t awaited) {
            // What is received has been sent.
            if (task.kind != receive_task || awaited != number - 1) awaited_.push_back(awaited);
        });
        std::reverse(awaited_.begin(), awaited_.end());
        for (const bool local : {true, false})  // events, then flags
            for (const std::int32_t awaited : awaited_) {
                Task &producer = tasks_[awaited];
                if ((lanes_[producer.lane].rank == lane.rank) != local) continue;
                waits.emplace_back(number, awaited);
                ++waiting.num_waits;
                await_task(waiting, producer);
            }
        Rank &rank = ranks_[lane.rank];
        if (rank.wanted) bind_operands(task, rank.list.operands);
        tasks_.push_back(waiting);
    }

    void await_task(const Task &waiting, Task &awaited) {
        const Lane &producer = lanes_[awaited.lane];
        const std::int32_t rank = lanes_[waiting.lane].rank;
        if (producer.of_host || lanes_[waiting.lane].of_host) {
            awaited.tells_host = true;
            span_ = std::max(span_, awaited.sequence);
            waits_.push_back({code_wait_flag, 1, producer.number, awaited.sequence, producer.rank});
            return;
        }
        if (producer.rank == rank) {
            if (awaited.event < 0) {
                awaited.event = static_cast<std::int32_t>(events_.size());
                events_.push_back({-1, 0});
            }
            ++events_[awaited.event].waits;
            waits_.push_back({code_wait_event, 0, awaited.event, awaited.sequence, producer.number});
            return;
        }
        std::vector<std::int32_t> &known = ranks_[rank].flag_lanes;
        const auto [flag, is_new] =
            flags_.try_emplace(key_of(awaited.lane, rank), static_cast<std::int32_t>(known.size()));
        if (is_new) known.push_back(awaited.lane);
        signal(awaited, rank, flag->second);
        waits_.push_back({code_wait_flag, 0, flag->second, awaited.sequence, producer.rank});
    }

    // Let a task signal to a rank, once.
    void signal(Task &task, std::int32_t rank, std::int32_t slot) {
        for (std::int32_t at = task.first_signal; at >= 0; at = signals_[at].next)
            if (signals_[at].rank == rank) return;
        const auto made = static_cast<std::int32_t>(signals_.size());
        signals_.push_back({rank, slot, -1});
        (task.first_signal < 0 ? task.first_signal : signals_[task.last_signal].next) = made;
        task.last_signal = made;
        span_ = std::max(span_, task.sequence);
    }

    void bind_operands(const TaskRecord &task, std::vector<BoundOperandRecord> &bound) const {
        for (const OperandRecord &operand : tables_.operands.subspan(task.first_operand, task.num_operands)) {
            const RegionRecord &region = tables_.regions[operand.region];
            const BufferRecord &buffer = tables_.buffers[region.buffer];
            BoundOperandRecord &made = bound.emplace_back();
            made.buffer = region.buffer;
            made.dtype = buffer.dtype;
            made.factor = operand.factor;
            made.op = operand.op;
            made.spare_rows = spare_rows(region, buffer);
            made.offset = (region.col * buffer.ld + region.row) * bytes_of(buffer.dtype);
            made.rows = region.rows;
            made.cols = region.cols;
            made.ld = buffer.ld;
            made.diagonal = operand.diagonal;
        }
    }

    // Write the waits, the body and what tells others of a task (premise P3).
    void emit(std::int32_t number, const Task &task, const Wait *first_wait) {
        const Lane &lane = lanes_[task.lane];
        Rank &rank = ranks_[lane.rank];
        std::vector<OperationRecord> &operations = rank.list.operations;
        OperationRecord operation;
        operation.lane = lane.number;
        operation.task = number;
        for (const Wait *wait = first_wait; wait != first_wait + task.num_waits; ++wait) {
            operation.code = wait->code;
            operation.in_host = wait->in_host;
            operation.slot = wait->slot;
            operation.value = wait->value;
            operation.peer = wait->peer;
            if (wait->code == code_wait_event) {
                Event &event = events_[wait->slot];
                operation.slot = event.slot;
                if (--event.waits == 0) rank.free_events.push_back(event.slot);
            }
            if (rank.wanted) operations.push_back(operation);
        }
        operation.in_host = 0;
        operation.slot = operation.peer = -1;
        operation.value = 0;
        if (task.kind != join_task && rank.wanted) {
            OperationRecord body = operation;
            body.code = task.kind;
            body.num_operands = task.num_operands;
            if (const LaneRecord &ends = tables_.lanes[static_cast<std::size_t>(task.lane)]; ends.kind == net_lane)
                body.peer = ends.rank == ends.source ? ends.destination : ends.source;
            if (task.num_operands != 0) body.first_operand = rank.num_operands;
            rank.num_operands += task.num_operands;
            operations.push_back(body);
        }
        operation.value = task.sequence;
        if (task.event >= 0) {
            operation.code = code_record;
            operation.slot = events_[task.event].slot = take_event(rank);
            if (rank.wanted) operations.push_back(operation);
        }
        operation.code = code_signal;
        if (task.tells_host && rank.wanted) {
            OperationRecord told = operation;
            told.in_host = 1;
            told.slot = lane.number;
            operations.push_back(told);
        }
        for (std::int32_t at = task.first_signal; at >= 0; at = signals_[at].next) {
            operation.slot = signals_[at].slot;
            operation.peer = signals_[at].rank;
            if (rank.wanted) operations.push_back(operation);
        }
    }

    // An event that every wait for its last record stands before in the list.
    std::int32_t take_event(Rank &rank) {
        if (rank.free_events.empty()) return rank.list.num_events++;
        const std::int32_t slot = rank.free_events.back();
        rank.free_events.pop_back();
        return slot;
    }

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

namespace {

using ByteArray = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;
using Numbers = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

// Lists of operations, waits and the span; with `rank` below 0 lists of all ranks are made, else others are empty. A
// list has operations and bound operands (bytes), the number of events, and the lane that writes each flag in its
// rank's memory, made of all ranks. Waits are the waiting and the awaited task of each, in turns.
auto lower(const HeldTables &held, std::size_t num_ranks, std::int32_t rank) {
    Lowerer lowerer(held.view(), num_ranks, rank);
    {
        nb::gil_scoped_release unlocked;
        lowerer.run();
    }
    std::vector<std::tuple<ByteArray, ByteArray, std::int32_t, Numbers>> lists;
    for (std::size_t r = 0; r < num_ranks; ++r) {
        RankOperations &list = lowerer.list(r);
        lists.emplace_back(as_bytes(std::move(list.operations)), as_bytes(std::move(list.operands)), list.num_events,
                           as_array<std::int32_t>(std::vector(lowerer.flag_lanes(r))));
    }
    return std::make_tuple(std::move(lists), as_array<std::int32_t>(std::move(lowerer.waits)), lowerer.span());
}

}  // namespace

void bind_lowering(nb::module_ &m) { m.def("lower", &lower, nb::arg("tables"), nb::arg("num_ranks"), nb::arg("rank")); }

}  // namespace uncut

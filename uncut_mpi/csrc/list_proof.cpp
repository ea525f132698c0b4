// The proof that operation lists imply every await of their schedule: planning/verify_lists.py says what that means.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "locations.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

std::string text(std::int64_t number) { return std::to_string(number); }

const char *name_of(std::uint8_t code) {
    return code == code_wait_event  ? "WAIT_EVENT"
           : code == code_wait_flag ? "WAIT_FLAG"
           : code == code_record    ? "RECORD"
                                    : "SIGNAL";
}

constexpr const char *never = ", which is signalled not earlier in the global order, if at all";

bool holds(std::int32_t index, std::size_t size) { return index >= 0 && static_cast<std::size_t>(index) < size; }

// One rank's list, whose operations are known to stand in the places of their tasks, on their lanes.
struct ListView {
    std::span<const OperationRecord> operations;
    std::span<const LaneRecord> flag_lanes;
    std::int32_t num_events;
};

class ListProof {
  public:
    ListProof(const ScheduleTables &tables, std::vector<ListView> lists, std::int32_t span)
        : tables_(tables), lists_(std::move(lists)), span_(span), lanes_(tables.lanes.size()), ranks_(lists_.size()) {
        for (std::size_t l = 0; l < lanes_.size(); ++l) {
            std::vector<std::int32_t> &of_rank = ranks_.at(tables.lanes[l].rank).lanes;
            lanes_[l].number = static_cast<std::int32_t>(of_rank.size());
            of_rank.push_back(static_cast<std::int32_t>(l));
        }
        for (std::size_t r = 0; r < lists_.size(); ++r) {
            ranks_[r].events.assign(lists_[r].num_events, {-1, 0});
            ranks_[r].flags.resize(lists_[r].flag_lanes.size());
        }
    }

    // Return how many awaits between lanes the lists imply. What is wrong first, in the global order, is a
    // std::invalid_argument.
    std::int64_t run() {
        std::int64_t proven = 0;
        sequence_.reserve(tables_.tasks.size());
        for (const TaskRecord &task : tables_.tasks) {
            task_ = static_cast<std::int32_t>(sequence_.size());
            lane_ = task.lane;
            rank_ = task.rank;
            sequence_.push_back(++lanes_[lane_].length);
            Rank &rank = ranks_[rank_];
            const std::span<const OperationRecord> operations = lists_[rank_].operations;
            for (; rank.next < operations.size() && operations[rank.next].task == task_; ++rank.next)
                operate(operations[rank.next]);
            if (task.kind == receive_task) {  // messages between two lanes keep their order
                const Reach sent{tables_.tasks[task_ - 1].lane, sequence_[task_ - 1]};
                lanes_[lane_].waits.push_back({lanes_[lane_].length, sent});
                lanes_[lane_].furthest[sent.lane] = sent.sequence;
            }
            for (const std::int32_t awaited : tables_.awaits.subspan(task.first_await, task.num_awaits)) {
                const std::int32_t lane = tables_.tasks[awaited].lane;
                if (lane == lane_) continue;
                if (!is_over({lane, sequence_[awaited]}))
                    throw std::invalid_argument("rank " + text(rank_) + ": the lists let task " + text(task_) +
                                                " (lane " + text(lane_) + ") start before task " + text(awaited) +
                                                " (rank " + text(tables_.tasks[awaited].rank) + ", lane " + text(lane) +
                                                "), which it awaits, is over");
                ++proven;
            }
        }
        return proven;
    }

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

    // What is over when a wait is.
    Reach awaited_by(const OperationRecord &wait) const {
        const Rank &rank = ranks_[rank_];
        const auto value = static_cast<std::int32_t>(wait.value);
        if (wait.code == code_wait_event) {
            if (!holds(wait.slot, rank.events.size())) refuse(wait, "names an event that does not exist");
            const Reach &held = rank.events[wait.slot];
            if (held.lane < 0 || lanes_[held.lane].number != wait.peer || held.sequence != value)
                refuse(wait, "waits for task " + text(value) + " of lane " + text(wait.peer) + ", of which event " +
                                 text(wait.slot) + " holds no record there");
            return held;
        }
        if (wait.in_host != 0) {
            if (!holds(wait.peer, ranks_.size()) || !holds(wait.slot, ranks_[wait.peer].lanes.size()))
                refuse(wait, "names a flag in host memory that does not exist");
            const std::int32_t lane = ranks_[wait.peer].lanes[wait.slot];
            if (value <= 0 || value > lanes_[lane].told)
                refuse(wait, "waits for " + text(value) + " of lane " + text(lane) + never);
            return {lane, value};
        }
        if (!holds(wait.slot, rank.flags.size())) refuse(wait, "names a flag that does not exist");
        const Flag &flag = rank.flags[wait.slot];
        const auto what = [&] { return "waits for " + text(value) + " in flag " + text(wait.slot); };
        if (value <= 0 || value > flag.value) refuse(wait, what() + never);
        if (tables_.lanes[flag.lane].rank != wait.peer)
            refuse(wait, what() + " as if rank " + text(wait.peer) + " signalled it; rank " +
                             text(tables_.lanes[flag.lane].rank) + " does");
        // The first signal of so much or more stands behind task `value` of the lane: values are sequences.
        return {flag.lane, value};
    }

    void record(const OperationRecord &operation) {
        Rank &rank = ranks_[rank_];
        const Reach own{lane_, lanes_[lane_].length};
        if (!holds(operation.slot, rank.events.size())) refuse(operation, "names an event that does not exist");
        if (static_cast<std::int32_t>(operation.value) != own.sequence)
            refuse(operation, "records " + text(operation.value) + ", but its task is task " + text(own.sequence) +
                                  " of its lane");
        if (std::exchange(rank.recorded, task_) == task_) refuse(operation, "records a task twice");
        rank.events[operation.slot] = own;
    }

    void signal(const OperationRecord &operation) {
        if (operation.in_host != 0) return tell_host(operation);
        if (!holds(operation.peer, ranks_.size()) || operation.peer == rank_ ||
            !holds(operation.slot, ranks_[operation.peer].flags.size()))
            refuse(operation, "names a flag of rank " + text(operation.peer) + " that does not exist");
        Flag &flag = ranks_[operation.peer].flags[operation.slot];
        const auto what = [&] {
            return "signals " + text(operation.value) + " to flag " + text(operation.slot) + " of rank " +
                   text(operation.peer);
        };
        if (std::memcmp(&lists_[operation.peer].flag_lanes[operation.slot], &tables_.lanes[lane_],
                        sizeof(LaneRecord)) != 0)
            refuse(operation, what() + ", whose list says that another lane does");
        if (flag.lane >= 0 && flag.lane != lane_)
            refuse(operation, what() + ", which lane " + text(flag.lane) + " signals too");
        flag = {lane_, told(operation, flag.value, what)};
    }

    // The flag is the lane's own, which no other can name.
    void tell_host(const OperationRecord &operation) {
        Lane &lane = lanes_[lane_];
        const auto what = [&] { return "signals " + text(operation.value) + " to the host"; };
        if (operation.slot != lane.number || operation.peer != -1)
            refuse(operation, what() + " in a flag of another lane");
        lane.told = told(operation, lane.told, what);
    }

    // Returns what a signal says in a flag that said so much before: the sequence of its task, once.
    template <typename What>
    std::int32_t told(const OperationRecord &operation, std::int32_t before, const What &what) const {
        const auto value = static_cast<std::int32_t>(operation.value);
        const std::int32_t sequence = lanes_[lane_].length;
        if (value != sequence) refuse(operation, what() + ", but its task is task " + text(sequence) + " of its lane");
        if (value == before) refuse(operation, what() + " twice");
        if (value > span_) refuse(operation, what() + ", beyond the span of " + text(span_));
        return value;
    }

    void operate(const OperationRecord &operation) {
        const bool is_body = operation.code <= code_combine || operation.code >= code_send;
        if (is_of_host(tables_.lanes[lane_].kind) && !is_body && operation.in_host == 0)
            refuse(operation, "is on a lane of the host, which waits and tells by flags in host memory alone");
        switch (operation.code) {
            case code_wait_event:
            case code_wait_flag: {
                const Reach over = awaited_by(operation);
                Lane &lane = lanes_[lane_];
                lane.waits.push_back({lane.length, over});
                std::int32_t &furthest = lane.furthest[over.lane];
                furthest = std::max(furthest, over.sequence);
                break;
            }
            case code_record: record(operation); break;
            case code_signal: signal(operation); break;
            default: break;
        }
    }

    // Whether the task at hand starts after `awaited`: mostly its lane has waited for that, or for more.
    bool is_over(const Reach &awaited) {
        const auto found = lanes_[lane_].furthest.find(awaited.lane);
        return (found != lanes_[lane_].furthest.end() && found->second >= awaited.sequence) || search(awaited);
    }

    // The same by way of other lanes: their waits are followed backwards, each once.
    bool search(const Reach &awaited) {
        for (const std::int32_t lane : std::exchange(reached_, {}))
            lanes_[lane].over = 0, lanes_[lane].followed = 0;
        std::vector<std::int32_t> todo{lane_};
        reached_ = {lane_};
        lanes_[lane_].over = lanes_[lane_].length;
        while (!todo.empty()) {
            Lane &lane = lanes_[todo.back()];
            if (lane.followed == lane.waits.size() || lane.waits[lane.followed].at > lane.over) {
                todo.pop_back();
                continue;
            }
            const Reach over = lane.waits[lane.followed++].over;
            Lane &other = lanes_[over.lane];
            if (over.sequence <= other.over) continue;
            if (other.over == 0) reached_.push_back(over.lane);
            other.over = over.sequence;
            if (over.lane == awaited.lane && over.sequence >= awaited.sequence) return true;
            todo.push_back(over.lane);
        }
        return false;
    }

    [[noreturn]] void refuse(const OperationRecord &operation, const std::string &what) const {
        throw std::invalid_argument("operation " + text(ranks_[rank_].next) + " of rank " + text(rank_) + " (" +
                                    name_of(operation.code) + " of task " + text(operation.task) + ") " + what);
    }

    ScheduleTables tables_;
    std::vector<ListView> lists_;
    std::int32_t span_;
    std::vector<Lane> lanes_;
    std::vector<Rank> ranks_;
    std::vector<std::int32_t> sequence_;           // of each task so far
    std::int32_t task_ = 0, lane_ = 0, rank_ = 0;  // at hand
    std::vector<std::int32_t> reached_;            // lanes of the search at hand
};

// The lists of all ranks are (operations, lanes of flags, events). Their operations stand in the places of their tasks,
// on their lanes.
std::int64_t prove_lists(const HeldTables &tables, const nb::list &lists, std::int32_t span) {
    std::deque<ArrayBytes> held;  // as long as the views
    std::vector<ListView> views;
    for (const nb::handle list : lists) {
        const auto &operations = held.emplace_back(list[0]), &flag_lanes = held.emplace_back(list[1]);
        views.push_back(
            {operations.records<OperationRecord>(), flag_lanes.records<LaneRecord>(), nb::cast<std::int32_t>(list[2])});
    }
    ListProof proof(tables.view(), std::move(views), span);
    nb::gil_scoped_release unlocked;
    return proof.run();
}

}  // namespace

void bind_list_proof(nb::module_ &m) {
    m.def("prove_lists", &prove_lists, nb::arg("tables"), nb::arg("lists"), nb::arg("span"),
          "Return how many awaits between lanes the lists imply. ValueError: what is wrong.");
}

}  // namespace uncut

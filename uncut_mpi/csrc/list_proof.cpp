#include "list_proof.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

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

}  // namespace

ListProof::ListProof(const ScheduleTables &tables, std::vector<ListView> lists, std::int32_t span)
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

std::int64_t ListProof::run() {
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
                throw std::invalid_argument("rank " + text(rank_) + ": the lists let task " + text(task_) + " (lane " +
                                            text(lane_) + ") start before task " + text(awaited) + " (rank " +
                                            text(tables_.tasks[awaited].rank) + ", lane " + text(lane) +
                                            "), which it awaits, is over");
            ++proven;
        }
    }
    return proven;
}

void ListProof::operate(const OperationRecord &operation) {
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

// What is over when a wait is.
ListProof::Reach ListProof::awaited_by(const OperationRecord &wait) const {
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

void ListProof::record(const OperationRecord &operation) {
    Rank &rank = ranks_[rank_];
    const Reach own{lane_, lanes_[lane_].length};
    if (!holds(operation.slot, rank.events.size())) refuse(operation, "names an event that does not exist");
    if (static_cast<std::int32_t>(operation.value) != own.sequence)
        refuse(operation,
               "records " + text(operation.value) + ", but its task is task " + text(own.sequence) + " of its lane");
    if (std::exchange(rank.recorded, task_) == task_) refuse(operation, "records a task twice");
    rank.events[operation.slot] = own;
}

// Returns what a signal says in a flag that said so much before: the sequence of its task, once.
template <typename What>
std::int32_t ListProof::told(const OperationRecord &operation, std::int32_t before, const What &what) const {
    const auto value = static_cast<std::int32_t>(operation.value);
    const std::int32_t sequence = lanes_[lane_].length;
    if (value != sequence) refuse(operation, what() + ", but its task is task " + text(sequence) + " of its lane");
    if (value == before) refuse(operation, what() + " twice");
    if (value > span_) refuse(operation, what() + ", beyond the span of " + text(span_));
    return value;
}

// The flag is the lane's own, which no other can name.
void ListProof::tell_host(const OperationRecord &operation) {
    Lane &lane = lanes_[lane_];
    const auto what = [&] { return "signals " + text(operation.value) + " to the host"; };
    if (operation.slot != lane.number || operation.peer != -1) refuse(operation, what() + " in a flag of another lane");
    lane.told = told(operation, lane.told, what);
}

void ListProof::signal(const OperationRecord &operation) {
    if (operation.in_host != 0) return tell_host(operation);
    if (!holds(operation.peer, ranks_.size()) || operation.peer == rank_ ||
        !holds(operation.slot, ranks_[operation.peer].flags.size()))
        refuse(operation, "names a flag of rank " + text(operation.peer) + " that does not exist");
    Flag &flag = ranks_[operation.peer].flags[operation.slot];
    const auto what = [&] {
        return "signals " + text(operation.value) + " to flag " + text(operation.slot) + " of rank " +
               text(operation.peer);
    };
    if (std::memcmp(&lists_[operation.peer].flag_lanes[operation.slot], &tables_.lanes[lane_], sizeof(LaneRecord)) != 0)
        refuse(operation, what() + ", whose list says that another lane does");
    if (flag.lane >= 0 && flag.lane != lane_)
        refuse(operation, what() + ", which lane " + text(flag.lane) + " signals too");
    flag = {lane_, told(operation, flag.value, what)};
}

// Whether the task at hand starts after `awaited`: mostly its lane has waited for that, or for more.
bool ListProof::is_over(const Reach &awaited) {
    const auto found = lanes_[lane_].furthest.find(awaited.lane);
    return (found != lanes_[lane_].furthest.end() && found->second >= awaited.sequence) || search(awaited);
}

// The same by way of other lanes: their waits are followed backwards, each once.
bool ListProof::search(const Reach &awaited) {
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

void ListProof::refuse(const OperationRecord &operation, const std::string &what) const {
    throw std::invalid_argument("operation " + text(ranks_[rank_].next) + " of rank " + text(rank_) + " (" +
                                name_of(operation.code) + " of task " + text(operation.task) + ") " + what);
}

}  // namespace uncut

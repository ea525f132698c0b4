// Copies between nodes: planning/crossing.py.
//
// A schedule goes by task by task. A copy from a memory of one node to one of another becomes a pair, SEND and RECV,
// one behind the other. What awaits it, or it awaits, is dealt to the two by the node that it is on.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "locations.hpp"
#include "tables.hpp"

namespace uncut {

class Crossing {
  public:
    Crossing(const ScheduleTables &from, int num_ranks)
        : from_(from), num_ranks_(num_ranks), last_(from.lanes.size(), -1) {
        for (int rank = 0; rank < num_ranks; ++rank) {
            const auto node = static_cast<std::size_t>(node_of_rank(rank));
            if (node >= ranks_.size()) ranks_.resize(node + 1);
            ranks_[node].push_back(rank);
        }
    }

    // Whether any copy goes from node to node.
    bool any() const {
        return std::ranges::any_of(from_.tasks, [this](const TaskRecord &task) { return crosses(task); });
    }

    // Once. Throws std::invalid_argument where a task awaits one of another node that no copy comes from.
    void run(Tables &out) {
        TableWriter writer(&out, num_ranks_, std::numeric_limits<std::int32_t>::max());
        out_ = &writer;
        made_.reserve(from_.tasks.size());
        for (const TaskRecord &task : from_.tasks) {
            crosses(task) ? cross(task) : pass(task);
            last_[static_cast<std::size_t>(task.lane)] = static_cast<std::int32_t>(made_.size()) - 1;
        }
    }

  private:
    // What a task has become: one on its node, or one on each of two.
    struct Made {
        std::array<std::int32_t, 2> tasks{-1, -1};
        std::array<int, 2> nodes{-1, -1};
        std::int32_t on(int node) const { return nodes[0] == node ? tasks[0] : nodes[1] == node ? tasks[1] : -1; }
    };

    bool crosses(const TaskRecord &task) const {
        return task.kind == copy_task &&
               from_.locations->node(location_of(task, 0)) != from_.locations->node(location_of(task, 1));
    }

    // The rank that sends or receives: the owner of the memory. For memory of a node it is the issuer, if that is
    // there, else the rank in the same place.
    int rank_at(const TaskRecord &task, std::size_t operand) const {
        const int location = location_of(task, operand), owner = from_.locations->rank(location);
        if (owner != nobody) return owner;
        const int node = from_.locations->node(location);
        if (node_of_rank(task.rank) == node) return task.rank;
        const std::vector<int> &here = ranks_[static_cast<std::size_t>(node)],
                               &there = ranks_[static_cast<std::size_t>(node_of_rank(task.rank))];
        const auto place = std::ranges::find(there, task.rank) - there.begin();
        return here[static_cast<std::size_t>(place) % here.size()];
    }

    // What a part of a task awaits on its node. What is on neither node of the task would need a message of its own.
    void deal_awaits(const TaskRecord &task, int node, int other, std::vector<std::int32_t> &awaits) const {
        awaits.clear();
        const auto take = [&](std::int32_t awaited) {
            const Made &made = made_[static_cast<std::size_t>(awaited)];
            if (const std::int32_t here = made.on(node); here >= 0) {
                awaits.push_back(here);
            } else if (other < 0 || made.on(other) < 0) {
                throw std::invalid_argument("task " + std::to_string(made_.size()) + " awaits task " +
                                            std::to_string(awaited) + " of another node, from which it copies nothing");
            }
        };
        for (std::int32_t at = 0; at < task.num_awaits; ++at)
            take(from_.awaits[task.first_await + at]);
        // What went before on the lane may be on another lane now.
        const std::int32_t before = last_[static_cast<std::size_t>(task.lane)];
        if (before >= 0 && made_[static_cast<std::size_t>(before)].on(node) >= 0) take(before);
    }

    OperandRecord moved(const OperandRecord &operand) {
        OperandRecord made = operand;
        const RegionRecord &r = from_.regions[static_cast<std::size_t>(operand.region)];
        made.region = out_->region({r.buffer, r.row, r.col, r.rows, r.cols});
        return made;
    }

    void pass(const TaskRecord &task) {
        const int node = node_of_rank(task.rank);
        const LaneRecord &lane = from_.lanes[static_cast<std::size_t>(task.lane)];
        std::vector<OperandRecord> operands;
        for (std::size_t at = 0; at < task.num_operands; ++at)
            operands.push_back(moved(from_.operands[task.first_operand + at]));
        deal_awaits(task, node, -1, sent_);
        const std::int32_t on = out_->lane(lane.rank, static_cast<LaneKind>(lane.kind), lane.source, lane.destination);
        Made &made = made_.emplace_back();
        made.tasks[0] = out_->task(static_cast<Kind>(task.kind), on, task.group, operands, sent_);
        made.nodes[0] = node;
    }

    void cross(const TaskRecord &task) {
        const int to = from_.locations->node(location_of(task, 0)), from = from_.locations->node(location_of(task, 1));
        const int receiver = rank_at(task, 0), sender = rank_at(task, 1);
        const OperandRecord written = moved(from_.operands[task.first_operand]),
                            read = moved(from_.operands[task.first_operand + 1]);
        if (read.op != op_n) throw std::invalid_argument("a copy from node to node transposes");
        deal_awaits(task, from, to, sent_);
        deal_awaits(task, to, from, received_);
        Made made;
        made.nodes = {from, to};
        made.tasks[0] =
            out_->task(send_task, out_->lane(sender, net_lane, sender, receiver), task.group, {&read, 1}, sent_);
        received_.push_back(made.tasks[0]);
        made.tasks[1] = out_->task(receive_task, out_->lane(receiver, net_lane, sender, receiver), task.group,
                                   {&written, 1}, received_);
        made_.push_back(made);
    }

    const RegionRecord &region_of(const TaskRecord &task, std::size_t operand) const {
        return from_.regions[static_cast<std::size_t>(from_.operands[task.first_operand + operand].region)];
    }
    int location_of(const TaskRecord &task, std::size_t operand) const {
        return from_.buffers[static_cast<std::size_t>(region_of(task, operand).buffer)].location;
    }
    int node_of_rank(int rank) const { return from_.locations->node(rank); }  // its device has its number

    ScheduleTables from_;
    int num_ranks_;
    std::vector<std::vector<int>> ranks_;  // of each node
    TableWriter *out_ = nullptr;
    std::vector<Made> made_;          // of each task
    std::vector<std::int32_t> last_;  // task of each lane
    std::vector<std::int32_t> sent_, received_;
};

}  // namespace uncut

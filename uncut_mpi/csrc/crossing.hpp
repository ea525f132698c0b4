// Copies between nodes: planning/crossing.py.
//
// A schedule goes by task by task. A copy from a memory of one node to one of another becomes a pair, SEND and RECV,
// one behind the other. What awaits it, or it awaits, is dealt to the two by the node that it is on.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "locations.hpp"
#include "tables.hpp"

namespace uncut {

class Crossing {
  public:
    Crossing(const ScheduleTables &from, int num_ranks);

    // Whether any copy goes from node to node.
    bool any() const;
    // Once. Throws std::invalid_argument where a task awaits one of another node that no copy comes from.
    void run(Tables &out);

  private:
    // What a task has become: one on its node, or one on each of two.
    struct Made {
        std::array<std::int32_t, 2> tasks{-1, -1};
        std::array<int, 2> nodes{-1, -1};
        std::int32_t on(int node) const { return nodes[0] == node ? tasks[0] : nodes[1] == node ? tasks[1] : -1; }
    };

    bool crosses(const TaskRecord &task) const;
    int rank_at(const TaskRecord &task, std::size_t operand) const;
    void deal_awaits(const TaskRecord &task, int node, int other, std::vector<std::int32_t> &awaits) const;
    OperandRecord moved(const OperandRecord &operand);
    void pass(const TaskRecord &task);
    void cross(const TaskRecord &task);

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

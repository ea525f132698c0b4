// The memories of a job, looked up by number in the table of model/locations.py. A device's number is its rank.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "records.hpp"

namespace uncut {

class Locations {
  public:
    Locations() = default;
    explicit Locations(std::span<const LocationRecord> table) : table_(table.begin(), table.end()) {
        for (const LocationRecord &one : table_) {
            num_ends_ = std::max(num_ends_, one.end + 1);
            num_nodes_ = std::max(num_nodes_, one.node + 1);
        }
    }

    int count() const { return static_cast<int>(table_.size()); }
    bool has(int at) const { return at >= 0 && at < count(); }
    bool in_host(int at) const { return table_[at].space == host_space; }
    int node(int at) const { return table_[at].node; }
    int rank(int at) const { return table_[at].rank; }  // whose it is, or nobody's
    int end(int at) const { return table_[at].end; }    // of links and lanes to it
    int num_ends() const { return num_ends_; }          // numbered first
    int num_nodes() const { return num_nodes_; }

  private:
    std::vector<LocationRecord> table_;
    int num_ends_ = 0, num_nodes_ = 0;
};

// All tables of a schedule.
struct ScheduleTables : TaskTables {
    std::span<const BufferRecord> buffers;
    std::span<const LaneRecord> lanes;
    const Locations *locations = nullptr;
};

}  // namespace uncut

// A schedule of few large products and its simulated run, both made at once: what a search looks at.
#pragma once

#include <cstdint>
#include <vector>

#include "kblocks_scheduler.hpp"
#include "simulator.hpp"

namespace uncut {

struct KRun {
    // Checked, and not laid out.
    KInput input;
    std::vector<std::int64_t> room;  // bytes that each rank has for its buffers
    std::int64_t most_tasks = 0;     // a schedule of more is not simulated

    bool begun = false;
    bool fits = false;  // whether buffers have the room; there is nothing else if not
    KTables tables{};
    Simulated times{};   // empty if there are too many tasks
    double seconds = 0;  // end of the last task

    SimulatedTables view() const {
        return {tables.tasks, tables.operands, tables.regions, tables.awaits, input.buffers, tables.lanes};
    }
    void make(const SimulatedMachine &machine);

    // Of each rank the end of its last product, 0 without any, and how many numbers all of them multiply.
    struct Progress {
        std::vector<double> end;
        std::vector<std::int64_t> elements;
    };
    Progress progress() const;
};

}  // namespace uncut

// A schedule of few large products and its simulated run, both made at once: what a search looks at. Copies between
// nodes run in halves (crossing.hpp); the schedule has them whole.
#pragma once

#include <cstdint>
#include <vector>

#include "kblocks_layout.hpp"
#include "simulations.hpp"

namespace uncut {

struct KRun {
    const KRequest &request;
    std::vector<std::int64_t> room;  // bytes that each rank has for its buffers
    std::int64_t most_tasks = 0;     // a schedule of more is given up
    // Whether tables and times are kept. A search has hundreds of runs and looks at few of them. Of these it makes
    // another one then, since memory that is written once takes longer than to use the same again.
    bool keeps = false;

    bool begun = false;
    bool fits = false;           // whether buffers have the room; there is nothing else if not
    std::int64_t num_tasks = 0;  // one more than there may be if there are too many
    // Nothing if there are too many tasks.
    double seconds = 0;  // until the last task has ended, at the power limit
    // Of each rank the end of the last product or copy from its device, at the power limit, 0 without any, and how many
    // numbers it multiplies.
    std::vector<double> end{};
    std::vector<std::int64_t> elements{};
    std::int64_t num_products = 0;
    std::int64_t moved_bytes = 0;  // by copies from one memory to another
    std::int64_t held_bytes = 0;   // in buffers of all ranks
    // If they are kept.
    Tables tables{};
    std::vector<BufferRecord> buffers{};
    Simulated times{};

    // Once.
    void make(Workplace &at);

  private:
    void sum_up(const Tables &made, const Simulated &run, const KLayout &layout);
};

}  // namespace uncut

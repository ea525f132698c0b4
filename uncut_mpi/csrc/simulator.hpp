// Discrete-event simulation of a schedule on a machine; planning/simulate.py says what is modelled.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "costs.hpp"
#include "locations.hpp"
#include "records.hpp"

namespace uncut {

// A link is source * num_ends + destination, by the ends of lanes. Bytes and seconds throughout.
struct SimulatedMachine {
    int num_ranks = 0, num_ends = 0;
    std::vector<double> bandwidth, latency;  // per link
    std::vector<double> port_capacity;       // bytes per second
    std::vector<std::int64_t> port_first;    // ports + 1 indices into the next two
    std::vector<std::int64_t> port_links;
    std::vector<double> port_weights;
    std::vector<std::vector<std::pair<std::size_t, double>>> ports_of;  // (port, weight) per link: by `prepare`

    std::vector<double> gemm_rate;                        // flop/s [dtype * num_ranks + rank], 0 where unknown
    std::vector<ProductCost> products;                    // per dtype
    std::vector<std::int64_t> multiprocessors;            // per rank
    std::vector<double> combine_rate, half_combine_rate;  // bytes per second, per rank
    // (row width in bytes, share of the bandwidth): model/costs.py
    std::vector<std::pair<double, double>> row_device, row_in, row_out, row_local;

    double host_copy_rate = 0;  // bytes per second of a rank's worker
    // Bytes per second of the disk, and what each call of the system takes.
    double file_read_rate = 0, file_write_rate = 0;
    double file_call_s = 0;
    bool on_disk = false;             // whether what is in host memory stands for what is in files
    double host_transposed_rate = 0;  // elements per second that it transposes
    double transposing_share = 1;     // of a COMBINE's rate, at which a device transposes
    double combine_start = 0;
    double copy_s = 0, gemm_s = 0, combine_s = 0, wait_s = 0, signal_s = 0, event_s = 0;
    double event_latency = 0, engine_latency = 0, kernel_latency = 0, flag_latency = 0;
    double rest_gain = 1;  // of the time that a device rests: what it takes off `ProductCost::sustained`
    double wait_lane = 0, signal_lane = 0;  // time of a lane for its waits for flags, and for each signal
    double call_s = 0;                      // before anything is issued
    int issuing_threads = 0;                // 0: one per rank
    bool serial_copies = false;             // a device serves its copies one way one after another

    // Once, when all else is set.
    void prepare();
};

struct SimulatedTables {
    std::span<const TaskRecord> tasks;
    std::span<const OperandRecord> operands;
    std::span<const RegionRecord> regions;
    std::span<const std::int32_t> awaits;
    std::span<const BufferRecord> buffers;
    std::span<const LaneRecord> lanes;
    const Locations *locations = nullptr;
};

struct Simulated {
    std::vector<double> start, end;  // by task
    std::vector<double> throttled;   // by rank: what its products take longer at the power limit
    void clear() {
        for (std::vector<double> *const one : {&start, &end, &throttled})
            one->clear();
    }
    double seconds() const {
        const auto most = [](const std::vector<double> &of) {
            return of.empty() ? 0.0 : *std::ranges::max_element(of);
        };
        return most(end) + most(throttled);
    }
};

// Simulates one schedule after the other on a machine, which has to live as long. What memory it takes it keeps for the
// next one: to get it anew takes a quarter of a small simulation.
class Simulator {
  public:
    explicit Simulator(const SimulatedMachine &machine);
    ~Simulator();

    // Of a checked schedule; throws std::invalid_argument for ranks that the machine lacks or a type without a rate.
    void run(const SimulatedTables &tables, Simulated &result);

  private:
    class State;
    std::unique_ptr<State> state_;
};

// The same for one schedule alone.
Simulated simulate(const SimulatedTables &tables, const SimulatedMachine &machine);

}  // namespace uncut

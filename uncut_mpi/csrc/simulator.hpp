// Discrete-event simulation of a schedule on a machine; planning/simulate.py says what is modelled.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "costs.hpp"
#include "locations.hpp"
#include "records.hpp"

namespace uncut {

// A link is source * num_ends + destination, by the ends of lanes. Bytes and seconds throughout.
struct SimulatedMachine {
    int num_ranks = 0, num_ends = 0;
    std::vector<double> bandwidth, latency;                                 // per link
    std::vector<double> port_capacity;                                      // bytes per second
    std::vector<std::tuple<std::size_t, std::uint32_t, double>> port_uses;  // link, port, weight; by link

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
    double rest_gain = 1;             // of the time that a device rests: what it takes off `ProductCost::sustained`
    // IssueCosts of model/costs.py.
    double copy_s = 0, gemm_s = 0, combine_s = 0, combine_start_s = 0, wait_s = 0, signal_s = 0, event_s = 0;
    double event_latency_s = 0, engine_latency_s = 0, kernel_latency_s = 0, flag_latency_s = 0;
    double wait_lane_s = 0, signal_lane_s = 0, call_s = 0;
    int issuing_threads = 0;     // 0: one per rank
    bool serial_copies = false;  // a device serves its copies one way one after another
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

}  // namespace uncut

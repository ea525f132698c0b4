// The scheduler of the Uncut-GEMMs paper (sections III-B to III-G) on a decomposition made in
// Python; planning/uncut.py says what each input means.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "pieces.hpp"
#include "tables.hpp"
#include "uncut_routing.hpp"

namespace uncut {

enum Routing : int { origin_routing, bw_routing, eta_routing };

struct Input : PlacedProblem {
    std::int64_t m = 0, n = 0, k = 0, tile = 0;
    std::int64_t most_tasks = 0;  // a schedule of more is given up

    bool caching = true, overlap = true, batch = true, lazy = true, eta_order = true;
    bool finish_first = false;  // with eta_order: opening a C tile counts against a sub-problem
    int routing = eta_routing;
    int chunks = 1, compute_lanes = 1;
    int chunks_per_hop = 0;  // of a chain, the first hop apart; 0: `chunks`, however long it is
    std::int64_t min_chunk_columns = 1, min_chunk_bytes = 1;

    std::vector<std::int64_t> row_starts, col_starts;  // where blocks begin, and the end of the last
    std::vector<std::int64_t> cell_rank;               // of each block, row by row
    // Of one block: the tiles of C that each of these ranks computes, in order, [col * tiles of m + row]; empty:
    // each cell's rank computes all of its block. Without batching and in the fixed order only.
    std::vector<std::vector<std::int64_t>> owned;
    std::vector<std::int64_t> a_panel, b_panel, c_panel, c_staging;  // buffer index per rank, or -1

    // Relays: tiles go over up to max_hops other ranks where that takes 1 / relay_gain of the direct link's
    // time or less. They keep copies in one buffer per rank and matrix, made at first use, each as if of the largest
    // tile.
    int max_hops = 0;
    double relay_gain = 1.0;
    int first_cache = 0;                                      // index of the first such buffer
    std::vector<std::int64_t> cache_bytes;                    // bytes per rank
    std::array<std::array<std::int64_t, 2>, 3> tile_shape{};  // rows and columns, per matrix
    std::array<std::int64_t, 3> tile_bytes{};
    std::vector<double> port_ps_per_byte;                      // what links share, per port
    std::vector<std::tuple<int, int, int, double>> port_uses;  // port, source, destination, weight

    std::vector<double> ps_per_byte;       // [source * ends + destination]: the devices, and host memory
    std::vector<std::int64_t> latency_ps;  // the same
    std::vector<double> ps_per_flop;       // per rank
};

struct UncutTables : Tables {
    std::vector<std::array<int, 3>> caches;  // rank, matrix and number of copies of the caches that relays need
    Time end = 0;                            // when the last task is over, by the model
};

}  // namespace uncut

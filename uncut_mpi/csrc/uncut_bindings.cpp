// Python's view of the scheduler: one call, whose tables numpy takes over without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "for_each.hpp"
#include "table_bytes.hpp"
#include "uncut_tables.hpp"

namespace nb = nanobind;

namespace uncut {

nb::tuple as_arrays(Tables &&tables) {
    return nb::make_tuple(as_bytes(std::move(tables.tasks)), as_bytes(std::move(tables.operands)),
                          as_bytes(std::move(tables.regions)), as_bytes(std::move(tables.awaits)),
                          as_bytes(std::move(tables.lanes)), tables.caches, tables.end);
}

namespace {

nb::tuple schedule_tables(const Input &input) {
    Tables tables;
    {
        nb::gil_scoped_release unlocked;
        tables = schedule_uncut(input);
    }
    return as_arrays(std::move(tables));
}

using Matrix = std::vector<std::vector<Time>>;

// For comparison with tests/helpers/routing.py.
std::tuple<int, std::vector<int>, std::vector<Time>> best_chain(const std::vector<Time> &eta, const Matrix &lam,
                                                                const Matrix &chunk_cost,
                                                                const std::vector<int> &destinations, int chunks) {
    const std::size_t n = destinations.size();
    if (n == 0) throw std::invalid_argument("best_chain needs a destination");
    Hops hops;
    hops.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
        const auto to = static_cast<std::size_t>(destinations[i]);
        Time best = never;
        for (std::size_t s = 0; s < eta.size(); ++s) {
            if (eta[s] >= never || s == to) continue;
            const Time start = std::max(eta[s], lam[s][to]);
            if (start + chunks * chunk_cost[s][to] < best) {
                best = start + chunks * chunk_cost[s][to];
                hops.source[i] = static_cast<int>(s);
                hops.first[i] = start_hop(start, chunk_cost[s][to], chunks);
            }
        }
        for (std::size_t j = 0; j < n; ++j) {
            hops.free[i * n + j] = lam[to][static_cast<std::size_t>(destinations[j])];
            hops.cost[i * n + j] = chunk_cost[to][static_cast<std::size_t>(destinations[j])];
        }
    }
    std::vector<int> order;
    ChainSearch().run(hops, chunks, order);
    std::vector<int> ranks;
    std::vector<Time> arrivals;
    Arrival arrival{0, 0};
    for (std::size_t h = 0; h < n; ++h) {
        const auto to = static_cast<std::size_t>(order[h]);
        if (h == 0) {
            arrival = hops.first[to];
        } else {
            const std::size_t link = static_cast<std::size_t>(order[h - 1]) * n + to;
            arrival = next_hop(arrival, hops.free[link], hops.cost[link], chunks);
        }
        ranks.push_back(destinations[to]);
        arrivals.push_back(arrival.last);
    }
    return {hops.source[static_cast<std::size_t>(order[0])], ranks, arrivals};
}

}  // namespace

#define FIELD(of, name) input.def_rw(#name, &of::name);

void bind_uncut_scheduler(nb::module_ &m) {
    nb::class_<Input> input(m, "UncutInput", "What the scheduler of the Uncut-GEMMs paper works on.");
    FOR_EACH(FIELD, Input, m, n, k, tile, num_ranks, most_tasks, rows, cols, op_a, op_b, reads_c, product, rounds_c,
             itemsize, accumulator_itemsize, caching, overlap, batch, lazy, eta_order, finish_first, chunks,
             chunks_per_hop, compute_lanes, serial_copies, min_chunk_columns, min_chunk_bytes, row_starts, col_starts,
             cell_rank, owned, a_panel, b_panel, c_panel, c_staging, max_hops, relay_gain, first_cache, cache_room,
             slot_shape, slot_bytes, port_ps_per_byte, port_uses, ps_per_byte, latency_ps, ps_per_flop)
    input.def(nb::init<>())
        .def(nb::init<const Input &>())
        .def("set_pieces",
             [](Input &self, nb::handle locations, nb::handle buffers, nb::handle pieces) {
                 const ArrayBytes location_bytes(locations), buffer_bytes(buffers), piece_bytes(pieces);
                 self.locations = Locations(location_bytes.records<LocationRecord>());
                 self.pieces = pieces_of(self.locations, self.op_a != op_n, self.op_b != op_n,
                                         buffer_bytes.records<BufferRecord>(), piece_bytes.records<PieceRecord>());
             })
        .def("set_routing", [](Input &self, int routing) {
            if (routing < 0 || routing > 2) throw std::invalid_argument("routing is 0, 1 or 2");
            self.routing = static_cast<Routing>(routing);
        });
    m.def("schedule_uncut", &schedule_tables, nb::arg("input"),
          "Return (tasks, operands, regions, awaits, lanes, caches, end in picoseconds); tables as uint8 arrays, "
          "caches as (rank, matrix, slots). ValueError if there are more than `most_tasks`.");
    m.def("uncut_best_chain", &best_chain, nb::arg("eta"), nb::arg("lam"), nb::arg("chunk_cost"),
          nb::arg("destinations"), nb::arg("chunks"), "As best_chain of tests/helpers/routing.py, times as integers.");
}

}  // namespace uncut

// Python's view of the scheduler: one call, whose tables numpy takes over without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

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

void bind_uncut_scheduler(nb::module_ &m) {
    nb::class_<Input>(m, "UncutInput", "What the scheduler of the Uncut-GEMMs paper works on.")
        .def(nb::init<>())
        .def(nb::init<const Input &>())
        .def_rw("m", &Input::m)
        .def_rw("n", &Input::n)
        .def_rw("k", &Input::k)
        .def_rw("tile", &Input::tile)
        .def_rw("num_ranks", &Input::num_ranks)
        .def_rw("most_tasks", &Input::most_tasks)
        .def_rw("rows", &Input::rows)
        .def_rw("cols", &Input::cols)
        .def_rw("op_a", &Input::op_a)
        .def_rw("op_b", &Input::op_b)
        .def_rw("reads_c", &Input::reads_c)
        .def_rw("product", &Input::product)
        .def_rw("rounds_c", &Input::rounds_c)
        .def_rw("itemsize", &Input::itemsize)
        .def_rw("accumulator_itemsize", &Input::accumulator_itemsize)
        .def_rw("caching", &Input::caching)
        .def_rw("overlap", &Input::overlap)
        .def_rw("batch", &Input::batch)
        .def_rw("lazy", &Input::lazy)
        .def_rw("eta_order", &Input::eta_order)
        .def_rw("finish_first", &Input::finish_first)
        .def_rw("chunks", &Input::chunks)
        .def_rw("chunks_per_hop", &Input::chunks_per_hop)
        .def_rw("compute_lanes", &Input::compute_lanes)
        .def_rw("serial_copies", &Input::serial_copies)
        .def_rw("min_chunk_columns", &Input::min_chunk_columns)
        .def_rw("min_chunk_bytes", &Input::min_chunk_bytes)
        .def_rw("row_starts", &Input::row_starts)
        .def_rw("col_starts", &Input::col_starts)
        .def_rw("cell_rank", &Input::cell_rank)
        .def_rw("owned", &Input::owned)
        .def_rw("a_panel", &Input::a_panel)
        .def_rw("b_panel", &Input::b_panel)
        .def_rw("c_panel", &Input::c_panel)
        .def_rw("c_staging", &Input::c_staging)
        .def_rw("max_hops", &Input::max_hops)
        .def_rw("relay_gain", &Input::relay_gain)
        .def_rw("first_cache", &Input::first_cache)
        .def_rw("cache_room", &Input::cache_room)
        .def_rw("slot_shape", &Input::slot_shape)
        .def_rw("slot_bytes", &Input::slot_bytes)
        .def_rw("port_ps_per_byte", &Input::port_ps_per_byte)
        .def_rw("port_uses", &Input::port_uses)
        .def_rw("ps_per_byte", &Input::ps_per_byte)
        .def_rw("latency_ps", &Input::latency_ps)
        .def_rw("ps_per_flop", &Input::ps_per_flop)
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

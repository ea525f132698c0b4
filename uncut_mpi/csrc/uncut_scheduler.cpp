// The scheduler of the Uncut-GEMMs paper: one call, whose tables numpy takes over without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "for_each.hpp"
#include "table_bytes.hpp"
#include "uncut_order.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

UncutTables schedule_uncut(const Input &in) {
    const Tiling tiling(in);
    Links links(in);
    Records records(in, tiling);
    Router router(in, tiling, links, records);
    Result result(in, tiling, links, records);
    Order order(in, tiling, links, router, result);
    for (bool working = true; working;) {
        working = false;
        for (const Worker &w : tiling.workers) {
            if (!order.left(w)) continue;
            working = true;
            const Subproblem s = order.next(w);
            const std::array tiles{tiling.tile(w, side_a, s.i, s.p), tiling.tile(w, side_b, s.j, s.p)};
            for (const Tile &t : tiles)
                for (const int number : router.fetch(w, t))
                    order.arrived(tiling.workers[number], t);
            if (result.open(w, s.i, s.j)) order.opened(w, s.i, s.j);
            const Router::Source a = router.source(w, tiles[side_a]), b = router.source(w, tiles[side_b]);
            const Result::Done product = result.add(w, s, a, b);
            for (const Tile &t : tiles)
                router.was_read(w, t, product.task, product.end);
            order.advanced(w, s.i, s.j);
        }
    }
    UncutTables made = records.take();
    made.end = links.end();
    return made;
}

auto schedule_tables(const Input &input) {
    UncutTables tables;
    {
        nb::gil_scoped_release unlocked;
        tables = schedule_uncut(input);
    }
    return arrays_of(std::move(tables), std::move(tables.caches), tables.end);
}

}  // namespace

#define FIELD(of, name) input.def_rw(#name, &of::name);

void bind_uncut_scheduler(nb::module_ &m) {
    nb::class_<Input> input(m, "UncutInput",
                            "What the scheduler of the Uncut-GEMMs paper works on; planning/uncut.py fills it.");
    FOR_EACH(FIELD, Input, m, n, k, tile, num_ranks, most_tasks, op_a, op_b, reads_c, dtypes, caching, overlap, batch,
             lazy, eta_order, finish_first, routing, chunks, chunks_per_hop, compute_lanes, serial_copies,
             min_chunk_columns, min_chunk_bytes, row_starts, col_starts, cell_rank, owned, a_panel, b_panel, c_panel,
             c_staging, max_hops, relay_gain, first_cache, cache_bytes, tile_shape, tile_bytes, port_ps_per_byte,
             port_uses, ps_per_byte, latency_ps, ps_per_flop)
    // Pieces are those of A, B and C, as records, after extents and transposes; locations `with_ends`.
    input.def(nb::init<>())
        .def(nb::init<const Input &>())
        .def("set_pieces", [](Input &self, nb::handle locations, nb::handle buffers, nb::handle pieces) {
            place(self, locations, buffers, pieces);
        });
    m.def("schedule_uncut", &schedule_tables, nb::arg("input"),
          "Return (tasks, operands, regions, awaits, lanes, caches, end in picoseconds); tables as uint8 arrays, "
          "caches as (rank, matrix, tiles). TooManyTasksError if there are more than `most_tasks`.");
}

#undef FIELD

}  // namespace uncut

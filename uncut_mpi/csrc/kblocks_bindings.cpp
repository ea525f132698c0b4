// Python's view of the scheduler of few large products.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "kblocks_run.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

using Extent = std::tuple<std::int64_t, std::int64_t>;

nb::tuple as_arrays(KTables &&tables, const KInput &input) {
    return nb::make_tuple(as_bytes(std::move(tables.tasks)), as_bytes(std::move(tables.operands)),
                          as_bytes(std::move(tables.regions)), as_bytes(std::move(tables.awaits)),
                          as_bytes(std::move(tables.lanes)), as_bytes(std::vector<BufferRecord>(input.buffers)));
}

nb::tuple schedule_tables(const KInput &input) {
    require(!input.rank_bytes.empty(), "lay_out comes first");
    check_kblocks(input);
    KTables tables;
    {
        nb::gil_scoped_release unlocked;
        schedule_kblocks(input, tables);
    }
    return as_arrays(std::move(tables), input);
}

}  // namespace

void bind_kblocks_scheduler(nb::module_ &m) {
    nb::class_<KBlocking>(m, "KBlocking", "How a rank's part of a product is cut.")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, int, int, int, int, bool, int, int>(),
             nb::arg("extent"), nb::arg("first"), nb::arg("most"), nb::arg("growth"), nb::arg("columns"),
             nb::arg("rows"), nb::arg("halvings"), nb::arg("order"), nb::arg("whole"), nb::arg("tail_parts"),
             nb::arg("lookahead"));
    nb::class_<KPlaces>(m, "KBlocksPlaces", "Blocks of C, and which of them are in each band of rows.")
        .def("__init__",
             [](KPlaces *self, std::vector<std::int64_t> row_starts, const std::vector<std::vector<int>> &place_of) {
                 new (self) KPlaces{std::move(row_starts), place_of, {}};
             })
        .def("add", [](KPlaces &self, Extent rows, Extent cols) {
            self.blocks.push_back({{std::get<0>(rows), std::get<1>(rows)}, {std::get<0>(cols), std::get<1>(cols)}});
        });
    nb::class_<KInput>(m, "KBlocksInput", "What the scheduler of few large products works on.")
        .def(nb::init<>())
        .def(nb::init<const KInput &>())
        .def_rw("num_ranks", &KInput::num_ranks)
        .def_rw("trans_a", &KInput::trans_a)
        .def_rw("trans_b", &KInput::trans_b)
        .def_rw("reads_c", &KInput::reads_c)
        .def_rw("half", &KInput::half)
        .def_rw("combines", &KInput::combines)
        .def_rw("serial_copies", &KInput::serial_copies)
        .def_rw("itemsize", &KInput::itemsize)
        .def_rw("min_slice_bytes", &KInput::min_slice_bytes)
        .def_rw("first_block", &KInput::first_block)
        .def_rw("most_summands", &KInput::most_summands)
        .def_rw("most_tasks", &KInput::most_tasks)
        .def_rw("earliest", &KInput::earliest)
        .def_rw("at_owner", &KInput::at_owner)
        .def_rw("first_away", &KInput::first_away)
        .def_rw("row_blocks", &KInput::row_blocks)
        .def_rw("column_blocks", &KInput::column_blocks)
        .def_rw("halvings", &KInput::halvings)
        .def_rw("step", &KInput::step)
        .def_rw("multiple", &KInput::multiple)
        .def_rw("dtype", &KInput::dtype)
        .def_rw("accumulator", &KInput::accumulator)
        .def_rw("accumulator_itemsize", &KInput::accumulator_itemsize)
        .def_rw("buffer_alignment", &KInput::buffer_alignment)
        .def_rw("column_alignment", &KInput::column_alignment)
        .def_rw("k_starts", &KInput::k_starts)
        .def_rw("product_lanes", &KInput::product_lanes)
        .def("set_origin",
             [](KInput &self, int matrix, bool on_host, int rank) {
                 if (matrix < 0 || matrix > 2) throw std::invalid_argument("matrix is 0, 1 or 2");
                 self.origin[static_cast<std::size_t>(matrix)] = {on_host, rank};
             })
        .def("set_buffers",
             [](KInput &self, nb::handle table) {
                 const ArrayBytes held(table);
                 const auto buffers = held.records<BufferRecord>();
                 self.buffers.assign(buffers.begin(), buffers.end());
             })
        .def("set_places", &set_places)
        .def_prop_ro("places",
                     [](const KInput &self) {
                         std::vector<std::tuple<Extent, Extent, std::vector<int>>> found;
                         for (const KPlace &one : self.places)
                             found.emplace_back(Extent{one.rows.first, one.rows.last},
                                                Extent{one.cols.first, one.cols.last}, one.ranks);
                         return found;
                     })
        .def("align",
             [](KInput &self, std::size_t place, std::size_t split, bool copies_a, bool copies_b, bool apart,
                std::int64_t k_step) {
                 require(k_step >= 1, "products have at least one element along k");
                 self.places.at(place).alignment.at(split) = {{copies_a, copies_b}, apart, k_step};
             })
        .def("lay_out",
             [](KInput &self) {
                 require(self.buffers.size() == 3, "set_buffers comes first, and lay_out once");
                 check_kblocks(self);
                 lay_out_kblocks(self);
                 return self.rank_bytes;
             })
        .def("add_steps",
             [](KInput &self, const KBlocking &how) {
                 const int split = static_cast<int>(self.moves.size());
                 self.rank_bytes.clear();
                 for (KMove &move : self.moves.emplace_back(make_steps(how)))
                     move.split = split;
                 return self.moves.back().size();
             })
        .def_prop_ro("steps_digest", [](const KInput &self) { return digest_of_steps(self.moves); });
    nb::class_<KRun>(m, "KBlocksRun", "A schedule of few large products and its simulated run.")
        .def(
            "__init__",
            [](KRun *self, const KInput &input, std::vector<std::int64_t> room, std::int64_t most_tasks, bool keeps) {
                check_kblocks(input);
                require(input.buffers.size() == 3, "a run is made of input that is not laid out");
                new (self) KRun{input, std::move(room), most_tasks, keeps};
            },
            nb::arg("input"), nb::arg("room"), nb::arg("most_tasks"), nb::arg("keeps") = false)
        .def_ro("keeps", &KRun::keeps)
        .def_ro("fits", &KRun::fits)
        .def_ro("num_tasks", &KRun::num_tasks)
        .def_ro("seconds", &KRun::seconds)
        .def_ro("moved_bytes", &KRun::moved_bytes)
        .def_ro("held_bytes", &KRun::held_bytes)
        .def("make",
             [](KRun &self, const SimulatedMachine &machine) {
                 require(!self.begun, "a run is begun once");
                 self.begun = true;
                 nb::gil_scoped_release unlocked;
                 Workplace place(machine);
                 self.make(place);
             })
        .def("tables",
             [](const KRun &self) {
                 require(self.keeps, "tables are kept by who asked for it");
                 return as_arrays(KTables(self.tables), self.input);
             })
        .def("times",
             [](const KRun &self) {
                 require(self.keeps, "times are kept by who asked for it");
                 return nb::make_tuple(as_array<double>(std::vector(self.times.start)),
                                       as_array<double>(std::vector(self.times.end)));
             })
        .def("progress", [](const KRun &self) { return std::make_tuple(self.progress.end, self.progress.elements); });
    m.def(
        "kblocks_steps",
        [](const KBlocking &how) {
            std::vector<std::tuple<int, std::int64_t, std::int64_t, int, int, int, int, bool>> found;
            for (const KMove &one : make_steps(how))
                found.emplace_back(one.step, one.first_k, one.last_k, one.first, one.last, one.top, one.bottom,
                                   one.early);
            return found;
        },
        nb::arg("how"), "Return (step, k start, k stop, first, last, top, bottom, early) of each step.");
    m.def("block_edges", &block_edges, nb::arg("extent"), nb::arg("blocks"), nb::arg("step"), nb::arg("multiple"),
          nb::arg("halvings"), "Return where blocks start, and the extent at the end.");
    m.def(
        "schedule_kblocks", &schedule_tables, nb::arg("input"),
        "Return (tasks, operands, regions, awaits, lanes, buffers) as uint8 arrays. ValueError if there are more than "
        "`most_tasks`.");
}

}  // namespace uncut

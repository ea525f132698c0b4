// Python's view of the scheduler of few large products.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "kblocks_scheduler.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

using Extent = std::tuple<std::int64_t, std::int64_t>;
using MoveTable = nb::ndarray<const std::int64_t, nb::shape<-1, 7>, nb::c_contig, nb::device::cpu>;
using Marks = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple schedule_tables(const KInput &input) {
    KTables tables;
    {
        nb::gil_scoped_release unlocked;
        tables = schedule_kblocks(input);
    }
    return nb::make_tuple(as_bytes(std::move(tables.tasks)), as_bytes(std::move(tables.operands)),
                          as_bytes(std::move(tables.regions)), as_bytes(std::move(tables.awaits)),
                          as_bytes(std::move(tables.lanes)));
}

}  // namespace

void bind_kblocks_scheduler(nb::module_ &m) {
    nb::class_<KInput>(m, "KBlocksInput", "What the scheduler of few large products works on.")
        .def(nb::init<>())
        .def_rw("rows", &KInput::rows)
        .def_rw("cols", &KInput::cols)
        .def_rw("row_starts", &KInput::row_starts)
        .def_rw("block_of", &KInput::block_of)
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
        .def_rw("earliest", &KInput::earliest)
        .def_rw("product_lanes", &KInput::product_lanes)
        .def("set_origin",
             [](KInput &self, int matrix, bool on_host, int rank) {
                 if (matrix < 0 || matrix > 2) throw std::invalid_argument("matrix is 0, 1 or 2");
                 self.origin[static_cast<std::size_t>(matrix)] = {on_host, rank};
             })
        .def("add_block", [](KInput &self) { self.blocks.emplace_back(); })
        .def("add_worker",
             [](KInput &self, int rank, Extent rows, Extent cols, Extent inner, std::vector<std::int64_t> heights,
                std::vector<std::int64_t> starts, std::array<int, 4> panels, std::int64_t direct_left, bool is_direct,
                std::int64_t k_step) {
                 self.blocks.back().members.push_back({rank, std::get<0>(rows), std::get<1>(rows), std::get<0>(cols),
                                                       std::get<1>(cols), std::get<0>(inner), std::get<1>(inner),
                                                       std::move(heights), std::move(starts), panels, direct_left,
                                                       is_direct, k_step});
             })
        .def("add_adder",
             [](KInput &self, int rank, std::vector<std::int64_t> firsts, std::vector<std::int64_t> lasts,
                std::vector<std::int64_t> places, std::vector<int> partial, int staging) {
                 self.blocks.back().adders.push_back(
                     {rank, std::move(firsts), std::move(lasts), std::move(places), std::move(partial), staging});
             })
        .def("add_moves", [](KInput &self, MoveTable table, Marks direct, Marks direct_at_home) {
            if (direct.shape(0) != table.shape(0) || direct_at_home.shape(0) != table.shape(0))
                throw std::invalid_argument("every step has a mark");
            const int split = static_cast<int>(self.moves.size());
            std::vector<KMove> &moves = self.moves.emplace_back();
            const auto rows = table.view();
            for (std::size_t at = 0; at < table.shape(0); ++at) {
                const auto number = [&](std::size_t which) { return static_cast<int>(rows(at, which)); };
                moves.push_back({number(0), split, rows(at, 1), rows(at, 2), number(3), number(4), number(5), number(6),
                                 direct(at) != 0, direct_at_home(at) != 0});
            }
        });
    m.def("schedule_kblocks", &schedule_tables, nb::arg("input"),
          "Return (tasks, operands, regions, awaits, lanes) as uint8 arrays.");
}

}  // namespace uncut

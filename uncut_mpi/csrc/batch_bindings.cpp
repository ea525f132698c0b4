// Python's view of the schedules of a batch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "batch.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

using Panels = std::vector<std::tuple<int, int, std::int64_t, std::int64_t>>;

}  // namespace

void bind_batch(nb::module_ &m) {
    // Buffers and pieces are those of A, B and C, locations `with_ends`, products m, n and k, all as records. Limits
    // are the constants of planning/batch.py in the order in which they stand there.
    nb::class_<Batch>(m, "Batch", "Schedules of a batch of products.")
        .def("__init__",
             [](Batch *self, int num_ranks, bool serial_copies, std::uint8_t op_a, std::uint8_t op_b, bool reads_c,
                const std::array<std::uint8_t, 3> &dtypes, nb::handle locations, nb::handle buffers, nb::handle pieces,
                nb::handle products, const std::vector<int> &devices, const std::vector<double> &rates,
                const std::vector<std::int64_t> &room, const std::array<std::int64_t, 7> &limits, double cut_s) {
                 PlacedProblem problem{num_ranks, serial_copies, op_a, op_b, reads_c, dtypes, {}, {}, {}};
                 const ArrayBytes users(buffers), held(pieces), shapes(products);
                 problem.locations = Locations(ArrayBytes(locations).records<LocationRecord>());
                 const auto records = users.records<BufferRecord>();
                 problem.users.assign(records.begin(), records.end());
                 new (self) Batch(std::move(problem), held.records<PieceRecord>(), shapes.records<ProductShape3>(),
                                  devices, rates, room,
                                  {limits[0], limits[1], limits[2], limits[3], limits[4], limits[5], limits[6], cut_s});
             })
        .def_prop_ro("work_of_homes", &Batch::work_of_homes)
        .def("arrange", [](Batch &self, bool all) { return self.arrange(all); })
        .def_prop_ro("num_sharing", &Batch::num_sharing)
        // (rank, matrix, rows, columns) of each.
        .def_prop_ro("panels",
                     [](const Batch &self) {
                         Panels found;
                         for (const BatchPanel &one : self.panels())
                             found.emplace_back(one.rank, one.matrix, one.rows, one.cols);
                         return found;
                     })
        .def("emit", [](Batch &self) {
            Tables made;
            self.emit(made);
            return arrays_of(std::move(made));
        });
}

}  // namespace uncut

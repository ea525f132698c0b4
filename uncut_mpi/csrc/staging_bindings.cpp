// Python's view of staging: what is used of each buffer, and a schedule's tables with the copies.
#include "staging.hpp"

#include "crossing.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

using Lane = std::array<std::int32_t, 4>;
using Given = std::tuple<std::int32_t, std::int32_t, std::int64_t, Lane, Lane>;

LaneRecord lane_of(const Lane &one) { return {one[0], one[1], one[2], one[3]}; }

// Once. A stand-in is (the caller's buffer, the one in its place, columns of a ring or 0, lane in, lane out), a lane
// (rank, kind, source, destination).
auto run(Staging &staging, int num_ranks, const std::vector<Given> &given) {
    std::vector<StandIn> stand_ins;
    for (const auto &[user, ours, columns, in, out] : given)
        stand_ins.push_back({user, ours, columns, lane_of(in), lane_of(out)});
    Tables made;
    {
        nb::gil_scoped_release unlocked;
        staging.run(num_ranks, stand_ins, made);
    }
    return arrays_of(std::move(made));
}

// What is left of copies between nodes; nothing where there are none.
nb::object cross(const HeldTables &tables, int num_ranks) {
    Tables made;
    {
        nb::gil_scoped_release unlocked;
        Crossing crossing(tables.view(), num_ranks);
        if (crossing.any()) crossing.run(made);
    }
    return made.tasks.empty() ? nb::none() : nb::cast(arrays_of(std::move(made)));
}

}  // namespace

void bind_staging(nb::module_ &m) {
    m.def("cross", &cross, nb::arg("tables"), nb::arg("num_ranks"),
          "Make pairs, SEND and RECV, of copies between nodes.");
    // `turned`: of each buffer whether it is stored the other way round than the schedule has it.
    nb::class_<Staging>(
        m, "Staging", "A schedule in which some of the caller's buffers get stand-ins, which all but some owners use.")
        .def(
            "__init__",
            [](Staging *self, const HeldTables &tables, nb::handle turned, bool reads_c) {
                new (self) Staging(tables.view(), ArrayBytes(turned).records<std::uint8_t>(), reads_c);
            },
            nb::keep_alive<1, 2>())
        // Of each buffer whether anybody cannot use it where it is, and the most rows and columns that a task uses.
        .def_prop_ro("used_by_others", &Staging::used_by_others)
        .def_prop_ro("rows", &Staging::rows)
        .def_prop_ro("cols", &Staging::cols)
        // Copies from and to buffers are made in pieces of so many elements at most (0: as they are); gives the tasks.
        .def("divide", [](Staging &self, const std::vector<std::int64_t> &most) { return self.divide(most); })
        .def("run", &run);
}

}  // namespace uncut

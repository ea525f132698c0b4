// Python's view of staging: what is used of each buffer, and a schedule's tables with the copies.
#include "staging.hpp"

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

nb::tuple run(Staging &staging, int num_ranks, const std::vector<Given> &given) {
    std::vector<StandIn> stand_ins;
    for (const auto &[user, ours, columns, in, out] : given)
        stand_ins.push_back({user, ours, columns, lane_of(in), lane_of(out)});
    Tables made;
    {
        nb::gil_scoped_release unlocked;
        staging.run(num_ranks, stand_ins, made);
    }
    return nb::make_tuple(as_bytes(std::move(made.tasks)), as_bytes(std::move(made.operands)),
                          as_bytes(std::move(made.regions)), as_bytes(std::move(made.awaits)),
                          as_bytes(std::move(made.lanes)));
}

}  // namespace

void bind_staging(nb::module_ &m) {
    nb::class_<Staging>(m, "Staging")
        .def(
            "__init__",
            [](Staging *self, const HeldTables &tables, nb::handle turned, bool reads_c) {
                new (self) Staging(tables.view(), ArrayBytes(turned).records<std::uint8_t>(), reads_c);
            },
            nb::keep_alive<1, 2>())
        .def_prop_ro("used_by_others", &Staging::used_by_others)
        .def_prop_ro("rows", &Staging::rows)
        .def_prop_ro("cols", &Staging::cols)
        .def("divide", [](Staging &self, const std::vector<std::int64_t> &most) { return self.divide(most); })
        .def("run", &run);
}

}  // namespace uncut

// Python's view of lowering and of its proof.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <deque>
#include <utility>
#include <vector>

#include "list_proof.hpp"
#include "lowering.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

std::int64_t prove_lists(nb::handle tasks, nb::handle awaits, nb::handle lanes, const nb::list &lists,
                         std::int32_t span) {
    const ArrayBytes task_bytes(tasks), await_bytes(awaits), lane_bytes(lanes);
    std::deque<ArrayBytes> held;  // as long as the views
    std::vector<ListView> views;
    for (const nb::handle list : lists) {
        const auto &operations = held.emplace_back(list[0]), &flag_lanes = held.emplace_back(list[1]);
        views.push_back(
            {operations.records<OperationRecord>(), flag_lanes.records<LaneRecord>(), nb::cast<std::int32_t>(list[2])});
    }
    ListProof proof(task_bytes.records<TaskRecord>(), await_bytes.records<std::int32_t>(),
                    lane_bytes.records<LaneRecord>(), std::move(views), span);
    nb::gil_scoped_release unlocked;
    return proof.run();
}

}  // namespace

void bind_lowering(nb::module_ &m) {
    nb::class_<Lowerer>(m, "Lowerer", "Makes operation lists of a schedule's tasks, taken part by part.")
        .def(
            "__init__",
            [](Lowerer *self, nb::handle lanes, nb::handle buffers, std::size_t num_ranks, std::int32_t rank) {
                const ArrayBytes lane_bytes(lanes), buffer_bytes(buffers);
                new (self)
                    Lowerer(lane_bytes.records<LaneRecord>(), buffer_bytes.records<BufferRecord>(), num_ranks, rank);
            },
            nb::arg("lanes"), nb::arg("buffers"), nb::arg("num_ranks"), nb::arg("rank"))
        .def(
            "take",
            [](Lowerer &self, nb::handle tasks, nb::handle operands, nb::handle regions, nb::handle awaits,
               std::int64_t closed) {
                const TaskBytes held(tasks, operands, regions, awaits);
                const TaskTables part = held.tables();
                nb::gil_scoped_release unlocked;
                self.take(part, closed);
            },
            nb::arg("tasks"), nb::arg("operands"), nb::arg("regions"), nb::arg("awaits"), nb::arg("closed"))
        .def("list",
             [](Lowerer &self, std::size_t rank) {
                 RankOperations taken = std::exchange(self.list(rank), {});
                 return nb::make_tuple(as_bytes(std::move(taken.operations)), as_bytes(std::move(taken.operands)),
                                       taken.num_events);
             })
        .def("flag_lanes", [](const Lowerer &self,
                              std::size_t rank) { return as_array<std::int32_t>(std::vector(self.flag_lanes(rank))); })
        .def("waits", [](Lowerer &self) { return as_array<std::int32_t>(std::exchange(self.waits, {})); })
        .def_prop_ro("span", &Lowerer::span);
    m.def("prove_lists", &prove_lists, nb::arg("tasks"), nb::arg("awaits"), nb::arg("lanes"), nb::arg("lists"),
          nb::arg("span"), "Return how many awaits between lanes the lists imply. ValueError: what is wrong.");
}

}  // namespace uncut

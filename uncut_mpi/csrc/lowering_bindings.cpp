// Python's view of lowering.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>
#include <vector>

#include "lowering.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {

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
               std::int64_t settled) {
                const ArrayBytes task_bytes(tasks), operand_bytes(operands), region_bytes(regions), await_bytes(awaits);
                const TaskPart part{task_bytes.records<TaskRecord>(), operand_bytes.records<OperandRecord>(),
                                    region_bytes.records<RegionRecord>(), await_bytes.records<std::int32_t>()};
                nb::gil_scoped_release unlocked;
                self.take(part, settled);
            },
            nb::arg("tasks"), nb::arg("operands"), nb::arg("regions"), nb::arg("awaits"), nb::arg("settled"))
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
}

}  // namespace uncut

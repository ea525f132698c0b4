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

nb::tuple lower(const HeldTables &held, std::size_t num_ranks, std::int32_t rank) {
    Lowerer lowerer(held.view(), num_ranks, rank);
    {
        nb::gil_scoped_release unlocked;
        lowerer.run();
    }
    nb::list lists;
    for (std::size_t r = 0; r < num_ranks; ++r) {
        RankOperations &list = lowerer.list(r);
        lists.append(nb::make_tuple(as_bytes(std::move(list.operations)), as_bytes(std::move(list.operands)),
                                    list.num_events, as_array<std::int32_t>(std::vector(lowerer.flag_lanes(r)))));
    }
    return nb::make_tuple(lists, as_array<std::int32_t>(std::move(lowerer.waits)), lowerer.span());
}

std::int64_t prove_lists(const HeldTables &tables, const nb::list &lists, std::int32_t span) {
    std::deque<ArrayBytes> held;  // as long as the views
    std::vector<ListView> views;
    for (const nb::handle list : lists) {
        const auto &operations = held.emplace_back(list[0]), &flag_lanes = held.emplace_back(list[1]);
        views.push_back(
            {operations.records<OperationRecord>(), flag_lanes.records<LaneRecord>(), nb::cast<std::int32_t>(list[2])});
    }
    ListProof proof(tables.view(), std::move(views), span);
    nb::gil_scoped_release unlocked;
    return proof.run();
}

}  // namespace

void bind_lowering(nb::module_ &m) {
    m.def("lower", &lower, nb::arg("tables"), nb::arg("num_ranks"), nb::arg("rank"));
    m.def("prove_lists", &prove_lists, nb::arg("tables"), nb::arg("lists"), nb::arg("span"),
          "Return how many awaits between lanes the lists imply. ValueError: what is wrong.");
}

}  // namespace uncut

// Python's view of lowering and of its proof.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <tuple>
#include <utility>
#include <vector>

#include "list_proof.hpp"
#include "lowering.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

using ByteArray = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;
using Numbers = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

// Lists of operations, waits and the span; with `rank` below 0 lists of all ranks are made, else others are empty. A
// list has operations and bound operands (bytes), the number of events, and the lane that writes each flag in its
// rank's memory, made of all ranks. Waits are the waiting and the awaited task of each, in turns.
auto lower(const HeldTables &held, std::size_t num_ranks, std::int32_t rank) {
    Lowerer lowerer(held.view(), num_ranks, rank);
    {
        nb::gil_scoped_release unlocked;
        lowerer.run();
    }
    std::vector<std::tuple<ByteArray, ByteArray, std::int32_t, Numbers>> lists;
    for (std::size_t r = 0; r < num_ranks; ++r) {
        RankOperations &list = lowerer.list(r);
        lists.emplace_back(as_bytes(std::move(list.operations)), as_bytes(std::move(list.operands)), list.num_events,
                           as_array<std::int32_t>(std::vector(lowerer.flag_lanes(r))));
    }
    return std::make_tuple(std::move(lists), as_array<std::int32_t>(std::move(lowerer.waits)), lowerer.span());
}

// The lists of all ranks are (operations, lanes of flags, events). Their operations stand in the places of their tasks,
// on their lanes.
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

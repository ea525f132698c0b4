// Python's view of the scheduler of few large products.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "for_each.hpp"
#include "kblocks_run.hpp"
#include "kblocks_scheduler.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uncut {
namespace {

using FirstAndLast = std::tuple<std::int64_t, std::int64_t>;

Extent extent_of(const FirstAndLast &one) { return {std::get<0>(one), std::get<1>(one)}; }

// An attribute of a value of Python's that the core takes as it is, into `made`.
template <typename Value>
void take(nb::handle from, const char *name, Value &value) {
    value = nb::cast<Value>(from.attr(name));
}
#define TAKE(from, name) take(from, #name, made.name);

// `Ways` of planning/ways.py.
KWays ways_of(nb::handle ways) {
    KWays made;
    FOR_EACH(TAKE, ways, first, place, links, sends, receives, from_host)
    for (const auto &[cost, first, second] : nb::cast<std::vector<std::tuple<double, int, int>>>(ways.attr("ways")))
        made.ways.push_back({cost, {first, second}});
    return made;
}

}  // namespace

#define READ(of, name) run.def_ro(#name, &of::name);

void bind_kblocks_scheduler(nb::module_ &m) {
    // Buffers and pieces are those of A, B and C, locations `with_ends`, all as records; planning/kblocks_request.py
    // has them.
    nb::class_<KProblem>(m, "KBlocksProblem", "What all schedules of a problem on a machine have in common.")
        .def(
            "__init__",
            [](KProblem *self, int num_ranks, bool serial_copies, std::uint8_t op_a, std::uint8_t op_b, bool reads_c,
               std::uint8_t ending, std::int64_t diagonal, const std::array<std::uint8_t, 3> &dtypes,
               nb::handle locations, nb::handle buffers, nb::handle pieces, std::int64_t step,
               std::int64_t min_slice_bytes, std::int64_t relay_bytes, nb::handle ways, bool same_sums, bool fuses) {
                KProblem made{{num_ranks, serial_copies, op_a, op_b, reads_c, dtypes, {}, {}, {}, ending, diagonal},
                              step,
                              min_slice_bytes,
                              relay_bytes,
                              ways_of(ways),
                              same_sums,
                              fuses};
                place(made, locations, buffers, pieces);
                new (self) KProblem(std::move(made));
            },
            nb::kw_only(), "num_ranks"_a, "serial_copies"_a, "op_a"_a, "op_b"_a, "reads_c"_a, "ending"_a, "diagonal"_a,
            "dtypes"_a, "locations"_a, "buffers"_a, "pieces"_a, "step"_a, "min_slice_bytes"_a, "relay_bytes"_a,
            "ways"_a, "same_sums"_a, "fuses"_a);
    // Of the `Blocking` of planning/options.py, and what planning/blocking.py derives.
    nb::class_<KBlocking>(m, "KBlocking", "How a rank's part of a product is cut, and in which order it is taken.")
        .def(
            "__init__",
            [](KBlocking *self, nb::handle how, int order, bool earliest, int tail_parts, bool far_apart,
               bool from_held, bool returns, bool together, bool at_owner) {
                KBlocking made;
                made.each_option([how](const char *name, auto &value) { take(how, name, value); });
                if (made.slots[matrix_b] == 0) made.slots[matrix_b] = made.slots[matrix_a];
                made.c_slots = std::max(1, made.c_slots);  // 0: nobody asked for two
                made.order = order, made.earliest = earliest, made.tail_parts = tail_parts;
                made.far_apart = far_apart, made.from_held = from_held, made.returns = returns;
                made.together = together, made.at_owner = at_owner;
                new (self) KBlocking(made);
            },
            "how"_a, nb::kw_only(), "order"_a, "earliest"_a, "tail_parts"_a, "far_apart"_a, "from_held"_a, "returns"_a,
            "together"_a, "at_owner"_a)
        // How many there are of so many elements of k, give or take one, without making them.
        .def("count_k_blocks", [](const KBlocking &self, std::int64_t extent) { return count_k_blocks(self, extent); })
        // (step, k start, k stop, first, last, top, bottom, early) of each.
        .def("steps", [](const KBlocking &self, std::int64_t extent) {
            std::vector<std::tuple<int, std::int64_t, std::int64_t, int, int, int, int, bool>> found;
            for (const KStep &one : make_steps(self, extent))
                found.emplace_back(one.kind, one.first_k, one.last_k, one.first, one.last, one.top, one.bottom,
                                   one.early);
            return found;
        });
    // Rows and columns, as planning.partition.Partition has them.
    nb::class_<KPlaces>(m, "KBlocksPlaces", "The block of C of each place.")
        .def("__init__", [](KPlaces *self, const std::vector<std::pair<FirstAndLast, FirstAndLast>> &blocks) {
            KPlaces *made = new (self) KPlaces{};
            for (const auto &[rows, cols] : blocks)
                made->blocks.push_back({extent_of(rows), extent_of(cols)});
        });
    // ValueError if it does not fit together. Part s of k of place p goes to number s * places + p of `devices`; ranks
    // take one round after the other. Products are aligned where that pays on the machine, if one is named.
    nb::class_<KRequest>(m, "KBlocksRequest", "What is asked of the scheduler of few large products.")
        .def(nb::init<const KProblem &, const KBlocking &, std::vector<std::int64_t>, const std::vector<int> &,
                      const std::vector<const KPlaces *> &, const SimulatedMachine *>(),
             nb::keep_alive<1, 2>(), nb::kw_only(), "problem"_a, "how"_a, "k_starts"_a, "devices"_a, "rounds"_a,
             "aligns_for"_a.none() = nb::none())
        // More than there are tasks, found without looking at any, so that nobody counts where this is few.
        .def_prop_ro("tasks_at_most", &KRequest::tasks_at_most)
        // (copies A, copies B, sums apart, k step) of each block of C that has elements, and each part of k.
        .def_prop_ro("aligned",
                     [](const KRequest &self) {
                         std::vector<std::tuple<bool, bool, bool, std::int64_t>> found;
                         for (const KRequest::Block &block : self.blocks)
                             for (const KAlignment &one : block.alignment)
                                 found.emplace_back(one.copies[matrix_a], one.copies[matrix_b], one.apart, one.k_step);
                         return found;
                     })
        // The same for the same steps, and for others in one of 2**64 cases.
        .def_prop_ro("steps_digest", [](const KRequest &self) { return digest_of_steps(self.steps); });
    nb::class_<KLayout>(m, "KBlocksLayout", "Who forms which blocks of C, and where what they need lies.")
        .def(nb::init<const KRequest &>(), nb::keep_alive<1, 2>(), "request"_a)
        // What the buffers of each rank take.
        .def_ro("rank_bytes", &KLayout::rank_bytes)
        // How many tasks there are, or one more than so many.
        .def("count", &count_kblocks, "most_tasks"_a, nb::call_guard<nb::gil_scoped_release>())
        // TooManyTasksError if there are more.
        .def(
            "tables",
            [](const KLayout &self, std::int64_t most_tasks) {
                Tables tables;
                {
                    nb::gil_scoped_release unlocked;
                    schedule_kblocks(self, most_tasks, tables);
                }
                return arrays_of(std::move(tables), as_bytes(std::vector(self.buffers)));
            },
            "most_tasks"_a);
    // By `make` or `Simulations.begin_kblocks`, to be read when that ended. Buffers have so many bytes (`room`) of each
    // rank; if that is too little (`fits`) there is nothing else. A schedule of more tasks is given up.
    nb::class_<KRun> run(m, "KBlocksRun", "A schedule of few large products and its simulated run.");
    FOR_EACH(READ, KRun, keeps, fits, num_tasks, seconds, num_products, moved_bytes, held_bytes)
    run.def(
           "__init__",
           [](KRun *self, const KRequest &request, std::vector<std::int64_t> room, std::int64_t most_tasks,
              bool keeps) { new (self) KRun{request, std::move(room), most_tasks, keeps}; },
           nb::keep_alive<1, 2>(), "request"_a, "room"_a, "most_tasks"_a, "keeps"_a = false)
        // Here, at once; ValueError if it was begun before.
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
                 return arrays_of(Tables(self.tables), as_bytes(std::vector(self.buffers)));
             })
        .def("times",
             [](const KRun &self) {
                 require(self.keeps, "times are kept by who asked for it");
                 return times_of(self.times);
             })
        // The end of each rank's last product (s, 0 without any), and how many numbers its products multiply.
        .def("progress", [](const KRun &self) { return std::make_tuple(self.end, self.elements); });
    m.def(
        "block_edges",
        [](std::int64_t extent, int blocks, std::int64_t step) { return block_edges(extent, blocks, step); },
        "extent"_a, "blocks"_a, "step"_a, "Return where blocks start, and the extent at the end.");
}

}  // namespace uncut

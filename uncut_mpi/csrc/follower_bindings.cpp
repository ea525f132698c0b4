// Python's view of the follower.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "follower.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

using Range = std::pair<std::int64_t, std::int64_t>;

// A rectangle of a buffer is the caller's A or B and only read; matrix −1: it holds nothing that may be. Its elements
// are those of the matrix so many rows and columns further on. If it is turned, element (c, r) of the matrix is at (r,
// c).
void give(Follower &follower, std::int32_t buffer, const Range &rows, const Range &cols, const Range &by, bool turned,
          int matrix) {
    Content content = matrix < 0 ? Content{} : Content::piece(static_cast<std::uint8_t>(matrix));
    if (matrix >= 0) content.turned = turned, content.row = by.first, content.col = by.second;
    follower.give(buffer, {rows.first, cols.first, rows.second, cols.second}, content);
}

// What a rectangle of the caller's C must hold: a `ResultPart` of model/problem.py. C_in is there at first, if it takes
// part. RuleBroken if some of it has been said before or is no part of C.
void expect(Follower &follower, std::int32_t buffer, const Range &rows, const Range &cols, const Range &by, bool turned,
            const std::vector<Range> &summed, bool alpha, int c_in, bool copied) {
    Content content{.kind = copied ? Content::Kind::piece : Content::Kind::partial,
                    .turned = turned,
                    .alpha = alpha,
                    .c_in = static_cast<CIn>(c_in),
                    .row = by.first,
                    .col = by.second};
    for (const auto &[start, stop] : summed)
        content.summed.push_back({start, stop});
    follower.expect(buffer, {rows.first, cols.first, rows.second, cols.second}, content);
}

// All tasks, once. ValueError if a table points outside of another.
void follow(Follower &follower, const HeldTables &tables) {
    const ScheduleTables view = tables.view();
    nb::gil_scoped_release unlocked;
    follower.follow(view);
}

}  // namespace

void bind_follower(nb::module_ &m) {
    // In its text <task 3> and <buffer 3> stand for their descriptions.
    nb::exception<RuleBroken>(m, "RuleBroken");
    // It keeps about 250 bytes for each rectangle of memory with a writer or content of its own, and 12 for every task.
    // Each lane has a clock of 4 bytes per lane, and so has each task that a later one still awaits.
    nb::class_<Follower>(m, "Follower",
                         "What memory holds while tasks run, derived from them alone, and whether each task is ordered "
                         "after what it needs.")
        .def(
            "__init__",
            [](Follower *self, const HeldTables &tables, std::uint8_t op_a, std::uint8_t op_b,
               const std::array<std::uint8_t, 3> &dtypes) { new (self) Follower({op_a, op_b, dtypes}, tables.view()); })
        .def("give", &give)
        .def("expect", &expect)
        // From then on what every operand holds is kept, of written ones after their tasks. The global order is trusted
        // then. HELD_DTYPE of planning/verify.py has what was kept since it was last taken.
        .def("keep_held", &Follower::keep_held)
        .def("take_held", [](Follower &self) { return as_bytes(self.take_held()); })
        .def("follow", &follow)
        // All that was expected is there, and all of the caller's C was spoken of.
        .def("finish", &Follower::finish, nb::call_guard<nb::gil_scoped_release>())
        // Operands so far.
        .def_prop_ro("reads", &Follower::reads)
        .def_prop_ro("writes", &Follower::writes);
}

}  // namespace uncut

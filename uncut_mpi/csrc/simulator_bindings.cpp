// Python's view of the simulator: a schedule's tables simulated at once, or on a thread.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <utility>

#include "for_each.hpp"
#include "kblocks_run.hpp"
#include "simulations.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

auto simulate_tables(const SimulatedMachine &machine, const HeldTables &held) {
    const ScheduleTables tables = held.view();
    Simulated result;
    {
        nb::gil_scoped_release unlocked;
        Simulator(machine).run(tables, result);
    }
    return times_of(std::move(result));
}

// Simulations with what they read and write, begun in order; whoever waits for one makes those that are not begun.
class HeldSimulations {
  public:
    explicit HeldSimulations(const SimulatedMachine &machine) : simulations_(machine) {}
    ~HeldSimulations() { close(); }

    // A ticket for `wait`; IndexError after `close`.
    std::int64_t begin(const nb::typed<nb::object, HeldTables> &tables) {
        const ScheduleTables view = nb::cast<const HeldTables &>(tables).view();
        return begin(tables, [view](Workplace &at) {
            Simulated result;
            at.simulator.run(view, result);
            return result;
        });
    }

    // Of a schedule that is to be made first; there is nothing then that `wait` returns.
    std::int64_t begin_kblocks(const nb::typed<nb::object, KRun> &run) {
        KRun &made = nb::cast<KRun &>(run);
        require(!made.begun, "a run is begun once");
        made.begun = true;
        return begin(run, [&made](Workplace &at) {
            made.make(at);
            return Simulated{};
        });
    }

    // What `simulate` returns, once for each ticket; IndexError else.
    auto wait(std::int64_t ticket) {
        const auto held = held_.extract(ticket);  // until this returns
        Simulated result;
        {
            nb::gil_scoped_release unlocked;
            result = simulations_.wait(ticket);
        }
        return times_of(std::move(result));
    }

    // What was not waited for is dropped.
    void close() {
        {
            nb::gil_scoped_release unlocked;
            simulations_.close();
        }
        held_.clear();
    }

  private:
    std::int64_t begin(const nb::object &object, Simulations::Make make) {
        const auto held = held_.emplace(next_, object).first;
        try {
            simulations_.begin(next_, std::move(make));
        } catch (...) {
            held_.erase(held);
            throw;
        }
        return next_++;
    }

    std::int64_t next_ = 0;
    std::map<std::int64_t, nb::object> held_;
    Simulations simulations_;  // closed before the tables go
};

}  // namespace

#define FIELD(of, name) machine.def_rw(#name, &of::name);

void bind_simulator(nb::module_ &m) {
    nb::class_<ProductCost>(m, "ProductCost", "GemmShape of model/costs.py, with its fields in order.")
        .def(nb::init<double, double, double, double, double, double, double, double, double, bool, double, double,
                      double, double>())
        // (operations, occupancy).
        .def("work",
             [](const ProductCost &cost, std::int64_t rows, std::int64_t cols, std::int64_t depth,
                std::int64_t multiprocessors, bool aligned) {
                 const ProductCost::Work work = cost.work(rows, cols, depth, multiprocessors, aligned);
                 return std::pair(work.operations, work.occupancy);
             })
        .def("moving_s", &ProductCost::moving_s)
        .def("block_s", &ProductCost::block_s)
        .def("seconds", &ProductCost::seconds);
    m.def("is_uneven", &is_uneven, "Return whether C has rows or columns above 256 that are no multiple of it.");
    m.def(
        "host_row_share", &host_row_share,
        "Return what a copy of rows so many bytes wide gets of the bandwidth of the host, where rows lie so far apart, "
        "the first one so many bytes behind a line; -1: anywhere.");
    nb::class_<SimulatedMachine> machine(
        m, "SimulatedMachine",
        "A machine as the simulator takes it; bytes and seconds; planning/simulate.py fills it.");
    machine.def(nb::init<>());
    FOR_EACH(FIELD, SimulatedMachine, num_ranks, num_ends, bandwidth, latency, port_capacity, port_uses, gemm_rate,
             products, multiprocessors, combine_rate, half_combine_rate, combine_start_s, rest_gain, row_device,
             row_local, row_in, row_out, copy_s, gemm_s, combine_s, wait_s, signal_s, event_s, event_latency_s,
             engine_latency_s, kernel_latency_s, flag_latency_s, wait_lane_s, signal_lane_s, host_copy_rate,
             file_read_rate, file_write_rate, file_call_s, on_disk, host_transposed_rate, transposing_share, call_s,
             issuing_threads, serial_copies)
    // ValueError if one ends inside a record. In order: tasks, operands, regions, awaits, buffers, lanes, locations.
    nb::class_<HeldTables>(m, "ScheduleTables", "The tables of a schedule, contiguous, where they are.")
        .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>());
    nb::class_<HeldSimulations>(m, "Simulations", "Simulations on a thread of their own.")
        .def(nb::init<const SimulatedMachine &>())
        .def("begin", nb::overload_cast<const nb::typed<nb::object, HeldTables> &>(&HeldSimulations::begin))
        .def("begin_kblocks", &HeldSimulations::begin_kblocks)
        .def("wait", &HeldSimulations::wait)
        .def("close", &HeldSimulations::close);
    m.def("simulate", &simulate_tables, "Return (start, end) of every task and what throttles every rank, in seconds.");
}

#undef FIELD

}  // namespace uncut

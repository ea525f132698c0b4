// A product from its opening to its end, for as long as all is as usual; api/calls.py goes on from where it is not.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>

#include "meeting.hpp"
#include "turn.hpp"

namespace uncut {

enum class Stage : int {
    outside = 0,  // nothing was begun
    opening = 1,  // the ranks have not met alike
    taking = 2,   // not all have their devices
    running = 3,  // only while it runs, or if the run has thrown
    ended = 4,    // by an error of this rank, or another's
    closing = 5,  // another has failed, or is not through
    over = 6,
};

class Passage {
  public:
    // Of meetings, or of what does as they do.
    Passage(nb::object opening, nb::object closing, Turn &turn)
        : opening_(std::move(opening)), closing_(std::move(closing)), turn_(turn) {}

    nb::object go(nb::handle settle, nb::handle run, nb::handle alpha, nb::handle beta, std::uint32_t epoch,
                  double timeout_s, double spin_s) {
        stage_ = Stage::outside;
        if (opening_.pending() || closing_.pending()) return nb::none();  // a wait that an interrupt has ended
        settle();
        stage_ = Stage::opening;
        turn_.arrive();
        outcome_ = opening_.meet(spin_s);
        if (outcome_ != Meeting::met_alike) return nb::none();
        stage_ = Stage::taking;
        if (!turn_.take(spin_s)) return nb::none();
        stage_ = Stage::running;
        nb::object done = run(alpha, beta, epoch, timeout_s, false);
        stage_ = Stage::ended;
        if (!nb::cast<bool>(done.attr("went_well"))) return done;
        stage_ = Stage::closing;
        outcome_ = closing_.meet(spin_s);
        if (outcome_ != Meeting::met_alike) return done;
        turn_.release();
        stage_ = Stage::over;
        return done;
    }

    Stage stage() const { return stage_; }
    int outcome() const { return outcome_; }

  private:
    struct Where {
        explicit Where(nb::object of) : any(std::move(of)) { nb::try_cast(any, meeting); }

        bool pending() const { return meeting ? meeting->pending() : nb::cast<bool>(any.attr("pending")); }
        int meet(double spin_s) { return meeting ? meeting->meet(spin_s) : nb::cast<int>(any.attr("meet")(spin_s)); }

        nb::object any;
        Meeting *meeting = nullptr;
    };

    Where opening_, closing_;
    Turn &turn_;
    Stage stage_ = Stage::outside;
    int outcome_ = Meeting::waiting;
};

void bind_meeting(nb::module_ &m) {
    nb::class_<Meeting>(m, "Meeting", "Records given to all ranks of a node through memory that they share.")
        .def(nb::init<Bytes, std::size_t, Bytes, Bytes>(), nb::arg("memory"), nb::arg("rank"), nb::arg("mine"),
             nb::arg("everyone"))
        .def_static("memory_bytes", &Meeting::memory_bytes, nb::arg("size"), "Bytes of zeros that the ranks need.")
        .def("meet", &Meeting::meet, nb::arg("spin_s"),
             "Begin the next meeting with this rank's record, then as `collect`.")
        .def_prop_ro("number", &Meeting::number, "How many meetings this rank has begun.")
        .def_prop_ro("pending", &Meeting::pending,
                     "Whether a meeting was begun that is neither collected nor abandoned.")
        .def("collect", &Meeting::collect, nb::arg("spin_s"),
             "Return 0 if others are still missing after so long, 1 if all gave the same record, 3 if one of them has "
             "left, else 2.")
        .def("leave", &Meeting::leave, nb::arg("reason"), "Give up the meeting that was begun and all others.")
        .def_prop_ro("left", &Meeting::left, "The ranks that have left: with which meeting, and why, the first bytes.");

    nb::class_<DeviceLock>(m, "DeviceLock", "A lock of one process, granted in order of arrival.",
                           nb::is_weak_referenceable())
        .def(nb::init<>());
    nb::class_<Turn> turn(m, "Turn", "A session's place among those who use a device; no method but `take` waits.");
    nb::enum_<Turn::State>(turn, "State")
        .value("ARRIVED", Turn::arrived)
        .value("HELD", Turn::held)
        .value("BLOCKED", Turn::blocked)
        .value("LOCKED", Turn::locked);
    turn.def(nb::init<Words, std::size_t, std::shared_ptr<DeviceLock>>(), nb::arg("words"), nb::arg("rank"),
             nb::arg("lock"))
        .def_prop_ro("call", &Turn::call, "The number of the call begun last.")
        .def("arrive", &Turn::arrive, "Begin the next call.")
        .def("say", &Turn::say, nb::arg("state"), "Tell the others how far this rank is in its call.")
        .def("take", &Turn::take, nb::arg("spin_s"),
             "Try the device if all ranks have begun the call; return whether all have theirs, within so long.")
        .def_prop_ro("is_blocked", &Turn::is_blocked, "Whether a rank has not got its device at once.")
        .def("below", &Turn::below, nb::arg("state"), "Return the ranks that are not so far in this call.")
        .def("queue", &Turn::queue, "Wait for the device from now on.")
        .def_prop_ro("has_device", &Turn::has_device, "Whether all who came before have given it back.")
        .def("release", &Turn::release, "Hold the device once less, or wait for it no more.")
        .def("let_go", &Turn::let_go, "Release it, and forget the words.");

    nb::class_<Passage> passage(m, "Passage", "The stages of a product, passed for as long as all is as usual.");
    nb::enum_<Stage>(passage, "Stage", nb::is_arithmetic())
        .value("OUTSIDE", Stage::outside)
        .value("OPENING", Stage::opening)
        .value("TAKING", Stage::taking)
        .value("RUNNING", Stage::running)
        .value("ENDED", Stage::ended)
        .value("CLOSING", Stage::closing)
        .value("OVER", Stage::over);
    passage
        .def(nb::init<nb::object, nb::object, Turn &>(), nb::arg("opening"), nb::arg("closing"), nb::arg("turn"),
             nb::keep_alive<1, 4>())
        .def("go", &Passage::go, nb::arg("settle"), nb::arg("run"), nb::arg("alpha"), nb::arg("beta"), nb::arg("epoch"),
             nb::arg("timeout_s"), nb::arg("spin_s"),
             "Pass through a product; return what its run did, if that is over.")
        .def_prop_ro("stage", &Passage::stage, "How far the last product got: where something unusual was met.")
        .def_prop_ro("outcome", &Passage::outcome, "What the last meeting came to.");
}

}  // namespace uncut

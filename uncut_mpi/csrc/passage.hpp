// A product from its opening to its end, for as long as all is as usual; api/calls.py goes on from where it is not.
#pragma once

#include <nanobind/nanobind.h>

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

}  // namespace uncut

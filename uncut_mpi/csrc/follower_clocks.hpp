// Which task is certain to be over before another starts: vector clocks over lanes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace uncut {

// A task and its lane; lanes are first in, first out.
struct Event {
    std::int32_t lane = -1, task = -1;
};

// Clocks computed task by task in the global order, which is never used as an ordering itself. It only says in which
// sequence clocks can be computed, since no task awaits a later one.
//
// Kept are a clock (4 bytes for each lane) of every lane, and that of every task which a later one still awaits. A
// lane's tasks share one until another await tells it something new. Each task takes 12 bytes.
class LaneClocks {
  public:
    explicit LaneClocks(std::size_t num_lanes) : of_lane_(num_lanes, 0) {
        clocks_.push_back({std::vector<std::int32_t>(num_lanes, -1), -1, static_cast<std::int32_t>(num_lanes) + 1});
    }

    // Takes the global order for one that tasks keep, from now on: all before the present one is over. That takes no
    // memory.
    void trust() { trusts_ = true; }

    // Goes on to the next task. `uses`: how many awaits of later tasks name it.
    void advance(std::int32_t lane, std::span<const std::int32_t> awaits, std::int32_t uses) {
        now_ = {lane, now_.task + 1};
        if (trusts_) return;
        for (const std::int32_t task : awaits) {
            Kept &awaited = kept_[task];
            if (awaited.lane != lane) learn(task, awaited);
            if (--awaited.uses == 0) drop(awaited.clock);
        }
        kept_.push_back({of_lane_[lane], lane, uses});
        if (uses > 0) ++clocks_[of_lane_[lane]].holders;
    }

    Event now() const { return now_; }
    // Whether a task is over before the present one starts; there is none where it is negative.
    bool over(Event event) const {
        return trusts_ || event.task < 0 || event.lane == now_.lane ||
               clocks_[of_lane_[now_.lane]].upto[event.lane] >= event.task;
    }

  private:
    // What tasks of a lane know of the others. An entry for the lane itself means nothing: all before is over.
    struct Clock {
        std::vector<std::int32_t> upto;  // of each lane the last task that is over
        std::int32_t since;              // the lane's task from which on this holds
        std::int32_t holders;
    };
    struct Kept {
        std::int32_t clock, lane, uses;
    };

    void drop(std::int32_t clock) {
        if (--clocks_[clock].holders == 0) free_.push_back(clock);
    }

    void learn(std::int32_t task, const Kept &awaited) {
        std::int32_t &at = of_lane_[now_.lane];
        const Clock *before = &clocks_[at];
        const Clock &theirs = clocks_[awaited.clock];
        const std::int32_t known = before->upto[awaited.lane];
        if (known >= task) return;
        if (before->holders > 1) {
            drop(at);
            if (free_.empty()) {
                free_.push_back(static_cast<std::int32_t>(clocks_.size()));
                clocks_.push_back({std::vector<std::int32_t>(of_lane_.size()), 0, 0});
            }
            at = free_.back();
            free_.pop_back();
            clocks_[at].holders = 1;
        }
        Clock &mine = clocks_[at];
        // Who knows a task of the lane that knew as much already knows all that.
        if (known < theirs.since) {
            std::transform(before->upto.begin(), before->upto.end(), theirs.upto.begin(), mine.upto.begin(),
                           [](std::int32_t a, std::int32_t b) { return std::max(a, b); });
        } else if (&mine != before) {
            mine.upto = before->upto;
        }
        mine.upto[awaited.lane] = task;
        mine.since = now_.task;
    }

    Event now_;
    bool trusts_ = false;
    std::vector<Kept> kept_;  // of each task
    std::deque<Clock> clocks_;
    std::vector<std::int32_t> of_lane_, free_;
};

}  // namespace uncut

// Who has a device of this process, and how far the ranks of a call are in taking theirs. spmd/turns.py says why so.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "relax.hpp"

namespace uncut {

namespace nb = nanobind;

using Words = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A lock granted in order of arrival: who is first in the line holds it.
class DeviceLock {
  public:
    // Take it if nobody else holds it or waits for it; each time it is taken it is to be given back.
    bool try_take(const void *who) {
        const std::scoped_lock held(mutex_);
        const bool taken = line_.empty() || (line_.front() == who && line_.back() == who);
        if (taken) line_.push_back(who);
        return taken;
    }

    void queue(const void *who) {
        const std::scoped_lock held(mutex_);
        line_.push_back(who);
    }

    bool is_held_by(const void *who) {
        const std::scoped_lock held(mutex_);
        return !line_.empty() && line_.front() == who;
    }

    // Hold it once less, or wait for it no more.
    void give_back(const void *who) {
        const std::scoped_lock held(mutex_);
        if (const auto found = std::ranges::find(line_, who); found != line_.end()) line_.erase(found);
    }

  private:
    std::mutex mutex_;
    std::vector<const void *> line_;
};

class Turn {
  public:
    // In a rank's word, 4·call + one of these, so that it only ever grows.
    enum State : std::uint64_t { arrived = 0, held = 1, blocked = 2, locked = 3, num_states = 4 };

    Turn(Words words, std::size_t rank, std::shared_ptr<DeviceLock> lock)
        : words_(std::move(words)), size_(words_.size()), rank_(rank), lock_(std::move(lock)) {}

    void arrive() {
        ++call_;
        tried_ = false;
        say(arrived);
    }

    void say(State state) {
        if (rank_ < size_) word(rank_).store(num_states * call_ + state, std::memory_order_release);
    }

    // Try the device once all ranks have begun the call; whether then all have theirs, after waiting for them so long.
    bool take(double spin_s) {
        if (!tried_) {
            if (!all(arrived)) return false;
            tried_ = true;
            say(lock_->try_take(this) ? held : blocked);
        }
        if (!all(held)) {
            const nb::gil_scoped_release unlocked;
            if (!spin(spin_s, [this] { return all(held); })) return false;
        }
        return !is_blocked();
    }

    // Whether a rank has not got its device at once. One that has failed in this call may be in its next one by now.
    bool is_blocked() const {
        for (std::size_t r = 0; r < size_; ++r)
            if (const std::uint64_t state = at(r) - num_states * call_; state == blocked || state == locked)
                return true;
        return false;
    }

    std::vector<std::size_t> below(State state) const {
        std::vector<std::size_t> ranks;
        for (std::size_t r = 0; r < size_; ++r)
            if (at(r) < num_states * call_ + state) ranks.push_back(r);
        return ranks;
    }

    void queue() { lock_->queue(this); }
    bool has_device() { return lock_->is_held_by(this); }
    void release() { lock_->give_back(this); }

    std::uint64_t call() const { return call_; }

    // Forget the words, whose memory goes.
    void let_go() {
        release();
        size_ = 0;
        words_ = {};
    }

  private:
    std::atomic_ref<std::uint64_t> word(std::size_t rank) const { return std::atomic_ref(words_.data()[rank]); }
    std::uint64_t at(std::size_t rank) const { return word(rank).load(std::memory_order_acquire); }
    bool all(State state) const {
        for (std::size_t r = 0; r < size_; ++r)
            if (at(r) < num_states * call_ + state) return false;
        return true;
    }

    Words words_;
    std::size_t size_, rank_;
    std::shared_ptr<DeviceLock> lock_;
    std::uint64_t call_ = 0;
    bool tried_ = false;
};

}  // namespace uncut

// Where the ranks of a node meet: each gives a record to all others through memory that they share.
//
// A rank has two places, used in turn, each a word with the number of the meeting and a record. It writes the
// record, then the word; it reads the others' records when all their words have the number. Nobody may begin
// a meeting before it has read all of the one before it (spmd/meetings.py sees to that), so when a place is used again
// all have read it. A rank that leaves for good marks its word; who waits for it finds the mark in either place, since
// some may have met with it just before. One that only gives up a meeting has come to it: the others there wait for
// those that have not, and when all have come the meeting is abandoned.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "relax.hpp"

namespace uncut {

namespace nb = nanobind;

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t line = 128;         // two cache lines: processors fetch them in pairs
constexpr std::size_t reason_bytes = 40;  // at the end of a line

// In a rank's word: it leaves with that meeting, and takes part in no other.
constexpr std::uint64_t left_mark = std::uint64_t{1} << 63;

class Meeting {
  public:
    enum Outcome : int { waiting = 0, met_alike = 1, met = 2, abandoned = 3 };

    Meeting(Bytes memory, std::size_t rank, Bytes mine, Bytes everyone)
        : memory_(std::move(memory)),
          mine_(std::move(mine)),
          everyone_(std::move(everyone)),
          rank_(rank),
          size_(everyone_.size() / mine_.size()),
          bytes_(mine_.size()) {
        if (rank >= size_ || everyone_.size() != size_ * bytes_ ||
            sizeof(std::uint64_t) + bytes_ + reason_bytes > line || memory_.size() < memory_bytes(size_))
            throw std::invalid_argument("the ranks' records do not fit into the memory where they meet");
    }

    static std::size_t memory_bytes(std::size_t size) { return 2 * size * line; }

    // How many meetings this rank has begun.
    std::uint64_t number() const { return number_; }
    // Whether a meeting was begun that is neither collected nor abandoned.
    bool pending() const { return pending_; }

    // Begin the next meeting and collect its records.
    int meet(double spin_s) {
        ++number_;
        std::uint8_t *place = place_of(rank_);
        std::memcpy(place + sizeof(std::uint64_t), mine_.data(), bytes_);
        word(place).store(number_, std::memory_order_release);
        pending_ = true;
        return collect(spin_s);
    }

    // Take part in no meeting any more: not in the one that was begun, else not in the next. Who waits for this rank
    // learns of it, and why.
    void leave(const std::string &reason) {
        if (!pending_) {
            ++number_;
            pending_ = true;
        }
        std::uint8_t *place = place_of(rank_);
        // Behind the record, which others may be reading.
        std::memcpy(place + line - reason_bytes, reason.c_str(), std::min(reason.size() + 1, reason_bytes));
        word(place).store(number_ | left_mark, std::memory_order_release);
    }

    // The ranks that have left: with which meeting, and why.
    std::vector<std::tuple<std::size_t, std::uint64_t, std::string>> left() const {
        std::vector<std::tuple<std::size_t, std::uint64_t, std::string>> ranks;
        for (std::size_t r = 0; r < size_; ++r)
            if (std::uint8_t *place = mark_of(r)) {
                const auto *reason = reinterpret_cast<const char *>(place + line - reason_bytes);
                ranks.emplace_back(r, word(place).load(std::memory_order_relaxed) & ~left_mark,
                                   std::string(reason, strnlen(reason, reason_bytes)));
            }
        return ranks;
    }

    // Wait for the others for at most so long; copy all records, in the order of ranks, when they are there.
    int collect(double spin_s) {
        if (!present()) {
            const nb::gil_scoped_release unlocked;
            if (!spin(spin_s, [this] { return present(); })) {
                if (!is_left()) return waiting;
                // Who left may have met with everybody before: then all were there when the mark was made.
                if (!present()) {
                    pending_ = false;
                    return abandoned;
                }
            }
        }
        pending_ = false;
        const std::uint8_t *own = place_of(rank_) + sizeof(std::uint64_t);
        int outcome = met_alike;
        bool complete = true;
        for (std::size_t r = 0; r < size_; ++r) {
            const std::uint8_t *theirs = place_of(r) + sizeof(std::uint64_t);
            complete = complete && word(place_of(r)).load(std::memory_order_acquire) == number_;
            if (std::memcmp(own, theirs, bytes_) != 0) outcome = met;
            std::memcpy(everyone_.data() + r * bytes_, theirs, bytes_);
        }
        return complete ? outcome : abandoned;
    }

  private:
    std::uint8_t *place_of(std::size_t rank) const { return memory_.data() + (2 * rank + number_ % 2) * line; }
    // The place in which a rank has marked that it left, if it has.
    std::uint8_t *mark_of(std::size_t rank) const {
        for (std::size_t turn = 0; turn < 2; ++turn) {
            std::uint8_t *place = memory_.data() + (2 * rank + turn) * line;
            if (word(place).load(std::memory_order_acquire) & left_mark) return place;
        }
        return nullptr;
    }
    // Whether a rank has left by more than giving up this meeting. Who waits in it too does so for as long as it likes,
    // and names whom it waits for.
    bool is_left() const {
        for (std::size_t r = 0; r < size_; ++r)
            if (const std::uint8_t *place = mark_of(r))
                if (place != place_of(r) || place[line - reason_bytes] != 0) return true;
        return false;
    }
    static std::atomic_ref<std::uint64_t> word(std::uint8_t *place) {
        return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t *>(place));
    }

    // Whether everybody is there; goes on where it stopped last.
    bool present() {
        if (seen_of_ != number_) {
            seen_of_ = number_;
            seen_ = 0;
        }
        while (seen_ < size_ && (word(place_of(seen_)).load(std::memory_order_acquire) & ~left_mark) == number_)
            ++seen_;
        return seen_ == size_;
    }

    Bytes memory_, mine_, everyone_;
    std::size_t rank_, size_, bytes_;
    std::uint64_t number_ = 0, seen_of_ = 0;
    std::size_t seen_ = 0;
    bool pending_ = false;
};

}  // namespace uncut

#pragma once

#include <cstddef>
#include <limits>
#include <vector>

namespace uncut {

// When each domain (a device, or a flow) next ends something. It is a heap in which a domain is once, and moves when
// its time does, since a change of rates moves many.
class Timetable {
  public:
    bool empty() const { return heap_.empty(); }
    double first_time() const { return heap_.front().time; }
    void clear() {
        heap_.clear();
        place_.clear();
    }

    std::size_t take_first() {
        const std::size_t domain = heap_.front().domain;
        drop(domain);
        return domain;
    }

    void set(std::size_t domain, double time) {
        if (domain >= place_.size()) place_.resize(domain + 1, absent);
        if (place_[domain] == absent) {
            place_[domain] = heap_.size();
            heap_.push_back({time, domain});
        } else {
            heap_[place_[domain]].time = time;
        }
        sift(place_[domain]);
    }

    void drop(std::size_t domain) {
        if (domain >= place_.size() || place_[domain] == absent) return;
        const std::size_t at = place_[domain];
        place_[domain] = absent;
        const Entry last = heap_.back();
        heap_.pop_back();
        if (at == heap_.size()) return;
        heap_[at] = last;
        place_[last.domain] = at;
        sift(at);
    }

  private:
    static constexpr std::size_t absent = std::numeric_limits<std::size_t>::max();

    struct Entry {
        double time;
        std::size_t domain;
        bool operator<(const Entry &other) const {
            return time != other.time ? time < other.time : domain < other.domain;
        }
    };

    void put(std::size_t at, const Entry &entry) {
        heap_[at] = entry;
        place_[entry.domain] = at;
    }

    void sift(std::size_t at) {
        const Entry entry = heap_[at];
        for (; at > 0 && entry < heap_[(at - 1) / 2]; at = (at - 1) / 2)
            put(at, heap_[(at - 1) / 2]);
        for (std::size_t child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
            if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
            if (!(heap_[child] < entry)) break;
            put(at, heap_[child]);
            at = child;
        }
        put(at, entry);
    }

    std::vector<Entry> heap_;
    std::vector<std::size_t> place_;
};

}  // namespace uncut

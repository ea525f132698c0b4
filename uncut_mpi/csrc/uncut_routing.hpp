// Routing of one fetch over the links of a node: which copy to take and in which order the destinations forward it.
// Uncut-GEMMs, sections III-D and III-E.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace uncut {

// Picoseconds as integers: sums are exact, so that ties are ties on every machine and compiler.
using Time = std::int64_t;
inline constexpr Time never = std::numeric_limits<Time>::max() / 4;

// Up to so many destinations every order of a chain is tried.
inline constexpr int exhaustive_destinations = 5;

// State of a chain after a hop: when its first and its last chunk are there.
struct Arrival {
    Time first;
    Time last;
};

// Most ranks that a hop may be relayed over.
inline constexpr int most_relays = 2;

// One link of a hop: when it is free, and what one chunk takes on it.
struct HopLink {
    Time free = 0, cost = 0;
};

// The other way between two destinations, over relays.
struct RelayedHop {
    int legs = 0;
    std::array<HopLink, most_relays + 1> leg;
};

// A hop into a destination, from the best source.
struct FirstHop {
    int source = -1;
    bool relayed = false;
    Arrival arrival{0, 0};
};

struct NextHop {
    HopLink direct;
    int other = -1;  // of the relayed hops; -1: there is none
};

// The hops a chain over n destinations may be made of.
struct Hops {
    std::vector<FirstHop> first;
    std::vector<NextHop> next;  // [from * n + to]
    std::vector<RelayedHop> relayed;

    void resize(std::size_t n) {
        first.assign(n, {});
        next.assign(n * n, {});
        relayed.clear();
    }
    std::size_t size() const { return first.size(); }
};

// Chunks pass one after the other at constant cost. So a hop ends either `chunks` costs after it could start or one
// cost after the last chunk reached its source, whichever is later.
inline Arrival next_hop(Arrival before, Time link_free, Time cost, int chunks) {
    const Time start = std::max(link_free, before.first);
    return {start + cost, std::max(start + chunks * cost, before.last + cost)};
}

class ChainSearch {
  public:
    // Writes the order (indices of destinations) with the earliest last arrival; of equal ones the
    // least sum of arrivals, then the lexicographically first (greedy insertion: the earliest
    // position).
    void run(const Hops &hops, int chunks, std::vector<int> &order) {
        hops_ = &hops;
        chunks_ = chunks;
        const int n = static_cast<int>(hops.size());
        best_last_ = best_sum_ = never;
        order.clear();
        if (n == 1) {
            order.push_back(0);
        } else if (n <= exhaustive_destinations) {
            used_.fill(false);
            extend(n, 0, {0, 0}, 0, order);
        } else {
            insert(n, order);
        }
    }

  private:
    Arrival hop(int from, int to, Arrival before) const {
        if (from < 0) return hops_->first[to].arrival;
        const NextHop &of = hops_->next[static_cast<std::size_t>(from) * hops_->size() + to];
        const Arrival direct = next_hop(before, of.direct.free, of.direct.cost, chunks_);
        if (of.other < 0) return direct;
        const RelayedHop &other = hops_->relayed[of.other];
        for (int l = 0; l < other.legs; ++l)
            before = next_hop(before, other.leg[l].free, other.leg[l].cost, chunks_);
        return before.last < direct.last ? before : direct;
    }

    // Whether a chain is the best one so far, which it then is.
    bool improves(Time last, Time sum) {
        if (last > best_last_ || (last == best_last_ && sum >= best_sum_)) return false;
        best_last_ = last;
        best_sum_ = sum;
        return true;
    }

    void extend(int n, int depth, Arrival before, Time sum, std::vector<int> &order) {
        if (depth == n) {
            if (improves(before.last, sum)) order.assign(path_.begin(), path_.begin() + n);
            return;
        }
        for (int to = 0; to < n; ++to) {
            if (used_[to]) continue;
            const Arrival after = hop(depth ? path_[depth - 1] : -1, to, before);
            if (after.last > best_last_) continue;  // arrivals never decrease along a chain
            used_[to] = true;
            path_[depth] = to;
            extend(n, depth + 1, after, sum + after.last, order);
            used_[to] = false;
        }
    }

    void insert(int n, std::vector<int> &order) {
        for (int to = 0; to < n; ++to) {
            best_last_ = best_sum_ = never;
            std::size_t place = 0;
            for (std::size_t at = 0; at <= order.size(); ++at) {
                trial_ = order;
                trial_.insert(trial_.begin() + static_cast<std::ptrdiff_t>(at), to);
                Arrival arrival{0, 0};
                Time sum = 0;
                int from = -1;
                for (const int d : trial_) {
                    arrival = hop(from, d, arrival);
                    sum += arrival.last;
                    from = d;
                }
                if (improves(arrival.last, sum)) place = at;
            }
            order.insert(order.begin() + static_cast<std::ptrdiff_t>(place), to);
        }
    }

    const Hops *hops_ = nullptr;
    int chunks_ = 1;
    Time best_last_ = never, best_sum_ = never;
    std::array<bool, exhaustive_destinations> used_{};
    std::array<int, exhaustive_destinations> path_{};
    std::vector<int> trial_;
};

}  // namespace uncut

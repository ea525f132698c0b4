// Routing of one fetch over the links of a node: which copy to take and in which order the destinations forward it.
// Uncut-GEMMs, sections III-D and III-E.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
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

// Chunks pass one after the other at constant cost. So a hop ends either `chunks` costs after it could start or one
// cost after the last chunk reached its source, whichever is later.
inline Arrival next_hop(Arrival before, Time link_free, Time cost, int chunks) {
    const Time start = std::max(link_free, before.first);
    return {start + cost, std::max(start + chunks * cost, before.last + cost)};
}

class ChainSearch {
  public:
    // Writes the chain (indices of so many destinations) with the earliest last arrival; of equal ones the
    // least sum of arrivals, then the lexicographically first (greedy insertion: the earliest
    // position). `hop` says when chunks are at a destination, from which one (-1: from the best source) and when.
    template <class Hop>
    void run(int n, const Hop &hop, std::vector<int> &chain) {
        best_last_ = best_sum_ = never;
        chain.clear();
        if (n == 1) {
            chain.push_back(0);
        } else if (n <= exhaustive_destinations) {
            used_.fill(false);
            extend(n, hop, 0, {0, 0}, 0, chain);
        } else {
            insert(n, hop, chain);
        }
    }

  private:
    // Whether a chain is the best one so far, which it then is.
    bool improves(Time last, Time sum) {
        if (last > best_last_ || (last == best_last_ && sum >= best_sum_)) return false;
        best_last_ = last;
        best_sum_ = sum;
        return true;
    }

    template <class Hop>
    void extend(int n, const Hop &hop, int depth, Arrival before, Time sum, std::vector<int> &chain) {
        if (depth == n) {
            if (improves(before.last, sum)) chain.assign(path_.begin(), path_.begin() + n);
            return;
        }
        for (int to = 0; to < n; ++to) {
            if (used_[to]) continue;
            const Arrival after = hop(depth ? path_[depth - 1] : -1, to, before);
            if (after.last > best_last_) continue;  // arrivals never decrease along a chain
            used_[to] = true;
            path_[depth] = to;
            extend(n, hop, depth + 1, after, sum + after.last, chain);
            used_[to] = false;
        }
    }

    template <class Hop>
    void insert(int n, const Hop &hop, std::vector<int> &chain) {
        for (int to = 0; to < n; ++to) {
            best_last_ = best_sum_ = never;
            std::size_t place = 0;
            for (std::size_t at = 0; at <= chain.size(); ++at) {
                trial_ = chain;
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
            chain.insert(chain.begin() + static_cast<std::ptrdiff_t>(place), to);
        }
    }

    Time best_last_ = never, best_sum_ = never;
    std::array<bool, exhaustive_destinations> used_{};
    std::array<int, exhaustive_destinations> path_{};
    std::vector<int> trial_;
};

}  // namespace uncut

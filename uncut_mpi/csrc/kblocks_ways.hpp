// Ways between devices of a node whose links differ: what a byte takes, and over whom it goes where a link is slow.
#pragma once

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace uncut {

constexpr int most_relays_of_a_way = 2;

struct KWay {
    double cost = 1;                                      // of a byte, where it is 1 on the fastest link
    std::array<int, most_relays_of_a_way> relay{-1, -1};  // ranks that hand it on, in turn
};

// `Ways` of planning/ways.py. Empty where all links of each node are alike: then each byte costs 1 at the ports of both
// its ends.
struct KWays {
    std::vector<int> first, place;  // of each rank: where its ways begin, and which of those of a node leads to it
    std::vector<KWay> ways;
    std::vector<double> links;                       // the same: the cost of a byte on the link itself
    std::vector<double> sends, receives, from_host;  // of each rank: of a byte at its port, 0 where links have none

    bool even() const { return ways.empty(); }
    // Of two ranks of a node.
    std::size_t at(int from, int to) const {
        return static_cast<std::size_t>(first[static_cast<std::size_t>(from)] + place[static_cast<std::size_t>(to)]);
    }
    double cost(int from, int to) const { return even() || from == to ? 1 : ways[at(from, to)].cost; }
    bool has_relays(int from, int to) const { return !even() && from != to && ways[at(from, to)].relay[0] >= 0; }
    // Calls for each link of a way with its ends.
    template <typename What>
    void each_leg(int from, int to, const What &what) const {
        if (even() || from == to) return;
        for (const int relay : ways[at(from, to)].relay)
            if (relay >= 0) what(std::exchange(from, relay), relay);
        what(from, to);
    }
};

}  // namespace uncut

// Links, chains of them over relays where a link is slow, and until when links and ranks are taken.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <utility>
#include <vector>

#include "uncut_routing.hpp"
#include "uncut_scheduler.hpp"

namespace uncut {

// A copy between two locations for the sake of a worker; host memory private to a rank is reached
// by that rank's link alone, and from there by `onward`. All host memory is one end of links.
struct Link {
    int issuer = -1;
    std::size_t resource;
    double ps_per_byte;
    Time latency;
    int source, destination;
    std::size_t at, onward;  // indices into the link tables; onward == at: there is none
};

inline Time cost(const Link &l, std::int64_t bytes) {
    return std::llround(static_cast<double>(bytes) * l.ps_per_byte) + l.latency;
}

// A chain of links over relays, each at the rate that it has in a stream of chunks over all of them.
struct Detour {
    int relays = 0;
    std::array<Link, most_relays + 1> leg{};  // each but the last ends at a relay
};

// What a tile is cut into on its way.
struct Chunks {
    int count = 1;
    std::int64_t bytes = 0;  // of one
};

class Links {
  public:
    explicit Links(const Input &in);

    bool in_host(int location) const { return in_.locations.in_host(location); }
    // As where it ends asks for it.
    const Link &link(int source, int destination) {
        Link &known = links_[static_cast<std::size_t>(source) * locations_ + destination];
        if (known.issuer < 0) known = make_link(source, destination);
        return known;
    }
    // The chain to take instead of a link, or null.
    const Detour *detour(int matrix, int source, int destination) {
        if (!in_.max_hops) return nullptr;
        std::int32_t &known = detour_at_[matrix][static_cast<std::size_t>(source) * locations_ + destination];
        if (known == unknown) known = find_detour(matrix, source, destination);
        return known < 0 ? nullptr : &detours_[known];
    }

    Chunks chunks(int matrix, const Region &r, std::size_t destinations) const;
    // Over relays, whose links are slow: what a chunk costs besides is nothing there.
    Chunks relayed_chunks(int matrix, const Region &r) const { return cut(matrix, r, in_.chunks); }

    bool blind() const { return in_.routing == bw_routing; }  // to load: an idle network, every copy there
    Time free_at(const Link &l) const { return blind() ? 0 : busy_until(l); }
    Time busy_until(const Link &l) const { return free_[l.resource]; }
    // When chunks are at the end of a link or a chain, from when they are at its source.
    Arrival over(const Link &l, Arrival arrival, Chunks chunks) const {
        return next_hop(arrival, free_at(l), cost(l, chunks.bytes), chunks.count);
    }
    Arrival over(const Detour &d, Arrival arrival, Chunks chunks, bool idle) const {
        for (int leg = 0; leg <= d.relays; ++leg)
            arrival =
                next_hop(arrival, idle ? 0 : busy_until(d.leg[leg]), cost(d.leg[leg], chunks.bytes), chunks.count);
        return arrival;
    }

    std::size_t resource_of(int rank) const { return index(ends_, 0) + rank; }  // its compute
    Time computes_until(int rank) const { return free_[resource_of(rank)]; }
    // Until when links were free before some were taken.
    using Before = std::vector<std::pair<std::size_t, Time>>;
    void take(const Link &l, Time until, Before *before = nullptr) {
        Time &free = free_[l.resource];
        if (before) before->emplace_back(l.resource, free);
        free = std::max(free, until);
    }
    void give_back(const Before &before) {
        for (auto it = before.rbegin(); it != before.rend(); ++it)
            free_[it->first] = it->second;
    }
    Time compute(int rank, Time not_before, Time duration) {
        Time &until = free_[resource_of(rank)];
        return until = std::max(until, not_before) + duration;
    }
    // Device memory is read and written once per operand; a local copy does two accesses per byte.
    Time combine_time(int rank, std::int64_t bytes) const {
        const std::size_t at = index(rank, rank);
        return std::llround(0.5 * static_cast<double>(bytes) * in_.ps_per_byte[at]) + in_.latency_ps[at];
    }
    Time end() const { return *std::ranges::max_element(free_); }  // of all that is scheduled

  private:
    static constexpr std::int32_t unknown = -2;

    std::size_t index(int source, int destination) const {
        return static_cast<std::size_t>(source) * ends_ + destination;
    }
    Chunks cut(int matrix, const Region &r, std::int64_t most) const;
    Link make_link(int source, int destination) const;
    std::int32_t find_detour(int matrix, int source, int destination);
    Time least_leg(int matrix, int location, bool outward, std::int64_t bytes);
    void share_ports(std::array<Link, most_relays + 1> &legs, int count) const;

    const Input &in_;
    const int ends_, locations_;  // of links there are fewer ends, a node's host memory being one
    std::vector<Time> free_;      // links [source * ends + destination], then compute per rank
    std::vector<Link> links_;     // [source * locations + destination], once somebody has asked for it
    std::array<std::vector<std::int32_t>, 3> detour_at_;          // of each matrix and link, once looked for
    std::array<std::array<std::vector<Time>, 2>, 3> least_legs_;  // into and out of each location; unknown: below 0
    std::deque<Detour> detours_;
    std::vector<std::vector<std::pair<int, double>>> ports_at_;  // (port, weight) per link
};

}  // namespace uncut

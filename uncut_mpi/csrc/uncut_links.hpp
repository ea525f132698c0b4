// Links, chains of them over relays where a link is slow, and until when links and ranks are taken.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <initializer_list>
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
    explicit Links(const Input &in)
        : in_(in),
          ends_(in.locations.num_ends()),
          locations_(in.locations.count()),
          free_(index(ends_, 0) + in.num_ranks, 0),
          links_(static_cast<std::size_t>(locations_) * locations_) {
        if (!in.max_hops) return;
        for (auto &table : detour_at_)
            table.assign(links_.size(), unknown);
        ports_at_.resize(index(ends_, 0));
        for (const auto &[port, source, destination, weight] : in.port_uses)
            ports_at_[index(source, destination)].emplace_back(port, weight);
    }

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

    Chunks chunks(int matrix, const Region &r, std::size_t destinations) const {
        if (destinations < 2) return {1, r.elements() * in_.itemsize(matrix)};
        if (in_.chunks_per_hop == 0) return relayed_chunks(matrix, r);
        return cut(matrix, r, std::min(in_.chunks, in_.chunks_per_hop * (static_cast<int>(destinations) - 1)));
    }

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

    Chunks cut(int matrix, const Region &r, std::int64_t most) const {
        const std::int64_t bytes = r.elements() * in_.itemsize(matrix);
        most = std::min({most, r.cols / in_.min_chunk_columns, bytes / in_.min_chunk_bytes});
        const std::int64_t count = std::max<std::int64_t>(1, most);
        return {static_cast<int>(count), (bytes + count - 1) / count};
    }

    Link make_link(int source, int destination) const {
        Link l;
        l.source = source;
        l.destination = destination;
        const bool inward = in_host(source), with_host = inward || in_host(destination);
        const int host = inward ? source : destination, device = inward ? destination : source;
        const int private_rank = with_host ? in_.locations.rank(host) : nobody;
        int from = in_.locations.end(source), to = in_.locations.end(destination);
        if (with_host) {
            l.issuer = private_rank >= 0 ? private_rank : device;
            if (private_rank >= 0) (inward ? to : from) = private_rank;
        } else {
            l.issuer = in_.overlap ? source : destination;
        }
        l.at = l.onward = index(from, to);
        l.ps_per_byte = in_.ps_per_byte[l.at];
        l.latency = in_.latency_ps[l.at];
        if (private_rank >= 0 && device != private_rank) {
            l.onward = inward ? index(private_rank, device) : index(device, private_rank);
            l.ps_per_byte = std::max(l.ps_per_byte, in_.ps_per_byte[l.onward]);
        }
        // A device that serves its copies in turn is one resource for all that it sends, in the place of its own link.
        const bool in_turn = in_.serial_copies && from != to && !in_host(from) && !in_host(to);
        l.resource = !in_.overlap ? resource_of(l.issuer) : in_turn ? index(from, from) : l.at;
        return l;
    }

    // Looks for a chain over relays that is much faster than a link, for a whole tile while nothing else is on its way.
    // Of equally fast ones the shorter, then the one of lower ranks. Returns its index, or -1.
    std::int32_t find_detour(int matrix, int source, int destination) {
        const Region r{-1, 0, 0, in_.tile_shape[matrix][0], in_.tile_shape[matrix][1]};
        if (source == destination || r.empty()) return -1;
        std::array<Link, most_relays + 1> direct{link(source, destination)};
        share_ports(direct, 1);
        const auto limit =
            static_cast<Time>(static_cast<double>(cost(direct[0], chunks(matrix, r, 1).bytes)) * in_.relay_gain);
        const Chunks parts = relayed_chunks(matrix, r);
        // Of most links no chain can be faster, by its first and its last leg alone.
        const Time first = least_leg(matrix, source, true, parts.bytes);
        if (parts.count * std::max(first, least_leg(matrix, destination, false, parts.bytes)) > limit) return -1;
        Time best = limit + 1;
        Detour found;
        auto consider = [&](std::initializer_list<int> relays) {
            Detour d;
            int at = source;
            for (const int relay : relays) {
                d.leg[d.relays++] = link(at, relay);
                at = relay;
            }
            d.leg[d.relays] = link(at, destination);
            share_ports(d.leg, d.relays + 1);
            const Time last = over(d, {0, 0}, parts, true).last;
            if (last >= best) return;
            best = last;
            found = d;
        };
        for (int x = 0; x < in_.num_ranks; ++x)
            if (x != source && x != destination) consider({x});
        for (int x = 0; in_.max_hops > 1 && x < in_.num_ranks; ++x) {
            if (x == source || x == destination) continue;
            if (parts.count * cost(link(source, x), parts.bytes) >= best) continue;
            for (int y = 0; y < in_.num_ranks; ++y)
                if (y != source && y != destination && y != x) consider({x, y});
        }
        if (!found.relays) return -1;
        detours_.push_back(found);
        return static_cast<std::int32_t>(detours_.size()) - 1;
    }

    // What the fastest link out of a location, or into it, takes for one chunk of a whole tile while nothing else is on
    // its way. `bytes` are the same for all tiles of a matrix.
    Time least_leg(int matrix, int location, bool outward, std::int64_t bytes) {
        std::vector<Time> &known = least_legs_[matrix][outward];
        if (known.empty()) known.assign(locations_, -1);
        Time &least = known[location];
        if (least >= 0) return least;
        least = never / std::max(1, in_.chunks);  // where there is none
        for (int x = 0; x < in_.num_ranks; ++x) {
            if (x == location) continue;
            const Link leg = outward ? link(location, x) : link(x, location);
            least = std::min(least, cost(leg, bytes));
        }
        return least;
    }

    // Slows legs that are busy at once, each with the same bytes per second, to what their ports let through.
    void share_ports(std::array<Link, most_relays + 1> &legs, int count) const {
        if (in_.port_uses.empty()) return;
        auto weight_of = [&](const Link &l, int port) {
            double sum = 0;
            for (const std::size_t at : {l.at, l.onward}) {
                for (const auto &[used, weight] : ports_at_[at])
                    if (used == port) sum += weight;
                if (l.onward == l.at) break;
            }
            return sum;
        };
        for (int h = 0; h < count; ++h) {
            for (const std::size_t at : {legs[h].at, legs[h].onward}) {
                for (const auto &[port, unused] : ports_at_[at]) {
                    double weight = 0;
                    for (int other = 0; other < count; ++other)
                        weight += weight_of(legs[other], port);
                    legs[h].ps_per_byte = std::max(legs[h].ps_per_byte, weight * in_.port_ps_per_byte[port]);
                }
            }
        }
    }

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

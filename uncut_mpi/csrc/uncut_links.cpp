#include "uncut_links.hpp"

#include <initializer_list>

namespace uncut {

Links::Links(const Input &in)
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

Chunks Links::chunks(int matrix, const Region &r, std::size_t destinations) const {
    if (destinations < 2) return {1, r.elements() * in_.itemsize(matrix)};
    if (in_.chunks_per_hop == 0) return relayed_chunks(matrix, r);
    return cut(matrix, r, std::min(in_.chunks, in_.chunks_per_hop * (static_cast<int>(destinations) - 1)));
}

Chunks Links::cut(int matrix, const Region &r, std::int64_t most) const {
    const std::int64_t bytes = r.elements() * in_.itemsize(matrix);
    most = std::min({most, r.cols / in_.min_chunk_columns, bytes / in_.min_chunk_bytes});
    const std::int64_t count = std::max<std::int64_t>(1, most);
    return {static_cast<int>(count), (bytes + count - 1) / count};
}

Link Links::make_link(int source, int destination) const {
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

// Slows legs that are busy at once, each with the same bytes per second, to what their ports let through.
void Links::share_ports(std::array<Link, most_relays + 1> &legs, int count) const {
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

// What the fastest link out of a location, or into it, takes for one chunk of a whole tile while nothing else is on its
// way. `bytes` are the same for all tiles of a matrix.
Time Links::least_leg(int matrix, int location, bool outward, std::int64_t bytes) {
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

// Looks for a chain over relays that is much faster than a link, for a whole tile while nothing else is on its way. Of
// equally fast ones the shorter, then the one of lower ranks. Returns its index, or -1.
std::int32_t Links::find_detour(int matrix, int source, int destination) {
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

}  // namespace uncut

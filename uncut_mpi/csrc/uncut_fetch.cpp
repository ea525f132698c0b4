// Routing of tiles of A and B (III-D, III-E), and the copies that bring them.
#include "uncut_state.hpp"

namespace uncut {

// The rank of a group that computes at a location and needs tiles of this row or column, if there is one.
Worker *Scheduler::sharer(int side, int group, int outer, int location) {
    const int index = in_host(location) ? -1 : workers_of_rank_[location];
    if (index < 0) return nullptr;
    Worker &w = workers_[index];
    return group_of(w, side) == group && w.sides[side].place[outer] >= 0 ? &w : nullptr;
}

// The copy of a tile that a relay at a location keeps, if it does.
Cached *Scheduler::cached(int side, int group, std::size_t tile, int location) {
    if (cached_[side].empty() || cached_[side][group].empty()) return nullptr;
    for (Cached &copy : cached_[side][group][tile])
        if (copy.rank == location) return &copy;
    return nullptr;
}

// When a location has a tile of the group of `w`, and the last copy that brings it there.
Scheduler::Holder Scheduler::holder(const Worker &w, int side, std::size_t tile, int location) {
    if (location == origin(side, group_of(w, side), tile).location) return {0, -1};
    if (const Worker *worker = sharer(side, group_of(w, side), outer_of(tile), location))
        return {worker->sides[side].eta[tile], worker->sides[side].task[tile]};
    if (const Cached *copy = cached(side, group_of(w, side), tile, location)) return {copy->eta, copy->task};
    return {};
}

Region Scheduler::held_region(const Worker &w, int side, int outer, int p, int location) {
    const std::size_t tile = tile_index(outer, p);
    const int group = group_of(w, side);
    if (location == origin(side, group, tile).location)
        return tile_in(in_.pieces[side][origins_[side][group][tile]], side, outer_extent(w, side, outer), k_extent(p));
    if (const Worker *worker = sharer(side, group, outer, location)) return own_region(*worker, side, outer, p);
    return cached(side, group, tile, location)->region;
}

// Fills `route` for a tile that `w` lacks; returns when it is there.
Time Scheduler::find_route(Worker &w, int side, int outer, int p, Route &route) {
    const std::size_t tile = tile_index(outer, p);
    destinations_.clear();
    if (in_.batch) {
        for (const int index : sharers_[side][group_of(w, side)])
            if (workers_[index].sides[side].eta[tile] >= never) destinations_.push_back(workers_[index].rank);
    } else {
        destinations_.push_back(w.rank);
    }
    const std::size_t n = destinations_.size();
    const Region r = shape(w, side, outer, p);
    hops_.resize(n);
    first_hops(w, side, tile, r);
    // A fetch for one rank alone needs chunks only where it goes over relays.
    route.chunks = n == 1 && hops_.first[0].relayed ? relay_chunks_of(side, r) : chunks_of(side, r, n);
    const std::int64_t chunk_bytes = chunk_bytes_of(side, r, route.chunks);
    if (n > 1) next_hops(w, side, tile, chunk_bytes);
    if (in_.routing == origin_routing) {
        order_.resize(n);
        for (std::size_t h = 0; h < n; ++h)
            order_[h] = static_cast<int>(h);
    } else {
        search_.run(hops_, route.chunks, order_);
    }

    // Arrivals with the load as it is, also for a route chosen blindly.
    route.legs.clear();
    int from = hops_.first[order_[0]].source;
    for (std::size_t h = 0; h < n; ++h) {
        const int to = destinations_[order_[h]];
        if (leg_to_[to] >= 0) continue;  // it was a relay on the way to one before it
        const Way way = h ? Way::earlier : hops_.first[order_[0]].relayed ? Way::relayed : Way::direct;
        travel(w, side, tile, from, to, way, chunk_bytes, route);
        from = to;
    }
    const Time at_w = route.legs[leg_to_[w.rank]].arrival.last;
    for (const Leg &leg : route.legs)
        leg_to_[leg.link.destination] = -1;
    return at_w;
}

// The best first hop into each destination.
void Scheduler::first_hops(Worker &w, int side, std::size_t tile, const Region &r) {
    const std::size_t n = destinations_.size();
    const int group = group_of(w, side), holder = origin(side, group, tile).location;
    const int chunks = chunks_of(side, r, n), relayed_chunks = n < 2 ? relay_chunks_of(side, r) : chunks;
    const std::int64_t chunk_bytes = chunk_bytes_of(side, r, chunks),
                       relayed_bytes = chunk_bytes_of(side, r, relayed_chunks);
    for (std::size_t to = 0; to < n; ++to) {
        const int destination = destinations_[to];
        const Worker &target = workers_[workers_of_rank_[destination]];
        const Time wait = in_.caching ? 0 : target.sides[side].reader_end[tile];
        Time best = never;
        auto take = [&](int source, bool relayed, const Arrival &arrival) {
            if (arrival.last >= best) return;
            best = arrival.last;
            hops_.first[to] = {source, relayed, arrival};
        };
        auto consider = [&](int source, Time eta) {
            const Time ready = blind() ? 0 : std::max(eta, wait);
            const Link &l = link(source, destination);
            take(source, false, next_hop({ready, ready}, free_at(l), cost(l, chunk_bytes), chunks));
            const Detour *d = detour(side, source, destination);
            if (!d || !can_relay(w, side, tile, *d)) return;
            take(source, true, over(*d, {ready, ready}, relayed_bytes, relayed_chunks, blind()));
        };
        consider(holder, 0);
        if (in_.routing == origin_routing || !in_.caching) continue;
        for (const int index : sharers_[side][group]) {
            const Worker &worker = workers_[index];
            const Time eta = worker.sides[side].eta[tile];
            if (worker.rank != holder && eta < never) consider(worker.rank, eta);
        }
        if (cached_[side].empty() || cached_[side][group].empty()) continue;
        for (const Cached &copy : cached_[side][group][tile])
            consider(copy.rank, copy.eta);
    }
}

// The hops between destinations.
void Scheduler::next_hops(Worker &w, int side, std::size_t tile, std::int64_t chunk_bytes) {
    const std::size_t n = destinations_.size();
    for (std::size_t from = 0; from < n; ++from) {
        for (std::size_t to = 0; to < n; ++to) {
            if (from == to) continue;
            const Link &l = link(destinations_[from], destinations_[to]);
            NextHop &next = hops_.next[from * n + to];
            next.direct = {free_at(l), cost(l, chunk_bytes)};
            const Detour *d = detour(side, destinations_[from], destinations_[to]);
            if (!d || !can_relay(w, side, tile, *d)) continue;
            RelayedHop hop;
            hop.legs = d->relays + 1;
            for (int leg = 0; leg < hop.legs; ++leg)
                hop.leg[leg] = {free_at(d->leg[leg]), cost(d->leg[leg], chunk_bytes)};
            next.other = static_cast<int>(hops_.relayed.size());
            hops_.relayed.push_back(hop);
        }
    }
}

// Whether every relay has the tile, needs it itself, or has room for a copy.
bool Scheduler::can_relay(const Worker &w, int side, std::size_t tile, const Detour &d) {
    for (int x = 0; x < d.relays; ++x) {
        const int relay = d.relay[x];
        if (holder(w, side, tile, relay).eta >= never && !sharer(side, group_of(w, side), outer_of(tile), relay) &&
            !can_keep(relay, side))
            return false;
    }
    return true;
}

// When the chunks of a tile are at a location that has it or gets it on this route.
Arrival Scheduler::there(Worker &w, int side, std::size_t tile, int location, const Route &route) {
    if (leg_to_[location] >= 0) return route.legs[leg_to_[location]].arrival;
    const Time eta = holder(w, side, tile, location).eta;
    return {eta, eta};
}

// Appends the legs from a location that has the tile, or gets it on this route, to a destination. Relays that
// have the tile already shorten a chain; others that need it are served on the way.
void Scheduler::travel(Worker &w, int side, std::size_t tile, int from, int to, Way way, std::int64_t chunk_bytes,
                       Route &route) {
    const Link &l = link(from, to);
    const Detour *d = way == Way::direct ? nullptr : detour(side, from, to);
    if (d && way == Way::earlier) {
        const Arrival before = there(w, side, tile, from, route);
        const Arrival direct = next_hop(before, free_at(l), cost(l, chunk_bytes), route.chunks);
        if (over(*d, before, chunk_bytes, route.chunks, blind()).last >= direct.last || !can_relay(w, side, tile, *d))
            d = nullptr;
    }
    if (!d) {
        add_leg(w, side, tile, l, chunk_bytes, route);
        return;
    }
    int start = 0;
    for (int x = 0; x < d->relays; ++x)
        if (there(w, side, tile, d->relay[x], route).last < never) start = x + 1;
    for (int leg = start; leg <= d->relays; ++leg)
        add_leg(w, side, tile, d->leg[leg], chunk_bytes, route);
}

void Scheduler::add_leg(Worker &w, int side, std::size_t tile, const Link &l, std::int64_t chunk_bytes, Route &route) {
    const Time wait = in_.caching ? 0 : workers_[workers_of_rank_[l.destination]].sides[side].reader_end[tile];
    Leg leg{l, leg_to_[l.source], {0, 0}};
    leg.arrival = next_hop(there(w, side, tile, l.source, route), std::max(free_[l.resource], wait),
                           cost(l, chunk_bytes), route.chunks);
    leg_to_[l.destination] = static_cast<int>(route.legs.size());
    route.legs.push_back(leg);
}

// Books a route's links until its arrivals; with `undo`, remembers what they were.
void Scheduler::book(const Route &route, std::vector<std::pair<std::size_t, Time>> *undo) {
    for (const Leg &leg : route.legs) {
        Time &until = free_[leg.link.resource];
        if (undo) undo->emplace_back(leg.link.resource, until);
        until = std::max(until, leg.arrival.last);
    }
}

void Scheduler::fetch(Worker &w, int side, int outer, int p) {
    const std::size_t tile = tile_index(outer, p);
    if (w.sides[side].home[tile] >= 0 || (in_.caching && w.sides[side].eta[tile] < never)) return;
    find_route(w, side, outer, p, route_);
    book(route_, nullptr);
    const int chunks = route_.chunks, group = group_of(w, side);
    std::vector<LegCopies> &hops = copies_;
    hops.clear();
    for (const Leg &leg : route_.legs) {
        const int from = leg.link.source, to = leg.link.destination;
        LegCopies hop{.lane = lane_for_copy(leg.link), .parent = leg.parent};
        if (leg.parent < 0) {
            hop.read = writer_.regions(held_region(w, side, outer, p, from), chunks);
            hop.awaits = holder(w, side, tile, from).task;
        } else {
            hop.read = hops[leg.parent].write;
        }
        const Worker *target = sharer(side, group, outer, to);
        if (!target) {
            if (cached_[side].empty()) cached_[side].resize(sharers_[side].size());
            auto &copies = cached_[side][group];
            if (copies.empty()) copies.resize(w.sides[side].eta.size());
            copies[tile].push_back(keep_copy(to, side, shape(w, side, outer, p)));
        }
        hop.write = writer_.regions(held_region(w, side, outer, p, to), chunks);
        if (target && !in_.caching) hop.reader = target->sides[side].reader[tile];
        hops.push_back(hop);
    }
    copy_chunks(hops, chunks);
    for (std::size_t h = 0; h < hops.size(); ++h) {
        const int to = route_.legs[h].link.destination;
        const Time eta = route_.legs[h].arrival.last;
        end_ = std::max(end_, eta);
        if (Worker *target = sharer(side, group, outer, to)) {
            target->sides[side].task[tile] = hops[h].brought;
            arrived(*target, side, outer, p, eta);
        } else {
            Cached &copy = *cached(side, group, tile, to);
            copy.task = hops[h].brought;
            copy.eta = eta;
        }
    }
}

// One chunk after the other goes all its way.
void Scheduler::copy_chunks(std::vector<LegCopies> &hops, int chunks) {
    const int group = hops.size() > 1 ? next_group_++ : -1;
    for (int q = 0; q < chunks; ++q)
        for (LegCopies &hop : hops) {
            const std::array awaits{hop.parent < 0 ? hop.awaits : hops[hop.parent].brought, hop.reader};
            const std::array<OperandRecord, 2> regions{{{hop.write + q, one}, {hop.read + q, one}}};
            hop.brought = writer_.task(copy_task, hop.lane, group, regions, awaits);
        }
}

void Scheduler::arrived(Worker &w, int side, int outer, int p, Time eta) {
    Tiles &t = w.sides[side];
    const bool news = t.eta[tile_index(outer, p)] >= never;
    t.eta[tile_index(outer, p)] = eta;
    if (!news || !track_known_) return;
    ++t.known[p];
    const Tiles &other = w.sides[1 - side];
    for (int o = 0; o < outer_tiles(w, 1 - side); ++o)
        if (other.eta[tile_index(o, p)] < never)
            add_known(w, side == side_a ? Subproblem{outer, o, p} : Subproblem{o, outer, p});
}

}  // namespace uncut

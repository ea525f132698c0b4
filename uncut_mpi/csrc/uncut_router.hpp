// When tiles of A and B are where, and how they get there (III-D, III-E).
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <vector>

#include "uncut_records.hpp"

namespace uncut {

// One copy of a route, from a place that has the tile to one that lacks it.
struct Leg {
    const Link *link;
    int parent = -1;  // the leg that brings the tile to its source; -1: it is there
    Arrival arrival{0, 0};
};

// A fetch of one tile for one or more ranks, in chunks along a chain; relays make more legs of it.
struct Route {
    Chunks chunks;
    std::vector<Leg> legs;
};

class Router {
  public:
    Router(const Input &in, const Tiling &tiling, Links &links, Records &records)
        : in_(in),
          tiling_(tiling),
          links_(links),
          records_(records),
          held_(tiling.workers.size()),
          leg_to_(in.locations.count(), -1) {
        for (const Worker &w : tiling.workers) {
            for (int side = 0; side < 2; ++side) {
                const std::vector<std::int32_t> &home = w.panels[side].home;
                Held &held = held_[w.number][side];
                held.eta.resize(home.size());
                std::ranges::transform(home, held.eta.begin(), [](int piece) { return piece < 0 ? never : 0; });
                held.task.assign(home.size(), -1);
                held.region.assign(home.size(), -1);
                if (in.caching) continue;
                held.reader.assign(home.size(), -1);
                held.reader_end.assign(home.size(), 0);
            }
        }
        for (int side = 0; side < 2; ++side)
            cached_[side].resize(tiling.sharers[side].size());
    }

    // When a worker has each tile of A or B; never: it is neither there nor under way.
    const std::vector<Time> &etas(const Worker &w, int side) const { return held_[w.number][side].eta; }

    // Fills a route for a tile that a worker lacks; returns when it is there.
    Time find(const Worker &w, const Tile &t, Route &route) {
        destinations_.clear();
        if (in_.batch) {
            for (const int number : tiling_.sharers_of(t))
                if (held_[number][t.side].eta[t.at] >= never) destinations_.push_back(tiling_.workers[number].rank);
        } else {
            destinations_.push_back(w.rank);
        }
        const std::size_t n = destinations_.size();
        const Region r = tiling_.shape(t);
        const Chunks direct = links_.chunks(t.side, r, n), relayed = n < 2 ? links_.relayed_chunks(t.side, r) : direct;
        first_hops(t, direct, relayed);
        // A fetch for one rank alone needs chunks only where it goes over relays.
        route.chunks = first_[0].relayed ? relayed : direct;
        if (n > 1) next_hops(t, route.chunks);
        if (in_.routing == origin_routing) {
            chain_.resize(n);
            std::iota(chain_.begin(), chain_.end(), 0);
        } else {
            const auto hop = [this, n, chunks = route.chunks](int from, int to, Arrival before) {
                if (from < 0) return first_[to].arrival;
                const NextHop &of = next_[from * n + to];
                const Arrival direct = next_hop(before, of.free, of.cost, chunks.count);
                if (!of.detour) return direct;
                const Arrival other = links_.over(*of.detour, before, chunks, links_.blind());
                return other.last < direct.last ? other : direct;
            };
            search_.run(static_cast<int>(n), hop, chain_);
        }

        // Arrivals with the load as it is, also for a route chosen blindly.
        route.legs.clear();
        int from = first_[chain_[0]].source;
        for (std::size_t h = 0; h < n; ++h) {
            const int to = destinations_[chain_[h]];
            if (leg_to_[to] >= 0) continue;  // it was a relay on the way to one before it
            travel(t, from, to, h ? Way::earlier : first_[chain_[0]].relayed ? Way::relayed : Way::direct, route);
            from = to;
        }
        const Time at_w = route.legs[leg_to_[w.rank]].arrival.last;
        for (const Leg &leg : route.legs)
            leg_to_[leg.link->destination] = -1;
        return at_w;
    }

    // Takes a route's links until its arrivals.
    void book(const Route &route, Links::Before *before = nullptr) {
        for (const Leg &leg : route.legs)
            links_.take(*leg.link, leg.arrival.last, before);
    }

    // Brings a tile that a worker lacks, and returns the numbers of all workers that had not asked for it before.
    const std::vector<int> &fetch(const Worker &w, const Tile &t) {
        news_.clear();
        if (in_.caching ? etas(w, t.side)[t.at] < never : w.panels[t.side].home[t.at] >= 0) return news_;
        find(w, t, route_);
        book(route_);
        TableWriter &writer = records_.writer();
        copies_.clear();
        for (const Leg &leg : route_.legs) {
            const int from = leg.link->source, to = leg.link->destination;
            LegCopies hop{.lane = records_.copy_lane_of(*leg.link), .parent = leg.parent};
            if (leg.parent < 0) {
                hop.read = writer.regions(held_region(t, from), route_.chunks.count);
                hop.awaits = holder(t, from).task;
            } else {
                hop.read = copies_[leg.parent].write;
            }
            const Worker *target = tiling_.sharer(t, to);
            if (!target) {
                auto &tiles = cached_[t.side][t.group];
                if (tiles.empty()) tiles.resize(tiling_.origins[t.side][t.group].size());
                tiles[t.at].push_back({to, records_.keep(to, t.side, tiling_.shape(t)), {}});
            }
            hop.write = writer.regions(held_region(t, to), route_.chunks.count);
            if (target && !in_.caching) hop.reader = held_[target->number][t.side].reader[t.at];
            copies_.push_back(hop);
        }
        records_.copy_chunks(copies_, route_.chunks.count);
        for (std::size_t h = 0; h < copies_.size(); ++h) {
            const Time eta = route_.legs[h].arrival.last;
            if (const Worker *target = tiling_.sharer(t, route_.legs[h].link->destination)) {
                Held &held = held_[target->number][t.side];
                if (held.eta[t.at] >= never) news_.push_back(target->number);
                held.eta[t.at] = eta;
                held.task[t.at] = copies_[h].brought;
            } else {
                cached(t, route_.legs[h].link->destination)->holder = {eta, copies_[h].brought};
            }
        }
        return news_;
    }

    // From where, when and after which copy a worker reads a tile that has been fetched.
    struct Source {
        std::int32_t region, task;
        Time eta;
    };

    Source source(const Worker &w, const Tile &t) {
        Held &held = held_[w.number][t.side];
        std::int32_t &region = held.region[t.at];  // tiles are read again and again
        if (region < 0) region = records_.writer().region(tiling_.own_region(w, t));
        return {region, held.task[t.at], held.eta[t.at]};
    }

    void was_read(const Worker &w, const Tile &t, std::int32_t by, Time until) {
        if (in_.caching) return;
        Held &held = held_[w.number][t.side];
        held.reader[t.at] = by;
        held.reader_end[t.at] = until;
    }

  private:
    // What one worker has of A or B.
    struct Held {
        std::vector<Time> eta;
        std::vector<std::int32_t> task;    // last copy that brings it; -1 for none
        std::vector<std::int32_t> region;  // where it is read; -1: nobody has asked
        std::vector<std::int32_t> reader;  // last GEMM that read this place; used without caching
        std::vector<Time> reader_end;
    };
    // When a place has a tile, and the last copy that brings it there, -1 for none.
    struct Holder {
        Time eta = never;
        std::int32_t task = -1;
    };
    // A copy of a tile that a relay keeps in its cache.
    struct Cached {
        int rank;
        Region region;
        Holder holder;
    };
    // A hop into a destination, from the best source; and one from another destination, which a detour may be faster
    // than.
    struct FirstHop {
        int source;
        bool relayed;
        Arrival arrival;
    };
    struct NextHop {
        Time free, cost;
        const Detour *detour;
    };

    std::span<Cached> cached(const Tile &t) {
        auto &tiles = cached_[t.side][t.group];
        return tiles.empty() ? std::span<Cached>() : tiles[t.at];
    }

    // The copy of a tile that a relay at a location keeps, if it does.
    Cached *cached(const Tile &t, int location) {
        for (Cached &copy : cached(t))
            if (copy.rank == location) return &copy;
        return nullptr;
    }

    Time read_until(const Tile &t, int rank) const {  // what is overwritten there
        return in_.caching ? 0 : held_[tiling_.worker_of(rank).number][t.side].reader_end[t.at];
    }

    // When a location has a tile, and the last copy that brings it there.
    Holder holder(const Tile &t, int location) {
        if (location == tiling_.origin(t)) return {0, -1};
        if (const Worker *w = tiling_.sharer(t, location)) {
            const Held &held = held_[w->number][t.side];
            return {held.eta[t.at], held.task[t.at]};
        }
        const Cached *copy = cached(t, location);
        return copy ? copy->holder : Holder{};
    }

    Region held_region(const Tile &t, int location) {
        if (location == tiling_.origin(t)) return tiling_.origin_region(t);
        if (const Worker *w = tiling_.sharer(t, location)) return tiling_.own_region(*w, t);
        return cached(t, location)->region;
    }

    // The best first hop into each destination.
    void first_hops(const Tile &t, Chunks chunks, Chunks relayed) {
        const int origin = tiling_.origin(t);
        first_.resize(destinations_.size());
        for (std::size_t to = 0; to < destinations_.size(); ++to) {
            const int destination = destinations_[to];
            const Time wait = read_until(t, destination);
            Time best = never;
            auto take = [&](int source, bool over_relays, const Arrival &arrival) {
                if (arrival.last >= best) return;
                best = arrival.last;
                first_[to] = {source, over_relays, arrival};
            };
            auto consider = [&](int source, Time eta) {
                const Time ready = links_.blind() ? 0 : std::max(eta, wait);
                take(source, false, links_.over(links_.link(source, destination), {ready, ready}, chunks));
                const Detour *d = links_.detour(t.side, source, destination);
                if (!d || !can_relay(t, *d)) return;
                take(source, true, links_.over(*d, {ready, ready}, relayed, links_.blind()));
            };
            consider(origin, 0);
            if (in_.routing == origin_routing || !in_.caching) continue;
            for (const int number : tiling_.sharers_of(t)) {
                const int rank = tiling_.workers[number].rank;
                const Time eta = held_[number][t.side].eta[t.at];
                if (rank != origin && eta < never) consider(rank, eta);
            }
            for (const Cached &copy : cached(t))
                consider(copy.rank, copy.holder.eta);
        }
    }

    // The hops between destinations.
    void next_hops(const Tile &t, Chunks chunks) {
        next_.clear();
        for (const int from : destinations_)
            for (const int to : destinations_) {
                const Link &l = links_.link(from, to);
                const Detour *d = from == to ? nullptr : links_.detour(t.side, from, to);
                next_.push_back({links_.free_at(l), cost(l, chunks.bytes), d && can_relay(t, *d) ? d : nullptr});
            }
    }

    enum class Way { direct, relayed, earlier };

    // Appends the legs from a location that has the tile, or gets it on this route, to a destination. Relays that
    // have the tile already shorten a chain; others that need it are served on the way.
    void travel(const Tile &t, int from, int to, Way way, Route &route) {
        const Link &l = links_.link(from, to);
        const Detour *d = way == Way::direct ? nullptr : links_.detour(t.side, from, to);
        if (d && way == Way::earlier) {
            const Arrival before = there(t, from, route);
            const Time direct = links_.over(l, before, route.chunks).last;
            if (links_.over(*d, before, route.chunks, links_.blind()).last >= direct || !can_relay(t, *d)) d = nullptr;
        }
        if (!d) {
            add_leg(t, l, route);
            return;
        }
        int start = 0;
        for (int x = 0; x < d->relays; ++x)
            if (there(t, d->leg[x].destination, route).last < never) start = x + 1;
        for (int leg = start; leg <= d->relays; ++leg)
            add_leg(t, d->leg[leg], route);
    }

    void add_leg(const Tile &t, const Link &l, Route &route) {
        const Time free = std::max(links_.busy_until(l), read_until(t, l.destination));
        const Arrival arrival =
            next_hop(there(t, l.source, route), free, cost(l, route.chunks.bytes), route.chunks.count);
        const int parent = leg_to_[l.source];
        leg_to_[l.destination] = static_cast<int>(route.legs.size());
        route.legs.push_back({&l, parent, arrival});
    }

    // When the chunks of a tile are at a location that has it or gets it on this route.
    Arrival there(const Tile &t, int location, const Route &route) {
        if (leg_to_[location] >= 0) return route.legs[leg_to_[location]].arrival;
        const Time eta = holder(t, location).eta;
        return {eta, eta};
    }

    // Whether every relay has the tile, needs it itself, or has room for a copy.
    bool can_relay(const Tile &t, const Detour &d) {
        return std::all_of(d.leg.begin(), d.leg.begin() + d.relays, [&](const Link &to) {
            const int relay = to.destination;
            return holder(t, relay).eta < never || tiling_.sharer(t, relay) || records_.can_keep(relay, t.side);
        });
    }

    const Input &in_;
    const Tiling &tiling_;
    Links &links_;
    Records &records_;
    std::vector<std::array<Held, 2>> held_;                                // by worker
    std::array<std::vector<std::vector<std::vector<Cached>>>, 2> cached_;  // per group, once there is one, and tile
    // Scratch.
    std::vector<int> destinations_, chain_, news_;
    std::vector<int> leg_to_;  // per location, the leg of the route under construction that ends there, or -1
    std::vector<FirstHop> first_;
    std::vector<NextHop> next_;  // [from * destinations + to]
    ChainSearch search_;
    Route route_;
    std::vector<LegCopies> copies_;
};

}  // namespace uncut

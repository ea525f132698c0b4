// When tiles of A and B are where, and how they get there (III-D, III-E).
#pragma once

#include <array>
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
    Router(const Input &in, const Tiling &tiling, Links &links, Records &records);

    // When a worker has each tile of A or B; never: it is neither there nor under way.
    const std::vector<Time> &etas(const Worker &w, int side) const { return held_[w.number][side].eta; }
    // Fills a route for a tile that a worker lacks; returns when it is there.
    Time find(const Worker &w, const Tile &t, Route &route);
    // Takes a route's links until its arrivals.
    void book(const Route &route, Links::Before *before = nullptr) {
        for (const Leg &leg : route.legs)
            links_.take(*leg.link, leg.arrival.last, before);
    }
    // Brings a tile that a worker lacks, and returns the numbers of all workers that had not asked for it before.
    const std::vector<int> &fetch(const Worker &w, const Tile &t);

    // From where, when and after which copy a worker reads a tile that has been fetched.
    struct Source {
        std::int32_t region, task;
        Time eta;
    };
    Source source(const Worker &w, const Tile &t);
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
    Cached *cached(const Tile &t, int location);
    Time read_until(const Tile &t, int rank) const {  // what is overwritten there
        return in_.caching ? 0 : held_[tiling_.worker_of(rank).number][t.side].reader_end[t.at];
    }
    Holder holder(const Tile &t, int location);
    Region held_region(const Tile &t, int location);
    void first_hops(const Tile &t, Chunks chunks, Chunks relayed);
    void next_hops(const Tile &t, Chunks chunks);
    enum class Way { direct, relayed, earlier };
    void travel(const Tile &t, int from, int to, Way way, Route &route);
    void add_leg(const Tile &t, const Link &l, Route &route);
    Arrival there(const Tile &t, int location, const Route &route);
    bool can_relay(const Tile &t, const Detour &d);

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

// The state of one run of the scheduler. What works on it is spread over files by concern. These are
// uncut_scheduler.cpp (sub-problems), uncut_tables.cpp (records), uncut_links.cpp (links and relays), uncut_fetch.cpp
// (tiles of A and B), uncut_result.cpp (tiles of C), uncut_order.cpp (what comes next).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <initializer_list>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "uncut_scheduler.hpp"

namespace uncut {

enum Side { side_a = 0, side_b = 1 };

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The tiles of an extent. Those of a kind have the same size, and who holds what of one of them holds it of all.
struct Cuts {
    std::vector<std::int64_t> edges;
    std::vector<int> kinds;
    int count() const { return static_cast<int>(kinds.size()); }
    Extent operator[](int tile) const { return {edges[tile], edges[tile + 1]}; }
};

// What one rank holds of A or B. Tile (o, p) has index o * kt + p; o counts along m (A) or n (B).
struct Tiles {
    std::vector<std::int32_t> home;  // the piece on its own device, which is read in place; -1: there is none
    int buffer = -1;
    std::vector<std::int64_t> place;   // per o, where its rows or columns begin in the panel; -1: not needed
    std::vector<std::int32_t> region;  // where the rank reads each; -1: nobody has asked
    std::vector<Time> eta;             // never: neither here nor under way
    std::vector<std::int32_t> task;    // last copy that brings it; -1 for none
    std::vector<std::int32_t> reader;  // last GEMM that read this place; used without caching
    std::vector<Time> reader_end;
    std::vector<int> known;  // per p, tiles that are here or under way
};

// A copy of a tile that a relay keeps in its cache.
struct Cached {
    int rank = -1;
    Region region;
    Time eta = never;
    std::int32_t task = -1;  // last copy that brings it
};

struct Ready {
    Time eta;
    int j, i, p;
    auto operator<=>(const Ready &) const = default;
};
using ReadyHeap = std::priority_queue<Ready, std::vector<Ready>, std::greater<>>;

// A C tile with sub-problems that can run now: the most advanced first.
struct ReadyTile {
    int progress, tile;
    bool operator<(const ReadyTile &other) const {
        return progress != other.progress ? progress < other.progress : tile > other.tile;
    }
};

struct CTile {
    int progress = 0;                   // sub-problems scheduled
    std::int32_t piece = 0, home = -1;  // of its first holder, and the one on the rank's own device if there is one
    std::int32_t own() const { return std::max(piece, home); }  // from where the rank has it
    std::int32_t lane = -1, sum = -1, fetch = -1, last = -1;    // sum: the region of what is summed
    Time fetched = 0, computed = 0;
};

struct Worker {
    int rank = 0, row = 0, col = 0;
    int mt = 0, nt = 0;
    std::array<const Cuts *, 2> cuts{};  // of its rows and columns
    bool awaits_c = false;               // whether products wait for a part of C
    std::array<Tiles, 2> sides;
    std::vector<CTile> c;             // [j * mt + i]
    std::vector<std::int64_t> owned;  // those it computes, in order; empty: all
    std::vector<bool> done;
    std::int64_t remaining = 0, next = 0;
    int opened = 0;

    // Sub-problems whose A and B are here or under way. First those of C tiles that may start, by ETA, then those whose
    // ETA has passed, per C tile. Last those that wait for their C tile to be chosen.
    ReadyHeap pending;
    std::vector<ReadyHeap> ready, waiting;
    std::priority_queue<ReadyTile> ready_tiles;
};

struct Subproblem {
    int i, j, p;
};

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
    std::array<int, most_relays> relay{};
    std::array<Link, most_relays + 1> leg{};
};

// One copy of a route, from a place that has the tile to one that lacks it.
struct Leg {
    Link link;
    int parent = -1;  // the leg that brings the tile to its source; -1: it is there
    Arrival arrival{0, 0};
};

// A fetch of one tile for one or more ranks, in chunks along a chain; relays make more legs of it.
struct Route {
    int chunks = 1;
    std::vector<Leg> legs;
};

// The copies of one leg, with the first region of each end, one for each chunk.
struct LegCopies {
    std::int32_t lane, parent;  // parent: the hop that brings what is read; -1: it is there when `awaits` is over
    std::int32_t read = -1, write = -1, awaits = -1, reader = -1;  // reader: of what was there
    std::int32_t brought = -1;                                     // the last copy so far
};

enum class CPlace { user, panel, staging };

class Scheduler {
  public:
    explicit Scheduler(const Input &in);
    UncutTables run();

  private:
    // -- geometry ----------------------------------------------------------------------------

    Extent k_extent(int p) const { return k_cuts_[p]; }
    Extent row_extent(const Worker &w, int i) const { return (*w.cuts[side_a])[i]; }
    Extent col_extent(const Worker &w, int j) const { return (*w.cuts[side_b])[j]; }
    Extent outer_extent(const Worker &w, int side, int o) const { return (*w.cuts[side])[o]; }
    int outer_tiles(const Worker &w, int side) const { return side == side_a ? w.mt : w.nt; }
    int group_of(const Worker &w, int side) const { return side == side_a ? w.row : w.col; }
    // A tile of A or B in a buffer of which that is a part, and in a piece that has it.
    Region tile_in(int buffer, int side, Extent outer, Extent inner) const {
        if (side == side_b) std::swap(outer, inner);
        return stored(buffer, outer, inner, in_.transposed(side));
    }
    Region tile_in(const KPiece &piece, int side, Extent outer, Extent inner) const {
        if (side == side_b) std::swap(outer, inner);
        return in_piece(piece, outer, inner, in_.transposed(side));
    }
    Region shape(const Worker &w, int side, int outer, int p) const {
        return tile_in(-1, side, outer_extent(w, side, outer), k_extent(p));
    }
    std::size_t tile_index(int outer, int p) const { return static_cast<std::size_t>(outer) * kt_ + p; }
    std::size_t sub_index(const Worker &w, const Subproblem &s) const {
        return (static_cast<std::size_t>(s.j) * w.mt + s.i) * kt_ + s.p;
    }
    std::size_t c_index(const Worker &w, int i, int j) const { return static_cast<std::size_t>(j) * w.mt + i; }
    void make_cuts();
    Cuts cut(Extent of, const std::vector<std::int64_t> &edges) const;
    std::int32_t piece_of(int matrix, Extent rows, Extent cols, std::int32_t hint) const;
    std::int32_t home_of(int matrix, std::int32_t piece, int rank) const;
    const KOrigin &origin(int side, int group, std::size_t tile) const {
        return in_.pieces[side][origins_[side][group][tile]].origin;
    }
    void make_workers();
    void make_c_tiles(Worker &w);
    void make_tiles(Worker &w, int side) const;
    void place_tiles(Worker &w, int side) const;
    void begin_at_home(Worker &w);
    void reserve();

    // -- tables ------------------------------------------------------------------------------

    Region own_region(const Worker &w, int side, int outer, int p) const;
    Region c_region(const Worker &w, int i, int j, CPlace place) const;
    Region held_c_region(const Worker &w, int i, int j, std::int32_t piece) const;
    std::int32_t lane_for_compute(int rank, int number) { return writer_.lane(rank, compute_lane, no_source, number); }
    std::int32_t lane_for_copy(const Link &l, bool result = false);
    bool can_keep(int rank, int matrix) const { return cache_bytes_[rank] >= in_.tile_bytes[matrix]; }
    Cached keep_copy(int rank, int matrix, const Region &tile);

    // -- links -------------------------------------------------------------------------------

    bool in_host(int location) const { return in_.locations.in_host(location); }
    std::size_t index(int source, int destination) const {
        return static_cast<std::size_t>(source) * ends_ + destination;
    }
    std::size_t resource_of(int rank) const { return index(ends_, 0) + rank; }  // its compute
    // As where it ends asks for it.
    const Link &link(int source, int destination) {
        Link &known = links_[static_cast<std::size_t>(source) * locations_ + destination];
        if (known.issuer < 0) known = make_link(source, destination);
        return known;
    }
    Link make_link(int source, int destination) const;
    // The chain to take instead of a link, or null.
    const Detour *detour(int matrix, int source, int destination) {
        if (!in_.max_hops) return nullptr;
        std::int32_t &known = detour_at_[matrix][static_cast<std::size_t>(source) * locations_ + destination];
        if (known == unknown) known = find_detour(matrix, source, destination);
        return known < 0 ? nullptr : &detours_[known];
    }
    std::int32_t find_detour(int matrix, int source, int destination);
    Time least_leg(int matrix, int location, bool outward, std::int64_t bytes);
    void share_ports(std::array<Link, most_relays + 1> &legs, int count) const;
    int chunks_of(int matrix, const Region &r, std::size_t destinations) const {
        if (destinations < 2) return 1;
        const int most = relay_chunks_of(matrix, r);
        return in_.chunks_per_hop > 0 ? std::min(most, in_.chunks_per_hop * (static_cast<int>(destinations) - 1))
                                      : most;
    }
    // Over relays, whose links are slow: what a chunk costs besides is nothing there.
    int relay_chunks_of(int matrix, const Region &r) const {
        const std::int64_t bytes = r.elements() * in_.itemsize(matrix);
        return static_cast<int>(std::clamp<std::int64_t>(
            std::min(r.cols / in_.min_chunk_columns, bytes / in_.min_chunk_bytes), 1, in_.chunks));
    }
    std::int64_t chunk_bytes_of(int matrix, const Region &r, int chunks) const {
        return ceil_div(r.elements() * in_.itemsize(matrix), chunks);
    }

    // -- A and B -----------------------------------------------------------------------------

    struct Holder {
        Time eta = never;
        std::int32_t task = -1;
    };

    bool blind() const { return in_.routing == bw_routing; }  // to load: an idle network, every copy there
    Time free_at(const Link &l) const { return blind() ? 0 : free_[l.resource]; }
    // When chunks are at the end of a chain, from when they are at its source.
    Arrival over(const Detour &d, Arrival arrival, std::int64_t chunk_bytes, int chunks, bool idle) const {
        for (int leg = 0; leg <= d.relays; ++leg)
            arrival = next_hop(arrival, idle ? 0 : free_[d.leg[leg].resource], cost(d.leg[leg], chunk_bytes), chunks);
        return arrival;
    }
    Worker *sharer(int side, int group, int outer, int location);
    int outer_of(std::size_t tile) const { return static_cast<int>(tile) / kt_; }
    Cached *cached(int side, int group, std::size_t tile, int location);
    Holder holder(const Worker &w, int side, std::size_t tile, int location);
    Region held_region(const Worker &w, int side, int outer, int p, int location);
    Time find_route(Worker &w, int side, int outer, int p, Route &route);
    enum class Way { direct, relayed, earlier };
    void first_hops(Worker &w, int side, std::size_t tile, const Region &r);
    void next_hops(Worker &w, int side, std::size_t tile, std::int64_t chunk_bytes);
    void travel(Worker &w, int side, std::size_t tile, int from, int to, Way way, std::int64_t chunk_bytes,
                Route &route);
    void add_leg(Worker &w, int side, std::size_t tile, const Link &l, std::int64_t chunk_bytes, Route &route);
    Arrival there(Worker &w, int side, std::size_t tile, int location, const Route &route);
    bool can_relay(const Worker &w, int side, std::size_t tile, const Detour &d);
    void book(const Route &route, std::vector<std::pair<std::size_t, Time>> *undo);
    void fetch(Worker &w, int side, int outer, int p);
    void copy_chunks(std::vector<LegCopies> &hops, int chunks);
    void arrived(Worker &w, int side, int outer, int p, Time eta);

    // -- C -----------------------------------------------------------------------------------

    // How a tile of C would travel.
    struct CWay {
        Detour path;  // without relays the link
        int chunks = 1;
        std::int64_t chunk_bytes = 0;
        Time arrival = 0;                                                      // of all of it
        Time busy() const { return chunks * cost(path.leg[0], chunk_bytes); }  // how long it keeps the first link
    };

    CWay c_way(const Worker &w, int i, int j, std::int32_t piece, bool inward, Time not_before);
    Time copy_c(Worker &w, int i, int j, std::int32_t piece, bool inward, CPlace place, std::int32_t awaited,
                Time not_before, std::int32_t &task);
    void write_back(Worker &w, const CTile &c, int i, int j, CPlace place, std::int32_t awaited, Time not_before);
    bool fetches(const CTile &c) const { return in_.reads_c && c.home < 0; }
    // Sum of products, and where C_in is fetched to and C_out is written back from.
    CPlace sum_place(const CTile &c) const { return c.home >= 0 && !in_.rounds_c() ? CPlace::user : CPlace::panel; }
    CPlace in_place(const CTile &c) const {
        if (c.home >= 0) return CPlace::user;
        return in_.lazy || in_.rounds_c() ? CPlace::staging : CPlace::panel;
    }
    CPlace out_place(const CTile &c) const {
        if (c.home >= 0) return CPlace::user;
        return in_.rounds_c() ? CPlace::staging : CPlace::panel;
    }
    void open(Worker &w, CTile &c, int i, int j);
    void close(Worker &w, CTile &c, int i, int j);

    // -- compute -----------------------------------------------------------------------------

    Time run_on(int rank, Time not_before, Time duration) {
        Time &until = free_[resource_of(rank)];
        until = std::max(until, not_before) + duration;
        end_ = std::max(end_, until);
        return until;
    }
    // Device memory is read and written once per operand; a local copy does two accesses per byte.
    Time combine_time(int rank, std::int64_t bytes) const {
        const std::size_t at = index(rank, rank);
        return std::llround(0.5 * static_cast<double>(bytes) * in_.ps_per_byte[at]) + in_.latency_ps[at];
    }
    void schedule(Worker &w, const Subproblem &s);

    // -- order -------------------------------------------------------------------------------

    // Smaller is better; see planning/uncut.py for the order in words.
    struct Choice {
        Time start = never;
        int fetches = 0;
        int reuse = 0;
        Subproblem s{0, 0, 0};
        bool opens = false;
        auto key() const { return std::make_tuple(start, opens, fetches, -reuse, s.j, s.i, s.p); }
        bool operator<(const Choice &other) const { return key() < other.key(); }
    };
    // One fetch, for one rank, on one link.
    struct SingleFetch {
        unsigned scan = 0;
        std::size_t resource = 0;
        Time eta = 0, cost = 0;
    };
    struct Estimate {
        unsigned scan = 0;
        std::size_t of = 0;
        Time eta = 0;
    };

    Subproblem next_fixed(Worker &w) const;
    void add_known(Worker &w, const Subproblem &s);
    bool needs_c(const Worker &w, std::size_t c) const {
        return c_is_input_ && w.c[c].home < 0 && w.c[c].progress == 0;
    }
    // Whether a sub-problem begins a C tile, where that counts against it.
    bool opens(const Worker &w, int i, int j) const { return in_.finish_first && w.c[c_index(w, i, j)].progress == 0; }
    void drop_done(const Worker &w, ReadyHeap &heap) const {
        while (!heap.empty() && w.done[sub_index(w, {heap.top().i, heap.top().j, heap.top().p})])
            heap.pop();
    }
    Subproblem select(Worker &w);
    void scan_missing(Worker &w, Time compute_free, Choice &best);
    Time estimate(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing);
    Time estimate_batched(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing);
    Time estimate_single(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing);
    const SingleFetch &single_fetch(Worker &w, int side, int outer, int p);
    const SingleFetch &c_fetch(const Worker &w, int i, int j);
    std::size_t kind_of_c(const Worker &w, int i, int j) const {
        return w.cuts[side_a]->kinds[i] * most_kinds_[side_b] + w.cuts[side_b]->kinds[j];
    }

    static constexpr std::int32_t unknown = -2;

    const Input &in_;
    const int ends_, locations_;                   // of links there are fewer ends, a node's host memory being one
    std::array<std::vector<Cuts>, 2> outer_cuts_;  // of rows and columns, per grid row and column
    Cuts k_cuts_;
    std::array<std::size_t, 2> most_kinds_{};  // of rows and columns of one rank
    int kt_ = 1;
    bool c_is_input_ = false, track_known_ = false, in_parts_ = false;
    std::int64_t c_tiles_ = 0;

    std::vector<Worker> workers_;
    std::vector<int> workers_of_rank_;                               // -1: computes nothing
    std::array<std::vector<std::vector<int>>, 2> sharers_;           // per grid row (A) or column (B)
    std::array<std::vector<std::vector<std::int32_t>>, 2> origins_;  // likewise, of each tile its first holder's piece

    std::vector<Link> links_;  // [source * locations + destination], once somebody has asked for it
    // Relays: the chain per matrix and link, once looked for, and the copies they keep per group and tile.
    std::array<std::vector<std::int32_t>, 3> detour_at_;
    std::array<std::array<std::vector<Time>, 2>, 3> least_legs_;  // into and out of each location; unknown: below 0
    std::deque<Detour> detours_;
    std::vector<std::vector<std::pair<int, double>>> ports_at_;  // (port, weight) per link
    std::array<std::vector<std::vector<std::vector<Cached>>>, 2> cached_;
    std::vector<std::int64_t> cache_bytes_;
    std::vector<std::array<int, 3>> cache_of_rank_;  // index into UncutTables::caches per matrix, or -1

    UncutTables out_;
    TableWriter writer_;
    Time end_ = 0;
    int next_group_ = 0;
    std::vector<Time> free_;         // links [source * ends + destination], then compute per rank
    std::vector<LegCopies> copies_;  // of one route
    // Scratch of routing and selection.
    std::vector<int> destinations_, order_;
    std::vector<int> leg_to_;  // per location, the leg of the route under construction that ends there, or -1
    Hops hops_;
    ChainSearch search_;
    Route route_, trial_;
    std::vector<std::pair<std::size_t, Time>> undo_;
    std::vector<Estimate> estimates_;
    std::vector<unsigned> blank_seen_;  // per kind of k, in which scan
    std::array<std::vector<SingleFetch>, 2> single_;
    std::vector<SingleFetch> single_c_;  // per kind of rows and of columns
    unsigned scan_ = 0;
    std::int64_t looked_at_ = 0;  // sub-problems, by all selections
};

}  // namespace uncut

#include "uncut_scheduler.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <queue>
#include <tuple>

namespace uncut {
namespace {

enum Kind : std::uint8_t { copy_task = 0, gemm_task = 1, combine_task = 2 };
enum Factor : std::uint8_t { one = 1, alpha = 2, beta = 3 };
enum LaneKind : std::int32_t { compute_lane = 0, copy_lane = 1 };
constexpr int host_owner = -1;
constexpr int no_source = -2;
constexpr std::array<int, 3> user_buffer = {0, 1, 2};
enum Side { side_a = 0, side_b = 1 };

struct Extent {
    std::int64_t start = 0, size = 0;
};

struct Rectangle {
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Regions of one block of tiles in one buffer, made at first use: whole tiles, and tiles in chunks.
struct RegionTable {
    std::vector<std::int32_t> whole, chunked;
    void resize(std::size_t tiles) {
        whole.assign(tiles, -1);
        chunked.assign(tiles, -1);
    }
};

// What one rank holds of A or B. Tile (o, p) has index o * kt + p; o counts along m (A) or n (B).
struct Tiles {
    bool home = false;
    int buffer = -1;
    RegionTable regions;
    std::vector<Time> eta;             // never: neither here nor under way
    std::vector<std::int32_t> task;    // last copy that brings it; -1 for none
    std::vector<std::int32_t> reader;  // last GEMM that read this place; used without caching
    std::vector<Time> reader_end;
    std::vector<int> known;  // per p, tiles that are here or under way
};

struct Ready {
    Time eta;
    int j, i, p;
    auto key() const { return std::tie(eta, j, i, p); }
    bool operator>(const Ready &other) const { return key() > other.key(); }
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
    int progress = 0;  // sub-problems scheduled
    std::int32_t lane = -1, fetch = -1, last = -1;
    Time fetched = 0, computed = 0;
};

struct Worker {
    int rank = 0, row = 0, col = 0;
    int mt = 0, nt = 0;
    bool c_home = false;
    std::array<Tiles, 2> sides;
    RegionTable c_panel, c_staging;
    std::vector<CTile> c;  // [j * mt + i]
    std::vector<bool> done;
    std::int64_t remaining = 0, next = 0;
    int opened = 0;

    // Sub-problems whose A and B are here or under way: of C tiles that may start, by ETA; those
    // whose ETA has passed, per C tile; and those that wait for their C tile to be chosen.
    ReadyHeap pending;
    std::vector<ReadyHeap> ready, waiting;
    std::priority_queue<ReadyTile> ready_tiles;
};

struct Subproblem {
    int i, j, p;
};

// A fetch of one tile for one or more ranks: source location, ranks in order, arrivals.
struct Route {
    int source = -1;
    std::vector<int> ranks;
    std::vector<Time> arrivals;
    std::vector<std::size_t> resources;
};

class Scheduler {
  public:
    explicit Scheduler(const Input &in)
        : in_(in),
          locations_(in.num_ranks + 1),
          host_(in.num_ranks),
          origins_{in.a, in.b, in.c},
          outer_is_row_{!in.trans_a, in.trans_b},
          free_(static_cast<std::size_t>(locations_) * locations_ + in.num_ranks, 0),
          lane_of_copy_(static_cast<std::size_t>(in.num_ranks) * locations_ * locations_, -1),
          lane_of_compute_(static_cast<std::size_t>(in.num_ranks) * in.compute_lanes, -1) {
        kt_ = in.product ? static_cast<int>(ceil_div(in.k, in.tile)) : 1;
        c_is_input_ = in.product && in.reads_c && !in.lazy && !in.half;
        track_known_ = in.eta_order && in.caching;
        make_workers();
        if (in.product) reserve();
    }

    Tables run() {
        bool working = true;
        while (working) {
            working = false;
            for (Worker &worker : workers_) {
                if (!worker.remaining) continue;
                working = true;
                --worker.remaining;
                if (in_.product) {
                    schedule(worker, track_known_ ? select(worker) : next_fixed(worker));
                } else {
                    scale(worker, static_cast<int>(worker.next++));
                }
            }
        }
        out_.end = end_;
        return std::move(out_);
    }

  private:
    // -- geometry ----------------------------------------------------------------------------

    Extent tile_extent(std::int64_t start, std::int64_t stop, int index) const {
        const std::int64_t first = start + index * in_.tile;
        return {first, std::min(in_.tile, stop - first)};
    }
    Extent k_extent(int p) const { return tile_extent(0, in_.k, p); }
    Extent row_extent(const Worker &w, int i) const {
        return tile_extent(in_.row_starts[w.row], in_.row_starts[w.row + 1], i);
    }
    Extent col_extent(const Worker &w, int j) const {
        return tile_extent(in_.col_starts[w.col], in_.col_starts[w.col + 1], j);
    }
    Extent outer_extent(const Worker &w, int side, int o) const {
        return side == side_a ? row_extent(w, o) : col_extent(w, o);
    }
    std::int64_t block_start(const Worker &w, int side) const {
        return side == side_a ? in_.row_starts[w.row] : in_.col_starts[w.col];
    }
    int outer_tiles(const Worker &w, int side) const { return side == side_a ? w.mt : w.nt; }
    Rectangle stored(int side, Extent outer, Extent inner) const {
        if (outer_is_row_[side]) return {outer.start, inner.start, outer.size, inner.size};
        return {inner.start, outer.start, inner.size, outer.size};
    }
    std::size_t tile_index(int outer, int p) const { return static_cast<std::size_t>(outer) * kt_ + p; }
    std::size_t sub_index(const Worker &w, const Subproblem &s) const {
        return (static_cast<std::size_t>(s.j) * w.mt + s.i) * kt_ + s.p;
    }

    void make_workers() {
        workers_of_rank_.assign(in_.num_ranks, -1);
        for (int cell = 0; cell < in_.rows * in_.cols; ++cell) {
            Worker w;
            w.row = cell / in_.cols;
            w.col = cell % in_.cols;
            w.rank = static_cast<int>(in_.cell_rank[cell]);
            w.mt = static_cast<int>(ceil_div(in_.row_starts[w.row + 1] - in_.row_starts[w.row], in_.tile));
            w.nt = static_cast<int>(ceil_div(in_.col_starts[w.col + 1] - in_.col_starts[w.col], in_.tile));
            if (w.mt == 0 || w.nt == 0) continue;
            const std::size_t c_tiles = static_cast<std::size_t>(w.mt) * w.nt;
            w.remaining = static_cast<std::int64_t>(c_tiles) * kt_;
            w.c.resize(c_tiles);
            w.c_home = in_.c.location == w.rank;
            w.c_panel.resize(c_tiles);
            w.c_staging.resize(c_tiles);
            if (track_known_) {
                w.done.assign(c_tiles * kt_, false);
                w.ready.resize(c_tiles);
                w.waiting.resize(c_tiles);
            }
            for (int side = 0; side < 2 && in_.product; ++side) {
                Tiles &t = w.sides[side];
                const std::size_t tiles = static_cast<std::size_t>(outer_tiles(w, side)) * kt_;
                t.home = origins_[side].location == w.rank;
                t.buffer = static_cast<int>((side == side_a ? in_.a_panel : in_.b_panel)[w.rank]);
                t.regions.resize(tiles);
                t.eta.assign(tiles, t.home ? 0 : never);
                t.task.assign(tiles, -1);
                t.known.assign(kt_, t.home ? outer_tiles(w, side) : 0);
                if (!in_.caching) {
                    t.reader.assign(tiles, -1);
                    t.reader_end.assign(tiles, 0);
                }
            }
            workers_of_rank_[w.rank] = static_cast<int>(workers_.size());
            workers_.push_back(std::move(w));
        }
        sharers_[side_a].resize(in_.rows);
        sharers_[side_b].resize(in_.cols);
        origin_regions_[side_a].resize(in_.rows);
        origin_regions_[side_b].resize(in_.cols);
        std::int64_t c_tile_count = 0;
        for (std::size_t index = 0; index < workers_.size(); ++index) {
            Worker &w = workers_[index];
            for (int side = 0; side < 2; ++side) {
                sharers_[side][group_of(w, side)].push_back(static_cast<int>(index));
                origin_regions_[side][group_of(w, side)].resize(static_cast<std::size_t>(outer_tiles(w, side)) * kt_);
            }
            w.next = 0;
            c_tile_count += static_cast<std::int64_t>(w.c.size());
        }
        // Where both A and B are at home, sub-problems can run from the start.
        for (std::size_t index = 0; track_known_ && index < workers_.size(); ++index) {
            Worker &w = workers_[index];
            if (!in_.product || !w.sides[side_a].home || !w.sides[side_b].home) continue;
            for (int j = 0; j < w.nt; ++j)
                for (int i = 0; i < w.mt; ++i)
                    for (int p = 0; p < kt_; ++p)
                        add_known(w, {i, j, p});
        }
        c_tiles_ = c_tile_count;
    }

    int group_of(const Worker &w, int side) const { return side == side_a ? w.row : w.col; }

    void reserve() {
        std::size_t copies = 0;
        for (const Worker &w : workers_)
            copies += (static_cast<std::size_t>(w.mt) + w.nt) * kt_ * in_.chunks;
        const std::size_t gemms = static_cast<std::size_t>(c_tiles_) * kt_;
        out_.tasks.reserve(copies + gemms + 3 * c_tiles_);
        out_.operands.reserve(2 * copies + 4 * gemms + 6 * c_tiles_);
        out_.regions.reserve(copies + gemms / 4);
        out_.awaits.reserve(copies + 2 * gemms + 3 * c_tiles_);
    }

    // -- tables ------------------------------------------------------------------------------

    std::int32_t add_region(int buffer, const Rectangle &r) {
        out_.regions.push_back({buffer, 0, r.row, r.col, r.rows, r.cols});
        return static_cast<std::int32_t>(out_.regions.size()) - 1;
    }

    std::int32_t whole_region(RegionTable &table, std::size_t tile, int buffer, const Rectangle &r) {
        if (table.whole[tile] < 0) table.whole[tile] = add_region(buffer, r);
        return table.whole[tile];
    }

    // First of `chunks` regions that cut the tile along its stored columns, remainders to the first.
    std::int32_t chunk_regions(RegionTable &table, std::size_t tile, int buffer, const Rectangle &r, int chunks) {
        if (chunks == 1) return whole_region(table, tile, buffer, r);
        if (table.chunked[tile] < 0) {
            table.chunked[tile] = static_cast<std::int32_t>(out_.regions.size());
            std::int64_t col = r.col;
            for (int q = 0; q < chunks; ++q) {
                const std::int64_t cols = r.cols / chunks + (q < r.cols % chunks ? 1 : 0);
                add_region(buffer, {r.row, col, r.rows, cols});
                col += cols;
            }
        }
        return table.chunked[tile];
    }

    std::int32_t origin_region(const Worker &w, int side, int outer, int p, int chunks) {
        return chunk_regions(origin_regions_[side][group_of(w, side)], tile_index(outer, p), user_buffer[side],
                             stored(side, outer_extent(w, side, outer), k_extent(p)), chunks);
    }

    std::int32_t panel_region(Worker &w, int side, int outer, int p, int chunks) {
        Extent extent = outer_extent(w, side, outer);
        extent.start -= block_start(w, side);
        Tiles &t = w.sides[side];
        return chunk_regions(t.regions, tile_index(outer, p), t.buffer, stored(side, extent, k_extent(p)), chunks);
    }

    // Where a rank reads a tile of A or B.
    std::int32_t read_region(Worker &w, int side, int outer, int p) {
        return w.sides[side].home ? origin_region(w, side, outer, p, 1) : panel_region(w, side, outer, p, 1);
    }

    enum class CPlace { user, panel, staging };

    std::int32_t c_region(Worker &w, int i, int j, CPlace place) {
        const Extent rows = row_extent(w, i), cols = col_extent(w, j);
        const std::size_t tile = static_cast<std::size_t>(j) * w.mt + i;
        const Rectangle in_matrix{rows.start, cols.start, rows.size, cols.size};
        const Rectangle in_block{rows.start - in_.row_starts[w.row], cols.start - in_.col_starts[w.col], rows.size,
                                 cols.size};
        switch (place) {
            case CPlace::panel: return whole_region(w.c_panel, tile, static_cast<int>(in_.c_panel[w.rank]), in_block);
            case CPlace::staging:
                return whole_region(w.c_staging, tile, static_cast<int>(in_.c_staging[w.rank]), in_block);
            default: break;
        }
        if (c_user_.empty()) c_user_.resize(workers_.size());
        RegionTable &table = c_user_[static_cast<std::size_t>(workers_of_rank_[w.rank])];
        if (table.whole.empty()) table.resize(w.c.size());
        return whole_region(table, tile, user_buffer[2], in_matrix);
    }

    struct OperandSpec {
        std::int32_t region;
        std::uint8_t factor;
        bool transposed = false;
    };

    std::int32_t add_task(Kind kind, std::int32_t lane, int group, std::initializer_list<OperandSpec> operands,
                          std::initializer_list<std::int32_t> awaits) {
        TaskRecord task;
        task.kind = kind;
        task.num_operands = static_cast<std::uint16_t>(operands.size());
        task.rank = out_.lanes[lane].rank;
        task.lane = lane;
        task.group = group;
        task.first_operand = static_cast<std::int32_t>(out_.operands.size());
        task.first_await = static_cast<std::int32_t>(out_.awaits.size());
        for (const OperandSpec &o : operands)
            out_.operands.push_back({o.region, o.factor, static_cast<std::uint8_t>(o.transposed), 0});
        for (const std::int32_t awaited : awaits)  // a lane is first in, first out
            if (awaited >= 0 && out_.tasks[awaited].lane != lane) out_.awaits.push_back(awaited);
        const auto first = out_.awaits.begin() + task.first_await;
        std::sort(first, out_.awaits.end());
        out_.awaits.erase(std::unique(first, out_.awaits.end()), out_.awaits.end());
        task.num_awaits = static_cast<std::int32_t>(out_.awaits.size()) - task.first_await;
        out_.tasks.push_back(task);
        return static_cast<std::int32_t>(out_.tasks.size()) - 1;
    }

    std::int32_t lane_for_compute(int rank, int number) {
        std::int32_t &lane = lane_of_compute_[static_cast<std::size_t>(rank) * in_.compute_lanes + number];
        if (lane < 0) {
            lane = static_cast<std::int32_t>(out_.lanes.size());
            out_.lanes.push_back({rank, compute_lane, no_source, number});
        }
        return lane;
    }

    // -- links -------------------------------------------------------------------------------

    // A copy between two locations for the sake of `worker`; host memory private to a rank is
    // reached by that rank's link alone.
    struct Link {
        int issuer;
        std::size_t resource;
        double ps_per_byte;
        Time latency;
        int source, destination;
    };

    Link link(int source, int destination, int private_rank, int worker) const {
        Link l;
        l.source = source;
        l.destination = destination;
        const int device = source == host_ ? destination : source;
        int from = source, to = destination;
        if (source == host_ || destination == host_) {
            l.issuer = private_rank >= 0 ? private_rank : device;
            if (private_rank >= 0) (source == host_ ? to : from) = private_rank;
        } else {
            l.issuer = in_.overlap ? source : worker;
        }
        const std::size_t at = index(from, to);
        l.ps_per_byte = in_.ps_per_byte[at];
        l.latency = in_.latency_ps[at];
        if (private_rank >= 0 && device != private_rank) {
            const std::size_t onward = source == host_ ? index(private_rank, device) : index(device, private_rank);
            l.ps_per_byte = std::max(l.ps_per_byte, in_.ps_per_byte[onward]);
        }
        l.resource = in_.overlap ? at : resource_of(l.issuer);
        return l;
    }

    std::size_t index(int source, int destination) const {
        return static_cast<std::size_t>(source) * locations_ + destination;
    }
    std::size_t resource_of(int rank) const { return index(locations_, 0) + rank; }  // its compute

    static Time cost(const Link &l, std::int64_t bytes) {
        return std::llround(static_cast<double>(bytes) * l.ps_per_byte) + l.latency;
    }

    std::int32_t lane_for_copy(const Link &l) {
        if (!in_.overlap) return lane_for_compute(l.issuer, 0);
        std::int32_t &lane = lane_of_copy_[index(l.source, l.destination) * in_.num_ranks + l.issuer];
        if (lane < 0) {
            lane = static_cast<std::int32_t>(out_.lanes.size());
            out_.lanes.push_back({l.issuer, copy_lane, l.source == host_ ? host_owner : l.source,
                                  l.destination == host_ ? host_owner : l.destination});
        }
        return lane;
    }

    // -- routing of A and B ------------------------------------------------------------------

    int chunks_of(const Rectangle &r, std::size_t destinations) const {
        if (destinations < 2) return 1;
        const std::int64_t bytes = r.rows * r.cols * in_.itemsize;
        const std::int64_t most = std::min(
            {static_cast<std::int64_t>(in_.chunks), r.cols / in_.min_chunk_columns, bytes / in_.min_chunk_bytes});
        return static_cast<int>(std::max<std::int64_t>(1, most));
    }

    Rectangle shape(const Worker &w, int side, int outer, int p) const {
        return stored(side, outer_extent(w, side, outer), k_extent(p));
    }

    // Fills route_ for a tile that `w` lacks; returns when it is there.
    Time find_route(Worker &w, int side, int outer, int p, Route &route) {
        const std::size_t tile = tile_index(outer, p);
        const std::vector<int> &sharers = sharers_[side][group_of(w, side)];
        destinations_.clear();
        if (in_.batch) {
            for (const int index : sharers)
                if (workers_[index].sides[side].eta[tile] >= never) destinations_.push_back(workers_[index].rank);
        } else {
            destinations_.push_back(w.rank);
        }
        const std::size_t n = destinations_.size();
        const Rectangle r = shape(w, side, outer, p);
        const int chunks = chunks_of(r, n);
        const std::int64_t chunk_bytes = ceil_div(r.rows * r.cols * in_.itemsize, chunks);
        const Origin &origin = origins_[side];
        const bool blind = in_.routing == Routing::bw;  // to load: an idle network, every copy there

        hops_.resize(n);
        for (std::size_t to = 0; to < n; ++to) {
            const Worker &target = workers_[workers_of_rank_[destinations_[to]]];
            const Time wait = in_.caching ? 0 : target.sides[side].reader_end[tile];
            Time best = never;
            auto consider = [&](int source, Time eta, int private_rank) {
                const Link l = link(source, destinations_[to], private_rank, destinations_[to]);
                const Time c = cost(l, chunk_bytes);
                const Time start = blind ? 0 : std::max({eta, free_[l.resource], wait});
                if (start + chunks * c < best) {
                    best = start + chunks * c;
                    hops_.source[to] = source;
                    hops_.first_start[to] = start;
                    hops_.first_cost[to] = c;
                }
            };
            consider(origin.location, 0, origin.private_rank);
            if (in_.routing != Routing::origin && in_.caching) {
                for (const int index : sharers) {
                    const Tiles &t = workers_[index].sides[side];
                    if (!t.home && t.eta[tile] < never) consider(workers_[index].rank, t.eta[tile], -1);
                }
            }
            for (std::size_t next = 0; next < n; ++next) {
                if (next == to) continue;
                const Link l = link(destinations_[to], destinations_[next], -1, destinations_[next]);
                hops_.free[to * n + next] = blind ? 0 : free_[l.resource];
                hops_.cost[to * n + next] = cost(l, chunk_bytes);
            }
        }
        if (in_.routing == Routing::origin) {
            order_.resize(n);
            for (std::size_t h = 0; h < n; ++h)
                order_[h] = static_cast<int>(h);
        } else {
            search_.run(hops_, chunks, order_);
        }

        // Arrivals with the load as it is, also for a route chosen blindly.
        route.source = hops_.source[order_[0]];
        route.ranks.clear();
        route.arrivals.clear();
        route.resources.clear();
        Arrival arrival{0, 0};
        Time at_w = 0;
        int from = route.source;
        for (std::size_t h = 0; h < n; ++h) {
            const int to = destinations_[order_[h]];
            const Link l = link(from, to, h == 0 && from == host_ ? origin.private_rank : -1, to);
            const Time c = cost(l, chunk_bytes);
            const Worker &target = workers_[workers_of_rank_[to]];
            const Time wait = in_.caching ? 0 : target.sides[side].reader_end[tile];
            if (h == 0) {
                arrival = start_hop(std::max({source_eta(side, from, tile), free_[l.resource], wait}), c, chunks);
            } else {
                arrival = next_hop(arrival, std::max(free_[l.resource], wait), c, chunks);
            }
            route.ranks.push_back(to);
            route.arrivals.push_back(arrival.last);
            route.resources.push_back(l.resource);
            if (to == w.rank) at_w = arrival.last;
            from = to;
        }
        return at_w;
    }

    Time source_eta(int side, int location, std::size_t tile) const {
        if (location == origins_[side].location) return 0;
        return workers_[workers_of_rank_[location]].sides[side].eta[tile];
    }

    // Books a route's links until its arrivals; with `undo`, remembers what they were.
    void book(const Route &route, std::vector<std::pair<std::size_t, Time>> *undo) {
        for (std::size_t h = 0; h < route.ranks.size(); ++h) {
            Time &until = free_[route.resources[h]];
            if (undo) undo->emplace_back(route.resources[h], until);
            until = std::max(until, route.arrivals[h]);
        }
    }

    void fetch(Worker &w, int side, int outer, int p) {
        const std::size_t tile = tile_index(outer, p);
        if (w.sides[side].home || (in_.caching && w.sides[side].eta[tile] < never)) return;
        find_route(w, side, outer, p, route_);
        book(route_, nullptr);
        const std::size_t hops = route_.ranks.size();
        const int chunks = chunks_of(shape(w, side, outer, p), hops);
        const int group = hops > 1 ? next_group_++ : -1;

        struct Hop {
            std::int32_t lane, read, write, reader;
        };
        std::vector<Hop> plan(hops);
        int from = route_.source;
        const bool from_origin = from == origins_[side].location;
        std::int32_t previous = from_origin ? -1 : workers_[workers_of_rank_[from]].sides[side].task[tile];
        std::int32_t read = from_origin ? origin_region(w, side, outer, p, chunks)
                                        : panel_region(workers_[workers_of_rank_[from]], side, outer, p, chunks);
        for (std::size_t h = 0; h < hops; ++h) {
            const int to = route_.ranks[h];
            Worker &target = workers_[workers_of_rank_[to]];
            const Link l = link(from, to, h == 0 && from == host_ ? origins_[side].private_rank : -1, to);
            const std::int32_t write = panel_region(target, side, outer, p, chunks);
            plan[h] = {lane_for_copy(l), read, write, in_.caching ? -1 : target.sides[side].reader[tile]};
            read = write;
            from = to;
        }
        std::int32_t first_source = previous;
        for (int q = 0; q < chunks; ++q) {
            previous = first_source;
            for (std::size_t h = 0; h < hops; ++h) {
                previous = add_task(copy_task, plan[h].lane, group, {{plan[h].write + q, one}, {plan[h].read + q, one}},
                                    {previous, plan[h].reader});
                if (q == chunks - 1) workers_[workers_of_rank_[route_.ranks[h]]].sides[side].task[tile] = previous;
            }
        }
        for (std::size_t h = 0; h < hops; ++h) {
            end_ = std::max(end_, route_.arrivals[h]);
            arrived(workers_[workers_of_rank_[route_.ranks[h]]], side, outer, p, route_.arrivals[h]);
        }
    }

    void arrived(Worker &w, int side, int outer, int p, Time eta) {
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

    // -- C -----------------------------------------------------------------------------------

    Link c_link(const Worker &w, bool inward) const {
        return inward ? link(in_.c.location, w.rank, in_.c.private_rank, w.rank)
                      : link(w.rank, in_.c.location, in_.c.private_rank, w.rank);
    }
    std::int64_t c_bytes(const Worker &w, int i, int j) const {
        return row_extent(w, i).size * col_extent(w, j).size * in_.itemsize;
    }

    Time copy_c(Worker &w, int i, int j, bool inward, CPlace place, std::int32_t awaited, Time not_before,
                std::int32_t &task) {
        const Link l = c_link(w, inward);
        const std::int32_t local = c_region(w, i, j, place), user = c_region(w, i, j, CPlace::user);
        task = add_task(copy_task, lane_for_copy(l), -1, {{inward ? local : user, one}, {inward ? user : local, one}},
                        {awaited});
        Time &until = free_[l.resource];
        until = std::max(until, not_before) + cost(l, c_bytes(w, i, j));
        end_ = std::max(end_, until);
        return until;
    }

    bool fetches_c(const Worker &w) const { return in_.reads_c && !w.c_home; }
    // Sum of products, and where C_in is fetched to and C_out is written back from.
    CPlace sum_place(const Worker &w) const { return w.c_home && !in_.half ? CPlace::user : CPlace::panel; }
    CPlace in_place(const Worker &w) const {
        if (w.c_home) return CPlace::user;
        return in_.lazy || in_.half ? CPlace::staging : CPlace::panel;
    }
    CPlace out_place(const Worker &w) const {
        if (w.c_home) return CPlace::user;
        return in_.half ? CPlace::staging : CPlace::panel;
    }

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

    void open(Worker &w, CTile &c, int i, int j) {
        c.lane = lane_for_compute(w.rank, in_.overlap ? w.opened % in_.compute_lanes : 0);
        ++w.opened;
        if (fetches_c(w) && !in_.lazy) c.fetched = copy_c(w, i, j, true, in_place(w), -1, 0, c.fetch);
        if (!track_known_) return;
        ReadyHeap &waiting = w.waiting[static_cast<std::size_t>(j) * w.mt + i];
        for (; !waiting.empty(); waiting.pop())
            w.pending.push(waiting.top());
    }

    void close(Worker &w, CTile &c, int i, int j) {
        const std::int64_t elements = row_extent(w, i).size * col_extent(w, j).size;
        const bool combines = in_.half || (in_.lazy && fetches_c(w));
        if (fetches_c(w) && in_.lazy) c.fetched = copy_c(w, i, j, true, in_place(w), -1, 0, c.fetch);
        if (combines) {
            const std::int32_t sum = c_region(w, i, j, CPlace::panel);
            const std::int32_t out = c_region(w, i, j, out_place(w));
            std::int64_t bytes = elements * (in_.accumulator_itemsize + in_.itemsize);
            if (in_.reads_c) {
                bytes += elements * in_.itemsize;
                c.last = add_task(combine_task, c.lane, -1,
                                  {{out, one}, {sum, one}, {c_region(w, i, j, in_place(w)), beta}}, {c.fetch});
            } else {
                c.last = add_task(combine_task, c.lane, -1, {{out, one}, {sum, one}}, {});
            }
            c.computed = run_on(w.rank, std::max(c.fetched, c.computed), combine_time(w.rank, bytes));
        }
        if (!w.c_home) {
            std::int32_t task = -1;
            copy_c(w, i, j, false, out_place(w), c.last, c.computed, task);
        }
    }

    // -- sub-problems ------------------------------------------------------------------------

    void schedule(Worker &w, const Subproblem &s) {
        const std::size_t c_index = static_cast<std::size_t>(s.j) * w.mt + s.i;
        CTile &c = w.c[c_index];
        if (track_known_) w.done[sub_index(w, s)] = true;
        fetch(w, side_a, s.i, s.p);
        fetch(w, side_b, s.j, s.p);
        const bool first = c.progress == 0;
        if (first) open(w, c, s.i, s.j);

        Tiles &a = w.sides[side_a], &b = w.sides[side_b];
        const std::size_t a_tile = tile_index(s.i, s.p), b_tile = tile_index(s.j, s.p);
        const bool awaits_c = first && c_is_input_;
        const std::int32_t sum = c_region(w, s.i, s.j, sum_place(w));
        const OperandSpec a_read{read_region(w, side_a, s.i, s.p), alpha, in_.trans_a};
        const OperandSpec b_read{read_region(w, side_b, s.j, s.p), one, in_.trans_b};
        const bool beta_now = first && in_.reads_c && !in_.half && (w.c_home || c_is_input_);
        std::int32_t task;
        if (first && !beta_now) {
            task = add_task(gemm_task, c.lane, -1, {{sum, one}, a_read, b_read}, {a.task[a_tile], b.task[b_tile]});
        } else {
            task = add_task(gemm_task, c.lane, -1,
                            {{sum, one}, a_read, b_read, {sum, static_cast<std::uint8_t>(beta_now ? beta : one)}},
                            {a.task[a_tile], b.task[b_tile], awaits_c ? c.fetch : -1});
        }
        const double flops = 2.0 * static_cast<double>(row_extent(w, s.i).size) *
                             static_cast<double>(col_extent(w, s.j).size) * static_cast<double>(k_extent(s.p).size);
        c.computed = run_on(w.rank, std::max({a.eta[a_tile], b.eta[b_tile], awaits_c ? c.fetched : 0}),
                            std::llround(flops * in_.ps_per_flop[w.rank]));
        c.last = task;
        if (!in_.caching) {
            a.reader[a_tile] = b.reader[b_tile] = task;
            a.reader_end[a_tile] = b.reader_end[b_tile] = c.computed;
        }
        ++c.progress;
        if (c.progress == kt_) {
            close(w, c, s.i, s.j);
        } else if (track_known_ && !w.ready[c_index].empty()) {
            w.ready_tiles.push({c.progress, static_cast<int>(c_index)});
        }
    }

    Subproblem next_fixed(Worker &w) const {
        const std::int64_t at = w.next++;
        const std::int64_t c = at / kt_;
        return {static_cast<int>(c % w.mt), static_cast<int>(c / w.mt), static_cast<int>(at % kt_)};
    }

    // -- the order by ETA (III-G1) -----------------------------------------------------------

    void add_known(Worker &w, const Subproblem &s) {
        const Time eta = std::max(w.sides[side_a].eta[tile_index(s.i, s.p)], w.sides[side_b].eta[tile_index(s.j, s.p)]);
        const std::size_t c = static_cast<std::size_t>(s.j) * w.mt + s.i;
        ReadyHeap &heap = needs_c(w, c) ? w.waiting[c] : w.pending;
        heap.push({eta, s.j, s.i, s.p});
    }

    bool needs_c(const Worker &w, std::size_t c) const { return c_is_input_ && !w.c_home && w.c[c].progress == 0; }

    // Whether a sub-problem begins a C tile, where that counts against it.
    bool opens(const Worker &w, int i, int j) const {
        return in_.finish_first && w.c[static_cast<std::size_t>(j) * w.mt + i].progress == 0;
    }

    void drop_done(const Worker &w, ReadyHeap &heap) const {
        while (!heap.empty() && w.done[sub_index(w, {heap.top().i, heap.top().j, heap.top().p})])
            heap.pop();
    }

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

    Subproblem select(Worker &w) {
        const Time compute_free = free_[resource_of(w.rank)];
        for (drop_done(w, w.pending); !w.pending.empty() && w.pending.top().eta <= compute_free;
             drop_done(w, w.pending)) {
            const Ready top = w.pending.top();
            const std::size_t c = static_cast<std::size_t>(top.j) * w.mt + top.i;
            w.ready[c].push(top);
            w.ready_tiles.push({w.c[c].progress, static_cast<int>(c)});
            w.pending.pop();
        }
        for (; !w.ready_tiles.empty(); w.ready_tiles.pop()) {
            const ReadyTile top = w.ready_tiles.top();
            ReadyHeap &heap = w.ready[top.tile];
            drop_done(w, heap);
            if (heap.empty() || w.c[top.tile].progress != top.progress) continue;
            return {heap.top().i, heap.top().j, heap.top().p};
        }
        Choice best;
        if (!w.pending.empty()) {
            const Ready &top = w.pending.top();
            best = {top.eta, 0, 0, {top.i, top.j, top.p}, opens(w, top.i, top.j)};
        }
        estimates_.fill(never);
        ++scan_;
        for (std::size_t c = 0; c_is_input_ && !w.c_home && c < w.waiting.size(); ++c) {
            ReadyHeap &heap = w.waiting[c];
            drop_done(w, heap);
            if (heap.empty()) continue;
            const Ready &top = heap.top();
            const Subproblem s{top.i, top.j, top.p};
            const Time start = std::max({compute_free, top.eta, estimate(w, s, false, false, true)});
            const Choice choice{start, 1, static_cast<int>(heap.size()), s, in_.finish_first};
            if (choice < best) best = choice;
        }
        scan_missing(w, compute_free, best);
        return best.s;
    }

    // Sub-problems that lack A or B.
    void scan_missing(Worker &w, Time compute_free, Choice &best) {
        const Tiles &a = w.sides[side_a], &b = w.sides[side_b];
        std::array<bool, 2> blank_seen{false, false};
        for (int p = 0; p < kt_; ++p) {
            if (a.known[p] == w.mt && b.known[p] == w.nt) continue;
            if (in_.batch && !a.known[p] && !b.known[p]) {
                // All like the first such p of this size, which wins by its index.
                bool &seen = blank_seen[k_extent(p).size == in_.tile];
                if (seen) continue;
                seen = true;
            }
            for (int j = 0; j < w.nt; ++j) {
                const Time b_eta = b.eta[tile_index(j, p)];
                for (int i = 0; i < w.mt; ++i) {
                    const Time a_eta = a.eta[tile_index(i, p)];
                    const bool a_missing = a_eta >= never, b_missing = b_eta >= never;
                    if (!a_missing && !b_missing) continue;
                    const bool c_missing = needs_c(w, static_cast<std::size_t>(j) * w.mt + i);
                    Time start = std::max(compute_free, estimate(w, {i, j, p}, a_missing, b_missing, c_missing));
                    if (!a_missing) start = std::max(start, a_eta);
                    if (!b_missing) start = std::max(start, b_eta);
                    const int reuse = a_missing ? (b_missing ? 0 : b.known[p]) : a.known[p];
                    const Choice choice{start, a_missing + b_missing + c_missing, reuse, {i, j, p}, opens(w, i, j)};
                    if (choice < best) best = choice;
                }
            }
        }
    }

    // When what a sub-problem lacks would be there, if it were chosen now.
    Time estimate(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing) {
        return in_.batch ? estimate_batched(w, s, a_missing, b_missing, c_missing)
                         : estimate_single(w, s, a_missing, b_missing, c_missing);
    }

    // With batching all tiles of a size that are missing are missing alike, so 64 values serve a
    // whole scan, and each can afford to book the links of A before B is routed.
    Time estimate_batched(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing) {
        const unsigned which = a_missing | b_missing << 1 | c_missing << 2 |
                               static_cast<unsigned>(row_extent(w, s.i).size == in_.tile) << 3 |
                               static_cast<unsigned>(col_extent(w, s.j).size == in_.tile) << 4 |
                               static_cast<unsigned>(k_extent(s.p).size == in_.tile) << 5;
        Time &known = estimates_[which];
        if (known < never) return known;
        Time eta = 0;
        undo_.clear();
        if (a_missing) {
            eta = find_route(w, side_a, s.i, s.p, trial_);
            if (b_missing || c_missing) book(trial_, &undo_);
        }
        if (b_missing) {
            eta = std::max(eta, find_route(w, side_b, s.j, s.p, trial_));
            if (c_missing) book(trial_, &undo_);
        }
        if (c_missing) {
            const Link l = c_link(w, true);
            eta = std::max(eta, free_[l.resource] + cost(l, c_bytes(w, s.i, s.j)));
        }
        for (auto it = undo_.rbegin(); it != undo_.rend(); ++it)
            free_[it->first] = it->second;
        return known = eta;
    }

    // One fetch, for one rank, on one link.
    struct SingleFetch {
        unsigned scan = 0;
        std::size_t resource = 0;
        Time eta = 0, cost = 0;
    };

    // Without batching each tile has its own holders, so the best fetch of each is kept for a scan;
    // fetches that share a link follow one another on it.
    Time estimate_single(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing) {
        std::array<SingleFetch, 3> fetches;
        std::size_t count = 0;
        if (a_missing) fetches[count++] = single_fetch(w, side_a, s.i, s.p);
        if (b_missing) fetches[count++] = single_fetch(w, side_b, s.j, s.p);
        if (c_missing) {
            const Link l = c_link(w, true);
            const Time c = cost(l, c_bytes(w, s.i, s.j));
            fetches[count++] = {0, l.resource, free_[l.resource] + c, c};
        }
        Time eta = 0;
        for (std::size_t f = 0; f < count; ++f) {
            for (std::size_t before = 0; before < f; ++before)
                if (fetches[before].resource == fetches[f].resource)
                    fetches[f].eta = std::max(fetches[f].eta, fetches[before].eta + fetches[f].cost);
            eta = std::max(eta, fetches[f].eta);
        }
        return eta;
    }

    const SingleFetch &single_fetch(Worker &w, int side, int outer, int p) {
        const std::size_t tile = tile_index(outer, p);
        if (single_[side].size() <= tile) single_[side].resize(w.sides[side].eta.size());
        SingleFetch &known = single_[side][tile];
        if (known.scan == scan_) return known;
        const Time eta = find_route(w, side, outer, p, trial_);
        const int from = trial_.source;
        const Link l = link(from, w.rank, from == host_ ? origins_[side].private_rank : -1, w.rank);
        const Rectangle r = shape(w, side, outer, p);
        return known = {scan_, trial_.resources[0], eta, cost(l, r.rows * r.cols * in_.itemsize)};
    }

    // -- no product: C := beta C -------------------------------------------------------------

    void scale(Worker &w, int tile) {
        const int i = tile % w.mt, j = tile / w.mt;
        const CPlace place = w.c_home ? CPlace::user : CPlace::staging;
        const std::int32_t lane = lane_for_compute(w.rank, in_.overlap ? tile % in_.compute_lanes : 0);
        std::int32_t fetched = -1, task = -1;
        Time ready = 0;
        if (fetches_c(w)) ready = copy_c(w, i, j, true, place, -1, 0, fetched);
        const std::int32_t region = c_region(w, i, j, place);
        if (in_.reads_c) {
            task = add_task(combine_task, lane, -1, {{region, one}, {region, beta}}, {fetched});
        } else {
            task = add_task(combine_task, lane, -1, {{region, one}}, {});
        }
        const Time end = run_on(w.rank, ready, combine_time(w.rank, (in_.reads_c ? 2 : 1) * c_bytes(w, i, j)));
        if (!w.c_home) copy_c(w, i, j, false, place, task, end, task);
    }

    const Input &in_;
    const int locations_, host_;
    const std::array<Origin, 3> origins_;
    const std::array<bool, 2> outer_is_row_;
    int kt_ = 1;
    bool c_is_input_ = false, track_known_ = false;
    std::int64_t c_tiles_ = 0;

    std::vector<Worker> workers_;
    std::vector<int> workers_of_rank_;                      // -1: computes nothing
    std::array<std::vector<std::vector<int>>, 2> sharers_;  // per grid row (A) or column (B)
    std::array<std::vector<RegionTable>, 2> origin_regions_;
    std::vector<RegionTable> c_user_;

    Tables out_;
    Time end_ = 0;
    int next_group_ = 0;
    std::vector<Time> free_;  // links [source * locations + destination], then compute per rank
    std::vector<std::int32_t> lane_of_copy_, lane_of_compute_;

    // Scratch of routing and selection.
    std::vector<int> destinations_, order_;
    Hops hops_;
    ChainSearch search_;
    Route route_, trial_;
    std::vector<std::pair<std::size_t, Time>> undo_;
    std::array<Time, 64> estimates_{};
    std::array<std::vector<SingleFetch>, 2> single_;
    unsigned scan_ = 0;
};

}  // namespace

Tables schedule_uncut(const Input &input) { return Scheduler(input).run(); }

}  // namespace uncut

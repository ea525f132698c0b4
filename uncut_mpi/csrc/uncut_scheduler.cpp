#include "uncut_state.hpp"

#include <bit>

namespace uncut {
namespace {

// Estimates of tiles of different kinds that a scan keeps, a power of two: more than there are but for matrices in very
// many parts.
constexpr std::size_t most_estimates = 4096;

}  // namespace

Scheduler::Scheduler(const Input &in)
    : in_(in),
      ends_(in.locations.num_ends()),
      locations_(in.locations.count()),
      links_(static_cast<std::size_t>(locations_) * locations_),
      cache_bytes_(in.cache_bytes),
      cache_of_rank_(in.num_ranks, {-1, -1, -1}),
      writer_(&out_, in.num_ranks, in.most_tasks),
      free_(index(ends_, 0) + in.num_ranks, 0),
      leg_to_(locations_, -1) {
    c_is_input_ = in.reads_c && !in.lazy && !in.rounds_c();
    track_known_ = in.eta_order && in.caching;
    in_parts_ = std::ranges::any_of(in.pieces, [](const auto &pieces) { return pieces.size() > 1; });
    if (in.max_hops) {
        for (auto &table : detour_at_)
            table.assign(static_cast<std::size_t>(locations_) * locations_, unknown);
        ports_at_.resize(index(ends_, 0));
        for (const auto &[port, source, destination, weight] : in.port_uses)
            ports_at_[index(source, destination)].emplace_back(port, weight);
    }
    make_cuts();
    make_workers();
    reserve();
}

UncutTables Scheduler::run() {
    bool working = true;
    while (working) {
        working = false;
        for (Worker &worker : workers_) {
            if (!worker.remaining) continue;
            working = true;
            --worker.remaining;
            schedule(worker, track_known_ ? select(worker) : next_fixed(worker));
        }
    }
    out_.end = end_;
    return std::move(out_);
}

// Tiles as long as asked for, from each edge on.
Cuts Scheduler::cut(Extent of, const std::vector<std::int64_t> &edges) const {
    Cuts made;
    made.edges.push_back(of.first);
    for (std::size_t number = 0; number < edges.size(); ++number) {
        const std::int64_t last = std::min(edges[number], of.last);
        while (made.edges.back() < last) {
            const std::int64_t size = std::min(in_.tile, last - made.edges.back());
            made.kinds.push_back(static_cast<int>(2 * number) + (size < in_.tile));
            made.edges.push_back(made.edges.back() + size);
        }
    }
    return made;
}

// Tiles end where pieces of the matrices do, so that each lies in one.
void Scheduler::make_cuts() {
    std::vector<std::int64_t> rows{in_.m}, cols{in_.n}, inner{in_.k};
    const auto add = [&](int matrix, std::vector<std::int64_t> &down, std::vector<std::int64_t> &along) {
        for (const KPiece &piece : in_.pieces[matrix]) {  // where one begins another ends
            down.push_back(piece.rows.last);
            along.push_back(piece.cols.last);
        }
    };
    add(matrix_a, rows, inner);
    add(matrix_b, inner, cols);
    add(matrix_c, rows, cols);
    for (std::vector<std::int64_t> *edges : {&rows, &cols, &inner}) {
        std::ranges::sort(*edges);
        edges->erase(std::unique(edges->begin(), edges->end()), edges->end());
    }
    for (std::size_t row = 0; row + 1 < in_.row_starts.size(); ++row)
        outer_cuts_[side_a].push_back(cut({in_.row_starts[row], in_.row_starts[row + 1]}, rows));
    for (std::size_t col = 0; col + 1 < in_.col_starts.size(); ++col)
        outer_cuts_[side_b].push_back(cut({in_.col_starts[col], in_.col_starts[col + 1]}, cols));
    k_cuts_ = cut({0, in_.k}, inner);
    kt_ = k_cuts_.count();
    most_kinds_ = {2 * rows.size(), 2 * cols.size()};
    blank_seen_.resize(2 * inner.size());
    single_c_.resize(most_kinds_[side_a] * most_kinds_[side_b]);
    estimates_.resize(std::min(most_estimates, std::bit_ceil(8 * single_c_.size() * blank_seen_.size())));
}

// The first of the pieces that have a rectangle.
std::int32_t Scheduler::piece_of(int matrix, Extent rows, Extent cols, std::int32_t hint) const {
    const std::vector<KPiece> &pieces = in_.pieces[matrix];
    const auto has = [&](const KPiece &piece) { return piece.rows.contains(rows) && piece.cols.contains(cols); };
    if (has(pieces[hint])) return hint;
    const auto found = std::ranges::find_if(pieces, has);
    require(found != pieces.end(), "every tile lies in a piece");
    return static_cast<std::int32_t>(found - pieces.begin());
}

// The one of those that have the same as a piece that is on a rank's device, or -1.
std::int32_t Scheduler::home_of(int matrix, std::int32_t piece, int rank) const {
    const auto last = piece + static_cast<std::int32_t>(in_.pieces[matrix][piece].holders);
    for (; piece < last; ++piece)
        if (in_.pieces[matrix][piece].origin.on_device_of(rank)) return piece;
    return -1;
}

// Where a worker's tiles of A or B, and the rows or columns of C with them, lie in its panels: one after the other.
void Scheduler::place_tiles(Worker &w, int side) const {
    const int tiles = outer_tiles(w, side);
    std::vector<bool> needed(tiles, w.owned.empty());
    for (const std::int64_t c : w.owned)
        needed[static_cast<std::size_t>(side == side_a ? c % w.mt : c / w.mt)] = true;
    std::int64_t next = 0;
    w.sides[side].place.assign(tiles, -1);
    for (int o = 0; o < tiles; ++o) {
        if (!needed[o]) continue;
        w.sides[side].place[o] = next;
        next += outer_extent(w, side, o).size();
    }
}

void Scheduler::make_workers() {
    workers_of_rank_.assign(in_.num_ranks, -1);
    for (int side = 0; side < 2; ++side) {
        sharers_[side].resize(outer_cuts_[side].size());
        for (const Cuts &outer : outer_cuts_[side]) {
            std::vector<std::int32_t> &pieces = origins_[side].emplace_back();
            std::int32_t piece = 0;
            for (int o = 0; o < outer.count(); ++o)
                for (int p = 0; p < kt_; ++p)
                    pieces.push_back(piece = side == side_a ? piece_of(side, outer[o], k_cuts_[p], piece)
                                                            : piece_of(side, k_cuts_[p], outer[o], piece));
        }
    }
    const bool dealt = !in_.owned.empty();
    const auto cols = static_cast<int>(outer_cuts_[side_b].size());
    for (std::size_t cell = 0; cell < in_.cell_rank.size(); ++cell) {
        Worker w;
        w.rank = static_cast<int>(in_.cell_rank[cell]);
        w.row = dealt ? 0 : static_cast<int>(cell) / cols;
        w.col = dealt ? 0 : static_cast<int>(cell) % cols;
        w.cuts = {&outer_cuts_[side_a][w.row], &outer_cuts_[side_b][w.col]};
        w.mt = w.cuts[side_a]->count();
        w.nt = w.cuts[side_b]->count();
        if (dealt) w.owned = in_.owned[cell];
        if (w.mt == 0 || w.nt == 0 || (dealt && w.owned.empty())) continue;
        make_c_tiles(w);
        for (int side = 0; side < 2; ++side) {
            place_tiles(w, side);
            make_tiles(w, side);
            sharers_[side][group_of(w, side)].push_back(static_cast<int>(workers_.size()));
        }
        if (track_known_) begin_at_home(w);
        workers_of_rank_[w.rank] = static_cast<int>(workers_.size());
        workers_.push_back(std::move(w));
    }
}

void Scheduler::make_c_tiles(Worker &w) {
    const std::size_t tiles = static_cast<std::size_t>(w.mt) * w.nt;
    c_tiles_ += static_cast<std::int64_t>(tiles);
    w.remaining = static_cast<std::int64_t>(w.owned.empty() ? tiles : w.owned.size()) * kt_;
    w.c.resize(tiles);
    for (std::int32_t piece = 0, j = 0; j < w.nt; ++j)
        for (int i = 0; i < w.mt; ++i) {
            CTile &c = w.c[c_index(w, i, j)];
            c.piece = piece = piece_of(matrix_c, row_extent(w, i), col_extent(w, j), piece);
            c.home = home_of(matrix_c, piece, w.rank);
            w.awaits_c |= c_is_input_ && c.home < 0;
        }
    if (!track_known_) return;
    w.done.assign(tiles * kt_, false);
    w.ready.resize(tiles);
    w.waiting.resize(tiles);
}

void Scheduler::make_tiles(Worker &w, int side) const {
    Tiles &t = w.sides[side];
    const std::size_t tiles = static_cast<std::size_t>(outer_tiles(w, side)) * kt_;
    t.buffer = static_cast<int>((side == side_a ? in_.a_panel : in_.b_panel)[w.rank]);
    t.region.assign(tiles, -1);
    t.eta.assign(tiles, never);
    t.task.assign(tiles, -1);
    t.known.assign(kt_, 0);
    const std::vector<std::int32_t> &pieces = origins_[side][group_of(w, side)];
    t.home.resize(tiles);
    for (std::size_t tile = 0; tile < tiles; ++tile) {
        t.home[tile] = home_of(side, pieces[tile], w.rank);
        if (t.home[tile] < 0) continue;
        t.eta[tile] = 0;
        ++t.known[static_cast<int>(tile) % kt_];
    }
    if (in_.caching) return;
    t.reader.assign(tiles, -1);
    t.reader_end.assign(tiles, 0);
}

// Where both A and B are at home, sub-problems can run from the start.
void Scheduler::begin_at_home(Worker &w) {
    const Tiles &a = w.sides[side_a], &b = w.sides[side_b];
    for (int p = 0; p < kt_; ++p) {
        if (a.known[p] == 0 || b.known[p] == 0) continue;
        for (int j = 0; j < w.nt; ++j)
            for (int i = 0; i < w.mt; ++i)
                if (a.home[tile_index(i, p)] >= 0 && b.home[tile_index(j, p)] >= 0) add_known(w, {i, j, p});
    }
}

void Scheduler::reserve() {
    std::size_t copies = 0;
    for (const Worker &w : workers_)
        copies += (static_cast<std::size_t>(w.mt) + w.nt) * kt_ * in_.chunks;
    const auto most = static_cast<std::size_t>(in_.most_tasks);  // beyond it all is given up
    const std::size_t gemms = std::min(most, static_cast<std::size_t>(c_tiles_) * kt_);
    copies = std::min(most, copies);
    writer_.reserve(copies + gemms + 3 * c_tiles_, 2 * copies + 4 * gemms + 6 * c_tiles_, copies + gemms / 4,
                    copies + 2 * gemms + 3 * c_tiles_);
}

void Scheduler::schedule(Worker &w, const Subproblem &s) {
    const std::size_t c_tile = c_index(w, s.i, s.j);
    CTile &c = w.c[c_tile];
    if (track_known_) w.done[sub_index(w, s)] = true;
    fetch(w, side_a, s.i, s.p);
    fetch(w, side_b, s.j, s.p);
    const bool first = c.progress == 0;
    if (first) open(w, c, s.i, s.j);

    Tiles &a = w.sides[side_a], &b = w.sides[side_b];
    const std::size_t a_tile = tile_index(s.i, s.p), b_tile = tile_index(s.j, s.p);
    const bool awaits_c = first && c_is_input_;
    // Tiles are read again and again: their regions are looked up once.
    if (c.sum < 0) c.sum = writer_.region(c_region(w, s.i, s.j, sum_place(c)));
    if (a.region[a_tile] < 0) a.region[a_tile] = writer_.region(own_region(w, side_a, s.i, s.p));
    if (b.region[b_tile] < 0) b.region[b_tile] = writer_.region(own_region(w, side_b, s.j, s.p));
    const bool beta_now = first && in_.reads_c && !in_.rounds_c() && (c.home >= 0 || c_is_input_);
    const std::array<OperandRecord, 4> operands{{{c.sum, one},
                                                 {a.region[a_tile], alpha, in_.op_a},
                                                 {b.region[b_tile], one, in_.op_b},
                                                 {c.sum, beta_now ? beta : one}}};
    const std::array awaits{a.task[a_tile], b.task[b_tile], awaits_c ? c.fetch : -1};
    const std::size_t count = first && !beta_now ? 3 : 4;  // without what is added to
    const std::int32_t task = writer_.task(gemm_task, c.lane, -1, std::span(operands).first(count), awaits);
    const double flops = 2.0 * static_cast<double>(row_extent(w, s.i).size()) *
                         static_cast<double>(col_extent(w, s.j).size()) * static_cast<double>(k_extent(s.p).size());
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
    } else if (track_known_ && !w.ready[c_tile].empty()) {
        w.ready_tiles.push({c.progress, static_cast<int>(c_tile)});
    }
}

UncutTables schedule_uncut(const Input &input) { return Scheduler(input).run(); }

}  // namespace uncut

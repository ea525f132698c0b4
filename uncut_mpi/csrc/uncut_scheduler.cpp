#include "uncut_state.hpp"

#include <stdexcept>

namespace uncut {

Scheduler::Scheduler(const Input &in)
    : in_(in),
      locations_(in.num_ranks + 1),
      host_(in.num_ranks),
      origins_{in.a, in.b, in.c},
      outer_is_row_{!in.trans_a, in.trans_b},
      cache_room_(in.cache_room),
      cache_of_rank_(in.num_ranks, {-1, -1, -1}),
      free_(static_cast<std::size_t>(locations_) * locations_ + in.num_ranks, 0),
      copy_lanes_(static_cast<std::size_t>(locations_) * locations_, -1),
      result_lanes_(copy_lanes_.size(), -1),
      lane_of_compute_(static_cast<std::size_t>(in.num_ranks) * in.compute_lanes, -1),
      leg_to_(locations_, -1) {
    kt_ = in.product ? static_cast<int>(ceil_div(in.k, in.tile)) : 1;
    c_is_input_ = in.product && in.reads_c && !in.lazy && !in.half;
    track_known_ = in.eta_order && in.caching;
    if (in.max_hops) {
        for (auto &table : detour_at_)
            table.assign(index(locations_, 0), unknown);
        make_ports();
    }
    make_workers();
    if (in.product) reserve();
}

Tables Scheduler::run() {
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
        next += outer_extent(w, side, o).size;
    }
}

Worker Scheduler::make_worker(int rank, int row, int col) const {
    Worker w;
    w.rank = rank;
    w.row = row;
    w.col = col;
    w.mt = static_cast<int>(ceil_div(in_.row_starts[row + 1] - in_.row_starts[row], in_.tile));
    w.nt = static_cast<int>(ceil_div(in_.col_starts[col + 1] - in_.col_starts[col], in_.tile));
    return w;
}

void Scheduler::make_workers() {
    workers_of_rank_.assign(in_.num_ranks, -1);
    std::vector<Worker> made;
    for (std::size_t cell = 0; cell < in_.cell_rank.size(); ++cell) {
        const int at = in_.owned.empty() ? static_cast<int>(cell) : 0, rank = static_cast<int>(in_.cell_rank[cell]);
        made.push_back(make_worker(rank, at / in_.cols, at % in_.cols));
        if (!in_.owned.empty()) made.back().owned = in_.owned[cell];
    }
    for (Worker &w : made) {
        if (w.mt == 0 || w.nt == 0 || (!in_.owned.empty() && w.owned.empty())) continue;
        const std::size_t c_tiles = static_cast<std::size_t>(w.mt) * w.nt;
        w.remaining = static_cast<std::int64_t>(w.owned.empty() ? c_tiles : w.owned.size()) * kt_;
        w.c.resize(c_tiles);
        w.c_home = in_.c.location == w.rank;
        w.c_panel.resize(c_tiles);
        w.c_staging.resize(c_tiles);
        if (track_known_) {
            w.done.assign(c_tiles * kt_, false);
            w.ready.resize(c_tiles);
            w.waiting.resize(c_tiles);
        }
        for (int side = 0; side < 2; ++side)
            place_tiles(w, side);
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

void Scheduler::reserve() {
    std::size_t copies = 0;
    for (const Worker &w : workers_)
        copies += (static_cast<std::size_t>(w.mt) + w.nt) * kt_ * in_.chunks;
    const std::size_t gemms = static_cast<std::size_t>(c_tiles_) * kt_;
    out_.tasks.reserve(copies + gemms + 3 * c_tiles_);
    out_.operands.reserve(2 * copies + 4 * gemms + 6 * c_tiles_);
    out_.regions.reserve(copies + gemms / 4);
    out_.awaits.reserve(copies + 2 * gemms + 3 * c_tiles_);
}

void Scheduler::schedule(Worker &w, const Subproblem &s) {
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

void Scheduler::scale(Worker &w, int tile) {
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

Tables schedule_uncut(const Input &input) { return Scheduler(input).run(); }

}  // namespace uncut
